"""Files of series of numbers: .ts, NPZ, NPY, and tables.

All become arrays (steps, channels), or (n1, ..., nr, channels); a number that is missing is NaN.
"""

import hashlib
import math
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from regard.data.columns import column_of, first_names
from regard.data.in_memory import MemoryTable, UserData, lay_in_memory
from regard.data.lines import opened_text
from regard.data.listing import split_labels
from regard.data.media import is_set
from regard.data.parts import named_files
from regard.data.table import KINDS, Table, is_folder, stem_and_suffix
from regard.errors import UsageError
from regard.files import read_bounded

_MOST_NUMBERS = 2**26  # of one file
_MOST_BYTES = 8 * _MOST_NUMBERS
MOST_CHANNELS = 2**16
MOST_AXES = 8
_MOST_LINE = 2**26  # bytes of a line of a .ts file
_MISSING = ("", "?")
_LOOKED = 20  # rows by which a table is known
_FEWEST = 3  # columns of numbers that make a table one of series, where no name says so
_FILES = (".csv", ".tsv", ".npy")  # of one series each, that a table names
# what a column of a table is -> its usual names
COLUMN_ROLES: dict[str, tuple[str, ...]] = {
    "series": ("series", "values", "x"),
    "path": ("path", "file", "filename"),
    "id": ("id", "case", "case_id", "series_id", "sample_id", "recording"),
    "time": ("time", "t", "step", "timestamp", "timepoint"),
    "label": ("label", "labels", "class", "category", "target", "y"),
}
# what columns= names, by how many it names
_COLUMNS = {1: ("label",), 2: ("path", "label"), 3: ("id", "time", "label")}


@dataclass(frozen=True, eq=False)
class SeriesRecord:
    """One series: its numbers (n1, ..., channels), its label, where it is, and its hash."""

    values: np.ndarray
    label: str
    where: str
    source: str

    labels = property(split_labels)

    def __str__(self) -> str:
        return self.where


@dataclass(frozen=True)
class SeriesColumns:
    """How a table holds series, and which of its columns are what: their names, or numbers."""

    layout: str = ""
    series: str = ""
    path: str = ""
    id: str = ""
    time: str = ""
    label: str = ""
    names: tuple[str, ...] = ()  # of the channels, where a header names them
    steps: int = 0  # of every series, where each is a row and all are as long


@dataclass(frozen=True)
class SeriesOptions:
    """How files are to be taken."""

    columns: str | None = None  # of a table
    header: bool | None = None  # whether a table has one; told by its rows unless given
    labelled: bool = True
    trained: SeriesColumns | None = None  # of the table that a model was trained on


def recording(values: Any, label: str, where: str) -> SeriesRecord:
    """Check the numbers of a series and hash them."""
    with np.errstate(over="ignore"):
        array = np.ascontiguousarray(values, dtype=np.float32)
    if not array.size:
        raise UsageError(f"{where}: a series without a number; remove it")
    if np.isinf(array).any():
        raise UsageError(f"{where}: an infinite number, or one too large; mend it or leave it out")
    digest = hashlib.blake2b(str(array.shape).encode() + array.tobytes(), digest_size=16)
    return SeriesRecord(array, label, where, digest.hexdigest())


def numbers(cells: Sequence[str], where: str) -> np.ndarray:
    """Cells as numbers; ? and nothing are numbers that are missing."""
    shown = [cell.strip() for cell in cells]
    for cell in shown:
        if not is_number(cell):
            raise UsageError(f"{where}: {cell!r:.40} is not a number; expected numbers, or ?")
    return np.array([float(cell) if cell not in _MISSING else np.nan for cell in shown])


def is_number(cell: str) -> bool:
    """True if a cell is a number, or the mark of one that is missing."""
    try:
        return cell.strip() in _MISSING or bool(float(cell)) in (True, False)
    except ValueError:
        return False


def read_recordings(
    path: str | Path | MemoryTable, options: SeriesOptions, notes: list[str]
) -> list[SeriesRecord]:
    """Read all series of a file; what the user should know is added to the notes."""
    return read_series(path, options, notes)[0]


