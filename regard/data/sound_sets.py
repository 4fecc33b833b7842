"""Sets of sounds as they lie on disk: tables of paths with transcripts or labels, class folders."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.data.columns import parse_columns, text_at
from regard.data.image_files import (
    LABELS,
    MOST_IMAGES,
    _digest,
    _folders,
    _part_folders,
    in_threads,
)
from regard.data.lines import missing
from regard.data.parts import named_files, single_file
from regard.data.sound_files import SUFFIXES, BrokenSound, SoundInfo, read_sound, sound_info
from regard.data.split import shares_of
from regard.data.table import BadRow, RowFaults, Table, Value, is_folder, is_saved
from regard.errors import UsageError

MOST_PACKED = 2 * 2**30  # bytes of sounds that a table itself holds
MOST_KEPT = 2 * 2**30  # bytes of decoded samples of a part that stay in memory
AUDIO = ("audio", "path", "file", "sound", "wav", "audio_filepath", "audio_path", "filename")
TEXTS = ("text", "transcript", "transcription", "sentence", "normalized_text")
TARGETS = {"text": TEXTS, "label": LABELS, "none": ()}
CHECKED = 200  # entries looked at to tell whether a folder holds sounds


class SoundItem(NamedTuple):
    """One sound of a set: where it is, its transcript or label, and a hash of its file."""

    where: str
    text: str
    label: str
    source: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the label by which sounds are split evenly, if there is one."""
        return (self.label,) if self.label else ()


@dataclass(frozen=True)
class SoundOptions:
    """How the files of a set are to be taken."""

    target: str = "text"  # what is learnt of a sound: text, label or none
    columns: str | None = None  # of a table: path and transcript or label
    header: bool | None = None  # whether a table has one
    names: tuple[str, ...] = ()  # of labels that are numbers
    pattern: str | None = None  # of file names with labels in them: {label}_{speaker}_{take}
    broken: str = "refuse"
    skip_bad: bool = False  # rows of a table
    most: int | None = None  # files to look at, spread over all

    @property
    def labelled(self) -> bool:
        """Tell whether sounds have labels."""
        return self.target == "label"


class SoundFiles:
    """The sounds of one part of a set, each with the header of its file."""

    def __init__(
        self,
        items: list[SoundItem],
        contents: Sequence[str | bytes],
        infos: Sequence[SoundInfo],
    ):
        """Take the sounds, and what of each is opened: its path, or the bytes of its file."""
        self.items, self.contents, self.infos = items, list(contents), list(infos)
        self.notes: list[str] = []
        self.bad: list[str] = []  # why each file that was left out cannot be read
        self.total = len(items)  # how many there were, if only some were looked at

    def __len__(self) -> int:
        return len(self.items)

    def all_notes(self) -> list[str]:
        """Return what the user should know of how the sounds were read."""
        first = f"{len(self.bad):,} files that cannot be read left out; the first: "
        return [*self.notes, first + self.bad[0]] if self.bad else self.notes

    def pick(self, numbers: Sequence[int]) -> "SoundFiles":
        """Return some of the sounds."""
        items, infos = [self.items[i] for i in numbers], [self.infos[i] for i in numbers]
        return SoundFiles(items, [self.contents[i] for i in numbers], infos)

    def read(self, i: int, rate: int) -> np.ndarray:
        """Return the samples of sound i."""
        return read_sound(self.contents[i], rate, self.items[i].where)

    def decode(self, rate: int, broken: str, most: int = MOST_KEPT) -> Iterator[Any]:
        """Yield the samples of each sound, how many beyond `most` bytes, or why it is broken."""
        sizes = np.cumsum([4 * rate * info.seconds for info in self.infos])

        def one(i: int) -> np.ndarray | int | str:
            try:
                samples = self.read(i, rate)
                return samples if sizes[i] <= most else len(samples)
            except BrokenSound as mistake:
                if broken == "refuse":
                    raise BrokenSound(f"{mistake}; or leave such files out: broken=skip") from None
                return str(mistake)

        yield from in_threads(one, range(len(self)))


# Which kind of set it is


def holds_sounds(data: Any) -> bool:
    """Tell whether data are sounds: a table of paths, or class folders."""
    if not data or not isinstance(data, str | os.PathLike):
        return False
    try:
        return bool(kind_of_set(Path(data)))
    except (OSError, UsageError):
        return False


def is_sound(name: str) -> bool:
    """Tell by its name whether a file is a sound."""
    return Path(name).suffix.lower() in SUFFIXES and not Path(name).name.startswith(".")


