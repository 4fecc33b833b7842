"""A look over texts with labels, words with tags, and plain texts before they are trained on."""

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.documents import (
    MOST_RUNNING,
    DocumentReader,
    blocks,
    find_texts,
    read_whole,
)
from regard.data.labelled import labelled_files
from regard.data.lines import opened_text
from regard.data.parts import given_files
from regard.data.split import hash_text, keys_of, shares_and_files
from regard.data.table import is_table
from regard.errors import UsageError
from regard.examine.report import ROWS, DataReport, Hashed, compare_parts, rows_about, size_about
from regard.modalities.base import ExamineOptions, odd_characters, plural

_FEW = 5  # rows of a label that can hardly be learnt from
_SAMPLE = 1000  # rows to measure a training with
_SAMPLE_TEXT = 200_000  # characters
MOST_READ = 5_000_000  # characters of a running text that are looked at, unless all are asked for


@dataclass
class RowCounts:
    """The size of one part."""

    rows: int
    of: str
    total: int  # about how many there are, where not all were looked at
    bad: int = 0
    characters: int = 0
    longest: int = 0
    labels: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        labels = f", {plural(len(self.labels), 'label')}" if self.labels else ""
        each = f", {self.characters / max(1, self.rows):,.1f} characters on average"
        each += f", longest {self.longest:,}"
        return (
            f"{self.rows:>10,} {self.of}{labels}"
            + ("" if self.of == "characters" else each)
            + (f"; about {self.total:,} in all" if self.total > self.rows else "")
            + (f", {self.bad:,} bad rows" if self.bad else "")
        )


def examine_rows(
    data: str, given: ExamineOptions, reader: Any, *, labelled: bool = True
) -> DataReport:
    """Look over texts with labels or words with tags, as a reader that drops bad rows has them.

    Unless `labelled`, the other column holds numbers.
    """
    shares, own = shares_and_files(given.valid, given.test)
    files = labelled_files(data, **own)
    if not files:
        raise UsageError(f"{data}: no train, valid or test part in it; name a file of the folder")
    report, parts = DataReport(data), {}
    for name, some in files.items():
        path, notes = some[0], []
        try:
            items = reader.read(path, notes)
        except UsageError as error:
            report.refused(path, error)
            continue
        bad = report.add_notes(path, notes)
        if not items:
            remedy = "give some, or set columns="
            report.add("error", "no_rows", path, f"no {reader.of} in it", remedy)
            continue
        sizes = [len(item.source) for item in items]
        whole = not reader.most or len(items) < reader.most
        last_line = int(items[-1].where.rpartition(":")[2])
        total = len(items) if whole else rows_about(path, len(items), last_line)
        counts = Counter(label for item in items if labelled for label in item[1])
        report.parts[name] = RowCounts(
            len(items), reader.of, total, bad, sum(sizes), max(sizes), dict(counts.most_common())
        )
        parts[name] = items
    hashed = [_hashed(name, items) for name, items in parts.items()]
    labels = {name: [(i.where, i[1]) for i in items] for name, items in parts.items()}
    compare_parts(report, hashed, ROWS, labels if labelled else None, _FEW, "one_label")
    if "train" in parts:
        report.sample = [_as_row(item) for item in parts["train"][:_SAMPLE]]
    return report.close((*files, *shares))


def _hashed(name: str, items: Sequence[Any]) -> Hashed:
    targets = np.array([hash_text("\t".join(item[1])) for item in items], np.uint64)
    return Hashed(name, np.array(keys_of(items), np.uint64), targets, lambda row: items[row].where)


def _as_row(item: Any) -> dict[str, Any]:
    """Return a row as training reads it from JSON lines."""
    row = dict(zip(item._fields[:2], item[:2], strict=True))
    if "labels" in row and len(row["labels"]) == 1:
        return {"text": row["text"], "label": row["labels"][0]}
    return row


class TextCounts:
    """Texts of a part that pass by: how many, how long, and the first of them."""

    def __init__(self, running: bool):
        self.running = running
        self.rows = self.size = self.longest = 0
        self.blank = True
        self.sample: list[str] = []

    def over(self, texts: Iterable[str]) -> Iterator[str]:
        """Yield texts, or blocks of a running one, and count them."""
        for text in texts:
            self.rows, self.size = self.rows + 1, self.size + len(text)
            self.longest = max(self.longest, self.size if self.running else len(text))
            self.blank = self.blank and not text.strip()
            if len(self.sample) < (1 if self.running else _SAMPLE):
                self.sample.append(text)
            yield text


def examine_texts(data: str, given: ExamineOptions) -> DataReport:
    """Look over running text or documents."""
    shares, own = shares_and_files(given.valid, given.test)
    files = find_texts(Path(data)) | given_files(data, own)
    report, most = DataReport(data), given.most
    for name, some in files.items():
        running, first = len(some) == 1 and not is_table(some[0]), some[0]
        counts = TextCounts(running)
        if running:
            texts = blocks(read_whole(first, MOST_RUNNING))
            if cut := most and first.is_file() and os.path.getsize(first) > MOST_READ:
                texts = _beginning(first)
        else:
            reader, cut = DocumentReader(some, given.columns, given.header), False
            texts = islice(reader.texts(), most or None)
        try:
            findings = list(odd_characters(counts.over(texts), str(first)))
        except UsageError as error:
            report.refused(str(error).partition(": ")[0], error)
            findings = []
        if counts.blank:
            remedy = "give a text file, or set columns="
            report.add("error", "no_text", first, "no text in it", remedy)
            continue
        rows, of = (counts.size, "characters") if running else (counts.rows, "documents")
        total = size_about(first)[0] if cut else rows
        if most and not running and rows >= most:
            total = rows_about(first, rows, rows)
        total = max(total, rows)
        report.parts[name] = RowCounts(rows, of, total, 0, counts.size, counts.longest)
        report.findings += findings
        if name == "train":
            documents = [{"text": text} for text in counts.sample]
            report.sample = counts.sample[0][:_SAMPLE_TEXT] if running else documents
    return report.close((*files, *shares))


def _beginning(path: Path) -> Iterator[str]:
    with opened_text(path) as file:
        yield file.read(MOST_READ).decode("utf-8", "ignore")
