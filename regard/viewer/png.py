"""Heat maps of attention as one PNG, with the tokens on both axes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any
from unicodedata import bidirectional, east_asian_width

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure
from matplotlib.font_manager import FontEntry, fontManager, get_font

from regard.errors import UsageError
from regard.files import write_atomically
from regard.viewer.picture import Choice, Picture, View, choose_views, language_of, show_token

PLAIN = "DejaVu Sans"  # comes with matplotlib, so it is always there
# Which fonts to ask first for what the plain one lacks, by the language the letters belong to.
FIRST_FONTS = {
    "zh": ("Noto Sans CJK SC", "Source Han Sans SC", "PingFang SC", "Microsoft YaHei", "SimHei"),
    "ja": ("Noto Sans CJK JP", "Source Han Sans", "Hiragino Sans", "Yu Gothic", "Meiryo"),
    "ko": ("Noto Sans CJK KR", "Source Han Sans K", "Apple SD Gothic Neo", "Malgun Gothic"),
    "": ("Noto Sans", "Arial Unicode MS", "WenQuanYi Zen Hei", "Droid Sans Fallback"),
}
COLOURS = LinearSegmentedColormap.from_list(
    "regard", [(0.0, "#ffffff"), (0.65, "#2f5bd8"), (1.0, "#101f57")]
)
INK, SOFT = "#1b1f27", "#5c6575"
LINE = "#e3e7ee"
NOTE = "Letters that no installed font has are shown as code points; Noto Sans CJK has most."
LONGEST_LABEL = 24
LEFT_TO_RIGHT = "\u200e"
SLANT = math.radians(60)  # of the columns' labels
MARGIN = 0.15
MOST_ACROSS = 8
MOST_PANELS = 240
MOST_PIXELS = 60_000_000


def draw(
    picture: Picture,
    path: str | Path | None = None,
    layers: Choice = None,
    heads: Choice = None,
) -> bytes:
    """Draw chosen layers and heads as heat maps, a row a layer, and return (and save) the PNG.

    Unless told, heads are averaged when there are several layers, and all shown when there is one.
    """
    chosen = choose_views(picture, layers)
    if not chosen.views:
        raise UsageError("there is no attention to draw in this picture; save it as .html instead")
    if heads is None:
        heads = "mean" if len(chosen.views) > 1 else "all"
    views = choose_views(chosen, heads=heads).views
    rows = arrange(views)
    panels = sum(map(len, rows))
    if panels > MOST_PANELS:
        raise UsageError(
            f"{panels} heat maps are too many for one PNG, which holds {MOST_PANELS}; "
            "choose some with layers= and heads=, or save as .html"
        )
    png = render(picture.title, rows)
    if path is not None:
        write_atomically(path, png)
    return png


def arrange(views: Sequence[View]) -> list[list[tuple[View, int]]]:
    """Put heads of one layer in a row or, if each has but one, layers of one kind."""
    single = all(len(view.heads) == 1 for view in views)
    groups: dict[str, list[tuple[View, int]]] = {}
    for view in views:
        parts = [part for part in view.name.split(".") if not (single and part.isdecimal())]
        heads = [(view, at) for at in range(len(view.heads))]
        groups.setdefault(".".join(parts), []).extend(heads)
    return [
        group[at : at + MOST_ACROSS]
        for group in groups.values()
        for at in range(0, len(group), MOST_ACROSS)
    ]


def render(title: str, rows: list[list[tuple[View, int]]]) -> bytes:
    """Lay the panels out in rows and return the PNG's bytes."""
    views = {id(view): view for row in rows for view, _ in row}.values()
    tokens = {t for v in views for t in (*v.row_tokens, *v.column_tokens, *(v.writes or ()))}
    shown = [show_token(text) for text in (title, *tokens, *(view.name for view in views))]
    fonts, missing = fonts_for("".join(sorted(set("".join(shown)))))

    # Sizes in inches. Laid out by hand: matplotlib's own ways measure every label many times.
    alone = len(rows) == len(rows[0]) == 1
    most = max(max(view.weights.shape[1:]) for view in views)
    cell = min(0.3 if alone else 0.2, 11.0 / most)
    letters = max(5.0, min(9.0, 0.72 * 72 * cell))
    labels = {id(v): (rows_of(v, missing), columns_of(v, missing)) for v in views}
    em = letters / 72
    wide = max(width_of(name) for names, _ in labels.values() for name in names) * em + 0.12
    long = max(width_of(name) for _, names in labels.values() for name in names) * em
    high = long * math.sin(SLANT) + 0.1
    across = max(
        max(view.weights.shape[2] * cell + long * math.cos(SLANT), em * width_of(title_of(view, 0)))
        for view in views
    )
    heights = [max(view.weights.shape[1] for view, _ in row) * cell for row in rows]
    width = MARGIN + max(map(len, rows)) * (wide + across + 0.15) + 0.7
    height = 0.5 + sum(heights) + len(rows) * (high + 0.45) + 0.3

    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    top = max(float(view.weights[at].max()) for row in rows for view, at in row) or 1.0
    norm = Normalize(0, top)
    upper = height - 0.5
    for row, tall in zip(rows, heights, strict=True):
        upper -= high + 0.35
        for number, (view, at) in enumerate(row):
            left = MARGIN + number * (wide + across + 0.15) + wide
            q, k = view.weights.shape[1:]
            place = figure.add_axes(
                (left / width, (upper - q * cell) / height, k * cell / width, q * cell / height),
                xticks=[],
                yticks=[],
            )
            place.imshow(view.weights[at], cmap=COLOURS, norm=norm, aspect="auto")
            label(place, *labels[id(view)], letters, cell, fonts)
            name = spell(show_token(title_of(view, at)), missing)
            where = left / width, (upper + high + 0.05) / height
            figure.text(*where, name, **style(fonts, 8.5, SOFT))
            if alone and most <= 24:
                write_numbers(place, view.weights[at], top, letters)
        upper -= tall + 0.1
    tall = min(2.4, 0.6 * height)
    scale = figure.add_axes(
        (1 - 0.55 / width, (height - tall) / 2 / height, 0.1 / width, tall / height)
    )
    figure.colorbar(ScalarMappable(norm, COLOURS), cax=scale).outline.set_visible(False)  # pyright: ignore
    scale.tick_params(labelsize=7, colors=SOFT, length=0)
    name = spell(show_token(title), missing)
    figure.text(MARGIN / width, 1 - 0.32 / height, name, **style(fonts, 11, INK))
    if missing:
        figure.text(MARGIN / width, 0.1 / height, NOTE, **style(fonts, 6.5, SOFT))

    stream = BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a missing glyph must not flood the screen
        figure.savefig(stream, format="png", dpi=min(160, math.sqrt(MOST_PIXELS / width / height)))
    return stream.getvalue()


