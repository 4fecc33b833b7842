"""Augmentation of images in training: a whole batch at once, a pure function of (seed, step).

All functions take pixels (b, c, h, w) from 0 to 255, as bytes or floats, and a random generator.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.errors import UsageError, lookup

Rng = np.random.Generator


def step_rng(seed: int, n: int, of: int = 5) -> Rng:
    """Random generator of step n, the same whenever it is asked for."""
    return np.random.Generator(np.random.PCG64([seed % 2**64, n, of]))


def _draw(rng: Rng, low: float, high: float, number: int) -> Tensor:
    return torch.from_numpy(rng.uniform(low, high, number).astype(np.float32))


def _each(values: Tensor) -> Tensor:
    """Reshape a number for each image so that it broadcasts over its pixels."""
    return values[:, None, None, None]


# Geometry


def flip(pixels: Tensor, rng: Rng) -> Tensor:
    """Random horizontal flip of half of the images."""
    turned = torch.from_numpy(rng.random(len(pixels)) < 0.5)
    return torch.where(_each(turned), pixels.flip(-1), pixels)


def crop(pixels: Tensor, rng: Rng, padding: int) -> Tensor:
    """Random crop to the same size after zero padding."""
    number, _, height, width = pixels.shape
    down, right = rng.integers(0, 2 * padding + 1, (2, number))
    return crop_at(pixels, padding, torch.from_numpy(down), torch.from_numpy(right))


def crop_at(pixels: Tensor, padding: int, down: Tensor, right: Tensor) -> Tensor:
    """Crop each zero-padded image at its own offset."""
    number, _, height, width = pixels.shape
    wide = F.pad(pixels, (padding,) * 4)
    windows = wide.unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(number), :, down, right].contiguous()


def zoom(pixels: Tensor, rng: Rng, least: float = 0.35) -> Tensor:
    """Random resized crop: at least a share of the area, of an aspect ratio from 3/4 to 4/3."""
    number = len(pixels)
    area = _draw(rng, least, 1, number)
    shape = _draw(rng, math.log(3 / 4), math.log(4 / 3), number).exp().sqrt()
    wide, high = (area.sqrt() * shape).clamp_max(1), (area.sqrt() / shape).clamp_max(1)
    right, down = ((1 - side) * _draw(rng, -1, 1, number) for side in (wide, high))
    nothing = torch.zeros(number)
    rows = [torch.stack([wide, nothing, right], 1), torch.stack([nothing, high, down], 1)]
    return affine(pixels, torch.stack(rows, 1), "border")


def affine(pixels: Tensor, matrices: Tensor, rim: str = "zeros") -> Tensor:
    """Warp each image by an affine matrix (2, 3) from output to input coordinates, -1 to 1."""
    grid = F.affine_grid(matrices, list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels.float(), grid, padding_mode=rim, align_corners=False)


# The operations of RandAugment and TrivialAugment


def _moved(pixels: Tensor, **terms: Tensor) -> Tensor:
    """Warp images by the identity with some entries changed, named by row and column."""
    matrices = torch.eye(2, 3).repeat(len(pixels), 1, 1)
    for place, values in terms.items():
        matrices[:, int(place[1]), int(place[2])] = values
    return affine(pixels, matrices)


def _rotate(pixels: Tensor, angle: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return _moved(pixels, _00=cos, _01=-sin, _10=sin, _11=cos)


def blend(pixels: Tensor, other: Tensor, amount: Tensor) -> Tensor:
    """Interpolate between another image (0) and an image (1), or extrapolate beyond it."""
    return torch.lerp(other, pixels, _each(amount)).clamp_(0, 255)


def greys(pixels: Tensor) -> Tensor:
    """Images in grey, with as many channels."""
    if pixels.shape[1] == 1:
        return pixels
    weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    return (pixels * weights).sum(1, keepdim=True).expand_as(pixels)


def brightness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Scale the brightness; an amount of 1 leaves images as they are, as below."""
    return blend(pixels, torch.zeros_like(pixels), amount)


