"""Tasks that give each example one label: what is the same for images and for series."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from regard.data.labels import saved_labels
from regard.errors import UsageError
from regard.metrics.baselines import Baselines
from regard.metrics.evaluation import LabelEvaluation
from regard.metrics.labels import LabelResults, count, log_loss, macro_f1, one_hot, top_k
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.answers import Classified
from regard.tasks.frame.question import Question
from regard.tasks.frame.task import Data, Judged, Task
from regard.training.label_loss import imbalance_notes

BASELINE_EXAMPLES = 2000  # that a baseline learns from
TOP = 5  # labels among which the right one should be, where there are more


@dataclass(frozen=True)
class OneLabelTrain:
    """What a training by labels can be told."""

    label_smoothing: float = setting(0.1, "label smoothing", min=0, max=0.9)
    class_weights: str = setting("none", "in the loss: none, or balanced for uneven labels")


@dataclass(frozen=True)
class OneLabelRun:
    """How labels are told."""

    n_best: int = setting(1, "labels to return for each, most probable first", min=1, max=100_000)
    scores: bool = setting(True, "print the probability of each label")


@dataclass(frozen=True)
class OneLabelEval:
    """How labels are judged."""

    errors: int = setting(10, "errors to show", min=0, max=100_000)


class LabelledPart(Protocol):
    """A part of a set: the number of the label of each example, and where it is."""

    labels: Any  # (n,)

    def __len__(self) -> int: ...

    def where(self, i: int) -> str:
        """Return where an example is."""
        ...


def learn_baselines(
    name: str, train: Any, read: Callable[[Any], np.ndarray], labels: int
) -> Baselines:
    """Learn the nearest-mean baseline from some examples, spread over a part, read as vectors."""
    rows = np.linspace(0, len(train) - 1, min(len(train), BASELINE_EXAMPLES)).astype(np.int64)
    some = train.pick(rows)
    return Baselines.fit(name, read(some), one_hot(np.asarray(some.labels), labels))


def saved_labels_and_baselines(
    folder: Path, model: Model, config: Mapping[str, Any]
) -> tuple[list[str], Baselines | None]:
    """Return the labels and the baselines of a saved model."""
    labels = saved_labels(folder, config, model.config.labels)
    return labels, Baselines.load(folder, len(labels))


class OneLabel(Task[Any, Classified]):
    """A task of examples with one label each; `codec` has labels and baselines.

    A task says how the probabilities (n, labels) of a part come about (`predict_examples`), and
    what the nearest-mean baseline reads of it (`baseline_vectors`).
    """

    Result = LabelEvaluation

    @property
    def labels(self) -> list[str]:
        """Return the labels that the model knows."""
        return self.codec.labels

    @classmethod
    def note_imbalance(cls, data: Data, settings: Any) -> None:
        """Note labels of train that are much rarer than others, unless they are weighted."""
        labels = data.parts.classes
        often = np.bincount(np.asarray(data.parts.parts["train"].labels), minlength=len(labels))
        data.notes.extend(imbalance_notes(often, labels, settings.class_weights))

    def baseline_vectors(self, part: Any) -> np.ndarray:
        """Return the examples of a part as vectors, as the nearest-mean baseline reads them."""
        raise NotImplementedError

    def baseline_scores(self, part: LabelledPart) -> dict[str, dict[str, float]]:
        """Return the scores of the commonest label and the nearest mean."""
        learnt: Baselines | None = self.codec.baselines
        targets = one_hot(np.asarray(part.labels), len(self.labels))
        return {} if learnt is None else learnt.scores(self.baseline_vectors(part), targets)

    def baselines(self, data: Data, settings: Any) -> dict[str, dict[str, float]]:
        """Return the scores of the baselines on the validation part."""
        return self.baseline_scores(data.parts.parts["valid"])

    def valid_scores(self, part: LabelledPart, probs: np.ndarray, by_f1: bool) -> dict[str, float]:
        """Return loss, accuracy and macro F1 of probabilities; the better is to be raised."""
        results = self.results(part, probs)
        accuracy = 100 * float((results.targets & results.predictions).any(1).mean())
        f1 = macro_f1(count(results.targets, results.predictions))
        loss = log_loss(results.targets, probs, False)
        better = f1 if by_f1 else accuracy
        return {"loss": loss, "accuracy": accuracy, "macro_f1": f1, "better": better}

    def check_run(self, settings: Any) -> Any:
        """Refuse more labels than there are."""
        if getattr(settings, "n_best", 1) > len(self.labels):
            raise UsageError(
                f"n_best={settings.n_best} is more than the {len(self.labels)} labels of the model"
            )
        return super().check_run(settings)

    def check_against(self, other: Any) -> None:
        """Refuse a model of other labels, or of other examples."""
        labels = getattr(other, "labels", [])
        alike = isinstance(other, OneLabel) and other.input == self.input
        if not alike or set(labels) != set(self.labels):
            raise UsageError(
                f"against= names a model of other labels ({', '.join(labels[:6])}); "
                "compare models of the same"
            )

    def predictions_of(self, other: Any, data: Data, settings: Any) -> np.ndarray:
        """Return the probabilities of another model, which reads the data in its own format."""
        order = [other.labels.index(label) for label in self.labels]
        return super().predictions_of(other, other.read_test(settings), settings)[:, order]

    def results(self, part: LabelledPart, probs: np.ndarray) -> LabelResults:
        """Return targets, predictions and probabilities, from which all scores follow."""
        return LabelResults.single(self.labels, np.asarray(part.labels), probs, unit=self.unit)

    def score(self, data: Data, predictions: np.ndarray, settings: Any) -> Judged:
        """Return accuracy, F1 and loss, by class too, and the errors it was surest of."""
        part: LabelledPart = data.parts.parts[settings.part]
        results = self.results(part, predictions)
        scores = results.scores(settings.samples)
        if len(self.labels) > TOP:
            scores.insert(1, top_k(np.asarray(part.labels), predictions, TOP, self.unit))
        errors = results.errors(settings.errors, lambda i: ("", part.where(i)))
        return Judged(scores, len(part), results.details(errors, self.baseline_scores(part)))

    def compare(self, data: Data, ours: np.ndarray, theirs: np.ndarray, settings: Any) -> Any:
        """Compare accuracies by a paired bootstrap."""
        part: LabelledPart = data.parts.parts[settings.part]
        other = self.results(part, theirs).predictions
        return self.results(part, ours).compare(other, settings.samples)

    def outputs(self, data: Data, predictions: np.ndarray, settings: Any) -> list[dict[str, Any]]:
        """Return each example with its label and what was predicted."""
        part: LabelledPart = data.parts.parts[settings.part]
        numbers = np.asarray(part.labels).tolist()
        return [
            {
                self.input: part.where(i),
                "label": self.labels[numbers[i]],
                "prediction": self.labels[best],
                "probability": float(predictions[i, best]),
            }
            for i, best in enumerate(predictions.argmax(1).tolist())
        ]

    def classified(self, probs: np.ndarray) -> list[Classified]:
        """Return the answers of probabilities (n, labels)."""
        return [Classified(self.labels, row, [int(row.argmax())]) for row in probs]

    def label_question(
        self, logits: Callable[[int], Tensor], expected: Any, **about: Any
    ) -> Question:
        """Return an input with its label; `logits` of so many copies of it are (copies, labels)."""

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            return logits(copies).double().log_softmax(-1).unsqueeze(1)

        chosen = logprobs(1)[0].argmax(-1).tolist() if expected is None else list(expected)
        told: dict[str, Any] = {"chosen": chosen, "expected": chosen, "places": ["label"], **about}
        return Question(self.labels[chosen[0]], logprobs, names=self.labels, **told)

    def labelled(self, probs: np.ndarray, settings: Any) -> Mapping[str, Any]:
        """Return the fields of a picture that tell the likeliest labels (labels,)."""
        from regard.viewer.text import label_candidates

        best = int(probs.argmax())
        rest = label_candidates(self.labels, probs, [best], settings.candidates)
        return {"output": self.labels[best], **rest}
