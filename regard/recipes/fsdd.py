"""FSDD: which digit is said, from 2,700 recordings of six speakers; the starter digits.

The official test set is the first five takes of each digit and speaker. To leave a speaker out
instead: regard train fsdd test=*_jackson_* out=runs/fsdd_jackson

Command: regard train fsdd data=fsdd, then: regard eval runs/fsdd data=fsdd
"""

TASK = "sounds"
DATA = "fsdd"
SETTINGS = {
    "pattern": "{label}_{speaker}_{take}",
    "test": "*_[0-4].*",
    "valid": "0.1",
    "rate": 8000,
    "size": "micro",
    "optimiser": "muon",
    "lr": 0.005,
    "frequency_masks": 2,
    "frequency_share": 0.15,
    "time_masks": 1,
    "time_share": 0.15,
    "threads": 1,
    "batch_seconds": 30,
    "steps": 3000,
    "valid_every": 300,
}
