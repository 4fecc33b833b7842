"""Scores of labels: accuracy, precision, recall, F1, log loss, confusion, and the worst errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from regard.metrics.evaluation import ClassScore, Misprediction
from regard.metrics.interval import wilson
from regard.metrics.score import (
    BOOTSTRAP_SEED,
    Comparison,
    Score,
    bootstrap,
    bootstrap_signature,
    compare_means,
    mean_of,
    paired_bootstrap,
    percentile_interval,
)

MANY = 10  # labels from which on precision at k is told of rows with several


class Counts(NamedTuple):
    """True positives, predicted labels and target labels: of each label, or of each unit."""

    right: np.ndarray
    predicted: np.ndarray
    targets: np.ndarray

    def f1(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Micro F1 of some rows in percent; where each row has one label, accuracy."""
        right, predicted, targets = (column[rows].sum(-1) for column in self)
        return percent(2 * right, predicted + targets)


def count(targets: np.ndarray, predictions: np.ndarray) -> Counts:
    """Count by label in two tables (n, labels) of target and predicted labels."""
    return Counts((targets & predictions).sum(0), predictions.sum(0), targets.sum(0))


def count_units(
    targets: np.ndarray, predictions: np.ndarray, groups: np.ndarray | None = None
) -> Counts:
    """Count by row of two tables (n, labels), or by the group (a sentence) that a row is in."""
    columns = ((targets & predictions).sum(1), predictions.sum(1), targets.sum(1))
    if groups is None:
        return Counts(*columns)
    return Counts(*(np.bincount(groups, column).astype(np.int64) for column in columns))


def one_hot(numbers: Sequence[int] | np.ndarray, labels: int) -> np.ndarray:
    """Table (n, labels) with one label a row."""
    table = np.zeros((len(numbers), labels), dtype=bool)
    table[np.arange(len(numbers)), np.asarray(numbers, dtype=np.int64)] = True
    return table


def percent(part: Any, whole: Any) -> np.ndarray:
    """Ratio in percent; 0 / 0 is 0."""
    part, whole = np.asarray(part, dtype=float), np.asarray(whole, dtype=float)
    return 100 * np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def class_scores(counts: Counts, labels: Sequence[str]) -> list[ClassScore]:
    """Precision, recall and F1 of each label."""
    right, predicted, targets = counts
    precision, recall = percent(right, predicted), percent(right, targets)
    f1 = percent(2 * right, predicted + targets)
    return [
        ClassScore(label, float(p), float(r), float(f), int(n))
        for label, p, r, f, n in zip(labels, precision, recall, f1, targets, strict=True)
    ]


def macro_f1(counts: Counts) -> float:
    """Mean F1 of all labels that are targets or predicted."""
    f1 = percent(2 * counts.right, counts.predicted + counts.targets)
    seen = counts.predicted + counts.targets > 0
    return float(f1[seen].mean()) if seen.any() else 0.0


def micro_f1(counts: Counts) -> float:
    """F1 of all labels pooled; where each row has one, that is accuracy."""
    return float(counts.f1())


def confusion(targets: np.ndarray, predictions: np.ndarray, labels: int) -> np.ndarray:
    """Confusion matrix (target label, predicted label), from label numbers (n,)."""
    table = np.zeros((labels, labels), dtype=np.int64)
    np.add.at(table, (targets, predictions), 1)
    return table


def log_loss(targets: np.ndarray, probs: np.ndarray, multilabel: bool) -> float:
    """Mean negative log-likelihood of the targets, in nats per row."""
    present = np.clip(probs.astype(np.float64), 1e-12, 1.0)
    if not multilabel:
        return float(-np.log(present[targets]).mean())
    absent = np.clip(1 - probs.astype(np.float64), 1e-12, 1.0)
    return float(-(np.log(np.where(targets, present, absent))).sum(1).mean())


def compare(ours: Counts, theirs: Counts, name: str, samples: int) -> Comparison:
    """Compare the micro F1 of two systems on the same units by paired bootstrap."""
    units = len(ours.right)
    signature = bootstrap_signature(samples, units)
    (result,) = paired_bootstrap({name: (ours.f1, theirs.f1)}, units, samples, signature)
    return result


def top_k(targets: np.ndarray, probs: np.ndarray, k: int, what: str = "images") -> Score:
    """Top-k accuracy: how often the target number (n,) is among the k likeliest."""
    best = np.argsort(-probs, 1, kind="stable")[:, :k]
    right, total = int((best == targets[:, None]).any(1).sum()), len(targets)
    low, high = wilson(right, total)
    signature = f"{what}:{total}|95%:{low:.2f} to {high:.2f}|wilson"
    return Score(f"top-{k}", 100 * right / total, signature)


def precision_at_k(
    targets: np.ndarray, probs: np.ndarray, ks: Sequence[int] = (1, 3, 5)
) -> dict[str, np.ndarray]:
    """Share of right labels among the k likeliest of each row (n,), in percent."""
    order = np.argsort(-probs, 1, kind="stable")[:, : max(ks)]
    right = np.take_along_axis(targets, order, 1)
    return {f"precision@{k}": 100 * right[:, :k].mean(1) for k in ks}


