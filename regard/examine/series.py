"""A look over series of numbers before they are trained on: what is wrong, where, what to do."""

from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from regard.data.series import find_series_parts
from regard.data.series_files import Recording, SeriesOptions, read_recordings
from regard.errors import UsageError
from regard.examine.report import (
    MEANT,
    SERIES,
    USUAL,
    DataReport,
    ExamineOptions,
    compare_items,
    plural,
)

FEW = 5  # series of a class that can hardly be learnt from
SAMPLE = 128  # series to measure a training with


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


def examine_series(data: str, given: ExamineOptions = USUAL) -> DataReport:
    """Look over all parts of a set of series and report what is wrong, where, and the remedy."""
    files, shares = find_series_parts(data, given.valid, given.test)
    report, parts = DataReport(data), {}
    for name in (part for part in ("train", "valid", "test") if part in files):
        try:
            options = SeriesOptions(given.columns, given.header)
            notes: list[str] = []
            items = read_recordings(files[name], options, notes)
        except UsageError as error:
            report.refused(files[name], error)
            continue
        for note in notes:
            what = note.removeprefix(f"{files[name]}: ")
            report.add("note", "read_as", files[name], what, "nothing, or name them with columns=")
        parts[name] = items
        steps = [len(item.values) for item in items]
        classes = dict(Counter(item.label for item in items).most_common())
        sizes = items[0].values.shape[-1], min(steps), max(steps), len(items)
        report.parts[name] = SeriesCounts(len(items), classes, *sizes)
        _find_numbers(report, name, files[name], items)
    compare_items(report, parts, SERIES, FEW)
    if "train" in parts:
        some = parts["train"][:: max(1, len(parts["train"]) // SAMPLE)][:SAMPLE]
        report.sample = [{"series": item.values.tolist(), "label": item.label} for item in some]
    return report.close((*files, *shares))


def _find_numbers(report: DataReport, name: str, path: Path, items: list[Recording]) -> None:
    """Find numbers that are missing, and channels in which nothing happens."""
    flat = np.concatenate([item.values.reshape(-1, item.values.shape[-1]) for item in items])
    gaps = np.isnan(flat)
    if gaps.any():
        first = next(item.where for item in items if np.isnan(item.values).any())
        what = f"{plural(int(gaps.sum()), 'number')} of {name} missing ({gaps.mean():.1%})"
        remedy = "nothing, if few: each is taken for the mean of its channel; else fill them in"
        level = "warning" if gaps.mean() > 0.1 else "note"
        report.add(level, "missing", first, what, remedy, int(gaps.sum()))
    still = [n + 1 for n, channel in enumerate(flat.T) if len(np.unique(channel)) < 2]
    if still:
        channels = ", ".join(map(str, still[:8]))
        what = f"{plural(len(still), 'channel')} of {name} always the same: {channels}"
        report.add("note", "constant", path, what, MEANT, len(still))
