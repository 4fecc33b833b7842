"""Images: files, arrays, and what PIL or datasets have of them."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor

from regard.data.captions import captions_in
from regard.data.image_files import (
    ImageFiles,
    ImageOptions,
    find_image_parts,
    holds_images,
    kind_of_set,
)
from regard.data.image_format import IMAGE_SUFFIXES, ImageFormat
from regard.data.images import settle_format
from regard.data.media import cell_file
from regard.errors import UsageError
from regard.modalities.base import (
    MEANT,
    ExamineOptions,
    Finding,
    Modality,
    Survey,
    class_counts,
    first_targets,
    link_or_write,
    made_up_text,
    plural,
    spread,
)
from regard.training.progress import Progress

_CAPTION_TOKENS = 16  # tokens of a caption
_SMALL = 8  # pixels of a side that shows hardly anything


@dataclass
class ImageCounts:
    """The size of one part of a set of images, and what they are brought to."""

    images: int
    bad: int
    classes: dict[str, int]
    sizes: int  # how many different ones
    image: int
    channels: int
    total: int = 0  # how many there are, where not all were looked at

    def __str__(self) -> str:
        count = len(self.classes)
        classes = f" of {count:,} class{'es' * (count != 1)}" if count else ""
        return (
            f"{self.images:>10,} images{classes}, "
            f"{'grey' if self.channels == 1 else 'colour'}, {self.image} x {self.image}"
            + (f" from {self.sizes:,} sizes" if self.sizes > 1 else "")
            + (f"; {self.total:,} in all" if self.total > self.images else "")
            + (f", {plural(self.bad, 'bad file')}" if self.bad else "")
        )


class ImageModality(Modality[np.ndarray]):
    """Images as bytes (channels, height, width)."""

    name, key, one, many = "image", "image", "image", "images"
    suffixes = frozenset(IMAGE_SUFFIXES)
    tasks = {"label": "images", "text": "caption", "": "denoise"}
    counted = "images"
    size_key, sides, unit = "image", 2, "pixels"
    columns = ("image", "img", "path", "file", "filename", "file_name")

    def check(self, given: Any, settings: Any = None, format: Any = None) -> Any:
        """Return a path, an image or an array, or refuse what is none."""
        image = cell_file(given)
        if not isinstance(image, str | Path | bytes | np.ndarray | Tensor | Image):
            raise UsageError(f"{image!r:.60} is no image; give a path, an image or an array")
        return image

    def decode(self, given: Any, format: ImageFormat, notes: list[str] | None = None) -> np.ndarray:
        """Return the pixels of an image, in an array of its own, as PyTorch wants it."""
        return np.array(format.read(given, notes=notes))

    def holds(self, data: Any, columns: str | None = None, header: bool | None = None) -> bool:
        """Tell whether data are images: class folders, a table of paths, idx files or mosaics."""
        return holds_images(data)

    def guess(self, path: Path, columns: str | None, header: bool | None) -> tuple[str, str]:
        """Tell labels from captions, and both from images alone."""
        kind = kind_of_set(path)
        if kind == "table":
            words = sorted(len(target.split()) for target in first_targets(path, columns, header))
            if words and words[len(words) // 2] >= 4:
                return "text", "a table of images and texts about them"
            return "label", "a table of images and labels"
        if kind == "folders" and not any(each.is_dir() for each in path.iterdir()):
            return "", "images without labels (or pretrain)"
        return "label", "images in folders, or with labels"

    def parts(self, data: str, asked: ExamineOptions) -> Any:
        """Find what reads the files of each part."""
        how = {"header": asked.header, "most": asked.most, "labelled": asked.target == "label"}
        options = ImageOptions(columns=asked.columns, broken="skip", **how)
        return find_image_parts(data, asked.valid, asked.test, options)

    def survey(self, name: str, files: ImageFiles, asked: ExamineOptions) -> Survey:
        """Open all images of a part, and tell of their sizes."""
        total, found = max(files.total, len(files)), files.notes
        files = _readable(name, files, asked.quiet)
        if not len(files):
            return Survey(None, [], None, [], found, files.bad)
        findings, least = [], min(files.sizes, key=min)
        if min(least) < _SMALL:
            what = f"images of {name} as small as {least[0]} x {least[1]} pixels"
            findings.append(Finding("warning", what, "", "remove what shows nothing", "small"))
        classes = class_counts(files.items) if asked.target == "label" else {}
        counts = ImageCounts(len(files), len(files.bad), classes, len(files.sizes), 0, 0, total)
        sample = files.pick(spread(len(files)))
        sample.sizes, sample.grey = files.sizes, files.grey
        return Survey(counts, files.items, sample, findings, found, files.bad)

    def compare(self, data: str, parts: Mapping[str, Survey]) -> list[Finding]:
        """Tell what the images of all parts are brought to: what suits the first."""
        format, notes = ImageFormat(), []
        for part in parts.values():
            format = settle_format(format, part.sample, notes)
            part.counts.image, part.counts.channels = format.size, format.channels
        return [Finding("note", note, data, MEANT, "sizes") for note in notes]

    def write_sample(
        self, folder: Path, sample: ImageFiles, target: str, values: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Put images into folders by label, as links where they lie in files, or list captions."""
        if target == "text":
            how = (values["columns"], values["header"], len(sample))
            known = captions_in(Path(values["data"]), "train", *how)
            rows = [{"image": os.path.abspath(i), "caption": said[0]} for i, said in known.items()]
            return super().write_sample(folder, rows, target, values)
        for number, (item, content) in enumerate(zip(sample.items, sample.contents, strict=True)):
            path = folder / "images" / item.label.replace("/", "_") / str(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            if sample.array is not None:
                pixels = np.squeeze(sample.array[number].transpose(1, 2, 0))
                fromarray(pixels).save(path.with_suffix(".png"))
            else:
                link_or_write(content, path, ".png")
        return str(folder / "images"), len(sample)

    def usual_size(self, config: Any, length: int) -> int:
        """Return the side of the images that a model was made for."""
        return config.image

    def example(
        self, config: Any, batch: int, size: int, beside: bool = False
    ) -> tuple[Tensor, ...]:
        """Return images of so many pixels a side, with captions if the model reads them."""
        images = torch.empty(batch, config.channels, size, size, device="meta")
        if not beside:
            return (images,)
        return images, made_up_text(batch, min(config.max_length, _CAPTION_TOKENS))


def _readable(name: str, files: ImageFiles, quiet: bool) -> ImageFiles:
    """Return the images that can be read to their end, and why the others cannot."""
    if files.array is not None:
        return files
    rows, bad = [], list(files.bad)
    with Progress(name, len(files), quiet=quiet) as bar:
        for row, image in enumerate(files.decode(ImageFormat(8, 3), "skip")):
            if isinstance(image, str):
                bad.append(image)
            else:
                rows.append(row)
            bar.update(1)
    whole = files.pick(rows)
    whole.bad, whole.sizes, whole.grey = bad, files.sizes, files.grey
    return whole


IMAGE = ImageModality()
