"""Text from files: lines, pairs of sentences, the parts of a data folder, and sentences of a text.

Everything streams: a file is read once from front to back, and a fault is told with its file
and line, so that a bad line among ten million is found by its number.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from regard.data.lines import Fault, missing, scan_lines
from regard.data.split import Split, keys_of, shares_of, split_rows, unseen
from regard.data.table import (
    KINDS,
    SHARD,
    BadRow,
    Table,
    is_folder,
    is_saved,
    like_header,
    stem_and_suffix,
)
from regard.errors import UsageError
from regard.files import refuse

# Names of columns and languages

# One language a row: its code, then other names it goes by in headers.
LANGUAGES = {
    name: row.split()[0]
    for row in """ar ara arabic|bg bul bulgarian|bn ben bengali|ca cat catalan
cs ces cze czech|da dan danish|de deu ger german deutsch|el ell gre greek|en eng english
es spa spanish|et est estonian|fa fas per persian|fi fin finnish|fr fra fre french|he heb hebrew
hi hin hindi|hr hrv croatian|hu hun hungarian|id ind indonesian|it ita italian|ja jpn japanese
ko kor korean|lt lit lithuanian|lv lav latvian|nl nld dut dutch|no nor norwegian|pl pol polish
pt por portuguese|ro ron rum romanian|ru rus russian|sk slk slo slovak|sl slv slovenian
sr srp serbian|sv swe swedish|sw swa swahili|ta tam tamil|th tha thai|tr tur turkish
uk ukr ukrainian|ur urd urdu|vi vie vietnamese|zh zho chi cmn chinese mandarin
yue cantonese""".replace("\n", "|").split("|")
    for name in row.split()
}

# Which names of columns or keys belong together: text to text, then media to text.
ROLES = (
    (
        {"source", "src", "text", "sentence", "input", "question", "review"},
        {"target", "tgt", "label", "class", "category", "translation", "output", "answer"},
    ),
    (
        {"image", "audio", "path", "file"},
        {"caption", "text", "transcript", "transcription", "sentence", "label"},
    ),
)


def language_of(name: str) -> str | None:
    """Return the language code that a name stands for (en, EN-us, English, eng), or None."""
    name = name.strip().casefold()
    if name in LANGUAGES:
        return LANGUAGES[name]
    code = re.fullmatch(r"([a-z]{2,3})[-_](?:[a-z]{2}|[a-z]{4}|\d{3})", name)
    return LANGUAGES.get(code[1]) if code else None


def same_language(name: str, wanted: str) -> bool:
    """Tell whether two names mean the same language."""
    name, wanted = name.strip().casefold(), wanted.strip().casefold()
    return name == wanted or (language_of(name) or name) == (language_of(wanted) or wanted)


def find_languages(
    names: Sequence[str], source: str | None, target: str | None
) -> tuple[int, int] | None:
    """Find the columns named after the languages, those wanted or else the first two."""
    coded = [i for i, name in enumerate(names) if language_of(name)]
    sides = []
    for wanted in (source, target):
        fitting = [i for i, name in enumerate(names) if wanted and same_language(name, wanted)]
        sides.append(fitting[0] if fitting else None)
    for i in (0, 1):
        if sides[i] is None and (source, target)[i] is None:
            sides[i] = next((c for c in coded if c != sides[1 - i] and c not in sides), None)
    a, b = sides
    return (a, b) if a is not None and b is not None and a != b else None


def find_roles(names: Sequence[str]) -> tuple[int, int] | None:
    """Find the columns with well-known names such as source and target, or text and label."""
    names = [name.strip().casefold() for name in names]
    for inputs, outputs in ROLES:
        a = next((i for i, name in enumerate(names) if name in inputs), None)
        b = next((i for i, name in enumerate(names) if name in outputs), None)
        if a is not None and b is not None and a != b:
            return a, b
    return None


def parse_columns(columns: str | Sequence[str | int] | None) -> tuple[str, str] | None:
    """Read `columns=`: two names or two numbers from 1, such as "2,1" or "text,label"."""
    if columns is None:
        return None
    parts = columns.split(",") if isinstance(columns, str) else [str(part) for part in columns]
    parts = [part.strip() for part in parts]
    numbers = [part for part in parts if re.fullmatch(r"-?\d+", part)]
    bad = len(parts) != 2 or not all(parts)
    if bad or any(len(number) > 6 or int(number) < 1 for number in numbers):
        raise UsageError(
            f"columns={','.join(parts)[:60]} is not two columns; give two "
            "numbers from 1 or two names, such as columns=2,1 or columns=text,label"
        )
    return parts[0], parts[1]


# Pairs


@dataclass(frozen=True, slots=True)
class Pair:
    """A source and its target, with the file and line they came from."""

    source: str
    target: str
    where: str


class PairReader:
    """Pairs of one table, or of two aligned files, one at a time as they are read."""

    def __init__(
        self,
        path: str | Path,
        *,
        target_path: str | Path | None = None,
        columns: str | Sequence[str | int] | None = None,
        source: str | None = None,
        target: str | None = None,
        header: bool | None = None,
        skip_bad: bool = False,
        on_bad: Callable[[Fault], None] | None = None,
    ) -> None:
        self.path = path
        self.header = header
        self.target_path = target_path
        self.columns = parse_columns(columns)
        self.source = source
        self.target = target
        self.skip_bad = skip_bad
        self.on_bad = on_bad  # is told of every fault; nothing is refused then
        self.dropped = 0
        self.notes: list[str] = []
        if target_path is not None and self.columns:
            raise UsageError(
                f"columns={','.join(self.columns)} is for a table, but {path} and "
                f"{target_path} are aligned files; leave columns= out"
            )

    def __iter__(self) -> Iterator[Pair]:
        self.dropped = 0
        self.notes = []
        self.first = ""
        yield from self._aligned() if self.target_path is not None else self._single()
        if self.dropped:
            rows = f"{self.dropped:,} bad row{'s' if self.dropped > 1 else ''}"
            self.notes.append(f"{rows} of {self.path} dropped; the first: {self.first}")

    def _bad(self, *faults: Fault) -> None:
        """Refuse a bad row, or count it when bad rows are to be dropped."""
        if self.on_bad:
            for fault in faults:
                self.on_bad(fault)
        elif not self.skip_bad:
            raise UsageError(f"{faults[0].message}; or drop such rows with skip_bad=true")
        self.first = self.first or faults[0].message
        self.dropped += 1

    def _empty(self, number: int, what: str = "an empty line", path: Any = None) -> None:
        where = f"{path or self.path}:{number}"
        self._bad(Fault("empty", where, what, "fill it or remove the row"))

    def _aligned(self) -> Iterator[Pair]:
        target_path = cast("str | Path", self.target_path)
        ours, theirs = str(self.path), str(target_path)
        blank: list[int] = []
        sources, targets = scan_lines(self.path), scan_lines(target_path)
        shared = 0
        for left, right in zip_longest(sources, targets):
            if left is None or right is None:
                # Blank lines at the very end of the longer file do no harm; a text does.
                number, text, _ = cast("tuple[int, str, Fault | None]", left or right)
                if text.strip():
                    longer, shorter = (theirs, ours) if left is None else (ours, theirs)
                    total = number + sum(1 for _ in (targets if left is None else sources))
                    what = f"no such line in {shorter}, which has {shared:,} lines, not {total:,}"
                    remedy = "line n of one file must translate line n of the other"
                    fault = Fault("uneven", f"{longer}:{number}", what, remedy)
                    if self.on_bad is None:
                        # Rows cannot be dropped here: the files may be shifted from line 1.
                        raise UsageError(fault.message)
                    self.on_bad(fault)
                    return
                continue
            shared = number = left[0]
            source, target = left[1], right[1]
            faults = [fault for fault in (left[2], right[2]) if fault]
            if not faults and not source.strip() and not target.strip():
                blank.append(number)
                continue
            for line in blank:
                self._empty(line)
            blank.clear()
            if faults:
                self._bad(*faults)
            elif not source.strip():
                self._empty(number, f"an empty line, but {theirs} has text there")
            elif not target.strip():
                self._empty(number, f"an empty line, but {ours} has text there", theirs)
            else:
                yield Pair(source, target, f"{ours}:{number}")

    def _single(self) -> Iterator[Pair]:
        """Read a table of any kind."""
        name = str(self.path)
        blank: list[int] = []
        row = None
        table = Table(self.path)
        for number, value, fault in table:
            if fault:
                self._bad(fault)
                continue
            if value is None:
                blank.append(number)
                continue
            for empty in blank:
                self._empty(empty)
            blank.clear()
            row = row or (CellRow(self, table) if isinstance(value, list) else KeyRow(self))
            try:
                sides = row.read(value, number)  # type: ignore[arg-type]
            except BadRow as bad:
                self._bad(Fault(bad.kind, f"{self.path}:{number}", bad.what, bad.remedy))
                continue
            if sides is None:
                continue
            source, target = sides
            if not source.strip():
                self._empty(number, "the source side is empty")
            elif not target.strip():
                self._empty(number, "the target side is empty")
            else:
                yield Pair(source, target, f"{name}:{number}")
        self.notes += table.notes


class CellRow:
    """How the cells of a row become two sides: settled by the first rows."""

    def __init__(self, reader: PairReader, table: Table) -> None:
        self.reader, self.table = reader, table
        self.at: tuple[int, int] | None = None
        self.most = 0

    def read(self, cells: list[str], number: int) -> tuple[str, str] | None:
        """Return the two sides of a row, or None for the header row."""
        if self.at is None:
            self.at, header = self._settle(cells)
            self.most = max(self.at) + 1
            if header:
                return None
        try:
            return cells[self.at[0]], cells[self.at[1]]
        except IndexError:
            found = f"{len(cells)} column{'s' if len(cells) > 1 else ''}"
            remedy = "put a TAB between source and target; two aligned files need from= and to="
            if len(cells) > 1 or self.table.kind == "csv":
                remedy = "add the missing column or set columns="
            what = f"{found}, expected at least {self.most}"
            raise BadRow("columns", what, remedy) from None

    def _settle(self, names: list[str]) -> tuple[tuple[int, int], bool]:
        """Choose the two columns by the first rows, and tell whether the first is a header."""
        reader = self.reader
        wanted = (reader.source, reader.target)
        found, header = None, False
        if reader.columns:
            named = not all(column.isdecimal() for column in reader.columns)
            if named and reader.header is False:
                raise UsageError(
                    f"{reader.path}: columns={','.join(reader.columns)} are names, but with "
                    "header=false there are none; give numbers such as columns=2,1"
                )
            a, b = (column_of(name, names, f"{reader.path}:1") for name in reader.columns)
            found = (a, b)
            cells = [names[i] if i < len(names) else "" for i in found]
            header = (
                named
                or bool(find_roles(cells) or find_roles(cells[::-1]))
                or bool(find_languages(cells, None, None))
            )
        elif reader.header is not False:
            by_language = find_languages(names, None, None)
            found = find_languages(names, *wanted) if any(wanted) else None
            found = found or find_roles(names) or (by_language if not any(wanted) else None)
            header = found is not None
            # Two languages in the first two columns are a header, but not the one asked for.
            if not header and by_language == (0, 1):
                raise UsageError(
                    f"{reader.path}:1: no columns for from={wanted[0]} to={wanted[1]}; the header "
                    f"names {', '.join(names)}; change from= and to=, or set columns="
                )
        by_names = header
        header = self._header(names, found or (0, 1), header)
        if header and found is None and len(names) > 2:
            told = ", ".join(name.strip()[:30] for name in names[:8])
            raise UsageError(
                f"{reader.path}:1: which of its columns {told}? Name two with columns=, such as "
                f"columns={names[0].strip()},{names[1].strip()}"
            )
        at = found or (0, 1)
        if header and max(at) < len(names):
            a, b = names[at[0]].strip(), names[at[1]].strip()
            more = "" if by_names or reader.header else "; give header=false if it is none"
            reader.notes.append(
                f"{reader.path}: row 1 is a header; reading columns {a} and {b}{more}"
            )
            if language_of(a) and language_of(b):
                reader.source, reader.target = reader.source or a, reader.target or b
        return at, header

    def _header(self, names: list[str], at: tuple[int, int], known: bool) -> bool:
        """Tell whether the first row is a header: as told, by known names, or by the others."""
        if self.reader.header is not None or known:
            return known if self.reader.header is None else self.reader.header
        found = like_header(self.table.cells(), at)
        if found is None:
            told = ", ".join(name.strip()[:30] for name in names[:8])
            raise UsageError(
                f"{self.reader.path}:1: whether its first row ({told}) is a header is not clear; "
                "say header=true or header=false"
            )
        return found


def column_of(name: str, names: Sequence[str], where: str) -> int:
    """Return the place of a column given by name or number."""
    if name.isdecimal():
        return int(name) - 1
    known = [cell.strip().casefold() for cell in names]
    if name.casefold() in known:
        return known.index(name.casefold())
    raise UsageError(
        f"{where}: no column '{name}' in the header row; found "
        f"{', '.join(cell[:30] for cell in names[:8])}; set columns= to names or numbers"
    )


class KeyRow:
    """How a mapping from keys to values becomes two sides: settled by the first good one."""

    def __init__(self, reader: PairReader) -> None:
        self.reader = reader
        self.keys: tuple[tuple[str, ...], tuple[str, ...]] | None = None

    def read(self, value: dict[str, Any], number: int) -> tuple[str, str]:
        """Return the two sides of a row."""
        if self.keys is None:
            self.keys = self._settle(value)
        return self.side(value, self.keys[0]), self.side(value, self.keys[1])

    def side(self, value: Any, path: tuple[str, ...]) -> str:
        """Return the text that lies at a path of keys."""
        for key in path:
            if not isinstance(value, dict) or key not in value:
                found = ", ".join(map(str, value)) if isinstance(value, dict) else "no object"
                what = f"no key '{'.'.join(path)}' (found: {found})"
                raise BadRow("columns", what, "add it or set columns=")
            value = value[key]
        if isinstance(value, str):
            if "\0" in value or not (value.isascii() or encodable(value)):
                what = f"key '{'.'.join(path)}' holds a NUL or half a surrogate"
                raise BadRow("json", what, "remove it")
            return value
        if value is None or value != value:  # no number at all
            return ""
        if isinstance(value, (dict, list, bytes)):
            what = f"key '{'.'.join(path)}' holds a {type(value).__name__}, expected text"
            raise BadRow("json", what, "make it a string or set columns=")
        return json.dumps(value) if isinstance(value, bool | int | float) else str(value)

    def _settle(self, value: dict[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Choose the two keys by the first object."""
        reader = self.reader
        if reader.columns:
            a, b = (key_path(key, value) for key in reader.columns)
            return a, b
        wanted = (reader.source, reader.target)
        nested = value.get("translation")
        inner = nested if isinstance(nested, dict) else value
        prefix = ("translation",) if inner is nested else ()
        names = list(inner)
        found = find_languages(names, *wanted)
        if found is None and inner is nested and not any(wanted) and len(names) == 2:
            found = (0, 1)
        if found:
            a, b = names[found[0]], names[found[1]]
            reader.source, reader.target = reader.source or a, reader.target or b
        else:
            found = find_roles(names)
            if found is None:
                asked = f" for from={wanted[0]} to={wanted[1]}" if any(wanted) else ""
                raise BadRow(
                    "columns",
                    f"no pair of keys{asked} among {', '.join(names[:8]) or 'none'}",
                    "name them source and target (or src and tgt, or translation) or set columns=",
                )
            a, b = names[found[0]], names[found[1]]
        return (*prefix, a), (*prefix, b)


