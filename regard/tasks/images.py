"""Classifying images: from images with labels to a model that labels images."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.augment import Augment, augments, chance_of
from regard.data.batches import Shuffled
from regard.data.image_files import BROKEN, ImageOptions
from regard.data.image_format import ImageFormat
from regard.data.images import ImageData, Images, load_images
from regard.errors import UsageError, lookup
from regard.files import cache_folder, sha256
from regard.metrics.baselines import Baselines
from regard.metrics.labels import count, log_loss, macro_f1, ones
from regard.models import MODELS, family
from regard.settings import describe
from regard.tasks import run
from regard.tasks.image_classifier import (
    ImageClassifier,
    ImageRunSettings,
    format_of,
    shrunk,
)
from regard.tasks.labelling import WEIGHTINGS, label_list, uneven, weigh
from regard.tasks.run import (
    Data,
    Report,
    TaskSettings,
    Work,
    build_model,
    resolve_task,
    settings_with,
    shape_of,
    size_of,
    train_task,
    trained,
)
from regard.training.loop import Trainable, at_least

NAME = "images"
FAMILY = "vit"
FAMILIES = ("vit", "swin", "mvit", "resnet", "local")
ViTConfig, _ = family(FAMILY)
SOME = 2000  # images that a baseline learns from

# what a size means for training, on top of the sizes of the model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.002, "batch": 128, "steps": 4000},
    "small": {"lr": 0.0015, "batch": 128, "steps": 10_000},
    "base": {"lr": 0.001, "batch": 128, "steps": 20_000},
    "big": {"lr": 0.0005, "batch": 256, "steps": 60_000},
}
# short keys for what lies deeper, where a family has it
SHORT: dict[str, str | tuple[str, ...]] = {
    **run.SHORT,
    "drop_path": "model.drop_path",
    "patch": "model.patch",
    "pool": "model.pool",
    "depths": "model.depths",
    "widths": "model.widths",
    "window": "model.window",
    "stem": "model.stem",
}


@dataclass(frozen=True)
class SightSettings(TaskSettings):
    """What a run that learns from images can be told, with labels or without."""

    schedule: str = field(default="cosine", metadata={"help": "fall of the rate"})
    weight_decay: float = field(default=0.05, metadata=at_least(0, "of matrices", 10))
    ema: float = field(default=0.999, metadata=at_least(0, "memory of averaged weights", 0.99999))
    valid: str | None = field(default=None, metadata={"help": "a set to choose by, or a share"})
    family: str = field(default=FAMILY, metadata={"help": "vit, swin, mvit, resnet or local"})
    like: str | None = field(default=None, metadata={"help": "a member of the family, as deit"})
    image: int | None = field(
        default=None, metadata=at_least(1, "pixels that images are brought to", 4096)
    )
    channels: int | None = field(default=None, metadata=at_least(1, "1 for grey, 3 for colour", 3))
    fit: str = field(default="crop", metadata={"help": "made square by crop, stretch or pad"})
    background: str = field(default="white", metadata={"help": "seen through images"})
    broken: str = field(default="refuse", metadata={"help": "refuse or skip what cannot be read"})
    columns: str | None = field(default=None, metadata={"help": "path and label, such as 2,1"})
    header: bool | None = field(
        default=None, metadata={"help": "whether a table begins with one; recognised unless told"}
    )
    names: tuple[str, ...] = field(default=(), metadata={"help": "of labels that are numbers"})
    tile: int = field(default=32, metadata=at_least(1, "pixels of an image in a mosaic", 4096))
    share: float = field(
        default=1.0, metadata={"help": "of the training images to use", "above": 0, "max": 1}
    )
    batch: int = field(default=128, metadata=at_least(1, "images a batch", 100_000))
    augment: str = field(
        default="flip+crop", metadata={"help": "none, or such as flip+crop+trivial, zoom, rand"}
    )
    padding: int | None = field(default=None, metadata=at_least(0, "rim that crop adds", 4096))
    strength: float = field(default=1.0, metadata=at_least(0, "of trivial and rand", 1))
    model: ViTConfig = field(default_factory=ViTConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class ImageSettings(SightSettings):
    """Everything that a run that learns labels of images can be told."""

    erase: float = field(default=0.0, metadata=at_least(0, "share of images with a hole", 1))
    mixup: float = field(default=0.0, metadata=at_least(0, "alpha of mixup; 0: none", 100))
    cutmix: float = field(default=0.0, metadata=at_least(0, "alpha of CutMix; 0: none", 100))
    label_smoothing: float = field(default=0.1, metadata=at_least(0, "spread of the target", 0.9))
    class_weights: str = field(
        default="none", metadata={"help": "in the loss: none, or balanced for uneven labels"}
    )
    teacher: str | None = field(default=None, metadata={"help": "a run to learn from"})
    distil: str = field(default="hard", metadata={"help": "learn its labels, or soft: its chances"})
    distil_weight: float = field(default=0.5, metadata=at_least(0, "of what it says", 1))
    temperature: float = field(
        default=3.0, metadata={"help": "of soft distillation", "above": 0, "max": 100}
    )


def family_of(values: Mapping[str, Any]) -> str:
    """Return the family of the model to build: that of `init`, or as told."""
    name = values.get("family")
    if name is None and values.get("init"):
        name = trained(values["init"])[1]["family"]
    known = {each: None for each in FAMILIES if each in MODELS}
    lookup("family", str(name or FAMILY), known)
    return str(name or FAMILY)


def resolve(values: Mapping[str, Any]) -> ImageSettings:
    """Make full settings of what a user gave: the size fills in what is not said."""
    name = family_of(values)
    if values.get("like") and values.get("init"):
        raise UsageError(
            f"like={values['like']} is for a new model; the one in init= has its parts already"
        )
    row = [str(values["like"])] if values.get("like") else []
    model = shape_of(name, values, *row)
    kind, size = settings_with(ImageSettings, model=family(name)[0]), size_of(values)
    known = {each.key for each in describe(kind)}
    settings = resolve_task(
        kind,
        {**values, "family": name},
        model=model,
        # a published model by its name is trained as a big one
        sizes={size: SIZES["big"], **SIZES},
        short={key: long for key, long in SHORT.items() if long in known},
        of="images and labels",
    )
    augments(settings.augment)
    lookup("broken", settings.broken, BROKEN)
    lookup("distil", settings.distil, DISTILS)
    lookup("class_weights", settings.class_weights, WEIGHTINGS)
    given = [key for key in ("distil", "distil_weight", "temperature") if key in values]
    if given and not settings.teacher:
        raise UsageError(f"{given[0]}= does nothing without a teacher; name a run with teacher=")
    return settings


def resized(format: ImageFormat, size: int | None) -> ImageFormat:
    """Return a format for images of another size, of which as much is seen."""
    if format.edge is None or not size or not format.size:
        return replace(format, size=size)
    return replace(format, size=size, edge=max(1, round(format.edge * size / format.size)))


def format_wanted(settings: SightSettings) -> ImageFormat:
    """Return what is known of the format of images before they are seen."""
    told = ImageFormat(
        settings.image, settings.channels, settings.fit, background=settings.background
    ).check()
    if settings.init:
        model, config = trained(settings.init)
        told = replace(told, channels=model.config.channels)
        if isinstance(config.get("image"), dict):
            before = format_of(Path(settings.init), model, config)
            told = resized(before, settings.image or before.size)
        elif settings.image is None:
            told = replace(told, size=model.config.image)
    elif settings.image is None and settings.size not in SIZES:
        told = replace(told, size=settings.model.image)  # type: ignore[attr-defined]
    return told


def options_of(settings: SightSettings) -> ImageOptions:
    """Return how the files of a set are to be taken."""
    given = settings.columns, settings.names, settings.tile, settings.broken
    return ImageOptions(*given, header=settings.header)


def read_images(settings: ImageSettings) -> ImageData:
    """Read the images to train and to validate on."""
    assert settings.data is not None
    data = load_images(
        settings.data,
        valid=settings.valid,
        test=settings.test,
        format=format_wanted(settings),
        options=options_of(settings),
        cache=cache_folder(),
    )
    train = data.parts["train"]
    label_list([(data.classes[i],) for i in train.labels.tolist()], settings.data)
    if settings.share < 1:
        data.parts["train"] = some = train.part(settings.share)
        data.notes.append(f"share={settings.share}: {len(some):,} of {len(train):,} images used")
    return data


# Learning from a teacher


def soft_loss(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the summed cross-entropy of targets (b, labels) that sum to one, weighed by label."""
    targets = targets if weights is None else targets * weights
    return -(targets * logits.float().log_softmax(-1)).sum()