def style(fonts: list[str], size: float, colour: str) -> dict[str, Any]:
    """Return how a text is drawn: in these fonts, and never read as a formula."""
    return {"family": fonts, "fontsize": size, "color": colour, "parse_math": False}


def label(
    place: Axes, rows: list[str], columns: list[str], letters: float, cell: float, fonts: list[str]
) -> None:
    """Write the tokens along both axes, as many as there is room for."""
    every = max(1, math.ceil(1.15 * letters / (72 * cell)))
    away = -0.5 - 0.05 / cell
    look = style(fonts, letters, INK)
    # Plain texts: matplotlib's ticks are ten times as slow, and there may be thousands.
    for i in range(0, len(rows), every):
        place.text(away, i, rows[i], ha="right", va="center_baseline", **look)
    slanted = {"rotation": math.degrees(SLANT), "rotation_mode": "anchor"}
    for j in range(0, len(columns), every):
        place.text(j + 0.1, away, columns[j], ha="left", va="bottom", **slanted, **look)
    for edge in place.spines.values():
        edge.set_color(LINE)
    if max(len(rows), len(columns)) <= 60:
        across, down = np.arange(1, len(columns)) - 0.5, np.arange(1, len(rows)) - 0.5
        place.vlines(across, -0.5, len(rows) - 0.5, color=LINE, linewidth=0.5)
        place.hlines(down, -0.5, len(columns) - 0.5, color=LINE, linewidth=0.5)


