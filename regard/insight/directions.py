"""`regard directions`: directions of a latent space that carry meaning, and how pure they are.

An autoencoder turns an image into a vector and paints an image from one. A direction is found among
the vectors of images (by labels, or by principal components), images are moved along it and painted
again, and a classifier that never saw the autoencoder says what has changed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor
from torch.nn import functional as F

from regard.data.image_files import ImageOptions
from regard.data.images import ImageData, Images, load_images
from regard.errors import UsageError, nearest
from regard.files import cache_folder
from regard.modalities.image import IMAGE
from regard.models.variational import VAE
from regard.settings import fill, setting
from regard.tasks.vision.pretrain import ImageEmbedder
from regard.training.progress import Progress
from regard.viewer.drawing import Drawing, Plot, draw_plots
from regard.viewer.panels import MAX_PANELS

_BATCH = 256
_RANDOM = 8  # directions of the same length that each is compared with


@dataclass(frozen=True)
class DirectionSettings:
    """Settings of directions in a latent space."""

    data: str | None = setting(None, "images in folders of their labels, or a table of them")
    by: str = setting("labels", "how directions are found", choices=lambda: DIRECTIONS)
    start: str | None = setting(
        None, "the label of the images that are moved; else the labels most alike", key="from"
    )
    to: str | None = setting(None, "the label towards which they are moved")
    judge: str | None = setting(None, "a classifier of images that says what has changed")
    count: int = setting(4, "directions", min=1, max=32)
    rows: int = setting(2, "images that are moved along each", min=1, max=16)
    steps: int = setting(7, "images of a film strip", min=3, max=15)
    reach: float = setting(1.5, "how far: 1 is the other label, or 2 deviations", above=0, max=10)
    images: int = setting(2000, "images a label that directions are found with", min=2, max=100_000)
    judged: int = setting(200, "images that a direction is judged by", min=1, max=100_000)
    seed: int = setting(1, "random seed", min=0, max=2**63 - 1)
    names: tuple[str, ...] = setting((), "names of labels that are numbers; else the judge's")
    columns: str | None = setting(None, "path and label in a table, such as 2,1")
    tile: int = setting(32, "pixels of an image in a mosaic", min=1, max=4096)


class Vectors(NamedTuple):
    """The vectors of images and the numbers of their labels."""

    vectors: Tensor  # (n, latent)
    labels: Tensor  # (n,)
    classes: Sequence[str]

    def mean(self, label: int) -> Tensor:
        """Return the mean of the vectors of a label."""
        return self.vectors[self.labels == label].mean(0)


class Direction(NamedTuple):
    """A direction; moving by it once is meant to change one thing.

    `start` is the label of the images that are moved (None: all), `to` the one that they are moved
    to (None: it is not meant to change any), `both` whether it is followed backwards too.
    """

    name: str
    vector: Tensor  # (latent,)
    start: int | None = None
    to: int | None = None
    both: bool = False


def by_labels(known: Vectors, settings: DirectionSettings) -> list[Direction]:
    """Return the differences of the means of two labels, those most alike unless they are named."""
    given = {"from": settings.start, "to": settings.to}
    numbers = {key: _label(key, name, known.classes) for key, name in given.items() if name}
    present = [n for n in range(len(known.classes)) if (known.labels == n).any()]
    means = {n: known.mean(n) for n in present}
    pairs = [pair for a, b in combinations(present, 2) for pair in ((a, b), (b, a))]
    pairs = [
        (a, b)
        for a, b in pairs
        if a == numbers.get("from", a) and b == numbers.get("to", b) and (given["from"] or a > b)
    ]
    if not pairs:
        raise UsageError(
            f"from={settings.start} to={settings.to}: no images of two such labels; choose from "
            f"{', '.join(known.classes)}"
        )
    pairs.sort(key=lambda pair: float((means[pair[1]] - means[pair[0]]).norm()))
    return [
        Direction(f"{known.classes[a]} to {known.classes[b]}", means[b] - means[a], a, b)
        for a, b in pairs[: settings.count]
    ]


def by_components(known: Vectors, settings: DirectionSettings) -> list[Direction]:
    """Return the principal components, two standard deviations long, of all or of one label."""
    start = _label("from", settings.start, known.classes) if settings.start else None
    if settings.to:
        raise UsageError("to= is for by=labels; a component leads to no label")
    some = known.vectors if start is None else known.vectors[known.labels == start]
    if len(some) < 2:
        raise UsageError(f"from={settings.start}: {len(some)} images; expected at least two")
    _, sizes, rows = torch.linalg.svd(some - some.mean(0), full_matrices=False)
    shares = sizes**2 / (sizes**2).sum()
    deviations = sizes / (len(some) - 1) ** 0.5
    return [
        Direction(
            f"component {n + 1}, {100 * float(shares[n]):.0f}%",
            2 * deviations[n] * rows[n],
            start,
            both=True,
        )
        for n in range(min(settings.count, len(rows)))
    ]


# name -> how to find directions among the vectors of images
DIRECTIONS: dict[str, Callable[[Vectors, DirectionSettings], list[Direction]]] = {
    "labels": by_labels,
    "components": by_components,
}


@dataclass(frozen=True)
class Directions(Drawing):
    """What was found: film strips, and how each direction changes what a classifier sees."""

    directions: Sequence[Direction] = field(default=(), repr=False)


def _label(key: str, name: str, classes: Sequence[str]) -> int:
    """Return the number of a label, or refuse it."""
    if name not in classes:
        raise UsageError(
            f"{key}={name}: no such label; choose from {', '.join(classes)}."
            + nearest(name, classes)
        )
    return list(classes).index(name)


class Space:
    """A latent space: images to vectors and back, in the format of an autoencoder."""

    def __init__(self, task: Any):
        encoder = task.predictor
        whole = encoder.whole() if isinstance(encoder, ImageEmbedder) else None
        if not isinstance(whole, VAE):
            raise UsageError(
                "this model paints no image from a vector; train one that does with: regard train "
                "pretrain objective=variational data=..."
            )
        self.model = whole
        self.format, self.device = task.format, task.device

    @torch.inference_mode()
    def encode(self, images: Images, progress: Callable[[int], None] = lambda n: None) -> Tensor:
        """Return the mean of the vector of each image, (n, latent)."""
        found = []
        for rows in np.split(np.arange(len(images)), range(_BATCH, len(images), _BATCH)):
            pixels = self.format.normalise(images.read(rows).to(self.device))
            found.append(self.model.encode(pixels)[0].float().cpu())
            progress(len(rows))
        return torch.cat(found)

    @torch.inference_mode()
    def paint(self, z: Tensor) -> Tensor:
        """Return the bytes (n, c, h, w) of the images of vectors."""
        parts = [self.model.decode(some.to(self.device)).float() for some in z.split(_BATCH)]
        return torch.cat([self.format.restore(part).cpu() for part in parts])


class ImageLabeller:
    """A classifier of images, asked for the probabilities of the labels that directions are of."""

    def __init__(self, task: Any, classes: Sequence[str]):
        theirs = list(getattr(task, "labels", []))
        labels_images = getattr(task, "inputs", None) is IMAGE and bool(theirs)
        if not labels_images or not set(classes) <= set(theirs):
            missing = [name for name in classes if name not in theirs]
            raise UsageError(
                f"judge= knows {', '.join(theirs[:12]) or 'no labels'}; expected a classifier of "
                f"images with the labels of data=, such as {missing[0] if missing else classes[0]}"
            )
        self.task, self.order = task, [theirs.index(name) for name in classes]

    def __call__(self, pixels: Tensor) -> np.ndarray:
        """Return the probability of each label, (n, labels), for bytes (n, c, h, w)."""
        format = self.task.format
        if pixels.shape[1] != format.channels:
            grey = pixels.float().mean(1, keepdim=True)
            pixels = grey.expand(-1, format.channels, -1, -1).round().to(torch.uint8)
        if pixels.shape[-1] != format.size:
            sized = F.interpolate(pixels.float(), (format.size, format.size), mode="bilinear")
            pixels = sized.round().clamp(0, 255).to(torch.uint8)
        judge = self.task
        probs = judge.predictor.probabilities(pixels, judge.predictor.plain)
        return probs[:, self.order]


def purity(before: np.ndarray, after: np.ndarray, start: int, to: int) -> float:
    """Return how many of the images whose label changed from `start` got the label `to`.

    `before` and `after` are the labels (n,) of the same images; if none changed it is 0.
    """
    changed = (before == start) & (after != start)
    return float((after[changed] == to).mean()) if changed.any() else 0.0


def measure(
    direction: Direction, z: Tensor, space: Space, judge: ImageLabeller, generator: torch.Generator
) -> dict[str, float]:
    """Return what a classifier sees change when images are moved by a direction once.

    Beside it the same by random directions of the same length, the mean of several.
    """

    def seen(by: Tensor) -> np.ndarray:
        return judge(space.paint(z + by)).argmax(1)

    before = seen(torch.zeros_like(direction.vector))
    length = direction.vector.norm()
    drawn = torch.randn(_RANDOM, len(direction.vector), generator=generator)
    randoms = [seen(length * F.normalize(row, dim=0)) for row in drawn]
    after = seen(direction.vector)

    def kept(other: np.ndarray) -> float:
        return 100 * float((other == before).mean())

    told = {
        "label kept, %": kept(after),
        "random: kept, %": float(np.mean([kept(other) for other in randoms])),
    }
    start, to = direction.start, direction.to
    if start is None or to is None:
        backwards = seen(-direction.vector)
        return {**told, "backwards: kept, %": kept(backwards)}

    def share(labels: np.ndarray, label: int) -> float:
        return 100 * float((labels == label).mean())

    return {
        "seen as the first, %": share(before, start),
        "moved: as the first, %": share(after, start),
        "moved: as the second, %": share(after, to),
        "random: as the second, %": float(np.mean([share(other, to) for other in randoms])),
        "purity, %": 100 * purity(before, after, start, to),
        "random: purity, %": 100 * float(np.mean([purity(before, x, start, to) for x in randoms])),
        **told,
    }


def times_of(direction: Direction, settings: DirectionSettings) -> Tensor:
    """Return how many times the direction is gone at each image of a film strip."""
    first = -settings.reach if direction.both else 0.0
    return torch.linspace(first, settings.reach, settings.steps)


def find_directions(
    task: Any,
    given: Mapping[str, Any],
    *,
    out: str | Path | None = None,
    load: Callable[[str], Any],
    quiet: bool = False,
) -> Directions:
    """Find directions in the latent space of an autoencoder, and draw images moved along them.

    They are found with the images of the train part; those that are moved are of the validation
    part.
    """
    settings = fill(DirectionSettings, given)
    find = DIRECTIONS[settings.by]
    if out is not None and Path(out).suffix.lower() not in (".png", ".html", ".htm"):
        raise UsageError(f"out={out}: unknown kind of file; end it in .png or .html")
    if settings.data is None:
        raise UsageError("data is missing; name the images, such as data=fashion-mnist")
    if settings.count * settings.rows * settings.steps > MAX_PANELS:
        raise UsageError(
            f"{settings.count} directions x {settings.rows} rows x {settings.steps} steps are too "
            f"many for one picture, which holds {MAX_PANELS} images"
        )
    space = Space(task)
    data = read_labelled(task, settings)
    judge = None
    if settings.judge is not None:
        judging = load(settings.judge)
        name_numbers(data, list(getattr(judging, "labels", [])))
        judge = ImageLabeller(judging, data.classes)
    known, held = (
        at_most(data.parts[name], number, settings.seed)
        for name, number in (("train", settings.images), ("valid", settings.judged))
    )
    with Progress(task.inputs.many, len(known) + len(held), quiet=quiet) as bar:
        vectors = Vectors(space.encode(known, bar.update), known.labels, data.classes)
        starts = Vectors(space.encode(held, bar.update), held.labels, data.classes)
    found = find(vectors, settings)
    generator = torch.Generator().manual_seed(settings.seed)
    rows, headings, numbers = [], [], {}
    for direction in found:
        z = starts.vectors
        z = z if direction.start is None else z[starts.labels == direction.start]
        if not len(z):
            raise UsageError(f"{direction.name}: no image to move in the validation part")
        rows += (strip := strips(direction, z[: settings.rows], space, settings))
        headings += [direction.name, *[""] * (len(strip) - 1)]
        numbers[direction.name] = {"length": float(direction.vector.norm())}
        if judge is not None:
            numbers[direction.name] |= measure(
                direction, z[: settings.judged], space, judge, generator
            )
    title = "Directions of the latent space, by " + settings.by
    notes = notes_of(found, settings)
    size = 1.05, 1.05
    sheet = draw_plots(title, rows, notes=notes, size=size, bare=True, headings=headings)
    drawing = Directions(title, numbers, notes, sheet, directions=found)
    return drawing if out is None else replace(drawing, path=str(drawing.save(out)))


def read_labelled(task: Any, settings: DirectionSettings) -> ImageData:
    """Read images and labels in the format of an autoencoder."""
    options = ImageOptions(columns=settings.columns, names=settings.names, tile=settings.tile)
    return load_images(
        str(settings.data), format=task.format, options=options, cache=cache_folder()
    )


def name_numbers(data: ImageData, names: Sequence[str]) -> None:
    """Give labels that are the numbers 0, 1, ... the names of as many others."""
    if len(names) == len(data.classes) and data.classes == [str(n) for n in range(len(names))]:
        data.classes = list(names)


def at_most(images: Images, count: int, seed: int) -> Images:
    """Return at most so many images of each label, chosen at random, in their order."""
    labels = images.labels.numpy()
    order = np.random.default_rng(seed).permutation(len(images))
    kept = [order[labels[order] == label][:count] for label in np.unique(labels)]
    return images.pick(np.sort(np.concatenate(kept)))


def strips(
    direction: Direction, z: Tensor, space: Space, settings: DirectionSettings
) -> list[list[Plot]]:
    """Return a row of images for each vector, moved along a direction."""
    times = times_of(direction, settings)
    moved = z[:, None] + times[:, None] * direction.vector
    pixels = space.paint(moved.flatten(0, 1)).permute(0, 2, 3, 1).numpy()
    pixels = pixels.repeat(3, -1) if pixels.shape[-1] == 1 else pixels
    pixels = pixels.reshape(len(z), len(times), *pixels.shape[1:])

    def paint(image: np.ndarray) -> Callable[[Axes], None]:
        return lambda axes: axes.imshow(image, interpolation="nearest") and None

    rows = []
    for number, row in enumerate(pixels):
        titles = ["" if number else f"{float(t):+.3g}" for t in times]
        rows.append([Plot(paint(x), t, bare=True) for x, t in zip(row, titles, strict=True)])
    return rows


def notes_of(found: Sequence[Direction], settings: DirectionSettings) -> tuple[str, ...]:
    """Return what is to be said of the picture."""
    how = {
        "labels": "From left to right an image is moved from the mean of one label towards that of "
        "another: 0 is the image as it is painted again, 1 the whole difference.",
        "components": "From left to right an image is moved along a principal component; 1 is two "
        "standard deviations.",
    }.get(settings.by, "")
    judged = (
        f"What changes is measured by {settings.judge} on up to {settings.judged} images that "
        "directions were not found with, beside random directions of the same length."
        if settings.judge
        else "How pure a direction is can be measured by a classifier: judge=MODEL."
    )
    return tuple(filter(None, (how, judged)))
