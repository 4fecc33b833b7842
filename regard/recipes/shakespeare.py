"""Tiny Shakespeare by characters, with Muon: the starter that ships with the package.

Command: regard train shakespeare data=tinyshakespeare
Takes:   5 minutes on one core that others use too
Gives:   a validation loss of 1.605 a character; 0.8M parameters
"""

TASK = "language"
DATA = "tinyshakespeare"
SETTINGS = {
    "size": "tiny",
    "tokenizer": "characters",
    "feed_forward": "gelu",
    "context": 64,
    "batch_tokens": 768,
    "dropout": 0.0,
    "optimiser": "muon",
    "lr": 0.005,
    "warmup": 100,
    "steps": 2000,
    "valid_every": 1000,
    "valid_tokens": 0,
    "threads": 1,
}
