"""Sets of files that are images or sounds: class folders, tables of their names, and parts."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar

import numpy as np

from regard.data.archive import archives_in, content_of, in_archive, is_archive, open_archive
from regard.data.in_memory import UserData
from regard.data.listing import HASH_BYTES, SETTLED, FileList, Items, Kept, numbered
from regard.data.parts import named_files, part_named, single_file
from regard.data.split import shares_of
from regard.data.store import store_key
from regard.data.table import Table, Value, is_folder, is_saved
from regard.data.tree import archive_parts, read_tree, texts_beside, unwrapped
from regard.errors import UsageError, nearest
from regard.files import refuse

_MOST_HASHED = 16 * 2**30  # bytes of files that are hashed; of more, only their ends and sizes
_HASHED_END = 2**16  # bytes of each end
_CHECKED = 200  # entries looked at to tell whether a folder holds such files
_CHUNK = 256  # files decoded before they are handed on
LABELS = ("label", "labels", "class", "category", "target")
BROKEN = {"refuse": None, "skip": None}

Files = TypeVar("Files")
Contents = Sequence[bytes | None]  # bytes of files that a table holds, where it does


@dataclass(frozen=True, kw_only=True)
class MediaOptions:
    """How the files of a set are to be taken."""

    columns: str | None = None  # of a table: path, and label or transcript
    header: bool | None = None  # whether a table has one
    names: tuple[str, ...] = ()  # of labels that are numbers
    broken: str = "refuse"  # or skip
    most: int | None = None  # files to look at, spread over all


@dataclass(frozen=True)
class Media:
    """A kind of files: how their names end, how they begin, and what is raised of a broken one."""

    word: str
    suffixes: frozenset[str]
    begins: Callable[[bytes], bool]  # whether the bytes of a file may be of the kind
    broken: type[UsageError]
    look: Callable[[Any, str], tuple[Any, ...]]  # header of a path or bytes that have a name
    header: np.dtype[Any]
    # suffixes of files with a label or a text beside them in a tar, and its keys in a JSON file
    beside: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]]

    def has_suffix(self, name: str) -> bool:
        """True if a name ends as those of such files."""
        return os.path.splitext(name)[1].lower() in self.suffixes

    def named(self, name: str) -> bool:
        """True if a file is one by its name, and not hidden."""
        return self.has_suffix(name) and not name.startswith(".")

    def lie_in(self, folder: Path) -> bool:
        """True if some are in a folder, or in those within, or in a place in a tar."""
        if found := in_archive(str(folder)):
            archive, inner = found
            below = archive.below(inner and inner + "/")
            return any(self.named(archive.names[i].rpartition("/")[2]) for i in below)
        entries = (file for _, _, files in os.walk(folder) for file in files)
        return any(self.has_suffix(name) for name in islice(entries, _CHECKED))

    def listed_in(self, path: Path, surely: bool = True) -> bool:
        """True if the first rows of a table have some; one row may be a header.

        It has them surely if all rows name one.
        """
        values = [row.value for row in islice(Table(path), 4) if row.value is not None]
        if not surely:
            return any(map(self.columns, values))
        return bool(values) and all(self.columns(value) for value in values[1:] or values)

    def kind_of_set(self, path: Path, surely: bool = True) -> str:
        """Kind of the set at a path, or nothing; not surely, if such files are expected."""
        if in_archive(str(path)):
            return "folders" if self.lie_in(path) else ""
        if path.is_file() or is_saved(path):
            if self.named(path.name):
                return "one"
            return "table" if self.listed_in(path, surely) else ""
        if not path.is_dir():
            return ""
        tables = [file for some in self.tables(path).values() for file in some]
        if any(self.listed_in(file, surely) for file in tables):
            return "table"
        if any(map(self.lie_in, archives_in(path))):
            return "folders"
        loose = any(self.named(entry.name) for entry in islice(os.scandir(path), 10_000))
        folders = (path / name for name in class_folders(path))
        return "folders" if (loose and not tables) or any(map(self.lie_in, folders)) else ""

    def told_in(self, path: Path) -> str:
        """What is told of the files in a folder or tars: label, text, or nothing."""
        found = in_archive(str(path))
        tars = [Path(found[0].path)] if found else archives_in(path)
        if any(map(class_folders, [path] if found else tars or [path])):
            return "label"
        names = {name for tar in tars for name in islice(open_archive(tar).names, _CHECKED)}
        ends = {os.path.splitext(name)[1] for name in names}
        return "label" if ".cls" in ends else "text" if ends & {".txt", ".json"} else ""

    def columns(self, value: Value) -> list[Any]:
        """Columns or keys of a row that hold such a file, or the name of one."""
        cells = value.items() if isinstance(value, dict) else enumerate(value)
        return [key for key, cell in cells if self._in(cell)]

    def _in(self, cell: Any) -> bool:
        if content := cell_bytes(cell):
            return self.begins(content)
        name = cell.get("path") if isinstance(cell, dict) else cell
        return isinstance(name, str) and self.has_suffix(name.strip())

    def tables(self, folder: Path) -> dict[str, list[Path]]:
        """Find the tables of each part in a folder; a file such as test.wav is none."""
        parts = {
            part: [file for file in files if not self.named(file.name) and not is_archive(file)]
            for part, files in named_files(folder).items()
        }
        return {part: files for part, files in parts.items() if files}

    def table_parts(
        self, path: Path, read: Callable[[Path], Files]
    ) -> dict[str, Callable[[], Files]]:
        """Find what reads the table of each part in a folder, or the one that a path is."""
        if not is_folder(path):
            return {"train": partial(read, path)}

        def one(part: str, files: list[Path]) -> Files:
            return read(single_file(files, part, path))

        return {part: partial(one, part, files) for part, files in self.tables(path).items()}

    def find_parts(
        self,
        path: Path,
        tabled: bool,
        read_table: Callable[[Path], Files],
        read_folder: Callable[[Sequence[Path]], Files],
        expected: str,
    ) -> dict[str, Callable[[], Files]]:
        """Find what reads each part of a set of tables or of folders, or refuse what is neither."""
        if tabled:
            return self.table_parts(path, read_table)
        if in_archive(str(path)) or path.is_dir():
            return self.folder_parts(path, read_folder)
        raise UsageError(f"{path}: no set of {self.word}s; expected {expected}")

    def folder_parts(
        self, path: Path, read: Callable[[Sequence[Path]], Files]
    ) -> dict[str, Callable[[], Files]]:
        """Find folders or tars train, valid and test; without them, the path is that of train."""
        if path.is_dir() and any(map(self.lie_in, archives_in(path))):
            return {part: partial(read, some) for part, some in archive_parts(path).items()}
        path, parts = unwrapped(path), dict[str, list[str]]()
        for name in (folders := class_folders(path)):
            if part := part_named(name):
                parts.setdefault(part, []).append(name)
        for part, some in parts.items():
            if len(some) > 1:
                raise UsageError(
                    f"{path}: several folders for {part} ({', '.join(some)}); keep one"
                )
        if "train" in parts or set(folders) == {some[0] for some in parts.values()} != set():
            return {part: partial(read, [path / some[0]]) for part, some in parts.items()}
        return {"train": partial(read, [path])}

    def list_files(
        self, roots: Sequence[Path], target: str, expected: str = ""
    ) -> tuple[FileList, list[str]]:
        """All files in class folders, on disk or in tars, and notes for the user.

        In tars, labels or texts may lie beside them. Where labels are of no concern, files outside
        of class folders count too.
        """
        of, root = f"{self.word}s", roots[0] if len(roots) == 1 else roots[0].parent
        tree = read_tree(roots, self.has_suffix)
        files, counts = tree.listing()
        beside = self.beside.get(target)
        if beside and (texts := texts_beside(files, roots, *beside)):
            if target == "text":
                return files._replace(texts=texts), []
            codes, labels = numbered(texts)
            return files._replace(codes=codes, labels=labels), []
        notes: list[str] = []
        loose = counts.pop()
        if target == "label" and not tree.folders:
            there = f"{loose} {of} lie loose" if loose else f"there is no {self.word}"
            raise UsageError(
                f"{root}: {there} in it; expected a folder of {of} for each class{expected}"
            )
        if target == "label":
            for label, count in zip(tree.folders, counts, strict=True):
                if not count:
                    where = root / label
                    expects = f"expected some of the class {label!r}"
                    raise UsageError(f"{where}: no {self.word} in it; {expects}")
            if loose:
                files = files.pick(range(sum(counts)))
                notes.append(f"{root}: {loose} {of} outside the class folders passed over")
        if tree.others:
            notes.append(f"{tree.others:,} files skipped that are not {of}, such as {tree.other}")
        return files, notes

    def look_at(
        self, files: FileList, of: str | Path, options: MediaOptions, contents: Contents = ()
    ) -> "MediaScan":
        """Hash files and look at their headers, or at those of so many, spread over all.

        What was found in files of a set, which are as they were, is known from the last time.
        `contents` are those of files that a table holds.
        """
        total, most = len(files.where), options.most
        some = bool(most and total > most)
        if most and some:
            chosen = [i * total // most for i in range(most)]
            files, contents = files.pick(chosen), [contents[i] for i in chosen if contents]
        whole = bool(contents) or files.stamps[:, 0].clip(0).sum() <= _MOST_HASHED
        key = store_key(self.word, os.path.realpath(str(of)), whole, str(self.header))
        kept, started = Kept.open("" if contents else key, self.header), time.time_ns()
        rows = kept.rows_of(files)
        good, new = rows >= 0, np.flatnonzero(rows < 0).tolist()
        hashes = np.zeros((len(rows), HASH_BYTES), np.uint8)
        headers, bad = np.zeros(len(rows), self.header), list[str]()
        hashes[good], headers[good] = kept.hashes[rows[good]], kept.headers[rows[good]]
        del kept

        def one(i: int) -> tuple[str, Any]:
            where = files.where[i]
            try:
                held = contents[i] if contents else None
                content = content_of(where) if held is None else held
                seen = self.look(content, where)
                return digest(content, whole), seen
            except OSError as error:
                raise self.broken(str(refuse(error, where))) from None
            except self.broken as mistake:
                if options.broken == "refuse":
                    skipped = "rows" if contents and contents[i] is not None else "files"
                    message = f"{mistake}; or leave such {skipped} out: broken=skip"
                    raise self.broken(message) from None
                return str(mistake), None

        try:
            for i, (text, seen) in zip(new, in_threads(one, new), strict=True):
                if seen is None:
                    bad.append(text)
                else:
                    hashes[i] = np.frombuffer(bytes.fromhex(text), np.uint8)
                    headers[i], good[i] = seen, True
        finally:  # what was read before a mistake need not be read again
            if new and not some and not contents:
                lain = good & (files.stamps[:, 1:].max(1) < started - SETTLED)
                at = np.flatnonzero(lain)
                Kept(files.where.pick(at), files.stamps[at], hashes[at], headers[at]).save(key)
        if bad:
            rows = np.flatnonzero(good).tolist()
            files, hashes, headers = files.pick(rows), hashes[rows], headers[rows]
            contents = [contents[i] for i in rows if contents]
        items = Items(files.where, files.codes, files.labels, hashes, files.texts)
        return MediaScan(items, headers, contents, bad, total)


class MediaFiles:
    """The files of one part of a set."""

    media: ClassVar[Media]

    def __init__(self, items: Items, contents: Contents = ()):
        """Take the files, and their bytes where a table holds these."""
        self.items, self.contents = items, contents
        self.notes: list[str] = []
        self.bad: list[str] = []  # why each file that was left out cannot be read
        self.total = len(items)  # how many there were, if only some were looked at

    def __len__(self) -> int:
        return len(self.items)

    def content(self, i: int) -> str | bytes:
        """What of file i is opened: its path, or its bytes where a table or a tar holds it."""
        held = self.contents[i] if self.contents else None
        return content_of(self.items.where[i]) if held is None else held

    def all_notes(self) -> list[str]:
        """Notes for the user on how the files were read."""
        first = f"{len(self.bad):,} files that cannot be read left out; the first: "
        return [*self.notes, first + self.bad[0]] if self.bad else self.notes

    def decode_each(self, one: Callable[[int], Any], broken: str) -> Iterator[Any]:
        """Yield what is made of each file by its number, or why it is broken, if not refused."""
        error = self.media.broken

        def attempt(i: int) -> Any:
            try:
                return one(i)
            except error as mistake:
                if broken == "refuse":
                    raise error(f"{mistake}; or leave such files out: broken=skip") from None
                return str(mistake)

        yield from in_threads(attempt, range(len(self)))


class MediaScan(NamedTuple):
    """Files that could be opened, their headers and bytes, why others could not, and how many."""

    items: Items
    headers: np.ndarray
    contents: Contents
    bad: list[str]
    total: int


def cell_bytes(cell: Any) -> bytes | None:
    """Bytes of a file that a cell of a table holds, as datasets keeps them."""
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    return content if isinstance(content, bytes) else None


def cell_file(cell: Any) -> Any:
    """Bytes or the path of a file that datasets keeps in a cell; else the cell."""
    if isinstance(cell, dict) and not cell.keys().isdisjoint(("bytes", "path")):
        return cell_bytes(cell) or cell.get("path")
    return cell


def in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Apply a function to all items, several at once, in order, some at a time."""
    rest = iter(items)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        while some := list(islice(rest, _CHUNK)):
            yield from pool.map(function, some)


