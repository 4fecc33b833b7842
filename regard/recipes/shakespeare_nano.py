"""Tiny Shakespeare by characters, in nanoGPT's configuration for a CPU.

Command: regard train shakespeare_nano data=tinyshakespeare
Takes:   3 minutes on one core that others use too
Gives:   a validation loss of 1.905 a character; 0.8M parameters
"""

TASK = "language"
DATA = "tinyshakespeare"
SETTINGS = {
    "size": "tiny",
    "tokenizer": "characters",
    "context": 64,
    "batch_tokens": 768,
    "dropout": 0.0,
    "lr": 0.001,
    "warmup": 100,
    "schedule": "cosine",
    "steps": 2000,
    "valid_every": 1000,
    "valid_tokens": 0,
}
