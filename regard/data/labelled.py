"""Texts with labels, and sentences with a tag for each word, from files."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from regard.data.lines import missing
from regard.data.split import SPLITS, Split, keys_of, shares_of, split_rows, unseen
from regard.data.table import BadRow, Table, is_folder, stem_and_suffix
from regard.data.text import (
    PARTS,
    CellRow,
    KeyRow,
    PairReader,
    find_file,
    find_roles,
    index_folder,
    key_path,
)
from regard.errors import UsageError, lookup

AROUND = 6  # words shown on both sides of one


class Example(NamedTuple):
    """A text and its labels, with the file and line it came from."""

    text: str
    labels: tuple[str, ...]
    where: str

    @property
    def source(self) -> str:
        """Return what it is told apart by where a validation part is split off."""
        return self.text

    @property
    def units(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return what has labels, and those: the text itself."""
        return [(self.text, self.labels)]

    @property
    def number(self) -> float:
        """Return the number that is its label, or refuse."""
        try:
            (text,) = self.labels
            return float(text)
        except ValueError as error:
            raise UsageError(
                f"{self.where}: {','.join(self.labels)!r:.60} is no number, which is what this "
                "model gives to a text"
            ) from error

    def excerpt(self, unit: int) -> str:
        """Return what to show of a unit."""
        return self.text


class Sentence(NamedTuple):
    """Words and their tags, with the file and line they came from."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    where: str

    @property
    def source(self) -> str:
        """Return what it is told apart by where a validation part is split off."""
        return " ".join(self.words)

    @property
    def units(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return what has labels, and those: each word."""
        return [(word, (tag,)) for word, tag in zip(self.words, self.tags, strict=True)]

    def excerpt(self, unit: int) -> str:
        """Return a word in brackets between its neighbours."""
        before, after = self.words[max(0, unit - AROUND) : unit], self.words[unit + 1 :]
        return " ".join([*before, f"[{self.words[unit]}]", *after[:AROUND]])


T = TypeVar("T", Example, Sentence)


class Faults:
    """What is wrong with the rows of a file: refused, or counted if bad rows are to be dropped."""

    def __init__(self, path: Path, *, skip_bad: bool = False):
        self.path, self.skip_bad = path, skip_bad
        self.dropped, self.first = 0, ""

    def bad(self, number: int, what: str, remedy: str) -> None:
        """Refuse a bad row, or count it."""
        message = f"{self.path}:{number}: {what}; {remedy}"
        if not self.skip_bad:
            raise UsageError(f"{message}; or drop such rows with skip_bad=true")
        self.first = self.first or message
        self.dropped += 1

    @property
    def notes(self) -> list[str]:
        """Tell what was dropped."""
        if not self.dropped:
            return []
        rows = f"{self.dropped:,} bad row{'s' if self.dropped > 1 else ''}"
        return [f"{rows} of {self.path} dropped; the first: {self.first}"]


# Texts and labels

TREC = re.compile(r"([A-Z]{2,12}):(\w{1,20}) (.+)")
FINENESS = {"coarse": lambda whole: whole.partition(":")[0], "fine": lambda whole: whole}


@dataclass(frozen=True)
class ExampleFormat:
    """How texts and labels stand in a file."""

    columns: str | None = None
    labels: str = "coarse"  # or fine, for labels such as NUM:date
    separator: str | None = None  # between several labels in a column
    encoding: str = "auto"
    skip_bad: bool = False
    header: bool | None = None


