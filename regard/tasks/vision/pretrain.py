"""Pretraining of image encoders without labels: by masks, by two views, by captions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.augment import augments
from regard.data.captions import CaptionData, captions_in, captions_of, with_captions
from regard.data.seeds import mix
from regard.data.tokenize import train_tokenizer
from regard.errors import UsageError
from regard.metrics.score import Score
from regard.modalities.base import One
from regard.modalities.image import IMAGE, stacked
from regard.models import pretrainer, task_changes
from regard.models.folder import load_rest, save_parts
from regard.models.protocols import Model
from regard.pretrained.folder import is_foreign
from regard.pretrained.mae_decoder import import_decoder
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.tasks.frame.answers import Classified, Embedded
from regard.tasks.frame.media import MediaCodec
from regard.tasks.frame.origin import Origin
from regard.tasks.labels.classifier import answer_groups
from regard.tasks.parts import (
    Answer,
    Judge,
    Learnt,
    Lesson,
    Objective,
    Predictor,
    ScoredPredictions,
    System,
    Task,
    V,
    build_model,
    complete,
    size_of,
    usual_shape,
)
from regard.tasks.runner import Runner
from regard.tasks.vision.images import EvalImages
from regard.tasks.vision.photos import (
    IMAGE_SHORT_KEYS,
    captioned,
    read_images,
    training_images,
    use_share,
)
from regard.tasks.vision.pretraining import (
    ENCODER_PRETRAINERS,
    PRETRAIN_BATCHES,
    PRETRAIN_OBJECTIVES,
    ClipBatches,
    LookPretrain,
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
from regard.viewer.picture import Picture


class PretrainObjective(Objective[TrainPretrain, CaptionData, MediaCodec]):
    """Trains an encoder of images within what trains it, without labels."""

    Settings = TrainPretrain
    published_sizes = True
    sizes = {
        "tiny": {"lr": 0.002, "steps": 6000},
        "small": {"lr": 0.0015, "steps": 15_000},
        "base": {"lr": 0.001, "steps": 40_000},
        "big": {"lr": 0.0005, "steps": 100_000},
    }
    short = {
        **IMAGE_SHORT_KEYS,
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

    def resolve(
        self, task: Task, values: Mapping[str, Any], origin: Origin | None
    ) -> TrainPretrain:
        """Settings of a training, completed from what a user gave."""
        name, objective = task.family_of(values, origin), str(values.get("objective", "masked"))
        by = pretrainer_of(objective, name)
        model = replace(usual_shape(name, values, origin), **task_changes(name, task.name))
        if by == "mae" and origin is None:
            model = replace(model, pool="mean")  # no other vector is about all patches
        around = pretrainer_config(by, model, size_of(values))
        defaults = {**PRETRAIN_OBJECTIVES[objective], "pretrainer": around}
        settings = complete(
            task,
            values,
            name,
            model,
            sizes={size: {**row, **defaults} for size, row in task.size_rows(values).items()},
            holds="images and captions" if by == "clip" else "",
            pretrainer=pretrainer(by)[0],
        )
        augments(settings.augment)
        if settings.batch < 2 and by not in ("mae", "vae"):
            raise UsageError(f"batch={settings.batch}; there must be others to tell an image from")
        if settings.model.labels:
            raise UsageError("model.labels is for training with labels: regard train classify")
        return settings

    def read(self, settings: TrainPretrain, origin: Origin | None) -> CaptionData:
        """Images, with labels if they have some: by them neighbours are judged."""
        clip, load = settings.objective == "clip", partial(training_images, settings, origin)
        try:
            data = load(labelled=not clip)
        except UsageError:
            if clip:
                raise
            data = load(labelled=False)
        if not 2 <= len(data.classes) <= len(data.parts["train"]) // 2:
            data.classes = []
        use_share(data, settings.share)
        return captioned(data, settings) if clip else with_captions(data, {})

    def codec(
        self, data: CaptionData, settings: TrainPretrain, learnt: Learnt, origin: Origin | None
    ) -> MediaCodec:
        """Format of the images, and the tokenizer of their captions."""
        tokenizer = None
        if data.captions:
            texts = [text for some in data.captions["train"] for text in some]
            tokenizer = learnt(lambda: train_tokenizer(texts, vocab=settings.pieces), init=False)
        around = around_config(settings, tokenizer)
        by = pretrainer_of(settings.objective, settings.family)
        more = {"pretraining": {"by": by, **asdict(around)}}
        return MediaCodec(IMAGE, IMAGE.settle(data, None), tokenizer=tokenizer, more=more)

    def model(
        self, data: CaptionData, codec: MediaCodec, settings: TrainPretrain, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """An encoder, and what trains it around it."""
        config, around = settings.model, around_config(settings, codec.tokenizer)
        if origin is None:
            config = replace(config, channels=codec.format.channels, image=codec.format.size)
        encoder = build_model(settings.family, config, settings, origin, fresh="head.")
        torch.manual_seed(mix(settings.seed, "around"))
        around = pretrainer(codec.more["pretraining"]["by"])[1](encoder, around)
        return settings.family, around.to(settings.device)

    def lesson(self, runner: Runner[Any], data: CaptionData, settings: TrainPretrain) -> Lesson:
        """Batches of what the objective asks, and its loss; the encoder alone is published."""
        model, codec = runner.model, runner.codec
        by, format = pretrainer_of(settings.objective, settings.family), codec.format
        if "pretraining" not in codec.more:  # a loaded encoder, within what it was trained by
            model = runner.predictor.whole()
            if by == "clip":
                codec = replace(codec, tokenizer=runner.predictor.with_texts()[1])
        height, width = model.encoder.grid((format.size, format.size))
        tokens = height * width
        batches = PRETRAIN_BATCHES[by](data, settings, tokens, model, codec)

        @torch.inference_mode()
        def validate(share: float) -> dict[str, float]:
            """Loss on the validation part, and what the vectors are worth."""
            scores = {"loss": batches.validation_loss(model)}
            scores["better"] = -scores["loss"]
            if data.classes:
                scores["neighbours"] = neighbour_accuracy(model.encoder, data, format)
            if isinstance(batches, ClipBatches):
                texts = text_vectors(model, batches.rows["valid"], batches.pad)
                near = image_vectors(model, data["valid"], format) @ texts.mT
                recalls = recall_at_k(near, [len(some) for some in data.captions["valid"]])
                scores["recall"] = scores["better"] = sum(recalls.values()) / len(recalls)
                scores |= recalls
            return scores

        return Lesson(
            batches=batches,
            count=lambda batch: (len(batch[0]), len(batch[0]) * tokens),
            loss=lambda batch: model.loss(*batch),
            validate=validate,
            title=f"An encoder of images ({settings.family}), trained by {by} without labels",
            facts={"images": len(data["train"])},
            published=model.encoder,
            publish=save_parts,
            dynamic=by == "clip",
        )


class ImageEmbedder(Predictor[Answer[Any], RunPretrain, LookPretrain]):
    """Turns images into vectors, or chooses among texts for them."""

    Settings, Look = RunPretrain, LookPretrain
    codec: MediaCodec

    def check(self, settings: V) -> V:
        """Judge by nearest neighbours, unless texts can be found or another probe is asked for."""
        if isinstance(settings, EvalImages) and settings.probe is None:
            return settings if self.trained_by == "clip" else replace(settings, probe="knn")
        return settings

    @property
    def trained_by(self) -> str:
        """What it was trained by: a name of PRETRAINERS, or nothing that is known."""
        if hasattr(self.model, "texts"):
            return "clip"
        given = self.config.get("pretraining")
        return str(given.get("by", "")) if isinstance(given, dict) else ""

    @property
    def trained_with(self) -> dict[str, str]:
        """Settings of a training that say by what it was trained."""
        names = {by: name for name, by in ENCODER_PRETRAINERS.items()}
        return {"objective": names.get(self.trained_by, "masked")}

    def whole(self) -> Any:
        """The encoder within what it was trained by, which paints or compares."""
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

        For each image that is what came out, bytes (h, w, c), and which pixels were masked, (h, w).
        """
        whole = self.whole()
        if not hasattr(whole, "reconstruct"):
            raise UsageError(f"an encoder trained by {self.trained_by} paints nothing")
        format, listed = self.codec.format, [images] if IMAGE.is_one(images) else images
        pixels = [torch.from_numpy(format.read(image)) for image in listed]
        read = format.normalise(torch.stack(pixels).to(self.device))
        return repaint(whole, read, format, seed)

    def with_texts(self) -> tuple[Any, Any]:
        """The model that compares images and texts, and its tokenizer."""
        if self.trained_by != "clip" or self.codec.folder is None:
            raise UsageError("this encoder never saw texts; train one with: objective=clip")
        return self.whole(), load_tokenizer(self.codec.folder)

    @torch.inference_mode()
    def predict(self, inputs: list[One], settings: RunPretrain, *, first: int = 0) -> list[Any]:
        """Vectors of images, or the text that is chosen for each."""
        answer = self._embed if settings.texts is None else self._chooser(settings)
        return answer_groups(
            self.codec.groups(inputs, settings),
            IMAGE,
            lambda raws, lines: answer(self._normalised(raws)),
        )

    def _normalised(self, raws: Any) -> Tensor:
        return self.codec.format.normalise(stacked(raws).to(self.device))

    def _embed(self, images: Tensor) -> list[Embedded]:
        return [Embedded(row) for row in pooled(self.model, images).float().cpu().numpy()]

    def _chooser(self, settings: RunPretrain) -> Callable[[Tensor], list[Classified]]:
        """What chooses among texts for images."""
        texts = texts_to_choose(str(settings.texts), settings.n_best)
        whole, tokenizer = self.with_texts()
        rows = text_rows(texts, tokenizer, whole.config.text.max_length)
        theirs = text_vectors(whole, rows, tokenizer.pad)

        def choose(images: Tensor) -> list[Classified]:
            near = whole.compare(whole.images(images), theirs.to(images.device))
            probs = near.softmax(-1).cpu().numpy()
            return [Classified(texts, row, [int(row.argmax())]) for row in probs]

        return choose

    def explain(self, given: One, settings: LookPretrain) -> Picture:
        """Read an image and gather where the model looked, or what it paints where masked."""
        from regard.viewer.image import reconstruction

        if settings.view != "rebuilt":
            return self.codec.picture(self.model, given, settings, self._describe)
        ((painted, hidden),) = self.paint([given], seed=settings.seed)
        height, width = hidden.shape
        original = self.codec.format.read(given)[:, :height, :width]
        sides = original, np.where(hidden, np.uint8(127), original), painted.transpose(2, 0, 1)
        name = Path(given).name if isinstance(given, str | Path) else "image"
        return reconstruction(
            *(torch.from_numpy(side.copy()).unsqueeze(0) for side in sides),
            title=name,
            note=f"{100 * hidden.mean():.0f}% masked",
        )

    @torch.inference_mode()
    def _describe(self, pixels: Tensor) -> dict[str, Any]:
        """How long the vector of an image is, as a field of its picture."""
        vector = pooled(self.model, self._normalised(pixels))
        length = f"{float(vector.norm()):.4g}"
        return {"note": f"a vector of {vector.shape[1]} numbers, of length {length}"}


