"""What a look over data found: how bad, where first, how often, and the remedy."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.data.lines import opened
from regard.data.split import hash_text, usual_share
from regard.data.table import kind_of
from regard.errors import UsageError
from regard.modalities.base import MEANT, ExamineOptions, Finding, Modality, plural

_LEVELS = ("error", "warning", "note")
_COPIES = "remove the copies, unless they are to count more"
_MOST_COUNTED = 32 * 2**20  # bytes of a file in which lines are counted
_UNEVEN = 10  # times as many rows of one label as of another


USUAL = ExamineOptions()


@dataclass
class DataReport:
    """What was found in a set of data: its parts, its languages and the findings, worst first."""

    data: str
    source: str | None = None
    target: str | None = None
    parts: dict[str, Any] = field(default_factory=dict)  # name -> its counts
    taken: str = ""  # for which task, and why
    findings: list[Finding] = field(default_factory=list)
    sample: Any = None  # some rows of train, to measure a training with

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that training would refuse."""
        return not any(finding.level == "error" for finding in self.findings)

    def add(
        self, level: str, kind: str, where: str | Path, what: str, remedy: str, count: int = 1
    ) -> None:
        """Add a finding."""
        self.findings.append(Finding(level, what, str(where), remedy, kind, count))

    def refused(self, path: str | Path, error: UsageError) -> None:
        """Add that a file cannot be read."""
        what, _, remedy = str(error).removeprefix(f"{path}: ").partition("; ")
        self.add("error", "unreadable", path, what, remedy or "mend the file")

    def add_notes(
        self, path: str | Path, notes: Iterable[str], setting: str = "skip_bad=true"
    ) -> int:
        """Add what a reader that drops bad rows notes of a file, and return how many it dropped."""
        bad = 0
        for note in notes:
            count, _, first = note.partition(" dropped; the first: ")
            if not first:
                self.add("note", "note", path, note.removeprefix(f"{path}: "), MEANT)
                continue
            bad = int(count.split()[0].replace(",", ""))
            remedy = f"mend them, or drop them with {setting}"
            what = f"{plural(bad, 'bad row')}; the first: {first}"
            self.add("error", "bad_rows", path, what, remedy, bad)
        return bad

    def close(self, named: Iterable[str]) -> "DataReport":
        """Sort the findings, and note that a validation part will be split off if none is named."""
        if "train" in self.parts and "valid" not in named:
            rows = self.parts["train"].total
            what = f"about {round(rows * usual_share(rows)):,} of {rows:,} will be split off train"
            if getattr(self.parts["train"], "of", "") == "characters":
                what = "the last tenth of the text is kept for it"
            else:
                what += " by hash"
            remedy = "nothing, or give your own with valid="
            self.add("note", "no_valid", self.data, f"no validation part; {what}", remedy)
        self.findings.sort(key=lambda finding: _LEVELS.index(finding.level))
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        own = {
            "data": self.data,
            "source": self.source,
            "target": self.target,
            "parts": {name: asdict(part) for name, part in self.parts.items()},
            "taken": self.taken,
        }
        findings = [asdict(finding) for finding in self.findings]
        return {**own, "findings": findings, "healthy": self.healthy}

    def lines(self) -> list[str]:
        """Return the report as lines for a terminal."""
        languages = f" ({self.source} to {self.target})" if self.source and self.target else ""
        lines = [f"{self.data}{languages}"] + ([self.taken] if self.taken else [])
        width = max(map(len, self.parts), default=0)
        lines += [f"  {name:{width}}  {part}" for name, part in self.parts.items()]
        for finding in self.findings:
            lines.append(f"{finding.level}: {finding.where}: {finding.what}")
            lines.append(f"  remedy: {finding.remedy}")
        tally = Counter(finding.level for finding in self.findings)
        counts = [plural(tally[level], level) for level in _LEVELS if tally[level]]
        return [*lines, ", ".join(counts) or "nothing found"]


def rows_about(path: Path, rows: int, last_line: int) -> int:
    """Return about how many rows a file has, if the first so many end at a line."""
    if kind_of(path) == "parquet" and path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_metadata(path).num_rows
    if path.is_dir():
        return rows  # at least
    _, lines = size_about(path)
    return max(rows, round(rows * lines / max(1, last_line)))


