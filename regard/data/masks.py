"""Images with masks: a class for each pixel, in a PNG beside each image."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import numpy as np
from PIL import Image

from regard.data.archive import content_of, in_archive
from regard.data.captions import read_captions
from regard.data.image_files import MOST_STORED, too_many
from regard.data.image_format import decoded, open_image, upright
from regard.data.images import ImageData, Images
from regard.data.labelled import hash_items
from regard.data.lines import missing
from regard.data.media import class_folders, in_threads
from regard.data.parts import named_files
from regard.errors import UsageError
from regard.files import read_text

IMAGES, MASKS, CLASSES = "images", "masks", "classes.txt"
NO_CLASS = 255  # value of a pixel that is of no class: neither learnt nor judged
_LAYOUT = f"expected a folder with {IMAGES}/ and {MASKS}/, or a table of images and masks"


@dataclass
class MaskData(ImageData):
    """Images with the class of each pixel (n, h, w) of each part; `classes` are their names."""

    masks: dict[str, np.ndarray] = field(default_factory=dict)

    @cached_property
    def sha(self) -> str:
        """A hash of the images and masks that are trained and validated on."""
        return hash_items([(super().sha, ""), *((self.part_sha(part), "") for part in self.masks)])

    def part_sha(self, part: str) -> str:
        """Hash of the images of a part, and of their masks."""
        digest = hashlib.sha256(self.masks[part].tobytes()).hexdigest()
        return hash_items([(digest, self.parts[part].hashes)])


MaskOf = Callable[[str], Path]  # from an image to its mask


def has_masks(path: Path) -> bool:
    """True if a folder holds a folder of images and one of masks."""
    both = {IMAGES, MASKS}
    return (path.is_dir() or bool(in_archive(str(path)))) and both <= set(class_folders(path))


def find_masks(
    data: str,
    parts: Sequence[str],
    valid: str | None = None,
    columns: str | None = None,
    header: bool | None = None,
    test: str | None = None,
) -> tuple[str, MaskOf]:
    """Where the images of a set are, and what finds the mask of each.

    Args:
        data: folder with one of images and one of masks, or a table of images and masks.
        parts: parts that are read.
        valid: the validation part, if it is elsewhere.
        columns: columns of a table, if told.
        header: whether a table has a header row, if told.
        test: the test part, if it is elsewhere.
    """
    path = Path(data)
    if has_masks(path):
        return str(path / IMAGES), mask_of
    if not path.exists():
        raise UsageError(missing(path))
    if path.is_dir() and not named_files(path):
        raise UsageError(f"{data}: no masks; {_LAYOUT}")
    found = read_captions(path, valid, columns, header, test, parts, files=True)
    return data, lambda image: Path(found[image][0])


def link_classes(data: str, folder: Path) -> None:
    """Link the names of the classes of a set into another folder, if it has some."""
    if (names := _home(data) / CLASSES).is_file():
        (folder / CLASSES).symlink_to(names.absolute())


def _home(data: str) -> Path:
    return Path(data) if Path(data).is_dir() else Path(data).parent


def mask_of(image: str) -> Path:
    """Mask of an image: under the same name, where the folder of images is one of masks."""
    parts = Path(image).with_suffix(".png").parts
    if IMAGES not in parts:
        raise UsageError(f"{image}: not in a folder named {IMAGES}; {_LAYOUT}")
    at = len(parts) - 1 - parts[::-1].index(IMAGES)
    return Path(*parts[:at], MASKS, *parts[at + 1 :])


def read_mask(image: str, mask_of: MaskOf, size: int) -> np.ndarray:
    """Classes (h, w) of the pixels of an image, brought to a size as the image is."""
    path = mask_of(image)
    if not path.is_file() and isinstance(content_of(str(path)), str):
        raise UsageError(f"{image}: no mask {path}; add it, or remove the image")
    seen = open_image(content_of(image), image)
    with open_image(content_of(str(path)), str(path)) as mask, seen as photo:
        if mask.mode not in ("P", "L", "1"):
            raise UsageError(
                f"{path}: a mask of mode {mask.mode}; expected an indexed or grey PNG, in which "
                "the number of a pixel is its class"
            )
        if mask.size != (seen := upright(photo).size):
            raise UsageError(
                f"{path}: {mask.width} x {mask.height} pixels, its image {seen[0]} x {seen[1]}; "
                "expected as many"
            )
        whole = decoded(mask, str(path)).resize((size, size), Image.Resampling.NEAREST)
        return np.asarray(whole).astype(np.uint8)


def with_masks(
    images: ImageData, data: str, mask_of: MaskOf, classes: Sequence[str] = ()
) -> MaskData:
    """Put the masks of each part beside its images.

    `classes` are those that are known; else they are the lines of classes.txt in the folder of the
    data, or without one the numbers of the masks of the training part.
    """
    size, masks = images.format.size, {}
    names = list(classes) or _named(_home(data))
    assert size is not None
    for part in images.parts:
        masks[part] = _read(images.parts[part], mask_of, size)
        names = names or [str(n) for n in range(1 + _largest(masks[part]))]
        if len(names) < 2:
            raise UsageError(
                f"{data}: its masks have one class only; number the pixels of each class 0, 1, 2 "
                f"and so on ({NO_CLASS} is for those of no class)"
            )
        _check(images.parts[part], masks[part], mask_of, names)
    about = {"notes": images.notes, "split": images.split, "classes": names}
    return MaskData(images.parts, images.format, masks, **about)


def _read(images: Images, mask_of: MaskOf, size: int) -> np.ndarray:
    if len(images) * size * size > MOST_STORED:
        raise too_many(images.where(0))
    where = [images.where(i) for i in range(len(images))]
    return np.stack(list(in_threads(partial(read_mask, mask_of=mask_of, size=size), where)))


def _named(folder: Path) -> list[str]:
    """Names of the classes that lie beside images and masks, if they do."""
    path = folder / CLASSES
    names = read_text(path, 2**20).split("\n") if path.is_file() else []
    names = [name.strip() for name in names if name.strip()]
    if len(set(names)) < len(names) or len(names) > NO_CLASS:
        raise UsageError(
            f"{path}: {len(names)} names; expected a line for each class, {NO_CLASS} at most, and "
            "none twice"
        )
    return names


def _largest(masks: np.ndarray) -> int:
    """Largest class of masks."""
    return int(masks[masks != NO_CLASS].max(initial=0))


def _check(images: Images, masks: np.ndarray, mask_of: MaskOf, names: Sequence[str]) -> None:
    """Refuse numbers of pixels that are no class."""
    wrong = (masks >= len(names)) & (masks != NO_CLASS)
    if wrong.any():
        row = int(wrong.any((1, 2)).argmax())
        value = int(masks[row][wrong[row]][0])
        raise UsageError(
            f"{mask_of(images.where(row))}: {value} is no class; there are {len(names)}, from 0 "
            f"({names[0]}) to {len(names) - 1} ({names[-1]}), and {NO_CLASS} for none"
        )
