"""Draws directions.png from an autoencoder of Fashion-MNIST: python docs/directions.py RUN

RUN is the folder of `regard train pretrain data=fashion-mnist objective=variational`.
"""

import sys
from pathlib import Path

from PIL import Image

import regard

HERE = Path(__file__).resolve().parent
SHOWN = {"directions.png": {"by": "labels"}, "components.png": {"by": "components", "count": 3}}


def main() -> None:
    """Draw them, and say what was measured."""
    for name, how in SHOWN.items():
        given = {"data": "fashion-mnist", "judge": "fashion", "rows": 1, **how}
        print(regard.directions(sys.argv[1], out=HERE / name, **given))
        Image.open(HERE / name).convert("RGB").quantize(64).save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
