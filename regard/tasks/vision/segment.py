"""Semantic segmentation: images and masks to a model that gives each pixel a class."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data.augment import augments
from regard.data.image_format import flat, open_image, upright
from regard.data.images import Images
from regard.data.labels import saved_labels
from regard.data.masks import MaskData, MaskOf, find_masks, with_masks
from regard.data.parts import PARTS
from regard.data.seeds import mix
from regard.errors import UsageError
from regard.metrics.overlap import Overlaps
from regard.metrics.score import Comparison
from regard.modalities.base import One
from regard.modalities.image import IMAGE, photo_of, stacked
from regard.models import family
from regard.models.protocols import Model
from regard.tasks.frame.media import MediaCodec
from regard.tasks.frame.origin import Origin
from regard.tasks.labels.classifier import answer_groups
from regard.tasks.parts import (
    Judge,
    Learnt,
    Lesson,
    Objective,
    Predictor,
    ScoredPredictions,
    System,
    Task,
    V,
    complete,
)
from regard.tasks.runner import Runner
from regard.tasks.vision.photos import (
    IMAGE_SHORT_KEYS,
    IMAGE_SIZES,
    begin_around,
    encoder_shape,
    read_images,
    training_images,
    use_share,
)
from regard.tasks.vision.segmenting import (
    DRAWINGS,
    NO_TARGET,
    SEGMENTER,
    EvalSegment,
    LookSegment,
    MaskBatch,
    MaskBatches,
    RunSegment,
    Segmented,
    TrainSegment,
    overlaid,
    seen_whole,
)
from regard.tasks.vision.written import check_count, check_out, write_answer
from regard.viewer.picture import Picture

SegmenterConfig, Segmenter = family(SEGMENTER)
_SIDE = 48  # places of a side, at most, by which the classes of a picture are shown
_COMMONEST = "the commonest class"


class SegmentObjective(Objective[TrainSegment, MaskData, MediaCodec]):
    """Learns the class of each pixel by cross-entropy."""

    Settings = TrainSegment
    serves = "images"
    published_sizes = True
    sizes = {size: {**row, "batch": 32} for size, row in IMAGE_SIZES.items()}
    short = IMAGE_SHORT_KEYS

    def resolve(self, task: Task, values: Mapping[str, Any], origin: Origin | None) -> TrainSegment:
        """Settings of a training; `init` is a segmenter, or an encoder that gets a new decoder."""
        name, model = encoder_shape(task, values, origin)
        given = dict(values)
        if origin is not None and origin.family == SEGMENTER:
            given.setdefault("decoder", origin.model.config.decoder)
        elif origin is not None:  # what learns is new, and learns like it
            given.setdefault("lr", task.size_rows(values)[str(values.get("size", "tiny"))]["lr"])
        settings = complete(task, given, name, model)
        augments(settings.augment)
        return settings

    def read(self, settings: TrainSegment, origin: Origin | None) -> MaskData:
        """Images and their masks."""
        data = str(settings.data)
        where, mask_of = _masks(settings, ("train", "valid"))
        images = training_images(replace(settings, data=where), origin, labelled=False)
        use_share(images, settings.share)
        return with_masks(images, data, mask_of)

    def codec(
        self, data: MaskData, settings: TrainSegment, learnt: Learnt, origin: Origin | None
    ) -> MediaCodec:
        """The format of the images, and the classes."""
        return MediaCodec(IMAGE, seen_whole(IMAGE.settle(data, None)), data.classes)

    def model(
        self, data: MaskData, codec: MediaCodec, settings: TrainSegment, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Encoder and decoder; what is in init keeps its weights."""
        encoder = IMAGE.shape(settings.model, codec.format, new=origin is None)
        plain: Any = SegmenterConfig()
        config = replace(
            plain,
            encoder=type(plain.encoder)(settings.family, encoder),
            classes=len(codec.labels),
            decoder=settings.decoder,
        )
        torch.manual_seed(mix(settings.seed, "weights"))
        model = Segmenter(config).to(settings.device)
        same = origin is not None and origin.was("segment", codec.labels)
        begin_around(model, settings, origin, SEGMENTER, "" if same else "decoder.")
        return SEGMENTER, model

    def lesson(self, runner: Runner[Any], data: MaskData, settings: TrainSegment) -> Lesson:
        """Batches of images and masks, and the cross-entropy of their pixels."""
        model, classes, segment = runner.model, len(data.classes), runner.predictor.masks

        def loss(batch: MaskBatch) -> Tensor:
            how: dict[str, Any] = {"ignore_index": NO_TARGET, "reduction": "sum"}
            return F.cross_entropy(model(batch.inputs), batch.targets, **how)

        def count(batch: MaskBatch) -> tuple[int, int]:
            places = np.prod(model.grid(tuple(batch.inputs.shape[2:])))
            learnt = int((batch.targets != NO_TARGET).sum())
            return max(1, learnt), len(batch.inputs) * int(places)

        def validate(share: float) -> dict[str, float]:
            scores = Overlaps.of(data.masks["valid"], segment(data["valid"]), classes).values()
            return {**scores, "better": scores["mean_iou"]}

        return Lesson(
            batches=MaskBatches(data["train"], data.masks["train"], runner.codec.format, settings),
            count=count,
            loss=loss,
            validate=validate,
            title=f"One of {classes} classes for each pixel of an image "
            f"({settings.family}, {settings.decoder} decoder)",
            facts={"images": len(data["train"]), "classes": classes},
            baselines=lambda: _commonest(data.masks["valid"], classes),
            dynamic=False,
        )


