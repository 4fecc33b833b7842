"""Tiny Shakespeare by characters, read far past the training length: the position lab.

Command: regard compare shakespeare_lab position=none,sinusoidal,rotary,alibi seeds=3 parallel=2
Takes:   1,500 steps a run on one core each, 3 to 6 minutes; the table tells the seconds
Gives:   a table and a plot of the loss by position, and by test length up to 8 times that of the
         training; docs/results.md has one of 1,000 steps
"""

TASK = "language"
DATA = "tinyshakespeare"
SETTINGS = {
    "size": "tiny",
    "tokenizer": "characters",
    "context": 64,
    "batch_tokens": 1024,
    "lr": 0.002,
    "warmup": 100,
    "steps": 1500,
    "valid_every": 500,
    "valid_tokens": 65_536,
    "threads": 1,
}
