"""A look over pairs of texts before they are trained on: what is wrong, where, and what to do.

Each file is read once and never given up for a bad line. What must be compared over the whole
of a part (copies, leaks, lengths) is kept as one number a row, so ten million pairs fit in memory.
"""

import re
from array import array
from dataclasses import dataclass
from itertools import combinations, islice
from pathlib import Path

import numpy as np

from regard.data.lines import Fault
from regard.data.marks import MARKS, excerpt, marks_in
from regard.data.pairs import PairFiles, PairReader, find_parts
from regard.data.split import fold, shares_and_files
from regard.errors import UsageError
from regard.examine.report import (
    PAIRS,
    USUAL,
    DataReport,
    Hashed,
    find_copies,
    find_leaks,
    rows_about,
)
from regard.modalities.base import ExamineOptions, plural

_LONG = 1_000  # characters of a line that is most likely no sentence
_FEW_LABELS = 0.02  # fewer different targets than this share of the rows are labels, not texts
_SAMPLE = 1000  # pairs to measure a training with


@dataclass
class PairCounts:
    """The size of one part."""

    files: list[str]
    pairs: int = 0
    bad: int = 0
    source_characters: int = 0
    target_characters: int = 0
    source_words: int = 0
    target_words: int = 0
    longest: int = 0  # characters of the longer side of the longest pair
    total: int = 0  # about how many there are, where not all were looked at

    def __str__(self) -> str:
        each = max(self.pairs, 1)
        return (
            f"{self.pairs:>10,} pairs  {self.source_characters / each:6.1f} and "
            f"{self.target_characters / each:.1f} characters on average, longest {self.longest:,}"
            + (f"; about {self.total:,} in all" if self.total > self.pairs else "")
            + (f", {self.bad:,} bad rows" if self.bad else "")
        )


# kind -> level, what is said of the rows, and the remedy (that of the fault itself where empty)
_KINDS = {
    **MARKS,
    "uneven": ("error", "the files are uneven", ""),
    "encoding": ("error", "not UTF-8", ""),
    "binary": ("error", "with NUL bytes", ""),
    "columns": ("error", "without both columns", ""),
    "json": ("error", "that are no good JSON", ""),
    "long": ("error", "over the longest line that is read", ""),
    "empty": ("error", "with an empty side", "fill them, or drop them with skip_bad=true"),
    "very_long": (
        "warning",
        f"over {_LONG:,} characters",
        "cut them into sentences; such rows are cut or left out in training",
    ),
    "untranslated": (
        "warning",
        "with the same text on both sides",
        "remove them, unless copying is what is to be learnt",
    ),
}
# Scripts by their letters; Han and kana are one, since Japanese mixes them.
_SCRIPTS = {
    "Latin": "A-Za-z\u00c0-\u024f\u1e00-\u1eff",
    "Greek": "\u0370-\u03ff",
    "Cyrillic": "\u0400-\u052f",
    "Hebrew": "\u0590-\u05ff",
    "Arabic": "\u0600-\u06ff\u0750-\u077f",
    "Indic": "\u0900-\u0dff",
    "Thai": "\u0e00-\u0e7f",
    "Han or kana": "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff",
    "Hangul": "\u1100-\u11ff\uac00-\ud7af",
}
SCRIPT_NAMES = list(_SCRIPTS)
_SCRIPT_RUN = re.compile("|".join(f"([{letters}]+)" for letters in _SCRIPTS.values()))
_LATIN = re.compile(f"[{_SCRIPTS['Latin']}]")
_NO_SCRIPT = 15


def scripts_of(text: str) -> int:
    """Return the main script of a text and, times 16, the main one beside Latin."""
    text = text[:200]
    if text.isascii():
        return (0 if _LATIN.search(text) else _NO_SCRIPT) + 16 * _NO_SCRIPT
    sizes = [0] * len(SCRIPT_NAMES)
    for run in _SCRIPT_RUN.finditer(text):
        # A word of other scripts has fewer letters, of Han one or two, so each weighs more.
        sizes[(run.lastindex or 1) - 1] += (run.end() - run.start()) * (
            3 if run.lastindex != 1 else 1
        )
    other = max(sizes[1:])
    second = sizes.index(other, 1) if other else _NO_SCRIPT
    main = second if other >= sizes[0] else 0
    return main + 16 * second


