"""What every modality can be asked: which files it is in, and how one input is told and read."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from PIL.Image import Image
from torch import Tensor

from regard.data.columns import columns_read
from regard.data.in_memory import is_missing
from regard.data.media import cell_file
from regard.data.parts import Dataset, named_files
from regard.data.split import Split
from regard.data.table import is_folder
from regard.errors import BrokenInput, UsageError, log

One = str | Path | bytes | Image | np.ndarray | Tensor  # one text, image or sound, and no list
Choose = Callable[[Sequence[str]], str]  # the column that is read, of all there are
LISTS = (".txt", ".jsonl", ".list")  # files whose lines name inputs
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".feather")  # rows of named columns
Raw = TypeVar("Raw")


class Found(NamedTuple):
    """The inputs that a path holds, each with the row of a table that it came in, if it did."""

    inputs: Iterable[tuple[Any, dict[str, Any] | None]]
    several: bool = False  # so that answers have the name of their input before them
    rows: bool = False  # whether they are the rows of a table


class Modality(Generic[Raw]):
    """A kind of input. Unless a modality says otherwise, each input is a file of its own."""

    name: str  # key of its format in config.json
    key: str  # of an input in JSON
    one: str
    many: str
    suffixes: frozenset[str] = frozenset()
    columns: tuple[str, ...]  # usual names of the column that holds inputs
    targets: tuple[str, ...] = ("tgt", "target")  # of the text that an input is to be judged with

    # One input, as a user gives it

    def is_one(self, given: Any) -> bool:
        """Tell whether this is one input, a file as datasets keeps it too, rather than several."""
        alone = isinstance(given, One) or not isinstance(given, Iterable)
        return alone or cell_file(given) is not given

    def opened(self, file: Any) -> Any:
        """Return what an open file gives: its bytes."""
        if isinstance(read := file.read(), str):
            raise UsageError(f"an open file of {self.key}; open it with mode 'rb'")
        return read

    def rows(
        self, rows: list[Mapping[str, Any]], column: Choose, format: Any = None, columns: Any = None
    ) -> list[Any]:
        """Return the inputs that the rows of a table hold, in the column that is chosen.

        `columns` are those that the user names, where an input may take several.
        """
        name = column(list(map(str, rows[0])))
        cells = [row.get(name) for row in rows]
        for number, cell in enumerate(cells, 1):
            if is_missing(cell):
                raise UsageError(f"row {number}: nothing in {name!r:.40}; fill it or leave it out")
        return cells

    def check(self, given: Any, settings: Any = None, format: Any = None) -> Any:
        """Return an input as `read` takes it, or refuse it; `settings` are those of a run."""
        given = cell_file(given)
        if not isinstance(given, One):
            raise UsageError(f"{given!r:.60} is no {self.one}; give a path, bytes or an array")
        return given

    def decode(self, given: Any, format: Any, notes: list[str] | None = None) -> Raw:
        """Return a checked input in a model's format; notes tell what was done to it."""
        raise NotImplementedError

    def read(
        self, given: Any, format: Any, broken: str = "refuse", notes: list[str] | None = None
    ) -> Raw | str:
        """Return an input in a model's format, or what is wrong with it if such are skipped."""
        if isinstance(given, str) and not given:
            return "no file is named"
        try:
            return self.decode(given, format, notes)
        except BrokenInput as mistake:
            if broken == "refuse":
                raise UsageError(f"{mistake}; or pass over such files: broken=skip") from None
            log(str(mistake))
            return str(mistake)

    # Files and data

    def found(self, path: str, format: Any = None, columns: str | None = None) -> Found | None:
        """Return the inputs that a file or folder is; None where they are its lines or rows."""
        if os.path.isdir(path):
            if not (files := sorted(self.files_in(path))):
                ends = ", ".join(sorted(self.suffixes))
                raise UsageError(f"{path}: no {self.one} in this folder; expected files in {ends}")
            return Found(((file, None) for file in files), several=True)
        listed = os.path.splitext(path)[1].lower() in LISTS
        return None if listed else Found([(path, None)])

    def files_in(self, folder: str) -> Iterator[str]:
        """Yield the paths of all files in a folder, and in those within, that may be inputs."""
        for place, _, names in os.walk(folder):
            for name in names:
                if os.path.splitext(name)[1].lower() in self.suffixes and not name.startswith("."):
                    yield os.path.join(place, name)

    def columns_of(self, settings: Any) -> list[str]:
        """Return the names of the columns that are trained on, where data are a table of names."""
        if (names := self.columns_asked(settings)) and not any(map(str.isdecimal, names)):
            return names
        path = Path(settings.data)
        files = named_files(path).get("train", []) if is_folder(path) else [path]
        asked = {key: getattr(settings, key, None) for key in ("source", "target", "header")}
        try:
            columns = getattr(settings, "columns", None)
            return list(columns_read(files[0], columns, **asked)) if files else []
        except (UsageError, OSError):  # no table of two columns
            return []

    def columns_asked(self, settings: Any) -> list[str]:
        """Return the columns that the user names."""
        asked = getattr(settings, "columns", None)
        return [name.strip() for name in str(asked).split(",")] if asked else []

    def load_alone(self, data: str, part: str, trained: Split | None) -> Dataset[Any] | None:
        """Load a part of inputs that have nothing to be judged by; None where there are none."""
        return None

    def first_inputs(self, rows: Any, count: int) -> list[Any]:
        """Return the first inputs of a part of data as `check` takes them."""
        if hasattr(rows, "inputs"):
            return rows.inputs(count)
        return [getattr(row, "input", row) for row in rows[:count]]
