"""Pairs of texts, such as a sentence and its translation: from a table, or from aligned files.

Everything streams: a file is read once from front to back, and a fault is told with its file
and line, so that a bad line among ten million is found by its number.
"""

import hashlib
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast

from regard.data.columns import TwoColumns
from regard.data.lines import Fault, missing, scan_lines
from regard.data.parts import PARTS, Dataset, PartReader, index_folder, load_parts, no_part
from regard.data.split import RowSplitter, Split, key_of, shares_and_files
from regard.data.table import KINDS, BadRow, RowFaults, Table, is_folder, stem_and_suffix
from regard.data.text_rows import ReadRow, TextRows, read_rows
from regard.errors import UsageError


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
        self.path, self.target_path = path, target_path
        self.skip_bad = skip_bad
        self.on_bad = on_bad  # gets every fault; nothing is refused then
        self.columns = TwoColumns(path, columns, source, target, header)
        self.faults = RowFaults(path, skip_bad)
        if target_path is not None and self.columns.columns:
            raise UsageError(
                f"columns={','.join(self.columns.columns)} is for a table, but {path} and "
                f"{target_path} are aligned files; leave columns= out"
            )
        self.notes: list[str] = []
        self.read = 0  # rows that were read

    @property
    def files(self) -> list[Path]:
        """All files that are read."""
        if self.target_path is not None:
            return [Path(self.path), Path(self.target_path)]
        return Table(self.path).files

    def state(self) -> dict[str, Any]:
        """Where it is, what was dropped, and what is known of the columns by now."""
        dropped = {"count": self.faults.count, "first": self.faults.first}
        told = {"notes": self.notes, "languages": self.languages}
        return {"read": self.read, "dropped": dropped, **told}

    def rows(self, after: dict[str, Any] | None = None) -> Iterator[ReadRow]:
        """Yield the texts of each pair, its line, and the hash of its source."""
        for pair in self.pairs(after):
            line = int(pair.where.rpartition(":")[2])
            yield (pair.source, pair.target), line, key_of(pair.source)

    @property
    def languages(self) -> tuple[str | None, str | None]:
        """Languages of source and target, as far as they are known by now."""
        return self.columns.source, self.columns.target

    def __iter__(self) -> Iterator[Pair]:
        return self.pairs()

    def pairs(self, after: dict[str, Any] | None = None) -> Iterator[Pair]:
        """Yield each pair, from the first or after a state."""
        self.faults = RowFaults(self.path, self.skip_bad, self.on_bad)
        self.notes = self.columns.notes = []
        done = 0
        if after:
            done, dropped = after["read"], after["dropped"]
            self.faults.count, self.faults.first = dropped["count"], dropped["first"]
        yield from self._aligned(done) if self.target_path is not None else self._table(done)
        self.notes += self.faults.notes

    def _empty(self, number: int, what: str = "an empty line", path: Any = None) -> None:
        where = f"{path or self.path}:{number}"
        self.faults.add(Fault("empty", where, what, "fill it or remove the row"))

    def _aligned(self, done: int) -> Iterator[Pair]:
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
            shared = self.read = number = left[0]
            if number <= done:
                continue
            source, target = left[1], right[1]
            faults = [fault for fault in (left[2], right[2]) if fault]
            if not faults and not source.strip() and not target.strip():
                blank.append(number)
                continue
            for line in blank:
                self._empty(line)
            blank.clear()
            if faults:
                self.faults.add(*faults)
            elif not source.strip():
                self._empty(number, f"an empty line, but {theirs} has text there")
            elif not target.strip():
                self._empty(number, f"an empty line, but {ours} has text there", theirs)
            else:
                yield Pair(source, target, f"{ours}:{number}")

    def _table(self, done: int) -> Iterator[Pair]:
        """Read a table of any kind."""
        name, table = str(self.path), Table(self.path, skip=done)
        blank: list[int] = []
        for number, value, fault in table:
            self.read = table.count
            if table.count <= done:
                with suppress(BadRow):
                    if value:  # it tells which columns are read
                        self.columns.read(table, value)
                continue
            if fault:
                self.faults.add(fault)
                continue
            if value is None:
                blank.append(number)
                continue
            for empty in blank:
                self._empty(empty)
            blank.clear()
            try:
                sides = self.columns.read(table, value)
            except BadRow as bad:
                self.faults.add(bad.at(f"{name}:{number}"))
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


