"""Tatoeba English to Chinese: the starter that ships with the package.

Command: regard train tatoeba_en_zh data=tatoeba-en-zh
Takes:   42 minutes on one core
Gives:   30.2 BLEU (sacreBLEU zh) on test.tsv with beam 5; 2.3M parameters
"""

TASK = "translate"
DATA = "tatoeba-en-zh"
SETTINGS = {
    "from": "en",
    "to": "zh",
    "size": "tiny",
    "pieces": 4000,
    "vocabularies": "separate",
    "lr": 0.003,
    "warmup": 500,
    "schedule": "cosine",
    "batch_tokens": 1500,
    "dropout": 0.25,
    "bpe_dropout": 0.1,
    "ema": 0.998,
    "steps": 5000,
    "valid_every": 500,
    "threads": 1,
}
