"""What each layer of a model of images sees: its receptive field, and what its channels like best.

The field of a place is where a pixel moves it, by gradient; what a channel wants to see are the
patches of one's own images that move it most, each as large as the field of its place.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.intervene import change
from regard.data.parts import PARTS
from regard.errors import UsageError, nearest
from regard.models.vision import ConvolutionModel
from regard.settings import setting
from regard.tasks.runner import Runner

_BATCH = 64  # images that are read at once


@dataclass(frozen=True)
class SeenImages:
    """The layers of a model, and the images over which they are looked into."""

    data: str | None = setting(None, "images that the model looks at: a folder or a file")
    part: str = setting("train", "the part of the data", choices=PARTS)
    images: int = setting(1000, "images to look at, spread over the part", min=1, max=100_000)
    layers: tuple[str, ...] = setting((), "layers, such as stem,blocks.1; some evenly unless given")


def seen_images(task: Runner[Any], settings: SeenImages) -> Tensor:
    """Bytes (n, c, h, w) of images that are spread over a part of the data."""
    rows = task.read_part_of(str(settings.data), settings.part)[settings.part]
    if not hasattr(rows, "read"):
        raise UsageError(f"data={settings.data}: no images of which some can be read")
    return rows.read(np.unique(np.linspace(0, len(rows) - 1, settings.images).astype(np.int64)))


def pull(vectors: Tensor, inputs: Tensor, direction: Tensor, keep: bool = False) -> Tensor:
    """By how much each number of the inputs moves vectors (b, c) along a direction."""
    (gradient,) = torch.autograd.grad((vectors * direction).sum(), inputs, retain_graph=keep)
    return gradient.abs()


class Box(NamedTuple):
    """A part of an image, in pixels; the last two edges lie just outside it."""

    top: int
    left: int
    bottom: int
    right: int

    @property
    def side(self) -> int:
        """The longer side."""
        return max(self.bottom - self.top, self.right - self.left)


def held_in(field: Tensor, share: float = 1.0) -> Box:
    """The smallest square that holds a share of a field (h, w), or all that is not zero of it."""
    rows, columns = ((field != 0).any(axis).nonzero().flatten() for axis in (1, 0))
    if not len(rows):  # a rectifier passes nothing on
        return Box(0, 0, *field.shape)
    whole = Box(int(rows[0]), int(columns[0]), int(rows[-1]) + 1, int(columns[-1]) + 1)
    inside = field[whole.top : whole.bottom, whole.left : whole.right].double()
    for side in range(1, whole.side if share < 1 else 0):
        high, wide = (min(side, most) for most in inside.shape)
        sums = F.avg_pool2d(inside[None, None], (high, wide), 1, divisor_override=1)[0, 0]
        if sums.max() >= share * inside.sum():
            row, column = divmod(int(sums.argmax()), sums.shape[1])
            top, left = whole.top + row, whole.left + column
            return Box(top, left, top + high, left + wide)
    return whole


# The layers of a model


def encoder_of(model: nn.Module) -> Any:
    """The part of a model that reads images: its encoder, or the model itself."""
    found = getattr(model, "encoder", model)
    if not hasattr(found, "features") or not hasattr(found, "stem"):
        raise UsageError("this model has no layers over an image; choose one of a vision family")
    return found


def grid_layers(encoder: nn.Module) -> list[str]:
    """Names of the layers of an encoder that lie over an image: its stem, and then its blocks."""
    names = ["stem"]
    for outer, several in encoder.named_modules():
        if isinstance(several, nn.ModuleList) and not any(outer.startswith(f"{n}.") for n in names):
            rows = several.named_children()
            names += [f"{outer}.{n}" for n, row in rows if not isinstance(row, nn.ModuleList)]
    return names


def chosen_layers(encoder: nn.Module, wanted: Sequence[str], most: int) -> list[str]:
    """Layers that are named, or so many of all, evenly, with the first and the last."""
    known = grid_layers(encoder)
    for name in wanted:
        if name not in known:
            raise UsageError(
                f"layers={name}: expected some of {', '.join(known)}{nearest(name, known)}"
            )
    few = min(most, len(known))
    evenly = {round(n * (len(known) - 1) / max(1, few - 1)) for n in range(few)}
    return list(wanted) or [known[n] for n in sorted(evenly)]


def grids(encoder: Any, images: Tensor, layers: Sequence[str]) -> dict[str, Tensor]:
    """What layers make of images (b, c, h, w) at each place: (b, rows, columns, channels)."""
    seen: dict[str, Tensor] = {}

    def keeper(name: str) -> Callable[[Tensor], Tensor]:
        def keep(x: Tensor) -> Tensor:
            seen[name] = x
            return x

        return keep

    with change(encoder, {f"{name}.out": keeper(name) for name in layers}):
        encoder.features(images)
    return {name: _laid_out(seen[name], encoder) for name in layers}


def _laid_out(x: Tensor, encoder: nn.Module) -> Tensor:
    if x.ndim == 4:
        return x.permute(0, 2, 3, 1) if isinstance(encoder, ConvolutionModel) else x
    side = math.isqrt(x.shape[1])  # a token before the grid makes no larger square of it
    return x[:, x.shape[1] - side * side :].unflatten(1, (side, side))


def fields(
    encoder: Any, images: Tensor, layers: Sequence[str], generator: torch.Generator
) -> dict[str, Tensor]:
    """By how much each pixel moves the place in the middle of a layer: (h, w), the mean of images.

    Each image has a random direction of the channels of its own.
    """
    images = images.clone().requires_grad_()
    with torch.enable_grad():
        found = grids(encoder, images, layers)
        fields = {}
        for name, x in found.items():
            middle = x[:, x.shape[1] // 2, x.shape[2] // 2]
            direction = torch.randn(middle.shape, generator=generator)
            fields[name] = pull(middle, images, direction, keep=True).sum(1).mean(0)
    return fields


# What channels want to see


class Patch(NamedTuple):
    """A part of an image that moves a channel: how much, of which image, and where it lies."""

    value: float
    image: int
    box: Box


class Liking(NamedTuple):
    """A channel and the patches that move it most, the best first."""

    channel: int
    patches: list[Patch]


def favourites(
    encoder: Any,
    read: Callable[[Sequence[int]], Tensor],
    count: int,
    layer: str,
    *,
    channels: int,
    patches: int,
    share: float = 1.0,
) -> list[Liking]:
    """Find the patches of images that move the channels of a layer most, one of each image.

    The channels are those that stand out most: whose best patches are furthest above their mean,
    in deviations.

    Args:
        encoder: encoder of a model
        read: images (b, c, h, w) by their numbers, as the model reads them
        count: number of images
        layer: name of a layer
        channels: channels to find
        patches: patches of each
        share: share of what moves the channel that a patch holds
    """
    best, where = [], []
    for start in range(0, count, _BATCH):
        with torch.no_grad():
            images = read(range(start, min(count, start + _BATCH)))
            x = grids(encoder, images, [layer])[layer].flatten(1, 2)
        values, places = x.max(1)
        best.append(values)
        where.append(places)
    values, places = torch.cat(best), torch.cat(where)
    top, rows = values.topk(min(patches, count), 0)
    deviation = values.std(0, correction=0)
    apart = (top.mean(0) - values.mean(0)) / deviation.clamp(min=1e-12)
    living = (deviation > 1e-6 * values.abs().amax()).nonzero().flatten()
    if not len(living):
        raise UsageError(
            f"no channel of {layer} tells the {count} images apart; look at more with images="
        )
    order = living[apart[living].argsort(descending=True, stable=True)]
    likings = []
    for channel in order[:channels].tolist():
        numbers = rows[:, channel].tolist()
        spots = places[rows[:, channel], channel]
        moved = _moved(encoder, read(numbers), layer, spots, channel)
        told = zip(top[:, channel].tolist(), numbers, moved, strict=True)
        likings.append(Liking(channel, [Patch(v, n, held_in(f, share)) for v, n, f in told]))
    return likings


def _moved(encoder: Any, images: Tensor, layer: str, spots: Tensor, channel: int) -> Tensor:
    """By how much each pixel moves a channel of a layer at one place of each image: (b, h, w)."""
    images = images.clone().requires_grad_()
    with torch.enable_grad():
        x = grids(encoder, images, [layer])[layer].flatten(1, 2)
        at = x[torch.arange(len(x)), spots, channel]
        return pull(at, images, torch.ones_like(at)).sum(1)
