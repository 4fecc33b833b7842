"""One judge of labels, whatever has them: accuracy, F1, loss, scores by class, worst errors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from regard.data.parts import Dataset
from regard.errors import UsageError
from regard.metrics.correlation import value_scores
from regard.metrics.evaluation import Evaluation, LabelEvaluation
from regard.metrics.labels import (
    MANY,
    LabelResults,
    count,
    log_loss,
    macro_f1,
    micro_f1,
    precision_at_k,
    top_k,
)
from regard.metrics.score import Comparison
from regard.tasks.frame.settings import BootstrapSettings
from regard.tasks.labels.decision import NUMBER
from regard.tasks.parts import Judge, ScoredPredictions, System
from regard.tasks.runner import Runner

_TOP = 5  # labels among which the right one should be, where there are more


class ReadsTest(Protocol):
    """Reads the part that a model is judged on."""

    def __call__(self, runner: Runner[Any], settings: Any) -> Dataset[Any]:
        """Data with that part."""
        ...


class LabelJudge(Judge[Dataset[Any]]):
    """Judges labels of examples by the probabilities that a model gives to all of them.

    Args:
        read_test: reads the part that is judged, with the labels of a model.
        made_with: settings that a score depends on, by the model and the data.
        top: whether it is told how often the right label is among the likeliest five.
        made_of: models that are judged instead, if others are made of them for that.
    """

    Settings = BootstrapSettings
    Result = LabelEvaluation

    def __init__(
        self,
        read_test: ReadsTest,
        made_with: Callable[[Runner[Any], Any, Any], dict[str, Any]] = lambda *about: {},
        top: bool = True,
        made_of: Callable[..., list[tuple[Runner[Any], Any]]] = lambda *about: [],
    ):
        self.read_test, self.made_with, self.top = read_test, made_with, top
        self.made_of = made_of

    def entrants(
        self, runners: Sequence[Runner[Any]], settings: Any, given: Mapping[str, Any]
    ) -> list[tuple[Runner[Any], Any]]:
        """Models of the same task and labels, or those that are made of them."""
        if made := self.made_of(runners, settings):
            return made
        runner, *others = runners
        decision = runner.codec.decision
        if others and decision is NUMBER:
            raise UsageError("against= compares labels, and this model gives numbers; leave it out")
        entrants = super().entrants(runners, settings, given)
        for other in others:
            labels = other.codec.labels
            alike = other.codec.decision.several == decision.several
            if not alike or set(labels) != set(runner.codec.labels):
                raise UsageError(
                    f"against= names a model of other labels ({', '.join(labels[:6])}); "
                    "compare models of the same"
                )
        return entrants

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

    def results(
        self, runner: Runner[Any], part: Any, probs: np.ndarray, settings: Any
    ) -> LabelResults:
        """Targets, predictions and probabilities, from which all scores follow."""
        codec = runner.codec
        return LabelResults(
            codec.labels,
            codec.targets(part),
            codec.decision.assign(probs, settings),
            probs,
            codec.decision.several,
            groups=codec.judged(part).groups,
            unit=runner.task.unit,
        )

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
        made_with = self.made_with(runner, data, settings)
        rows = codec.records(part, predictions, settings) if settings.outputs else []
        if codec.decision is NUMBER:
            right = np.array([example.number for example in part])
            scores = value_scores(predictions[:, 0].astype(float), right)
            return ScoredPredictions(scores, len(right), {}, made_with, Evaluation, rows)
        results = self.results(runner, part, predictions, settings)
        if codec.outliers is not None:
            refused = int(runner.predictor.none_in(part, predictions).sum())
            data.notes.append(
                f"run answers {refused:,} of these {len(part):,} {unit} by 'none of these'; "
                "scores are of the likeliest label of all"
            )
        data.notes.extend(codec.cut_notes(part, settings))
        scores = results.scores(settings.samples)
        if self.top and len(codec.labels) > _TOP:
            scores.insert(1, top_k(results.targets.argmax(1), predictions, _TOP, unit))
        errors = results.errors(settings.errors, codec.judged(part).show)
        details = results.details(errors, baseline_scores(codec, part))
        return ScoredPredictions(scores, len(results.targets), details, made_with, rows=rows)

    def compare(
        self, runner: Runner[Any], data: Dataset[Any], theirs: System, ours: Any, settings: Any
    ) -> list[Comparison]:
        """Comparison by a paired bootstrap."""
        results = self.results(runner, data[settings.part], ours, settings)
        assigned = runner.codec.decision.assign(theirs.predictions, settings)
        return results.compare(assigned, settings.samples, theirs.predictions)


def baseline_scores(codec: Any, part: Any) -> dict[str, dict[str, float]]:
    """Scores of the commonest label and of a simple classifier."""
    if codec.baselines is None:
        return {}
    return codec.baselines.scores(codec.baseline_vectors(part), codec.targets(part))


def valid_scores(results: LabelResults, by_f1: bool) -> dict[str, float]:
    """Loss, accuracy and macro F1 of probabilities; `better` is to be raised."""
    counts = count(results.targets, results.predictions)
    scores = {
        "loss": log_loss(results.targets, results.probs, results.multilabel),
        "accuracy": 100 * float((results.targets == results.predictions).all(1).mean()),
        "macro_f1": macro_f1(counts),
    }
    if results.multilabel and len(results.labels) >= MANY:
        each = precision_at_k(results.targets, results.probs)
        scores |= {name: float(values.mean()) for name, values in each.items()}
    return {**scores, "better": scores["macro_f1"] if by_f1 else micro_f1(counts)}
