"""The files below a folder or in tars, in one order, whatever holds them."""

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.data.archive import Archive, archives_in, in_archive
from regard.data.listing import FileList, TextBlob, keep_arrays, kept_arrays, stamp_of
from regard.data.parts import part_named
from regard.data.store import store_key
from regard.errors import UsageError
from regard.files import refuse

MOST_FILES = 20_000_000
_MOST_BESIDE = 2**20  # bytes of a file that holds a label or a text
_NO_FILE = (-1, -1, -1)  # the stamp of a link that leads nowhere


class FileTree(NamedTuple):
    """Files of a kind below some roots, as they were found."""

    where: TextBlob
    at: np.ndarray  # number of the folder that each is in
    places: list[str]  # of folders, from the roots on; that of a root is empty
    stamps: np.ndarray
    others: int  # files of other kinds in these folders, but for the roots
    other: str  # one of them

    @property
    def folders(self) -> list[str]:
        """Folders right below the roots."""
        return sorted({place.partition("/")[0] for place in self.places} - {""})

    def listing(self) -> tuple[FileList, list[int]]:
        """All files, whose labels are the folders that they are in, and how many each has.

        They are in the order of these, of the folders in them and of their names; those that lie
        in none come last.
        """
        labels = [*self.folders, ""]
        by_place = np.argsort(self.at, kind="stable")
        bounds = np.searchsorted(self.at[by_place], np.arange(len(self.places) + 1)).tolist()
        order, counts = array("q"), dict.fromkeys(labels, 0)
        tops = {place: place.partition("/")[0] for place in self.places}
        for n in sorted(
            range(len(self.places)),
            key=lambda n: (not self.places[n], tops[self.places[n]], self.places[n]),
        ):
            rows = by_place[bounds[n] : bounds[n + 1]].tolist()
            names = [self.where.raw(i).rpartition(b"/")[2] for i in rows]
            order.extend(rows[i] for i in sorted(range(len(rows)), key=names.__getitem__))
            counts[tops[self.places[n]]] += len(rows)
        codes = np.repeat(np.arange(len(counts), dtype=np.int32), list(counts.values()))
        stamps = self.stamps[np.frombuffer(order, np.int64)]
        return FileList(self.where.pick(order), codes, labels, stamps), list(counts.values())


def read_tree(roots: Sequence[Path], fits: Callable[[str], bool]) -> FileTree:
    """Find all files of a kind below folders or places in tars."""
    home = os.path.join(os.path.commonpath(roots) if len(roots) > 1 else roots[0], "")
    blob, ends, at, stamps = bytearray(), array("q"), array("i"), array("q")
    places: dict[str, int] = {}
    others, other = 0, ""
    for root in roots:
        for place, names, stamp in _in_archive(root) or _in_folder(str(root)):
            if place.startswith((".", "__")):
                continue
            name = place.partition("/")[0]
            if any("\ud800" <= letter <= "\udfff" for letter in name):
                raise UsageError(
                    f"{root}: the folder {name!r} has a name that is not UTF-8; rename it"
                )
            number = places.setdefault(place, len(places))
            folder = os.path.join(root, place, "")
            prefix = os.fsencode(folder[len(home) :])
            for i, name in enumerate(names):
                if name.startswith("."):
                    continue
                if fits(name):
                    blob += prefix + os.fsencode(name)
                    ends.append(len(blob))
                    at.append(number)
                    stamps.extend(stamp(i))
                elif place:
                    others, other = others + 1, min(other or folder + name, folder + name)
            if len(ends) > MOST_FILES:
                raise UsageError(f"{root}: over {MOST_FILES:,} files; too many to be meant")
    where = TextBlob(bytes(blob), np.frombuffer(ends, np.int64), home)
    table = np.frombuffer(stamps, np.int64).reshape(-1, 3)
    return FileTree(where, np.frombuffer(at, np.int32), list(places), table, others, other)


# of folders below a root: place, names of the files in it, and the stamp of each by its number
_Found = Iterator[tuple[str, Sequence[str], Callable[[int], tuple[int, int, int]]]]


def _in_archive(root: Path) -> _Found | None:
    """Files in the folders of a place in a tar, unless it lies in none."""
    if (found := in_archive(str(root))) is None:
        return None
    archive, inner = found
    start = len(inner and inner + "/")

    def folder_of(i: int) -> str:
        return os.fsdecode(archive.names.raw(i))[start:].rpartition("/")[0]

    def folders() -> _Found:
        for place, rows in groupby(archive.below(inner and inner + "/"), folder_of):
            numbers = list(rows)
            names = [archive.names[i].rpartition("/")[2] for i in numbers]
            yield place, names, partial(_stamp_in, archive, numbers)

    return folders()


def _stamp_in(archive: Archive, numbers: Sequence[int], i: int) -> tuple[int, int, int]:
    return (int(archive.sizes[numbers[i]]), *archive.stamp[1:])


