"""Batches of augmented series of numbers with labels."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.data.augment import step_rng
from regard.data.batches import Shuffled
from regard.data.series import SeriesFormat, SeriesSet, stack
from regard.data.series_augment import SeriesAugment


class SeriesBatch(NamedTuple):
    """Series (b, n1, ..., c), their lengths, and the targets (b, labels)."""

    series: Tensor
    lengths: Tensor
    targets: Tensor


def normalised(part: SeriesSet, format: SeriesFormat) -> list[Tensor]:
    """Return the series of a part as a model reads them."""
    return [format.take(item.values, item.where) for item in part.items]


class SeriesBatches:
    """Batch n of augmented series, a pure function of (seed, n)."""

    def __init__(self, train: SeriesSet, format: SeriesFormat, labels: int, settings: Any):
        self.series = normalised(train, format)
        self.labels, self.settings = torch.from_numpy(train.labels), settings
        self.shuffled = Shuffled(len(train), settings.batch, settings.seed)
        strengths = settings.strength, settings.mixup, settings.label_smoothing
        self.augment = SeriesAugment(settings.augment, labels, *strengths)

    def __getitem__(self, n: int) -> SeriesBatch:
        """Return batch n."""
        picked, device = self.shuffled[n], self.settings.device
        series, lengths = stack([self.series[i] for i in picked])
        rng = step_rng(self.settings.seed, n)
        made = self.augment(series, lengths, self.labels[torch.from_numpy(picked)], rng)
        return SeriesBatch(*(part.to(device) for part in made))

    def epoch(self) -> float:
        """Return in how many batches all series are read once."""
        return self.shuffled.epoch()
