"""Denoising: clean images to a model that takes noise out of others."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.image_format import SUFFIXES, ImageFormat
from regard.data.photos import Photo, Photos, load_photos
from regard.errors import UsageError
from regard.metrics.image import psnr
from regard.metrics.results import key_of
from regard.metrics.score import compare_means
from regard.modalities.image import IMAGE
from regard.models.protocols import Model
from regard.tasks.frame.answers import Unread
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import SHORT
from regard.tasks.frame.task import Judged, NoCodec, Task
from regard.tasks.vision.noise import (
    FAMILY,
    LOSSES,
    Batch,
    Crops,
    Denoised,
    EvalDenoise,
    LookDenoise,
    RunDenoise,
    TrainDenoise,
    as_image,
    filter_scores,
    image_scores,
    is_image_file,
    with_noise,
    write_image,
)

LEVELS = (15, 25, 50)  # standard deviations of noise, of 255, that are validated on
SIDE = 1024  # pixels to a side that are denoised at once
NOISY = "the noisy images"


def _noisy(photos: Sequence[Photo], level: float, seed: int) -> list[Tensor]:
    """Return photos with Gaussian noise of a level, of 255."""
    return [photo.clean() + level / 255 * photo.noise(seed) for photo in photos]


def _psnr_by_level(
    photos: Sequence[Any], denoise: Callable[[Tensor, float], Tensor]
) -> dict[str, float]:
    """PSNR at some levels of noise, and their mean."""
    scores = {}
    for level in LEVELS:
        sigma, total = level / 255, 0.0
        for photo in photos:
            clean = photo.clean()
            total += float(psnr(denoise(clean + sigma * photo.noise(0), sigma), clean))
        scores[f"psnr_{level}"] = total / len(photos)
    return {"psnr": sum(scores.values()) / len(scores), **scores}


class Denoise(Task[NoCodec, Any]):
    """Take the noise out of images, grey or channel by channel."""

    name, holds, unit, inputs, dynamic = "denoise", "clean images", "images", IMAGE, False
    target = ""
    Train, Run, Eval, Look = TrainDenoise, RunDenoise, EvalDenoise, LookDenoise
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"lr": 0.004, "batch": 8, "steps": 4000},
        "small": {"lr": 0.003, "batch": 16, "steps": 8000},
        "base": {"lr": 0.002, "batch": 16, "steps": 30_000},
        "big": {"lr": 0.001, "batch": 32, "steps": 100_000},
    }
    short = {
        **{key: long for key, long in SHORT.items() if key not in ("feed_forward", "order")},
        "image": "model.image",
        "patch": "model.patch",
        "window": "model.window",
        "look": "model.look",
        "every": "model.every",
        "score": "model.block.score",
    }

    # Training

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse levels of noise out of order."""
        noise = settings.noise
        if len(noise) != 2 or noise[0] > noise[1] or not noise[1]:
            told = ",".join(f"{level:g}" for level in noise)
            raise UsageError(f"noise={told}; expected the least and the largest, such as 5,55")
        return settings

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> Photos:
        """Read grey images to train and to validate on."""
        given = {"valid": settings.valid, "test": settings.test, "broken": settings.broken}
        return load_photos(settings.data, channels=1, **given)

    @classmethod
    def make_codec(cls, data: Photos, settings: Any, learnt: Any, origin: Any) -> NoCodec:
        """Return nothing: images are read as they are."""
        return NoCodec()

    @classmethod
    def make_model(cls, data: Photos, codec: NoCodec, settings: Any, origin: Any) -> Any:
        """Build the denoiser."""
        return FAMILY, cls.build(FAMILY, settings.model, settings, origin)

    def batches(self, data: Photos, settings: Any) -> Crops:
        """Return batches of crops with noise."""
        self.tokens = (settings.model.image // settings.model.patch) ** 2
        self.error = LOSSES[settings.loss]
        return Crops(data["train"], settings)

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the pixels, which the loss counts, and their tokens."""
        return batch.clean.numel(), len(batch.clean) * self.tokens

    def loss(self, batch: Batch, settings: Any) -> Tensor:
        """Return the summed error of all pixels."""
        return self.error(self.model(batch.noisy, batch.sigma) - batch.clean).sum()

    def validate(self, data: Photos, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the PSNR on the validation part at some levels of noise, and their mean."""
        scores = _psnr_by_level(data["valid"], self.clean)
        return {**scores, "better": scores["psnr"]}

    def baselines(self, data: Photos, settings: Any) -> dict[str, dict[str, float]]:
        """PSNR of the validation part with its noise."""
        return {NOISY: _psnr_by_level(data["valid"], lambda noisy, sigma: noisy)}

    def title(self, data: Photos, settings: Any) -> str:
        """Return what the model card says that the model is."""
        low, high = settings.noise
        return f"Takes noise of {low:g} to {high:g} (standard deviation, of 255) out of images"

    def facts(self, data: Photos, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        return {"images": len(data["train"])}

    # Using

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: Mapping[str, Any]) -> NoCodec:
        """Refuse a model that cannot denoise."""
        if config["family"] != FAMILY:
            raise UsageError(
                f"{folder / 'config.json'}: a {config['family']} cannot denoise; expected a "
                "denoiser, trained with: regard train denoise"
            )
        return NoCodec()

    def check_run(self, settings: Any) -> Any:
        """Refuse files that are no images."""
        out = getattr(settings, "out", None)
        suffix = Path(out).suffix.lower() if out else ""
        if suffix and suffix not in SUFFIXES and not Path(str(out)).is_dir():
            raise UsageError(
                f"out={out} is no kind of image that can be written; end it in "
                f"{', '.join(sorted(SUFFIXES))}, or name a folder"
            )
        if getattr(settings, "sigma", None) == ():
            raise UsageError("sigma= names no noise; expected some, such as sigma=15,25,50")
        return settings

    @torch.inference_mode()
    def level(self, image: Tensor) -> float:
        """Estimate the standard deviation of the noise of an image (c, h, w) from 0 to 1."""
        return float(self.model.level(image[:, None].to(self.device)).mean())

    @torch.inference_mode()
    def clean(self, image: Tensor, sigma: float | None = None, side: int = SIDE) -> Tensor:
        """Return an image (c, h, w) from 0 to 1 without its noise of standard deviation sigma.

        A large one is denoised in crops that overlap by as much as the model sees.
        """
        sigma = self.level(image) if sigma is None else sigma
        whole = self.model.whole
        step, rim = (-(-n // whole) * whole for n in (side, self.model.reach))
        high, wide = image.shape[1:]
        clean = torch.empty_like(image)
        for top in range(0, high, step):
            for left in range(0, wide, step):
                up, before = max(0, top - rim), max(0, left - rim)
                crop = image[:, up : top + step + rim, before : left + step + rim]
                made = self.model(crop[:, None].to(self.device), sigma)[:, 0]
                made = made[:, top - up :, left - before :][:, :step, :step]
                clean[:, top : top + step, left : left + step] = made.cpu()
        return clean.clamp_(0, 1)

    def predict(self, inputs: list[Any], settings: Any, *, first: int = 0) -> list[Any]:
        """Denoise images, and write them where told."""
        if settings.out and is_image_file(settings.out) and first + len(inputs) > 1:
            raise UsageError(f"out={settings.out} is one file for several images; name a folder")
        return [self._one(image, n, settings) for n, image in enumerate(inputs, first)]

    def _one(self, image: Any, number: int, settings: Any) -> Denoised | Unread:
        read = IMAGE.read(image, ImageFormat(), settings.broken)
        if isinstance(read, str):
            return Unread(read)
        clean = torch.from_numpy(read).float() / 255
        noisy, sigma = with_noise(clean, settings)
        sigma = self.level(noisy) if sigma is None else sigma
        denoised = self.clean(noisy, sigma)
        pixels, where = as_image(denoised), ""
        if settings.out:
            name = Path(image).stem if isinstance(image, str | Path) else str(number + 1)
            out = Path(settings.out)
            path = out if is_image_file(settings.out) else out / f"{name}.png"
            write_image(pixels, path)
            where = str(path)
        if not settings.noise:
            return Denoised(pixels, 255 * sigma, where)
        before, after = (float(psnr(x, clean)) for x in (noisy, denoised))
        return Denoised(pixels, 255 * sigma, where, before, after)

    # Judging

    def read_test(self, settings: Any) -> Photos:
        """Read clean images."""
        given = {"need": (settings.part,), "broken": settings.broken, "trained": self.trained}
        return load_photos(settings.data, **given)

    def data_hash(self, data: Photos, settings: Any) -> Any:
        """Return the hashes of the images."""
        return [photo.hash for photo in data[settings.part]]

    def predict_examples(self, data: Photos, settings: Any) -> dict[float, list[Tensor]]:
        """Denoise the images of each level."""
        return {
            level: [
                self.clean(image, None if settings.blind else level / 255)
                for image in _noisy(data[settings.part], level, settings.seed)
            ]
            for level in settings.sigma
        }

    def judge(self, data: Photos, predictions: Any, settings: Any) -> Judged:
        """Return PSNR and SSIM at each level, beside those of the noisy images and of filters."""
        photos = data[settings.part]
        clean, scores = [photo.clean() for photo in photos], []
        baseline: dict[str, float] = {}
        for level, images in predictions.items():
            made = f"images:{len(photos)}|sigma:{level:g}|seed:{settings.seed}|noise not clipped"
            scores += image_scores(f"at {level:g}", images, clean, made + "|blind" * settings.blind)
            noisy = _noisy(photos, level, settings.seed)
            scores += image_scores(f"at {level:g} of {NOISY}", noisy, clean, made)
            ours, theirs = scores[-4:-2], scores[-2:]
            pairs = zip(ours, theirs, strict=True)
            baseline |= {key_of(model.name): noise.value for model, noise in pairs}
            if settings.filters:
                scores += filter_scores(settings, level, noisy, clean, made)
        count = len(photos) * len(settings.sigma)
        return Judged(scores, count, {"baselines": {NOISY: baseline}})

    def compare(self, data: Photos, ours: Any, theirs: Any, settings: Any) -> Any:
        """Compare the PSNR of each level by a paired bootstrap."""
        clean, rows = [photo.clean() for photo in data[settings.part]], []
        for level in ours:
            name = f"PSNR at {level:g}"
            mine, other = (
                {name: [float(psnr(*pair)) for pair in zip(side[level], clean, strict=True)]}
                for side in (ours, theirs)
            )
            rows += compare_means(mine, other, settings.samples, unit="images")
        return rows

    def write_outputs(self, data: Photos, predictions: Any, settings: Any) -> None:
        """Write the denoised images into a folder."""
        for level, images in predictions.items():
            photos = zip(data[settings.part], images, strict=True)
            for number, (photo, image) in enumerate(photos, 1):
                name = f"{number}-{Path(photo.where).stem}-{level:g}.png"
                write_image(as_image(image), Path(settings.outputs) / name)

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the levels of noise and their seed."""
        return {"sigma": list(settings.sigma), "seed": settings.seed}

    # Looking

    def explain(self, given: Any, settings: Any) -> Any:
        """Denoise a crop of an image and gather where the pixel in its middle looked."""
        from regard.filters.nonlocal_means import nonlocal_means_weights
        from regard.layers.layout import TokenGrid
        from regard.viewer.image import VIEWS, image_picture, placed_view
        from regard.viewer.picture import Placement

        view = VIEWS[settings.view]
        clean = torch.tensor(ImageFormat(channels=1).read(IMAGE.check(given))).float() / 255
        noisy, sigma = with_noise(clean, settings)
        sigma = self.level(noisy) if sigma is None else sigma
        x, y = _pixel(settings.at, clean.shape[2], clean.shape[1])
        across, down = (_span(at, settings.piece, self.model.whole) for at in (x, y))
        left, top = across.start, down.start
        crop = noisy[:, down, across]
        high, wide = crop.shape[1:]
        with watch(self.model) as maps, torch.inference_mode():
            denoised = self.model(crop[None].to(self.device), sigma)[0].cpu().clamp(0, 1)
        spread = max(sigma, 1 / 255)
        means = nonlocal_means_weights(
            crop, (x - left, y - top), h=spread / 2, noise=spread, window="full"
        )
        grid = TokenGrid((), high, wide, 1 / high, 1 / wide)
        token = np.array([(y - top) * wide + x - left])
        placement = Placement(grid, grid, token, np.arange(high * wide)[None])
        name = Path(given).name if isinstance(given, str | Path) else "image"
        told = f"sigma {255 * sigma:.1f}"
        if settings.noise:
            target = clean[:, down, across]
            told += f", PSNR {psnr(crop, target):.2f} -> {psnr(denoised, target):.2f} dB"
        picture = image_picture(
            view,
            self.model,
            maps,
            (high, wide),
            as_image(crop),
            ((x - left + 0.5) / wide, (y - top + 0.5) / high),
            title=f"{name} at {x},{y}",
            source=name,
            output=told,
            note="non-local means beside what was learned: the weights of one pixel",
        )
        weights = means.numpy().reshape(1, 1, -1)
        by_hand = placed_view("non-local means", weights, placement, heads=("mean",))
        return replace(picture, views=[*picture.views, by_hand])


def _pixel(at: str, wide: int, high: int) -> tuple[int, int]:
    """Read which pixel is asked about."""
    from regard.viewer.placement import parse_query_point

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
