"""Draws the picture of sound.md: python docs/sound.py MODEL, of a sentence of AN4's dev part."""

import sys
from pathlib import Path

import regard
from regard.recipes import data_folder

if __name__ == "__main__":
    sentence = Path(data_folder("an4")) / "audio" / "an87-fbbh-b.ogg"
    model = regard.load(sys.argv[1])
    layers = len(model.model.encoder) - 1
    out = Path(__file__).with_suffix(".png")
    print(regard.look(model, sentence, out=out, layers=str(layers), heads="0,3"))
