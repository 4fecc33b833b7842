"""A look over images before they are learnt from: what is wrong, where, and what to do."""

from collections import Counter
from collections.abc import Mapping
from itertools import combinations

from regard.data.image import Shelf, settle
from regard.data.image_files import ImageOptions, find_image_parts
from regard.data.image_format import ImageFormat
from regard.errors import UsageError
from regard.examine.pairs import LEVELS, Finding, ImageCounts, Report, no_valid, plural
from regard.training.progress import Progress

FEW = 10  # images of a class that can hardly be learnt from
UNEVEN = 10  # times as many images of one class as of another
SMALL = 8  # pixels of a side that shows hardly anything
MEANT = "nothing, if that is meant"


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
) -> Report:
    """Look over all parts of a set of images and report what is wrong, where, and the remedy."""
    options = ImageOptions(columns, broken="skip", labelled=labelled, header=header, most=most)
    readers, shares = find_image_parts(data, valid, test, options)
    if not readers:
        raise UsageError(f"{data}: no train, valid or test part in it; name a folder of it")
    report, shelves = Report(data), {}
    counts: dict[str, ImageCounts] = {}
    report.parts, found = counts, report.findings
    format = ImageFormat()
    for name in (part for part in ("train", "valid", "test") if part in readers):
        shelf = readers[name](options)
        total = max(shelf.total, len(shelf))
        found += [Finding("note", note, data, MEANT, "note") for note in shelf.notes]
        shelf = _readable(name, shelf, quiet)
        if shelf.bad:
            count = len(shelf.bad)
            what = f"{plural(count, 'file')} of {name} cannot be read; the first: {shelf.bad[0]}"
            remedy = "repair or remove them, or leave them out with broken=skip"
            found.append(Finding("error", what, data, remedy, "broken", count))
        if not len(shelf):
            what, remedy = f"no image of {name} can be read", "give images that open"
            found.append(Finding("error", what, data, remedy, "no_images"))
            continue
        told: list[str] = []
        format = settle(format, shelf, told)
        assert format.size is not None and format.channels is not None
        found += [Finding("note", note, data, MEANT, "sizes") for note in told]
        classes = Counter(item.label for item in shelf.items if labelled)
        classes = dict(classes.most_common())
        sizes = len(shelf.bad), classes, len(shelf.sizes), format.size, format.channels
        counts[name], shelves[name] = ImageCounts(len(shelf), *sizes, total), shelf
        found += _small_findings(name, shelf, data) + _copy_findings(name, shelf)
    if "train" in counts and labelled:
        found += _class_findings(data, shelves, counts)
    for earlier, later in combinations(shelves, 2):
        found += _leak_findings(earlier, shelves[earlier], later, shelves[later])
    if "train" in counts and "valid" not in (*readers, *shares):
        what = no_valid(counts["train"].total)
        remedy = "nothing, or give your own with valid="
        found.append(Finding("note", what, data, remedy, "no_valid"))
    found.sort(key=lambda finding: LEVELS.index(finding.level))
    return report


def _readable(name: str, shelf: Shelf, quiet: bool) -> Shelf:
    """Return the images that can be read to their end, and why the others cannot."""
    if shelf.array is not None:
        return shelf
    items, bad = [], list(shelf.bad)
    with Progress(name, len(shelf), quiet=quiet) as bar:
        for item, image in zip(shelf.items, shelf.decode(ImageFormat(8, 3), "skip"), strict=True):
            if isinstance(image, str):
                bad.append(image)
            else:
                items.append(item)
            bar.update(1)
    whole = Shelf(items)
    whole.bad, whole.sizes, whole.grey = bad, shelf.sizes, shelf.grey
    return whole


def _small_findings(name: str, shelf: Shelf, data: str) -> list[Finding]:
    """Tell of images that show hardly anything."""
    least = min(shelf.sizes, key=min)
    if min(least) >= SMALL:
        return []
    what = f"images of {name} as small as {least[0]} x {least[1]} pixels"
    return [Finding("warning", what, data, "remove what shows nothing", "small")]


def _copy_findings(name: str, shelf: Shelf) -> list[Finding]:
    """Tell of images that are in a part twice, under one label or under several."""
    first: dict[str, int] = {}
    again: list[tuple[int, int]] = []
    for row, item in enumerate(shelf.items):
        if (earlier := first.setdefault(item.source, row)) != row:
            again.append((row, earlier))
    findings = []
    alike = [(a, b) for a, b in again if shelf.items[a].label == shelf.items[b].label]
    torn = [(a, b) for a, b in again if shelf.items[a].label != shelf.items[b].label]
    if alike:
        (row, earlier), share = alike[0], len(alike) / len(shelf)
        level = "warning" if share > 0.01 else "note"
        what = (
            f"{plural(len(alike), 'image')} of {name} ({share:.1%}) there already; the first is "
            f"{shelf.items[earlier].where}"
        )
        remedy = "remove the copies, unless they are to count more"
        where = shelf.items[row].where
        findings.append(Finding(level, what, where, remedy, "duplicate_image", len(alike)))
    if torn:
        one, other = (shelf.items[row] for row in torn[0])
        what = (
            f"{plural(len(torn), 'image')} of {name} there already under another label; the first "
            f"is '{one.label}' here and '{other.label}' as {other.where}"
        )
        remedy = "keep the right label of each; nothing can be learnt from both"
        findings.append(Finding("warning", what, one.where, remedy, "torn_label", len(torn)))
    return findings


def _class_findings(
    data: str, shelves: Mapping[str, Shelf], counts: Mapping[str, ImageCounts]
) -> list[Finding]:
    """Tell of classes that are missing, hardly there, or far more frequent than others."""
    findings, known = [], counts["train"].classes
    if len(known) == 1:
        what, remedy = f"all images of train are '{next(iter(known))}'", "add another class"
        findings.append(Finding("error", what, data, remedy, "one_class"))
    for name, shelf in shelves.items():
        strange = [item for item in shelf.items if item.label not in known]
        if strange:
            what = (
                f"{plural(len(strange), 'image')} of {name} under a label that train has not, "
                f"such as '{strange[0].label}'"
            )
            remedy = "add images of it to train, or remove them"
            where = strange[0].where
            findings.append(Finding("error", what, where, remedy, "unknown_label", len(strange)))
    ordered = list(known.items())  # the most frequent first
    (most, many), (least, few) = ordered[0], ordered[-1]
    rare = [label for label, count in known.items() if count < FEW]
    if rare:
        what = (
            f"fewer than {FEW} images in train of {plural(len(rare), 'label')}, '{least}' the least"
        )
        remedy = "add some, join it with another class, or begin from a trained model with init="
        findings.append(Finding("warning", what, data, remedy, "rare_label", len(rare)))
    if many > UNEVEN * few:
        what = f"{many:,} images of '{most}' in train, {few:,} of '{least}'"
        remedy = "judge by macro F1 rather than by accuracy, or even them out"
        findings.append(Finding("note", what, data, remedy, "uneven_labels"))
    return findings


def _leak_findings(earlier: str, before: Shelf, later: str, after: Shelf) -> list[Finding]:
    """Tell of images of a later part that are in an earlier one too."""
    known = {item.source: item.where for item in before.items}
    shared = [item for item in after.items if item.source in known]
    if not shared:
        return []
    what = (
        f"{plural(len(shared), 'image')} of {later} ({len(shared) / len(after):.1%}) also in "
        f"{earlier}; the first is {known[shared[0].source]}"
    )
    remedy = f"remove them from {earlier}, else scores on {later} are too good"
    return [Finding("warning", what, shared[0].where, remedy, "leak_image", len(shared))]
