"""A look over texts with labels, words with tags, and plain texts before they are trained on."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.documents import find_texts, read_texts
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


def examine_texts(data: str, given: ExamineOptions) -> DataReport:
    """Look over running text or documents."""
    shares, own = shares_and_files(given.valid, given.test)
    files = find_texts(Path(data)) | given_files(data, own)
    report, most = DataReport(data), given.most
    for name, some in files.items():
        texts, total, running = [], 0, len(some) == 1 and not is_table(some[0])
        try:
            for path in some:
                size = os.path.getsize(path) if path.is_file() else 0
                if most and running and size > MOST_READ:
                    with opened_text(path) as file:
                        texts.append(file.read(MOST_READ).decode("utf-8", "ignore"))
                    total += size_about(path)[0]
                    continue
                for text in read_texts(path, given.columns, given.header):
                    texts.append(text)
                    total += len(text) if running else 1
                    if most and len(texts) >= most:
                        break
        except UsageError as error:
            report.refused(str(error).partition(": ")[0], error)
        if not any(map(str.strip, texts)):
            remedy = "give a text file, or set columns="
            report.add("error", "no_text", some[0], "no text in it", remedy)
            continue
        sizes = [len(text) for text in texts]
        if most and not running and len(texts) >= most:
            total = rows_about(some[0], len(texts), len(texts))
        rows, of = (sum(sizes), "characters") if running else (len(texts), "documents")
        report.parts[name] = RowCounts(rows, of, max(total, rows), 0, sum(sizes), max(sizes))
        report.findings += odd_characters(texts, str(some[0]))
        if name == "train":
            documents = [{"text": text} for text in texts[:_SAMPLE]]
            report.sample = texts[0][:_SAMPLE_TEXT] if running else documents
    return report.close((*files, *shares))
