"""Data that lie in memory: lists of rows, frames and datasets, written once as files like others.

A file is named by the hash of what it holds, so that the same data are the same file in every
session: a training on them can be taken up again, and recipe.json names the file.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from regard.data.parts import PARTS
from regard.data.table import TableRow, name_labels
from regard.errors import UsageError
from regard.files import cache_folder, make_folder, refuse, replacing, temporary_beside

# what rows without names are called, by how many values they have
_NAMES = {1: ("text",), 2: ("source", "target"), 3: ("sentence1", "sentence2", "score")}
_LISTS = ("words", "tags")  # of a row of two lists
_EXPECTED = (
    "a path, a list of dicts or tuples, a pandas or polars frame, a dataset, or a dict of these "
    "by part (train, valid, test)"
)


class Frame(Protocol):
    """A lazy frame or an Arrow table, which are no iterables."""

    @property
    def schema(self) -> Any:
        """Names and kinds of its columns."""
        ...


UserData = str | os.PathLike[str] | Iterable[Any] | Frame  # as a user gives them


def on_disk(data: UserData | None) -> Any:
    """Path of data; those in memory are written to the cache first."""
    if data is None or isinstance(data, str | os.PathLike):
        return data
    if hasattr(data, "read"):
        return _open_path(data)
    parts = _parts(data)
    digest, home = hashlib.sha256(), cache_folder() / "tables"
    try:
        with temporary_beside(home / "staged", Path.mkdir) as staged:
            for name, rows in parts.items():
                with replacing(staged / f"{name}.jsonl") as path, open(path, "w") as file:
                    file.writelines(_lines(rows, digest, name))
            folder = home / digest.hexdigest()[:32]
            make_folder(folder)
            for path in staged.iterdir():  # also over what is there already: it may be damaged
                path.replace(folder / path.name)
    except OSError as error:
        raise refuse(error, home) from error
    return str(folder / "train.jsonl" if list(parts) == ["train"] else folder)


def lay_in_memory(path: Path) -> bool:
    """True if a table was written here, so that its paths are the user's own."""
    return path.absolute().is_relative_to((cache_folder() / "tables").absolute())


def home_of(table: Path) -> Path:
    """Folder from which a table's paths start: its own; if it lay in memory, the working one."""
    return Path() if lay_in_memory(table) else table.parent


def _open_path(file: Any) -> str:
    """Path of an open file."""
    path = getattr(file, "name", None)
    if not isinstance(path, str) or not os.path.isfile(path):
        raise UsageError(f"data= is a {type(file).__name__} without a path; give that")
    return path


def _parts(data: UserData) -> dict[str, Any]:
    """Rows of each part."""
    if isinstance(data, Mapping):
        words = {word: name for name, some in PARTS.items() for word in some}
        if data and all(isinstance(key, str) and key in words for key in data):
            return {words[key]: rows for key, rows in data.items()}
    return {"train": data}


def _lines(data: UserData, digest: Any, name: str) -> Iterator[str]:
    """Yield each row as a line of JSON, and hash it."""
    digest.update(f"{name}\n".encode())
    number = 0
    for number, row in enumerate(rows_of(data), 1):
        if not isinstance(row, Mapping):
            row = _with_names(row, number)
        try:
            line = json.dumps({str(key): _plain(value) for key, value in row.items()})
        except (TypeError, ValueError, RecursionError) as error:
            raise UsageError(
                f"row {number} of data holds more than text, numbers and lists ({error}); "
                "for images, give files, Parquet or the folder of a saved dataset"
            ) from None
        digest.update(line.encode() + b"\n")
        yield line + "\n"
    if not number:
        raise UsageError(f"data= has no rows ({type(data).__name__}); give some")


def rows_of(data: Any) -> Iterable[Any]:
    """Rows of a list, frame or dataset, without importing what made it."""
    if (rows := frame_rows(data)) is not None:
        return rows
    if isinstance(data, Mapping):
        if not is_columns(data):
            raise UsageError(f"data= is a dict of no columns of one length; expected {_EXPECTED}")
        return column_rows(data)
    if hasattr(data, "to_pylist"):  # one column of pyarrow
        return data.to_pylist()
    kinds = str | bytes | set | frozenset  # of which the last two have no order
    if isinstance(data, kinds) or not isinstance(data, Iterable) or not getattr(data, "ndim", 1):
        raise UsageError(f"data= is a {type(data).__name__}; expected {_EXPECTED}")
    return data


