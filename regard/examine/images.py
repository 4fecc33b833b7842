"""A look over images before they are trained on: what is wrong, where, and what to do."""

from collections import Counter
from dataclasses import dataclass

from regard.data.image_files import ImageFiles, ImageOptions, find_image_parts
from regard.data.image_format import ImageFormat
from regard.data.images import settle_format
from regard.errors import UsageError
from regard.examine.report import (
    IMAGES,
    MEANT,
    USUAL,
    DataReport,
    ExamineOptions,
    compare_items,
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
    data: str, given: ExamineOptions = USUAL, *, labelled: bool = True
) -> DataReport:
    """Look over all parts of a set of images and report what is wrong, where, and the remedy."""
    how = {"header": given.header, "most": given.most, "labelled": labelled}
    options = ImageOptions(given.columns, broken="skip", **how)
    readers, shares = find_image_parts(data, given.valid, given.test, options)
    if not readers:
        raise UsageError(f"{data}: no train, valid or test part in it; name a folder of it")
    report, parts = DataReport(data), {}
    format = ImageFormat()
    for name in (part for part in ("train", "valid", "test") if part in readers):
        files = readers[name]()
        total = max(files.total, len(files))
        for note in files.notes:
            report.add("note", "note", data, note, MEANT)
        files = _readable(name, files, given.quiet)
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
    items = {name: files.items for name, files in parts.items()}
    compare_items(report, items, IMAGES, FEW if labelled else 0)
    if "train" in parts:
        train = parts["train"]
        report.sample = train.pick(range(0, len(train), max(1, len(train) // SAMPLE))[:SAMPLE])
    return report.close((*readers, *shares))


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
