"""Texts with labels, and sentences with a tag for each word, from files."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.columns import TwoColumns, find_roles, key_path, parse_columns, text_at
from regard.data.lines import missing
from regard.data.parts import (
    Dataset,
    PartReader,
    given_files,
    load_parts,
    named_files,
    no_part,
    single_file,
)
from regard.data.split import RowSplitter, Split, shares_and_files
from regard.data.table import BadRow, RowFaults, Table, is_folder, stem_and_suffix
from regard.errors import UsageError, lookup

_AROUND = 6  # words shown on both sides of one


class Example(NamedTuple):
    """A text and its labels, with the file and line it came from."""

    text: str
    labels: tuple[str, ...]
    where: str

    @property
    def input(self) -> str:
        """Input of a model."""
        return self.text

    @property
    def source(self) -> str:
        """Text by whose hash rows are split."""
        return self.text

    @property
    def units(self) -> list[tuple[str, tuple[str, ...]]]:
        """Labelled units with their labels: the text itself."""
        return [(self.text, self.labels)]

    @property
    def number(self) -> float:
        """Number that is its label, or refuse."""
        try:
            (text,) = self.labels
            return float(text)
        except ValueError as error:
            raise UsageError(
                f"{self.where}: {','.join(self.labels)!r:.60} is not a number, which is what this "
                "model gives to a text"
            ) from error

    def excerpt(self, unit: int) -> str:
        """Text to show of a unit."""
        return self.text


class Sentence(NamedTuple):
    """Words and their tags, with the file and line they came from."""

    words: tuple[str, ...]
    tags: tuple[str, ...]
    where: str

    @property
    def input(self) -> list[str]:
        """Input of a model."""
        return list(self.words)

    @property
    def source(self) -> str:
        """Text by whose hash rows are split."""
        return " ".join(self.words)

    @property
    def units(self) -> list[tuple[str, tuple[str, ...]]]:
        """Labelled units with their labels: each word."""
        return [(word, (tag,)) for word, tag in zip(self.words, self.tags, strict=True)]

    def excerpt(self, unit: int) -> str:
        """Word in brackets between its neighbours."""
        before, after = self.words[max(0, unit - _AROUND) : unit], self.words[unit + 1 :]
        return " ".join([*before, f"[{self.words[unit]}]", *after[:_AROUND]])


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

    def __init__(self, format: ExampleFormat, most: int | None = None):
        """Take how rows stand in a file, and how many to read, if not all."""
        self.format, self.most = format, most
        self.several = format.separator is not None  # or as soon as a list of labels is read
        self.fine = lookup("labels", format.labels, FINENESS)
        if format.separator == "":
            raise UsageError("separator= is empty; give what stands between labels, such as ','")

    def read(self, path: Path, notes: list[str]) -> list[Example]:
        """Read a file; notes for the user are added."""
        format = self.format
        table = Table(path, encoding=format.encoding)
        faults = RowFaults(path, format.skip_bad)
        columns = TwoColumns(path, format.columns, header=format.header)
        examples: list[Example] = []
        parse = None
        for number, value, fault in table:
            if fault is not None:
                faults.add(fault)
            if value is None:
                continue
            parse = parse or self._parser(table, value, columns)
            try:
                example = parse(value)
                if example is None:
                    continue
                text, labels = example[0].strip(), tuple(label.strip() for label in example[1])
                if not text:
                    raise BadRow("empty", "the text is empty", "fill it or remove the row")
                if not all(labels) or not (labels or self.several):
                    raise BadRow("empty", "the label is empty", "fill it or remove the row")
            except BadRow as bad:
                faults.add(bad.at(f"{path}:{number}"))
                continue
            examples.append(Example(text, tuple(dict.fromkeys(labels)), f"{path}:{number}"))
            if len(examples) == self.most:
                break
        notes += [*table.notes, *faults.notes, *columns.notes]
        texts, labels = len({e.text for e in examples}), len({e.labels for e in examples})
        swapped = 3 * texts <= len(examples) < 2 * labels and len(examples) >= 20
        if swapped and format.columns is None:
            raise UsageError(
                f"{path}: {labels:,} different labels for {texts:,} different texts; do the labels "
                "stand first? Set columns=, such as columns=2,1"
            )
        return examples

    def _parser(self, table: Table, value: Any, columns: TwoColumns) -> Callable[[Any], Any]:
        """Choose by the first row how rows are read."""
        if isinstance(value, dict):
            return partial(self._keys, columns)
        if table.kind is None and len(value) == 1 and TREC.fullmatch(value[0].strip()):
            return self._trec
        return partial(self._cells, columns, table)

    def _cells(self, columns: TwoColumns, table: Table, cells: list[str]) -> tuple[str, Any] | None:
        try:
            sides = columns.read(table, cells)
        except BadRow as bad:
            remedy = "write text, TAB, label on each line, or set columns="
            raise BadRow(bad.kind, bad.what, remedy) from None
        return None if sides is None else (sides[0], self._labels(sides[1]))

    def _trec(self, cells: list[str]) -> tuple[str, Sequence[str]]:
        match = TREC.fullmatch("\t".join(cells).strip())
        if match is None:
            what = f"{cells[0][:40]!r} does not begin with a label such as NUM:date"
            raise BadRow("columns", what, "write LABEL:finer, a space, and the text")
        return match[3], [self.fine(f"{match[1]}:{match[2]}")]

    def _keys(self, columns: TwoColumns, value: dict[str, Any]) -> tuple[str, Sequence[str]]:
        if columns.columns:
            text, label = (key_path(key, value) for key in columns.columns)
        else:
            names = list(value)
            at = find_roles(["label" if name == "labels" else name for name in names])
            if at is None:
                remedy = 'write {"text": "...", "label": "..."} or set columns='
                keys = ", ".join(names[:8]) or "none"
                raise BadRow("columns", f"no text and label among the keys {keys}", remedy)
            text, label = ((names[i],) for i in at)
        labels = value.get(label[0]) if len(label) == 1 else None
        if isinstance(labels, list):
            self.several = True
            return text_at(value, text), [text_at({"label": one}, ["label"]) for one in labels]
        return text_at(value, text), self._labels(text_at(value, label))

    def _labels(self, cell: str) -> list[str]:
        """Labels of a cell, which may hold several."""
        separator = self.format.separator
        return [cell] if separator is None else [p for p in cell.split(separator) if p.strip()]


# Words and tags

_CONLLU = {"form": 1, "lemma": 2, "upos": 3, "xpos": 4, "feats": 5, "deprel": 7}
_DOCUMENT = "-DOCSTART-"  # what begins a document in the files of CoNLL 2003
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

    def __init__(self, format: SentenceFormat, most: int | None = None):
        """Take how rows stand in a file, and how many sentences to read, if not all."""
        self.format, self.most = format, most

    def read(self, path: Path, notes: list[str]) -> list[Sentence]:
        """Read a file; notes for the user are added."""
        table = Table(path, encoding=self.format.encoding)
        faults = RowFaults(path, self.format.skip_bad)
        columns = parse_columns(self.format.columns)
        sentences: list[Sentence] = []
        words: list[str] = []
        tags: list[str] = []
        start, bad, parse = 0, False, None

        def close() -> None:
            nonlocal bad
            if words and not bad:
                sentences.append(Sentence(tuple(words), tuple(tags), f"{path}:{start}"))
            words.clear()
            tags.clear()
            bad = False

        for number, value, fault in table:
            if len(sentences) == self.most:
                break
            if fault is None and value is None:
                close()
                continue
            try:
                if fault is not None:
                    raise BadRow(fault.kind, fault.what, fault.remedy)
                if isinstance(value, dict):
                    close()
                    start, row = number, _lists(columns, value)
                else:
                    line = "\t".join(value or ())
                    parse = parse or self._parser(path, line, notes)
                    row = parse(line)
                    start = start if words else number
                words += row[0]
                tags += row[1]
            except BadRow as wrong:
                if not bad:  # the rest of a bad sentence goes with it
                    faults.add(wrong.at(f"{path}:{number}"))
                bad = True
        close()
        notes += [*table.notes, *faults.notes]
        return sentences

    def _parser(
        self, path: Path, line: str, notes: list[str]
    ) -> Callable[[str], tuple[Sequence[str], Sequence[str]]]:
        """Choose by the file's name, or else by its first line, how lines are read."""
        suffix = stem_and_suffix(path)[1]
        if suffix == "conllu" or re.match(r"# |1(-\d+)?\t(?:[^\t]*\t){8}[^\t]*$", line):
            return _Conllu(self.format.column)
        return _Columns(self.format.column, path, line, notes)


