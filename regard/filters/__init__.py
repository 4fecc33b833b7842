"""Image filters by name: weighted averages of pixels, from fixed weights to attention."""

from collections.abc import Callable

from torch import Tensor

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
from regard.filters.variation import total_variation, total_variation_weights

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
