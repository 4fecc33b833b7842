"""WikiText-2: a masked language model that fills in words.

The text is that of bench/plain_wikitext.py: spelled as people write, and in lower case.

Command: python bench/plain_wikitext.py ../shared/data/wikitext-2 wikitext-2-plain,
         then: regard train wikitext2_masked data=wikitext-2-plain
Takes:   about 20 minutes of one core (36 minutes while others used it, too)
Gives:   a loss of 3.97 a masked token of the validation part, 30.7% of them right; 874,737
         parameters; the starters fill and embed
"""

TASK = "language"
DATA = "wikitext-2-plain"
SETTINGS = {
    "objective": "masked",
    "size": "tiny",
    "tokenizer": "bpe",
    "pieces": 2800,
    "context": 64,
    "batch_tokens": 2048,
    "mask_share": 0.2,
    "depth": 3,
    "width": 128,
    "heads": 4,
    "ffn_width": 384,
    "order": "pre",
    "model.block.norm_eps": 1e-5,
    "model.block.attention_dropout": 0.0,
    "model.types": 0,
    "position": "rotary",
    "dropout": 0.0,
    "optimiser": "muon",
    "lr": 0.005,
    "schedule": "cosine",
    "warmup": 100,
    "ema": 0.995,
    "steps": 8000,
    "valid_every": 1000,
    "valid_tokens": 40_000,
    "threads": 1,
}
