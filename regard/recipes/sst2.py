"""SST-2: whether a sentence from a film review is for or against, without pretraining.

Command: regard train sst2 data=sst2, then: regard eval runs/sst2 data=sst2 part=valid
Takes:   about 3 minutes on one core
Gives:   84.6% of the sentences of dev.tsv right (95%: 82.1 to 86.9)
"""

TASK = "classify"
DATA = "sst2"
SETTINGS = {
    "valid": "0.04",
    "valid_by": "whole",
    "size": "tiny",
    "depth": 1,
    "width": 64,
    "ffn_width": 128,
    "members": 3,
    "tokenizer": "words",
    "features": "words+bigrams",
    "feature_rows": 40000,
    "pool": "convolution",
    "word_dropout": 0.1,
    "dropout": 0.2,
    "head_dropout": 0.3,
    "lr": 0.003,
    "warmup": 50,
    "batch_tokens": 2048,
    "ema": 0.99,
    "steps": 500,
    "valid_every": 500,
}
