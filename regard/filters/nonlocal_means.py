"""Non-local means: attention over patches, wherever in the image they are."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from regard.attention.scores import Gaussian, Score
from regard.errors import UsageError, lookup
from regard.filters.frame import (
    Place,
    Sums,
    Window,
    attended,
    average,
    half,
    in_piece,
    near,
    of_range,
    pad,
    planes,
    positive,
    radius_of,
    squares,
    weights_of,
)


def _flat(side: int) -> Tensor:
    return torch.full((side,), 1 / side, dtype=torch.float64)


def _round(side: int) -> Tensor:
    at = torch.arange(side, dtype=torch.float64) - side // 2
    share = torch.exp(-((at / max(1.0, (side - 1) / 4)) ** 2) / 2)
    return share / share.sum()


# name -> what each row, and each column, of a patch counts; together one
PATCHES: dict[str, Callable[[int], Tensor]] = {"flat": _flat, "gaussian": _round}


def _squared(score: Tensor, h: float, noise: float) -> Tensor:
    """Forgive what noise alone makes patches differ by: twice its variance."""
    return score.add_(2 * (noise / h) ** 2).clamp_(max=0) if noise else score


def _plain(score: Tensor, h: float, noise: float) -> Tensor:
    """Take the root, as on the lectures' slide: -|difference| / h^2."""
    return _squared(score, h, noise).neg_().sqrt_().div_(-h)


# name -> the score from -(mean squared difference) / h^2, which it may overwrite
DISTANCES: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "squared": _squared,
    "plain": _plain,
}


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
    """Average pixels whose patches look alike (Buades, Coll and Morel 2005).

    The weight is exp(-d^2 / h^2), d^2 the mean squared difference of two patches less twice the
    variance of a noise that is known, or exp(-d / h^2) if the distance is plain. window=full is
    attention over the whole image.
    """
    x = planes(image)
    of_range(x, h=h)
    radius = radius_of(window)
    if radius is None:
        score, keys = patch_score(x, h, patch, distance, patch_weights, noise)
        out = average(keys, x.flatten(2).mT, score).mT.reshape(x.shape)
    else:
        out = _in_window(x, radius, h, patch, distance, patch_weights, noise)
    return out.view(image.shape)


class Patchwise:
    """A score of the distance between patches that is no dot product."""

    def __init__(self, finish: Callable, h: float, noise: float):
        self.finish, self.h, self.noise = finish, h, noise

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """Return all scores, (..., q, k)."""
        apart = torch.cdist(q, k, compute_mode="donot_use_mm_for_euclid_dist")
        return self.finish(-(apart / self.h).square(), self.h, self.noise)


def _check(h: float, patch: int, distance: str, patch_weights: str, noise: float) -> Callable:
    positive(h=h)
    radius_of(patch, "patch")
    lookup("patch_weights", patch_weights, PATCHES)
    if not noise >= 0:
        raise UsageError(f"noise={noise} is too small; it must be at least 0")
    return lookup("distance", distance, DISTANCES)


def patch_score(
    image: Float[Tensor, "n c h w"],
    h: float,
    patch: int,
    distance: str,
    patch_weights: str,
    noise: float,
) -> tuple[Score, Float[Tensor, "n l d"]]:
    """Return the score of patches, and each pixel's patch as a vector."""
    finish = _check(h, patch, distance, patch_weights, noise)
    share = PATCHES[patch_weights](patch).sqrt().to(image)
    share = torch.outer(share, share).flatten() / image.shape[1] ** 0.5
    centred = image - image.mean((-2, -1), keepdim=True)  # nearer to zero, finer differences
    cut = pad(centred, patch // 2).unfold(2, patch, 1).unfold(3, patch, 1).flatten(4)
    keys = (cut * share).permute(0, 2, 3, 1, 4).flatten(1, 2).flatten(2)
    if finish is _squared and not noise:
        return Gaussian(h / 2**0.5), keys
    return Patchwise(finish, h, noise), keys


def exact(
    image: Float[Tensor, "n c h w"],
    radius: int | None,
    *,
    h: float = 0.1,
    patch: int = 7,
    distance: str = "squared",
    patch_weights: str = "flat",
    noise: float = 0.0,
) -> Float[Tensor, "n c h w"]:
    """Filter by attention over the pixels that a mask leaves: what the fast way equals."""
    score, keys = patch_score(image, h, patch, distance, patch_weights, noise)
    mask = near(radius, image)
    return average(keys, image.flatten(2).mT, score, mask).mT.reshape(image.shape)


def _sum_flat(x: Tensor, side: int, dim: int) -> Tensor:
    """Add up each `side` neighbours by sums of two, of four and so on."""
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


def _sum_weighted(x: Tensor, share: list[float], dim: int) -> Tensor:
    """Add up neighbours by their share."""
    length = x.shape[dim] - len(share) + 1
    total = x.narrow(dim, 0, length) * share[0]
    for at, weight in enumerate(share[1:], 1):
        total.add_(x.narrow(dim, at, length), alpha=weight)
    return total


def _in_window(
    image: Tensor,
    radius: int,
    h: float,
    patch: int,
    distance: str,
    patch_weights: str,
    noise: float,
) -> Tensor:
    """Filter by one step of the window at a time, for all pixels at once."""
    finish = _check(h, patch, distance, patch_weights, noise)
    sums, padded, margin = Sums(image), pad(image, patch // 2), patch - 1
    share = PATCHES[patch_weights](patch).tolist()
    flat = patch_weights == "flat"
    scale = -1 / (h * h * image.shape[1] * (patch**2 if flat else 1))
    nothing = image.new_zeros(())

    def wider(where: tuple) -> tuple:
        return ..., *(slice(span.start, span.stop + margin) for span in where[1:])

    def summed(x: Tensor) -> Tensor:
        for dim in (-2, -1):
            x = _sum_flat(x, patch, dim) if flat else _sum_weighted(x, share, dim)
        return x

    for down, right in half(radius, *image.shape[-2:]):
        for here, there in sums.bands(down, right):
            score = squares(padded[wider(here)] - padded[wider(there)], scale, nothing)
            sums.add(weights_of(finish(summed(score), h, noise)), here, there)
    return sums.done()


def nonlocal_means_weights(
    image: Tensor,
    at: Place,
    *,
    h: float = 0.1,
    patch: int = 7,
    window: Window = 21,
    distance: str = "squared",
    patch_weights: str = "flat",
    noise: float = 0.0,
) -> Float[Tensor, "h w"]:
    """Return the weights of one pixel."""
    radius = radius_of(window)

    def find(piece: Tensor, at: Place) -> Tensor:
        score, keys = patch_score(piece, h, patch, distance, patch_weights, noise)
        return attended(keys, score, at, (piece.shape[-2], piece.shape[-1]), radius)

    return in_piece(image, at, None if radius is None else radius + patch, find)
