"""Multi30k English to German by an encoder-decoder, and by a decoder alone of the same size.

The decoder reads the source as a prefix in both directions and goes on with the target: one stack
does the work of encoder and decoder with shared parameters (a prefix language model). Three layers
of an encoder and three of a decoder have as many parameters as seven of the decoder alone; all
other parts are the same, and so are pairs and steps.

Command: regard compare decoder_multi30k data=multi30k
"""

TASK = "translate"
DATA = "multi30k"
SETTINGS = {
    "from": "en",
    "to": "de",
    "like": "transformer",
    "size": "tiny",
    "pieces": 5000,
    "ffn_width": 512,
    "vocabularies": "joint",
    "position": "rotary",
    "norm": "layer",
    "model.block.feed_forward": "relu",
    "lr": 0.004,
    "warmup": 200,
    "schedule": "cosine",
    "batch_tokens": 1500,
    "dropout": 0.0,
    "ema": 0.99,
    "steps": 800,
    "valid_every": 500,
    "valid_sentences": 100,
}
# like -> what differs, the task too
VARIANTS = {
    "transformer": {"depth": 3},
    "gpt2": {
        "task": "prefix",
        "depth": 7,
        "model.scale_embedding": True,
        "model.init": "scaled",
    },
}
COMPARE = {"like": ",".join(VARIANTS), "seeds": 1}
EVAL = {"part": "valid"}
