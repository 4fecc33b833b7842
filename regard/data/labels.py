"""The labels of a data set and of a model: which there are, and whether they fit each other."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from regard.data.labelled import Example
from regard.errors import UsageError, nearest

MOST_LABELS = 100_000

I = TypeVar("I", bound=tuple[Any, ...])


def label_list(rows: Sequence[Sequence[str]], where: str) -> list[str]:
    """All labels of rows, sorted, or say why they cannot be learnt."""
    labels = sorted({label for row in rows for label in row})
    if len(labels) < 2:
        only = f"only the label {labels[0]!r:.40}" if labels else "no label"
        raise UsageError(f"{where}: {only}; expected two or more to tell apart")
    if len(labels) > MOST_LABELS or (len(labels) > 1000 and 2 * len(labels) > len(rows)):
        raise UsageError(
            f"{where}: {len(labels):,} different labels in {len(rows):,} rows, such as "
            f"{labels[0]!r:.40}; are the columns swapped? Set columns="
        )
    return labels


def label_table(items: Sequence[Any], labels: Sequence[str]) -> np.ndarray:
    """Table (n, labels) of the labels of each text of examples, or word of sentences."""
    numbers = {label: n for n, label in enumerate(labels)}
    rows = [some for item in items for _, some in item.units]
    table = np.zeros((len(rows), len(labels)), dtype=bool)
    columns = [numbers[label] for some in rows for label in some]
    table[np.repeat(np.arange(len(rows)), [len(some) for some in rows]), columns] = True
    return table


def check_single_labels(examples: Iterable[Example]) -> None:
    """Refuse a text with more than one label, or none."""
    for example in examples:
        if len(example.labels) != 1:
            raise UsageError(
                f"{example.where}: {len(example.labels)} labels; this model gives each text one"
            )


def with_known_labels(
    items: Sequence[I],
    labels: Sequence[str],
    known: str,
    notes: list[str],
    *,
    skip_bad: bool = False,
) -> list[I]:
    """Examples or sentences all of whose labels are known; refuses the others.

    `known` says of a label that is not: "does not occur in train".
    """
    every, kept, first = set(labels), [], ""
    for item in items:
        # the labels of an example, or the tags of a sentence
        unknown = next((label for label in item[1] if label not in every), None)
        if unknown is None:
            kept.append(item)
            continue
        shown = ", ".join(labels[:8]) + (", ..." if len(labels) > 8 else "")
        near = nearest(unknown, labels)
        message = f"{item[2]}: label {unknown!r:.60} {known} ({shown}).{near}"
        if not skip_bad:
            raise UsageError(f"{message} Mend it, or leave such rows out with skip_bad=true")
        first = first or message
    if first:
        notes.append(f"{len(items) - len(kept):,} rows with unknown labels left out; {first}")
    if not kept:
        raise UsageError(f"no row is left: {first}")
    return kept


def saved_labels(folder: Path, config: Mapping[str, Any], size: int) -> list[str]:
    """Labels that a model's config.json names, which must be as many as its outputs."""
    path = folder / "config.json"
    labels: Any = config.get("labels")
    good = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not good or len(set(labels)) != len(labels):
        raise UsageError(f"{path}: 'labels' is {labels!r:.40}; expected a list of different texts")
    if len(labels) != size:
        raise UsageError(f"{path}: {len(labels)} labels, but the model tells {size} apart")
    return labels
