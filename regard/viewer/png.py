"""A picture of attention as one PNG."""

from __future__ import annotations

from pathlib import Path

from regard.errors import UsageError
from regard.files import write_atomically
from regard.viewer.heatmaps import draw_heat_maps
from regard.viewer.overlays import draw_overlays
from regard.viewer.panels import DPI
from regard.viewer.picture import Choice, Picture

FINE_DPI = 160  # for the small labels of heat maps


def draw(
    picture: Picture,
    path: str | Path | None = None,
    layers: Choice = None,
    heads: Choice = None,
) -> bytes:
    """Draw chosen layers and heads, over the photo if there is one, and return (and save) the PNG.

    A row is a layer, a panel a head. Unless given, all heads are shown, or their mean where they
    would be too many.
    """
    of_image = picture.photo is not None or bool(picture.tiles)
    if not picture.views and not picture.tiles:
        remedy = "choose view=filters" if of_image else "save it as .html instead"
        raise UsageError(f"there is no attention to draw in this picture; {remedy}")
    sheet = (draw_overlays if of_image else draw_heat_maps)(picture, layers, heads)
    png = sheet.png(DPI if of_image else FINE_DPI)
    if path is not None:
        write_atomically(path, png)
    return png
