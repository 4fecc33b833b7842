"""Tokenised text and decoded images on disk, read through the memory map, never all at once.

A store is hashed when it is opened (1.7 GB a second where the processor has instructions for it),
and one whose bytes are not those that were written is built again.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from regard.errors import UsageError
from regard.files import cache_folder, refuse, replacing, sha256, sweep, write_atomically

_FORMAT = 2  # of the note, which has the hash of each file, and of itself
_NOTE = "store.json"  # written last: a folder without it holds no store


def store_key(*parts: object) -> str:
    """Name a store after all it depends on: the hashes of data and tokenizers, and settings."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:32]


class Column:
    """The rows of one column: all ids in one array, and where each row begins and ends."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray):
        """Take the ids of all rows and the n + 1 offsets of n rows."""
        self.ids = ids
        self.offsets = offsets

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Ids of one row."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a store of {len(self)} rows")
        return self.ids[self.offsets[row] : self.offsets[row + 1]]


class Store:
    """Columns of tokenised rows, memory-mapped."""

    def __init__(self, columns: list[Column]):
        """Take the columns, all of which have the same number of rows."""
        self.columns = columns

    @classmethod
    def open(cls, folder: str | Path) -> "Store":
        """Open the store in a folder, or say what is wrong with it."""
        folder = Path(folder)
        with _intact(folder) as note:
            arrays = [_map(folder / name) for name in note["files"]]
        return cls([Column(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)])

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.columns[0])

    def __getitem__(self, column: int) -> Column:
        """One column."""
        return self.columns[column]

    def lengths(self, column: int) -> np.ndarray:
        """Length of every row of a column."""
        return np.diff(self.columns[column].offsets)


def build_store(folder: str | Path, rows: Iterable[Sequence[Sequence[int]]]) -> Store:
    """Write rows of token ids, one sequence for each column, and open the store they make.

    Several processes may do so at once, since what they write is the same, and others may delete
    the folder meanwhile: then it is used from memory.
    """
    folder = Path(folder)
    ids: list[array] = []
    offsets: list[array] = []
    for number, row in enumerate(rows, 1):
        if number == 1:
            ids = [array("i") for _ in row]
            offsets = [array("q", [0]) for _ in row]
        if len(row) != len(ids):
            raise UsageError(f"row {number} has {len(row)} columns; expected {len(ids)} as before")
        for column, tokens in enumerate(row):
            ids[column].extend(tokens)
            offsets[column].append(len(ids[column]))
    if not ids:
        raise UsageError(f"{folder}: no examples to store; check the data")
    columns = []
    for tokens, bounds in zip(ids, offsets, strict=True):
        values = np.frombuffer(tokens, dtype=np.int32)
        small = values.min(initial=0) >= 0 and values.max(initial=0) < 2**16
        values = values.astype(np.uint16) if small else values
        columns.append(Column(values, np.frombuffer(bounds, dtype=np.int64)))
    try:
        arrays: dict[str, np.ndarray] = {}
        for place, column in enumerate(columns):
            arrays |= {f"{place}.ids.npy": column.ids, f"{place}.offsets.npy": column.offsets}
        for name, values in arrays.items():
            _write(folder / name, values)
        _write_note(folder, arrays, {})
        return Store.open(folder)
    except UsageError as mistake:
        if not _deleted(mistake):
            raise
        return Store(columns)


def tokenised(rows: Callable[[], Iterable[Sequence[Sequence[int]]]], *key: object) -> Store:
    """Open the store that the cache has by this key, or build it; only then are `rows` made."""
    folder = cache_folder() / "stores" / store_key(*key)
    try:
        return Store.open(folder)
    except UsageError:  # not there, or broken
        return build_store(folder, rows())


def _deleted(mistake: UsageError) -> bool:
    """True if a file could not be written or found since somebody deletes the folder."""
    return isinstance(mistake.__cause__, FileNotFoundError)


def _write(path: Path, values: np.ndarray) -> None:
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.save(file, values, allow_pickle=False)


def _write_note(folder: Path, names: Iterable[str], values: dict[str, Any]) -> None:
    """Write what makes a folder a store: some values, and the hashes of its files."""
    try:
        files = {name: sha256(folder / name) for name in names}
    except OSError as error:
        raise refuse(error, folder) from error
    note = {"format": _FORMAT, **values, "files": files}
    write_atomically(folder / _NOTE, json.dumps({**note, "sha256": store_key(note)}) + "\n")


@contextmanager
def _intact(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the note of a store, every byte of which is as it was written."""
    sweep(folder)  # of those who built it at once, some may have been killed
    try:
        note = json.loads((folder / _NOTE).read_bytes())
        if note["format"] != _FORMAT or note.pop("sha256") != store_key(note):
            raise ValueError(f"{_NOTE} is not as it was written")
        for name, expected in note["files"].items():
            if sha256(folder / name) != expected:
                raise ValueError(f"{name} is not as it was written")
        yield note
    except OSError as error:
        raise refuse(error, error.filename or folder) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{folder}: a broken store ({error}); delete the folder to have it built again"
        ) from error