def _hard(logits: Tensor, theirs: Tensor, temperature: float) -> Tensor:
    return F.cross_entropy(logits.float(), theirs.argmax(-1), reduction="sum")


def _soft(logits: Tensor, theirs: Tensor, temperature: float) -> Tensor:
    ours, theirs = (x.float().div(temperature).log_softmax(-1) for x in (logits, theirs))
    return temperature**2 * F.kl_div(ours, theirs, reduction="sum", log_target=True)


# name -> what is to be learnt of a teacher: its labels (DeiT, Touvron et al. 2021), or how likely
# it takes each to be (Hinton et al. 2015)
DISTILS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {"hard": _hard, "soft": _soft}


class Teacher:
    """A trained classifier of the same labels, asked about the images of each batch."""

    def __init__(self, folder: str, labels: list[str], format: ImageFormat, device: str):
        model, config = trained(folder)
        self.runs = ImageClassifier.load(Path(folder), model, config)
        if set(self.runs.labels) != set(labels):
            raise UsageError(
                f"teacher={folder} knows other labels ({', '.join(self.runs.labels[:6])}); "
                "take one that was trained on the same"
            )
        theirs = self.runs.format
        if theirs.channels != format.channels:
            raise UsageError(
                f"teacher={folder} reads {theirs.channels} channels, the data have "
                f"{format.channels}; set channels={theirs.channels}"
            )
        self.order = [self.runs.labels.index(label) for label in labels]
        self.model = model.to(device).eval().requires_grad_(False)
        self.size = theirs.size
        # from images as the pupil sees them to those of the teacher
        (mean, std), (mean2, std2) = (
            [torch.tensor(values, device=device)[:, None, None] for values in each.moments()]
            for each in (format, theirs)
        )
        self.scale, self.shift = std / std2, (mean - mean2) / std2

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return its logits (b, labels)."""
        images = images * self.scale + self.shift
        if images.shape[-1] != self.size:
            images = F.interpolate(images, size=self.size, mode="bilinear", antialias=True)
        return self.model(images)[:, self.order]


# Training


class Batch(NamedTuple):
    """Images, the targets (b, labels), and what a teacher says of them."""

    images: Tensor
    targets: Tensor
    theirs: Tensor | None = None


class ImageClassification(Trainable):
    """The task as the training loop sees it."""

    def __init__(
        self,
        train: Images,
        settings: ImageSettings,
        format: ImageFormat,
        labels: list[str],
        *,
        tokens: int = 1,
        valid: Images | None = None,
        teacher: Callable[[Tensor], Tensor] | None = None,
    ):
        """Take the images to learn from, and how many tokens an image comes to."""
        self.train, self.settings, self.format, self.labels = train, settings, format, labels
        self.tokens, self.valid, self.teacher = tokens, valid, teacher
        self.shuffled = Shuffled(len(train), settings.batch, settings.seed)
        self.distil = lookup("distil", settings.distil, DISTILS)
        often = np.bincount(train.labels.numpy(), minlength=len(labels))
        self.weights = weigh(settings.class_weights, often, len(train))
        assert format.size is not None
        self.augment = Augment(
            settings.augment,
            len(labels),
            format.normalise,
            padding=format.size // 8 if settings.padding is None else settings.padding,
            strength=settings.strength,
            erase=settings.erase,
            mixup=settings.mixup,
            cutmix=settings.cutmix,
            smoothing=settings.label_smoothing,
        )

    def batch(self, n: int) -> Batch:
        """Return batch n, always the same for the same seed and n."""
        picked = self.shuffled[n]
        pixels, labels = self.train.read(picked), self.train.labels[torch.from_numpy(picked)]
        images, targets = self.augment(pixels, labels, chance_of(self.settings.seed, n))
        images, targets = images.to(self.settings.device), targets.to(self.settings.device)
        return Batch(images, targets, None if self.teacher is None else self.teacher(images))

    def epoch(self) -> float:
        """Return in how many batches all images are read once."""
        return len(self.train) / self.shuffled.rows

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the images, which the loss counts, and the tokens that they come to."""
        return len(batch.images), len(batch.images) * self.tokens

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed loss of the labels, and of what the teacher says."""
        weights = None if self.weights is None else self.weights.to(batch.targets.device)
        if batch.theirs is None:
            return soft_loss(model(batch.images), batch.targets, weights)
        one, other = two_heads(model, batch.images)
        weight = self.settings.distil_weight
        taught = self.distil(other, batch.theirs, self.settings.temperature)
        return (1 - weight) * soft_loss(one, batch.targets, weights) + weight * taught

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return loss, accuracy and F1 on the validation part."""
        assert self.valid is not None
        classifier = ImageClassifier(model, self.labels, self.format)
        chances = classifier.chances_of(self.valid, ImageRunSettings(batch=256))
        wanted = ones(self.valid.labels.numpy(), len(self.labels))
        found = ones(chances.argmax(1), len(self.labels))
        accuracy = 100 * float((wanted & found).any(1).mean())
        f1 = macro_f1(count(wanted, found))
        return {
            "loss": log_loss(wanted, chances, False),
            "accuracy": accuracy,
            "macro_f1": f1,
            "better": accuracy if self.weights is None else f1,
        }


