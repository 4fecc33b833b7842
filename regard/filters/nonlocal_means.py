"""Non-local means: attention whose score compares patches, wherever in the image they are."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.scores import Gaussian, ScoreFunction
from regard.errors import UsageError, lookup
from regard.filters.kernels import try_nonlocal_means
from regard.filters.pixels import (
    PairwiseSums,
    Pixel,
    Window,
    attention_average,
    attention_weights,
    check_positive,
    check_range,
    exp_weights,
    half_window,
    local_weights,
    pad,
    planes,
    radius_of,
    squares,
    window_mask,
)


def _flat(side: int) -> Tensor:
    return torch.full((side,), 1 / side, dtype=torch.float64)


def _gaussian(side: int) -> Tensor:
    at = torch.arange(side, dtype=torch.float64) - side // 2
    weights = torch.exp(-((at / max(1.0, (side - 1) / 4)) ** 2) / 2)
    return weights / weights.sum()


# name -> the weight of each row, and each column, of a patch; they sum to one
_PATCHES: dict[str, Callable[[int], Tensor]] = {"flat": _flat, "gaussian": _gaussian}


def _squared(score: Tensor, h: float, noise: float) -> Tensor:
    """Subtract what noise alone makes patches differ by: twice its variance."""
    return score.add_(2 * (noise / h) ** 2).clamp_(max=0) if noise else score


def _plain(score: Tensor, h: float, noise: float) -> Tensor:
    """Take the root, as on the lectures' slide: -|difference| / h^2."""
    return _squared(score, h, noise).neg_().sqrt_().div_(-h)


# name -> the score from -(mean squared difference) / h^2, in place
_DISTANCES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "squared": _squared,
    "plain": _plain,
}


