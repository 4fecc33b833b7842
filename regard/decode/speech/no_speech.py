"""A gate before the model: does a sound hold speech, or only silence, noise, hum or music?

Seven measures of a stretch of at most two seconds, each hardly dependent on how loud it is, and a
quadratic logistic regression of them. Noise keeps its level and has no pitch; hum and notes keep
their frequencies to a fraction of a hertz, which no voice does. The weights were fitted by
bench/no_speech.py on training utterances of AN4 and FSDD and on generated sounds without speech.
"""

from collections.abc import Iterator

import numpy as np
import soxr

RATE = 8000  # what is above 4 kHz is not looked at
_FRAME_HOP = 80  # samples: 10 ms
STRETCH_SECONDS = 2.0  # seconds
_SOFTEST_PEAK = 1e-4  # of full scale: a sound that never gets louder is none
_LOUD = 1e-3  # of the largest power: softer frames are not measured
_NOISE_POWER = 1e-8  # power of the faintest noise, relative to the loudest sample
_PITCHES = 70, 400  # Hz, of a voice
_VOICED = 0.7  # correlation of a frame with itself one period later
_JUMP, _STILL = 0.08, 0.002  # of log pitch in 10 ms: another note; not moving at all

# of change, flatness, harmonicity, moving, level, steadiness and steady
MEASURE_MEAN = (3.074, -22.4, 0.6627, 0.4386, 4.688, 0.7864, 0.3603)
MEASURE_SCALE = (1.606, 19.03, 0.2808, 0.4352, 3.357, 0.1898, 0.3936)
MEASURE_CLIP = 4.0  # deviations from the mean, beyond which nothing changes
THRESHOLD = 0.5  # log-odds
TERM_WEIGHTS = (
    -0.266,
    2.397,
    0.3428,
    1.471,
    1.749,
    2.506,
    -1.095,
    -2.377,
    -0.5518,
    0.7966,
    -3.37,
    -0.1851,
    2.063,
    -0.4108,
    0.6659,
    0.8065,
    1.575,
    -0.9945,
    0.1205,
    0.1469,
    -0.9381,
    1.339,
    0.3252,
    -0.5408,
    0.8919,
    0.6771,
    0.2593,
    -0.1657,
    -1.059,
    -0.959,
    -1.115,
    -0.5714,
    -0.4685,
    -1.547,
    -0.04934,
    -0.1529,
)


def is_speech(samples: np.ndarray, rate: int, threshold: float = THRESHOLD) -> bool:
    """True if some two seconds of a sound hold speech."""
    return any(score > threshold for score in _scores(samples, rate))


def speech_score(samples: np.ndarray, rate: int) -> float:
    """Log-odds that a sound holds speech, by its most speech-like two seconds."""
    return max(_scores(samples, rate), default=-np.inf)


