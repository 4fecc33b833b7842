"""FSDD: which digit is said, from 2,700 recordings of six speakers; the starter digits.

The official test set is the first five takes of each digit and speaker. To leave a speaker out
instead: regard train fsdd test=*_jackson_* normalise=utterance frequency_warp=0.2

Command: regard train fsdd data=fsdd, then: regard eval runs/fsdd data=fsdd
Takes:   about 4.3 minutes of one core (36 minutes while many others used the machine)
Gives:   all 300 sounds of the official test set right, 99.22% of the validation part; 292,730
         parameters
"""

TASK = "sounds"
DATA = "fsdd"
SETTINGS = {
    "pattern": "{label}_{speaker}_{take}",
    "test": "*_[0-4].*",
    "valid": "0.05",
    "rate": 8000,
    "mels": 64,
    "normalise": "global",
    "size": "micro",
    "width": 64,
    "ffn_width": 128,
    "model.channels": 16,
    "model.convolution_norm": "layer",
    "dropout": 0.1,
    "speeds": "0.8,0.9,1.0,1.1,1.2",
    "time_masks": 1,
    "time_share": 0.2,
    "frequency_share": 0.15,
    "optimiser": "muon",
    "lr": 0.005,
    "warmup": 300,
    "ema": 0.995,
    "threads": 1,
    "batch_seconds": 16,
    "steps": 3000,
    "valid_every": 500,
}
