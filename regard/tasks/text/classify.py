"""Text classification: one label of a text, several of them, or a number."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.image_files import holds_images
from regard.data.label_clusters import cluster_labels, load_clusters, save_clusters
from regard.data.labelled import FINENESS, ExampleFormat, ExampleReader
from regard.data.labels import check_single_labels, label_table
from regard.data.rows import Row, TextBatch, TextBatches
from regard.data.series_files import holds_series
from regard.data.sound_sets import holds_sounds
from regard.data.split import SPLITS
from regard.errors import UsageError
from regard.layers.heads import ClassificationHead
from regard.metrics.baselines import bigram_gain
from regard.models.protocols import TextModel
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.task import Choice, Learnt
from regard.tasks.text.codec import EncoderRun, TextCodec
from regard.tasks.text.few_texts import EMBEDDINGS, FEW, few_text_settings
from regard.tasks.text.label_judge import LabelData
from regard.tasks.text.labelling import SHORT, LabelBatch, LabelEval, LabelTrain
from regard.tasks.text.text_classifier import TextClassifier, clusters_of
from regard.training.label_loss import (
    LABEL_LOSSES,
    LabelLoss,
    class_weights,
    clustered,
    imbalance_notes,
)


@dataclass(frozen=True)
class ExampleSettings:
    """Where texts and labels are in a file."""

    GROUP = "data"

    columns: str | None = setting(None, "columns of a table: text and label, such as 2,1")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    separator: str | None = setting(None, "separator of several labels in a column")


@dataclass(frozen=True)
class ClassifyTrain(ExampleSettings, LabelTrain):
    """What a training of a classifier can be told."""

    labels: str = setting("coarse", "of labels such as NUM:date", choices=FINENESS, group="data")
    valid_by: str = setting(
        "text",
        "what is split off: whole where texts are parts of others",
        choices=SPLITS,
        group="data",
    )
    threshold: float = setting(0.5, "probability threshold of multi-label texts", min=0, max=1)
    embeddings: str = setting("random", "initial embeddings", choices=EMBEDDINGS)
    few: bool = setting(True, "choose another model where texts are few; false: as size= says")


@dataclass(frozen=True)
class ClassifyRun(EncoderRun):
    """How to label texts."""

    n_best: int = setting(1, "labels to return per text, the likeliest first", min=1, max=100_000)
    scores: bool = setting(False, "print the probability of each label")
    threshold: float = setting(0.5, "probability threshold of multi-label texts", min=0, max=1)
    cluster_beam: int | None = setting(
        None, "clusters whose labels are ranked; as in training unless given", min=1, max=100_000
    )


@dataclass(frozen=True)
class ClassifyEval(ExampleSettings, LabelEval, ClassifyRun):
    """What an evaluation of a classifier can be told."""

    labels: str | None = setting(None, "of labels such as NUM:date", choices=FINENESS, group="data")


class Classify(TextClassifier):
    """Labels whole texts."""

    name, holds, unit, target = "classify", "texts and labels", "texts", "label"
    few_rows = FEW
    baseline = "naive Bayes"
    Train, Run, Eval = ClassifyTrain, ClassifyRun, ClassifyEval
    short = {**SHORT, "clusters": "model.clusters", "cluster_beam": "model.cluster_beam"}

    @property
    def objective(self) -> LabelLoss:
        """Return the loss of its labels."""
        if self.clusters:
            return clustered(len(self.labels), self.clusters, self.model.config.cluster_beam)
        return LABEL_LOSSES["value"] if self.regression else super().objective

    # Training

    @classmethod
    def instead(cls, values: Mapping[str, Any]) -> str:
        """Leave images, sounds and series of numbers to their own tasks."""
        numbers = partial(holds_series, columns=values.get("columns"))
        tests = {"images": holds_images, "sounds": holds_sounds, "series": numbers}
        found = (name for name, holds in tests.items() if holds(values.get("data")))
        return next(found, cls.name)

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse embeddings that are not for this model, and a beam of more than all clusters."""
        settings = super().checked(settings, values, origin)
        beam, clusters = values.get("cluster_beam"), clusters_of(settings.model)
        if beam and settings.model.cluster_beam > clusters:
            raise UsageError(
                f"cluster_beam={beam} is more than clusters={clusters}; lower it or raise those"
            )
        usual = settings.family == cls.families()[0] and not (settings.init or settings.like)
        if settings.embeddings != "random" and not usual:
            raise UsageError(
                f"embeddings={settings.embeddings} is for a new model of the usual kind; "
                "leave it out with init=, like= or family="
            )
        return settings

    @classmethod
    def file_reader(cls, settings: Any) -> ExampleReader:
        """Return what reads texts and labels."""
        return ExampleReader(
            ExampleFormat(
                settings.columns,
                settings.labels or "coarse",
                settings.separator,
                settings.encoding,
                settings.skip_bad,
                settings.header,
            )
        )

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> LabelData:
        """Read texts and labels, one each unless they come with several."""
        data = cls.read_parts(settings, by=settings.valid_by)
        if not data.multilabel:
            if clusters := clusters_of(settings.model):
                raise UsageError(
                    f"clusters={clusters} is for texts of several labels, and here "
                    "each has one; set separator= if a column holds several, or clusters=0"
                )
            check_single_labels(item for part in data.parts.values() for item in part)
        return data

    @classmethod
    def defaults_for_data(
        cls, settings: Any, values: Mapping[str, Any], data: Any
    ) -> tuple[Any, Choice | None]:
        """Settings that suit few texts where the user gave none, unless few=false."""
        if data.multilabel or not settings.few:
            return settings, None
        train, size = data["train"], len(data.classes)

        def gain() -> float:
            numbers = label_table(train, data.classes).argmax(1)
            return bigram_gain([example.text for example in train], numbers, size)

        why, few = few_text_settings(values, SHORT, len(train), gain)
        if not few:
            return settings, None
        choice = Choice(why, few, f"few=false keeps what size={settings.size} has")
        return cls.resolve({**values, **few}), choice

    @classmethod
    def label_facts(cls, data: LabelData, settings: Any) -> dict[str, Any]:
        """Return how labels were read, which evaluations go by."""
        return {
            "several": data.multilabel,
            "read_labels": settings.labels,
            "read_separator": settings.separator,
        }

    @classmethod
    def make_codec(
        cls, data: Any, settings: Any, learnt: Learnt, origin: Origin | None
    ) -> TextCodec:
        """Put the labels into clusters, if there are to be any, and learn what others learn."""
        count, clusters = clusters_of(settings.model), []
        if count:
            clusters = learnt(
                lambda: cluster_labels(data["train"], data.classes, count, settings.seed),
                load=load_clusters,
                save=save_clusters,
                init=False,
            )
            data = replace(data, labels=list(chain.from_iterable(clusters)))
        return replace(super().make_codec(data, settings, learnt, origin), clusters=clusters)

    @classmethod
    def make_model(
        cls, data: Any, codec: TextCodec, settings: Any, origin: Origin | None
    ) -> tuple[str, Any]:
        """Build the model, its outputs at the log odds of several labels, and its embeddings."""
        name, model = super().make_model(data, codec, settings, origin)
        if data.multilabel and not (origin and origin.was(cls.name, codec.labels)):
            targets = torch.from_numpy(label_table(data["train"], codec.labels))
            heads = [part for part in model.modules() if isinstance(part, ClassificationHead)]
            for head in heads:  # else each label begins with half a chance, which costs many steps
                head.start_at(targets.to(head.out.bias.device))
        if settings.embeddings != "random":
            train = data["train"]
            rows = codec.encoder.texts([e.text for e in train], settings.max_length)
            targets = label_table(train, codec.labels)
            EMBEDDINGS[settings.embeddings](
                model, (row.ids for row in rows), targets, settings.seed
            )
        return name, model

    def batches(self, data: Any, settings: Any) -> TextBatches:
        """Return batches of texts and the numbers of their labels, or a table of several."""
        train, longest = data["train"], settings.max_length
        texts = [example.text for example in train]
        rows = self.encoder.texts(texts, longest)
        if not all(len(row.ids) <= longest for row in rows):
            raise UsageError(f"max_length={longest} leaves no room for a text; raise it")
        self.truncated = sum(row.truncated for row in rows)
        if self.truncated:
            data.notes.append(
                f"{self.truncated:,} of {len(rows):,} texts are longer than max_length={longest} "
                "pieces and were cut"
            )
        table = label_table(train, self.labels)
        counts, device = table.sum(0), settings.device
        data.notes.extend(imbalance_notes(counts, self.labels, settings.class_weights))
        weights = class_weights(settings.class_weights, counts, len(rows), self.multilabel)
        self.class_weights = None if weights is None else weights.to(device)
        targets = table.astype(np.float32) if self.multilabel else table.argmax(1)

        def make(picked: np.ndarray, rows: list[Row], texts: TextBatch) -> LabelBatch:
            return LabelBatch(texts, torch.from_numpy(targets[picked]).to(device))

        def again(i: int, key: int) -> Row:
            return self.encoder.texts([texts[i]], longest, [key])[0]

        return self.text_batches(rows, make, again, settings)

    def logits(self, model: TextModel, batch: LabelBatch) -> Tensor:
        """Return the logits (b, labels) of texts by one model of the ensemble."""
        head = model.head.all_logits if self.clusters else model.head
        return head(model.hidden(**batch.texts.inputs), batch.texts.lengths)

    def title(self, data: Any, settings: Any) -> str:
        """Return what the model card says that the model is."""
        return f"{'Several' if self.multilabel else 'One'} of {len(self.labels)} labels for a text"

    def facts(self, data: Any, settings: Any) -> dict[str, Any]:
        """Return how many labels there are, and how many texts were truncated."""
        return {**super().facts(data, settings), "cut": self.truncated}
