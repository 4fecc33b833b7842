"""Denoising: clean images to a model that takes noise out of others."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.data.image_format import ImageFormat
from regard.data.photos import Photo, Photos, load_photos
from regard.errors import UsageError
from regard.metrics.image import psnr
from regard.metrics.results import key_of
from regard.metrics.score import Comparison, compare_means
from regard.modalities.base import One
from regard.modalities.image import IMAGE
from regard.models.protocols import Model
from regard.tasks.frame.answers import Unread
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import SHORT_KEYS
from regard.tasks.parts import (
    Judge,
    Learnt,
    Lesson,
    NoCodec,
    Objective,
    Predictor,
    ScoredPredictions,
    System,
    Task,
    V,
    build_model,
)
from regard.tasks.runner import Runner
from regard.tasks.vision.noise import (
    DENOISER,
    PIXEL_LOSSES,
    Denoised,
    EvalDenoise,
    LookDenoise,
    NoisyCrops,
    RunDenoise,
    TrainDenoise,
    as_image,
    filter_scores,
    image_scores,
    with_noise,
)
from regard.tasks.vision.written import check_count, check_out, write_answer, write_image
from regard.viewer.picture import Picture

_LEVELS = (15, 25, 50)  # standard deviations of the noise (0 to 255), that are validated on
_SIDE = 1024  # pixels to a side that are denoised at once
_NOISY = "the noisy images"


def _noisy(photos: Sequence[Photo], level: float, seed: int) -> list[Tensor]:
    """Photos with Gaussian noise of a level, of 255."""
    return [photo.clean() + level / 255 * photo.noise(seed) for photo in photos]


def _psnr_by_level(
    photos: Sequence[Photo], denoise: Callable[[Tensor, float], Tensor]
) -> dict[str, float]:
    """PSNR at some levels of noise, and their mean."""
    scores = {}
    for level in _LEVELS:
        sigma, total = level / 255, 0.0
        for photo in photos:
            clean = photo.clean()
            total += float(psnr(denoise(clean + sigma * photo.noise(0), sigma), clean))
        scores[f"psnr_{level}"] = total / len(photos)
    return {"psnr": sum(scores.values()) / len(scores), **scores}


class DenoiseObjective(Objective[TrainDenoise, Photos, NoCodec]):
    """Learns to take Gaussian noise of many levels out of crops of grey images."""

    Settings = TrainDenoise
    sizes = {
        "tiny": {"lr": 0.004, "batch": 8, "steps": 4000},
        "small": {"lr": 0.003, "batch": 16, "steps": 8000},
        "base": {"lr": 0.002, "batch": 16, "steps": 30_000},
        "big": {"lr": 0.001, "batch": 32, "steps": 100_000},
    }
    short = {
        **{key: long for key, long in SHORT_KEYS.items() if key not in ("feed_forward", "order")},
        "image": "model.image",
        "patch": "model.patch",
        "window": "model.window",
        "look": "model.look",
        "every": "model.every",
        "score": "model.block.score",
    }

    def resolve(self, task: Task, values: Mapping[str, Any], origin: Origin | None) -> TrainDenoise:
        """Settings whose levels of noise are in order."""
        settings = super().resolve(task, values, origin)
        noise = settings.noise
        if len(noise) != 2 or noise[0] > noise[1] or not noise[1]:
            told = ",".join(f"{level:g}" for level in noise)
            raise UsageError(f"noise={told}; expected the least and the largest, such as 5,55")
        return settings

    def read(self, settings: TrainDenoise, origin: Origin | None) -> Photos:
        """Grey images to train and to validate on."""
        given = {"valid": settings.valid, "test": settings.test, "broken": settings.broken}
        return load_photos(str(settings.data), channels=1, **given)

    def codec(
        self, data: Photos, settings: TrainDenoise, learnt: Learnt, origin: Origin | None
    ) -> NoCodec:
        """Nothing: images are read as they are."""
        return NoCodec()

    def model(
        self, data: Photos, codec: NoCodec, settings: TrainDenoise, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """The denoiser."""
        return DENOISER, build_model(DENOISER, settings.model, settings, origin)

    def lesson(self, runner: Runner[Any], data: Photos, settings: TrainDenoise) -> Lesson:
        """Batches of crops with noise, and the error of their pixels."""
        model, error = runner.model, PIXEL_LOSSES[settings.loss]
        tokens = (settings.model.image // settings.model.patch) ** 2
        low, high = settings.noise

        def validate(share: float) -> dict[str, float]:
            scores = _psnr_by_level(data["valid"], runner.predictor.clean)
            return {**scores, "better": scores["psnr"]}

        return Lesson(
            batches=NoisyCrops(data["train"], settings),
            count=lambda batch: (batch.clean.numel(), len(batch.clean) * tokens),
            loss=lambda batch: error(model(batch.noisy, batch.sigma) - batch.clean).sum(),
            validate=validate,
            title=f"Takes noise of {low:g} to {high:g} (standard deviation, of 255) out of images",
            facts={"images": len(data["train"])},
            baselines=lambda: {_NOISY: _psnr_by_level(data["valid"], lambda noisy, sigma: noisy)},
            dynamic=False,
        )


class ImageDenoiser(Predictor[Denoised | Unread, RunDenoise, LookDenoise]):
    """Takes the noise out of images, grey or channel by channel."""

    Settings, Look = RunDenoise, LookDenoise

    def check(self, settings: V) -> V:
        """Refuse files to write that are no images."""
        check_out(settings.out if isinstance(settings, RunDenoise) else None)
        return settings

    @torch.inference_mode()
    def level(self, image: Tensor) -> float:
        """Estimated standard deviation of the noise of an image (c, h, w) from 0 to 1."""
        return float(self.model.level(image[:, None].to(self.device)).mean())

    @torch.inference_mode()
    def clean(self, image: Tensor, sigma: float | None = None, side: int = _SIDE) -> Tensor:
        """An image (c, h, w) from 0 to 1 without its noise of standard deviation sigma.

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

    def predict(self, inputs: list[One], settings: RunDenoise, *, first: int = 0) -> list[Any]:
        """Denoise images, and write them where told."""
        check_count(settings.out, first + len(inputs))
        return [self._one(image, n, settings) for n, image in enumerate(inputs, first)]

    def _one(self, image: One, number: int, settings: RunDenoise) -> Denoised | Unread:
        read = IMAGE.read(image, ImageFormat(), settings.broken)
        if isinstance(read, str):
            return Unread(read)
        clean = torch.from_numpy(read).float() / 255
        noisy, sigma = with_noise(clean, settings)
        sigma = self.level(noisy) if sigma is None else sigma
        denoised = self.clean(noisy, sigma)
        pixels = as_image(denoised)
        where = write_answer(pixels, settings.out, image, number)
        if not settings.noise:
            return Denoised(pixels, 255 * sigma, where)
        before, after = (float(psnr(x, clean)) for x in (noisy, denoised))
        return Denoised(pixels, 255 * sigma, where, before, after)

    def explain(self, given: One, settings: LookDenoise) -> Picture:
        """Denoise a crop of an image and gather where the pixel in its middle looked."""
        from regard.filters.nonlocal_means import nonlocal_means_weights
        from regard.layers.layout import TokenGrid
        from regard.viewer.image import VIEWS, image_picture, placed_view
        from regard.viewer.picture import Placement

        view = VIEWS[settings.view]
        clean = torch.tensor(ImageFormat(channels=1).read(given)).float() / 255
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