def digest(content: str | bytes, whole: bool = True) -> str:
    """Hash a file, or only its size and how it begins and ends."""
    if isinstance(content, str):
        with open(content, "rb") as file:
            if whole:
                return hashlib.file_digest(file, "sha256").hexdigest()[:32]
            size, begins = os.fstat(file.fileno()).st_size, file.read(_HASHED_END)
            file.seek(max(0, size - _HASHED_END))
            ends = file.read(_HASHED_END)
    else:
        size, begins, ends = len(content), content[:_HASHED_END], content[-_HASHED_END:]
    hashed = content if whole and isinstance(content, bytes) else b"%d:" % size + begins + ends
    return hashlib.sha256(hashed).hexdigest()[:32]


# Where the parts are


def is_set(data: UserData | None, kind_of: Callable[[Path], object]) -> bool:
    """True if data are the path of a set of some kind."""
    if not data or not isinstance(data, str | os.PathLike):
        return False
    try:
        return bool(kind_of(Path(data)))
    except (OSError, UsageError):
        return False


def find_media_parts(
    data: str,
    valid: str | None,
    test: str | None,
    find: Callable[[Path], dict[str, Callable[[], Files]]],
) -> tuple[dict[str, Callable[[], Files]], dict[str, float]]:
    """Find what reads each part, and the shares of train that are to be split off, if told."""
    readers, shares = find(Path(data)), shares_of(valid, test)
    home = Path(data) if os.path.isdir(data) else Path(data).parent
    for name, given in (("valid", valid), ("test", test)):
        if name in shares:
            readers.pop(name, None)
        elif given:
            beside = not os.path.exists(given) and (home / given).exists()
            path = home / given if beside else Path(given)
            others = find(path)
            if len(others) != 1:
                names = ", ".join(others)
                raise UsageError(f"{path}: {len(others)} parts ({names}); expected one")
            readers[name] = next(iter(others.values()))
    return readers, shares


