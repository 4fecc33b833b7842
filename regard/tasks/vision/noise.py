"""What a denoiser is told, learns from and writes: settings, noisy crops, images and scores."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.augment import step_rng
from regard.data.batches import Shuffled
from regard.data.media import BROKEN
from regard.data.photos import Photo, load_photos, noise_of
from regard.metrics.image import psnr, ssim
from regard.metrics.score import Score
from regard.models import family
from regard.settings import setting
from regard.tasks.frame.settings import BootstrapSettings, RunSettings, TrainSettings
from regard.tasks.parts import Answer
from regard.training.progress import Progress

DENOISER = "denoiser"
DenoiserConfig, _ = family(DENOISER)


@dataclass(frozen=True)
class TrainDenoise(TrainSettings):
    """What a training of a denoiser can be told."""

    schedule: str = "cosine"
    ema: float = 0.995
    optimiser: str = "muon"
    noise: tuple[float, ...] = setting(
        (5.0, 55.0),
        "minimum and maximum standard deviation of the noise (0 to 255)",
        min=0,
        max=255,
    )
    loss: str = setting("l1", "loss per pixel", choices=lambda: PIXEL_LOSSES)
    batch: int = setting(16, "crops per batch", min=1, max=100_000, group="optimiser")
    broken: str = setting("refuse", "files that cannot be read", choices=BROKEN, group="data")
    model: DenoiserConfig = field(default_factory=DenoiserConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class NoisySettings(RunSettings):
    """The noise of an image."""

    sigma: float | None = setting(
        None, "standard deviation of the noise (0 to 255); estimated unless given", min=0, max=255
    )
    noise: float = setting(0.0, "noise to add first, to a clean image", min=0, max=255)
    seed: int = setting(0, "random seed of the noise that is added", min=0, max=2**62)


@dataclass(frozen=True)
class RunDenoise(NoisySettings):
    """How to take the noise out of images."""

    out: str | None = setting(None, "the image to write, or a folder for several", group="files")
    broken: str = setting("refuse", "files that cannot be read", choices=BROKEN, group="data")


@dataclass(frozen=True)
class EvalDenoise(BootstrapSettings):
    """What to judge on, and how."""

    data: str | None = setting(None, "a folder of clean images", group="data")
    sigma: tuple[float, ...] = setting(
        (25.0,), "standard deviations of the noise (0 to 255)", above=0, max=255
    )
    seed: int = setting(0, "random seed of the noise", min=0, max=2**62)
    blind: bool = setting(False, "let the model estimate the noise")
    filters: str | None = setting(
        None, "compare with classical filters, tuned on the images of this folder"
    )
    outputs: str | None = setting(None, "a folder for the denoised images", group="files")
    tuned_on: int = setting(12, "images of that folder to tune filters on", min=1, max=10_000)
    broken: str = setting("refuse", "files that cannot be read", choices=BROKEN, group="data")
    threads: int | None = setting(None, "CPU threads", min=1, max=1024, group="machine")


@dataclass(frozen=True)
class LookDenoise(NoisySettings):
    """What to see of how a pixel is denoised."""

    view: str = setting("attention", "view of the attention", choices=("attention", "rollout"))
    at: str = setting("middle", "the query: middle, or a pixel x,y of the photo")
    piece: int = setting(64, "side of the crop around it, in pixels", min=8, max=512)


# what is summed over all pixels
PIXEL_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"l1": torch.abs, "l2": torch.square}


@dataclass(frozen=True, eq=False)
class Denoised(Answer[RunDenoise]):
    """A clean image, bytes (h, w) or (h, w, 3), and what its noise was taken to be.

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

    def record(self, settings: RunDenoise) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        fields: dict[str, Any] = {"out": self.where or None, "sigma": self.sigma}
        if self.after is not None:
            fields |= {"noisy_psnr": self.before, "psnr": self.after}
        return fields


class NoisyBatch(NamedTuple):
    """Crops of images with noise, without, and its standard deviation."""

    noisy: Tensor
    clean: Tensor
    sigma: Tensor


