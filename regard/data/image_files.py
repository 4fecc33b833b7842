"""Sets of images as they lie on disk: class folders, tables of paths, idx files, mosaics."""

import hashlib
import math
import os
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from regard.data.columns import parse_columns, text_at
from regard.data.image_format import (
    GREY,
    MOST_PIXELS,
    SUFFIXES,
    BrokenImage,
    ImageFormat,
    decoded,
    flat,
    open_image,
    too_large,
)
from regard.data.labelled import ExampleFormat, ExampleReader
from regard.data.lines import missing, opened
from regard.data.pairs import PairReader
from regard.data.parts import PARTS, named_files, part_named, single_file
from regard.data.split import shares_of
from regard.data.store import store_key
from regard.data.table import BadRow, Table, is_folder, is_saved
from regard.errors import UsageError
from regard.files import refuse

MOST_IMAGES = 20_000_000
MOST_STORED = 4 * 2**30  # bytes of a set that is kept decoded; a larger one is read from its files
MOST_HASHED = 16 * 2**30  # bytes of files that are hashed; of more, only names and sizes are
CHECKED = 200  # entries looked at to tell whether a folder holds images
CHUNK = 256  # images decoded before they are handed on
LABELS = ("label", "labels", "class", "category", "target")
BROKEN = {"refuse": None, "skip": None}
PART = "|".join(word for words in PARTS.values() for word in words)
IDX = re.compile(rf"^(t10k|{PART})[._-]images?[._-]?idx\d[._-]ubyte(\.gz|\.xz)?$", re.IGNORECASE)
MOSAIC = re.compile(rf"(?P<part>{PART})_(?P<label>[^.]+)\.(jpe?g|png)", re.IGNORECASE)


class Item(NamedTuple):
    """One image of a set: where it is, its label, and a hash of what it shows."""

    where: str
    label: str
    source: str

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the label by which images are split evenly, if there is one."""
        return (self.label,) if self.label else ()


class ImageFiles:
    """The images of one part of a set, not yet decoded: in files, or in an array (n, c, h, w)."""

    def __init__(
        self,
        items: list[Item],
        array: np.ndarray | None = None,
        contents: Sequence[str | bytes] | None = None,
    ):
        """Take the images, and what of each is opened: its path, or the bytes of its file."""
        self.items, self.array = items, array
        self.contents = [item.where for item in items] if contents is None else list(contents)
        self.notes: list[str] = []
        self.bad: list[str] = []  # why each file that was left out cannot be read
        self.sizes: set[tuple[int, int]] = set()
        self.total = len(items)  # how many there were, if only some were looked at
        self.grey = array is not None and array.shape[1] == 1
        if array is not None:
            self.sizes = {(array.shape[3], array.shape[2])}

    def __len__(self) -> int:
        return len(self.items)

    def all_notes(self) -> list[str]:
        """Return what the user should know of how the images were read."""
        first = f"{len(self.bad):,} files that cannot be read left out; the first: "
        return [*self.notes, first + self.bad[0]] if self.bad else self.notes

    def pick(self, numbers: Sequence[int]) -> "ImageFiles":
        """Return some of the images."""
        array = None if self.array is None else self.array[numbers]
        contents = [self.contents[i] for i in numbers]
        return ImageFiles([self.items[i] for i in numbers], array, contents)

    def open(self, i: int) -> Image.Image:
        """Open image i."""
        if self.array is not None:
            return open_image(self.array[i].transpose(1, 2, 0))
        return open_image(self.contents[i], self.items[i].where)

    def whole(self, format: ImageFormat) -> np.ndarray | None:
        """Return all images (n, c, h, w), if they lie in memory as the format wants them."""
        shape = (format.channels, format.size, format.size)
        return self.array if self.array is not None and self.array.shape[1:] == shape else None

    def decode(self, format: ImageFormat, broken: str) -> Iterator[np.ndarray | str]:
        """Yield every image in the format, or why it cannot be had."""

        def one(i: int) -> np.ndarray | str:
            try:
                return format.take(self.open(i), self.items[i].where)
            except BrokenImage as mistake:
                if broken == "refuse":
                    raise BrokenImage(f"{mistake}; or leave such files out: broken=skip") from None
                return str(mistake)

        yield from in_threads(one, range(len(self)))


def in_threads(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Apply a function to all items, several at once, in order, some at a time."""
    rest = iter(items)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        while some := list(islice(rest, CHUNK)):
            yield from pool.map(function, some)


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


# what reads a part, once it is needed
ReadImages = Callable[[], ImageFiles]


# Which kind of set it is


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
    tables = [file for some in named_files(path).values() for file in some]
    if any(_lists_images(file) for file in tables):
        return "table"
    folders = sorted(name for name in names if not name.startswith(".") and (path / name).is_dir())
    loose = not tables and any(_is_image(name) for name in names)
    return "folders" if loose or any(_has_image(path / name) for name in folders) else ""