def key_path(name: str, value: dict[str, Any]) -> tuple[str, ...]:
    """Return the path of keys that a name or number of columns= stands for."""
    if name in value:
        return (name,)
    if name.isdecimal() and 1 <= int(name) <= len(value):
        return (list(value)[int(name) - 1],)
    return tuple(name.split("."))


def encodable(text: str) -> bool:
    """Tell whether a text can be written as UTF-8, which half a surrogate pair cannot."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_pairs(
    path: str | Path,
    *,
    columns: str | Sequence[str | int] | None = None,
    target_path: str | Path | None = None,
    source: str | None = None,
    target: str | None = None,
    header: bool | None = None,
    skip_bad: bool = False,
    notes: list[str] | None = None,
) -> list[Pair]:
    """Read all pairs of a table or of two aligned files; notes are added to `notes`."""
    reader = PairReader(
        path,
        target_path=target_path,
        columns=columns,
        source=source,
        target=target,
        header=header,
        skip_bad=skip_bad,
    )
    pairs = list(reader)
    if notes is not None:
        notes.extend(reader.notes)
    return pairs


# The parts of a data folder

PARTS = {
    "train": ("train", "training"),
    "valid": ("valid", "val", "dev", "validation"),
    "test": ("test",),
}
LANGUAGE_SUFFIX = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8})*|source|target")
NO_LANGUAGE = {
    "md",
    "log",
    "zip",
    "tar",
    "bz2",
    "zst",
    "py",
    "sh",
    "yml",
    "xml",
    "pt",
    "npy",
}


@dataclass(frozen=True)
class Part:
    """The file of one part of the data, or its two aligned files, and the languages if known."""

    path: Path
    target_path: Path | None = None
    source: str | None = None
    target: str | None = None

    @property
    def files(self) -> list[Path]:
        """The one or two files of the part."""
        return [self.path] if self.target_path is None else [self.path, self.target_path]


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


def part_of(files: dict[str, Path], source: str | None, target: str | None) -> Part | None:
    """Choose the file or the two aligned files of one stem, or None when it is not clear."""
    if source in files and target in files and source and target:
        return Part(files[source], files[target], source, target)
    for kind in KINDS:
        if kind in files:
            return Part(files[kind], None, source, target)
    found = sorted(s for s in files if LANGUAGE_SUFFIX.fullmatch(s) and s not in NO_LANGUAGE)
    if len(found) != 2:
        return None
    a, b = reversed(found) if source == found[1] or target == found[0] else found
    fits = source in (None, a) and target in (None, b)
    return Part(files[a], files[b], a, b) if fits else None


def find_file(
    given: str | Path, folder: Path | None, source: str | None, target: str | None
) -> Part:
    """Find what a user named: a file, two files with a comma, or the stem of aligned files."""
    text = os.fspath(given)
    for place in [Path(), folder] if folder else [Path()]:
        path = place / text
        halves = [place / half.strip() for half in text.split(",")]
        if is_folder(path):
            raise UsageError(f"{path}: is a folder; expected a file in it")
        if os.path.exists(path):
            stem, suffix = stem_and_suffix(path)
            if suffix not in KINDS and suffix in (source, target):
                part = part_of(index_folder(path.parent).get(stem, {}), source, target)
                if part is not None and part.target_path is not None:
                    return part
            return Part(path, None, source, target)
        if len(halves) == 2 and all(os.path.isfile(half) for half in halves):
            ends = [stem_and_suffix(half)[1] for half in halves]
            a, b = (end if LANGUAGE_SUFFIX.fullmatch(end) else None for end in ends)
            return Part(halves[0], halves[1], source or a, target or b)
        if os.path.isdir(path.parent):
            files = index_folder(path.parent).get(path.name)
            part = part_of(files, source, target) if files else None
            if part:
                return part
            if files:
                raise UsageError(which_languages(path.parent, files, source, target))
    raise UsageError(missing(Path(text) if folder is None else folder / text))


def which_languages(
    folder: Path, files: dict[str, Path], source: str | None, target: str | None
) -> str:
    """Say which files were found where the two languages could not be settled."""
    found = ", ".join(path.name for path in files.values())
    stem = stem_and_suffix(next(iter(files.values())))[0]
    if source and target:
        lacking = " and ".join(f"{stem}.{s}" for s in (source, target) if s not in files)
        return (
            f"{folder}: no {lacking}; found {found}; set from= and to= to suffixes that are there"
        )
    return f"{folder}: which languages? Found {found}; set from= and to=, such as from=en to=de"


def find_parts(
    data: str | Path,
    *,
    source: str | None = None,
    target: str | None = None,
    valid: str | Path | None = None,
    test: str | Path | None = None,
) -> dict[str, Part]:
    """Find train, valid and test in a folder or file; further test files keep their own names."""
    if source and source == target:
        raise UsageError(f"from={source} to={target} are the same language; choose two")
    if not os.fspath(data):
        raise UsageError("data= is empty; give a folder or a file")
    folder = Path(data) if is_folder(data) else None
    parts: dict[str, Part] = {}
    if folder is None:
        parts["train"] = find_file(data, None, source, target)
        source, target = parts["train"].source, parts["train"].target
    given = {"valid": valid, "test": test}
    stems = index_folder(folder) if folder else {}
    for name, words in PARTS.items():
        if chosen := given.get(name):
            parts[name] = find_file(chosen, folder or Path(data).parent, source, target)
        found = [word for word in words if word in stems]
        pattern = re.compile(rf"(?:{'|'.join(words)})(?![a-z])", re.IGNORECASE)
        found += sorted(stem for stem in stems if pattern.match(stem) and stem not in found)
        fitting = {stem: part_of(stems[stem], source, target) for stem in found}
        usable = {stem: part for stem, part in fitting.items() if part}
        if found and not usable and name not in parts and (name == "train" or "train" not in parts):
            raise UsageError(which_languages(cast(Path, folder), stems[found[0]], source, target))
        if name == "train" and len(usable) > 1 and next(iter(usable)) not in words:
            names = ", ".join(usable)
            raise UsageError(f"{folder}: several files to train on ({names}); name one with data=")
        for stem, part in usable.items():
            if name not in parts:
                parts[name] = part
                source, target = part.source, part.target
            elif stem not in parts and name != "train":
                parts[stem] = part
    return parts


# The whole corpus


@dataclass
class Corpus:
    """The pairs of each part, the languages as far as known, and what the user should be told."""

    parts: dict[str, list[Pair]]
    source: str | None
    target: str | None
    notes: list[str] = field(default_factory=list)
    files: dict[str, Part] = field(default_factory=dict)
    split: Split = field(default_factory=Split)


def load_pairs(
    data: str | Path,
    *,
    source: str | None = None,
    target: str | None = None,
    columns: str | Sequence[str | int] | None = None,
    valid: str | Path | None = None,
    test: str | Path | None = None,
    need: Sequence[str] = ("train",),
    header: bool | None = None,
    skip_bad: bool = False,
    trained: Split | None = None,
) -> Corpus:
    """Load the needed parts, and with train also valid (split off by hash if absent) and test.

    `valid` and `test` are files, or shares of train such as 0.1. A model that was `trained` on the
    data is judged on what was held out.
    """
    shares = shares_of(valid, test)
    files = find_parts(
        data,
        source=source,
        target=target,
        valid=None if "valid" in shares else valid,
        test=None if "test" in shares else test,
    )
    for part in shares:
        files.pop(part, None)
    if not is_folder(data) and len(need) == 1 and need[0] not in (*files, *shares):
        # Only one part is wanted and only one file is given: that is it.
        files = {need[0]: files["train"]}
    notes: list[str] = []
    if not (source and target) and (first := next(iter(files.values()), None)) and first.source:
        if first.target_path is not None:
            notes.append(
                f"languages taken from the file names: from={first.source} to={first.target}"
            )
        source, target = first.source, first.target
    noted = set(trained.bounds) if trained else set()
    lacking = {"valid", *shares, *noted} - set(files) if "train" in files else set()
    splitting = bool(lacking & {*need, *(("valid", "test") if "train" in need else ())})
    wanted = list(dict.fromkeys([*need, *(("valid", "test") if "train" in need else ())]))
    if splitting and "train" not in wanted:
        wanted.insert(0, "train")
    for name in need:
        if name not in files and not (name in lacking and splitting):
            raise UsageError(no_part(Path(data), name, source, target))
    parts: dict[str, list[Pair]] = {}
    for name in wanted:
        if name not in files:
            continue
        part = files[name]
        reader = PairReader(
            part.path,
            target_path=part.target_path,
            columns=None if part.target_path else columns,
            source=source,
            target=target,
            header=header,
            skip_bad=skip_bad,
        )
        parts[name] = list(reader)
        source, target = source or reader.source, target or reader.target
        notes.extend(reader.notes)
        if not parts[name]:
            why = f"; {reader.notes[-1]}" if reader.dropped else "; expected one on each line"
            raise UsageError(f"{part.path}: no pairs in it{why}")
    split = Split()
    if splitting:
        wanted_parts = {"valid": shares.get("valid")} if "valid" in lacking else {}
        if "test" in shares:
            wanted_parts["test"] = shares["test"]
        parts, split = split_rows(parts, wanted_parts, "pairs", notes, trained)
    elif trained is not None and len(need) == 1:
        parts[need[0]] = unseen(parts[need[0]], need[0], trained, str(data), "pairs", notes)
    for name in need:
        if not parts.get(name):
            raise UsageError(no_part(Path(data), name, source, target))
    others = [name for name in files if name not in (*PARTS, *need)]
    if others and "test" in wanted and test is None:
        chosen = stem_and_suffix(files["test"].path)[0] if "test" in files else None
        notes.append(
            f"testing on {chosen}; also there: {', '.join(others)} (choose with test=NAME)"
        )
    if "train" in parts:
        split = split.noting(keys_of(parts["train"]))
    return Corpus(parts, source, target, notes, files, split)


def no_part(data: Path, name: str, source: str | None, target: str | None) -> str:
    """Say that a part is missing from the data, and what names it could have."""
    if not is_folder(data):
        return f"{data}: a single file has no {name} part; give {name}=FILE or a folder as data="
    ends = f".{source} and .{target}" if source and target else ".tsv, .csv, .jsonl or .parquet"
    names = " or ".join(PARTS.get(name, (name,)))
    found = ", ".join(sorted(os.listdir(data))[:8]) or "nothing"
    return f"{data}: no {name} part; expected {names} with {ends}; found {found}"


# Sentences


def words(text: str) -> frozenset[str]:
    """Make a set of the words of a text."""
    return frozenset(text.split())


# What may stand before a dot without ending a sentence.
ABBREVIATIONS = words(
    """mr mrs ms dr prof st mt sr messrs mme mlle hr fr hrn gen col sgt capt lt cmdr rev hon sen rep
    gov pres e.g eg i.e ie vs cf viz ca approx no nos nr vol fig figs eq sec ch pp pg ed eds al
    z.b d.h u.a bzw usf bspw vgl abs str p.ex jan feb mar apr jun jul aug sep sept oct nov dec
    ave blvd dept est tel ph.d"""
)
# Words that begin a sentence, also after initials such as U.S. and J. K.
STARTERS = words(
    """a an the this that these those he she it we they i you there here his her its our their my
    in on at for from with by as if when while after before since but and or so yet however then
    what who why how where not no yes der die das ein eine er sie es wir ihr ich le la les un une
    il elle"""
)
# What an ordinal with a dot stands before in German, Czech and their like: "am 3. Oktober".
AFTER_ORDINALS = words(
    """januar jänner februar märz april mai juni juli august september oktober november dezember
    jahrhundert jahrhunderts jahrestag geburtstag klasse stock platz"""
)
BREAK = re.compile(
    # Quantifiers are possessive and no lookahead follows, so a run is never read twice.
    r"""(?P<end>[.!?…؟۔।]++["'”’“»«)\]]*+)(?P<space>\s*+)
    |(?P<wide>[。！？｡]++["'”’」』）】》〉)\]]*+)(?P<gap>\s*+)
    |(?P<white>\s++)""",
    re.VERBOSE,
)
OPENERS = "\"'“‘„«»(['¿¡—–-"
WITHOUT_SPACES = {"zh", "ja", "yue"}
WIDE = re.compile("[\u3000-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff00-\uffef]")


def split_sentences(text: str) -> list[str]:
    """Cut a text into sentence, separator, sentence, separator, ...: joined they are the text."""
    pieces: list[str] = []
    start = 0
    for match in BREAK.finditer(text):
        kind = match.lastgroup
        if kind == "white":
            # Other white space inside a sentence is no break; before the first one it is kept.
            ends = match.start() == 0 or "\n" in match[0]
            cut = match.start()
        elif kind == "gap":
            ends, cut = True, match.end("wide")
        else:
            cut = match.end("end")
            ends = "\n" in match["space"] or ends_sentence(text, start, match)
        if ends:
            pieces += [text[start:cut], text[cut : match.end()]]
            start = match.end()
    if start < len(text):
        pieces += [text[start:], ""]
    return pieces


def ends_sentence(text: str, start: int, match: re.Match[str]) -> bool:
    """Judge whether a full stop or its like, found inside a text, ends the sentence."""
    after = match.end()
    if after == len(text):
        return True
    if not match["space"]:
        return False
    ahead = text[after : after + 24].lstrip(OPENERS)
    if ahead[:1].islower():
        return False
    if match["end"][0] != "." or match["end"].startswith(".."):
        return True
    before = text[max(start, match.start() - 16) : match.start()].split()
    word = before[-1].lstrip(OPENERS).casefold() if before else ""
    following = re.match(r"\w*", ahead)
    next_word = following[0].casefold() if following else ""
    if word in ABBREVIATIONS:
        # "No. 5" but "Did he? No. He left."
        return word in ("no", "st", "mar", "sec", "est") and next_word in STARTERS
    if len(word) == 1 and word.isalpha() or re.fullmatch(r"(?:\w\.)+\w", word):
        return next_word in STARTERS
    if word.isdecimal() and len(word) <= 2:
        # An ordinal, or the number of an item in a list.
        first = len(before) == 1 and match.start() - start < 16
        return not first and next_word not in AFTER_ORDINALS
    return True


def join_sentences(
    translations: Sequence[str], separators: Sequence[str], target_language: str | None = None
) -> str:
    """Put translated sentences together with their separators, made fit for the language."""
    if len(translations) != len(separators):
        raise ValueError(f"{len(translations)} translations, {len(separators)} separators")
    code = language_of(target_language) if target_language else None
    out: list[str] = []
    for i, (text, separator) in enumerate(zip(translations, separators, strict=True)):
        follower = translations[i + 1] if i + 1 < len(translations) else ""
        if text and follower and not separator.strip(" \u3000"):
            if code is None:
                spaced = not (WIDE.match(text[-1]) or WIDE.match(follower[0]))
            elif code in WITHOUT_SPACES:
                # English left as it is inside Chinese keeps its spaces.
                spaced = text[-1].isascii() and follower[0].isascii()
            else:
                spaced = True
            separator = (separator.replace("\u3000", " ") or " ") if spaced else ""
        out += [text, separator]
    return "".join(out)
