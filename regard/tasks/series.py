"""Classification of series: series of numbers with labels to a model that labels series."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.augment import augments
from regard.data.labels import label_list
from regard.data.series import SeriesData, SeriesFormat, SeriesSet, load_series, stack
from regard.data.series_augment import SERIES_AUGMENTS
from regard.data.series_batches import SeriesBatch, SeriesBatches, normalised
from regard.data.series_files import SeriesOptions
from regard.errors import UsageError
from regard.metrics.baselines import block_means
from regard.modalities.series import SERIES
from regard.models import family
from regard.models.ensemble import each_member
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.media import MediaCodec, saved_format
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import text_keys
from regard.tasks.frame.settings import (
    SHORT_KEYS,
    BootstrapSettings,
    RunSettings,
    TrainSettings,
    derived,
)
from regard.tasks.labels.classifier import GROUP, classifier, in_groups
from regard.tasks.labels.judge import LabelJudge
from regard.tasks.labels.objective import LabelledInputs, LabelObjective
from regard.tasks.labels.settings import (
    OneLabelEval,
    OneLabelRun,
    OneLabelTrain,
    saved_labels_and_baselines,
)
from regard.tasks.parts import Choice, Task
from regard.tasks.runner import Runner
from regard.training.label_loss import soft_loss
from regard.viewer.picture import Picture

SeriesConfig, _ = family("series")
_TOKENS = 128  # that a series is cut into, unless chunk= says


@dataclass(frozen=True)
class SeriesColumnSettings:
    """Where series and labels are in a table."""

    GROUP = "data"

    columns: str | None = setting(None, "of tables: label; path,label; or id,time,label")
    header: bool | None = setting(None, "whether a table has a header row; guessed unless told")


@dataclass(frozen=True)
class TrainSeries(SeriesColumnSettings, OneLabelTrain, TrainSettings):
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


@dataclass(frozen=True)
class RunSeries(OneLabelRun, RunSettings):
    """How to label series."""

    batch: int = setting(64, "series per batch", min=1, max=100_000, group="machine")


@dataclass(frozen=True)
class EvalSeries(
    derived("EvalSeries", SeriesColumnSettings, OneLabelEval, BootstrapSettings, RunSeries)
):
    """What to judge on, and how."""

    valid: str | None = setting(
        None, "which file is the validation part, or its share", group="data"
    )


@dataclass(frozen=True)
class SeriesCodec(MediaCodec):
    """The format of a model's series, its labels and baselines."""

    kind = "series"
    modality = SERIES
    format: SeriesFormat

    def groups(self, inputs: Sequence[Any], settings: Any) -> Iterator[Any]:
        """Series as they are read, some at a time, with no notes."""
        return in_groups(lambda given, _: SERIES.read(given, self.format), inputs, GROUP)

    def raws(self, part: SeriesSet, settings: Any = None) -> list[Tensor]:
        """Normalised series of a part."""
        return normalised(part, self.format)

    def logits(self, model: Any, raws: Sequence[Tensor], settings: Any) -> Tensor:
        """Logits (n, labels) of series, one upon the other."""
        device = next(model.parameters()).device
        return model(*(part.to(device) for part in stack(raws)))

    @torch.inference_mode()
    def probabilities(self, model: Any, raws: Sequence[Tensor], settings: Any) -> np.ndarray:
        """Probability of each label, (n, labels), of normalised series."""
        made = np.zeros((len(raws), len(self.labels)), np.float32)
        order = np.argsort([len(one) for one in raws], kind="stable")  # alike in length
        for start in range(0, len(raws), settings.batch):
            some = order[start : start + settings.batch]
            logits = self.logits(model, [raws[i] for i in some], settings)
            made[some] = logits.float().softmax(-1).cpu().numpy()
        return made

    def tokens(self, model: Any, raw: Tensor) -> dict[str, Any]:
        """Names of the chunks of a series, and which of them each key is."""
        names = model.chunks.names(raw.shape[:-1])
        return {"tokens": names, "keys": text_keys(len(names))}

    def picture(self, model: Any, given: Any, settings: Any, describe: Any) -> Picture:
        """Watch a model while it labels a series, and gather where it looked."""
        from regard.viewer.text import text_views

        series = SERIES.decode(given, self.format)
        with watch(model) as maps:
            described = describe([series])
        names = model.chunks.names(series.shape[:-1])
        views = text_views(maps, names, whole="series")
        return Picture(title=given.where, views=views, source=given.where, **described)

    def baseline_vectors(self, part: SeriesSet) -> np.ndarray:
        """Series averaged over stretches of steps."""
        return np.stack([block_means(x.flatten(1).numpy()) for x in self.raws(part)])