# The files of each part

_ENDS = ".tsv, .csv, .jsonl or .parquet"
_LANGUAGE_SUFFIX = re.compile(r"[A-Za-z]{2,3}([-_][A-Za-z0-9]{2,8})*|source|target")
_NO_LANGUAGE = frozenset(
    ["md", "log", "zip", "tar", "bz2", "zst", "py", "sh", "yml", "xml", "pt", "npy"]
)


@dataclass(frozen=True)
class PairFiles:
    """The file of one part of the data, or its two aligned files, and the languages if known."""

    path: Path
    target_path: Path | None = None
    source: str | None = None
    target: str | None = None

    @property
    def files(self) -> list[Path]:
        """The one or two files of the part."""
        return [self.path] if self.target_path is None else [self.path, self.target_path]

    def reader(
        self,
        source: str | None = None,
        target: str | None = None,
        columns: str | Sequence[str | int] | None = None,
        **settings: Any,
    ) -> PairReader:
        """Reader of the pairs; columns are those of a table."""
        return PairReader(
            self.path,
            target_path=self.target_path,
            columns=None if self.target_path else columns,
            source=source or self.source,
            target=target or self.target,
            **settings,
        )


def choose_files(
    files: dict[str, Path], source: str | None, target: str | None
) -> PairFiles | None:
    """Choose the file or the two aligned files of one stem, or None when it is not clear."""
    if source in files and target in files and source and target:
        return PairFiles(files[source], files[target], source, target)
    for kind in KINDS:
        if kind in files:
            return PairFiles(files[kind], None, source, target)
    suffixes = sorted(s for s in files if _LANGUAGE_SUFFIX.fullmatch(s) and s not in _NO_LANGUAGE)
    if len(suffixes) != 2:
        return None
    turned = source == suffixes[1] or target == suffixes[0]
    a, b = reversed(suffixes) if turned else suffixes
    fits = source in (None, a) and target in (None, b)
    return PairFiles(files[a], files[b], a, b) if fits else None


def find_pair_files(
    given: str | Path, folder: Path | None, source: str | None, target: str | None
) -> PairFiles:
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
                part = choose_files(index_folder(path.parent).get(stem, {}), source, target)
                if part is not None and part.target_path is not None:
                    return part
            return PairFiles(path, None, source, target)
        if len(halves) == 2 and all(os.path.isfile(half) for half in halves):
            ends = [stem_and_suffix(half)[1] for half in halves]
            a, b = (end if _LANGUAGE_SUFFIX.fullmatch(end) else None for end in ends)
            return PairFiles(halves[0], halves[1], source or a, target or b)
        if os.path.isdir(path.parent):
            files = index_folder(path.parent).get(path.name)
            part = choose_files(files, source, target) if files else None
            if part:
                return part
            if files:
                raise UsageError(which_languages(path.parent, files, source, target))
    raise UsageError(missing(Path(text) if folder is None else folder / text))


def which_languages(
    folder: Path, files: dict[str, Path], source: str | None, target: str | None
) -> str:
    """Error that lists the files found, where the two languages are unclear."""
    names = ", ".join(path.name for path in files.values())
    stem = stem_and_suffix(next(iter(files.values())))[0]
    if source and target:
        lacking = " and ".join(f"{stem}.{s}" for s in (source, target) if s not in files)
        return (
            f"{folder}: no {lacking}; found {names}; set from= and to= to suffixes that are there"
        )
    return f"{folder}: which languages? Found {names}; set from= and to=, such as from=en to=de"


