"""What the layers of a model look for: the filters of the first, and what channels like best."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import UsageError, load
from regard.api import load_with_data
from regard.gallery.drawn import Drawn
from regard.insight import Liking, SeenImages, chosen_layers, encoder_of, favourites, seen_images
from regard.settings import setting
from regard.viewer import Drawing, Picture, Tile, draw_overlays, first_filters

_LAYERS = 4  # that are drawn unless they are named
_SIDE = 192  # pixels of a mosaic, at least


@dataclass(frozen=True)
class FilterPictureSettings(SeenImages, Drawn):
    """Settings of what the layers of a model look for."""

    model: str = setting("fashion", "model that sees: a folder or a starter")
    channels: int = setting(8, "with data: channels of a layer", min=1, max=64)
    patches: int = setting(9, "with data: patches of a channel", min=1, max=64)
    held: float = setting(
        1.0, "share of what moves a channel that a patch holds: 1 is all of it", above=0, max=1
    )


def seeing(model: str) -> Any:
    """Load a model that reads images."""
    task = load(model)
    if task.inputs.name != "image":
        raise UsageError(
            f"model={model} does not read images, so its first layer is no picture; "
            "choose one that does, such as fashion"
        )
    return task


def draw(settings: FilterPictureSettings) -> Drawing:
    """Draw the filters of the first layer, the strongest first; with data, what channels like."""
    task = seeing(settings.model)
    return _filters(task, settings) if settings.data is None else _likings(task, settings)


def _filters(task: Any, settings: FilterPictureSettings) -> Drawing:
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


def _likings(task: Any, settings: FilterPictureSettings) -> Drawing:
    path = load_with_data(task, settings.data)[1]
    encoder, raws = encoder_of(task.model), seen_images(task, replace(settings, data=path))
    shown = raws.permute(0, 2, 3, 1).numpy()

    def read(numbers: Sequence[int]) -> Tensor:
        return task.inputs.collate(raws[list(numbers)], task.format)[0]

    tiles, numbers = [], {}
    with torch.inference_mode(False):
        for layer in chosen_layers(encoder, settings.layers, _LAYERS):
            found = favourites(
                encoder,
                read,
                len(raws),
                layer,
                channels=settings.channels,
                patches=settings.patches,
                share=settings.held,
            )
            side = max(p.box.side for liking in found for p in liking.patches)
            tiles += [
                Tile(f"{layer}, {liking.channel}", _mosaic(shown, liking, side)) for liking in found
            ]
            numbers |= {
                f"{layer}, {liking.channel}": {
                    "best patch": liking.patches[0].value,
                    "largest side": float(max(p.box.side for p in liking.patches)),
                }
                for liking in found
            }
    title = f"{settings.model}: what channels want to see"
    held = "all" if settings.held == 1 else f"{settings.held:.0%}"
    note = (
        f"A mosaic for each channel: of {len(raws):,} images those that move it most, cut to the "
        f"square with {held} of what moves it; grey fills up smaller ones."
    )
    picture = Picture(title, tiles=tiles, tiles_per_row=settings.channels, note=note)
    return Drawing(title, numbers, (note,), draw_overlays(picture))


def _mosaic(images: np.ndarray, liking: Liking, side: int) -> np.ndarray:
    """Patches in a square, each in the middle of its cell and with a line around it."""
    across = math.ceil(math.sqrt(len(liking.patches)))
    down = math.ceil(len(liking.patches) / across)
    grey, white = 128, 255
    whole = np.full((down * (side + 1) - 1, across * (side + 1) - 1, 3), white, np.uint8)
    for number, patch in enumerate(liking.patches):
        top, left = (place * (side + 1) for place in divmod(number, across))
        cell = whole[top : top + side, left : left + side]
        cell[:], box = grey, patch.box
        pixels = images[patch.image, box.top : box.bottom, box.left : box.right]
        high, wide = pixels.shape[:2]
        y, x = (side - high) // 2, (side - wide) // 2
        cell[y : y + high, x : x + wide] = pixels
    times = -(-_SIDE // max(whole.shape))
    return whole.repeat(times, 0).repeat(times, 1)
