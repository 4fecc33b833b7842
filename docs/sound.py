"""Draws the picture of sound.md: python docs/sound.py MODEL; the sentence is of AN4's dev part."""

import sys
from pathlib import Path

from PIL import Image

import regard
from regard.recipes import data_folder

if __name__ == "__main__":
    sentence = Path(data_folder("an4")) / "audio" / "an87-fbbh-b.ogg"
    model = regard.load(sys.argv[1])
    last = len(model.model.encoder) - 1
    out = Path(__file__).with_suffix(".png")
    print(regard.look(model, sentence, out=out, layers=str(last), heads="0,3"))
    colours = Image.open(out).convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE)
    colours.save(out, optimize=True)  # a fifth of its size
