"""A look over data before it is trained on: what is wrong with it, where, and what to do.

Each file is read once and never given up for a bad line. What must be compared over the whole
of a part (copies, leaks, lengths) is kept as one number a row, so ten million pairs fit in memory.
"""

import os
import re
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.lines import Fault
from regard.data.pairs import PairFiles, PairReader, find_parts
from regard.data.split import fold, shares_of, usual_share
from regard.data.table import kind_of
from regard.errors import UsageError

LONG = 1_000  # characters of a line that is most likely no sentence
FEW_LABELS = 0.02  # fewer different targets than this share of the rows are labels, not texts
LEVELS = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    """One thing found: how bad, what, where first, and the remedy."""

    level: str  # error, warning or note
    what: str
    where: str
    remedy: str
    kind: str = ""
    count: int = 1


@dataclass
class Counts:
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


@dataclass
class ImageCounts:
    """The size of one part of a set of images, and what they are brought to."""

    images: int
    bad: int
    classes: dict[str, int]
    sizes: int  # how many different ones
    image: int
    channels: int
    total: int = 0  # how many there are, where not all were looked at

    def __str__(self) -> str:
        classes = f"{len(self.classes):,} class{'es' * (len(self.classes) != 1)}"
        return (
            f"{self.images:>10,} images of {classes}, "
            f"{'grey' if self.channels == 1 else 'colour'}, {self.image} x {self.image}"
            + (f" from {self.sizes:,} sizes" if self.sizes > 1 else "")
            + (f"; {self.total:,} in all" if self.total > self.images else "")
            + (f", {plural(self.bad, 'bad file')}" if self.bad else "")
        )


