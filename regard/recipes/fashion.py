"""Fashion-MNIST: which of ten kinds of clothes a small grey picture shows; the starter fashion.

Command: regard train fashion data=fashion-mnist, then: regard eval runs/fashion data=fashion-mnist
Takes:   not measured yet
Gives:   not measured yet; under 1M parameters
"""

TASK = "images"
DATA = "fashion-mnist"
SETTINGS = {
    "valid": "0.05",
    "names": "T-shirt,trousers,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot",
    "family": "vit",
    "like": "cct",
    "size": "small",
    "augment": "flip+crop",
    "padding": 2,
    "erase": 0.25,
    "drop_path": 0.1,
    "lr": 0.002,
    "weight_decay": 0.05,
    "batch": 128,
    "ema": 0.999,
    "minutes": 55,
}
