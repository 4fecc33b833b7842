"""A trained encoder of images as its user has it: files in, vectors out, and their worth."""

import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.augment import chance_of
from regard.data.image import (
    BROKEN,
    ImageData,
    ImageFormat,
    ImageOptions,
    Images,
    load_images,
)
from regard.errors import UsageError, lookup
from regard.files import cache_folder
from regard.metrics.bleu import Score
from regard.metrics.evaluation import Evaluation, made_here, write_outputs
from regard.metrics.labels import LabelEvaluation
from regard.models.folder import load_rest
from regard.pretrained.folder import is_foreign
from regard.pretrained.mae_decoder import import_decoder
from regard.settings import fill, setting
from regard.tasks.classifier import Classified
from regard.tasks.embed import Embedded
from regard.tasks.image_classifier import (
    ImageClassifier,
    ImageEvalSettings,
    ImageRunSettings,
    Unread,
    format_of,
    read_image,
)
from regard.tasks.image_look import ImageLookSettings, check_kind, picture_of
from regard.tasks.labelling import Reader
from regard.tasks.pretrain import (
    NAME,
    Captioned,
    captions_in,
    meeting_images,
    meeting_texts,
    of_part,
    recall,
)
from regard.tasks.probe import Known, by_neighbours, fit_line, pooled, vectors
from regard.tasks.run import load_tokenizer
from regard.tasks.runners import Runner


@dataclass(frozen=True)
class EncoderSettings(ImageRunSettings):
    """How to make vectors of images, or to choose among texts by one that was trained with them."""

    texts: str | None = setting(None, "to choose from, with | between: a dog|a cat")


@dataclass(frozen=True)
class ProbeSettings(ImageEvalSettings):
    """What to judge an encoder on, and how."""

    share: float = setting(1.0, "of the labelled images to learn from", above=0, max=1)
    neighbours: int = setting(20, "that vote for a label, with probe=knn", min=1, max=10_000)


@dataclass(frozen=True)
class EncoderLookSettings(ImageLookSettings):
    """What to see of how an image is read."""

    view: str = setting("attention", "attention, rollout (up to each layer), filters or rebuilt")
    seed: int = setting(1, "of what is masked with view=rebuilt", min=0, max=2**31)


class Probed(nn.Module):
    """An encoder and what makes chances of labels of its vectors."""

    def __init__(self, encoder: Any, chances: Callable[[Tensor], Tensor]):
        super().__init__()
        self.encoder, self.chances = encoder, chances

    def forward(self, images: Tensor) -> Tensor:
        """Return the logarithm of the chances (n, labels)."""
        found = self.chances(pooled(self.encoder, images).float().cpu())
        return found.clamp_min(1e-9).log()


class Fitted(NamedTuple):
    """What a probe has learnt: chances of labels by vectors, and what is to be told of it."""

    chances: Callable[[Tensor], Tensor]
    told: dict[str, Any]


def _knn(known: Known, how: ProbeSettings) -> Fitted:
    near = lambda asked: by_neighbours(known, asked, how.neighbours)  # noqa: E731
    return Fitted(near, {"neighbours": how.neighbours})


def _linear(known: Known, how: ProbeSettings) -> Fitted:
    chances, decay = fit_line(known)
    return Fitted(chances, {"decay": decay})


# name -> how labels are learnt of vectors that stay as they are
PROBES: dict[str, Callable[[Known, ProbeSettings], Fitted]] = {"linear": _linear, "knn": _knn}


