"""The bilateral filter: attention whose score is a Gaussian of content and position."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.scores import Gaussian
from regard.errors import UsageError
from regard.filters.gaussian import window_radius
from regard.filters.kernels import try_bilateral
from regard.filters.pixels import (
    AutoWindow,
    PairwiseSums,
    Pixel,
    attention_average,
    attention_weights,
    check_positive,
    check_range,
    exp_weights,
    half_window,
    local_weights,
    pixel_coordinates,
    planes,
    squares,
    window_mask,
)

Width = float | Literal["inf"]


def bilateral(
    image: Float[Tensor, "*b c h w"],
    *,
    sigma_s: float = 3.0,
    sigma_r: Width = 0.1,
    window: AutoWindow = "auto",
) -> Float[Tensor, "*b c h w"]:
    """Bilateral filter (Aurich and Weule 1995; named by Tomasi and Manduchi 1998).

    The weight is a spatial Gaussian times a Gaussian of the difference of values; sigma_r=inf
    leaves the Gaussian filter. The window reaches three sigma_s to each side unless given; full is
    attention over the whole image.
    """
    check_range(planes(image), sigma_r=float(sigma_r))
    return filter_by_guide(image, image, sigma_s, sigma_r, window)


def filter_by_guide(
    image: Tensor, guide: Tensor, sigma_s: float, sigma_r: Width, window: AutoWindow
) -> Tensor:
    """Filter an image with the bilateral weights of a guide."""
    check_positive(sigma_s=sigma_s, sigma_r=float(sigma_r))
    x, by = planes(image), planes(guide, "guide").to(image.dtype)
    if by.shape[-2:] != x.shape[-2:] or by.shape[0] not in (1, x.shape[0]):
        raise UsageError(
            f"guide of shape {tuple(guide.shape)} for an image of {tuple(image.shape)}; "
            "expected the same height and width"
        )
    radius = window_radius(sigma_s, window, 3)
    if radius is None:
        out = exact(x, by.expand(x.shape[0], -1, -1, -1), sigma_s, sigma_r)
    else:
        out = _in_window(x, by, sigma_s, float(sigma_r), radius)
    return out.view(image.shape)


def coordinates(
    guide: Float[Tensor, "n c h w"], sigma_s: float, sigma_r: Width
) -> Float[Tensor, "n l d"]:
    """Return a point for each pixel, such that the bilateral score is -distance^2 / 2."""
    at = pixel_coordinates(guide) / sigma_s
    value = (guide - guide.mean((-2, -1), keepdim=True)).flatten(2).mT / float(sigma_r)
    return torch.cat([at.expand(len(guide), -1, -1), value], -1)


def exact(
    image: Float[Tensor, "n c h w"],
    guide: Float[Tensor, "n e h w"],
    sigma_s: float,
    sigma_r: Width,
    radius: int | None = None,
) -> Float[Tensor, "n c h w"]:
    """Filter by masked attention over all pixels, the reference of the windowed implementation."""
    k = coordinates(guide, sigma_s, sigma_r)
    mask = window_mask(radius, image)
    return attention_average(k, image.flatten(2).mT, Gaussian(), mask).mT.reshape(image.shape)


def _in_window(image: Tensor, guide: Tensor, sigma_s: float, sigma_r: float, radius: int) -> Tensor:
    """Filter by looping over the offsets of the window, each for all pixels at once."""
    content = -1 / (2 * sigma_r**2)
    made = try_bilateral(image, guide, radius, content, -1 / (2 * sigma_s**2))
    if made is not None:
        return made
    sums = PairwiseSums(image)
    for down, right in half_window(radius, *image.shape[-2:]):
        # content times position is, in the exponent, content plus a bias
        position = image.new_tensor(-(down**2 + right**2) / (2 * sigma_s**2))
        for here, there in sums.bands(down, right):
            score = squares(guide[here] - guide[there], content, position)
            sums.add(exp_weights(score), here, there)
    return sums.done()


def bilateral_weights(
    image: Tensor,
    at: Pixel,
    *,
    sigma_s: float = 3.0,
    sigma_r: Width = 0.1,
    window: AutoWindow = "auto",
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel; the joint filter has those of its guide."""
    check_positive(sigma_s=sigma_s, sigma_r=float(sigma_r))
    radius = window_radius(sigma_s, window, 3)

    def find(piece: Tensor, at: Pixel) -> Tensor:
        k = coordinates(piece, sigma_s, sigma_r)
        return attention_weights(k, Gaussian(), at, (piece.shape[-2], piece.shape[-1]), radius)

    return local_weights(image, at, radius, find)
