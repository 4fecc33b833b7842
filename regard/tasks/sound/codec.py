"""What tasks on sounds share: settings, what brings sounds to a model, and batches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.attention.watch import watch
from regard.data.augment import step_rng
from regard.data.batches import IndexBatches
from regard.data.media import BROKEN
from regard.data.sound_augment import SoundAugment
from regard.data.sound_files import SOUND_SUFFIXES, Samples
from regard.data.sound_sets import SoundOptions, is_glob
from regard.data.sounds import SoundData, Sounds, load_sounds
from regard.data.spectrogram import SoundFormat
from regard.decode.batching import in_batches
from regard.errors import UsageError
from regard.layers.layout import time_grid
from regard.metrics.baselines import block_means
from regard.modalities.sound import SOUND
from regard.models import family
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.media import MediaCodec, first_files, saved_format
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import grid_keys, window_keys
from regard.tasks.frame.settings import SHORT_KEYS, BootstrapSettings, RunSettings, TrainSettings
from regard.tasks.labels.classifier import STRANGERS, in_groups
from regard.viewer.picture import Picture, Recording
from regard.viewer.settings import SoundLookSettings

ConformerConfig, _ = family("conformer")
SoundSource = Path | str | bytes | np.ndarray | Samples  # one sound, as a user gives it
_MOST_CELLS = 100  # of a window, which are cut one by one
_LOOK_SECONDS = 60.0  # of a sound that is looked at: its attention grows with the square
_GROUP_SECONDS = 1200.0  # of sounds that are in memory at once while they are answered
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


class SoundFilesAsked(Protocol):
    """Settings that say how the files of a set are taken."""

    @property
    def columns(self) -> str | None:
        """Columns of a table: path and text."""
        ...

    @property
    def header(self) -> bool | None:
        """Whether a table has a header row."""
        ...

    @property
    def broken(self) -> str:
        """What becomes of sounds that cannot be used."""
        ...


S = TypeVar("S", bound=SoundTrainSettings)


@dataclass(frozen=True)
class SoundCodec(MediaCodec):
    """The format of a model's sounds, its labels or tokenizer, and what else lies beside it."""

    kind = "sound"
    modality = SOUND
    format: SoundFormat

    def groups(self, inputs: Sequence[Any], settings: SoundRunSettings) -> Iterator[Any]:
        """Samples of sounds, as many at once as there is memory for."""

        def read(given: Any, notes: list[str]) -> np.ndarray | str:
            return SOUND.read(given, self.format, settings.broken)

        def seconds(raw: np.ndarray | str) -> float:
            return len(raw) / self.format.rate

        return in_groups(read, inputs, _GROUP_SECONDS, seconds)

    def raws(self, part: Sounds, settings: Any = None) -> list[np.ndarray]:
        """Samples of the sounds of a part."""
        return [part.read(i) for i in range(len(part))]

    def arguments(self, raws: Sequence[np.ndarray], device: Any) -> tuple[Tensor, Tensor]:
        """Spectrograms (b, t, mels), and their frames (b)."""
        return pad_sounds([self.format.spectrogram(samples) for samples in raws], device)

    def logits(self, model: Any, raws: Sequence[np.ndarray], settings: SoundRunSettings) -> Tensor:
        """Logits (n, labels) of sounds."""
        return model(*self.arguments(raws, next(model.parameters()).device))

    def probabilities(
        self, model: Any, raws: Sequence[np.ndarray], settings: SoundRunSettings
    ) -> np.ndarray:
        """Probability of each label, (n, labels), for the samples of sounds."""
        device = next(model.parameters()).device

        @torch.inference_mode()
        def forward(some: list[Tensor]) -> list[np.ndarray]:
            logits = model(*pad_sounds(some, device)).float()
            return list(logits.softmax(-1).cpu().numpy())

        features = [self.format.spectrogram(samples) for samples in raws]
        frames = max(1, round(settings.batch_seconds / self.format.hop))
        rows = in_batches(features, [len(one) for one in features], forward, tokens=frames)
        return np.stack(rows)

    def tokens(self, model: Any, raw: np.ndarray) -> dict[str, Any]:
        """Moments of a sound, and which of them each key is."""
        return self.moments(model, self.format.frames(len(raw)))

    def moments(self, model: Any, frames: int) -> dict[str, Any]:
        """Tokens, keys and grid of a Question about a spectrogram of so many frames."""
        from regard.viewer.image import layouts

        seconds, stride = model.stride * self.format.hop, model.stride
        size = 1
        if not hasattr(model.config, "full_window"):
            grid, keys = grid_keys(layouts(model, (self.format.mels, frames)))
        else:  # a window that is longer than the sound, of which some vectors are cut together
            size, columns = model.config.max_frames, -(-frames // stride)
            step = -(-columns // _MOST_CELLS)
            grid = time_grid(-(-columns // step), step * stride, frames)
            keys, seconds = window_keys(columns, step), step * seconds
        names = [f"{column * seconds:.2f} s" for column in range(grid.width)]
        grid = replace(grid, seconds=seconds)
        return {"tokens": names, "keys": keys, "grid": grid, "size": size}

    def picture(
        self, model: Any, given: SoundSource, settings: SoundLookSettings, describe: Any
    ) -> Picture:
        """Watch a model while it answers a sound, and gather where it looked.

        `describe` answers samples (n,) as fields of the picture; a field `forward` is one pass over
        the sound, whose attention is shown.
        """
        from regard.viewer.sound import parse_moment, sound_picture

        samples, rate = self.format.read(given), self.format.rate
        name = Path(given).name if isinstance(given, str | Path) else "sound"
        if len(samples) > _LOOK_SECONDS * rate:
            raise UsageError(
                f"{name}: {len(samples) / rate:.0f} seconds; at most "
                f"{_LOOK_SECONDS:.0f} are looked at, cut it"
            )
        query = parse_moment(settings.at, len(samples) / rate)
        described = describe([samples])
        device = next(model.parameters()).device
        usual = partial(model, *self.arguments([samples], device))
        forward = described.pop("forward", usual)
        with watch(model) as maps, torch.inference_mode():
            forward()
        return sound_picture(
            model,
            maps,
            self.format.log_mel(samples).numpy(),
            Recording(samples, rate, **described.pop("recording", {})),
            stride=model.stride,
            view=settings.view,
            query=query,
            **{"title": name, "source": name, **described},
        )

    def baseline_vectors(self, part: Sounds) -> np.ndarray:
        """Means of stretches of frames."""
        log_mels = (self.format.log_mel(samples).numpy() for samples in self.raws(part))
        return np.stack([block_means(each) for each in log_mels])

    # None of these

    @torch.inference_mode()
    def outlier_vectors(self, model: Any, raws: Sequence[np.ndarray]) -> np.ndarray:
        """Each filter's mean and deviation, the length, and the vector that the head reads."""
        device = next(model.parameters()).device

        def vector(samples: np.ndarray) -> np.ndarray:
            filters = self.format.log_mel(samples)
            memory, lengths = model.encode(*self.arguments([samples], device))
            pooled = model.readout.pool(memory, lengths)[0].float().cpu()
            length = torch.tensor([float(np.log(len(filters)))])
            deviation = filters.std(0, correction=0)
            return torch.cat([filters.mean(0), deviation, length, pooled]).numpy()

        return np.stack([vector(samples) for samples in raws])

    def strangers(self, raws: Sequence[np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
        """Noise, noise with the spectrum of speech, tones and silence, at any loudness."""
        sizes = rng.choice([len(one) for one in raws], STRANGERS)
        gains = 10 ** rng.uniform(-3, -0.5, STRANGERS)

        def pink(n: int) -> np.ndarray:
            spectrum = np.fft.rfft(rng.normal(size=n))
            noise = np.fft.irfft(spectrum / np.sqrt(np.arange(len(spectrum)) + 1), n)
            return noise / max(1e-9, noise.std())

        def tone(n: int) -> np.ndarray:
            pitch = rng.uniform(50, self.format.rate / 2)
            return np.sin(2 * np.pi * pitch * np.arange(n) / self.format.rate)

        makers = {
            "noise": lambda n: rng.normal(size=n),
            "pink noise": pink,
            "tones": tone,
            "silence": np.zeros,
        }
        return {
            name: [
                np.float32(gain * make(n)) for n, gain in zip(sizes.tolist(), gains, strict=True)
            ]
            for name, make in makers.items()
        }

    def read_foreign(self, folder: str) -> list[np.ndarray]:
        """Sounds of a folder that are none of what was learnt."""
        return [self.format.read(file) for file in first_files(folder, SOUND_SUFFIXES)]


def sound_options(settings: SoundFilesAsked, target: str) -> SoundOptions:
    """How the files of a set are taken."""
    return SoundOptions(
        target, columns=settings.columns, header=settings.header, broken=settings.broken
    )


def check_sound(settings: S, origin: Origin | None) -> S:
    """Refuse formats and augmentations that mean nothing; a model has the format of init."""
    settings.augment.check()
    if origin is not None and isinstance(origin.config.get("sound"), dict):
        return replace(settings, sound=format_of(origin.folder, origin.model, origin.config))
    sound = settings.sound.check()
    return replace(settings, model=replace(settings.model, mels=sound.mels))


def read_training(settings: SoundTrainSettings, options: SoundOptions) -> SoundData:
    """Sounds to train and to validate on."""
    return load_sounds(
        str(settings.data),
        valid=settings.valid,
        test=settings.test,
        format=settings.sound,
        options=options,
    )


def read_sounds(runner: Any, settings: SoundEvalSettings, options: SoundOptions) -> SoundData:
    """The part that is judged, as a model hears it."""
    return load_sounds(
        str(settings.data),
        need=(settings.part,),
        valid=settings.valid,
        test=settings.test,
        format=runner.codec.format,
        options=options,
        classes=runner.codec.labels or None,
        trained=runner.trained,
    )


def parts_by_name(settings: SoundTrainSettings) -> dict[str, Any]:
    """How parts are told apart by names, which evaluations go by."""
    parts = {key: getattr(settings, key) for key in ("valid", "test")}
    return {f"read_{key}": value for key, value in parts.items() if is_glob(value)}


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
        settings: SoundTrainSettings,
        make: Callable[[np.ndarray, Tensor, Tensor], Any],
        too_short: Callable[[int, int], bool] = lambda i, frames: False,
    ):
        self.sounds, self.format, self.settings = sounds, format, settings
        self.make, self.too_short = make, too_short
        frames = np.array([format.frames(n) for n in sounds.samples.tolist()])
        budget = max(1, round(settings.batch_seconds / format.hop))
        self.batches = IndexBatches([in_buckets(frames, settings.buckets)], budget, settings.seed)
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
