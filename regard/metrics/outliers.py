"""None of these: inputs too far from all that a classifier was trained on to be given a label."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from regard.errors import UsageError
from regard.files import write_atomically
from regard.files.hashes import verify

_OUTLIER_FILE = "outliers.safetensors"
NONE = "none of these"
_MAX_MATRIX = 2**22  # in a matrix
SHRINKAGES = (0.01, 0.1, 0.5)  # towards a sphere, to choose from
_LEAST_DEVIATION = 0.1  # least deviation of a number, by the mean of all
STRANGERS = 300  # inputs of each kind that is made up to measure by


@dataclass(frozen=True)
class Outliers:
    """The Mahalanobis distance of an input to the mean of its label (Lee et al. 2018), bounded.

    d(x, c)^2 = (x - mean_c)' C^-1 (x - mean_c), where C is the covariance within labels of what x
    is: numbers of the input itself, and the vector that the model's head reads. Probabilities
    do not tell noise from what was learnt; distances do.
    """

    means: np.ndarray  # (labels, w), whitened
    whiten: np.ndarray  # (w, w): C^-1/2
    threshold: float
    measured: Mapping[str, Any] = field(default_factory=dict)  # shares in percent

    @classmethod
    def measure(
        cls,
        known: tuple[np.ndarray, np.ndarray],
        valid: tuple[np.ndarray, np.ndarray],
        strangers: Mapping[str, tuple[np.ndarray, np.ndarray]],
        labels: int,
        share: float,
    ) -> "Outliers":
        """Fit to training vectors and labels; refuse `share` of the validation part.

        `valid` and each kind of `strangers` are vectors and the labels that the model gives them.
        The shrinkage of the covariance is that under which fewest strangers get a label.
        """
        found = [cls.fit(*known, labels, shrinkage) for shrinkage in SHRINKAGES]
        bounds = [float(np.quantile(each.distances(*valid), 1 - share)) for each in found]
        labelled = [
            {
                name: float((each.distances(*some) <= most).mean())
                for name, some in strangers.items()
            }
            for each, most in zip(found, bounds, strict=True)
        ]
        best = int(np.argmin([sum(shares.values()) for shares in labelled]))
        told = {name: round(100 * value, 1) for name, value in labelled[best].items()}
        measured = {"refused": {"validation": round(100 * share, 1)}, "labelled": told}
        return cls(found[best].means, found[best].whiten, bounds[best], measured)

    @classmethod
    def fit(
        cls, vectors: np.ndarray, numbers: np.ndarray, labels: int, shrinkage: float
    ) -> "Outliers":
        """Fit means and covariance to vectors and the numbers of their labels, without a bound."""
        x = vectors.astype(np.float64)
        scale = x.std(0)
        scale = np.maximum(scale, max(_LEAST_DEVIATION * scale.mean(), 1e-9))
        means = np.stack(
            [x[numbers == n].mean(0) if (numbers == n).any() else x.mean(0) for n in range(labels)]
        )
        inner = (x - means[numbers]) / scale
        values, axes = np.linalg.eigh(inner.T @ inner / len(inner))
        values = values.clip(min=0) + shrinkage * values.mean() + 1e-9
        whiten = (axes / np.sqrt(values)) / scale[:, None]
        return cls((means @ whiten).astype(np.float32), whiten.astype(np.float32), np.inf)

    def distances(self, vectors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """Distance of each vector to the mean of the label that it is given."""
        return np.linalg.norm(vectors @ self.whiten - self.means[numbers], axis=1)

    def are_far(self, vectors: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """True for each vector that is too far from the label that it is given."""
        return ~(self.distances(vectors, numbers) <= self.threshold)

    def facts(self) -> dict[str, Any]:
        """Entry of config.json."""
        return {"threshold": self.threshold, **self.measured}

    def save(self, folder: Path) -> None:
        """Write means and covariance beside a model."""
        write_atomically(folder / _OUTLIER_FILE, save({"means": self.means, "whiten": self.whiten}))

    @classmethod
    def load(cls, folder: Path, config: Mapping[str, Any], labels: int) -> "Outliers | None":
        """Read those of a folder, if its config has a threshold, or say what is wrong."""
        told = config.get("none")
        if told is None:
            return None
        most = told.get("threshold") if isinstance(told, dict) else None
        if not isinstance(most, int | float) or isinstance(most, bool) or not most > 0:
            raise UsageError(
                f"{folder / 'config.json'}: 'none' has the threshold {most!r:.40}; expected a "
                "number above 0, or leave 'none' out"
            )
        path = folder / _OUTLIER_FILE
        verify(folder, _OUTLIER_FILE)
        try:
            size = path.stat().st_size
            tables = load(path.read_bytes()) if size <= 8 * _MAX_MATRIX else {}
        except (SafetensorError, OSError, ValueError) as error:
            raise UsageError(f"{path}: {str(error)[:100]}; copy it again") from None
        means, whiten = (tables.get(name, np.zeros(0)) for name in ("means", "whiten"))
        width = whiten.shape[-1]
        if means.shape != (labels, width) or whiten.shape != (width, width):
            raise UsageError(f"{path}: {means.shape} and {whiten.shape}; expected {labels} means")
        return cls(means, whiten, float(most), {k: v for k, v in told.items() if k != "threshold"})
