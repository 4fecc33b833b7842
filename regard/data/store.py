"""Texts, their tokens and decoded images on disk, read through the memory map.

A store is hashed when it is opened (1.7 GB a second where the processor has instructions for it),
and one whose bytes are not those that were written is built again. A large one is built in parts,
so that memory is bounded, all cores work, and what was killed goes on from its finished parts.
"""

import hashlib
import json
import multiprocessing
import os
import sys
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import count
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch

from regard.errors import UsageError
from regard.files import (
    alone,
    cache_folder,
    delete,
    refuse,
    replacing,
    sha256,
    sweep,
    write_atomically,
)

_FORMAT = 2  # of the note, which has the hash of each file, and of itself
_NOTE = "store.json"  # written last: a folder without it holds no store
PART = 1 << 25  # bytes of text in a part of a store
SHOWN = ContextVar("shown", default=True)  # whether a terminal shows how far a build is

StoreRow = Sequence[
    Sequence[int] | bytes
]  # of a store: a sequence of ids, or bytes, for each column


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
    """Columns of rows of ids or bytes, memory-mapped, and what was noted about them."""

    def __init__(self, columns: list[Column], about: dict[str, Any] | None = None):
        """Take the columns, all of which have the same number of rows."""
        self.columns, self.about = columns, about or {}

    @classmethod
    def open(cls, folder: str | Path) -> "Store":
        """Open the store in a folder, or say what is wrong with it."""
        folder = Path(folder)
        with _intact(folder) as note:
            arrays = [_map(folder / name) for name in note["files"]]
        columns = [Column(*pair) for pair in zip(arrays[::2], arrays[1::2], strict=True)]
        return cls(columns, note.get("about"))

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.columns[0]) if self.columns else 0

    def __getitem__(self, column: int) -> Column:
        """One column."""
        return self.columns[column]

    def lengths(self, column: int) -> np.ndarray:
        """Length of every row of a column."""
        return np.diff(self.columns[column].offsets)


class Gathered:
    """Rows in memory, on their way to a store."""

    def __init__(self) -> None:
        self.ids: list[array[int] | bytearray] = []
        self.offsets: list[array[int]] = []
        self.rows = self.size = 0  # and bytes

    def add(self, row: StoreRow) -> None:
        """Add a row: a sequence of ids, or bytes, for each column."""
        if not self.rows:
            self.ids = [bytearray() if isinstance(some, bytes) else array("i") for some in row]
            self.offsets = [array("q", [0]) for _ in row]
        self.rows += 1
        if len(row) != len(self.ids):
            raise UsageError(
                f"row {self.rows} has {len(row)} columns; expected {len(self.ids)} as before"
            )
        for some, ids, offsets in zip(row, self.ids, self.offsets, strict=True):
            ids.extend(some)
            offsets.append(len(ids))
            self.size += len(some)

    def store(self) -> Store:
        """The rows so far as a store."""
        columns = []
        for ids, offsets in zip(self.ids, self.offsets, strict=True):
            values = np.frombuffer(ids, np.uint8 if isinstance(ids, bytearray) else np.int32)
            small = values.min(initial=0) >= 0 and values.max(initial=0) < 2**16
            values = values.astype(np.uint16) if small and values.itemsize == 4 else values
            columns.append(Column(values, np.frombuffer(offsets, np.int64)))
        return Store(columns)


def gather(rows: Iterable[StoreRow]) -> Store:
    """Rows as a store in memory."""
    gathered = Gathered()
    for row in rows:
        gathered.add(row)
    return gathered.store()


def build_store(
    folder: str | Path,
    rows: Iterable[StoreRow],
    nothing: str = "no examples to store; check the data",
) -> Store:
    """Write rows, one sequence of ids or bytes for each column, and open the store they make.

    Several processes may do so at once, since what they write is the same, and others may delete
    the folder meanwhile: then it is used from memory. `nothing` is said where there are no rows.
    """
    folder, store = Path(folder), gather(rows)
    if not len(store):
        raise UsageError(f"{folder}: {nothing}")
    try:
        for name, values in _arrays(store).items():
            _write(folder / name, values)
        _write_note(folder, _arrays(store), {})
        return Store.open(folder)
    except UsageError as mistake:
        if not _deleted(mistake):
            raise
        return store


def _arrays(store: Store) -> dict[str, np.ndarray]:
    """Arrays of a store by the names of their files."""
    columns = enumerate(store.columns)
    return {
        f"{place}.{name}.npy": values
        for place, column in columns
        for name, values in (("ids", column.ids), ("offsets", column.offsets))
    }