def _in_folder(root: str, place: str = "") -> _Found:
    """Files in the folders below one; of those behind links, only those right below it count."""
    folders, files = [], []
    try:
        with os.scandir(os.path.join(root, place)) as entries:
            for entry in entries:
                if not entry.is_dir():
                    files.append(entry)
                elif not (entry.is_symlink() if place else entry.name.startswith((".", "__"))):
                    folders.append(entry.name)
    except OSError as error:
        raise refuse(error, os.path.join(root, place)) from error
    yield place, [entry.name for entry in files], lambda i: _stamp(files[i])
    for name in folders:
        yield from _in_folder(root, os.path.join(place, name))


def _stamp(entry: os.DirEntry[str]) -> tuple[int, int, int]:
    try:
        return stamp_of(os.stat(entry.path))  # an entry would keep what its own stat returns
    except OSError:
        return _NO_FILE


def stamps_of(paths: TextBlob) -> np.ndarray:
    """Sizes and times of files wherever they are."""
    stamps = array("q")
    for path in paths:
        try:
            if (found := in_archive(path)) is None:
                stamps.extend(stamp_of(os.stat(path)))
            else:
                archive, number = found[0], found[0].find(found[1])
                size = -1 if number is None else int(archive.sizes[number])
                stamps.extend((size, *archive.stamp[1:]))
        except (OSError, ValueError):
            stamps.extend(_NO_FILE)
    return np.frombuffer(stamps, np.int64).reshape(-1, 3)


# Where the parts are


def unwrapped(path: Path) -> Path:
    """The only folder in a tar, if it has the name of the tar or of a part; else the path."""
    if found := in_archive(str(path)):
        archive, inner = found
        folders = [] if inner else archive.folders("")
        if len(folders) == 1 and len(archive.below(folders[0] + "/")) == len(archive.names):
            named = part_named(folders[0]) or folders[0] == path.stem
            return path / folders[0] if named else path
    return path


def archive_parts(folder: Path) -> dict[str, list[Path]]:
    """Tars of each part that lie in a folder: by their names, or all of them train."""
    parts: dict[str, list[Path]] = {}
    for path in archives_in(folder):
        words = path.stem.replace("-", ".").replace("_", ".").split(".")
        named = [part for word in words if (part := part_named(word))]
        parts.setdefault(named[0] if named else "", []).append(unwrapped(path))
    if rest := parts.pop("", []):
        if parts:
            raise UsageError(
                f"{folder}: {rest[0].name} names no part, as others do; name it such as "
                "train-000.tar, or move it away"
            )
        parts = {"train": rest}
    return parts


# What lies beside a file in a tar


def texts_beside(
    files: FileList, roots: Sequence[Path], suffixes: Sequence[str], keys: Sequence[str]
) -> TextBlob | None:
    """Text of each file in tars from the one of the same stem beside it, or nothing without such.

    A text file holds it, a JSON file has it by one of some keys. What was read is kept.
    """
    archives = [found[0] for root in roots if (found := in_archive(str(root)))]
    if len(archives) < len(roots) or not len(files.where):
        return None

    def text(where: str) -> str | None:
        found = in_archive(where)
        return None if found is None else _text_beside(*found, suffixes, keys)

    def asked(where: str) -> str:
        if (found := text(where)) is None:
            raise UsageError(
                f"{where}: no {' or '.join(suffixes)} with its text beside it, as others have"
            )
        return found

    if text(files.where[0]) is None:
        return None
    every = [(os.path.realpath(one.path), *one.stamp) for one in archives]
    key = store_key("beside", every, suffixes, keys, hashlib.sha256(files.where.blob).hexdigest())
    if kept := kept_arrays(key):
        return TextBlob(kept["names"].tobytes(), kept["ends"])
    texts = TextBlob.of(map(asked, files.where))
    keep_arrays(key, {"names": np.frombuffer(texts.blob, np.uint8), "ends": texts.ends})
    return texts


def _text_beside(
    archive: Archive, name: str, suffixes: Sequence[str], keys: Sequence[str]
) -> str | None:
    """Text that lies beside a file in a tar, if one does."""
    folder, _, last = name.rpartition("/")
    stems = dict.fromkeys((os.path.splitext(last)[0], last.partition(".")[0]))
    for stem in stems:
        for suffix in suffixes:
            number = archive.find(os.path.join(folder, stem + suffix))
            if number is None:
                continue
            where = f"{archive.path}/{archive.names[number]}"
            if archive.sizes[number] > _MOST_BESIDE:
                raise UsageError(f"{where}: over {_MOST_BESIDE >> 20} MB; expected a short text")
            try:
                text = archive.read(number).decode()
                value = json.loads(text) if suffix == ".json" else text
            except (ValueError, RecursionError):
                raise UsageError(f"{where}: no text in UTF-8, or no JSON; mend it") from None
            if suffix == ".json":
                some = value if isinstance(value, dict) else {}
                value = next((some[key] for key in keys if key in some), None)
            if isinstance(value, str | int) and str(value).strip():
                return str(value).strip()
    return None
