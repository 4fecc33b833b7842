"""Sets of files that are images or sounds, in the format of a model, with their labels."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.data.media import class_names
from regard.data.parts import NEEDED, Dataset, PartReader, PartsAsked, load_parts
from regard.data.split import RowSplitter
from regard.errors import UsageError


class MediaRows:
    """Some of the files of a part, which have `items`, with the numbers of their labels."""

    def __init__(self, files: Any, rows: np.ndarray, labels: Tensor):
        """Take which of the files they are."""
        self.files, self.rows, self.labels = files, rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, i: int) -> str:
        """Return the file of one, or its place in a file."""
        return self.files.items[int(self.rows[i])].where

    @property
    def items(self) -> list[Any]:
        """Return where each is, its label, its transcript if it has one, and its hash."""
        return [self.files.items[row] for row in self.rows.tolist()]

    @property
    def hashes(self) -> list[str]:
        """Return what tells each from all others."""
        return [item.source for item in self.items]

    @property
    def sha(self) -> str:
        """Return a hash of the files and their labels."""
        raise NotImplementedError

    def pick(self, indices: Any) -> Self:
        """Return some of them."""
        indices = np.asarray(indices, dtype=np.int64)
        some = copy(self)
        some.rows, some.labels = self.rows[indices], self.labels[torch.from_numpy(indices)]
        return some


R = TypeVar("R", bound=MediaRows)


@dataclass
class MediaSet(Dataset[R], Generic[R]):
    """The files of each part, the names of their labels, and their format.

    `format.key()` is what of it makes other data of the same files.
    """

    format: Any

    @cached_property
    def sha(self) -> str:
        """A hash of what is trained and validated on, in its format."""
        parts = [self.parts[name].sha for name in ("train", "valid") if name in self.parts]
        held = json.dumps([parts, self.classes, self.format.key()])
        return hashlib.sha256(held.encode()).hexdigest()


S = TypeVar("S", bound=MediaSet[Any])


def rounded_stats(mean: np.ndarray, std: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return means and deviations as a config keeps them; what never varies is divided by 1."""
    means, deviations = ([round(float(x), 6) for x in row] for row in (mean, std))
    return tuple(means), tuple(x or 1.0 for x in deviations)


D = TypeVar("D", bound=Dataset[Any])


def load_file_parts(
    loaded: D,
    data: str,
    word: str,
    readers: Mapping[str, Any],
    read: Callable[[str], Any],
    shares: Mapping[str, float],
    asked: PartsAsked,
) -> D:
    """Read the needed parts, which have `items` and `pick`; what is held out is split by hash."""
    return load_parts(
        loaded,
        {name: PartReader(data, partial(read, name)) for name in readers},
        absent=lambda name: f"{data}: no {name} part; there is {', '.join(readers) or 'none'}",
        where=data,
        splitter=RowSplitter(
            f"{word}s", items=lambda rows: rows.items, pick=lambda rows, some: rows.pick(some)
        ),
        unnamed=list(readers) == ["train"],
        need=asked.get("need", NEEDED),
        shares=shares,
        trained=asked.get("trained"),
    )


def load_media(
    loaded: S,
    data: str,
    word: str,
    readers: Mapping[str, Callable[[], Any]],
    decode: Callable[[str, Any], Any],
    *,
    names: Sequence[str] | None,
    shares: Mapping[str, float],
    asked: PartsAsked,
) -> S:
    """Read the needed parts into a set; without one for validation, some are split off by hash.

    `names` are those of labels that are numbers, or None where labels are known or of no concern.
    """

    def read(name: str) -> Any:
        files = readers[name]()
        notes = files.all_notes()
        if not len(files):
            why = f"; {notes[-1]}" if notes else ""
            raise UsageError(f"{data}: no {word} in the {name} part{why}")
        loaded.notes.extend(notes)
        if names is not None and not loaded.classes:
            loaded.classes = class_names({item.label for item in files.items}, names)
        return decode(name, files)

    return load_file_parts(loaded, data, word, readers, read, shares, asked)
