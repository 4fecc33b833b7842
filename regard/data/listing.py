"""Many files in little memory: names in one blob, labels by number, hashes as bytes.

What was found in files is kept in the cache with their sizes and times, so that those that did not
change are not opened again.
"""

import hashlib
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, overload

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from regard.data.split import hash_text
from regard.errors import UsageError
from regard.files import cache_folder, make_folder, replacing

HASH_BYTES = 16
_CHUNK = 2**16
# nanoseconds that a file must have lain unchanged before it was looked at: times of files are
# coarse, and one that is written twice within the same tick may keep its time
SETTLED = 2 * 10**9


class TextBlob(Sequence[str]):
    """Texts that begin alike, in one blob: 8 bytes each beside their own letters."""

    def __init__(self, blob: bytes, ends: np.ndarray, root: str = ""):
        """Take all letters, where each text ends in them, and what they all begin with."""
        self.blob, self.ends, self.root = blob, ends, root

    @classmethod
    def of(cls, texts: Iterable[str | bytes], root: str = "") -> "TextBlob":
        """Keep texts, without what they all begin with."""
        blob, ends = bytearray(), array("q")
        for text in texts:
            blob += text if isinstance(text, bytes) else os.fsencode(text)
            ends.append(len(blob))
        return cls(bytes(blob), np.frombuffer(ends, np.int64), root)

    def __len__(self) -> int:
        return len(self.ends)

    def raw(self, i: int) -> bytes:
        """Bytes of a text, without what all begin with."""
        return self.blob[self.ends[i - 1] if i else 0 : self.ends[i]]

    @overload
    def __getitem__(self, i: int) -> str: ...
    @overload
    def __getitem__(self, i: slice) -> "TextBlob": ...
    def __getitem__(self, i: int | slice) -> "str | TextBlob":
        if isinstance(i, slice):
            return self.pick(range(*i.indices(len(self))))
        return self.root + os.fsdecode(self.raw(range(len(self))[i]))

    def pick(self, rows: Sequence[int] | np.ndarray) -> "TextBlob":
        """Some of the texts."""
        picked = np.asarray(rows, np.int64)
        starts = np.concatenate([[0], self.ends[:-1]]) if len(self) else self.ends
        begins, ends, parts = starts[picked], self.ends[picked], list[bytes]()
        for low in range(0, len(picked), _CHUNK):  # objects for some at a time
            some = (part[low : low + _CHUNK].tolist() for part in (begins, ends))
            parts.append(b"".join([self.blob[a:b] for a, b in zip(*some, strict=True)]))
        return TextBlob(b"".join(parts), np.cumsum(ends - begins), self.root)


def split_labels(item: Any) -> tuple[str, ...]:
    """Label by which files are split evenly, if there is one."""
    return (item.label,) if item.label else ()


class Item(NamedTuple):
    """One file of a set: where it is, its label, a hash of what it holds, and its transcript."""

    where: str
    label: str
    source: str
    text: str = ""

    labels = property(split_labels)


class Items(Sequence[Item]):
    """Files of a set, each made when it is asked for: some 30 bytes beside its name."""

    def __init__(
        self,
        where: TextBlob,
        codes: np.ndarray,
        labels: Sequence[str],
        hashes: np.ndarray,
        texts: TextBlob | None = None,
    ):
        """Take places, numbers of labels and their names, hashes (n, 16), and transcripts."""
        self.where, self.codes, self.label_names = where, codes, labels
        self.digests, self.texts = hashes, texts

    @classmethod
    def of(cls, items: Iterable[Item]) -> "Items":
        """Keep files; those with transcripts all have one."""
        every = list(items)
        codes, labels = numbered(item.label for item in every)
        hashes = np.frombuffer(b"".join(bytes.fromhex(x.source) for x in every), np.uint8)
        texts = TextBlob.of(item.text for item in every) if any(x.text for x in every) else None
        where = TextBlob.of(item.where for item in every)
        return cls(where, codes, labels, hashes.reshape(-1, HASH_BYTES), texts)

    def __len__(self) -> int:
        return len(self.where)

    @overload
    def __getitem__(self, i: int) -> Item: ...
    @overload
    def __getitem__(self, i: slice) -> "Items": ...
    def __getitem__(self, i: int | slice) -> "Item | Items":
        if isinstance(i, slice):
            return self.pick(range(len(self))[i])
        text = self.texts[i] if self.texts is not None else ""
        label = self.label_names[int(self.codes[i])]
        return Item(self.where[i], label, self.digests[i].tobytes().hex(), text)

    def pick(self, rows: Sequence[int] | np.ndarray) -> "Items":
        """Some of the files."""
        rows = np.asarray(rows, np.int64)
        texts = None if self.texts is None else self.texts.pick(rows)
        parts = self.codes[rows], self.label_names, self.digests[rows], texts
        return Items(self.where.pick(rows), *parts)

    def sources(self) -> Iterator[str]:
        """Hash of each file."""
        return (self.digests[i].tobytes().hex() for i in range(len(self)))

    @property
    def keys(self) -> np.ndarray:
        """Hash of each file by which parts are split off."""
        return np.fromiter(map(hash_text, self.sources()), np.uint64, len(self))

    def strata(self) -> list[str]:
        """Label by which each file is split evenly; nothing where one has none."""
        names = list(self.label_names)
        return [names[code] for code in self.codes.tolist()] if all(self.labels) else []

    @property
    def labels(self) -> list[str]:
        """Labels that some file has, in no order."""
        return [self.label_names[int(code)] for code in np.unique(self.codes)]


