"""SST-2: whether a sentence from a film review is for or against, without pretraining.

Command: regard train sst2 data=sst2, then: regard eval runs/sst2 data=sst2 part=valid
Takes:   18 minutes on one core
Gives:   77.9% of dev.tsv right, chosen on a part of train; 5.9M parameters
"""

TASK = "classify"
DATA = "sst2"
SETTINGS = {
    "valid": "0.03",
    "size": "tiny",
    "depth": 2,
    "width": 128,
    "pieces": 10000,
    "features": "bigrams",
    "feature_rows": 32768,
    "feature_dropout": 0.3,
    "word_dropout": 0.2,
    "dropout": 0.3,
    "lr": 0.002,
    "batch_tokens": 2048,
    "ema": 0.998,
    "steps": 4000,
}
