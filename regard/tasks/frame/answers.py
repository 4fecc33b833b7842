"""Answers that several tasks give: a label, a number, a vector, a text, or why there is none."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.decode.alignment import Alignment
from regard.tasks.frame.task import Answer

IN_RECORD = 100  # labels whose probabilities a JSON line has


@dataclass(frozen=True, repr=False)
class Classified(Answer):
    """The labels of one text, and how likely each label is."""

    labels: Sequence[str]  # all that the model knows
    probabilities: np.ndarray
    chosen: Sequence[int]
    several: bool = False
    cut: bool = False

    def __str__(self) -> str:
        return ",".join(self.labels[i] for i in self.chosen)

    @property
    def label(self) -> str | list[str]:
        """Return the label, or all of them where there may be several."""
        names = [self.labels[i] for i in self.chosen]
        return names if self.several else names[0]

    @property
    def probability(self) -> float | list[float]:
        """Return how likely the label is, or each of them where there may be several."""
        probs = [float(self.probabilities[i]) for i in self.chosen]
        return probs if self.several else probs[0]

    def keys(self) -> list[str]:
        """Return all names that there are."""
        return ["label", "probability", *super().keys()]

    def __repr__(self) -> str:
        return f"Classified(label={self.label!r}, probability={self.probability!r})"

    def ranked(self) -> list[int]:
        """Return the numbers of all labels, the most probable first."""
        return np.argsort(-self.probabilities, kind="stable").tolist()

    def lines(self, settings: Any) -> Iterator[str]:
        """Write the labels as lines, each with its probability if asked."""
        rows = (
            [[i] for i in self.ranked()[: settings.n_best]]
            if settings.n_best > 1
            else [self.chosen]
        )
        for row in rows:
            probs = ",".join(f"{self.probabilities[i]:.4f}" for i in row)
            names = ",".join(self.labels[i] for i in row)
            yield f"{names}\t{probs}" if settings.scores else names

    def record(self, settings: Any) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        ranked = {
            self.labels[i]: round(float(self.probabilities[i]), 6)
            for i in self.ranked()[:IN_RECORD]
        }
        probs = [round(float(self.probabilities[i]), 6) for i in self.chosen]
        fields = {
            "prediction": self.label,
            "probability": probs if self.several else probs[0],
            "probabilities": ranked,
        }
        return {**fields, "cut": True} if self.cut else fields


@dataclass(frozen=True)
class Valued(Answer):
    """The number that a model with a single output gives to an input: its logit."""

    value: float
    cut: bool = False  # whether the input was truncated

    def __str__(self) -> str:
        return f"{self.value:.6g}"

    def record(self, settings: Any) -> dict[str, Any]:
        """Return the fields that the prediction adds to a JSON line."""
        return {"prediction": self.value, **({"cut": True} if self.cut else {})}


@dataclass(frozen=True)
class Embedded(Answer):
    """The vector of one input."""

    vector: np.ndarray
    cut: bool = False  # whether the input was longer than the model reads

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.vector, dtype=dtype, copy=copy)

    def __str__(self) -> str:
        return " ".join(f"{number:.8g}" for number in self.vector.tolist())

    def record(self, settings: Any) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        fields = {"prediction": [float(f"{number:.8g}") for number in self.vector.tolist()]}
        return {**fields, "cut": True} if self.cut else fields


@dataclass
class Generated(Answer):
    """A generated text with its score; `others` are the next best hypotheses."""

    text: str
    score: float = 0.0
    logprob: float = 0.0
    alignment: Alignment | None = None
    others: list["Generated"] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    def lines(self, settings: Any) -> Iterator[str]:
        """Write the hypotheses as lines, each with what was asked for after ` ||| `."""
        for answer in [self, *self.others]:
            parts = [answer.text]
            if settings.scores or settings.forced:
                parts.append(f"{answer.score:.6f}")
            if answer.alignment is not None:
                pharaoh = settings.alignments == "pharaoh"
                record = json.dumps(answer.alignment.record(), ensure_ascii=False)
                parts.append(str(answer.alignment) if pharaoh else record)
            yield " ||| ".join(parts)

    def record(self, settings: Any) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        fields: dict[str, Any] = {"prediction": self.text, "score": round(self.score, 6)}
        if self.alignment is not None:
            fields["alignment"] = self.alignment.record()
        if self.others:
            fields["n_best"] = [fields.copy(), *(other.record(settings) for other in self.others)]
        return fields


@dataclass(frozen=True)
class Unread(Answer):
    """What is answered for an image or a sound that cannot be read."""

    why: str

    def __str__(self) -> str:
        return ""

    def lines(self, settings: Any) -> Iterator[str]:
        """Leave the lines of the answer empty."""
        yield from [""] * getattr(settings, "n_best", 1)

    def record(self, settings: Any) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        return {"prediction": None, "error": self.why}