def _masks(settings: TrainSegment | EvalSegment, parts: Sequence[str]) -> tuple[str, MaskOf]:
    """Where the images of a set are, and what finds the mask of each."""
    told = settings.valid, settings.columns, settings.header, settings.test
    return find_masks(str(settings.data), parts, *told)


def _commonest(masks: np.ndarray, classes: int) -> dict[str, dict[str, float]]:
    """Scores of the class that most pixels are of."""
    often = np.bincount(masks[masks < classes], minlength=classes)
    same = np.full_like(masks, often.argmax())
    return {_COMMONEST: Overlaps.of(masks, same, classes).values()}


class SegmentPredictor(Predictor[Segmented, RunSegment, LookSegment]):
    """Gives each pixel of an image its most probable class."""

    Settings, Look = RunSegment, LookSegment

    def check(self, settings: V) -> V:
        """Refuse files to write that are no images."""
        check_out(settings.out if isinstance(settings, RunSegment) else None)
        return settings

    @torch.inference_mode()
    def logits(self, pixels: Tensor) -> Tensor:
        """Logits (n, classes, h, w) of bytes (n, c, h, w)."""
        return self.model(self.codec.format.normalise(pixels.to(self.device)))

    def masks(self, images: Images, batch: int = 64) -> np.ndarray:
        """Classes (n, h, w) of the pixels of a part."""
        rows = np.split(np.arange(len(images)), range(batch, len(images), batch))
        found = [self.logits(images.read(some)).argmax(1).byte().cpu() for some in rows]
        return torch.cat(found).numpy()

    def predict(self, inputs: list[One], settings: RunSegment, *, first: int = 0) -> list[Any]:
        """Segment images batch by batch, and write masks or overlays where told."""
        check_count(settings.out, first + len(inputs))

        def answer(raws: list[np.ndarray], lines: list[int]) -> list[Segmented]:
            found = self.logits(stacked(raws)).argmax(1)
            return [
                self._answer(inputs[line - first], mask, line, settings)
                for line, mask in zip(lines, found, strict=True)
            ]

        return answer_groups(self.codec.groups(inputs, settings), IMAGE, answer, first)

    def _answer(self, given: One, mask: Tensor, number: int, settings: RunSegment) -> Segmented:
        photo = np.asarray(flat(upright(open_image(given))))
        own = F.interpolate(mask[None, None].float(), photo.shape[:2]).byte()[0, 0].cpu().numpy()
        if not settings.out:
            return Segmented(own, self.codec.labels)
        drawn = DRAWINGS[settings.draw](photo, own, self.codec.labels)
        return Segmented(own, self.codec.labels, write_answer(drawn, settings.out, given, number))

    def describe(self, pixels: Tensor) -> dict[str, Any]:
        """Segment an image for its picture."""
        mask = self.logits(pixels)[0].argmax(0).byte().cpu().numpy()
        return {"output": str(Segmented(mask, self.codec.labels))}

    def explain(self, given: One, settings: LookSegment) -> Picture:
        """Segment an image and show where each class is, or how the image was seen."""
        from regard.layers.layout import TokenGrid
        from regard.viewer.image import placed_view
        from regard.viewer.picture import Placement

        pixels, photo, name = photo_of(self.codec.format_for(settings), given)
        logits, classes = self.logits(pixels)[0], self.codec.labels
        mask = F.interpolate(logits[None], photo.shape[:2], mode="bilinear")[0].argmax(0)
        seen = np.asarray(overlaid(photo, mask.byte().cpu().numpy(), classes))
        if settings.view != "classes":
            own = self.codec.picture(self.model.encoder, given, settings, self.describe)
            return own if own.tiles else replace(own, photo=seen)
        high, wide = (min(_SIDE, side) for side in logits.shape[1:])
        probs = F.adaptive_avg_pool2d(logits.softmax(0), (high, wide)).flatten(1)
        places = TokenGrid((), high, wide, 1 / high, 1 / wide)
        asked = TokenGrid(tuple(classes), 0, 0, 1.0, 1.0)
        placement = Placement(asked, places, np.arange(len(classes)), np.arange(high * wide)[None])
        view = placed_view("classes", probs[None].cpu().numpy(), placement, kind="cross")
        return Picture(
            title=name,
            views=[view],
            source=name,
            **self.describe(pixels),
            note="where each class is probable, over the photo tinted by the likeliest",
            opens=(view.name, "mean"),
            photo=seen,
            query="mean",
        )