class VectorJudge(Judge[CaptionData, EvalImages, Tensor]):
    """Judges vectors of images by labels that are learnt from them, or by texts that are found."""

    def entrants(
        self, runners: Sequence[Runner[Any]], settings: EvalImages, given: Mapping[str, Any]
    ) -> list[tuple[Runner[Any], Any]]:
        """The models, or probes on their vectors."""
        return probed(runners, settings) or super().entrants(runners, settings, given)

    def read(self, runner: Runner[Any], settings: EvalImages) -> CaptionData:
        """Images and their captions."""
        data = read_images(runner, settings, trained=None, labelled=False)
        given = Path(str(settings.data)), settings.part, settings.columns, settings.header
        captions = captions_of(data[settings.part], captions_in(*given))
        return with_captions(data, {settings.part: captions})

    def predict(
        self, runner: Runner[Any], data: CaptionData, settings: EvalImages, like: Any = None
    ) -> Tensor:
        """Similarity of each image to each text."""
        whole, tokenizer = runner.predictor.with_texts()
        texts = [text for some in data.captions[settings.part] for text in some]
        rows = text_rows(texts, tokenizer, whole.config.text.max_length)
        theirs = text_vectors(whole, rows, tokenizer.pad)
        return image_vectors(whole, data[settings.part], runner.codec.format) @ theirs.mT

    def score(
        self,
        runner: Runner[Any],
        data: CaptionData,
        predictions: Tensor,
        settings: EvalImages,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """How often what belongs together is among the first found."""
        images, captions = data[settings.part], data.captions[settings.part]
        signature = f"recall|images:{len(images)}|texts:{predictions.shape[1]}"
        recalls = recall_at_k(predictions, [len(some) for some in captions])
        texts = [text for some in captions for text in some]
        rows = [
            {"image": images.where(n), "captions": captions[n], "prediction": texts[best]}
            for n, best in enumerate(predictions.argmax(1).tolist())
        ]
        scores = [Score(name, value, signature) for name, value in recalls.items()]
        return ScoredPredictions(scores, len(images), rows=rows)


def load_codec(folder: Path, model: Model, config: Mapping[str, Any]) -> MediaCodec:
    """Format of images that a folder names."""
    if not hasattr(model, "features") or not hasattr(model, "pool"):
        raise UsageError(
            f"{folder / 'config.json'}: a model of family {config['family']}, which reads no images"
        )
    return MediaCodec(IMAGE, IMAGE.saved_format(folder, model, config), folder=folder)


PRETRAIN = Task(
    name="pretrain",
    holds="images",
    inputs=IMAGE,
    predictor=ImageEmbedder,
    judge=VectorJudge(),
    load_codec=load_codec,
    objective=PretrainObjective(),
    target="",
    unit="images",
    judged=EvalImages,
)
