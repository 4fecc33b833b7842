"""Total-variation denoising."""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.filters.pixels import (
    Pixel,
    apply_flow,
    check_count,
    check_positive,
    local_weights,
    pixel_gradient,
    planes,
    squares,
)

_STEP = 0.25
_MIN_SQUARE = 1e-30  # the square root has no derivative at 0


def total_variation(
    image: Float[Tensor, "*b c h w"], *, strength: float = 0.1, steps: int = 100
) -> Float[Tensor, "*b c h w"]:
    """Minimise |grad u| + |u - image|^2 / (2 strength) (Rudin, Osher and Fatemi 1992).

    By Chambolle's projection algorithm (2004); channels share their edges.
    """
    check_positive(strength=strength)
    check_count(steps=steps)
    x = planes(image)
    down, right = torch.zeros_like(x.diff(dim=-2)), torch.zeros_like(x.diff(dim=-1))
    for _ in range(steps):
        u = apply_flow(x, down, right)
        slope_down, slope_right = u.diff(dim=-2), u.diff(dim=-1)
        size = torch.zeros_like(x[:, :1])
        size[..., :-1, :] += squares(slope_down)
        size[..., :-1] += squares(slope_right)
        size = 1 + _STEP / strength * size.clamp(min=_MIN_SQUARE).sqrt()
        down = (down - _STEP * slope_down) / size[..., :-1, :]
        right = (right - _STEP * slope_right) / size[..., :-1]
    return apply_flow(x, down, right).view(image.shape)


def total_variation_weights(
    image: Tensor, at: Pixel, *, strength: float = 0.1, steps: int = 100
) -> Float[Tensor, "h w"]:
    """Return the gradient of one filtered pixel, some of whose weights may be negative."""

    def find(piece: Tensor, at: Pixel) -> Tensor:
        return pixel_gradient(
            lambda x: total_variation(x, strength=strength, steps=steps), piece, at
        )

    return local_weights(image, at, 2 * steps + 2, find)
