"""A trained classifier of images as its user has it: files in, labels out."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.image_files import BROKEN, ImageOptions
from regard.data.image_format import BrokenImage, ImageFormat
from regard.data.images import ImageData, Images, load_images
from regard.errors import UsageError, log, lookup
from regard.files import cache_folder
from regard.metrics.baselines import Baselines, small
from regard.metrics.bleu import Score
from regard.metrics.evaluation import Evaluation, made_here, write_outputs
from regard.metrics.labels import (
    Error,
    LabelEvaluation,
    by_class,
    compare,
    confusion,
    count,
    ones,
    scores_of,
    units,
    wilson,
)
from regard.settings import fill, setting
from regard.tasks.classifier import Classified
from regard.tasks.image_look import ImageLookSettings, check_kind, picture_of
from regard.tasks.labelling import labels_of
from regard.tasks.runners import Answer, Runner

FEW = 5  # labels among which the right one should be, where there are more


@dataclass(frozen=True)
class ImageRunSettings:
    """How to label images."""

    n_best: int = setting(1, "labels an image, the likeliest first", min=1, max=100_000)
    scores: bool = setting(True, "tell the probability of each label")
    image: int | None = setting(None, "pixels that images are brought to", min=1, max=4096)
    mirror: bool = setting(False, "judge each image and its mirror image, and take the mean")
    broken: str = setting("refuse", "a file that cannot be read: refuse it or skip it")
    batch: int = setting(64, "images read at once", min=1, max=100_000)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)


@dataclass(frozen=True)
class ImageEvalSettings(ImageRunSettings):
    """What to judge on, and how."""

    data: str | None = setting(None, "a folder or table of images with labels")
    part: str = setting("test", "test, valid or train")
    test: str | None = setting(None, "which test set of the folder")
    valid: str | None = setting(None, "which set to choose by, or a share")
    columns: str | None = setting(None, "path and label, such as 2,1")
    header: bool | None = setting(None, "whether a table begins with one; recognised unless told")
    tile: int = setting(32, "pixels of an image in a mosaic", min=1, max=4096)
    errors: int = setting(10, "errors to show", min=0, max=100_000)
    samples: int = setting(1000, "of the bootstrap", min=100, max=100_000)
    outputs: str | None = setting(None, "a file for the answers; .jsonl tells more")
    probe: str | None = setting(
        None, "linear or knn: judge labels learnt of its vectors, by share="
    )


@dataclass(frozen=True)
class Unread(Answer):
    """What is answered for an image that cannot be read."""

    why: str

    def __str__(self) -> str:
        return ""

    def lines(self, how: ImageRunSettings) -> Iterator[str]:
        """Leave the lines of the answer empty."""
        yield from [""] * how.n_best

    def record(self, how: ImageRunSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        return {"prediction": None, "error": self.why}


def format_of(folder: Path, model: Any, config: dict[str, Any]) -> ImageFormat:
    """Check and return how images are brought to a model, as its folder says."""
    where = str(folder / "config.json")
    told = config.get("image")
    if not isinstance(told, dict):
        raise UsageError(f"{where}: 'image' is {told!r:.40}; expected size, channels, mean and std")
    try:
        format = fill(ImageFormat, told, where=where).check()
    except UsageError as mistake:
        text = str(mistake)
        raise UsageError(text if text.startswith(where) else f"{where}: {text}") from None
    if format.size is None:
        raise UsageError(f"{where}: 'image' has no size")
    if format.channels != model.config.channels:
        raise UsageError(
            f"{where}: images of {format.channels} channels, but the model reads "
            f"{model.config.channels}"
        )
    return format


def read_image(image: Any, format: ImageFormat, broken: str) -> np.ndarray | str:
    """Return the pixels of an image, or what is wrong with it if such are passed over."""
    if isinstance(image, str) and not image:
        return "no file is named"
    check_kind(image)
    try:
        return np.array(format.read(image))  # its own, as PyTorch wants it
    except BrokenImage as mistake:
        if broken == "refuse":
            raise UsageError(f"{mistake}; or pass over such files: broken=skip") from None
        log(str(mistake))
        return str(mistake)


def shrunk(images: Images) -> np.ndarray:
    """Return images as the nearest mean reads them."""
    parts = np.array_split(np.arange(len(images)), -(-len(images) // 256))
    return np.concatenate([small(images.read(part).numpy()) for part in parts])


class ImageClassifier(Runner[Classified | Unread]):
    """A model with its labels and the format of its images."""

    task = "images"
    reads = "image"  # the name of an input in JSON
    settings = ImageRunSettings
    eval_settings = ImageEvalSettings
    look_settings = ImageLookSettings

    def __init__(self, model: Any, labels: list[str], format: ImageFormat):
        self.model, self.labels, self.format = model, labels, format
        self.device = next(model.parameters()).device
        self.baselines: Baselines | None = None

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "ImageClassifier":
        """Put a loaded model together with what its folder says of images and labels."""
        if not getattr(model.config, "labels", 0) or not hasattr(model, "features"):
            raise UsageError(
                f"{folder / 'config.json'}: a model without a head, which labels no images; train "
                "one with: regard train classify init=..."
            )
        labels = labels_of(folder, model, config)
        found = cls(model, labels, format_of(folder, model, config))
        found.baselines = Baselines.load(folder, len(labels))
        return found

    def check(self, settings: dict[str, Any]) -> ImageRunSettings:
        """Make full settings of what a user gave."""
        return self._checked(fill(ImageRunSettings, settings))

    def _checked(self, how: ImageRunSettings) -> ImageRunSettings:
        lookup("broken", how.broken, BROKEN)
        if how.n_best > len(self.labels):
            raise UsageError(
                f"n_best={how.n_best} is more than the {len(self.labels)} labels of the model"
            )
        return how

    def _format(self, how: ImageRunSettings) -> ImageFormat:
        return replace(self.format, size=how.image) if how.image else self.format

    def answer(
        self, inputs: list[Any], *, first: int = 0, **settings: Any
    ) -> list[Classified | Unread]:
        """Label images: paths, open images, or arrays (h, w, 3) of bytes."""
        how = self.check(settings)
        if how.threads:
            torch.set_num_threads(how.threads)
        format, answers = self._format(how), []
        for start in range(0, len(inputs), how.batch):
            some = inputs[start : start + how.batch]
            read = [read_image(image, format, how.broken) for image in some]
            good = [torch.from_numpy(pixels) for pixels in read if not isinstance(pixels, str)]
            rows = iter(self.chances(torch.stack(good), how.mirror) if good else [])
            for pixels in read:
                if isinstance(pixels, str):
                    answers.append(Unread(pixels))
                else:
                    chances = next(rows)
                    answers.append(Classified(self.labels, chances, [int(chances.argmax())]))
        return answers

    @torch.inference_mode()
    def chances(self, pixels: Tensor, mirror: bool = False) -> np.ndarray:
        """Return how likely each label is, (n, labels), for bytes (n, c, h, w)."""
        images = self.format.normalise(pixels.to(self.device))
        found = self.model(images).float().softmax(-1)
        if mirror:
            found = (found + self.model(images.flip(-1)).float().softmax(-1)) / 2
        return found.cpu().numpy()

    def chances_of(self, images: Images, how: ImageRunSettings) -> np.ndarray:
        """Return how likely each label is for the images of a part."""
        places = np.arange(len(images))
        parts = [places[start : start + how.batch] for start in range(0, len(images), how.batch)]
        found = [self.chances(images.read(p), how.mirror) for p in parts]
        return np.concatenate(found)

    # Judging

    def _data(self, how: ImageEvalSettings) -> ImageData:
        """Read a part as this model takes its images."""
        assert how.data is not None
        return load_images(
            how.data,
            test=how.test,
            valid=how.valid,
            need=(how.part,),
            format=self._format(how),
            options=ImageOptions(how.columns, (), how.tile, how.broken, header=how.header),
            classes=self.labels,
            cache=cache_folder(),
            trained=self.trained,
        )

    def evaluate(
        self,
        settings: dict[str, Any],
        *,
        against: "ImageClassifier | None" = None,
        names: tuple[str, str] = ("model", ""),
    ) -> LabelEvaluation | Evaluation:
        """Label a test set and judge the labels, or with probe= what its vectors are worth."""
        if settings.get("probe") is not None:
            from regard.tasks.encoder import Encoder

            return Encoder(self.model, self.format).evaluate(settings, against=against, names=names)
        how = fill(ImageEvalSettings, settings)
        self._checked(how)
        if how.data is None:
            raise UsageError(
                "data is missing; add data=FOLDER or data=TABLE with images and labels"
            )
        lookup("part", how.part, {"test": 0, "valid": 0, "train": 0})
        if how.threads:
            torch.set_num_threads(how.threads)
        data = self._data(how)
        images = data.parts[how.part]
        started = time.perf_counter()
        chances = self.chances_of(images, how)
        seconds = time.perf_counter() - started
        numbers, number = images.labels.numpy(), len(self.labels)
        wanted, found = ones(numbers, number), ones(chances.argmax(1), number)
        if how.outputs:
            write_outputs(
                how.outputs,
                [
                    {
                        "image": images.where(i),
                        "label": self.labels[numbers[i]],
                        "prediction": self.labels[best],
                        "probability": float(chances[i, best]),
                    }
                    for i, best in enumerate(chances.argmax(1).tolist())
                ],
            )
        comparison = []
        if against is not None:
            theirs = ones(self._theirs(against, how), number)
            ours = units(wanted, found)
            comparison = [compare(ours, units(wanted, theirs), "accuracy", how.samples)]
        scores = scores_of(wanted, found, chances, several=False, what="images")
        if number > FEW:
            scores.insert(1, top(numbers, chances))
        made_with = {
            "data": how.data,
            "part": how.part,
            "data_hash": images.sha,
            "size": images.format.size,
            "mirror": how.mirror,
            **made_here(),
        }
        return LabelEvaluation(
            names[0],
            scores,
            len(images),
            seconds,
            made_with,
            names[1] or None,
            comparison,
            "images",
            list(self.labels),
            by_class(count(wanted, found), self.labels),
            confusion(numbers, chances.argmax(1), number).tolist(),
            self._errors(images, numbers, chances, how.errors),
            notes=data.notes,
            baselines={}
            if self.baselines is None
            else self.baselines.scores(shrunk(images), wanted),
        )

    def _theirs(self, other: Any, how: ImageEvalSettings) -> np.ndarray:
        """Return which of our labels another model gives to each image."""
        if not isinstance(other, ImageClassifier) or set(other.labels) != set(self.labels):
            raise UsageError(
                "against= names a model of other labels "
                f"({', '.join(other.labels[:6])}); compare models of the same"
            )
        chances = other.chances_of(other._data(how).parts[how.part], how)
        order = [other.labels.index(label) for label in self.labels]
        return chances[:, order].argmax(1)

    def _errors(
        self, images: Images, wanted: np.ndarray, chances: np.ndarray, most: int
    ) -> list[Error]:
        """Return the wrong answers, those that the model was surest of first."""
        found, sure = chances.argmax(1), chances.max(1)
        wrong = np.flatnonzero(found != wanted)
        order = wrong[np.argsort(-sure[wrong], kind="stable")][:most]
        return [
            Error(
                "", images.where(i), self.labels[wanted[i]], self.labels[found[i]], float(sure[i])
            )
            for i in order.tolist()
        ]

    # Looking

    def picture(self, image: Any, **settings: Any):
        """Label an image and gather where the model looked."""
        how = fill(ImageLookSettings, settings)

        def answer(pixels: Tensor) -> dict[str, Any]:
            (chances,) = self.chances(pixels)
            order = np.argsort(-chances, kind="stable")[: how.candidates].tolist()
            told = ", ".join(f"{self.labels[i]} {chances[i]:.4f}" for i in order)
            return {
                "output": str(Classified(self.labels, chances, [order[0]])),
                "alternatives": [(self.labels[i], float(chances[i])) for i in order[1:]],
                "note": f"probabilities: {told}",
            }

        return picture_of(self.model, self.format, image, how, answer)


def top(wanted: np.ndarray, chances: np.ndarray) -> Score:
    """Return how often the right label is among the few likeliest."""
    best = np.argsort(-chances, 1, kind="stable")[:, :FEW]
    right = int((best == wanted[:, None]).any(1).sum())
    low, high = wilson(right, len(wanted))
    signature = f"images:{len(wanted)}|95%:{low:.2f} to {high:.2f}|wilson"
    return Score(f"top-{FEW}", 100 * right / len(wanted), signature)
