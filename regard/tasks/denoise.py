"""Denoising: from clean images to a model that takes noise out of others."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.augment import chance_of
from regard.data.batches import Shuffled
from regard.data.image_files import BROKEN
from regard.data.photos import Photo, load_photos
from regard.errors import UsageError, lookup
from regard.metrics.image import psnr
from regard.models import family
from regard.tasks import run
from regard.tasks.denoiser import ImageDenoiser
from regard.tasks.run import (
    Data,
    Report,
    TaskSettings,
    Work,
    build_model,
    resolve_task,
    shape_of,
    train_task,
)
from regard.training.loop import Trainable, at_least

NAME = "denoise"
FAMILY = "denoiser"
DenoiserConfig, _ = family(FAMILY)
LEVELS = (15, 25, 50)  # of 255: what is validated on

# what a size means for training, on top of the sizes of the model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.004, "batch": 8, "steps": 4000},
    "small": {"lr": 0.003, "batch": 16, "steps": 8000},
    "base": {"lr": 0.002, "batch": 16, "steps": 30_000},
    "big": {"lr": 0.001, "batch": 32, "steps": 100_000},
}
# short keys for what lies deeper
SHORT: dict[str, str | tuple[str, ...]] = {
    **{key: long for key, long in run.SHORT.items() if key not in ("feed_forward", "order")},
    "image": "model.image",
    "patch": "model.patch",
    "window": "model.window",
    "look": "model.look",
    "every": "model.every",
    "score": "model.block.score",
}


@dataclass(frozen=True)
class DenoiseSettings(TaskSettings):
    """Everything that a run that learns to denoise can be told."""

    schedule: str = field(default="cosine", metadata={"help": "fall of the rate"})
    ema: float = field(default=0.995, metadata=at_least(0, "memory of averaged weights", 0.99999))
    optimiser: str = field(default="muon", metadata={"help": "adamw or muon"})
    valid: str | None = field(default=None, metadata={"help": "a folder to choose by, or a share"})
    noise: tuple[float, ...] = field(
        default=(5.0, 55.0),
        metadata={"help": "least and largest spread of noise, of 255", "min": 0, "max": 255},
    )
    loss: str = field(default="l1", metadata={"help": "l1 or l2: of what is to be small"})
    batch: int = field(default=16, metadata=at_least(1, "pieces a batch", 100_000))
    broken: str = field(default="refuse", metadata={"help": "refuse or skip what cannot be read"})
    model: DenoiserConfig = field(default_factory=DenoiserConfig)  # type: ignore[valid-type]


# name -> what is summed over all pixels
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {"l1": torch.abs, "l2": torch.square}


def resolve(values: Mapping[str, Any]) -> DenoiseSettings:
    """Make full settings of what a user gave: the size fills in what is not said."""
    settings = resolve_task(
        DenoiseSettings,
        values,
        model=shape_of(FAMILY, values),
        sizes=SIZES,
        short=SHORT,
        of="clean images",
    )
    lookup("loss", settings.loss, LOSSES)
    lookup("broken", settings.broken, BROKEN)
    if len(settings.noise) != 2 or settings.noise[0] > settings.noise[1] or not settings.noise[1]:
        told = ",".join(f"{level:g}" for level in settings.noise)
        raise UsageError(f"noise={told}; expected the least and the largest spread, such as 5,55")
    return settings


class Batch(NamedTuple):
    """Pieces of images with noise, without, and its spread."""

    noisy: Tensor
    clean: Tensor
    sigma: Tensor


class Denoising(Trainable):
    """The task as the training loop sees it."""

    def __init__(self, train: Sequence[Photo], valid: Sequence[Photo], settings: DenoiseSettings):
        self.settings, self.valid = settings, valid
        config: Any = settings.model
        self.side = config.image
        self.tokens = (config.image // config.patch) ** 2
        self.images = [enlarged(photo.pixels[0].numpy(), self.side) for photo in train]
        self.shuffled = Shuffled(len(self.images), settings.batch, settings.seed)
        self.error = lookup("loss", settings.loss, LOSSES)

    def batch(self, n: int) -> Batch:
        """Return batch n, always the same for the same seed and n."""
        chance = chance_of(self.settings.seed, n)
        pieces = [self.piece(self.images[i], chance) for i in self.shuffled[n].tolist()]
        clean = torch.from_numpy(np.stack(pieces)).unsqueeze(1).float() / 255
        low, high = self.settings.noise
        sigma = torch.from_numpy(chance.uniform(low, high, len(clean)).astype(np.float32)) / 255
        noise = torch.from_numpy(chance.standard_normal(clean.shape, np.float32))
        noisy = clean + sigma[:, None, None, None] * noise
        return Batch(*(x.to(self.settings.device) for x in (noisy, clean, sigma)))

    def piece(self, image: np.ndarray, chance: np.random.Generator) -> np.ndarray:
        """Cut a random piece out of an image, turned and mirrored at random."""
        top, left = (chance.integers(n - self.side + 1) for n in image.shape)
        way = int(chance.integers(8))
        cut = np.rot90(image[top : top + self.side, left : left + self.side], way % 4)
        return cut[:, ::-1] if way > 3 else cut

    def epoch(self) -> float:
        """Return in how many batches all images are read once."""
        return len(self.images) / self.shuffled.rows

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the pixels, which the loss counts, and the tokens that they come to."""
        return batch.clean.numel(), len(batch.clean) * self.tokens

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed error of all pixels."""
        return self.error(model(batch.noisy, batch.sigma) - batch.clean).sum()

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return the PSNR on the validation part at some levels of noise, and their mean."""
        runs, found = ImageDenoiser(model), {}
        for level in LEVELS:
            sigma, total = level / 255, 0.0
            for photo in self.valid:
                clean = photo.clean()
                total += float(psnr(runs.clean(clean + sigma * photo.noise(0), sigma), clean))
            found[f"psnr_{level}"] = total / len(self.valid)
        mean = sum(found.values()) / len(found)
        return {"psnr": mean, **found, "better": mean}


def enlarged(image: np.ndarray, side: int) -> np.ndarray:
    """Mirror an image (h, w) that is smaller than a piece."""
    more = [(0, max(0, side - n)) for n in image.shape]
    return np.pad(image, more, mode="symmetric")


def train(values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None) -> Report:
    """Train a denoiser in a folder, or go on with one that was begun there."""
    settings = resolve(values)

    def read() -> Data:
        assert settings.data is not None
        given = {"valid": settings.valid, "test": settings.test, "broken": settings.broken}
        photos = load_photos(settings.data, channels=1, **given)
        return Data(photos.parts, photos.sha, photos.notes, photos.split)

    def prepare(data: Data, folder: Path, begun: dict[str, Any] | None) -> Work:
        model = build_model(FAMILY, settings.model, settings)
        low, high = settings.noise
        return Work(
            FAMILY,
            model,
            Denoising(data.parts["train"], data.parts["valid"], settings),
            f"Takes noise of a spread from {low:g} to {high:g} (of 255) out of images",
            facts={"images": len(data.parts["train"])},
            dynamic=False,
        )

    return train_task(
        NAME, values, settings, read=read, prepare=prepare, recipe=recipe, quiet=quiet
    )