def _has_image(folder: Path) -> bool:
    entries = (file for _, _, files in os.walk(folder) for file in files)
    return any(_has_suffix(name) for name in islice(entries, CHECKED))


def _has_suffix(name: str) -> bool:
    return Path(name).suffix.lower() in SUFFIXES


def _is_image(name: str) -> bool:
    return _has_suffix(name) and not name.startswith(".")


def _lists_images(path: Path) -> bool:
    """Tell by the first rows of a table, of which one may be a header, whether it names images."""
    values = [row.value for row in islice(Table(path), 4) if row.value is not None]
    return bool(values) and all(_names_image(value) for value in values[1:] or values)


def _names_image(value: Any) -> bool:
    cells = list(value.values() if isinstance(value, dict) else value)
    return any(
        _image_bytes(cell) or (isinstance(cell, str) and _has_suffix(cell.strip()))
        for cell in cells
    )


def _image_bytes(cell: Any) -> bytes | None:
    """Return the bytes of an image that a cell of a table holds, as datasets keeps them."""
    content = cell.get("bytes") if isinstance(cell, dict) else cell
    return content if isinstance(content, bytes) else None


# Where its parts are


def find_image_parts(
    data: str, valid: str | None, test: str | None, options: ImageOptions
) -> tuple[dict[str, ReadImages], dict[str, float]]:
    """Find what reads each part, and the shares of train that are to be split off, if told."""
    readers, shares = find_images(Path(data), options), shares_of(valid, test)
    home = Path(data) if os.path.isdir(data) else Path(data).parent
    for name, given in (("valid", valid), ("test", test)):
        if name in shares:
            readers.pop(name, None)
        elif given:
            beside = not os.path.exists(given) and (home / given).exists()
            path = home / given if beside else Path(given)
            others = find_images(path, options)
            if len(others) != 1:
                names = ", ".join(others)
                raise UsageError(f"{path}: {len(others)} parts ({names}); expected one")
            readers[name] = next(iter(others.values()))
    return readers, shares


def find_images(path: Path, options: ImageOptions) -> dict[str, ReadImages]:
    """Find the parts of a set and what reads each."""
    if not path.exists():
        raise UsageError(missing(path))
    kind = kind_of_set(path)
    if kind == "idx":
        return _find_idx(path if path.is_dir() else path.parent, options)
    if kind == "mosaics" and options.mosaics:
        return _find_mosaics(path, options)
    if kind == "table":
        if not is_folder(path):
            return {"train": partial(_read_table, path, options)}
        return {
            name: partial(_read_one_table, path, name, files, options)
            for name, files in named_files(path).items()
        }
    if path.is_dir():
        return {
            name: partial(_read_folder, folder, options)
            for name, folder in _part_folders(path).items()
        }
    raise UsageError(
        f"{path}: no set of images; expected a folder with a folder of images for each class, a "
        "table of paths and labels, or idx files"
    )


def _folders(path: Path) -> list[str]:
    try:
        entries = sorted(entry.name for entry in os.scandir(path) if entry.is_dir())
    except OSError as error:
        raise refuse(error, path) from error
    names = [name for name in entries if not name.startswith((".", "__"))]
    for name in names:
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise UsageError(f"{path}: the folder {name!r} has a name that is not UTF-8; rename it")
    return names


def _part_folders(path: Path) -> dict[str, Path]:
    """Find folders train, valid and test; without them, the folder is that of train."""
    names = _folders(path)
    parts: dict[str, list[str]] = {}
    for name in names:
        if part := part_named(name):
            parts.setdefault(part, []).append(name)
    for part, folders in parts.items():
        if len(folders) > 1:
            raise UsageError(f"{path}: several folders for {part} ({', '.join(folders)}); keep one")
    if "train" in parts or set(names) == {folders[0] for folders in parts.values()} != set():
        return {part: path / folders[0] for part, folders in parts.items()}
    return {"train": path}


# Images in files


def _read_folder(folder: Path, options: ImageOptions) -> ImageFiles:
    """Read a folder of class folders, or where labels are of no concern, all images within."""
    classes = _folders(folder)
    loose = [name for name in sorted(os.listdir(folder)) if _is_image(name)]
    if options.labelled and not classes:
        there = f"{len(loose)} images lie loose in it" if loose else "there is no image in it"
        raise UsageError(f"{folder}: {there}; expected a folder of images for each class")
    files, others, notes = [], [], []
    for name in classes:
        before = len(files)
        for place, _, names in sorted(os.walk(folder / name)):
            for file in sorted(names):
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
    return _look_at(files, options, notes)


def _read_one_table(
    folder: Path, name: str, files: list[Path], options: ImageOptions
) -> ImageFiles:
    return _read_table(single_file(files, name, folder), options)


