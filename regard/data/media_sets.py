"""Sets of files that are images or sounds, in the format of a model, with their labels."""

import hashlib
import json
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from regard.data.listing import Items
from regard.data.media import BROKEN, class_names, label_numbers
from regard.data.parts import NEEDED, Dataset, PartReader, PartsAsked, load_parts
from regard.data.split import RowSplitter
from regard.errors import UsageError, lookup


class MediaRows:
    """Some of the files of a part, which have `items`, with the numbers of their labels."""

    def __init__(self, files: Any, rows: np.ndarray, labels: Tensor):
        """Take which of the files they are."""
        self.files, self.rows, self.labels = files, rows, labels

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, i: int) -> str:
        """File of one, or its place in a file."""
        return self.files.items.where[int(self.rows[i])]

    @property
    def items(self) -> Items:
        """Place, label, transcript (if there is one) and hash of each."""
        return self.files.items.pick(self.rows)

    @property
    def hashes(self) -> list[str]:
        """Identity of each, by which it differs from all others."""
        return list(self.items.sources())

    @property
    def sha(self) -> str:
        """Hash of the files and their labels."""
        raise NotImplementedError

    def pick(self, indices: Any) -> Self:
        """Some of them."""
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

    word: ClassVar[str]  # what its files are: image or sound
    format: Any

    @cached_property
    def sha(self) -> str:
        """A hash of what is trained and validated on, in its format."""
        parts = [self.parts[name].sha for name in ("train", "valid") if name in self.parts]
        held = json.dumps([parts, self.classes, self.format.key()])
        return hashlib.sha256(held.encode()).hexdigest()


S = TypeVar("S", bound=MediaSet[Any])


def labels_of(files: Any, data: MediaSet[Any], options: Any) -> Tensor:
    """Numbers of the labels of files, 0 where these are of no concern."""
    if not options.labelled:
        return torch.zeros(len(files), dtype=torch.int64)
    return torch.from_numpy(label_numbers(files.items, data.classes))


def note_broken(data: MediaSet[Any], part: str, broken: int, why: str, left: int) -> None:
    """Tell how many files of a part were left out as broken, or refuse if none are left."""
    if broken and not left:
        raise UsageError(f"no {data.word} of the {part} part can be read; {why}")
    if broken:
        count = f"{broken:,} broken {data.word}s of the {part} part left out"
        data.notes.append(f"{count}; the first: {why}")


def rounded_stats(mean: np.ndarray, std: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Means and deviations as a config keeps them; what never varies is divided by 1."""
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
    find: Callable[..., tuple[Mapping[str, Callable[[], Any]], Mapping[str, float]]],
    decode: Callable[[str, Any], Any],
    options: Any,
    asked: PartsAsked,
) -> S:
    """Read the needed parts into a set; without one for validation, some are split off by hash.

    Args:
        loaded: Set to fill, with its classes if they are known.
        data: Where it lies.
        find: What finds the readers of its parts, and shares of train, by data, valid and test.
        decode: What makes rows of the files of a part.
        options: How its files are to be taken.
        asked: Which parts are read.
    """
    lookup("broken", options.broken, BROKEN)
    readers, shares = find(data, asked.get("valid"), asked.get("test"), options)
    unknown = options.labelled and not loaded.classes

    def read(name: str) -> Any:
        files = readers[name]()
        notes = files.all_notes()
        if not len(files):
            why = f"; {notes[-1]}" if notes else ""
            raise UsageError(f"{data}: no {loaded.word} in the {name} part{why}")
        loaded.notes.extend(notes)
        if unknown and not loaded.classes:
            loaded.classes = class_names(set(files.items.labels), options.names)
        return decode(name, files)

    return load_file_parts(loaded, data, loaded.word, readers, read, shares, asked)
