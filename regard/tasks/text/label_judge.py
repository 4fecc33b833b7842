"""Judging labels of texts or of words: by the probabilities that a trained encoder gives them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor, nn

from regard.data.labelled import Example, Labelled, Sentence, load_labelled
from regard.data.labels import label_table, with_known_labels
from regard.errors import UsageError
from regard.metrics.evaluation import LabelEvaluation
from regard.metrics.labels import LabelResults, one_hot
from regard.metrics.score import Comparison
from regard.models import task_changes
from regard.models.protocols import Model
from regard.tasks.frame.one_label import saved_labels_and_baselines
from regard.tasks.frame.task import Answer, Judged, Task
from regard.tasks.text.codec import TextCodec, check_max_length, load_encoder


@dataclass
class LabelData(Labelled):
    """Examples or sentences by part, and their labels."""

    multilabel: bool = False
    left_out: int = 0  # rows with labels that the model does not know


class Predicted(NamedTuple):
    """The probability of each label (n, labels) of texts or words, and how many were truncated."""

    probs: np.ndarray
    truncated: int = 0


A = TypeVar("A", bound=Answer)
Items = Sequence[Example] | Sequence[Sentence]


class LabelJudge(Task[TextCodec, A], Generic[A]):
    """A task whose model gives labels to texts or to words, and how these are judged.

    It says how files are read (`file_reader`), and how examples become `probabilities`.
    """

    Result = LabelEvaluation
    multilabel = False

    def __init__(self, model: nn.Module, codec: TextCodec, config: Mapping[str, Any] | None = None):
        super().__init__(model, codec, config)
        self.labels, self.tokenizer, self.encoder = codec.labels, codec.tokenizer, codec.encoder
        self.max_length: int = self.config.get("max_length") or self.model.config.max_length
        self.class_weights: Tensor | None = None  # in the loss, while it is trained

    @classmethod
    def file_reader(cls, settings: Any) -> Any:
        """Return what reads a file of examples."""
        raise NotImplementedError

    def probabilities(self, items: Any, settings: Any) -> Predicted:
        """Return the probability of each label of texts or words."""
        raise NotImplementedError

    def baselines(self, data: LabelData, settings: Any, part: str = "valid") -> dict[str, Any]:
        """Return the scores of the baselines on a part, if the model has any beside it."""
        if self.codec.baselines is None:
            return {}
        units = [unit for item in data[part] for unit, _ in item.units]
        return self.codec.baselines.scores(units, label_table(data[part], self.labels))

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: dict[str, Any]) -> TextCodec:
        """Read tokenizer, features, labels and baselines of a folder."""
        changes = task_changes(config["family"], cls.name)
        if any(getattr(model.config, key) != value for key, value in changes.items()):
            raise UsageError(
                f"{folder / 'config.json'}: a head of {model.config.head!r:.40}, which labels no "
                f"{cls.unit}; train one with: regard train {cls.name} init=..."
            )
        labels, baselines = saved_labels_and_baselines(folder, model, config)
        return TextCodec(load_encoder(folder, model, config), labels, baselines)

    @property
    def own(self) -> dict[str, Any]:
        """Return none: nothing is decoded."""
        return {}

    def check_run(self, settings: Any) -> Any:
        """Refuse more tokens than the model has positions for."""
        check_max_length(settings, self.model)
        return settings

    def read_part(self, settings: Any, known: bool = True) -> LabelData:
        """Read the part that a model is judged on, with labels that are known to it."""
        part = settings.part
        data = load_labelled(
            settings.data,
            self.file_reader(settings),
            test=settings.test,
            need=(part,),
            trained=self.trained,
        )
        items = data[part]
        if known:
            why, skip = "is none of the model's", settings.skip_bad
            items = with_known_labels(items, self.labels, why, data.notes, skip_bad=skip)
        left_out = len(data[part]) - len(items)
        return LabelData({part: items}, left_out=left_out, notes=data.notes)

    def predict_examples(self, data: LabelData, settings: Any) -> Predicted:
        """Return the probability of each label of the examples."""
        return self.probabilities(data[settings.part], settings)

    def assign(self, probs: np.ndarray, settings: Any) -> np.ndarray:
        """Return a table (n, labels) of the predicted labels: the likeliest of each row."""
        return one_hot(probs.argmax(1), len(self.labels))

    def results(self, items: Items, predicted: Predicted, settings: Any) -> LabelResults:
        """Return targets, predictions and probabilities, from which all scores follow."""
        targets, probs = label_table(items, self.labels), predicted.probs
        sizes = [len(item.units) for item in items]
        # the words of a sentence are resampled together
        groups = np.repeat(np.arange(len(sizes)), sizes) if self.unit == "words" else None
        assigned, unit = self.assign(probs, settings), self.unit
        return LabelResults(
            self.labels, targets, assigned, probs, self.multilabel, groups=groups, unit=unit
        )

    def score(self, data: LabelData, predictions: Predicted, settings: Any) -> Judged:
        """Return accuracy, F1 and loss, the scores of each label, and the worst errors."""
        items = data[settings.part]
        if predictions.truncated:
            most = settings.max_length or self.max_length
            data.notes.append(f"{predictions.truncated:,} texts were cut at {most} pieces")
        results = self.results(items, predictions, settings)
        units = [(item, n) for item in items for n in range(len(item.units))]
        errors = results.errors(
            settings.errors, lambda i: (units[i][0].where, units[i][0].excerpt(units[i][1]))
        )
        details = results.details(errors, self.baselines(data, settings, settings.part))
        more = {"left_out": data.left_out}
        return Judged(results.scores(settings.samples), len(units), details, more)

    def check_against(self, other: Task[Any, Any]) -> None:
        """Refuse a model of other labels."""
        super().check_against(other)
        assert isinstance(other, LabelJudge)
        if set(other.labels) != set(self.labels) or other.multilabel != self.multilabel:
            raise UsageError(
                "against= names a model of other labels "
                f"({', '.join(other.labels[:6])}); compare models of the same"
            )

    def predictions_of(self, other: Any, data: LabelData, settings: Any) -> Predicted:
        """Return what another model predicts, with its labels in the order of this one."""
        theirs = super().predictions_of(other, data, settings)
        order = [other.labels.index(label) for label in self.labels]
        return theirs._replace(probs=theirs.probs[:, order])

    def compare(self, data: LabelData, ours: Any, theirs: Any, settings: Any) -> list[Comparison]:
        """Compare by paired bootstrap resampling."""
        results = self.results(data[settings.part], ours, settings)
        assigned = self.assign(theirs.probs, settings)
        return results.compare(assigned, settings.samples, theirs.probs)

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the settings that a score depends on."""
        return {"max_length": settings.max_length or self.max_length}