def kind_of_set(path: Path) -> str:
    """Return which kind of set lies at a path, or nothing."""
    if path.is_file() or is_saved(path):
        if is_sound(path.name):
            return "one"
        return "table" if _lists_sounds(path) else ""
    if not path.is_dir():
        return ""
    tables = [file for some in named_files(path).values() for file in some]
    if any(_lists_sounds(file) for file in tables):
        return "table"
    names = [entry.name for entry in islice(os.scandir(path), 10_000)]
    loose = not tables and any(map(is_sound, names))
    return "folders" if loose or any(map(_has_sound, map(path.joinpath, names))) else ""


def _has_sound(folder: Path) -> bool:
    entries = (file for _, _, files in os.walk(folder) for file in files)
    return not folder.name.startswith(".") and any(map(is_sound, islice(entries, CHECKED)))


def _lists_sounds(path: Path) -> bool:
    """Tell by the first rows of a table, of which one may be a header, whether it names sounds."""
    if is_sound(path.name):
        return False
    values = [row.value for row in islice(Table(path), 4) if row.value is not None]
    return bool(values) and all(_sound_columns(value) for value in values[1:] or values)


def _sound_columns(value: Value) -> list[Any]:
    """Return the columns or keys of a row that hold sounds, or the names of their files."""
    cells = value.items() if isinstance(value, dict) else enumerate(value)
    return [key for key, cell in cells if _content(cell) is not None or _names_sound(cell)]


def _names_sound(cell: Any) -> bool:
    path = cell.get("path") if isinstance(cell, dict) else cell
    return isinstance(path, str) and is_sound(path.strip())


def _content(cell: Any) -> bytes | None:
    """Return the bytes of a sound that a cell of a table holds, as datasets keeps them."""
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    return content if isinstance(content, bytes) else None


# Where its parts are

# what reads a part, once it is needed
ReadSounds = Callable[[], SoundFiles]


def find_sound_parts(
    data: str, valid: str | None, test: str | None, options: SoundOptions
) -> tuple[dict[str, ReadSounds], dict[str, float]]:
    """Find what reads each part, and the shares of train that are to be split off, if told."""
    given = (("test", test), ("valid", valid))
    globs = {name: value for name, value in given if value and is_glob(value)}
    valid, test = None if "valid" in globs else valid, None if "test" in globs else test
    readers, shares = find_sounds(Path(data), options), shares_of(valid, test)
    if globs:
        readers |= _by_names(data, readers, globs)
    home = Path(data) if os.path.isdir(data) else Path(data).parent
    for name, given in (("valid", valid), ("test", test)):
        if name in shares:
            readers.pop(name, None)
        elif given:
            beside = not os.path.exists(given) and (home / given).exists()
            path = home / given if beside else Path(given)
            others = find_sounds(path, options)
            if len(others) != 1:
                names = ", ".join(others)
                raise UsageError(f"{path}: {len(others)} parts ({names}); expected one")
            readers[name] = next(iter(others.values()))
    return readers, shares


def is_glob(given: Any) -> bool:
    """Tell whether valid= or test= is a pattern of file names, such as *_[0-4].*, and no file."""
    return bool(given) and bool(set("*?[") & set(str(given))) and not os.path.exists(given)


def _by_names(
    data: str, readers: Mapping[str, ReadSounds], globs: Mapping[str, str]
) -> dict[str, ReadSounds]:
    """Find the parts of a set whose files are told apart by their names."""
    if "train" not in readers:
        raise UsageError(f"{data}: no train part of which file names could be taken")
    whole = cache(readers["train"])

    def read(part: str) -> SoundFiles:
        files = whole()
        names = [os.path.basename(item.where) for item in files.items]
        of = [
            next((p for p, glob in globs.items() if fnmatchcase(n, glob)), "train") for n in names
        ]
        for name, glob in globs.items():
            if name not in of:
                raise UsageError(f"{name}={glob} fits no file of {data}, such as {names[0]}")
        return files.pick([i for i, name in enumerate(of) if name == part])

    return {part: partial(read, part) for part in ("train", *globs)}


def name_pattern(pattern: str) -> re.Pattern[str]:
    """Return what takes the label out of file names such as {label}_{speaker}_{take}."""
    if pattern.count("{label}") != 1:
        raise UsageError(f"pattern={pattern}; expected {{label}} in it, such as {{label}}_{{take}}")
    parts = re.split(r"\{(\w+)\}", pattern)
    fixed = [re.escape(part) if i % 2 == 0 else "" for i, part in enumerate(parts)]
    named = ["(?P<label>.+?)" if part == "label" else ".+?" for part in parts[1::2]]
    return re.compile(fixed[0] + "".join(a + b for a, b in zip(named, fixed[2::2], strict=True)))