@dataclass(frozen=True)
class LabelResults:
    """The labels that n rows should have and were given, from which every score follows."""

    labels: Sequence[str]
    targets: np.ndarray  # (n, labels), bool
    predictions: np.ndarray  # (n, labels), bool
    probs: np.ndarray  # (n, labels)
    multilabel: bool = False
    groups: np.ndarray | None = None  # (n,): the sentence of a word; groups are resampled whole
    unit: str = "texts"

    @classmethod
    def single(
        cls, labels: Sequence[str], targets: np.ndarray, probs: np.ndarray, **more: Any
    ) -> "LabelResults":
        """Take one target number a row; the prediction is the likeliest label."""
        size = len(labels)
        return cls(labels, one_hot(targets, size), one_hot(probs.argmax(1), size), probs, **more)

    def scores(self, samples: int = 1000) -> list[Score]:
        """Accuracy with its 95% interval, F1 and log loss."""
        counts, total = count(self.targets, self.predictions), len(self.targets)
        exact = int((self.targets == self.predictions).all(1).sum())
        drawn = f"samples:{samples}|seed:{BOOTSTRAP_SEED}"
        if self.groups is None:
            low, high = wilson(exact, total)
            method = "wilson"
        else:
            units = count_units(self.targets, self.predictions, self.groups)
            low, high = percentile_interval(bootstrap([units.f1], len(units.right), samples)[0])
            method = f"bootstrap over {len(units.right)} sentences|{drawn}"
        signature = f"{self.unit}:{total}|95%:{low:.2f} to {high:.2f}|{method}"
        name = "all labels right" if self.multilabel else "accuracy"
        scores = [Score(name, 100 * exact / total, signature)]
        if self.multilabel:
            scores.append(
                Score("micro F1", micro_f1(counts), f"labels:{int(counts.targets.sum())}")
            )
        seen = int((counts.predicted + counts.targets > 0).sum())
        scores.append(Score("macro F1", macro_f1(counts), f"labels:{seen}"))
        if self.multilabel and self.targets.shape[1] >= MANY:
            for name, each in precision_at_k(self.targets, self.probs).items():
                low, high = percentile_interval(bootstrap([mean_of(each)], total, samples)[0])
                signature = f"{self.unit}:{total}|95%:{low:.2f} to {high:.2f}|bootstrap|{drawn}"
                scores.append(Score(name, float(each.mean()), signature))
        loss = log_loss(self.targets, self.probs, self.multilabel)
        return [*scores, Score("loss", loss, f"nats|{self.unit}:{total}")]

    def compare(
        self, theirs: np.ndarray, samples: int, probs: np.ndarray | None = None
    ) -> list[Comparison]:
        """Compare with what another system predicted, (n, labels), by paired bootstrap.

        Precision at k goes by how probable it found the labels, where that is given.
        """
        ours = count_units(self.targets, self.predictions, self.groups)
        other = count_units(self.targets, theirs, self.groups)
        rows = [compare(ours, other, "micro F1" if self.multilabel else "accuracy", samples)]
        if probs is None or not self.multilabel or len(self.labels) < MANY:
            return rows
        precision, other_precision = (precision_at_k(self.targets, p) for p in (self.probs, probs))
        return rows + compare_means(precision, other_precision, samples, unit=self.unit)

    def confusion(self) -> list[list[int]] | None:
        """Confusion matrix, unless rows have several labels."""
        if self.multilabel:
            return None
        numbers = self.targets.argmax(1), self.predictions.argmax(1)
        return confusion(*numbers, len(self.labels)).tolist()

    def errors(self, most: int, show: Callable[[int], tuple[str, str]]) -> list[Misprediction]:
        """Wrong predictions of highest probability; `show(i)` is where and what i is."""
        wrong = self.targets != self.predictions
        # how likely it held that a label is there, or is not there, though it is the other way
        absent = (1 - self.probs) * self.multilabel
        sure = (np.where(self.predictions, self.probs, absent) * wrong).max(1, initial=0.0)
        rows = np.flatnonzero(wrong.any(1))
        order = rows[np.argsort(-sure[rows], kind="stable")][:most]
        return [
            Misprediction(
                *show(i),
                self._named(self.targets[i]),
                self._named(self.predictions[i]),
                float(sure[i]),
            )
            for i in order.tolist()
        ]

    def _named(self, row: np.ndarray) -> str:
        return ",".join(self.labels[k] for k in np.flatnonzero(row).tolist()) or "none"

    def details(
        self, errors: Sequence[Misprediction], baselines: dict[str, dict[str, float]] | None = None
    ) -> dict[str, Any]:
        """Fields of a LabelEvaluation beside the scores."""
        return {
            "labels": list(self.labels),
            "classes": class_scores(count(self.targets, self.predictions), self.labels),
            "confusion": self.confusion(),
            "errors": list(errors),
            "baselines": baselines or {},
        }