class SegmentJudge(Judge[MaskData, EvalSegment, Overlaps]):
    """Judges masks by the intersection over union of their classes, and by right pixels."""

    Settings = EvalSegment

    def entrants(
        self, runners: Sequence[Runner[Any]], settings: EvalSegment, given: Mapping[str, Any]
    ) -> list[tuple[Runner[Any], EvalSegment]]:
        """Models of the same classes."""
        first, *others = runners
        for other in others:
            if other.name == first.name and other.codec.labels != first.codec.labels:
                raise UsageError(
                    f"against= names a model of other classes "
                    f"({', '.join(other.codec.labels[:6])}); compare models of the same"
                )
        return super().entrants(runners, settings, given)

    def read(self, runner: Runner[Any], settings: EvalSegment) -> MaskData:
        """Images as a model takes them, and their masks."""
        data = str(settings.data)
        where, mask_of = _masks(settings, tuple(PARTS))
        images = read_images(runner, replace(settings, data=where), labelled=False)
        return with_masks(images, data, mask_of, runner.codec.labels)

    def predict(
        self,
        runner: Runner[Any],
        data: MaskData,
        settings: EvalSegment,
        like: Runner[Any] | None = None,
    ) -> Overlaps:
        """Overlaps of masks and predictions, at the size that the model reads images in."""
        own, part = data if like is None else self.read(runner, settings), settings.part
        found = runner.predictor.masks(own[part], settings.batch)
        return Overlaps.of(own.masks[part], found, len(runner.codec.labels))

    def score(
        self,
        runner: Runner[Any],
        data: MaskData,
        predictions: Overlaps,
        settings: EvalSegment,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """Mean IoU and right pixels with intervals, and the IoU of each class."""
        images, labels = data[settings.part], runner.codec.labels
        each = dict(zip(labels, predictions.by_class().round(2).tolist(), strict=True))
        said = ", ".join(f"{name} {value:.1f}" for name, value in each.items() if value == value)
        data.notes.append(f"IoU of each class: {said}")
        rows = [
            {"image": images.where(i), "right": int(both.sum()), "pixels": int(pixels)}
            for i, (both, _, pixels) in enumerate(zip(*predictions, strict=True))
        ]
        return ScoredPredictions(
            predictions.scores(settings.samples),
            len(images),
            {"baselines": _commonest(data.masks[settings.part], len(labels))},
            {"size": runner.codec.format_for(settings).size},
            rows=rows,
        )

    def compare(
        self,
        runner: Runner[Any],
        data: MaskData,
        theirs: System,
        ours: Overlaps,
        settings: EvalSegment,
    ) -> list[Comparison]:
        """Comparison by a paired bootstrap over images."""
        return ours.compare(theirs.predictions, settings.samples)


def load_codec(folder: Path, model: Model, config: Mapping[str, Any]) -> MediaCodec:
    """Read the classes and the format of images."""
    if config["family"] != SEGMENTER:
        raise UsageError(
            f"{folder / 'config.json'}: a {config['family']} gives pixels no classes; expected a "
            "segmenter, trained with: regard train segment"
        )
    labels = saved_labels(folder, config, model.config.classes)
    return MediaCodec(IMAGE, IMAGE.saved_format(folder, model, config), labels)


SEGMENT = Task(
    name="segment",
    holds="images/ and masks/",
    inputs=IMAGE,
    target="mask",
    unit="images",
    objective=SegmentObjective(),
    predictor=SegmentPredictor,
    judge=SegmentJudge(),
    judged=EvalSegment,
    load_codec=load_codec,
)
