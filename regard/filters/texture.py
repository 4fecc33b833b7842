"""Texture synthesis by non-parametric sampling: hard attention to matching neighbourhoods."""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.errors import UsageError
from regard.filters.pixels import check_count, planes, radius_of

SEED = 3  # pixels to a side of the piece of the sample that growth begins with


class SampleNearest:
    """Hard attention: a key drawn at random among those nearly as near as the nearest."""

    def __init__(self, tolerance: float, generator: torch.Generator):
        self.tolerance, self.generator = tolerance, generator

    def __call__(self, scores: Tensor) -> Tensor:
        """Return one-hot weights, given minus the squared distances."""
        distance = scores.neg().clamp_(min=0)
        near = distance <= distance.amin(-1, keepdim=True) * (1 + self.tolerance) + 1e-6
        drawn = torch.multinomial(near.to(scores.dtype).flatten(0, -2), 1, generator=self.generator)
        drawn = drawn.view(*scores.shape[:-1], 1)
        return torch.zeros_like(scores).scatter_(-1, drawn, 1.0)


def texture(
    image: Float[Tensor, "*b c h w"],
    *,
    height: int = 64,
    width: int = 64,
    patch: int = 11,
    tolerance: float = 0.1,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Float[Tensor, "*b c h2 w2"]:
    """Synthesise a texture from a sample, pixel by pixel from the middle (Efros and Leung 1999).

    Each pixel is copied from a place of the sample whose neighbourhood matches the known one,
    drawn among those not more than `tolerance` worse than the best match. `progress` is called with
    the number of new pixels.
    """
    check_count(height=height, width=width)
    reach = radius_of(patch, "patch")
    samples = planes(image)
    if reach is None or min(samples.shape[-2:]) < patch or min(height, width) < 1:
        raise UsageError(
            f"patch={patch} for a sample of {samples.shape[-1]} x {samples.shape[-2]} and a "
            f"texture of {width} x {height}; expected a sample that is no smaller than a patch"
        )
    if not tolerance >= 0:
        raise UsageError(f"tolerance={tolerance} is too small; it must be at least 0")
    generator = torch.Generator().manual_seed(seed)
    grown = [
        _grow(sample, height, width, reach, tolerance, generator, progress or (lambda pixels: None))
        for sample in samples.detach().cpu()
    ]
    return torch.stack(grown).to(image).view(*image.shape[:-2], height, width)


def _grow(
    sample: Float[Tensor, "c h w"],
    height: int,
    width: int,
    reach: int,
    tolerance: float,
    generator: torch.Generator,
    progress: Callable[[int], None],
) -> Float[Tensor, "c h2 w2"]:
    """Synthesise one texture."""
    side, channels = 2 * reach + 1, len(sample)
    k = sample.unfold(1, side, 1).unfold(2, side, 1).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
    v = sample[:, reach : sample.shape[1] - reach, reach : sample.shape[2] - reach].flatten(1).mT
    # -sum of m (q - k)^2 = (-m q^2, 2 m q, -m) . (1, k, k^2): a dot product
    k = torch.cat([torch.ones_like(k[:, :1]), k, k.square()], -1).contiguous()
    at = (torch.arange(side, dtype=sample.dtype) - reach) / (side / 6.4)
    falloff = torch.exp(-(at.square().unsqueeze(1) + at.square()) / 2)
    sample_nearest = SampleNearest(tolerance, generator)
    canvas = sample.new_zeros(channels, height + 2 * reach, width + 2 * reach)
    known = sample.new_zeros(height + 2 * reach, width + 2 * reach)
    count = _plant_seed(sample, canvas, known, reach, generator)
    progress(count)
    inside = slice(reach, reach + height), slice(reach, reach + width)
    around = sample.new_ones(1, 1, side, side)
    while True:
        seen = F.conv2d(known[None, None], around)[0, 0] * (1 - known[inside])
        touching = F.max_pool2d(known[None, None], 3, 1, 1)[0, 0][inside] * (1 - known[inside])
        edge = touching.nonzero()
        if not len(edge):
            return canvas[:, *inside].clone()
        # those with most known neighbours first, in random order among equals
        noise = torch.rand(len(edge), generator=generator, dtype=seen.dtype)
        order = (seen[edge[:, 0], edge[:, 1]] + noise).argsort(descending=True)
        for y, x in edge[order].tolist():
            box = slice(y, y + side), slice(x, x + side)
            m = known[box] * falloff
            m = (m / m.sum()).expand(channels, -1, -1).flatten()
            q = canvas[:, *box].flatten()
            query = torch.cat([-(m * q * q).sum().view(1), 2 * m * q, -m]).unsqueeze(0)
            canvas[:, y + reach, x + reach] = attend(
                query, k, v, score="product", normalise=sample_nearest
            ).squeeze(0)
            known[y + reach, x + reach] = 1
        progress(len(edge))


def _plant_seed(
    sample: Tensor, canvas: Tensor, known: Tensor, reach: int, generator: torch.Generator
) -> int:
    """Copy a small random piece of the sample to the middle; return its number of pixels."""
    room = [size - 2 * reach for size in canvas.shape[1:]]
    sides = [min(SEED, here, there) for here, there in zip(room, sample.shape[1:], strict=True)]
    into = [
        slice(reach + (size - n) // 2, reach + (size - n) // 2 + n)
        for size, n in zip(room, sides, strict=True)
    ]
    out = []
    for size, n in zip(sample.shape[1:], sides, strict=True):
        start = int(torch.randint(size - n + 1, (), generator=generator))
        out.append(slice(start, start + n))
    canvas[:, *into], known[*into] = sample[:, *out], 1
    return sides[0] * sides[1]