class PairRows:
    """One part of the data: numbers of every row, and the first of each fault with its count."""

    def __init__(self, name: str, part: PairFiles) -> None:
        self.name, self.part = name, part
        self.counts = PairCounts([str(file) for file in part.files])
        self.path = str(part.path)
        self.sample: list[dict[str, str]] = []
        self.lines = array("q")
        self.sources = array("q")  # hashes, which are enough to tell equal from different
        self.targets = array("q")
        self.lengths = (array("i"), array("i"))
        self.scripts = (array("B"), array("B"))
        self.faults: dict[tuple[str, str], tuple[Fault, int]] = {}

    def add(self, fault: Fault) -> None:
        """Count a fault, remembering the first of its kind in its file."""
        key = (fault.kind, fault.where.rpartition(":")[0])
        first, count = self.faults.get(key, (fault, 0))
        self.faults[key] = first, count + 1

    def read(self, reader: PairReader, most: int | None = None) -> None:
        """Read all or so many pairs, going on after every fault that leaves something to read."""
        counts, part = self.counts, self.part
        files = (part.path, part.target_path or part.path)
        reader.on_bad = self.add
        try:
            for pair in islice(reader, most):
                line = int(pair.where.rpartition(":")[2])
                sides = pair.source, pair.target
                folded = fold(pair.source), fold(pair.target)
                sizes = len(pair.source), len(pair.target)
                self.lines.append(line)
                self.sources.append(hash(folded[0]))
                self.targets.append(hash(folded[1]))
                for i, text in enumerate(sides):
                    self.lengths[i].append(sizes[i])
                    self.scripts[i].append(scripts_of(text))
                    if sizes[i] > _LONG:
                        self._mark("very_long", files[i], line, text)
                    for kind in marks_in(text):
                        self._mark(kind, files[i], line, text)
                if folded[0] == folded[1] and any(map(str.isalpha, folded[0])):
                    self._mark("untranslated", files[0], line, pair.source)
                if counts.pairs < _SAMPLE:
                    self.sample.append({"source": pair.source, "target": pair.target})
                counts.pairs += 1
                counts.source_characters += sizes[0]
                counts.target_characters += sizes[1]
                counts.source_words += folded[0].count(" ") + 1
                counts.target_words += folded[1].count(" ") + 1
                counts.longest = max(counts.longest, *sizes)
        except UsageError as mistake:
            # The file as a whole cannot be read any further; what was read still counts.
            path = next((f for f in counts.files if str(mistake).startswith(f)), self.path)
            what, _, remedy = str(mistake).removeprefix(f"{path}: ").partition("; ")
            fault = Fault("unreadable", path, what, remedy or "mend the file")
            self.faults["unreadable", path] = fault, 1
        counts.bad = reader.faults.count
        counts.total = counts.pairs
        if counts.pairs == most:
            counts.total = rows_about(part.path, counts.pairs, self.lines[-1])

    def _mark(self, kind: str, path: Path, line: int, text: str) -> None:
        self.add(Fault(kind, f"{path}:{line}", excerpt(text), ""))

    def at(self, index: int) -> str:
        """Return file and line of a row."""
        return f"{self.path}:{self.lines[index]}"

    def hashed(self) -> Hashed:
        """Return the hashes of the rows."""
        return Hashed(self.name, as_numbers(self.sources), as_numbers(self.targets), self.at)

    def labels(self) -> bool:
        """Tell whether the targets are labels, by how few different ones there are."""
        different = len(np.unique(as_numbers(self.targets)))
        return self.counts.pairs >= 50 and different <= _FEW_LABELS * self.counts.pairs


def as_numbers(hashes: array) -> np.ndarray:
    """Return hashes as unsigned numbers without copying them."""
    return np.frombuffer(hashes, np.int64).view(np.uint64) if hashes else np.zeros(0, np.uint64)


# What only many rows together can show


def find_faults(report: DataReport, rows: PairRows) -> None:
    """Tell of each kind of faulty row once, with its count and the first line."""
    labelled = rows.labels()
    for (kind, path), (fault, count) in rows.faults.items():
        if kind == "unreadable":
            report.add("error", kind, path, fault.what, fault.remedy, count)
            continue
        if kind == "untranslated" and labelled:
            continue
        level, said, remedy = _KINDS[kind]
        if kind == "untranslated" and count <= 0.01 * rows.counts.pairs and rows.counts.pairs > 100:
            level = "note"  # names and exclamations are often the same in two languages
        if kind == "uneven":
            what = f"{said}: {fault.what}"
        else:
            what = f"{plural(count, 'row')} {said}; the first: {fault.what}"
        report.add(level, kind, fault.where, what, remedy or fault.remedy, count)