def several(roots: Sequence[Path]) -> str:
    """What a part that lies in several places is called."""
    return "\n".join(map(str, roots))


def class_folders(path: Path) -> list[str]:
    """Names of the folders in a folder, or in a place in a tar, but for hidden ones."""
    try:
        if found := in_archive(str(path)):
            entries = found[0].folders(found[1] and found[1] + "/")
        else:
            entries = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    except OSError as error:
        raise refuse(error, path) from error
    names = [name for name in entries if not name.startswith((".", "__"))]
    for name in names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise UsageError(f"{path}: the folder {name!r} has a name that is not UTF-8; rename it")
    return names


# Labels


def class_names(labels: set[str], names: Sequence[str]) -> list[str]:
    """All labels in order: by number where they are numbers, and then by their names."""
    numbers = all(label.isdecimal() for label in labels)
    if not names:
        return sorted(labels, key=lambda label: (int(label), label) if numbers else (0, label))
    if not numbers:
        raise UsageError("names= is for labels that are numbers; these have names of their own")
    most = max(map(int, labels))
    if len(set(names)) != len(names) or len(names) <= most:
        raise UsageError(
            f"names= gives {len(names)} names, but labels go up to {most}; "
            f"give {most + 1} different ones"
        )
    return list(names)


def label_numbers(items: Sequence[Any], classes: Sequence[str]) -> np.ndarray:
    """Number of each file's label; refuses one that is not known."""
    numbers: Mapping[str, int] = {label: i for i, label in enumerate(classes)}
    if isinstance(items, Items):
        codes, names = items.codes, items.label_names
    else:
        codes, names = numbered(item.label for item in items)
    every = {names[int(code)] for code in np.unique(codes)}
    if not every & numbers.keys() and all(label.isdecimal() for label in every):
        numbers = {str(i): i for i in range(len(classes))}  # numbers of labels that have names
    if unknown := every - numbers.keys():
        item = next(item for item in items if item.label in unknown)
        shown = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
        raise UsageError(
            f"{item.where}: label {item.label!r:.60} is not among those that are known "
            f"({shown}).{nearest(item.label, list(classes))}"
        )
    return np.array([numbers.get(label, -1) for label in names], np.int64)[codes]
