"""Image files to arrays of bytes: opened, decoded, turned upright and brought to one format."""

import math
import os
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError
from torch import Tensor

from regard.data.lines import missing
from regard.errors import BrokenInput, UsageError
from regard.files import refuse
from regard.settings import setting

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}
MOST_PIXELS = 64_000_000  # of one image: decoded, some 200 MB
_MOST_BYTES = 2**30  # of one file
GREY = {"1", "L", "LA", "La", "I", "F", "I;16", "I;16B", "I;16L", "I;16N"}  # modes without colour
# what is too large is refused here, in our own words
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)

Box = tuple[float, float, float, float]  # left, top, right and bottom
Colour = tuple[int, int, int]


class BrokenImage(BrokenInput):
    """An image that cannot be read; a set may be told to leave it out."""


def _centred(width: int, height: int, side: int) -> Box:
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


# how an image is made square -> what of it is seen, in its pixels
FITS: dict[str, Callable[[int, int], Box]] = {
    "crop": lambda width, height: _centred(width, height, min(width, height)),
    "stretch": lambda width, height: (0, 0, width, height),
    "pad": lambda width, height: _centred(width, height, max(width, height)),
}


def _letterbox(
    image: Image.Image, size: int, resample: Image.Resampling, colour: Colour
) -> Image.Image:
    """Bring the longer side to the size, and paste the image in the middle of a square."""
    scale = size / max(image.size)
    width, height = (max(1, round(scale * side)) for side in image.size)
    square = Image.new(image.mode, (size, size), colour if image.mode == "RGB" else _grey(colour))
    square.paste(
        image.resize((width, height), resample), ((size - width) // 2, (size - height) // 2)
    )
    return square


def _resize_then_crop(
    image: Image.Image, edge: int, fit: str, size: int, resample: Image.Resampling
) -> Image.Image:
    """Bring the shorter side to an edge, or both, and keep a square of a size in the middle.

    Whatever lies outside of the image is black.
    """
    long = edge if fit == "stretch" else int(edge * max(image.size) / min(image.size))
    image = image.resize((edge, long) if image.width <= image.height else (long, edge), resample)
    left, top = ((side - size) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))


_GROUNDS: dict[str, None] = dict.fromkeys(("any", "dark", "light"))
_EVEN, _LIKE = 32, 0.7  # levels from the ground that are still ground; share of a border that is it
_NEAR = 0.2  # by how much content may be larger or smaller than it should be


def ground_of(pixels: np.ndarray) -> float | None:
    """Level of the border of an image (h, w), if nearly all of it has the same."""
    border = np.concatenate([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]]).astype(float)
    level = float(np.median(border))
    return level if (abs(border - level) < _EVEN).mean() >= _LIKE else None


def content_box(pixels: np.ndarray, level: float) -> tuple[int, int, int, int] | None:
    """Left, top, right and bottom of what is not of the level of the ground."""
    shown = abs(pixels.astype(float) - level) >= _EVEN
    rows, columns = np.flatnonzero(shown.any(1)), np.flatnonzero(shown.any(0))
    if not len(rows):
        return None
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def measure_ground(images: np.ndarray) -> tuple[str, float]:
    """Ground of nearly all images (n, h, w), dark, light or any, and their content."""
    levels = [ground_of(pixels) for pixels in images]
    for name, has in (("dark", lambda x: x < _EVEN), ("light", lambda x: x > 255 - _EVEN)):
        if np.mean([level is not None and has(level) for level in levels]) > 0.95:
            pairs = [
                (x, level) for x, level in zip(images, levels, strict=True) if level is not None
            ]
            boxes = [(box, x) for x, level in pairs if (box := content_box(x, level))]
            sides = [max(b[2] - b[0], b[3] - b[1]) / max(x.shape) for b, x in boxes]
            return name, float(np.median(sides)) if sides else 1.0
    return "any", 1.0


def _place(pixels: np.ndarray, ground: str, content: float) -> tuple[Box | None, list[str]]:
    """Square in which a grey image shows something, as large as content asks for.

    There is none if the image is as it should be, has no even ground, or nothing on it. The notes
    say what is to be done.
    """
    level = ground_of(pixels)
    box = None if level is None else content_box(pixels, level)
    if level is None or box is None:
        return None, []
    notes, light = [], level > 127
    if light != (ground == "light"):
        notes.append(
            f"inverted: its ground is {'light' if light else 'dark'}, the model's {ground}"
        )
    left, top, right, bottom = box
    side = max(right - left, bottom - top) / content
    if len(set(pixels.shape)) > 1 or abs(side / len(pixels) - 1) > _NEAR:
        notes.append(f"cropped to what it shows ({right - left} x {bottom - top} pixels)")
    x, y = round((left + right - side) / 2), round((top + bottom - side) / 2)
    return ((x, y, x + round(side), y + round(side)) if notes else None), notes


