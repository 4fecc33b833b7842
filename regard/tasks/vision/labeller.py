"""Labels of images: what a classifier and an encoder with a probe on it share."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.image_format import SUFFIXES
from regard.data.images import ImageData, Images
from regard.metrics.baselines import downsample
from regard.settings import setting
from regard.tasks.frame.answers import Classified
from regard.tasks.frame.media import first_files
from regard.tasks.frame.one_label import STRANGERS, OneLabel, OneLabelRun
from regard.tasks.frame.question import Question
from regard.tasks.frame.settings import derived
from regard.tasks.vision.photos import (
    ImageEvalSettings,
    ImageRunSettings,
    ImageTask,
)

FEW = 8  # pixels of the sides of an image by which its distance is measured


@dataclass(frozen=True)
class RunImages(OneLabelRun, ImageRunSettings):
    """How to label images."""

    mirror: bool = setting(False, "average over each image and its mirror image")


@dataclass(frozen=True)
class EvalImages(derived("EvalImages", ImageEvalSettings, RunImages)):
    """What to judge on, and how."""

    probe: str | None = setting(
        None,
        "judge labels learnt from its vectors, by share=",
        choices="regard.tasks.vision.probe:PROBES",
    )


def shrunk(images: Images) -> np.ndarray:
    """Return images as the nearest-mean baseline reads them."""
    parts = np.array_split(np.arange(len(images)), -(-len(images) // 256))
    return np.concatenate([downsample(images.read(part).numpy()) for part in parts])


class ImageLabeller(OneLabel, ImageTask[Classified]):
    """A model that gives each image one of its labels."""

    name = "images"
    Run, Eval = RunImages, EvalImages

    def baseline_vectors(self, part: Images) -> np.ndarray:
        """Return images as the nearest-mean baseline reads them."""
        return shrunk(part)

    @torch.inference_mode()
    def probabilities(self, pixels: Tensor, mirror: bool = False) -> np.ndarray:
        """Return the probability of each label, (n, labels), for bytes (n, c, h, w)."""
        images = self.format.normalise(pixels.to(self.device))
        probs = self.model(images).float().softmax(-1)
        if mirror:
            probs = (probs + self.model(images.flip(-1)).float().softmax(-1)) / 2
        return probs.cpu().numpy()

    def probabilities_of(self, images: Images, settings: Any) -> np.ndarray:
        """Return the probability of each label for the images of a part."""
        rows = np.split(np.arange(len(images)), range(settings.batch, len(images), settings.batch))
        return np.concatenate(
            [self.probabilities(images.read(some), settings.mirror) for some in rows]
        )

    def answer_pixels(self, pixels: Tensor, settings: Any, lines: Any) -> list[Classified]:
        """Label bytes (n, c, h, w)."""
        return self.classified(self.probabilities(pixels, settings.mirror), pixels)

    # None of these

    def part_inputs(self, part: Images) -> Tensor:
        """Return the bytes (n, c, h, w) of images."""
        return part.read(np.arange(len(part)))

    def label_inputs(self, inputs: Tensor) -> np.ndarray:
        """Return the probability of each label for bytes (n, c, h, w)."""
        return np.concatenate([self.probabilities(some) for some in inputs.split(256)])

    @torch.inference_mode()
    def outlier_vectors(self, inputs: Tensor) -> np.ndarray:
        """Return images shrunk to a few pixels beside the vectors that the head reads."""
        heads = [
            self.model.pool(self.model.features(self.format.normalise(some.to(self.device))))
            for some in inputs.split(256)
        ]
        few = downsample(inputs.numpy(), FEW)
        return np.concatenate([few, torch.cat(heads).float().cpu().numpy()], 1)

    def strangers(self, inputs: Tensor, rng: np.random.Generator) -> dict[str, Any]:
        """Return noise, noise with the spectrum of photos, and images of one level."""
        shape = (STRANGERS, *inputs.shape[1:])
        pink = rng.normal(size=shape)
        rows, columns = (np.fft.fftfreq(n)[:, None] for n in shape[2:])
        slope = np.hypot(rows, columns.T).clip(min=1 / max(shape[2:]))
        pink = np.fft.ifft2(np.fft.fft2(pink) / slope).real
        low, high = (f(pink, axis=(1, 2, 3), keepdims=True) for f in (np.min, np.max))
        levels = np.linspace(0, 255, STRANGERS)[:, None, None, None]
        found = {
            "noise": rng.integers(0, 256, shape),
            "smooth noise": 255 * (pink - low) / (high - low),
            "one level": np.broadcast_to(levels, shape),
        }
        return {name: torch.from_numpy(x.astype(np.uint8)) for name, x in found.items()}

    def read_foreign(self, folder: str) -> Tensor:
        """Read images of a folder that are none of what was learnt."""
        files = first_files(folder, SUFFIXES)
        return torch.from_numpy(np.stack([self.format.read(file) for file in files]))

    def read_test(self, settings: Any) -> ImageData:
        """Read the part that is judged."""
        return self.load_test(settings, classes=self.labels)

    def predict_examples(self, data: ImageData, settings: Any) -> np.ndarray:
        """Return the probability of each label for each image."""
        return self.probabilities_of(data[settings.part], settings)

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the size of images, and whether mirror images were used."""
        return {"size": self.format_for(settings).size, "mirror": settings.mirror}

    def question(self, given: Any, settings: Any, expected: Any = None) -> Question:
        """Return an image with its label and the log-probability of that."""
        images = self.normalised(given, settings)

        def logits(copies: int) -> Tensor:
            return self.model(images.expand(copies, -1, -1, -1))

        return self.label_question(logits, expected, **self.image_tokens(images))

    def describe(self, pixels: Tensor, settings: Any) -> dict[str, Any]:
        """Label an image for its picture."""
        (probs,) = self.probabilities(pixels)
        return dict(self.labelled(probs, settings, pixels))