def two_heads(model: Any, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits of the head for labels and of the one for a teacher, or twice the only one."""
    pooled = model.pool(model.features(images))
    if hasattr(model.head, "each"):
        return model.head.each(pooled)
    logits = model.head(pooled)
    return logits, logits


def build_classifier(settings: ImageSettings, format: ImageFormat, labels: list[str]) -> Any:
    """Build the model with a head for the labels; one that knew the same before keeps its head."""
    config: Any = replace(settings.model, labels=len(labels))  # type: ignore[type-var]
    fresh = "head."
    if settings.init:
        before = trained(settings.init)[1]
        if (before.get("task"), before.get("labels")) == (NAME, labels):
            fresh = ""
    else:
        config = replace(config, channels=format.channels, image=format.size)
    return build_model(settings.family, config, settings, fresh=fresh)


def learn_baselines(train: Images, labels: int) -> Baselines:
    """Learn what a model should beat from some of the images."""
    rows = np.linspace(0, len(train) - 1, min(len(train), SOME)).astype(np.int64)
    some = train.pick(rows)
    wanted = ones(some.labels.numpy(), labels)
    return Baselines.learn("the nearest mean image", shrunk(some), wanted)


def train(values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None) -> Report:
    """Train a classifier of images in a folder, or go on with one that was begun there."""
    settings = resolve(values)

    def read() -> Data:
        data = read_images(settings)
        return Data(data, data.sha, data.notes, data.split)

    def prepare(data: Data, folder: Path, begun: dict[str, Any] | None) -> Work:
        found: ImageData = data.parts
        labels, format = found.classes, found.format
        if not format.mean:
            mean, std = found.parts["train"].channel_stats()
            format = replace(format, mean=mean, std=std)
        model = build_classifier(settings, format, labels)
        assert format.size is not None
        height, width = model.grid((format.size, format.size))
        facts: dict[str, Any] = {"labels": len(labels), "images": len(found.parts["train"])}
        teacher = None
        if settings.teacher:
            teacher = Teacher(settings.teacher, labels, format, settings.device)
            facts["teacher"] = sha256(Path(settings.teacher) / "model.safetensors")
            if begun is not None and begun.get("teacher") != facts["teacher"]:
                raise UsageError(
                    f"{folder} was begun with another teacher than {settings.teacher} holds now; "
                    "restore it to go on, or give another out= to begin anew"
                )
        task = ImageClassification(
            found.parts["train"],
            settings,
            format,
            labels,
            tokens=height * width,
            valid=found.parts["valid"],
            teacher=teacher,
        )
        train, valid = found.parts["train"], found.parts["valid"]
        often = np.bincount(train.labels.numpy(), minlength=len(labels))
        data.notes.extend(uneven(often, labels, settings.class_weights))
        baselines = learn_baselines(train, len(labels))
        return Work(
            settings.family,
            model,
            task,
            f"One of {len(labels)} labels for an image",
            about={"labels": labels, "image": asdict(format)},
            facts=facts,
            save=baselines.save,
            baselines=baselines.scores(shrunk(valid), ones(valid.labels.numpy(), len(labels))),
            dynamic=False,
        )

    return train_task(
        NAME, values, settings, read=read, prepare=prepare, recipe=recipe, quiet=quiet
    )
