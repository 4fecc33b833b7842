"""Search of the filter parameters that give the best PSNR for a noise level."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from regard.filters import FILTERS
from regard.metrics.image import psnr

Grid = dict[str, list[Any]]
Pairs = Sequence[tuple[Tensor, Tensor]]  # noisy and clean
_STARTS = (0.3, 0.6)  # of the search, as fractions of the lists of values


def geometric(sigma: float, low: float, high: float, steps: int = 9) -> list[float]:
    """Return a geometric sequence from low to high, times sigma."""
    ratio = (high / low) ** (1 / (steps - 1))
    return [sigma * low * ratio**n for n in range(steps)]


# name -> the values to try of each parameter, for noise of standard deviation sigma
GRIDS: dict[str, Callable[[float], Grid]] = {
    "gaussian": lambda sigma: {"sigma": geometric(1, 0.4, 2.5, 13)},
    "heat": lambda sigma: {"steps": [1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 40], "step": [0.05]},
    "perona_malik": lambda sigma: {
        "k": geometric(sigma, 0.3, 4.0, 11),
        "steps": [2, 4, 6, 9, 13, 20, 30, 45],
        "conductance": ["exponential", "rational"],
    },
    "bilateral": lambda sigma: {
        "sigma_s": geometric(1, 0.7, 4.0, 8),
        "sigma_r": geometric(sigma, 0.8, 6.0, 11),
    },
    "nonlocal_means": lambda sigma: {
        "h": geometric(sigma, 0.2, 2.0, 13),
        "patch": [3, 5, 7, 9],
        "window": [5, 7, 9, 11, 15, 21, 27],
        "noise": [0.0, 0.7 * sigma, sigma],
        "patch_weights": ["flat", "gaussian"],
    },
    "total_variation": lambda sigma: {"strength": geometric(sigma, 0.3, 1.5, 9), "steps": [100]},
}


def tuned(name: str, sigma: float, pairs: Pairs) -> dict[str, Any]:
    """Return the parameters of a filter with the best mean PSNR on (noisy, clean) pairs.

    Coordinate search: all values of one parameter are tried, then of the next, until nothing is
    gained; from several starts.
    """
    grid = GRIDS[name](sigma)
    known: dict[tuple[int, ...], float] = {}

    def score(place: tuple[int, ...]) -> float:
        if place not in known:
            own = {key: values[n] for (key, values), n in zip(grid.items(), place, strict=True)}
            outputs = [(FILTERS[name](noisy, **own).clamp(0, 1), clean) for noisy, clean in pairs]
            known[place] = sum(psnr(*two) for two in outputs) / len(outputs)
        return known[place]

    for share in _STARTS:
        place, before = tuple(int(share * len(values)) for values in grid.values()), None
        while place != before:
            before = place
            for axis, values in enumerate(grid.values()):
                line = [(*place[:axis], n, *place[axis + 1 :]) for n in range(len(values))]
                place = max(line, key=score)
    best = max(known, key=known.__getitem__)
    return {key: values[n] for (key, values), n in zip(grid.items(), best, strict=True)}
