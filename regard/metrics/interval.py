"""Confidence intervals: Student's t for a mean of a few numbers, Wilson's for a proportion."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from regard.errors import UsageError

_SURE = 0.95
_NORMAL = 1.959963984540054  # 95% of a normal law lie within so many standard deviations


def within(t: float, freedom: int) -> float:
    """Probability that Student's t lies between -t and t.

    A finite sum for whole degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4).
    """
    angle = math.atan2(t, math.sqrt(freedom))
    sine, cosine, odd = math.sin(angle), math.cos(angle), freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for n in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (n + 1) / (n + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


@cache
def critical(freedom: int, sure: float = _SURE) -> float:
    """Critical value of Student's t, two-sided."""
    low, high = 0.0, 1.0
    while within(high, freedom) < sure:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < sure else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Interval:
    """A mean with the half-width of its confidence interval; None for a single value."""

    mean: float
    half: float | None
    values: tuple[float, ...]


def interval(values: Sequence[float], sure: float = _SURE) -> Interval:
    """Mean of numbers with its confidence interval by Student's t."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2 or not all(map(math.isfinite, values)):
        return Interval(mean, None, tuple(values))
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Interval(mean, critical(count - 1, sure) * spread / math.sqrt(count), tuple(values))


class Difference(NamedTuple):
    """The mean of paired differences, its half-width, and the p-value of Student's paired test."""

    mean: float
    half: float
    p: float


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference | None:
    """Compare numbers pair by pair (Student's paired test); None if there are too few."""
    gap = interval([a - b for a, b in zip(ours, theirs, strict=True)]) if ours else None
    if gap is None or gap.half is None:
        return None
    if gap.half == 0:
        return Difference(gap.mean, 0.0, 1.0 if gap.mean == 0 else 0.0)
    freedom = len(ours) - 1
    t = abs(gap.mean) / gap.half * critical(freedom)
    return Difference(gap.mean, gap.half, 1 - within(t, freedom))


def wilson(hits: int, total: int) -> tuple[float, float]:
    """95% confidence interval of a proportion, in percent (Wilson 1927)."""
    if not total:
        raise UsageError("nothing to score: there are no answers")
    share, z = hits / total, _NORMAL**2 / total
    half = _NORMAL * math.sqrt(share * (1 - share) / total + z / 4 / total)
    low, high = ((share + z / 2 + sign * half) / (1 + z) for sign in (-1, 1))
    return 100 * max(0.0, low), 100 * min(1.0, high)
