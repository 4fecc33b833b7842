"""Pictures of attention: one HTML file to explore, PNG to print, inline in a notebook."""

from regard.viewer.drawing import Drawing, Plot, draw_plots
from regard.viewer.image import filters as first_filters
from regard.viewer.notebook import Look, draw, save
from regard.viewer.overlays import draw_overlays
from regard.viewer.panels import BLUES, LINE, SOFT, Panel, Sheet, draw_gallery
from regard.viewer.picture import Picture, Step, Table, View, choose_views
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
    "Table",
    "View",
    "choose_views",
    "draw",
    "draw_gallery",
    "draw_overlays",
    "draw_plots",
    "first_filters",
    "plain",
    "save",
]
