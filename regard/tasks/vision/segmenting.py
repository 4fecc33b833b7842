"""What a segmenter is told, learns from and answers: settings, batches, masks and overlays."""

import colorsys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regard.data.augment import AUGMENTS, AugmentOptions, augments, step_rng
from regard.data.batches import Shuffled
from regard.data.image_format import ImageFormat
from regard.data.images import Images
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import BootstrapSettings, derived
from regard.tasks.parts import Answer
from regard.tasks.vision.photos import ImageRunSettings, ImageTable, ImageTrainSettings
from regard.viewer.settings import ImageLookSettings

SEGMENTER = "segmenter"
NO_TARGET = -1  # of a pixel that nothing is learnt of
_MOVES = ("flip", "crop")  # augmentations that a mask can follow
_GOLDEN = 0.618033988749895  # of a turn: hues so far apart never come near each other
_TINT = 0.55  # share of a class's colour in an overlay


@dataclass(frozen=True)
class TrainSegment(ImageTrainSettings):
    """What a training of a segmenter can be told."""

    fit: str = setting("stretch", "how images become square", choices=("stretch",), group="data")
    augment: str = setting("flip", "augmentation", choices=("none", *_MOVES), joined_by="+")
    batch: int = setting(32, "images a batch", min=1, max=100_000, group="optimiser")
    decoder: str = setting(
        "linear",
        "decoder from features to pixels",
        choices="regard.models.segmenter:PIXEL_DECODERS",
        group="model",
    )

    def format(self, origin: Origin | None) -> ImageFormat:
        """What is known of the format of images before they are seen."""
        return seen_whole(super().format(origin))


def seen_whole(format: ImageFormat) -> ImageFormat:
    """Format in which an image is seen whole, as its mask is."""
    return replace(format, fit="stretch", edge=None, ground="any", content=1.0)


@dataclass(frozen=True)
class RunSegment(ImageRunSettings):
    """How to segment images."""

    out: str | None = setting(None, "the image to write, or a folder for several", group="files")
    draw: str = setting("overlay", "what is written", choices=lambda: DRAWINGS, group="files")


@dataclass(frozen=True)
class EvalSegment(derived("EvalSegment", ImageTable, BootstrapSettings, ImageRunSettings)):
    """What to judge on, and how."""

    data: str | None = setting(None, "a folder with images/ and masks/", group="data")
    valid: str | None = setting(
        None, "which set is the validation part, or its share", group="data"
    )


@dataclass(frozen=True)
class LookSegment(ImageLookSettings):
    """What to see of how pixels got their classes."""

    view: str = setting(
        "classes",
        "where each class is, a view of the encoder's attention, or the first filters",
        choices=lambda: ("classes", *import_module("regard.viewer.image").VIEWS),
    )


def colours(classes: Sequence[str]) -> np.ndarray:
    """Colours (classes, 3) of masks: black for a background, else hues far apart."""
    hues = [colorsys.hsv_to_rgb(_GOLDEN * n % 1, 0.75, 0.95) for n in range(len(classes))]
    table = np.array(hues)
    table[[name.lower() == "background" for name in classes]] = 0
    return (255 * table).round().astype(np.uint8)


def overlaid(photo: np.ndarray, mask: np.ndarray, classes: Sequence[str]) -> Image.Image:
    """A photo (h, w) or (h, w, 3) tinted by the classes of its pixels; a background is not."""
    rgb = np.broadcast_to(photo[..., None] if photo.ndim == 2 else photo, (*mask.shape, 3))
    table = colours(classes)
    share = _TINT * np.any(table, 1, keepdims=True)[mask]
    return Image.fromarray(((1 - share) * rgb + share * table[mask]).round().astype(np.uint8))


def indexed(photo: np.ndarray, mask: np.ndarray, classes: Sequence[str]) -> Image.Image:
    """A mask whose numbers are classes, as a training reads it."""
    image = Image.fromarray(mask, "P")
    image.putpalette(colours(classes).flatten().tolist())
    return image


DRAWINGS = {"overlay": overlaid, "mask": indexed}


@dataclass(frozen=True, eq=False)
class Segmented(Answer[RunSegment]):
    """The class of each pixel of an image (h, w), and where that was written."""

    mask: np.ndarray
    classes: Sequence[str]
    where: str = ""

    @property
    def shares(self) -> Mapping[str, float]:
        """Share of the pixels of each class that is there, the largest first."""
        often = np.bincount(self.mask.ravel(), minlength=len(self.classes)) / self.mask.size
        order = [n for n in np.argsort(-often, kind="stable").tolist() if often[n]]
        return {str(self.classes[n]): float(often[n]) for n in order}

    def __str__(self) -> str:
        told = ", ".join(f"{name} {100 * share:.1f}%" for name, share in self.shares.items())
        return f"{self.where}\t{told}" if self.where else told

    def record(self, settings: RunSegment) -> dict[str, Any]:
        """Shares of the classes, and the file that was written."""
        return {"shares": self.shares, "out": self.where or None}


class MaskBatch(NamedTuple):
    """Images, and the class of each of their pixels (b, h, w)."""

    inputs: Tensor
    targets: Tensor


class MaskBatches:
    """Batch n of images and masks that were moved alike, a pure function of (seed, n)."""

    def __init__(
        self, train: Images, masks: np.ndarray, format: ImageFormat, settings: TrainSegment
    ):
        self.train, self.format, self.settings = train, format, settings
        # 0 is then of no class, like the rim of a crop
        self.masks = torch.from_numpy(masks + np.uint8(1)).unsqueeze(1)
        self.shuffled = Shuffled(len(train), settings.batch, settings.seed)
        self.moves = augments(settings.augment, {name: AUGMENTS[name] for name in _MOVES})
        assert format.size is not None
        padding = format.size // 8 if settings.padding is None else settings.padding
        self.options = AugmentOptions(padding, settings.strength)

    def __getitem__(self, n: int) -> MaskBatch:
        """Batch n."""
        picked, rng = self.shuffled[n], step_rng(self.settings.seed, n)
        both = torch.cat([self.train.read(picked), self.masks[torch.from_numpy(picked)]], 1)
        for move in self.moves:
            both = move(both, rng, self.options)
        images, targets = self.format.normalise(both[:, :-1]), both[:, -1].long() - 1
        return MaskBatch(images, targets)

    def epoch(self) -> float:
        """Number of batches in which all images are read once."""
        return len(self.train) / self.shuffled.rows
