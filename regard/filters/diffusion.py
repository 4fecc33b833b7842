"""Diffusion: heat that spreads, and Perona and Malik's that stops at edges."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import UsageError, lookup
from regard.filters.frame import (
    LEAST,
    Place,
    counted,
    derivative,
    flowed,
    in_piece,
    of_range,
    planes,
    positive,
    squares,
)

STABLE = 0.25  # the largest explicit step: beyond it a pixel gives away more than it has

Conduct = Callable[[Tensor], Tensor]

# name -> conductance of the squared difference over K^2; Perona and Malik's first and second
CONDUCTANCES: dict[str, Conduct] = {
    "exponential": lambda x: torch.exp(x.neg().clamp(min=LEAST)),
    "rational": lambda x: 1 / (1 + x),
}


def heat(
    image: Float[Tensor, "*b c h w"], *, steps: int = 20, step: float = 0.2
) -> Float[Tensor, "*b c h w"]:
    """Let the image spread as heat does, u_t = div(grad u), in explicit steps.

    The solution is a Gaussian filter of the width `matching_sigma`, with a mirror at the border.
    """
    _check(steps, step)
    return _spread(planes(image), lambda x: 1.0, steps, step).view(image.shape)


def matching_sigma(steps: int, step: float) -> float:
    """Return the width of the Gaussian that heat amounts to: its variance grows by twice a step."""
    return math.sqrt(2 * steps * step)


def perona_malik(
    image: Float[Tensor, "*b c h w"],
    *,
    k: float = 0.04,
    steps: int = 30,
    step: float = 0.2,
    conductance: str = "exponential",
) -> Float[Tensor, "*b c h w"]:
    """Let the image spread except over edges, u_t = div(c(|grad u|) grad u).

    An edge is a difference of more than k, of values that are 0 to 1 (or 0 to 255, with a k for
    these); channels share their edges (Perona and Malik 1990).
    """
    _check(steps, step)
    of_range(planes(image), k=k)
    return _spread(planes(image), _conduct(k, conductance), steps, step).view(image.shape)


def _check(steps: int, step: float) -> None:
    counted(steps=steps)
    if not 0 < step <= STABLE:
        raise UsageError(
            f"step={step} is not stable; expected more than 0 and at most {STABLE}: "
            "for more diffusion take more steps"
        )


def _conduct(k: float, name: str, frozen: bool = False) -> Conduct:
    """Return the conductance between neighbours of a difference (n, c, h, w)."""
    positive(k=k)
    function = lookup("conductance", name, CONDUCTANCES)

    def conduct(x: Tensor) -> Tensor:
        return function(squares(x.detach() if frozen else x, k**-2))

    return conduct


def _spread(x: Tensor, conduct: Callable, steps: int, step: float) -> Tensor:
    """Let neighbours exchange what they differ by, so that nothing is lost or gained."""
    for _ in range(steps):
        down, right = x.diff(dim=-2), x.diff(dim=-1)
        x = flowed(x, conduct(down) * -step * down, conduct(right) * -step * right)
    return x


def heat_weights(
    image: Tensor, at: Place, *, steps: int = 20, step: float = 0.2
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel: where the heat that is there came from."""

    def find(piece: Tensor, at: Place) -> Tensor:
        return derivative(lambda x: heat(x, steps=steps, step=step), piece, at)

    return in_piece(image, at, steps, find)


def perona_malik_weights(
    image: Tensor,
    at: Place,
    *,
    k: float = 0.04,
    steps: int = 30,
    step: float = 0.2,
    conductance: str = "exponential",
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel: where what is there came from, through all steps."""
    _check(steps, step)
    conduct = _conduct(k, conductance, frozen=True)

    def find(piece: Tensor, at: Place) -> Tensor:
        return derivative(lambda x: _spread(x, conduct, steps, step), piece, at)

    return in_piece(image, at, steps, find)
