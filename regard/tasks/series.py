"""Classification of series: series of numbers with labels to a model that labels series."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.augment import augments
from regard.data.labels import label_list
from regard.data.series import SeriesFormat, SeriesSet, load_series, stack
from regard.data.series_augment import SERIES_AUGMENTS
from regard.data.series_batches import SeriesBatch, SeriesBatches, normalised
from regard.data.series_files import SeriesOptions
from regard.errors import UsageError
from regard.metrics.baselines import Baselines, block_means
from regard.metrics.labels import one_hot
from regard.modalities.series import SERIES
from regard.models import family, task_changes
from regard.models.ensemble import each_member
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.answers import Classified
from regard.tasks.frame.media import MediaCodec, saved_format
from regard.tasks.frame.one_label import (
    OneLabel,
    OneLabelEval,
    OneLabelRun,
    OneLabelTrain,
    saved_labels_and_baselines,
)
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import Question, text_keys
from regard.tasks.frame.settings import (
    SHORT,
    BootstrapSettings,
    RunSettings,
    TrainSettings,
    derived,
)
from regard.tasks.frame.task import Choice, Data
from regard.training.label_loss import class_weights, soft_loss

SeriesConfig, _ = family("series")
TOKENS = 128  # that a series is cut into, unless chunk= says


@dataclass(frozen=True)
class SeriesTable:
    """Where series and labels are in a table."""

    GROUP = "data"

    columns: str | None = setting(None, "of tables: label; path,label; or id,time,label")
    header: bool | None = setting(None, "whether a table has a header row; guessed unless told")


@dataclass(frozen=True)
class TrainSeries(SeriesTable, OneLabelTrain, TrainSettings):
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
class EvalSeries(derived("EvalSeries", SeriesTable, OneLabelEval, BootstrapSettings, RunSeries)):
    """What to judge on, and how."""

    valid: str | None = setting(
        None, "which file is the validation part, or its share", group="data"
    )


@dataclass(frozen=True)
class SeriesCodec(MediaCodec):
    """The format of a model's series, its labels and baselines."""

    kind = "series"
    format: SeriesFormat


def mean_vectors(part: SeriesSet, format: SeriesFormat) -> np.ndarray:
    """Return series as the nearest-mean baseline reads them: averaged over stretches of steps."""
    return np.stack([block_means(x.flatten(1).numpy()) for x in normalised(part, format)])