class DenoiseJudge(Judge[Photos, EvalDenoise, dict[float, list[Tensor]]]):
    """Judges images that noise was added to by how near they come to what they were."""

    Settings = EvalDenoise

    def entrants(
        self, runners: Sequence[Runner[Any]], settings: EvalDenoise, given: Mapping[str, Any]
    ) -> list[tuple[Runner[Any], EvalDenoise]]:
        """Models that are judged by some noise."""
        if not settings.sigma:
            raise UsageError("sigma= names no noise; expected some, such as sigma=15,25,50")
        return super().entrants(runners, settings, given)

    def read(self, runner: Runner[Any], settings: EvalDenoise) -> Photos:
        """Clean images."""
        given = {"need": (settings.part,), "broken": settings.broken, "trained": runner.trained}
        return load_photos(str(settings.data), **given)

    def predict(
        self, runner: Runner[Any], data: Photos, settings: EvalDenoise, like: Any = None
    ) -> dict[float, list[Tensor]]:
        """Denoised images of each level."""
        return {
            level: [
                runner.predictor.clean(image, None if settings.blind else level / 255)
                for image in _noisy(data[settings.part], level, settings.seed)
            ]
            for level in settings.sigma
        }

    def score(
        self,
        runner: Runner[Any],
        data: Photos,
        predictions: dict[float, list[Tensor]],
        settings: EvalDenoise,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """PSNR and SSIM at each level, beside those of the noisy images and of filters."""
        photos = data[settings.part]
        clean, scores = [photo.clean() for photo in photos], []
        baseline: dict[str, float] = {}
        for level, images in predictions.items():
            made = f"images:{len(photos)}|sigma:{level:g}|seed:{settings.seed}|noise not clipped"
            scores += image_scores(f"at {level:g}", images, clean, made + "|blind" * settings.blind)
            noisy = _noisy(photos, level, settings.seed)
            scores += image_scores(f"at {level:g} of {_NOISY}", noisy, clean, made)
            ours, theirs = scores[-4:-2], scores[-2:]
            pairs = zip(ours, theirs, strict=True)
            baseline |= {key_of(model.name): noise.value for model, noise in pairs}
            if settings.filters:
                scores += filter_scores(settings, level, noisy, clean, made)
        if settings.outputs:
            _write_images(photos, predictions, Path(settings.outputs))
        count = len(photos) * len(settings.sigma)
        made_with = {"sigma": list(settings.sigma), "seed": settings.seed}
        baselines = {"baselines": {_NOISY: baseline}}
        return ScoredPredictions(scores, count, baselines, made_with, rows=None)

    def compare(
        self, runner: Runner[Any], data: Photos, theirs: System, ours: Any, settings: EvalDenoise
    ) -> list[Comparison]:
        """PSNR of each level compared by a paired bootstrap."""
        clean, rows = [photo.clean() for photo in data[settings.part]], []
        for level in ours:
            name = f"PSNR at {level:g}"
            mine, other = (
                {name: [float(psnr(*pair)) for pair in zip(side[level], clean, strict=True)]}
                for side in (ours, theirs.predictions)
            )
            rows += compare_means(mine, other, settings.samples, unit="images")
        return rows


def _write_images(
    photos: Sequence[Photo], predictions: Mapping[float, list[Tensor]], folder: Path
) -> None:
    """Write the denoised images of each level into a folder."""
    for level, images in predictions.items():
        for number, (photo, image) in enumerate(zip(photos, images, strict=True), 1):
            write_image(
                as_image(image), folder / f"{number}-{Path(photo.where).stem}-{level:g}.png"
            )


def _pixel(at: str, wide: int, high: int) -> tuple[int, int]:
    """The pixel that is asked about."""
    from regard.viewer.placement import parse_query_point

    if at.strip().lower() == "middle":
        return wide // 2, high // 2
    if not re.match(r"\s*\d", at):
        raise UsageError(f"at={at:.40}; expected middle, or a pixel such as at=120,80")
    point = parse_query_point(at, (wide, high), (0, 0, wide, high))
    assert isinstance(point, tuple)
    return int(point[0] * wide), int(point[1] * high)


def _span(at: int, piece: int, whole: int) -> slice:
    """What is around a pixel, cut where windows of the whole image are."""
    first, last = max(0, at - piece // 2) // whole, -(-(at + piece // 2) // whole)
    return slice(first * whole, max(first + 1, last) * whole)


def load_codec(folder: Path, model: Model, config: Mapping[str, Any]) -> NoCodec:
    """Refuse a model that cannot denoise."""
    if config["family"] != DENOISER:
        raise UsageError(
            f"{folder / 'config.json'}: a {config['family']} cannot denoise; expected a "
            "denoiser, trained with: regard train denoise"
        )
    return NoCodec()


DENOISE = Task(
    name="denoise",
    holds="clean images",
    inputs=IMAGE,
    predictor=ImageDenoiser,
    judge=DenoiseJudge(),
    load_codec=load_codec,
    objective=DenoiseObjective(),
    target="",
    unit="images",
    judged=EvalDenoise,
)