def find_odd_lengths(report: DataReport, rows: PairRows, typical: tuple[float, float]) -> None:
    """Tell of pairs one side of which is far too long for the other."""
    middle, bound = typical
    lengths = [np.frombuffer(side, np.int32) for side in rows.lengths]
    away = log_ratios(rows) - middle
    # Very short texts differ by much without anything being wrong.
    odd = (np.abs(away) > bound) & (np.maximum(*lengths) >= 20)
    if not odd.any():
        return
    worst = int(np.where(odd, np.abs(away), 0).argmax())
    what = (
        f"{plural(int(odd.sum()), 'pair')} of {rows.name} with lengths that do not fit (usual "
        f"ratio {np.exp(middle):.2f}); the worst has {lengths[0][worst]:,} to "
        f"{lengths[1][worst]:,} characters, the first is line {rows.lines[int(odd.argmax())]}"
    )
    remedy = "look whether the sides belong together (a shifted line, a cut text); remove bad pairs"
    report.add("warning", "length_ratio", rows.at(worst), what, remedy, int(odd.sum()))


def log_ratios(rows: PairRows) -> np.ndarray:
    """Return the logarithm of target length over source length of each pair."""
    source, target = (np.frombuffer(side, np.int32) for side in rows.lengths)
    return np.log((target + 2.0) / (source + 2.0))  # 2 keeps very short texts from the extremes


def usual_ratio(rows: PairRows) -> tuple[float, float]:
    """Return the usual log ratio of lengths, and how far from it is too far."""
    ratios = log_ratios(rows)
    middle = float(np.median(ratios))
    spread = 1.4826 * float(np.median(np.abs(ratios - middle)))
    return middle, max(float(np.log(2.5)), 6 * spread)


def find_odd_scripts(report: DataReport, rows: PairRows) -> None:
    """Tell of texts in another script than nearly all others on their side."""
    codes = [np.frombuffer(side, np.uint8) for side in rows.scripts]
    scripts = [side & 15 for side in codes]
    usual = [int(np.bincount(side[side != _NO_SCRIPT], minlength=1).argmax()) for side in scripts]
    # A Chinese text may be mostly English names, but an English one is not mostly Chinese.
    strange = [
        (main != _NO_SCRIPT) & (main != most) & (side >> 4 != most)
        for main, side, most in zip(scripts, codes, usual, strict=True)
    ]
    swapped = strange[0] & strange[1] & (scripts[0] == usual[1]) & (scripts[1] == usual[0])
    paths = [rows.counts.files[0], rows.counts.files[-1]]
    if swapped.any():
        row = int(swapped.argmax())
        what = (
            f"{plural(int(swapped.sum()), 'pair')} of {rows.name} with the sides swapped, by script"
        )
        remedy = "swap them back, or remove them"
        report.add("warning", "swapped", rows.at(row), what, remedy, int(swapped.sum()))
    for side, name in enumerate(("source", "target")):
        odd = strange[side] & ~swapped
        # A side that is no single script anyway has no wrong one.
        if not odd.any() or strange[side].mean() > 0.2:
            continue
        row = int(odd.argmax())
        script = SCRIPT_NAMES[scripts[side][row]]
        what = (
            f"{plural(int(odd.sum()), name)} of {rows.name} in another script than "
            f"{SCRIPT_NAMES[usual[side]]}; the first in {script}"
        )
        remedy = "look whether it is the wrong language; remove such pairs"
        where = f"{paths[side]}:{rows.lines[row]}"
        report.add("warning", "script", where, what, remedy, int(odd.sum()))


def examine_pairs(
    data: str | Path,
    given: ExamineOptions = USUAL,
    *,
    source: str | None = None,
    target: str | None = None,
) -> DataReport:
    """Look over all parts of a set of pairs and report what is wrong, where, and the remedy.

    Of each part, only so many rows are looked at as `given.most` says.
    """
    shares, own = shares_and_files(given.valid, given.test)
    files = find_parts(data, source=source, target=target, **own)
    if not files:
        raise UsageError(f"{data}: no train, valid or test part in it; name a file of the folder")
    report = DataReport(str(data), source, target)
    parts: list[PairRows] = []
    typical = None
    for name, part in files.items():
        reader = part.reader(report.source, report.target, given.columns, header=given.header)
        rows = PairRows(name, part)
        rows.read(reader, given.most)
        report.source, report.target = reader.languages
        report.parts[name] = rows.counts
        parts.append(rows)
        find_faults(report, rows)
        if not rows.counts.pairs:
            remedy = "give one pair on each line, or set columns="
            report.add("error", "no_pairs", rows.path, "no pairs in it", remedy)
            continue
        find_copies(report, rows.hashed(), PAIRS)
        if not rows.labels():
            # What is usual is settled by the first part, which is train.
            typical = typical or usual_ratio(rows)
            find_odd_lengths(report, rows, typical)
            find_odd_scripts(report, rows)
    for earlier, later in combinations(parts, 2):
        # Two test sets may share what they like.
        if earlier.name in ("train", "valid"):
            find_leaks(report, earlier.hashed(), later.hashed(), PAIRS)
    report.sample = next((rows.sample for rows in parts if rows.name == "train"), None)
    return report.close((*files, *shares))
