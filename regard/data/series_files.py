"""Files of series of numbers: .ts, NPZ, NPY, and tables.

All become arrays (steps, channels), or (n1, ..., nr, channels); a number that is missing is NaN.
"""

import hashlib
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.columns import column_of
from regard.data.lines import opened_text
from regard.data.media import is_set, split_labels
from regard.data.parts import named_files
from regard.data.table import KINDS, Table, is_folder, stem_and_suffix
from regard.errors import UsageError
from regard.files import read_bounded

MOST_NUMBERS = 2**26  # of one file
MOST_BYTES = 8 * MOST_NUMBERS
MOST_CHANNELS = 2**16
MOST_AXES = 8
MOST_LINE = 2**26  # bytes of a line of a .ts file
MISSING = ("", "?")
LOOKED = 20  # rows by which a table is known
FEWEST = 3  # columns of numbers that make a table one of series, where no name says so
FILES = (".csv", ".tsv", ".npy")  # of one series each, that a table names
# what a column of a table is -> its usual names
ROLES: dict[str, tuple[str, ...]] = {
    "series": ("series", "x", "values"),
    "id": ("id", "case", "case_id", "series_id", "sample_id", "recording"),
    "time": ("time", "t", "step", "timestamp", "timepoint"),
    "label": ("label", "labels", "class", "category", "target", "y"),
    "path": ("path", "file", "filename"),
}
# what columns= names, by how many it names
COLUMNS = {1: ("label",), 2: ("path", "label"), 3: ("id", "time", "label")}


@dataclass(frozen=True, eq=False)
class Recording:
    """One series: its numbers (n1, ..., channels), its label, where it is, and its hash."""

    values: np.ndarray
    label: str
    where: str
    source: str

    labels = property(split_labels)

    def __str__(self) -> str:
        return self.where


@dataclass(frozen=True)
class SeriesOptions:
    """How files are to be taken."""

    columns: str | None = None  # of a table
    header: bool | None = None  # whether a table has one; told by its rows unless given
    labelled: bool = True
    layout: str = ""  # of tables, where a model was trained on one; else their columns tell


def recording(values: Any, label: str, where: str) -> Recording:
    """Check the numbers of a series and hash them."""
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(values, dtype=np.float32)
    if not array.size:
        raise UsageError(f"{where}: a series without a number; remove it")
    if np.isinf(array).any():
        raise UsageError(f"{where}: an infinite number, or one too large; mend it or leave it out")
    digest = hashlib.blake2b(str(array.shape).encode() + array.tobytes(), digest_size=16)
    return Recording(array, label, where, digest.hexdigest())


def numbers(cells: Sequence[str], where: str) -> np.ndarray:
    """Return cells as numbers; ? and nothing are numbers that are missing."""
    shown = [cell.strip() for cell in cells]
    for cell in shown:
        if not is_number(cell):
            raise UsageError(f"{where}: {cell!r:.40} is no number; expected numbers, or ?")
    return np.array([float(cell) if cell not in MISSING else np.nan for cell in shown])


def is_number(cell: str) -> bool:
    """Tell whether a cell is a number, or the mark of one that is missing."""
    try:
        return cell.strip() in MISSING or bool(float(cell)) in (True, False)
    except ValueError:
        return False


def read_recordings(path: str | Path, options: SeriesOptions, notes: list[str]) -> list[Recording]:
    """Read all series of a file; what the user should know is added to the notes."""
    read = READERS.get(stem_and_suffix(path)[1].lower(), read_table)
    found: list[Recording] = []
    total = 0
    for one in read(Path(path), options, notes):
        total += one.values.size
        if total > MOST_NUMBERS:
            raise UsageError(f"{path}: over {MOST_NUMBERS:,} numbers; give fewer or shorter series")
        if options.labelled and not one.label:
            raise UsageError(f"{one.where}: no label; add it, or name its column with columns=")
        found.append(one)
        if one.values.shape[1:] != found[0].values.shape[1:]:
            raise UsageError(
                f"{one.where}: a series {one.values.shape}, but that of {found[0].where} is "
                f"{found[0].values.shape}; only the first axis may differ"
            )
    if not found:
        raise UsageError(f"{path}: no series in it")
    return found


