"""A toy modality in one file: clouds of points in the plane, a JSON line each."""

import hashlib
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from regard.data.parts import PartReader, load_parts, no_part
from regard.data.series import SeriesData, SeriesFormat, SeriesSet
from regard.data.series_files import SeriesRecord
from regard.data.split import RowSplitter, shares_and_files
from regard.errors import UsageError
from regard.modalities.base import Finding, FoundInputs, Modality, Survey, class_counts, spread
from regard.tasks import series
from regard.tasks.frame.media import saved_format
from regard.tasks.labels.judge import LabelJudge
from regard.tasks.labels.objective import LabelObjective
from regard.tasks.labels.settings import saved_labels_and_baselines
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


def load_clouds(
    data, *, classes=None, need=("train", "valid"), valid=None, test=None, trained=None
):
    loaded = SeriesData({}, classes=list(classes or []))
    shares, _ = shares_and_files(valid, test)

    def read():
        items = read_clouds(data)
        loaded.classes = loaded.classes or sorted({item.label for item in items})
        return SeriesSet(items, loaded.classes)

    return load_parts(
        loaded,
        {"train": PartReader(data, read)},
        need=need,
        shares=shares,
        absent=lambda name: no_part(data, name, f"a share with {name}="),
        where=data,
        splitter=RowSplitter("clouds", items=lambda rows: rows.items, pick=SeriesSet.pick),
        unnamed=True,
        trained=trained,
    )


class Clouds(Modality):
    name, key, one, many = "cloud", "points", "cloud", "clouds"
    columns, suffixes, tasks = ("points",), frozenset({SUFFIX}), {"label": "clouds"}
    unit = "points"

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


CLOUDS = Clouds()


@dataclass(frozen=True)
class CloudCodec(series.SeriesCodec):
    kind, modality = "cloud", CLOUDS


class LabelledClouds(series.LabelledSeries):
    def read(self, settings, origin):
        return load_clouds(settings.data, valid=settings.valid, test=settings.test)

    def codec(self, data, settings, learnt, origin):
        return CloudCodec(SeriesFormat.of(data["train"], data.columns), data.classes)


def load_codec(folder, model, config):
    format, _ = saved_format(SeriesFormat, "cloud", folder, config, "mean and deviation")
    return CloudCodec(format, *saved_labels_and_baselines(folder, model, config))


def read_test(runner, settings):
    asked = {"need": (settings.part,), "valid": settings.valid, "trained": runner.trained}
    return load_clouds(settings.data, classes=runner.labels, **asked)


TASK = replace(
    CLASSIFY_SERIES,
    name="clouds",
    holds="clouds of points and labels",
    inputs=CLOUDS,
    judge=LabelJudge(read_test),
    load_codec=load_codec,
    objective=LabelObjective(
        LabelledClouds(), series.TrainSeries, CLASSIFY_SERIES.sizes, CLASSIFY_SERIES.short
    ),
    unit="clouds",
)
