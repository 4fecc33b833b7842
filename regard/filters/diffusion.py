"""Diffusion: the heat equation, and Perona and Malik's anisotropic diffusion."""

import math
from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import UsageError, lookup
from regard.filters.pixels import (
    MIN_SCORE,
    Pixel,
    apply_flow,
    check_count,
    check_positive,
    check_range,
    local_weights,
    pixel_gradient,
    planes,
    squares,
)

MAX_STEP = 0.25  # of the explicit scheme, which is unstable beyond

Conductance = Callable[[Tensor], Tensor]

# name -> conductance of the squared difference over K^2; Perona and Malik's first and second
_CONDUCTANCES: dict[str, Conductance] = {
    "exponential": lambda x: torch.exp(x.neg().clamp(min=MIN_SCORE)),
    "rational": lambda x: 1 / (1 + x),
}


def heat(
    image: Float[Tensor, "*b c h w"], *, steps: int = 20, step: float = 0.2
) -> Float[Tensor, "*b c h w"]:
    """Heat equation u_t = div(grad u), in explicit steps.

    The solution is a Gaussian filter of sigma `matching_sigma`, with mirrored borders.
    """
    _check(steps, step)
    return _diffuse(planes(image), lambda x: 1.0, steps, step).view(image.shape)


def matching_sigma(steps: int, step: float) -> float:
    """Return the sigma of the equivalent Gaussian filter: its variance grows by twice a step."""
    return math.sqrt(2 * steps * step)


def perona_malik(
    image: Float[Tensor, "*b c h w"],
    *,
    k: float = 0.04,
    steps: int = 30,
    step: float = 0.2,
    conductance: str = "exponential",
) -> Float[Tensor, "*b c h w"]:
    """Anisotropic diffusion u_t = div(c(|grad u|) grad u) (Perona and Malik 1990).

    An edge is a difference of more than k, of values that are 0 to 1 (or 0 to 255, with a k for
    these); channels share their edges.
    """
    _check(steps, step)
    check_range(planes(image), k=k)
    return _diffuse(planes(image), _conduct(k, conductance), steps, step).view(image.shape)


def _check(steps: int, step: float) -> None:
    check_count(steps=steps)
    if not 0 < step <= MAX_STEP:
        raise UsageError(
            f"step={step} is not stable; expected more than 0 and at most {MAX_STEP}: "
            "for more diffusion take more steps"
        )


def _conduct(k: float, name: str, frozen: bool = False) -> Conductance:
    """Return the conductance as a function of differences (n, c, h, w) of neighbours."""
    check_positive(k=k)
    function = lookup("conductance", name, _CONDUCTANCES)

    def conduct(x: Tensor) -> Tensor:
        return function(squares(x.detach() if frozen else x, k**-2))

    return conduct


def _diffuse(x: Tensor, conduct: Callable, steps: int, step: float) -> Tensor:
    """Make explicit steps; the flow between neighbours conserves the mean."""
    for _ in range(steps):
        down, right = x.diff(dim=-2), x.diff(dim=-1)
        x = apply_flow(x, conduct(down) * -step * down, conduct(right) * -step * right)
    return x


def heat_weights(
    image: Tensor, at: Pixel, *, steps: int = 20, step: float = 0.2
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel: the gradient of the filtered value there."""

    def find(piece: Tensor, at: Pixel) -> Tensor:
        return pixel_gradient(lambda x: heat(x, steps=steps, step=step), piece, at)

    return local_weights(image, at, steps, find)


def perona_malik_weights(
    image: Tensor,
    at: Pixel,
    *,
    k: float = 0.04,
    steps: int = 30,
    step: float = 0.2,
    conductance: str = "exponential",
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel through all steps, with the conductances held fixed."""
    _check(steps, step)
    conduct = _conduct(k, conductance, frozen=True)

    def find(piece: Tensor, at: Pixel) -> Tensor:
        return pixel_gradient(lambda x: _diffuse(x, conduct, steps, step), piece, at)

    return local_weights(image, at, steps, find)
