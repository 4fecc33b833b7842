"""Attention over an image as one PNG: a row for each layer, a panel for each head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from PIL import Image

from regard.errors import UsageError
from regard.files import write_atomically
from regard.viewer.laid import cell_of, on_grid, row_at
from regard.viewer.picture import Choice, Picture, Spot, View, choose_views, show_token
from regard.viewer.png import INK, MARGIN, MOST_PANELS, SOFT, fonts_for, spell, style

HEAT = LinearSegmentedColormap.from_list(
    "heat", ["#2b0f54", "#8c2981", "#e4506b", "#fe9f6d", "#fcfdbf"]
)
MARK = "#35f0ff"
SIDE = 320  # pixels to a side that a map is drawn with, at most
ACROSS, FEW_ACROSS = 12, 6
TILES_ACROSS = 16
DPI = 130
LINE_HIGH = 0.22  # inches of a caption
BAR_HIGH = 0.25  # inches of the scale
MOST_PIXELS = 40_000_000


class Panel(NamedTuple):
    """One small image with its caption, and a frame (left, top, width, height) from 0 to 1.

    The first of a layer has the layer's name above it, with room over some panels.
    """

    pixels: np.ndarray
    caption: str
    frame: tuple[float, float, float, float] | None = None
    above: str = ""
    room: int = 1


def draw_panels(
    picture: Picture,
    path: str | Path | None = None,
    layers: Choice = None,
    heads: Choice = None,
) -> bytes:
    """Draw the maps of chosen layers and heads over the photo, and return (and save) the PNG.

    Unless told, all heads are shown, or their mean where they would be too many.
    """
    rows = tile_rows(picture) if picture.tiles else map_rows(picture, layers, heads)
    panels = sum(map(len, rows))
    if panels > MOST_PANELS:
        raise UsageError(
            f"{panels} maps are too many for one PNG, which holds {MOST_PANELS}; choose some with "
            "layers= and heads=, or save as .html"
        )
    png = render(picture, rows)
    if path is not None:
        write_atomically(path, png)
    return png


def tile_rows(picture: Picture) -> list[list[Panel]]:
    """Put tiles in rows, as many in each as the picture says."""
    across = picture.across or min(TILES_ACROSS, math.ceil(math.sqrt(2 * len(picture.tiles))))
    panels = [Panel(colours(tile.pixels), tile.name) for tile in picture.tiles]
    return [panels[at : at + across] for at in range(0, len(panels), across)]


def map_rows(picture: Picture, layers: Choice, heads: Choice) -> list[list[Panel]]:
    """Lay chosen heads over the photo, after the photo itself and what has no heads."""
    assert picture.photo is not None
    chosen = choose_views(picture, layers)
    if not chosen.views:
        raise UsageError("there is no attention to draw in this picture; choose view=filters")
    if all(view.kind == "cross" for view in chosen.views):
        return word_rows(chosen, layers, heads)
    if heads is None:
        many = 1 + sum(len(view.heads) for view in chosen.views) > MOST_PANELS
        heads = "mean" if many else "all"
    views = choose_views(chosen, heads=heads).views
    photo = colours(picture.photo)
    first, groups = [Panel(photo, caption_of(picture.spot))], []
    single = all(len(view.heads) == 1 for view in views)
    for view in views:
        panels = panels_of(view, photo, picture.spot, single)
        if single or view.kind == "rollout":
            first += panels
        else:
            cut = [panels[at : at + ACROSS] for at in range(0, len(panels), ACROSS)]
            above = f"{view.name}, even {even_share(view):.2g}"
            groups += [[g[0]._replace(above=above, room=len(g)), *g[1:]] for g in cut]
    return fitted([[panel] for panel in first]) + fitted(groups)


def word_rows(picture: Picture, layers: Choice, heads: Choice) -> list[list[Panel]]:
    """Lay over the photo where each word of a caption looked: a panel for each.

    Unless told, by the mean of heads of the layer that is to be seen first.
    """
    assert picture.photo is not None
    first = picture.opens[0] if picture.opens else ""
    views = choose_views(picture, heads=heads or "mean").views
    views = [view for view in views if layers or view.name == first] or [views[-1]]
    photo = colours(picture.photo)
    single = len(views) == 1 and len(views[0].heads) == 1
    panels = [Panel(photo, "")]
    for view in views:
        for head, name in enumerate(view.heads):
            one = replace(view, weights=view.weights[head : head + 1], heads=(name,))
            for row, word in enumerate(view.row_tokens):
                (found,) = on_grid(one, row)
                top = float(found.max())
                pixels = glow(photo, found / (top or 1.0), view)
                caption = f"≤{top:.2g}" if single else f"{view.name}, {name} ≤{top:.2g}"
                panels.append(Panel(pixels, caption, above=word))
    return fitted([[panel] for panel in panels])


def fitted(groups: Sequence[list[Panel]]) -> list[list[Panel]]:
    """Put groups into rows, several in one where they fit beside each other."""
    most = max([FEW_ACROSS, *map(len, groups)])
    rows: list[list[Panel]] = []
    for group in groups:
        if rows and len(rows[-1]) + len(group) <= most:
            rows[-1] += group
        else:
            rows.append(list(group))
    return rows


def panels_of(view: View, photo: np.ndarray, spot: Spot, single: bool) -> list[Panel]:
    """Return a panel for each head of a layer."""
    frame, panels = frame_of(view, spot), []
    rolled = view.kind == "rollout"
    for head, found in zip(view.heads, on_grid(view, spot), strict=True):
        top = float(found.max())
        # a token that stays itself through all layers would leave the others dark
        shown = np.sqrt(found / (top or 1.0)) if rolled else found / (top or 1.0)
        name = f"head {head}" if str(head).isdecimal() else str(head)
        caption = f"{name} ≤{top:.2g}" + (", root" if rolled else "")
        above = f"{view.name}, even {even_share(view):.2g}" if single or rolled else ""
        panels.append(Panel(overlay(photo, shown, view), caption, frame, above))
    return panels


def even_share(view: View) -> float:
    """Return what each place would get of a look that tells none from another."""
    assert view.laid is not None
    return 1 / max(1.0, float((view.laid.sees >= 0).sum(1).mean()))


def caption_of(spot: Spot) -> str:
    """Say from where the maps are."""
    return {"class": "from the class token, or all", "mean": "the mean from all places"}.get(
        spot if isinstance(spot, str) else "", "from the framed place"
    )


def frame_of(view: View, spot: Spot) -> tuple[float, float, float, float] | None:
    """Return where on the image the cell is that asks."""
    laid = view.laid
    assert laid is not None
    row = row_at(laid, spot)
    cell = None if row is None else cell_of(laid.rows, int(laid.asks[row]))
    if cell is None:
        return None
    lattice = laid.rows
    return cell[1] * lattice.right, cell[0] * lattice.down, lattice.right, lattice.down


def colours(pixels: np.ndarray) -> np.ndarray:
    """Return an image in red, green and blue."""
    return np.repeat(pixels[..., None], 3, 2) if pixels.ndim == 2 else pixels


def overlay(photo: np.ndarray, found: np.ndarray, view: View) -> np.ndarray:
    """Lay a map of numbers from 0 to 1 over a photo that is paled for it."""
    assert view.laid is not None
    share = SIDE / max(photo.shape[:2])
    high, wide = (max(1, round(share * side)) for side in photo.shape[:2])
    how = Image.Resampling.NEAREST if share > 1 else Image.Resampling.LANCZOS
    shown = np.asarray(Image.fromarray(photo).resize((wide, high), how), np.float32) / 255
    base = 0.62 * (0.7 * shown.mean(2, keepdims=True) + 0.3 * shown)
    lattice = view.laid.columns
    # pixels beyond the last whole cell are not seen at all
    found = np.pad(found, ((0, 1), (0, 1)))
    alpha = (0.12 + 0.8 * np.sqrt(found))[..., None].astype(np.float32)
    colour = HEAT(found)[..., :3].astype(np.float32) * alpha
    rows = ((np.arange(high) + 0.5) / high / lattice.down).astype(int).clip(max=lattice.height)
    columns = ((np.arange(wide) + 0.5) / wide / lattice.right).astype(int).clip(max=lattice.width)
    mixed = base * (1 - alpha[rows[:, None], columns]) + colour[rows[:, None], columns]
    return (255 * mixed).round().astype(np.uint8)


def glow(photo: np.ndarray, found: np.ndarray, view: View) -> np.ndarray:
    """Light a photo where a map of numbers from 0 to 1 is high, smoothly between its cells."""
    assert view.laid is not None
    share, lattice = SIDE / max(photo.shape[:2]), view.laid.columns
    high, wide = (max(1, round(share * side)) for side in photo.shape[:2])
    shown = np.asarray(Image.fromarray(photo).resize((wide, high), Image.Resampling.LANCZOS))
    grid = Image.fromarray(found.astype(np.float32))
    over = round(lattice.width * lattice.right * wide), round(lattice.height * lattice.down * high)
    smooth = np.asarray(grid.resize(over, Image.Resampling.BICUBIC)).clip(0, 1)
    light = np.zeros((high, wide), np.float32)
    light[: over[1], : over[0]] = smooth[:high, :wide]
    light = light[..., None]
    base = shown.astype(np.float32) / 255
    mixed = base * (0.3 + 0.7 * light) + 0.25 * light * HEAT(light[..., 0])[..., :3]
    return (255 * mixed.clip(0, 1)).round().astype(np.uint8)


def render(picture: Picture, rows: Sequence[Sequence[Panel]]) -> bytes:
    """Lay the panels out in rows and return the PNG's bytes."""
    # Sizes in inches, laid out by hand as those of the other pictures.
    most = max(map(len, rows))
    tall, wide = rows[0][0].pixels.shape[:2]
    side = max(0.45 if picture.tiles else 1.2, min(2.6, 11.0 / most))
    if picture.tiles and not picture.across:
        side = min(side, 0.75)
    high, step = side * tall / wide, side + 0.1
    told = [line for line in (picture.output and f"→ {picture.output}", picture.note) if line]
    panels = [panel for row in rows for panel in row]
    words = [picture.title, *told, *(word for p in panels for word in (p.caption, p.above))]
    fonts, missing = fonts_for("".join(sorted(set("".join(map(show_token, words))))))
    named = [LINE_HIGH if any(panel.above for panel in row) else 0.0 for row in rows]
    scaled = bool(picture.views)
    width = max(2 * MARGIN + most * step, 5.5)
    height = 0.5 + 0.2 * len(told) + sum(named) + len(rows) * (high + LINE_HIGH) + MARGIN
    height += BAR_HIGH * scaled
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)

    def write(text: str, left: float, up: float, room: float, size: float, ink: str) -> None:
        fits = max(2, int(room / (0.6 * size / 72)))
        text = show_token(text) if text else ""
        text = text if len(text) <= fits else text[: fits - 1] + "…"
        figure.text(left / width, up / height, spell(text, missing), **style(fonts, size, ink))

    upper = height - 0.32
    for number, word in enumerate([picture.title, *told]):
        ink, size = (SOFT, 8) if number else (INK, 11)
        write(word, MARGIN, upper, width - 2 * MARGIN, size, ink)
        upper -= 0.2
    for row, above in zip(rows, named, strict=True):
        upper -= above
        for number, panel in enumerate(row):
            left = MARGIN + number * step
            box = left / width, (upper - high) / height, side / width, high / height
            draw_panel(figure.add_axes(box, xticks=[], yticks=[], frame_on=False), panel)
            write(panel.caption, left, upper - high - 0.13, step, 7 if side >= 1 else 5, SOFT)
            if panel.above:
                write(panel.above, left, upper + 0.05, panel.room * step, 8, INK)
        upper -= high + LINE_HIGH
    if scaled:  # the scale: the same colours for all, each up to its own largest weight
        box = (MARGIN + 0.15) / width, (upper - 0.05) / height, 1.2 / width, 0.1 / height
        bar = figure.add_axes(box, xticks=[], yticks=[], frame_on=False)
        bar.imshow(np.linspace(0, 1, 256)[None], cmap=HEAT, aspect="auto", extent=(0, 1, 0, 1))
        write("0", MARGIN, upper - 0.05, 0.2, 7, SOFT)
        text = "≤ the number under each map; even: what looking everywhere alike would give"
        write(text, MARGIN + 1.45, upper - 0.05, width - 1.5, 7, SOFT)
    stream = BytesIO()
    dpi = min(DPI, math.sqrt(MOST_PIXELS / width / height))
    figure.savefig(stream, format="png", dpi=dpi)
    return stream.getvalue()


def draw_panel(place: Axes, panel: Panel) -> None:
    """Draw one image and its frame."""
    place.imshow(panel.pixels, extent=(0, 1, 1, 0), aspect="auto", interpolation="nearest")
    if panel.frame is not None:
        x, y, w, h = panel.frame
        place.plot([x, x + w, x + w, x, x], [y, y, y + h, y + h, y], color=MARK, linewidth=1.2)
        place.set(xlim=(0, 1), ylim=(1, 0))
