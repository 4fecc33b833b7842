"""What tasks that predict labels share, whatever they read."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.errors import UsageError, nearest
from regard.metrics.labels import LabelResults, one_hot, top_k
from regard.metrics.score import Comparison
from regard.tasks.frame.task import Judged

MOST_LABELS = 100_000
MAX_WEIGHT = 100.0  # of a label in the loss
UNEVEN = 5  # times as often: labels that the user should hear of
TOP = 5  # labels among which the right one should be, where there are more


def label_list(found: Sequence[Sequence[str]], where: str) -> list[str]:
    """Return all labels that there are, sorted, or say why they cannot be learnt."""
    labels = sorted({label for some in found for label in some})
    if len(labels) < 2:
        told = f"only the label {labels[0]!r:.40}" if labels else "no label"
        raise UsageError(f"{where}: {told}; expected two or more to tell apart")
    if len(labels) > MOST_LABELS or (len(labels) > 1000 and 2 * len(labels) > len(found)):
        raise UsageError(
            f"{where}: {len(labels):,} different labels in {len(found):,} rows, such as "
            f"{labels[0]!r:.40}; are the columns swapped? Set columns="
        )
    return labels


def unknown_label(where: str, label: str, labels: Sequence[str], known: str) -> str:
    """Say that a label is not among those that are known."""
    near = nearest(label, labels)
    shown = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
    return f"{where}: label {label!r:.60} {known} ({shown}).{near}"


I = TypeVar("I")


def known_only(
    items: Sequence[I],
    labels: Sequence[str],
    of: Callable[[I], Sequence[str]],
    known: str,
    notes: list[str],
    *,
    skip_bad: bool = False,
) -> list[I]:
    """Return items all of whose labels are known, or refuse the first of the others."""
    every, kept, first = set(labels), [], ""
    for item in items:
        strange = next((label for label in of(item) if label not in every), None)
        if strange is None:
            kept.append(item)
            continue
        message = unknown_label(getattr(item, "where", ""), strange, labels, known)
        if not skip_bad:
            raise UsageError(f"{message} Mend it, or leave such rows out with skip_bad=true")
        first = first or message
    if first:
        notes.append(f"{len(items) - len(kept):,} rows with unknown labels left out; {first}")
    if not kept:
        raise UsageError(f"no row is left: {first}")
    return kept


def labels_of(folder: Path, model: Any, config: Mapping[str, Any]) -> list[str]:
    """Check and return the labels that a model's folder names."""
    path = folder / "config.json"
    labels: Any = config.get("labels")
    good = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not good or len(set(labels)) != len(labels):
        raise UsageError(f"{path}: 'labels' is {labels!r:.40}; expected a list of different texts")
    if len(labels) != model.config.labels:
        raise UsageError(
            f"{path}: {len(labels)} labels, but the model tells {model.config.labels} apart"
        )
    return labels


def _balanced(often: np.ndarray, rows: int) -> np.ndarray:
    """Let every label weigh alike, however rare it is; the mean over all rows is one."""
    return rows / (len(often) * np.maximum(often, 1))


# name -> the weight of each label in the loss, from how often it is there among so many rows
WEIGHTINGS: dict[str, Callable[[np.ndarray, int], np.ndarray] | None] = {
    "none": None,
    "balanced": _balanced,
}


def weigh(name: str, often: np.ndarray, rows: int, several: bool = False) -> Tensor | None:
    """Return the weights of labels in the loss; of several, those of where each is there."""
    how = WEIGHTINGS[name]
    if how is None:
        return None
    weights = (rows - often) / np.maximum(often, 1) if several else how(often, rows)
    return torch.from_numpy(np.clip(weights, 1 / MAX_WEIGHT, MAX_WEIGHT).astype(np.float32))


def uneven(often: np.ndarray, labels: Sequence[str], name: str) -> list[str]:
    """Say that some labels are much rarer than others, if they are and nothing is done about it."""
    low, high = int(often.argmin()), int(often.argmax())
    if WEIGHTINGS[name] is not None or often[high] < UNEVEN * max(1, often[low]):
        return []
    return [
        f"uneven labels: {labels[high]!r:.40} occurs {int(often[high]):,} times, "
        f"{labels[low]!r:.40} {int(often[low]):,}; judge by macro F1, too, or set "
        "class_weights=balanced to let each label weigh alike"
    ]


def judge_labels(
    labels: Sequence[str],
    numbers: np.ndarray,
    probs: np.ndarray,
    named: Sequence[tuple[str, str]],
    settings: Any,
    baselines: dict[str, dict[str, float]],
    *,
    unit: str,
) -> Judged:
    """Judge predictions of one label each: accuracy, F1 and loss, by class, and the worst errors.

    `numbers` are the right labels, `probs` (n, labels) what was predicted, and `named` says of
    each example where it stands and what it is.
    """
    results = LabelResults.single(labels, numbers, probs, unit=unit)
    scores = results.scores()
    if len(labels) > TOP:
        scores.insert(1, top_k(numbers, probs, TOP, unit))
    errors = results.errors(settings.errors, lambda i: named[i])
    return Judged(scores, len(numbers), results.details(errors, baselines))


def compare_labels(
    numbers: np.ndarray, ours: np.ndarray, theirs: np.ndarray, settings: Any
) -> list[Comparison]:
    """Compare the accuracy of two tables of probabilities by a paired bootstrap."""
    results = LabelResults.single([""] * ours.shape[1], numbers, ours)
    return [results.compare(one_hot(theirs.argmax(1), ours.shape[1]), settings.samples)]
