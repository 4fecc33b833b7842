"""Multi30k English to German, a small Transformer on two cores."""

TASK = "translate"
DATA = "multi30k"
SETTINGS = {
    "from": "en",
    "to": "de",
    "size": "tiny",
    "pieces": 6000,
    "lr": 0.004,
    "warmup": 800,
    "schedule": "cosine",
    "batch_tokens": 2048,
    "dropout": 0.2,
    "ema": 0.998,
    "minutes": 25,
}
