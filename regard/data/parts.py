"""The parts of a set of data (train, valid, test), for every modality in the same way.

Parts are found by their names, read, and where one is lacking, split off train by hash; what was
decided is noted.
"""

import os
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypedDict, TypeVar

from regard.data.lines import missing
from regard.data.split import RowSplitter, Split
from regard.data.table import KINDS, SHARD, is_folder, is_saved, stem_and_suffix
from regard.errors import UsageError
from regard.files import refuse

PARTS = {
    "train": ("train", "training"),
    "valid": ("valid", "val", "dev", "validation"),
    "test": ("test",),
}

Rows = TypeVar("Rows")


@dataclass
class Dataset(Generic[Rows]):
    """The rows of each part, notes for the user, and what was kept from training."""

    parts: dict[str, Rows]
    notes: list[str] = field(default_factory=list, kw_only=True)
    split: Split = field(default_factory=Split, kw_only=True)
    classes: list[str] = field(default_factory=list, kw_only=True)  # names of the labels

    def __getitem__(self, part: str) -> Rows:
        return self.parts[part]

    @cached_property
    def sha(self) -> str:
        """A hash of what is trained and validated on."""
        raise NotImplementedError

    def part_sha(self, part: str) -> str | list[str]:
        """Hash of the rows of one part, or that of each."""
        return self.parts[part].sha  # type: ignore[attr-defined]


Data = TypeVar("Data", bound=Dataset[Any])
NEEDED = ("train", "valid")  # parts, unless told


class PartsAsked(TypedDict, total=False):
    """Which parts of data are read: `valid` and `test` are files, or shares of train such as 0.1.

    A model that was `trained` on the data is judged on what was held out.
    """

    valid: str | None
    test: str | None
    need: Sequence[str]
    trained: Split | None


class PartReader(NamedTuple):
    """Where a part lies, and what reads its rows."""

    where: str | Path
    read: Callable[[], Any]


def load_parts(
    dataset: Data,
    readers: Mapping[str, PartReader],
    *,
    need: Sequence[str],
    shares: Mapping[str, float],
    absent: Callable[[str], str],
    where: str | Path,
    splitter: RowSplitter,
    optional: Collection[str] = (),
    unnamed: bool = False,
    trained: Split | None = None,
) -> Data:
    """Read the needed parts, and those `optional` that are there, into a dataset.

    Without a validation part, one is split off train, as are the parts that `shares` ask for and
    those that a model which was `trained` on the data kept. What is given may be a single part that
    is `unnamed`: then it is the one that is needed. `absent` says that a part is missing.
    """
    if unnamed and len(need) == 1 and need[0] not in (*readers, *shares):
        readers = {need[0]: readers["train"]}
    kept = {"valid", *shares, *(trained.bounds if trained is not None else ())}
    wanted = (*need, *optional)
    lacking = [
        name
        for name in ("valid", "test")
        if name in kept and name not in readers and name in (*wanted, *shares)
    ]
    splitting = lacking if "train" in readers and {"train", *lacking} & set(wanted) else []
    for name in need:
        if name not in readers and name not in splitting:
            raise UsageError(absent(name))
    reading = {"train", *wanted} if splitting else set(wanted)
    train_first = sorted(reading & set(readers), key=lambda name: (name != "train", name))
    parts = {name: readers[name].read() for name in train_first}
    if splitting:
        given = {name: shares.get(name) for name in splitting}
        rows, where = parts["train"], str(readers["train"].where)
        split_off, dataset.split = splitter.split(rows, given, where, dataset.notes, trained)
        parts |= split_off
        for name in need:
            if name not in parts:
                raise UsageError(absent(name))
        parts = {name: rows for name, rows in parts.items() if name in (*wanted, *shares)}
    elif trained is not None and len(need) == 1:
        (name,) = need
        parts[name] = splitter.held_out(parts[name], name, trained, str(where), dataset.notes)
    dataset.parts |= parts
    if "train" in parts:
        dataset.split = splitter.sampled(dataset.split, parts["train"])
    return dataset


# Where the parts are


def part_named(word: str) -> str | None:
    """Part that a word stands for: val, dev and valid are one."""
    return next((name for name, words in PARTS.items() if word.lower() in words), None)


def index_folder(folder: Path) -> dict[str, dict[str, Path]]:
    """List a folder as stem -> suffix -> file."""
    stems: dict[str, dict[str, Path]] = {}
    try:
        entries = os.scandir(folder)
        names = sorted(e.name for e in entries if e.is_file() or is_saved(e.path))
    except OSError as error:
        raise refuse(error, folder) from error
    for name in names:
        if not name.startswith("."):
            stem, suffix = (name, "arrow") if is_saved(folder / name) else stem_and_suffix(name)
            if shard := SHARD.search(stem):
                if int(shard[1]):
                    continue  # the first stands for all
                stem = stem[: shard.start()]
            # Sorted, so that train.en comes before train.en.gz and is the one that stays.
            stems.setdefault(stem, {}).setdefault(suffix, folder / name)
    return stems


def named_files(folder: Path) -> dict[str, list[Path]]:
    """Find the files of each part by their names, such as train.tsv or en-ud-train.conllu.xz."""
    files = [path for some in index_folder(folder).values() for path in some.values()]
    parts: dict[str, list[Path]] = {}
    for name, words in PARTS.items():
        pattern = re.compile(rf"(?:^|[._-])(?:{'|'.join(words)})(?:$|[._-])", re.IGNORECASE)
        if some := [path for path in files if pattern.search(path.name)]:
            parts[name] = some
    return parts


def single_file(files: Sequence[Path], part: str, data: str | Path, key: str | None = None) -> Path:
    """The one file of a part; refuses several."""
    if len(files) > 1:
        names = ", ".join(path.name for path in files)
        raise UsageError(
            f"{data}: several files for {part} ({names}); name one with {key or part}="
        )
    return files[0]


def home_of(data: str | Path) -> Path:
    """Folder that data are, or lie in."""
    return Path(data) if is_folder(data) else Path(data).parent


def given_files(data: str | Path, given: Mapping[str, Any]) -> dict[str, list[Path]]:
    """Find the files of parts that a user named with valid= and test=, beside the data too."""
    return {name: [find_file(path, home_of(data))] for name, path in given.items() if path}


def find_file(given: str | Path, folder: Path) -> Path:
    """Find a file that a user named, from here or in a folder, with or without its suffix."""
    for path in (Path(given), folder / given):
        if is_folder(path):
            raise UsageError(f"{path}: is a folder; expected a file in it")
        if os.path.exists(path):
            return path
        files = index_folder(path.parent).get(path.name, {}) if path.parent.is_dir() else {}
        tables = [files[kind] for kind in KINDS if kind in files]
        if tables or len(files) == 1:
            return [*tables, *files.values()][0]
    raise UsageError(missing(folder / given))


def listing(folder: str | Path) -> str:
    """First names in a folder, for a message."""
    return ", ".join(sorted(os.listdir(folder))[:8]) or "nothing"


def no_part(data: str | Path, name: str, expected: str) -> str:
    """Message for a part that is missing from the data, with what would be one."""
    if not is_folder(data):
        return f"{data}: a single file has no {name} part; give {name}=FILE or a folder as data="
    return f"{data}: no {name} part; expected {expected}; found {listing(data)}"
