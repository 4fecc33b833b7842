"""A trained denoiser as its user has it: noisy images in, clean ones out."""

import io
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regard.attention.watch import watch
from regard.data.image import (
    BROKEN,
    MOST_STORED,
    SUFFIXES,
    Broken,
    ImageFormat,
    ImageOptions,
    Images,
    Shelf,
    find_images,
    split_images,
)
from regard.data.split import Split, keys_of, shares_of, unseen
from regard.errors import UsageError, log, lookup
from regard.files import write_atomically
from regard.metrics.bleu import Comparison, Score
from regard.metrics.evaluation import Evaluation, made_here
from regard.metrics.image import psnr, ssim
from regard.metrics.score import compare_means
from regard.settings import fill, setting
from regard.tasks.image_classifier import Unread
from regard.tasks.image_look import check_kind
from regard.tasks.runners import Answer, Runner
from regard.training.progress import Progress
from regard.viewer.placement import parse_query_point

SIDE = 1024  # pixels to a side that are denoised at once


# Sets of images, each of its own size


class Photo(NamedTuple):
    """An image of a set: where it is, a hash of its file, and its bytes (c, h, w)."""

    where: str
    hash: str
    pixels: Tensor

    def clean(self) -> Tensor:
        """Return it with numbers from 0 to 1."""
        return self.pixels.float() / 255

    def noise(self, seed: int) -> Tensor:
        """Return noise of spread one, the same whoever asks for it."""
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


# Running


@dataclass(frozen=True)
class DenoiseRunSettings:
    """How to take the noise out of images."""

    sigma: float | None = setting(
        None, "spread of the noise, of 255; estimated unless told", min=0, max=255
    )
    noise: float = setting(0.0, "noise to add first, to an image that is clean", min=0, max=255)
    seed: int = setting(0, "of the noise that is added", min=0, max=2**62)
    out: str | None = setting(None, "the image to write, or a folder for several")
    broken: str = setting("refuse", "a file that cannot be read: refuse it or skip it")
    threads: int | None = setting(None, "processor threads", min=1, max=1024)


@dataclass(frozen=True)
class DenoiseEvalSettings:
    """What to judge on, and how."""

    data: str | None = setting(None, "a folder of clean images")
    part: str = setting("test", "test, valid or train")
    sigma: tuple[float, ...] = setting((25.0,), "spread of the noise, of 255", above=0, max=255)
    seed: int = setting(0, "of the noise", min=0, max=2**62)
    blind: bool = setting(False, "let the model estimate the noise")
    filters: str | None = setting(
        None, "compare with filters made by hand, tuned on the images of this folder"
    )
    outputs: str | None = setting(None, "a folder for the images without noise")
    tuned_on: int = setting(12, "images of that folder to tune filters on", min=1, max=10_000)
    samples: int = setting(1000, "of the bootstrap", min=100, max=100_000)
    broken: str = setting("refuse", "a file that cannot be read: refuse it or skip it")
    threads: int | None = setting(None, "processor threads", min=1, max=1024)


@dataclass(frozen=True)
class DenoiseLookSettings:
    """What to see of how a pixel is denoised."""

    view: str = setting("attention", "attention, or rollout (up to each layer)")
    at: str = setting("middle", "who looks: middle, or a pixel x,y of the photo")
    piece: int = setting(64, "pixels to a side of the piece around it", min=8, max=512)
    sigma: float | None = setting(
        None, "spread of the noise, of 255; estimated unless told", min=0, max=255
    )
    noise: float = setting(0.0, "noise to add first, to an image that is clean", min=0, max=255)
    seed: int = setting(0, "of the noise that is added", min=0, max=2**62)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)