class ExampleReader:
    """Reads texts and labels from a table, or from lines such as `NUM:date When was ...`."""

    of = "texts with labels"
    most: int | None = None  # rows to read, if not all

    def __init__(self, format: ExampleFormat):
        self.format = format
        self.several = format.separator is not None  # or as soon as a list of labels is read
        self.fine = lookup("labels", format.labels, FINENESS)
        if format.separator == "":
            raise UsageError("separator= is empty; give what stands between labels, such as ','")

    def read(self, path: Path, notes: list[str]) -> list[Example]:
        """Read a file; what the user should be told is added to the notes."""
        format = self.format
        table, faults = (
            Table(path, encoding=format.encoding),
            Faults(path, skip_bad=format.skip_bad),
        )
        found: list[Example] = []
        parse = None
        pairs = PairReader(path, columns=format.columns, header=format.header)
        for number, value, fault in table:
            if fault is not None:
                faults.bad(number, fault.what, fault.remedy)
            if value is None:
                continue
            parse = parse or self._parser(table, value, pairs)
            try:
                example = parse(value, number)
                if example is None:
                    continue
                text, labels = example[0].strip(), tuple(label.strip() for label in example[1])
                if not text:
                    raise BadRow("empty", "the text is empty", "fill it or remove the row")
                if not all(labels) or not (labels or self.several):
                    raise BadRow("empty", "the label is empty", "fill it or remove the row")
            except BadRow as bad:
                faults.bad(number, bad.what, bad.remedy)
                continue
            found.append(Example(text, tuple(dict.fromkeys(labels)), f"{path}:{number}"))
            if len(found) == self.most:
                break
        notes += [*table.notes, *faults.notes, *pairs.notes]
        texts, labels = len({e.text for e in found}), len({e.labels for e in found})
        swapped = 3 * texts <= len(found) < 2 * labels and len(found) >= 20
        if swapped and format.columns is None:
            raise UsageError(
                f"{path}: {labels:,} different labels for {texts:,} different texts; do the labels "
                "stand first? Set columns=, such as columns=2,1"
            )
        return found

    def _parser(self, table: Table, value: Any, pairs: PairReader) -> Callable[[Any, int], Any]:
        """Choose by the first row how rows are read."""
        if isinstance(value, dict):
            keys = KeyRow(pairs)
            return lambda value, number: self._keys(keys, value)
        if table.kind is None and len(value) == 1 and TREC.fullmatch(value[0].strip()):
            return self._trec
        cells = CellRow(pairs, table)
        return lambda value, number: self._cells(cells, value, number)

    def _cells(self, row: CellRow, cells: list[str], number: int) -> tuple[str, Any] | None:
        try:
            sides = row.read(cells, number)
        except BadRow as bad:
            remedy = "write text, TAB, label on each line, or set columns="
            raise BadRow(bad.kind, bad.what, remedy) from None
        if sides is None:
            return None
        text, label = sides
        separator = self.format.separator
        return text, [label] if separator is None else _parts(label, separator)

    def _trec(self, cells: list[str], number: int) -> tuple[str, Sequence[str]]:
        match = TREC.fullmatch("\t".join(cells).strip())
        if match is None:
            what = f"{cells[0][:40]!r} does not begin with a label such as NUM:date"
            raise BadRow("columns", what, "write LABEL:finer, a space, and the text")
        return match[3], [self.fine(f"{match[1]}:{match[2]}")]

    def _keys(self, row: KeyRow, value: dict[str, Any]) -> tuple[str, Sequence[str]]:
        if row.reader.columns:
            text, label = (key_path(key, value) for key in row.reader.columns)
        else:
            names = list(value)
            found = find_roles(["label" if name == "labels" else name for name in names])
            if found is None:
                told = ", ".join(names[:8]) or "none"
                remedy = 'write {"text": "...", "label": "..."} or set columns='
                raise BadRow("columns", f"no text and label among the keys {told}", remedy)
            text, label = ((names[i],) for i in found)
        labels = value.get(label[0]) if len(label) == 1 else None
        if isinstance(labels, list):
            self.several = True
            return row.side(value, text), [row.side({"label": one}, ("label",)) for one in labels]
        side = row.side(value, label)
        separator = self.format.separator
        return row.side(value, text), [side] if separator is None else _parts(side, separator)


def _parts(cell: str, separator: str) -> list[str]:
    return [part for part in cell.split(separator) if part.strip()]


# Words and tags

CONLLU = {"form": 1, "lemma": 2, "upos": 3, "xpos": 4, "feats": 5, "deprel": 7}
DOCUMENT = "-DOCSTART-"  # what begins a document in the files of CoNLL 2003
WORD_KEYS, TAG_KEYS = ("words", "tokens"), ("tags", "upos", "ner_tags", "labels")


@dataclass(frozen=True)
class SentenceFormat:
    """How words and tags stand in a file."""

    column: str | None = None  # upos unless told, or the last one
    encoding: str = "auto"
    skip_bad: bool = False
    columns: str | None = None  # of a table: the lists of words and of tags


