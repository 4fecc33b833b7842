"""One layout for every PNG: rows of panels under a title, measured in inches from the top left."""

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from io import BytesIO
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from regard.errors import UsageError
from regard.viewer.fonts import cut, fonts_for, spell
from regard.viewer.picture import show_token

BLUES = LinearSegmentedColormap.from_list(
    "regard", [(0.0, "#ffffff"), (0.65, "#2f5bd8"), (1.0, "#101f57")]
)
HEAT = LinearSegmentedColormap.from_list(
    "heat", ["#2b0f54", "#8c2981", "#e4506b", "#fe9f6d", "#fcfdbf"]
)
INK, SOFT, LINE = "#1b1f27", "#5c6575", "#e3e7ee"
_FRAME = "#35f0ff"
_DPI = 130
_LONGEST_LINE = 1000  # letters of a title or a note, before it is cut to the room there is
_MAX_PIXELS = 60_000_000
MAX_PANELS = 256  # as many as there are filters to look at
_MIN_SIDE = 240  # pixels to which the longer side of a smaller image is enlarged, at least
# inches: around all panels, of the title, of a note under it, above and under a panel
MARGIN, TITLE, NOTE, _HEADING, CAPTION = 0.15, 0.5, 0.2, 0.22, 0.22
_LETTERS_PER_INCH, _MOST_LETTERS = 16.0, 115  # of a line of a note
_MISSING = "Letters that no installed font has are shown as code points; Noto Sans CJK has most."


class Sheet:
    """A figure whose parts are placed by hand: matplotlib's own layouts measure every label."""

    def __init__(self, width: float, height: float, words: Iterable[str]) -> None:
        self.width, self.height = width, height
        self.fonts, self.missing = fonts_of(words)
        self.figure = Figure(figsize=(width, height), facecolor="white")
        FigureCanvasAgg(self.figure)

    def spell(self, text: str) -> str:
        """Text in letters that can be seen, and that some font has."""
        return spell(show_token(text, _LONGEST_LINE), self.missing) if text else ""

    def style(self, size: float, colour: str = INK) -> dict[str, Any]:
        """Arguments to draw a text: fonts that have its letters, and never as a formula."""
        return {"family": self.fonts, "fontsize": size, "color": colour, "parse_math": False}

    def write(
        self,
        text: str,
        left: float,
        down: float,
        size: float,
        colour: str = INK,
        room: float = math.inf,
    ) -> None:
        """Write a text from a point on its baseline, cut to the room there is.

        Args:
            text: text to write
            left: inches from the left
            down: inches from the top
            size: font size in points
            colour: colour of the text
            room: inches to which it is cut
        """
        shown = cut(self.spell(text), room * 72 / size)
        at = left / self.width, 1 - down / self.height
        self.figure.text(*at, shown, **self.style(size, colour))

    def head(self, title: str, notes: Sequence[str] = ()) -> None:
        """Write a title, and notes under it."""
        room = self.width - 2 * MARGIN
        self.write(title, MARGIN, 0.32, 11, room=room)
        for number, note in enumerate(notes):
            self.write(note, MARGIN, 0.52 + NOTE * number, 8, SOFT, room)

    def axes(self, left: float, down: float, width: float, height: float, **options: Any) -> Axes:
        """Add axes with soft edges, of which `left` and `down` are the upper left corner."""
        low = 1 - (down + height) / self.height
        box = left / self.width, low, width / self.width, height / self.height
        axes = self.figure.add_axes(box, **options)
        for edge in axes.spines.values():
            edge.set_color(LINE)
        return axes

    def png(self, dpi: float = _DPI) -> bytes:
        """Figure as PNG, with fewer dots per inch where it would be too large."""
        stream = BytesIO()
        dpi = min(dpi, math.sqrt(_MAX_PIXELS / self.width / self.height))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # a missing glyph must not flood
            self.figure.savefig(stream, format="png", dpi=dpi)
        return stream.getvalue()


def fonts_of(words: Iterable[str]) -> tuple[list[str], frozenset[str]]:
    """Fonts for all of some words, and the letters that none has."""
    shown = (show_token(word, _LONGEST_LINE) for word in words)
    return fonts_for("".join(sorted(set("".join(shown)))))


def lines_of(notes: Iterable[str], width: float) -> list[str]:
    """Notes of 8 points as lines that fit into so many inches."""
    most = min(_MOST_LETTERS, int(width * _LETTERS_PER_INCH))
    return [line for note in notes for line in wrap(note, most)]


