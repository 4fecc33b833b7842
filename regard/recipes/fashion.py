"""Fashion-MNIST: which of ten kinds of clothes a small grey picture shows; the starter fashion.

Attention over 7x7 tokens, which a few convolutions make (nearly three quarters of all
multiply-adds, and all after those convolutions but the head, are in blocks of attention).

Command: regard train fashion data=fashion-mnist, then: regard eval runs/fashion data=fashion-mnist
Takes:   48.6 minutes on 2 cores (67 while others used them, too)
Gives:   93.51% on the test set, 94.30% on the validation part; 949,226 parameters
"""

TASK = "images"
DATA = "fashion-mnist"
SETTINGS = {
    "valid": "0.05",
    "names": "T-shirt,trousers,pullover,dress,coat,sandal,shirt,sneaker,bag,ankle boot",
    "family": "vit",
    "like": "early",
    "size": "small",
    "depth": 6,
    "augment": "flip+crop",
    "padding": 2,
    "erase": 0.1,
    "drop_path": 0.05,
    "label_smoothing": 0.1,
    "optimiser": "muon",
    "lr": 0.004,
    "warmup": 200,
    "weight_decay": 0.05,
    "ema": 0.999,
    "processes": 2,
    "batch": 64,
    "steps": 6000,
    "valid_every": 600,
}
