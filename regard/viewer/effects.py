"""What an answer depends on as PNG: the effect of tokens beside attention, and tables."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize

from regard.errors import UsageError
from regard.layers.layout import TokenGrid
from regard.viewer.fonts import text_width
from regard.viewer.heatmaps import bare
from regard.viewer.overlays import as_rgb, overlay
from regard.viewer.panels import BLUES, INK, LINE, MARGIN, SOFT, TITLE, Sheet, lines_of
from regard.viewer.picture import Effects, Picture, ValueTable

_LUMINANCE = 0.299, 0.587, 0.114  # of red, green and blue (ITU-R BT.601)
_SIGNED = LinearSegmentedColormap.from_list(
    "signed", ["#7a1f12", "#d8573c", "#ffffff", "#2f5bd8", "#101f57"]
)
_FOR, _AGAINST = "#2f5bd8", "#d8573c"
_MAX_TOKENS = 150  # rows of bars
_MAX_CELLS = 6000
_MAX_ACROSS = 12.0  # inches of tables beside each other
_ROW, _BARS = 0.19, 1.9  # inches of a token, and of a column of bars
_SIDE = 2.1  # of a photo
_STRIP = 0.62  # of a curve over time
_CUT = "log p lost when cut"


def draw_effects(picture: Picture) -> Sheet:
    """Draw the effect of each token beside the attention to it, and a table of the heads."""
    effects = picture.effects
    assert effects is not None
    if picture.recording is not None:
        return _draw_sound(picture, effects)
    if picture.photo is not None and effects.grid is not None:
        return _draw_photo(picture, effects, effects.grid)
    return _draw_text(picture, effects)


def head_table(effects: Effects) -> list[ValueTable]:
    """Effects of heads as a table: a row for each layer."""
    if not effects.heads:
        return []
    most = max(map(len, effects.heads.values()))
    values = np.full((len(effects.heads), most), np.nan)
    for row, each in enumerate(effects.heads.values()):
        values[row, : len(each)] = each
    columns = [str(n) for n in range(most)]
    name = f"heads: {_CUT}"
    return [ValueTable(name, values, list(effects.heads), columns)]


def edge_tables(effects: Effects, picture: Picture) -> list[ValueTable]:
    """Effects of edges as tables of queries and keys."""
    named = {view.name: view for view in picture.views}
    return [
        ValueTable(
            f"edges of {name}: {_CUT}",
            values,
            _names(named, name, 0, values.shape[0]),
            _names(named, name, 1, values.shape[1]),
        )
        for name, values in effects.edges.items()
    ]


def _names(views: dict, name: str, side: int, count: int) -> list[str]:
    view = views.get(name)
    tokens = [] if view is None else list((view.row_tokens, view.column_tokens)[side])
    return tokens if len(tokens) == count else [str(n) for n in range(count)]


# ---- the parts of a sheet ---------------------------------------------------------------------


def table_size(table: ValueTable) -> tuple[float, float, float, float]:
    """Inches of a table's cells across and down, and of the labels left of and above it."""
    rows, columns = table.values.shape
    if rows * columns > _MAX_CELLS:
        raise UsageError(
            f"{rows} x {columns} cells are too many for one PNG, which holds {_MAX_CELLS:,}; "
            "choose a shorter input, or save as .html"
        )
    texts = table.texts
    longest = max((text_width(t) for row in texts or () for t in row), default=0.0)
    wide = min(1.1, max(0.34, longest * 6.5 / 72 + 0.08)) if texts else min(0.42, 9.0 / columns)
    left = max(map(text_width, (bare(each, frozenset()) for each in table.rows))) * 7 / 72 + 0.1
    above = max(map(text_width, (bare(each, frozenset()) for each in table.columns))) * 7 / 72
    return wide * columns, 0.2 * rows, left, above * math.sin(math.radians(55)) + 0.12


def draw_table(sheet: Sheet, table: ValueTable, left: float, down: float) -> float:
    """Draw a table from a point on, and return where it ends below."""
    wide, high, before, above = table_size(table)
    sheet.write(table.name, left, down + 0.12, 8, INK)
    top = down + 0.2 + above
    axes = sheet.axes(left + before, top, wide, high, xticks=[], yticks=[])
    values = np.ma.masked_invalid(table.values)
    most = float(np.abs(values).max()) or 1.0
    norm = Normalize(-most, most) if table.signed else Normalize(0, most)
    colours = _SIGNED if table.signed else BLUES
    axes.imshow(values, cmap=colours, norm=norm, aspect="auto")
    style = sheet.style(7)
    rows, columns = table.values.shape
    for row, name in enumerate(table.rows):
        place = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
        axes.text(-0.06 / wide, row, bare(name, sheet.missing), **place, **style)
    slanted = {"rotation": 55, "rotation_mode": "anchor", "ha": "left", "va": "bottom"}
    every = max(1, math.ceil(0.13 * columns / wide))
    for column in range(0, columns, every):
        where = {"transform": axes.get_xaxis_transform()}
        name = bare(table.columns[column], sheet.missing)
        axes.text(column, 1 + 0.04 / high, name, **where, **slanted, **style)
    small = sheet.style(6.5)
    for row in range(rows):
        for column in range(columns):
            value = table.values[row, column]
            if not np.isfinite(value):
                continue
            if table.texts is not None:
                text = bare(table.texts[row][column], sheet.missing)
            else:
                digits = 3 if most < 0.1 else 2 if most < 100 else 0
                text = f"{value:{'+z' if table.signed else ''}.{digits}f}"
                if text_width(text) * 6.5 / 72 > wide / columns - 0.02:
                    continue
            dark = np.dot(colours(norm(value))[:3], _LUMINANCE) < 0.5
            look = {**small, "color": "white" if dark else INK, "ha": "center", "va": "center"}
            axes.text(column, row, text, clip_on=True, **look)
    return top + high + 0.12