class _Conllu:
    """Ten columns; lines of comments, of ranges of words and of empty nodes are passed over."""

    def __init__(self, column: str | None):
        self.name = (column or "upos").lower()
        known = {**_CONLLU, **{str(n + 1): n for n in range(1, 10)}}
        self.at = lookup("column", self.name, known)

    def __call__(self, line: str) -> tuple[Sequence[str], Sequence[str]]:
        if line.startswith("#"):
            return (), ()
        cells = line.split("\t")
        if len(cells) != 10:
            what = f"{len(cells)} column{'s' if len(cells) > 1 else ''}, expected 10"
            raise BadRow("columns", what, "CoNLL-U has ten, with TABs between")
        if not cells[0].isdecimal():
            if re.fullmatch(r"\d+[-.]\d+", cells[0]):
                return (), ()
            raise BadRow("columns", f"{cells[0][:20]!r} is not a word number", "mend the line")
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
        if self.count < 2 and not line.startswith(_DOCUMENT):
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

    def __call__(self, line: str) -> tuple[Sequence[str], Sequence[str]]:
        if line.startswith(_DOCUMENT):
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


def _lists(
    columns: tuple[str, str] | None, value: dict[str, Any]
) -> tuple[Sequence[str], Sequence[str]]:
    sides: list[list[str]] = []
    for name, keys in zip(columns or (None, None), (WORD_KEYS, TAG_KEYS), strict=True):
        key = next((key for key in ((name,) if name else keys) if key in value), None)
        if key is None or not isinstance(value[key], list):
            remedy = 'write {"words": ["A", "dog"], "tags": ["DET", "NOUN"]}, or set columns='
            raise BadRow("columns", f"no list of {name or keys[0]} in it", remedy)
        sides.append([text_at({key: one}, (key,)).strip() for one in value[key]])
    words, tags = sides
    if len(words) != len(tags):
        what = f"{len(words)} words, but {len(tags)} tags"
        raise BadRow("columns", what, "give each word one tag")
    if not words or not all(words) or not all(tags):
        raise BadRow("empty", "an empty word, tag or list", "fill it or remove the line")
    return words, tags