class SentenceReader:
    """Reads words and tags from CoNLL-U, columns with blank lines between, or a table of lists."""

    of = "words with tags"
    several = False  # a word has one tag
    most: int | None = None  # sentences to read, if not all

    def __init__(self, format: SentenceFormat):
        self.format = format

    def read(self, path: Path, notes: list[str]) -> list[Sentence]:
        """Read a file; what the user should be told is added to the notes."""
        format = self.format
        table, faults = (
            Table(path, encoding=format.encoding),
            Faults(path, skip_bad=format.skip_bad),
        )
        keys = KeyRow(PairReader(path, columns=format.columns))
        found: list[Sentence] = []
        words: list[str] = []
        tags: list[str] = []
        start, bad, parse = 0, False, None

        def close() -> None:
            nonlocal bad
            if words and not bad:
                found.append(Sentence(tuple(words), tuple(tags), f"{path}:{start}"))
            words.clear()
            tags.clear()
            bad = False

        for number, value, fault in table:
            if len(found) == self.most:
                break
            if fault is None and value is None:
                close()
                continue
            try:
                if fault is not None:
                    raise BadRow(fault.kind, fault.what, fault.remedy)
                if isinstance(value, dict):
                    close()
                    start, row = number, _listed(keys, value)
                else:
                    line = "\t".join(value or ())
                    parse = parse or self._parser(path, line, notes)
                    row = parse(line, number)
                    start = start if words else number
                words += row[0]
                tags += row[1]
            except BadRow as wrong:
                if not bad:  # the rest of a bad sentence goes with it
                    faults.bad(number, wrong.what, wrong.remedy)
                bad = True
        close()
        notes += [*table.notes, *faults.notes]
        return found

    def _parser(
        self, path: Path, line: str, notes: list[str]
    ) -> Callable[[str, int], tuple[Sequence[str], Sequence[str]]]:
        """Choose by the file's name, or else by its first line, how lines are read."""
        suffix = stem_and_suffix(path)[1]
        if suffix == "conllu" or re.match(r"# |1(-\d+)?\t(?:[^\t]*\t){8}[^\t]*$", line):
            return _Conllu(self.format.column)
        return _Columns(self.format.column, path, line, notes)


class _Conllu:
    """Ten columns; lines of comments, of ranges of words and of empty nodes are passed over."""

    def __init__(self, column: str | None):
        self.name = (column or "upos").lower()
        known = {**CONLLU, **{str(n + 1): n for n in range(1, 10)}}
        self.at = lookup("column", self.name, known)

    def __call__(self, line: str, number: int) -> tuple[Sequence[str], Sequence[str]]:
        if line.startswith("#"):
            return (), ()
        cells = line.split("\t")
        if len(cells) != 10:
            what = f"{len(cells)} column{'s' if len(cells) > 1 else ''}, expected 10"
            raise BadRow("columns", what, "CoNLL-U has ten, with TABs between")
        if not cells[0].isdecimal():
            if re.fullmatch(r"\d+[-.]\d+", cells[0]):
                return (), ()
            raise BadRow("columns", f"{cells[0][:20]!r} is no number of a word", "mend the line")
        word, tag = cells[1].strip(), cells[self.at].strip()
        if not word or not tag or (tag == "_" and word != "_"):
            what = f"no word or no {self.name} in it"
            raise BadRow("empty", what, "fill it, or choose another column with column=")
        return (word,), (tag,)


class _Columns:
    """A word and its tag on each line, with TABs or spaces between."""

    def __init__(self, column: str | None, path: Path, line: str, notes: list[str]):
        self.tabs = "\t" in line
        self.count = len(self._cells(line))
        if self.count < 2 and not line.startswith(DOCUMENT):
            raise BadRow("columns", "1 column, expected 2", "write word, TAB, tag on each line")
        if column is not None and not (column.isdecimal() and 2 <= int(column) <= self.count):
            raise UsageError(
                f"{path}: column={column}; expected a number from 2 to {self.count}, "
                "the column of the tag"
            )
        if column is None and self.count > 2:
            notes.append(
                f"{path}: {self.count} columns, of which the last is taken for the tag; "
                "choose with column="
            )
        self.at = int(column) - 1 if column else self.count - 1

    def _cells(self, line: str) -> list[str]:
        return [cell.strip() for cell in line.split("\t")] if self.tabs else line.split()

    def __call__(self, line: str, number: int) -> tuple[Sequence[str], Sequence[str]]:
        if line.startswith(DOCUMENT):
            return (), ()
        cells = self._cells(line)
        if len(cells) != self.count:
            between = "TABs" if self.tabs else "spaces"
            what = f"{len(cells)} column{'s' if len(cells) > 1 else ''}, expected {self.count}"
            raise BadRow("columns", what, f"write as many on each line, with {between} between")
        word, tag = cells[0], cells[self.at]
        if not word or not tag:
            raise BadRow("empty", "no word or no tag in it", "fill it or remove the line")
        return (word,), (tag,)


def _listed(row: KeyRow, value: dict[str, Any]) -> tuple[Sequence[str], Sequence[str]]:
    sides: list[list[str]] = []
    named = row.reader.columns or (None, None)
    for name, keys in zip(named, (WORD_KEYS, TAG_KEYS), strict=True):
        key = next((key for key in ((name,) if name else keys) if key in value), None)
        if key is None or not isinstance(value[key], list):
            remedy = 'write {"words": ["A", "dog"], "tags": ["DET", "NOUN"]}, or set columns='
            raise BadRow("columns", f"no list of {name or keys[0]} in it", remedy)
        sides.append([row.side({key: one}, (key,)).strip() for one in value[key]])
    words, tags = sides
    if len(words) != len(tags):
        what = f"{len(words)} words, but {len(tags)} tags"
        raise BadRow("columns", what, "give each word one tag")
    if not words or not all(words) or not all(tags):
        raise BadRow("empty", "an empty word, tag or list", "fill it or remove the line")
    return words, tags


