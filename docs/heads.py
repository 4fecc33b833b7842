"""Draws heads.png: the scores of all heads of the starter that translates, over its test part."""

from pathlib import Path

import regard

DATA = Path(__file__).resolve().parents[2] / "shared" / "data" / "tatoeba-en-zh"


def main() -> None:
    """Measure and draw."""
    out = Path(__file__).with_suffix(".png")
    regard.heads("en-zh", data=DATA, examples=200, out=out, quiet=False)


if __name__ == "__main__":
    main()
