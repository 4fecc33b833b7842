"""What tasks on sounds share: settings, the format of sounds, batches, running and looking."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.attention.watch import watch
from regard.data.augment import step_rng
from regard.data.batches import Batches
from regard.data.media import BROKEN
from regard.data.sound_augment import SoundAugment
from regard.data.sound_sets import SoundOptions, is_glob
from regard.data.sounds import SoundData, Sounds, load_sounds
from regard.data.spectrogram import SoundFormat
from regard.errors import UsageError
from regard.layers.layout import time_grid
from regard.modalities.sound import SOUND
from regard.models import family
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.media import MediaCodec, MediaTask, saved_format
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import grid_keys, window_keys
from regard.tasks.frame.settings import SHORT as TASK_SHORT
from regard.tasks.frame.settings import BootstrapSettings, RunSettings, TrainSettings
from regard.tasks.frame.task import Answer
from regard.viewer.settings import SoundLookSettings

ConformerConfig, _ = family("conformer")
MOST_CELLS = 100  # of a window, which are cut one by one
LOOK_SECONDS = 60.0  # of a sound that is looked at: its attention grows with the square
GROUP_SECONDS = 1200.0  # of sounds that are in memory at once while they are answered
# short keys for the format, the augmentation and the model's config
SHORT: dict[str, str | tuple[str, ...]] = {
    **TASK_SHORT,
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
        10, "groups of like length that batches are of", min=1, max=10_000, group="optimiser"
    )
    sound: SoundFormat = field(default_factory=SoundFormat)
    augment: SoundAugment = field(default_factory=SoundAugment)
    model: ConformerConfig = field(default_factory=ConformerConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class SoundRunSettings(RunSettings):
    """How to read sounds."""

    rate: int | None = setting(
        None, "samples a second of arrays; the model's unless given", min=1, group="data"
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


@dataclass(frozen=True)
class SoundCodec(MediaCodec):
    """The format of a model's sounds, its labels or tokenizer, and what else lies beside it."""

    kind = "sound"
    format: SoundFormat


def format_of(folder: Path, model: Model, config: Mapping[str, Any]) -> SoundFormat:
    """Check and return how sounds are brought to a model, as its folder says."""
    expected = "rate, mels, window, hop"
    format, where = saved_format(SoundFormat, "sound", folder, config, expected)
    if format.mels != model.config.mels:
        raise UsageError(
            f"{where}: spectrograms of {format.mels} mel filters, but the model reads "
            f"{model.config.mels}"
        )
    return format


def with_statistics(format: SoundFormat, train: Sounds) -> SoundFormat:
    """Return a format with mean and deviation of its filters, where it normalises by these."""
    if format.normalise != "global" or format.mean:
        return format
    mean, std = train.feature_stats()
    return replace(format, mean=mean, std=std)


# Batches


def pad_sounds(
    features: Sequence[Tensor], device: torch.device | str = "cpu"
) -> tuple[Tensor, Tensor]:
    """Stack spectrograms to (b, t, mels) filled up with zeros, and return their frames (b)."""
    lengths = torch.tensor([len(one) for one in features], device=device)
    return pad_sequence(list(features), batch_first=True).to(device), lengths


def in_buckets(lengths: np.ndarray, buckets: int) -> np.ndarray:
    """Return the length of the longest in the bucket of each, where all have about as many."""
    shares = np.arange(1, buckets + 1) / buckets
    edges = np.unique(np.quantile(lengths, shares, method="higher"))
    return edges[np.searchsorted(edges, lengths)]


class SoundBatches:
    """Batch n of augmented spectrograms, a pure function of (seed, n).

    `make(rows, sound, lengths)` makes a batch of them; `too_short(i, frames)` tells whether
    sound i would be of no use with so few frames, so that its speed is kept.
    """

    def __init__(
        self,
        sounds: Sounds,
        format: SoundFormat,
        settings: Any,
        make: Callable[[np.ndarray, Tensor, Tensor], Any],
        too_short: Callable[[int, int], bool] = lambda i, frames: False,
    ):
        self.sounds, self.format, self.settings = sounds, format, settings
        self.make, self.too_short = make, too_short
        frames = np.array([format.frames(n) for n in sounds.samples.tolist()])
        budget = max(1, round(settings.batch_seconds / format.hop))
        self.batches = Batches([in_buckets(frames, settings.buckets)], budget, settings.seed)
        self.plain = replace(settings.augment, speeds=(1.0,))

    def features(self, i: int, n: int, place: int) -> Tensor:
        """Augmented spectrogram of sound i at a place of batch n."""
        samples, seed = self.sounds.read(i), self.settings.seed
        for augment in (self.settings.augment, self.plain):
            rng = step_rng(seed, n, 16 + place)
            features = augment(samples, self.format, rng)
            if not self.too_short(i, len(features)):
                break
        return features

    def __getitem__(self, n: int) -> Any:
        """Return batch n."""
        rows = self.batches[n]
        features = [self.features(i, n, place) for place, i in enumerate(rows.tolist())]
        return self.make(rows, *pad_sounds(features, self.settings.device))

    def epoch(self) -> float:
        """Return in how many batches all sounds are read once."""
        return self.batches.len_epoch()


# Using

A = TypeVar("A", bound=Answer)


