"""Texture synthesis by non-parametric sampling: hard attention to matching neighbourhoods."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from regard import UsageError, attend
from regard.files import write_atomically
from regard.filters import as_rgb, save_photo
from regard.gallery.filters import Filtered, begin
from regard.settings import setting
from regard.training import Progress
from regard.viewer import Panel, draw_gallery

_MAX_COPIED = 2**27  # numbers in the patches of a sample
_MAX_VALUES = 12  # of all keys, each drawn as a panel
_START = 3  # pixels to a side of the piece of the sample that growth begins with


@dataclass(frozen=True)
class TextureSettings:
    """Settings of a texture; several values of a key are drawn side by side."""

    out: Path | None = setting(None, "image to write: .png, .jpg, .webp or .bmp")
    height: int = setting(64, "height of the texture, in pixels", min=1, max=4096)
    width: int = setting(64, "width of the texture, in pixels", min=1, max=4096)
    patch: tuple[int, ...] = setting((11,), "side of a patch, in pixels", min=1, max=101)
    tolerance: tuple[float, ...] = setting(
        (0.1,), "relative error over the best match that is accepted", min=0, max=1000
    )
    seed: tuple[int, ...] = setting((0,), "random seed", min=0, max=2**63 - 1)
    threads: int | None = setting(None, "CPU threads", min=1, max=1024)


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
    if patch % 2 == 0:
        raise UsageError(f"patch={patch} has no centre; expected an odd number such as 7")
    reach = patch // 2
    samples = image.reshape(-1, *image.shape[-3:])
    if min(samples.shape[-2:]) < patch or min(height, width) < 1:
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
    sides = [min(_START, here, there) for here, there in zip(room, sample.shape[1:], strict=True)]
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


@torch.no_grad()
def grow(settings: TextureSettings, photo: str, *, quiet: bool = True) -> Filtered:
    """Grow a texture from a sample, or one for each value of the keys that have several."""
    keys = {name: getattr(settings, name) for name in ("patch", "tolerance", "seed")}
    choices = [dict(zip(keys, values, strict=True)) for values in product(*keys.values())]
    if len(choices) > _MAX_VALUES:
        raise UsageError(f"{len(choices)} textures; give at most {_MAX_VALUES} values")
    out, sample, title = begin(settings, photo, picture=len(choices) > 1)
    if 2 * sample.numel() * max(settings.patch) ** 2 > _MAX_COPIED:
        raise UsageError(
            f"a sample of {sample.shape[-1]} x {sample.shape[-2]} has too many patches of "
            f"patch={max(settings.patch)}; cut a smaller sample"
        )
    size = {"height": settings.height, "width": settings.width}
    with Progress("texture", len(choices) * size["height"] * size["width"], quiet=quiet) as bar:
        grown = [texture(sample, **size, **chosen, progress=bar.update) for chosen in choices]
    if len(choices) == 1:
        save_photo(grown[0], out)
        return Filtered(str(out))
    several = [name for name, values in keys.items() if len(values) > 1]
    panels = [
        Panel(as_rgb(image), ", ".join(f"{name}={chosen[name]}" for name in several))
        for image, chosen in zip(grown, choices, strict=True)
    ]
    rows = [panels[i : i + 4] for i in range(0, len(panels), 4)]
    write_atomically(out, draw_gallery(f"{title}: texture", rows))
    return Filtered(str(out))
