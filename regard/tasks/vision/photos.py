"""What tasks on images share: their settings, and how these say where images are."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from regard.data.augment import AUGMENTS
from regard.data.captions import (
    CaptionData,
    captions_of,
    read_captions,
    with_captions,
)
from regard.data.image_files import ImageOptions
from regard.data.image_format import FITS, ImageFormat
from regard.data.images import ImageData
from regard.data.media import BROKEN
from regard.modalities.image import IMAGE
from regard.models import family, task_changes
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import SHORT_KEYS, RunSettings, TrainSettings
from regard.tasks.frame.tune import let_learn
from regard.tasks.labels.settings import LabelEvalSettings
from regard.tasks.parts import Task, usual_shape
from regard.tasks.runner import Runner

ViTConfig, _ = family("vit")
# short keys for fields of the model's config, where a family has them
IMAGE_SHORT_KEYS: dict[str, str | tuple[str, ...]] = {
    **SHORT_KEYS,
    "drop_path": "model.drop_path",
    "patch": "model.patch",
    "pool": "model.pool",
    "depths": "model.depths",
    "widths": "model.widths",
    "window": "model.window",
    "stem": "model.stem",
}


IMAGE_SIZES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {"lr": 0.002, "batch": 128, "steps": 4000},
    "small": {"lr": 0.0015, "batch": 128, "steps": 10_000},
    "base": {"lr": 0.001, "batch": 128, "steps": 20_000},
    "big": {"lr": 0.0005, "batch": 256, "steps": 60_000},
}


@dataclass(frozen=True)
class ImageTable:
    """Where images and labels are in a table or a mosaic."""

    GROUP = "data"

    columns: str | None = setting(None, "path and label, such as 2,1")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    tile: int = setting(32, "pixels of an image in a mosaic", min=1, max=4096)

    def reading(self, labelled: bool = True) -> ImageOptions:
        """How the files of images are read."""
        names, broken = getattr(self, "names", ()), getattr(self, "broken", "refuse")
        return ImageOptions(
            columns=self.columns,
            names=tuple(names),
            tile=self.tile,
            broken=broken,
            labelled=labelled,
            header=self.header,
        )


@dataclass(frozen=True)
class ImageTrainSettings(ImageTable, TrainSettings):
    """What a training on images can be told, with labels or without."""

    schedule: str = "cosine"
    weight_decay: float = 0.05
    ema: float = 0.999
    family: str = setting("vit", "model family", group="model")
    like: str | None = setting(None, "model preset", group="model")
    image: int | None = setting(None, "image size in pixels", min=1, max=4096, group="data")
    channels: int | None = setting(
        None, "channels: 1 for grey, 3 for colour", min=1, max=3, group="data"
    )
    fit: str = setting("crop", "how images become square", choices=FITS, group="data")
    background: str = setting("white", "colour behind transparent images", group="data")
    broken: str = setting("refuse", "files that cannot be read", choices=BROKEN, group="data")
    names: tuple[str, ...] = setting((), "names of labels that are numbers", group="data")
    share: float = setting(1.0, "share of the training images to use", above=0, max=1, group="data")
    batch: int = setting(128, "images a batch", min=1, max=100_000, group="optimiser")
    augment: str = setting(
        "flip+crop", "augmentation", choices=lambda: ("none", *AUGMENTS), joined_by="+"
    )
    padding: int | None = setting(None, "pixels of padding before a random crop", min=0, max=4096)
    strength: float = setting(1.0, "magnitude of trivial and rand augmentation", min=0, max=1)
    model: ViTConfig = field(default_factory=ViTConfig)  # type: ignore[valid-type]

    def format(self, origin: Origin | None) -> ImageFormat:
        """What is known of the format of images before they are seen.

        A published size names a model that was trained on images of its own size.
        """
        format = ImageFormat(self.image, self.channels, self.fit, background=self.background)
        format = format.check()
        if origin is None:
            own = self.size not in IMAGE_SIZES and not self.image
            return replace(format, size=self.model.image) if own else format
        config = origin.model.config
        if isinstance(origin.config.get("image"), dict):
            before = IMAGE.saved_format(origin.folder, origin.model, origin.config)
            return resized(before, self.image or before.size)
        return replace(format, channels=config.channels, size=self.image or config.image)


@dataclass(frozen=True)
class ImageRunSettings(RunSettings):
    """How to read images."""

    image: int | None = setting(None, "image size in pixels", min=1, max=4096, group="data")
    broken: str = setting("refuse", "files that cannot be read", choices=BROKEN, group="data")
    batch: int = setting(64, "images a batch", min=1, max=100_000, group="machine")


@dataclass(frozen=True)
class ImageEvalSettings(ImageTable, LabelEvalSettings):
    """What to judge on."""

    data: str | None = setting(None, "a folder or table of images with labels", group="data")
    valid: str | None = setting(
        None, "which set is the validation part, or its share", group="data"
    )


def resized(format: ImageFormat, size: int | None) -> ImageFormat:
    """Return a format for images of another size, of which as much is seen."""
    if format.edge is None or not size or not format.size:
        return replace(format, size=size)
    return replace(format, size=size, edge=max(1, round(format.edge * size / format.size)))


def use_share(data: ImageData, share: float) -> None:
    """Keep a share of the training images, and note it."""
    train = data.parts["train"]
    if share < 1:
        data.parts["train"] = some = train.part(share)
        data.notes.append(f"share={share}: {len(some):,} of {len(train):,} images used")


def encoder_shape(task: Task, values: Mapping[str, Any], origin: Origin | None) -> tuple[str, Any]:
    """Family and config of the encoder of a larger model, such as a captioner.

    They are those of `init`, which is such a model or an encoder, or else those that are asked for.
    """
    encoder: Any = getattr(origin and origin.model.config, "encoder", None)
    if hasattr(encoder, "family"):
        return encoder.family, encoder.config
    name = task.family_of(values, origin)
    return name, replace(usual_shape(name, values, origin), **task_changes(name, "pretrain"))


def begin_around(
    model: Any, settings: ImageTrainSettings, origin: Origin | None, around: str, fresh: str = ""
) -> None:
    """Give a model around an encoder the weights of `init`, and let learn what is to.

    Args:
        model: the model, with its `encoder`.
        settings: those of the training.
        origin: such a model (of the family `around`), another around an encoder, or an encoder.
        around: family of the model.
        fresh: how the names of weights begin that are not taken from such a model.
    """
    if origin is not None and origin.family == around:
        origin.initialise(model, fresh)
    elif origin is not None:
        seen = getattr(origin.model, "encoder", origin.model)
        replace(origin, model=seen).initialise(model.encoder, "head.")
    let_learn(model, settings, "decoder.")


def captioned(data: ImageData, settings: ImageTrainSettings) -> CaptionData:
    """Return the images of each part with the captions that lie beside them."""
    given = settings.valid, settings.columns, settings.header
    captions = read_captions(Path(str(settings.data)), *given)
    return with_captions(data, {name: captions_of(data[name], captions) for name in data.parts})


def training_images(
    settings: ImageTrainSettings, origin: Origin | None, *, labelled: bool = True
) -> ImageData:
    """Images to train and to validate on."""
    return IMAGE.load(
        str(settings.data),
        settings.reading(labelled),
        settings.format(origin),
        valid=settings.valid,
        test=settings.test,
    )


def read_images(
    runner: Runner[Any],
    settings: ImageEvalSettings,
    *,
    labelled: bool = True,
    **more: Any,
) -> ImageData:
    """The part that is judged, as a model takes its images."""
    asked: dict[str, Any] = {"need": (settings.part,), "trained": runner.trained, **more}
    return IMAGE.load(
        str(settings.data),
        settings.reading(labelled),
        IMAGE.format_for(runner.codec.format, settings),
        test=settings.test,
        valid=settings.valid,
        **asked,
    )