@dataclass(frozen=True)
class PatchScore:
    """The score of two patches by the mean of their squared differences.

    It is no dot product where the noise is known or the distance plain.
    """

    h: float = 0.1
    patch: int = 7
    distance: str = "squared"
    patch_weights: str = "flat"
    noise: float = 0.0

    def __post_init__(self):
        check_positive(h=self.h)
        radius_of(self.patch, "patch")
        lookup("patch_weights", self.patch_weights, _PATCHES)
        if not self.noise >= 0:
            raise UsageError(f"noise={self.noise} is too small; it must be at least 0")
        lookup("distance", self.distance, _DISTANCES)

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """Return the scores (..., q, k) of patches as vectors."""
        distance = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist")
        return self.finish(-(distance / self.h).square())

    def finish(self, score: Tensor) -> Tensor:
        """Return the score from -(mean squared difference) / h^2, in place."""
        return _DISTANCES[self.distance](score, self.h, self.noise)

    def score(self) -> ScoreFunction:
        """Return the score for attention: a Gaussian, which runs fused, where it is one."""
        is_gaussian = self.distance == "squared" and not self.noise
        return Gaussian(self.h / 2**0.5) if is_gaussian else self

    def side_weights(self) -> Tensor:
        """Return the weight of each row, and each column, of a patch."""
        return _PATCHES[self.patch_weights](self.patch)

    def keys(self, image: Float[Tensor, "n c h w"]) -> Float[Tensor, "n l d"]:
        """Return the patch of each pixel as a vector."""
        weights = self.side_weights().sqrt().to(image)
        weights = torch.outer(weights, weights).flatten() / image.shape[1] ** 0.5
        centred = image - image.mean((-2, -1), keepdim=True)  # nearer to zero, finer differences
        padded = pad(centred, self.patch // 2)
        cut = padded.unfold(2, self.patch, 1).unfold(3, self.patch, 1).flatten(4)
        return (cut * weights).permute(0, 2, 3, 1, 4).flatten(1, 2).flatten(2)


def nonlocal_means(
    image: Float[Tensor, "*b c h w"],
    *,
    h: float = 0.1,
    patch: int = 7,
    window: Window = 21,
    distance: str = "squared",
    patch_weights: str = "flat",
    noise: float = 0.0,
) -> Float[Tensor, "*b c h w"]:
    """Non-local means (Buades, Coll and Morel 2005).

    The weight is exp(-d^2 / h^2), d^2 the mean squared difference of two patches less twice the
    variance of a noise that is known, or exp(-d / h^2) if the distance is plain. window=full is
    attention over the whole image.
    """
    x = planes(image)
    check_range(x, h=h)
    radius = radius_of(window)
    patches = PatchScore(h, patch, distance, patch_weights, noise)
    out = _by_attention(x, None, patches) if radius is None else _in_window(x, radius, patches)
    return out.view(image.shape)


def _by_attention(image: Tensor, radius: int | None, patches: PatchScore) -> Tensor:
    values, mask = image.flatten(2).mT, window_mask(radius, image)
    averages = attention_average(patches.keys(image), values, patches.score(), mask)
    return averages.mT.reshape(image.shape)


def exact(
    image: Float[Tensor, "n c h w"], radius: int | None, **options: Any
) -> Float[Tensor, "n c h w"]:
    """Filter by masked attention over all pixels, the reference of the windowed implementation."""
    return _by_attention(image, radius, PatchScore(**options))


def _sum_flat(x: Tensor, side: int, dim: int) -> Tensor:
    """Box filter: sum each `side` neighbours by sums of two, of four and so on."""
    length, size, at, total = x.shape[dim] - side + 1, 1, 0, None
    while True:
        if side & size:
            part = x.narrow(dim, at, length)
            total = part if total is None else total + part
            at += size
        if at == side:
            assert total is not None
            return total
        rest = x.shape[dim] - size
        x, size = x.narrow(dim, 0, rest) + x.narrow(dim, size, rest), 2 * size


def _sum_weighted(x: Tensor, weights: list[float], dim: int) -> Tensor:
    """Sum neighbours with weights."""
    length = x.shape[dim] - len(weights) + 1
    total = x.narrow(dim, 0, length) * weights[0]
    for at, weight in enumerate(weights[1:], 1):
        total.add_(x.narrow(dim, at, length), alpha=weight)
    return total


def _in_window(image: Tensor, radius: int, patches: PatchScore) -> Tensor:
    """Filter by looping over the offsets of the window, each for all pixels at once."""
    side = patches.patch
    if patches.patch_weights == "flat" and patches.distance == "squared":
        content = -1 / (patches.h**2 * image.shape[1] * side**2)
        made = try_nonlocal_means(
            image, radius, side, content, 2 * (patches.noise / patches.h) ** 2
        )
        if made is not None:
            return made
    sums, padded, margin = PairwiseSums(image), pad(image, side // 2), side - 1
    weights = _PATCHES[patches.patch_weights](side).tolist()
    flat = patches.patch_weights == "flat"
    scale = -1 / (patches.h * patches.h * image.shape[1] * (side**2 if flat else 1))
    nothing = image.new_zeros(())

    def wider(where: tuple) -> tuple:
        return ..., *(slice(span.start, span.stop + margin) for span in where[1:])

    def summed(x: Tensor) -> Tensor:
        for dim in (-2, -1):
            x = _sum_flat(x, side, dim) if flat else _sum_weighted(x, weights, dim)
        return x

    for down, right in half_window(radius, *image.shape[-2:]):
        for here, there in sums.bands(down, right):
            score = squares(padded[wider(here)] - padded[wider(there)], scale, nothing)
            sums.add(exp_weights(patches.finish(summed(score))), here, there)
    return sums.done()


def nonlocal_means_weights(
    image: Tensor, at: Pixel, *, window: Window = 21, **options: Any
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel; the options are those of the filter."""
    radius, patches = radius_of(window), PatchScore(**options)

    def find(piece: Tensor, at: Pixel) -> Tensor:
        size = piece.shape[-2], piece.shape[-1]
        return attention_weights(patches.keys(piece), patches.score(), at, size, radius)

    return local_weights(image, at, None if radius is None else radius + patches.patch, find)