def write_numbers(place: Axes, weights: np.ndarray, top: float, letters: float) -> None:
    """Write into each cell that matters what it weighs."""
    for i, j in np.argwhere(weights >= 0.05):
        ink = "white" if weights[i, j] > 0.4 * top else INK
        number = f"{weights[i, j]:.2f}".removeprefix("0")
        place.text(j, i, number, ha="center", va="center", fontsize=0.75 * letters, color=ink)


def rows_of(view: View, missing: frozenset[str]) -> list[str]:
    """Return the labels of the rows: the token there and, in a decoder, the one it writes."""
    rows = [bare(token, missing) for token in view.row_tokens]
    if view.writes is None:
        return rows
    words = [bare(word, missing) for word in view.writes]
    # Where letters run from right to left, marks keep the two and their arrow in our order.
    right = any(bidirectional(letter) in ("R", "AL") for name in (*rows, *words) for letter in name)
    arrow = f"{LEFT_TO_RIGHT} → {LEFT_TO_RIGHT}" if right else " → "
    start = LEFT_TO_RIGHT if right else ""
    return [f"{start}{row}{arrow}{word}" for row, word in zip(rows, words, strict=True)]


def columns_of(view: View, missing: frozenset[str]) -> list[str]:
    """Return the labels of the columns."""
    return [bare(token, missing) for token in view.column_tokens]


def bare(token: str, missing: frozenset[str]) -> str:
    """Return a token as one reads it: no mark of a word's start, and not too long for a label."""
    shown = show_token(token)
    shown = spell(shown[1:] if shown.startswith("▁") and len(shown) > 1 else shown, missing)
    return shown if len(shown) <= LONGEST_LABEL else shown[: LONGEST_LABEL - 1] + "…"


def width_of(label: str) -> float:
    """Estimate how wide a label is, in letter heights."""
    return sum(1.0 if east_asian_width(letter) in "WF" else 0.62 for letter in label)


def title_of(view: View, at: int) -> str:
    """Name one head of one layer."""
    head = view.heads[at]
    return f"{view.name}, {f'{head} of heads' if isinstance(head, str) else f'head {head}'}"


def spell(text: str, missing: Iterable[str]) -> str:
    """Write letters that no font has as their code points, which are at least legible."""
    lacking = set(missing)
    return "".join(
        f"[U+{ord(letter):04X}]" if letter in lacking else letter for letter in text
    ).replace("][", " ")


@cache
def fonts_for(text: str) -> tuple[list[str], frozenset[str]]:
    """Find fonts that together hold every letter of a text, and say which letters none has."""
    fonts = [PLAIN]
    plain = [entry for entry in fontManager.ttflist if entry.name == PLAIN]
    needed = {ord(letter) for letter in text if not letter.isspace()} - letters_in(plain[0])
    if not needed:
        return fonts, frozenset()
    first = [
        *FIRST_FONTS[language_of(text)],
        *(name for row in FIRST_FONTS.values() for name in row),
    ]
    entries = [
        entry
        for entry in fontManager.ttflist
        if entry.style == "normal"
        and entry.weight in (400, "normal", "regular")
        and not entry.name.startswith(("Last Resort", ".LastResort"))  # boxes for every letter
    ]
    entries.sort(key=lambda entry: first.index(entry.name) if entry.name in first else len(first))
    for entry in entries:
        if entry.name not in fonts and needed & (found := letters_in(entry)):
            fonts.append(entry.name)
            needed -= found
        if not needed:
            break
    return fonts, frozenset(map(chr, needed))


def letters_in(entry: FontEntry) -> set[int]:
    """Return the code points a font can draw, none if it cannot be read."""
    try:
        return set(get_font(entry.fname).get_charmap())
    except (OSError, RuntimeError):  # a colour font, or a broken file
        return set()
