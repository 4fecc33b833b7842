"""Draws the pictures of pictures.md: python docs/pictures.py"""

from pathlib import Path

from PIL import Image

import regard

HERE = Path(__file__).resolve().parent
SHOWN = {
    "fields": "receptive_fields",
    "scaling": "scaling",
    "heads": "heads",
    "particles": "particles",
    "diffusion": "perona_malik",
}


def main() -> None:
    """Draw them all."""
    for short, name in SHOWN.items():
        path = HERE / f"pictures-{short}.png"
        print(regard.show(name, out=path))
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)  # small files


if __name__ == "__main__":
    main()