def find_sounds(path: Path, options: SoundOptions) -> dict[str, ReadSounds]:
    """Find the parts of a set and what reads each."""
    if not path.exists():
        raise UsageError(missing(path))
    if options.pattern and is_folder(path):
        return {
            name: partial(_read_named, folder, options)
            for name, folder in _part_folders(path).items()
        }
    kind = kind_of_set(path)
    if kind == "table":
        if not is_folder(path):
            return {"train": partial(_read_table, path, options)}
        return {
            name: partial(_read_one_table, path, name, files, options)
            for name, files in named_files(path).items()
        }
    if path.is_dir():
        return {
            name: partial(_read_folder, folder, options)
            for name, folder in _part_folders(path).items()
        }
    raise UsageError(
        f"{path}: no set of sounds; expected a table of paths and transcripts or labels, or a "
        "folder with a folder of sounds for each class"
    )


def _read_folder(folder: Path, options: SoundOptions) -> SoundFiles:
    """Read a folder of class folders, or where there is nothing to learn of them, all within."""
    if options.target == "text":
        raise UsageError(
            f"{folder}: no transcripts; expected a table of paths and transcripts, such as "
            "train.tsv, beside the sounds"
        )
    classes = _folders(folder)
    loose = [name for name in sorted(os.listdir(folder)) if is_sound(name)]
    if options.labelled and not classes:
        there = f"{len(loose)} sounds lie loose in it" if loose else "there is no sound in it"
        raise UsageError(
            f"{folder}: {there}; expected a folder of sounds for each class, or a table of paths "
            "and labels, such as train.tsv"
        )
    rows, notes = [], []
    for name in classes:
        before = len(rows)
        for place, _, names in sorted(os.walk(folder / name)):
            rows += [
                _Row(path := os.path.join(place, file), "", name, path)
                for file in sorted(names)
                if is_sound(file)
            ]
        if len(rows) > MOST_IMAGES:
            raise UsageError(f"{folder}: over {MOST_IMAGES:,} files; too many to be meant")
        if len(rows) == before and options.labelled:
            raise UsageError(
                f"{folder / name}: no sound in it; expected some of the class {name!r}"
            )
    if not options.labelled:
        rows += [_Row(str(folder / name), "", "", str(folder / name)) for name in loose]
    elif loose:
        notes.append(f"{folder}: {len(loose)} sounds outside the class folders passed over")
    return _look_at(rows, options, notes)


def _read_named(folder: Path, options: SoundOptions) -> SoundFiles:
    """Read all sounds of a folder, whose labels are in their names."""
    assert options.pattern is not None
    pattern, rows = name_pattern(options.pattern), []
    for place, _, names in sorted(os.walk(folder)):
        for name in filter(is_sound, sorted(names)):
            found = pattern.fullmatch(Path(name).stem)
            if found is None:
                raise UsageError(
                    f"{os.path.join(place, name)}: a name unlike pattern={options.pattern}; "
                    "rename it, or leave pattern= out where each class has a folder"
                )
            path = os.path.join(place, name)
            rows.append(_Row(path, "", found["label"], path))
        if len(rows) > MOST_IMAGES:
            raise UsageError(f"{folder}: over {MOST_IMAGES:,} files; too many to be meant")
    return _look_at(rows, options, [])


# Tables


class _Row(NamedTuple):
    where: str
    text: str
    label: str
    content: str | bytes


def _read_one_table(
    folder: Path, name: str, files: list[Path], options: SoundOptions
) -> SoundFiles:
    return _read_table(single_file(files, name, folder), options)


def _read_table(path: Path, options: SoundOptions) -> SoundFiles:
    """Read a table of paths, from its own folder on, or of sounds, and transcripts or labels."""
    table, faults = Table(path, encoding="auto"), RowFaults(path, options.skip_bad)
    keys: tuple[Any, Any] | None = None
    rows: list[_Row] = []
    size = 0
    for number, value, fault in table:
        if fault is not None:
            faults.add(fault)
        if value is None:
            continue
        if keys is None:
            keys, header = _choose_columns(path, table, value, options)
            if header:
                continue
        try:
            row = _parse_row(path, number, value, keys, options)
        except BadRow as bad:
            faults.add(bad.at(f"{path}:{number}"))
            continue
        size += len(row.content) if isinstance(row.content, bytes) else 0
        if size > MOST_PACKED:
            raise UsageError(f"{row.where}: the sounds so far take over 2 GB; use fewer")
        if len(rows) == MOST_IMAGES:
            raise UsageError(f"{path}: over {MOST_IMAGES:,} rows; too many to be meant")
        rows.append(row)
    return _look_at(rows, options, [*table.notes, *faults.notes])


