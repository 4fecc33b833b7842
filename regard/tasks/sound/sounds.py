"""Sound classification: sounds with labels to a model that labels sounds, such as spoken words."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.labels import label_list
from regard.data.sound_sets import SoundOptions
from regard.data.sound_streams import SUFFIXES
from regard.data.sounds import SoundData, Sounds
from regard.data.spectrogram import SoundFormat
from regard.decode.batching import in_batches
from regard.errors import UsageError
from regard.metrics.baselines import block_means
from regard.metrics.outliers import Outliers
from regard.models import task_changes
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.answers import Classified
from regard.tasks.frame.media import first_files
from regard.tasks.frame.one_label import (
    STRANGERS,
    NoneTrain,
    OneLabel,
    OneLabelEval,
    OneLabelRun,
    OneLabelTrain,
    learn_baselines,
    saved_labels_and_baselines,
)
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import Question
from regard.tasks.frame.settings import derived
from regard.tasks.sound.codec import (
    SHORT,
    SoundBatches,
    SoundCodec,
    SoundEvalSettings,
    SoundRunSettings,
    SoundTask,
    SoundTrainSettings,
    format_of,
    pad_sounds,
    with_statistics,
)
from regard.training.label_loss import class_weights


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


class Batch(NamedTuple):
    """Spectrograms (b, t, mels) with their frames (b), and the numbers of their labels (b)."""

    sound: Tensor
    lengths: Tensor
    labels: Tensor


def vectors(sounds: Sounds, format: SoundFormat) -> np.ndarray:
    """Return sounds as the nearest-mean baseline reads them: means of stretches of frames."""
    return np.stack(
        [block_means(format.log_mel(sounds.read(i)).numpy()) for i in range(len(sounds))]
    )


class ClassifySounds(OneLabel, SoundTask[Classified]):
    """Label sounds: the most probable of the labels that were learnt."""

    name, holds = "sounds", "sounds and labels"
    Train, Run, Eval = TrainSounds, RunSounds, EvalSounds
    better = "accuracy"
    short = {**SHORT, "pool": "model.pool"}
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "micro": {"lr": 0.003, "steps": 2000},
        "tiny": {"lr": 0.002, "steps": 4000},
        "small": {"lr": 0.001, "steps": 10_000},
        "base": {"lr": 0.0007, "steps": 20_000, "batch_seconds": 200.0},
        "big": {"lr": 0.0005, "steps": 60_000, "batch_seconds": 400.0},
    }

    # Training

    @classmethod
    def options(cls, settings: Any) -> SoundOptions:
        """Return how the files of a set are taken."""
        names = getattr(settings, "names", ())
        return replace(super().options(settings), pattern=settings.pattern, names=names)

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> SoundData:
        """Read the sounds to train and to validate on."""
        data = cls.load_parts(settings)
        numbers = data["train"].labels.tolist()
        label_list([(data.classes[i],) for i in numbers], settings.data)
        return data

    @classmethod
    def make_codec(cls, data: SoundData, settings: Any, learnt: Any, origin: Any) -> SoundCodec:
        """Take the labels and the format of the data."""
        labels, train = data.classes, data["train"]
        cls.note_imbalance(data, settings)
        more = cls.reading(settings)
        if settings.pattern:
            more["read_pattern"] = settings.pattern
        format = with_statistics(settings.sound, train)
        baselines = learn_baselines(
            "the nearest mean spectrogram", train, lambda some: vectors(some, format), len(labels)
        )
        return SoundCodec(format, labels, baselines=baselines, more=more)

    @classmethod
    def make_model(cls, data: SoundData, codec: SoundCodec, settings: Any, origin: Any) -> Any:
        """Build the model with a head; one that knew the same labels before keeps its head."""
        name, labels = settings.family, codec.labels
        config = replace(settings.model, **task_changes(name, cls.name), labels=len(labels))
        fresh = "" if origin is not None and origin.was(cls.name, labels) else "readout."
        return name, cls.build(name, config, settings, origin, fresh=fresh)

    def batches(self, data: SoundData, settings: Any) -> SoundBatches:
        """Return batches of augmented spectrograms with their labels."""
        train: Sounds = data["train"]
        often = np.bincount(train.labels.numpy(), minlength=len(self.labels))
        weights = class_weights(settings.class_weights, often, len(train))
        self.weights = None if weights is None else weights.to(settings.device)

        def make(picked: np.ndarray, sound: Tensor, lengths: Tensor) -> Batch:
            labels = train.labels[torch.from_numpy(picked)]
            return Batch(sound, lengths, labels.to(settings.device))

        return SoundBatches(train, self.format, settings, make)

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the sounds, which the loss counts, and the frames that were read."""
        return len(batch.labels), int(batch.lengths.sum())

    def loss(self, batch: Batch, settings: Any) -> Tensor:
        """Return the summed cross-entropy of the labels."""
        logits = self.model(batch.sound, batch.lengths).float()
        rest = {"weight": self.weights, "label_smoothing": settings.label_smoothing}
        return F.cross_entropy(logits, batch.labels, **rest, reduction="sum")

    def validate(self, data: SoundData, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return loss, accuracy and macro F1 on the validation part."""
        valid: Sounds = data["valid"]
        probs = self.probabilities_of(valid, self.Run())
        return self.valid_scores(valid, probs, by_f1=self.weights is not None)

    def title(self, data: SoundData, settings: Any) -> str:
        """Return what the model card says that the model is."""
        return f"One of {len(self.labels)} labels for a sound"

    def facts(self, data: SoundData, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        return {"labels": len(self.labels), "sounds": len(data["train"])}

    def baseline_vectors(self, part: Sounds) -> np.ndarray:
        """Return sounds as the nearest-mean baseline reads them."""
        return vectors(part, self.format)

    # Using

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: Mapping[str, Any]) -> SoundCodec:
        """Read the labels and the format of sounds that a folder names."""
        if not getattr(model.config, "labels", 0):
            raise UsageError(f"{folder / 'config.json'}: a model without a head for labels")
        labels, baselines = saved_labels_and_baselines(folder, model, config)
        outliers = Outliers.load(folder, config, len(labels))
        format = format_of(folder, model, config)
        return SoundCodec(format, labels, baselines=baselines, outliers=outliers)

    def probabilities(self, sounds: list[np.ndarray], settings: Any) -> np.ndarray:
        """Return the probability of each label, (n, labels), for the samples of sounds."""

        @torch.inference_mode()
        def forward(some: list[Tensor]) -> list[np.ndarray]:
            logits = self.model(*pad_sounds(some, self.device)).float()
            return list(logits.softmax(-1).cpu().numpy())

        features = [self.format.spectrogram(samples) for samples in sounds]
        frames = max(1, round(settings.batch_seconds / self.format.hop))
        rows = in_batches(features, [len(one) for one in features], forward, tokens=frames)
        return np.stack(rows)

    def probabilities_of(self, sounds: Sounds, settings: Any) -> np.ndarray:
        """Return the probability of each label for the sounds of a part."""
        parts = np.split(np.arange(len(sounds)), range(512, len(sounds), 512))
        return np.concatenate(
            [self.probabilities([sounds.read(i) for i in part], settings) for part in parts]
        )

    def answer_sounds(
        self, sounds: list[np.ndarray], settings: Any, lines: list[int]
    ) -> list[Classified]:
        """Label the samples of sounds."""
        return self.classified(self.probabilities(sounds, settings), sounds)

    # None of these

    def part_inputs(self, part: Sounds) -> list[np.ndarray]:
        """Return the samples of sounds."""
        return [part.read(i) for i in range(len(part))]

    def label_inputs(self, inputs: list[np.ndarray]) -> np.ndarray:
        """Return the probability of each label for samples of sounds."""
        return self.probabilities(inputs, self.Run())

    @torch.inference_mode()
    def outlier_vectors(self, inputs: list[np.ndarray]) -> np.ndarray:
        """Return each filter's mean and deviation, the length, and the vector the head reads."""
        return np.stack([self._outlier_vector(samples) for samples in inputs])

    def _outlier_vector(self, samples: np.ndarray) -> np.ndarray:
        filters, device = self.format.log_mel(samples), self.device
        memory, lengths = self.model.encode(*pad_sounds([self.format.spectrogram(samples)], device))
        pooled = self.model.readout.pool(memory, lengths)[0].float().cpu()
        length = torch.tensor([float(np.log(len(filters)))])
        deviation = filters.std(0, correction=0)
        return torch.cat([filters.mean(0), deviation, length, pooled]).numpy()

    def strangers(self, inputs: list[np.ndarray], rng: np.random.Generator) -> dict[str, Any]:
        """Return noise, noise with the spectrum of speech, tones and silence, at any loudness."""
        sizes = rng.choice([len(one) for one in inputs], STRANGERS)
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
        """Read sounds of a folder that are none of what was learnt."""
        return [self.format.read(file) for file in first_files(folder, SUFFIXES)]

    def predict_examples(self, data: SoundData, settings: Any) -> np.ndarray:
        """Return the probability of each label for each sound."""
        return self.probabilities_of(data[settings.part], settings)

    # Looking

    def question(self, given: Any, settings: Any, expected: Any = None) -> Question:
        """Return a sound with its label and the log-probability of that."""
        spectrogram = self.format.spectrogram(self.format.read(self.check_input(given, settings)))
        return self.label_question(
            lambda copies: self.model(*pad_sounds([spectrogram] * copies, self.device)),
            expected,
            **self.time_tokens(len(spectrogram)),
        )

    def describe(
        self, samples: np.ndarray, settings: Any
    ) -> tuple[dict[str, Any], Callable[[], Any]]:
        """Label a sound for its picture."""
        sound = pad_sounds([self.format.spectrogram(samples)], self.device)
        with torch.inference_mode():
            probs = self.model(*sound).float().softmax(-1)[0].cpu().numpy()
        return dict(self.labelled(probs, settings, [samples])), lambda: self.model(*sound)
