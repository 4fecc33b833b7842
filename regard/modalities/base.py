"""What every modality can be asked: which files it is in, and how one input is told and read."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from regard.data.columns import columns_read
from regard.data.in_memory import is_missing
from regard.data.marks import MARKS, excerpt, marks_in
from regard.data.media import cell_file
from regard.data.pairs import PairReader
from regard.data.parts import Dataset, named_files
from regard.data.split import Split
from regard.data.table import is_folder
from regard.errors import BrokenInput, UsageError, log

One = str | Path | bytes | Image | np.ndarray | Tensor  # one text, image or sound, and no list
Choose = Callable[[Sequence[str]], str]  # the column that is read, of all there are
LIST_SUFFIXES = (".txt", ".jsonl", ".list")  # files whose lines name inputs
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".feather")  # rows of named columns
Raw = TypeVar("Raw")


MEANT = "nothing, if that is meant"
LOOKED = 300  # rows of a table by which a task is guessed
_SAMPLE = 128  # files to measure a training with


class FoundInputs(NamedTuple):
    """The inputs that a path holds, each with the row of a table that it came in, if it did."""

    inputs: Iterable[tuple[Any, dict[str, Any] | None]]
    several: bool = False  # so that answers have the name of their input before them
    rows: bool = False  # whether they are the rows of a table


@dataclass(frozen=True)
class ExamineOptions:
    """How data are read that are looked over, and where their parts are."""

    columns: str | None = None
    header: bool | None = None
    valid: str | None = None
    test: str | None = None
    most: int | None = None  # rows or files of a part to look at
    quiet: bool = True
    target: str = "label"  # what is learnt of an input
    pattern: str | None = None  # of file names with labels in them


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
class Survey:
    """What a look over one part of data shows, before parts are compared.

    Args:
        counts: the size of the part: a dataclass with `total`, whose str() is a line of the report.
        items: inputs that can be read, each with `where`, `source` (a hash) and `label`.
        sample: some of these, to measure a training with.
        findings: what is odd about single inputs.
        notes: what was noted while they were found.
        bad: why each of the others cannot be read.
    """

    counts: Any
    items: Sequence[Any]
    sample: Any
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)


def plural(count: int, word: str) -> str:
    """Return a count with its word: 1 row, 2 rows."""
    return f"{count:,} {word}{'s' * (count != 1)}"


def made_up_text(batch: int, length: int) -> Tensor:
    """Return the tokens (batch, length) of texts on the meta device."""
    return torch.empty(batch, length, dtype=torch.long, device="meta")


def spread(count: int, most: int = _SAMPLE) -> range:
    """Return so many numbers, spread over all."""
    return range(0, count, max(1, count // most))[:most]


def class_counts(items: Iterable[Any]) -> dict[str, int]:
    """Return how many items each label has, the most first."""
    return dict(Counter(item.label for item in items if item.label).most_common())


def odd_characters(texts: Iterable[str], where: str = "") -> Iterator[Finding]:
    """Yield what no text should have, with its count and the first line."""
    seen: dict[str, tuple[str, int]] = {}
    for line in (line for text in texts for line in text.splitlines()):
        for kind in marks_in(line):
            first, count = seen.get(kind, (line, 0))
            seen[kind] = first, count + 1
    seen.pop("tab", None)
    for kind, (first, count) in seen.items():
        level, said, remedy = MARKS[kind]
        what = f"{plural(count, 'line')} {said}; the first: {excerpt(first)}"
        yield Finding(level, what, where, remedy, kind, count)


def first_targets(path: Path, columns: str | None, header: bool | None) -> list[str]:
    """Return what stands beside the first files of a table, or that of a folder."""
    table = named_files(path).get("train", [path])[0] if path.is_dir() else path
    try:
        reader = PairReader(table, columns=columns, header=header, skip_bad=True)
        return [pair.target for pair in islice(reader, LOOKED)]
    except UsageError:
        return []


def link_or_write(content: str | bytes, path: Path, suffix: str) -> Path:
    """Link a file, or write its bytes, of which not the suffix but what is in them decides."""
    if isinstance(content, bytes):
        path = path.with_suffix(suffix)
        path.write_bytes(content)
    else:
        path = path.with_suffix(Path(content).suffix)
        os.symlink(os.path.abspath(content), path)
    return path


class Modality(Generic[Raw]):
    """A kind of input. Unless a modality says otherwise, each input is a file of its own."""

    name: str  # key of its format in config.json
    key: str  # of an input in JSON
    one: str
    many: str
    suffixes: frozenset[str] = frozenset()
    columns: tuple[str, ...]  # usual names of the column that holds inputs
    targets: tuple[str, ...] = ("tgt", "target")  # of the text that an input is to be judged with
    tasks: Mapping[str, str] = {}  # what is learnt of an input (text, label, "") -> the task
    in_rows: bool = False  # whether inputs are lines or rows of tables, rather than files
    few: int = 10  # inputs of a label that can hardly be learnt from
    counted: str = "tokens"  # what of its data a training reads by the second
    size_key: str = "length"  # setting of `cost` that says how large an input is
    sides: int = 1  # of an input that are of this size
    unit: str = "tokens"  # of the size

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

    def found(
        self, path: str, format: Any = None, columns: str | None = None
    ) -> FoundInputs | None:
        """Return the inputs that a file or folder is; None where they are its lines or rows."""
        if os.path.isdir(path):
            if not (files := sorted(self.files_in(path))):
                ends = ", ".join(sorted(self.suffixes))
                raise UsageError(f"{path}: no {self.one} in this folder; expected files in {ends}")
            return FoundInputs(((file, None) for file in files), several=True)
        listed = os.path.splitext(path)[1].lower() in LIST_SUFFIXES
        return None if listed else FoundInputs([(path, None)])

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

    def holds(self, data: Any, columns: str | None = None, header: bool | None = None) -> bool:
        """Tell whether data are the path of a set of such inputs."""
        return False

    def guess(self, path: Path, columns: str | None, header: bool | None) -> tuple[str, str]:
        """Return what is most likely to be learnt of such data, a key of `tasks`, and why."""
        return "label", f"{self.many} with labels"

    def parts(
        self, data: str, asked: ExamineOptions
    ) -> tuple[dict[str, Callable[[], Any]], dict[str, float]]:
        """Find what reads each part that is looked over, and the shares of train to split off."""
        raise NotImplementedError

    def survey(self, name: str, files: Any, asked: ExamineOptions) -> Survey:
        """Look over what was read of a part."""
        raise NotImplementedError

    def compare(self, data: str, parts: Mapping[str, Survey]) -> list[Finding]:
        """Return what only several parts together show, beside copies, leaks and labels."""
        return []

    def write_sample(
        self, folder: Path, sample: Any, target: str, values: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Write a sample as data of a training, and return where it is and its number of rows.

        `values` are the settings of the training that say where the data are.
        """
        if isinstance(sample, str):
            (folder / "sample.txt").write_text(sample)
            return str(folder / "sample.txt"), len(sample)
        path = folder / "sample.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in sample))
        return str(path), len(sample)

    def words(self, beside: bool) -> tuple[str, str]:
        """Return what one input and several are called, with a text beside each or without."""
        return self.one, self.many

    def usual_size(self, config: Any, length: int) -> int:
        """Return the size of inputs of which the cost is told, for a family whose length it is."""
        return min(config.max_length, length)

    def example(
        self, config: Any, batch: int, size: int, beside: bool = False
    ) -> tuple[Tensor, ...]:
        """Return the arguments of a model for inputs of a size, made up on the meta device.

        Some models read a text `beside` each input.
        """
        raise NotImplementedError

    def first_inputs(self, rows: Any, count: int) -> list[Any]:
        """Return the first inputs of a part of data as `check` takes them."""
        if hasattr(rows, "inputs"):
            return rows.inputs(count)
        return [getattr(row, "input", row) for row in rows[:count]]
