"""The filters of a model's first layer."""

from dataclasses import dataclass

import numpy as np

from regard import UsageError, load
from regard.gallery.drawn import Drawn
from regard.settings import setting
from regard.viewer import Drawing, Picture, draw_overlays, first_filters


@dataclass(frozen=True)
class FilterPictureSettings(Drawn):
    """Settings of the first layer's filters."""

    model: str = setting("fashion", "model that sees: a folder or a starter")


def draw(settings: FilterPictureSettings) -> Drawing:
    """Draw the filters of the first layer, the strongest first."""
    task = load(settings.model)
    if task.inputs.name != "image":
        raise UsageError(
            f"model={settings.model} does not read images, so its first layer is no picture; "
            "choose one that does, such as fashion"
        )
    title = f"{settings.model}: what the first layer looks for, the strongest first"
    tiles = first_filters(getattr(task.model, "encoder", task.model))
    pixels = [tile.pixels.astype(float) / 255 for tile in tiles]
    rough = [_roughness(one if one.ndim == 2 else one.mean(2)) for one in pixels]
    numbers = {
        f"{len(tiles)} filters of {pixels[0].shape[1]} x {pixels[0].shape[0]}": {
            "smoothest": min(rough),
            "mean roughness": sum(rough) / len(rough),
            "roughest": max(rough),
        }
    }
    notes = (
        "Grey is zero; each filter is scaled to its own largest weight. Roughness is the mean "
        "squared difference of neighbouring weights over twice their variance: 1 for noise, near "
        "0 for a smooth filter.",
    )
    return Drawing(title, numbers, notes, draw_overlays(Picture(title, tiles=tiles)))


def _roughness(filter: np.ndarray) -> float:
    """Return the mean squared difference of neighbours over twice the variance."""
    differences = [np.diff(filter, axis=axis).ravel() ** 2 for axis in (0, 1)]
    return float(np.concatenate(differences).mean() / max(2 * filter.var(), 1e-12))
