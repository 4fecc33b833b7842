"""Log-mel filter banks: samples of a sound to frames of features, as a model wants them."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.sound_files import Samples, read_sound
from regard.errors import UsageError
from regard.settings import setting

_SOFTEST = 0.05  # share of a filter's values that are called its softest
_LEAST_STD = 1e-3  # of a filter that hardly moves, such as in silence


class Sizes(NamedTuple):
    """How a sound is cut into frames, in samples."""

    rate: int
    window: int
    hop: int
    mels: int


@dataclass(frozen=True)
class SoundFormat:
    """The spectrograms that a model takes: rate, frames, mel filters, and their normalisation."""

    rate: int = setting(16000, "sampling rate in Hz", min=1000, max=192_000)
    mels: int = setting(80, "number of mel filters", min=1, max=512)
    window: float = setting(0.025, "frame length in seconds", above=0, max=1)
    hop: float = setting(0.01, "seconds between frames", above=0, max=1)
    features: str = setting("kaldi", "spectrogram", choices=lambda: SPECTROGRAM_KINDS)
    normalise: str = setting(
        "utterance", "normalisation of the spectrogram", choices=lambda: _NORMALISE
    )
    mean: tuple[float, ...] = setting((), "mean of each filter", min=-1000, max=1000)
    std: tuple[float, ...] = setting((), "standard deviation of each filter", above=0, max=1000)

    def key(self) -> int:
        """All that the samples depend on: their rate."""
        return self.rate

    def check(self) -> "SoundFormat":
        """Refuse numbers that mean nothing."""
        sizes = self.sizes
        if not 1 <= sizes.hop <= sizes.window or sizes.window < 8:
            raise UsageError(
                f"window={self.window} and hop={self.hop} are {sizes.window} and {sizes.hop} "
                f"samples at rate={self.rate}; expected a hop of at least 1, and no larger than a "
                "window of at least 8"
            )
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.mels):
            raise UsageError(
                f"{len(self.mean)} means and {len(self.std)} standard deviations for "
                f"mels={self.mels}; expected one of each for a filter"
            )
        return self

    @property
    def sizes(self) -> Sizes:
        """Rate, window, hop and filters as whole numbers."""
        window, hop = (math.floor(x * self.rate + 0.5) for x in (self.window, self.hop))
        return Sizes(self.rate, window, hop, self.mels)

    def read(self, source: Path | str | bytes | np.ndarray | Samples, name: str = "") -> np.ndarray:
        """Samples (n,) of a sound: a path, the bytes of a file, or samples."""
        return read_sound(source, self.rate, name)

    def log_mel(self, samples: np.ndarray | Tensor) -> Tensor:
        """Features (frames, mels) of samples (n,), as they are before normalisation."""
        samples = torch.as_tensor(samples, dtype=torch.float32)
        sizes, features = self.sizes, SPECTROGRAM_KINDS[self.features]
        short = features.least(sizes) - len(samples)
        return features.compute(F.pad(samples, (0, max(0, short))), sizes)

    def spectrogram(self, samples: np.ndarray | Tensor) -> Tensor:
        """Normalised features (frames, mels) of samples (n,) of its rate."""
        return _NORMALISE[self.normalise](self.log_mel(samples), self)

    def frames(self, samples: int) -> int:
        """Number of frames of a number of samples; at least one."""
        features, sizes = SPECTROGRAM_KINDS[self.features], self.sizes
        return features.frames(max(samples, features.least(sizes)), sizes)

    def seconds(self, frame: float) -> float:
        """Start of the stretch that a frame stands for: its middle less half a hop."""
        sizes = self.sizes
        middle = frame * sizes.hop + SPECTROGRAM_KINDS[self.features].middle(sizes)
        return max(0.0, (middle - sizes.hop / 2) / sizes.rate)


# Normalisation


def _by_utterance(features: Tensor, format: SoundFormat) -> Tensor:
    """Bring each filter to mean 0 and standard deviation 1 over the frames of a sound.

    Frames of digital silence, which no room is ever in, are taken for the softest of the others:
    they would move both as no sound does.
    """
    silent = features.amax(1) == features.amin()
    if silent.any() and not silent.all():
        softest = features[~silent].quantile(_SOFTEST, 0)
        std, mean = torch.std_mean(features[~silent], 0, correction=0)
        features = torch.where(silent[:, None], softest, features)
    else:
        std, mean = torch.std_mean(features, 0, correction=0)
    return (features - mean) / std.clamp_min(_LEAST_STD)


def _by_set(features: Tensor, format: SoundFormat) -> Tensor:
    """Bring each filter to mean 0 and standard deviation 1 over a whole set, as it was measured."""
    if not format.mean:
        raise UsageError("normalise=global needs mean and std of the training set; they are empty")
    mean, std = (torch.tensor(values, dtype=torch.float32) for values in (format.mean, format.std))
    return (features - mean) / std


# name -> what normalises the features of a sound
_NORMALISE: dict[str, Callable[[Tensor, SoundFormat], Tensor]] = {
    "utterance": _by_utterance,
    "global": _by_set,
    "none": lambda features, format: features,
}


# Filters


def htk_mel(hertz: np.ndarray) -> np.ndarray:
    """Frequencies on the mel scale of HTK and Kaldi."""
    return 1127.0 * np.log1p(hertz / 700.0)


def _slaney_mel(hertz: np.ndarray) -> np.ndarray:
    """Slaney's mel scale: linear below 1000 Hz, logarithmic above."""
    above = 15 + 27 * np.log(np.maximum(hertz, 1000) / 1000) / np.log(6.4)
    return np.where(hertz < 1000, 3 * hertz / 200, above)