def size_about(path: Path) -> tuple[int, int]:
    """Return about how many bytes and lines a text has, by its first bytes.

    Of a compressed file that is much larger it is at least so many.
    """
    with opened(path) as file:
        start = file.read(_MOST_COUNTED)
    size = max(len(start), os.path.getsize(path))
    return size, round(start.count(b"\n") * size / max(1, len(start)))


# What only many rows together show


class Wording(NamedTuple):
    """How copies of some kind of rows are told, within a part and in two."""

    row: str
    alike: str = ", but for case and space"
    source: str = "row"  # what a row is known by
    other: str = "other labels"
    level: str = "warning"  # of sources that are there twice with others
    remedy: str = "settle which labels are right; nothing can be learnt from both"
    # copies, sources with another target, the same in two parts (or any source, if the last is "")
    kinds: tuple[str, str, str, str] = ("duplicate", "torn_label", "leak", "")


PAIRS = Wording(
    "pair",
    source="source",
    other="another target",
    level="note",
    remedy="nothing, if the targets are all good; else keep the best one",
    kinds=("duplicate_pair", "duplicate_source", "leak_pair", "leak_source"),
)
ROWS = Wording("row")


def wording_of(inputs: Modality[Any], target: str) -> Wording:
    """Return how copies of files of a modality are told, of which a target is learnt."""
    one = inputs.one
    wording = Wording(one, "", one, kinds=(f"duplicate_{one}", "torn_label", f"leak_{one}", ""))
    if target != "text":
        return wording
    remedy = "settle what is said in it; nothing can be learnt from both"
    return wording._replace(other="another text", remedy=remedy)


class Hashed:
    """A part of which each row is known by two hashes: of its source, and of all of it."""

    def __init__(
        self, name: str, sources: np.ndarray, targets: np.ndarray, at: Callable[[int], str]
    ):
        """Take 64-bit hashes, and what says where a row is."""
        self.name, self.sources, self.at = name, sources, at
        # An odd factor, so that a pair and its reverse differ.
        self.whole = sources * np.uint64(0x9E3779B97F4A7C15) ^ targets

    @classmethod
    def of_items(cls, name: str, items: Sequence[Any]) -> "Hashed":
        """Take items that have a hash, one label each, and where they are."""
        sources = np.array([int(item.source[:16], 16) for item in items], np.uint64)
        known = [getattr(item, "text", "") or item.label for item in items]
        hashes = {target: hash_text(target) for target in set(known)}
        targets = np.array([hashes[target] for target in known], np.uint64)
        return cls(name, sources, targets, lambda row: items[row].where)


def _first_of(hashes: np.ndarray) -> np.ndarray:
    """Return for each row the first one that is equal to it."""
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    return first[inverse]


def find_copies(report: DataReport, part: Hashed, wording: Wording) -> None:
    """Find rows, and sources with another target, that are in the part twice."""
    first, again = _first_of(part.whole), _first_of(part.sources)
    rows = np.arange(len(first))
    copies, others = first != rows, (again != rows) & (first == rows)

    def tell(copied: np.ndarray, original: np.ndarray, level: str, kind: str, word: str) -> None:
        if count := int(copied.sum()):
            row = int(copied.argmax())
            how = wording.alike if copied is copies else f" with {wording.other}"
            what = (
                f"{plural(count, word)} of {part.name} ({copied.mean():.1%}) there already{how}; "
                f"the first is that of {part.at(int(original[row]))}"
            )
            remedy = wording.remedy if copied is others else _COPIES
            report.add(level, kind, part.at(row), what, remedy, count)

    many = len(rows) and copies.mean() > 0.01
    tell(copies, first, "warning" if many else "note", wording.kinds[0], wording.row)
    tell(others, again, wording.level, wording.kinds[1], wording.source)