def frame_rows(data: Any) -> Iterable[dict[str, Any]] | None:
    """Rows of a frame, Arrow table or dataset; None: it is none of these."""
    if hasattr(data, "collect") and hasattr(data, "collect_schema"):  # lazy, of polars
        data = data.collect()
    if hasattr(data, "iter_rows"):  # polars
        return data.iter_rows(named=True)
    if hasattr(data, "schema") and hasattr(data, "read_all"):  # a stream of pyarrow
        data = data.read_all()
    if hasattr(data, "to_pylist") and hasattr(data, "schema"):  # pyarrow
        _check_names(data.schema.names)
        return data.to_pylist()
    if hasattr(data, "itertuples") and hasattr(data, "columns"):  # pandas
        names = _check_names([str(name) for name in data.columns])
        return (dict(zip(names, row, strict=True)) for row in data.itertuples(index=False))
    if hasattr(data, "features") and hasattr(data, "column_names"):  # datasets
        return _dataset_rows(data)
    return None


def _check_names(names: list[str]) -> list[str]:
    for name in names:
        if names.count(name) > 1:
            raise UsageError(f"a table with two columns {name!r:.40}; rename one")
    return names


def is_columns(data: Mapping[Any, Any]) -> bool:
    """True if a dict holds columns of one length by their names."""
    columns = [values for values in data.values() if _is_column(values)]
    return 0 < len(columns) == len(data) and len({len(values) for values in columns}) == 1


def column_rows(data: Mapping[Any, Any]) -> Iterator[dict[str, Any]]:
    """Yield the rows of columns by their names."""
    names = [str(name) for name in data]
    return (dict(zip(names, row, strict=True)) for row in zip(*data.values(), strict=True))


def _is_column(values: Any) -> bool:
    kinds = str | bytes | Mapping
    sized = hasattr(values, "__len__") and getattr(values, "ndim", 1) > 0
    return sized and isinstance(values, Iterable) and not isinstance(values, kinds)


class MemoryTable:
    """Rows in memory, read as those of a file in the folder where the program runs."""

    parent = Path()

    def __init__(self, rows: Iterable[Mapping[str, Any]]):
        self.rows, self.notes = list(rows), []

    def __iter__(self) -> Iterator[TableRow]:
        for number, row in enumerate(self.rows, 1):
            yield TableRow(number, {str(key): _plain(value) for key, value in row.items()})

    def where(self, number: int) -> str:
        """Name of the row in messages."""
        return f"row {number}"

    def __str__(self) -> str:
        return "the table"


def is_missing(value: Any) -> bool:
    """True if a cell of a frame holds nothing."""
    if isinstance(value, float):
        return value != value
    return value is None or type(value).__name__ in ("NAType", "NaTType")


def _dataset_rows(data: Any) -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset, with labels by their names."""
    names = {}
    for key, feature in (data.features or {}).items():
        while hasattr(feature, "feature"):  # of a list
            feature = feature.feature
        if known := getattr(feature, "names", None):
            names[key] = list(known)
    for row in data:
        yield {**row, **{key: name_labels(row[key], known) for key, known in names.items()}}


def _with_names(row: Any, number: int) -> Mapping[str, Any]:
    """Row with the names that rows of its kind have."""
    if isinstance(row, str):
        return {"text": row}
    if hasattr(row, "_asdict"):
        return row._asdict()
    if not isinstance(row, Sequence) or isinstance(row, bytes) or len(row) not in _NAMES:
        raise UsageError(
            f"row {number} of data is a {type(row).__name__}; expected a dict, or a tuple of one "
            "to three values"
        )
    lists = len(row) == 2 and all(isinstance(one, list | tuple) for one in row)
    return dict(zip(_LISTS if lists else _NAMES[len(row)], row, strict=True))


def _plain(value: Any) -> Any:
    """Value as JSON has it; what is missing in a frame is none."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if hasattr(value, "tolist"):  # numpy
        value = value.tolist()
    if isinstance(value, list | tuple | set):
        return [_plain(one) for one in value]
    if isinstance(value, bytes):
        raise TypeError("bytes")
    if isinstance(value, Path):
        return str(value.absolute())
    if hasattr(value, "isoformat"):
        return None if value != value else str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return None if is_missing(value) else value
