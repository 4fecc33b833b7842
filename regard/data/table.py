"""Rows of named or numbered columns from any file: TSV, CSV, JSON lines, Parquet, Arrow, datasets.

A row is a list of cells or a mapping from keys to values. Text streams line by line; what is wrong
with a row is told with its file and line, and never stops the reading of the others.
"""

import csv
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.lines import (
    LONGEST_LINE,
    Fault,
    Recoded,
    encoding_of,
    opened,
    opened_text,
    scan_stream,
)
from regard.errors import UsageError

_HEADER_ROWS = 1000  # rows by which a header is known
_HEAD_SIZE = 4_000_000  # characters of them
_BATCH = 1000  # rows of an Arrow table made at once
_MOST_PACKED = 4 * 2**30  # bytes of a packed Parquet file, which is unpacked in memory
_DELIMITERS = {",": "commas", ";": "semicolons", "\t": "TABs", "|": "bars"}
_ALONE = "\x1f"  # parts nothing: the delimiter of a file with one column

Value = list[str] | dict[str, Any]


class BadRow(Exception):
    """A row that cannot be read; only its file and line are not known here."""

    def __init__(self, kind: str, what: str, remedy: str) -> None:
        self.kind, self.what, self.remedy = kind, what, remedy

    def at(self, where: str) -> Fault:
        """Fault with the file and line of the row."""
        return Fault(self.kind, where, self.what, self.remedy)


class RowFaults:
    """What is wrong with the rows of a file: refused, or counted if bad rows are to be dropped."""

    def __init__(
        self,
        path: str | Path,
        skip_bad: bool = False,
        on_bad: Callable[[Fault], None] | None = None,
        setting: str = "skip_bad=true",
    ):
        """Take what to do of bad rows, and the setting by which a user has them dropped."""
        self.path, self.skip_bad, self.on_bad, self.setting = path, skip_bad, on_bad, setting
        self.count, self.first = 0, ""

    def add(self, *faults: Fault) -> None:
        """Refuse a bad row, or count it; `on_bad` gets all its faults."""
        if self.on_bad:
            for fault in faults:
                self.on_bad(fault)
        elif not self.skip_bad:
            raise UsageError(f"{faults[0].message}; or drop such rows with {self.setting}")
        self.first = self.first or faults[0].message
        self.count += 1

    @property
    def notes(self) -> list[str]:
        """Note on what was dropped."""
        if not self.count:
            return []
        rows = f"{self.count:,} bad row{'s' if self.count > 1 else ''}"
        return [f"{rows} of {self.path} dropped; the first: {self.first}"]


class TableRow(NamedTuple):
    """A row with the number of its line, or of itself where there are no lines.

    It has no value if it is blank or at fault.
    """

    number: int
    value: Value | None
    fault: Fault | None = None


class Table:
    """The rows of one file (or of a saved dataset's folder), one at a time as they are read.

    Those up to `skip` need not be parsed: only the first of them come, by which columns are known.
    `count` is how many have come or were skipped.
    """

    def __init__(self, path: str | Path, *, encoding: str = "utf-8", skip: int = 0):
        self.path = Path(path)
        self.skip, self.count, self.read = skip, 0, 0
        self.notes: list[str] = []
        self.head: list[TableRow] = []  # the first rows, once reading has begun
        self.kind = kind_of(self.path)
        self.encoding = encoding
        if encoding == "auto":
            text = self.kind in (None, "tsv", "csv", "jsonl")
            self.encoding = encoding_of(self.path) if text else "utf-8"
            if self.encoding != "utf-8":
                name = {"latin1": "Latin-1", "cp1252": "Windows' cp1252"}[self.encoding]
                self.notes.append(
                    f"{path}: not UTF-8, so read as {name}; give encoding=utf-8 to refuse it"
                )

    def __iter__(self) -> Iterator[TableRow]:
        rows = _READERS.get(self.kind or "", _lines)(self)
        size, self.head, self.read = 0, [], 0
        for row in rows:
            self.head.append(row)
            size += sum(map(len, row.value)) if isinstance(row.value, list) else 0
            if len(self.head) == _HEADER_ROWS or size > _HEAD_SIZE:
                break
        for place, row in enumerate(self.head, 1):
            self.count = place
            yield row
        for row in rows:
            self.count = self.read
            yield row

    def skips(self, number: int) -> bool:
        """True if row n, counted from 1, is not wanted."""
        return _HEADER_ROWS < number <= self.skip

    def where(self, number: int) -> str:
        """File and line of a row."""
        return f"{self.path}:{number}"

    def cells(self) -> list[list[str]]:
        """First rows that are cells."""
        return [row.value for row in self.head if isinstance(row.value, list)]

    @property
    def files(self) -> list[Path]:
        """All files that the rows, and the names of their labels, are read from."""
        if is_saved(self.path):
            about = self.path / "dataset_info.json"
            beside = [self.path / "state.json", *([about] if about.is_file() else [])]
            return [*saved_files(self.path), *beside]
        return shards(self.path)


