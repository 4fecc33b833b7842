"""Multi30k English to German, a small Transformer.

Command: regard train multi30k_en_de data=multi30k
Takes:   25 minutes on 2 cores (3,853 steps, 23 minutes when measured)
Gives:   37.7 BLEU (sacreBLEU 13a, cased) on test_2016_flickr with beam 5; 2.5M parameters
"""

TASK = "translate"
DATA = "multi30k"
SETTINGS = {
    "from": "en",
    "to": "de",
    "size": "tiny",
    "pieces": 5000,
    "ffn_width": 512,
    "lr": 0.004,
    "warmup": 500,
    "schedule": "cosine",
    "batch_tokens": 1000,
    "dropout": 0.15,
    "ema": 0.998,
    "processes": 2,
    "minutes": 25,
}
