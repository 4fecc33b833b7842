"""CIFAR-10 without labels: an encoder that tells two views of a photo from all others (SimCLR).

Then a few labels go further than from scratch. The labels of the set are never learnt from; while
training, neighbours are judged by them.

Command: regard train cifar10_pretrain data=cifar10, then with 1% of the labels:
         regard train images data=cifar10 init=runs/cifar10_pretrain valid=0.02 share=0.01
         TUNE_KEYS
Takes:   PRE_TAKES
Gives:   PRE_GIVES
"""

TASK = "pretrain"
DATA = "cifar10"
SETTINGS = {
    "valid": "0.02",
    "objective": "contrastive",
    "family": "vit",
    "like": "early",
    "size": "tiny",
    "augment": "zoom+flip+jitter+grey",
    "least": 0.2,
    "temperature": 0.2,
    "batch": 256,
    "optimiser": "muon",
    "lr": 0.003,
    "warmup": 50,
    "ema": 0.99,
    "threads": 1,
    "minutes": 56,
}