def tokenised(rows: Callable[[], Iterable[StoreRow]], *key: object) -> Store:
    """Open the store that the cache has by this key, or build it; only then are `rows` made."""
    return tokenised_parts([rows], *key)


def tokenised_parts(
    parts: Sequence[Callable[[], Iterable[StoreRow]]],
    *key: object,
    nothing: str = "no examples to store; check the data",
) -> Store:
    """Open the store that the cache has by this key, or build it of parts, with all cores.

    `nothing` is said where there are no rows.
    """
    folder = store_folder(*key)
    try:
        return Store.open(folder)
    except UsageError:  # not there, or broken
        if len(parts) == 1:
            return build_store(folder, parts[0](), nothing)
    with one_builder(folder):
        try:
            return Store.open(folder)
        except UsageError:
            _make_parts(folder, parts)
            return join_parts(folder, {}, nothing)


def store_folder(*key: object) -> Path:
    """Folder in the cache of the store with this key."""
    return cache_folder() / "stores" / store_key(*key)


@contextmanager
def one_builder(folder: Path) -> Iterator[None]:
    """Wait until no other process builds the store in a folder, and keep them out."""
    try:
        with alone(folder.with_suffix(".lock")):
            yield
    except OSError as error:
        raise refuse(error, folder) from error


# Parts


class StoredPart(NamedTuple):
    """A file with some rows of a store, and what was noted with them."""

    path: Path
    note: dict[str, Any]


def part_path(folder: Path, number: int) -> Path:
    """File of a part; its name says how large parts are, since others have other rows."""
    return folder / f"part-{PART >> 10}k-{number:06}.npz"


def write_part(path: Path, store: Store, about: dict[str, Any]) -> None:
    """Write some rows of a store, and what is to be noted with them."""
    kinds = [column.ids.dtype.str for column in store.columns]
    sizes = [len(column.ids) for column in store.columns]
    note = {"rows": len(store), "kinds": kinds, "sizes": sizes, "about": about}
    told = np.frombuffer(json.dumps(note).encode(), np.uint8)
    with replacing(path) as temporary, open(temporary, "wb") as file:
        arrays: dict[str, Any] = {"note": told, **_arrays(store)}
        np.savez(file, **arrays)


def finished_parts(folder: Path) -> Iterator[StoredPart]:
    """Yield the parts of a store from the first to the last that is whole."""
    for number in count():
        if (part := read_part(part_path(folder, number))) is None:
            return
        yield part


