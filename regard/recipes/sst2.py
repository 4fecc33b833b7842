"""SST-2: whether a sentence from a film review is for or against, without pretraining.

Command: regard train sst2 data=sst2, then: regard eval runs/sst2 data=sst2 part=valid
Takes:   at most 25 minutes on 2 cores
Gives:   accuracy on dev.tsv; chosen on a part of train, so that dev is seen once
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
