"""Sets of sounds as they lie on disk: tables of paths with transcripts or labels, class folders."""

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from fnmatch import fnmatchcase
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.data.archive import in_archive, locator
from regard.data.columns import parse_columns, text_at
from regard.data.in_memory import UserData, lay_in_memory
from regard.data.lines import missing
from regard.data.listing import FileList, Items, TextBlob, numbered
from regard.data.media import (
    LABELS,
    Contents,
    Media,
    MediaFiles,
    MediaOptions,
    cell_bytes,
    find_media_parts,
    is_set,
    several,
)
from regard.data.sound_files import SOUND_SUFFIXES, BrokenSound, SoundInfo, read_sound, sound_info
from regard.data.sound_streams import begins_as_sound
from regard.data.table import BadRow, Fault, RowFaults, Table, Value
from regard.data.tree import MOST_FILES, stamps_of
from regard.errors import UsageError

_MOST_PACKED = 2 * 2**30  # bytes of sounds that a table itself holds
_MOST_KEPT = 2 * 2**30  # bytes of decoded samples of a part that stay in memory
_AUDIO = ("audio", "path", "file", "sound", "wav", "audio_filepath", "audio_path", "filename")
TEXTS = ("text", "transcript", "transcription", "sentence", "normalized_text")
TARGETS = {"text": TEXTS, "label": LABELS, "none": ()}


def _look(content: str | bytes, where: str) -> tuple[int, int, float, str]:
    return astuple(sound_info(content, where))


SOUNDS = Media(
    "sound",
    frozenset(SOUND_SUFFIXES),
    begins_as_sound,
    BrokenSound,
    look=_look,
    header=np.dtype([("rate", "<i4"), ("channels", "<i4"), ("seconds", "<f8"), ("kind", "S4")]),
    beside={
        "label": ((".cls", ".txt", ".json"), LABELS),
        "text": ((".txt", ".json"), TEXTS),
    },
)


@dataclass(frozen=True)
class SoundOptions(MediaOptions):
    """How the sounds of a set are to be taken."""

    target: str = "text"  # what is learnt of a sound: text, label or none
    pattern: str | None = None  # of file names with labels in them: {label}_{speaker}_{take}

    @property
    def labelled(self) -> bool:
        """True if sounds have labels."""
        return self.target == "label"


class SoundFiles(MediaFiles):
    """The sounds of one part of a set, each with the header of its file."""

    media = SOUNDS

    def __init__(self, items: Items, headers: np.ndarray, contents: Contents = ()):
        """Take the sounds, their headers, and the bytes of those that a table holds."""
        super().__init__(items, contents)
        self.headers = headers

    @cached_property
    def infos(self) -> list[SoundInfo]:
        """What the header of each sound says."""
        return [
            SoundInfo(rate, channels, seconds, kind.decode())
            for rate, channels, seconds, kind in self.headers.tolist()
        ]

    def pick(self, numbers: Sequence[int]) -> "SoundFiles":
        """Some of the sounds."""
        contents = [self.contents[i] for i in numbers] if self.contents else ()
        rows = np.asarray(numbers, np.int64)
        return SoundFiles(self.items.pick(rows), self.headers[rows], contents)

    def read(self, i: int, rate: int) -> np.ndarray:
        """Samples of sound i."""
        return read_sound(self.content(i), rate, self.items.where[i])

    def decode(self, rate: int, broken: str, most: int = _MOST_KEPT) -> Iterator[Any]:
        """Yield the samples of each sound, how many beyond `most` bytes, or why it is broken."""
        sizes = np.cumsum(4 * rate * self.headers["seconds"])

        def one(i: int) -> np.ndarray | int:
            samples = self.read(i, rate)
            return samples if sizes[i] <= most else len(samples)

        return self.decode_each(one, broken)


# Which kind of set it is


def holds_sounds(data: UserData | None) -> bool:
    """True if data are sounds: a table of paths, or class folders."""
    return is_set(data, SOUNDS.kind_of_set)


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
    find = partial(find_sounds, options=options)
    readers, shares = find_media_parts(data, valid, test, find)
    return {**readers, **(_by_names(data, readers, globs) if globs else {})}, shares


def is_glob(given: Any) -> bool:
    """True if valid= or test= is a pattern of file names, such as *_[0-4].*, and no file."""
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
                raise UsageError(
                    f"{name}={glob} fits no file of {data}, such as {names[0]}; correct it, or "
                    f"give {name}=none"
                )
        some = files.pick([i for i, name in enumerate(of) if name == part])
        some.total = round(files.total * len(some) / len(files))
        return some

    return {part: partial(read, part) for part in ("train", *globs)}


