"""Image classification: images with labels to a model that labels images."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.augment import augments
from regard.data.images import ImageData
from regard.errors import UsageError
from regard.files import sha256
from regard.modalities.base import LabelledBatch
from regard.modalities.image import IMAGE, stacked
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.media import MediaCodec
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import Asked, derived
from regard.tasks.labels.classifier import Classifier, classifier
from regard.tasks.labels.judge import LabelJudge
from regard.tasks.labels.objective import LabelObjective, label_lesson, load_label_codec
from regard.tasks.labels.settings import (
    LabelTrainSettings,
    LinearTrain,
    NoneTrain,
    OneLabelRun,
)
from regard.tasks.parts import Lesson, Task
from regard.tasks.runner import Runner
from regard.tasks.vision.distillation import DISTILS, Teacher, two_heads
from regard.tasks.vision.photos import (
    IMAGE_SHORT_KEYS,
    IMAGE_SIZES,
    ImageEvalSettings,
    ImageRunSettings,
    ImageTrainSettings,
    use_share,
)
from regard.tasks.vision.probe import PROBES, probed
from regard.training.label_loss import target_loss
from regard.viewer.settings import ImageLookSettings


@dataclass(frozen=True)
class TrainImages(NoneTrain, LinearTrain, ImageTrainSettings, LabelTrainSettings):
    """What a training of an image classifier can be told."""

    erase: float = setting(0.0, "share of images with a random hole", min=0, max=1)
    mixup: float = setting(0.0, "alpha of mixup; 0 disables it", min=0, max=100)
    cutmix: float = setting(0.0, "alpha of CutMix; 0 disables it", min=0, max=100)
    teacher: str | None = setting(None, "a trained model to distil")
    distil: str = setting("hard", "distillation of its labels or probabilities", choices=DISTILS)
    distil_weight: float = setting(0.5, "weight of the distillation loss", min=0, max=1)
    temperature: float = setting(3.0, "temperature of soft distillation", above=0, max=100)


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


class ImageClassifier(Classifier):
    """Gives each image the most probable of its labels."""

    def probabilities(self, raws: Sequence[Any], settings: Asked) -> np.ndarray:
        """Probability of each label (n, labels) of images, with mirror= the mean of both sides."""
        probs = super().probabilities(raws, settings)
        if not (isinstance(settings, RunImages) and settings.mirror):
            return probs
        mirrored: Any = stacked(raws).flip(-1)
        return (probs + super().probabilities(mirrored, settings)) / 2


def load_codec(folder: Path, model: Model, config: Mapping[str, Any]) -> MediaCodec:
    """Labels and format of images that a folder names."""
    if not hasattr(model, "features"):
        raise UsageError(f"{folder / 'config.json'}: a model that labels no images")
    return load_label_codec(IMAGE, folder, model, config)


def made_with(runner: Runner[Any], data: ImageData, settings: EvalImages) -> dict[str, Any]:
    """Size of images, whether mirror images were used, and what a probe learnt from."""
    size = runner.codec.format_for(settings).size
    return {"size": size, "mirror": settings.mirror, **runner.config.get("probe", {})}


class ImageLabels(LabelObjective[TrainImages, ImageData]):
    """Learns labels of images, of a share of them or with a teacher if told."""

    dynamic = False

    def resolve(self, task: Task, values: Mapping[str, Any], origin: Origin | None) -> TrainImages:
        """Refuse keys of distillation without a teacher."""
        settings = super().resolve(task, values, origin)
        augments(settings.augment)
        given = [key for key in ("distil", "distil_weight", "temperature") if key in values]
        if given and not settings.teacher:
            raise UsageError(
                f"{given[0]}= does nothing without a teacher; name a run with teacher="
            )
        return settings

    def read(self, settings: TrainImages, origin: Origin | None) -> ImageData:
        """Images to train and to validate on."""
        data = super().read(settings, origin)
        use_share(data, settings.share)
        return data

    def lesson(self, runner: Runner[Any], data: ImageData, settings: TrainImages) -> Lesson:
        """The usual lesson, and with a teacher what that says of each image, too."""
        if not settings.teacher:
            return super().lesson(runner, data, settings)
        other = Origin.load(settings.teacher)
        theirs = load_codec(other.folder, other.model, other.config)
        teacher = Teacher(other, theirs, runner.codec, settings.device)
        if theirs.baselines is not None and theirs.baselines.mixture is not None:
            data.notes.append(
                f"teacher={settings.teacher}: its encoder teaches, without its linear model"
            )

        def loss(batch: LabelledBatch, weights: Tensor | None) -> Tensor:
            one, other = two_heads(runner.model, batch.inputs)
            share = settings.distil_weight
            with torch.autocast(settings.device.split(":")[0], enabled=False):
                answers = teacher(batch.inputs)
            taught = DISTILS[settings.distil](other, answers, settings.temperature)
            own = target_loss(settings.loss, one, batch.targets, weights)
            return (1 - share) * own + share * taught

        codec, train = runner.codec, data["train"]
        batches = IMAGE.batches(train, codec.format, settings, len(codec.labels))
        told = sha256(Path(settings.teacher) / "model.safetensors")
        facts = {"images": len(train), "teacher": told}
        return label_lesson(runner, data, settings, batches, loss, facts, dynamic=False)


IMAGES = Task(
    name="images",
    holds="images and labels",
    inputs=IMAGE,
    predictor=classifier(RunImages(batch=256), ImageLookSettings, ImageClassifier),
    judge=LabelJudge(made_with, made_of=probed),
    load_codec=load_codec,
    objective=ImageLabels(
        "images",
        IMAGE,
        TrainImages,
        sizes=IMAGE_SIZES,
        short=IMAGE_SHORT_KEYS,
        published_sizes=True,
    ),
    target="label",
    unit="images",
    judged=EvalImages,
)