def _read_table(path: Path, options: ImageOptions) -> ImageFiles:
    """Read a table of paths, from the table's own folder on, or of images, and labels."""
    notes: list[str] = []
    first = next((row.value for row in Table(path) if row.value is not None), None)
    if isinstance(first, dict) and any(map(_image_bytes, first.values())):
        return _read_packed(path, first, options)
    if options.labelled:
        format = ExampleFormat(options.columns, "fine", header=options.header)
        examples = ExampleReader(format).read(path, notes)
        rows = [(example.text, ",".join(example.labels)) for example in examples]
    else:
        pairs = PairReader(path, columns=options.columns, header=options.header)
        rows = [(source, "") for source in dict.fromkeys(pair.source for pair in pairs)]
    return _look_at([(str(path.parent / name), label) for name, label in rows], options, notes)


def _read_packed(path: Path, first: dict[str, Any], options: ImageOptions) -> ImageFiles:
    """Read a table that holds images themselves, and labels."""
    names = parse_columns(options.columns) or (None, None)
    image = names[0] or next(key for key, cell in first.items() if _image_bytes(cell))
    label = names[1] or next((key for key in first if key in LABELS), None)
    if options.labelled and label is None:
        raise UsageError(
            f"{path}: which column is the label? Found {', '.join(first)}; set columns={image},NAME"
        )
    files, size, total = ImageFiles([]), 0, 0
    for number, value, _ in Table(path):
        total = number
        if not isinstance(value, dict) or (options.most and len(files) >= options.most):
            continue
        where, data = f"{path}:{number}", _image_bytes(value.get(image)) or b""
        try:
            with open_image(data, where) as opened_image:
                files.sizes.add(opened_image.size)
                grey = opened_image.mode in GREY
            text = text_at(value, (str(label),)).strip() if options.labelled else ""
        except BadRow as bad:
            raise UsageError(bad.at(where).message) from None
        except BrokenImage as mistake:
            if options.broken == "refuse":
                raise BrokenImage(f"{mistake}; or leave such rows out: broken=skip") from None
            files.bad.append(str(mistake))
            continue
        if options.labelled and not text:
            raise UsageError(f"{where}: the label is empty; fill it or remove the row")
        size += len(data)
        if size > MOST_STORED:
            raise too_many(where)
        files.grey = grey and (files.grey or not files.items)
        files.items.append(Item(where, text, hashlib.sha256(data).hexdigest()[:32]))
        files.contents.append(data)
    files.total = total
    return files


def too_many(where: str) -> UsageError:
    """Say that images take more memory than a set may."""
    return UsageError(f"{where}: the images so far take over {MOST_STORED >> 30} GB; use fewer")


def _look_at(
    files: Sequence[tuple[str, str]], options: ImageOptions, notes: list[str]
) -> ImageFiles:
    """Hash files and look at their headers."""
    every = len(files)
    if options.most and every > options.most:
        files = [files[i * every // options.most] for i in range(options.most)]
    total = sum(os.path.getsize(path) for path, _ in files if os.path.exists(path))
    hashed = total <= MOST_HASHED

    def one(file: tuple[str, str]) -> tuple[str, Any]:
        path, label = file
        try:
            with open_image(path) as image:
                seen = (image.size, image.mode in GREY, _is_animated(image))
            with open(path, "rb") as content:
                digest = (
                    hashlib.file_digest(content, "sha256").hexdigest()[:32]
                    if hashed
                    else store_key(path, os.path.getsize(path))
                )
        except OSError as error:
            raise BrokenImage(str(refuse(error, path))) from None
        except BrokenImage as mistake:
            if options.broken == "refuse":
                raise BrokenImage(f"{mistake}; or leave such files out: broken=skip") from None
            return str(mistake), None
        return digest, seen

    items, seen, bad = [], [], []
    for (path, label), (digest, what) in zip(files, in_threads(one, files), strict=True):
        if what is None:
            bad.append(digest)
        else:
            items.append(Item(path, label, digest))
            seen.append(what)
    found = ImageFiles(items)
    found.sizes = {size for size, _, _ in seen}
    found.grey = all(grey for _, grey, _ in seen)
    found.bad, found.total, found.notes = bad, every, notes
    if animated := sum(moves for _, _, moves in seen):
        notes.append(f"{animated:,} animated images: of each, the first frame is read")
    return found


def _is_animated(image: Image.Image) -> bool:
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
        there = "more" if len(data) > math.prod(shape) else f"{len(data):,}"
        raise UsageError(
            f"{path}: its header says {math.prod(shape):,} bytes, there are {there}; copy it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


def _find_idx(folder: Path, options: ImageOptions) -> dict[str, ReadImages]:
    """Find idx files of images, each with one of labels beside it."""
    readers: dict[str, ReadImages] = {}
    for name in sorted(os.listdir(folder)):
        if match := IDX.search(name):
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
    return ImageFiles(_array_items(images, map(str, labels.tolist()), str(path)), images)


def _labels_beside(path: Path) -> Path:
    """Return the idx file of labels that goes with one of images, packed or not."""
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
        if match := MOSAIC.fullmatch(name):
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
    return ImageFiles(items, np.concatenate(arrays))
