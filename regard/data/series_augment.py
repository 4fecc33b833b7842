"""Augmentation of series in training: a whole batch at once, a pure function of (seed, step).

All functions take normalised series (b, n1, ..., c), their lengths (b), a random generator and a
strength from 0 on, and return series and lengths. They act along the first axis, or on channels.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.data.augment import Rng, augments, smoothed

Batch = tuple[Tensor, Tensor]  # series (b, n1, ..., c) and lengths (b)


def _normal(rng: Rng, *shape: int) -> Tensor:
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


def _uniform(rng: Rng, *shape: int) -> Tensor:
    return torch.from_numpy(rng.random(shape, np.float32))


def _by_channel(x: Tensor, values: Tensor) -> Tensor:
    """Reshape a number for each series and channel (b, c) so that it broadcasts over x."""
    return values.view(len(x), *[1] * (x.ndim - 2), x.shape[-1])


def _by_step(x: Tensor, values: Tensor) -> Tensor:
    """Reshape a value for each series and step (b, n1) so that it broadcasts over x."""
    return values.view(*x.shape[:2], *[1] * (x.ndim - 2))


def jitter(x: Tensor, lengths: Tensor, rng: Rng, strength: float) -> Batch:
    """Add noise to every number."""
    return x + 0.2 * strength * _normal(rng, *x.shape), lengths


def scale(x: Tensor, lengths: Tensor, rng: Rng, strength: float) -> Batch:
    """Scale every channel by a random factor."""
    factors = (0.2 * strength * _normal(rng, len(x), x.shape[-1])).exp()
    return x * _by_channel(x, factors), lengths


def mask(x: Tensor, lengths: Tensor, rng: Rng, strength: float) -> Batch:
    """Set a stretch of up to a third of the steps to zero."""
    width = (_uniform(rng, len(x)) * min(1.0, strength / 3) * lengths).round()
    start = (_uniform(rng, len(x)) * (lengths - width + 1)).floor()
    steps = torch.arange(x.shape[1])
    hidden = (steps >= start[:, None]) & (steps < (start + width)[:, None])
    return x.masked_fill(_by_step(x, hidden), 0.0), lengths


def stretch(x: Tensor, lengths: Tensor, rng: Rng, strength: float) -> Batch:
    """Play each series slower or faster, by up to a quarter."""
    factors = (0.25 * strength * (2 * _uniform(rng, len(x)) - 1)).exp()
    size = (lengths * factors).round().clamp(min=1)
    steps = torch.arange(int(size.max())) * ((lengths - 1) / (size - 1).clamp(min=1))[:, None]
    return resample(x, lengths, steps), size.long()


def warp(x: Tensor, lengths: Tensor, rng: Rng, strength: float, knots: int = 4) -> Batch:
    """Play parts of each series slower and others faster (Um et al. 2017), its length unchanged."""
    speeds = (0.4 * strength * _normal(rng, len(x), knots)).exp()
    ends = torch.cat([torch.zeros(len(x), 1), speeds.cumsum(1)], 1) / speeds.sum(1, keepdim=True)
    share = torch.arange(x.shape[1]) / (lengths - 1).clamp(min=1)[:, None]
    place = share.clamp(max=1) * knots
    first = place.floor().clamp(max=knots - 1).long()
    low, high = ends.gather(1, first), ends.gather(1, first + 1)
    steps = torch.lerp(low, high, place - first) * (lengths - 1)[:, None]
    return resample(x, lengths, steps), lengths


def resample(x: Tensor, lengths: Tensor, steps: Tensor) -> Tensor:
    """Each series at other steps (b, n), by linear interpolation within its length."""
    last = (lengths - 1)[:, None]
    steps = steps.clamp(min=0).minimum(last)
    low = steps.floor().long()
    rows = torch.arange(len(x))[:, None]
    between = (steps - low).view(*steps.shape, *[1] * (x.ndim - 2))
    return torch.lerp(x[rows, low], x[rows, (low + 1).minimum(last)], between)


# name -> augmentation of a batch
SERIES_AUGMENTS: dict[str, Callable[[Tensor, Tensor, Rng, float], Batch]] = {
    "jitter": jitter,
    "scale": scale,
    "mask": mask,
    "stretch": stretch,
    "warp": warp,
}


@dataclass(frozen=True)
class SeriesAugment:
    """All augmentation of a batch: series, lengths and labels in, soft targets out beside them."""

    names: str
    labels: int
    strength: float = 1.0
    mixup: float = 0.0
    smoothing: float = 0.0

    def __call__(self, x: Tensor, lengths: Tensor, labels: Tensor, rng: Rng) -> tuple[Tensor, ...]:
        """Augmented series, their lengths, and targets (b, labels)."""
        for one in augments(self.names, SERIES_AUGMENTS):
            x, lengths = one(x, lengths, rng, self.strength)
        real = torch.arange(x.shape[1]) < lengths[:, None]
        x, targets = x * _by_step(x, real), smoothed(labels, self.labels, self.smoothing)
        if not self.mixup:
            return x, lengths, targets
        # a series goes on alone where the other has ended (Zhang et al. 2018: mixup)
        share = torch.from_numpy(rng.beta(self.mixup, self.mixup, len(x)).astype(np.float32))
        kept = share.view(-1, *[1] * (x.ndim - 1))
        targets = torch.lerp(targets.roll(1, 0), targets, share[:, None])
        return torch.lerp(x.roll(1, 0), x, kept), lengths.maximum(lengths.roll(1, 0)), targets
