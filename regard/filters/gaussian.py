"""The Gaussian filter: a convolution, whose weights do not depend on the data."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from regard.errors import lookup
from regard.filters.pixels import (
    AutoWindow,
    Pixel,
    check_positive,
    local_weights,
    pixel_gradient,
    planes,
    radius_of,
)


def _cut(x: Tensor, kernel: Tensor) -> Tensor:
    """Pixels outside have no weight, as in masked attention."""
    reach = len(kernel) // 2
    inside = F.conv1d(x.new_ones(1, 1, x.shape[-1]), kernel.view(1, 1, -1), padding=reach)
    return F.conv1d(x, kernel.view(1, 1, -1), padding=reach) / inside


def _mirror(x: Tensor, kernel: Tensor) -> Tensor:
    """Mirror padding (the border pixel repeated), as for heat that cannot leave."""
    size, reach = x.shape[-1], len(kernel) // 2
    at = torch.arange(-reach, size + reach, device=x.device) % (2 * size)
    at = torch.where(at < size, at, 2 * size - 1 - at)
    return F.conv1d(x.index_select(-1, at), kernel.view(1, 1, -1))


def _nearest(x: Tensor, kernel: Tensor) -> Tensor:
    """Replicate padding."""
    reach = len(kernel) // 2
    return F.conv1d(F.pad(x, (reach, reach), mode="replicate"), kernel.view(1, 1, -1))


# name -> convolution of rows (n, 1, l) with a kernel, by what is outside of the image
_BORDERS = {"cut": _cut, "mirror": _mirror, "nearest": _nearest}


def gaussian(
    image: Float[Tensor, "*b c h w"],
    *,
    sigma: float = 2.0,
    window: AutoWindow = "auto",
    border: str = "cut",
) -> Float[Tensor, "*b c h w"]:
    """Gaussian filter, with weights exp(-distance^2 / 2 sigma^2).

    The window reaches four sigma to each side unless given.
    """
    check_positive(sigma=sigma)
    convolve = lookup("border", border, _BORDERS)
    x = planes(image)
    reach = window_radius(sigma, window)
    for _ in range(2):  # along rows, then along columns
        radius = x.shape[-1] - 1 if reach is None else reach
        at = torch.arange(-radius, radius + 1, dtype=x.dtype, device=x.device)
        kernel = torch.exp(-((at / sigma) ** 2) / 2)
        flat = x.reshape(-1, 1, x.shape[-1])
        x = convolve(flat, kernel / kernel.sum()).view(x.shape).mT
    return x.reshape(image.shape)


def window_radius(sigma: float, window: AutoWindow, times: float = 4) -> int | None:
    """Return the radius of a window; auto is some times sigma, full has none."""
    return max(1, int(times * sigma + 0.5)) if window == "auto" else radius_of(window)


def gaussian_weights(
    image: Tensor,
    at: Pixel,
    *,
    sigma: float = 2.0,
    window: AutoWindow = "auto",
    border: str = "cut",
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel."""

    def find(piece: Tensor, at: Pixel) -> Tensor:
        return pixel_gradient(
            lambda x: gaussian(x, sigma=sigma, window=window, border=border), piece, at
        )

    return local_weights(image, at, window_radius(sigma, window), find)
