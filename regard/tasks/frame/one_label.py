"""Tasks that give each example one label: what is the same for images and for series."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from regard.data.labels import saved_labels
from regard.data.parts import Dataset
from regard.errors import UsageError, log
from regard.files import read_json, write_json
from regard.files.hashes import seal, unseal
from regard.metrics.baselines import Baselines
from regard.metrics.evaluation import LabelEvaluation
from regard.metrics.labels import LabelResults, count, log_loss, macro_f1, one_hot, top_k
from regard.metrics.outliers import Outliers
from regard.models.folder import load_folder
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.answers import Classified
from regard.tasks.frame.question import Question
from regard.tasks.frame.task import Judged, Task
from regard.training.label_loss import CLASS_WEIGHTS, imbalance_notes

BASELINE_EXAMPLES = 2000  # that a baseline learns from
STRANGERS = 300  # of each kind that is made
NONE_EXAMPLES = 3000  # of a part, that distances are measured on
TOP = 5  # labels among which the right one should be, where there are more


@dataclass(frozen=True)
class OneLabelTrain:
    """What a training by labels can be told."""

    label_smoothing: float = setting(0.1, "label smoothing", min=0, max=0.9)
    class_weights: str = setting("none", "class weights in the loss", choices=CLASS_WEIGHTS)


@dataclass(frozen=True)
class NoneTrain:
    """What a training can be told of inputs that are to get no label."""

    none: float = setting(
        0.0, "share of the validation part that may be 'none of these'; 0 disables it", max=0.5
    )
    foreign: str | None = setting(None, "a folder of files that are none of these, to measure by")


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

    target, Result = "label", LabelEvaluation

    @property
    def labels(self) -> list[str]:
        """Return the labels that the model knows."""
        return self.codec.labels

    @classmethod
    def note_imbalance(cls, data: Dataset[Any], settings: Any) -> None:
        """Note labels of train that are much rarer than others, unless they are weighted."""
        labels = data.classes
        often = np.bincount(np.asarray(data["train"].labels), minlength=len(labels))
        data.notes.extend(imbalance_notes(often, labels, settings.class_weights))

    def baseline_vectors(self, part: Any) -> np.ndarray:
        """Return the examples of a part as vectors, as the nearest-mean baseline reads them."""
        raise NotImplementedError

    def baseline_scores(self, part: LabelledPart) -> dict[str, dict[str, float]]:
        """Return the scores of the commonest label and the nearest mean."""
        learnt: Baselines | None = self.codec.baselines
        targets = one_hot(np.asarray(part.labels), len(self.labels))
        return {} if learnt is None else learnt.scores(self.baseline_vectors(part), targets)

    # None of these: tasks on files, whose codec may have a threshold

    def outlier_vectors(self, inputs: Any) -> np.ndarray:
        """Return what the distance of inputs that were read is measured by, (n, w)."""
        raise NotImplementedError

    def strangers(self, inputs: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Return inputs like these in size that are none of what was learnt, by their kind."""
        raise NotImplementedError

    def read_foreign(self, folder: str) -> Any:
        """Read the files of a folder that are none of what was learnt."""
        raise NotImplementedError

    def label_inputs(self, inputs: Any) -> np.ndarray:
        """Return the probability of each label (n, labels) for inputs that were read."""
        raise NotImplementedError

    def are_none(self, probs: np.ndarray, inputs: Any) -> np.ndarray:
        """Return for each input, with its probabilities, whether it is none of these."""
        outliers: Outliers | None = getattr(self.codec, "outliers", None)
        if outliers is None:
            return np.zeros(len(probs), dtype=bool)
        return outliers.are_far(self.outlier_vectors(inputs), probs.argmax(1))

    def measure_none(self, parts: Mapping[str, Any], share: float, foreign: str | None) -> Outliers:
        """Measure from which distance on inputs are none of these; see Outliers."""

        def some(part: Any) -> Any:
            rows = np.unique(np.linspace(0, len(part) - 1, NONE_EXAMPLES).astype(np.int64))
            return part.pick(rows)

        def placed(inputs: Any) -> tuple[np.ndarray, np.ndarray]:
            return self.outlier_vectors(inputs), self.label_inputs(inputs).argmax(1)

        train, valid = some(parts["train"]), self.part_inputs(some(parts["valid"]))
        others = self.strangers(valid, np.random.default_rng(0))
        if foreign is not None:
            others["foreign files"] = self.read_foreign(foreign)
        return Outliers.measure(
            (self.outlier_vectors(self.part_inputs(train)), np.asarray(train.labels)),
            placed(valid),
            {name: placed(inputs) for name, inputs in others.items()},
            len(self.labels),
            share,
        )

    def part_inputs(self, part: Any) -> Any:
        """Return the inputs of a part as they are read."""
        raise NotImplementedError

    def finish(self, folder: Path, data: Dataset[Any], settings: Any) -> None:
        """Measure what is none of these by the published weights, if that is asked."""
        if not getattr(settings, "none", 0.0):
            return
        published = type(self).load(folder, *load_folder(folder))
        published.note_none(folder, data.parts, settings.none, settings.foreign)

    def note_none(
        self, folder: Path, parts: Mapping[str, Any], share: float, foreign: str | None
    ) -> Outliers:
        """Measure what is none of these, and write it into the folder of the model."""
        found = self.measure_none(parts, share, foreign)
        unseal(folder)
        found.save(folder)
        write_json(
            folder / "config.json", {**read_json(folder / "config.json"), "none": found.facts()}
        )
        seal(folder)
        told = ", ".join(f"{name} {value:g}%" for name, value in found.measured["labelled"].items())
        log(
            f"none of these: {100 * share:g}% of the validation part; labelled all the same: {told}"
        )
        return found

    def baselines(self, data: Dataset[Any], settings: Any) -> dict[str, dict[str, float]]:
        """Return the scores of the baselines on the validation part."""
        return self.baseline_scores(data["valid"])

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
        alike = isinstance(other, OneLabel) and other.inputs is self.inputs
        if not alike or set(labels) != set(self.labels):
            raise UsageError(
                f"against= names a model of other labels ({', '.join(labels[:6])}); "
                "compare models of the same"
            )

    def predictions_of(self, other: Any, data: Dataset[Any], settings: Any) -> np.ndarray:
        """Return the probabilities of another model, which reads the data in its own format."""
        order = [other.labels.index(label) for label in self.labels]
        return super().predictions_of(other, other.read_test(settings), settings)[:, order]

    def results(self, part: LabelledPart, probs: np.ndarray) -> LabelResults:
        """Return targets, predictions and probabilities, from which all scores follow."""
        return LabelResults.single(self.labels, np.asarray(part.labels), probs, unit=self.unit)

    def score(self, data: Dataset[Any], predictions: np.ndarray, settings: Any) -> Judged:
        """Return accuracy, F1 and loss, by class too, and the errors it was surest of."""
        part: LabelledPart = data[settings.part]
        results = self.results(part, predictions)
        if getattr(self.codec, "outliers", None) is not None:
            refused = int(self.none_in(part, predictions).sum())
            data.notes.append(
                f"run answers {refused:,} of these {len(part):,} {self.unit} by 'none of these'; "
                "scores are of the likeliest label of all"
            )
        scores = results.scores(settings.samples)
        if len(self.labels) > TOP:
            scores.insert(1, top_k(np.asarray(part.labels), predictions, TOP, self.unit))
        errors = results.errors(settings.errors, lambda i: ("", part.where(i)))
        return Judged(scores, len(part), results.details(errors, self.baseline_scores(part)))

    def compare(
        self, data: Dataset[Any], ours: np.ndarray, theirs: np.ndarray, settings: Any
    ) -> Any:
        """Compare accuracies by a paired bootstrap."""
        part: LabelledPart = data[settings.part]
        other = self.results(part, theirs).predictions
        return self.results(part, ours).compare(other, settings.samples)

    def outputs(
        self, data: Dataset[Any], predictions: np.ndarray, settings: Any
    ) -> list[dict[str, Any]]:
        """Return each example with its label and what was predicted."""
        part: LabelledPart = data[settings.part]
        numbers = np.asarray(part.labels).tolist()
        return [
            {
                self.inputs.key: part.where(i),
                "label": self.labels[numbers[i]],
                "prediction": self.labels[best],
                "probability": float(predictions[i, best]),
            }
            for i, best in enumerate(predictions.argmax(1).tolist())
        ]

    def none_in(self, part: Any, probs: np.ndarray) -> np.ndarray:
        """Return for each example of a part whether it is none of these."""
        rows = np.split(np.arange(len(part)), range(512, len(part), 512))
        found = [self.are_none(probs[some], self.part_inputs(part.pick(some))) for some in rows]
        return np.concatenate(found)

    def classified(self, probs: np.ndarray, inputs: Any = None) -> list[Classified]:
        """Return the answers of probabilities (n, labels) for inputs that were read."""
        none = self.are_none(probs, inputs).tolist()
        return [
            Classified(self.labels, row, [int(row.argmax())], none=far)
            for row, far in zip(probs, none, strict=True)
        ]

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

    def labelled(self, probs: np.ndarray, settings: Any, inputs: Any = None) -> Mapping[str, Any]:
        """Return the fields of a picture that tell the likeliest labels (labels,)."""
        from regard.viewer.text import label_candidates

        best = int(probs.argmax())
        rest = label_candidates(self.labels, probs, [best], settings.candidates)
        (answer,) = self.classified(probs[None], inputs)
        return {"output": str(answer), **rest}
