"""Tiny Shakespeare by characters: the starter that ships with the package.

Command: regard train shakespeare data=tinyshakespeare
Takes:   TAKES
Gives:   GIVES
"""

TASK = "language"
DATA = "tinyshakespeare"
SETTINGS = {
    "size": "tiny",
    "like": "llama",
    "tokenizer": "characters",
    "depth": 6,
    "width": 160,
    "heads": 5,
    "ffn_width": 432,
    "model.tie": True,
    "context": 256,
    "batch_tokens": 2048,
    "dropout": 0.15,
    "optimiser": "muon",
    "lr": 0.006,
    "warmup": 50,
    "ema": 0.99,
    "processes": 2,
    "minutes": 9,
    "valid_tokens": 0,
}
