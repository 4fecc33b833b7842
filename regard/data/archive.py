"""Files in tar archives, read where they lie: nothing is unpacked, and no name is a path on disk.

A file in an archive has a place as if the archive were a folder: `train.tar/cat/1.png`.
"""

import os
import tarfile
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator
from functools import cache, lru_cache
from io import BufferedReader
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.listing import TextBlob, keep_arrays, kept_arrays, stamp_of
from regard.data.store import store_key
from regard.errors import UsageError
from regard.files import refuse

SUFFIX = ".tar"
_MOST_MEMBERS = 20_000_000
_MOST_NAME = 4096  # bytes
_MOST_HEADER = 2**20  # bytes of one header: long names and notes
_MOST_BYTES = 2**30  # of a member that is read
_BLOCK = 512
_PACKED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}
_ARCHIVES = 4096  # whose indices stay open


class Archive(NamedTuple):
    """The files in a tar, in the order of their names: where each begins, and how long it is."""

    path: str
    stamp: tuple[int, int, int]
    names: TextBlob
    starts: np.ndarray
    sizes: np.ndarray

    def find(self, name: str) -> int | None:
        """Number of a file by its name, if there is one."""
        raw, every = os.fsencode(name), range(len(self.names))
        at = bisect_left(every, raw, key=self.names.raw)
        return at if at < len(every) and self.names.raw(at) == raw else None

    def below(self, folder: str) -> range:
        """Numbers of the files in a folder of it, which ends with a slash, or of all."""
        raw, every = os.fsencode(folder), range(len(self.names))
        if not raw:
            return every
        low, high = (bisect_left(every, end, key=self.names.raw) for end in (raw, raw[:-1] + b"0"))
        return range(low, high)

    def folders(self, inner: str) -> list[str]:
        """Names of the folders in a folder of it, which ends with a slash, or right in it."""
        rows, found = self.below(inner), list[str]()
        i = rows.start
        while i < rows.stop:
            name, inside, _ = self.names[i][len(inner) :].partition("/")
            found += [name] * bool(inside)
            i = self.below(f"{inner}{name}/").stop if inside else i + 1
        return found

    def read(self, number: int) -> bytes:
        """Bytes of a file, if the archive is still as it was."""
        start, size = int(self.starts[number]), int(self.sizes[number])
        where = f"{self.path}/{self.names[number]}"
        if size > _MOST_BYTES:
            raise UsageError(f"{where}: {size:,} bytes; at most {_MOST_BYTES >> 30} GB are read")
        try:
            with open(self.path, "rb") as file:
                if stamp_of(os.fstat(file.fileno())) != self.stamp:
                    raise UsageError(f"{self.path}: changed while it was read; begin again")
                file.seek(start)
                content = file.read(size)
        except OSError as error:
            raise refuse(error, self.path) from error
        if len(content) < size:
            raise UsageError(f"{where}: cut short; copy {self.path} again")
        return content


def is_archive(path: str | os.PathLike[str]) -> bool:
    """True if a path is that of a tar."""
    return str(path).lower().endswith(SUFFIX) and os.path.isfile(path)


def in_archive(where: str) -> tuple[Archive, str] | None:
    """Archive that a place lies in, and the name in it, or nothing if it lies in none."""
    at = where.find(SUFFIX)
    while at >= 0:
        end = at + len(SUFFIX)
        if where[end : end + 1] in ("", os.sep, "/") and os.path.isfile(where[:end]):
            return open_archive(where[:end]), where[end + 1 :].strip("/")
        at = where.find(SUFFIX, end)
    return None


def content_of(where: str) -> str | bytes:
    """What of a file is opened: its path, or its bytes if it lies in an archive."""
    if (found := in_archive(where)) is None:
        return where
    number = found[0].find(found[1])
    return where if number is None else found[0].read(number)


def open_archive(path: str | os.PathLike[str]) -> Archive:
    """Archive with the index of its files, which is made once and kept in the cache."""
    try:
        return _opened(os.fspath(path), stamp_of(os.stat(path)))
    except OSError as error:
        raise refuse(error, os.fspath(path)) from error


@lru_cache(maxsize=_ARCHIVES)
def _opened(path: str, stamp: tuple[int, int, int]) -> Archive:
    key = store_key("tar", os.path.realpath(path), *stamp)
    found = kept_arrays(key)
    if not found:
        found = _index(path)
        keep_arrays(key, found)
    names = TextBlob(found["names"].tobytes(), found["ends"])
    return Archive(path, stamp, names, found["starts"], found["sizes"])