def name_pattern(pattern: str) -> re.Pattern[str]:
    """Pattern that takes the label out of file names such as {label}_{speaker}_{take}."""
    if pattern.count("{label}") != 1:
        raise UsageError(f"pattern={pattern}; expected {{label}} in it, such as {{label}}_{{take}}")
    parts = re.split(r"\{(\w+)\}", pattern)
    fixed = [re.escape(part) if i % 2 == 0 else "" for i, part in enumerate(parts)]
    named = ["(?P<label>.+?)" if part == "label" else ".+?" for part in parts[1::2]]
    return re.compile(fixed[0] + "".join(a + b for a, b in zip(named, fixed[2::2], strict=True)))


def find_sounds(path: Path, options: SoundOptions) -> dict[str, ReadSounds]:
    """Find the parts of a set and what reads each."""
    if not path.exists() and not in_archive(str(path)):
        raise UsageError(missing(path))
    if options.pattern and (path.is_dir() or in_archive(str(path))):
        return SOUNDS.folder_parts(path, partial(_read_named, options=options))
    return SOUNDS.find_parts(
        path,
        SOUNDS.kind_of_set(path, surely=False) == "table",
        partial(_read_table, options=options),
        partial(_read_folder, options=options),
        "a table of paths and transcripts or labels, or a folder with a folder of sounds for each "
        "class",
    )


def _read_folder(roots: Sequence[Path], options: SoundOptions) -> SoundFiles:
    """Read class folders, or where there is nothing to learn of them, all within."""
    if options.target == "text" and not in_archive(str(roots[0])):
        raise _no_transcripts(roots[0])
    table = ", or a table of paths and labels, such as train.tsv"
    files, notes = SOUNDS.list_files(roots, options.target, table)
    if options.target == "text" and files.texts is None:
        raise _no_transcripts(roots[0])
    return _look_at(files, several(roots), options, notes)


def _no_transcripts(folder: Path) -> UsageError:
    return UsageError(
        f"{folder}: no transcripts; expected a table of paths and transcripts, such as train.tsv, "
        "beside the sounds"
    )


def _read_named(roots: Sequence[Path], options: SoundOptions) -> SoundFiles:
    """Read all sounds of a folder, whose labels are in their names."""
    assert options.pattern is not None
    pattern, found = name_pattern(options.pattern), list[str]()
    files, _ = SOUNDS.list_files(roots, "none")
    files = files.pick(sorted(range(len(files.where)), key=files.where.__getitem__))
    for path in files.where:
        match = pattern.fullmatch(Path(path).stem)
        if match is None:
            raise UsageError(
                f"{path}: a name unlike pattern={options.pattern}; rename it, or give pattern=none "
                "where each class has a folder"
            )
        found.append(match["label"])
    codes, labels = numbered(found)
    return _look_at(files._replace(codes=codes, labels=labels), several(roots), options, [])


# Tables


class _Row(NamedTuple):
    where: str
    text: str
    label: str
    content: str | bytes


def _read_table(path: Path, options: SoundOptions) -> SoundFiles:
    """Read a table of paths, from its own folder on, or of sounds, and transcripts or labels."""
    table = Table(path, encoding="auto")
    faults = RowFaults(path, options.broken == "skip", setting="broken=skip")
    rows: list[_Row] = []
    size = 0
    for row, _, _ in _parse_rows(path, table, options, faults.add):
        size += len(row.content) if isinstance(row.content, bytes) else 0
        if size > _MOST_PACKED:
            raise UsageError(f"{row.where}: the sounds so far take over 2 GB; use fewer")
        if len(rows) == MOST_FILES:
            raise UsageError(f"{path}: over {MOST_FILES:,} rows; too many to be meant")
        rows.append(row)
    where, texts = TextBlob.of(row.where for row in rows), TextBlob.of(row.text for row in rows)
    held = [row.content if isinstance(row.content, bytes) else None for row in rows]
    codes, labels = numbered(row.label for row in rows)
    files = FileList(where, codes, labels, stamps_of(where), texts)
    return _look_at(files, path, options, [*table.notes, *faults.notes], held if size else ())


def _parse_rows(
    path: Path,
    table: Table,
    options: SoundOptions,
    add_fault: Callable[[Fault], None],
    optional: bool = False,
) -> Iterator[tuple[_Row, Value, Any]]:
    """Yield each row, what stands in the table, and the key of the sound in it.

    There may be no column of an `optional` target.
    """
    keys = None
    locate = (
        _own_path
        if lay_in_memory(path)
        else partial(path_inside, path.parent, locator(path.parent))
    )
    for number, value, fault in table:
        if fault is not None:
            add_fault(fault)
        if value is None:
            continue
        if keys is None:
            keys, header = _choose_columns(path, table, value, options, optional)
            if header:
                continue
        try:
            row = _parse_row(f"{path}:{number}", value, keys, options, locate)
        except BadRow as bad:
            add_fault(bad.at(f"{path}:{number}"))
        else:
            yield row, value, keys[0]


