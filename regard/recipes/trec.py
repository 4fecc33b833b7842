"""TREC: what a question asks for, in six classes, without pretraining.

Command: regard train trec data=trec, then: regard eval runs/trec data=trec
Takes:   at most 25 minutes on 2 cores
Gives:   accuracy on the test part; chosen on a tenth of train
"""

TASK = "classify"
DATA = "trec"
SETTINGS = {
    "valid": "0.1",
    "size": "tiny",
    "depth": 2,
    "width": 128,
    "pieces": 6000,
    "features": "bigrams",
    "feature_rows": 16384,
    "feature_dropout": 0.2,
    "word_dropout": 0.15,
    "dropout": 0.3,
    "lr": 0.002,
    "batch_tokens": 1024,
    "ema": 0.995,
    "steps": 2000,
}
