"""Sets of images as they lie on disk: class folders, tables of paths, idx files, mosaics."""

import hashlib
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from regard.data.archive import in_archive, locator
from regard.data.columns import parse_columns, text_at
from regard.data.image_format import (
    GREY,
    IMAGE_SUFFIXES,
    MOST_PIXELS,
    BrokenImage,
    ImageFormat,
    decoded,
    flat,
    open_image,
    too_large,
)
from regard.data.in_memory import UserData, home_of
from regard.data.labelled import ExampleFormat, ExampleReader
from regard.data.lines import missing, opened
from regard.data.listing import FileList, Item, Items, TextBlob, numbered
from regard.data.media import (
    LABELS,
    Contents,
    Media,
    MediaFiles,
    MediaOptions,
    cell_bytes,
    find_media_parts,
    is_set,
    several,
)
from regard.data.pairs import PairReader
from regard.data.parts import PARTS, part_named
from regard.data.sound_streams import begins_as_sound
from regard.data.table import BadRow, Table, is_folder
from regard.data.tree import MOST_FILES, stamps_of
from regard.errors import UsageError

MOST_STORED = 4 * 2**30  # bytes of a set that is kept decoded; a larger one is read from its files


def _look(content: str | bytes, where: str) -> tuple[int, int, bool, bool]:
    """Width and height of an image, whether it is grey, and whether it moves."""
    with open_image(content, where) as image:
        moves = image.format != "MPO" and bool(getattr(image, "is_animated", False))
        return *image.size, image.mode in GREY, moves


IMAGE_MEDIA = Media(
    "image",
    frozenset(IMAGE_SUFFIXES),
    lambda content: not begins_as_sound(content),
    BrokenImage,
    look=_look,
    header=np.dtype([("width", "<i4"), ("height", "<i4"), ("grey", "?"), ("moves", "?")]),
    beside={
        "label": ((".cls", ".txt", ".json"), LABELS),
        "text": ((".txt", ".json"), ("caption", "text")),
    },
)
_PART = "|".join(word for words in PARTS.values() for word in words)
_IDX = re.compile(rf"^(t10k|{_PART})[._-]images?[._-]?idx\d[._-]ubyte(\.gz|\.xz)?$", re.IGNORECASE)
_MOSAIC = re.compile(rf"(?P<part>{_PART})_(?P<label>[^.]+)\.(jpe?g|png)", re.IGNORECASE)


class ImageFiles(MediaFiles):
    """The images of one part of a set, not yet decoded: in files, or in an array (n, c, h, w)."""

    media = IMAGE_MEDIA

    def __init__(self, items: Items, array: np.ndarray | None = None, contents: Contents = ()):
        """Take the images, and the bytes of their files where a table holds these."""
        super().__init__(items, contents)
        self.array = array
        self.sizes: set[tuple[int, int]] = set()
        self.grey = array is not None and array.shape[1] == 1
        if array is not None:
            self.sizes = {(array.shape[3], array.shape[2])}

    def pick(self, numbers: Sequence[int]) -> "ImageFiles":
        """Some of the images."""
        array = None if self.array is None else self.array[numbers]
        contents = [self.contents[i] for i in numbers] if self.contents else ()
        return ImageFiles(self.items.pick(numbers), array, contents)

    def open(self, i: int) -> Image.Image:
        """Open image i."""
        if self.array is not None:
            return open_image(self.array[i].transpose(1, 2, 0))
        return open_image(self.content(i), self.items.where[i])

    def whole(self, format: ImageFormat) -> np.ndarray | None:
        """All images (n, c, h, w), if they lie in memory as the format wants them."""
        shape = (format.channels, format.size, format.size)
        return self.array if self.array is not None and self.array.shape[1:] == shape else None

    def decode(self, format: ImageFormat, broken: str) -> Iterator[np.ndarray | str]:
        """Yield every image in the format, or why it cannot be had."""
        return self.decode_each(lambda i: format.take(self.open(i), self.items.where[i]), broken)


@dataclass(frozen=True)
class ImageOptions(MediaOptions):
    """How the images of a set are to be taken."""

    tile: int = 32  # pixels of an image in a mosaic
    labelled: bool = True  # else images alone will do
    mosaics: bool = True  # else each file is one image, whatever its name