def contrast(pixels: Tensor, amount: Tensor) -> Tensor:
    """Scale the contrast around the mean grey."""
    return blend(pixels, greys(pixels).mean((1, 2, 3), keepdim=True).expand_as(pixels), amount)


def colour(pixels: Tensor, amount: Tensor) -> Tensor:
    """Scale the saturation."""
    return blend(pixels, greys(pixels), amount)


def sharpness(pixels: Tensor, amount: Tensor) -> Tensor:
    """Blur or sharpen images; the border stays as it is."""
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
    """Stretch the histogram of each channel to 0 to 255."""
    low, high = pixels.amin((2, 3), keepdim=True), pixels.amax((2, 3), keepdim=True)
    stretched = (pixels - low) * (255 / (high - low).clamp_min(1))
    return torch.where(high > low, stretched.round(), pixels)


def equalize(pixels: Tensor) -> Tensor:
    """Equalise the histogram of each channel."""
    values = pixels.long().flatten(2)
    counts = torch.zeros(*values.shape[:2], 256).scatter_add_(
        2, values, torch.ones(()).expand(values.shape)
    )
    last = torch.gather(counts, 2, values.amax(2, keepdim=True))
    step = ((values.shape[2] - last) / 255).floor()
    below = counts.cumsum(2) - counts
    table = ((below + (step / 2).floor()) / step.clamp_min(1)).floor().clamp_(0, 255)
    equal = torch.where(step > 0, table.gather(2, values), values.float())
    return equal.view(pixels.shape)


class Operation(NamedTuple):
    """An operation: its amount at magnitude 1, whether its sign is drawn, and what it does."""

    most: float
    signed: bool
    apply: Callable[[Tensor, Tensor], Tensor]


# name -> what RandAugment (Cubuk et al. 2020) and TrivialAugment (Müller and Hutter 2021) draw from
OPERATIONS: dict[str, Operation] = {
    "same": Operation(0, False, lambda pixels, amount: pixels),
    "shear_x": Operation(0.3, True, lambda pixels, amount: _moved(pixels, _01=amount)),
    "shear_y": Operation(0.3, True, lambda pixels, amount: _moved(pixels, _10=amount)),
    "move_x": Operation(0.9, True, lambda pixels, amount: _moved(pixels, _02=amount)),
    "move_y": Operation(0.9, True, lambda pixels, amount: _moved(pixels, _12=amount)),
    "rotate": Operation(math.pi / 6, True, _rotate),
    "brightness": Operation(0.9, True, lambda pixels, amount: brightness(pixels, 1 + amount)),
    "contrast": Operation(0.9, True, lambda pixels, amount: contrast(pixels, 1 + amount)),
    "colour": Operation(0.9, True, lambda pixels, amount: colour(pixels, 1 + amount)),
    "sharpness": Operation(0.9, True, lambda pixels, amount: sharpness(pixels, 1 + amount)),
    "posterize": Operation(4, False, _posterize),
    "solarize": Operation(256, False, lambda pixels, amount: _solarize(pixels, 256 - amount)),
    "autocontrast": Operation(0, False, lambda pixels, amount: autocontrast(pixels)),
    "equalize": Operation(0, False, lambda pixels, amount: equalize(pixels)),
}


def random_operation(pixels: Tensor, rng: Rng, magnitudes: Tensor) -> Tensor:
    """Apply to each image one operation, drawn uniformly, of its magnitude from 0 to 1."""
    pixels = pixels.float().clone()
    kinds = rng.integers(0, len(OPERATIONS), len(pixels))
    signs = torch.from_numpy(2.0 * rng.integers(0, 2, len(pixels)) - 1).float()
    for number, (most, signed, apply) in enumerate(OPERATIONS.values()):
        some = torch.from_numpy(np.flatnonzero(kinds == number))
        if number and len(some):
            amount = most * magnitudes[some] * (signs[some] if signed else 1)
            pixels[some] = apply(pixels[some], amount)
    return pixels


