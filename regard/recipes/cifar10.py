"""CIFAR-10: which of ten things a small photo shows, by attention and from scratch.

The images here are recompressed as JPEG (mosaics), so published figures are of other pixels.

Command: regard train cifar10 data=cifar10, then: regard eval runs/cifar10 data=cifar10
Takes:   98 minutes on 2 cores (9,000 steps of 128 images, 23.5 epochs)
Gives:   88.13% on the test set, 90.06% on the validation part; 951,722 parameters, 73% of the
         multiply-adds in blocks that attend
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
    "steps": 9_000,
    "valid_every": 750,
}
