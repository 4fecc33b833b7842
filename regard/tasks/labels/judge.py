"""One judge of labels, whatever has them: accuracy, F1, loss, scores by class, worst errors."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from typing_extensions import TypeVar

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
from regard.tasks.frame.answers import Valued
from regard.tasks.labels.classifier import of_valid
from regard.tasks.labels.decision import NUMBER, threshold_of
from regard.tasks.labels.settings import LabelEvalSettings
from regard.tasks.parts import D, Judge, ScoredPredictions, System
from regard.tasks.runner import Runner

E = TypeVar("E", bound=LabelEvalSettings, default=LabelEvalSettings)
Rows = list[dict[str, Any]]  # of a file of predictions
_TOP = 5  # labels among which the right one should be, where there are more


class LabelJudge(Judge[D, E, np.ndarray]):
    """Judges labels of examples by the probabilities that a model gives to all of them.

    Args:
        made_with: settings that a score depends on, by the model and the data.
        top: whether it is told how often the right label is among the likeliest five.
        made_of: models that are judged instead, if others are made of them for that.
    """

    Settings = LabelEvalSettings
    Result = LabelEvaluation

    def __init__(
        self,
        made_with: Callable[[Runner[Any], Any, Any], dict[str, Any]] = lambda *about: {},
        top: bool = True,
        made_of: Callable[..., list[tuple[Runner[Any], Any]]] = lambda *about: [],
    ):
        self.made_with, self.top = made_with, top
        self.made_of = made_of

    def entrants(
        self, runners: Sequence[Runner[Any]], settings: E, given: Mapping[str, Any]
    ) -> list[tuple[Runner[Any], E]]:
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

    def read(self, runner: Runner[Any], settings: E) -> D:
        """The part that is judged, in the format of a model, with labels that it knows."""
        codec = runner.codec
        return codec.modality.load(
            settings.data,
            settings.reading(),
            codec.modality.format_for(codec.format, settings),
            classes=None if codec.decision is NUMBER else codec.labels,
            valid=getattr(settings, "valid", None),
            test=settings.test,
            need=(settings.part,),
            trained=runner.trained,
        )

    def predict(
        self,
        runner: Runner[Any],
        data: D,
        settings: E,
        like: Runner[Any] | None = None,
    ) -> np.ndarray:
        """Probability of each label for each example, in the order of another model's labels.

        A model reads the data in its own format.
        """
        if like is None:
            return runner.predictor.part_probabilities(data[settings.part], settings)
        part = self.read(runner, settings)[settings.part]
        labels = runner.codec.labels
        order = [labels.index(label) for label in like.codec.labels]
        return runner.predictor.part_probabilities(part, settings)[:, order]

    def results(
        self, runner: Runner[Any], part: Any, probs: np.ndarray, settings: E
    ) -> LabelResults:
        """Targets, predictions and probabilities, from which all scores follow."""
        codec = runner.codec
        return LabelResults(
            codec.labels,
            codec.modality.label_table(part, codec.labels),
            codec.decision.assign(probs, threshold_of(settings)),
            probs,
            codec.decision.several,
            groups=codec.modality.judged(part, codec.labels).groups,
            unit=runner.task.unit,
        )

    def score(
        self,
        runner: Runner[Any],
        data: D,
        predictions: np.ndarray,
        settings: E,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """Accuracy, F1 and loss, by class too, and the errors it was surest of."""
        part, codec, unit = data[settings.part], runner.codec, runner.task.unit
        made_with = self.made_with(runner, data, settings)
        rows = self.rows(runner, part, predictions, settings) if settings.outputs else []
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
        scores = results.scores(settings.samples)
        if self.top and len(codec.labels) > _TOP:
            scores.insert(1, top_k(results.targets.argmax(1), predictions, _TOP, unit))
        show = codec.modality.judged(part, codec.labels).show
        errors = results.errors(settings.errors, show)
        valid = of_valid(settings)
        if valid and codec.baselines is not None and codec.baselines.refitted:
            data.notes.append(
                "part=valid is judged by a linear model that has not learnt its rows; run answers "
                "by one that has"
            )
        details = results.details(errors, baseline_scores(codec, part, valid))
        return ScoredPredictions(scores, len(results.targets), details, made_with, rows=rows)

    def compare(
        self, runner: Runner[Any], data: D, theirs: System, ours: Any, settings: E
    ) -> list[Comparison]:
        """Comparison by a paired bootstrap."""
        results = self.results(runner, data[settings.part], ours, settings)
        threshold = threshold_of(settings)
        assigned = runner.codec.decision.assign(theirs.predictions, threshold)
        return results.compare(assigned, settings.samples, theirs.predictions)

    def rows(self, runner: Runner[Any], part: Any, probs: np.ndarray, settings: E) -> Rows:
        """Each example with its label and what was predicted."""
        codec, threshold, rows = runner.codec, threshold_of(settings), []
        told = codec.modality.judged(part, codec.labels).fields
        for i, row in enumerate(probs):
            answer = codec.decision.answer(codec.labels, row, threshold)
            if isinstance(answer, Valued):
                rows.append({**told(i), "prediction": answer.value})
            else:
                said = {"prediction": str(answer), "probability": answer.probability}
                rows.append({**told(i), **said})
        return rows


def baseline_scores(codec: Any, part: Any, valid: bool = True) -> dict[str, dict[str, float]]:
    """Scores of the commonest label and of a simple classifier, on a part: `valid` or another."""
    if codec.baselines is None:
        return {}
    modality = codec.modality
    vectors, targets = (
        modality.vectors(part, codec.format),
        modality.label_table(part, codec.labels),
    )
    return codec.baselines.scores(vectors, targets, valid)


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