def _lay(image: Image.Image, box: Box, ground: str) -> Image.Image:
    """Cut a square out of a grey image with an even ground and lay it on a dark or light one."""
    pixels = np.asarray(image).astype(float)
    level = ground_of(pixels) or 0.0
    light = level > 127
    shown = (level - pixels if light else pixels - level) * (255 / max(level, 255 - level))
    # on black: what lies outside of the image is then of the ground too
    image = Image.fromarray(shown.round().clip(0, 255).astype(np.uint8)).crop(box)  # type: ignore[arg-type]
    return ImageOps.invert(image) if ground == "light" else image


_RESAMPLES = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


@dataclass(frozen=True)
class ImageFormat:
    """The images that a model takes: square, with so many channels of this mean and deviation."""

    size: int | None = setting(None, min=1, max=4096)
    channels: int | None = setting(None, min=1, max=3)
    fit: str = setting("crop", choices=FITS)
    resample: str = setting("bicubic", choices=_RESAMPLES)
    background: str = "white"  # what is seen through an image
    # to which an image is brought before a square of the size is cut out of its middle
    edge: int | None = setting(None, min=1, max=4096)
    # behind what is shown, if it is always the same
    ground: str = setting("any", choices=_GROUNDS)
    # the longer side of what is shown, by that of the image, where the ground is known
    content: float = setting(1.0, above=0, max=1)
    mean: tuple[float, ...] = setting((), min=-1000, max=1000)
    std: tuple[float, ...] = setting((), above=0, max=1000)

    def check(self) -> "ImageFormat":
        """Refuse colours and numbers that mean nothing."""
        _colour(self.background)
        if self.channels not in (None, 1, 3):
            raise UsageError(f"channels={self.channels}; expected 1 for grey or 3 for colour")
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.channels):
            raise UsageError(
                f"{len(self.mean)} means and {len(self.std)} standard deviations for "
                f"{self.channels} channels; expected one of each for a channel"
            )
        return self

    def key(self) -> list[Any]:
        """All that the pixels depend on, before they are normalised."""
        edge = [] if self.edge is None else [self.edge]
        ground = [] if self.ground == "any" else [self.ground, self.content]
        return [self.size, self.channels, self.fit, self.resample, self.background, *edge, *ground]

    def seen(self, width: int, height: int) -> Box:
        """Left, top, right and bottom of what is seen of an image, in its pixels."""
        if self.edge is None or self.size is None:
            return FITS[self.fit](width, height)
        whole = (width, height) if self.fit == "stretch" else (min(width, height),) * 2
        wide, high = (self.size * side / self.edge for side in whole)
        left, top = (width - wide) / 2, (height - high) / 2
        return left, top, left + wide, top + high

    def seen_of(self, image: Image.Image) -> Box:
        """Visible part of an open, upright image, in its pixels."""
        box = None
        if self.ground != "any" and self.channels == 1:
            grey = flat(image, self.background).convert("L")
            box, _ = _place(np.asarray(grey), self.ground, self.content)
        return self.seen(*image.size) if box is None else box

    def read(self, source: Any, name: str = "", notes: list[str] | None = None) -> np.ndarray:
        """Bytes (c, h, w) of an image: a path, an open image, or an array (h, w, c).

        What was done to it beyond its size is added to `notes`.
        """
        return self.take(open_image(source, name), name or _name(source), notes)

    def take(self, image: Image.Image, name: str, notes: list[str] | None = None) -> np.ndarray:
        """Decode an image that is open, turn it upright and bring it to the format."""
        whole = self.edge is not None or self.ground != "any"  # of which a part may be cut out
        if self.size is not None and not whole and image.format in ("JPEG", "MPO"):
            # a JPEG can be decoded at a half, a quarter or an eighth; twice the size is kept
            share = 2 * self.size / min(image.size)
            image.draft(None, (math.ceil(share * image.width), math.ceil(share * image.height)))
        image = flat(upright(decoded(image, name)), self.background)
        if self.channels is not None:
            image = image.convert("L" if self.channels == 1 else "RGB")
        if self.ground != "any" and image.mode == "L":
            box, done = _place(np.asarray(image), self.ground, self.content)
            image = image if box is None else _lay(image, box, self.ground)
            if notes is not None:
                notes += done
        resample = _RESAMPLES[self.resample]
        if self.size is not None and self.edge is not None:
            image = _resize_then_crop(image, self.edge, self.fit, self.size, resample)
        elif self.size is not None and image.size != (self.size, self.size):
            if self.fit == "pad":
                image = _letterbox(image, self.size, resample, _colour(self.background))
            else:
                box = FITS[self.fit](*image.size)
                image = image.resize((self.size, self.size), resample, box=box)
        pixels = np.asarray(image)
        return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Normalise pixels (b, c, h, w) of 0 to 255 by the mean and deviation of the channels."""
        mean, std = (torch.tensor(v, device=pixels.device)[:, None, None] for v in self.moments())
        return torch.addcmul(-mean / std, pixels.float(), 1 / (255 * std))

    def restore(self, images: Tensor) -> Tensor:
        """Pixels, 0 to 255, of normalised images."""
        mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in self.moments())
        return (255 * (images * std + mean)).round().clamp(0, 255).to(torch.uint8)

    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and deviation of the channels; without them, pixels are from 0 to 1."""
        return (self.mean, self.std) if self.mean else ((0.0,), (1.0,))


