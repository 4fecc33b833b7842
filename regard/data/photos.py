"""Sets of images that keep their own size, as denoisers learn from them."""

import hashlib
from functools import cached_property
from typing import NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from regard.data.image_files import (
    MOST_STORED,
    ImageFiles,
    ImageOptions,
    find_image_parts,
    too_many,
)
from regard.data.image_format import ImageFormat
from regard.data.media import BROKEN
from regard.data.media_sets import load_file_parts
from regard.data.parts import NEEDED, Dataset, PartsAsked
from regard.errors import UsageError, lookup


class Photo(NamedTuple):
    """An image of a set: where it is, a hash of its file, and its bytes (c, h, w)."""

    where: str
    hash: str
    pixels: Tensor

    @property
    def input(self) -> np.ndarray:
        """Pixels as an array (h, w, c)."""
        return self.pixels.permute(1, 2, 0).numpy()

    def clean(self) -> Tensor:
        """Pixels as numbers from 0 to 1."""
        return self.pixels.float() / 255

    def noise(self, seed: int) -> Tensor:
        """Gaussian noise of standard deviation 1, the same whoever asks for it."""
        return noise_of(self.hash, tuple(self.pixels.shape), seed)


def noise_of(hash: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Gaussian noise that depends on an image and the seed, and on nothing else."""
    rng = np.random.Generator(np.random.PCG64([seed % 2**64, int(hash[:16], 16)]))
    return torch.from_numpy(rng.standard_normal(shape, np.float32))


class Photos(Dataset[list[Photo]]):
    """The photos of each part."""

    @cached_property
    def sha(self) -> str:
        """A hash of the photos that are trained and validated on."""
        hashes = [[photo.hash for photo in self.parts[name]] for name in ("train", "valid")]
        return hashlib.sha256(repr(hashes).encode()).hexdigest()

    def part_sha(self, part: str) -> list[str]:
        """Hash of each photo of a part."""
        return [photo.hash for photo in self.parts[part]]


def load_photos(
    data: str,
    *,
    channels: int | None = None,
    broken: str = "refuse",
    most: int | None = None,
    **asked: Unpack[PartsAsked],
) -> Photos:
    """Read the needed parts, as they are or in so many channels; some are split off if none are.

    Only so many as `most` are taken of each part, chosen by hash.
    """
    valid, test, need = asked.get("valid"), asked.get("test"), asked.get("need", NEEDED)
    lookup("broken", broken, BROKEN)
    options = ImageOptions(labelled=False, mosaics=False, broken=broken)
    readers, shares = find_image_parts(data, valid, test, options)
    own = [name for name in readers if not {"valid": valid, "test": test}.get(name)]
    if need[0] not in readers and len(own) == 1:
        readers[need[0]] = readers.pop(own[0])  # the only part that there is
    photos = Photos({})
    files: Dataset[ImageFiles] = Dataset({}, notes=photos.notes)

    def read(name: str) -> ImageFiles:
        part = readers[name]()
        if not len(part):
            raise UsageError(f"{data}: no image in it; expected a folder of images")
        files.notes.extend(part.all_notes())
        return part

    load_file_parts(files, data, "image", readers, read, shares, asked)
    for name in need:
        part = files.parts[name]
        if most and most < len(part):
            order = sorted(range(len(part)), key=lambda i: part.items[i].source)
            part = part.pick(order[:most])
        photos.parts[name] = _decode(part, channels, broken, photos.notes)
        if not photos.parts[name]:
            raise UsageError(f"{data}: no image to be read in the {name} part")
    photos.split = files.split
    return photos


def _decode(files: ImageFiles, channels: int | None, broken: str, notes: list[str]) -> list[Photo]:
    photos, total = [], 0
    images = files.decode(ImageFormat(channels=channels), broken)
    for item, pixels in zip(files.items, images, strict=True):
        if isinstance(pixels, str):
            notes.append(f"left out: {pixels}")
            continue
        total += pixels.nbytes
        if total > MOST_STORED:
            raise too_many(item.where)
        photos.append(Photo(item.where, item.source, torch.tensor(pixels)))
    return photos