# .ts, the format of the time series archives


def read_ts(path: Path, options: SeriesOptions, notes: list[str]) -> Iterator[Recording]:
    """Yield the series of a .ts file: a line each, dimensions by colons, and then the label."""
    head: dict[str, list[str]] = {}
    begun = number = 0
    with opened_text(path) as file:
        while line := file.readline(MOST_LINE + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > MOST_LINE:
                raise UsageError(f"{where}: over {MOST_LINE >> 20} MB in a line; cut the series")
            try:
                text = line.decode().strip()
            except UnicodeDecodeError as error:
                raise UsageError(f"{where}: not UTF-8 at byte {error.start}; is it text?") from None
            if not text or text[0] in "#%":
                continue
            if not begun and text[0] == "@":
                key, *words = text[1:].split() or [""]
                head[key.lower()] = words
                begun = key.lower() == "data"
                if begun:
                    _check_head(head, path)
                continue
            if not begun:
                raise UsageError(f"{where}: {text!r:.40} before @data; is it a .ts file?")
            yield _ts_series(text, head, where)
    if not begun:
        raise UsageError(f"{path}: no @data in it; is it a .ts file?")


def _says(head: dict[str, list[str]], key: str) -> bool:
    return [word.lower() for word in head.get(key, [])[:1]] == ["true"]


def _check_head(head: dict[str, list[str]], path: Path) -> None:
    if _says(head, "timestamps"):
        raise UsageError(
            f"{path}: @timeStamps true; resample the series to even steps, and write values alone"
        )
    if _says(head, "targetlabel"):
        raise UsageError(f"{path}: @targetLabel true, numbers to predict; expected @classLabel")


def _ts_series(text: str, head: dict[str, list[str]], where: str) -> Recording:
    parts, label = text.split(":"), ""
    if "(" in text:
        raise UsageError(f"{where}: times in brackets; resample the series and write values alone")
    if _says(head, "classlabel"):
        label, known = parts.pop().strip(), head["classlabel"][1:]
        if known and label not in known:
            raise UsageError(f"{where}: label {label!r:.40} is not in @classLabel; add it there")
    if not 0 < len(parts) <= MOST_CHANNELS:
        raise UsageError(f"{where}: {len(parts)} dimensions; expected 1 to {MOST_CHANNELS:,}")
    rows = [numbers(part.split(","), where) for part in parts]
    if len({len(row) for row in rows}) > 1:
        few, many = min(map(len, rows)), max(map(len, rows))
        raise UsageError(f"{where}: dimensions of {few} and {many} values; fill them up with ?")
    return recording(np.stack(rows, 1), label, where)


# Arrays


def _array(data: bytes, where: str) -> np.ndarray:
    """Return the array of an .npy file, of no more numbers than there are bytes, and no objects."""
    file = BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0}
        head = read.get(version, np.lib.format.read_array_header_2_0)(file)
        shape, dtype = head[0], head[2]
        if dtype.kind not in "biufUS":
            raise UsageError(f"{where}: an array of {dtype}; expected numbers, or texts as labels")
        if len(shape) > MOST_AXES or math.prod(shape) * dtype.itemsize > len(data) - file.tell():
            raise UsageError(f"{where}: {shape} of {dtype} promised in {len(data):,} bytes")
        file.seek(0)
        return np.lib.format.read_array(file, allow_pickle=False)
    except UsageError:
        raise
    except Exception as error:  # what NumPy says of a header depends on what is wrong with it
        why = " ".join(str(error).split())[:80]
        raise UsageError(f"{where}: no array that can be read ({why}); save it again") from None