# The parts of a data folder


class Labelled(Dataset[list[Any]]):
    """The texts with labels, or sentences with tags, of each part."""

    @cached_property
    def sha(self) -> str:
        """A hash of what is trained and validated on."""
        names = [name for name in ("train", "valid") if name in self.parts] or list(self.parts)
        return hash_items([item for name in names for item in self.parts[name]])

    def part_sha(self, part: str) -> str:
        """Hash of the rows of one part."""
        return hash_items(self.parts[part])


def hash_items(items: Sequence[Any]) -> str:
    """Hash of texts or sentences with their labels."""
    digest = hashlib.sha256()
    for item in items:
        digest.update(json.dumps(item[:2]).encode() + b"\n")
    return digest.hexdigest()


def labelled_files(data: str | Path, **given: Any) -> dict[str, list[Path]]:
    """Find the files of each part in a folder or file, and those given for valid and test."""
    if not is_folder(data) and not os.path.exists(data):
        raise UsageError(missing(Path(data)))
    files = named_files(Path(data)) if is_folder(data) else {"train": [Path(data)]}
    return files | given_files(data, given)


def load_labelled(
    data: str,
    reader: Any,
    *,
    valid: str | None = None,
    test: str | None = None,
    need: Sequence[str] = ("train", "valid"),
    by: str = "text",
    trained: Split | None = None,
) -> Labelled:
    """Read the needed parts; without one for validation, some are split off train by hash.

    `valid` and `test` are files, or shares of train such as 0.1. Where texts are parts of others,
    split by="whole", or the answers are known from them. A model that was `trained` on the data is
    judged on what was held out.
    """
    splitter = RowSplitter(reader.of, by)
    shares, given = shares_and_files(valid, test)
    files = labelled_files(data, **given)
    loaded = Labelled({})

    def read(name: str) -> list[Any]:
        path = single_file(files[name], name, data)
        items = reader.read(path, loaded.notes)
        if not items:
            why = f"; {loaded.notes[-1]}" if loaded.notes else ""
            raise UsageError(f"{path}: no {reader.of} in it{why}")
        return items

    return load_parts(
        loaded,
        {n: PartReader(some[0], partial(read, n)) for n, some in files.items() if n not in shares},
        need=need,
        shares=shares,
        absent=lambda name: no_part(data, name, f"a file such as {name}.tsv"),
        where=data,
        splitter=splitter,
        unnamed=not is_folder(data),
        trained=trained,
    )
