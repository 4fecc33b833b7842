"""Scores of labels: how many are right, of which class, how surely, and where the worst are."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from regard.errors import UsageError
from regard.metrics.bleu import Comparison, Score
from regard.metrics.evaluation import Evaluation

SURE = 1.959963984540054  # of a normal law, 95% lie within so many standard deviations
SHOWN = 20  # labels of a confusion matrix that is still printed
LONGEST = 100  # characters of a text that is shown
SEED = 1


@dataclass(frozen=True)
class ClassScore:
    """How well one label is found, in percent."""

    label: str
    precision: float
    recall: float
    f1: float
    support: int  # how often it is right


class Counts(NamedTuple):
    """How often each label was found rightly, found at all, and to be found."""

    right: np.ndarray
    found: np.ndarray
    wanted: np.ndarray


def count(wanted: np.ndarray, found: np.ndarray) -> Counts:
    """Count labels in two tables (n, labels) of which label each row has and was given."""
    return Counts((wanted & found).sum(0), found.sum(0), wanted.sum(0))


def ones(numbers: Sequence[int] | np.ndarray, labels: int) -> np.ndarray:
    """Return a table (n, labels) with one label a row."""
    table = np.zeros((len(numbers), labels), dtype=bool)
    table[np.arange(len(numbers)), np.asarray(numbers, dtype=np.int64)] = True
    return table


def percent(part: Any, whole: Any) -> np.ndarray:
    """Return how many percent a part is; nothing of nothing is none."""
    part, whole = np.asarray(part, dtype=float), np.asarray(whole, dtype=float)
    return 100 * np.divide(part, whole, out=np.zeros_like(part), where=whole > 0)


def by_class(counts: Counts, labels: Sequence[str]) -> list[ClassScore]:
    """Return precision, recall and F1 of each label."""
    right, found, wanted = counts
    columns = (percent(right, found), percent(right, wanted), percent(2 * right, found + wanted))
    return [
        ClassScore(label, float(p), float(r), float(f), int(n))
        for label, p, r, f, n in zip(labels, *columns, wanted, strict=True)
    ]


def macro_f1(counts: Counts) -> float:
    """Return the mean F1 of all labels that are there, or that were found though they are not."""
    f1 = percent(2 * counts.right, counts.found + counts.wanted)
    seen = counts.found + counts.wanted > 0
    return float(f1[seen].mean()) if seen.any() else 0.0


def micro_f1(counts: Counts) -> float:
    """Return the F1 of all labels taken together; where each row has one, that is accuracy."""
    return float(percent(2 * counts.right.sum(), counts.found.sum() + counts.wanted.sum()))


def confusion(wanted: np.ndarray, found: np.ndarray, labels: int) -> np.ndarray:
    """Return how often each label (rows) was taken for each (columns), from their numbers."""
    table = np.zeros((labels, labels), dtype=np.int64)
    np.add.at(table, (wanted, found), 1)
    return table


def wilson(right: int, total: int) -> tuple[float, float]:
    """Return between which percentages the true share lies with 95% (Wilson 1927)."""
    if not total:
        raise UsageError("nothing to judge: there are no answers")
    share, z = right / total, SURE**2 / total
    half = SURE * math.sqrt(share * (1 - share) / total + z / 4 / total)
    low, high = ((share + z / 2 + sign * half) / (1 + z) for sign in (-1, 1))
    return 100 * max(0.0, low), 100 * min(1.0, high)


class Units(NamedTuple):
    """What stands and falls together, a text or a sentence: labels right, found and wanted."""

    right: np.ndarray
    found: np.ndarray
    wanted: np.ndarray

    def f1(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the F1 of all labels of some units together, or accuracy where each has one."""
        right, found, wanted = (column[rows].sum(-1) for column in self)
        return percent(2 * right, found + wanted)


def units(wanted: np.ndarray, found: np.ndarray, of: np.ndarray | None = None) -> Units:
    """Sum tables (n, labels) by the unit that each row belongs to, or let each row be one."""
    columns = ((wanted & found).sum(1), found.sum(1), wanted.sum(1))
    if of is None:
        return Units(*columns)
    return Units(*(np.bincount(of, column).astype(np.int64) for column in columns))


def resampled(systems: Sequence[Units], samples: int) -> list[np.ndarray]:
    """Return the F1 of systems on the same units drawn again and again, with replacement."""
    chance = np.random.Generator(np.random.PCG64(SEED))
    size = len(systems[0].right)
    found: list[list[np.ndarray]] = [[] for _ in systems]
    for start in range(0, samples, 100):
        rows = chance.integers(0, size, (min(100, samples - start), size))
        for values, system in zip(found, systems, strict=True):
            values.append(system.f1(rows))
    return [np.concatenate(values) for values in found]


