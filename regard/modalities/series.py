"""Series of numbers: arrays, and files that hold one or many."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.augment import step_rng
from regard.data.batches import Shuffled
from regard.data.in_memory import MemoryTable, UserData, on_disk
from regard.data.lines import missing
from regard.data.parts import PartsAsked
from regard.data.series import (
    SeriesData,
    SeriesFormat,
    SeriesSet,
    find_series_parts,
    load_series,
    stack,
)
from regard.data.series_augment import SeriesAugment
from regard.data.series_files import (
    SeriesOptions,
    SeriesRecord,
    holds_series,
    read_recordings,
    recording,
)
from regard.errors import UsageError
from regard.metrics.baselines import block_means
from regard.modalities.base import (
    LIST_SUFFIXES,
    MEANT,
    Choose,
    ExamineOptions,
    Finding,
    FoundInputs,
    Inputs,
    LabelledBatch,
    Modality,
    Survey,
    class_counts,
    plural,
    spread,
)
from regard.models.protocols import Model
from regard.models.series import SeriesConfig


@dataclass
class SeriesCounts:
    """The size of one part of a set of series."""

    series: int
    classes: dict[str, int]
    channels: int
    shortest: int
    longest: int
    total: int

    def __str__(self) -> str:
        classes = f"{len(self.classes):,} class{'es' * (len(self.classes) != 1)}"
        ends = sorted({self.shortest, self.longest})
        return (
            f"{self.series:>10,} series of {classes}, {plural(self.channels, 'channel')}, "
            f"{' to '.join(f'{n:,}' for n in ends)} steps"
        )


_DILATIONS = (1, 2, 4, 8, 16)
_KERNELS = torch.full((84, 1, 9), -1.0)
for _n, _places in enumerate(combinations(range(9), 3)):
    _KERNELS[_n, 0, list(_places)] = 2.0


class Series(Modality[Tensor, SeriesFormat, SeriesData]):
    """Series of vectors, or of larger arrays, with as many steps as each has."""

    name, key, one, many = "series", "series", "series", "series"
    columns = ("series",)
    tasks = {"label": "series"}
    few, unit = 5, "steps"
    baseline = "a linear model of means and kernels"
    Format, format_keys = SeriesFormat, "axes, channels, mean, std"

    def is_one(self, given: Any) -> bool:
        """Tell whether this is one series, a path or an array, rather than several."""
        one = isinstance(given, SeriesRecord) or super().is_one(given)
        return one and not isinstance(given, Mapping)

    def opened(self, file: Any) -> Any:
        """Return the path of an open file."""
        return on_disk(file)

    def recordings(
        self,
        path: str | Path | MemoryTable,
        format: SeriesFormat | None = None,
        columns: str | None = None,
    ) -> list[SeriesRecord]:
        """Return all series of a file, with labels or without, by the columns of the training."""
        return read_recordings(path, SeriesOptions(columns, None, False, format), [])

    def rows(
        self,
        rows: list[Mapping[str, Any]],
        column: Choose,
        format: SeriesFormat | None = None,
        columns: Any = None,
    ) -> list[SeriesRecord]:
        """Return the series that the rows of a table hold."""
        return self.recordings(MemoryTable(rows), format, columns)

    def check(
        self, given: Any, settings: Any = None, format: SeriesFormat | None = None
    ) -> SeriesRecord:
        """Return the series that is given: an array, a file, or one of a file as FILE:LINE."""
        if isinstance(given, SeriesRecord):
            return given
        if isinstance(given, str | Path) and given:
            named = re.fullmatch(r"(.+):\d+", str(given))
            within = bool(named) and not Path(given).exists()
            path = Path(named[1]) if named and within else Path(given)
            if not path.is_file():
                raise UsageError(missing(path))
            found = self.recordings(path, format, getattr(settings, "columns", None))
            some = [one for one in found if not within or one.where == str(given)]
            if len(some) != 1:
                where = found[0].where
                raise UsageError(f"{given}: {len(some)} series; name one of them, such as {where}")
            return some[0]
        try:
            values = np.asarray(given, dtype=np.float64)
        except (ValueError, TypeError):
            raise UsageError(f"{given!r:.60} is no series; give a path or an array") from None
        return recording(values[:, None] if values.ndim == 1 else values, "", "the series")

    def decode(
        self, given: SeriesRecord, format: SeriesFormat, notes: list[str] | None = None
    ) -> Tensor:
        """Return a series in the scale of a model."""
        return format.take(given.values, given.where)

    def found(
        self, path: str, format: SeriesFormat | None = None, columns: str | None = None
    ) -> FoundInputs | None:
        """Return the series of a file; lines of a list name some."""
        if os.path.isdir(path) or os.path.splitext(path)[1].lower() in LIST_SUFFIXES:
            return None
        series = self.recordings(path, format, columns)
        if len(series) == 1:
            return FoundInputs([(path, None)])
        return FoundInputs(((one, None) for one in series), several=True)

    def columns_of(self, settings: Any) -> list[str]:
        """Return the names of the columns of a table of files, unless the user names others."""
        return [] if self.columns_asked(settings) else super().columns_of(settings)

    def holds(
        self, data: UserData | None, columns: str | None = None, header: bool | None = None
    ) -> bool:
        """Tell whether data are series of numbers: .ts or NPZ files, or tables of series."""
        return holds_series(data, columns, header)

    def guess(self, path: Path, columns: str | None, header: bool | None) -> tuple[str, str]:
        """Take them for what has labels."""
        return "label", "series of numbers with labels"

    def parts(self, data: str, asked: ExamineOptions) -> Any:
        """Find the file of each part."""
        files, shares = find_series_parts(data, asked.valid, asked.test)
        return {name: partial(Path, path) for name, path in files.items()}, shares

    def survey(self, name: str, files: Path, asked: ExamineOptions) -> Survey:
        """Read all series of a part, and tell of numbers that are missing or always the same."""
        notes: list[str] = []
        items = read_recordings(files, SeriesOptions(asked.columns, asked.header), notes)
        remedy = "nothing, or name them with columns="
        about = [note.removeprefix(f"{files}: ") for note in notes]
        findings = [Finding("note", note, str(files), remedy, "read_as") for note in about]
        steps = [len(item.values) for item in items]
        sizes = items[0].values.shape[-1], min(steps), max(steps), len(items)
        counts = SeriesCounts(len(items), class_counts(items), *sizes)
        some = [items[i] for i in spread(len(items))]
        sample = [{"series": item.values.tolist(), "label": item.label} for item in some]
        return Survey(counts, items, sample, [*findings, *_odd_numbers(name, files, items)])

    def example(
        self, config: SeriesConfig, batch: int, size: int, beside: bool = False
    ) -> tuple[Tensor, ...]:
        """Return series of so many steps."""
        return (torch.empty(batch, *[size] * len(config.chunk), config.channels, device="meta"),)

    # With labels

    def load(
        self,
        data: str,
        source: SeriesOptions,
        format: SeriesFormat | None = None,
        *,
        classes: Sequence[str] | None = None,
        **asked: Unpack[PartsAsked],
    ) -> SeriesData:
        """Load series of files and tables."""
        return load_series(data, options=source, classes=classes, **asked)

    def settle(self, data: SeriesData, format: SeriesFormat | None) -> SeriesFormat:
        """Mean and deviation of the channels of train, unless a model has a format already."""
        return format or SeriesFormat.of(data["train"], data.columns)

    def saved_format(self, folder: Path, model: Model, config: Mapping[str, Any]) -> SeriesFormat:
        """Format that the config.json of a folder has, of as many axes as the model reads."""
        format = super().saved_format(folder, model, config)
        self.shape(model.config, format, new=False)
        return format

    def shape(self, config: SeriesConfig, format: SeriesFormat, new: bool) -> Any:
        """Config of a model for so many channels and axes."""
        if new:
            config = replace(config, channels=format.channels)
        if len(config.chunk) != format.axes:
            raise UsageError(
                f"chunk={','.join(map(str, config.chunk))} for arrays of {format.axes} axes; "
                "give a length for each"
            )
        return config

    def raws(self, part: SeriesSet, format: SeriesFormat) -> list[Tensor]:
        """Normalised series of a part."""
        return [format.take(item.values, item.where) for item in part.items]

    def collate(
        self,
        raws: Sequence[Tensor],
        format: SeriesFormat,
        device: torch.device | str = "cpu",
    ) -> Inputs:
        """Series one upon the other, and their lengths."""
        return tuple(part.to(device) for part in stack(raws))

    def batches(self, part: SeriesSet, format: SeriesFormat, settings: Any, labels: int) -> Any:
        """Batches of augmented series."""
        return SeriesBatches(self.raws(part, format), part.labels, settings, labels)

    def features(self, raws: Sequence[Tensor], format: SeriesFormat) -> np.ndarray:
        """Means of stretches (n, d), and how often kernels of many widths answer."""
        flat = [x.flatten(1).float() for x in raws]
        return np.stack([np.append(block_means(x.numpy()), _answers(x)) for x in flat])


def _answers(series: Tensor) -> np.ndarray:
    """How often, and how much at most, kernels of nine steps answer in a series (n, c).

    They are the 84 of MiniRocket (Dempster et al. 2021), three twos among six minus ones, over
    the mean of all channels.
    """
    signal = series.mean(1).view(1, 1, -1)
    found = []
    for dilation in _DILATIONS:
        heard = F.conv1d(signal, _KERNELS, padding=4 * dilation, dilation=dilation)[0]
        found += [(heard > 0).float().mean(1), heard.amax(1).clamp(-1e3, 1e3)]
    return torch.cat(found).numpy()


class SeriesBatches:
    """Batch n of augmented series, a pure function of (seed, n)."""

    def __init__(self, series: Sequence[Tensor], numbers: np.ndarray, settings: Any, labels: int):
        self.series, self.numbers, self.settings = series, torch.from_numpy(numbers), settings
        self.shuffled = Shuffled(len(series), settings.batch, settings.seed)
        strengths = settings.strength, settings.mixup, settings.label_smoothing
        self.augment = SeriesAugment(settings.augment, labels, *strengths)

    def __getitem__(self, n: int) -> LabelledBatch:
        """Batch n."""
        picked = self.shuffled[n]
        series, lengths = stack([self.series[i] for i in picked])
        rng = step_rng(self.settings.seed, n)
        made = self.augment(series, lengths, self.numbers[torch.from_numpy(picked)], rng)
        return LabelledBatch(*made, tokens=int(made[1].sum()))

    def epoch(self) -> float:
        """Number of batches in which all series are read once."""
        return self.shuffled.epoch()


def _odd_numbers(name: str, path: Path, items: list[SeriesRecord]) -> Iterator[Finding]:
    """Yield numbers that are missing, and channels in which nothing happens."""
    flat = np.concatenate([item.values.reshape(-1, item.values.shape[-1]) for item in items])
    gaps = np.isnan(flat)
    if gaps.any():
        first = next(item.where for item in items if np.isnan(item.values).any())
        what = f"{plural(int(gaps.sum()), 'number')} of {name} missing ({gaps.mean():.1%})"
        remedy = "nothing, if few: each is taken for the mean of its channel; else fill them in"
        level = "warning" if gaps.mean() > 0.1 else "note"
        yield Finding(level, what, first, remedy, "missing", int(gaps.sum()))
    still = [n + 1 for n, channel in enumerate(flat.T) if len(np.unique(channel)) < 2]
    if still:
        channels = ", ".join(map(str, still[:8]))
        what = f"{plural(len(still), 'channel')} of {name} always the same: {channels}"
        yield Finding("note", what, str(path), MEANT, "constant", len(still))


SERIES = Series()