def _choose_columns(
    path: Path, table: Table, value: Value, options: SoundOptions
) -> tuple[tuple[Any, Any], bool]:
    """Choose the columns or keys of sound and target, and tell whether the row is a header."""
    names = [name.strip() for name in value]  # keys, or the cells of the first row
    keyed, given = isinstance(value, dict), parse_columns(options.columns)
    header = not keyed and (not _sound_columns(value) if options.header is None else options.header)
    known = names if keyed or header else []

    def at(role: str, usual: Sequence[str], others: Sequence[Any]) -> Any:
        asked = given[role == "target"] if given else None
        if asked is not None and asked not in known and asked.isdecimal():
            return names[int(asked) - 1] if keyed and int(asked) <= len(names) else int(asked) - 1
        found = [
            name for name in known if name.casefold() in ((asked.casefold(),) if asked else usual)
        ]
        if found:
            return found[0] if keyed else names.index(found[0])
        if asked is None and len(others) == 1:
            return others[0]
        what = {"sound": "the path of the sound", "target": f"the {options.target}"}[role]
        there = ", ".join(name[:30] for name in names[:8])
        raise UsageError(
            f"{path}:1: which column is {what}? Found {there}; set columns=PATH,"
            f"{options.target.upper()} by name or number"
        )

    first = next((row for row in table.cells()[1:]), value) if header else value
    sounds = _sound_columns(first)
    sound = at("sound", AUDIO, sounds)
    if options.target == "none":
        return (sound, None), header
    columns = names if keyed else range(len(value))
    rest = [column for column in columns if column != sound]
    return (sound, at("target", TARGETS[options.target], rest)), header


def _parse_row(
    path: Path, number: int, value: Value, keys: tuple[Any, Any], options: SoundOptions
) -> _Row:
    sound, target = (None if key is None else _cell(value, key) for key in keys)
    text = "" if keys[1] is None else text_at({"target": target}, ("target",)).strip()
    if not text and options.target != "none":
        raise BadRow("empty", f"the {options.target} is empty", "fill it or remove the row")
    pair = ("", text) if options.labelled else (text, "")
    content = _content(sound)
    if content is not None:
        return _Row(f"{path}:{number}", *pair, content)
    name = sound.get("path") if isinstance(sound, dict) else sound
    file = path_inside(path.parent, name)
    return _Row(file, *pair, file)


def _cell(value: Value, key: Any) -> Any:
    try:
        return value[key]
    except (KeyError, IndexError):
        there = f"no column {key + 1}" if isinstance(key, int) else f"no key '{key}'"
        raise BadRow("columns", there, "add it or set columns=") from None


def path_inside(folder: Path, name: Any) -> str:
    """Return the path of a file that a table names, which may not lie outside of its folder.

    A link in the folder is followed: whoever gave the table did not choose where it leads.
    """
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise BadRow("empty", "no path of a sound in it", "fill it or remove the row")
    path = os.path.normpath(folder / name.strip())
    home = os.path.abspath(folder)
    if os.path.commonpath([home, os.path.abspath(path)]) != home:
        what = f"{name.strip()[:80]} lies outside of {folder}, the folder of the table"
        raise BadRow("outside", what, "put the sounds into that folder, and write paths from there")
    return path


def _look_at(rows: Sequence[_Row], options: SoundOptions, notes: list[str]) -> SoundFiles:
    """Hash sounds and look at their headers."""
    chosen: Sequence[int] = range(len(rows))
    if options.most and len(rows) > options.most:
        chosen = [i * len(rows) // options.most for i in range(options.most)]

    def one(i: int) -> tuple[str, SoundInfo | None]:
        where, content = rows[i].where, rows[i].content
        try:
            info = sound_info(content, where)
            return _digest(content, True), info
        except BrokenSound as mistake:
            if options.broken == "refuse":
                raise BrokenSound(f"{mistake}; or leave such files out: broken=skip") from None
            return str(mistake), None

    items, contents, infos, bad = [], [], [], []
    for i, (digest, info) in zip(chosen, in_threads(one, chosen), strict=True):
        if info is None:
            bad.append(digest)
            continue
        row = rows[i]
        items.append(SoundItem(row.where, row.text, row.label, digest))
        contents.append(row.content)
        infos.append(info)
    found = SoundFiles(items, contents, infos)
    found.bad, found.total, found.notes = bad, len(rows), notes
    return found