# what reads a part, once it is needed
ReadImages = Callable[[], ImageFiles]


# Which kind of set it is


def holds_images(data: UserData | None) -> bool:
    """True if data are images: class folders, a table of paths, idx files or mosaics."""
    return is_set(data, kind_of_set)


def kind_of_set(path: Path) -> str:
    """Kind of image set at a path, or none."""
    names = [path.name] if path.exists() else []
    if is_folder(path):
        names = [entry.name for entry in islice(os.scandir(path), 10_000)]
    if any(_IDX.search(name) for name in names):
        return "idx"
    if is_folder(path) and any(_MOSAIC.fullmatch(name) for name in names):
        return "mosaics"
    return IMAGE_MEDIA.kind_of_set(path)


# Where its parts are


def find_image_parts(
    data: str, valid: str | None, test: str | None, options: ImageOptions
) -> tuple[dict[str, ReadImages], dict[str, float]]:
    """Find what reads each part, and the shares of train that are to be split off, if told."""
    return find_media_parts(data, valid, test, lambda path: find_images(path, options))


def find_images(path: Path, options: ImageOptions) -> dict[str, ReadImages]:
    """Find the parts of a set and what reads each."""
    if not path.exists() and not in_archive(str(path)):
        raise UsageError(missing(path))
    kind = kind_of_set(path)
    if kind == "idx":
        return _find_idx(path if path.is_dir() else path.parent, options)
    if kind == "mosaics" and options.mosaics:
        return _find_mosaics(path, options)
    return IMAGE_MEDIA.find_parts(
        path,
        kind == "table",
        partial(_read_table, options=options),
        partial(_read_folder, options=options),
        "a folder with a folder of images for each class, a table of paths and labels, or idx "
        "files",
    )


# Images in files


def _read_folder(roots: Sequence[Path], options: ImageOptions) -> ImageFiles:
    """Read class folders, or where labels are of no concern, all images within."""
    files, notes = IMAGE_MEDIA.list_files(roots, "label" if options.labelled else "none")
    return _look_at(files, several(roots), notes, options)


def _read_table(path: Path, options: ImageOptions) -> ImageFiles:
    """Read a table of paths, from the table's own folder on, or of images, and labels."""
    notes: list[str] = []
    first = next((row.value for row in Table(path) if row.value is not None), None)
    if isinstance(first, dict) and any(map(cell_bytes, first.values())):
        return _read_packed(path, first, options)
    if options.labelled:
        format = ExampleFormat(options.columns, "fine", header=options.header)
        examples = ExampleReader(format).read(path, notes)
        rows = [(example.text, ",".join(example.labels)) for example in examples]
    else:
        pairs = PairReader(path, columns=options.columns, header=options.header)
        rows = [(source, "") for source in dict.fromkeys(pair.source for pair in pairs)]
    locate = locator(home_of(path))
    where = TextBlob.of(locate(name) for name, _ in rows)
    codes, labels = numbered(label for _, label in rows)
    return _look_at(FileList(where, codes, labels, stamps_of(where)), path, notes, options)


def _read_packed(path: Path, first: dict[str, Any], options: ImageOptions) -> ImageFiles:
    """Read a table that holds images themselves, and labels."""
    names = parse_columns(options.columns) or (None, None)
    image = names[0] or next(key for key, cell in first.items() if cell_bytes(cell))
    label = names[1] or next((key for key in first if key in LABELS), None)
    if options.labelled and label is None:
        raise UsageError(
            f"{path}: which column is the label? Found {', '.join(first)}; set columns={image},NAME"
        )
    rows, contents, size, total = [], [], 0, 0
    for number, value, _ in Table(path):
        total = number
        if not isinstance(value, dict) or (options.most and len(rows) >= options.most):
            continue
        where, data = f"{path}:{number}", cell_bytes(value.get(image)) or b""
        try:
            text = text_at(value, (str(label),)).strip() if options.labelled else ""
        except BadRow as bad:
            raise UsageError(bad.at(where).message) from None
        if options.labelled and not text:
            raise UsageError(f"{where}: the label is empty; fill it or remove the row")
        size += len(data)
        if size > MOST_STORED:
            raise too_many(where)
        rows.append((where, text))
        contents.append(data)
    where, (codes, labels) = TextBlob.of(x for x, _ in rows), numbered(x for _, x in rows)
    stamps = np.zeros((len(rows), 3), np.int64)
    found = _look_at(FileList(where, codes, labels, stamps), path, [], options, contents)
    found.total = total
    return found