# What a file is

# The suffixes of files that hold rows, in the order of preference.
KINDS: dict[str, str | None] = {
    "tsv": "tsv",
    "tab": "tsv",
    "jsonl": "jsonl",
    "ndjson": "jsonl",
    "json": "jsonl",
    "txt": None,
    "csv": "csv",
    "parquet": "parquet",
    "arrow": "arrow",
    "feather": "arrow",
}
_MAGIC = {b"PAR1": "parquet", b"ARRO": "arrow"}
SHARD = re.compile(r"-(\d{5})-of-(\d{5})$")  # of a set that was cut into several files


def stem_and_suffix(path: str | Path) -> tuple[str, str]:
    """Split a file name into stem and suffix, leaving .gz and .xz out of account."""
    name = Path(path).name.removesuffix(".gz").removesuffix(".xz")
    stem, dot, suffix = name.rpartition(".")
    return (stem, suffix) if dot and stem else (name, "")


def kind_of(path: Path) -> str | None:
    """Kind of rows in a file, by its first bytes or its name; None if its lines must decide."""
    if is_saved(path):
        return "arrow"
    kind = KINDS.get(stem_and_suffix(path)[1].lower())
    if os.path.isfile(path) and kind != "arrow":
        with opened(path) as file:
            kind = _MAGIC.get(file.read(4), kind)
    return kind


def is_table(path: Path) -> bool:
    """True if a file surely holds rows rather than running text."""
    return kind_of(path) is not None


def is_saved(path: str | Path) -> bool:
    """True if a folder is a set that Hugging Face's datasets has saved."""
    return os.path.isfile(os.path.join(path, "state.json"))


def is_folder(path: str | Path) -> bool:
    """True if a path is a folder of files, and not of one saved set."""
    return os.path.isdir(path) and not is_saved(path)


def shards(path: Path) -> list[Path]:
    """All files of a set that was cut into several, of which the first stands for all."""
    stem, suffix = stem_and_suffix(path)
    shard = SHARD.search(stem)
    if shard is None or int(shard[1]):
        return [path]
    end = path.name[len(stem) :]
    names = [f"{stem[: shard.start()]}-{n:05}-of-{shard[2]}{end}" for n in range(int(shard[2]))]
    for name in names:
        if not (path.parent / name).is_file():
            raise UsageError(
                f"{path.parent / name}: no such file, but {path.name} says it is there"
            )
    return [path.parent / name for name in names]


# Rows that are lines

_LIKE_JSON = re.compile(r'\s*\{\s*["}]')


def parse_tsv(line: str, number: int) -> Value:
    """Cells of a line."""
    return line.split("\t")