def trivial(pixels: Tensor, rng: Rng, strength: float) -> Tensor:
    """TrivialAugment: one operation for each image, of a magnitude drawn uniformly."""
    return random_operation(pixels, rng, _draw(rng, 0, strength, len(pixels)))


def rand(pixels: Tensor, rng: Rng, strength: float) -> Tensor:
    """RandAugment: two operations for each image, of magnitude 9 of 30."""
    for _ in range(2):
        pixels = random_operation(pixels, rng, torch.full((len(pixels),), 0.3 * strength))
    return pixels


def jitter(pixels: Tensor, rng: Rng, strength: float) -> Tensor:
    """Colour jitter of four in five images: brightness, contrast, saturation, hue (SimCLR)."""
    number, reach = len(pixels), 0.4 * strength
    changed = pixels.float()
    for operation in (brightness, contrast, colour):
        changed = operation(changed, _draw(rng, 1 - reach, 1 + reach, number))
    changed = hue(changed, _draw(rng, -0.1 * strength, 0.1 * strength, number))
    return torch.where(_each(torch.from_numpy(rng.random(number) < 0.8)), changed, pixels)


# RGB to YIQ
_YIQ = ((0.299, 0.587, 0.114), (0.5959, -0.2746, -0.3213), (0.2115, -0.5227, 0.3112))


def hue(pixels: Tensor, turn: Tensor) -> Tensor:
    """Rotate the hue; a turn of 1 is once around the circle."""
    if pixels.shape[1] == 1:
        return pixels
    axes, angle = torch.tensor(_YIQ), 2 * math.pi * turn
    cos, sin = angle.cos(), angle.sin()
    turned = torch.eye(3).repeat(len(pixels), 1, 1)
    turned[:, 1, 1], turned[:, 1, 2], turned[:, 2, 1], turned[:, 2, 2] = cos, -sin, sin, cos
    matrices = axes.inverse() @ turned @ axes
    return (matrices @ pixels.flatten(2)).view(pixels.shape).clamp_(0, 255)


def grey(pixels: Tensor, rng: Rng) -> Tensor:
    """Random greyscale of one in five images."""
    drawn = torch.from_numpy(rng.random(len(pixels)) < 0.2)
    return torch.where(_each(drawn), greys(pixels.float()), pixels)


class AugmentOptions(NamedTuple):
    """What augmentations depend on."""

    padding: int  # pixels, before a random crop
    strength: float  # magnitude, from 0 to 1
    least: float = 0.35  # share of the area that a random resized crop keeps


# name -> augmentation of a batch
AUGMENTS: dict[str, Callable[[Tensor, Rng, AugmentOptions], Tensor]] = {
    "flip": lambda pixels, rng, options: flip(pixels, rng),
    "crop": lambda pixels, rng, options: crop(pixels, rng, options.padding),
    "zoom": lambda pixels, rng, options: zoom(pixels, rng, options.least),
    "trivial": lambda pixels, rng, options: trivial(pixels, rng, options.strength),
    "rand": lambda pixels, rng, options: rand(pixels, rng, options.strength),
    "jitter": lambda pixels, rng, options: jitter(pixels, rng, options.strength),
    "grey": lambda pixels, rng, options: grey(pixels, rng),
}


def augments(names: str, table: Mapping[str, Any] = AUGMENTS) -> list[Any]:
    """Augmentations that names such as flip+crop stand for, in their order."""
    if names == "none":
        return []
    each = names.split("+")
    if len(set(each)) != len(each) or "none" in each:
        raise UsageError(f"augment={names} has a name twice, or none beside others; name each once")
    return [lookup("augment", name, {**table, "none": None}) for name in each]


# Rectangles erased, or taken from another image


