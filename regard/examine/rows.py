"""A look over texts with labels, words with tags, and plain texts before they are learnt from."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from regard.data.documents import find_texts, read_texts
from regard.data.labelled import find_labelled
from regard.data.lines import missing, opened_text
from regard.data.parts import find_file
from regard.data.split import keys_of, shares_of
from regard.data.table import is_folder, is_table
from regard.errors import UsageError
from regard.examine.pairs import (
    EACH_MARK,
    KINDS,
    LEVELS,
    MAY_MARK,
    Finding,
    Report,
    excerpt,
    no_valid,
    plural,
    rows_about,
)

FEW = 5  # rows of a label that can hardly be learnt from
UNEVEN = 10  # times as many rows of one label as of another
MOST_READ = 5_000_000  # characters of a running text that are looked at, unless all are asked for
MEANT = "nothing, if that is meant"


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
        told = f"{self.rows:>10,} {self.of}"
        if self.labels:
            told += f", {plural(len(self.labels), 'label')}"
        each = self.characters / max(1, self.rows)
        return told + (
            f", {each:,.1f} characters on average, longest {self.longest:,}"
            + (f"; about {self.total:,} in all" if self.total > self.rows else "")
            + (f", {self.bad:,} bad rows" if self.bad else "")
        )


@dataclass(frozen=True)
class _Part:
    name: str
    path: str
    items: Sequence[Any]


def examine_rows(
    data: str, reader: Any, *, valid: str | None = None, test: str | None = None
) -> Report:
    """Look over texts with labels or words with tags, as a reader that drops bad rows has them."""
    files: dict[str, list[Path]] = {"train": [Path(data)]}
    home = Path(data) if is_folder(data) else Path(data).parent
    if is_folder(data):
        files = {name: some for name, some in find_labelled(home).items() if some}
    elif not os.path.exists(data):
        raise UsageError(missing(Path(data)))
    shares = shares_of(valid, test)
    for name, given in (("valid", valid), ("test", test)):
        if given and name not in shares:
            files[name] = [find_file(given, home, None, None).path]
    if not files:
        raise UsageError(f"{data}: no train, valid or test part in it; name a file of the folder")
    report, parts = Report(data), []
    counts: dict[str, RowCounts] = {}
    report.parts = counts
    for name, some in files.items():
        notes: list[str] = []
        try:
            items = reader.read(some[0], notes)
        except UsageError as refused:
            what, _, remedy = str(refused).removeprefix(f"{some[0]}: ").partition("; ")
            finding = Finding("error", what, str(some[0]), remedy or "mend the file", "unreadable")
            report.findings.append(finding)
            continue
        bad = 0
        for note in notes:
            dropped = " dropped; the first: " in note
            bad = int(note.split()[0].replace(",", "")) if dropped else bad
            first = note.partition(" the first: ")[2]
            what = first or note.removeprefix(f"{some[0]}: ")
            what = f"{plural(bad, 'bad row')}; the first: {what}" if dropped else what
            level, kind = ("error", "bad_rows") if dropped else ("note", "note")
            remedy = "mend them, or drop them with skip_bad=true" if dropped else MEANT
            report.findings.append(Finding(level, what, str(some[0]), remedy, kind, max(1, bad)))
        if not items:
            what, remedy = f"no {reader.of} in it", "give some, or set columns="
            report.findings.append(Finding("error", what, str(some[0]), remedy, "no_rows"))
            continue
        parts.append(_Part(name, str(some[0]), items))
        sizes = [len(item.source) for item in items]
        total = len(items)
        if reader.most and total >= reader.most:
            total = rows_about(some[0], total, sum(sizes))
        labels = Counter(label for item in items for label in item[1])
        counts[name] = RowCounts(
            len(items), reader.of, total, bad, sum(sizes), max(sizes), dict(labels.most_common())
        )
        report.findings += _copies(parts[-1])
    if "train" in counts:
        report.findings += _labels(data, counts)
    for earlier, later in combinations(parts, 2):
        report.findings += _leaks(earlier, later)
    if "train" in counts and "valid" not in (*files, *shares):
        what = no_valid(counts["train"].total)
        report.findings.append(Finding("note", what, data, "nothing, or give valid=", "no_valid"))
    report.findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return report


def _copies(part: _Part) -> list[Finding]:
    """Tell of texts that are in a part twice, with the same labels or with others."""
    first: dict[int, Any] = {}
    alike, torn = [], []
    for key, item in zip(keys_of(part.items), part.items, strict=True):
        earlier = first.setdefault(key, item)
        if earlier is not item:
            (alike if earlier[1] == item[1] else torn).append((item, earlier))
    found = []
    for kind, pairs, remedy in (
        ("duplicate", alike, "remove the copies, unless they are to count more"),
        ("torn_label", torn, "settle which labels are right"),
    ):
        if pairs:
            (item, earlier), share = pairs[0], len(pairs) / len(part.items)
            level = "warning" if share > 0.01 or kind == "torn_label" else "note"
            how = "with other labels" if kind == "torn_label" else "but for case and space"
            what = (
                f"{plural(len(pairs), 'row')} of {part.name} ({share:.1%}) there already {how}; "
                f"the first is that of {earlier.where}"
            )
            found.append(Finding(level, what, item.where, remedy, kind, len(pairs)))
    return found


def _leaks(earlier: _Part, later: _Part) -> list[Finding]:
    """Tell of rows of a later part that are in an earlier one too."""
    known = dict(zip(keys_of(earlier.items), earlier.items, strict=True))
    pairs = zip(keys_of(later.items), later.items, strict=True)
    shared = [(item, known[key]) for key, item in pairs if key in known]
    if not shared:
        return []
    what = (
        f"{plural(len(shared), 'row')} of {later.name} ({len(shared) / len(later.items):.1%}) also "
        f"in {earlier.name}, but for case and space; the first is {shared[0][1].where}"
    )
    remedy = f"remove them from {earlier.name}, else scores on {later.name} are too good"
    return [Finding("warning", what, shared[0][0].where, remedy, "leak", len(shared))]


def _labels(data: str, counts: dict[str, RowCounts]) -> list[Finding]:
    """Tell of labels that cannot be learnt, or hardly."""
    labels = counts["train"].labels
    if len(labels) < 2:
        what = f"only the label {next(iter(labels), '')!r:.40} in train"
        return [Finding("error", what, data, "give rows of two labels or more", "one_label")]
    found = []
    least, most = min(labels, key=labels.__getitem__), max(labels, key=labels.__getitem__)
    rare = [label for label, count in labels.items() if count < FEW]
    if rare:
        what = f"under {FEW} in train of {plural(len(rare), 'label')}, such as {least!r:.40}"
        remedy = "add some, join them with others, or begin from a trained model with init="
        found.append(Finding("warning", what, data, remedy, "rare_label", len(rare)))
    if labels[most] > UNEVEN * labels[least]:
        what = f"{labels[most]:,} of {most!r:.40} in train, {labels[least]:,} of {least!r:.40}"
        remedy = "judge by macro F1 rather than by accuracy, or even them out"
        found.append(Finding("note", what, data, remedy, "uneven_labels"))
    for name, part in counts.items():
        strange = [label for label in part.labels if label not in labels]
        if strange:
            what = f"{plural(len(strange), 'label')} of {name} not in train: {strange[0]!r:.40}"
            found.append(Finding("error", what, data, "mend them", "unknown_label", len(strange)))
    return found


def examine_texts(
    data: str,
    *,
    columns: str | None = None,
    header: bool | None = None,
    valid: str | None = None,
    test: str | None = None,
    most: int | None = None,
) -> Report:
    """Look over running text or documents."""
    files, shares = find_texts(Path(data)), shares_of(valid, test)
    for name, given in (("valid", valid), ("test", test)):
        if given and name not in shares:
            files[name] = [find_file(given, Path(data).parent, None, None).path]
    report = Report(data)
    counts: dict[str, RowCounts] = {}
    report.parts = counts
    for name, some in files.items():
        texts, total, running = [], 0, len(some) == 1 and not is_table(some[0])
        try:
            for path in some:
                size = os.path.getsize(path) if path.is_file() else 0
                if most and running and size > MOST_READ:
                    with opened_text(path) as file:
                        text = file.read(MOST_READ).decode("utf-8", "ignore")
                    texts.append(text)
                    total += size
                    continue
                for text in read_texts(path, columns, header):
                    texts.append(text)
                    total += len(text) if running else 1
                    if most and len(texts) >= most:
                        break
        except UsageError as refused:
            what, _, remedy = str(refused).partition("; ")
            where, _, what = what.partition(": ")
            report.findings.append(Finding("error", what, where, remedy or "mend it", "unreadable"))
        sizes = [len(text) for text in texts]
        if not sum(map(len, map(str.split, texts))):
            what, remedy = "no text in it", "give a text file, or set columns="
            report.findings.append(Finding("error", what, str(some[0]), remedy, "no_text"))
            continue
        if most and not running and len(texts) >= most:
            total = rows_about(some[0], len(texts), sum(sizes))
        rows, of = (sum(sizes), "characters") if running else (len(texts), "documents")
        counts[name] = RowCounts(rows, of, max(total, rows), 0, sum(sizes), max(sizes))
        report.findings += _marks(texts, str(some[0]))
    if "train" in counts and "valid" not in (*files, *shares):
        rows = counts["train"]
        what = no_valid(rows.total) if rows.of == "documents" else "no validation part; the last "
        what += "" if rows.of == "documents" else "tenth of the text is kept for it"
        report.findings.append(Finding("note", what, data, "nothing, or give valid=", "no_valid"))
    report.findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return report


def _marks(texts: Sequence[str], where: str) -> list[Finding]:
    """Tell of characters that no text should have."""
    seen: dict[str, tuple[str, int]] = {}
    lines = (line for text in texts for line in text.splitlines() if MAY_MARK.search(line))
    for line in lines:
        for kind, pattern in EACH_MARK.items():
            if kind != "tab" and pattern.search(line):
                first, count = seen.get(kind, (line, 0))
                seen[kind] = first, count + 1
    return [
        Finding(
            KINDS[kind][0],
            f"{plural(count, 'line')} {KINDS[kind][1]}; the first: {excerpt(first)}",
            where,
            KINDS[kind][2],
            kind,
            count,
        )
        for kind, (first, count) in seen.items()
    ]
