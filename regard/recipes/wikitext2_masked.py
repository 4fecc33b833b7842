"""WikiText-2: a masked language model that fills in words.

The text is that of bench/plain_wikitext.py: spelled as people write, and in lower case.

Command: python bench/plain_wikitext.py ../shared/data/wikitext-2 wikitext-2-plain,
         then: regard train wikitext2_masked data=wikitext-2-plain
Takes:   about 23 minutes on one core, from 4.2 minutes for the first 1,500 steps
Gives:   after these 1,500 steps a loss of 4.75 a masked token of the validation part, 24.8% of them
         right; the rest of the steps is not measured yet; 1.0M parameters
"""

TASK = "language"
DATA = "wikitext-2-plain"
SETTINGS = {
    "objective": "masked",
    "size": "tiny",
    "tokenizer": "bpe",
    "pieces": 4000,
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
    "schedule": "constant",
    "warmup": 100,
    "ema": 0.995,
    "steps": 8000,
    "valid_every": 250,
    "valid_tokens": 40_000,
    "threads": 1,
}
