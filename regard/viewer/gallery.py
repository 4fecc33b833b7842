"""Images side by side, pixel for pixel, with a line under each."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from regard.errors import UsageError
from regard.viewer.panels import HEAT, MOST_PIXELS, Panel, draw_panel
from regard.viewer.png import INK, SOFT, fonts_for, spell, style

LEAST = 240  # pixels to which the longer side of a smaller image is enlarged, at least
ROOM, LINE, TITLE = 8, 20, 34  # pixels between images, for a line, and for the title
DPI = 100


def heat_map(weights: np.ndarray) -> np.ndarray:
    """Return weights (h, w) as colours: the root of their share of the largest."""
    top = float(np.abs(weights).max()) or 1.0
    return (255 * HEAT(np.sqrt(np.abs(weights) / top))[..., :3]).round().astype(np.uint8)


def draw_gallery(title: str, rows: Sequence[Sequence[Panel]]) -> bytes:
    """Draw rows of images, all in the size of the first, and return the PNG."""
    tall, wide = rows[0][0].pixels.shape[:2]
    times = -(-LEAST // max(tall, wide))
    high, across = tall * times, wide * times
    width = max(LEAST, max(map(len, rows)) * (across + ROOM) + ROOM)
    height = TITLE + len(rows) * (high + LINE + ROOM)
    if width * height > MOST_PIXELS:
        raise UsageError(
            f"a picture of {width} x {height} pixels is too large; choose a smaller size="
        )
    words = [title, *(panel.caption for row in rows for panel in row)]
    fonts, missing = fonts_for("".join(sorted(set("".join(words)))))
    figure = Figure(figsize=(width / DPI, height / DPI), facecolor="white", dpi=DPI)
    FigureCanvasAgg(figure)

    def write(text: str, left: float, down: float, room: float, size: float, ink: str) -> None:
        fits = max(2, int(room / (0.6 * size * DPI / 72)))
        text = text if len(text) <= fits else text[: fits - 1] + "…"
        at = left / width, 1 - down / height
        figure.text(*at, spell(text, missing), **style(fonts, size, ink))

    write(title, ROOM, 23, width - 2 * ROOM, 11, INK)
    for number, row in enumerate(rows):
        top = TITLE + number * (high + LINE + ROOM)
        for column, panel in enumerate(row):
            left = ROOM + column * (across + ROOM)
            box = left / width, 1 - (top + high) / height, across / width, high / height
            draw_panel(figure.add_axes(box, xticks=[], yticks=[], frame_on=False), panel)
            write(panel.caption, left, top + high + 15, across + ROOM, 8.5, SOFT)
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    return stream.getvalue()
