"""Images from files: one by one, or whole sets with labels."""

import hashlib
import json
import math
import os
import re
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from io import BytesIO
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageColor, ImageOps, UnidentifiedImageError
from torch import Tensor

from regard.data.labelled import ExampleFormat, ExampleReader, find_labelled
from regard.data.lines import missing, opened
from regard.data.split import Split, keys_of, shares_of, split_rows, unseen
from regard.data.store import Table, build_table, store_key
from regard.data.table import BadRow, is_folder, is_saved
from regard.data.table import Table as Rows
from regard.data.text import PARTS, KeyRow, PairReader, parse_columns
from regard.errors import UsageError, lookup, nearest
from regard.files import refuse

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
SUFFIXES = {".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"}
MOST_PIXELS = 64_000_000  # of one image: decoded, some 200 MB
MOST_BYTES = 2**30  # of one file
MOST_IMAGES = 20_000_000
MOST_STORED = 4 * 2**30  # bytes of a set that is kept decoded; a larger one is read from its files
MOST_HASHED = 16 * 2**30  # bytes of files that are hashed; of more, only names and sizes are
USUAL = 64  # pixels to which photos are brought that are not all of one size
LARGEST = 256  # pixels of images that are taken as they are
CHECKED = 200  # entries looked at to tell whether a folder holds images
CHUNK = 256  # images decoded before they are handed on
# what is too large is refused here, in our own words
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)


class Broken(UsageError):
    """An image that cannot be read; a set may be told to leave it out."""


# One image


def _whole(width: int, height: int) -> tuple[float, float, float, float]:
    return 0, 0, width, height