def _map(path: Path) -> np.ndarray:
    # A plain array over the map: slices of np.memmap itself cost microseconds each.
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


# Decoded images


class ImageStore:
    """Images, as rows of bytes of one shape, memory-mapped; some places may be empty."""

    def __init__(self, rows: np.ndarray, gaps: list[int], why: str):
        """Take the rows (n, ...), the numbers of those left out, and why the first of them was."""
        self.rows, self.gaps, self.why = rows, gaps, why

    @classmethod
    def of(cls, shape: tuple[int, ...], rows: Iterable[np.ndarray | str]) -> "ImageStore":
        """Keep rows in memory; a text says why one is left out."""
        store = cls(np.zeros(shape, np.uint8), [], "")
        for number, row in enumerate(store._whole(rows)):
            store.rows[number] = row
        return store

    @classmethod
    def open(cls, folder: str | Path, shape: tuple[int, ...]) -> "ImageStore":
        """Open the store of a shape (n, ...) in a folder, or say what is wrong with it."""
        folder = Path(folder)
        with _intact(folder) as note:
            rows = _map(folder / "rows.npy") if np.prod(shape) else np.zeros(shape, np.uint8)
            if rows.shape != shape:
                raise ValueError(f"rows of {rows.shape}, expected {shape}")
        return cls(rows, note["gaps"], note["why"])

    @classmethod
    def write(
        cls, file: BinaryIO, shape: tuple[int, ...], rows: Iterable[np.ndarray | str]
    ) -> "ImageStore":
        """Write rows one by one as an array of NumPy's, and map them; the file may be deleted."""
        store = cls(np.broadcast_to(np.uint8(0), shape), [], "")
        header = {"descr": "|u1", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        start = file.tell()
        for row in store._whole(rows):
            file.write(row.tobytes())
        file.flush()
        if store.rows.size:
            store.rows = np.asarray(np.memmap(file, np.uint8, "r", start, shape))
        return store

    def _whole(self, rows: Iterable[np.ndarray | str]) -> Iterator[np.ndarray]:
        """Yield rows in their order, zeros where one is left out, and note which these are."""
        nothing = np.zeros(self.rows.shape[1:], np.uint8)
        for number, row in enumerate(rows):
            if isinstance(row, str):
                self.gaps.append(number)
                self.why = self.why or row
            yield nothing if isinstance(row, str) or not nothing.size else row


def build_image_store(
    folder: str | Path, shape: tuple[int, ...], rows: Iterable[np.ndarray | str], tries: int = 100
) -> ImageStore:
    """Write rows of bytes and open the store they make; a text says why a row is left out.

    Several processes may do so at once, since what they write is the same, and others may delete
    the folder meanwhile: then it is used from where it was written, and where nothing is written
    yet, made again so many times.
    """
    folder, begun, store = Path(folder), False, None
    try:
        with replacing(folder / "rows.npy") as temporary, open(temporary, "w+b") as file:
            begun = True
            store = ImageStore.write(file, shape, rows)
        _write_note(folder, ["rows.npy"], {"gaps": store.gaps, "why": store.why})
        return ImageStore.open(folder, shape)
    except UsageError as mistake:
        if not _deleted(mistake) or (begun and store is None) or not tries:
            raise
        return store or build_image_store(folder, shape, rows, tries - 1)
