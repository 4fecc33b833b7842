"""Augmentation of sounds in training: speed and masked stretches, a pure function of (seed, n)."""

from dataclasses import dataclass

import numpy as np
import soxr
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.augment import Rng
from regard.data.spectrogram import SoundFormat, htk_mel
from regard.errors import UsageError
from regard.settings import setting


@dataclass(frozen=True)
class SoundAugment:
    """Speed perturbation (Ko et al. 2015), SpecAugment (Park et al. 2019; 2020) and VTLP."""

    speeds: tuple[float, ...] = setting(
        (0.9, 1.0, 1.1), "speeds; each sound gets one at random", min=0.5, max=2
    )
    time_masks: int = setting(10, "number of time masks", min=0, max=100)
    time_share: float = setting(0.05, "maximum share of frames in a mask", min=0, max=1)
    frequency_masks: int = setting(2, "number of frequency masks", min=0, max=100)
    frequency_share: float = setting(0.33, "maximum share of filters in a mask", min=0, max=1)
    time_warp: int = setting(0, "maximum time warp, in frames", min=0, max=1000)
    frequency_warp: float = setting(
        0.0, "maximum frequency scaling: by 1 plus or minus this", min=0, max=0.5
    )

    def check(self) -> "SoundAugment":
        """Refuse speeds that are none."""
        if not self.speeds or min(self.speeds) <= 0:
            raise UsageError(f"speeds={self.speeds}; expected factors such as 0.9,1.0,1.1")
        return self

    def __call__(self, samples: np.ndarray, format: SoundFormat, rng: Rng) -> Tensor:
        """Augmented spectrogram (frames, mels) of samples (n,)."""
        factor = self.speeds[int(rng.integers(len(self.speeds)))]
        features = format.spectrogram(change_speed(samples, factor))
        if self.time_warp:
            features = warp_time(features, rng, self.time_warp)
        if self.frequency_warp:
            factor = 1 + self.frequency_warp * (2 * float(rng.random()) - 1)
            features = warp_frequencies(features, factor, format.rate)
        features = mask_stretches(features, rng, self.frequency_masks, self.frequency_share, 1)
        return mask_stretches(features, rng, self.time_masks, self.time_share, 0)


def change_speed(samples: np.ndarray, factor: float) -> np.ndarray:
    """Play samples (n,) so many times as fast: n / factor samples, of another pitch."""
    return samples if factor == 1 else soxr.resample(samples, factor, 1.0)


def mask_stretches(features: Tensor, rng: Rng, count: int, share: float, axis: int) -> Tensor:
    """Set random stretches of frames (axis 0) or filters (axis 1) to the mean of the features.

    Each is of any length from none to a share of the axis.
    """
    size = features.shape[axis]
    widths = rng.integers(0, int(share * size) + 1, count)
    starts = (rng.random(count) * (size - widths + 1)).astype(np.int64)
    at = np.arange(size)[:, None]
    masked = torch.from_numpy(((at >= starts) & (at < starts + widths)).any(1))
    return torch.where(masked[:, None] if axis == 0 else masked, features.mean(), features)


def warp_time(features: Tensor, rng: Rng, most: int) -> Tensor:
    """Move a random frame by up to so many frames; what lies before and after is stretched."""
    frames = len(features)
    most = min(most, (frames - 1) // 2)
    if most < 1:
        return features
    middle = int(rng.integers(most, frames - most))
    to = middle + int(rng.integers(-most, most + 1))
    if not 0 < to < frames or not middle > 0:
        return features
    sides = ((features[:middle], to), (features[middle:], frames - to))
    stretched = [
        F.interpolate(side.T[None], size=length, mode="linear", align_corners=True)[0].T
        for side, length in sides
    ]
    return torch.cat(stretched)


def warp_frequencies(features: Tensor, factor: float, rate: int) -> Tensor:
    """Move what lies at a frequency of log-mel features (frames, mels) to factor times as much.

    Vocal tract length perturbation (Jaitly and Hinton 2013): up to 4,800 Hz; above, frequencies are
    bent so that half the rate stays where it is. Filters are taken as even on HTK's mel scale.
    """
    top = rate / 2
    mels = np.linspace(htk_mel(np.array(20.0)), htk_mel(np.array(top)), features.shape[1] + 2)[1:-1]
    hertz = 700 * np.expm1(mels / 1127)
    bend = min(4800.0, 0.6 * top) * min(factor, 1.0)
    steep = (top - bend / factor) / (top - bend)
    source = np.where(hertz <= bend, hertz / factor, top - steep * (top - hertz))
    at = np.interp(htk_mel(source), mels, np.arange(len(mels)))
    low = np.floor(at).astype(np.int64)
    high = np.minimum(low + 1, len(mels) - 1)
    share = torch.from_numpy((at - low).astype(np.float32))
    return torch.lerp(features[:, low], features[:, high], share)