def _scores(samples: np.ndarray, rate: int) -> Iterator[float]:
    """Score stretch after stretch, each overlapping the one before by half."""
    size = int(STRETCH_SECONDS * rate)
    last = max(0, len(samples) - size)
    for start in [*range(0, last, size // 2), last]:
        part = samples[start : start + size]
        if len(part) and np.abs(part).max() > _SOFTEST_PEAK:
            x = np.clip(
                (measures(part, rate) - np.array(MEASURE_MEAN)) / np.array(MEASURE_SCALE),
                -MEASURE_CLIP,
                MEASURE_CLIP,
            )
            yield float(np.dot(terms(x), TERM_WEIGHTS))


def terms(x: np.ndarray) -> np.ndarray:
    """1, each measure, and the products of every two of them."""
    places = np.tril_indices(x.shape[-1])
    products = x[..., places[0]] * x[..., places[1]]
    return np.concatenate([np.ones((*x.shape[:-1], 1)), x, products], axis=-1)


def measures(samples: np.ndarray, rate: int) -> np.ndarray:
    """Seven measures of a short sound."""
    sound = np.asarray(samples, dtype=np.float32)
    sound = soxr.resample(sound, rate, RATE) if rate != RATE else sound
    sound = sound.astype(np.float64) / max(float(np.abs(sound).max(initial=0.0)), 1e-12)
    return np.array([*_shape(sound), *_pitch(sound), *_lines(sound)])


def _frames(sound: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Windowed frames (n, size) every 10 ms, and which of them are loud."""
    sound = np.pad(sound, (0, max(0, size + 4 * _FRAME_HOP - len(sound))))
    frames = np.lib.stride_tricks.sliding_window_view(sound, size)[::_FRAME_HOP] * np.hanning(size)
    power = np.square(frames).sum(1)
    return frames, power > _LOUD * power.max()


def _bins(size: int, low: float, high: float) -> slice:
    """Bins of a Fourier transform of so many samples between two frequencies."""
    return slice(int(np.ceil(low * size / RATE)), int(high * size / RATE) + 1)


def _bands(size: int, count: int = 18, low: float = 100.0, high: float = 3800.0) -> np.ndarray:
    """Triangular bands (count, bins) on the mel scale."""
    first, last = (1127 * float(np.log1p(hertz / 700)) for hertz in (low, high))
    edges = 700 * np.expm1(np.linspace(first, last, count + 2) / 1127)[:, None]
    at = np.fft.rfftfreq(size, 1 / RATE)
    rising = (at - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - at) / (edges[2:] - edges[1:-1])
    return np.maximum(0, np.minimum(rising, falling))


_BANDS = _bands(256)


def _shape(sound: np.ndarray) -> tuple[float, float]:
    """Measure how much the spectral shape changes in 40 ms, and how flat the spectrum is (dB)."""
    frames, loud = _frames(sound, 256)
    power = np.square(np.abs(np.fft.rfft(frames))) + _NOISE_POWER * np.square(np.hanning(256)).sum()
    bands = 10 * np.log10(power @ _BANDS.T)
    shape = bands - bands.mean(1, keepdims=True)
    change = np.sqrt(np.square(shape[4:] - shape[:-4]).mean(1))[loud[4:] & loud[:-4]]
    inner = power[loud, _bins(256, 200, 3800)]
    flat = 10 * (np.log10(inner).mean(1) - np.log10(inner.mean(1)))
    return float(np.median(change)) if len(change) else 0.0, float(flat.mean())


def _pitch(sound: np.ndarray) -> tuple[float, float, float]:
    """Measure the harmonicity, the share of frames whose pitch moves, and how the level varies."""
    size, padded = 320, 1024
    frames, loud = _frames(sound, size)
    power = np.square(np.abs(np.fft.rfft(frames, padded)))
    voice = _bins(padded, 80, 3800)
    power[:, : voice.start] = power[:, voice.stop :] = 0
    level = 10 * np.log10(power.sum(1) + _NOISE_POWER)
    window = np.fft.irfft(np.square(np.abs(np.fft.rfft(np.hanning(size), padded))))[:size]
    same = np.fft.irfft(power)[:, :size] / window
    same = same[:, RATE // _PITCHES[1] - 1 : RATE // _PITCHES[0] + 2] / (same[:, :1] + 1e-12)
    middle = same[:, 1:-1]
    peaks = np.where((middle > same[:, :-2]) & (middle >= same[:, 2:]), middle, -1.0)
    # the first of several peaks that are almost as high: not an octave too low
    first = (peaks >= 0.9 * peaks.max(1, keepdims=True)).argmax(1)
    rows = np.arange(len(same))
    before, at, after = (same[rows, first + n] for n in range(3))
    bend = np.minimum(before - 2 * at + after, -1e-9)
    lag = RATE // _PITCHES[1] + first + np.clip(0.5 * (before - after) / bend, -0.5, 0.5)
    high = peaks[rows, first]
    voiced = (high > _VOICED) & loud
    step = np.abs(np.diff(np.log(lag)))[voiced[1:] & voiced[:-1]]
    gliding = step[step < _JUMP]
    moving = float((gliding > _STILL).mean()) if len(gliding) else 0.0
    return float(np.median(high[loud])), moving, float(level[loud].std())


def _lines(sound: np.ndarray) -> tuple[float, float]:
    """Measure how steadily the phases of the strongest frequencies advance.

    Returns the median over frames, where 1 is a tone that never changes, and the share of frames
    that are as steady as a tone.
    """
    frames, loud = _frames(sound, 512)
    spectrum = np.fft.rfft(frames)[:, _bins(512, 100, 2500)]
    before, now, after = spectrum[:-4], spectrum[2:-2], spectrum[4:]
    size = np.abs(now)
    peak = np.zeros(size.shape, dtype=bool)
    peak[:, 1:-1] = (size[:, 1:-1] > size[:, :-2]) & (size[:, 1:-1] > size[:, 2:])
    weight = np.where(peak & (size > 0.1 * size.max(1, keepdims=True)), size, 0.0)
    turn = np.cos(np.angle(after * before * np.conj(now) ** 2))
    steady = ((weight * turn).sum(1) / (weight.sum(1) + 1e-12))[loud[2:-2]]
    if len(steady) == 0:
        return 0.0, 0.0
    return float(np.median(steady)), float((steady > 0.95).mean())