# The parts of a data folder


@dataclass
class Labelled(Generic[T]):
    """What each part holds, and what the user should be told."""

    parts: dict[str, list[T]]
    notes: list[str] = field(default_factory=list)
    split: Split = field(default_factory=Split)

    @property
    def sha(self) -> str:
        """Return a hash of what is trained and validated on."""
        return hash_items([item for name in ("train", "valid") for item in self.parts[name]])


def hash_items(items: Sequence[Any]) -> str:
    """Return a hash of texts or sentences with their labels."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item[:2]).encode() + b"\n")
    return digest.hexdigest()


def find_labelled(folder: Path) -> dict[str, list[Path]]:
    """Find the files of each part by their names, such as train.tsv or en-ud-train.conllu.xz."""
    files = [path for some in index_folder(folder).values() for path in some.values()]
    parts: dict[str, list[Path]] = {}
    for name, words in PARTS.items():
        pattern = re.compile(rf"(?:^|[._-])(?:{'|'.join(words)})(?:$|[._-])", re.IGNORECASE)
        parts[name] = [path for path in files if pattern.search(path.name)]
    return parts


def load_labelled(
    data: str,
    reader: Any,
    *,
    valid: str | None = None,
    test: str | None = None,
    need: Sequence[str] = ("train", "valid"),
    by: str = "text",
    trained: Split | None = None,
) -> Labelled[Any]:
    """Read the needed parts; without one for validation, some are split off train by hash.

    `valid` and `test` are files, or shares of train such as 0.1. Where texts are parts of others,
    split by="whole", or the answers are known from them. A model that was `trained` on the data is
    judged on what was held out.
    """
    lookup("valid_by", by, SPLITS)
    shares = shares_of(valid, test)
    files: dict[str, list[Path]] = {"train": [Path(data)]}
    home = Path(data).parent
    if is_folder(data):
        home = Path(data)
        files = find_labelled(home)
    elif not os.path.exists(data):
        raise UsageError(missing(Path(data)))
    elif len(need) == 1 and need[0] not in shares:
        files = {need[0]: [Path(data)]}  # only one part is wanted, and only one file given
    for name, given in (("valid", valid), ("test", test)):
        if name in shares:
            files[name] = []
        elif given:
            files[name] = [find_file(given, home, None, None).path]
    loaded: Labelled[Any] = Labelled({})

    def load(name: str) -> list[Any]:
        found = files.get(name, [])
        if not found:
            told = ", ".join(sorted(os.listdir(home))[:8]) if is_folder(data) else data
            raise UsageError(
                f"{data}: no {name} part; expected a file such as {name}.tsv; found {told}"
            )
        if len(found) > 1:
            told = ", ".join(path.name for path in found)
            raise UsageError(f"{data}: several files for {name} ({told}); name one with {name}=")
        items = reader.read(found[0], loaded.notes)
        if not items:
            why = f"; {loaded.notes[-1]}" if loaded.notes else ""
            raise UsageError(f"{found[0]}: no {reader.of} in it{why}")
        return items

    noted = trained.bounds if trained is not None else {}
    lacking = [name for name in ("valid", "test") if not files.get(name)]
    lacking = [name for name in lacking if name in shares or name in noted or name == "valid"]
    splitting = [name for name in lacking if name in (*need, *shares)]
    for name in need:
        if name not in splitting:
            loaded.parts[name] = load(name)
    if splitting:
        train = loaded.parts.get("train") or load("train")
        wanted = {name: shares.get(name) for name in splitting}
        found = split_rows({"train": train}, wanted, reader.of, loaded.notes, trained, by)
        for name in need:
            if name not in found[0] and name not in loaded.parts:
                raise UsageError(f"{data}: no {name} part; expected a file such as {name}.tsv")
        loaded.parts |= {name: found[0][name] for name in found[0] if name in (*need, *shares)}
        loaded.split = found[1]
    elif trained is not None and len(need) == 1:
        (name,) = need
        of = reader.of
        loaded.parts[name] = unseen(loaded.parts[name], name, trained, data, of, loaded.notes)
    if "train" in loaded.parts:
        loaded.split = loaded.split.noting(keys_of(loaded.parts["train"]))
    return loaded
