"""Five jobs by one encoder-decoder, told by a prefix (T5).

Command: regard train text_many data=runs/text-many
Data:    python bench/text_many.py out=runs/text-many
Takes:   1,000 steps, which were not timed on a quiet machine
Gives:   on the test parts, greedily: 10.6 BLEU, 80.9% of sentiments, 81.0% of question types, 28.9%
         of answers right, ROUGE-L 3.1 of titles; models of one job after a fifth of the steps each:
         12.1, 79.0, 81.4, 30.6 and 21.7; 2.2M parameters
"""

TASK = "text"
DATA = "text-many"
SETTINGS = {
    "metric": "answers",
    "size": "tiny",
    "width": 128,
    "depth": 3,
    "ffn_width": 512,
    "pieces": 6000,
    "position": "t5",
    "optimiser": "muon",
    "lr": 0.004,
    "warmup": 100,
    "schedule": "cosine",
    "batch_tokens": 2000,
    "max_length": 128,
    "dropout": 0.1,
    "ema": 0.99,
    "steps": 1000,
    "valid_every": 500,
    "threads": 1,
}