@dataclass(frozen=True, eq=False)
class Denoised(Answer):
    """A clean image, bytes (h, w) or (h, w, 3), with the spread that its noise was taken to have.

    If noise was added first, `before` and `after` are the PSNR of the image with and without it.
    """

    pixels: np.ndarray
    sigma: float
    where: str = ""  # the file it was written to
    before: float | None = None
    after: float | None = None

    def __str__(self) -> str:
        told = f"sigma {self.sigma:.1f}"
        if self.after is not None:
            told += f", PSNR {self.before:.2f} -> {self.after:.2f} dB"
        return f"{self.where}\t{told}" if self.where else f"{told}; give out= to write the image"

    def lines(self, how: DenoiseRunSettings) -> Iterator[str]:
        """Tell of the image in one line."""
        yield str(self)

    def record(self, how: DenoiseRunSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        told: dict[str, Any] = {"out": self.where or None, "sigma": self.sigma}
        if self.after is not None:
            told |= {"noisy_psnr": self.before, "psnr": self.after}
        return told


class ImageDenoiser(Runner[Denoised | Unread]):
    """A model that takes the noise out of images, grey or channel by channel."""

    task = "denoise"
    reads = "image"  # the name of an input in JSON
    settings = DenoiseRunSettings
    eval_settings = DenoiseEvalSettings
    look_settings = DenoiseLookSettings

    def __init__(self, model: Any):
        self.model = model
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "ImageDenoiser":
        """Take a loaded model that denoises."""
        if config["family"] != "denoiser":
            raise UsageError(
                f"{folder / 'config.json'}: a {config['family']} cannot denoise; expected a "
                "denoiser, trained with: regard train denoise"
            )
        return cls(model)

    def check(self, settings: dict[str, Any]) -> DenoiseRunSettings:
        """Make full settings of what a user gave."""
        how = fill(DenoiseRunSettings, settings)
        lookup("broken", how.broken, BROKEN)
        suffix = Path(how.out).suffix.lower() if how.out else ""
        if suffix and suffix not in SUFFIXES and not Path(str(how.out)).is_dir():
            raise UsageError(
                f"out={how.out} is no kind of image that can be written; end it in "
                f"{', '.join(sorted(SUFFIXES))}, or name a folder"
            )
        return how

    @torch.inference_mode()
    def level(self, image: Tensor) -> float:
        """Estimate the spread of the noise of an image (c, h, w) from 0 to 1."""
        return float(self.model.level(image[:, None].to(self.device)).mean())

    @torch.inference_mode()
    def clean(self, image: Tensor, sigma: float | None = None, side: int = SIDE) -> Tensor:
        """Return an image (c, h, w) from 0 to 1 without its noise, of the spread sigma.

        A large one is denoised in pieces that overlap by as much as the model sees.
        """
        sigma = self.level(image) if sigma is None else sigma
        whole = self.model.whole
        step, rim = (-(-n // whole) * whole for n in (side, self.model.reach))
        high, wide = image.shape[1:]
        found = torch.empty_like(image)
        for top in range(0, high, step):
            for left in range(0, wide, step):
                up, before = max(0, top - rim), max(0, left - rim)
                piece = image[:, up : top + step + rim, before : left + step + rim]
                made = self.model(piece[:, None].to(self.device), sigma)[:, 0]
                made = made[:, top - up :, left - before :][:, :step, :step]
                found[:, top : top + step, left : left + step] = made.cpu()
        return found.clamp_(0, 1)

    def answer(
        self, inputs: list[Any], *, first: int = 0, **settings: Any
    ) -> list[Denoised | Unread]:
        """Denoise images: paths, open images, or arrays (h, w) or (h, w, 3) of bytes."""
        how = self.check(settings)
        if how.threads:
            torch.set_num_threads(how.threads)
        if how.out and _is_file(how.out) and first + len(inputs) > 1:
            raise UsageError(f"out={how.out} is one file for several images; name a folder")
        return [self._one(image, n, how) for n, image in enumerate(inputs, first)]

    def _one(self, image: Any, number: int, how: DenoiseRunSettings) -> Denoised | Unread:
        check_kind(image)
        try:
            pixels = torch.tensor(ImageFormat().read(image))
        except Broken as mistake:
            if how.broken == "refuse":
                raise UsageError(f"{mistake}; or pass over such files: broken=skip") from None
            log(str(mistake))
            return Unread(str(mistake))
        clean = pixels.float() / 255
        noisy, sigma = _noisy(clean, how)
        sigma = self.level(noisy) if sigma is None else sigma
        found = self.clean(noisy, sigma)
        written = as_image(found)
        where = ""
        if how.out:
            named = Path(image).stem if isinstance(image, str | Path) else str(number + 1)
            path = Path(how.out) if _is_file(how.out) else Path(how.out) / f"{named}.png"
            write_image(written, path)
            where = str(path)
        if not how.noise:
            return Denoised(written, 255 * sigma, where)
        before, after = (float(psnr(x, clean)) for x in (noisy, found))
        return Denoised(written, 255 * sigma, where, before, after)

    # Judging

    def evaluate(
        self,
        settings: dict[str, Any],
        *,
        against: "ImageDenoiser | None" = None,
        names: tuple[str, str] = ("model", ""),
    ) -> Evaluation:
        """Add noise to clean images, take it out again, and tell PSNR and SSIM."""
        how = fill(DenoiseEvalSettings, settings)
        if how.data is None:
            raise UsageError("data is missing; add data=FOLDER with clean images")
        if not how.sigma:
            raise UsageError("sigma= names no spread; expected some, such as sigma=15,25,50")
        lookup("part", how.part, {"test": 0, "valid": 0, "train": 0})
        if against is not None and not isinstance(against, ImageDenoiser):
            raise UsageError("against= names a model of another task; compare denoisers")
        if how.threads:
            torch.set_num_threads(how.threads)
        notes: list[str] = []
        shelf = shelf_of(how.data, how.part, how.broken)
        if self.trained is not None:
            places = {item.where: row for row, item in enumerate(shelf.items)}
            some = unseen(shelf.items, how.part, self.trained, how.data, "images", notes)
            shelf = _shelf(_all_of(shelf).pick([places[item.where] for item in some]))
        photos = read_photos(shelf, None, how.broken, notes)
        scores, comparison, seconds = [], [], 0.0
        for level in how.sigma:
            sigma = level / 255
            pairs = [(p.clean() + sigma * p.noise(how.seed), p.clean()) for p in photos]
            told = None if how.blind else sigma
            started = time.perf_counter()
            cleaned = [self.clean(noisy, told) for noisy, _ in pairs]
            mine = judged(cleaned, pairs)
            seconds += time.perf_counter() - started
            for number, image in enumerate(cleaned if how.outputs else []):
                name = f"{number + 1}-{Path(photos[number].where).stem}-{level:g}.png"
                write_image(as_image(image), Path(str(how.outputs)) / name)
            before = judged([noisy for noisy, _ in pairs], pairs)
            made = f"images:{len(photos)}|sigma:{level:g}|seed:{how.seed}|noise not clipped"
            scores += told_of(f"at {level:g}", mine, made + "|blind" * how.blind)
            scores += told_of(f"at {level:g} of the noisy images", before, made)
            if how.filters:
                scores += self._filters(how, level, pairs, made)
            if against is not None:
                theirs = judged([against.clean(noisy, told) for noisy, _ in pairs], pairs)
                comparison.append(compared(mine[0], theirs[0], f"PSNR at {level:g}", how.samples))
        made_with = {
            "data": how.data,
            "part": how.part,
            "data_hash": [photo.hash for photo in photos],
            "sigma": list(how.sigma),
            "seed": how.seed,
            **made_here(),
        }
        return Evaluation(
            names[0],
            scores,
            len(photos) * len(how.sigma),
            seconds,
            made_with,
            names[1] or None,
            comparison,
            "images",
            notes=notes,
        )

    def _filters(
        self,
        how: DenoiseEvalSettings,
        level: float,
        pairs: Sequence[tuple[Tensor, Tensor]],
        made: str,
    ) -> list[Score]:
        """Return the scores of all filters made by hand, with what was found best for each."""
        from regard.filters import FILTERS
        from regard.filters.tuned import GRIDS, tuned

        assert how.filters is not None
        shelf = shelf_of(how.filters, "train", how.broken)
        order = sorted(range(len(shelf)), key=lambda i: shelf.items[i].source)[: how.tuned_on]
        some = Shelf([shelf.items[i] for i in order], _some(shelf.array, order))
        known = [
            (photo.clean() + level / 255 * photo.noise(how.seed + 1), photo.clean())
            for photo in read_photos(some, None, how.broken, [])
        ]
        scores = []
        with Progress(f"filters at {level:g}", len(GRIDS)) as bar:
            for name in GRIDS:
                best = tuned(name, level / 255, known)
                made_of = [FILTERS[name](noisy, **best).clamp(0, 1) for noisy, _ in pairs]
                told = "|".join(f"{key}:{_short(value)}" for key, value in best.items())
                words = f"{made}|{told}|tuned on {len(known)} images of {Path(how.filters).name}"
                scores += told_of(f"at {level:g} of {name}", judged(made_of, pairs), words)
                bar.update(1)
        return scores

    # Looking

    def picture(self, image: Any, **settings: Any):
        """Denoise a piece of an image and gather where the pixel in its middle looked."""
        from regard.filters.nonlocal_means import nonlocal_means_weights
        from regard.viewer.image import VIEWS, image_picture, placed_view
        from regard.viewer.picture import Placement, TokenGrid

        how = fill(DenoiseLookSettings, settings)
        view = lookup("view", how.view, {name: VIEWS[name] for name in ("attention", "rollout")})
        check_kind(image)
        if how.threads:
            torch.set_num_threads(how.threads)
        clean = torch.tensor(ImageFormat(channels=1).read(image)).float() / 255
        noisy, sigma = _noisy(clean, how)
        sigma = self.level(noisy) if sigma is None else sigma
        x, y = _pixel(how.at, clean.shape[2], clean.shape[1])
        across, down = (_span(at, how.piece, self.model.whole) for at in (x, y))
        left, top = across.start, down.start
        piece = noisy[:, down, across]
        high, wide = piece.shape[1:]
        with watch(self.model) as maps, torch.inference_mode():
            found = self.model(piece[None].to(self.device), sigma)[0].cpu().clamp(0, 1)
        spread = max(sigma, 1 / 255)
        means = nonlocal_means_weights(
            piece, (x - left, y - top), h=spread / 2, noise=spread, window="full"
        )
        grid = TokenGrid((), high, wide, 1 / high, 1 / wide)
        token = np.array([(y - top) * wide + x - left])
        placement = Placement(grid, grid, token, np.arange(high * wide)[None])
        name = Path(image).name if isinstance(image, str | Path) else "image"
        told = f"sigma {255 * sigma:.1f}"
        if how.noise:
            meant = clean[:, down, across]
            told += ", PSNR {:.2f} -> {:.2f} dB".format(*(psnr(a, meant) for a in (piece, found)))
        picture = image_picture(
            view,
            self.model,
            maps,
            (high, wide),
            as_image(piece),
            ((x - left + 0.5) / wide, (y - top + 0.5) / high),
            title=f"{name} at {x},{y}",
            source=name,
            output=told,
            note="non-local means beside what was learned: the weights of one pixel",
        )
        weights = means.numpy().reshape(1, 1, -1)
        by_hand = placed_view("non-local means", weights, placement, heads=("mean",))
        return replace(picture, views=[*picture.views, by_hand])


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _pixel(at: str, wide: int, high: int) -> tuple[int, int]:
    """Read which pixel is asked about."""
    if at.strip().lower() == "middle":
        return wide // 2, high // 2
    if not re.match(r"\s*\d", at):
        raise UsageError(f"at={at:.40}; expected middle, or a pixel such as at=120,80")
    point = parse_query_point(at, (wide, high), (0, 0, wide, high))
    assert isinstance(point, tuple)
    return int(point[0] * wide), int(point[1] * high)


def _span(at: int, piece: int, whole: int) -> slice:
    """Return what is around a pixel, cut where windows of the whole image are."""
    first, last = max(0, at - piece // 2) // whole, -(-(at + piece // 2) // whole)
    return slice(first * whole, max(first + 1, last) * whole)


def _noisy(
    clean: Tensor, how: DenoiseRunSettings | DenoiseLookSettings
) -> tuple[Tensor, float | None]:
    """Return an image with the noise that is to be added, and its spread if that is known."""
    sigma = None if how.sigma is None else how.sigma / 255
    if not how.noise:
        return clean, sigma
    noise = noise_of("0", tuple(clean.shape), how.seed)
    return clean + how.noise / 255 * noise, how.noise / 255 if sigma is None else sigma


def _is_file(out: str) -> bool:
    return Path(out).suffix.lower() in SUFFIXES and not Path(out).is_dir()


def as_image(image: Tensor) -> np.ndarray:
    """Return an image (c, h, w) from 0 to 1 as bytes (h, w) or (h, w, 3)."""
    pixels = (255 * image).round().clamp(0, 255).to(torch.uint8)
    return (pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).numpy()


def write_image(pixels: np.ndarray, path: Path) -> None:
    """Write bytes as an image of the kind that the name says."""
    stream = io.BytesIO()
    kind = Image.registered_extensions()[path.suffix.lower()]
    Image.fromarray(pixels).save(stream, kind)
    write_atomically(path, stream.getvalue())


# Scores


def judged(
    found: Sequence[Tensor], pairs: Sequence[tuple[Tensor, Tensor]]
) -> tuple[list[float], list[float]]:
    """Return PSNR and SSIM of each image."""
    both = [(x, clean) for x, (_, clean) in zip(found, pairs, strict=True)]
    return [float(psnr(*two)) for two in both], [float(ssim(*two)) for two in both]


def told_of(name: str, found: tuple[list[float], list[float]], made: str) -> list[Score]:
    """Return the mean PSNR and SSIM over images."""
    means = [sum(values) / len(values) for values in found]
    return [Score(f"PSNR {name}", means[0], made), Score(f"SSIM {name}", means[1], made, 4)]


def compared(ours: list[float], theirs: list[float], name: str, samples: int) -> Comparison:
    """Compare two models on the same images by paired bootstrap resampling."""
    return compare_means({name: ours}, {name: theirs}, samples, unit="images")[0]
