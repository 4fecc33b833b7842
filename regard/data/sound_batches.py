"""Batches of augmented spectrograms of like length."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.data.augment import step_rng
from regard.data.batches import IndexBatches
from regard.data.sounds import Sounds
from regard.data.spectrogram import SoundFormat


def pad_sounds(
    features: Sequence[Tensor], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Stack spectrograms to (b, t, mels) filled up with zeros, and return their frames (b)."""
    lengths = torch.tensor([len(one) for one in features], device=device)
    return pad_sequence(list(features), batch_first=True).to(device), lengths


def in_buckets(lengths: np.ndarray, buckets: int) -> np.ndarray:
    """Length of the longest in the bucket of each, where all have about as many."""
    shares = np.arange(1, buckets + 1) / buckets
    edges = np.unique(np.quantile(lengths, shares, method="higher"))
    return edges[np.searchsorted(edges, lengths)]


class SoundBatches:
    """Batch n of augmented spectrograms, a pure function of (seed, n).

    `make(rows, sound, lengths, frames)` makes a batch of them; `too_short(i, frames)` tells whether
    sound i would be of no use with so few frames, so that its speed is kept.
    """

    def __init__(
        self,
        sounds: Sounds,
        format: SoundFormat,
        settings: Any,
        make: Callable[[np.ndarray, Tensor, Tensor, int], Any],
        too_short: Callable[[int, int], bool] = lambda i, frames: False,
    ):
        self.sounds, self.format, self.settings = sounds, format, settings
        self.make, self.too_short = make, too_short
        frames = np.array([format.frames(n) for n in sounds.samples.tolist()])
        budget = max(1, round(settings.batch_seconds / format.hop))
        self.batches = IndexBatches([in_buckets(frames, settings.buckets)], budget, settings.seed)
        self.plain = replace(settings.augment, speeds=(1.0,))

    def features(self, i: int, n: int, place: int) -> Tensor:
        """Augmented spectrogram of sound i at a place of batch n."""
        samples, seed = self.sounds.read(i), self.settings.seed
        for augment in (self.settings.augment, self.plain):
            rng = step_rng(seed, n, 16 + place)
            features = augment(samples, self.format, rng)
            if not self.too_short(i, len(features)):
                break
        return features

    def __getitem__(self, n: int) -> Any:
        """Batch n."""
        rows = self.batches[n]
        features = [self.features(i, n, place) for place, i in enumerate(rows.tolist())]
        sound, lengths = pad_sounds(features)
        return self.make(rows, sound, lengths, sum(map(len, features)))

    def epoch(self) -> float:
        """Number of batches in which all sounds are read once."""
        return self.batches.len_epoch()