def read_part(path: Path, whole: bool = True) -> StoredPart | None:
    """Part in a file, if it is there; every byte is checked unless it need not be `whole`."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if whole and arrays.zip.testzip() is not None:
                return None
            return StoredPart(path, json.loads(arrays["note"].tobytes()))
    except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile):
        return None


def join_parts(folder: Path, about: dict[str, Any], nothing: str = "no rows in it") -> Store:
    """Write the parts in a folder one after the other as a store, and open it."""
    parts = [part for part in _whole_parts(folder) if part.note["rows"]]
    if not parts:
        raise UsageError(f"{folder}: {nothing}")
    rows, names = sum(part.note["rows"] for part in parts), []
    for place in range(len(parts[0].note["kinds"])):
        kinds = [np.dtype(part.note["kinds"][place]) for part in parts]
        kind = max(kinds, key=lambda kind: kind.itemsize).str
        size = sum(part.note["sizes"][place] for part in parts)
        ids, offsets = (f"{place}.{what}.npy" for what in ("ids", "offsets"))
        _write_joined(folder / ids, kind, size, [(part.path, ids) for part in parts])
        _write_joined(folder / offsets, "<i8", rows + 1, [(part.path, offsets) for part in parts])
        names += [ids, offsets]
    _write_note(folder, names, {"about": about})
    for path in folder.glob("part-*.npz"):
        delete(path)
    return Store.open(folder)


def _whole_parts(folder: Path) -> Iterator[StoredPart]:
    for number in count():
        if not (path := part_path(folder, number)).exists():
            return
        if (part := read_part(path, whole=False)) is None:
            raise UsageError(f"{path}: damaged; delete it, and give the same command again")
        yield part


def _write_joined(path: Path, kind: str, size: int, parts: Sequence[tuple[Path, str]]) -> None:
    """Write arrays of parts one after the other; those of offsets go on from each other."""
    offsets, at, last = path.name.endswith("offsets.npy"), 0, 0
    with replacing(path) as temporary, open(temporary, "wb") as file:
        header = {"descr": kind, "fortran_order": False, "shape": (size,)}
        np.lib.format.write_array_header_1_0(file, header)
        for source, name in parts:
            try:
                with np.load(source, allow_pickle=False) as arrays:
                    values = arrays[name].astype(kind, copy=False)
            except (ValueError, KeyError, zipfile.BadZipFile):
                raise UsageError(f"{source}: damaged; give the same command again") from None
            if offsets:
                values = values[at > 0 :] + last
                last = int(values[-1])
            file.write(memoryview(values).cast("B") if len(values) else b"")
            at += len(values)
    if at != size:
        raise UsageError(f"{path.parent}: its parts changed while they were joined; begin again")


def _make_parts(folder: Path, parts: Sequence[Callable[[], Iterable[StoreRow]]]) -> None:
    """Write the parts that are not there yet, with all cores."""
    todo = [n for n in range(len(parts)) if read_part(part_path(folder, n)) is None]
    workers = min(len(todo), usual_workers())
    with _shown("storing tokens, parts", len(parts), len(parts) - len(todo)) as shown:
        if workers < 2:
            for number in todo:
                write_part(part_path(folder, number), gather(parts[number]()), {})
                shown.update(1)
            return
        _work(folder, parts, [todo[start::workers] for start in range(workers)], shown.update)


def usual_workers() -> int:
    """Number of processes that build a store: one for each thread of the processes of a host."""
    if sys.platform != "linux":  # elsewhere a process cannot be forked with threads in it
        return 1
    asked = torch.get_num_threads() * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return min(asked, len(os.sched_getaffinity(0)))


def _work(
    folder: Path,
    parts: Sequence[Callable[[], Iterable[StoreRow]]],
    shares: Sequence[list[int]],
    on_part: Callable[[int], None],
) -> None:
    """Write parts in processes of which each has its share."""
    fork, ends, children = multiprocessing.get_context("fork"), [], []
    for share in shares:
        end, other = fork.Pipe(duplex=False)
        child = fork.Process(target=_work_alone, args=(folder, parts, share, other), daemon=True)
        child.start()
        other.close()
        ends.append(end)
        children.append(child)
    try:
        while ends:
            for end in wait(ends):
                assert isinstance(end, Connection)
                try:
                    mistake = end.recv_bytes()
                except EOFError:
                    ends.remove(end)
                    continue
                if mistake:
                    raise UsageError(mistake.decode())
                on_part(1)
        for child in children:
            child.join()
        if code := next((child.exitcode for child in children if child.exitcode), 0):
            raise UsageError(
                f"a process that builds {folder} has ended (exit code {code}; was there memory?); "
                "give the same command again to go on from its finished parts"
            )
    finally:
        for child in children:
            child.kill()
            child.join()


def _work_alone(
    folder: Path,
    parts: Sequence[Callable[[], Iterable[StoreRow]]],
    share: Sequence[int],
    told: Connection,
) -> None:
    """Write a share of the parts in this process, unless the one that began it is gone."""
    parent = multiprocessing.parent_process()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the other cores have their own processes

    def rows(number: int) -> Iterator[StoreRow]:
        for row in parts[number]():
            if parent is None or os.getppid() != parent.pid:
                os._exit(1)
            yield row

    try:
        for number in share:
            write_part(part_path(folder, number), gather(rows(number)), {})
            told.send_bytes(b"")
    except UsageError as mistake:
        told.send_bytes(str(mistake).encode())
    except KeyboardInterrupt:
        os._exit(1)


def _shown(what: str, total: int, done: int = 0) -> Any:
    """A progress bar, on a terminal only."""
    from regard.training.progress import Progress

    return Progress(what, total, done=done, quiet=not (SHOWN.get() and sys.stderr.isatty()))


def rows_in_parts(
    folder: Path,
    rows: Callable[[dict[str, Any]], Iterator[StoreRow]],
    state: Callable[[], dict[str, Any]],
    begun: Gathered,
    more: Iterator[StoreRow],
    total: int,
) -> Store:
    """Write rows that are read one after the other, in parts, and open the store they make.

    Args:
        folder: of the store.
        rows: makes the rows after those of a state.
        state: of what has read them, so far.
        begun: the first of them, if no part is there yet.
        more: the rows that follow these.
        total: bytes of what they are read from.
    """
    parts = list(finished_parts(folder))
    if parts:
        begun, more = Gathered(), rows(parts[-1].note["about"])
    size = sum(sum(part.note["sizes"]) for part in parts)
    with _shown("storing text, MB", total >> 20, size >> 20) as shown:
        for number in count(len(parts)):
            while begun.size < PART and (row := next(more, None)) is not None:
                begun.add(row)
            if not begun.rows:
                break
            write_part(part_path(folder, number), begun.store(), state())
            shown.update(begun.size >> 20)
            begun = Gathered()
    return join_parts(folder, state())


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
