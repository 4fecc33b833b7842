"""How a classifier learns labels, whatever an input is."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn

from regard.data.parts import Dataset
from regard.metrics.baselines import Baselines
from regard.metrics.labels import one_hot
from regard.models import task_changes
from regard.models.folder import load_folder
from regard.tasks.frame.origin import Origin
from regard.tasks.labels.judge import LabelJudge, baseline_scores, valid_scores
from regard.tasks.parts import Batches, Choice, Learnt, Lesson, Objective, build_model
from regard.tasks.runner import Runner
from regard.training.label_loss import class_weights, imbalance_notes

BASELINE_EXAMPLES = 2000  # that a baseline learns from


class LabelledInputs(Protocol):
    """What differs between modalities when labels are learnt."""

    task: str
    baseline: str  # the simplest model that learns, by its name in baselines.KINDS
    dynamic: bool  # whether batches differ in shape
    head: str  # how the names of the head's weights begin

    def check(self, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Settings that fit each other, or a refusal."""
        ...

    def read(self, settings: Any, origin: Origin | None) -> Any:
        """Parts to train and to validate on, with the names of their labels."""
        ...

    def suit(
        self, settings: Any, values: Mapping[str, Any], data: Any
    ) -> tuple[Any, Choice | None]:
        """Settings whose defaults follow the data where the user gave none."""
        ...

    def codec(self, data: Any, settings: Any, origin: Origin | None) -> Any:
        """Format of the inputs and the labels, without baselines."""
        ...

    def config(self, config: Any, codec: Any, origin: Origin | None) -> Any:
        """Config of the model for such inputs."""
        ...

    def batches(self, train: Any, runner: Runner[Any], settings: Any) -> Batches:
        """Batches of augmented inputs and targets."""
        ...

    def count(self, runner: Runner[Any], batch: Any) -> tuple[int, int]:
        """Inputs of a batch, which the loss counts, and its tokens."""
        ...

    def loss(self, model: Any, batch: Any, settings: Any, weights: Tensor | None) -> Tensor:
        """Summed cross-entropy of the labels."""
        ...

    def facts(self, settings: Any) -> dict[str, Any]:
        """What recipe.json says further."""
        ...


class LabelObjective(Objective):
    """Learns one label an input by cross-entropy.

    Args:
        inputs: what differs between modalities.
        settings: class of the settings of a training.
        sizes: what a size means for training.
        short: short keys for fields of the model's config.
        published_sizes: whether other sizes are published models, trained as a big one.
    """

    def __init__(
        self,
        inputs: LabelledInputs,
        settings: type,
        sizes: Mapping[str, Mapping[str, Any]],
        short: Mapping[str, str | tuple[str, ...]],
        published_sizes: bool = False,
    ):
        self.inputs, self.Settings, self.published_sizes = inputs, settings, published_sizes
        self.sizes, self.short = sizes, short

    def check(self, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Settings that fit each other, or a refusal."""
        return self.inputs.check(settings, values, origin)

    def read(self, settings: Any, origin: Origin | None) -> Dataset[Any]:
        """Parts to train and to validate on."""
        return self.inputs.read(settings, origin)

    def suit(
        self, settings: Any, values: Mapping[str, Any], data: Dataset[Any]
    ) -> tuple[Any, Choice | None]:
        """Settings whose defaults follow the data where the user gave none."""
        return self.inputs.suit(settings, values, data)

    def codec(self, data: Any, settings: Any, learnt: Learnt, origin: Origin | None) -> Any:
        """Labels and format of the data, and the nearest mean of examples spread over them."""
        train, labels = data["train"], data.classes
        often = np.bincount(np.asarray(train.labels), minlength=len(labels))
        data.notes.extend(imbalance_notes(often, labels, settings.class_weights))
        codec = self.inputs.codec(data, settings, origin)
        rows = np.linspace(0, len(train) - 1, min(len(train), BASELINE_EXAMPLES)).astype(np.int64)
        some = train.pick(rows)
        targets = one_hot(np.asarray(some.labels), len(labels))
        vectors = codec.baseline_vectors(some)
        return replace(codec, baselines=Baselines.fit(self.inputs.baseline, vectors, targets))

    def model(
        self, data: Dataset[Any], codec: Any, settings: Any, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Model with a head for the labels; one that knew the same before keeps its head."""
        name, task = settings.family, self.inputs.task
        config = replace(settings.model, **task_changes(name, task), labels=len(codec.labels))
        config = self.inputs.config(config, codec, origin)
        known = origin is not None and origin.was(task, codec.labels)
        fresh = "" if known else self.inputs.head
        return name, build_model(name, config, settings, origin, fresh=fresh)

    def lesson(self, runner: Runner[Any], data: Dataset[Any], settings: Any) -> Lesson:
        """Batches of augmented inputs, and the cross-entropy of their labels."""
        train, codec, predictor = data["train"], runner.codec, runner.predictor
        often = np.bincount(np.asarray(train.labels), minlength=len(codec.labels))
        weights = class_weights(settings.class_weights, often, len(train))
        weights = None if weights is None else weights.to(settings.device)
        judge: LabelJudge = runner.task.judge  # type: ignore[assignment]

        def validate(share: float) -> dict[str, float]:
            valid = data["valid"]
            probs = predictor.part_probabilities(valid, predictor.plain)
            return valid_scores(judge.results(runner, valid, probs), weights is not None)

        def finish(folder: Path) -> None:
            if getattr(settings, "none", 0.0):
                published = runner.task.load(folder, *load_folder(folder))
                published.predictor.note_none(folder, data, settings.none, settings.foreign)

        modality, unit = runner.task.inputs, runner.task.unit
        return Lesson(
            batches=self.inputs.batches(train, runner, settings),
            count=lambda batch: self.inputs.count(runner, batch),
            loss=lambda batch: self.inputs.loss(runner.model, batch, settings, weights),
            validate=validate,
            title=f"One of {len(codec.labels)} labels for {a(modality.one)}",
            facts={
                "labels": len(codec.labels),
                unit: len(train),
                **self.inputs.facts(settings),
            },
            baselines=lambda: baseline_scores(codec, data["valid"]),
            finish=finish,
            dynamic=self.inputs.dynamic,
        )


def a(noun: str) -> str:
    """A noun with its article."""
    return f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"
