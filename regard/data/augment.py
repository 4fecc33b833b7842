"""Images changed at random while training, a whole batch at once and always alike for a key.

All functions take pixels (b, c, h, w) from 0 to 255, as bytes or floats, and a chance.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.errors import UsageError, lookup

Chance = np.random.Generator


def chance_of(seed: int, n: int, of: int = 5) -> Chance:
    """Return the chance of step n, the same whenever it is asked for."""
    return np.random.Generator(np.random.PCG64([seed % 2**64, n, of]))


def _draw(chance: Chance, low: float, high: float, number: int) -> Tensor:
    return torch.from_numpy(chance.uniform(low, high, number).astype(np.float32))


def _each(values: Tensor) -> Tensor:
    """Lay a number for each image out so that it meets all its pixels."""
    return values[:, None, None, None]


# Where things are


def flip(pixels: Tensor, chance: Chance) -> Tensor:
    """Mirror half of the images, left and right."""
    turned = torch.from_numpy(chance.random(len(pixels)) < 0.5)
    return torch.where(_each(turned), pixels.flip(-1), pixels)


def crop(pixels: Tensor, chance: Chance, padding: int) -> Tensor:
    """Cut images of the same size out of ones with a black rim."""
    number, _, height, width = pixels.shape
    down, right = chance.integers(0, 2 * padding + 1, (2, number))
    return crop_at(pixels, padding, torch.from_numpy(down), torch.from_numpy(right))


def crop_at(pixels: Tensor, padding: int, down: Tensor, right: Tensor) -> Tensor:
    """Cut each image out of one with a rim, so far down and right."""
    number, _, height, width = pixels.shape
    wide = F.pad(pixels, (padding,) * 4)
    windows = wide.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(number), :, down, right].contiguous()


def zoom(pixels: Tensor, chance: Chance, least: float = 0.35) -> Tensor:
    """Enlarge a random part of each image: of a share of its area, a little stretched."""
    number = len(pixels)
    area = _draw(chance, least, 1, number)
    shape = _draw(chance, math.log(3 / 4), math.log(4 / 3), number).exp().sqrt()
    wide, high = (area.sqrt() * shape).clamp_max(1), (area.sqrt() / shape).clamp_max(1)
    right, down = ((1 - side) * _draw(chance, -1, 1, number) for side in (wide, high))
    nothing = torch.zeros(number)
    rows = [torch.stack([wide, nothing, right], 1), torch.stack([nothing, high, down], 1)]
    return affine(pixels, torch.stack(rows, 1), "border")


def affine(pixels: Tensor, matrices: Tensor, rim: str = "zeros") -> Tensor:
    """Move each image by a matrix (2, 3) that says where each of its points was, from -1 to 1."""
    grid = F.affine_grid(matrices, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels.float(), grid, padding_mode=rim, align_corners=False)


# What single images go through in RandAugment and TrivialAugment


def _moved(pixels: Tensor, **terms: Tensor) -> Tensor:
    """Move images by a matrix with some terms, named by row and column."""
    matrices = torch.eye(2, 3).repeat(len(pixels), 1, 1)
    for place, values in terms.items():
        matrices[:, int(place[1]), int(place[2])] = values
    return affine(pixels, matrices)


def _rotate(pixels: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return _moved(pixels, _00=cos, _01=-sin, _10=sin, _11=cos)


def blend(pixels: Tensor, other: Tensor, amount: Tensor) -> Tensor:
    """Go from another image towards an image, or beyond it: amount 1 is the image itself."""
    return torch.lerp(other, pixels, _each(amount)).clamp_(0, 255)


def greys(pixels: Tensor) -> Tensor:
    """Return images without colour."""
    if pixels.shape[1] == 1:
        return pixels
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    return (pixels * weights).sum(1, keepdim=True).expand_as(pixels)


def brightness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Make images darker or brighter; 1 leaves them as they are, as below."""
    return blend(pixels, torch.zeros_like(pixels), amount)