def _name(source: Any) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else "the image"


def _colour(name: str) -> Colour:
    try:
        red, green, blue = ImageColor.getrgb(name)[:3]
    except ValueError:
        raise UsageError(
            f"background={name!r:.40} is not a colour; write one such as white, black or #8090a0"
        ) from None
    return red, green, blue


def _grey(colour: Colour) -> int:
    return Image.new("RGB", (1, 1), colour).convert("L").getpixel((0, 0))  # type: ignore[return-value]


def open_image(source: Any, name: str = "") -> Image.Image:
    """Open an image by its header; what is none, or too large to decode, is refused."""
    if isinstance(source, Image.Image):
        return source
    if isinstance(source, np.ndarray | Tensor):
        return _from_array(np.asarray(source), name or "the array")
    name = name or _name(source)
    try:
        if isinstance(source, bytes):
            if not 0 < len(source) <= _MOST_BYTES:
                raise BrokenImage(f"{name}: {len(source):,} bytes; expected an image")
            return _bounded(Image.open(BytesIO(source), formats=_FORMATS), name)
        path = Path(source)
        if not path.is_file():
            if path.is_dir():
                raise BrokenImage(f"{name}: is a folder; expected an image")
            raise BrokenImage(f"{name}: not a file" if path.exists() else missing(path))
        if (size := path.stat().st_size) > _MOST_BYTES or not size:
            why = "over 1 GB" if size else "empty"
            raise BrokenImage(f"{name}: {why}; expected an image")
        image = Image.open(path, formats=_FORMATS)
    except UsageError:
        raise
    except UnidentifiedImageError:
        kinds = ", ".join(_FORMATS)
        raise BrokenImage(f"{name}: no image, or a broken one; expected {kinds}") from None
    except Image.DecompressionBombError as error:
        pixels = re.search(r"\d+", str(error))
        raise too_large(name, int(pixels[0]) if pixels else 0) from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise BrokenImage(str(refuse(error, name))) from None
        raise BrokenImage(f"{name}: no image ({' '.join(str(error).split())[:80]})") from None
    except Exception as error:  # a decoder stumbles over noise in many ways
        raise BrokenImage(f"{name}: a broken image ({type(error).__name__})") from None
    return _bounded(image, name)


def _bounded(image: Image.Image, name: str) -> Image.Image:
    """Refuse an open image that is too large to decode, or has nothing in it."""
    if image.width * image.height > MOST_PIXELS:
        image.close()
        raise too_large(name, image.width * image.height)
    if min(image.size) < 1:
        raise BrokenImage(f"{name}: {image.width} x {image.height} pixels; expected at least one")
    return image


def too_large(name: str, pixels: int) -> BrokenImage:
    """Error for an image with more pixels than are decoded."""
    return BrokenImage(
        f"{name}: {pixels / 1e6:,.0f} megapixels; at most {MOST_PIXELS // 10**6} are decoded, "
        "make it smaller"
    )


def _from_array(array: np.ndarray, name: str) -> Image.Image:
    if array.ndim == 3 and array.shape[2] == 1:
        array = array[:, :, 0]
    good = array.ndim == 2 or (array.ndim == 3 and array.shape[2] in (3, 4))
    if not good or array.dtype not in (np.uint8, np.uint16) or not array.size:
        raise UsageError(
            f"{name}: {array.dtype} {array.shape}; expected bytes (h, w) or (h, w, 3), 0 to 255"
        )
    return Image.fromarray(array)


def decoded(image: Image.Image, name: str) -> Image.Image:
    """Decode an open image, its first frame if it is animated."""
    try:
        image.load()
    except MemoryError:
        raise
    except Exception as error:  # a decoder stumbles over noise in many ways
        reason = " ".join(str(error).split())[:80] or type(error).__name__
        raise BrokenImage(f"{name}: broken or cut short ({reason}); copy it again") from None
    return image


def upright(image: Image.Image) -> Image.Image:
    """Turn an image as its camera noted that it should be."""
    try:
        return ImageOps.exif_transpose(image) or image
    except Exception:  # a note that makes no sense turns nothing
        return image


def flat(image: Image.Image, background: str = "white") -> Image.Image:
    """Image in grey or red, green and blue, 8 bits each; alpha is laid over a colour."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        wide = np.asarray(image).astype(np.float64)
        return Image.fromarray((wide.clip(0, 65535) / 257).round().astype(np.uint8))
    if image.has_transparency_data:
        grey = image.mode in GREY
        image = image.convert("RGBA")
        backdrop = Image.new("RGBA", image.size, (*_colour(background), 255))
        image = Image.alpha_composite(backdrop, image).convert("RGB")
        still = len(set(_colour(background))) == 1  # grey on grey stays so
        return image.convert("L") if grey and still else image
    return image.convert("L" if image.mode in GREY else "RGB")
