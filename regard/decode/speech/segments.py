"""Long recordings cut at pauses into parts that a model can read."""

from itertools import pairwise
from typing import NamedTuple

import numpy as np

from regard.errors import UsageError

HOP = 0.01  # seconds from one value of the loudness to the next
SILENCE = -90.0  # decibels of full scale: nothing that a recording can hold is softer
_RISE = 8.0  # decibels above the noise floor at which sound begins; it ends 3 dB lower
_HYSTERESIS = 3.0
_SOUND_RANGE = 45.0  # decibels below the loudest sound, beyond which a sound is none
_LONG_PAUSE = 2.0  # seconds of pause that always end a segment


class Segment(NamedTuple):
    """A part of a recording: its first sample, and one past its last."""

    start: int
    end: int


def loudness(samples: np.ndarray, rate: int) -> np.ndarray:
    """Level in decibels of full scale of every 10 ms of a recording."""
    if samples.ndim != 1 or rate < 1:
        raise UsageError(f"samples of shape {samples.shape} at {rate} Hz; expected (n,) and a rate")
    count = int(np.ceil(len(samples) / (HOP * rate)))
    starts = (np.arange(count) * HOP * rate).astype(np.int64)
    if count == 0:
        return np.zeros(0)
    sums = np.add.reduceat(np.square(samples), starts, dtype=np.float64)
    mean = sums / np.diff(starts, append=len(samples))
    return 10 * np.log10(np.maximum(mean, 10 ** (SILENCE / 10)))


def smooth(level: np.ndarray, count: int = 3) -> np.ndarray:
    """Average the power of so many neighbours, an odd number, around each value in decibels."""
    power = np.pad(10 ** (level / 10), count // 2, mode="edge") if len(level) else level
    return (
        10 * np.log10(np.convolve(power, np.ones(count) / count, "valid")) if len(level) else level
    )


def sound_threshold(level: np.ndarray) -> float | None:
    """Decibels above which something sounds, or None if no pause stands out.

    The noise floor is a low percentile, which neither a click nor a word moves.
    """
    if len(level) == 0 or level.max() <= SILENCE:
        return None
    floor, top = np.percentile(level, [10, 99])
    begin = max(float(floor) + _RISE, float(top) - _SOUND_RANGE)
    return begin if begin < top else None


def _stretches(inside: np.ndarray) -> np.ndarray:
    """(n, 2): where each run of True begins, and one past its end."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], inside, [False]])))
    return edges.reshape(-1, 2)


def sounding(level: np.ndarray, *, min_pause: float = 0.3, margin: float = 0.15) -> np.ndarray:
    """(n, 2): the frames of each stretch of sound, from a level every 10 ms.

    A stretch rises above the threshold and goes on until the level is 3 dB lower; pauses shorter
    than min_pause seconds belong to it, and so does a margin on both sides.
    """
    begin = sound_threshold(level)
    if begin is None:
        some = len(level) > 0 and level.max() > SILENCE
        return np.array([[0, len(level)]] if some else [], dtype=np.int64).reshape(-1, 2)
    runs = _stretches(level > begin - _HYSTERESIS)
    runs = runs[[bool((level[a:b] > begin).any()) for a, b in runs]]
    if len(runs) == 0:
        return runs
    far = runs[1:, 0] - runs[:-1, 1] >= round(min_pause / HOP)
    runs = np.stack(
        [runs[np.concatenate([[True], far]), 0], runs[np.concatenate([far, [True]]), 1]], axis=1
    )
    reach = round(margin / HOP)
    middle = (runs[:-1, 1] + runs[1:, 0]) // 2
    low = np.concatenate([[0], middle])
    high = np.concatenate([middle, [len(level)]])
    return np.stack(
        [np.maximum(runs[:, 0] - reach, low), np.minimum(runs[:, 1] + reach, high)], axis=1
    )


def cut_at_pauses(
    samples: np.ndarray,
    rate: int,
    most_seconds: float = 30.0,
    *,
    min_pause: float = 0.3,
    margin: float = 0.15,
) -> list[Segment]:
    """Cut a recording into segments of at most so many seconds that hold all of its sound.

    A recording that is short enough stays whole. A longer one is cut at its longest pauses; where a
    sound goes on for longer, it is cut at the quietest point of the second half.

    Args:
        samples: recording (n,)
        rate: sampling rate in Hz
        most_seconds: maximum duration of a segment
        min_pause: seconds of silence that make a pause
        margin: seconds kept on both sides of what sounds
    """
    if most_seconds < 4 * HOP or min_pause <= 0 or margin < 0:
        raise UsageError(
            f"most_seconds={most_seconds}, min_pause={min_pause}, margin={margin}; expected at "
            f"least {4 * HOP}, above 0 and at least 0"
        )
    level = smooth(loudness(samples, rate))
    stretches = sounding(level, min_pause=min_pause, margin=margin)
    if len(stretches) == 0:
        return []
    if len(samples) <= most_seconds * rate:
        return [Segment(0, len(samples))]
    scale = rate * HOP
    most = int((most_seconds * rate - 1) / scale)  # room for rounding to whole samples
    parts: list[tuple[int, int]] = []
    for start, end in stretches.tolist():
        while end - start > most:
            around = smooth(level[start : start + most], 5)
            cut = start + most // 2 + int(around[most // 2 : most - 1].argmin())
            parts.append((start, cut))
            start = cut
        parts.append((start, end))
    return [
        Segment(min(round(a * scale), len(samples)), min(round(b * scale), len(samples)))
        for a, b in _grouped(parts, most)
    ]


def _grouped(parts: list[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """Put neighbours together while they fit, and part them at the longest pauses."""
    long = round(_LONG_PAUSE / HOP)
    pauses = [b[0] - a[1] for a, b in pairwise(parts)] + [long]
    grouped: list[tuple[int, int]] = []
    first = 0
    while first < len(parts):
        start, last, best = parts[first][0], first, first
        while last < len(parts) and parts[last][1] - start <= most:
            half = parts[best][1] - start >= most // 2  # long enough to end there
            if not half or pauses[last] >= pauses[best]:
                best = last
            if pauses[last] >= long:
                break
            last += 1
        grouped.append((start, parts[best][1]))
        first = best + 1
    return grouped
