"""Sound classification: sounds with labels to a model that labels sounds, such as spoken words."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.labels import label_list
from regard.data.sound_sets import SoundOptions
from regard.data.sounds import SoundData, Sounds
from regard.errors import UsageError
from regard.metrics.outliers import Outliers
from regard.modalities.sound import SOUND
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import derived
from regard.tasks.labels.classifier import classifier
from regard.tasks.labels.judge import LabelJudge
from regard.tasks.labels.objective import LabelledInputs, LabelObjective, spread
from regard.tasks.labels.settings import (
    NoneTrain,
    OneLabelEval,
    OneLabelRun,
    OneLabelTrain,
    saved_labels_and_baselines,
)
from regard.tasks.parts import Task
from regard.tasks.runner import Runner
from regard.tasks.sound.codec import (
    SOUND_SHORT_KEYS,
    SoundBatches,
    SoundCodec,
    SoundEvalSettings,
    SoundRunSettings,
    SoundTrainSettings,
    check_sound,
    format_of,
    parts_by_name,
    read_sounds,
    read_training,
    sound_options,
    with_statistics,
)
from regard.viewer.settings import SoundLookSettings


@dataclass(frozen=True)
class TrainSounds(NoneTrain, OneLabelTrain, SoundTrainSettings):
    """What a training of a sound classifier can be told."""

    columns: str | None = setting(
        None, "columns of a table: path and label, such as 2,1", group="data"
    )
    names: tuple[str, ...] = setting((), "names of labels that are numbers", group="data")
    pattern: str | None = setting(
        None, "file names with labels, such as {label}_{speaker}_{take}", group="data"
    )


@dataclass(frozen=True)
class RunSounds(OneLabelRun, SoundRunSettings):
    """How to label sounds."""


@dataclass(frozen=True)
class EvalSounds(derived("EvalSounds", OneLabelEval, SoundEvalSettings, RunSounds)):
    """What to judge on, and how."""

    data: str | None = setting(None, "a folder or table of sounds with labels", group="data")
    columns: str | None = setting(
        None, "columns of a table: path and label, such as 2,1", group="data"
    )
    pattern: str | None = setting(
        None, "file names with labels, such as {label}_{speaker}_{take}", group="data"
    )


class LabelledSoundBatch(NamedTuple):
    """Spectrograms (b, t, mels) with their frames (b), and the numbers of their labels (b)."""

    sound: Tensor
    lengths: Tensor
    labels: Tensor


def options(settings: Any) -> SoundOptions:
    """How the files of a set with labels are taken."""
    names = getattr(settings, "names", ())
    return replace(sound_options(settings, "label"), pattern=settings.pattern, names=names)


def load_codec(folder: Path, model: Model, config: Mapping[str, Any]) -> SoundCodec:
    """Labels and format of sounds that a folder names."""
    if not getattr(model.config, "labels", 0):
        raise UsageError(f"{folder / 'config.json'}: a model without a head for labels")
    labels, baselines = saved_labels_and_baselines(folder, model, config)
    outliers = Outliers.load(folder, config, len(labels))
    format = format_of(folder, model, config)
    return SoundCodec(format, labels, baselines=baselines, outliers=outliers)


class LabelledSounds(LabelledInputs):
    """Sounds, of which labels are learnt."""

    task, unit, head = "sounds", "sounds", "readout."
    baseline = "the nearest mean spectrogram"

    def check(self, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse formats and augmentations that mean nothing."""
        return check_sound(settings, origin)

    def read(self, settings: Any, origin: Origin | None) -> SoundData:
        """Sounds to train and to validate on."""
        data = read_training(settings, options(settings))
        numbers = data["train"].labels.tolist()
        label_list([(data.classes[i],) for i in numbers], settings.data)
        return data

    def codec(
        self, data: SoundData, settings: Any, learnt: Any, origin: Origin | None
    ) -> SoundCodec:
        """Labels and format of the data."""
        more = parts_by_name(settings)
        if settings.pattern:
            more["read_pattern"] = settings.pattern
        format = with_statistics(settings.sound, data["train"])
        return SoundCodec(format, data.classes, more=more)

    def baseline_part(self, train: Sounds) -> Sounds:
        """Some sounds, spread over all."""
        return spread(train)

    def batches(self, data: SoundData, runner: Runner[Any], settings: Any) -> SoundBatches:
        """Batches of augmented spectrograms with their labels."""
        train = data["train"]

        def make(picked: np.ndarray, sound: Tensor, lengths: Tensor) -> LabelledSoundBatch:
            labels = train.labels[torch.from_numpy(picked)]
            return LabelledSoundBatch(sound, lengths, labels.to(settings.device))

        return SoundBatches(train, runner.codec.format, settings, make)

    def count(self, runner: Runner[Any], batch: LabelledSoundBatch) -> tuple[int, int]:
        """Sounds, which the loss counts, and the frames that were read."""
        return len(batch.labels), int(batch.lengths.sum())

    def loss(
        self, runner: Runner[Any], batch: LabelledSoundBatch, settings: Any, weights: Tensor | None
    ) -> Tensor:
        """Summed cross-entropy of the labels."""
        logits = runner.model(batch.sound, batch.lengths).float()
        smoothing = settings.label_smoothing
        return F.cross_entropy(
            logits, batch.labels, weight=weights, label_smoothing=smoothing, reduction="sum"
        )


CLASSIFY_SOUNDS = Task(
    name="sounds",
    holds="sounds and labels",
    inputs=SOUND,
    predictor=classifier(RunSounds(), SoundLookSettings),
    judge=LabelJudge(lambda runner, settings: read_sounds(runner, settings, options(settings))),
    load_codec=load_codec,
    objective=LabelObjective(
        LabelledSounds(),
        TrainSounds,
        sizes={
            "micro": {"lr": 0.003, "steps": 2000},
            "tiny": {"lr": 0.002, "steps": 4000},
            "small": {"lr": 0.001, "steps": 10_000},
            "base": {"lr": 0.0007, "steps": 20_000, "batch_seconds": 200.0},
            "big": {"lr": 0.0005, "steps": 60_000, "batch_seconds": 400.0},
        },
        short={**SOUND_SHORT_KEYS, "pool": "model.pool"},
    ),
    target="label",
    unit="sounds",
    judged=EvalSounds,
)