def draw_tables(picture: Picture) -> Sheet:
    """Draw the tables of a picture, several beside each other where they fit."""
    rows: list[list[tuple[ValueTable, float, float]]] = []  # with the width and height of each
    for table in picture.tables:
        cells, high, left, above = table_size(table)
        wide = max(left + cells, text_width(table.name) * 8 / 72) + 0.4
        each = table, wide, high + above + 0.34
        if rows and sum(wide for _, wide, _ in rows[-1]) + each[1] <= _MAX_ACROSS:
            rows[-1].append(each)
        else:
            rows.append([each])
    notes = [line for line in (picture.output and f"→ {picture.output}", picture.note) if line]
    across = max(6.5, max(sum(wide for _, wide, _ in row) for row in rows))
    notes = lines_of(notes, across)
    words = [w for t in picture.tables for w in (t.name, *t.rows, *t.columns)]
    words += [w for t in picture.tables for row in t.texts or () for w in row]
    down = TITLE + 0.2 * len(notes)
    high = down + sum(max(high for _, _, high in row) for row in rows) + MARGIN
    sheet = Sheet(across + 2 * MARGIN, high, [picture.title, *notes, *words])
    sheet.head(picture.title, notes)
    for row in rows:
        at = MARGIN
        for table, wide, _ in row:
            draw_table(sheet, table, at, down)
            at += wide
        down += max(high for _, _, high in row)
    return sheet


def _bars(axes: Axes, values: np.ndarray, *, upright: bool = False) -> None:
    """Draw a bar for each number, in the colour of its sign."""
    colours = [_FOR if value >= 0 else _AGAINST for value in values]
    places = np.arange(len(values))
    if upright:
        axes.bar(places, values, color=colours, width=0.9)
        axes.axhline(0, color=LINE, linewidth=0.8, zorder=0)
    else:
        axes.barh(places, values, color=colours, height=0.72)
        axes.axvline(0, color=LINE, linewidth=0.8, zorder=0)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=6, colors=SOFT, length=0)


def _captions(effects: Effects) -> dict[str, np.ndarray]:
    """Effect and the maps beside it by what is written above them."""
    maps = {
        f"{name}, ρ = {effects.correlations[name]:+.2f}": values
        for name, values in effects.attention.items()
    }
    return {_CUT: effects.effects, **maps}


def _texts(picture: Picture, effects: Effects, tables: Sequence[ValueTable]) -> list[str]:
    words = [picture.title, effects.answer, effects.note, *effects.tokens]
    words += [word for table in tables for word in (table.name, *table.rows, *table.columns)]
    return [*words, *_captions(effects)]


def _draw_text(picture: Picture, effects: Effects) -> Sheet:
    """Draw a row for each token: what is lost when it is cut, and the attention to it."""
    count = len(effects.tokens)
    if count > _MAX_TOKENS:
        raise UsageError(
            f"{count} tokens are too many for one PNG, which holds {_MAX_TOKENS}; save as .html"
        )
    tables = [*head_table(effects), *edge_tables(effects, picture)]
    columns = _captions(effects)
    names = [bare(token, frozenset()) for token in effects.tokens]
    left = max(map(text_width, names)) * 8 / 72 + 0.15
    across = left + len(columns) * (_BARS + 0.15)
    sizes = [table_size(table) for table in tables]
    beside = max((before + wide for wide, _, before, _ in sizes), default=0.0)
    high = max(_ROW * count + 0.4, sum(h + above + 0.34 for _, h, _, above in sizes))
    notes = [f"→ {effects.answer}", effects.note]
    width = across + beside + 2 * MARGIN + (0.35 if tables else 0.0)
    sheet = Sheet(max(width, 8.0), TITLE + 0.4 + high + 0.45, _texts(picture, effects, tables))
    sheet.head(picture.title, notes)
    top = TITLE + 0.4 + 0.25
    for number, (name, values) in enumerate(columns.items()):
        at = MARGIN + left + number * (_BARS + 0.15)
        sheet.write(name, at, top - 0.06, 8, INK, _BARS + 0.1)
        axes = sheet.axes(at, top, _BARS, _ROW * count, ylim=(count - 0.5, -0.5), yticks=[])
        _bars(axes, values)
        axes.locator_params(axis="x", nbins=4)
        if not number:
            place = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
            for row, token in enumerate(effects.tokens):
                axes.text(-0.03, row, bare(token, sheet.missing), **place, **sheet.style(8))
    down = TITLE + 0.45
    for table in tables:
        down = draw_table(sheet, table, MARGIN + across + 0.3, down)
    return sheet