def parse_json(line: str, number: int) -> Value:
    """Object that a line holds."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        if number == 1 and line.lstrip().startswith("["):
            remedy = "make it one object a line with: jq -c '.[]'"
            raise BadRow("json", "one JSON array", remedy) from None
        what = getattr(error, "msg", "too deep or too large")
        place = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        raise BadRow("json", f"not JSON ({what}{place})", "mend the line") from None
    if not isinstance(value, dict):
        what = f"a JSON {type(value).__name__}, expected an object"
        raise BadRow("json", what, 'write {"source": "...", "target": "..."}')
    return value


def _lines(table: Table) -> Iterator[TableRow]:
    """Read rows that are lines, of TSV or JSON by the file's name or else by its first line."""
    parse = {"tsv": parse_tsv, "jsonl": parse_json}.get(table.kind or "")
    first = True
    for path in shards(table.path):
        with opened_text(path, table.encoding) as file:
            lines = scan_stream(file, str(path))
            if isinstance(file, Recoded) and file.encoding == "utf-16" and parse is not parse_json:
                yield from _records(table, lines, "\t")  # as Excel saves it, with its quotes
                continue
            for number, line, fault in lines:
                table.read += 1
                if table.skips(table.read):
                    continue
                if fault or not line.strip():
                    yield TableRow(number, None, fault)
                    continue
                if first and parse is not parse_json:
                    json_ = _LIKE_JSON.match(line) and (parse is None or "\t" not in line)
                    parse = parse_json if json_ else parse_tsv
                first = False
                try:
                    yield TableRow(number, parse(line, number))  # type: ignore[misc]
                except BadRow as bad:
                    yield TableRow(number, None, bad.at(f"{path}:{number}"))


# CSV


def _csv(table: Table) -> Iterator[TableRow]:
    """Read comma-separated values; what parts the columns is told by the first rows."""
    for path in shards(table.path):
        with opened_text(path, table.encoding) as file:
            lines = scan_stream(file, str(path))
            head = list(islice(lines, 200))
            named = re.fullmatch(r"sep=([^\w\s]|\t)", head[0][1]) if head else None
            if named:  # as Excel writes and reads it
                head.pop(0)
            delimiter = named[1] if named else _delimiter(path, head, whole=len(head) < 200)
            if delimiter != _ALONE:
                name = _DELIMITERS.get(delimiter, repr(delimiter))
                table.notes.append(f"{path}: CSV with {name} between columns")
            yield from _records(table, chain(head, lines), delimiter)


def _delimiter(path: Path, head: Sequence[tuple[int, str, Fault | None]], whole: bool) -> str:
    """Choose what parts columns: that by which nearly all rows have the same number, over one."""
    shares: dict[str, float] = {}
    first: list[int] = []
    csv.field_size_limit(4 * LONGEST_LINE)  # rows are bounded before cells are
    for delimiter in _DELIMITERS:
        text = (line + "\n" for _, line, fault in head if fault is None)
        try:
            rows = [row for row in csv.reader(text, delimiter=delimiter) if any(row)]
        except csv.Error:
            continue
        rows = rows if whole else rows[:-1]  # the last may be cut short
        counts = Counter(map(len, rows))
        first.append(len(rows[0]) if rows else 1)
        (width, often), *_ = counts.most_common(1) or [(1, 0)]
        if width > 1:
            shares[delimiter] = often / len(rows)
    if not shares or max(first) == 1:
        return _ALONE
    best = [delimiter for delimiter in shares if shares[delimiter] == max(shares.values())]
    if len(best) > 1 or shares[best[0]] < 0.5:
        names = " or ".join(_DELIMITERS[delimiter] for delimiter in best)
        raise UsageError(
            f"{path}: whether {names} part its columns is not clear; write sep={best[0]} as its "
            "first line, or put quotes around the cells"
        )
    return best[0]


class _Feed:
    """Lines for the reader of CSV, which may take several for one row."""

    def __init__(self, lines: Iterator[tuple[int, str, Fault | None]]):
        self.lines = lines
        self.begin()

    def begin(self) -> None:
        """Begin a row."""
        self.number, self.size, self.fault = 0, 0, None

    def __iter__(self) -> "_Feed":
        return self

    def __next__(self) -> str:
        number, text, fault = next(self.lines)
        self.number = self.number or number
        self.fault = self.fault or fault
        self.size += len(text)
        if self.size > LONGEST_LINE and self.fault is None:
            raise csv.Error(f"a row of over {LONGEST_LINE:,} characters; is a quote not closed?")
        return ("" if fault else text) + "\n"


