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
    "like": "early",
    "size": "small",
    "depth": 6,
    "augment": "flip+crop",
    "erase": 0.1,
    "cutmix": 0.5,
    "drop_path": 0.05,
    "label_smoothing": 0.1,
    "optimiser": "muon",
    "lr": 0.004,
    "warmup": 200,
    "weight_decay": 0.05,
    "ema": 0.999,
    "processes": 2,
    "batch": 64,
    "steps": 12_000,
    "valid_every": 1000,
}