@dataclass(frozen=True, eq=False)
class Panel:
    """An image (h, w, 3) with its caption, and a frame (left, top, width, height) from 0 to 1.

    A heading stands above it, with room over `span` panels.
    """

    pixels: np.ndarray
    caption: str = ""
    frame: tuple[float, float, float, float] | None = None
    heading: str = ""
    span: int = 1

    def draw(self, axes: Axes, sheet: Sheet) -> None:
        """Draw the image and its frame."""
        axes.imshow(self.pixels, extent=(0, 1, 1, 0), aspect="auto", interpolation="nearest")
        axes.set_frame_on(False)
        if self.frame is not None:
            x, y, w, h = self.frame
            axes.plot([x, x + w, x + w, x, x], [y, y, y + h, y + h, y], color=_FRAME, linewidth=1.2)
            axes.set(xlim=(0, 1), ylim=(1, 0))


def lay_out(
    title: str,
    rows: Sequence[Sequence[Panel]],
    size: Callable[[Any], tuple[float, float]],
    *,
    notes: Sequence[str] = (),
    words: Iterable[str] = (),
    pitch: float | None = None,
    left: float = 0.0,
    above: Sequence[float] | None = None,
    right: float = MARGIN,
    bottom: float = MARGIN,
    letters: float = 7,
    min_width: float = 0.0,
) -> Sheet:
    """Draw rows of panels of some size (width, height) under a title and notes.

    Args:
        title: title of the figure
        rows: rows of panels
        size: width and height of a panel in inches
        notes: lines below the title
        words: further texts to have fonts for
        pitch: inches from one panel to the next
        left: inches before each panel, for labels
        above: inches above each row
        right: inches kept free on the right
        bottom: inches kept free below
        letters: font size of captions in points
        min_width: minimum width of the figure in inches
    """
    panels = [panel for row in rows for panel in row]
    if len(panels) > MAX_PANELS:
        raise UsageError(
            f"{len(panels)} maps are too many for one PNG, which holds {MAX_PANELS}; "
            "choose some with layers= and heads=, or save as .html"
        )
    texts = [title, *notes, *words, *(t for p in panels for t in (p.heading, p.caption) if t)]
    pitch = pitch or max(size(panel)[0] for panel in panels) + 0.1
    above = above or [0.0] * len(rows)
    headings = [_HEADING * any(panel.heading for panel in row) for row in rows]
    heights = [max(size(panel)[1] for panel in row) for row in rows]
    captions = [CAPTION if any(panel.caption for panel in row) else MARGIN for row in rows]
    bottom += NOTE * bool(fonts_of(texts)[1])
    width = max(min_width, MARGIN + max(map(len, rows)) * pitch - 0.1 + right)
    height = TITLE + NOTE * len(notes) + bottom
    height += sum(map(sum, (headings, above, heights, captions)))
    sheet = Sheet(width, height, texts)
    sheet.head(title, notes)
    down = TITLE + NOTE * len(notes)
    for row, panels in enumerate(rows):
        down += headings[row] + above[row]
        for number, panel in enumerate(panels):
            at = MARGIN + number * pitch + left
            panel.draw(sheet.axes(at, down, *size(panel), xticks=[], yticks=[]), sheet)
            low, high = down + heights[row] + 0.13, down - above[row] - 0.05
            sheet.write(panel.caption, at, low, letters, SOFT, pitch - 0.05)
            sheet.write(panel.heading, at, high, 8, INK, panel.span * pitch - 0.05)
        down += heights[row] + captions[row]
    if sheet.missing:
        sheet.write(_MISSING, MARGIN, height - 0.1, 6.5, SOFT)
    return sheet


def draw_gallery(title: str, rows: Sequence[Sequence[Panel]]) -> bytes:
    """Draw rows of images pixel for pixel, all in the size of the first, and return the PNG."""
    count, (high, wide) = sum(map(len, rows)), rows[0][0].pixels.shape[:2]
    times = -(-_MIN_SIDE // max(high, wide))
    if count * (high * times + 30) * (wide * times + 10) > _MAX_PIXELS:
        raise UsageError(
            f"{count} images of {wide} x {high} pixels are too many for one picture; "
            "choose a smaller size="
        )
    # at 100 dots per inch all lengths of the layout are whole pixels, so images stay sharp
    inches = wide * times / 100, high * times / 100
    return lay_out(title, rows, lambda _: inches, letters=8.5, min_width=2.4).png(100)


def heat_map(weights: np.ndarray) -> np.ndarray:
    """Weights (h, w) as colours: the root of their share of the largest."""
    top = float(np.abs(weights).max()) or 1.0
    return (255 * HEAT(np.sqrt(np.abs(weights) / top))[..., :3]).round().astype(np.uint8)
