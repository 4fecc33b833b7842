"""Fashion-MNIST as vectors of 24 numbers that clothes are painted from: the starter painter.

A variational autoencoder; what it is for, and directions in its space, are in docs/directions.md.

Command: regard train fashion_painter data=fashion-mnist
Takes:   4 minutes on one core, beside other work
Gives:   loss -0.708 on the validation part (nats a pixel of normalised images), 326,706 parameters
"""

TASK = "pretrain"
DATA = "fashion-mnist"
SETTINGS = {
    "valid": "0.05",
    "objective": "variational",
    "depth": 2,
    "width": 64,
    "heads": 4,
    "ffn_width": 128,
    "patch": 4,
    "pretrainer.width": 16,
    "latent": 24,
    "batch": 64,
    "lr": 0.002,
    "warmup": 100,
    "schedule": "cosine",
    "steps": 2500,
    "valid_every": 500,
    "threads": 1,
}