class NoisyCrops:
    """Batch n of random crops with noise, a pure function of (seed, n)."""

    def __init__(self, train: Sequence[Photo], settings: TrainDenoise):
        self.settings, self.side = settings, settings.model.image
        self.images = [mirrored(photo.pixels[0].numpy(), self.side) for photo in train]
        self.shuffled = Shuffled(len(self.images), settings.batch, settings.seed)

    def __getitem__(self, n: int) -> NoisyBatch:
        """Return batch n."""
        rng = step_rng(self.settings.seed, n)
        crops = [self.crop(self.images[i], rng) for i in self.shuffled[n].tolist()]
        clean = torch.from_numpy(np.stack(crops)).unsqueeze(1).float() / 255
        low, high = self.settings.noise
        sigma = torch.from_numpy(rng.uniform(low, high, len(clean)).astype(np.float32)) / 255
        noise = torch.from_numpy(rng.standard_normal(clean.shape, np.float32))
        noisy = clean + sigma[:, None, None, None] * noise
        return NoisyBatch(noisy, clean, sigma)

    def crop(self, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Cut a random crop out of an image, rotated and mirrored at random."""
        top, left = (rng.integers(n - self.side + 1) for n in image.shape)
        turn = int(rng.integers(8))
        cut = np.rot90(image[top : top + self.side, left : left + self.side], turn % 4)
        return cut[:, ::-1] if turn > 3 else cut

    def epoch(self) -> float:
        """Return in how many batches all images are read once."""
        return len(self.images) / self.shuffled.rows


def mirrored(image: np.ndarray, side: int) -> np.ndarray:
    """Mirror an image (h, w) at its rim until it is as large as a crop."""
    more = [(0, max(0, side - n)) for n in image.shape]
    return np.pad(image, more, mode="symmetric")


def filter_scores(
    settings: EvalDenoise, level: float, noisy: Sequence[Tensor], clean: Sequence[Tensor], made: str
) -> list[Score]:
    """Return the scores of all hand-made filters, each with its best parameters."""
    from regard.filters import FILTERS
    from regard.filters.tuned import GRIDS, tuned

    given = {"need": ("train",), "most": settings.tuned_on, "broken": settings.broken}
    known = [
        (photo.clean() + level / 255 * photo.noise(settings.seed + 1), photo.clean())
        for photo in load_photos(str(settings.filters), **given).parts["train"]
    ]
    scores = []
    with Progress(f"filters at {level:g}", len(GRIDS)) as bar:
        for name in GRIDS:
            best = tuned(name, level / 255, known)
            images = [FILTERS[name](image, **best).clamp(0, 1) for image in noisy]
            parts = [
                f"{k}:{v:.4g}" if isinstance(v, float) else f"{k}:{v}" for k, v in best.items()
            ]
            home = Path(str(settings.filters)).name
            words = "|".join([made, *parts, f"tuned on {len(known)} images of {home}"])
            scores += image_scores(f"at {level:g} of {name}", images, clean, words)
            bar.update(1)
    return scores


def image_scores(
    name: str, images: Sequence[Tensor], clean: Sequence[Tensor], made: str
) -> list[Score]:
    """Return the mean PSNR and SSIM over images."""
    pairs = list(zip(images, clean, strict=True))
    means = [sum(float(metric(*pair)) for pair in pairs) / len(pairs) for metric in (psnr, ssim)]
    return [Score(f"PSNR {name}", means[0], made), Score(f"SSIM {name}", means[1], made, 4)]


def with_noise(clean: Tensor, settings: NoisySettings) -> tuple[Tensor, float | None]:
    """Return an image with the noise that is to be added, and its deviation if that is known."""
    sigma = None if settings.sigma is None else settings.sigma / 255
    if not settings.noise:
        return clean, sigma
    noise = noise_of("0", tuple(clean.shape), settings.seed)
    return clean + settings.noise / 255 * noise, settings.noise / 255 if sigma is None else sigma


def as_image(image: Tensor) -> np.ndarray:
    """Return an image (c, h, w) from 0 to 1 as bytes (h, w) or (h, w, 3)."""
    pixels = (255 * image).round().clamp(0, 255).to(torch.uint8)
    return (pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).numpy()
