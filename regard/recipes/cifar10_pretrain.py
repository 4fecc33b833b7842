"""CIFAR-10 without labels: an encoder that tells two views of a photo from all others (SimCLR).

Then a few labels go further than from scratch. The labels of the set are never learnt from; while
training, neighbours are judged by them.

Command: regard train cifar10_pretrain data=cifar10, then with 1% of the labels:
         regard train classify data=cifar10 init=runs/cifar10_pretrain layer_decay=0.75 share=0.01,
         or: regard eval runs/cifar10_pretrain data=cifar10 probe=linear share=0.01
Takes:   not measured yet
Gives:   not measured yet
"""

TASK = "pretrain"
DATA = "cifar10"
SETTINGS = {
    "valid": "0.02",
    "objective": "contrastive",
    "family": "vit",
    "like": "cct",
    "size": "small",
    "patch": 8,
    "augment": "zoom+flip+jitter+grey",
    "least": 0.2,
    "temperature": 0.2,
    "batch": 256,
    "lr": 0.001,
    "weight_decay": 0.05,
    "ema": 0.999,
    "minutes": 58,
}