class Encoder(Runner[Embedded | Classified | Unread]):
    """A model without a head and the format of its images."""

    task = NAME
    reads = "image"  # the name of an input in JSON
    settings = EncoderSettings
    eval_settings = ProbeSettings
    look_settings = EncoderLookSettings

    def __init__(
        self,
        model: Any,
        format: ImageFormat,
        folder: Path | None = None,
        config: dict[str, Any] | None = None,
    ):
        """Take where it lies, if what it was trained with may be asked for."""
        self.model, self.format = model, format
        self.folder, self.config = folder, config or {}
        self.device = next(model.parameters()).device

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "Encoder":
        """Put a loaded model together with what its folder says of images."""
        if not hasattr(model, "features") or not hasattr(model, "pool"):
            raise UsageError(
                f"{folder / 'config.json'}: a model of family {config['family']}, which reads no "
                "images"
            )
        return cls(model, format_of(folder, model, config), folder, config)

    def check(self, settings: dict[str, Any]) -> EncoderSettings:
        """Make full settings of what a user gave."""
        how = fill(EncoderSettings, settings)
        lookup("broken", how.broken, BROKEN)
        return how

    # What it was trained with

    @property
    def trained_by(self) -> str:
        """Return what it was trained by: mae, simmim, simclr, clip, or nothing that is known."""
        if hasattr(self.model, "texts"):
            return "clip"
        told = self.config.get("pretraining")
        return str(told.get("by", "")) if isinstance(told, dict) else ""

    def whole(self) -> Any:
        """Return the encoder within what it was trained by, which paints or compares."""
        if hasattr(self.model, "texts"):
            return self.model
        if self.folder is None or "pretraining" not in self.config:
            raise UsageError(
                "what this encoder was trained with is not known; only its vectors are"
            )
        read = import_decoder if is_foreign(self.folder) else load_rest
        return read(self.folder, self.model, self.config["pretraining"])

    @torch.inference_mode()
    def paint(self, images: Any, *, seed: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
        """Mask some of images and paint it again.

        Returns for each image what came out, bytes (h, w, c), and which pixels were masked, (h, w).
        """
        whole = self.whole()
        if not hasattr(whole, "paint_over"):
            raise UsageError(f"an encoder trained by {self.trained_by} paints nothing")
        listed = [images] if self.is_one(images) else images
        pixels = [torch.from_numpy(self.format.read(image)) for image in listed]
        read = self.format.normalise(torch.stack(pixels).to(self.device))
        height, width = whole.size(read)
        noise = chance_of(seed, 0).random((len(read), height * width), np.float32)
        painted, masked = whole.paint_over(read, torch.from_numpy(noise).to(self.device))
        shown = self.format.restore(painted).permute(0, 2, 3, 1).cpu().numpy()
        return list(zip(shown, masked[:, 0].cpu().numpy(), strict=True))

    def _meets(self) -> tuple[Any, Reader]:
        """Return the model that compares images and texts, and what reads the texts."""
        if self.trained_by != "clip" or self.folder is None:
            raise UsageError("this encoder never saw texts; train one with: objective=clip")
        return self.whole(), Reader(load_tokenizer(self.folder))

    # Running

    @torch.inference_mode()
    def answer(
        self, inputs: list[Any], *, first: int = 0, **settings: Any
    ) -> list[Embedded | Classified | Unread]:
        """Make a vector of each image, or choose among texts; a path, an image or an array each."""
        how = self.check(settings)
        if how.threads:
            torch.set_num_threads(how.threads)
        format = replace(self.format, size=how.image) if how.image else self.format
        answer = self._chooser(how) if how.texts is not None else self._vectors
        answers: list[Embedded | Classified | Unread] = []
        for start in range(0, len(inputs), how.batch):
            some = inputs[start : start + how.batch]
            read = [read_image(image, format, how.broken) for image in some]
            good = [torch.from_numpy(pixels) for pixels in read if not isinstance(pixels, str)]
            rows = iter(self._answered(answer, good) if good else [])
            answers += [Unread(one) if isinstance(one, str) else next(rows) for one in read]
        return answers

    def _answered(self, answer: Callable[[Tensor], list[Any]], pixels: list[Tensor]) -> list[Any]:
        return answer(self.format.normalise(torch.stack(pixels).to(self.device)))

    def _vectors(self, images: Tensor) -> list[Embedded]:
        return [Embedded(row) for row in pooled(self.model, images).float().cpu().numpy()]

    def _chooser(self, how: EncoderSettings) -> Callable[[Tensor], list[Classified]]:
        """Return what chooses among texts for images."""
        texts = [text.strip() for text in str(how.texts).split("|")]
        if len(texts) < 2 or not all(texts) or len(set(texts)) < len(texts):
            raise UsageError(
                f"texts={how.texts!s:.40}; expected two or more, as in texts='a dog|a cat'"
            )
        if how.n_best > len(texts):
            raise UsageError(f"n_best={how.n_best} is more than the {len(texts)} texts")
        whole, reader = self._meets()
        rows = [row.ids for row in reader.texts(texts, whole.config.text.max_length)]
        theirs = meeting_texts(whole, rows, reader.tokenizer.pad)

        def choose(images: Tensor) -> list[Classified]:
            near = whole.compare(whole.images(images), theirs.to(images.device))
            chances = near.softmax(-1).cpu().numpy()
            return [Classified(texts, row, [int(row.argmax())]) for row in chances]

        return choose

    # Looking

    def picture(self, image: Any, **settings: Any):
        """Read an image and gather where the model looked, or what it paints where it is masked."""
        from regard.viewer.image import VIEWS, reconstruction

        how = fill(EncoderLookSettings, settings)
        lookup("view", how.view, {**VIEWS, "rebuilt": reconstruction})
        if how.view != "rebuilt":
            return picture_of(self.model, self.format, image, how, self._told)
        check_kind(image)
        ((painted, hidden),) = self.paint([image], seed=how.seed)
        height, width = hidden.shape
        original = self.format.read(image)[:, :height, :width]
        sides = original, np.where(hidden, np.uint8(127), original), painted.transpose(2, 0, 1)
        name = Path(image).name if isinstance(image, str | Path) else "image"
        return reconstruction(
            *(torch.from_numpy(side.copy()).unsqueeze(0) for side in sides),
            title=name,
            note=f"{100 * hidden.mean():.0f}% masked",
        )

    @torch.inference_mode()
    def _told(self, pixels: Tensor) -> dict[str, Any]:
        vector = pooled(self.model, self.format.normalise(pixels.to(self.device)))
        return {
            "note": f"a vector of {vector.shape[1]} numbers, of length {float(vector.norm()):.4g}"
        }

    # Judging

    def evaluate(
        self,
        settings: dict[str, Any],
        *,
        against: Any = None,
        names: tuple[str, str] = ("model", ""),
    ) -> LabelEvaluation | Evaluation:
        """Judge the vectors by labels that are learnt of them, or by texts that are found."""
        how = fill(ProbeSettings, settings)
        if how.data is None:
            raise UsageError(
                "data is missing; add data=FOLDER or data=TABLE with images and labels"
            )
        if how.threads:
            torch.set_num_threads(how.threads)
        if how.probe is None and self.trained_by == "clip":
            return self._retrieve(how, names)
        probe = lookup("probe", how.probe or "knn", PROBES)
        if how.part == "train":
            raise UsageError(
                "part=train is what a probe learns from; choose part=test or part=valid"
            )
        fitted, judge = self._probed(probe, how)
        own = {each.name for each in fields(ImageEvalSettings)} - {"probe"}
        rest = {key: value for key, value in settings.items() if key in own}
        other = None
        if against is not None:
            other = Encoder(against.model, against.format)._probed(probe, how)[1]
        result = judge.evaluate(rest, against=other, names=names)
        told = {"probe": how.probe or "knn", "share": how.share, **fitted.told}
        return replace(result, made_with={**result.made_with, **told})

    def _data(self, how: ProbeSettings, *, labelled: bool = True) -> ImageData:
        return load_images(
            str(how.data),
            test=how.test,
            valid=how.valid,
            need=("train", how.part) if labelled else (how.part,),
            format=replace(self.format, size=how.image) if how.image else self.format,
            options=ImageOptions(
                how.columns, (), how.tile, how.broken, labelled, header=how.header
            ),
            cache=cache_folder(),
        )

    def _probed(
        self, probe: Callable[[Known, ProbeSettings], Fitted], how: ProbeSettings
    ) -> tuple[Fitted, ImageClassifier]:
        """Learn labels of the vectors of the training part; return a classifier to be judged."""
        data = self._data(how)
        if len(data.classes) < 2:
            raise UsageError(f"{how.data}: one label, {data.classes}; expected at least two")
        train = data.parts["train"].part(how.share)
        known = Known(vectors(self.model, train, self.format), train.labels, len(data.classes))
        fitted = probe(known, how)
        model = Probed(self.model, fitted.chances).eval()
        return fitted, ImageClassifier(model, data.classes, self.format)

    def _retrieve(self, how: ProbeSettings, names: tuple[str, str]) -> Evaluation:
        """Find the text of each image and the image of each text."""
        whole, reader = self._meets()
        images: Images = self._data(how, labelled=False).parts[how.part]
        captions = of_part(
            images, captions_in(Path(str(how.data)), how.part, how.columns, how.header)
        )
        started = time.perf_counter()
        rows = Captioned.read(captions, reader, whole.config.text.max_length).rows
        texts = meeting_texts(whole, [row for some in rows for row in some], reader.tokenizer.pad)
        near = meeting_images(whole, images, self.format) @ texts.mT
        found = recall(near, [len(some) for some in rows])
        if how.outputs:
            flat = [text for some in captions for text in some]
            best = zip(captions, near.argmax(1).tolist(), strict=True)
            told = [{"captions": some, "prediction": flat[i]} for some, i in best]
            write_outputs(
                how.outputs, [{"image": images.where(n), **row} for n, row in enumerate(told)]
            )
        seconds = time.perf_counter() - started
        signature = f"recall|images:{len(images)}|texts:{near.shape[1]}"
        scores = [Score(f"{name}", value, signature) for name, value in found.items()]
        made_with = {"data": how.data, "part": how.part, "data_hash": images.sha, **made_here()}
        return Evaluation(names[0], scores, len(images), seconds, made_with, of="images")
