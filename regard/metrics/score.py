"""A score with its signature, and the comparison of two systems by paired bootstrap resampling."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

BOOTSTRAP_SEED = 1
DRAWN_ROWS = 2**23  # rows drawn at a time, which bounds the memory of a bootstrap

# a score of a system on the units of these numbers (samples, units), for every sample
Statistic = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Score:
    """A score with the signature that lets anyone reproduce it."""

    name: str
    value: float
    signature: str
    digits: int = 2  # after the point

    def __str__(self) -> str:
        return f"{self.name} = {self.value:.{self.digits}f}  {self.signature}"


@dataclass(frozen=True)
class Comparison:
    """Two systems on the same test set: scores, p-value, and the 95% interval of ours."""

    name: str
    ours: float
    theirs: float
    p: float
    low: float
    high: float
    signature: str
    against: str = ""  # whose theirs are, where there are several


def bootstrap(statistics: Sequence[Statistic], units: int, samples: int) -> list[np.ndarray]:
    """Statistics of the same resamples of units, drawn with replacement: (samples,) each."""
    rng = np.random.Generator(np.random.PCG64(BOOTSTRAP_SEED))
    values: list[list[np.ndarray]] = [[] for _ in statistics]
    step = max(1, DRAWN_ROWS // units)
    for start in range(0, samples, step):
        rows = rng.integers(0, units, (min(step, samples - start), units))
        for some, statistic in zip(values, statistics, strict=True):
            some.append(statistic(rows))
    return [np.concatenate(some) for some in values]


def percentile_interval(values: np.ndarray) -> tuple[float, float]:
    """95% interval of bootstrap resamples, by percentiles."""
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)


def bootstrap_signature(samples: int, units: int, unit: str = "units") -> str:
    """Signature of a paired bootstrap."""
    return f"paired bootstrap|samples:{samples}|seed:{BOOTSTRAP_SEED}|{unit}:{units}"


def paired_bootstrap(
    statistics: Mapping[str, tuple[Statistic, Statistic]], units: int, samples: int, signature: str
) -> list[Comparison]:
    """Compare our and their statistic of each name by paired bootstrap resampling (Koehn 2004).

    p is how often resamples differ from their mean by as much as the systems do.
    """
    drawn = bootstrap([side for both in statistics.values() for side in both], units, samples)
    whole = np.arange(units)[None]
    results = []
    for number, (name, both) in enumerate(statistics.items()):
        a, b = drawn[2 * number : 2 * number + 2]
        ours, theirs = (float(side(whole)[0]) for side in both)
        extreme = np.abs((a - b) - (a - b).mean()) >= abs(ours - theirs)
        p = (int(extreme.sum()) + 1) / (samples + 1)
        results.append(Comparison(name, ours, theirs, p, *percentile_interval(a), signature))
    return results


def compare_means(
    ours: Mapping[str, Sequence[float] | np.ndarray],
    theirs: Mapping[str, Sequence[float] | np.ndarray],
    samples: int,
    signature: str = "",
    unit: str = "units",
) -> list[Comparison]:
    """Compare scores that are means over examples, given for every example, by their names."""
    units = len(next(iter(ours.values())))
    signature = "|".join(filter(None, (bootstrap_signature(samples, units, unit), signature)))
    both = {name: (mean_of(ours[name]), mean_of(theirs[name])) for name in ours}
    return paired_bootstrap(both, units, samples, signature)


def mean_of(values: Sequence[float] | np.ndarray) -> Statistic:
    """Statistic that is the mean of these values."""
    array = np.asarray(values, dtype=float)
    return lambda rows: array[rows].mean(-1)
