"""Images of their own sizes, to which noise is added: sets, parts and reproducible noise."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.image import (
    BROKEN,
    MOST_STORED,
    ImageFormat,
    ImageOptions,
    Images,
    Shelf,
    find_images,
    split_images,
)
from regard.data.split import Split, keys_of, shares_of, unseen
from regard.errors import UsageError, lookup


class Photo(NamedTuple):
    """An image of a set: where it is, a hash of its file, and its bytes (c, h, w)."""

    where: str
    hash: str
    pixels: Tensor

    def clean(self) -> Tensor:
        """Return it with numbers from 0 to 1."""
        return self.pixels.float() / 255

    def noise(self, seed: int) -> Tensor:
        """Return noise of standard deviation one, the same whoever asks for it."""
        return noise_of(self.hash, tuple(self.pixels.shape), seed)


def noise_of(hash: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Return normal noise that depends on an image and the seed, and on nothing else."""
    law = np.random.PCG64([seed % 2**64, int(hash[:16], 16)])
    return torch.from_numpy(np.random.Generator(law).standard_normal(shape, np.float32))


def read_photos(shelf: Shelf, channels: int | None, broken: str, notes: list[str]) -> list[Photo]:
    """Decode the images of a shelf as they are, or in so many channels."""
    lookup("broken", broken, BROKEN)
    found, total = [], 0
    for item, pixels in zip(
        shelf.items, shelf.decode(ImageFormat(channels=channels), broken), strict=True
    ):
        if isinstance(pixels, str):
            notes.append(f"left out: {pixels}")
            continue
        total += pixels.nbytes
        if total > MOST_STORED:
            raise UsageError(
                f"{item.where}: the images so far take over {MOST_STORED >> 30} GB; use fewer"
            )
        found.append(Photo(item.where, item.source, torch.tensor(pixels)))
    return found


def shelf_of(data: str, part: str, broken: str) -> Shelf:
    """Find the images of a part, or those of the only part that there is."""
    options = ImageOptions(labelled=False, mosaics=False, broken=broken)
    readers = find_images(Path(data), options)
    reader = readers.get(part) or (next(iter(readers.values())) if len(readers) == 1 else None)
    if reader is None:
        raise UsageError(f"{data}: no {part} part; there is {', '.join(readers)}")
    shelf = reader(options)
    if not len(shelf):
        raise UsageError(f"{data}: no image in it; expected a folder of images")
    return shelf


def train_and_valid(
    data: str, valid: str | None, test: str | None, broken: str
) -> tuple[dict[str, list[Photo]], list[str], Split]:
    """Read grey images to learn from and to validate on; some are split off if none are named."""
    notes: list[str] = []
    shares, split = shares_of(valid, test), Split()
    options = ImageOptions(labelled=False, mosaics=False, broken=broken)
    shelves = {"train": shelf_of(data, "train", broken)}
    if valid and "valid" not in shares:
        shelves["valid"] = shelf_of(valid, "valid", broken)
    elif "valid" not in shares and (reader := find_images(Path(data), options).get("valid")):
        shelves["valid"] = reader(options)
    lacking = {name: shares.get(name) for name in ("valid", *shares) if name not in shelves}
    if lacking:
        parts, split = split_images(_all_of(shelves["train"]), lacking, notes)
        shelves |= {name: _shelf(part) for name, part in parts.items()}
    for shelf in shelves.values():
        notes += shelf.told()
    split = split.noting(keys_of(shelves["train"].items))
    shelves.pop("test", None)
    found = {name: read_photos(shelf, 1, broken, notes) for name, shelf in shelves.items()}
    for name, photos in found.items():
        if not photos:
            raise UsageError(f"{data}: no image to be read in the {name} part")
    return found, notes, split


def _all_of(shelf: Shelf) -> Images:
    """Return all images of a shelf, as they are."""
    labels = torch.zeros(len(shelf), dtype=torch.long)
    return Images(shelf, np.arange(len(shelf)), labels, ImageFormat(channels=1), None)


def _shelf(part: Images) -> Shelf:
    """Return some images of a shelf as a shelf."""
    rows, whole = part.rows.tolist(), part.shelf
    return Shelf([whole.items[row] for row in rows], _some(whole.array, rows))


def _some(array: np.ndarray | None, rows: list[int]) -> np.ndarray | None:
    return None if array is None else array[rows]


def unseen_photos(
    data: str, part: str, broken: str, trained: Split | None, notes: list[str]
) -> list[Photo]:
    """Read the images of a part that a model was not trained on."""
    shelf = shelf_of(data, part, broken)
    if trained is not None:
        places = {item.where: row for row, item in enumerate(shelf.items)}
        some = unseen(shelf.items, part, trained, data, "images", notes)
        shelf = _shelf(_all_of(shelf).pick([places[item.where] for item in some]))
    return read_photos(shelf, None, broken, notes)


def some_photos(data: str, count: int, broken: str) -> list[Photo]:
    """Read so many training images, the same whatever their order."""
    shelf = shelf_of(data, "train", broken)
    order = sorted(range(len(shelf)), key=lambda i: shelf.items[i].source)[:count]
    some = Shelf([shelf.items[i] for i in order], _some(shelf.array, order))
    return read_photos(some, None, broken, [])