def _slaney_hertz(mel: np.ndarray) -> np.ndarray:
    return np.where(mel < 15, 200 * mel / 3, 1000 * np.exp((mel - 15) * np.log(6.4) / 27))


@lru_cache(maxsize=16)
def _kaldi_filters(sizes: Sizes, fft: int) -> Tensor:
    """Triangles (bins, mels) between 20 Hz and half the rate, even on Kaldi's mel scale."""
    edges = np.linspace(htk_mel(np.array(20.0)), htk_mel(np.array(sizes.rate / 2)), sizes.mels + 2)
    bins = htk_mel(np.arange(fft // 2) * sizes.rate / fft)[:, None]
    left, middle, right = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins - left) / (middle - left), (right - bins) / (right - middle)
    filters = np.maximum(0, np.minimum(rising, falling))
    return torch.from_numpy(np.pad(filters, ((0, 1), (0, 0))).astype(np.float32))


@lru_cache(maxsize=16)
def _slaney_filters(sizes: Sizes, fft: int) -> Tensor:
    """Triangles (bins, mels) of equal area, even on Slaney's mel scale, as librosa's."""
    edges = _slaney_hertz(np.linspace(0, _slaney_mel(np.array(sizes.rate / 2)), sizes.mels + 2))
    bins = (np.arange(fft // 2 + 1) * sizes.rate / fft)[:, None]
    left, middle, right = edges[:-2], edges[1:-1], edges[2:]
    rising, falling = (bins - left) / (middle - left), (right - bins) / (right - middle)
    filters = np.maximum(0, np.minimum(rising, falling)) * 2 / (right - left)
    return torch.from_numpy(filters.astype(np.float32))


@lru_cache(maxsize=16)
def _hann(window: int, periodic: bool = True) -> Tensor:
    return torch.hann_window(window, periodic, dtype=torch.float64).float()


@lru_cache(maxsize=16)
def _povey(window: int) -> Tensor:
    """Kaldi's window: a Hann window to the power of 0.85."""
    return torch.hann_window(window, False, dtype=torch.float64).pow(0.85).float()


# Features


def _power_of_two(window: int) -> int:
    return 1 << (window - 1).bit_length()


def _power(spectrum: Tensor) -> Tensor:
    return spectrum.real.square().add_(spectrum.imag.square())


def _kaldi(samples: Tensor, sizes: Sizes) -> Tensor:
    """Kaldi's filter bank without dither: frames lie wholly within the sound."""
    frames = samples.unfold(0, sizes.window, sizes.hop)
    frames = frames - frames.mean(1, keepdim=True)
    before = torch.cat([frames[:, :1], frames[:, :-1]], 1)
    frames = (frames - 0.97 * before) * _povey(sizes.window)
    fft = _power_of_two(sizes.window)
    power = _power(torch.fft.rfft(frames, fft))
    return (power @ _kaldi_filters(sizes, fft)).clamp_min(torch.finfo(torch.float32).eps).log()


def _stft_power(samples: Tensor, sizes: Sizes, fft: int, pad: str) -> Tensor:
    """Power (frames, bins) of frames around every hop."""
    window = _hann(sizes.window)
    spectrum = torch.stft(
        samples, fft, sizes.hop, sizes.window, window, pad_mode=pad, return_complex=True
    )
    return _power(spectrum).T


def _librosa(samples: Tensor, sizes: Sizes) -> Tensor:
    """The logarithm of librosa's mel spectrogram, at least 1e-10; zeros lie around the sound."""
    fft = _power_of_two(sizes.window)
    power = _stft_power(samples, sizes, fft, "constant")
    return (power @ _slaney_filters(sizes, fft)).clamp_min(1e-10).log()


def _whisper(samples: Tensor, sizes: Sizes) -> Tensor:
    """Whisper's features: the largest sets a floor 8 powers of ten below it, for all frames."""
    power = _stft_power(samples, sizes, sizes.window, "reflect")[:-1]
    logs = (power @ _slaney_filters(sizes, sizes.window)).clamp_min(1e-10).log10()
    return (logs.clamp_min(logs.max() - 8) + 4) / 4


class SpectrogramKind(NamedTuple):
    """A kind of features: what computes them, and how frames lie in the samples."""

    compute: Callable[[Tensor, Sizes], Tensor]  # samples (n,) -> (frames, mels)
    frames: Callable[[int, Sizes], int]  # of so many samples
    least: Callable[[Sizes], int]  # samples; a shorter sound is padded with zeros
    middle: Callable[[Sizes], float]  # of the first frame, in samples


# name -> features
SPECTROGRAM_KINDS: dict[str, SpectrogramKind] = {
    "kaldi": SpectrogramKind(
        _kaldi,
        lambda samples, sizes: 1 + (samples - sizes.window) // sizes.hop,
        lambda sizes: sizes.window,
        lambda sizes: sizes.window / 2,
    ),
    "librosa": SpectrogramKind(
        _librosa,
        lambda samples, sizes: 1 + samples // sizes.hop,
        lambda sizes: 1,
        lambda sizes: 0.0,
    ),
    "whisper": SpectrogramKind(
        _whisper,
        lambda samples, sizes: samples // sizes.hop,
        lambda sizes: sizes.window,  # of which half is reflected
        lambda sizes: 0.0,
    ),
}