class SoundTask(MediaTask[SoundCodec, A]):
    """A task whose inputs are sounds."""

    unit = "sounds"
    inputs = SOUND
    Train, Run, Look = SoundTrainSettings, SoundRunSettings, SoundLookSettings
    short = SHORT

    @property
    def format(self) -> SoundFormat:
        """Return how sounds are brought to the model."""
        return self.codec.format

    # Training

    @classmethod
    def options(cls, settings: Any) -> SoundOptions:
        """Return how the files of a set are taken."""
        return SoundOptions(
            cls.target or "none", settings.columns, settings.header, broken=settings.broken
        )

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse formats and augmentations that mean nothing; a model has the format of init."""
        settings.augment.check()
        if origin is not None and isinstance(origin.config.get("sound"), dict):
            format = format_of(origin.folder, origin.model, origin.config)
            return replace(settings, sound=format)
        sound = settings.sound.check()
        return replace(settings, model=replace(settings.model, mels=sound.mels))

    @classmethod
    def load_parts(cls, settings: Any) -> SoundData:
        """Read the sounds to train and to validate on."""
        return load_sounds(
            str(settings.data),
            valid=settings.valid,
            test=settings.test,
            format=settings.sound,
            options=cls.options(settings),
        )

    @classmethod
    def reading(cls, settings: Any) -> dict[str, Any]:
        """Return how parts are told apart by names, which evaluations go by."""
        parts = {key: getattr(settings, key) for key in ("valid", "test")}
        return {f"read_{key}": value for key, value in parts.items() if is_glob(value)}

    # Running

    def read_test(self, settings: Any) -> SoundData:
        """Read the part that is judged."""
        return load_sounds(
            settings.data,
            need=(settings.part,),
            valid=settings.valid,
            test=settings.test,
            format=self.format,
            options=self.options(settings),
            classes=self.codec.labels or None,
            trained=self.trained,
        )

    def eval_defaults(self) -> dict[str, Any]:
        """Return how the model's own data were read, where their names say it."""
        found = {key: self.config.get(f"read_{key}") for key in ("valid", "test", "pattern")}
        return {key: value for key, value in found.items() if isinstance(value, str)}

    def read_groups(self, inputs: Sequence[Any], broken: str) -> Iterator[list[np.ndarray | str]]:
        """Read sounds, as many at once as there is memory for."""
        group: list[np.ndarray | str] = []
        seconds = 0.0
        for given in inputs:
            group.append(SOUND.read(given, self.format, broken))
            seconds += len(group[-1]) / self.format.rate
            if seconds >= GROUP_SECONDS:
                yield group
                group, seconds = [], 0.0
        if group:
            yield group

    def answer_sounds(self, sounds: list[np.ndarray], settings: Any, lines: list[int]) -> list[A]:
        """Answer samples (n,), which are inputs of these numbers."""
        raise NotImplementedError

    def predict(self, inputs: list[Any], settings: Any, *, first: int = 0) -> list[Any]:
        """Answer sounds, some at a time."""

        def answer(sounds: list[np.ndarray], lines: list[int]) -> list[A]:
            return self.answer_sounds(sounds, settings, lines)

        answers: list[Any] = []
        for group in self.read_groups(inputs, settings.broken):
            answers += self.answer_read(group, answer, first + len(answers))
        return answers

    def time_tokens(self, frames: int) -> dict[str, Any]:
        """Return tokens, keys and grid of a Question about a spectrogram of so many frames."""
        from regard.viewer.image import layouts

        seconds, stride = self.model.stride * self.format.hop, self.model.stride
        size = 1
        if not hasattr(self.model.config, "full_window"):
            grid, keys = grid_keys(layouts(self.model, (self.format.mels, frames)))
        else:  # a window that is longer than the sound, of which some vectors are cut together
            size, columns = self.model.config.max_frames, -(-frames // stride)
            step = -(-columns // MOST_CELLS)
            grid = time_grid(-(-columns // step), step * stride, frames)
            keys, seconds = window_keys(columns, step), step * seconds
        names = [f"{column * seconds:.2f} s" for column in range(grid.width)]
        told = {"tokens": names, "keys": keys, "grid": replace(grid, seconds=seconds)}
        return {**told, "size": size}

    def describe(
        self, samples: np.ndarray, settings: Any
    ) -> tuple[dict[str, Any], Callable[[], Any]]:
        """Answer the samples (n,) of a sound as fields of its picture.

        The second is one pass over the sound, whose attention is shown.
        """
        raise NotImplementedError

    def explain(self, given: Any, settings: Any) -> Any:
        """Watch the model while it answers a sound, and gather where it looked."""
        from regard.viewer.picture import Recording
        from regard.viewer.sound import parse_moment, sound_picture

        samples = self.format.read(self.check_input(given, settings))
        name = Path(given).name if isinstance(given, str | Path) else "sound"
        if len(samples) > LOOK_SECONDS * self.format.rate:
            raise UsageError(
                f"{name}: {len(samples) / self.format.rate:.0f} seconds; at most "
                f"{LOOK_SECONDS:.0f} are looked at, cut it"
            )
        query = parse_moment(settings.at, len(samples) / self.format.rate)
        told, forward = self.describe(samples, settings)
        with watch(self.model) as maps, torch.inference_mode():
            forward()
        recording = Recording(samples, self.format.rate, **told.pop("recording", {}))
        told = {"title": name, "source": name, **told}
        seen = self.model, maps, self.format.log_mel(samples).numpy(), recording
        more = {"stride": self.model.stride, "view": settings.view, "query": query}
        return sound_picture(*seen, **more, **told)
