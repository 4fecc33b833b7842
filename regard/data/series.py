"""Sets of series of numbers in the format of a model: parts, normalisation, padded batches."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from regard.data.lines import missing
from regard.data.media import class_names, label_numbers
from regard.data.parts import (
    NEEDED,
    Dataset,
    PartReader,
    PartsAsked,
    given_files,
    load_parts,
    no_part,
    single_file,
)
from regard.data.series_files import (
    MOST_AXES,
    MOST_CHANNELS,
    SeriesColumns,
    SeriesOptions,
    SeriesRecord,
    part_files,
    read_series,
)
from regard.data.split import RowSplitter, shares_and_files
from regard.data.table import is_folder
from regard.errors import UsageError


@dataclass(frozen=True)
class SeriesFormat(SeriesColumns):
    """The series that a model takes: so many axes, and channels of this mean and deviation.

    Beside that, how the table that it was trained on holds them.
    """

    axes: int = field(default=1, metadata={"min": 1, "max": MOST_AXES})
    channels: int = field(default=1, metadata={"min": 1, "max": MOST_CHANNELS})
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = field(default=(), metadata={"above": 0})

    def check(self) -> "SeriesFormat":
        """Refuse numbers that do not fit each other."""
        if not len(self.mean) == len(self.std) == self.channels:
            raise UsageError(
                f"{len(self.mean)} means and {len(self.std)} standard deviations for "
                f"{self.channels} channels; expected one of each for a channel"
            )
        return self

    @classmethod
    def of(cls, series: "SeriesSet", columns: SeriesColumns) -> "SeriesFormat":
        """Take the mean and deviation of each channel over all steps that are not missing."""
        values = [one.values for one in series.items]
        axes, channels = values[0].ndim - 1, values[0].shape[-1]
        flat = np.concatenate([x.reshape(-1, channels) for x in values]).astype(np.float64)
        known = ~np.isnan(flat)
        count = np.maximum(known.sum(0), 1)
        mean = np.where(known, flat, 0).sum(0) / count
        std = np.sqrt((np.where(known, flat - mean, 0) ** 2).sum(0) / count)
        rounded = [[float(f"{x:.6g}") for x in row] for row in (mean, std)]
        numbers: dict[str, Any] = {
            "mean": tuple(rounded[0]),
            "std": tuple(x or 1.0 for x in rounded[1]),
        }
        return cls(**asdict(columns), axes=axes, channels=channels, **numbers)

    def take(self, values: np.ndarray, where: str = "the array") -> Tensor:
        """Series (n1, ..., channels) normalised; what is missing is the channel's mean."""
        if values.ndim != self.axes + 1 or values.shape[-1] != self.channels or not values.size:
            axes = ", ".join(["steps", *(f"n{n}" for n in range(2, self.axes + 1))])
            raise UsageError(
                f"{where}: a series {values.shape}; expected ({axes}, {self.channels} channels)"
            )
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        return torch.from_numpy(np.nan_to_num((values.astype(np.float32) - mean) / std, nan=0.0))


class SeriesSet:
    """The series of a part with the numbers of their labels."""

    def __init__(self, items: Sequence[SeriesRecord], classes: Sequence[str] = ()):
        self.items, self.classes = list(items), list(classes)
        self.labels = np.array(label_numbers(items, classes) if classes else [], np.int64)

    def __len__(self) -> int:
        return len(self.items)

    def pick(self, rows: Sequence[int]) -> "SeriesSet":
        """Some of the series."""
        return SeriesSet([self.items[row] for row in rows], self.classes)

    def inputs(self, count: int) -> list[SeriesRecord]:
        """First series."""
        return self.items[:count]

    def where(self, i: int) -> str:
        """File of a series, and its place in it."""
        return self.items[i].where

    @property
    def sha(self) -> str:
        """Hash of the series and their labels."""
        text = "".join(f"{item.source} {item.label}\n" for item in self.items)
        return hashlib.sha256(text.encode()).hexdigest()


@dataclass
class SeriesData(Dataset[SeriesSet]):
    """The series of each part, the names of their labels, and the columns of their tables."""

    columns: SeriesColumns = field(default_factory=SeriesColumns)

    @cached_property
    def sha(self) -> str:
        """A hash of what is trained and validated on."""
        parts = [self.parts[name].sha for name in ("train", "valid") if name in self.parts]
        return hashlib.sha256(json.dumps([parts, self.classes]).encode()).hexdigest()


def find_series_parts(
    data: str, valid: str | None, test: str | None
) -> tuple[dict[str, Path], dict[str, float]]:
    """Find the file of each part, and the shares of train that are to be split off, if told."""
    shares, given = shares_and_files(valid, test)
    if not Path(data).exists():
        raise UsageError(missing(Path(data)))
    files = part_files(Path(data)) if is_folder(data) else {"train": [Path(data)]}
    files = {name: some for name, some in files.items() if name not in shares}
    files |= given_files(data, given)
    keys = {"train": "data"}
    return {n: single_file(some, n, data, keys.get(n)) for n, some in files.items()}, shares


def load_series(
    data: str,
    *,
    options: SeriesOptions | None = None,
    classes: Sequence[str] | None = None,
    **asked: Unpack[PartsAsked],
) -> SeriesData:
    """Read the needed parts of a set; without one for validation, some are split off by hash.

    `classes` are the labels that are known, else they are those of train.
    """
    options = options or SeriesOptions()
    files, shares = find_series_parts(data, asked.get("valid"), asked.get("test"))
    loaded = SeriesData({}, classes=list(classes or []))

    def read(name: str) -> SeriesSet:
        items, columns = read_series(path := files[name], options, loaded.notes)
        if not loaded.classes:
            loaded.classes = class_names({item.label for item in items}, ())
        if name == "train" or not loaded.columns.layout:
            loaded.columns = columns
        gaps = sum(int(np.isnan(item.values).sum()) for item in items)
        if gaps:
            what = f"{gaps:,} numbers of {path} are missing"
            loaded.notes.append(f"{what}; each is taken for the mean of its channel")
        return SeriesSet(items, loaded.classes)

    return load_parts(
        loaded,
        {name: PartReader(files[name], partial(read, name)) for name in files},
        need=asked.get("need", NEEDED),
        shares=shares,
        absent=lambda name: no_part(data, name, f"{name}.ts, {name}.npz or {name}.csv"),
        where=data,
        splitter=RowSplitter("series", items=lambda rows: rows.items, pick=SeriesSet.pick),
        unnamed=not is_folder(data),
        trained=asked.get("trained"),
    )


def stack(series: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Put series one upon the other, padded with zeros, and give their lengths."""
    return (
        torch.nn.utils.rnn.pad_sequence(list(series), batch_first=True),
        torch.tensor([len(one) for one in series]),
    )