def boxes(rng: Rng, number: int, size: Sequence[int], areas: Tensor, shapes: Tensor) -> Tensor:
    """Masks (b, 1, h, w) of random rectangles of given areas (shares) and aspect ratios."""
    height, width = size
    high = (areas * height * width / shapes).sqrt().round().clamp(0, height)
    wide = (areas * height * width * shapes).sqrt().round().clamp(0, width)
    top = (_draw(rng, 0, 1, number) * (height - high + 1)).floor()
    left = (_draw(rng, 0, 1, number) * (width - wide + 1)).floor()
    rows, columns = torch.arange(height)[None], torch.arange(width)[None]
    down = (rows >= top[:, None]) & (rows < (top + high)[:, None])
    right = (columns >= left[:, None]) & (columns < (left + wide)[:, None])
    return (down[:, :, None] & right[:, None, :])[:, None]


def erase(images: Tensor, rng: Rng, share: float) -> Tensor:
    """Random erasing: noise in a rectangle of some normalised images (Zhong et al. 2020)."""
    picked = torch.from_numpy(np.flatnonzero(rng.random(len(images)) < share))
    number = len(picked)
    shapes = _draw(rng, math.log(0.3), math.log(1 / 0.3), number).exp()
    masks = boxes(rng, number, images.shape[2:], _draw(rng, 0.02, 1 / 3, number), shapes)
    noise = rng.standard_normal((number, *images.shape[1:]), np.float32)
    images = images.clone()
    images[picked] = torch.where(masks, torch.from_numpy(noise), images[picked])
    return images


def mix(
    images: Tensor, targets: Tensor, rng: Rng, mixup: float, cutmix: float
) -> tuple[Tensor, Tensor]:
    """Mixup (Zhang et al. 2018) and CutMix (Yun et al. 2019) of images and targets (b, labels).

    Where both are on, each image gets one of them, half each.
    """
    number = len(images)
    shares = {
        kind: torch.from_numpy(rng.beta(alpha, alpha, number).astype(np.float32))
        for kind, alpha in (("mixup", mixup), ("cutmix", cutmix))
        if alpha
    }
    if not shares:
        return images, targets
    other, kept = images.roll(1, 0), torch.ones(number, 1, *images.shape[2:])
    if "cutmix" in shares:
        masks = boxes(rng, number, images.shape[2:], 1 - shares["cutmix"], torch.ones(number))
        kept = (~masks).float()
    if "mixup" in shares:
        even = _each(shares["mixup"]).expand_as(kept)
        cut = torch.from_numpy(rng.random(number) < 0.5) & ("cutmix" in shares)
        kept = torch.where(_each(cut), kept, even)
    share = kept.mean((1, 2, 3))[:, None]
    return torch.lerp(other, images, kept), torch.lerp(targets.roll(1, 0), targets, share)


@dataclass(frozen=True)
class Augment:
    """All augmentation of a batch: pixels and labels in, images and soft targets out."""

    names: str
    labels: int
    normalise: Callable[[Tensor], Tensor]
    padding: int = 4
    strength: float = 1.0
    erase: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    smoothing: float = 0.0

    def __call__(self, pixels: Tensor, labels: Tensor, rng: Rng) -> tuple[Tensor, Tensor]:
        """Augmented, normalised images and their targets (b, labels)."""
        options = AugmentOptions(self.padding, self.strength)
        for one in augments(self.names):
            pixels = one(pixels, rng, options)
        images = self.normalise(pixels)
        if self.erase:
            images = erase(images, rng, self.erase)
        targets = smoothed(labels, self.labels, self.smoothing)
        return mix(images, targets, rng, self.mixup, self.cutmix)


def smoothed(labels: Tensor, number: int, smoothing: float) -> Tensor:
    """One-hot targets (b, labels) with label smoothing."""
    return F.one_hot(labels, number).float() * (1 - smoothing) + smoothing / number
