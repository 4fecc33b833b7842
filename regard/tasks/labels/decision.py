"""How probabilities of labels become an answer: one label, several of them, or a number."""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from regard.errors import UsageError
from regard.metrics.labels import one_hot
from regard.tasks.frame.answers import Classified, Valued
from regard.tasks.frame.settings import Asked, TrainSettings
from regard.training.label_loss import LABEL_LOSSES, LabelLoss

ChosenSteps = dict[str, Any]  # chosen, answer, names and places of a Question


class Decision(Protocol):
    """What is decided by the outputs of a classifier."""

    loss: LabelLoss
    several: bool  # whether an input may have more than one label, or none

    def assign(self, probs: np.ndarray, threshold: float) -> np.ndarray:
        """Table (n, labels) of the labels that are given."""
        ...

    def answer(
        self, labels: Sequence[str], probs: np.ndarray, threshold: float, **about: Any
    ) -> Classified | Valued:
        """Answer for one input, by the probability of each label (labels,)."""
        ...

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-probabilities (n, steps, classes) by logits (n, labels)."""
        ...

    def steps(
        self, labels: Sequence[str], logprobs: Tensor, threshold: float, expected: Any = None
    ) -> ChosenSteps:
        """Classes (steps,) that the answer consists of, by (steps, classes), and their names."""
        ...


def threshold_of(settings: Asked | TrainSettings) -> float:
    """Probability from which on one of several labels is given."""
    return getattr(settings, "threshold", 0.5)


class OneLabel:
    """The most probable label."""

    loss, several = LABEL_LOSSES["single"], False

    def assign(self, probs: np.ndarray, threshold: float) -> np.ndarray:
        """Table (n, labels) with the likeliest label of each row."""
        return one_hot(probs.argmax(1), probs.shape[1])

    def answer(
        self, labels: Sequence[str], probs: np.ndarray, threshold: float, **about: Any
    ) -> Classified:
        """The likeliest label."""
        return Classified(labels, probs, [int(probs.argmax())], **about)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-probabilities of one step, whose classes are the labels."""
        return logits.double().log_softmax(-1).unsqueeze(1)

    def steps(
        self, labels: Sequence[str], logprobs: Tensor, threshold: float, expected: Any = None
    ) -> ChosenSteps:
        """The label is the one step."""
        chosen = list(logprobs.argmax(-1).tolist() if expected is None else expected)
        answer = labels[chosen[0]]
        return {"chosen": chosen, "answer": answer, "names": labels, "places": ["label"]}


class SeveralLabels:
    """All labels above a threshold, the likeliest first."""

    several = True

    def __init__(self, loss: LabelLoss = LABEL_LOSSES["multi"]):
        self.loss = loss

    def assign(self, probs: np.ndarray, threshold: float) -> np.ndarray:
        """Table (n, labels) of those above the threshold."""
        return probs >= threshold

    def answer(
        self, labels: Sequence[str], probs: np.ndarray, threshold: float, **about: Any
    ) -> Classified:
        """Those above the threshold, the likeliest first."""
        order = np.argsort(-probs, kind="stable").tolist()
        return Classified(labels, probs, [i for i in order if probs[i] >= threshold], True, **about)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Log-probabilities of a step for each label, which is given or not."""
        logits = logits.double()
        return torch.stack([-logits, logits], -1).log_softmax(-1)

    def steps(
        self, labels: Sequence[str], logprobs: Tensor, threshold: float, expected: Any = None
    ) -> ChosenSteps:
        """Each label is a step."""
        given = (logprobs.exp()[:, 1] >= threshold).long().tolist()
        chosen = list(given if expected is None else expected)
        named = [label for label, yes in zip(labels, chosen, strict=True) if yes]
        answer = ", ".join(named) or "no label"
        return {"chosen": chosen, "answer": answer, "names": ["no", "yes"], "places": labels}


class Number:
    """The single output itself."""

    loss, several = LABEL_LOSSES["value"], False

    def assign(self, probs: np.ndarray, threshold: float) -> np.ndarray:
        """Refuse: there is no label."""
        raise UsageError("this model gives a number to an input, and no label")

    def answer(
        self, labels: Sequence[str], probs: np.ndarray, threshold: float, **about: Any
    ) -> Valued:
        """The number."""
        return Valued(float(probs[0]), **about)

    def logprobs(self, logits: Tensor) -> Tensor:
        """Refuse: a number has no probability."""
        raise UsageError("this model gives a number, which has no probability to be changed")

    def steps(self, labels: Sequence[str], logprobs: Tensor, *about: Any) -> ChosenSteps:
        """Refuse, too."""
        return {"chosen": self.logprobs(logprobs)}


ONE_LABEL, SEVERAL_LABELS, NUMBER = OneLabel(), SeveralLabels(), Number()
