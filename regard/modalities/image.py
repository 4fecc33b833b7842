"""Images: files, arrays, and what PIL or datasets have of them."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor
from torch.nn import functional as F

from regard.attention.watch import watch
from regard.data.augment import Augment, step_rng
from regard.data.batches import Shuffled
from regard.data.captions import captions_in
from regard.data.image_files import (
    IMAGE_MEDIA,
    ImageFiles,
    ImageOptions,
    find_image_parts,
    holds_images,
    kind_of_set,
)
from regard.data.image_format import (
    IMAGE_SUFFIXES,
    ImageFormat,
    measure_ground,
    open_image,
    upright,
)
from regard.data.images import ImageData, Images, load_images, settle_format
from regard.data.in_memory import UserData
from regard.data.masks import find_masks, has_masks, link_classes
from regard.data.media import cell_file
from regard.data.parts import PartsAsked
from regard.errors import UsageError
from regard.files import cache_folder
from regard.layers.layout import Layout
from regard.metrics.baselines import downsample
from regard.metrics.outliers import STRANGERS
from regard.modalities.base import (
    MEANT,
    Describe,
    DrawnInput,
    ExamineOptions,
    Finding,
    Inputs,
    LabelledBatch,
    Modality,
    One,
    Survey,
    class_counts,
    first_targets,
    link_or_write,
    made_up_text,
    plural,
    spread,
)
from regard.modalities.tokens import InputTokens, grid_keys
from regard.models.protocols import ImageModelConfig, Model
from regard.training.progress import Progress
from regard.viewer.picture import Picture
from regard.viewer.settings import ImageLookSettings

_CAPTION_TOKENS = 16  # tokens of a caption
_SMALL = 8  # pixels of a side that shows hardly anything
_FEW = 8  # pixels of the sides of an image by which its distance is measured
_SHOWN = 512  # pixels of the longer side of a photo that is looked at


@dataclass
class ImageCounts:
    """The size of one part of a set of images, and what they are brought to."""

    images: int
    bad: int
    classes: dict[str, int]
    sizes: int  # how many different ones
    image: int
    channels: int
    total: int = 0  # how many there are, where not all were looked at

    def __str__(self) -> str:
        count = len(self.classes)
        classes = f" of {count:,} class{'es' * (count != 1)}" if count else ""
        return (
            f"{self.images:>10,} images{classes}, "
            f"{'grey' if self.channels == 1 else 'colour'}, {self.image} x {self.image}"
            + (f" from {self.sizes:,} sizes" if self.sizes > 1 else "")
            + (f"; {self.total:,} in all" if self.total > self.images else "")
            + (f", {plural(self.bad, 'bad file')}" if self.bad else "")
        )


# of a linear model: sides of shrunk images, directions of gradients, cells a side
_SHRUNK, _GRADIENT_SIDE, _DIRECTIONS, _CELLS = 14, 32, 8, (7, 3)


class ImageModality(Modality[np.ndarray, ImageFormat, ImageData]):
    """Images as bytes (channels, height, width)."""

    name, key, one, many = "image", "image", "image", "images"
    suffixes = frozenset(IMAGE_SUFFIXES)
    tasks = {"label": "images", "text": "caption", "mask": "segment", "": "denoise"}
    counted = "images"
    size_key, sides, unit = "image", 2, "pixels"
    baseline, baseline_rows = "a linear model of pixels and gradients", 20_000
    Format, format_keys = ImageFormat, "size, channels, mean, std"
    columns = ("image", "img", "path", "file", "filename", "file_name")

    def check(self, given: Any, settings: Any = None, format: ImageFormat | None = None) -> Any:
        """Return a path, an image or an array, or refuse what is none."""
        image = cell_file(given)
        if not isinstance(image, str | Path | bytes | np.ndarray | Tensor | Image):
            raise UsageError(f"{image!r:.60} is no image; give a path, an image or an array")
        return image

    def decode(self, given: One, format: ImageFormat, notes: list[str] | None = None) -> np.ndarray:
        """Return the pixels of an image, in an array of its own, as PyTorch wants it."""
        return np.array(format.read(given, notes=notes))

    def holds(
        self, data: UserData | None, columns: str | None = None, header: bool | None = None
    ) -> bool:
        """Tell whether data are images: class folders, a table of paths, idx files or mosaics."""
        return holds_images(data)

    def guess(self, path: Path, columns: str | None, header: bool | None) -> tuple[str, str]:
        """Tell labels, captions and masks from each other, and from images alone."""
        if has_masks(path):
            return "mask", "a folder with images/ and masks/"
        kind = kind_of_set(path)
        if kind == "table":
            words = sorted(len(target.split()) for target in first_targets(path, columns, header))
            if words and words[len(words) // 2] >= 4:
                return "text", "a table of images and texts about them"
            return "label", "a table of images and labels"
        told = IMAGE_MEDIA.told_in(path) if kind == "folders" else "label"
        return told, {
            "": "images without labels (or pretrain)",
            "label": "images in folders, or with labels",
            "text": "images in tars with texts about them",
        }[told]

    def parts(self, data: str, asked: ExamineOptions) -> Any:
        """Find what reads the files of each part."""
        how = {"header": asked.header, "most": asked.most, "labelled": asked.target == "label"}
        options = ImageOptions(columns=asked.columns, broken="skip", **how)
        if asked.target == "mask":
            data = find_masks(data, ("train",), asked.valid, asked.columns, asked.header)[0]
        return find_image_parts(data, asked.valid, asked.test, options)

    def survey(self, name: str, files: ImageFiles, asked: ExamineOptions) -> Survey:
        """Open all images of a part, and tell of their sizes."""
        total, found = max(files.total, len(files)), files.notes
        files = _readable(name, files, asked.quiet)
        if not len(files):
            return Survey(None, [], None, [], found, files.bad)
        findings, least = [], min(files.sizes, key=min)
        if min(least) < _SMALL:
            what = f"images of {name} as small as {least[0]} x {least[1]} pixels"
            findings.append(Finding("warning", what, "", "remove what shows nothing", "small"))
        classes = class_counts(files.items) if asked.target == "label" else {}
        counts = ImageCounts(len(files), len(files.bad), classes, len(files.sizes), 0, 0, total)
        sample = files.pick(spread(len(files)))
        sample.sizes, sample.grey = files.sizes, files.grey
        return Survey(counts, files.items, sample, findings, found, files.bad)

    def compare(self, data: str, parts: Mapping[str, Survey]) -> list[Finding]:
        """Tell what the images of all parts are brought to: what suits the first."""
        format, notes = ImageFormat(), []
        for part in parts.values():
            format = settle_format(format, part.sample, notes)
            part.counts.image, part.counts.channels = format.size, format.channels
        return [Finding("note", note, data, MEANT, "sizes") for note in notes]

    def write_sample(
        self, folder: Path, sample: ImageFiles, target: str, values: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Put images into folders by label, as links where they are files; list captions, masks."""
        if target == "text":
            how = (values["columns"], values["header"], len(sample))
            known = captions_in(Path(values["data"]), "train", *how)
            rows = [{"image": os.path.abspath(i), "caption": said[0]} for i, said in known.items()]
            return super().write_sample(folder, rows, target, values)
        if target == "mask":
            mask_of = find_masks(values["data"], ("train",), columns=values["columns"])[1]
            pairs = [(item.where, mask_of(item.where)) for item in sample.items]
            rows = [{"image": os.path.abspath(i), "mask": os.path.abspath(m)} for i, m in pairs]
            link_classes(values["data"], folder)
            return super().write_sample(folder, rows, target, values)
        for number, item in enumerate(sample.items):
            path = folder / "images" / item.label.replace("/", "_") / str(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            if sample.array is not None:
                pixels = np.squeeze(sample.array[number].transpose(1, 2, 0))
                fromarray(pixels).save(path.with_suffix(".png"))
            else:
                link_or_write(sample.content(number), path, ".png")
        return str(folder / "images"), len(sample)

    def usual_size(self, config: ImageModelConfig, length: int) -> int:
        """Return the side of the images that a model was made for."""
        return config.image

    def example(
        self, config: Any, batch: int, size: int, beside: bool = False
    ) -> tuple[Tensor, ...]:
        """Return images of so many pixels a side, with captions if the model reads them."""
        images = torch.empty(batch, config.channels, size, size, device="meta")
        if not beside:
            return (images,)
        return images, made_up_text(batch, min(config.max_length, _CAPTION_TOKENS))

    # With labels

    def load(
        self,
        data: str,
        source: ImageOptions,
        format: ImageFormat | None = None,
        *,
        classes: Sequence[str] | None = None,
        **asked: Unpack[PartsAsked],
    ) -> ImageData:
        """Load images, decoded once and kept in the user's cache."""
        how = {"format": format, "options": source, "cache": cache_folder()}
        return load_images(data, **how, classes=classes, **asked)

    def settle(self, data: ImageData, format: ImageFormat | None) -> ImageFormat:
        """Format of the images, with the mean and deviation of their channels."""
        if data.format.mean:
            return data.format
        train = data.parts["train"]
        mean, std = train.channel_stats()
        settled = replace(data.format, mean=mean, std=std)
        if settled.channels != 1:
            return settled
        some = train.read(np.unique(np.linspace(0, len(train) - 1, 1000).astype(np.int64)))
        ground, content = measure_ground(some[:, 0].numpy())
        return replace(settled, ground=ground, content=round(content, 3))

    def saved_format(self, folder: Path, model: Model, config: Mapping[str, Any]) -> ImageFormat:
        """Format that the config.json of a folder has, with a size."""
        format = super().saved_format(folder, model, config)
        if format.size is None:
            raise UsageError(f"{folder / 'config.json'}: 'image' has no size")
        return format

    def shape(self, config: Any, format: ImageFormat, new: bool) -> Any:
        """Config of a new model for images of this size; one to go on with has its own."""
        fits = {"channels": format.channels, "image": format.size}
        return replace(config, **fits) if new else config

    def format_for(self, format: ImageFormat, settings: Any) -> ImageFormat:
        """Format of images of the size that is asked for."""
        size = getattr(settings, "image", None)
        return replace(format, size=size) if size else format

    def raws(self, part: Images, format: ImageFormat) -> Any:
        """Bytes (n, c, h, w) of the images of a part."""
        return part.read(np.arange(len(part)))

    def collate(self, raws: Any, format: ImageFormat, device: torch.device | str = "cpu") -> Inputs:
        """Normalised images (n, c, h, w)."""
        return (format.normalise(stacked(raws).to(device)),)

    def batches(self, part: Images, format: ImageFormat, settings: Any, labels: int) -> Any:
        """Batches of augmented images."""
        return ImageBatches(part, format, settings, labels)

    def tokens(
        self,
        model: Any,
        raw: np.ndarray | Tensor,
        format: ImageFormat,
        read: Mapping[str, Layout] | None = None,
    ) -> InputTokens:
        """Patches of an image; `read` lays out more modules."""
        from regard.viewer.image import layouts
        from regard.viewer.placement import token_name

        grid, keys = grid_keys({**layouts(model, (raw.shape[-2], raw.shape[-1])), **(read or {})})
        names = [token_name(grid, cell) for cell in range(len(grid.names), len(grid))]
        return InputTokens(names, keys, grid)

    def picture(
        self,
        model: Any,
        given: One,
        format: ImageFormat,
        settings: ImageLookSettings,
        describe: Describe,
    ) -> Picture:
        """Watch what attends to an image while its bytes (1, c, h, w) are answered."""
        from regard.viewer.image import VIEWS, image_picture
        from regard.viewer.placement import parse_query_point

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

    def drawn(
        self, model: Any, format: ImageFormat, batch: Any, row: int, strength: Tensor, peak: int
    ) -> DrawnInput | None:
        """An image, where a model reads it as a grid."""
        first = batch[0] if isinstance(batch, tuple) else None  # of what pretrains an encoder
        images = getattr(batch, "images", getattr(batch, "inputs", first))
        if not isinstance(images, Tensor) or not hasattr(model, "grid"):
            return None
        high, wide = model.grid(tuple(images.shape[2:]))
        flat = strength.flatten()[-high * wide :]  # further tokens come first
        if len(flat) != high * wide:
            return None
        mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (format.mean, format.std))
        plain = (images[row] * std + mean).clamp(0, 1).expand(3, -1, -1)
        pixels = (255 * plain).round().byte().permute(1, 2, 0).numpy()
        return DrawnInput(pixels, flat.view(high, wide).numpy())

    def vectors(self, part: Images, format: ImageFormat) -> np.ndarray:
        """Images shrunk to a few pixels, and histograms of the directions of gradients."""
        parts = np.array_split(np.arange(len(part)), -(-len(part) // 256))
        return np.concatenate([self.features(part.read(some), format) for some in parts])

    def features(self, raws: Any, format: ImageFormat) -> np.ndarray:
        """Numbers (n, d) of images that were read, by which a linear model tells them apart."""
        pixels = stacked(raws)
        return np.concatenate([downsample(pixels.numpy(), _SHRUNK), _gradients(pixels)], 1)

    # None of these

    @torch.inference_mode()
    def outlier_vectors(self, model: Any, raws: Any, format: ImageFormat) -> np.ndarray:
        """Images shrunk to a few pixels beside the vectors that the head reads."""
        pixels, device = stacked(raws), next(model.parameters()).device
        heads = [
            model.pool(model.features(*self.collate(some, format, device)))
            for some in pixels.split(256)
        ]
        few = downsample(pixels.numpy(), _FEW)
        return np.concatenate([few, torch.cat(heads).float().cpu().numpy()], 1)

    def strangers(
        self, raws: Any, format: ImageFormat, rng: np.random.Generator
    ) -> dict[str, Sequence[Any]]:
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
        return {name: x.astype(np.uint8) for name, x in made.items()}


def _gradients(pixels: Tensor) -> np.ndarray:
    """Histograms of the directions of gradients in cells of images (n, c, h, w)."""
    x = F.interpolate(pixels.float() / 255, size=_GRADIENT_SIDE, mode="area")
    dx, dy = (
        F.pad(x[..., 2:] - x[..., :-2], (1, 1)),
        F.pad(x[..., 2:, :] - x[..., :-2, :], (0, 0, 1, 1)),
    )
    steepest = (size := (dx**2 + dy**2).sqrt()).argmax(1, keepdim=True)  # of all channels
    dx, dy, size = (one.gather(1, steepest) for one in (dx, dy, size))
    angle = torch.atan2(dy, dx) % (2 * torch.pi) * _DIRECTIONS / (2 * torch.pi)
    low, part = angle.long(), angle.frac()
    shape = (len(x), _DIRECTIONS, *x.shape[2:])
    found = torch.zeros(shape).scatter_add_(1, low % _DIRECTIONS, size * (1 - part))
    found.scatter_add_(1, (low + 1) % _DIRECTIONS, size * part)
    cells = [F.adaptive_avg_pool2d(found, side) for side in _CELLS]
    norms = [cell / (cell.square().sum(1, keepdim=True) + 1e-4).sqrt() for cell in cells]
    return torch.cat(
        [*(c.sqrt().flatten(1) for c in cells), *(n.flatten(1) for n in norms)], 1
    ).numpy()


def stacked(raws: Any) -> Tensor:
    """Bytes (n, c, h, w) of images, be they stacked already or not."""
    if isinstance(raws, Tensor):
        return raws
    return torch.stack([torch.as_tensor(each) for each in raws])


def photo_of(format: ImageFormat, image: Any) -> tuple[Tensor, np.ndarray, str]:
    """What a model sees of an image (1, c, h, w), that as sharp as it is, and its name."""
    assert format.size is not None
    pixels = torch.tensor(format.read(image)).unsqueeze(0)
    side = max(format.size, min(_SHOWN, *upright(open_image(image)).size))
    photo = replace(format, size=side).read(image).transpose(1, 2, 0)
    name = Path(image).name if isinstance(image, str | Path) else "image"
    return pixels, photo[..., 0] if photo.shape[2] == 1 else photo, name


class ImageBatches:
    """Batch n of augmented images, a pure function of (seed, n)."""

    def __init__(self, train: Images, format: ImageFormat, settings: Any, labels: int):
        self.train, self.settings = train, settings
        self.shuffled = Shuffled(len(train), settings.batch, settings.seed)
        assert format.size is not None
        self.augment = Augment(
            settings.augment,
            labels,
            format.normalise,
            padding=format.size // 8 if settings.padding is None else settings.padding,
            strength=settings.strength,
            erase=settings.erase,
            mixup=settings.mixup,
            cutmix=settings.cutmix,
            smoothing=settings.label_smoothing,
        )

    def __getitem__(self, n: int) -> LabelledBatch:
        """Batch n."""
        picked = self.shuffled[n]
        pixels, labels = self.train.read(picked), self.train.labels[torch.from_numpy(picked)]
        images, targets = self.augment(pixels, labels, step_rng(self.settings.seed, n))
        return LabelledBatch(images, None, targets)

    def epoch(self) -> float:
        """Number of batches in which all images are read once."""
        return len(self.train) / self.shuffled.rows


def _readable(name: str, files: ImageFiles, quiet: bool) -> ImageFiles:
    """Return the images that can be read to their end, and why the others cannot."""
    if files.array is not None:
        return files
    rows, bad = [], list(files.bad)
    with Progress(name, len(files), quiet=quiet) as bar:
        for row, image in enumerate(files.decode(ImageFormat(8, 3), "skip")):
            if isinstance(image, str):
                bad.append(image)
            else:
                rows.append(row)
            bar.update(1)
    whole = files.pick(rows)
    whole.bad, whole.sizes, whole.grey = bad, files.sizes, files.grey
    return whole


IMAGE = ImageModality()
