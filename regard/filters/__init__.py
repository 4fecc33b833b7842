"""Image filters by name: weighted averages of pixels, from fixed weights to attention."""

from collections.abc import Callable

from torch import Tensor

from regard.filters.bilateral import bilateral, bilateral_weights
from regard.filters.diffusion import heat, heat_weights, perona_malik, perona_malik_weights
from regard.filters.gaussian import gaussian, gaussian_weights
from regard.filters.guided import joint_bilateral, joint_bilateral_weights
from regard.filters.nonlocal_means import nonlocal_means, nonlocal_means_weights
from regard.filters.texture import texture
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
    "texture": texture,
}

# name -> the weights (h, w) of one pixel; texture copies a single one, so it has none
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
    "WEIGHTS",
    "bilateral",
    "gaussian",
    "heat",
    "joint_bilateral",
    "nonlocal_means",
    "perona_malik",
    "texture",
    "total_variation",
]
