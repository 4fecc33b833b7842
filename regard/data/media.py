"""Sets of files that are images or sounds: class folders, tables of their names, and parts."""

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from regard.data.in_memory import UserData
from regard.data.parts import named_files, part_named, single_file
from regard.data.split import shares_of
from regard.data.store import store_key
from regard.data.table import Table, Value, is_folder, is_saved
from regard.errors import UsageError, nearest
from regard.files import refuse

MOST_FILES = 20_000_000
_MOST_HASHED = 16 * 2**30  # bytes of files that are hashed; of more, only names and sizes are
_CHECKED = 200  # entries looked at to tell whether a folder holds such files
_CHUNK = 256  # files decoded before they are handed on
LABELS = ("label", "labels", "class", "category", "target")
BROKEN = {"refuse": None, "skip": None}

Files = TypeVar("Files")


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

    def has_suffix(self, name: str) -> bool:
        """True if a name ends as those of such files."""
        return Path(name).suffix.lower() in self.suffixes

    def named(self, name: str) -> bool:
        """True if a file is one by its name, and not hidden."""
        return self.has_suffix(name) and not name.startswith(".")

    def lie_in(self, folder: Path) -> bool:
        """True if some are in a folder, or in those within."""
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
        if path.is_file() or is_saved(path):
            if self.named(path.name):
                return "one"
            return "table" if self.listed_in(path, surely) else ""
        if not path.is_dir():
            return ""
        tables = [file for some in self.tables(path).values() for file in some]
        if any(self.listed_in(file, surely) for file in tables):
            return "table"
        loose = any(self.named(entry.name) for entry in islice(os.scandir(path), 10_000))
        folders = (path / name for name in class_folders(path))
        return "folders" if (loose and not tables) or any(map(self.lie_in, folders)) else ""

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
            part: [file for file in files if not self.named(file.name)]
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
        read_folder: Callable[[Path], Files],
        expected: str,
    ) -> dict[str, Callable[[], Files]]:
        """Find what reads each part of a set of tables or of folders, or refuse what is neither."""
        if tabled:
            return self.table_parts(path, read_table)
        if path.is_dir():
            return folder_parts(path, read_folder)
        raise UsageError(f"{path}: no set of {self.word}s; expected {expected}")

    def read_folder(
        self, folder: Path, labelled: bool, expected: str = ""
    ) -> tuple[list[tuple[str, str]], list[str]]:
        """Paths and labels of all files in class folders, and notes for the user.

        Where labels are of no concern, files outside of class folders count too.
        """
        of = f"{self.word}s"
        classes = class_folders(folder)
        loose = [name for name in sorted(os.listdir(folder)) if self.named(name)]
        if labelled and not classes:
            there = f"{len(loose)} {of} lie loose" if loose else f"there is no {self.word}"
            raise UsageError(
                f"{folder}: {there} in it; expected a folder of {of} for each class{expected}"
            )
        files: list[tuple[str, str]] = []
        others: list[str] = []
        notes: list[str] = []
        for label in classes:
            before = len(files)
            for place, _, names in sorted(os.walk(folder / label)):
                for name in sorted(names):
                    if self.named(name):
                        files.append((os.path.join(place, name), label))
                    elif not name.startswith("."):
                        others.append(os.path.join(place, name))
            if len(files) > MOST_FILES:
                raise UsageError(f"{folder}: over {MOST_FILES:,} files; too many to be meant")
            if len(files) == before and labelled:
                raise UsageError(
                    f"{folder / label}: no {self.word} in it; expected some of the class {label!r}"
                )
        if not labelled:
            files += [(str(folder / name), "") for name in loose]
        elif loose:
            notes.append(f"{folder}: {len(loose)} {of} outside the class folders passed over")
        if others:
            notes.append(f"{len(others):,} files skipped that are not {of}, such as {others[0]}")
        return files, notes

    def look_at(
        self,
        rows: Sequence[tuple[str, str | bytes]],
        look: Callable[[Any, str], Any],
        broken: str,
        most: int | None = None,
    ) -> "MediaScan":
        """Hash files and look at their headers, or at those of so many, spread over all.

        A row says where a file is, and what of it is opened: its path, or its bytes.
        """
        chosen: Sequence[int] = range(len(rows))
        if most and len(rows) > most:
            chosen = [i * len(rows) // most for i in range(most)]
        paths = [content for i in chosen if isinstance(content := rows[i][1], str)]
        hashed = (
            sum(os.path.getsize(path) for path in paths if os.path.exists(path)) <= _MOST_HASHED
        )

        def one(i: int) -> tuple[str, Any]:
            where, content = rows[i]
            try:
                seen = look(content, where)
                return digest(content, hashed), seen
            except OSError as error:
                raise self.broken(str(refuse(error, where))) from None
            except self.broken as mistake:
                if broken == "refuse":
                    skipped = "files" if isinstance(content, str) else "rows"
                    message = f"{mistake}; or leave such {skipped} out: broken=skip"
                    raise self.broken(message) from None
                return str(mistake), None

        found = MediaScan([], [], [], [])
        for i, (text, seen) in zip(chosen, in_threads(one, chosen), strict=True):
            if seen is None:
                found.bad.append(text)
            else:
                found.rows.append(i)
                found.hashes.append(text)
                found.headers.append(seen)
        return found


class MediaFiles:
    """The files of one part of a set, each with what of it is opened: its path, or its bytes."""

    media: ClassVar[Media]

    def __init__(self, items: list[Any], contents: Sequence[str | bytes]):
        """Take the files, which have `where`, `label` and `source`, a hash."""
        self.items, self.contents = items, list(contents)
        self.notes: list[str] = []
        self.bad: list[str] = []  # why each file that was left out cannot be read
        self.total = len(items)  # how many there were, if only some were looked at

    def __len__(self) -> int:
        return len(self.items)

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
    """Which rows could be opened, the hash and header of each, and why the others could not."""

    rows: list[int]
    hashes: list[str]
    headers: list[Any]
    bad: list[str]


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


def digest(content: str | bytes, hashed: bool = True) -> str:
    """Hash a file, or only its name and size."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()[:32]
    if not hashed:
        return store_key(content, os.path.getsize(content))
    with open(content, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:32]


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


def folder_parts(path: Path, read: Callable[[Path], Files]) -> dict[str, Callable[[], Files]]:
    """Find folders train, valid and test; without them, the folder is that of train."""
    names = class_folders(path)
    parts: dict[str, list[str]] = {}
    for name in names:
        if part := part_named(name):
            parts.setdefault(part, []).append(name)
    for part, folders in parts.items():
        if len(folders) > 1:
            raise UsageError(f"{path}: several folders for {part} ({', '.join(folders)}); keep one")
    if "train" in parts or set(names) == {folders[0] for folders in parts.values()} != set():
        return {part: partial(read, path / folders[0]) for part, folders in parts.items()}
    return {"train": partial(read, path)}


def class_folders(path: Path) -> list[str]:
    """Names of the folders in a folder, but for hidden ones."""
    try:
        entries = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    except OSError as error:
        raise refuse(error, path) from error
    names = [name for name in entries if not name.startswith((".", "__"))]
    for name in names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise UsageError(f"{path}: the folder {name!r} has a name that is not UTF-8; rename it")
    return names


# Labels


class LabelledItem(Protocol):
    """A file of a set: where it is, and its label."""

    @property
    def where(self) -> str: ...
    @property
    def label(self) -> str: ...


def split_labels(item: LabelledItem) -> tuple[str, ...]:
    """Label by which files are split evenly, if there is one."""
    return (item.label,) if item.label else ()


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


def label_numbers(items: Sequence[LabelledItem], classes: Sequence[str]) -> list[int]:
    """Number of each file's label; refuses one that is not known."""
    numbers: Mapping[str, int] = {label: i for i, label in enumerate(classes)}
    every = {item.label for item in items}
    if not every & numbers.keys() and all(label.isdecimal() for label in every):
        numbers = {str(i): i for i in range(len(classes))}  # numbers of labels that have names
    for item in items:
        if item.label not in numbers:
            shown = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
            raise UsageError(
                f"{item.where}: label {item.label!r:.60} is not among those that are known "
                f"({shown}).{nearest(item.label, list(classes))}"
            )
    return [numbers[item.label] for item in items]
