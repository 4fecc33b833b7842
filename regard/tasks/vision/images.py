"""Image classification: images with labels to a model that labels images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.augment import Augment, augments, step_rng
from regard.data.batches import Shuffled
from regard.data.images import ImageData, Images
from regard.data.labels import label_list
from regard.errors import UsageError
from regard.files import sha256
from regard.metrics.outliers import Outliers
from regard.models import task_changes
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.one_label import (
    NoneTrain,
    OneLabelTrain,
    learn_baselines,
    saved_labels_and_baselines,
)
from regard.tasks.frame.origin import Origin
from regard.tasks.vision.distillation import DISTILS, Teacher, two_heads
from regard.tasks.vision.labeller import ImageLabeller, RunImages, shrunk
from regard.tasks.vision.photos import (
    ImageCodec,
    ImageTrainSettings,
    format_of,
    use_share,
    with_statistics,
)
from regard.tasks.vision.probe import evaluate_probe
from regard.training.label_loss import class_weights, soft_loss


@dataclass(frozen=True)
class TrainImages(NoneTrain, OneLabelTrain, ImageTrainSettings):
    """What a training of an image classifier can be told."""

    erase: float = setting(0.0, "share of images with a random hole", min=0, max=1)
    mixup: float = setting(0.0, "alpha of mixup; 0 disables it", min=0, max=100)
    cutmix: float = setting(0.0, "alpha of CutMix; 0 disables it", min=0, max=100)
    teacher: str | None = setting(None, "a trained model to distil")
    distil: str = setting("hard", "distillation of its labels or probabilities", choices=DISTILS)
    distil_weight: float = setting(0.5, "weight of the distillation loss", min=0, max=1)
    temperature: float = setting(3.0, "temperature of soft distillation", above=0, max=100)


# Batches


class Batch(NamedTuple):
    """Images, the targets (b, labels), and the logits of a teacher."""

    images: Tensor
    targets: Tensor
    theirs: Tensor | None = None


class ImageBatches:
    """Batch n of augmented images, a pure function of (seed, n)."""

    def __init__(
        self,
        train: Images,
        settings: Any,
        codec: ImageCodec,
        teacher: Callable[[Tensor], Tensor] | None = None,
    ):
        self.train, self.settings, self.teacher = train, settings, teacher
        self.shuffled = Shuffled(len(train), settings.batch, settings.seed)
        assert codec.format.size is not None
        self.augment = Augment(
            settings.augment,
            len(codec.labels),
            codec.format.normalise,
            padding=codec.format.size // 8 if settings.padding is None else settings.padding,
            strength=settings.strength,
            erase=settings.erase,
            mixup=settings.mixup,
            cutmix=settings.cutmix,
            smoothing=settings.label_smoothing,
        )

    def __getitem__(self, n: int) -> Batch:
        """Return batch n."""
        picked, device = self.shuffled[n], self.settings.device
        pixels, labels = self.train.read(picked), self.train.labels[torch.from_numpy(picked)]
        images, targets = self.augment(pixels, labels, step_rng(self.settings.seed, n))
        images, targets = images.to(device), targets.to(device)
        return Batch(images, targets, None if self.teacher is None else self.teacher(images))

    def epoch(self) -> float:
        """Return in how many batches all images are read once."""
        return len(self.train) / self.shuffled.rows


class ClassifyImages(ImageLabeller):
    """Label images: the most probable of the labels that were learnt."""

    name = "images"
    Train = TrainImages
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"lr": 0.002, "batch": 128, "steps": 4000},
        "small": {"lr": 0.0015, "batch": 128, "steps": 10_000},
        "base": {"lr": 0.001, "batch": 128, "steps": 20_000},
        "big": {"lr": 0.0005, "batch": 256, "steps": 60_000},
    }

    # Training

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse keys of distillation without a teacher."""
        augments(settings.augment)
        given = [key for key in ("distil", "distil_weight", "temperature") if key in values]
        if given and not settings.teacher:
            raise UsageError(
                f"{given[0]}= does nothing without a teacher; name a run with teacher="
            )
        return settings

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> ImageData:
        """Read the images to train and to validate on."""
        data: ImageData = cls.load_images(settings, origin)
        train = data["train"]
        label_list([(data.classes[i],) for i in train.labels.tolist()], settings.data)
        use_share(data, settings.share)
        return data

    @classmethod
    def make_codec(cls, data: ImageData, settings: Any, learnt: Any, origin: Any) -> ImageCodec:
        """Take the labels and the format of the data."""
        labels, train = data.classes, data["train"]
        cls.note_imbalance(data, settings)
        baselines = learn_baselines("the nearest mean image", train, shrunk, len(labels))
        return ImageCodec(with_statistics(data), labels, baselines)

    @classmethod
    def make_model(cls, data: ImageData, codec: ImageCodec, settings: Any, origin: Any) -> Any:
        """Build the model with a head; one that knew the same labels before keeps its head."""
        name, labels = settings.family, codec.labels
        config = replace(settings.model, **task_changes(name, cls.name), labels=len(labels))
        if origin is None:
            config = replace(config, channels=codec.format.channels, image=codec.format.size)
        fresh = "" if origin is not None and origin.was(cls.name, labels) else "head."
        return name, cls.build(name, config, settings, origin, fresh=fresh)

    def batches(self, data: ImageData, settings: Any) -> ImageBatches:
        """Return batches of augmented images."""
        train: Images = data["train"]
        often = np.bincount(train.labels.numpy(), minlength=len(self.labels))
        self.weights = class_weights(settings.class_weights, often, len(train))
        self.distil = DISTILS[settings.distil]
        height, width = self.model.grid((self.format.size, self.format.size))
        self.tokens = height * width
        teacher = None
        if settings.teacher:
            other = Origin.load(settings.teacher)
            theirs = self.load_codec(other.folder, other.model, other.config)
            teacher = Teacher(other, theirs, self.codec, settings.device)
        return ImageBatches(train, settings, self.codec, teacher)

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the images, which the loss counts, and their tokens."""
        return len(batch.images), len(batch.images) * self.tokens

    def loss(self, batch: Batch, settings: Any) -> Tensor:
        """Return the summed cross-entropy of the labels, and that of distillation."""
        weights = None if self.weights is None else self.weights.to(batch.targets.device)
        if batch.theirs is None:
            return soft_loss(self.model(batch.images), batch.targets, weights)
        one, other = two_heads(self.model, batch.images)
        share = settings.distil_weight
        taught = self.distil(other, batch.theirs, settings.temperature)
        return (1 - share) * soft_loss(one, batch.targets, weights) + share * taught

    def validate(self, data: ImageData, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return loss, accuracy and macro F1 on the validation part."""
        valid: Images = data["valid"]
        probs = self.probabilities_of(valid, RunImages(batch=256))
        return self.valid_scores(valid, probs, by_f1=self.weights is not None)

    def title(self, data: ImageData, settings: Any) -> str:
        """Return what the model card says that the model is."""
        return f"One of {len(self.labels)} labels for an image"

    def facts(self, data: ImageData, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        facts: dict[str, Any] = {
            "labels": len(self.labels),
            "images": len(data["train"]),
        }
        if settings.teacher:
            facts["teacher"] = sha256(Path(settings.teacher) / "model.safetensors")
        return facts

    # Using

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: Mapping[str, Any]) -> ImageCodec:
        """Read the labels and the format of images that a folder names."""
        if not getattr(model.config, "labels", 0) or not hasattr(model, "features"):
            raise UsageError(
                f"{folder / 'config.json'}: a model without a head, which labels no images; train "
                "one with: regard train classify init=..."
            )
        labels, baselines = saved_labels_and_baselines(folder, model, config)
        outliers = Outliers.load(folder, config, len(labels))
        return ImageCodec(format_of(folder, model, config), labels, baselines, outliers=outliers)

    def evaluate(self, settings: Mapping[str, Any], **rivals: Any) -> Any:
        """Judge the labels of a test set, or with probe= what the model's vectors are worth."""
        if settings.get("probe") is not None:
            return evaluate_probe(self, settings, **rivals)
        return super().evaluate(settings, **rivals)
