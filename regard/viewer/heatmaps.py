"""Attention over a text as heat maps, with the tokens on both axes."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from unicodedata import bidirectional

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize

from regard.viewer.fonts import cut, spell, text_width
from regard.viewer.panels import BLUES, INK, LINE, SOFT, Panel, Sheet, fonts_of, lay_out
from regard.viewer.picture import Choice, Picture, View, choose_views, show_token

_MAX_LABEL = 14  # font sizes
_LEFT_TO_RIGHT = "\u200e"
_SLANT = math.radians(60)  # of the columns' labels
_MAX_ACROSS = 8
_MAX_GRID = 60  # tokens up to which the lines between cells are drawn
_MAX_NUMBERS = 24  # tokens up to which a single heat map has its weights in the cells

Row = list[tuple[View, int]]  # views, and the head of each


def arrange(views: Sequence[View]) -> list[Row]:
    """Put heads of one layer in a row or, if each has but one, layers of one kind."""
    single = all(len(view.heads) == 1 for view in views)
    groups: dict[str, Row] = {}
    for view in views:
        parts = [part for part in view.name.split(".") if not (single and part.isdecimal())]
        heads = [(view, head) for head in range(len(view.heads))]
        groups.setdefault(".".join(parts), []).extend(heads)
    return [
        group[at : at + _MAX_ACROSS]
        for group in groups.values()
        for at in range(0, len(group), _MAX_ACROSS)
    ]


@dataclass(frozen=True, eq=False, kw_only=True)
class HeatMap(Panel):
    """The weights (queries, keys) of a head as a panel, with the tokens of both sides.

    A cell has a side of so many inches, a letter so many points.
    """

    rows: list[str]
    columns: list[str]
    cell: float
    letters: float
    norm: Normalize
    numbers: bool  # in the cells
    least: float = 0.05  # that is written in a cell

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of the cells, in inches."""
        return len(self.columns) * self.cell, len(self.rows) * self.cell

    def draw(self, axes: Axes, sheet: Sheet) -> None:
        """Draw the weights, the tokens along both axes as far as there is room, and a grid."""
        rows, columns = self.rows, self.columns
        axes.imshow(self.pixels, cmap=BLUES, norm=self.norm, aspect="auto")
        every = max(1, math.ceil(1.15 * self.letters / (72 * self.cell)))
        away, style = -0.5 - 0.05 / self.cell, sheet.style(self.letters)
        # Plain texts: matplotlib's ticks are ten times as slow, and there may be thousands.
        for i in range(0, len(rows), every):
            axes.text(away, i, rows[i], ha="right", va="center_baseline", **style)
        slanted = {"rotation": math.degrees(_SLANT), "rotation_mode": "anchor"}
        for j in range(0, len(columns), every):
            axes.text(j + 0.1, away, columns[j], ha="left", va="bottom", **slanted, **style)
        if max(len(rows), len(columns)) <= _MAX_GRID:
            across, down = np.arange(1, len(columns)) - 0.5, np.arange(1, len(rows)) - 0.5
            axes.vlines(across, -0.5, len(rows) - 0.5, color=LINE, linewidth=0.5)
            axes.hlines(down, -0.5, len(columns) - 0.5, color=LINE, linewidth=0.5)
        if self.numbers:
            for i, j in np.argwhere(self.pixels >= self.least):
                number = f"{self.pixels[i, j]:.2f}".removeprefix("0")
                ink = "white" if self.norm(self.pixels[i, j]) > 0.4 else INK
                middle = {"ha": "center", "va": "center", "fontsize": 0.75 * self.letters}
                axes.text(j, i, number, color=ink, **middle)


def draw_heat_maps(picture: Picture, layers: Choice = None, heads: Choice = None) -> Sheet:
    """Draw chosen layers and heads as heat maps, all in the same cells and colours.

    Unless given, heads are averaged when there are several layers, and all shown when there is
    one.
    """
    chosen = choose_views(picture, layers)
    if heads is None:
        heads = "mean" if len(chosen.views) > 1 else "all"
    rows = arrange(choose_views(chosen, heads=heads).views)
    views = {id(view): view for row in rows for view, _ in row}.values()
    words = [t for v in views for t in (*v.row_tokens, *v.column_tokens, *(v.writes or ()))]
    _, missing = fonts_of([picture.title, *words, *(view.name for view in views)])
    alone = len(rows) == len(rows[0]) == 1
    most = max(max(view.weights.shape[1:]) for view in views)
    cell = min(0.3 if alone else 0.2, 11.0 / most)
    letters = max(5.0, min(9.0, 0.72 * 72 * cell))
    norm = Normalize(0, max(float(view.weights[at].max()) for row in rows for view, at in row) or 1)
    numbers = alone and most <= _MAX_NUMBERS
    style = {"cell": cell, "letters": letters, "norm": norm, "numbers": numbers}
    labels = {id(view): labels_of(view, missing) for view in views}
    maps = [
        [
            HeatMap(view.weights[at], heading=name_of(view, at), **labels[id(view)], **style)
            for view, at in row
        ]
        for row in rows
    ]
    return lay_out_maps(picture.title, maps, letters, norm, words)


