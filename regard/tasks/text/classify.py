"""Text classification: one label of a text, several of them, or a number."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.data.label_clusters import FILE, cluster_labels, load_clusters, save_clusters
from regard.data.labelled import FINENESS, ExampleFormat
from regard.data.labels import check_single_labels
from regard.data.rows import TextBatch, TokenRow
from regard.data.split import SPLITS
from regard.errors import UsageError
from regard.layers.heads import ClassificationHead
from regard.modalities import MODALITIES, modality_of
from regard.modalities.text import TEXT, LabelData, LabelSource
from regard.models import serving
from regard.models.ensemble import members_of
from regard.models.protocols import Model, ModelConfig
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import Asked
from regard.tasks.labels.classifier import Classifier, classifier
from regard.tasks.labels.decision import NUMBER, ONE_LABEL, SEVERAL_LABELS, SeveralLabels
from regard.tasks.labels.judge import LabelJudge
from regard.tasks.labels.objective import label_lesson, with_linear
from regard.tasks.labels.settings import LinearTrain
from regard.tasks.parts import Choice, Learnt, Lesson, Task, V
from regard.tasks.runner import Runner
from regard.tasks.text.codec import EncoderRun
from regard.tasks.text.labelling import (
    ENCODER_SIZES,
    LABEL_SHORT_KEYS,
    LabelBatch,
    LabelEval,
    LabelTextCodec,
    LabelTrain,
    TextLabels,
    load_text_codec,
    made_with,
    text_batches,
    text_loss,
)
from regard.training.label_loss import clustered

FEW = 10_000  # texts up to which other settings are better; chosen on parts of SST-2 and TREC
_FEW_SETTINGS = {"tokenizer": "unigram", "pieces": 2000, "ema": 0.99, "epochs": 10}
# who sets one of these has an opinion on all of them
_TOGETHER = ({"tokenizer", "pieces", "features", "bpe_dropout"}, {"steps", "epochs"})


@dataclass(frozen=True)
class ExampleSettings:
    """Where texts and labels are in a file."""

    GROUP = "data"

    columns: str | None = setting(None, "columns of a table: text and label, such as 2,1")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    separator: str | None = setting(None, "separator of several labels in a column")

    def reading(self) -> LabelSource:
        """How texts and labels lie in files."""
        of: Any = self  # a training or an evaluation
        how = (of.labels or "coarse", self.separator, of.encoding, of.skip_bad, self.header)
        return LabelSource(ExampleFormat(self.columns, *how), getattr(of, "valid_by", "text"))


@dataclass(frozen=True)
class ClassifyTrain(ExampleSettings, LinearTrain, LabelTrain):
    """What a training of a classifier can be told."""

    labels: str = setting("coarse", "of labels such as NUM:date", choices=FINENESS, group="data")
    valid_by: str = setting(
        "text",
        "what is split off: whole where texts are parts of others",
        choices=SPLITS,
        group="data",
    )
    threshold: float = setting(0.5, "probability threshold of multi-label texts", min=0, max=1)
    few: bool = setting(True, "another tokenizer and fewer steps where texts are few")

    def facts(self) -> dict[str, Any]:
        """How labels were read, which evaluations go by."""
        return {"read_labels": self.labels, "read_separator": self.separator}


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


def few_text_settings(values: Mapping[str, Any], texts: int) -> dict[str, Any]:
    """Settings for so few texts where a user gave none, by their short keys."""
    given = {key for key, value in values.items() if value is not None}
    if texts > FEW or given & {"init", "like", "family"}:
        return {}
    given = given.union(*(some for some in _TOGETHER if given & some))
    return {key: value for key, value in _FEW_SETTINGS.items() if key not in given}


def clusters_of(config: ModelConfig) -> int:
    """Number of clusters that a model puts its labels into; 0 if it puts them into none."""
    return getattr(config, "clusters", 0)


@contextmanager
def ranking(model: Any, settings: Asked) -> Iterator[None]:
    """Rank the labels of as many clusters as are asked for."""
    beam = getattr(settings, "cluster_beam", None)
    heads = [one.head for one in members_of(model)] if beam else []
    usual = [head.beam for head in heads]
    for head in heads:
        head.beam = beam
    try:
        yield
    finally:
        for head, before in zip(heads, usual, strict=True):
            head.beam = before


class TextClassifier(Classifier):
    """Gives a text the most probable of its labels, by as many of their clusters as are asked."""

    def check(self, settings: V) -> V:
        """Refuse more tokens, labels or clusters than there are."""
        clusters, beam = clusters_of(self.model.config), getattr(settings, "cluster_beam", None)
        if beam and beam > clusters:
            raise UsageError(
                f"cluster_beam={beam} is more than the {clusters} clusters of the model"
            )
        return super().check(settings)

    def logits(self, raws: Sequence[TokenRow], settings: Asked) -> Tensor:
        """Logits (n, labels) of texts."""
        with ranking(self.model, settings):
            return super().logits(raws, settings)


class TextLabelJudge(LabelJudge[LabelData, ClassifyEval]):
    """Judges labels of texts, one each unless the model gives several."""

    def read(self, runner: Runner[Any], settings: ClassifyEval) -> LabelData:
        """The part that is judged, with one label each unless the model gives several."""
        data = super().read(runner, settings)
        if runner.codec.decision is ONE_LABEL:
            check_single_labels(data[settings.part])
        return data

    def predict(
        self,
        runner: Runner[Any],
        data: LabelData,
        settings: ClassifyEval,
        like: Runner[Any] | None = None,
    ) -> np.ndarray:
        """Probability of each label for each text, and a note if texts are cut."""
        if like is not None:
            return super().predict(runner, data, settings, like)
        format = runner.predictor.format_for(settings)
        rows = TEXT.raws(data[settings.part], format)
        if cut := sum(row.truncated for row in rows):
            data.notes.append(f"{cut:,} texts were cut at {format.longest} pieces")
        return runner.predictor.probabilities(rows, settings)


def judged_with(runner: Runner[Any], data: LabelData, settings: ClassifyEval) -> dict[str, Any]:
    """Settings that a score depends on."""
    made, codec = made_with(runner, data, settings), runner.codec
    if codec.decision is NUMBER:
        return made
    threshold = settings.threshold if codec.decision.several else None
    made["threshold"] = threshold
    if clusters_of(runner.model.config):
        made["cluster_beam"] = settings.cluster_beam or runner.model.head.beam
    return made


def load_codec(folder: Path, model: Model, config: dict[str, Any]) -> LabelTextCodec:
    """Tokenizer, features, labels, clusters and baselines of a folder."""
    codec = load_text_codec("classify", TEXT, folder, model, config)
    if not isinstance(config.get("several", False), bool):
        raise UsageError(f"{folder / 'config.json'}: 'several' must be true or false")
    count, clusters = clusters_of(model.config), []
    if count:
        clusters = load_clusters(folder)
        if (list(chain(*clusters)), len(clusters)) != (codec.labels, count):
            raise UsageError(
                f"{folder / FILE}: its clusters are not those of 'labels' and 'clusters' in "
                "config.json; restore both as they were published"
            )
    return deciding(replace(codec, clusters=clusters), config.get("several") is True)


def deciding(codec: LabelTextCodec, several: bool) -> LabelTextCodec:
    """A codec that decides for several labels, for one, or for a number if there is none."""
    one = NUMBER if len(codec.labels) == 1 else ONE_LABEL
    return replace(codec, decision=SEVERAL_LABELS if several else one)


class ClassifyObjective(TextLabels[ClassifyTrain]):
    """Learns one label of a text, or several."""

    def resolve(
        self, task: Task, values: Mapping[str, Any], origin: Origin | None
    ) -> ClassifyTrain:
        """Refuse a beam of more than all clusters."""
        settings = super().resolve(task, values, origin)
        beam, clusters = values.get("cluster_beam"), clusters_of(settings.model)
        if beam and settings.model.cluster_beam > clusters:
            raise UsageError(
                f"cluster_beam={beam} is more than clusters={clusters}; lower it or raise those"
            )
        return settings

    def read(self, settings: ClassifyTrain, origin: Origin | None) -> LabelData:
        """Texts and labels, one each unless they come with several."""
        data = super().read(settings, origin)
        if not data.multilabel:
            if clusters := clusters_of(settings.model):
                raise UsageError(
                    f"clusters={clusters} is for texts of several labels, and here "
                    "each has one; set separator= if a column holds several, or clusters=0"
                )
            check_single_labels(item for part in data.parts.values() for item in part)
        return data

    def suit(
        self, settings: ClassifyTrain, values: Mapping[str, Any], data: LabelData
    ) -> tuple[ClassifyTrain, Choice | None]:
        """Settings that suit few texts where the user gave none, unless few=false."""
        count = len(data["train"])
        few = {} if data.multilabel or not settings.few else few_text_settings(values, count)
        if not few:
            return with_linear(settings, data)
        why = f"few texts ({count:,}, at most {FEW:,})"
        choice = Choice(why, few, f"few=false keeps what size={settings.size} has")
        return with_linear(CLASSIFY.resolve({**values, **few}), data, choice)

    def codec(
        self, data: LabelData, settings: ClassifyTrain, learnt: Learnt, origin: Origin | None
    ) -> LabelTextCodec:
        """Put the labels into clusters, if there are to be any, and learn what others learn."""
        count, clusters = clusters_of(settings.model), []
        if count:
            clusters = learnt(
                lambda: cluster_labels(data["train"], data.classes, count, settings.seed),
                load=load_clusters,
                save=save_clusters,
                init=False,
            )
            data = replace(data, classes=list(chain.from_iterable(clusters)))
        codec = super().codec(data, settings, learnt, origin)
        config = {**codec.config, "several": data.multilabel}
        codec = deciding(replace(codec, clusters=clusters, config=config), data.multilabel)
        if not count:
            return codec
        loss = clustered(len(codec.labels), count, settings.model.cluster_beam)
        return replace(codec, decision=SeveralLabels(loss))

    def model(
        self, data: LabelData, codec: LabelTextCodec, settings: ClassifyTrain, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Begin outputs at the log odds of several labels."""
        name, model = super().model(data, codec, settings, origin)
        if data.multilabel and not (origin is not None and origin.was(self.task, codec.labels)):
            heads = [part for part in model.modules() if isinstance(part, ClassificationHead)]
            targets = torch.from_numpy(TEXT.label_table(data["train"], codec.labels))
            for head in heads:  # else each label begins with half a chance, which costs many steps
                head.start_at(targets.to(head.out.bias.device))
        return name, model

    def lesson(self, runner: Runner[Any], data: LabelData, settings: ClassifyTrain) -> Lesson:
        """Batches of texts and the numbers of their labels, or a table of several."""
        codec, longest = runner.codec, settings.max_length
        texts = [example.text for example in data["train"]]
        rows = codec.encoder.texts(texts, longest)
        if not all(len(row.ids) <= longest for row in rows):
            raise UsageError(f"max_length={longest} leaves no room for a text; raise it")
        truncated = sum(row.truncated for row in rows)
        if truncated:
            data.notes.append(
                f"{truncated:,} of {len(rows):,} texts are longer than max_length={longest} "
                "pieces and were cut"
            )
        table = TEXT.label_table(data["train"], codec.labels)
        targets = table.astype(np.float32) if codec.decision.several else table.argmax(1)

        def make(picked: np.ndarray, rows: list[TokenRow], texts: TextBatch) -> LabelBatch:
            return LabelBatch(texts, torch.from_numpy(targets[picked]))

        def again(i: int, key: int) -> TokenRow:
            return codec.encoder.texts([texts[i]], longest, [key])[0]

        def logits(model: Any, batch: LabelBatch) -> Tensor:
            head = model.head.all_logits if codec.clusters else model.head
            return head(model.hidden(**batch.texts.inputs), batch.texts.lengths)

        batches = text_batches(rows, codec.encoder, make, again, settings)
        loss = text_loss(runner, settings, logits)
        return label_lesson(runner, data, settings, batches, loss, {"cut": truncated})


def other_modality(values: Mapping[str, Any]) -> str | None:
    """The task to train where data, or the family, are of images, sounds or series of numbers."""
    data, family = values.get("data"), values.get("family")
    inputs = modality_of(data, values.get("columns"))
    if inputs is None and family and not (data and Path(str(data)).exists()):
        tasks = (modality.tasks.get("label") for modality in MODALITIES.values())
        return next((task for task in tasks if task and family in serving(task)), None)
    return None if inputs is None else inputs.tasks["label"]


CLASSIFY = Task(
    name="classify",
    holds="texts and labels",
    inputs=TEXT,
    predictor=classifier(ClassifyRun(), kind=TextClassifier),
    judge=TextLabelJudge(judged_with, top=False),
    load_codec=load_codec,
    objective=ClassifyObjective(
        "classify",
        TEXT,
        ClassifyTrain,
        sizes=ENCODER_SIZES,
        short={
            **LABEL_SHORT_KEYS,
            "clusters": "model.clusters",
            "cluster_beam": "model.cluster_beam",
        },
    ),
    target="label",
    unit="texts",
    judged=ClassifyEval,
    few_rows=FEW,
    instead=other_modality,
)
