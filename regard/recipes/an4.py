"""AN4: read spelling, numbers and words from 40 minutes of speech; the starter letters.

The loss on dev stops falling halfway, so the best is taken: more steps need more regularisation.

Command: regard train an4 data=an4, then: regard eval runs/an4 data=an4 part=valid
Takes:   about 36 minutes of one core (53 minutes while others used it, too)
Gives:   13.05% of the words of dev wrong, 7.87% of the characters, without a language model, after
         4,000 steps; 1,390,479 parameters. 10.70% with speeds=0.9,1.0,1.1 in eval; trained with
         subsampling=2 steps=6000, an hour, and so read, 10.44% in two seeds (17.23 in a third)
"""

TASK = "transcribe"
DATA = "an4"
SETTINGS = {
    "size": "tiny",
    "depth": 6,
    "width": 96,
    "ffn_width": 384,
    "kernel": 15,
    "model.channels": 16,
    "model.convolution_norm": "layer",
    "dropout": 0.1,
    "drop_path": 0.1,
    "inter_ctc": 0.3,
    "optimiser": "muon",
    "lr": 0.004,
    "warmup": 400,
    "ema": 0.998,
    "threads": 1,
    "batch_seconds": 30,
    "steps": 8000,
    "valid_every": 500,
}
