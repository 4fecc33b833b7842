"""Sets of images in the format of a model: decoded once, with the numbers of their labels."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from torch import Tensor

from regard.data.image_files import (
    MOST_STORED,
    ImageFiles,
    ImageOptions,
    find_image_parts,
)
from regard.data.image_format import BrokenImage, ImageFormat
from regard.data.media import in_threads
from regard.data.media_sets import (
    MediaRows,
    MediaSet,
    labels_of,
    load_media,
    note_broken,
    rounded_stats,
)
from regard.data.parts import PartsAsked
from regard.data.store import ImageStore, build_image_store, store_key
from regard.errors import UsageError

_USUAL = 64  # pixels to which photos are brought that are not all of one size
_LARGEST = 256  # pixels of images that are taken as they are


class Images(MediaRows):
    """The images of a part with the numbers of their labels, in the format of a model."""

    files: ImageFiles

    def __init__(
        self,
        files: ImageFiles,
        rows: np.ndarray,
        labels: Tensor,
        format: ImageFormat,
        pixels: np.ndarray | None,
    ):
        """Take which of the files they are; pixels are those of all files, if decoded."""
        super().__init__(files, rows, labels)
        self.format, self.pixels = format, pixels

    def read(self, indices: Any) -> Tensor:
        """Bytes (n, c, h, w) of some images."""
        rows = self.rows[np.asarray(indices, dtype=np.int64)]
        if self.pixels is not None:
            return torch.from_numpy(self.pixels[rows])

        def one(row: int) -> np.ndarray:
            return self.format.read(self.files.content(row), self.files.items.where[row])

        return torch.from_numpy(np.stack(list(in_threads(one, rows.tolist()))))

    def inputs(self, count: int) -> list[np.ndarray]:
        """First images (h, w, c)."""
        return [image.permute(1, 2, 0).numpy() for image in self.read(range(min(count, len(self))))]

    def part(self, share: float) -> "Images":
        """Share of the images of every class, by hash: a smaller share is within it."""
        if share >= 1:
            return self
        order = sorted(range(len(self)), key=self.hashes.__getitem__)
        labels = self.labels.numpy()[order]
        kept = [np.array(order)[labels == label] for label in np.unique(labels)]
        some = [rows[: max(1, round(share * len(rows)))] for rows in kept]
        return self.pick(np.sort(np.concatenate(some)))

    def channel_stats(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation of each channel, of pixels from 0 to 1."""
        channels = self.read([0]).shape[1]
        counts = np.zeros((channels, 256), np.int64)  # exact, however it is summed
        for start in range(0, len(self), 1024):
            some = self.read(np.arange(start, min(len(self), start + 1024))).numpy()
            for channel, row in enumerate(counts):
                row += np.bincount(some[:, channel].ravel(), minlength=256)
        share, values = counts / counts.sum(1, keepdims=True), np.arange(256) / 255
        mean = share @ values
        std = np.sqrt((share * (values - mean[:, None]) ** 2).sum(1))
        return rounded_stats(mean, std)

    @property
    def sha(self) -> str:
        """Hash of the images and their labels."""
        digest = hashlib.sha256()
        for source, label in zip(self.hashes, self.labels.tolist(), strict=True):
            digest.update(f"{source} {label}\n".encode())
        return digest.hexdigest()


@dataclass
class ImageData(MediaSet[Images]):
    """The images of each part, the names of their labels, and their format."""

    word = "image"
    format: ImageFormat


def load_images(
    data: str,
    *,
    format: ImageFormat | None = None,
    options: ImageOptions | None = None,
    classes: Sequence[str] | None = None,
    cache: Path | None = None,
    **asked: Unpack[PartsAsked],
) -> ImageData:
    """Read the needed parts of a set; without one for validation, some are split off by hash.

    What the format leaves open is settled by the images. `classes` are the labels that are known,
    else they are those of train. Decoded images are kept in the cache folder.
    """
    options = options or ImageOptions()
    loaded = ImageData({}, (format or ImageFormat()).check(), classes=list(classes or []))

    def decode(name: str, files: ImageFiles) -> Images:
        loaded.format = settle_format(loaded.format, files, loaded.notes)
        return _decode_part(name, files, loaded, options, cache)

    return load_media(loaded, data, find_image_parts, decode, options, asked)


def settle_format(format: ImageFormat, files: ImageFiles, notes: list[str]) -> ImageFormat:
    """Settle size and channels by the images where they are left open."""
    if format.channels is None:
        format = replace(format, channels=1 if files.grey else 3)
    if format.size is None:
        sizes = sorted(files.sizes)
        width, height = sizes[0]
        alike = len(sizes) == 1 and width == height <= _LARGEST
        format = replace(format, size=width if alike else _USUAL)
        if not alike:
            largest = max(sizes, key=lambda size: size[0] * size[1])
            notes.append(
                f"images of {width} x {height} to {largest[0]} x {largest[1]} pixels are brought "
                f"to {_USUAL} x {_USUAL} (fit={format.fit}); choose with image="
            )
    return format


def _decode_part(
    name: str, files: ImageFiles, data: ImageData, options: ImageOptions, cache: Path | None
) -> Images:
    """Decode a part, or open it decoded, and number its labels."""
    labels = labels_of(files, data, options)
    pixels, stored = _decoded(files, data.format, options.broken, cache)
    rows = np.arange(len(files))
    if stored is not None and stored.gaps:
        if options.broken == "refuse":
            raise BrokenImage(f"{stored.why}; or leave such files out: broken=skip")
        rows = np.delete(rows, stored.gaps)
        note_broken(data, name, len(stored.gaps), stored.why, len(rows))
    return Images(files, rows, labels[torch.from_numpy(rows)], data.format, pixels)


def _decoded(
    files: ImageFiles, format: ImageFormat, broken: str, cache: Path | None
) -> tuple[np.ndarray | None, ImageStore | None]:
    """All images of a part decoded, unless that is too much, and which are broken."""
    whole = files.whole(format)
    if whole is not None:
        return whole, None
    assert format.size is not None and format.channels is not None
    shape: tuple[int, ...] = (len(files), format.channels, format.size, format.size)
    if math.prod(shape) > MOST_STORED:
        shape = (len(files), 0)  # only which are broken is noted
    if cache is None:
        stored = ImageStore.of(shape, files.decode(format, broken))
    else:
        digest = hashlib.sha256("\n".join(files.items.sources()).encode())
        folder = cache / "stores" / store_key("images", digest.hexdigest(), format.key(), shape)
        try:
            stored = ImageStore.open(folder, shape)
        except UsageError:  # not there, or not any more
            stored = build_image_store(folder, shape, files.decode(format, broken))
    return (stored.rows if stored.rows.size else None), stored
