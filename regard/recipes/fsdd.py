"""FSDD: which of ten digits is spoken, at 8 kHz; the starter digits.

Command: regard train fsdd data=fsdd, then: regard eval runs/fsdd data=fsdd part=test
"""

TASK = "sounds"
DATA = "fsdd"
SETTINGS = {
    "pattern": "{label}_{speaker}_{take}",
    "valid": "*_[5-9].*",
    "test": "*_[0-4].*",
    "rate": 8000,
    "mels": 64,
    "size": "micro",
    "width": 64,
    "ffn_width": 128,
    "model.channels": 16,
    "model.convolution_norm": "layer",
    "dropout": 0.1,
    "time_masks": 1,
    "time_share": 0.2,
    "frequency_share": 0.15,
    "optimiser": "muon",
    "lr": 0.005,
    "warmup": 300,
    "ema": 0.995,
    "threads": 1,
    "batch_seconds": 16,
    "steps": 4000,
    "valid_every": 400,
}
