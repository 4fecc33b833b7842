"""What tasks on images share: their settings, the format of images, reading and looking."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.augment import AUGMENTS
from regard.data.captions import (
    CaptionData,
    captions_of,
    read_captions,
    with_captions,
)
from regard.data.image_files import ImageOptions
from regard.data.image_format import (
    FITS,
    IMAGE_SUFFIXES,
    ImageFormat,
    measure_ground,
    open_image,
    upright,
)
from regard.data.images import ImageData, Images, load_images
from regard.data.media import BROKEN
from regard.errors import UsageError
from regard.files import cache_folder
from regard.layers.layout import Layout
from regard.metrics.baselines import downsample
from regard.modalities.image import IMAGE
from regard.models import family
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.media import MediaCodec, first_files, saved_format
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import grid_keys
from regard.tasks.frame.settings import SHORT_KEYS, BootstrapSettings, RunSettings, TrainSettings
from regard.tasks.labels.classifier import STRANGERS, in_groups
from regard.viewer.picture import Picture

_FEW = 8  # pixels of the sides of an image by which its distance is measured
_SHOWN = 512  # pixels of the longer side of a photo that is looked at
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


@dataclass(frozen=True)
class ImageTable:
    """Where images and labels are in a table or a mosaic."""

    GROUP = "data"

    columns: str | None = setting(None, "path and label, such as 2,1")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    tile: int = setting(32, "pixels of an image in a mosaic", min=1, max=4096)


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


@dataclass(frozen=True)
class ImageRunSettings(RunSettings):
    """How to read images."""

    image: int | None = setting(None, "image size in pixels", min=1, max=4096, group="data")
    broken: str = setting("refuse", "files that cannot be read", choices=BROKEN, group="data")
    batch: int = setting(64, "images a batch", min=1, max=100_000, group="machine")


@dataclass(frozen=True)
class ImageEvalSettings(ImageTable, BootstrapSettings):
    """What to judge on."""

    data: str | None = setting(None, "a folder or table of images with labels", group="data")
    valid: str | None = setting(
        None, "which set is the validation part, or its share", group="data"
    )
    errors: int = setting(10, "errors to show", min=0, max=100_000, group="scores")


@dataclass(frozen=True)
class ImageCodec(MediaCodec):
    """The format of a model's images, its labels, and what else lies beside the weights."""

    kind = "image"
    modality = IMAGE
    format: ImageFormat
    pretraining: Mapping[str, Any] = field(default_factory=dict)  # what the encoder was trained by
    folder: Path | None = None  # where it was loaded from

    def facts(self) -> dict[str, Any]:
        """What config.json says of it."""
        more = {"pretraining": dict(self.pretraining)} if self.pretraining else {}
        return {**super().facts(), **more}

    def format_for(self, settings: Any) -> ImageFormat:
        """Format of images of the size that is asked for."""
        size = getattr(settings, "image", None)
        return replace(self.format, size=size) if size else self.format

    def groups(self, inputs: Sequence[Any], settings: Any) -> Iterator[Any]:
        """Bytes (c, h, w) of images, a batch at a time, and what was done to each."""
        format, broken = self.format_for(settings), settings.broken

        def read(given: Any, notes: list[str]) -> np.ndarray | str:
            return IMAGE.read(given, format, broken, notes)

        return in_groups(read, inputs, settings.batch)

    def raws(self, part: Images, settings: Any = None) -> Tensor:
        """Bytes (n, c, h, w) of the images of a part."""
        return part.read(np.arange(len(part)))

    def logits(self, model: Any, raws: Any, settings: Any) -> Tensor:
        """Logits (n, labels) of images."""
        return model(self.format.normalise(stacked(raws).to(next(model.parameters()).device)))

    @torch.inference_mode()
    def probabilities(self, model: Any, raws: Any, settings: Any) -> np.ndarray:
        """Probability of each label (n, labels) of images, with mirror= the mean of both sides."""
        device, rows = next(model.parameters()).device, []
        for some in stacked(raws).split(settings.batch):
            images = self.format.normalise(some.to(device))
            probs = model(images).float().softmax(-1)
            if settings.mirror:
                probs = (probs + model(images.flip(-1)).float().softmax(-1)) / 2
            rows.append(probs.cpu().numpy())
        return np.concatenate(rows)

    def tokens(
        self, model: Any, raw: Any, read: Mapping[str, Layout] | None = None
    ) -> dict[str, Any]:
        """Tokens, keys and grid of a Question about an image; `read` lays out more modules."""
        from regard.viewer.image import layouts
        from regard.viewer.placement import token_name

        grid, keys = grid_keys({**layouts(model, tuple(raw.shape[-2:])), **(read or {})})
        names = [token_name(grid, cell) for cell in range(len(grid.names), len(grid))]
        return {"tokens": names, "keys": keys, "grid": grid}

    def picture(self, model: Any, given: Any, settings: Any, describe: Any) -> Picture:
        """Watch what attends to an image while it is answered, and gather where it looked.

        `describe` answers the bytes (1, c, h, w) of the image as fields of its picture.
        """
        from regard.viewer.image import VIEWS, image_picture
        from regard.viewer.placement import parse_query_point

        format = self.format_for(settings)
        assert format.size is not None
        whole = upright(open_image(given))
        query = parse_query_point(settings.at, whole.size, format.seen_of(whole))
        pixels, photo, name = photo_of(format, given)
        with watch(model) as maps:
            described = describe(pixels)
        notes: list[str] = []
        format.read(given, notes=notes)
        note = "; ".join([*notes, *([described["note"]] if described.get("note") else [])])
        described = {"title": name, "source": name, **described, "note": note}
        size = format.size, format.size
        return image_picture(VIEWS[settings.view], model, maps, size, photo, query, **described)

    def baseline_vectors(self, part: Images) -> np.ndarray:
        """Images shrunk to a few pixels."""
        parts = np.array_split(np.arange(len(part)), -(-len(part) // 256))
        return np.concatenate([downsample(part.read(some).numpy()) for some in parts])

    # None of these

    @torch.inference_mode()
    def outlier_vectors(self, model: Any, raws: Any) -> np.ndarray:
        """Images shrunk to a few pixels beside the vectors that the head reads."""
        pixels, device = stacked(raws), next(model.parameters()).device
        heads = [
            model.pool(model.features(self.format.normalise(some.to(device))))
            for some in pixels.split(256)
        ]
        few = downsample(pixels.numpy(), _FEW)
        return np.concatenate([few, torch.cat(heads).float().cpu().numpy()], 1)

    def strangers(self, raws: Any, rng: np.random.Generator) -> dict[str, Any]:
        """Noise, noise with the spectrum of photos, and images of one level."""
        shape = (STRANGERS, *stacked(raws).shape[1:])
        pink = rng.normal(size=shape)
        rows, columns = (np.fft.fftfreq(n)[:, None] for n in shape[2:])
        slope = np.hypot(rows, columns.T).clip(min=1 / max(shape[2:]))
        pink = np.fft.ifft2(np.fft.fft2(pink) / slope).real
        low, high = (f(pink, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
        levels = np.linspace(0, 255, STRANGERS)[:, None, None, None]
        made = {
            "noise": rng.integers(0, 256, shape),
            "smooth noise": 255 * (pink - low) / (high - low),
            "one level": np.broadcast_to(levels, shape),
        }
        return {name: torch.from_numpy(x.astype(np.uint8)) for name, x in made.items()}

    def read_foreign(self, folder: str) -> Tensor:
        """Images of a folder that are none of what was learnt."""
        files = first_files(folder, IMAGE_SUFFIXES)
        return stacked([self.format.read(file) for file in files])


def stacked(raws: Any) -> Tensor:
    """Bytes (n, c, h, w) of images, be they stacked already or not."""
    return raws if isinstance(raws, Tensor) else torch.from_numpy(np.stack(raws))


def format_of(folder: Path, model: Model, config: Mapping[str, Any]) -> ImageFormat:
    """Check and return how images are brought to a model, as its folder says."""
    expected = "size, channels, mean, std"
    format, where = saved_format(ImageFormat, "image", folder, config, expected)
    if format.size is None:
        raise UsageError(f"{where}: 'image' has no size")
    if format.channels != model.config.channels:
        raise UsageError(
            f"{where}: images of {format.channels} channels, but the model reads "
            f"{model.config.channels}"
        )
    return format


def resized(format: ImageFormat, size: int | None) -> ImageFormat:
    """Return a format for images of another size, of which as much is seen."""
    if format.edge is None or not size or not format.size:
        return replace(format, size=size)
    return replace(format, size=size, edge=max(1, round(format.edge * size / format.size)))


def format_wanted(settings: Any, origin: Origin | None, published: bool) -> ImageFormat:
    """Return what is known of the format of images before they are seen.

    A `published` size names a model that was trained on images of its own size.
    """
    format = ImageFormat(
        settings.image, settings.channels, settings.fit, background=settings.background
    ).check()
    if origin is not None:
        config = origin.model.config
        format = replace(format, channels=config.channels)
        if isinstance(origin.config.get("image"), dict):
            before = format_of(origin.folder, origin.model, origin.config)
            return resized(before, settings.image or before.size)
        return format if settings.image else replace(format, size=config.image)
    return (
        replace(format, size=settings.model.image) if published and not settings.image else format
    )


def with_statistics(data: ImageData) -> ImageFormat:
    """Return the format of images with the mean and deviation of their channels."""
    if data.format.mean:
        return data.format
    train = data.parts["train"]
    mean, std = train.channel_stats()
    format = replace(data.format, mean=mean, std=std)
    if format.channels != 1:
        return format
    some = train.read(np.unique(np.linspace(0, len(train) - 1, 1000).astype(np.int64)))
    ground, content = measure_ground(some[:, 0].numpy())
    return replace(format, ground=ground, content=round(content, 3))


def use_share(data: ImageData, share: float) -> None:
    """Keep a share of the training images, and note it."""
    train = data.parts["train"]
    if share < 1:
        data.parts["train"] = some = train.part(share)
        data.notes.append(f"share={share}: {len(some):,} of {len(train):,} images used")


def captioned(data: ImageData, settings: Any) -> CaptionData:
    """Return the images of each part with the captions that lie beside them."""
    given = settings.valid, settings.columns, settings.header
    captions = read_captions(Path(str(settings.data)), *given)
    return with_captions(data, {name: captions_of(data[name], captions) for name in data.parts})


def photo_of(format: ImageFormat, image: Any) -> tuple[Tensor, np.ndarray, str]:
    """Return what a model sees of an image (1, c, h, w), that as sharp as it is, and its name."""
    assert format.size is not None
    pixels = torch.tensor(format.read(image)).unsqueeze(0)
    side = max(format.size, min(_SHOWN, *upright(open_image(image)).size))
    photo = replace(format, size=side).read(image).transpose(1, 2, 0)
    name = Path(image).name if isinstance(image, str | Path) else "image"
    return pixels, photo[..., 0] if photo.shape[2] == 1 else photo, name


def image_options(settings: Any, labelled: bool, names: Sequence[str] = ()) -> ImageOptions:
    """Return how the files of images are read."""
    columns, tile, broken = settings.columns, settings.tile, settings.broken
    return ImageOptions(
        columns=columns,
        names=tuple(names),
        tile=tile,
        broken=broken,
        labelled=labelled,
        header=settings.header,
    )


def training_images(
    settings: Any, origin: Origin | None, published: bool, *, labelled: bool = True
) -> ImageData:
    """Images to train and to validate on; a `published` size names a model of its own size."""
    return load_images(
        str(settings.data),
        valid=settings.valid,
        test=settings.test,
        format=format_wanted(settings, origin, published),
        options=image_options(settings, labelled, settings.names),
        cache=cache_folder(),
    )


def read_images(runner: Any, settings: Any, *, labelled: bool = True, **more: Any) -> ImageData:
    """The part that is judged, as a model takes its images."""
    asked: dict[str, Any] = {"need": (settings.part,), "trained": runner.trained, **more}
    return load_images(
        settings.data,
        **asked,
        test=settings.test,
        valid=settings.valid,
        format=runner.codec.format_for(settings),
        options=image_options(settings, labelled),
        cache=cache_folder(),
    )