def compare(ours: Units, theirs: Units, name: str, samples: int) -> Comparison:
    """Compare two systems by paired bootstrap resampling (Koehn 2004)."""
    a, b = resampled([ours, theirs], samples)
    gap = float(ours.f1() - theirs.f1())
    apart = np.abs((a - b) - (a - b).mean()) >= abs(gap)
    low, high = np.percentile(a, [2.5, 97.5])
    p = (float(apart.sum()) + 1) / (samples + 1)
    signature = f"paired bootstrap|samples:{samples}|seed:{SEED}|units:{len(ours.right)}"
    return Comparison(
        name, float(ours.f1()), float(theirs.f1()), p, float(low), float(high), signature
    )


@dataclass(frozen=True)
class Error:
    """A wrong answer, and how sure the model was of it."""

    where: str
    text: str
    right: str
    answer: str
    probability: float

    def __str__(self) -> str:
        text = self.text if len(self.text) <= LONGEST else self.text[: LONGEST - 1] + "…"
        return f"  {self.answer} ({self.probability:.2f}), but {self.right}: {text}  {self.where}"


def tell_baseline(name: str, row: Mapping[str, float]) -> str:
    """Say what a baseline reaches."""
    return f"baseline, {name}: accuracy {row['accuracy']:.2f}, macro F1 {row['macro_f1']:.2f}"


@dataclass(frozen=True, repr=False)
class LabelEvaluation(Evaluation):
    """The scores of labels, with those of each class and the errors it was surest of."""

    labels: list[str] = field(default_factory=list)
    classes: list[ClassScore] = field(default_factory=list)
    confusion: list[list[int]] | None = None
    errors: list[Error] = field(default_factory=list)
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)  # on the same rows

    def __str__(self) -> str:
        told = [tell_baseline(name, row) for name, row in self.baselines.items()]
        parts = [super().__str__(), *told, self._classes()]
        if self.confusion is not None:
            parts.append(self._confusion(self.confusion))
        if self.errors:
            told = "\n".join(str(error) for error in self.errors)
            parts.append(f"wrong and surest of it:\n{told}")
        return "\n".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)

    def _classes(self) -> str:
        width = max(5, *(len(row.label) for row in self.classes))
        lines = [f"{'label':<{width}}  precision  recall      F1  support"]
        for row in self.classes:
            lines.append(
                f"{row.label:<{width}}  {row.precision:9.2f}  {row.recall:6.2f}  {row.f1:6.2f}"
                f"  {row.support:7,}"
            )
        return "\n".join(lines)

    def _confusion(self, table: list[list[int]]) -> str:
        if len(self.labels) > SHOWN:
            pairs = [
                (number, self.labels[i], self.labels[j])
                for i, row in enumerate(table)
                for j, number in enumerate(row)
                if i != j and number
            ]
            most = sorted(pairs, key=lambda pair: -pair[0])[:10]
            told = [f"  {a} taken for {b}: {number:,}" for number, a, b in most]
            return "\n".join(["most often confused:", *told])
        cells = [[f"{number:,}" for number in row] for row in table]
        wide = [
            max(len(label), *(len(row[j]) for row in cells)) for j, label in enumerate(self.labels)
        ]
        first = max(map(len, self.labels))
        lines = ["right label down, answer across:"]
        for name, row in (("", self.labels), *zip(self.labels, cells, strict=True)):
            line = "  ".join(f"{cell:>{width}}" for cell, width in zip(row, wide, strict=True))
            lines.append(f"{name:<{first}}  {line}")
        return "\n".join(lines)


def scores_of(
    wanted: np.ndarray,
    found: np.ndarray,
    chances: np.ndarray,
    *,
    several: bool,
    of: np.ndarray | None = None,
    samples: int = 1000,
    what: str = "texts",
) -> list[Score]:
    """Return the scores of labels wanted and found, tables (n, labels), and of their chances."""
    counts = count(wanted, found)
    rows = units(wanted, found, of)
    total = len(wanted)
    exact = int((wanted == found).all(1).sum())
    if of is None:
        low, high = wilson(exact, total)
        how = "wilson"
    else:
        low, high = np.percentile(resampled([rows], samples)[0], [2.5, 97.5])
        how = f"bootstrap over {len(rows.right)} sentences|samples:{samples}|seed:{SEED}"
    signature = f"{what}:{total}|95%:{low:.2f} to {high:.2f}|{how}"
    name = "all labels right" if several else "accuracy"
    scores = [Score(name, 100 * exact / total, signature)]
    if several:
        scores.append(Score("micro F1", micro_f1(counts), f"labels:{int(counts.wanted.sum())}"))
    seen = int((counts.found + counts.wanted > 0).sum())
    scores.append(Score("macro F1", macro_f1(counts), f"labels:{seen}"))
    return [*scores, Score("loss", log_loss(wanted, chances, several), f"nats|{what}:{total}")]


def log_loss(wanted: np.ndarray, chances: np.ndarray, several: bool) -> float:
    """Return the mean of -log of the chance that was given to what is right."""
    sure = np.clip(chances.astype(np.float64), 1e-12, 1.0)
    if not several:
        return float(-np.log(sure[wanted]).mean())
    not_so = np.clip(1 - chances.astype(np.float64), 1e-12, 1.0)
    return float(-(np.log(np.where(wanted, sure, not_so))).sum(1).mean())
