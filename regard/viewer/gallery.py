"""Images side by side, pixel for pixel, with a line under each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from regard.errors import UsageError
from regard.viewer.panels import HEAT, MAX_PIXELS, Panel, lay_out

MIN_SIDE = 240  # pixels to which the longer side of a smaller image is enlarged, at least
DPI = 100  # all lengths of the layout are whole hundredths of an inch, so images stay sharp


def heat_map(weights: np.ndarray) -> np.ndarray:
    """Return weights (h, w) as colours: the root of their share of the largest."""
    top = float(np.abs(weights).max()) or 1.0
    return (255 * HEAT(np.sqrt(np.abs(weights) / top))[..., :3]).round().astype(np.uint8)


def draw_gallery(title: str, rows: Sequence[Sequence[Panel]]) -> bytes:
    """Draw rows of images, all in the size of the first, and return the PNG."""
    high, wide = rows[0][0].pixels.shape[:2]
    times = -(-MIN_SIDE // max(high, wide))
    if sum(map(len, rows)) * (high * times + 30) * (wide * times + 10) > MAX_PIXELS:
        raise UsageError(
            f"{sum(map(len, rows))} images of {wide} x {high} pixels are too many for one picture; "
            "choose a smaller size="
        )
    inches = wide * times / DPI, high * times / DPI
    return lay_out(title, rows, lambda _: inches, letters=8.5, min_width=2.4).png(DPI)
