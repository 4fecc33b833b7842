"""How a classifier learns labels, whatever an input is."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from regard.data.parts import Dataset
from regard.metrics.baselines import Baselines
from regard.models import task_changes
from regard.models.folder import load_folder
from regard.tasks.frame.origin import Origin
from regard.tasks.labels.judge import LabelJudge, baseline_scores, valid_scores
from regard.tasks.parts import (
    Batches,
    Choice,
    Learnt,
    Lesson,
    Objective,
    Task,
    build_model,
    complete,
    usual_shape,
)
from regard.tasks.runner import Runner
from regard.training.label_loss import class_weights, imbalance_notes


class LabelledInputs:
    """What differs between kinds of inputs when labels are learnt.

    The methods with a body have the usual answer.
    """

    task: str
    unit: str = "texts"  # what an input is called in recipe.json
    baseline: str  # the simplest model that learns, by its name in baselines.KINDS
    head: str = "head."  # how the names of the head's weights begin
    dynamic: bool = True  # whether batches differ in shape
    note_uneven: bool = True  # whether labels that are much rarer than others are noted

    def shape(self, name: str, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Config of a family before the user's keys."""
        return usual_shape(name, values, origin)

    def check(self, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Settings that fit each other, or a refusal."""
        return settings

    def read(self, settings: Any, origin: Origin | None) -> Any:
        """Parts to train and to validate on, with the names of their labels."""
        raise NotImplementedError

    def suit(
        self, settings: Any, values: Mapping[str, Any], data: Any
    ) -> tuple[Any, Choice | None]:
        """Settings whose defaults follow the data where the user gave none."""
        return settings, None

    def codec(self, data: Any, settings: Any, learnt: Learnt, origin: Origin | None) -> Any:
        """What brings inputs to the model, and the labels; without baselines."""
        raise NotImplementedError

    def baseline_part(self, train: Any) -> Any:
        """Examples that a baseline learns from."""
        return train

    def config(self, config: Any, codec: Any, origin: Origin | None) -> Any:
        """Config of the model for such inputs."""
        return config

    def start(self, model: Any, data: Any, codec: Any, settings: Any, known: bool) -> None:
        """Change the weights that a training begins with; `known`: it told these labels apart."""

    def batches(self, data: Any, runner: Runner[Any], settings: Any) -> Batches:
        """Batches of augmented inputs and targets."""
        raise NotImplementedError

    def count(self, runner: Runner[Any], batch: Any) -> tuple[int, int]:
        """Units of a batch, which the loss counts, and its tokens."""
        raise NotImplementedError

    def loss(self, runner: Runner[Any], batch: Any, settings: Any, weights: Any) -> Tensor:
        """Summed loss of the labels."""
        raise NotImplementedError

    def title(self, codec: Any, runner: Runner[Any]) -> str:
        """What the model card says that the model is."""
        one = runner.inputs.one
        article = "an" if one[0] in "aeio" else "a"
        return f"One of {len(codec.labels)} labels for {article} {one}"

    def facts(self, data: Any, batches: Any, settings: Any) -> dict[str, Any]:
        """What recipe.json says beside the number of labels."""
        return {self.unit: len(data["train"])}


class LabelObjective(Objective):
    """Learns labels by cross-entropy.

    Args:
        inputs: what differs between kinds of inputs.
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
        self.sizes, self.short, self.serves = sizes, short, inputs.task

    def resolve(self, task: Task, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Settings that fit each other, or a refusal."""
        name = task.family_of(values, origin)
        settings = complete(task, values, name, self.inputs.shape(name, values, origin))
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
        """What brings inputs to the model, the labels, and a simple classifier to compare with."""
        codec = self.inputs.codec(data, settings, learnt, origin)
        some = self.inputs.baseline_part(data["train"])
        vectors, targets = codec.baseline_vectors(some), codec.targets(some)
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
        model = build_model(name, config, settings, origin, fresh=fresh)
        self.inputs.start(model, data, codec, settings, known)
        return name, model

    def lesson(self, runner: Runner[Any], data: Dataset[Any], settings: Any) -> Lesson:
        """Batches of inputs with targets, and the loss of their labels."""
        inputs, codec, predictor = self.inputs, runner.codec, runner.predictor
        judge: LabelJudge = runner.task.judge  # type: ignore[assignment]
        batches = inputs.batches(data, runner, settings)
        targets = codec.targets(data["train"])
        often = targets.sum(0)
        if inputs.note_uneven:
            data.notes.extend(imbalance_notes(often, codec.labels, settings.class_weights))
        several = codec.decision.several
        weights = class_weights(settings.class_weights, often, len(targets), several)
        weights = None if weights is None else weights.to(settings.device)

        def validate(share: float) -> dict[str, float]:
            valid, plain = data["valid"], predictor.plain
            if several:
                plain = replace(plain, threshold=settings.threshold)
            probs = predictor.part_probabilities(valid, plain)
            results = judge.results(runner, valid, probs, plain)
            return valid_scores(results, weights is not None)

        def finish(folder: Path) -> None:
            if getattr(settings, "none", 0.0):
                published = runner.task.load(folder, *load_folder(folder))
                published.predictor.note_none(folder, data, settings.none, settings.foreign)

        return Lesson(
            batches=batches,
            count=lambda batch: inputs.count(runner, batch),
            loss=lambda batch: inputs.loss(runner, batch, settings, weights),
            validate=validate,
            title=inputs.title(codec, runner),
            facts={"labels": len(codec.labels), **inputs.facts(data, batches, settings)},
            baselines=lambda: baseline_scores(codec, data["valid"]),
            finish=finish,
            dynamic=inputs.dynamic,
        )


def spread(part: Any, most: int = 2000) -> Any:
    """Some examples, spread over a part."""
    return part.pick(np.linspace(0, len(part) - 1, min(len(part), most)).astype(np.int64))
