"""Attention over a photo: a row for each layer, a panel for each head."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from PIL import Image

from regard.layers.layout import TokenGrid
from regard.viewer.panels import HEAT, MARGIN, MAX_PANELS, NOTE, SOFT, Panel, Sheet, lay_out
from regard.viewer.picture import Choice, Picture, QueryPoint, View, choose_views
from regard.viewer.placement import cell_of, grid_weights, placement_of, query_row

_SIDE = 320  # pixels to a side that a map is drawn with, at most
_MAX_ACROSS, _MIN_ACROSS = 12, 6
_TILES_ACROSS = 16
_QUERIES: dict[QueryPoint, str] = {
    "class": "from the class token, or all",
    "mean": "the mean from all places",
}
_SCALE = "≤ the number under each map; even: the weight if attention were uniform"


def overlay_rows(picture: Picture, layers: Choice, heads: Choice) -> list[list[Panel]]:
    """Lay chosen heads over the photo, after the photo itself and what has no heads."""
    if picture.tiles:
        return tile_rows(picture)
    assert picture.photo is not None
    chosen = choose_views(picture, layers)
    if all(view.kind == "cross" for view in chosen.views):
        return caption_rows(chosen, layers, heads)
    if heads is None:
        many = 1 + sum(len(view.heads) for view in chosen.views) > MAX_PANELS
        heads = "mean" if many else "all"
    views = choose_views(chosen, heads=heads).views
    photo = as_rgb(picture.photo)
    first, groups = [Panel(photo, _QUERIES.get(picture.query, "from the framed place"))], []
    single = all(len(view.heads) == 1 for view in views)
    for view in views:
        panels = head_panels(view, photo, picture.query)
        heading = f"{view.name}, even {uniform_weight(view):.2g}"
        if single or view.kind == "rollout":
            first += [replace(panel, heading=heading) for panel in panels]
        else:
            for at in range(0, len(panels), _MAX_ACROSS):
                head, *rest = panels[at : at + _MAX_ACROSS]
                groups.append([replace(head, heading=heading, span=1 + len(rest)), *rest])
    return fill_rows([[panel] for panel in first]) + fill_rows(groups)


def tile_rows(picture: Picture) -> list[list[Panel]]:
    """Put tiles in rows, as many in each as the picture says."""
    tiles = picture.tiles
    across = picture.tiles_per_row or min(_TILES_ACROSS, math.ceil(math.sqrt(2 * len(tiles))))
    panels = [Panel(as_rgb(tile.pixels), tile.name) for tile in tiles]
    return [panels[at : at + across] for at in range(0, len(panels), across)]


def caption_rows(picture: Picture, layers: Choice, heads: Choice) -> list[list[Panel]]:
    """Lay over the photo what each word of a caption attends to: a panel for each.

    Unless given, by the mean of heads of the layer that is to be seen first.
    """
    assert picture.photo is not None
    first = picture.opens[0] if picture.opens else ""
    views = choose_views(picture, heads=heads or "mean").views
    views = [view for view in views if layers or view.name == first] or [views[-1]]
    photo = as_rgb(picture.photo)
    single = len(views) == 1 and len(views[0].heads) == 1
    panels = [Panel(photo, "")]
    for view in views:
        grid = placement_of(view).key_grid
        words = [(word, grid_weights(view, row)) for row, word in enumerate(view.row_tokens)]
        for head, name in enumerate(view.heads):
            for word, weights in words:
                top = float(weights[head].max())
                caption = f"≤{top:.2g}" if single else f"{view.name}, {name} ≤{top:.2g}"
                pixels = glow(photo, weights[head] / (top or 1.0), grid)
                panels.append(Panel(pixels, caption, heading=word))
    return fill_rows([[panel] for panel in panels])


def fill_rows(groups: Sequence[list[Panel]]) -> list[list[Panel]]:
    """Put groups into rows, several in one where they fit beside each other."""
    most = max([_MIN_ACROSS, *map(len, groups)])
    rows: list[list[Panel]] = []
    for group in groups:
        if rows and len(rows[-1]) + len(group) <= most:
            rows[-1] += group
        else:
            rows.append(list(group))
    return rows


def head_panels(view: View, photo: np.ndarray, query: QueryPoint) -> list[Panel]:
    """Panel for each head of a layer."""
    placement, panels = placement_of(view), []
    row, frame = query_row(placement, query), None
    cell = row is not None and cell_of(placement.query_grid, int(placement.query_tokens[row]))
    if cell:
        high, wide = placement.query_grid.cell_height, placement.query_grid.cell_width
        frame = cell[1] * wide, cell[0] * high, wide, high
    rolled = view.kind == "rollout"
    for head, weights in zip(view.heads, grid_weights(view, query), strict=True):
        top = float(weights.max())
        # a token that stays itself through all layers would leave the others dark
        shown = np.sqrt(weights / (top or 1.0)) if rolled else weights / (top or 1.0)
        name = f"head {head}" if str(head).isdecimal() else str(head)
        caption = f"{name} ≤{top:.2g}" + (", root" if rolled else "")
        panels.append(Panel(overlay(photo, shown, placement.key_grid), caption, frame))
    return panels


def uniform_weight(view: View) -> float:
    """Weight of each key under uniform attention."""
    return 1 / max(1.0, float((placement_of(view).key_tokens >= 0).sum(1).mean()))


def as_rgb(pixels: np.ndarray) -> np.ndarray:
    """Image (h, w) or (h, w, 3) in red, green and blue."""
    return np.repeat(pixels[..., None], 3, 2) if pixels.ndim == 2 else pixels


def _resized(photo: np.ndarray, enlarge: Image.Resampling) -> np.ndarray:
    """Bring the longer side of a photo to SIDE pixels, as numbers from 0 to 1."""
    share = _SIDE / max(photo.shape[:2])
    high, wide = (max(1, round(share * side)) for side in photo.shape[:2])
    method = enlarge if share > 1 else Image.Resampling.LANCZOS
    return np.asarray(Image.fromarray(photo).resize((wide, high), method), np.float32) / 255


def overlay(photo: np.ndarray, weights: np.ndarray, grid: TokenGrid) -> np.ndarray:
    """Lay weights (h, w) from 0 to 1 in the cells of a grid over a photo that is paled for it."""
    shown = _resized(photo, Image.Resampling.NEAREST)
    high, wide = shown.shape[:2]
    base = 0.62 * (0.7 * shown.mean(2, keepdims=True) + 0.3 * shown)
    # pixels beyond the last whole cell are not seen at all
    weights = np.pad(weights, ((0, 1), (0, 1)))
    alpha = (0.12 + 0.8 * np.sqrt(weights))[..., None].astype(np.float32)
    colour = HEAT(weights)[..., :3].astype(np.float32) * alpha
    rows = ((np.arange(high) + 0.5) / high / grid.cell_height).astype(int).clip(max=grid.height)
    columns = ((np.arange(wide) + 0.5) / wide / grid.cell_width).astype(int).clip(max=grid.width)
    mixed = base * (1 - alpha[rows[:, None], columns]) + colour[rows[:, None], columns]
    return (255 * mixed).round().astype(np.uint8)


def glow(photo: np.ndarray, weights: np.ndarray, grid: TokenGrid) -> np.ndarray:
    """Light a photo where weights (h, w) from 0 to 1 are high, smoothly between their cells."""
    base = _resized(photo, Image.Resampling.LANCZOS)
    high, wide = base.shape[:2]
    over = round(grid.width * grid.cell_width * wide), round(grid.height * grid.cell_height * high)
    cells = Image.fromarray(weights.astype(np.float32))
    smooth = np.asarray(cells.resize(over, Image.Resampling.BICUBIC)).clip(0, 1)
    light = np.zeros((high, wide), np.float32)
    light[: over[1], : over[0]] = smooth[:high, :wide]
    light = light[..., None]
    mixed = base * (0.3 + 0.7 * light) + 0.25 * light * HEAT(light[..., 0])[..., :3]
    return (255 * mixed.clip(0, 1)).round().astype(np.uint8)


def draw_overlays(picture: Picture, layers: Choice = None, heads: Choice = None) -> Sheet:
    """Draw chosen heads over the photo, with the scale of their colours; or tiles."""
    rows = overlay_rows(picture, layers, heads)
    high, wide = rows[0][0].pixels.shape[:2]
    side = max(0.45 if picture.tiles else 1.2, min(2.6, 11.0 / max(map(len, rows))))
    if picture.tiles and not picture.tiles_per_row:
        side = min(side, 0.75)
    sheet = lay_out(
        picture.title,
        rows,
        lambda _: (side, side * high / wide),
        notes=[line for line in (picture.output and f"→ {picture.output}", picture.note) if line],
        words=[_SCALE],
        bottom=0.35 if picture.views else MARGIN,
        letters=7 if side >= 1 else 5,
        min_width=5.5,
    )
    if picture.views:  # the same colours for all, each up to its own largest weight
        down = sheet.height - 0.15 - NOTE * bool(sheet.missing)
        bar = sheet.axes(MARGIN + 0.15, down - 0.08, 1.2, 0.1, xticks=[], yticks=[], frame_on=False)
        bar.imshow(np.linspace(0, 1, 256)[None], cmap=HEAT, aspect="auto", extent=(0, 1, 0, 1))
        sheet.write("0", MARGIN, down, 7, SOFT)
        sheet.write(_SCALE, MARGIN + 1.45, down, 7, SOFT, sheet.width - 1.75)
    return sheet