def _middle(width: int, height: int) -> tuple[float, float, float, float]:
    side = min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def _paved(image: Image.Image, size: int, how: Image.Resampling, paper: tuple) -> Image.Image:
    """Bring the longer side to the size, and lay the image on the middle of a square."""
    share = size / max(image.size)
    wide, high = (max(1, round(share * side)) for side in image.size)
    colour = paper if image.mode == "RGB" else _grey(paper)
    square = Image.new(image.mode, (size, size), colour)
    square.paste(image.resize((wide, high), how), ((size - wide) // 2, (size - high) // 2))
    return square


def _within(box: Callable[[int, int], tuple[float, float, float, float]]) -> Callable[..., Any]:
    def fit(image: Image.Image, size: int, how: Image.Resampling, paper: tuple) -> Image.Image:
        return image.resize((size, size), how, box=box(*image.size))

    return fit


def _cut(image: Image.Image, edge: int, fit: str, size: int, how: Image.Resampling) -> Image.Image:
    """Bring the shorter side to an edge, or both, and keep a square of a size in the middle.

    Whatever lies outside of the image is black.
    """
    long = edge if fit == "stretch" else int(edge * max(image.size) / min(image.size))
    image = image.resize((edge, long) if image.width <= image.height else (long, edge), how)
    left, top = ((side - size) // 2 for side in image.size)
    return image.crop((left, top, left + size, top + size))


# name -> how an image is made square
FITS: dict[str, Callable[..., Image.Image]] = {
    "crop": _within(_middle),
    "stretch": _within(_whole),
    "pad": _paved,
}


def _around(width: int, height: int) -> tuple[float, float, float, float]:
    side = max(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


# name -> left, top, right and bottom of what is seen of an image, in its pixels
SEEN: dict[str, Callable[[int, int], tuple[float, float, float, float]]] = {
    "crop": _middle,
    "stretch": _whole,
    "pad": _around,
}
RESAMPLES = {
    "nearest": Image.Resampling.NEAREST,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


@dataclass(frozen=True)
class ImageFormat:
    """What a model takes for an image: square, of so many channels, with this mean and spread."""

    size: int | None = field(default=None, metadata={"min": 1, "max": 4096})
    channels: int | None = field(default=None, metadata={"min": 1, "max": 3})
    fit: str = "crop"
    resample: str = "bicubic"
    background: str = "white"  # what is seen through an image
    # to which an image is brought before a square of the size is cut out of its middle
    edge: int | None = field(default=None, metadata={"min": 1, "max": 4096})
    mean: tuple[float, ...] = field(default=(), metadata={"min": -1000, "max": 1000})
    std: tuple[float, ...] = field(default=(), metadata={"above": 0, "max": 1000})

    def check(self) -> "ImageFormat":
        """Refuse names and numbers that mean nothing."""
        lookup("fit", self.fit, FITS)
        lookup("resample", self.resample, RESAMPLES)
        _colour(self.background)
        if self.channels not in (None, 1, 3):
            raise UsageError(f"channels={self.channels}; expected 1 for grey or 3 for colour")
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, self.channels):
            raise UsageError(
                f"{len(self.mean)} means and {len(self.std)} spreads for {self.channels} channels; "
                "expected one of each for a channel"
            )
        return self

    def key(self) -> list[Any]:
        """Return all that the pixels depend on, before they are normalised."""
        edge = [] if self.edge is None else [self.edge]
        return [self.size, self.channels, self.fit, self.resample, self.background, *edge]

    def seen(self, width: int, height: int) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of what is seen of an image, in its pixels."""
        if self.edge is None or self.size is None:
            return SEEN[self.fit](width, height)
        whole = (width, height) if self.fit == "stretch" else (min(width, height),) * 2
        wide, high = (self.size * side / self.edge for side in whole)
        left, top = (width - wide) / 2, (height - high) / 2
        return left, top, left + wide, top + high

    def read(self, source: Any, name: str = "") -> np.ndarray:
        """Return the bytes (c, h, w) of an image: a path, an open image, or an array (h, w, c)."""
        return self.take(open_image(source, name), name or _name(source))

    def take(self, image: Image.Image, name: str) -> np.ndarray:
        """Decode an image that is open, turn it upright and bring it to the format."""
        if self.size is not None and self.edge is None and image.format in ("JPEG", "MPO"):
            # a JPEG can be decoded at a half, a quarter or an eighth; twice the size is kept
            share = 2 * self.size / min(image.size)
            image.draft(None, (math.ceil(share * image.width), math.ceil(share * image.height)))
        image = flat(upright(decoded(image, name)), self.background)
        if self.channels is not None:
            image = image.convert("L" if self.channels == 1 else "RGB")
        if self.size is not None and self.edge is not None:
            image = _cut(image, self.edge, self.fit, self.size, RESAMPLES[self.resample])
        elif self.size is not None and image.size != (self.size, self.size):
            how = RESAMPLES[self.resample]
            image = FITS[self.fit](image, self.size, how, _colour(self.background))
        pixels = np.asarray(image)
        return pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1))

    def normalise(self, pixels: Tensor) -> Tensor:
        """Bring pixels (b, c, h, w) of 0 to 255 to the mean 0 and the spread 1 of the set."""
        mean, std = (torch.tensor(v, device=pixels.device)[:, None, None] for v in self.moments())
        return torch.addcmul(-mean / std, pixels.float(), 1 / (255 * std))

    def restore(self, images: Tensor) -> Tensor:
        """Return the pixels, 0 to 255, of normalised images."""
        mean, std = (torch.tensor(v, device=images.device)[:, None, None] for v in self.moments())
        return (255 * (images * std + mean)).round().clamp(0, 255).to(torch.uint8)

    def moments(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and spread of the channels; where none are told, pixels are from 0 to 1."""
        return (self.mean, self.std) if self.mean else ((0.0,), (1.0,))


def _name(source: Any) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else "the image"


def _colour(name: str) -> tuple[int, int, int]:
    try:
        red, green, blue = ImageColor.getrgb(name)[:3]
    except ValueError:
        raise UsageError(
            f"background={name!r:.40} is no colour; write one such as white, black or #8090a0"
        ) from None
    return red, green, blue


def _grey(colour: tuple) -> int:
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
            if not 0 < len(source) <= MOST_BYTES:
                raise Broken(f"{name}: {len(source):,} bytes; expected an image")
            return _bounded(Image.open(BytesIO(source), formats=FORMATS), name)
        path = Path(source)
        if not path.is_file():
            if path.is_dir():
                raise Broken(f"{name}: is a folder; expected an image")
            told = f"{name}: not a file" if path.exists() else missing(path)
            raise Broken(told)
        if (size := path.stat().st_size) > MOST_BYTES or not size:
            told = "over 1 GB" if size else "empty"
            raise Broken(f"{name}: {told}; expected an image")
        image = Image.open(path, formats=FORMATS)
    except UsageError:
        raise
    except UnidentifiedImageError:
        kinds = ", ".join(FORMATS)
        raise Broken(f"{name}: no image, or a broken one; expected {kinds}") from None
    except Image.DecompressionBombError as error:
        pixels = re.search(r"\d+", str(error))
        raise too_large(name, int(pixels[0]) if pixels else 0) from None
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.strerror:
            raise Broken(str(refuse(error, name))) from None
        raise Broken(f"{name}: no image ({' '.join(str(error).split())[:80]})") from None
    except Exception as error:  # a decoder stumbles over noise in many ways
        raise Broken(f"{name}: a broken image ({type(error).__name__})") from None
    return _bounded(image, name)


def _bounded(image: Image.Image, name: str) -> Image.Image:
    """Refuse an open image that is too large to decode, or has nothing in it."""
    if image.width * image.height > MOST_PIXELS:
        image.close()
        raise too_large(name, image.width * image.height)
    if min(image.size) < 1:
        raise Broken(f"{name}: {image.width} x {image.height} pixels; expected at least one")
    return image


def too_large(name: str, pixels: int) -> Broken:
    """Say that an image has more pixels than are decoded."""
    return Broken(
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
        raise Broken(f"{name}: broken or cut short ({reason}); copy it again") from None
    return image


def upright(image: Image.Image) -> Image.Image:
    """Turn an image as its camera noted that it should be."""
    try:
        return ImageOps.exif_transpose(image) or image
    except Exception:  # a note that makes no sense turns nothing
        return image


def flat(image: Image.Image, background: str = "white") -> Image.Image:
    """Return an image in grey or red, green and blue, 8 bits each; alpha is laid over a colour."""
    if image.mode in ("I", "F") or image.mode.startswith("I;"):
        wide = np.asarray(image).astype(np.float64)
        return Image.fromarray((wide.clip(0, 65535) / 257).round().astype(np.uint8))
    if image.has_transparency_data:
        grey = image.mode in GREY
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, (*_colour(background), 255))
        image = Image.alpha_composite(paper, image).convert("RGB")
        still = len(set(_colour(background))) == 1  # grey on grey stays so
        return image.convert("L") if grey and still else image
    return image.convert("L" if image.mode in GREY else "RGB")


GREY = {"1", "L", "LA", "La", "I", "F", "I;16", "I;16B", "I;16L", "I;16N"}


# Sets of images


class Item(NamedTuple):
    """One image of a set: where it is, its label, and a hash of what it shows."""

    where: str
    label: str
    source: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the label by which images are split evenly, if there is one."""
        return (self.label,) if self.label else ()


class Shelf:
    """The images of one part of a set, still in their files; or in an array (n, c, h, w)."""

    def __init__(self, items: list[Item], array: np.ndarray | None = None):
        self.items, self.array = items, array
        # where each is, or what a table has of it
        self.paths: list[str | bytes] = [] if array is not None else [i.where for i in items]
        self.notes: list[str] = []
        self.bad: list[str] = []  # why each file that was left out cannot be read
        self.sizes: set[tuple[int, int]] = set()
        self.total = 0  # how many there were, if only some were looked at
        self.grey = array is not None and array.shape[1] == 1
        if array is not None:
            self.sizes = {(array.shape[3], array.shape[2])}

    def __len__(self) -> int:
        return len(self.items)

    def told(self) -> list[str]:
        """Return what the user should know of how the images were read."""
        first = f"{len(self.bad):,} files that cannot be read left out; the first: "
        return [*self.notes, first + self.bad[0]] if self.bad else self.notes

    def open(self, i: int) -> Image.Image:
        """Open image i."""
        if self.array is not None:
            return open_image(self.array[i].transpose(1, 2, 0))
        return open_image(self.paths[i], self.items[i].where)

    def whole(self, format: ImageFormat) -> np.ndarray | None:
        """Return all images (n, c, h, w), if they lie in memory as the format wants them."""
        wanted = (format.channels, format.size, format.size)
        return self.array if self.array is not None and self.array.shape[1:] == wanted else None

    def decode(self, format: ImageFormat, broken: str) -> Iterator[np.ndarray | str]:
        """Yield every image in the format, or why it cannot be had."""

        def one(i: int) -> np.ndarray | str:
            try:
                return format.take(self.open(i), self.items[i].where)
            except Broken as mistake:
                if broken == "refuse":
                    raise Broken(f"{mistake}; or leave such files out: broken=skip") from None
                return str(mistake)

        yield from _mapped(one, range(len(self)))


def _mapped(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Apply a function to all items, several at once, in order, some at a time."""
    rest = iter(items)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        while some := list(islice(rest, CHUNK)):
            yield from pool.map(function, some)


class Images:
    """The images of a part with the numbers of their labels, in the format of a model."""

    def __init__(
        self,
        shelf: Shelf,
        rows: np.ndarray,
        labels: Tensor,
        format: ImageFormat,
        pixels: np.ndarray | None,
    ):
        """Take which images of a shelf they are; pixels are all of the shelf's, if decoded."""
        self.shelf, self.rows, self.labels, self.format = shelf, rows, labels, format
        self.pixels = pixels

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, indices: Any) -> Tensor:
        """Return the bytes (n, c, h, w) of some images."""
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        if self.pixels is not None:
            return torch.from_numpy(self.pixels[rows])
        shelf = self.shelf
        found = _mapped(
            lambda i: self.format.read(shelf.paths[i], shelf.items[i].where), rows.tolist()
        )
        return torch.from_numpy(np.stack(list(found)))

    def where(self, i: int) -> str:
        """Return the file of an image, or its place in one."""
        return self.shelf.items[int(self.rows[i])].where

    @property
    def hashes(self) -> list[str]:
        """Return what tells each image from all others."""
        return [self.shelf.items[row].source for row in self.rows.tolist()]

    def pick(self, indices: Any) -> "Images":
        """Return some of the images."""
        indices = np.asarray(indices, dtype=np.int64)
        labels = self.labels[torch.from_numpy(indices)]
        return Images(self.shelf, self.rows[indices], labels, self.format, self.pixels)

    def part(self, share: float) -> "Images":
        """Return a share of the images of every class, by hash: a smaller share is within it."""
        if share >= 1:
            return self
        order = sorted(range(len(self)), key=self.hashes.__getitem__)
        labels = self.labels.numpy()[order]
        kept = [np.array(order)[labels == label] for label in np.unique(labels)]
        some = [rows[: max(1, round(share * len(rows)))] for rows in kept]
        return self.pick(np.sort(np.concatenate(some)))

    def law(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Return mean and spread of each channel, of pixels from 0 to 1."""
        channels = self.read([0]).shape[1]
        counts = np.zeros((channels, 256), np.int64)  # exact, however it is summed
        for start in range(0, len(self), 1024):
            some = self.read(np.arange(start, min(len(self), start + 1024))).numpy()
            for channel, row in enumerate(counts):
                row += np.bincount(some[:, channel].ravel(), minlength=256)
        share, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
        mean = share @ values
        spread = np.sqrt((share * (values - mean[:, None]) ** 2).sum(1))
        rounded = [[round(float(x), 6) for x in row] for row in (mean, spread)]
        return tuple(rounded[0]), tuple(x or 1.0 for x in rounded[1])

    @property
    def sha(self) -> str:
        """Return a hash of the images and their labels."""
        digest = hashlib.sha256()
        for source, label in zip(self.hashes, self.labels.tolist(), strict=True):
            digest.update(f"{source} {label}\n".encode())
        return digest.hexdigest()


@dataclass
class ImageData:
    """The parts of a set, the names of its labels, and what the user should be told."""

    parts: dict[str, Images]
    classes: list[str]
    format: ImageFormat
    notes: list[str] = field(default_factory=list)
    split: Split = field(default_factory=Split)

    @property
    def sha(self) -> str:
        """Return a hash of what is trained and validated on, in its format."""
        parts = [self.parts[name].sha for name in ("train", "valid") if name in self.parts]
        return hashlib.sha256(
            json.dumps([parts, self.classes, self.format.key()]).encode()
        ).hexdigest()


@dataclass(frozen=True)
class ImageOptions:
    """How the files of a set are to be taken."""

    columns: str | None = None  # of a table: path and label
    names: tuple[str, ...] = ()  # of labels that are numbers
    tile: int = 32  # pixels of an image in a mosaic
    broken: str = "refuse"
    labelled: bool = True  # else images alone will do
    mosaics: bool = True  # else each file is one image, whatever its name
    header: bool | None = None  # whether a table has one
    most: int | None = None  # files to look at, spread over all


BROKEN = {"refuse": None, "skip": None}

# what reads a part, once it is needed
Read = Callable[[ImageOptions], Shelf]


def load_images(
    data: str,
    *,
    valid: str | None = None,
    test: str | None = None,
    need: Sequence[str] = ("train", "valid"),
    format: ImageFormat | None = None,
    options: ImageOptions | None = None,
    classes: Sequence[str] | None = None,
    cache: Path | None = None,
    trained: Split | None = None,
) -> ImageData:
    """Read the needed parts of a set; without one for validation, some are split off by hash.

    `valid` and `test` are sets, or shares of train such as 0.1. A model that was `trained` on the
    data is judged on what was held out.
    What the format leaves open is settled by the images. `classes` are the labels that are known,
    else they are those of train. Decoded images are kept in the cache folder.
    """
    options = options or ImageOptions()
    format = (format or ImageFormat()).check()
    lookup("broken", options.broken, BROKEN)
    readers, shares = find_image_parts(data, valid, test, options)
    if len(need) == 1 and list(readers) == ["train"] and need[0] not in shares:
        readers = {need[0]: readers["train"]}  # only one part is wanted, and only one there
    noted = trained.bounds if trained is not None else {}
    lacking = [name for name in ("valid", "test") if name not in readers]
    lacking = [name for name in lacking if name in shares or name in noted or name == "valid"]
    splitting = [name for name in lacking if name in (*need, *shares)]
    wanted = {"train" if name in splitting else name for name in need}
    shelves = {}
    for name in sorted(wanted, reverse=True):  # train before the others
        if name not in readers:
            raise UsageError(f"{data}: no {name} part; there is {', '.join(readers) or 'none'}")
        shelves[name] = readers[name](options)
        if not len(shelves[name]):
            why = f"; {told[-1]}" if (told := shelves[name].told()) else ""
            raise UsageError(f"{data}: no image in the {name} part{why}")
    notes = [note for shelf in shelves.values() for note in shelf.told()]
    first = shelves.get("train") or next(iter(shelves.values()))
    format = settle(format, first, notes)
    if classes is None:
        labels = {item.label for item in first.items}
        classes = class_names(labels, options.names) if options.labelled else []
    else:
        classes = list(classes)
    found = ImageData({}, list(classes), format, notes)
    for name, shelf in shelves.items():
        found.parts[name] = _settle_part(name, shelf, found, options, cache)
    if splitting:
        given = {name: shares.get(name) for name in splitting}
        both, found.split = split_images(found.parts["train"], given, notes, trained)
        for name in need:
            if name not in (*both, *found.parts):
                raise UsageError(f"{data}: no {name} part; there is {', '.join(readers)}")
        found.parts |= {name: part for name, part in both.items() if name in (*need, *shares)}
        if "train" not in need:
            del found.parts["train"]
    elif trained is not None and len(need) == 1:
        part = found.parts[need[0]]
        some = unseen(_numbered(part), need[0], trained, data, "images", notes)
        found.parts[need[0]] = part.pick([item.number for item in some])
    if "train" in found.parts:
        found.split = found.split.noting(keys_of(_numbered(found.parts["train"])))
    return found


def find_image_parts(
    data: str, valid: str | None, test: str | None, options: ImageOptions
) -> tuple[dict[str, Read], dict[str, float]]:
    """Find what reads each part, and the shares of train that are to be split off, if told."""
    readers, shares = find_images(Path(data), options), shares_of(valid, test)
    for name, given in (("valid", valid), ("test", test)):
        if name in shares:
            readers.pop(name, None)
        elif given:
            readers[name] = _only(_beside(given, Path(data)), options)
    return readers, shares


def split_images(
    train: Images,
    shares: Mapping[str, float | None],
    notes: list[str],
    trained: Split | None = None,
) -> tuple[dict[str, Images], Split]:
    """Split parts off by hash, evenly by label, so that copies of an image stay together."""
    parts, split = split_rows({"train": _numbered(train)}, shares, "images", notes, trained)
    return {name: train.pick([item.number for item in some]) for name, some in parts.items()}, split


class _Numbered(NamedTuple):
    where: str
    source: str
    labels: tuple[str, ...]
    number: int


def _numbered(images: Images) -> list[_Numbered]:
    items = [images.shelf.items[row] for row in images.rows.tolist()]
    return [_Numbered(item.where, item.source, item.labels, i) for i, item in enumerate(items)]


def settle(format: ImageFormat, shelf: Shelf, notes: list[str]) -> ImageFormat:
    """Settle size and channels by the images where they are left open."""
    if format.channels is None:
        format = replace(format, channels=1 if shelf.grey else 3)
    if format.size is None:
        sizes = sorted(shelf.sizes)
        width, height = sizes[0]
        alike = len(sizes) == 1 and width == height <= LARGEST
        format = replace(format, size=width if alike else USUAL)
        if not alike:
            largest = max(sizes, key=lambda size: size[0] * size[1])
            notes.append(
                f"images of {width} x {height} to {largest[0]} x {largest[1]} pixels are brought "
                f"to {USUAL} x {USUAL} (fit={format.fit}); choose with image="
            )
    return format


def class_names(labels: set[str], names: Sequence[str]) -> list[str]:
    """Return all labels in order: by number where they are numbers, and then by their names."""
    numbers = all(label.isdecimal() for label in labels)
    if not names:
        return sorted(labels, key=lambda label: (int(label), label) if numbers else (0, label))
    if not numbers:
        raise UsageError("names= is for labels that are numbers; these have names of their own")
    most = max(map(int, labels))
    if len(set(names)) != len(names) or len(names) <= most:
        raise UsageError(
            f"names= gives {len(names)} names, but labels go up to {most}; "
            f"give {most + 1} different ones"
        )
    return list(names)


def _settle_part(
    name: str, shelf: Shelf, data: ImageData, options: ImageOptions, cache: Path | None
) -> Images:
    """Decode a part, or find it decoded, and number its labels."""
    labels = torch.tensor(label_numbers(shelf, data.classes, options), dtype=torch.int64)
    pixels, gaps = _decoded(shelf, data.format, options.broken, cache)
    if gaps is not None and gaps.gaps:
        first = f"{len(gaps.gaps):,} broken images of the {name} part left out"
        if options.broken == "refuse":
            raise Broken(f"{gaps.why}; or leave such files out: broken=skip")
        data.notes.append(f"{first}; the first: {gaps.why}")
    rows = np.arange(len(shelf))
    if gaps is not None:
        rows = np.delete(rows, gaps.gaps)
    if not len(rows):
        raise UsageError(f"no image of the {name} part can be read; {gaps.why if gaps else ''}")
    return Images(shelf, rows, labels[torch.from_numpy(rows)], data.format, pixels)


def label_numbers(shelf: Shelf, classes: Sequence[str], options: ImageOptions) -> list[int]:
    """Return the number of each image's label, or refuse one that is not known."""
    if not options.labelled:
        return [0] * len(shelf)
    numbers = {label: i for i, label in enumerate(classes)}
    every = {item.label for item in shelf.items}
    if not every & numbers.keys() and all(label.isdecimal() for label in every):
        numbers = {str(i): i for i in range(len(classes))}  # numbers of labels that have names
    for item in shelf.items:
        if item.label not in numbers:
            shown = ", ".join(classes[:8]) + (", ..." if len(classes) > 8 else "")
            raise UsageError(
                f"{item.where}: label {item.label!r:.60} is not among those that are known "
                f"({shown}).{nearest(item.label, list(classes))}"
            )
    return [numbers[item.label] for item in shelf.items]


def _decoded(
    shelf: Shelf, format: ImageFormat, broken: str, cache: Path | None
) -> tuple[np.ndarray | None, Table | None]:
    """Return all images of a shelf decoded, unless that is too much, and which are broken."""
    whole = shelf.whole(format)
    if whole is not None:
        return whole, None
    assert format.size is not None and format.channels is not None
    shape = (len(shelf), format.channels, format.size, format.size)
    if math.prod(shape) > MOST_STORED:
        shape = (len(shelf), 0)  # only which are broken is noted
    if cache is None:
        rows, gaps, why = np.zeros(shape, np.uint8), [], ""
        for number, row in enumerate(shelf.decode(format, broken)):
            if isinstance(row, str):
                gaps.append(number)
                why = why or row
            elif rows.size:
                rows[number] = row
        table = Table(rows, gaps, why)
    else:
        digest = hashlib.sha256("\n".join(item.source for item in shelf.items).encode())
        folder = cache / "stores" / store_key("images", digest.hexdigest(), format.key(), shape)
        try:
            table = Table.open(folder, shape)
        except UsageError:  # not there, or not any more
            table = build_table(folder, shape, shelf.decode(format, broken))
    return (table.rows if table.rows.size else None), table


# Where the images are


def holds_images(data: Any) -> bool:
    """Tell whether data are images: class folders, a table of paths, idx files or mosaics."""
    if not data or not isinstance(data, str | os.PathLike):
        return False
    try:
        return bool(kind_of_set(Path(data)))
    except (OSError, UsageError):
        return False


def kind_of_set(path: Path) -> str:
    """Return which kind of set lies at a path, or nothing."""
    if path.is_file() or is_saved(path):
        if IDX.search(path.name):
            return "idx"
        if _is_image(path.name):
            return "one"
        return "table" if _lists_images(path) else ""
    if not path.is_dir():
        return ""
    names = [entry.name for entry in islice(os.scandir(path), 10_000)]
    if any(IDX.search(name) for name in names):
        return "idx"
    if any(MOSAIC.fullmatch(name) for name in names):
        return "mosaics"
    tables = [file for some in find_labelled(path).values() for file in some]
    if any(_lists_images(file) for file in tables):
        return "table"
    folders = sorted(name for name in names if not name.startswith(".") and (path / name).is_dir())
    loose = not tables and any(_is_image(name) for name in names)
    return "folders" if loose or any(_has_image(path / name) for name in folders) else ""


def _has_image(folder: Path) -> bool:
    entries = (file for _, _, files in os.walk(folder) for file in files)
    return any(Path(name).suffix.lower() in SUFFIXES for name in islice(entries, CHECKED))


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES and not name.startswith(".")


def _lists_images(path: Path) -> bool:
    """Tell by the first rows of a table, of which one may be a header, whether it names images."""
    values = [row.value for row in islice(Rows(path), 4) if row.value is not None]
    return bool(values) and all(_names_image(value) for value in values[1:] or values)


def _names_image(value: Any) -> bool:
    cells = value.values() if isinstance(value, dict) else value
    if any(_packed(cell) for cell in cells):
        return True
    names = (cell.strip() for cell in cells if isinstance(cell, str))
    return any(Path(name).suffix.lower() in SUFFIXES for name in names)


def _packed(cell: Any) -> bytes | None:
    """Return the bytes of an image that a cell of a table holds, as datasets keeps them."""
    found = cell.get("bytes") if isinstance(cell, dict) else cell
    return found if isinstance(found, bytes) else None


PART = "|".join(word for words in PARTS.values() for word in words)
IDX = re.compile(rf"^(t10k|{PART})[._-]images?[._-]?idx\d[._-]ubyte(\.gz|\.xz)?$", re.IGNORECASE)
MOSAIC = re.compile(rf"(?P<part>{PART})_(?P<label>[^.]+)\.(jpe?g|png)", re.IGNORECASE)


def part_named(word: str) -> str | None:
    """Return the part that a word stands for: val, dev and valid are one."""
    found = (name for name, words in PARTS.items() if word.lower() in words)
    return "test" if word.lower() == "t10k" else next(found, None)


def find_images(path: Path, options: ImageOptions) -> dict[str, Read]:
    """Find the parts of a set and what reads each."""
    if not path.exists():
        raise UsageError(missing(path))
    kind = kind_of_set(path)
    if kind == "idx":
        return _find_idx(path if path.is_dir() else path.parent)
    if kind == "mosaics" and options.mosaics:
        return _find_mosaics(path)
    if kind == "table":
        if not is_folder(path):
            return {"train": lambda options: _read_table(path, options)}
        tables = {name: files for name, files in find_labelled(path).items() if files}
        return {name: _one_table(path, name, files) for name, files in tables.items()}
    if path.is_dir():
        return _find_folders(path, options)
    raise UsageError(
        f"{path}: no set of images; expected a folder with a folder of images for each class, a "
        "table of paths and labels, or idx files"
    )


def _only(path: Path, options: ImageOptions) -> Read:
    """Return what reads the one part that a path holds."""
    readers = find_images(path, options)
    if len(readers) != 1:
        raise UsageError(f"{path}: {len(readers)} parts ({', '.join(readers)}); expected one")
    return next(iter(readers.values()))


def _beside(given: str, data: Path) -> Path:
    """Return a path as it is given, or inside the data's folder."""
    home = data if data.is_dir() else data.parent
    return Path(given) if os.path.exists(given) or not (home / given).exists() else home / given


def _folders(path: Path) -> list[str]:
    try:
        entries = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    except OSError as error:
        raise refuse(error, path) from error
    found = [name for name in entries if not name.startswith((".", "__"))]
    for name in found:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise UsageError(f"{path}: the folder {name!r} has a name that is not UTF-8; rename it")
    return found


def _find_folders(path: Path, options: ImageOptions) -> dict[str, Read]:
    """Find class folders, in folders train, valid and test or by themselves."""
    names = _folders(path)
    parts: dict[str, list[Path]] = {}
    for name in names:
        if part := part_named(name):
            parts.setdefault(part, []).append(path / name)
    for part, folders in parts.items():
        if len(folders) > 1:
            told = ", ".join(folder.name for folder in folders)
            raise UsageError(f"{path}: several folders for {part} ({told}); keep one")
    if "train" in parts or set(names) == {folders[0].name for folders in parts.values()} != set():
        return {part: _folder_reader(folders[0]) for part, folders in parts.items()}
    return {"train": _folder_reader(path)}


def _folder_reader(folder: Path) -> Read:
    return lambda options: _read_folder(folder, options)


def _read_folder(folder: Path, options: ImageOptions) -> Shelf:
    """Read a folder of class folders, or where labels are of no concern, all images within."""
    classes = _folders(folder)
    loose = [name for name in sorted(os.listdir(folder)) if _is_image(name)]
    if options.labelled and not classes:
        told = f"{len(loose)} images lie loose in it" if loose else "there is no image in it"
        raise UsageError(f"{folder}: {told}; expected a folder of images for each class")
    files, others, notes = [], [], []
    for name in classes:
        before = len(files)
        for place, _, found in sorted(os.walk(folder / name)):
            for file in sorted(found):
                kind = files if _is_image(file) else others
                kind.append((os.path.join(place, file), name))
        if len(files) > MOST_IMAGES:
            raise UsageError(f"{folder}: over {MOST_IMAGES:,} files; too many to be meant")
        if len(files) == before and options.labelled:
            raise UsageError(
                f"{folder / name}: no image in it; expected some of the class {name!r}"
            )
    if not options.labelled:
        files += [(str(folder / name), "") for name in loose]
    elif loose:
        notes.append(f"{folder}: {len(loose)} images outside the class folders passed over")
    others = [name for name, _ in others if not os.path.basename(name).startswith(".")]
    if others:
        notes.append(f"{len(others):,} files that are no images passed over, such as {others[0]}")
    return _examined(files, options, notes)


def _one_table(folder: Path, name: str, files: list[Path]) -> Read:
    def read(options: ImageOptions) -> Shelf:
        if len(files) > 1:
            told = ", ".join(file.name for file in files)
            raise UsageError(f"{folder}: several files for {name} ({told}); name one with {name}=")
        return _read_table(files[0], options)

    return read


def _read_table(path: Path, options: ImageOptions) -> Shelf:
    """Read a table of paths, from the table's own folder on, or of images, and labels."""
    notes: list[str] = []
    first = next((row.value for row in Rows(path) if row.value is not None), None)
    if isinstance(first, dict) and any(map(_packed, first.values())):
        return _read_packed(path, first, options)
    if options.labelled:
        format = ExampleFormat(options.columns, "fine", header=options.header)
        rows = ExampleReader(format).read(path, notes)
        found = [(row.text, ",".join(row.labels)) for row in rows]
    else:
        pairs = PairReader(path, columns=options.columns, header=options.header)
        found = [(source, "") for source in dict.fromkeys(pair.source for pair in pairs)]
    files = [(str(path.parent / name), label) for name, label in found]
    return _examined(files, options, notes)


def _read_packed(path: Path, first: dict[str, Any], options: ImageOptions) -> Shelf:
    """Read a table that holds images themselves, and labels."""
    names = parse_columns(options.columns) or (None, None)
    image = names[0] or next(key for key, cell in first.items() if _packed(cell))
    label = names[1] or next((key for key in first if key in LABELS), None)
    if options.labelled and label is None:
        raise UsageError(
            f"{path}: which column is the label? Found {', '.join(first)}; set columns={image},NAME"
        )
    row, total = KeyRow(PairReader(path)), 0
    shelf = Shelf([])
    for number, value, _ in Rows(path):
        shelf.total = number
        if not isinstance(value, dict) or (options.most and len(shelf) >= options.most):
            continue
        where, data = f"{path}:{number}", _packed(value.get(image)) or b""
        try:
            with open_image(data, where) as opened_image:
                shelf.sizes.add(opened_image.size)
                grey = opened_image.mode in GREY
            text = row.side(value, (str(label),)).strip() if options.labelled else ""
        except BadRow as bad:
            raise UsageError(f"{where}: {bad.what}; {bad.remedy}") from None
        except Broken as mistake:
            if options.broken == "refuse":
                raise Broken(f"{mistake}; or leave such rows out: broken=skip") from None
            shelf.bad.append(str(mistake))
            continue
        if options.labelled and not text:
            raise UsageError(f"{where}: the label is empty; fill it or remove the row")
        total += len(data)
        if total > MOST_STORED:
            raise UsageError(
                f"{where}: the images so far take over {MOST_STORED >> 30} GB; use fewer"
            )
        shelf.grey = grey and (shelf.grey or not shelf.items)
        shelf.items.append(Item(where, text, hashlib.sha256(data).hexdigest()[:32]))
        shelf.paths.append(data)
    return shelf


LABELS = ("label", "labels", "class", "category", "target")


def _examined(files: Sequence[tuple[str, str]], options: ImageOptions, notes: list[str]) -> Shelf:
    """Hash files and look at their headers."""
    every = len(files)
    if options.most and every > options.most:
        files = [files[i * every // options.most] for i in range(options.most)]
    total = 0
    for path, _ in files:
        if os.path.exists(path):
            total += os.path.getsize(path)
    hashed = total <= MOST_HASHED

    def one(file: tuple[str, str]) -> tuple[str, Any]:
        path, label = file
        try:
            with open_image(path) as image:
                seen = (image.size, image.mode in GREY, _moves(image))
            with open(path, "rb") as opened_file:
                digest = (
                    hashlib.file_digest(opened_file, "sha256").hexdigest()[:32]
                    if hashed
                    else store_key(path, os.path.getsize(path))
                )
        except OSError as error:
            raise Broken(str(refuse(error, path))) from None
        except Broken as mistake:
            if options.broken == "refuse":
                raise Broken(f"{mistake}; or leave such files out: broken=skip") from None
            return str(mistake), None
        return digest, seen

    items, seen, bad = [], [], []
    for (path, label), (digest, what) in zip(files, _mapped(one, files), strict=True):
        if what is None:
            bad.append(digest)
        else:
            items.append(Item(path, label, digest))
            seen.append(what)
    shelf = Shelf(items)
    shelf.sizes = {size for size, _, _ in seen}
    shelf.grey = all(grey for _, grey, _ in seen)
    shelf.bad = bad
    shelf.total = every
    if moving := sum(moves for _, _, moves in seen):
        notes.append(f"{moving:,} animated images: of each, the first frame is read")
    shelf.notes = notes
    return shelf


def _moves(image: Image.Image) -> bool:
    return image.format != "MPO" and bool(getattr(image, "is_animated", False))


# idx files (LeCun et al. 1998)


def read_idx(path: Path) -> np.ndarray:
    """Read an array of bytes from an idx file, packed or not."""
    with opened(path) as file:
        head = file.read(4)
        if len(head) < 4 or head[:2] != b"\0\0":
            raise UsageError(f"{path}: no idx file; expected it to begin with two zero bytes")
        if head[2] != 8 or not 1 <= head[3] <= 4:
            raise UsageError(
                f"{path}: idx of type {head[2]}, {head[3]} axes; expected bytes (8), 1-4"
            )
        rest = file.read(4 * head[3])
        if len(rest) < 4 * head[3]:
            raise UsageError(f"{path}: cut short in its header; copy it again")
        shape = struct.unpack(f">{head[3]}I", rest)
        if not 0 < math.prod(shape) <= MOST_STORED or max(shape) > MOST_IMAGES:
            raise UsageError(f"{path}: its header says {shape}; too many to be meant, or none")
        data = file.read(math.prod(shape) + 1)
    if len(data) != math.prod(shape):
        told = "more" if len(data) > math.prod(shape) else f"{len(data):,}"
        raise UsageError(
            f"{path}: its header says {math.prod(shape):,} bytes, there are {told}; copy it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _find_idx(folder: Path) -> dict[str, Read]:
    """Find idx files of images, each with one of labels beside it."""
    found: dict[str, Read] = {}
    for name in sorted(os.listdir(folder)):
        if match := IDX.search(name):
            part = part_named(match[1])
            if part in found:
                raise UsageError(
                    f"{folder}: several idx files for {part}, such as {name}; keep one"
                )
            found[str(part)] = _idx_reader(folder / name)
    return found


def _idx_reader(path: Path) -> Read:
    def read(options: ImageOptions) -> Shelf:
        images = read_idx(path)
        if images.ndim != 3 and not (images.ndim == 4 and images.shape[3] == 3):
            raise UsageError(f"{path}: an array {images.shape}; expected (n, h, w) or (n, h, w, 3)")
        if images.shape[1] * images.shape[2] > MOST_PIXELS:
            raise too_large(str(path), images.shape[1] * images.shape[2])
        labels = np.zeros(len(images), np.uint8)
        if options.labelled:
            other = _labels_beside(path)
            labels = read_idx(other)
            if labels.shape != (len(images),):
                raise UsageError(
                    f"{other}: {labels.shape[0]:,} labels for {len(images):,} images of "
                    f"{path.name}; expected one each"
                )
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        images = np.ascontiguousarray(images)
        return Shelf(_array_items(images, map(str, labels.tolist()), str(path)), images)

    return read


def _labels_beside(path: Path) -> Path:
    """Return the idx file of labels that goes with one of images, packed or not."""
    start = re.split(r"images?", path.name, flags=re.IGNORECASE)[0]
    found = [n for n in sorted(os.listdir(path.parent)) if re.match(rf"{start}labels?.*idx1", n)]
    if len(found) != 1:
        told = f"no file {start}labels-idx1-ubyte" if not found else f"several: {', '.join(found)}"
        raise UsageError(f"{path}: {told} beside it; expected one with a label for each image")
    return path.parent / found[0]


def _array_items(images: np.ndarray, labels: Iterable[str], where: str) -> list[Item]:
    return [
        Item(f"{where}:{i}", label, hashlib.sha256(image.tobytes()).hexdigest()[:32])
        for i, (image, label) in enumerate(zip(images, labels, strict=True), 1)
    ]


# Mosaics: one large image for each part and class, cut into tiles row by row


def _find_mosaics(folder: Path) -> dict[str, Read]:
    found: dict[str, dict[str, Path]] = {}
    for name in sorted(os.listdir(folder)):
        if match := MOSAIC.fullmatch(name):
            part = found.setdefault(str(part_named(match["part"])), {})
            if match["label"] in part:
                raise UsageError(f"{folder}: two mosaics of {match['label']}, such as {name}")
            part[match["label"]] = folder / name
    return {part: _mosaic_reader(files) for part, files in found.items()}


def _mosaic_reader(files: Mapping[str, Path]) -> Read:
    return lambda options: _read_mosaics(files, options.tile)


def _read_mosaics(files: Mapping[str, Path], tile: int) -> Shelf:
    arrays, items = [], []
    for label, path in files.items():
        whole = np.asarray(flat(decoded(open_image(path), str(path))).convert("RGB"))
        height, width, channels = whole.shape
        if height % tile or width % tile:
            raise UsageError(
                f"{path}: a mosaic of {width} x {height} pixels cannot be cut into tiles of "
                f"{tile}; set tile="
            )
        grid = whole.reshape(height // tile, tile, width // tile, tile, channels)
        tiles = np.ascontiguousarray(grid.transpose(0, 2, 4, 1, 3))
        tiles = tiles.reshape(-1, channels, tile, tile)
        items += _array_items(tiles, [label] * len(tiles), str(path))
        arrays.append(tiles)
    return Shelf(items, np.concatenate(arrays))