def find_leaks(report: DataReport, earlier: Hashed, later: Hashed, wording: Wording) -> None:
    """Find rows of a later part (valid, test) that are in an earlier one (train) too."""

    def tell(
        leaked: np.ndarray, ours: np.ndarray, theirs: np.ndarray, kind: str, word: str
    ) -> None:
        if count := int(leaked.sum()):
            row = int(leaked.argmax())
            what = (
                f"{plural(count, word)} of {later.name} ({leaked.mean():.1%}) also in "
                f"{earlier.name}{wording.alike}; the first is "
                f"{earlier.at(int((theirs == ours[row]).argmax()))}"
            )
            remedy = f"remove them from {earlier.name}, else scores on {later.name} are too good"
            report.add("warning", kind, later.at(row), what, remedy, count)

    sources = np.isin(later.sources, earlier.sources)
    if not wording.kinds[3]:
        tell(sources, later.sources, earlier.sources, wording.kinds[2], wording.row)
        return
    whole = np.isin(later.whole, earlier.whole)
    tell(whole, later.whole, earlier.whole, wording.kinds[2], wording.row)
    word = f"{wording.source} (with {wording.other})"
    tell(sources & ~whole, later.sources, earlier.sources, wording.kinds[3], word)


def compare_parts(
    report: DataReport,
    hashed: Sequence[Hashed],
    wording: Wording,
    labels: Mapping[str, Sequence[tuple[str, Sequence[str]]]] | None = None,
    few: int = 0,
    alone: str = "one_class",
) -> None:
    """Find what is twice in a part or in two of them, and labels that can hardly be learnt."""
    for part in hashed:
        find_copies(report, part, wording)
    if labels and "train" in labels:
        find_labels(report, labels, wording.row, few, alone)
    for earlier, later in combinations(hashed, 2):
        find_leaks(report, earlier, later, wording)


def compare_items(
    report: DataReport, parts: Mapping[str, Sequence[Any]], wording: Wording, few: int
) -> None:
    """Compare parts of items that have a hash, a label, or none if `few` is 0, and their place."""
    hashed = [Hashed.of_items(name, items) for name, items in parts.items()]
    compare_parts(report, hashed, wording, labels_of(parts) if few else None, few)


def labels_of(parts: Mapping[str, Sequence[Any]]) -> dict[str, list[tuple[str, Sequence[str]]]]:
    """Return where each item of each part is, and its labels."""
    return {name: [(item.where, item.labels) for item in items] for name, items in parts.items()}


def find_labels(
    report: DataReport,
    parts: Mapping[str, Sequence[tuple[str, Sequence[str]]]],
    word: str,
    few: int,
    alone: str,
) -> None:
    """Find labels that cannot be learnt, or hardly, by where each row is and its labels.

    Of fewer rows than `few`, hardly anything is learnt; `alone` is the kind of a finding.
    """
    counts = Counter(label for _, labels in parts["train"] for label in labels)
    if len(counts) < 2:
        what = f"only the label {next(iter(counts), '')!r:.40} in train"
        report.add("error", alone, report.data, what, "give rows of two labels or more")
    for name, rows in parts.items():
        strange = [(at, one) for at, labels in rows for one in labels if one not in counts]
        if strange:
            where, label = strange[0]
            what = (
                f"{plural(len(strange), word)} of {name} under a label that train has not, such as "
                f"{label!r:.40}"
            )
            remedy = "add such rows to train, or mend or remove them"
            report.add("error", "unknown_label", where, what, remedy, len(strange))
    if len(counts) < 2:
        return
    (most, many), (least, least_count) = counts.most_common()[0], counts.most_common()[-1]
    if rare := [label for label, count in counts.items() if count < few]:
        labels = plural(len(rare), "label")
        what = f"fewer than {few} {word}s in train of {labels}, {least!r:.40} the least"
        remedy = "add some, join it with another label, or begin from a trained model with init="
        report.add("warning", "rare_label", report.data, what, remedy, len(rare))
    if many > _UNEVEN * least_count:
        what = f"{many:,} {word}s of {most!r:.40} in train, {least_count:,} of {least!r:.40}"
        remedy = "judge by macro F1 rather than by accuracy, or even them out"
        report.add("note", "uneven_labels", report.data, what, remedy)
