"""The joint bilateral filter: values of one image, weights from another (a guide)."""

from jaxtyping import Float
from torch import Tensor

from regard.filters.bilateral import Width, bilateral_weights, filter_by_guide
from regard.filters.pixels import AutoWindow, Pixel, check_range, planes


def joint_bilateral(
    image: Float[Tensor, "*b c h w"],
    *,
    guide: Tensor,
    sigma_s: float = 3.0,
    sigma_r: Width = 0.1,
    window: AutoWindow = "auto",
) -> Float[Tensor, "*b c h w"]:
    """Joint (cross) bilateral filter: an ancestor of cross-attention.

    (Petschnigg et al. 2004; Eisemann and Durand 2004.)
    """
    check_range(planes(guide, "guide"), sigma_r=float(sigma_r))
    return filter_by_guide(image, guide, sigma_s, sigma_r, window)


def joint_bilateral_weights(
    image: Tensor,
    at: Pixel,
    *,
    guide: Tensor,
    sigma_s: float = 3.0,
    sigma_r: Width = 0.1,
    window: AutoWindow = "auto",
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel, which depend on the guide only."""
    return bilateral_weights(guide, at, sigma_s=sigma_s, sigma_r=sigma_r, window=window)