@dataclass
class Report:
    """What was found in a set of data: its parts, its languages and the findings, worst first."""

    data: str
    source: str | None = None
    target: str | None = None
    parts: Any = field(default_factory=dict)  # name -> its counts
    taken: str = ""  # for which task, and why
    findings: list[Finding] = field(default_factory=list)

    @property
    def healthy(self) -> bool:
        """Whether nothing was found that training would refuse."""
        return not any(finding.level == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain values for JSON."""
        return {**asdict(self), "healthy": self.healthy}

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
        told = [
            f"{tally[level]} {level}{'s' * (tally[level] > 1)}" for level in LEVELS if tally[level]
        ]
        return [*lines, ", ".join(told) or "nothing found"]


# What one row can show

# Level, what is said of the rows, and the remedy (that of the fault itself where it is empty).
KINDS = {
    "uneven": ("error", "the files are uneven", ""),
    "encoding": ("error", "not UTF-8", ""),
    "binary": ("error", "with NUL bytes", ""),
    "columns": ("error", "without both columns", ""),
    "json": ("error", "that are no good JSON", ""),
    "long": ("error", "over the longest line that is read", ""),
    "empty": ("error", "with an empty side", "fill them, or drop them with skip_bad=true"),
    "replaced": (
        "warning",
        "with U+FFFD, the mark of letters lost in a conversion",
        "convert the original again with its true encoding, or remove the rows",
    ),
    "garbled": (
        "warning",
        "that look like UTF-8 once read as Latin-1 (such as Ã¤ for ä)",
        "convert them back with: iconv -f utf-8 -t latin1 (or cp1252)",
    ),
    "control": (
        "warning",
        "with control characters or line separators",
        "remove them; they become pieces of the vocabulary",
    ),
    "invisible": (
        "note",
        "with invisible characters (zero-width space, soft hyphen, byte order mark)",
        "remove them; equal words look different to a model",
    ),
    "tab": ("note", "with a TAB inside the text", "make it a space"),
    "markup": (
        "note",
        "with HTML entities or tags",
        "turn them into plain text, unless the model is to write them",
    ),
    "very_long": (
        "warning",
        f"over {LONG:,} characters",
        "cut them into sentences; such rows are cut or left out in training",
    ),
    "untranslated": (
        "warning",
        "with the same text on both sides",
        "remove them, unless copying is what is to be learnt",
    ),
}
MARKS = {
    "replaced": "\ufffd",
    "garbled": "Ã[\u0080-\u00bf\u0152\u0153\u0160\u0161\u0178\u201c-\u201e]|â€|Â[\u00a0-\u00bf]",
    "control": "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]",
    "invisible": "[\u00ad\u200b\u2060\ufeff]",
    "tab": "\t",
    "markup": r"&(?:amp|lt|gt|quot|apos|nbsp|\#\d{1,6});|</?[a-z]{1,10}/?>",
}
# A single class of first letters is searched many times faster than the alternatives.
MAY_MARK = re.compile("[\x00-\x1f\x7f-\x9f\u00adÃâÂ&<\u200b\u2028\u2029\u2060\ufeff\ufffd]")
EACH_MARK = {name: re.compile(pattern) for name, pattern in MARKS.items()}

# Scripts by their letters; Han and kana are one, since Japanese mixes them.
SCRIPTS = {
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
SCRIPT_NAMES = list(SCRIPTS)
SCRIPT_RUN = re.compile("|".join(f"([{letters}]+)" for letters in SCRIPTS.values()))
LATIN = re.compile(f"[{SCRIPTS['Latin']}]")
NO_SCRIPT = 15


def scripts_of(text: str) -> int:
    """Return the main script of a text and, times 16, the main one beside Latin."""
    text = text[:200]
    if text.isascii():
        return (0 if LATIN.search(text) else NO_SCRIPT) + 16 * NO_SCRIPT
    sizes = [0] * len(SCRIPT_NAMES)
    for run in SCRIPT_RUN.finditer(text):
        # A word of other scripts has fewer letters, of Han one or two, so each weighs more.
        sizes[(run.lastindex or 1) - 1] += (run.end() - run.start()) * (
            3 if run.lastindex != 1 else 1
        )
    other = max(sizes[1:])
    second = sizes.index(other, 1) if other else NO_SCRIPT
    main = second if other >= sizes[0] else 0
    return main + 16 * second


class Rows:
    """One part of the data: numbers of every row, and the first of each fault with its count."""

    def __init__(self, name: str, part: PairFiles) -> None:
        self.name = name
        self.counts = Counts([str(file) for file in part.files])
        self.path = str(part.path)
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

    def read(self, reader: PairReader, part: PairFiles, most: int | None = None) -> None:
        """Read all or so many pairs, going on after every fault that leaves something to read."""
        counts = self.counts
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
                    if sizes[i] > LONG:
                        self._mark("very_long", files[i], line, text)
                    if MAY_MARK.search(text):
                        for kind, pattern in EACH_MARK.items():
                            if pattern.search(text):
                                self._mark(kind, files[i], line, text)
                if folded[0] == folded[1] and any(map(str.isalpha, folded[0])):
                    self._mark("untranslated", files[0], line, pair.source)
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
        counts.bad = reader.dropped
        counts.total = counts.pairs
        if counts.pairs == most:
            sizes = counts.source_characters + counts.target_characters
            counts.total = rows_about(part.path, counts.pairs, sizes, part.target_path)

    def _mark(self, kind: str, path: Path, line: int, text: str) -> None:
        self.add(Fault(kind, f"{path}:{line}", excerpt(text), ""))

    def at(self, index: int) -> str:
        """Return file and line of a row."""
        return f"{self.path}:{self.lines[index]}"

    def pair_hashes(self) -> np.ndarray:
        """Return one number for each pair, from those of its two sides."""
        sources, targets = as_numbers(self.sources), as_numbers(self.targets)
        # An odd factor, so that a pair and its reverse differ.
        return sources * np.uint64(0x9E3779B97F4A7C15) ^ targets

    def labels(self) -> bool:
        """Tell whether the targets are labels, by how few different ones there are."""
        different = len(np.unique(as_numbers(self.targets)))
        return self.counts.pairs >= 50 and different <= FEW_LABELS * self.counts.pairs


def as_numbers(hashes: array) -> np.ndarray:
    """Return hashes as unsigned numbers without copying them."""
    return np.frombuffer(hashes, np.int64).view(np.uint64) if hashes else np.zeros(0, np.uint64)


def excerpt(text: str, most: int = 60) -> str:
    """Return the start of a text with everything unprintable shown by its code."""
    short = text[:most] + ("…" if len(text) > most else "")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in short)


def plural(count: int, word: str) -> str:
    """Return a count with its word: 1 row, 2 rows."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def rows_about(path: Path, rows: int, characters: int, other: Path | None = None) -> int:
    """Return about how many rows a file has, from those that were read of it."""
    if kind_of(path) == "parquet" and path.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_metadata(path).num_rows
    if path.is_dir() or path.suffix in (".gz", ".xz"):
        return rows  # at least
    size = sum(os.path.getsize(file) for file in (path, other) if file)
    return max(rows, round(rows * size / max(1, characters + 2 * rows)))


def no_valid(rows: int) -> str:
    """Say what is split off where there is no validation part."""
    count = round(rows * usual_share(rows))
    return f"no validation part; about {count:,} of {rows:,} will be split off train by hash"


# What only many rows together can show


def row_findings(rows: Rows) -> list[Finding]:
    """Tell of each kind of faulty row once, with its count and the first line."""
    findings = []
    labelled = rows.labels()
    for (kind, path), (fault, count) in rows.faults.items():
        if kind == "unreadable":
            findings.append(Finding("error", fault.what, path, fault.remedy, kind, count))
            continue
        if kind == "untranslated" and labelled:
            continue
        level, said, remedy = KINDS[kind]
        if kind == "untranslated" and count <= 0.01 * rows.counts.pairs and rows.counts.pairs > 100:
            level = "note"  # names and exclamations are often the same in two languages
        if kind == "uneven":
            what = f"{said}: {fault.what}"
        else:
            what = f"{plural(count, 'row')} {said}; the first: {fault.what}"
        findings.append(Finding(level, what, fault.where, remedy or fault.remedy, kind, count))
    return findings


def copies(hashes: np.ndarray) -> tuple[np.ndarray, dict[int, int]]:
    """Return which rows repeat an earlier one, and for the first of them the earlier row."""
    if len(hashes) == 0:
        return np.zeros(0, bool), {}
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    original = first[inverse]
    repeats = original != np.arange(len(hashes))
    at = int(repeats.argmax())
    return repeats, {at: int(original[at])} if repeats.any() else {}


def copy_findings(rows: Rows) -> list[Finding]:
    """Tell of pairs, and of sources with another target, that are in the part twice."""
    findings = []
    repeated, first = copies(rows.pair_hashes())
    for row, original in first.items():
        share = repeated.mean()
        findings.append(
            Finding(
                "warning" if share > 0.01 else "note",
                f"{plural(int(repeated.sum()), 'pair')} of {rows.name} ({share:.1%}) repeated but "
                f"for case and space; the first repeats line {rows.lines[original]}",
                rows.at(row),
                "remove the copies, unless they are to count more",
                "duplicate_pair",
                int(repeated.sum()),
            )
        )
    again, _ = copies(as_numbers(rows.sources))
    other = again & ~repeated
    if other.any():
        count = int(other.sum())
        row = int(other.argmax())
        original = int((as_numbers(rows.sources) == as_numbers(rows.sources)[row]).argmax())
        findings.append(
            Finding(
                "note",
                f"{plural(count, 'source')} of {rows.name} ({other.mean():.1%}) there already with "
                f"another target; the first is that of line {rows.lines[original]}",
                rows.at(row),
                "nothing, if the targets are all good; else keep the best one",
                "duplicate_source",
                count,
            )
        )
    return findings


def leak_findings(earlier: Rows, later: Rows) -> list[Finding]:
    """Tell of rows of a later part (valid, test) that are in an earlier one (train) too."""
    findings = []
    both = np.isin(later.pair_hashes(), earlier.pair_hashes())
    source = np.isin(as_numbers(later.sources), as_numbers(earlier.sources)) & ~both
    for kind, word, shared in (("leak_pair", "pair", both), ("leak_source", "source", source)):
        if not shared.any():
            continue
        row = int(shared.argmax())
        ours = later.pair_hashes() if kind == "leak_pair" else as_numbers(later.sources)
        theirs = earlier.pair_hashes() if kind == "leak_pair" else as_numbers(earlier.sources)
        place = earlier.at(int((theirs == ours[row]).argmax()))
        alone = " (with another target)" if kind == "leak_source" else ""
        findings.append(
            Finding(
                "warning",
                f"{plural(int(shared.sum()), word)}{alone} of {later.name} ({shared.mean():.1%}) "
                f"also in {earlier.name}, but for case and space; the first is {place}",
                later.at(row),
                f"remove them from {earlier.name}, else scores on {later.name} are too good",
                kind,
                int(shared.sum()),
            )
        )
    return findings


def ratio_findings(rows: Rows, typical: tuple[float, float]) -> list[Finding]:
    """Tell of pairs one side of which is far too long for the other."""
    middle, bound = typical
    lengths = [np.frombuffer(side, np.int32) for side in rows.lengths]
    away = log_ratios(rows) - middle
    # Very short texts differ by much without anything being wrong.
    odd = (np.abs(away) > bound) & (np.maximum(*lengths) >= 20)
    if not odd.any():
        return []
    worst = int(np.where(odd, np.abs(away), 0).argmax())
    return [
        Finding(
            "warning",
            f"{plural(int(odd.sum()), 'pair')} of {rows.name} with lengths that do not fit (usual "
            f"ratio {np.exp(middle):.2f}); the worst has {lengths[0][worst]:,} to "
            f"{lengths[1][worst]:,} characters, the first is line {rows.lines[int(odd.argmax())]}",
            rows.at(worst),
            "look whether the sides belong together (a shifted line, a cut text); remove bad pairs",
            "length_ratio",
            int(odd.sum()),
        )
    ]


def log_ratios(rows: Rows) -> np.ndarray:
    """Return the logarithm of target length over source length of each pair."""
    source, target = (np.frombuffer(side, np.int32) for side in rows.lengths)
    return np.log((target + 2.0) / (source + 2.0))  # 2 keeps very short texts from the extremes


def usual_ratio(rows: Rows) -> tuple[float, float]:
    """Return the usual log ratio of lengths, and how far from it is too far."""
    ratios = log_ratios(rows)
    middle = float(np.median(ratios))
    spread = 1.4826 * float(np.median(np.abs(ratios - middle)))
    return middle, max(float(np.log(2.5)), 6 * spread)


def script_findings(rows: Rows) -> list[Finding]:
    """Tell of texts in another script than nearly all others on their side."""
    findings = []
    codes = [np.frombuffer(side, np.uint8) for side in rows.scripts]
    scripts = [side & 15 for side in codes]
    usual = [int(np.bincount(side[side != NO_SCRIPT], minlength=1).argmax()) for side in scripts]
    # A Chinese text may be mostly English names, but an English one is not mostly Chinese.
    strange = [
        (main != NO_SCRIPT) & (main != most) & (side >> 4 != most)
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
        findings.append(
            Finding("warning", what, rows.at(row), remedy, "swapped", int(swapped.sum()))
        )
    for side, name in enumerate(("source", "target")):
        odd = strange[side] & ~swapped
        # A side that is no single script anyway has no wrong one.
        if not odd.any() or strange[side].mean() > 0.2:
            continue
        row = int(odd.argmax())
        found = SCRIPT_NAMES[scripts[side][row]]
        what = (
            f"{plural(int(odd.sum()), name)} of {rows.name} in another script than "
            f"{SCRIPT_NAMES[usual[side]]}; the first in {found}"
        )
        remedy = "look whether it is the wrong language; remove such pairs"
        where = f"{paths[side]}:{rows.lines[row]}"
        findings.append(Finding("warning", what, where, remedy, "script", int(odd.sum())))
    return findings


def examine(
    data: str | Path,
    *,
    source: str | None = None,
    target: str | None = None,
    columns: str | Sequence[str | int] | None = None,
    valid: str | Path | None = None,
    test: str | Path | None = None,
    header: bool | None = None,
    most: int | None = None,
) -> Report:
    """Look over all parts of a set of data and report what is wrong, where, and the remedy.

    Of each part, only so many rows are looked at as `most` says.
    """
    shares = shares_of(valid, test)
    given = {"valid": valid, "test": test}
    named = {name: None if name in shares else path for name, path in given.items()}
    files = find_parts(data, source=source, target=target, **named)
    if not files:
        raise UsageError(f"{data}: no train, valid or test part in it; name a file of the folder")
    report = Report(str(data), source, target)
    counts: dict[str, Counts] = {}
    report.parts = counts
    parts: list[Rows] = []
    typical = None
    for name, part in files.items():
        reader = PairReader(
            part.path,
            target_path=part.target_path,
            columns=None if part.target_path else columns,
            header=header,
            source=report.source or part.source,
            target=report.target or part.target,
        )
        rows = Rows(name, part)
        rows.read(reader, part, most)
        report.source, report.target = reader.source, reader.target
        counts[name] = rows.counts
        parts.append(rows)
        found = row_findings(rows)
        if not rows.counts.pairs:
            remedy = "give one pair on each line, or set columns="
            found.append(Finding("error", "no pairs in it", rows.path, remedy, "no_pairs"))
        else:
            found += copy_findings(rows)
            if not rows.labels():
                # What is usual is settled by the first part, which is train.
                typical = typical or usual_ratio(rows)
                found += ratio_findings(rows, typical) + script_findings(rows)
        report.findings += found
    for earlier, later in combinations(parts, 2):
        # Two test sets may share what they like.
        if earlier.name in ("train", "valid"):
            report.findings += leak_findings(earlier, later)
    if "train" in files and "valid" not in (*files, *shares):
        what = no_valid(counts["train"].total)
        remedy = "nothing, or give your own with valid="
        report.findings.append(Finding("note", what, str(data), remedy, "no_valid"))
    report.findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return report
