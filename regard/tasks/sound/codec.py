"""What tasks on sounds share: their settings, and how these say where sounds are."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from regard.data.media import BROKEN
from regard.data.sound_augment import SoundAugment
from regard.data.sound_files import Samples
from regard.data.sound_sets import SoundOptions, is_glob
from regard.data.sounds import SoundData
from regard.data.spectrogram import SoundFormat
from regard.modalities.sound import SOUND
from regard.models import family
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import SHORT_KEYS, BootstrapSettings, RunSettings, TrainSettings
from regard.tasks.runner import Runner

ConformerConfig, _ = family("conformer")
SoundSource = Path | str | bytes | np.ndarray | Samples  # one sound, as a user gives it
# short keys for the format, the augmentation and the model's config
SOUND_SHORT_KEYS: dict[str, str | tuple[str, ...]] = {
    **SHORT_KEYS,
    "rate": "sound.rate",
    "mels": "sound.mels",
    "window": "sound.window",
    "hop": "sound.hop",
    "features": "sound.features",
    "normalise": "sound.normalise",
    "speeds": "augment.speeds",
    "time_masks": "augment.time_masks",
    "time_share": "augment.time_share",
    "frequency_masks": "augment.frequency_masks",
    "frequency_share": "augment.frequency_share",
    "time_warp": "augment.time_warp",
    "frequency_warp": "augment.frequency_warp",
    "subsampling": "model.subsampling",
    "kernel": "model.kernel",
    "drop_path": "model.drop_path",
    "decoder_depth": "model.decoder_depth",
}


@dataclass(frozen=True)
class SoundTrainSettings(TrainSettings):
    """What a training on sounds can be told."""

    schedule: str = "cosine"
    ema: float = 0.999
    valid: str | None = setting(None, "a file, a share such as 0.1, or names such as *_[0-4].*")
    test: str | None = setting(None, "test data: a file, a share, or names to hold out")
    family: str = setting("conformer", "model family", group="model")
    like: str | None = setting(None, "model preset", group="model")
    columns: str | None = setting(
        None, "columns of a table: path and text, such as 2,1", group="data"
    )
    header: bool | None = setting(
        None, "whether a table has a header row; guessed unless told", group="data"
    )
    broken: str = setting("refuse", "sounds that cannot be used", choices=BROKEN, group="data")
    batch_seconds: float = setting(
        100.0, "seconds of sound per batch", above=0, max=1e7, group="optimiser"
    )
    buckets: int = setting(
        10, "number of length buckets for batches", min=1, max=10_000, group="optimiser"
    )
    sound: SoundFormat = field(default_factory=SoundFormat)
    augment: SoundAugment = field(default_factory=SoundAugment)
    model: ConformerConfig = field(default_factory=ConformerConfig)  # type: ignore[valid-type]

    def reading(self) -> SoundOptions:
        """How the files of a set are taken."""
        return SoundOptions("text", columns=self.columns, header=self.header, broken=self.broken)

    def format(self, origin: Origin | None) -> SoundFormat:
        """Format of the sounds, which is that of the model in init=."""
        return self.sound

    def facts(self) -> dict[str, Any]:
        """How parts are told apart by names, which evaluations go by."""
        parts = {"read_valid": self.valid, "read_test": self.test}
        return {key: value for key, value in parts.items() if is_glob(value)}


@dataclass(frozen=True)
class SoundRunSettings(RunSettings):
    """How to read sounds."""

    rate: int | None = setting(
        None, "sampling rate of arrays in Hz; the model's unless given", min=1, group="data"
    )
    broken: str = setting("refuse", "files that cannot be read", choices=BROKEN, group="data")
    batch_seconds: float = setting(
        200.0, "seconds of sound per batch", above=0, max=1e7, group="machine"
    )


@dataclass(frozen=True)
class SoundEvalSettings(BootstrapSettings):
    """What to judge on."""

    data: str | None = setting(None, "a folder or table of sounds")
    valid: str | None = setting(None, "the validation part: a file, a share or names", group="data")
    test: str | None = setting(None, "the test part: a file, a share or names such as *_[0-4].*")
    columns: str | None = setting(
        None, "columns of a table: path and text, such as 2,1", group="data"
    )
    header: bool | None = setting(
        None, "whether a table has a header row; guessed unless told", group="data"
    )

    def reading(self) -> SoundOptions:
        """How the files of a set are taken."""
        broken = getattr(self, "broken", "refuse")
        return SoundOptions("text", columns=self.columns, header=self.header, broken=broken)


S = TypeVar("S", bound=SoundTrainSettings)


def check_sound(settings: S, origin: Origin | None) -> S:
    """Refuse formats and augmentations that mean nothing; a model has the format of init."""
    settings.augment.check()
    if origin is not None and isinstance(origin.config.get("sound"), dict):
        before = SOUND.saved_format(origin.folder, origin.model, origin.config)
        return replace(settings, sound=before)
    sound = settings.sound.check()
    return replace(settings, model=replace(settings.model, mels=sound.mels))


def read_training(settings: SoundTrainSettings) -> SoundData:
    """Sounds to train and to validate on."""
    parts: dict[str, Any] = {"valid": settings.valid, "test": settings.test}
    return SOUND.load(str(settings.data), settings.reading(), settings.sound, **parts)


def read_sounds(runner: Runner[Any], settings: SoundEvalSettings) -> SoundData:
    """The part that is judged, as a model hears it."""
    return SOUND.load(
        str(settings.data),
        settings.reading(),
        runner.codec.format,
        need=(settings.part,),
        valid=settings.valid,
        test=settings.test,
        trained=runner.trained,
    )