def too_many(where: str) -> UsageError:
    """Error for images that take more memory than a set may."""
    return UsageError(f"{where}: the images so far take over {MOST_STORED >> 30} GB; use fewer")


def _look_at(
    files: FileList,
    of: str | Path,
    notes: list[str],
    options: ImageOptions,
    contents: Contents = (),
) -> ImageFiles:
    """Hash images and look at their headers: files with labels, or what a table holds of them."""
    seen = IMAGE_MEDIA.look_at(files, of, options, contents)
    found = ImageFiles(seen.items, contents=seen.contents)
    sizes = np.unique(seen.headers[["width", "height"]])
    found.sizes = {(int(width), int(height)) for width, height in sizes.tolist()}
    found.grey = bool(seen.headers["grey"].all())
    found.bad, found.total, found.notes = seen.bad, seen.total, notes
    if animated := int(seen.headers["moves"].sum()):
        notes.append(f"{animated:,} animated images: of each, the first frame is read")
    return found


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
        if not 0 < math.prod(shape) <= MOST_STORED or max(shape) > MOST_FILES:
            raise UsageError(f"{path}: its header says {shape}; too many to be meant, or none")
        data = file.read(math.prod(shape) + 1)
    if len(data) != math.prod(shape):
        there = "more" if len(data) > math.prod(shape) else f"{len(data):,}"
        raise UsageError(
            f"{path}: its header says {math.prod(shape):,} bytes, there are {there}; copy it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _find_idx(folder: Path, options: ImageOptions) -> dict[str, ReadImages]:
    """Find idx files of images, each with one of labels beside it."""
    readers: dict[str, ReadImages] = {}
    for name in sorted(os.listdir(folder)):
        if match := _IDX.search(name):
            part = "test" if match[1].lower() == "t10k" else str(part_named(match[1]))
            if part in readers:
                raise UsageError(
                    f"{folder}: several idx files for {part}, such as {name}; keep one"
                )
            readers[part] = partial(_read_idx_part, folder / name, options)
    return readers


def _read_idx_part(path: Path, options: ImageOptions) -> ImageFiles:
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
    items = _array_items(images, map(str, labels.tolist()), str(path))
    return ImageFiles(Items.of(items), images)


def _labels_beside(path: Path) -> Path:
    """Idx file of labels that goes with one of images, packed or not."""
    start = re.split(r"images?", path.name, flags=re.IGNORECASE)[0]
    names = [n for n in sorted(os.listdir(path.parent)) if re.match(rf"{start}labels?.*idx1", n)]
    if len(names) != 1:
        there = f"several: {', '.join(names)}" if names else f"no file {start}labels-idx1-ubyte"
        raise UsageError(f"{path}: {there} beside it; expected one with a label for each image")
    return path.parent / names[0]


def _array_items(images: np.ndarray, labels: Iterable[str], where: str) -> list[Item]:
    return [
        Item(f"{where}:{i}", label, hashlib.sha256(image.tobytes()).hexdigest()[:32])
        for i, (image, label) in enumerate(zip(images, labels, strict=True), 1)
    ]


# Mosaics: one large image for each part and class, cut into tiles row by row


def _find_mosaics(folder: Path, options: ImageOptions) -> dict[str, ReadImages]:
    parts: dict[str, dict[str, Path]] = {}
    for name in sorted(os.listdir(folder)):
        if match := _MOSAIC.fullmatch(name):
            part = parts.setdefault(str(part_named(match["part"])), {})
            if match["label"] in part:
                raise UsageError(f"{folder}: two mosaics of {match['label']}, such as {name}")
            part[match["label"]] = folder / name
    return {part: partial(_read_mosaics, files, options) for part, files in parts.items()}


def _read_mosaics(files: Mapping[str, Path], options: ImageOptions) -> ImageFiles:
    arrays, items, tile = [], [], options.tile
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
    return ImageFiles(Items.of(items), np.concatenate(arrays))
