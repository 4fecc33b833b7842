"""UD English EWT: the part of speech of every word, without pretraining.

Command: regard train ud_ewt_upos data=ud-en-ewt,
         then: regard eval runs/ud_ewt_upos data=ud-en-ewt part=valid
Takes:   7 minutes on one core
Gives:   94.2% of the words of the dev part right, chosen on a part of train; 6.0M parameters
"""

TASK = "tag"
DATA = "ud-en-ewt"
SETTINGS = {
    "valid": "0.04",
    "size": "tiny",
    "depth": 3,
    "width": 192,
    "heads": 3,
    "ffn_width": 768,
    "pieces": 8000,
    "features": "affixes",
    "feature_rows": 16384,
    "feature_dropout": 0.1,
    "word_dropout": 0.1,
    "dropout": 0.25,
    "lr": 0.002,
    "batch_tokens": 2048,
    "ema": 0.998,
    "steps": 1200,
}
