"""One judge of labels, whatever has them: accuracy, F1, loss, scores by class, worst errors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from regard.data.parts import Dataset
from regard.errors import UsageError
from regard.metrics.evaluation import LabelEvaluation
from regard.metrics.labels import LabelResults, count, log_loss, macro_f1, one_hot, top_k
from regard.metrics.score import Comparison
from regard.tasks.frame.settings import BootstrapSettings
from regard.tasks.parts import Judge, ScoredPredictions, System
from regard.tasks.runner import Runner

TOP = 5  # labels among which the right one should be, where there are more


class ReadsTest(Protocol):
    """Reads the part that a model is judged on."""

    def __call__(self, runner: Runner[Any], settings: Any) -> Dataset[Any]:
        """Data with that part."""
        ...


class LabelJudge(Judge[Dataset[Any]]):
    """Judges one label an example by the probabilities that a model gives to all of them.

    Args:
        read_test: reads the part that is judged, with the labels of a model.
        made_with: settings that a score depends on.
        subject: the model that is judged, if another is made of one for that.
    """

    Settings = BootstrapSettings
    Result = LabelEvaluation

    def __init__(
        self,
        read_test: ReadsTest,
        made_with: Callable[[Runner[Any], Any], dict[str, Any]] = lambda runner, settings: {},
        subject: Callable[[Runner[Any], Any], Runner[Any]] = lambda runner, settings: runner,
    ):
        self.read_test, self.made_with, self._subject = read_test, made_with, subject

    def subject(self, runner: Runner[Any], settings: Any) -> Runner[Any]:
        """The model that is judged."""
        return self._subject(runner, settings)

    def rival(
        self, runner: Runner[Any], other: Runner[Any], settings: Any, given: Mapping[str, Any]
    ) -> Any:
        """Refuse a model of other labels, or of other inputs."""
        labels = getattr(other.codec, "labels", [])
        alike = other.task.inputs is runner.task.inputs
        if not alike or set(labels) != set(runner.codec.labels):
            raise UsageError(
                f"against= names a model of other labels ({', '.join(labels[:6])}); "
                "compare models of the same"
            )
        return settings

    def read(self, runner: Runner[Any], settings: Any) -> Dataset[Any]:
        """The part that is judged."""
        return self.read_test(runner, settings)

    def predict(
        self,
        runner: Runner[Any],
        data: Dataset[Any],
        settings: Any,
        like: Runner[Any] | None = None,
    ) -> np.ndarray:
        """Probability of each label for each example, in the order of another model's labels.

        A model reads the data in its own format.
        """
        if like is None:
            return runner.predictor.part_probabilities(data[settings.part], settings)
        part = self.read_test(runner, settings)[settings.part]
        labels = runner.codec.labels
        order = [labels.index(label) for label in like.codec.labels]
        return runner.predictor.part_probabilities(part, settings)[:, order]

    def results(self, runner: Runner[Any], part: Any, probs: np.ndarray) -> LabelResults:
        """Targets, predictions and probabilities, from which all scores follow."""
        labels, unit = runner.codec.labels, runner.task.unit
        return LabelResults.single(labels, np.asarray(part.labels), probs, unit=unit)

    def score(
        self,
        runner: Runner[Any],
        data: Dataset[Any],
        predictions: np.ndarray,
        settings: Any,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """Accuracy, F1 and loss, by class too, and the errors it was surest of."""
        part, codec, unit = data[settings.part], runner.codec, runner.task.unit
        results = self.results(runner, part, predictions)
        if codec.outliers is not None:
            refused = int(runner.predictor.none_in(part, predictions).sum())
            data.notes.append(
                f"run answers {refused:,} of these {len(part):,} {unit} by 'none of these'; "
                "scores are of the likeliest label of all"
            )
        scores = results.scores(settings.samples)
        if len(codec.labels) > TOP:
            scores.insert(1, top_k(np.asarray(part.labels), predictions, TOP, unit))
        errors = results.errors(settings.errors, lambda i: ("", part.where(i)))
        return ScoredPredictions(
            scores,
            len(part),
            results.details(errors, baseline_scores(codec, part)),
            self.made_with(runner, settings),
        )

    def compare(
        self, runner: Runner[Any], data: Dataset[Any], theirs: System, ours: Any, settings: Any
    ) -> list[Comparison]:
        """Comparison of accuracies by a paired bootstrap."""
        part = data[settings.part]
        other = self.results(runner, part, theirs.predictions).predictions
        return self.results(runner, part, ours).compare(other, settings.samples)

    def outputs(
        self, runner: Runner[Any], data: Dataset[Any], predictions: np.ndarray, settings: Any
    ) -> list[dict[str, Any]]:
        """Each example with its label and what was predicted."""
        part, labels = data[settings.part], runner.codec.labels
        numbers = np.asarray(part.labels).tolist()
        return [
            {
                runner.task.inputs.key: part.where(i),
                "label": labels[numbers[i]],
                "prediction": labels[best],
                "probability": float(predictions[i, best]),
            }
            for i, best in enumerate(predictions.argmax(1).tolist())
        ]


def baseline_scores(codec: Any, part: Any) -> dict[str, dict[str, float]]:
    """Scores of the commonest label and the nearest mean."""
    if codec.baselines is None:
        return {}
    targets = one_hot(np.asarray(part.labels), len(codec.labels))
    return codec.baselines.scores(codec.baseline_vectors(part), targets)


def valid_scores(results: LabelResults, by_f1: bool) -> dict[str, float]:
    """Loss, accuracy and macro F1 of probabilities; `better` is to be raised."""
    accuracy = 100 * float((results.targets & results.predictions).any(1).mean())
    f1 = macro_f1(count(results.targets, results.predictions))
    loss = log_loss(results.targets, results.probs, False)
    return {"loss": loss, "accuracy": accuracy, "macro_f1": f1, "better": f1 if by_f1 else accuracy}