def read_npz(path: Path, options: SeriesOptions, notes: list[str]) -> Iterator[Recording]:
    """Yield the series of x (n, steps, channels) of an NPZ file, with y (n) and lengths (n)."""
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(path) as file:
            for name in file.namelist():
                key = name.removesuffix(".npy").lower()
                if key not in ("x", "y", "lengths"):
                    notes.append(f"{path}: {name[:40]} passed over; x, y and lengths are read")
                    continue
                if file.getinfo(name).file_size > MOST_BYTES:
                    raise UsageError(f"{path}: {name} has over {MOST_BYTES >> 20:,} MB; give fewer")
                arrays[key] = _array(file.read(name), f"{path}: {name}")
    except (OSError, EOFError, RuntimeError, ValueError, zlib.error, zipfile.error) as error:
        why = " ".join(str(error).split())[:80] or type(error).__name__
        raise UsageError(f"{path}: no NPZ that can be read ({why}); save it again") from None
    if "x" not in arrays:
        raise UsageError(f"{path}: no array x; expected x (n, steps, channels), and y (n)")
    x = arrays["x"]
    x = x[..., None] if x.ndim == 2 else x
    y = arrays.get("y", np.full(len(x) if x.ndim else 0, ""))
    lengths = arrays.get("lengths", np.full(len(y), x.shape[1] if x.ndim > 1 else 0))
    if x.dtype.kind not in "biuf" or x.ndim < 3 or y.shape != (len(x),):
        raise UsageError(
            f"{path}: x is {x.dtype} {x.shape} and y {y.shape}; expected numbers (n, steps, "
            "channels), and n labels"
        )
    if lengths.shape != y.shape or lengths.dtype.kind not in "iu":
        raise UsageError(f"{path}: lengths are {lengths.dtype} {lengths.shape}; expected {len(x)}")
    for n, (values, label, length) in enumerate(zip(x, y, lengths.tolist(), strict=True), 1):
        where = f"{path}:{n}"
        if not 0 < length <= len(values):
            raise UsageError(f"{where}: length {length}; expected 1 to {len(values)}")
        yield recording(values[:length], text_of(label), where)


