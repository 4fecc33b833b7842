"""CIFAR-10 without labels: an encoder that tells two views of a photo from all others (SimCLR).

Then a few labels go further than from scratch. The labels of the set are never learnt from; while
training, neighbours are judged by them.

Command: regard train cifar10_pretrain data=cifar10, then with 1% of the labels:
         regard train images data=cifar10 init=runs/cifar10_pretrain valid=0.02 share=0.01
         batch=64 augment=flip+crop optimiser=muon lr=0.003 layer_decay=0.75 warmup=20 ema=0.98
         steps=200 valid_every=50
Takes:   56 minutes on one core (1,343 steps); then a minute
Gives:   with 1% of the labels 55.4% on the test set (mean of three seeds), from scratch 41.4%;
         389,506 parameters
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
