"""Answers that several tasks give: labels with their probabilities, and vectors."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.tasks.frame.task import Answer

MOST_LISTED = 100  # labels whose probability a JSON line names


@dataclass(frozen=True, repr=False)
class Classified(Answer):
    """The predicted labels of one text or image, and the probability of every label."""

    labels: Sequence[str]  # all that the model knows
    probabilities: np.ndarray
    chosen: Sequence[int]
    several: bool = False  # whether an input may have more labels than one, or none
    cut: bool = False  # whether the text was truncated

    def __str__(self) -> str:
        return ",".join(self.labels[i] for i in self.chosen)

    @property
    def label(self) -> str | list[str]:
        """Return the label, or all of them where there may be several."""
        names = [self.labels[i] for i in self.chosen]
        return names if self.several else names[0]

    @property
    def probability(self) -> float | list[float]:
        """Return the probability of the label, or of each of them where there may be several."""
        values = [float(self.probabilities[i]) for i in self.chosen]
        return values if self.several else values[0]

    def keys(self) -> list[str]:
        """Return the names of all fields."""
        return ["label", "probability", *super().keys()]

    def __repr__(self) -> str:
        return f"Classified(label={self.label!r}, probability={self.probability!r})"

    def _ranked(self) -> list[int]:
        return np.argsort(-self.probabilities, kind="stable").tolist()

    def lines(self, settings: Any) -> Iterator[str]:
        """Write the labels as lines, each with its probability if asked."""
        many = settings.n_best > 1
        rows = [[i] for i in self._ranked()[: settings.n_best]] if many else [self.chosen]
        for row in rows:
            values = ",".join(f"{self.probabilities[i]:.4f}" for i in row)
            names = ",".join(self.labels[i] for i in row)
            yield f"{names}\t{values}" if settings.scores else names

    def record(self, settings: Any) -> dict[str, Any]:
        """Return the fields that the prediction adds to a JSON line."""
        rounded = [round(value, 6) for value in self.probabilities.tolist()]
        values = [rounded[i] for i in self.chosen]
        return {
            "prediction": self.label,
            "probability": values if self.several else values[0],
            "probabilities": {self.labels[i]: rounded[i] for i in self._ranked()[:MOST_LISTED]},
            **({"cut": True} if self.cut else {}),
        }


@dataclass(frozen=True)
class Embedded(Answer):
    """The vector of one text or image."""

    vector: np.ndarray
    cut: bool = False  # whether the text was truncated

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.vector, dtype=dtype, copy=copy)

    def __str__(self) -> str:
        return " ".join(f"{number:.8g}" for number in self.vector.tolist())

    def record(self, settings: Any) -> dict[str, Any]:
        """Return the fields that the prediction adds to a JSON line."""
        vector = [float(f"{number:.8g}") for number in self.vector.tolist()]
        return {"prediction": vector, **({"cut": True} if self.cut else {})}