def lay_out_maps(
    title: str, maps: list[list[HeatMap]], letters: float, norm: Normalize, words: Sequence[str]
) -> Sheet:
    """Lay rows of heat maps out, with room for their labels and a scale of their colours.

    Args:
        title: title of the figure
        maps: rows of heat maps
        letters: font size of the labels
        norm: scale of the colours
        words: further texts to have fonts for
    """
    panels = [each for row in maps for each in row]
    em = letters / 72
    left = max(text_width(name) for each in panels for name in each.rows) * em + 0.12
    long = [max(text_width(name) for each in row for name in each.columns) * em for row in maps]
    slant = max(long) * math.cos(_SLANT)
    across = max(max(p.size[0] + slant, text_width(p.heading) * 8 / 72) for p in panels)
    sheet = lay_out(
        title,
        maps,
        lambda each: each.size,
        words=words,
        pitch=left + across + 0.15,
        left=left,
        above=[length * math.sin(_SLANT) + em * math.cos(_SLANT) + 0.1 for length in long],
        right=0.65,
    )
    high = min(2.4, 0.6 * sheet.height)
    scale = sheet.axes(sheet.width - 0.55, (sheet.height - high) / 2, 0.1, high)
    bar = sheet.figure.colorbar(ScalarMappable(norm, BLUES), cax=scale)
    bar.outline.set_visible(False)  # pyright: ignore
    scale.tick_params(labelsize=7, colors=SOFT, length=0)
    return sheet


def draw_tables(
    title: str, tables: Mapping[str, np.ndarray], rows: Sequence[str], columns: Sequence[str]
) -> Sheet:
    """Draw tables of numbers from 0 to 1, all with the same rows and columns, side by side."""
    _, missing = fonts_of([title, *rows, *columns, *tables])
    labels = {"rows": [bare(name, missing) for name in rows], "columns": list(columns)}
    letters, norm = 7.5, Normalize(0, 1)
    style = {"cell": 0.27, "letters": letters, "norm": norm, "numbers": True, "least": 0.0}
    panels = [HeatMap(table, heading=name, **labels, **style) for name, table in tables.items()]
    across = max(1, min(_MAX_ACROSS // 2, round(16 / len(columns))))
    maps = [panels[at : at + across] for at in range(0, len(panels), across)]
    return lay_out_maps(title, maps, letters, norm, [*rows, *columns])


def name_of(view: View, at: int) -> str:
    """Name one head of one layer."""
    head = view.heads[at]
    numbered = isinstance(head, int) or head[:1].isdecimal()
    return f"{view.name}, {f'head {head}' if numbered else f'{head} of heads'}"


def labels_of(view: View, missing: frozenset[str]) -> dict[str, list[str]]:
    """Labels of rows and columns; in a decoder a row has the token it writes, too."""
    rows, columns, words = (
        [bare(token, missing) for token in tokens]
        for tokens in (view.row_tokens, view.column_tokens, view.writes or ())
    )
    if words:
        # Where letters run from right to left, marks keep the two and their arrow in our order.
        right = any(bidirectional(c) in ("R", "AL") for name in (*rows, *words) for c in name)
        mark = _LEFT_TO_RIGHT if right else ""
        pairs = zip(rows, words, strict=True)
        rows = [f"{mark}{row}{mark} → {mark}{word}" for row, word in pairs]
    return {"rows": rows, "columns": columns}


def bare(token: str, missing: frozenset[str]) -> str:
    """Token as one reads it: no mark of a word's start, and not too long for a label."""
    shown = show_token(token)
    shown = shown[1:] if shown.startswith("▁") and len(shown) > 1 else shown
    return cut(spell(shown, missing), _MAX_LABEL)