def _records(
    table: Table, lines: Iterator[tuple[int, str, Fault | None]], delimiter: str
) -> Iterator[TableRow]:
    """Read rows whose cells may be quoted, and then hold line ends."""
    csv.field_size_limit(4 * LONGEST_LINE)  # rows are bounded before cells are
    feed = _Feed(lines)
    reader = csv.reader(feed, delimiter=delimiter, strict=True)
    width = 0
    while True:
        feed.begin()
        table.read += 1
        try:
            cells = next(reader, None)
            if cells is not None and width and table.skips(table.read):
                continue
        except csv.Error as error:
            if table.skips(table.read):
                continue
            what = f"not CSV ({str(error).replace(chr(10), ' ')})"
            remedy = 'write a cell with a quote in it as "a ""quote"""'
            fault = feed.fault or Fault("columns", table.where(feed.number), what, remedy)
            yield TableRow(feed.number, None, fault)
            continue
        if cells is None:
            return
        if feed.fault or not any(cell.strip() for cell in cells):
            yield TableRow(feed.number, None, feed.fault)
            continue
        width = width or len(cells)
        if len(cells) > width and not any(cells[width:]):
            cells = cells[:width]
        if len(cells) != width:
            what = f"{len(cells)} column{'s' * (len(cells) > 1)}, expected {width}"
            name = _DELIMITERS.get(delimiter, repr(delimiter))
            remedy = f"put quotes around cells with {name} in them"
            yield TableRow(
                feed.number, None, Fault("columns", table.where(feed.number), what, remedy)
            )
            continue
        yield TableRow(feed.number, cells)


# Parquet and Arrow


_DAMAGE = (ValueError, RuntimeError, KeyError, TypeError, OverflowError, SystemError, MemoryError)


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise UsageError(
            "Parquet and Arrow need pyarrow: pip install 'regard[arrow]'; or save the data as CSV "
            "or JSON lines"
        ) from None
    return pyarrow


@contextmanager
def _bytes_of(path: Path) -> Iterator[Any]:
    """Give pyarrow a file to read: as it lies on disk, or unpacked."""
    arrow = _arrow()
    with opened(path) as file:
        plain = isinstance(getattr(file, "raw", None), FileIO)
        data = b"" if plain else file.read(_MOST_PACKED + 1)
    if len(data) > _MOST_PACKED:
        raise UsageError(f"{path}: over {_MOST_PACKED >> 30} GB unpacked; unpack it on disk")
    with arrow.memory_map(os.fspath(path)) if plain else arrow.BufferReader(data) as source:
        yield source


def _parquet(table: Table) -> Iterator[TableRow]:
    """Read the rows of Parquet files."""
    _arrow()
    from pyarrow import parquet

    def batches(source: Any) -> tuple[Any, Iterator[Any]]:
        file = parquet.ParquetFile(source)
        return file.schema_arrow, file.iter_batches(_BATCH)

    yield from _columnar(table, shards(table.path), batches)


def _ipc(table: Table) -> Iterator[TableRow]:
    """Read the rows of Arrow files or streams, such as those of a saved dataset."""
    ipc = _arrow().ipc

    def batches(source: Any) -> tuple[Any, Iterator[Any]]:
        start = source.read(6)
        source.seek(0)
        if start == b"ARROW1":
            file = ipc.open_file(source)
            parts = (file.get_batch(n) for n in range(file.num_record_batches))
        else:
            file = ipc.open_stream(source)
            parts = iter(file)
        cut = (part.slice(at, _BATCH) for part in parts for at in range(0, part.num_rows, _BATCH))
        return file.schema, cut

    files = saved_files(table.path) if is_saved(table.path) else shards(table.path)
    yield from _columnar(table, files, batches)


