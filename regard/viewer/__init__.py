"""Pictures of attention: one HTML file to explore, PNG to print, inline in a notebook."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.viewer.drawing import Drawing, Plot, draw_plots, inline_image, still_page
    from regard.viewer.image import filters as first_filters
    from regard.viewer.notebook import Look, draw, save
    from regard.viewer.overlays import draw_overlays
    from regard.viewer.panels import BLUES, LINE, SOFT, Panel, Sheet, draw_gallery
    from regard.viewer.picture import Picture, Step, Tile, ValueTable, View, choose_views
    from regard.viewer.plot import DOT, SEED, plain

__all__ = [
    "BLUES",
    "DOT",
    "LINE",
    "SEED",
    "SOFT",
    "Drawing",
    "Look",
    "Panel",
    "Picture",
    "Plot",
    "Sheet",
    "Step",
    "Tile",
    "ValueTable",
    "View",
    "choose_views",
    "draw",
    "draw_gallery",
    "draw_overlays",
    "draw_plots",
    "first_filters",
    "inline_image",
    "plain",
    "save",
    "still_page",
]
# modules that define these names, imported when one is asked for: most of them draw, which takes
# matplotlib
_HOMES = ("drawing", "notebook", "overlays", "panels", "picture", "plot")


def __getattr__(name: str) -> Any:
    """What a module of the package defines under a name."""
    if name == "first_filters":
        return import_module("regard.viewer.image").filters
    if name in __all__:
        modules = (import_module(f"regard.viewer.{home}") for home in _HOMES)
        return next(getattr(module, name) for module in modules if hasattr(module, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
