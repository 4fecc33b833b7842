"""Tatoeba English to Chinese: the starter that ships with the package.

Command: regard train tatoeba_en_zh data=runs/en-zh-data
Data:    python bench/en_zh_data.py out=runs/en-zh-data
Takes:   2 hours 15 minutes on one core, beside other work, to step 8,250 of 9,000
Gives:   34.5 BLEU (sacreBLEU zh) on test.tsv with beam 5; 5.9M parameters

The starter had a second stage of 992 steps on short sentences, which gives 35.3 (docs/log.md).
"""

TASK = "translate"
DATA = "tatoeba-en-zh"
SETTINGS = {
    "from": "en",
    "to": "zh",
    "size": "tiny",
    "width": 192,
    "ffn_width": 768,
    "heads": 6,
    "model.encoder_depth": 5,
    "model.decoder_depth": 3,
    "pieces": 5000,
    "vocabularies": "separate",
    "lr": 0.002,
    "warmup": 800,
    "schedule": "cosine",
    "batch_tokens": 1500,
    "dropout": 0.2,
    "bpe_dropout": 0.1,
    "ema": 0.998,
    "steps": 9000,
    "valid_every": 750,
    "threads": 1,
}
