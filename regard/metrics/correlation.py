"""How well predicted numbers go with those that are right: correlations and squared error."""

import math

import numpy as np

from regard.metrics.score import Score


def pearson(one: np.ndarray, other: np.ndarray) -> float:
    """Pearson's correlation; NaN where one of both is constant."""
    a, b = (np.asarray(x, dtype=np.float64) for x in (one, other))
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / size if size else math.nan


def ranks(numbers: np.ndarray) -> np.ndarray:
    """Rank of each number from 1 on; equal ones share the mean of their ranks."""
    _, which, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]


def spearman(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's correlation, that of the ranks."""
    return pearson(ranks(one), ranks(other))


def correlation_scores(values: np.ndarray, targets: np.ndarray, signature: str) -> list[Score]:
    """Both correlations of values with targets."""
    return [
        Score("Spearman", spearman(values, targets), signature, 4),
        Score("Pearson", pearson(values, targets), signature, 4),
    ]


def value_scores(values: np.ndarray, targets: np.ndarray) -> list[Score]:
    """Both correlations of the values of texts with targets, and the squared error."""
    signature = f"texts:{len(targets)}"
    error = float(((values - targets) ** 2).mean())
    scores = correlation_scores(values, targets, signature)
    return [*scores, Score("mean squared error", error, signature, 4)]