def saved_files(folder: Path) -> list[Path]:
    """Files of a set that datasets has saved, in their order."""
    path = folder / "state.json"
    try:
        state = json.loads(path.read_bytes()[: 2**24])
        names = [str(row["filename"]) for row in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(f"{path}: no list of data files in it; save the set again") from None
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise UsageError(f"{path}: names {name!r:.60}, which is not a file beside it")
    if not names:
        raise UsageError(f"{path}: names no data file; save the set again")
    return [folder / name for name in names]


def _columnar(
    table: Table, files: Sequence[Path], batches: Callable[[Any], tuple[Any, Iterator[Any]]]
) -> Iterator[TableRow]:
    arrow = _arrow()
    for path in files:
        try:
            with _bytes_of(path) as source:
                schema, parts = batches(source)
                names = _class_names(schema.metadata, path.parent)
                for part in parts:
                    if table.skips(table.read + 1) and table.skips(table.read + part.num_rows):
                        table.read += part.num_rows
                        continue
                    part.validate(full=True)  # pyarrow itself trusts the offsets of a file
                    for value in part.to_pylist():
                        table.read += 1
                        if table.skips(table.read):
                            continue
                        for key, known in names.items():
                            value[key] = name_labels(value.get(key), known)
                        yield TableRow(table.read, value)
        except (arrow.ArrowException, OSError, *_DAMAGE) as error:
            if isinstance(error, UsageError):
                raise
            why = " ".join(str(error).split())[:120]
            raise UsageError(f"{path}: cannot be read ({why}); fetch or save it again") from None


def _class_names(metadata: Any, folder: Path) -> dict[str, list[str]]:
    """Names of columns of numbered labels, as datasets notes them beside the rows."""
    try:
        if metadata and b"huggingface" in metadata:
            features = json.loads(metadata[b"huggingface"])["info"]["features"]
        else:
            noted = folder / "dataset_info.json"
            features = json.loads(noted.read_bytes()[: 2**24])["features"]
        items = list(features.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return {}
    class_names = {}
    for key, feature in items:
        while isinstance(feature, dict) and "feature" in feature:
            feature = feature["feature"]  # of a list
        names = feature.get("names") if isinstance(feature, dict) else None
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            class_names[key] = names
    return class_names


def name_labels(value: Any, names: list[str]) -> Any:
    """Names of labels that are numbers, in lists too; a number without one is none."""
    if isinstance(value, list):
        return [name_labels(one, names) for one in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return names[value] if 0 <= value < len(names) else None
    return value


# kind -> what reads its rows; others are read by line
_READERS: dict[str, Callable[[Table], Iterator[TableRow]]] = {
    "csv": _csv,
    "parquet": _parquet,
    "arrow": _ipc,
}


# Headers

_NAME = re.compile(r"[^\W\d][\w .#/()-]{0,39}")
_WORD = re.compile(r"[^\W\d][\w-]{0,39}")


def like_header(rows: Sequence[Sequence[str]], at: Sequence[int]) -> bool | None:
    """True if the first row is a header, by the rows below it; None if that is not clear.

    `at` are the columns that are read, the last of which may hold labels. A header has short names
    where the others have numbers or texts, and a label in it that no other row has.
    """
    if not rows:
        return False
    first, others = rows[0], rows[1:]
    at = [i for i in at if i < len(first)]
    named = all(_NAME.fullmatch(first[i].strip()) and len(first[i].split()) <= 3 for i in at)
    if not named or not others or not at or len({first[i] for i in at}) < len(at):
        return False
    columns = [[row[i].strip() for row in others if i < len(row)] for i in range(len(first))]
    for name, cells in zip(first, columns, strict=True):
        if len(cells) > 1 and not _is_number(name) and all(map(_is_number, cells)):
            return True
    if not all(columns[i] for i in at):
        return False
    plain = all(_WORD.fullmatch(first[i].strip()) for i in at)
    # other rows may be as short, such as those of a list of words
    alike = any(all(i < len(row) and _WORD.fullmatch(row[i].strip()) for i in at) for row in others)
    last = columns[at[-1]]
    if len(at) > 1 and len(last) >= 6 and 2 * len(set(last)) <= len(last):  # labels
        if first[at[-1]].strip() in last:
            return False
        return True if plain and not alike else None
    usual = [sorted(len(cell.split()) for cell in columns[i])[len(columns[i]) // 2] for i in at]
    return plain and not alike and len(others) >= 6 and min(usual) >= 3


def _is_number(cell: str) -> bool:
    return re.fullmatch(r"[+-]?(\d+([.,]\d*)?|[.,]\d+)([eE][+-]?\d+)?", cell.strip()) is not None