def text_of(value: Any) -> str:
    """Return a cell or a label as a text, numbers as people write them."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float | np.floating):
        whole = float(value).is_integer()
        return "" if math.isnan(value) else str(int(value)) if whole else repr(float(value))
    return "" if value is None else str(value).strip()


def read_npy(path: Path, options: SeriesOptions, notes: list[str]) -> Iterator[Recording]:
    """Yield the one series (steps,) or (steps, channels) of an NPY file."""
    array = _array(read_bounded(path, MOST_BYTES), str(path))
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise UsageError(f"{path}: {array.dtype} {array.shape}; expected numbers (steps, channels)")
    yield recording(array[:, None] if array.ndim == 1 else array, "", str(path))


# Tables


class SeriesTable:
    """The rows of a table of series, and which of its columns are what."""

    def __init__(self, path: Path, columns: str | None = None, header: bool | None = None):
        """Read the first rows to tell whether there is a header, and the roles of columns."""
        self.path, self.table, self.skip = path, Table(path, encoding="auto"), 0
        first = [value for _, value in islice(self._values(), LOOKED)]
        if not first:
            raise UsageError(f"{path}: no rows in it")
        names = list(map(str, first[0]))
        if not isinstance(first[0], dict):
            known = {name for some in ROLES.values() for name in some}
            named = any(name.strip().casefold() in known for name in names)
            cells = (cell for row in first[1:] for cell in row)
            above = not any(map(is_number, filter(None, names))) and any(map(is_number, cells))
            self.skip = int(named or above if header is None else header)
        self.names = [name.strip().casefold() for name in names if self.skip or first[0] != names]
        self.first = [_cells(value) for value in first[self.skip :]]
        self.roles = self._roles(columns)

    def _values(self) -> Iterator[tuple[int, Any]]:
        for row in self.table:
            if row.fault is not None:
                raise UsageError(row.fault.message)
            if row.value is not None:
                yield row.number, row.value

    def __iter__(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield where each row is, and its cells."""
        for number, value in islice(self._values(), self.skip, None):
            cells, where = _cells(value), self.table.where(number)
            if len(cells) <= max(self.roles.values(), default=0):
                raise UsageError(f"{where}: {len(cells)} columns; expected as many as before")
            yield where, cells

    def _roles(self, columns: str | None) -> dict[str, int]:
        """Return the place of each column that is asked for, or has a usual name."""
        if not columns:
            names = {name: n for n, name in reversed(list(enumerate(self.names)))}
            known = {role: [names[w] for w in words if w in names] for role, words in ROLES.items()}
            return {role: places[0] for role, places in known.items() if places}
        asked = [name.strip() for name in columns.split(",")]
        if len(asked) not in COLUMNS or "0" in asked:
            raise UsageError(
                f"columns={columns:.60}; expected the label of a table of series, path,label of "
                "one of files, or id,time,label of one of steps"
            )
        places = [column_of(name, self.names, str(self.path)) for name in asked]
        if self.first and max(places) >= len(self.first[0]):
            raise UsageError(f"{self.path}: {len(self.first[0])} columns; no column {max(asked)}")
        return dict(zip(COLUMNS[len(asked)], places, strict=True))

    @property
    def layout(self) -> str:
        """Return how the table holds series, or nothing where it does not seem to."""
        rows, roles = self.first, self.roles
        if not rows:
            return ""
        if "series" in roles and isinstance(rows[0][roles["series"]], list):
            return "lists"
        if {"id", "time"} <= roles.keys():
            return "long"
        path, label = roles.get("path", 0), roles.get("label", 0)
        if all(str(row[path]).strip().lower().endswith(FILES) for row in rows):
            return "files"
        others = [[text_of(cell) for n, cell in enumerate(row) if n != label] for row in rows]
        numeric = all(is_number(cell) for row in others for cell in row)
        return "wide" if numeric and len(others[0]) >= FEWEST else ""

    def wide(self, options: SeriesOptions) -> Iterator[Recording]:
        """Yield a series for each row; without names the first column is the label."""
        label = self.roles.get("label", -1 if self.names and not options.labelled else 0)
        for where, cells in self:
            texts = [text_of(cell) for n, cell in enumerate(cells) if n != label]
            while len(texts) > 1 and not texts[-1]:  # a shorter series, filled up with nothing
                texts.pop()
            told = "" if label < 0 else text_of(cells[label])
            yield recording(numbers(texts, where)[:, None], told, where)

    def long(self, options: SeriesOptions) -> Iterator[Recording]:
        """Yield a series for each id, whose steps are rows, in the order of their times."""
        own, label = set(self.roles.values()), self.roles.get("label")
        series: dict[str, list[tuple[str, str, np.ndarray, str]]] = {}
        for total, (where, cells) in enumerate(self):
            step = numbers([text_of(c) for n, c in enumerate(cells) if n not in own], where)
            if total * len(step) > MOST_NUMBERS:
                raise UsageError(f"{self.path}: over {MOST_NUMBERS:,} numbers; give fewer steps")
            name, time = (text_of(cells[self.roles[role]]) for role in ("id", "time"))
            told = "" if label is None else text_of(cells[label])
            rows = series.setdefault(name, [])
            if rows and (rows[0][1], len(rows[0][2])) != (told, len(step)):
                what = f"label {told!r:.40} and {len(step)} channels"
                raise UsageError(f"{where}: {what}, unlike the first step of id {name!r:.40}")
            rows.append((time, told, step, where))
        for name, rows in series.items():
            timed = all(is_number(time) and time not in MISSING for time, *_ in rows)
            rows.sort(key=lambda row: (float(row[0]), "") if timed else (0.0, row[0]))
            if len({time for time, *_ in rows}) < len(rows):
                raise UsageError(f"{self.path}: a time of id {name!r:.40} is there twice; mend it")
            yield recording(np.stack([step for _, _, step, _ in rows]), rows[0][1], rows[0][3])

    def files(self, options: SeriesOptions) -> Iterator[Recording]:
        """Yield a series for each file that a row names, beside the table or below."""
        home, path = self.path.parent.resolve(), self.roles.get("path", 0)
        label = self.roles.get("label", 1)
        for where, cells in self:
            file = (home / text_of(cells[path])).resolve()
            if not file.is_relative_to(home):
                raise UsageError(f"{where}: {cells[path]!r:.60} lies outside the folder {home}")
            told = text_of(cells[label]) if label < len(cells) else ""
            yield recording(read_steps(file), told, str(file))

    def lists(self, options: SeriesOptions) -> Iterator[Recording]:
        """Yield a series for each row with a list of numbers, or of lists of numbers."""
        place, label = self.roles["series"], self.roles.get("label")
        for where, cells in self:
            try:
                values = np.array(cells[place], dtype=np.float64)  # null is missing
            except (ValueError, TypeError, OverflowError):
                raise UsageError(f"{where}: no array of numbers; give all steps alike") from None
            if not 0 < values.ndim <= MOST_AXES:
                raise UsageError(f"{where}: an array {values.shape}; expected (steps, channels)")
            told = "" if label is None else text_of(cells[label])
            yield recording(values[:, None] if values.ndim == 1 else values, told, where)


