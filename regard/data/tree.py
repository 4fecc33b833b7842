"""The files below a folder or in tars, in one order, whatever holds them."""

import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.data.archive import Archive, archives_in, in_archive
from regard.data.listing import Listing, Names, keep_arrays, kept_arrays, stamp_of
from regard.data.parts import part_named
from regard.data.store import store_key
from regard.errors import UsageError
from regard.files import refuse

MOST_FILES = 20_000_000
_MOST_BESIDE = 2**20  # bytes of a file that holds a label or a text
_NO_FILE = (-1, -1, -1)  # the stamp of a link that leads nowhere


class Tree(NamedTuple):
    """Files of a kind below some roots, as they were found."""

    where: Names
    starts: np.ndarray  # where in each place its name below the root begins
    stamps: np.ndarray
    folders: list[str]  # right below the roots, but for hidden ones
    others: int  # files of other kinds in these
    other: str  # one of them

    def listing(self) -> tuple[Listing, list[int]]:
        """All files, whose labels are the folders that they are in, and how many each has.

        They are in the order of these, of the folders in them and of their names; those that lie
        in none come last.
        """
        groups: dict[bytes, array[int]] = {}
        for i, start in enumerate(self.starts.tolist()):
            folder = self.where.raw(i)[start:].rpartition(b"/")[0]
            groups.setdefault(folder, array("q")).append(i)
        by_top: dict[str, list[bytes]] = {}
        for folder in groups:
            by_top.setdefault(os.fsdecode(folder.split(b"/", 1)[0]), []).append(folder)
        order, counts = array("q"), []
        for top in (labels := [*self.folders, ""]):
            before = len(order)
            for folder in sorted(by_top.get(top, ())):
                rows = groups[folder].tolist()
                names = [self.where.raw(i).rpartition(b"/")[2] for i in rows]
                order.extend(rows[i] for i in sorted(range(len(rows)), key=names.__getitem__))
            counts.append(len(order) - before)
        codes = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        rows = np.frombuffer(order, np.int64)
        return Listing(self.where.pick(order), codes, labels, self.stamps[rows]), counts


def read_tree(roots: Sequence[Path], fits: Callable[[str], bool]) -> Tree:
    """Find all files of a kind below folders or places in tars."""
    every = [_in_archive(root) or _in_folder(root) for root in roots]
    home = os.path.join(os.path.commonpath(roots) if len(roots) > 1 else roots[0], "")
    blob, ends, starts, stamps = bytearray(), array("q"), array("q"), array("q")
    folders: set[str] = set()
    others, other = 0, ""
    for root, found in zip(roots, every, strict=True):
        prefix = os.fsencode(os.path.join(root, ""))[len(os.fsencode(home)) :]
        for name, stamp in found:
            top, inside, _ = name.partition("/")
            if inside and top.startswith((".", "__")):
                continue
            if inside:
                folders.add(top)
            last = name.rpartition("/")[2]
            if not last or last.startswith("."):
                continue
            if not fits(last):
                if inside:
                    others, path = others + 1, os.path.join(root, name)
                    other = min(other, path) if other else path
                continue
            blob += prefix + os.fsencode(name)
            ends.append(len(blob))
            starts.append(len(prefix))
            stamps.extend(stamp() if callable(stamp) else stamp)
            if len(ends) > MOST_FILES:
                raise UsageError(f"{root}: over {MOST_FILES:,} files; too many to be meant")
    for name in folders:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise UsageError(
                f"{roots[0]}: the folder {name!r} has a name that is not UTF-8; rename it"
            )
    where = Names(bytes(blob), np.frombuffer(ends, np.int64), home)
    table = np.frombuffer(stamps, np.int64).reshape(-1, 3)
    return Tree(where, np.frombuffer(starts, np.int64), table, sorted(folders), others, other)


Found = Iterator[tuple[str, Any]]  # names below a root, and a stamp or what makes it


def _in_archive(root: Path) -> Found | None:
    """Names of the files in a place in a tar, unless it lies in none."""
    if (found := in_archive(str(root))) is None:
        return None
    archive, inner = found
    inner += "/" if inner else ""

    def names() -> Found:
        for i in archive.below(inner):
            name = os.fsdecode(archive.names.raw(i))[len(inner) :]
            yield name, (int(archive.sizes[i]), *archive.stamp[1:])

    return names()


def _in_folder(root: Path, inner: str = "") -> Found:
    """Names of the files below a folder; folders behind links are those right below it alone."""
    try:
        with os.scandir(os.path.join(root, inner)) as entries:
            for entry in entries:
                name = inner + entry.name
                if not inner and entry.name.startswith((".", "__")):
                    continue
                if not entry.is_dir():
                    yield name, partial(_stamp, entry)
                elif not inner or not entry.is_symlink():
                    yield name + "/", _NO_FILE
                    yield from _in_folder(root, name + "/")
    except OSError as error:
        raise refuse(error, os.path.join(root, inner)) from error


def _stamp(entry: os.DirEntry[str]) -> tuple[int, int, int]:
    try:
        return stamp_of(entry.stat())
    except OSError:
        return _NO_FILE


def stamps_of(paths: Names) -> np.ndarray:
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


def archive_parts(folder: Path) -> dict[str, list[Path]]:
    """Tars of each part that lie in a folder: by their names, or all of them train."""
    parts: dict[str, list[Path]] = {}
    for path in archives_in(folder):
        words = path.stem.replace("-", ".").replace("_", ".").split(".")
        named = [part for word in words if (part := part_named(word))]
        parts.setdefault(named[0] if named else "", []).append(path)
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
    files: Listing, roots: Sequence[Path], suffixes: Sequence[str], keys: Sequence[str]
) -> Names | None:
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
        return Names(kept["names"].tobytes(), kept["ends"])
    texts = Names.of(map(asked, files.where))
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
