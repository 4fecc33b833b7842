"""Total variation: the nearest image that changes little."""

import torch
from jaxtyping import Float
from torch import Tensor

from regard.filters.frame import (
    Place,
    counted,
    derivative,
    flowed,
    in_piece,
    planes,
    positive,
    squares,
)

STEP = 0.25
SMALLEST = 1e-30  # of a squared slope: the root of less has no derivative


def total_variation(
    image: Float[Tensor, "*b c h w"], *, strength: float = 0.1, steps: int = 100
) -> Float[Tensor, "*b c h w"]:
    """Find u of least |grad u| + |u - image|^2 / (2 strength) by Chambolle's steps (2004).

    (Rudin, Osher and Fatemi 1992.) Channels share their edges.
    """
    positive(strength=strength)
    counted(steps=steps)
    x = planes(image)
    down, right = torch.zeros_like(x.diff(dim=-2)), torch.zeros_like(x.diff(dim=-1))
    for _ in range(steps):
        u = flowed(x, down, right)
        slope_down, slope_right = u.diff(dim=-2), u.diff(dim=-1)
        size = torch.zeros_like(x[:, :1])
        size[..., :-1, :] += squares(slope_down)
        size[..., :-1] += squares(slope_right)
        size = 1 + STEP / strength * size.clamp(min=SMALLEST).sqrt()
        down = (down - STEP * slope_down) / size[..., :-1, :]
        right = (right - STEP * slope_right) / size[..., :-1]
    return flowed(x, down, right).view(image.shape)


def total_variation_weights(
    image: Tensor, at: Place, *, strength: float = 0.1, steps: int = 100
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel, here the derivative, some of which may be negative."""

    def find(piece: Tensor, at: Place) -> Tensor:
        return derivative(lambda x: total_variation(x, strength=strength, steps=steps), piece, at)

    return in_piece(image, at, 2 * steps + 2, find)
