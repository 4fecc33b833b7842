"""How a classifier learns labels, whatever an input is."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from regard.data.labels import label_list
from regard.data.parts import Dataset
from regard.errors import UsageError
from regard.files.hashes import unseal
from regard.metrics.baselines import MAX_LABELS, Baselines
from regard.metrics.mixture import MIXED_ROWS, Mixture, load_mixture, save_mixture
from regard.metrics.outliers import Outliers
from regard.modalities.base import LabelledBatch, Modality, NoneOfThese
from regard.models import task_changes
from regard.models.ensemble import alone, each_member
from regard.models.folder import load_folder
from regard.models.protocols import Model
from regard.tasks.frame.media import MediaCodec
from regard.tasks.frame.origin import Origin
from regard.tasks.labels.classifier import LabelCodec
from regard.tasks.labels.decision import threshold_of
from regard.tasks.labels.judge import LabelJudge, baseline_scores, valid_scores
from regard.tasks.labels.settings import (
    LabelTrainSettings,
    LinearTrain,
    NoneTrain,
    saved_labels_and_baselines,
)
from regard.tasks.parts import Batches, Choice, D, Learnt, Lesson, Objective, build_model
from regard.tasks.runner import Runner
from regard.training.label_loss import class_weights, imbalance_notes, target_loss

S = TypeVar("S", bound=LabelTrainSettings, default=LabelTrainSettings)
C = TypeVar("C", bound=LabelCodec, default=MediaCodec)
Loss = Callable[[Any, Tensor | None], Tensor]  # summed over a batch, by the weights of labels
_AGAIN = "after the last step the linear model is fitted to the validation part, too"


class LabelObjective(Objective[S, D, C]):
    """Learns labels by cross-entropy; what inputs differ in, their modality knows.

    Args:
        task: name of the task.
        modality: what an input is.
        settings: class of the settings of a training.
        sizes: what a size means for training.
        short: short keys for fields of the model's config.
        published_sizes: whether other sizes are published models, trained as a big one.
        head: how the names of the head's weights begin.
    """

    dynamic: bool = True  # whether batches differ in shape

    def __init__(
        self,
        task: str,
        modality: Modality[Any, Any, D],
        settings: type[S],
        sizes: Mapping[str, Mapping[str, Any]],
        short: Mapping[str, str | tuple[str, ...]],
        published_sizes: bool = False,
        head: str = "head.",
    ):
        self.task, self.serves, self.modality, self.head = task, task, modality, head
        self.Settings, self.published_sizes = settings, published_sizes
        self.sizes, self.short = sizes, short

    def read(self, settings: S, origin: Origin | None) -> D:
        """Inputs with labels to train and to validate on."""
        data = self.modality.load(
            str(settings.data),
            settings.reading(),
            settings.format(origin),
            valid=settings.valid,
            test=settings.test,
        )
        numbers = np.asarray(data["train"].labels).tolist()
        label_list([(data.classes[i],) for i in numbers], str(settings.data))
        return data

    def suit(self, settings: S, values: Mapping[str, Any], data: D) -> tuple[S, Choice | None]:
        """Add a linear model where rows are few, unless told."""
        return with_linear(settings, data)

    def codec(self, data: D, settings: S, learnt: Learnt, origin: Origin | None) -> C:
        """Labels of the data, the format of its inputs, and a simple classifier to compare with."""
        format = self.modality.settle(data, settings.format(origin))
        codec: Any = MediaCodec(self.modality, format, data.classes, more=settings.facts())
        return with_baselines(codec, data["train"])

    def model(self, data: D, codec: C, settings: S, origin: Origin | None) -> tuple[str, nn.Module]:
        """Model with a head for the labels; one that knew the same before keeps its head."""
        config = replace(
            settings.model, **task_changes(settings.family, self.task), labels=len(codec.labels)
        )
        config = self.modality.shape(config, codec.format, new=origin is None)
        fresh = "" if origin is not None and origin.was(self.task, codec.labels) else self.head
        return settings.family, build_model(settings.family, config, settings, origin, fresh=fresh)

    def lesson(self, runner: Runner[Any], data: D, settings: S) -> Lesson:
        """Batches of augmented inputs, and the cross-entropy of their targets."""
        codec, train = runner.codec, data["train"]

        def loss(batch: LabelledBatch, weights: Tensor | None) -> Tensor:
            logits = each_member(runner.model, lambda one: alone(one, *batch.arguments))
            how = batch.targets, weights
            return torch.stack([target_loss(settings.loss, one, *how) for one in logits]).mean()

        batches = self.modality.batches(train, codec.format, settings, len(codec.labels))
        facts = {self.modality.many: len(train)}
        return label_lesson(runner, data, settings, batches, loss, facts, dynamic=self.dynamic)


def with_linear(
    settings: S, data: Dataset[Any], choice: Choice | None = None
) -> tuple[S, Choice | None]:
    """Settings that say whether a linear model is added, and what else was chosen for the data.

    It is where rows are few and have one label each, and no trained model is started from.
    """
    if not isinstance(settings, LinearTrain):
        return settings, choice
    rows, labels = len(data["train"]), len(data.classes)
    fits = 2 <= labels <= MAX_LABELS and not getattr(data, "multilabel", False)
    if settings.linear and not fits:
        raise UsageError(
            f"linear=true is for one of 2 to {MAX_LABELS:,} labels an input; leave it out"
        )
    if settings.linear is not None:
        return settings, choice
    adds: Any = {"linear": bool(fits and rows <= MIXED_ROWS and not settings.init)}
    settings = replace(settings, **adds)
    if not adds["linear"]:
        return settings, choice
    told, remedy = {"linear": "true"}, f"{_AGAIN}; linear=false leaves the encoder alone"
    if choice is None:
        return settings, Choice(f"{rows:,} training rows (up to {MIXED_ROWS:,})", told, remedy)
    told, remedy = {**choice.settings, **told}, f"{choice.remedy}; {remedy}"
    return settings, Choice(choice.why, told, remedy)


def with_baselines(codec: C, train: Any) -> C:
    """A codec with a simple classifier that has learnt from the training part."""
    own: Any = codec
    return replace(own, baselines=fit_baselines(codec, [train]))


def fit_baselines(codec: LabelCodec, parts: Sequence[Any], *chosen: str) -> Baselines:
    """A simple classifier that has learnt from parts: the one that was chosen, if one was."""
    modality, most = codec.modality, codec.modality.baseline_rows
    if most is not None:
        rows = (np.linspace(0, len(x) - 1, min(len(x), most)).astype(np.int64) for x in parts)
        parts = [part.pick(some) for part, some in zip(parts, rows, strict=True)]
    targets = np.concatenate([modality.label_table(part, codec.labels) for part in parts])
    read = [modality.vectors(part, codec.format) for part in parts]
    vectors = np.concatenate(read) if isinstance(read[0], np.ndarray) else list(chain(*read))
    return Baselines.fit(modality.baseline, vectors, targets, *chosen)


def label_lesson(
    runner: Runner[Any],
    data: Dataset[Any],
    settings: LabelTrainSettings,
    batches: Batches,
    loss: Loss,
    facts: Mapping[str, Any],
    *,
    note_uneven: bool = True,
    dynamic: bool = True,
) -> Lesson:
    """The lesson by which a model learns labels.

    Args:
        runner: the task with its model.
        data: parts to train and to validate on.
        settings: those of the training.
        batches: batches, which have targets.
        loss: summed loss of a batch.
        facts: what recipe.json says beside the number of labels.
        note_uneven: whether labels that are much rarer than others are noted.
        dynamic: whether batches differ in shape.
    """
    codec, predictor, modality = runner.codec, runner.predictor, runner.codec.modality
    judge: LabelJudge = runner.task.judge  # type: ignore[assignment]
    targets, several = modality.label_table(data["train"], codec.labels), codec.decision.several
    often = targets.sum(0)
    if note_uneven:
        data.notes.extend(imbalance_notes(often, codec.labels, settings.class_weights))
    weights = class_weights(settings.class_weights, often, len(targets), several)
    weights = None if weights is None else weights.to(settings.device)
    adds = isinstance(settings, LinearTrain) and bool(settings.linear)
    if codec.baselines is not None and codec.baselines.chosen:
        told = [codec.baselines.chosen, *([_AGAIN] if adds else [])]
        facts = {**facts, "linear": "; ".join(told)}

    @cache
    def of_linear() -> tuple[Tensor, Tensor]:
        """Logits of the linear model, and the number of the label, of validation rows."""
        valid = data["valid"]
        found = codec.baselines.logits(modality.vectors(valid, codec.format))
        right = modality.label_table(valid, codec.labels).argmax(1)
        return torch.from_numpy(found), torch.from_numpy(right)

    linear = of_linear if adds else None

    def validate(share: float) -> dict[str, float]:
        valid, plain = data["valid"], predictor.plain
        if several:
            plain = replace(plain, threshold=threshold_of(settings))
        probs, more = predictor.part_probabilities(valid, plain), {}
        if linear is not None:
            probs, more = mixed(probs, *linear())
        scores = valid_scores(judge.results(runner, valid, probs, plain), weights is not None)
        return {**scores, **more}

    def finish(folder: Path) -> None:
        if isinstance(settings, NoneTrain) and settings.none:
            published = runner.task.load(folder, *load_folder(folder))
            published.predictor.note_none(folder, data, settings.none, settings.foreign)
        if linear is not None:
            refit(folder, codec, data)

    one, how = runner.inputs.one, "Several" if several else "One"
    article = "an" if one[0] in "aeio" else "a"
    return Lesson(
        batches=batches,
        count=lambda batch: (len(batch.targets), tokens_of(runner, batch)),
        loss=lambda batch: loss(batch, weights),
        validate=validate,
        title=f"{how} of {len(codec.labels)} labels for {article} {one}",
        facts={"labels": len(codec.labels), **facts},
        baselines=lambda: baseline_scores(codec, data["valid"]),
        beside=save_mixture,
        finish=finish,
        dynamic=dynamic,
    )


def refit(folder: Path, codec: LabelCodec, data: Dataset[Any]) -> None:
    """Fit the linear model of a published folder again, to the validation part, too.

    The weights stay, which were chosen by the one before; that goes on judging the validation part.
    """
    (mixture, done), before = load_mixture(folder), codec.baselines
    if mixture is None or not mixture.linear or done or before is None:
        return
    fitted = fit_baselines(codec, [data["train"], data["valid"]], before.chosen)
    unseal(folder)
    save_mixture(folder, mixture.scores, fitted.tables)


def mixed(
    probs: np.ndarray, linear: Tensor, targets: Tensor
) -> tuple[np.ndarray, dict[str, float]]:
    """Probabilities (n, labels) of an encoder and a linear model together, and the weights."""
    encoder = torch.from_numpy(probs).float().clamp(min=1e-30).log()
    chosen = Mixture.choose(encoder, linear, targets)
    right = float((encoder.argmax(1) == targets).float().mean())
    both = chosen.logits(encoder, linear).softmax(-1).numpy()
    return both, {"encoder_accuracy": 100 * right, **chosen.scores}


def tokens_of(runner: Runner[Any], batch: Any) -> int:
    """Number of tokens of a batch: what lengths count, or the places of a grid."""
    if (tokens := batch.tokens) is not None:
        return tokens
    height, width = runner.model.grid(tuple(batch.inputs.shape[2:]))
    return len(batch.inputs) * height * width


def load_label_codec(
    modality: Modality[Any], folder: Path, model: Model, config: Mapping[str, Any]
) -> MediaCodec:
    """Labels and format of inputs that a folder names."""
    if not getattr(model.config, "labels", 0):
        raise UsageError(
            f"{folder / 'config.json'}: a model without a head, which labels no {modality.many}; "
            "train one with: regard train classify init=..."
        )
    labels, baselines = saved_labels_and_baselines(folder, model, config)
    known = isinstance(modality, NoneOfThese)
    outliers = Outliers.load(folder, config, len(labels)) if known else None
    format = modality.saved_format(folder, model, config)
    return MediaCodec(modality, format, labels, baselines, outliers=outliers)