def _signed_overlay(photo: np.ndarray, effects: np.ndarray, grid: TokenGrid) -> np.ndarray:
    """Lay signed numbers (h, w) over a photo in two colours."""
    most = float(np.abs(effects).max()) or 1.0
    base = overlay(photo, np.zeros_like(effects), grid).astype(np.float64)
    high, wide = base.shape[:2]
    rows = ((np.arange(high) + 0.5) / high / grid.cell_height).astype(int).clip(max=grid.height - 1)
    columns = ((np.arange(wide) + 0.5) / wide / grid.cell_width).astype(int)
    cells = (effects / most)[rows[:, None], columns.clip(max=grid.width - 1)]
    share = np.sqrt(np.abs(cells))[..., None] * 0.9
    colours = np.where(cells[..., None] >= 0, (96, 140, 255), (255, 110, 80))
    return (base * (1 - share) + colours * share).round().astype(np.uint8)


def _draw_photo(picture: Picture, effects: Effects, grid: TokenGrid) -> Sheet:
    """Draw a photo, the effect of each place over it, and the attention to it."""
    assert picture.photo is not None
    photo = as_rgb(picture.photo)
    shape = grid.height, grid.width
    panels = {"": photo}
    for name, values in _captions(effects).items():
        cells = values.reshape(shape)
        if name == _CUT:
            panels[f"{_CUT}, ≤ {np.abs(cells).max():.2g}"] = _signed_overlay(photo, cells, grid)
        else:
            panels[name] = overlay(photo, cells / (float(cells.max()) or 1.0), grid)
    tables = head_table(effects)
    high = _SIDE * photo.shape[0] / photo.shape[1]
    below = sum(h + above + 0.34 for _, h, _, above in map(table_size, tables))
    width = max(2 * MARGIN + len(panels) * (_SIDE + 0.12), 7.0)
    sheet = Sheet(width, TITLE + 0.75 + high + below + 0.2, _texts(picture, effects, tables))
    sheet.head(picture.title, [f"→ {effects.answer}", effects.note])
    for number, (name, pixels) in enumerate(panels.items()):
        at = MARGIN + number * (_SIDE + 0.12)
        sheet.write(name, at, TITLE + 0.6, 8, INK, _SIDE)
        axes = sheet.axes(at, TITLE + 0.67, _SIDE, high, xticks=[], yticks=[], frame_on=False)
        axes.imshow(pixels, aspect="auto", interpolation="nearest")
    down = TITLE + 0.75 + high
    for table in tables:
        down = draw_table(sheet, table, MARGIN, down)
    return sheet


def _draw_sound(picture: Picture, effects: Effects) -> Sheet:
    """Draw a spectrogram, and under it the effect of each moment and the attention to it."""
    assert picture.photo is not None and picture.recording is not None
    tables, columns = head_table(effects), _captions(effects)
    wide, left = 8.0, MARGIN + 0.35
    below = sum(h + above + 0.34 for _, h, _, above in map(table_size, tables))
    high = 1.3 + len(columns) * (_STRIP + 0.3)
    sheet = Sheet(
        wide + left + MARGIN, TITLE + 0.6 + high + below + 0.3, _texts(picture, effects, tables)
    )
    sheet.head(picture.title, [f"→ {effects.answer}", effects.note])
    down = TITLE + 0.5
    axes = sheet.axes(left, down, wide, 1.2, xticks=[], yticks=[])
    span = picture.recording.seconds
    axes.imshow(picture.photo, extent=(0, span, 0, 1), aspect="auto", cmap="magma")
    down += 1.2
    for name, values in columns.items():
        sheet.write(name, left, down + 0.2, 8, INK, wide)
        # a cell may reach beyond the end of the sound
        last = span / (effects.grid.cell_width * span) if effects.grid else len(values)
        axes = sheet.axes(left, down + 0.26, wide, _STRIP, xlim=(-0.5, last - 0.5), xticks=[])
        _bars(axes, values, upright=True)
        axes.locator_params(axis="y", nbins=3)
        down += _STRIP + 0.3
    for table in tables:
        down = draw_table(sheet, table, MARGIN, down + 0.1)
    return sheet
