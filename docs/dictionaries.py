"""Draws dictionaries.png of the pages of two dictionaries: one of a text model, one of images.

python docs/dictionaries.py runs/features/features.html 29,177,445 runs/clothes/features.html 3,7,12
"""

import base64
import json
import re
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from regard.viewer.panels import INK, SOFT, Sheet

ROWS = 4  # examples of a text feature
LETTER = 0.083  # inches


def features_of(page: str, numbers: str) -> list[dict[str, Any]]:
    """Return some features of a page."""
    found = re.search(r'id="data">(.*?)</script>', Path(page).read_text(), re.DOTALL)
    assert found is not None
    features = {one["number"]: one for one in json.loads(found[1])["features"]}
    return [features[int(number)] for number in numbers.split(",")]


def draw_text(sheet: Sheet, feature: dict[str, Any], left: float, down: float) -> None:
    """Draw the examples of a feature as lines of shaded letters."""
    sheet.write(f"feature {feature['number']}: {feature['about']}", left, down, 8.5, SOFT)
    for row, example in enumerate(feature["examples"][:ROWS]):
        first = max(0, example["peak"] - 18)
        shown = list(zip(example["tokens"], example["values"], strict=True))[first : first + 34]
        for place, (token, value) in enumerate(shown):
            x, y = left + LETTER * place, down + 0.22 + 0.19 * row
            style = {"family": "DejaVu Sans Mono", "fontsize": 8, "color": INK}
            box = {"facecolor": (0.89, 0.31, 0.42, 0.75 * value), "pad": 0.6, "linewidth": 0}
            at = x / sheet.width, 1 - y / sheet.height
            letter = token if token.strip() else " "
            sheet.figure.text(*at, letter, bbox=box, parse_math=False, **style)


def draw_images(sheet: Sheet, feature: dict[str, Any], left: float, down: float) -> None:
    """Draw the examples of a feature as a row of images."""
    sheet.write(f"feature {feature['number']}: {feature['about']}", left, down, 8.5, SOFT)
    for place, example in enumerate(feature["examples"][:8]):
        pixels = np.asarray(Image.open(BytesIO(base64.b64decode(example["image"]))))
        axes = sheet.axes(left + 0.62 * place, down + 0.1, 0.58, 0.58, xticks=[], yticks=[])
        axes.imshow(pixels)
        axes.set_frame_on(False)


def main() -> None:
    """Draw text features on the left, and image features on the right."""
    texts, images = features_of(*sys.argv[1:3]), features_of(*sys.argv[3:5])
    high = max(1.02 * len(texts), 0.86 * len(images)) + 0.6
    sheet = Sheet(8.6, high, ["Features of shakespeare (left) and fashion (right)"])
    sheet.write("Features of shakespeare (left) and fashion (right)", 0.15, 0.28, 10.5)
    for row, feature in enumerate(texts):
        draw_text(sheet, feature, 0.15, 0.6 + 1.02 * row)
    for row, feature in enumerate(images):
        draw_images(sheet, feature, 3.5, 0.6 + 0.86 * row)
    Path(__file__).with_suffix(".png").write_bytes(sheet.png())


if __name__ == "__main__":
    main()
