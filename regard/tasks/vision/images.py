"""Image classification: images with labels to a model that labels images."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.data.augment import Augment, augments, step_rng
from regard.data.batches import Shuffled
from regard.data.images import ImageData, Images
from regard.data.labels import label_list
from regard.errors import UsageError
from regard.files import sha256
from regard.metrics.outliers import Outliers
from regard.modalities.image import IMAGE
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import derived
from regard.tasks.labels.classifier import classifier
from regard.tasks.labels.judge import LabelJudge
from regard.tasks.labels.objective import LabelledInputs, LabelObjective, spread
from regard.tasks.labels.settings import (
    NoneTrain,
    OneLabelRun,
    OneLabelTrain,
    saved_labels_and_baselines,
)
from regard.tasks.parts import Task
from regard.tasks.runner import Runner
from regard.tasks.vision.distillation import DISTILS, Teacher, two_heads
from regard.tasks.vision.photos import (
    IMAGE_SHORT_KEYS,
    ImageCodec,
    ImageEvalSettings,
    ImageRunSettings,
    ImageTrainSettings,
    format_of,
    read_images,
    training_images,
    use_share,
    with_statistics,
)
from regard.tasks.vision.probe import PROBES, probed
from regard.training.label_loss import soft_loss
from regard.viewer.settings import ImageLookSettings


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


class LabelledImageBatch(NamedTuple):
    """Images, the targets (b, labels), and the logits of a teacher."""

    images: Tensor
    targets: Tensor
    theirs: Tensor | None = None


@dataclass(frozen=True)
class RunImages(OneLabelRun, ImageRunSettings):
    """How to label images."""

    mirror: bool = setting(False, "average over each image and its mirror image")


@dataclass(frozen=True)
class EvalImages(derived("EvalImages", ImageEvalSettings, RunImages)):
    """What to judge on, and how."""

    probe: str | None = setting(
        None,
        "judge labels learnt from its vectors",
        choices=PROBES,
    )
    share: float = setting(1.0, "share of the labelled images a probe learns from", above=0, max=1)
    neighbours: int = setting(20, "neighbours that vote, with probe=knn", min=1, max=10_000)


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

    def __getitem__(self, n: int) -> LabelledImageBatch:
        """Return batch n."""
        picked, device = self.shuffled[n], self.settings.device
        pixels, labels = self.train.read(picked), self.train.labels[torch.from_numpy(picked)]
        images, targets = self.augment(pixels, labels, step_rng(self.settings.seed, n))
        images, targets = images.to(device), targets.to(device)
        return LabelledImageBatch(
            images, targets, None if self.teacher is None else self.teacher(images)
        )

    def epoch(self) -> float:
        """Return in how many batches all images are read once."""
        return len(self.train) / self.shuffled.rows


def load_codec(folder: Path, model: Model, config: Mapping[str, Any]) -> ImageCodec:
    """Labels and format of images that a folder names."""
    if not getattr(model.config, "labels", 0) or not hasattr(model, "features"):
        raise UsageError(
            f"{folder / 'config.json'}: a model without a head, which labels no images; train "
            "one with: regard train classify init=..."
        )
    labels, baselines = saved_labels_and_baselines(folder, model, config)
    outliers = Outliers.load(folder, config, len(labels))
    return ImageCodec(format_of(folder, model, config), labels, baselines, outliers=outliers)


def read_test(runner: Runner[Any], settings: Any) -> ImageData:
    """The part that is judged, as a model takes its images."""
    return read_images(runner, settings, classes=runner.codec.labels)


def made_with(runner: Runner[Any], data: ImageData, settings: Any) -> dict[str, Any]:
    """Size of images, whether mirror images were used, and what a probe learnt from."""
    size = runner.codec.format_for(settings).size
    return {"size": size, "mirror": settings.mirror, **runner.config.get("probe", {})}


class LabelledImages(LabelledInputs):
    """Images, of which labels are learnt."""

    task, dynamic = "images", False
    baseline = "the nearest mean image"

    def check(self, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse keys of distillation without a teacher."""
        augments(settings.augment)
        given = [key for key in ("distil", "distil_weight", "temperature") if key in values]
        if given and not settings.teacher:
            raise UsageError(
                f"{given[0]}= does nothing without a teacher; name a run with teacher="
            )
        return settings

    def read(self, settings: Any, origin: Origin | None) -> ImageData:
        """Images to train and to validate on."""
        data = training_images(settings, origin, settings.size not in _SIZES)
        numbers = data["train"].labels.tolist()
        label_list([(data.classes[i],) for i in numbers], settings.data)
        use_share(data, settings.share)
        return data

    def codec(
        self, data: ImageData, settings: Any, learnt: Any, origin: Origin | None
    ) -> ImageCodec:
        """Labels and format of the data."""
        return ImageCodec(with_statistics(data), data.classes)

    def baseline_part(self, train: Images) -> Images:
        """Some images, spread over all."""
        return spread(train)

    def config(self, config: Any, codec: ImageCodec, origin: Origin | None) -> Any:
        """Config of the model for images of this size."""
        if origin is not None:
            return config
        return replace(config, channels=codec.format.channels, image=codec.format.size)

    def batches(self, data: ImageData, runner: Runner[Any], settings: Any) -> ImageBatches:
        """Batches of augmented images, with what a teacher says of them."""
        teacher = None
        if settings.teacher:
            other = Origin.load(settings.teacher)
            theirs = load_codec(other.folder, other.model, other.config)
            teacher = Teacher(other, theirs, runner.codec, settings.device)
        return ImageBatches(data["train"], settings, runner.codec, teacher)

    def count(self, runner: Runner[Any], batch: LabelledImageBatch) -> tuple[int, int]:
        """Images, which the loss counts, and their tokens."""
        size = runner.codec.format.size
        height, width = runner.model.grid((size, size))
        return len(batch.images), len(batch.images) * height * width

    def loss(
        self, runner: Runner[Any], batch: LabelledImageBatch, settings: Any, weights: Tensor | None
    ) -> Tensor:
        """Summed cross-entropy of the labels, and that of distillation."""
        if batch.theirs is None:
            return soft_loss(runner.model(batch.images), batch.targets, weights)
        one, other = two_heads(runner.model, batch.images)
        share = settings.distil_weight
        taught = DISTILS[settings.distil](other, batch.theirs, settings.temperature)
        return (1 - share) * soft_loss(one, batch.targets, weights) + share * taught

    def facts(self, data: ImageData, batches: Any, settings: Any) -> dict[str, Any]:
        """Number of images, and the hash of the teacher."""
        facts: dict[str, Any] = {"images": len(data["train"])}
        if settings.teacher:
            facts["teacher"] = sha256(Path(settings.teacher) / "model.safetensors")
        return facts


_SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"lr": 0.002, "batch": 128, "steps": 4000},
    "small": {"lr": 0.0015, "batch": 128, "steps": 10_000},
    "base": {"lr": 0.001, "batch": 128, "steps": 20_000},
    "big": {"lr": 0.0005, "batch": 256, "steps": 60_000},
}
IMAGES = Task(
    name="images",
    holds="images and labels",
    inputs=IMAGE,
    predictor=classifier(RunImages(batch=256), ImageLookSettings),
    judge=LabelJudge(read_test, made_with, made_of=probed),
    load_codec=load_codec,
    objective=LabelObjective(
        LabelledImages(), TrainImages, sizes=_SIZES, short=IMAGE_SHORT_KEYS, published_sizes=True
    ),
    target="label",
    unit="images",
    judged=EvalImages,
)
