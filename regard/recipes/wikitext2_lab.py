"""WikiText-2, a small causal model read far past its training length: the position lab.

Command: regard compare wikitext2_lab position=none,sinusoidal,rotary,alibi seeds=3 parallel=2
Takes:   500 steps a run on one core each; the table tells the seconds
Gives:   a table and a plot of the loss by position, and by test length up to 8 times the training's
"""

TASK = "language"
DATA = "wikitext-2"
SETTINGS = {
    "size": "tiny",
    "tokenizer": "bpe",
    "pieces": 4000,
    "context": 128,
    "batch_tokens": 2048,
    "lr": 0.002,
    "warmup": 100,
    "steps": 500,
    "valid_every": 250,
    "valid_tokens": 65_536,
    "threads": 1,
}
