"""Captions of images: tables of paths and captions, beside the images that they name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from regard.data.archive import archives_in, in_archive, locator
from regard.data.image_files import IMAGE_MEDIA
from regard.data.images import ImageData, Images
from regard.data.in_memory import home_of
from regard.data.labelled import hash_items
from regard.data.pairs import PairReader
from regard.data.parts import PARTS
from regard.errors import UsageError


@dataclass
class CaptionData(ImageData):
    """Images with the captions of each image of each part, if they have some."""

    captions: dict[str, list[list[str]]] = field(default_factory=dict)

    @cached_property
    def sha(self) -> str:
        """A hash of the images and captions that are trained and validated on."""
        rows = [row for part in self.captions for row in self._rows(part)]
        return hash_items([(super().sha, ""), *rows]) if self.captions else super().sha

    def part_sha(self, part: str) -> str:
        """Hash of the images of a part, and of their captions."""
        return hash_items(self._rows(part))

    def _rows(self, part: str) -> list[tuple[str, list[str]]]:
        return list(zip(self.parts[part].hashes, self.captions[part], strict=True))


def with_captions(images: ImageData, captions: dict[str, list[list[str]]]) -> CaptionData:
    """Put the captions of each part beside its images."""
    about = {"notes": images.notes, "split": images.split, "classes": images.classes}
    return CaptionData(images.parts, images.format, captions, **about)


def captions_in(
    path: Path,
    part: str,
    columns: str | None,
    header: bool | None = None,
    most: int | None = None,
    files: bool = False,
) -> dict[str, list[str]]:
    """Read the captions of each image in a table, or in that of a part, by the path of its file.

    Args:
        path: table, or a folder of tables.
        part: the part whose table of a folder is read.
        columns: columns of paths and captions, if told.
        header: whether a table has a header row, if told.
        most: number of images that are read at most.
        files: whether captions are files, as masks are, with paths from the table's folder on.
    """
    captions: dict[str, list[str]] = {}
    if in_archive(str(path)) or (
        path.is_dir() and not IMAGE_MEDIA.tables(path) and archives_in(path)
    ):
        read = partial(IMAGE_MEDIA.list_files, target="text")
        for name, read_part in IMAGE_MEDIA.folder_parts(path, read).items():
            found = read_part()[0] if part in ("", name) else None
            if found is not None and found.texts is not None:
                captions |= {w: [t] for w, t in zip(found.where, found.texts, strict=True)}
        return captions
    for table in IMAGE_MEDIA.tables(path).get(part, []) if path.is_dir() else [path]:
        locate = locator(home_of(table))
        for pair in PairReader(table, columns=columns, header=header):
            image = locate(pair.source)
            if len(captions) == most and image not in captions:
                return captions
            told = locate(pair.target) if files else pair.target
            captions.setdefault(image, []).append(told)
    return captions


def read_captions(
    data: Path,
    valid: str | None,
    columns: str | None,
    header: bool | None,
    test: str | None = None,
    parts: Sequence[str] = ("train", "valid"),
    files: bool = False,
) -> dict[str, list[str]]:
    """Read all captions of some parts, those to train and to validate on unless told.

    Args:
        data: table, or a folder of tables.
        valid: table of the validation part, if it is elsewhere.
        columns: columns of paths and captions, if told.
        header: whether a table has a header row, if told.
        test: table of the test part, if it is elsewhere.
        parts: parts of a folder that are read.
        files: whether captions are files, as masks are.
    """
    captions: dict[str, list[str]] = {}
    for part in parts if data.is_dir() or in_archive(str(data)) else ("train",):
        captions |= captions_in(data, part, columns, header, files=files)
    home = data if data.is_dir() else data.parent
    for given in filter(None, (valid, test)):
        path = next((path for path in (Path(given), home / given) if path.is_file()), None)
        captions |= captions_in(path, "", columns, header, files=files) if path else {}
    if not captions:
        raise UsageError(
            f"{data}: no table of images and captions; expected a TSV of paths and captions, or a "
            f"folder with {parts[-1]}.tsv"
        )
    return captions


def captions_of(images: Images, captions: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """Captions of each image of a part."""
    return [list(captions.get(images.where(i), [""])) for i in range(len(images))]


def all_captions_of(images: Images, settings: Any) -> list[list[str]]:
    """Captions of each image of a part, wherever the data of an evaluation have them."""
    data, given = Path(str(settings.data)), (settings.valid, settings.columns, settings.header)
    mine = captions_of(images, read_captions(data, *given, settings.test, tuple(PARTS)))
    if not any(map(any, mine)):
        raise UsageError(f"{data}: no captions of these images; name their table with test=")
    return mine
