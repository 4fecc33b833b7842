"""Rows of text that need not fit in memory: written once as bytes, then read through the map.

What a source holds is read row by row. A part of a store of it is held in memory; where there is
more, it goes to the cache, under a key by which the unchanged source is known again.
"""

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from struct import pack
from typing import Any, Generic, Protocol, TypeVar, overload

import numpy as np

from regard.data.store import (
    PART,
    Column,
    Gathered,
    Store,
    StoreRow,
    finished_parts,
    one_builder,
    rows_in_parts,
    store_folder,
)
from regard.errors import UsageError

_FORMAT = 1  # of stored rows
_AT_ONCE = 1000  # rows
_AT_ONCE_BYTES = 1 << 20  # of rows that are tokenised at once
_FACTS = 2  # numbers of a row beside its texts: one of its own, and the hash that it is split by

T = TypeVar("T")
ReadRow = tuple[tuple[str, ...], int, int]  # its texts, its number, the hash that it is split by


class TextRows(Sequence[T], Generic[T]):
    """Rows made of texts that lie in memory or on disk, all of them or some.

    Args:
        texts: the texts of all rows as bytes, a column for each text of a row.
        facts: (rows, 2) of each, its own number, and the hash that it is split by.
        make: makes a row of its texts and its number.
        picked: the numbers of those that are meant; None: all.
        change: what is done to each row when it is read.
    """

    def __init__(
        self,
        texts: Sequence[Column],
        facts: np.ndarray,
        make: Callable[[list[str], int], T],
        picked: np.ndarray | None = None,
        change: Callable[[T], T] | None = None,
    ):
        self.texts, self.facts, self.make = texts, facts, make
        self.picked, self.change = picked, change

    @classmethod
    def of(cls, store: Store, make: Callable[[list[str], int], T]) -> "TextRows[T]":
        """Rows of a store, the last column of which has the facts."""
        if not len(store):
            return cls([], np.zeros((0, _FACTS), np.uint64), make)
        *texts, facts = store.columns
        return cls(texts, facts.ids.view(np.uint64).reshape(-1, _FACTS), make)

    def __len__(self) -> int:
        return len(self.facts) if self.picked is None else len(self.picked)

    @overload
    def __getitem__(self, row: int) -> T: ...
    @overload
    def __getitem__(self, row: slice) -> "TextRows[T]": ...
    def __getitem__(self, row: int | slice) -> "T | TextRows[T]":
        if isinstance(row, slice):
            return self.pick(np.arange(*row.indices(len(self))))
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return next(iter(self.pick(np.array([row % len(self)]))))

    def __iter__(self) -> Iterator[T]:
        for rows, texts in self._chunks():
            for some, number in zip(texts, self.facts[rows, 0].tolist(), strict=True):
                row = self.make([text.decode() for text in some], number)
                yield row if self.change is None else self.change(row)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def raw(self) -> Iterator[tuple[bytes, ...]]:
        """Yield the texts of each row as bytes, which nothing has changed."""
        for _, texts in self._chunks():
            yield from texts

    def _chunks(self) -> Iterator[tuple[np.ndarray, Iterator[tuple[bytes, ...]]]]:
        """Yield the numbers of some rows, and their texts."""
        for start in range(0, len(self), _AT_ONCE):
            stop = min(start + _AT_ONCE, len(self))
            rows = np.arange(start, stop) if self.picked is None else self.picked[start:stop]
            columns = [
                map(bytes, map(column.ids.data.__getitem__, map(slice, *ends)))
                for column in self.texts
                for ends in [[column.offsets[rows + side].tolist() for side in (0, 1)]]
            ]
            yield rows, zip(*columns, strict=True)

    def pick(self, rows: "np.ndarray | Sequence[int]") -> "TextRows[T]":
        """Some of the rows, by their places."""
        rows = np.asarray(rows, np.int32 if len(self.facts) < 2**31 - 1 else np.int64)
        picked = rows if self.picked is None else self.picked[rows]
        return TextRows(self.texts, self.facts, self.make, picked, self.change)

    def _fact(self, place: int) -> np.ndarray:
        facts = self.facts[:, place]
        return facts if self.picked is None else facts[self.picked]

    @property
    def numbers(self) -> np.ndarray:
        """The number of each row, such as that of its line."""
        return self._fact(0)

    @property
    def keys(self) -> np.ndarray:
        """The hash of each row by which parts are split off."""
        return self._fact(1)

    def strata(self) -> list[str]:
        """Nothing: texts without labels are split by their hashes alone."""
        return []

    @property
    def sizes(self) -> np.ndarray:
        """Bytes of each row."""
        sizes = np.zeros(len(self), np.int64)
        for column in self.texts:
            each = np.diff(column.offsets)
            sizes += each if self.picked is None else each[self.picked]
        return sizes