def _refuse(fault: Fault) -> None:
    raise UsageError(fault.message)


def listed_sounds(path: Path) -> Iterator[tuple[str | bytes, dict[str, Any]]]:
    """Yield the sounds that a table names, from its own folder on, each beside its row."""
    rows = _parse_rows(path, Table(path, encoding="auto"), SoundOptions(), _refuse, optional=True)
    for row, value, key in rows:
        name = row.where if isinstance(row.content, bytes) else value[key]
        told = {"text": row.text} if row.text else {}
        yield row.content, {**(value if isinstance(value, dict) else told), "audio": name}


def _choose_columns(
    path: Path, table: Table, value: Value, options: SoundOptions, optional: bool
) -> tuple[tuple[Any, Any], bool]:
    """Choose the columns or keys of sound and target, and tell whether the row is a header."""
    keyed = isinstance(value, dict)
    header = not keyed and (not SOUNDS.columns(value) if options.header is None else options.header)
    columns: list[Any] = list(value) if keyed else list(range(len(value)))
    names = [str(name).strip() for name in value]
    known = [name.casefold() for name in names] if keyed or header else []
    given = parse_columns(options.columns) or (None, None)

    def choose(asked: str | None, usual: Sequence[str], what: str, others: list[Any]) -> Any:
        """Choose a column as asked for, by its usual name, or since there is no other."""
        if asked is not None and asked.isdecimal() and asked not in known:
            if int(asked) <= len(columns):
                return columns[int(asked) - 1]
        else:
            usual = usual if asked is None else (asked.casefold(),)
            for name in usual:
                if name in known:
                    return columns[known.index(name)]
            if asked is None and len(others) == 1:
                return others[0]
        there = ", ".join(name[:30] for name in names[:8])
        raise UsageError(
            f"{path}:1: which column is the {what}? Found {there}; set columns= to two names or "
            f"numbers, such as columns=path,{options.target} or columns=1,2"
        )

    first = next(iter(table.cells()[1:]), value) if header else value
    sound = choose(given[0], _AUDIO, "path of the sound", SOUNDS.columns(first))
    if options.target == "none":
        return (sound, None), header
    others = [column for column in columns if column != sound]
    try:
        return (sound, choose(given[1], TARGETS[options.target], options.target, others)), header
    except UsageError:
        if not optional:
            raise
        return (sound, None), header


def _parse_row(
    where: str,
    value: Value,
    keys: tuple[Any, Any],
    options: SoundOptions,
    locate: Callable[[Any], str],
) -> _Row:
    sound, target = (None if key is None else _cell(value, key) for key in keys)
    text = "" if keys[1] is None else text_at({"target": target}, ("target",)).strip()
    if not text and keys[1] is not None:
        raise BadRow("empty", f"the {options.target} is empty", "fill it or remove the row")
    pair = ("", text) if options.labelled else (text, "")
    content = cell_bytes(sound)
    if content is not None:
        return _Row(where, *pair, content)
    file = locate(sound.get("path") if isinstance(sound, dict) else sound)
    return _Row(file, *pair, file)


def _cell(value: Value, key: Any) -> Any:
    try:
        return value[key]
    except (KeyError, IndexError):
        there = f"no column {key + 1}" if isinstance(key, int) else f"no key '{key}'"
        raise BadRow("columns", there, "add it or set columns=") from None


def _own_path(name: Any) -> str:
    """Path that a cell holds."""
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise BadRow("empty", "no path of a sound in it", "fill it or remove the row")
    return name.strip()


def path_inside(folder: Path, locate: Callable[[str], str], name: Any) -> str:
    """Path of a file that a table names, which may not lie outside of its folder.

    A link in the folder is followed: whoever gave the table did not choose where it leads.
    """
    path = os.path.normpath(locate(_own_path(name)))
    home = os.path.abspath(folder)
    if os.path.commonpath([home, os.path.abspath(path)]) != home:
        what = f"{name.strip()[:80]} lies outside of {folder}, the folder of the table"
        raise BadRow("outside", what, "put the sounds into that folder, and write paths from there")
    return path


def _look_at(
    files: FileList,
    of: str | Path,
    options: SoundOptions,
    notes: list[str],
    contents: Contents = (),
) -> SoundFiles:
    """Hash sounds and look at their headers."""
    seen = SOUNDS.look_at(files, of, options, contents)
    found = SoundFiles(seen.items, seen.headers, seen.contents)
    found.bad, found.total, found.notes = seen.bad, seen.total, notes
    return found
