"""Multi30k English to German by one fixed context, by attention, and by a Transformer.

RNNenc, RNNsearch and a Transformer of about as many parameters learn from the same pairs for as
long, half of them joined to up to 80 words. Then they are judged by the length of the source, also
of test sentences that are joined to 80 words: the figure of Bahdanau et al. 2015.

Command: regard compare ladder_multi30k data=multi30k
         (one of them: regard train ladder_multi30k like=rnnsearch data=multi30k)
Takes:   45 minutes for each of the three on 2 cores (3,818, 1,892 and 3,672 steps when measured),
         and 4 minutes to judge them
Gives:   26.2, 36.7 and 39.3 BLEU (sacreBLEU 13a, lower-cased, beam 5) on test_2016_flickr; 8.4,
         38.1 and 38.2 joined to over 80 words; the table by length, and lengths.png; 5.1M, 5.3M
         and 5.2M parameters
"""

TASK = "translate"
DATA = "multi30k"
SETTINGS = {
    "from": "en",
    "to": "de",
    "like": "transformer",
    "size": "small",
    "pieces": 5000,
    "joined": 80,
    "lr": 0.003,
    "warmup": 300,
    "schedule": "cosine",
    "batch_tokens": 1500,
    "dropout": 0.2,
    "ema": 0.998,
    "processes": 2,
    "minutes": 45,
}
# like -> what differs: about as many parameters each
VARIANTS = {
    "rnnenc": {"depth": 1, "width": 288},
    "rnnsearch": {"depth": 1, "width": 288},
    "transformer": {"depth": 3, "width": 256, "ffn_width": 512},
}
COMPARE = {"like": ",".join(VARIANTS), "seeds": 1}
EVAL = {"lowercase": True, "joined": (10, 20, 30, 40, 50, 60, 70, 80)}
