"""Sound classification: sounds with labels to a model that labels sounds, such as spoken words."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from regard.data.sound_sets import SoundOptions
from regard.data.sounds import SoundData
from regard.modalities.sound import SOUND
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import derived
from regard.tasks.labels.classifier import classifier
from regard.tasks.labels.judge import LabelJudge
from regard.tasks.labels.objective import LabelObjective, load_label_codec
from regard.tasks.labels.settings import (
    LabelEvalSettings,
    LabelTrainSettings,
    LinearTrain,
    NoneTrain,
    OneLabelRun,
)
from regard.tasks.parts import Task
from regard.tasks.sound.codec import (
    SOUND_SHORT_KEYS,
    SoundEvalSettings,
    SoundRunSettings,
    SoundTrainSettings,
    check_sound,
)
from regard.viewer.settings import SoundLookSettings


@dataclass(frozen=True)
class TrainSounds(NoneTrain, LinearTrain, SoundTrainSettings, LabelTrainSettings):
    """What a training of a sound classifier can be told."""

    columns: str | None = setting(
        None, "columns of a table: path and label, such as 2,1", group="data"
    )
    names: tuple[str, ...] = setting((), "names of labels that are numbers", group="data")
    pattern: str | None = setting(
        None, "file names with labels, such as {label}_{speaker}_{take}", group="data"
    )

    def reading(self) -> SoundOptions:
        """How the files of a set with labels are taken."""
        how = {"target": "label", "pattern": self.pattern, "names": self.names}
        return replace(super().reading(), **how)

    def facts(self) -> dict[str, Any]:
        """How parts and labels are told by names, which evaluations go by."""
        return {**super().facts(), **({"read_pattern": self.pattern} if self.pattern else {})}


@dataclass(frozen=True)
class RunSounds(OneLabelRun, SoundRunSettings):
    """How to label sounds."""


@dataclass(frozen=True)
class EvalSounds(derived("EvalSounds", SoundEvalSettings, LabelEvalSettings, RunSounds)):
    """What to judge on, and how."""

    data: str | None = setting(None, "a folder or table of sounds with labels", group="data")
    columns: str | None = setting(
        None, "columns of a table: path and label, such as 2,1", group="data"
    )
    pattern: str | None = setting(
        None, "file names with labels, such as {label}_{speaker}_{take}", group="data"
    )

    def reading(self) -> SoundOptions:
        """How the files of a set with labels are taken."""
        return replace(super().reading(), target="label", pattern=self.pattern)


class SoundLabels(LabelObjective[TrainSounds, SoundData]):
    """Learns labels of sounds."""

    def resolve(self, task: Task, values: Mapping[str, Any], origin: Origin | None) -> TrainSounds:
        """Refuse formats and augmentations that mean nothing."""
        return check_sound(super().resolve(task, values, origin), origin)


CLASSIFY_SOUNDS = Task(
    name="sounds",
    holds="sounds and labels",
    inputs=SOUND,
    predictor=classifier(RunSounds(), SoundLookSettings),
    judge=LabelJudge(),
    load_codec=partial(load_label_codec, SOUND),
    objective=SoundLabels(
        "sounds",
        SOUND,
        TrainSounds,
        sizes={
            "micro": {"lr": 0.003, "steps": 2000},
            "tiny": {"lr": 0.002, "steps": 4000},
            "small": {"lr": 0.001, "steps": 10_000},
            "base": {"lr": 0.0007, "steps": 20_000, "batch_seconds": 200.0},
            "big": {"lr": 0.0005, "steps": 60_000, "batch_seconds": 400.0},
        },
        short={**SOUND_SHORT_KEYS, "pool": "model.pool"},
        head="readout.",
    ),
    target="label",
    unit="sounds",
    judged=EvalSounds,
)