def _cells(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else value


def read_table(path: Path, options: SeriesOptions, notes: list[str]) -> Iterator[Recording]:
    """Yield the series of a table, as its columns show that it holds them."""
    if options.layout == "files":  # what such a model reads is a file for each series
        return iter([recording(read_steps(path), "", str(path))])
    table = SeriesTable(path, options.columns, options.header)
    layout = options.layout or table.layout
    if layout not in LAYOUTS:
        raise UsageError(
            f"{path}: no table of series; expected a label and numbers in each row, columns id, "
            "time and label, or paths and labels; or name them with columns="
        )
    notes.append(f"{path}: read as a table with {LAYOUTS[layout]}")
    return getattr(table, layout)(options)


def read_steps(path: Path) -> np.ndarray:
    """Return the series (steps, channels) of a file: a row for each step, but for its time."""
    if path.suffix.lower() == ".npy":
        return next(iter(read_npy(path, SeriesOptions(), []))).values
    table = SeriesTable(path)
    time, found = table.roles.get("time"), []
    for where, cells in table:
        found.append(numbers([text_of(c) for n, c in enumerate(cells) if n != time], where))
        if len(found[-1]) != len(found[0]) or len(found) * len(found[0]) > MOST_NUMBERS:
            raise UsageError(f"{where}: {len(found[-1])} columns, expected {len(found[0])}")
    if not found:
        raise UsageError(f"{path}: no steps in it")
    return np.stack(found)


# how a table holds series -> what is said of it
LAYOUTS = {
    "wide": "a series in each row",
    "long": "a step of a series in each row",
    "files": "a file for each series",
    "lists": "a list of numbers for each series",
}
READERS: dict[str, Callable[[Path, SeriesOptions, list[str]], Iterable[Recording]]] = {
    "ts": read_ts,
    "npz": read_npz,
    "npy": read_npy,
}


def layout_of(path: Path, columns: str | None = None) -> str:
    """Return how a file holds series: its suffix, or the layout of a table, or nothing."""
    suffix = stem_and_suffix(path)[1].lower()
    if suffix in READERS:
        return suffix
    return SeriesTable(path, columns).layout if suffix in KINDS else ""


def part_files(folder: Path) -> dict[str, list[Path]]:
    """Find the files of each part in a folder: those that only hold series, or else tables."""
    parts = {}
    for name, files in named_files(folder).items():
        kinds = {path: stem_and_suffix(path)[1].lower() for path in files}
        some = [path for path in files if kinds[path] in READERS]
        if some := some or [path for path in files if kinds[path] in KINDS]:
            parts[name] = some
    return parts


def holds_series(data: Any) -> bool:
    """Tell whether data are series of numbers: .ts or NPZ files, or tables of series."""

    def has_layout(path: Path) -> bool:
        files = [path] if not is_folder(path) else sum(part_files(path).values(), [])
        return path.exists() and any(layout_of(file) for file in files)

    return is_set(data, has_layout)
