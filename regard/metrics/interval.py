"""How sure a mean of a few numbers is, by Student's t."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

SURE = 0.95


def within(t: float, freedom: int) -> float:
    """Return the chance that Student's t lies between -t and t.

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
def critical(freedom: int, sure: float = SURE) -> float:
    """Return the t that Student's t stays below, to both sides, as surely as this."""
    low, high = 0.0, 1.0
    while within(high, freedom) < sure:
        high *= 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if within(middle, freedom) < sure else (low, middle)
    return (low + high) / 2


@dataclass(frozen=True)
class Interval:
    """A mean of some numbers, and how far to both sides the true one may be; unknown of one."""

    mean: float
    half: float | None
    values: tuple[float, ...]


def interval(values: Sequence[float], sure: float = SURE) -> Interval:
    """Return the mean of numbers with its interval, if they are a sample of a normal law."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2 or not all(map(math.isfinite, values)):
        return Interval(mean, None, tuple(values))
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (count - 1))
    return Interval(mean, critical(count - 1, sure) * spread / math.sqrt(count), tuple(values))


class Difference(NamedTuple):
    """The mean of differences in pairs, and the chance of one as large if there were none."""

    mean: float
    half: float
    p: float


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Difference | None:
    """Compare numbers pair by pair (Student's paired test); None if there are too few."""
    found = interval([a - b for a, b in zip(ours, theirs, strict=True)]) if ours else None
    if found is None or found.half is None:
        return None
    if found.half == 0:
        return Difference(found.mean, 0.0, 1.0 if found.mean == 0 else 0.0)
    freedom = len(ours) - 1
    t = abs(found.mean) / found.half * critical(freedom)
    return Difference(found.mean, found.half, 1 - within(t, freedom))
