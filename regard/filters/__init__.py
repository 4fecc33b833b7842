"""Image filters by name: weighted averages of pixels, from fixed weights to attention."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from regard.attention.watch import Watched
from regard.filters.bilateral import bilateral, bilateral_weights
from regard.filters.diffusion import (
    MAX_STEP,
    heat,
    heat_weights,
    perona_malik,
    perona_malik_weights,
)
from regard.filters.gaussian import gaussian, gaussian_weights
from regard.filters.guided import joint_bilateral, joint_bilateral_weights
from regard.filters.nonlocal_means import nonlocal_means, nonlocal_means_weights
from regard.filters.photo import (
    as_rgb,
    check_suffix,
    crop_of,
    image_panel,
    parse_pixel,
    read_photo,
    save_photo,
    weights_panel,
)
from regard.filters.pixels import planes
from regard.filters.variation import total_variation, total_variation_weights

F = TypeVar("F", bound=Callable[..., Tensor])


def watched(function: F, weights: Callable[..., Tensor]) -> F:
    """A filter that `regard.watch` can watch, whose weights of each pixel are a row of its map."""

    def shape(image: Tensor) -> tuple[int, int, int, int]:
        pixels = image.shape[-1] * image.shape[-2]
        return len(planes(image)), 1, pixels, pixels

    def rows(image: Tensor, number: int, span: slice, **settings: Any) -> Tensor:
        one, wide = planes(image)[number], image.shape[-1]
        if "guide" in settings:
            guides = planes(settings["guide"])
            settings["guide"] = guides[number if len(guides) > 1 else 0]
        pixels = ((n % wide, n // wide) for n in range(span.start, span.stop))
        return torch.stack([weights(one, at, **settings).flatten() for at in pixels])

    return cast(F, Watched(function, shape, rows))


gaussian = watched(gaussian, gaussian_weights)
heat = watched(heat, heat_weights)
perona_malik = watched(perona_malik, perona_malik_weights)
total_variation = watched(total_variation, total_variation_weights)
bilateral = watched(bilateral, bilateral_weights)
joint_bilateral = watched(joint_bilateral, joint_bilateral_weights)
nonlocal_means = watched(nonlocal_means, nonlocal_means_weights)

# name -> a function of images (..., c, h, w) with values from 0 to 1
FILTERS: dict[str, Callable[..., Tensor]] = {
    "gaussian": gaussian,
    "heat": heat,
    "perona_malik": perona_malik,
    "total_variation": total_variation,
    "bilateral": bilateral,
    "joint_bilateral": joint_bilateral,
    "nonlocal_means": nonlocal_means,
}

# name -> the weights (h, w) of one pixel
WEIGHTS: dict[str, Callable[..., Tensor]] = {
    "gaussian": gaussian_weights,
    "heat": heat_weights,
    "perona_malik": perona_malik_weights,
    "total_variation": total_variation_weights,
    "bilateral": bilateral_weights,
    "joint_bilateral": joint_bilateral_weights,
    "nonlocal_means": nonlocal_means_weights,
}

__all__ = [
    "FILTERS",
    "MAX_STEP",
    "WEIGHTS",
    "as_rgb",
    "bilateral",
    "check_suffix",
    "crop_of",
    "gaussian",
    "heat",
    "image_panel",
    "joint_bilateral",
    "nonlocal_means",
    "parse_pixel",
    "perona_malik",
    "read_photo",
    "save_photo",
    "total_variation",
    "weights_panel",
]