def find_parts(
    data: str | Path,
    *,
    source: str | None = None,
    target: str | None = None,
    valid: str | Path | None = None,
    test: str | Path | None = None,
) -> dict[str, PairFiles]:
    """Find train, valid and test in a folder or file; further test files keep their own names."""
    if source and source == target:
        raise UsageError(f"from={source} to={target} are the same language; choose two")
    if not os.fspath(data):
        raise UsageError("data= is empty; give a folder or a file")
    folder = Path(data) if is_folder(data) else None
    parts: dict[str, PairFiles] = {}
    if folder is None:
        parts["train"] = find_pair_files(data, None, source, target)
        source, target = parts["train"].source, parts["train"].target
    given = {"valid": valid, "test": test}
    stems = index_folder(folder) if folder else {}
    for name, words in PARTS.items():
        if chosen := given.get(name):
            parts[name] = find_pair_files(chosen, folder or Path(data).parent, source, target)
        fits = [word for word in words if word in stems]
        pattern = re.compile(rf"(?:{'|'.join(words)})(?![a-z])", re.IGNORECASE)
        fits += sorted(stem for stem in stems if pattern.match(stem) and stem not in fits)
        files = {stem: choose_files(stems[stem], source, target) for stem in fits}
        usable = {stem: part for stem, part in files.items() if part}
        if fits and not usable and name not in parts and (name == "train" or "train" not in parts):
            raise UsageError(which_languages(cast(Path, folder), stems[fits[0]], source, target))
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
class Corpus(Dataset[Sequence[Pair]]):
    """The pairs of each part, and the languages as far as known."""

    source: str | None
    target: str | None
    files: dict[str, PairFiles] = field(default_factory=dict)

    @cached_property
    def sha(self) -> str:
        """A hash of the pairs that are trained and validated on."""
        digest = hashlib.sha256()
        for part in ("train", "valid"):
            for pair in _as_bytes(self.parts.get(part, ())):
                digest.update(pair)
            digest.update(b"\x02")
        return digest.hexdigest()

    def part_sha(self, part: str) -> str:
        """Hash of the pairs of one part."""
        digest = hashlib.sha256()
        for pair in _as_bytes(self.parts[part]):
            digest.update(pair)
        return digest.hexdigest()


def _as_bytes(pairs: Sequence[Pair]) -> Iterator[bytes]:
    if isinstance(pairs, TextRows) and pairs.change is None:
        return (b"%b\x00%b\x01" % pair for pair in pairs.raw())
    return (f"{pair.source}\x00{pair.target}\x01".encode(errors="replace") for pair in pairs)


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
    shares, given = shares_and_files(valid, test)
    files = find_parts(data, source=source, target=target, **given)
    files = {name: part for name, part in files.items() if name not in shares}
    corpus = Corpus({}, source, target, files)
    if not (source and target) and (first := next(iter(files.values()), None)) and first.source:
        if first.target_path is not None:
            corpus.notes.append(
                f"languages taken from the file names: from={first.source} to={first.target}"
            )
        corpus.source, corpus.target = first.source, first.target

    def read(name: str) -> TextRows[Pair]:
        part = files[name]
        languages = corpus.source, corpus.target
        reader = part.reader(*languages, columns, header=header, skip_bad=skip_bad)

        def pair(texts: list[str], line: int) -> Pair:
            return Pair(texts[0], texts[1], f"{part.path}:{line}")

        given = languages, reader.columns.columns, header, skip_bad
        pairs, state = read_rows(reader, pair, *given)
        corpus.source, corpus.target = state["languages"]
        corpus.notes.extend(state["notes"])
        if not pairs:
            why = reader.notes[-1] if reader.faults.count else "expected one on each line"
            raise UsageError(f"{part.path}: no pairs in it; {why}")
        return pairs

    def absent(name: str) -> str:
        known = corpus.source and corpus.target
        ends = f".{corpus.source} and .{corpus.target}" if known else _ENDS
        return no_part(data, name, f"{' or '.join(PARTS.get(name, (name,)))} with {ends}")

    load_parts(
        corpus,
        {name: PartReader(part.path, partial(read, name)) for name, part in files.items()},
        need=need,
        optional=("valid", "test") if "train" in need else (),
        shares=shares,
        absent=absent,
        where=data,
        splitter=RowSplitter("pairs"),
        unnamed=not is_folder(data),
        trained=trained,
    )
    others = [name for name in files if name not in (*PARTS, *need)]
    if others and {"train", "test"} & set(need) and test is None:
        chosen = stem_and_suffix(files["test"].path)[0] if "test" in files else None
        corpus.notes.append(
            f"testing on {chosen}; also there: {', '.join(others)} (choose with test=NAME)"
        )
    return corpus
