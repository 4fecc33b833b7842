"""A toy modality in one file: clouds of points in the plane, a JSON line each."""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from regard.data.parts import NEEDED, PartReader, load_parts, no_part
from regard.data.series import SeriesData, SeriesFormat, SeriesSet
from regard.data.series_files import SeriesRecord
from regard.data.split import RowSplitter, shares_and_files
from regard.errors import UsageError
from regard.modalities.base import Finding, FoundInputs, Modality, Survey, class_counts, spread
from regard.modalities.series import Series
from regard.tasks import series
from regard.tasks.labels.objective import load_label_codec
from regard.tasks.series import CLASSIFY_SERIES

SUFFIX = ".clouds"


@dataclass
class CloudCounts:
    clouds: int
    classes: dict[str, int]
    total: int

    def __str__(self):
        return f"{self.clouds:>10,} clouds of {len(self.classes)} labels"


def read_clouds(path):
    clouds = []
    for number, line in enumerate(Path(path).read_text().splitlines(), 1):
        where, row = f"{path}:{number}", json.loads(line)
        points = np.asarray(row["points"], dtype=np.float32)
        if points.ndim != 2 or points.shape[1] != 2:
            raise UsageError(f"{where}: points {points.shape}; expected pairs of numbers")
        source = hashlib.sha256(points.tobytes()).hexdigest()
        clouds.append(SeriesRecord(points, row.get("label", ""), where, source))
    return clouds


class Clouds(Modality[torch.Tensor, SeriesFormat, SeriesData]):
    name, key, one, many = "cloud", "points", "cloud", "clouds"
    columns, suffixes, tasks = ("points",), frozenset({SUFFIX}), {"label": "clouds"}
    unit, baseline = "points", "a linear model of means and kernels"
    Format, format_keys = SeriesFormat, "axes, channels, mean, std"

    def holds(self, data, columns=None, header=None):
        return isinstance(data, str | Path) and str(data).endswith(SUFFIX)

    def is_one(self, given):
        return isinstance(given, SeriesRecord | str | Path | np.ndarray)

    def found(self, path, format=None, columns=None):
        return FoundInputs(((cloud, None) for cloud in read_clouds(path)), several=True)

    def check(self, given, settings=None, format=None):
        if isinstance(given, SeriesRecord):
            return given
        if isinstance(given, str | Path):
            return read_clouds(given)[0]
        return SeriesRecord(np.asarray(given, np.float32), "", "the cloud", "")

    def decode(self, given, format, notes=None):
        return format.take(given.values, given.where)

    def parts(self, data, asked):
        return {"train": partial(Path, data)}, {}

    def survey(self, name, files, asked):
        items = read_clouds(files)
        empty = [item for item in items if not len(item.values)]
        found = [Finding("error", "a cloud without points", i.where, "drop it") for i in empty]
        rows = [items[i] for i in spread(len(items))]
        sample = [{"points": item.values.tolist(), "label": item.label} for item in rows]
        return Survey(
            CloudCounts(len(items), class_counts(items), len(items)), items, sample, found
        )

    def write_sample(self, folder, sample, target, values):
        path = folder / f"sample{SUFFIX}"
        path.write_text("".join(json.dumps(row) + "\n" for row in sample))
        return str(path), len(sample)

    def example(self, config, batch, size, beside=False):
        return (torch.empty(batch, size, config.channels, device="meta"),)

    def load(self, data, source, format=None, *, classes=None, **asked):
        loaded = SeriesData({}, classes=list(classes or []))

        def read():
            items = read_clouds(data)
            loaded.classes = loaded.classes or sorted({item.label for item in items})
            return SeriesSet(items, loaded.classes)

        return load_parts(
            loaded,
            {"train": PartReader(data, read)},
            need=asked.get("need", NEEDED),
            shares=shares_and_files(asked.get("valid"), asked.get("test"))[0],
            absent=lambda name: no_part(data, name, f"a share with {name}="),
            where=data,
            splitter=RowSplitter("clouds", items=lambda rows: rows.items, pick=SeriesSet.pick),
            unnamed=True,
            trained=asked.get("trained"),
        )

    # a cloud is to a model a series of points, in the order that they were drawn
    settle, shape, collate = Series.settle, Series.shape, Series.collate
    raws, batches = Series.raws, Series.batches

    def features(self, raws, format):
        return np.stack([points.mean(0).numpy() for points in raws])


CLOUDS = Clouds()
TASK = replace(
    CLASSIFY_SERIES,
    name="clouds",
    holds="clouds of points and labels",
    inputs=CLOUDS,
    load_codec=partial(load_label_codec, CLOUDS),
    objective=series.SeriesLabels(
        "series", CLOUDS, series.TrainSeries, CLASSIFY_SERIES.sizes, CLASSIFY_SERIES.short
    ),
    unit="clouds",
)