def numbered(labels: Iterable[str]) -> tuple[np.ndarray, list[str]]:
    """Number of each label, and their names in the order in which they come."""
    numbers: dict[str, int] = {}
    codes = array("i", (numbers.setdefault(label, len(numbers)) for label in labels))
    return np.frombuffer(codes, np.int32), list(numbers)


class FileList(NamedTuple):
    """Files that are not opened yet: their places, labels, and by what a change is seen.

    A stamp (n, 3) is the size and the times of a file, in nanoseconds: of its bytes, and of the
    file itself, which nobody can set. It is -1 where there is no such file.
    """

    where: TextBlob
    codes: np.ndarray
    labels: Sequence[str]
    stamps: np.ndarray
    texts: TextBlob | None = None

    def pick(self, rows: Sequence[int]) -> "FileList":
        """Some of the files."""
        some = np.asarray(rows, np.int64)
        texts = None if self.texts is None else self.texts.pick(some)
        parts = self.codes[some], self.labels, self.stamps[some], texts
        return FileList(self.where.pick(some), *parts)


def stamp_of(status: os.stat_result) -> tuple[int, int, int]:
    """Size and times of a file, by which a change is seen."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


class Kept(NamedTuple):
    """What was found in files when they were last opened."""

    where: TextBlob
    stamps: np.ndarray
    hashes: np.ndarray
    headers: np.ndarray

    @classmethod
    def open(cls, key: str, header: np.dtype[Any]) -> "Kept":
        """Open what the cache has by a key, or nothing."""
        found = kept_arrays(key)
        if not found:
            stamps, hashes = np.zeros((0, 3), np.int64), np.zeros((0, HASH_BYTES), np.uint8)
            return cls(TextBlob.of(()), stamps, hashes, np.zeros(0, header))
        headers = np.frombuffer(found["headers"].tobytes(), header)
        where = TextBlob(found["names"].tobytes(), found["ends"])
        return cls(where, found["stamps"], found["hashes"], headers)

    def save(self, key: str) -> None:
        """Write it to the cache, if that can be written to."""
        flat = {"names": self.where.blob, "headers": self.headers.tobytes()}
        arrays = {name: np.frombuffer(each, np.uint8) for name, each in flat.items()}
        arrays |= {"ends": self.where.ends, "stamps": self.stamps, "hashes": self.hashes}
        keep_arrays(key, arrays)

    def rows_of(self, files: FileList) -> np.ndarray:
        """Row of each file that is as it was, else -1."""
        mine, theirs = self.where, files.where
        if mine.blob == theirs.blob and np.array_equal(mine.ends, theirs.ends):
            rows = np.arange(len(mine))
        else:
            places = {mine.raw(i): i for i in range(len(mine))}
            each = (places.get(theirs.raw(i), -1) for i in range(len(theirs)))
            rows = np.fromiter(each, np.int64, len(theirs))
        same = rows >= 0
        same[same] = (self.stamps[rows[same]] == files.stamps[same]).all(1)
        return np.where(same, rows, -1)


def _path(key: str) -> Path:
    return cache_folder() / "files" / f"{key}.index"


def kept_arrays(key: str) -> dict[str, np.ndarray]:
    """Arrays that the cache has by a key, or none where they are not as they were written."""
    with suppress(OSError, SafetensorError, ValueError):
        content = memoryview(_path(key).read_bytes())
        if hashlib.sha256(content[32:]).digest() == content[:32]:
            return load(bytes(content[32:]))
    return {}


def keep_arrays(key: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Write arrays to the cache by a key, if that can be written to."""
    with suppress(OSError, UsageError):
        make_folder(_path(key).parent)
        content = save({name: np.ascontiguousarray(array) for name, array in arrays.items()})
        with replacing(_path(key)) as temporary, open(temporary, "wb") as file:
            file.write(hashlib.sha256(content).digest())
            file.write(content)