def contrast(pixels: Tensor, amount: Tensor) -> Tensor:
    """Bring images nearer to their mean grey, or away from it."""
    return blend(pixels, greys(pixels).mean((1, 2, 3), keepdim=True).expand_as(pixels), amount)


def colour(pixels: Tensor, amount: Tensor) -> Tensor:
    """Make images paler or more colourful."""
    return blend(pixels, greys(pixels), amount)


def sharpness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Blur images or make them sharper; the rim stays as it is."""
    if min(pixels.shape[2:]) < 3:
        return pixels
    blurred = pixels.clone()
    inner = blurred[:, :, 1:-1, 1:-1]
    # the weights 1 around and 5 in the middle
    inner.mul_(4 / 13).add_(F.avg_pool2d(pixels, 3, 1), alpha=9 / 13)
    return blend(pixels, blurred, amount)


def _posterize(pixels: Tensor, lost: Tensor) -> Tensor:
    step = _each(2 ** lost.round())
    return (pixels / step).floor() * step


def _solarize(pixels: Tensor, above: Tensor) -> Tensor:
    return torch.where(pixels >= _each(above), 255 - pixels, pixels)


def autocontrast(pixels: Tensor) -> Tensor:
    """Stretch each channel to reach from 0 to 255."""
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    stretched = (pixels - low) * (255 / (high - low).clamp_min(1))
    return torch.where(high > low, stretched.round(), pixels)


def equalize(pixels: Tensor) -> Tensor:
    """Let every brightness of a channel be about as frequent."""
    values = pixels.long().flatten(2)
    counts = torch.zeros(*values.shape[:2], 256).scatter_add_(
        2, values, torch.ones(()).expand(values.shape)
    )
    last = torch.gather(counts, 2, values.amax(2, keepdim=True))
    step = ((values.shape[2] - last) / 255).floor()
    below = counts.cumsum(2) - counts
    table = ((below + (step / 2).floor()) / step.clamp_min(1)).floor().clamp_(0, 255)
    found = torch.where(step > 0, table.gather(2, values), values.float())
    return found.view(pixels.shape)


class Change(NamedTuple):
    """One change: what a strength of 1 means, whether it goes both ways, and what it does."""

    most: float
    both_ways: bool
    does: Callable[[Tensor, Tensor], Tensor]


# name -> what RandAugment (Cubuk et al. 2020) and TrivialAugment (Müller and Hutter 2021) draw from
CHANGES: dict[str, Change] = {
    "same": Change(0, False, lambda pixels, amount: pixels),
    "shear_x": Change(0.3, True, lambda pixels, amount: _moved(pixels, _01=amount)),
    "shear_y": Change(0.3, True, lambda pixels, amount: _moved(pixels, _10=amount)),
    "move_x": Change(0.9, True, lambda pixels, amount: _moved(pixels, _02=amount)),
    "move_y": Change(0.9, True, lambda pixels, amount: _moved(pixels, _12=amount)),
    "rotate": Change(math.pi / 6, True, _rotate),
    "brightness": Change(0.9, True, lambda pixels, amount: brightness(pixels, 1 + amount)),
    "contrast": Change(0.9, True, lambda pixels, amount: contrast(pixels, 1 + amount)),
    "colour": Change(0.9, True, lambda pixels, amount: colour(pixels, 1 + amount)),
    "sharpness": Change(0.9, True, lambda pixels, amount: sharpness(pixels, 1 + amount)),
    "posterize": Change(4, False, _posterize),
    "solarize": Change(256, False, lambda pixels, amount: _solarize(pixels, 256 - amount)),
    "autocontrast": Change(0, False, lambda pixels, amount: autocontrast(pixels)),
    "equalize": Change(0, False, lambda pixels, amount: equalize(pixels)),
}


def change(pixels: Tensor, chance: Chance, strengths: Tensor) -> Tensor:
    """Let each image go through one change, drawn by chance, of its strength from 0 to 1."""
    pixels = pixels.float().clone()
    kinds = chance.integers(0, len(CHANGES), len(pixels))
    signs = torch.from_numpy(2.0 * chance.integers(0, 2, len(pixels)) - 1).float()
    for number, (most, both_ways, does) in enumerate(CHANGES.values()):
        some = torch.from_numpy(np.flatnonzero(kinds == number))
        if number and len(some):
            amount = most * strengths[some] * (signs[some] if both_ways else 1)
            pixels[some] = does(pixels[some], amount)
    return pixels


def trivial(pixels: Tensor, chance: Chance, strength: float) -> Tensor:
    """Change each image once, by a strength drawn from all up to a most."""
    return change(pixels, chance, _draw(chance, 0, strength, len(pixels)))


def rand(pixels: Tensor, chance: Chance, strength: float) -> Tensor:
    """Change each image twice, by a third of the strength (9 of 30)."""
    for _ in range(2):
        pixels = change(pixels, chance, torch.full((len(pixels),), 0.3 * strength))
    return pixels


def jitter(pixels: Tensor, chance: Chance, strength: float) -> Tensor:
    """Change brightness, contrast, colour and hue of four in five images (Chen et al. 2020)."""
    number, reach = len(pixels), 0.4 * strength
    changed = pixels.float()
    for change in (brightness, contrast, colour):
        changed = change(changed, _draw(chance, 1 - reach, 1 + reach, number))
    changed = hue(changed, _draw(chance, -0.1 * strength, 0.1 * strength, number))
    return torch.where(_each(torch.from_numpy(chance.random(number) < 0.8)), changed, pixels)


# brightness and two axes of colour, of red, green and blue
_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def hue(pixels: Tensor, turn: Tensor) -> Tensor:
    """Turn the colours of images around the circle; 1 is once around."""
    if pixels.shape[1] == 1:
        return pixels
    axes, angle = torch.tensor(_YIQ), 2 * math.pi * turn
    cos, sin = angle.cos(), angle.sin()
    turned = torch.eye(3).repeat(len(pixels), 1, 1)
    turned[:, 1, 1], turned[:, 1, 2], turned[:, 2, 1], turned[:, 2, 2] = cos, -sin, sin, cos
    matrices = axes.inverse() @ turned @ axes
    return (matrices @ pixels.flatten(2)).view(pixels.shape).clamp_(0, 255)


def grey(pixels: Tensor, chance: Chance) -> Tensor:
    """Take the colour from one in five images."""
    drawn = torch.from_numpy(chance.random(len(pixels)) < 0.2)
    return torch.where(_each(drawn), greys(pixels.float()), pixels)


class Ways(NamedTuple):
    """What a change of a batch may depend on."""

    padding: int
    strength: float
    least: float = 0.35  # share of an image that zoom keeps


# name -> what it does to a batch
AUGMENTS: dict[str, Callable[[Tensor, Chance, Ways], Tensor]] = {
    "flip": lambda pixels, chance, ways: flip(pixels, chance),
    "crop": lambda pixels, chance, ways: crop(pixels, chance, ways.padding),
    "zoom": lambda pixels, chance, ways: zoom(pixels, chance, ways.least),
    "trivial": lambda pixels, chance, ways: trivial(pixels, chance, ways.strength),
    "rand": lambda pixels, chance, ways: rand(pixels, chance, ways.strength),
    "jitter": lambda pixels, chance, ways: jitter(pixels, chance, ways.strength),
    "grey": lambda pixels, chance, ways: grey(pixels, chance),
}


def augments(names: str) -> list[Callable[[Tensor, Chance, Ways], Tensor]]:
    """Return what names such as flip+crop stand for, in their order; none stands for nothing."""
    if names == "none":
        return []
    found = names.split("+")
    if len(set(found)) != len(found):
        raise UsageError(f"augment={names} has a name twice; name each once")
    return [lookup("augment", name, {**AUGMENTS, "none": AUGMENTS["flip"]}) for name in found]


# Parts of images taken away or put in


def boxes(
    chance: Chance, number: int, size: Sequence[int], areas: Tensor, shapes: Tensor
) -> Tensor:
    """Return masks (b, 1, h, w) of rectangles of some areas (shares) and shapes, drawn anywhere."""
    height, width = size
    high = (areas * height * width / shapes).sqrt().round().clamp(0, height)
    wide = (areas * height * width * shapes).sqrt().round().clamp(0, width)
    top = (_draw(chance, 0, 1, number) * (height - high + 1)).floor()
    left = (_draw(chance, 0, 1, number) * (width - wide + 1)).floor()
    rows, columns = torch.arange(height)[None], torch.arange(width)[None]
    down = (rows >= top[:, None]) & (rows < (top + high)[:, None])
    right = (columns >= left[:, None]) & (columns < (left + wide)[:, None])
    return (down[:, :, None] & right[:, None, :])[:, None]


def erase(images: Tensor, chance: Chance, share: float) -> Tensor:
    """Put noise in the place of a rectangle in a share of normalised images (Zhong et al. 2020)."""
    picked = torch.from_numpy(np.flatnonzero(chance.random(len(images)) < share))
    number = len(picked)
    shapes = _draw(chance, math.log(0.3), math.log(1 / 0.3), number).exp()
    masks = boxes(chance, number, images.shape[2:], _draw(chance, 0.02, 1 / 3, number), shapes)
    noise = chance.standard_normal((number, *images.shape[1:]), np.float32)
    images = images.clone()
    images[picked] = torch.where(masks, torch.from_numpy(noise), images[picked])
    return images


def mix(
    images: Tensor, targets: Tensor, chance: Chance, mixup: float, cutmix: float
) -> tuple[Tensor, Tensor]:
    """Mix each image with another of the batch, and its targets (b, labels) in the same share.

    Mixup (Zhang et al. 2018) adds them; CutMix (Yun et al. 2019) puts a rectangle of the other in.
    Where both are on, each image gets one of them, half each.
    """
    number = len(images)
    shares = {
        kind: torch.from_numpy(chance.beta(alpha, alpha, number).astype(np.float32))
        for kind, alpha in (("mixup", mixup), ("cutmix", cutmix))
        if alpha
    }
    if not shares:
        return images, targets
    other, kept = images.roll(1, 0), torch.ones(number, 1, *images.shape[2:])
    if "cutmix" in shares:
        masks = boxes(chance, number, images.shape[2:], 1 - shares["cutmix"], torch.ones(number))
        kept = (~masks).float()
    if "mixup" in shares:
        even = _each(shares["mixup"]).expand_as(kept)
        cut = torch.from_numpy(chance.random(number) < 0.5) & ("cutmix" in shares)
        kept = torch.where(_each(cut), kept, even)
    share = kept.mean((1, 2, 3))[:, None]
    return torch.lerp(other, images, kept), torch.lerp(targets.roll(1, 0), targets, share)


@dataclass(frozen=True)
class Augment:
    """All changes of a batch in training: pixels and labels in, images and soft targets out."""

    names: str
    labels: int
    normalise: Callable[[Tensor], Tensor]
    padding: int = 4
    strength: float = 1.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.0

    def __call__(self, pixels: Tensor, labels: Tensor, chance: Chance) -> tuple[Tensor, Tensor]:
        """Return changed, normalised images and their targets (b, labels)."""
        ways = Ways(self.padding, self.strength)
        for one in augments(self.names):
            pixels = one(pixels, chance, ways)
        images = self.normalise(pixels)
        if self.erase:
            images = erase(images, chance, self.erase)
        targets = smoothed(labels, self.labels, self.smoothing)
        return mix(images, targets, chance, self.mixup, self.cutmix)


def smoothed(labels: Tensor, number: int, smoothing: float) -> Tensor:
    """Return targets (b, labels) that are sure of a label but for a share spread over all."""
    return F.one_hot(labels, number).float() * (1 - smoothing) + smoothing / number
