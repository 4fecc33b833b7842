"""What every modality can be asked: its files, how inputs are read, and brought to a model."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Unpack, runtime_checkable

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor
from typing_extensions import TypeVar

from regard.attention.watch import watch
from regard.data.columns import columns_read
from regard.data.in_memory import UserData, is_missing
from regard.data.marks import MARKS, excerpt, marks_in
from regard.data.media import cell_file
from regard.data.pairs import PairReader
from regard.data.parts import Dataset, PartsAsked, named_files
from regard.data.split import Split
from regard.data.table import is_folder
from regard.errors import BrokenInput, UsageError, log
from regard.metrics.labels import one_hot
from regard.modalities.tokens import InputTokens, text_keys
from regard.models.protocols import Model
from regard.settings import fill_checked
from regard.viewer.picture import Picture

One = str | Path | bytes | Image | np.ndarray | Tensor  # one text, image or sound, and no list
Choose = Callable[[Sequence[str]], str]  # the column that is read, of all there are
LIST_SUFFIXES = (".txt", ".jsonl", ".list")  # files whose lines name inputs
TABLES = (".csv", ".tsv", ".parquet", ".arrow", ".feather")  # rows of named columns
Raw = TypeVar("Raw")  # one input as it is read
F = TypeVar("F", default=Any)  # how a model wants its inputs
D = TypeVar("D", bound=Dataset[Any], default=Any)  # parts of data with labels
Inputs = tuple[Tensor, ...] | Mapping[str, Tensor]  # arguments of a model
Describe = Callable[[Any], dict[str, Any]]  # answers inputs that were read, as fields of a picture

MEANT = "nothing, if that is meant"
LOOKED = 300  # rows of a table by which a task is guessed
_SAMPLE = 128  # files to measure a training with
_GROUP = 512  # inputs that are in memory at once
_GROUP_BYTES = 2**26  # of inputs that are in memory at once while they are answered


class FoundInputs(NamedTuple):
    """The inputs that a path holds, each with the row of a table that it came in, if it did."""

    inputs: Iterable[tuple[Any, dict[str, Any] | None]]
    several: bool = False  # so that answers have the name of their input before them
    rows: bool = False  # whether they are the rows of a table


class JudgedUnits(NamedTuple):
    """What of a part has labels, and is judged."""

    show: Callable[[int], tuple[str, str]]  # where unit i is, and what it is
    fields: Callable[[int], dict[str, Any]]  # of unit i in a file of predictions
    groups: np.ndarray | None = None  # (n,): the sentence of each word; these are resampled whole


@runtime_checkable
class NoneOfThese(Protocol):
    """What a modality can do beside, whose inputs may be none of what was learnt."""

    def outlier_vectors(self, model: Any, raws: Sequence[Any], format: Any) -> np.ndarray:
        """Numbers (n, w) by which the distance of inputs is measured."""
        ...

    def strangers(
        self, raws: Sequence[Any], format: Any, rng: np.random.Generator
    ) -> dict[str, Sequence[Any]]:
        """Inputs like these in size that are none of what was learnt, by their kind."""
        ...


class DrawnInput(NamedTuple):
    """An input of a batch as pixels (h, w, 3), and what is strong where on it (gh, gw)."""

    pixels: np.ndarray
    strength: np.ndarray
    notes: tuple[str, ...] = ()


class LabelledBatch(NamedTuple):
    """Inputs with their lengths, if these differ, and the targets (b, labels).

    What is learnt of the targets is a distribution over the labels, so smoothed and mixed ones are
    alike.
    """

    inputs: Tensor
    lengths: Tensor | None
    targets: Tensor
    tokens: int | None = None  # all lengths together, if the host knows

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        """Arguments of a model."""
        return (self.inputs,) if self.lengths is None else (self.inputs, self.lengths)


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


class Modality(Generic[Raw, F, D]):
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
    baseline: str = ""  # the simplest model that learns labels of inputs, of baselines.KINDS
    baseline_rows: int | None = None  # that it learns from; None: from all
    Format: type = object  # how a model wants its inputs
    format_keys: str = ""  # the main ones, as a message names them
    agrees: tuple[str, str] = ("channels", "channels")  # what of it a model's config has, too
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
        self,
        rows: list[Mapping[str, Any]],
        column: Choose,
        format: F | None = None,
        columns: Any = None,
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

    def check(self, given: Any, settings: Any = None, format: F | None = None) -> Any:
        """Return an input as `read` takes it, or refuse it; `settings` are those of a run."""
        given = cell_file(given)
        if not isinstance(given, One):
            raise UsageError(f"{given!r:.60} is no {self.one}; give a path, bytes or an array")
        return given

    def decode(self, given: Any, format: F, notes: list[str] | None = None) -> Raw:
        """Return a checked input in a model's format; notes tell what was done to it."""
        raise NotImplementedError

    def read(
        self, given: Any, format: F, broken: str = "refuse", notes: list[str] | None = None
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

    def holds(
        self, data: UserData | None, columns: str | None = None, header: bool | None = None
    ) -> bool:
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

    # Inputs with labels, to a model and back

    def load(
        self,
        data: str,
        source: Any,
        format: F | None = None,
        *,
        classes: Sequence[str] | None = None,
        **asked: Unpack[PartsAsked],
    ) -> D:
        """Load parts of data with labels.

        Args:
            data: where they are.
            source: how they lie there: the options of the modality's reader.
            format: how the model wants them, as far as it is known.
            classes: labels that are known; those of train unless given.
            asked: which parts.
        """
        raise NotImplementedError

    def settle(self, data: D, format: F | None) -> F:
        """Format of a new model for such data: what was wanted, and what the data tell."""
        raise NotImplementedError

    def saved_format(self, folder: Path, model: Model, config: Mapping[str, Any]) -> F:
        """Format that the config.json of a folder has, checked, and that its model reads."""
        where, given = str(folder / "config.json"), config.get(self.name)
        if not isinstance(given, dict):
            raise UsageError(
                f"{where}: {self.name!r} is {given!r:.40}; expected {self.format_keys}"
            )
        format, (key, word) = fill_checked(self.Format, given, where), self.agrees
        ours, theirs = getattr(format, key), getattr(model.config, key)
        if ours != theirs:
            raise UsageError(f"{where}: {self.many} of {ours} {word}, but the model reads {theirs}")
        return format

    def shape(self, config: Any, format: F, new: bool) -> Any:
        """Config of a model, a new one or one to go on with, for inputs of a format."""
        return config

    def format_for(self, format: F, settings: Any) -> F:
        """Format in which inputs are read by such settings of a run."""
        return format

    def label_table(self, part: Any, labels: Sequence[str]) -> np.ndarray:
        """Table (n, labels) of the labels of a part."""
        return one_hot(np.asarray(part.labels), len(labels))

    def judged(self, part: Any, labels: Sequence[str]) -> JudgedUnits:
        """What of a part is judged, and how it is told."""
        numbers = np.asarray(part.labels).tolist()

        def told(i: int) -> dict[str, Any]:
            return {self.key: part.where(i), "label": labels[numbers[i]]}

        return JudgedUnits(lambda i: ("", part.where(i)), told)

    def groups(
        self, inputs: Sequence[Any], format: F, broken: str = "refuse", most: int = _GROUP
    ) -> Iterator[tuple[list[Any], list[list[str]]]]:
        """Checked inputs as they are read, as many at once as there is memory for, and notes.

        One that cannot be read is what is wrong with it.
        """
        group: list[Any] = []
        notes: list[list[str]] = []
        total = 0
        for given in inputs:
            notes.append([])
            group.append(self.read(given, format, broken, notes[-1]))
            total += getattr(group[-1], "nbytes", 0)
            if total >= _GROUP_BYTES or len(group) == most:
                yield group, notes
                group, notes, total = [], [], 0
        if group:
            yield group, notes

    def raws(self, part: Any, format: F) -> Sequence[Raw]:
        """Inputs of a part as they are read."""
        raise NotImplementedError

    def length(self, raw: Raw, format: F) -> int:
        """Length of an input, by which batches are made of like ones."""
        return len(raw)  # type: ignore[arg-type]

    def limits(self, settings: Any, format: F) -> dict[str, int]:
        """Rows and tokens that a batch of a run may have."""
        return {"rows": settings.batch, "tokens": 2**62}

    def collate(self, raws: Sequence[Raw], format: F, device: torch.device | str = "cpu") -> Inputs:
        """Arguments of a model for inputs that were read."""
        raise NotImplementedError

    def batches(self, part: Any, format: F, settings: Any, labels: int) -> Any:
        """Batches of augmented inputs with targets of so many labels, for a training."""
        raise NotImplementedError

    def tokens(self, model: Any, raw: Raw, format: F) -> InputTokens:
        """Tokens of an input that can be cut."""
        names = self.token_names(model, raw, format)
        return InputTokens(names, text_keys(len(names)))

    def token_names(self, model: Any, raw: Raw, format: F) -> list[str]:
        """Names of the tokens that a model reads of an input, where these are a line."""
        return model.chunks.names(raw.shape[:-1])  # type: ignore[attr-defined]

    def picture(
        self, model: Any, given: Any, format: F, settings: Any, describe: Describe
    ) -> Picture:
        """Watch a model while it answers an input, and gather where it looked."""
        from regard.viewer.text import text_views

        raw = self.decode(given, format)
        with watch(model) as maps:
            described = describe([raw])
        views = text_views(maps, self.token_names(model, raw, format), whole=self.one)
        name = getattr(given, "where", str(given))
        return Picture(title=name, views=views, source=name, **described)

    def drawn(
        self, model: Any, format: F, batch: Any, row: int, strength: Tensor, peak: int
    ) -> DrawnInput | None:
        """An input of a batch with how strong something is at its places, and where it is most."""
        return None

    def vectors(self, part: Any, format: F) -> Any:
        """Inputs of a part as the baseline reads them."""
        return self.features(self.raws(part, format), format)

    def features(self, raws: Sequence[Any], format: F) -> Any:
        """What a linear model reads of inputs that were read."""
        raise NotImplementedError