def read_series(
    path: str | Path | MemoryTable, options: SeriesOptions, notes: list[str]
) -> tuple[list[SeriesRecord], SeriesColumns]:
    """Read all series of a file, or of a table in memory, and tell how it holds them."""
    path = Path(path) if isinstance(path, str) else path
    suffix, table = stem_and_suffix(str(path))[1].lower(), None
    if isinstance(path, Path) and suffix in _READERS:
        series = _READERS[suffix](path, options, notes)
    else:
        table = SeriesTable(path, options).settled()
        series = table.series()
        notes.append(f"{path}: {table.described()}")
    found: list[SeriesRecord] = []
    total = 0
    for one in series:
        total += one.values.size
        if total > _MOST_NUMBERS:
            raise UsageError(
                f"{path}: over {_MOST_NUMBERS:,} numbers; give fewer or shorter series"
            )
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
    lengths = {len(one.values) for one in found}
    columns = table.columns if table else SeriesColumns(suffix)
    alike = columns.layout == "wide" and len(lengths) == 1
    return found, replace(columns, steps=lengths.pop() if alike else 0)


# .ts, the format of the time series archives


def read_ts(path: Path, options: SeriesOptions, notes: list[str]) -> Iterator[SeriesRecord]:
    """Yield the series of a .ts file: a line each, dimensions by colons, and then the label."""
    head: dict[str, list[str]] = {}
    begun = number = 0
    with opened_text(path) as file:
        while line := file.readline(_MOST_LINE + 1):
            number += 1
            where = f"{path}:{number}"
            if len(line) > _MOST_LINE:
                raise UsageError(f"{where}: over {_MOST_LINE >> 20} MB in a line; cut the series")
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


def _ts_series(text: str, head: dict[str, list[str]], where: str) -> SeriesRecord:
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
    """Array of an .npy file, of no more numbers than there are bytes, and no objects."""
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


