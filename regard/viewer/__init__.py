"""Pictures of attention: one HTML file to explore, PNG to print, inline in a notebook."""

from regard.viewer.notebook import Look, draw, save
from regard.viewer.picture import Picture, Step, View, choose_views

__all__ = ["Look", "Picture", "Step", "View", "choose_views", "draw", "save"]
