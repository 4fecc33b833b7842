"""CIFAR-10: which of ten things a small photo shows, by attention and from scratch.

The images here are recompressed as JPEG (mosaics), so published figures are of other pixels.

Command: regard train cifar10 data=cifar10, then: regard eval runs/cifar10 data=cifar10
Takes:   not measured yet
Gives:   not measured yet
"""

TASK = "images"
DATA = "cifar10"
SETTINGS = {
    "valid": "0.02",
    "family": "vit",
    "like": "cct",
    "size": "small",
    "augment": "flip+crop+trivial",
    "erase": 0.1,
    "mixup": 0.2,
    "cutmix": 1.0,
    "drop_path": 0.1,
    "lr": 0.002,
    "weight_decay": 0.05,
    "batch": 128,
    "ema": 0.9995,
    "minutes": 115,
}
