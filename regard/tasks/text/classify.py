"""Text classification: one label of a text, several of them, or a number."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.label_clusters import FILE, cluster_labels, load_clusters, save_clusters
from regard.data.labelled import FINENESS, Example, ExampleFormat, ExampleReader
from regard.data.labels import check_single_labels, label_table
from regard.data.rows import TextBatch, TextBatches, TokenRow, collate
from regard.data.split import SPLITS
from regard.decode.batching import in_batches
from regard.errors import UsageError, log
from regard.layers.heads import ClassificationHead
from regard.metrics.baselines import bigram_gain
from regard.modalities import modality_of
from regard.modalities.text import TEXT
from regard.models import serving
from regard.models.ensemble import members_of
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import text_keys
from regard.tasks.labels.classifier import JudgedUnits, classifier
from regard.tasks.labels.decision import NUMBER, ONE_LABEL, SEVERAL_LABELS, SeveralLabels
from regard.tasks.labels.judge import LabelJudge
from regard.tasks.labels.objective import LabelObjective
from regard.tasks.parts import Choice, Task
from regard.tasks.runner import Runner
from regard.tasks.text.codec import EncoderRun
from regard.tasks.text.few_texts import EMBEDDINGS, FEW, few_text_settings
from regard.tasks.text.labelling import (
    ENCODER_SIZES,
    LABEL_SHORT_KEYS,
    LabelBatch,
    LabelData,
    LabelEval,
    LabelledText,
    LabelTextCodec,
    LabelTrain,
    load_text_codec,
    made_with,
    read_labelled,
)
from regard.training.label_loss import clustered
from regard.viewer.picture import Picture

_WHOLE_POOLS = ("mean", "max", "attention", "convolution")  # they read all tokens, not the first


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


def clusters_of(config: Any) -> int:
    """Number of clusters that a model puts its labels into; 0 if it puts them into none."""
    return getattr(config, "clusters", 0)


@contextmanager
def ranking(model: Any, settings: Any) -> Iterator[None]:
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


@dataclass(frozen=True)
class ClassifyCodec(LabelTextCodec):
    """How texts with labels are brought to an encoder."""

    modality = TEXT

    def check(self, settings: Any, model: Any) -> None:
        """Refuse more tokens or clusters than there are."""
        super().check(settings, model)
        clusters, beam = clusters_of(model.config), getattr(settings, "cluster_beam", None)
        if beam and beam > clusters:
            raise UsageError(
                f"cluster_beam={beam} is more than the {clusters} clusters of the model"
            )

    def read(self, given: str, settings: Any) -> TokenRow:
        """A text as a row of tokens."""
        return self.encoder.texts([given], self.longest(settings))[0]

    def groups(self, inputs: Sequence[str], settings: Any) -> Iterator[Any]:
        """All texts as rows of tokens, after a line of how many were cut."""
        rows = self.encoder.texts(inputs, self.longest(settings)) if inputs else []
        if truncated := sum(row.truncated for row in rows):
            longest = self.longest(settings)
            log(f"{truncated} of {len(inputs)} texts were cut at {longest} pieces")
        yield rows, [[]] * len(rows)

    def raws(self, part: Sequence[Example], settings: Any) -> list[TokenRow]:
        """Texts of a part as rows of tokens."""
        return self.encoder.texts([example.text for example in part], self.longest(settings))

    def logits(self, model: Any, raws: Sequence[TokenRow], settings: Any) -> Tensor:
        """Logits (n, labels) of texts."""
        device = next(model.parameters()).device
        with ranking(model, settings):
            return model(**collate(raws, self.tokenizer.pad, device).inputs)

    @torch.inference_mode()
    def probabilities(self, model: Any, raws: Sequence[TokenRow], settings: Any) -> np.ndarray:
        """Probability of each label (n, labels)."""

        def forward(some: list[TokenRow]) -> list[np.ndarray]:
            logits = self.logits(model, some, settings).float()
            return list(self.decision.loss.probs(logits).cpu().numpy())

        limits = {"tokens": settings.batch_tokens, "rows": settings.batch_rows}
        probs = in_batches(raws, [len(row.ids) for row in raws], forward, **limits)
        return np.stack(probs) if probs else np.zeros((0, len(self.labels)), np.float32)

    def about(self, raw: TokenRow) -> dict[str, Any]:
        """Whether a text was cut."""
        return {"cut": raw.truncated}

    def tokens(self, model: Any, raw: TokenRow) -> dict[str, Any]:
        """Tokens of a text, and which of them the answer is read from."""
        spelled = self.encoder.spelled(raw)
        whole = getattr(model.config, "pool", "mean") in _WHOLE_POOLS
        reads = None if whole else [0]
        return {"tokens": spelled, "keys": text_keys(len(spelled)), "reads": reads}

    def picture(self, model: Any, given: str, settings: Any, describe: Any) -> Picture:
        """What each layer attended to while a text was labelled."""
        from regard.viewer.text import text_views

        row = self.read(given, settings)
        with watch(model) as maps:
            described = describe([row])
        views = text_views(maps, self.encoder.spelled(row))
        return Picture(title=given, views=views, source=given, **described)

    def judged(self, part: Sequence[Example]) -> JudgedUnits:
        """Where each text is, and the text."""
        return JudgedUnits(lambda i: (part[i].where, part[i].excerpt(0)))

    def cut_notes(self, part: Sequence[Example], settings: Any) -> list[str]:
        """How many texts were cut."""
        cut = sum(row.truncated for row in self.raws(part, settings))
        return [f"{cut:,} texts were cut at {self.longest(settings)} pieces"] if cut else []

    def records(
        self, part: Sequence[Example], probs: np.ndarray, settings: Any
    ) -> list[dict[str, Any]]:
        """Prediction for each text beside its label."""
        rows = []
        for example, row in zip(part, probs, strict=True):
            answer = self.decision.answer(self.labels, row, settings)
            record = {"text": example.text, "label": ",".join(example.labels)}
            if self.decision is NUMBER:
                rows.append({**record, "prediction": answer.value})
            else:
                said = {"prediction": str(answer), "probability": answer.probability}
                rows.append({**record, **said})
        return rows


def reader(settings: Any) -> ExampleReader:
    """What reads texts and labels."""
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


def read_test(runner: Runner[Any], settings: Any) -> LabelData:
    """The part that a model is judged on."""
    decision = runner.codec.decision
    data = read_labelled(reader(settings), runner, settings, known=decision is not NUMBER)
    if decision is ONE_LABEL:
        check_single_labels(data[settings.part])
    return data


def judged_with(runner: Runner[Any], data: LabelData, settings: Any) -> dict[str, Any]:
    """Settings that a score depends on."""
    made, codec = made_with(runner, data, settings), runner.codec
    if codec.decision is NUMBER:
        return made
    threshold = settings.threshold if codec.decision.several else None
    made["threshold"] = threshold
    if clusters_of(runner.model.config):
        made["cluster_beam"] = settings.cluster_beam or runner.model.head.beam
    return made


def load_codec(folder: Path, model: Model, config: dict[str, Any]) -> ClassifyCodec:
    """Tokenizer, features, labels, clusters and baselines of a folder."""
    codec = load_text_codec("classify", "texts", folder, model, config)
    if not isinstance(config.get("several", False), bool):
        raise UsageError(f"{folder / 'config.json'}: 'several' is no true or false")
    count, clusters = clusters_of(model.config), []
    if count:
        clusters = load_clusters(folder)
        if (list(chain(*clusters)), len(clusters)) != (codec.labels, count):
            raise UsageError(
                f"{folder / FILE}: its clusters are not those of 'labels' and 'clusters' in "
                "config.json; restore both as they were published"
            )
    return _INPUTS.codec_of(replace(codec, clusters=clusters), config)


class LabelledTexts(LabelledText):
    """Texts, of which labels are learnt."""

    task, baseline = "classify", "naive Bayes"

    def reader(self, settings: Any) -> ExampleReader:
        """What reads texts and labels."""
        return reader(settings)

    def codec_of(self, codec: LabelTextCodec, config: Mapping[str, Any]) -> ClassifyCodec:
        """The codec, which decides for one label, several, or a number."""
        one = NUMBER if len(codec.labels) == 1 else ONE_LABEL
        decision = SEVERAL_LABELS if config.get("several") is True else one
        return ClassifyCodec(**{**vars(codec), "decision": decision})

    def label_facts(self, data: LabelData, settings: Any) -> dict[str, Any]:
        """How labels were read, which evaluations go by."""
        return {
            "several": data.multilabel,
            "read_labels": settings.labels,
            "read_separator": settings.separator,
        }

    def check(self, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse embeddings that are not for this model, and a beam of more than all clusters."""
        settings = super().check(settings, values, origin)
        beam, clusters = values.get("cluster_beam"), clusters_of(settings.model)
        if beam and settings.model.cluster_beam > clusters:
            raise UsageError(
                f"cluster_beam={beam} is more than clusters={clusters}; lower it or raise those"
            )
        usual = settings.family == serving(self.task)[0] and not (settings.init or settings.like)
        if settings.embeddings != "random" and not usual:
            raise UsageError(
                f"embeddings={settings.embeddings} is for a new model of the usual kind; "
                "leave it out with init=, like= or family="
            )
        return settings

    def read(self, settings: Any, origin: Origin | None) -> LabelData:
        """Texts and labels, one each unless they come with several."""
        data = self.read_parts(settings, by=settings.valid_by)
        if not data.multilabel:
            if clusters := clusters_of(settings.model):
                raise UsageError(
                    f"clusters={clusters} is for texts of several labels, and here "
                    "each has one; set separator= if a column holds several, or clusters=0"
                )
            check_single_labels(item for part in data.parts.values() for item in part)
        return data

    def suit(
        self, settings: Any, values: Mapping[str, Any], data: LabelData
    ) -> tuple[Any, Choice | None]:
        """Settings that suit few texts where the user gave none, unless few=false."""
        if data.multilabel or not settings.few:
            return settings, None
        train, size = data["train"], len(data.classes)

        def gain() -> float:
            numbers = label_table(train, data.classes).argmax(1)
            return bigram_gain([example.text for example in train], numbers, size)

        why, few = few_text_settings(values, LABEL_SHORT_KEYS, len(train), gain)
        if not few:
            return settings, None
        choice = Choice(why, few, f"few=false keeps what size={settings.size} has")
        return CLASSIFY.resolve({**values, **few}), choice

    def codec(
        self, data: LabelData, settings: Any, learnt: Any, origin: Origin | None
    ) -> ClassifyCodec:
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
        codec = replace(super().codec(data, settings, learnt, origin), clusters=clusters)
        if not count:
            return codec
        loss = clustered(len(codec.labels), count, settings.model.cluster_beam)
        return replace(codec, decision=SeveralLabels(loss))

    def start(self, model: Any, data: Any, codec: Any, settings: Any, known: bool) -> None:
        """Begin outputs at the log odds of several labels, and embeddings as naive Bayes."""
        train = data["train"]
        targets = codec.targets(train)
        if data.multilabel and not known:
            heads = [part for part in model.modules() if isinstance(part, ClassificationHead)]
            for head in heads:  # else each label begins with half a chance, which costs many steps
                head.start_at(torch.from_numpy(targets).to(head.out.bias.device))
        if settings.embeddings != "random":
            rows = codec.encoder.texts([e.text for e in train], settings.max_length)
            begin = EMBEDDINGS[settings.embeddings]
            begin(model, (row.ids for row in rows), targets, settings.seed)

    def batches(self, data: LabelData, runner: Runner[Any], settings: Any) -> TextBatches:
        """Batches of texts and the numbers of their labels, or a table of several."""
        codec, longest, device = runner.codec, settings.max_length, settings.device
        texts = [example.text for example in data["train"]]
        rows = codec.encoder.texts(texts, longest)
        if not all(len(row.ids) <= longest for row in rows):
            raise UsageError(f"max_length={longest} leaves no room for a text; raise it")
        if truncated := sum(row.truncated for row in rows):
            data.notes.append(
                f"{truncated:,} of {len(rows):,} texts are longer than max_length={longest} "
                "pieces and were cut"
            )
        table = codec.targets(data["train"])
        targets = table.astype(np.float32) if codec.decision.several else table.argmax(1)

        def make(picked: np.ndarray, rows: list[TokenRow], texts: TextBatch) -> LabelBatch:
            return LabelBatch(texts, torch.from_numpy(targets[picked]).to(device))

        def again(i: int, key: int) -> TokenRow:
            return codec.encoder.texts([texts[i]], longest, [key])[0]

        return self.text_batches(rows, codec.encoder, make, again, settings)

    def logits(self, codec: ClassifyCodec, model: Any, batch: LabelBatch) -> Tensor:
        """Logits (b, labels) of texts by one model of the ensemble."""
        head = model.head.all_logits if codec.clusters else model.head
        return head(model.hidden(**batch.texts.inputs), batch.texts.lengths)

    def title(self, codec: ClassifyCodec, runner: Runner[Any]) -> str:
        """What the model card says that the model is."""
        how = "Several" if codec.decision.several else "One"
        return f"{how} of {len(codec.labels)} labels for a text"

    def facts(self, data: LabelData, batches: TextBatches, settings: Any) -> dict[str, Any]:
        """How many texts were truncated."""
        return {"cut": sum(row.truncated for row in batches.rows)}


def other_modality(values: Mapping[str, Any]) -> str | None:
    """The task to train where data are images, sounds or series of numbers."""
    inputs = modality_of(values.get("data"), values.get("columns"))
    return None if inputs is None else inputs.tasks["label"]


_INPUTS = LabelledTexts()
CLASSIFY = Task(
    name="classify",
    holds="texts and labels",
    inputs=TEXT,
    predictor=classifier(ClassifyRun()),
    judge=LabelJudge(read_test, judged_with, top=False),
    load_codec=load_codec,
    objective=LabelObjective(
        _INPUTS,
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