class ClassifySeries(OneLabel):
    """Label series of numbers: the most probable of the labels that were learnt."""

    name, holds, unit, inputs = "series", "series of numbers and labels", "series", SERIES
    Train, Run, Eval = TrainSeries, RunSeries, EvalSeries
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"lr": 0.002, "batch": 32, "steps": 1000},
        "small": {"lr": 0.001, "batch": 32, "steps": 2000},
        "base": {"lr": 0.0005, "batch": 64, "steps": 5000},
        "big": {"lr": 0.0003, "batch": 64, "steps": 10_000},
    }
    short: ClassVar[Mapping[str, str | tuple[str, ...]]] = {
        **SHORT,
        "chunk": "model.chunk",
        "stride": "model.stride",
        "pool": "model.pool",
        "drop_path": "model.drop_path",
        "head_dropout": "model.head_dropout",
        "max_length": "model.max_length",
        "members": "model.members",
    }

    @property
    def format(self) -> SeriesFormat:
        """Return how series are brought to the model."""
        return self.codec.format

    # Training

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse an augmentation that is named twice."""
        augments(settings.augment, SERIES_AUGMENTS)
        return settings

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> Data:
        """Read the series to train and to validate on."""
        options = SeriesOptions(settings.columns, settings.header)
        given = {"valid": settings.valid, "test": settings.test}
        data = load_series(str(settings.data), options=options, **given)
        label_list([item.labels for item in data.parts["train"].items], str(settings.data))
        return Data(data, data.sha, data.notes, data.split)

    @classmethod
    def defaults_for_data(
        cls, settings: Any, values: Mapping[str, Any], data: Data
    ) -> tuple[Any, Choice | None]:
        """Cut series into chunks by how long they are, unless told or already trained."""
        if values.get("init") or {"chunk", "model.chunk"} & values.keys():
            return settings, None
        shapes = [item.values.shape[:-1] for item in data.parts.parts["train"].items]
        sides = [max(shape[axis] for shape in shapes) for axis in range(len(shapes[0]))]
        most = max(1, int(TOKENS ** (1 / len(sides))))
        chunk = tuple(-(-side // most) for side in sides)
        longest = max(sides[0], settings.model.max_length)
        settings = replace(settings, model=replace(settings.model, chunk=chunk, max_length=longest))
        given = {"chunk": ",".join(map(str, chunk)), "max_length": longest}
        why = f"series of up to {' x '.join(map(str, sides))} steps"
        return settings, Choice(why, given, "give chunk= to choose")

    @classmethod
    def make_codec(cls, data: Data, settings: Any, learnt: Any, origin: Any) -> SeriesCodec:
        """Take the labels of the data, and the mean and deviation of the channels of train."""
        train, labels = data.parts.parts["train"], data.parts.classes
        format = SeriesFormat.of(train, data.parts.columns)
        if origin is not None and isinstance(origin.config.get("series"), dict):
            format = format_of(origin.folder, origin.config)
        cls.note_imbalance(data, settings)
        targets, vectors = one_hot(train.labels, len(labels)), mean_vectors(train, format)
        baselines = Baselines.fit("the nearest mean series", vectors, targets)
        return SeriesCodec(format, labels, baselines)

    @classmethod
    def make_model(cls, data: Data, codec: SeriesCodec, settings: Any, origin: Any) -> Any:
        """Build the model with a head; one that knew the same labels before keeps its head."""
        name, labels = settings.family, codec.labels
        config = replace(settings.model, **task_changes(name, cls.name), labels=len(labels))
        if origin is None:
            config = replace(config, channels=codec.format.channels)
        if len(config.chunk) != codec.format.axes:
            raise UsageError(
                f"chunk={','.join(map(str, config.chunk))} for arrays of {codec.format.axes} axes; "
                "give a length for each"
            )
        fresh = "" if origin is not None and origin.was(cls.name, labels) else "head."
        return name, cls.build(name, config, settings, origin, fresh=fresh)

    def batches(self, data: Data, settings: Any) -> SeriesBatches:
        """Return batches of augmented series."""
        train: SeriesSet = data.parts.parts["train"]
        often = np.bincount(train.labels, minlength=len(self.labels))
        self.weights = class_weights(settings.class_weights, often, len(train))
        return SeriesBatches(train, self.format, len(self.labels), settings)

    def count(self, batch: SeriesBatch) -> tuple[int, int]:
        """Return the series, which the loss counts, and their steps."""
        return len(batch.series), int(batch.lengths.sum())

    def loss(self, batch: SeriesBatch, settings: Any) -> Tensor:
        """Return the summed cross-entropy of the labels, the mean over an ensemble."""
        weights = None if self.weights is None else self.weights.to(batch.targets.device)
        inputs = batch.series, batch.lengths
        logits = each_member(self.model, lambda member: member.head(*member.hidden(*inputs)))
        return soft_loss(logits, batch.targets, weights) / len(logits)

    def validate(self, data: Data, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return loss, accuracy and macro F1 on the validation part."""
        valid: SeriesSet = data.parts.parts["valid"]
        probs = self.probabilities(normalised(valid, self.format), RunSeries().batch)
        return self.valid_scores(valid, probs, by_f1=self.weights is not None)

    def title(self, data: Data, settings: Any) -> str:
        """Return what the model card says that the model is."""
        return f"One of {len(self.labels)} labels for a series of numbers"

    def facts(self, data: Data, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        return {"labels": len(self.labels), "series": len(data.parts.parts["train"])}

    # Using

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: Mapping[str, Any]) -> SeriesCodec:
        """Read the labels and the format of series that a folder names."""
        labels, baselines = saved_labels_and_baselines(folder, model, config)
        format = format_of(folder, config)
        if (format.channels, format.axes) != (model.config.channels, len(model.config.chunk)):
            raise UsageError(
                f"{folder / 'config.json'}: series of {format.channels} channels, but the model "
                f"reads {model.config.channels}"
            )
        return SeriesCodec(format, labels, baselines)

    @torch.inference_mode()
    def probabilities(self, series: Sequence[Tensor], batch: int) -> np.ndarray:
        """Return the probability of each label, (n, labels), of normalised series."""
        made = np.zeros((len(series), len(self.labels)), np.float32)
        order = np.argsort([len(one) for one in series], kind="stable")  # alike in length
        for start in range(0, len(series), batch):
            some = order[start : start + batch]
            x, lengths = (part.to(self.device) for part in stack([series[i] for i in some]))
            made[some] = self.model(x, lengths).float().softmax(-1).cpu().numpy()
        return made

    def predict(self, inputs: list[Any], settings: Any, *, first: int = 0) -> list[Classified]:
        """Label series."""
        series = [SERIES.decode(one, self.format) for one in inputs]
        return self.classified(self.probabilities(series, settings.batch))

    def read_test(self, settings: Any) -> Data:
        """Read the part that is judged."""
        data = load_series(
            settings.data,
            valid=settings.valid,
            test=settings.test,
            need=(settings.part,),
            options=SeriesOptions(settings.columns, settings.header),
            classes=self.labels,
            trained=self.trained,
        )
        return Data(data, data.parts[settings.part].sha, data.notes)

    def predict_examples(self, data: Data, settings: Any) -> np.ndarray:
        """Return the probability of each label for each series."""
        series = normalised(data.parts.parts[settings.part], self.format)
        return self.probabilities(series, settings.batch)

    def baseline_vectors(self, part: SeriesSet) -> np.ndarray:
        """Return series as the nearest-mean baseline reads them."""
        return mean_vectors(part, self.format)

    def question(self, given: Any, settings: Any, expected: Any = None) -> Question:
        """Return a series with its label and the log-probability of that."""
        one = self.check_input(given, settings)
        series = SERIES.decode(one, self.format)
        names = self.model.chunks.names(series.shape[:-1])

        def logits(copies: int) -> Tensor:
            return self.model(*(part.to(self.device) for part in stack([series] * copies)))

        about = {"tokens": names, "keys": text_keys(len(names))}
        return self.label_question(logits, expected, **about)

    def explain(self, given: Any, settings: Any) -> Any:
        """Watch the model while it labels a series, and gather where it looked."""
        from regard.viewer.picture import Picture
        from regard.viewer.text import text_views

        one = self.check_input(given, settings)
        series = SERIES.decode(one, self.format)
        with watch(self.model) as maps:
            (probs,) = self.probabilities([series], 1)
        names = self.model.chunks.names(series.shape[:-1])
        views, told = text_views(maps, names, whole="series"), self.labelled(probs, settings)
        return Picture(title=one.where, views=views, source=one.where, **told)


def format_of(folder: Path, config: Mapping[str, Any]) -> SeriesFormat:
    """Check and return how series are brought to a model, as its folder says."""
    return saved_format(SeriesFormat, "series", folder, config, "axes, channels, mean, std")[0]
