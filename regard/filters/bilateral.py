"""The bilateral filter: attention whose score is content and position."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.scores import Gaussian
from regard.errors import UsageError
from regard.filters.frame import (
    AutoWindow,
    Place,
    Sums,
    attended,
    average,
    half,
    in_piece,
    near,
    of_range,
    places,
    planes,
    positive,
    squares,
    weights_of,
)
from regard.filters.gaussian import reach_of

Width = float | Literal["inf"]


def bilateral(
    image: Float[Tensor, "*b c h w"],
    *,
    sigma_s: float = 3.0,
    sigma_r: Width = 0.1,
    window: AutoWindow = "auto",
) -> Float[Tensor, "*b c h w"]:
    """Average pixels that are near and alike (Tomasi and Manduchi 1998).

    The weight is a Gaussian of distance times a Gaussian of the difference of values; sigma_r=inf
    leaves the Gaussian filter. The window reaches three sigma_s to each side unless told; full is
    attention over the whole image.
    """
    of_range(planes(image), sigma_r=float(sigma_r))
    return by_guide(image, image, sigma_s, sigma_r, window)


def by_guide(
    image: Tensor, guide: Tensor, sigma_s: float, sigma_r: Width, window: AutoWindow
) -> Tensor:
    """Average an image with the bilateral weights of a guide."""
    positive(sigma_s=sigma_s, sigma_r=float(sigma_r))
    x, seen = planes(image), planes(guide, "guide").to(image.dtype)
    if seen.shape[-2:] != x.shape[-2:] or seen.shape[0] not in (1, x.shape[0]):
        raise UsageError(
            f"guide of shape {tuple(guide.shape)} for an image of {tuple(image.shape)}; "
            "expected the same height and width"
        )
    radius = reach_of(sigma_s, window, 3)
    if radius is None:
        out = exact(x, seen.expand(x.shape[0], -1, -1, -1), sigma_s, sigma_r)
    else:
        out = _in_window(x, seen, sigma_s, float(sigma_r), radius)
    return out.view(image.shape)


def coordinates(
    guide: Float[Tensor, "n c h w"], sigma_s: float, sigma_r: Width
) -> Float[Tensor, "n l d"]:
    """Return a point for each pixel, such that its bilateral score is -distance^2 / 2."""
    at = places(guide) / sigma_s
    value = (guide - guide.mean((-2, -1), keepdim=True)).flatten(2).mT / float(sigma_r)
    return torch.cat([at.expand(len(guide), -1, -1), value], -1)


def exact(
    image: Float[Tensor, "n c h w"],
    guide: Float[Tensor, "n e h w"],
    sigma_s: float,
    sigma_r: Width,
    radius: int | None = None,
) -> Float[Tensor, "n c h w"]:
    """Filter by attention over the pixels that a mask leaves: what the fast way equals."""
    k = coordinates(guide, sigma_s, sigma_r)
    mask = near(radius, image)
    return average(k, image.flatten(2).mT, Gaussian(), mask).mT.reshape(image.shape)


def _in_window(image: Tensor, guide: Tensor, sigma_s: float, sigma_r: float, radius: int) -> Tensor:
    """Filter by one step of the window at a time, for all pixels at once."""
    sums = Sums(image)
    content = -1 / (2 * sigma_r**2)
    for down, right in half(radius, *image.shape[-2:]):
        # content times position is, in the exponent, content plus a bias
        position = image.new_tensor(-(down**2 + right**2) / (2 * sigma_s**2))
        for here, there in sums.bands(down, right):
            score = squares(guide[here] - guide[there], content, position)
            sums.add(weights_of(score), here, there)
    return sums.done()


def bilateral_weights(
    image: Tensor,
    at: Place,
    *,
    sigma_s: float = 3.0,
    sigma_r: Width = 0.1,
    window: AutoWindow = "auto",
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel; those of the joint filter are its guide's."""
    positive(sigma_s=sigma_s, sigma_r=float(sigma_r))
    radius = reach_of(sigma_s, window, 3)

    def find(piece: Tensor, at: Place) -> Tensor:
        k = coordinates(piece, sigma_s, sigma_r)
        return attended(k, Gaussian(), at, (piece.shape[-2], piece.shape[-1]), radius)

    return in_piece(image, at, radius, find)