def format_of(folder: Path, config: Mapping[str, Any]) -> SeriesFormat:
    """How series are brought to a model, as its folder says."""
    return saved_format(SeriesFormat, "series", folder, config, "axes, channels, mean, std")[0]


def load_codec(folder: Path, model: Model, config: Mapping[str, Any]) -> SeriesCodec:
    """Labels and format of series that a folder names."""
    labels, baselines = saved_labels_and_baselines(folder, model, config)
    format = format_of(folder, config)
    if (format.channels, format.axes) != (model.config.channels, len(model.config.chunk)):
        raise UsageError(
            f"{folder / 'config.json'}: series of {format.channels} channels, but the model "
            f"reads {model.config.channels}"
        )
    return SeriesCodec(format, labels, baselines)


def read_test(runner: Runner[Any], settings: Any) -> SeriesData:
    """The part that is judged."""
    return load_series(
        settings.data,
        valid=settings.valid,
        test=settings.test,
        need=(settings.part,),
        options=SeriesOptions(settings.columns, settings.header),
        classes=runner.codec.labels,
        trained=runner.trained,
    )


class LabelledSeries(LabelledInputs):
    """Series of numbers, of which labels are learnt."""

    task, unit = "series", "series"
    baseline = "the nearest mean series"

    def check(self, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse augmentations that mean nothing."""
        augments(settings.augment, SERIES_AUGMENTS)
        return settings

    def read(self, settings: Any, origin: Origin | None) -> SeriesData:
        """Series to train and to validate on."""
        options = SeriesOptions(settings.columns, settings.header)
        given = {"valid": settings.valid, "test": settings.test}
        data = load_series(str(settings.data), options=options, **given)
        label_list([item.labels for item in data["train"].items], str(settings.data))
        return data

    def suit(
        self, settings: Any, values: Mapping[str, Any], data: SeriesData
    ) -> tuple[Any, Choice | None]:
        """Cut series into chunks by how long they are, unless told or already trained."""
        if values.get("init") or {"chunk", "model.chunk"} & values.keys():
            return settings, None
        shapes = [item.values.shape[:-1] for item in data["train"].items]
        sides = [max(shape[axis] for shape in shapes) for axis in range(len(shapes[0]))]
        most = max(1, int(_TOKENS ** (1 / len(sides))))
        chunk = tuple(-(-side // most) for side in sides)
        longest = max(sides[0], settings.model.max_length)
        settings = replace(settings, model=replace(settings.model, chunk=chunk, max_length=longest))
        given = {"chunk": ",".join(map(str, chunk)), "max_length": longest}
        why = f"series of up to {' x '.join(map(str, sides))} steps"
        return settings, Choice(why, given, "give chunk= to choose")

    def codec(
        self, data: SeriesData, settings: Any, learnt: Any, origin: Origin | None
    ) -> SeriesCodec:
        """Labels of the data, and the mean and deviation of the channels of train."""
        format = SeriesFormat.of(data["train"], data.columns)
        if origin is not None and isinstance(origin.config.get("series"), dict):
            format = format_of(origin.folder, origin.config)
        return SeriesCodec(format, data.classes)

    def config(self, config: Any, codec: SeriesCodec, origin: Origin | None) -> Any:
        """Config of the model for so many channels."""
        if origin is None:
            config = replace(config, channels=codec.format.channels)
        if len(config.chunk) != codec.format.axes:
            raise UsageError(
                f"chunk={','.join(map(str, config.chunk))} for arrays of {codec.format.axes} axes; "
                "give a length for each"
            )
        return config

    def batches(self, data: SeriesData, runner: Runner[Any], settings: Any) -> SeriesBatches:
        """Batches of augmented series."""
        codec = runner.codec
        return SeriesBatches(data["train"], codec.format, len(codec.labels), settings)

    def count(self, runner: Runner[Any], batch: SeriesBatch) -> tuple[int, int]:
        """Series, which the loss counts, and their steps."""
        return len(batch.series), int(batch.lengths.sum())

    def loss(self, runner: Runner[Any], batch: SeriesBatch, settings: Any, weights: Any) -> Tensor:
        """Summed cross-entropy of the labels, the mean over an ensemble."""
        inputs = batch.series, batch.lengths
        logits = each_member(runner.model, lambda member: member.head(*member.hidden(*inputs)))
        return soft_loss(logits, batch.targets, weights) / len(logits)


CLASSIFY_SERIES = Task(
    name="series",
    holds="series of numbers and labels",
    inputs=SERIES,
    predictor=classifier(RunSeries()),
    judge=LabelJudge(read_test),
    load_codec=load_codec,
    objective=LabelObjective(
        LabelledSeries(),
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
