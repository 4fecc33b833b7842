"""Labels of images: what a classifier and an encoder with a probe on it share."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.images import Images
from regard.errors import UsageError
from regard.metrics.baselines import downsample
from regard.metrics.evaluation import LabelEvaluation
from regard.metrics.labels import LabelResults, one_hot, top_k
from regard.settings import setting
from regard.tasks.frame.answers import Classified
from regard.tasks.frame.settings import derived
from regard.tasks.frame.task import Data, Judged
from regard.tasks.vision.photos import ImageEvalSettings, ImageRunSettings, ImageTask

TOP = 5  # labels among which the right one should be, where there are more


@dataclass(frozen=True)
class RunImages(ImageRunSettings):
    """How to label images."""

    n_best: int = setting(1, "labels to return per image, most probable first", min=1, max=100_000)
    scores: bool = setting(True, "print the probability of each label")
    mirror: bool = setting(False, "average over each image and its mirror image")


@dataclass(frozen=True)
class EvalImages(derived("EvalImages", ImageEvalSettings, RunImages)):
    """What to judge on, and how."""

    probe: str | None = setting(
        None, "linear or knn: judge labels learnt from its vectors, by share="
    )


def shrunk(images: Images) -> np.ndarray:
    """Return images as the nearest-mean baseline reads them."""
    parts = np.array_split(np.arange(len(images)), -(-len(images) // 256))
    return np.concatenate([downsample(images.read(part).numpy()) for part in parts])


class ImageLabeller(ImageTask[Classified]):
    """A model that gives each image one of its labels."""

    name = "images"
    Run, Eval, Result = RunImages, EvalImages, LabelEvaluation

    @property
    def labels(self) -> list[str]:
        """Return the labels that the model knows."""
        return self.codec.labels

    def baseline_scores(self, images: Images) -> dict[str, dict[str, float]]:
        """Return the scores of the commonest label and the nearest mean image."""
        learnt = self.codec.baselines
        targets = one_hot(images.labels.numpy(), len(self.labels))
        return {} if learnt is None else learnt.scores(shrunk(images), targets)

    def check_run(self, settings: Any) -> Any:
        """Refuse more labels than there are."""
        if getattr(settings, "n_best", 1) > len(self.labels):
            raise UsageError(
                f"n_best={settings.n_best} is more than the {len(self.labels)} labels of the model"
            )
        return super().check_run(settings)

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
        probs = self.probabilities(pixels, settings.mirror)
        return [Classified(self.labels, row, [int(row.argmax())]) for row in probs]

    def read_test(self, settings: Any) -> Data:
        """Read the part that is judged."""
        data = self.load_test(settings, classes=self.labels)
        return Data(data, data.parts[settings.part].sha, data.notes)

    def predict_examples(self, data: Data, settings: Any) -> np.ndarray:
        """Return the probability of each label for each image."""
        return self.probabilities_of(data.parts.parts[settings.part], settings)

    def predictions_of(self, other: Any, data: Data, settings: Any) -> np.ndarray:
        """Return the probabilities of another model, which reads the images in its own format."""
        order = [other.labels.index(label) for label in self.labels]
        return super().predictions_of(other, other.read_test(settings), settings)[:, order]

    def check_against(self, other: Any) -> None:
        """Refuse a model of other labels."""
        labels = getattr(other, "labels", [])
        if not isinstance(other, ImageLabeller) or set(labels) != set(self.labels):
            raise UsageError(
                f"against= names a model of other labels ({', '.join(labels[:6])}); "
                "compare models of the same"
            )

    def score(self, data: Data, predictions: np.ndarray, settings: Any) -> Judged:
        """Return accuracy, F1 and loss, by class too, and the errors it was surest of."""
        images: Images = data.parts.parts[settings.part]
        results = self.results(images, predictions)
        scores = results.scores(settings.samples)
        if len(self.labels) > TOP:
            scores.insert(1, top_k(images.labels.numpy(), predictions, TOP, self.unit))
        errors = results.errors(settings.errors, lambda i: ("", images.where(i)))
        return Judged(scores, len(images), results.details(errors, self.baseline_scores(images)))

    def results(self, images: Images, probs: np.ndarray) -> LabelResults:
        """Return targets, predictions and probabilities, from which all scores follow."""
        return LabelResults.single(self.labels, images.labels.numpy(), probs, unit=self.unit)

    def compare(self, data: Data, ours: np.ndarray, theirs: np.ndarray, settings: Any) -> Any:
        """Compare accuracies by a paired bootstrap."""
        images: Images = data.parts.parts[settings.part]
        other = self.results(images, theirs).predictions
        return [self.results(images, ours).compare(other, settings.samples)]

    def outputs(self, data: Data, predictions: np.ndarray, settings: Any) -> list[dict[str, Any]]:
        """Return each image with its label and what was predicted."""
        images: Images = data.parts.parts[settings.part]
        numbers = images.labels.tolist()
        return [
            {
                "image": images.where(i),
                "label": self.labels[numbers[i]],
                "prediction": self.labels[best],
                "probability": float(predictions[i, best]),
            }
            for i, best in enumerate(predictions.argmax(1).tolist())
        ]

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the size of images, and whether mirror images were used."""
        return {"size": self.format_for(settings).size, "mirror": settings.mirror}

    def describe(self, pixels: Tensor, settings: Any) -> dict[str, Any]:
        """Label an image for its picture."""
        from regard.viewer.text import label_candidates

        (probs,) = self.probabilities(pixels)
        best = int(probs.argmax())
        rest = label_candidates(self.labels, probs, [best], settings.candidates)
        return {"output": self.labels[best], **rest}
