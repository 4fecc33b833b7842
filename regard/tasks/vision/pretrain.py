"""Pretraining of image encoders without labels: by masks, by two views, by captions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.augment import augments
from regard.data.captions import CaptionData, captions_in, captions_of, with_captions
from regard.data.images import ImageData
from regard.data.seeds import mix
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError
from regard.metrics.score import Score
from regard.modalities.image import IMAGE
from regard.models import family, pretrainer, task_changes
from regard.models.folder import load_rest, save_parts
from regard.models.protocols import Model
from regard.pretrained.folder import is_foreign
from regard.pretrained.mae_decoder import import_decoder
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.settings import fill
from regard.tasks.frame.answers import Classified, Embedded
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import resolve_train, size_of, with_parts
from regard.tasks.frame.task import Judged, listed
from regard.tasks.vision.images import EvalImages
from regard.tasks.vision.photos import (
    SHORT,
    ImageCodec,
    ImageTask,
    captioned,
    format_of,
    use_share,
    with_statistics,
)
from regard.tasks.vision.pretraining import (
    BATCHES,
    OBJECTIVES,
    CaptionBatches,
    LookPretrain,
    PretrainBatches,
    RunPretrain,
    TrainPretrain,
    around_config,
    image_vectors,
    pretrainer_config,
    pretrainer_of,
    recall_at_k,
    repaint,
    text_rows,
    text_vectors,
    texts_to_choose,
)
from regard.tasks.vision.probe import neighbour_accuracy, pooled, probed

PROBE_KEYS = ("probe", "share", "neighbours")  # of an evaluation


class Pretrain(ImageTask[Any]):
    """An encoder that turns images into vectors, trained without labels."""

    name, holds, target = "pretrain", "images", ""
    Train, Run, Eval, Look = TrainPretrain, RunPretrain, EvalImages, LookPretrain
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"lr": 0.002, "steps": 6000},
        "small": {"lr": 0.0015, "steps": 15_000},
        "base": {"lr": 0.001, "steps": 40_000},
        "big": {"lr": 0.0005, "steps": 100_000},
    }
    short = {
        **SHORT,
        "mask_share": "pretrainer.mask_share",
        "target": "pretrainer.target",
        "decoder_depth": "pretrainer.depth",
        "decoder_width": "pretrainer.block.width",
        "decoder_heads": "pretrainer.block.heads",
        "latent": "pretrainer.latent",
        "beta": "pretrainer.beta",
        "temperature": "pretrainer.temperature",
        "projection_width": "pretrainer.width",
        "max_length": "pretrainer.text.max_length",
    }

    # Training: the model is the encoder within what trains it

    @classmethod
    def resolve(cls, values: Mapping[str, Any], origin: Origin | None = None) -> Any:
        """Complete what a user gave to the settings of a training."""
        origin = origin or (Origin.load(values["init"]) if values.get("init") else None)
        name, objective = cls.family_of(values, origin), str(values.get("objective", "masked"))
        by = pretrainer_of(objective, name)
        model = replace(cls.shape(name, values, origin), **task_changes(name, cls.name))
        if by == "mae" and origin is None:
            model = replace(model, pool="mean")  # no other vector is about all patches
        around = pretrainer_config(by, model, size_of(values))
        defaults = {**OBJECTIVES[objective], "pretrainer": around}
        settings = resolve_train(
            with_parts(cls.Train, model=family(name)[0], pretrainer=pretrainer(by)[0]),
            {**values, "family": name},
            config=model,
            sizes={size: {**row, **defaults} for size, row in cls.size_table(values).items()},
            short=cls.short,
            holds="images and captions" if by == "clip" else "images",
        )
        augments(settings.augment)
        if settings.batch < 2 and by not in ("mae", "vae"):
            raise UsageError(f"batch={settings.batch}; there must be others to tell an image from")
        if settings.model.labels:
            raise UsageError("model.labels is for training with labels: regard train classify")
        return settings

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> CaptionData:
        """Read the images, with labels if they have some: by them neighbours are judged."""
        clip = settings.objective == "clip"
        try:
            data: ImageData = cls.load_images(settings, origin, labelled=not clip)
        except UsageError:
            if clip:
                raise
            data = cls.load_images(settings, origin, labelled=False)
        if not 2 <= len(data.classes) <= len(data.parts["train"]) // 2:
            data.classes = []
        use_share(data, settings.share)
        return captioned(data, settings) if clip else with_captions(data, {})

    @classmethod
    def make_codec(cls, data: CaptionData, settings: Any, learnt: Any, origin: Any) -> ImageCodec:
        """Take the format of the images, and learn the tokenizer of their captions."""
        tokenizer = None
        if data.captions:
            texts = [text for some in data.captions["train"] for text in some]
            tokenizer = learnt(lambda: train_tokenizer(texts, vocab=settings.pieces), init=False)
        around = around_config(settings, tokenizer)
        by = pretrainer_of(settings.objective, settings.family)
        pretraining = {"by": by, **asdict(around)}
        return ImageCodec(with_statistics(data), tokenizer=tokenizer, pretraining=pretraining)

    @classmethod
    def make_model(cls, data: CaptionData, codec: ImageCodec, settings: Any, origin: Any) -> Any:
        """Build an encoder and what trains it around it."""
        config, around = settings.model, around_config(settings, codec.tokenizer)
        if origin is None:
            config = replace(config, channels=codec.format.channels, image=codec.format.size)
        encoder = cls.build(settings.family, config, settings, origin, fresh="head.")
        by = pretrainer_of(settings.objective, settings.family)
        torch.manual_seed(mix(settings.seed, "around"))
        return settings.family, pretrainer(by)[1](encoder, around).to(settings.device)

    def published(self) -> nn.Module:
        """Return the encoder, whose folder it is."""
        return self.model.encoder

    def publish(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write the encoder, and what it was trained with beside it."""
        save_parts(folder, weights)

    def batches(self, data: CaptionData, settings: Any) -> PretrainBatches:
        """Return batches of what the objective asks."""
        height, width = self.model.encoder.grid((self.format.size, self.format.size))
        self.tokens = height * width
        by = self.codec.pretraining["by"]
        self.dynamic = by == "clip"
        self.feed = BATCHES[by](data, settings, self.tokens, self.model, self.codec)
        return self.feed

    def count(self, batch: Any) -> tuple[int, int]:
        """Return the images, which the loss counts, and their tokens."""
        return len(batch[0]), len(batch[0]) * self.tokens

    def loss(self, batch: Any, settings: Any) -> Tensor:
        """Return the summed loss of a batch."""
        return self.model.loss(*batch)

    @torch.inference_mode()
    def validate(self, data: CaptionData, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the loss on the validation part, and what the vectors are worth."""
        scores = {"loss": self.feed.validation_loss(self.model)}
        scores["better"] = -scores["loss"]
        if data.classes:
            scores["neighbours"] = neighbour_accuracy(self.model.encoder, data, self.format)
        if isinstance(self.feed, CaptionBatches):
            texts = text_vectors(self.model, self.feed.rows["valid"], self.feed.pad)
            near = image_vectors(self.model, data["valid"], self.format) @ texts.mT
            recalls = recall_at_k(near, [len(some) for some in data.captions["valid"]])
            scores["recall"] = scores["better"] = sum(recalls.values()) / len(recalls)
            scores |= recalls
        return scores

    def title(self, data: CaptionData, settings: Any) -> str:
        """Return what the model card says that the model is."""
        by = pretrainer_of(settings.objective, settings.family)
        return f"An encoder of images ({settings.family}), trained by {by} without labels"

    def facts(self, data: CaptionData, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        return {"images": len(data["train"])}

    # Using: the model is the encoder alone

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: Mapping[str, Any]) -> ImageCodec:
        """Read the format of images that a folder names."""
        if not hasattr(model, "features") or not hasattr(model, "pool"):
            raise UsageError(
                f"{folder / 'config.json'}: a model of family {config['family']}, which reads no "
                "images"
            )
        return ImageCodec(format_of(folder, model, config), folder=folder)

    @property
    def trained_by(self) -> str:
        """Return what it was trained by: a name of PRETRAINERS, or nothing that is known."""
        if hasattr(self.model, "texts"):
            return "clip"
        given = self.config.get("pretraining")
        return str(given.get("by", "")) if isinstance(given, dict) else ""

    def whole(self) -> Any:
        """Return the encoder within what it was trained by, which paints or compares."""
        if hasattr(self.model, "texts"):
            return self.model
        folder = self.codec.folder
        if folder is None or "pretraining" not in self.config:
            raise UsageError(
                "what this encoder was trained with is not known; only its vectors are"
            )
        read = import_decoder if is_foreign(folder) else load_rest
        return read(folder, self.model, self.config["pretraining"])

    @torch.inference_mode()
    def paint(self, images: Any, *, seed: int = 1) -> list[tuple[np.ndarray, np.ndarray]]:
        """Mask some of images and paint it again.

        Returns for each image what came out, bytes (h, w, c), and which pixels were masked, (h, w).
        """
        whole = self.whole()
        if not hasattr(whole, "reconstruct"):
            raise UsageError(f"an encoder trained by {self.trained_by} paints nothing")
        listed = [images] if IMAGE.is_one(images) else images
        pixels = [torch.from_numpy(self.format.read(image)) for image in listed]
        read = self.format.normalise(torch.stack(pixels).to(self.device))
        return repaint(whole, read, self.format, seed)

    def _with_texts(self) -> tuple[Any, Any]:
        """Return the model that compares images and texts, and its tokenizer."""
        if self.trained_by != "clip" or self.codec.folder is None:
            raise UsageError("this encoder never saw texts; train one with: objective=clip")
        return self.whole(), load_tokenizer(self.codec.folder)

    @torch.inference_mode()
    def predict(self, inputs: list[Any], settings: Any, *, first: int = 0) -> list[Any]:
        """Embed images, or choose among texts for each."""
        self.answerer = self._embed if settings.texts is None else self._chooser(settings)
        return super().predict(inputs, settings, first=first)

    def answer_pixels(self, pixels: Tensor, settings: Any, lines: Sequence[int]) -> list[Any]:
        """Answer bytes (n, c, h, w)."""
        return self.answerer(self.format.normalise(pixels.to(self.device)))

    def _embed(self, images: Tensor) -> list[Embedded]:
        return [Embedded(row) for row in pooled(self.model, images).float().cpu().numpy()]

    def _chooser(self, settings: Any) -> Callable[[Tensor], list[Classified]]:
        """Return what chooses among texts for images."""
        texts = texts_to_choose(settings.texts, settings.n_best)
        whole, tokenizer = self._with_texts()
        rows = text_rows(texts, tokenizer, whole.config.text.max_length)
        theirs = text_vectors(whole, rows, tokenizer.pad)

        def choose(images: Tensor) -> list[Classified]:
            near = whole.compare(whole.images(images), theirs.to(images.device))
            probs = near.softmax(-1).cpu().numpy()
            return [Classified(texts, row, [int(row.argmax())]) for row in probs]

        return choose

    def explain(self, given: Any, settings: Any) -> Any:
        """Read an image and gather where the model looked, or what it paints where masked."""
        from regard.viewer.image import reconstruction

        if settings.view != "rebuilt":
            return super().explain(given, settings)
        ((painted, hidden),) = self.paint([IMAGE.check(given)], seed=settings.seed)
        height, width = hidden.shape
        original = self.format.read(given)[:, :height, :width]
        sides = original, np.where(hidden, np.uint8(127), original), painted.transpose(2, 0, 1)
        name = Path(given).name if isinstance(given, str | Path) else "image"
        return reconstruction(
            *(torch.from_numpy(side.copy()).unsqueeze(0) for side in sides),
            title=name,
            note=f"{100 * hidden.mean():.0f}% masked",
        )

    @torch.inference_mode()
    def describe(self, pixels: Tensor, settings: Any) -> dict[str, Any]:
        """Say how long the vector of an image is."""
        vector = pooled(self.model, self.format.normalise(pixels.to(self.device)))
        length = f"{float(vector.norm()):.4g}"
        return {"note": f"a vector of {vector.shape[1]} numbers, of length {length}"}

    # Judging: by labels that are learnt from vectors, or with texts by retrieval

    def evaluate(self, settings: Mapping[str, Any], **rivals: Any) -> Any:
        """Judge the vectors by labels that are learnt from them, or by texts that are found."""
        if settings.get("probe") is None and self.trained_by == "clip":
            return super().evaluate(settings, **{**rivals, "against": None})
        asked = fill(EvalImages, {"probe": "knn", **settings})
        if asked.data is None:
            raise UsageError(f"data is missing; add data=FILE or data=FOLDER with {self.holds}")
        with self.using(asked):
            made = [probed(each, asked) for each in (self, *listed(rivals.pop("against", None)))]
        rest = {key: v for key, v in settings.items() if key not in PROBE_KEYS}
        return made[0].evaluate(rest, against=made[1:], **rivals)

    def read_test(self, settings: Any) -> CaptionData:
        """Read images and their captions."""
        data = self.load_test(settings, trained=None, labelled=False)
        given = Path(str(settings.data)), settings.part, settings.columns, settings.header
        captions = captions_of(data[settings.part], captions_in(*given))
        return with_captions(data, {settings.part: captions})

    def predict_examples(self, data: CaptionData, settings: Any) -> Tensor:
        """Return the similarity of each image to each text."""
        images, captions = data[settings.part], data.captions[settings.part]
        whole, tokenizer = self._with_texts()
        texts = [text for some in captions for text in some]
        rows = text_rows(texts, tokenizer, whole.config.text.max_length)
        theirs = text_vectors(whole, rows, tokenizer.pad)
        return image_vectors(whole, images, self.format) @ theirs.mT

    def score(self, data: CaptionData, predictions: Tensor, settings: Any) -> Judged:
        """Return how often what belongs together is among the first found."""
        images, captions = data[settings.part], data.captions[settings.part]
        signature = f"recall|images:{len(images)}|texts:{predictions.shape[1]}"
        recalls = recall_at_k(predictions, [len(some) for some in captions])
        return Judged([Score(k, v, signature) for k, v in recalls.items()], len(images))

    def outputs(
        self, data: CaptionData, predictions: Tensor, settings: Any
    ) -> list[dict[str, Any]]:
        """Return each image with its captions and the text that was found."""
        images, captions = data[settings.part], data.captions[settings.part]
        texts = [text for some in captions for text in some]
        return [
            {"image": images.where(n), "captions": captions[n], "prediction": texts[best]}
            for n, best in enumerate(predictions.argmax(1).tolist())
        ]
