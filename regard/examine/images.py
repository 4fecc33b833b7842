"""A look over images before they are trained on: what is wrong, where, and what to do."""

from collections import Counter
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from regard.data.image_files import ImageFiles, ImageOptions, find_image_parts
from regard.data.image_format import ImageFormat
from regard.data.images import settle_format
from regard.data.split import hash_text
from regard.errors import UsageError
from regard.examine.report import (
    IMAGES,
    MEANT,
    DataReport,
    Hashed,
    find_copies,
    find_labels,
    find_leaks,
    plural,
)
from regard.training.progress import Progress

FEW = 10  # images of a class that can hardly be learnt from
SMALL = 8  # pixels of a side that shows hardly anything
SAMPLE = 128  # images to measure a training with


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


def examine_images(
    data: str,
    *,
    columns: str | None = None,
    valid: str | None = None,
    test: str | None = None,
    header: bool | None = None,
    labelled: bool = True,
    most: int | None = None,
    quiet: bool = True,
) -> DataReport:
    """Look over all parts of a set of images and report what is wrong, where, and the remedy."""
    options = ImageOptions(columns, broken="skip", labelled=labelled, header=header, most=most)
    readers, shares = find_image_parts(data, valid, test, options)
    if not readers:
        raise UsageError(f"{data}: no train, valid or test part in it; name a folder of it")
    report, parts = DataReport(data), {}
    format = ImageFormat()
    for name in (part for part in ("train", "valid", "test") if part in readers):
        files = readers[name]()
        total = max(files.total, len(files))
        for note in files.notes:
            report.add("note", "note", data, note, MEANT)
        files = _readable(name, files, quiet)
        if files.bad:
            what = f"{plural(len(files.bad), 'file')} of {name} cannot be read; the first: "
            remedy = "repair or remove them, or leave them out with broken=skip"
            report.add("error", "broken", data, what + files.bad[0], remedy, len(files.bad))
        if not len(files):
            what = f"no image of {name} can be read"
            report.add("error", "no_images", data, what, "give images that open")
            continue
        notes: list[str] = []
        format = settle_format(format, files, notes)
        assert format.size is not None and format.channels is not None
        for note in notes:
            report.add("note", "sizes", data, note, MEANT)
        classes = dict(Counter(item.label for item in files.items if labelled).most_common())
        sizes = len(files.bad), classes, len(files.sizes), format.size, format.channels
        report.parts[name] = ImageCounts(len(files), *sizes, total)
        least = min(files.sizes, key=min)
        if min(least) < SMALL:
            what = f"images of {name} as small as {least[0]} x {least[1]} pixels"
            report.add("warning", "small", data, what, "remove what shows nothing")
        parts[name] = files
    hashed = {name: _hashed(name, files) for name, files in parts.items()}
    for part in hashed.values():
        find_copies(report, part, IMAGES)
    if "train" in parts and labelled:
        labels = {
            name: [(item.where, (item.label,)) for item in files.items]
            for name, files in parts.items()
        }
        find_labels(report, labels, "image", FEW, "one_class")
    for earlier, later in combinations(hashed.values(), 2):
        find_leaks(report, earlier, later, IMAGES)
    if "train" in parts:
        train = parts["train"]
        report.sample = train.pick(range(0, len(train), max(1, len(train) // SAMPLE))[:SAMPLE])
    return report.close((*readers, *shares))


def _hashed(name: str, files: ImageFiles) -> Hashed:
    sources = np.array([int(item.source[:16], 16) for item in files.items], np.uint64)
    labels = {label: hash_text(label) for label in {item.label for item in files.items}}
    targets = np.array([labels[item.label] for item in files.items], np.uint64)
    return Hashed(name, sources, targets, lambda row: files.items[row].where)


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