# Rows of any kind: these, or a list


def pick(rows: Sequence[T], places: "np.ndarray | Sequence[int]") -> Sequence[T]:
    """Some of the rows, by their places."""
    return rows.pick(places) if isinstance(rows, TextRows) else [rows[place] for place in places]


def mapped(rows: Sequence[T], change: Callable[[T], T]) -> Sequence[T]:
    """Rows, each changed when it is read."""
    if not isinstance(rows, TextRows):
        return [change(row) for row in rows]
    return TextRows(rows.texts, rows.facts, rows.make, rows.picked, change)


def portions(rows: Sequence[Any]) -> list[range]:
    """Rows in portions that are stored one by one: a list is a single one."""
    if not isinstance(rows, TextRows):
        return [range(len(rows))]
    ends = np.cumsum(rows.sizes)
    whole = int(ends[-1]) if len(ends) else 0
    borders = np.searchsorted(ends, np.arange(PART, whole, PART)).tolist()
    borders = sorted({0, *borders, len(rows)})
    return [range(a, b) for a, b in zip(borders, borders[1:], strict=False)]


def in_batches(rows: Sequence[Any], some: range) -> Iterator[list[Any]]:
    """Yield some texts or pairs as lists, each of few rows and few letters."""
    batch: list[Any] = []
    size = 0
    for row in rows[some.start : some.stop]:
        batch.append(row)
        size += sum(map(len, (row,) if isinstance(row, str) else (row.source, row.target)))
        if len(batch) == _AT_ONCE or size > _AT_ONCE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def spread(rows: Sequence[T], most: int) -> Sequence[T]:
    """Rows of at most about so many bytes, evenly spaced: all where that is all."""
    if not isinstance(rows, TextRows) or (size := int(rows.sizes.sum())) <= most:
        return rows
    few, some = len(rows), rows
    while size > most and few > 1:
        few = max(1, int(few * most / size * 0.99))
        some = rows.pick(np.linspace(0, len(rows) - 1, few).astype(np.int64))
        size = int(some.sizes.sum())
    return some


# Reading


class RowReader(Protocol):
    """What reads rows one after the other, and can go on from where it was."""

    @property
    def files(self) -> Sequence[Path]:
        """All files that are read."""
        ...

    def rows(self, after: dict[str, Any] | None = None) -> Iterator[ReadRow]:
        """Yield texts, number and hash of each row, from the first or after a state."""
        ...

    def state(self) -> dict[str, Any]:
        """Where it is, and all that is known by now, as JSON has it."""
        ...


def read_rows(
    reader: RowReader, make: Callable[[list[str], int], T], *key: object
) -> tuple[TextRows[T], dict[str, Any]]:
    """Read rows into memory or, if they are many, into the cache; return them with the last state.

    `key` is all that the rows depend on, but for the files.
    """

    def stored(after: dict[str, Any] | None = None) -> Iterator[StoreRow]:
        for texts, number, hash_ in reader.rows(after):
            yield *(text.encode() for text in texts), pack("<QQ", number, hash_)

    seen = _stamps(reader.files)
    folder = (
        None if seen is None else store_folder("rows", _FORMAT, type(reader).__name__, *seen, *key)
    )
    if folder is not None and folder.exists():
        try:
            store = Store.open(folder)
            return TextRows.of(store, make), store.about
        except UsageError:  # not finished, or broken
            pass
    begun, more = Gathered(), stored()
    if folder is None or not any(finished_parts(folder)):
        most = PART if folder is not None else np.inf
        while begun.size < most and (row := next(more, None)) is not None:
            begun.add(row)
        if begun.size < most:
            return TextRows.of(begun.store(), make), reader.state()
    assert folder is not None
    with one_builder(folder):  # the other processes of a host wait, then map it
        try:
            store = Store.open(folder)
        except UsageError:
            total = sum(os.path.getsize(path) for path in reader.files)
            store = rows_in_parts(folder, stored, reader.state, begun, more, total)
            if _stamps(reader.files) != seen:
                raise UsageError(
                    f"{reader.files[0]}: changed while it was read; give the command again"
                ) from None
    return TextRows.of(store, make), store.about


def _stamps(files: Sequence[Path]) -> list[Any] | None:
    """What changes when one of some files does; None where one is no file, such as a pipe."""
    stamps = []
    for path in files:
        try:
            at = os.stat(path)
        except OSError:  # reading it will say why
            return None
        if not stat.S_ISREG(at.st_mode):
            return None
        stamps.append(
            [os.path.abspath(path), at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino]
        )
    return stamps