def read_npz(path: Path, options: SeriesOptions, notes: list[str]) -> Iterator[SeriesRecord]:
    """Yield the series of x (n, steps, channels) of an NPZ file, with y (n) and lengths (n)."""
    arrays: dict[str, np.ndarray] = {}
    try:
        with zipfile.ZipFile(path) as file:
            for name in file.namelist():
                key = name.removesuffix(".npy").lower()
                if key not in ("x", "y", "lengths"):
                    notes.append(f"{path}: {name[:40]} passed over; x, y and lengths are read")
                    continue
                if file.getinfo(name).file_size > _MOST_BYTES:
                    raise UsageError(
                        f"{path}: {name} has over {_MOST_BYTES >> 20:,} MB; give fewer"
                    )
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
    """Cell or a label as a text, numbers as people write them."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, float | np.floating):
        whole = float(value).is_integer()
        return "" if math.isnan(value) else str(int(value)) if whole else repr(float(value))
    return "" if value is None else str(value).strip()


def read_npy(path: Path, options: SeriesOptions, notes: list[str]) -> Iterator[SeriesRecord]:
    """Yield the one series (steps,) or (steps, channels) of an NPY file."""
    array = _array(read_bounded(path, _MOST_BYTES), str(path))
    if array.dtype.kind not in "biuf" or not array.ndim:
        raise UsageError(f"{path}: {array.dtype} {array.shape}; expected numbers (steps, channels)")
    yield recording(array[:, None] if array.ndim == 1 else array, "", str(path))


# Tables


class SeriesTable:
    """The rows of a table of series, and which of its columns are what."""

    def __init__(self, path: Path | MemoryTable, options: SeriesOptions | None = None):
        """Read the first rows to tell whether there is a header, and the roles of columns."""
        self.path, self.skip = path, 0
        self.table = path if isinstance(path, MemoryTable) else Table(path, encoding="auto")
        self.options = options or SeriesOptions()
        first = [value for _, value in islice(self._values(), _LOOKED)]
        if not first:
            raise UsageError(f"{path}: no rows in it")
        self.header: list[str] = []
        if isinstance(first[0], dict):
            self.header = list(dict.fromkeys(str(key) for value in first for key in value))
        elif self._has_header(first):
            self.header, self.skip = [name.strip() for name in first[0]], 1
        self.names = [name.casefold() for name in self.header]
        self.first = [self._cells(value, str(path)) for value in first[self.skip :]]
        self.roles = self._asked(self.options.columns) if self.options.columns else self._usual()

    def _has_header(self, first: list[list[str]]) -> bool:
        """True if the first row names columns: as told, by usual names, or by the others."""
        if self.options.header is not None:
            return self.options.header
        trained = self.options.trained or SeriesColumns()
        known = {name for some in COLUMN_ROLES.values() for name in some}
        known |= {name.casefold() for name in trained.names}
        cells = (cell for row in first[1:] for cell in row)
        above = not any(map(is_number, filter(None, first[0]))) and any(map(is_number, cells))
        return above or any(name.strip().casefold() in known for name in first[0])

    def _values(self) -> Iterator[tuple[int, Any]]:
        for row in self.table:
            if row.fault is not None:
                raise UsageError(row.fault.message)
            if row.value is not None:
                yield row.number, row.value

    def _cells(self, value: Any, where: str) -> list[Any]:
        """Cells of a row in the order of the columns."""
        if not isinstance(value, dict):
            return value
        if not value.keys() <= set(self.header):
            others = ", ".join(sorted(set(value) - set(self.header)))
            raise UsageError(f"{where}: {others:.60} unlike the rows before; give all the same")
        return [value.get(name) for name in self.header]

    def __iter__(self) -> Iterator[tuple[str, list[Any]]]:
        """Yield where each row is, and its cells."""
        for number, value in islice(self._values(), self.skip, None):
            where = self.table.where(number)
            cells = self._cells(value, where)
            if len(cells) <= max(self.roles.values(), default=0):
                raise UsageError(f"{where}: {len(cells)} columns; expected as many as before")
            yield where, cells

    # Which column is what

    def _is_numeric(self, place: int) -> bool:
        return all(is_number(text_of(row[place])) for row in self.first if place < len(row))

    def _fits(self, role: str, place: int) -> bool:
        """True if a column can be what its name says."""
        cells = [row[place] for row in self.first if place < len(row)]
        if role == "series":
            return all(isinstance(cell, list) for cell in cells)
        if role == "path":
            return all(str(cell).strip().lower().endswith(_FILES) for cell in cells)
        return True

    def _usual(self) -> dict[str, int]:
        """Columns of a training, or those whose names can mean nothing else.

        Numbers in a column y are those of a channel where there is an x, or a row for each step.
        """
        trained = self.options.trained or SeriesColumns()
        roles = {}
        for role, words in COLUMN_ROLES.items():
            own = str(getattr(trained, role)).casefold()
            if own.isdecimal() and not self.header and role != "label":
                roles[role] = int(own) - 1
                continue
            # a column that the model knows by a name is found by that alone
            known = (own,) if own and not own.isdecimal() else words
            taken = [name.casefold() for name in trained.names]
            places = [self.names.index(w) for w in known if w in self.names and w not in taken]
            fitting = [place for place in places if self._fits(role, place)]
            if fitting:
                roles[role] = fitting[0]
        label = roles.get("label", -1)
        if label >= 0 and self.names[label] == "y" and not trained.label:
            steps = {"id", "time"} <= roles.keys() or trained.layout not in ("", "wide", "lists")
            if (steps or "x" in self.names) and "series" not in roles and self._is_numeric(label):
                del roles["label"]
        return roles

    def _asked(self, columns: str) -> dict[str, int]:
        """Place of each column that columns= names."""
        asked = [name.strip() for name in columns.split(",")]
        if len(asked) not in _COLUMNS or "0" in asked:
            raise UsageError(
                f"columns={columns:.60}; expected the label of a table of series, path,label of "
                "one of files, or id,time,label of one of steps"
            )
        places = [column_of(name, self.header, str(self.path)) for name in asked]
        if self.first and max(places) >= len(self.first[0]):
            raise UsageError(f"{self.path}: {len(self.first[0])} columns; no column {max(asked)}")
        roles = dict(zip(_COLUMNS[len(asked)], places, strict=True))
        if "path" in roles and self._fits("series", roles["path"]):
            roles["series"] = roles.pop("path")
        return roles

    @property
    def layout(self) -> str:
        """Layout of the series in the table, or none where there seem to be none."""
        rows, roles = self.first, self.roles
        if not rows:
            return ""
        if "series" in roles:
            return "lists"
        if (trained := self.options.trained) and not self.options.columns:
            return trained.layout if trained.layout in ("wide", "long") else "steps"
        if {"id", "time"} <= roles.keys():
            return "long"
        if self._fits("path", roles.get("path", 0)):
            return "files"
        own = {roles.get("label", 0), roles.get("id")}
        others = [n for n in range(len(rows[0])) if n not in own]
        return "wide" if len(others) >= _FEWEST and all(map(self._is_numeric, others)) else ""

    def settled(self) -> Self:
        """Settle what the layout needs, or refuse a table that holds no series."""
        layout = self.layout
        if not layout:
            raise UsageError(
                f"{self.path}: no table of series; expected a label and numbers in each row, "
                "columns id, time and label, or paths and labels; or name them with columns="
            )
        used = {"wide": ("id", "label"), "long": ("id", "time", "label")}
        used |= {"files": ("path", "label"), "lists": ("series", "label")}
        if layout == "wide" and "time" in self.roles and not self.options.trained:
            raise UsageError(
                f"{self.path}: a column {self._name(self.roles['time']):.30} but no id; where a "
                "row is a step add an id, where it is a series name its label with columns="
            )
        if layout == "wide" and "label" not in self.roles:
            self.roles |= self._first_label()
        if layout == "files":
            self.roles = {"path": 0, **self.roles}
        self.roles = {k: at for k, at in self.roles.items() if k in used.get(layout, self.roles)}
        if layout == "steps" and len(self.roles) >= len(self.first[0]):
            self.roles = {}  # nothing else would be a channel
        roles: dict[str, Any] = {role: self._name(at) for role, at in self.roles.items()}
        names = [self._name(n) for n in self.channels()] if layout in ("long", "steps") else []
        if not self.header or len(set(map(str.casefold, names))) < len(names):
            names = []
        self.columns = SeriesColumns(layout, **roles, names=tuple(names))
        return self

    def series(self) -> Iterator[SeriesRecord]:
        """Yield the series of a table that is settled."""
        return getattr(self, self.columns.layout)()

    def _name(self, place: int) -> str:
        """Name of a column, or its number."""
        return self.header[place] if self.header else str(place + 1)

    def channels(self) -> list[int]:
        """Columns that are channels, where each row is a step."""
        names = self.options.trained.names if self.options.trained else ()
        if names and self.header:
            where = f"{self.path}: channels {first_names(names)} are read"
            return [column_of(name, self.header, where, numbers=False) for name in names]
        own = set(self.roles.values())
        return [n for n in range(len(self.first[0])) if n not in own]

    def described(self) -> str:
        """Note on how the table is read: which column is taken for what."""
        known = self.columns
        told = [f"{role} is {name:.30}" for role in COLUMN_ROLES if (name := getattr(known, role))]
        told += [f"channels are {first_names(known.names)}"] if known.names else []
        told = [f": {', '.join(told)}"] if told else []
        return "".join([f"read as a table with {_LAYOUTS[known.layout]}", *told])

    def _first_label(self) -> dict[str, int]:
        """True if the first column of a row for each series is its label.

        It is where it holds no numbers. Without a header it is the label in training, and
        otherwise where a row has one cell more than the series that were trained on.
        """
        trained, labelled = self.options.trained or SeriesColumns(), self.options.labelled
        if not self._is_numeric(0) or (labelled and not self.header):
            return {"label": 0}
        if labelled:
            raise UsageError(
                f"{self.path}: which of its columns {first_names(self.header)} is the label? Name "
                f"it with columns=, such as columns={self.header[-1]:.30}"
            )
        width = len(self.first[0])
        if self.header or not trained.label or width == trained.steps:
            return {}
        if width == trained.steps + 1:
            return {"label": 0}
        raise UsageError(
            f"{self.path}: whether its first column is a label is not clear; say columns=1 if it "
            "is, or add a header row"
        )

    # How series lie in it

    def wide(self) -> Iterator[SeriesRecord]:
        """Yield a series for each row."""
        label, own = self.roles.get("label"), set(self.roles.values())
        for where, cells in self:
            texts = [text_of(cell) for n, cell in enumerate(cells) if n not in own]
            while len(texts) > 1 and not texts[-1]:  # a shorter series, filled up with nothing
                texts.pop()
            told = "" if label is None else text_of(cells[label])
            yield recording(numbers(texts, where)[:, None], told, where)

    def long(self) -> Iterator[SeriesRecord]:
        """Yield a series for each id, whose steps are rows, in the order of their times.

        Where a model is run, a table without an id is one series.
        """
        channels, roles = self.channels(), self.roles
        series: dict[str, list[tuple[str, str, np.ndarray, str]]] = {}
        for total, (where, cells) in enumerate(self):
            if len(cells) <= max(channels, default=0):
                raise UsageError(f"{where}: {len(cells)} columns; expected as many as before")
            step = numbers([text_of(cells[n]) for n in channels], where)
            if total * len(step) > _MOST_NUMBERS:
                raise UsageError(f"{self.path}: over {_MOST_NUMBERS:,} numbers; give fewer steps")
            name, time, told = (
                text_of(cells[roles[role]]) if role in roles else ""
                for role in ("id", "time", "label")
            )
            rows = series.setdefault(name, [])
            if rows and rows[0][1] != told:
                raise UsageError(
                    f"{where}: label {told!r:.40}, unlike the first step of id {name!r:.40}"
                )
            rows.append((time if "time" in roles else str(len(rows)), told, step, where))
        for name, rows in series.items():
            timed = all(is_number(time) and time not in _MISSING for time, *_ in rows)
            rows.sort(key=lambda row: (float(row[0]), "") if timed else (0.0, row[0]))
            if len({time for time, *_ in rows}) < len(rows):
                raise UsageError(f"{self.path}: a time of id {name!r:.40} is there twice; mend it")
            yield recording(np.stack([step for _, _, step, _ in rows]), rows[0][1], rows[0][3])

    def steps(self) -> Iterator[SeriesRecord]:
        """Yield the one series of a table with a row for each step."""
        channels, found = self.channels(), []
        for where, cells in self:
            if len(cells) != len(self.first[0]) or len(found) * len(channels) > _MOST_NUMBERS:
                raise UsageError(f"{where}: {len(cells)} columns, expected {len(self.first[0])}")
            found.append(numbers([text_of(cells[n]) for n in channels], where))
        yield recording(np.stack(found), "", str(self.path))

    def files(self) -> Iterator[SeriesRecord]:
        """Yield a series for each file that a row names, beside the table or below.

        Their channels have the names that are in the first.
        """
        own = isinstance(self.path, MemoryTable) or lay_in_memory(self.path)
        home = Path.cwd() if own else self.path.parent.resolve()
        path, label = self.roles["path"], self.roles.get("label", 1)
        asked = SeriesOptions(labelled=False)
        for where, cells in self:
            file = (home / text_of(cells[path])).resolve()
            if not own and not file.is_relative_to(home):
                raise UsageError(f"{where}: {cells[path]!r:.60} lies outside the folder {home}")
            told = text_of(cells[label]) if label < len(cells) else ""
            known = replace(self.columns, layout="steps", label="")
            (one,), steps = read_series(file, replace(asked, trained=known), [])
            if not self.columns.names:
                self.columns = replace(self.columns, names=steps.names, time=steps.time)
            yield replace(one, label=told)

    def lists(self) -> Iterator[SeriesRecord]:
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


# how a table holds series -> what is said of it
_LAYOUTS = {
    "wide": "a series in each row",
    "long": "a step of a series in each row",
    "files": "a file for each series",
    "lists": "a list of numbers for each series",
    "steps": "a step in each row",
}
_READERS: dict[str, Callable[[Path, SeriesOptions, list[str]], Iterable[SeriesRecord]]] = {
    "ts": read_ts,
    "npz": read_npz,
    "npy": read_npy,
}


def part_files(folder: Path) -> dict[str, list[Path]]:
    """Find the files of each part in a folder: those that only hold series, or else tables."""
    parts = {}
    for name, files in named_files(folder).items():
        kinds = {path: stem_and_suffix(path)[1].lower() for path in files}
        some = [path for path in files if kinds[path] in _READERS]
        if some := some or [path for path in files if kinds[path] in KINDS]:
            parts[name] = some
    return parts


def holds_series(
    data: UserData | None, columns: str | None = None, header: bool | None = None
) -> bool:
    """True if data are series of numbers: .ts or NPZ files, or tables of series."""
    asked = SeriesOptions(columns, header)

    def has_series(path: Path) -> bool:
        suffix = stem_and_suffix(path)[1].lower()
        return suffix in _READERS or (suffix in KINDS and bool(SeriesTable(path, asked).layout))

    def lie_in(path: Path) -> bool:
        files = [path] if not is_folder(path) else sum(part_files(path).values(), [])
        return path.exists() and any(map(has_series, files))

    return is_set(data, lie_in)
