"""Classification of series: series of numbers with labels to a model that labels series."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from regard.data.augment import augments
from regard.data.series import SeriesData, SeriesFormat
from regard.data.series_augment import SERIES_AUGMENTS
from regard.data.series_files import SeriesOptions
from regard.modalities.series import SERIES
from regard.models import family
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import (
    SHORT_KEYS,
    RunSettings,
    derived,
)
from regard.tasks.labels.classifier import classifier
from regard.tasks.labels.judge import LabelJudge
from regard.tasks.labels.objective import LabelObjective, load_label_codec, with_linear
from regard.tasks.labels.settings import (
    LabelEvalSettings,
    LabelTrainSettings,
    LinearTrain,
    OneLabelRun,
)
from regard.tasks.parts import Choice, Task

SeriesConfig, _ = family("series")
_TOKENS = 128  # that a series is cut into, unless chunk= says


@dataclass(frozen=True)
class SeriesColumnSettings:
    """Where series and labels are in a table."""

    GROUP = "data"

    columns: str | None = setting(None, "of tables: label; path,label; or id,time,label")
    header: bool | None = setting(None, "whether a table has a header row; guessed unless told")

    def reading(self) -> SeriesOptions:
        """How series stand in a table."""
        return SeriesOptions(self.columns, self.header)


@dataclass(frozen=True)
class TrainSeries(SeriesColumnSettings, LinearTrain, LabelTrainSettings):
    """What a training of a classifier of series can be told."""

    schedule: str = "cosine"
    weight_decay: float = 0.05
    ema: float = 0.99
    family: str = setting("series", "model family", group="model")
    batch: int = setting(32, "series per batch", min=1, max=100_000, group="optimiser")
    augment: str = setting(
        "jitter+scale+mask",
        "augmentation",
        choices=lambda: ("none", *SERIES_AUGMENTS),
        joined_by="+",
    )
    strength: float = setting(1.0, "magnitude of augmentation", min=0, max=10)
    mixup: float = setting(0.0, "alpha of mixup; 0 disables it", min=0, max=100)
    model: SeriesConfig = field(default_factory=SeriesConfig)  # type: ignore[valid-type]

    def format(self, origin: Origin | None) -> SeriesFormat | None:
        """Format of the model in init=; else the data tell it."""
        if origin is None or not isinstance(origin.config.get("series"), dict):
            return None
        return SERIES.saved_format(origin.folder, origin.model, origin.config)


@dataclass(frozen=True)
class RunSeries(OneLabelRun, RunSettings):
    """How to label series."""

    batch: int = setting(64, "series per batch", min=1, max=100_000, group="machine")


@dataclass(frozen=True)
class EvalSeries(derived("EvalSeries", SeriesColumnSettings, LabelEvalSettings, RunSeries)):
    """What to judge on, and how."""

    valid: str | None = setting(
        None, "which file is the validation part, or its share", group="data"
    )


class SeriesLabels(LabelObjective[TrainSeries, SeriesData]):
    """Learns labels of series of numbers."""

    def resolve(self, task: Task, values: Mapping[str, Any], origin: Origin | None) -> TrainSeries:
        """Refuse augmentations that mean nothing."""
        settings = super().resolve(task, values, origin)
        augments(settings.augment, SERIES_AUGMENTS)
        return settings

    def suit(
        self, settings: TrainSeries, values: Mapping[str, Any], data: SeriesData
    ) -> tuple[TrainSeries, Choice | None]:
        """Cut series into chunks by how long they are, unless told or already trained."""
        if values.get("init") or {"chunk", "model.chunk"} & values.keys():
            return with_linear(settings, data)
        shapes = [item.values.shape[:-1] for item in data["train"].items]
        sides = [max(shape[axis] for shape in shapes) for axis in range(len(shapes[0]))]
        most = max(1, int(_TOKENS ** (1 / len(sides))))
        chunk = tuple(-(-side // most) for side in sides)
        longest = max(sides[0], settings.model.max_length)
        settings = replace(settings, model=replace(settings.model, chunk=chunk, max_length=longest))
        given = {"chunk": ",".join(map(str, chunk)), "max_length": longest}
        why = f"series of up to {' x '.join(map(str, sides))} steps"
        return with_linear(settings, data, Choice(why, given, "give chunk= to choose"))


CLASSIFY_SERIES = Task(
    name="series",
    holds="series of numbers and labels",
    inputs=SERIES,
    predictor=classifier(RunSeries()),
    judge=LabelJudge(),
    load_codec=partial(load_label_codec, SERIES),
    objective=SeriesLabels(
        "series",
        SERIES,
        TrainSeries,
        sizes={
            "tiny": {"lr": 0.002, "batch": 32, "steps": 1000},
            "small": {"lr": 0.001, "batch": 32, "steps": 2000},
            "base": {"lr": 0.0005, "batch": 64, "steps": 5000},
            "big": {"lr": 0.0003, "batch": 64, "steps": 10_000},
        },
        short={
            **SHORT_KEYS,
            "chunk": "model.chunk",
            "stride": "model.stride",
            "pool": "model.pool",
            "drop_path": "model.drop_path",
            "head_dropout": "model.head_dropout",
            "max_length": "model.max_length",
            "members": "model.members",
        },
    ),
    target="label",
    unit="series",
    judged=EvalSeries,
)