def _index(path: str) -> dict[str, np.ndarray]:
    names: list[bytes] = []
    starts, sizes = array("q"), array("q")
    for name, start, size in _members(path):
        names.append(name)
        starts.append(start)
        sizes.append(size)
        if len(names) > _MOST_MEMBERS:
            raise UsageError(f"{path}: over {_MOST_MEMBERS:,} files; too many to be meant")
    order = sorted(range(len(names)), key=names.__getitem__)
    for one, next in zip(order, order[1:], strict=False):
        if names[one] == names[next]:
            raise UsageError(f"{path}: {os.fsdecode(names[one])} is in it twice; keep one")
    kept = TextBlob.of(names[i] for i in order)
    places = {"starts": starts, "sizes": sizes}
    arrays = {key: np.frombuffer(each, np.int64)[order] for key, each in places.items()}
    return {"names": np.frombuffer(kept.blob, np.uint8), "ends": kept.ends, **arrays}


class _Headers(BufferedReader):
    """A file of which tarfile reads no more at once than a header may have."""

    def read(self, size: int | None = -1, /) -> bytes:
        """So many bytes."""
        if size is None or not 0 <= size <= _MOST_HEADER:
            raise tarfile.ReadError("a header that is too long")
        return super().read(size)


def _members(path: str) -> Iterator[tuple[bytes, int, int]]:
    """Yield the name of each file in a tar, where it begins and its size, or refuse the tar."""
    with open(path, "rb", buffering=0) as raw:
        head = raw.read(2)
        if kind := _PACKED.get(head):
            raise UsageError(
                f"{path}: a tar packed by {kind}; unpack it, so that it is a plain tar"
            )
        raw.seek(0)
        length, file, last = os.fstat(raw.fileno()).st_size, _Headers(raw), -1
        try:
            tar = tarfile.TarFile(fileobj=file, errors="surrogateescape")
            while (member := tar.next()) is not None:
                tar.members.clear()  # type: ignore[attr-defined] # else it keeps them all
                name = _checked(member, path)
                if member.offset <= last or member.offset_data + member.size > length:
                    raise tarfile.ReadError(f"{member.name} is cut short")
                last = member.offset
                if name:
                    yield name, member.offset_data, member.size
            end = tar.offset
        except UsageError:
            raise
        except Exception as error:  # tarfile stumbles over noise in many ways
            why = " ".join(str(error).split())[:80] or type(error).__name__
            raise UsageError(f"{path}: cut short, or no tar ({why}); copy it again") from None
        raw.seek(end)
        some = raw.read(_BLOCK)
        if len(some) < _BLOCK or any(some):
            raise UsageError(f"{path}: cut short or damaged at byte {end:,}; copy it again")
        while some := raw.read(_MOST_HEADER):
            if any(some):
                raise UsageError(f"{path}: more behind its end; put all into one tar")


def _checked(member: tarfile.TarInfo, path: str) -> bytes:
    """Name of a file, or nothing for a folder; what is neither is refused."""
    name = member.name.removeprefix("./")
    if member.isdir():
        return b""
    kind = "a sparse file" if member.issparse() else "a link" if not member.isfile() else ""
    if kind and not (member.islnk() or member.issym() or member.issparse()):
        kind = "a device, or no file"
    if kind:
        raise UsageError(f"{path}: {name!r:.200} is {kind}; put plain files into the tar")
    raw = os.fsencode(name)
    if name.startswith("/") or ".." in name.split("/") or not 0 < len(raw) <= _MOST_NAME:
        raise UsageError(
            f"{path}: {name!r:.200} is no name below the tar's own folder; make it from there"
        )
    return raw


def archives_in(folder: Path) -> list[Path]:
    """Tars that lie in a folder, in the order of their names."""
    try:
        names = sorted(entry.name for entry in os.scandir(folder) if is_archive(entry.path))
    except OSError:
        return []
    return [folder / name for name in names if not name.startswith(".")]


def locator(home: str | os.PathLike[str]) -> Callable[[str], str]:
    """Find the place of a file that a table in a folder names: there, or in a tar beside it."""
    archives = cache(lambda: [open_archive(path) for path in archives_in(Path(home))])

    def locate(name: str) -> str:
        path = str(Path(home) / name)
        if not os.path.exists(path):
            inner = os.path.normpath(name)
            for archive in archives():
                if archive.find(inner) is not None:
                    return f"{archive.path}/{inner}"
        return path

    return locate
