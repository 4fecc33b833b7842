"""Draws the pictures of filters.md: python docs/filters.py

The photo is none: a house drawn here, whose bricks and fence repeat as things in photos do.
"""

from pathlib import Path

from PIL import Image, ImageDraw

import regard

HERE = Path(__file__).resolve().parent
SIDE, FINE = 160, 4  # pixels to a side, and how many times finer it is drawn first


def house() -> Image.Image:
    """Draw a house under a sky."""
    image = Image.new("RGB", (SIDE * FINE, SIDE * FINE))
    draw = ImageDraw.Draw(image)

    def box(left: float, top: float, right: float, bottom: float, colour: str) -> None:
        draw.rectangle([FINE * v for v in (left, top, right, bottom)], fill=colour)

    for y in range(SIDE):
        box(0, y, SIDE, y + 1, f"rgb({90 + y // 2}, {140 + y // 2}, {215 - y // 6})")
    draw.ellipse([FINE * v for v in (118, 14, 146, 42)], fill="#ffe9a0")
    box(0, 118, SIDE, SIDE, "#5f8f4e")
    draw.polygon([FINE * v for v in (18, 62, 68, 22, 118, 62)], fill="#7c3b34")
    box(26, 60, 110, 124, "#d8c8b4")
    for row in range(9):
        for column in range(-1, 8):
            left = 26 + 12 * column + 6 * (row % 2)
            top = 61 + 7 * row
            ends = max(26, left), top, min(110, left + 11), top + 6
            if ends[2] > ends[0]:
                box(*ends, "#b0604a")
    for left in (38, 82):
        box(left, 72, left + 18, 92, "#f4f0e6")
        box(left + 2, 74, left + 8, 90, "#33506e")
        box(left + 10, 74, left + 16, 90, "#33506e")
    box(60, 92, 76, 124, "#3d2a20")
    for left in range(2, SIDE, 9):
        box(left, 128, left + 5, 150, "#eeeeea")
    box(0, 133, SIDE, 136, "#eeeeea")
    return image.resize((SIDE, SIDE), Image.Resampling.BOX)


def main() -> None:
    """Draw all pictures."""
    photo = HERE / "house.png"
    house().save(photo, optimize=True)
    settings = {"sigma": 25, "weights_at": "72,70"}
    told = regard.show("filter_comparison", photo, **settings, out=HERE / "filters.png")
    print(told)
    regard.show("bilateral_grid", photo, weights_at="72,70", out=HERE / "bilateral.png")
    sample = HERE / "texture.png"
    house().crop((28, 96, 58, 124)).save(sample)
    regard.show("texture", sample, width=80, height=64, patch=15, out=sample)
    Image.open(sample).resize((320, 256), Image.Resampling.NEAREST).save(sample)
    for name in ("filters.png", "bilateral.png", "texture.png"):  # few colours, small files
        Image.open(HERE / name).convert("RGB").quantize(256).save(HERE / name, optimize=True)


if __name__ == "__main__":
    main()
