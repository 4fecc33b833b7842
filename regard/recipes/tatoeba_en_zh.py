"""Tatoeba English to Chinese: the starter that ships with the package."""

TASK = "translate"
DATA = "tatoeba-en-zh"
SETTINGS = {
    "from": "en",
    "to": "zh",
    "size": "tiny",
    "pieces": 4000,
    "vocabularies": "separate",
    "lr": 0.004,
    "warmup": 800,
    "schedule": "cosine",
    "batch_tokens": 1500,
    "dropout": 0.25,
    "ema": 0.998,
    "steps": 20000,
}
