"""The joint bilateral filter: one image averaged by what another looks like."""

from jaxtyping import Float
from torch import Tensor

from regard.filters.bilateral import Width, bilateral_weights, by_guide
from regard.filters.frame import AutoWindow, Place, of_range, planes


def joint_bilateral(
    image: Float[Tensor, "*b c h w"],
    *,
    guide: Tensor,
    sigma_s: float = 3.0,
    sigma_r: Width = 0.1,
    window: AutoWindow = "auto",
) -> Float[Tensor, "*b c h w"]:
    """Average pixels that are near, and alike in the guide: cross-attention's ancestor.

    (Petschnigg et al. 2004; Eisemann and Durand 2004.)
    """
    of_range(planes(guide, "guide"), sigma_r=float(sigma_r))
    return by_guide(image, guide, sigma_s, sigma_r, window)


def joint_bilateral_weights(
    image: Tensor,
    at: Place,
    *,
    guide: Tensor,
    sigma_s: float = 3.0,
    sigma_r: Width = 0.1,
    window: AutoWindow = "auto",
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel, which only the guide decides."""
    return bilateral_weights(guide, at, sigma_s=sigma_s, sigma_r=sigma_r, window=window)
