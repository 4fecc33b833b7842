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

from regard.attention.watch import watch
from regard.data.features import split_words
from regard.data.image_files import holds_images
from regard.data.label_clusters import FILE, cluster_labels, load_clusters, save_clusters
from regard.data.labelled import Example, ExampleFormat, ExampleReader
from regard.data.labels import check_single_labels, label_table
from regard.data.rows import Row, TextBatch, TextBatches, collate
from regard.data.series_files import holds_series
from regard.data.sound_sets import holds_sounds
from regard.decode.batching import in_batches
from regard.errors import UsageError, log, lookup
from regard.metrics.baselines import bigram_gain
from regard.metrics.correlation import value_scores
from regard.metrics.evaluation import Evaluation
from regard.models.protocols import Model, TextModel
from regard.settings import setting
from regard.tasks.frame.answers import Classified, Valued
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import Question, text_keys
from regard.tasks.frame.task import Judged, Learnt, Task
from regard.tasks.text.codec import EncoderRun, TextCodec
from regard.tasks.text.labelling import (
    SHORT,
    LabelBatch,
    LabelData,
    LabelEval,
    Labeller,
    LabelTrain,
    Predicted,
)
from regard.training.few_texts import EMBEDDINGS, few_text_settings
from regard.training.label_loss import (
    LABEL_LOSSES,
    LabelLoss,
    class_weights,
    clustered,
    imbalance_notes,
)

WHOLE_POOLS = ("mean", "max", "attention", "convolution")  # they read all tokens, not the first


@dataclass(frozen=True)
class ExampleSettings:
    """Where texts and labels are in a file."""

    columns: str | None = setting(None, "columns of a table: text and label, such as 2,1")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    separator: str | None = setting(None, "separator of several labels in a column")


@dataclass(frozen=True)
class ClassifyTrain(ExampleSettings, LabelTrain):
    """What a training of a classifier can be told."""

    labels: str = setting("coarse", "coarse or fine, for labels such as NUM:date")
    valid_by: str = setting("text", "split off text, or whole where texts are parts of others")
    threshold: float = setting(0.5, "probability threshold of multi-label texts", min=0, max=1)
    embeddings: str = setting("random", "initial embeddings: random, or naive_bayes for few texts")


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

    labels: str | None = setting(None, "coarse or fine, for labels such as NUM:date")


def clusters_of(config: Any) -> int:
    """Return into how many clusters a model puts its labels; 0 if into none."""
    return getattr(config, "clusters", 0)


class Classify(Labeller[Classified | Valued]):
    """Labels whole texts."""

    name, holds, unit = "classify", "texts and labels", "texts"
    baseline = "naive Bayes"
    Train, Run, Eval = ClassifyTrain, ClassifyRun, ClassifyEval
    short = {**SHORT, "clusters": "model.clusters", "cluster_beam": "model.cluster_beam"}

    def __init__(self, model: nn.Module, codec: TextCodec, config: Mapping[str, Any] | None = None):
        super().__init__(model, codec, config)
        self.clusters = clusters_of(self.model.config)
        self.multilabel = self.config.get("several") is True
        self.regression = len(self.labels) == 1 and not self.multilabel
        if self.regression:
            self.Result = Evaluation
        self.truncated = 0  # texts of the training

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
        tests = {"images": holds_images, "sounds": holds_sounds, "series": holds_series}
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
        lookup("embeddings", settings.embeddings, EMBEDDINGS)
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
    def suited(cls, settings: Any, values: Mapping[str, Any], data: Any) -> Any:
        """Return settings that suit few texts, where the user said nothing."""
        if data.multilabel:
            return settings
        train, size = data.parts["train"], len(data.labels)

        def gain() -> float:
            numbers = label_table(train, data.labels).argmax(1)
            return bigram_gain([example.text for example in train], numbers, size)

        few = few_text_settings(values, SHORT, len(train), gain)
        return cls.resolve({**values, **few}) if few else settings

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
                lambda: cluster_labels(data.parts["train"], data.labels, count, settings.seed),
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
        """Build the model, with the embeddings that the settings choose."""
        name, model = super().make_model(data, codec, settings, origin)
        if settings.embeddings != "random":
            train = data.parts["train"]
            rows = codec.encoder.texts([e.text for e in train], settings.max_length)
            targets = label_table(train, codec.labels)
            EMBEDDINGS[settings.embeddings](
                model, (row.ids for row in rows), targets, settings.seed
            )
        return name, model

    def batches(self, data: Any, settings: Any) -> TextBatches:
        """Return batches of texts and the numbers of their labels, or a table of several."""
        train, longest = data.parts["train"], settings.max_length
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

    # Using

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: dict[str, Any]) -> TextCodec:
        """Read tokenizer, features, labels and baselines of a folder."""
        codec = super().load_codec(folder, model, config)
        if not isinstance(config.get("several", False), bool):
            raise UsageError(f"{folder / 'config.json'}: 'several' is no true or false")
        count = clusters_of(model.config)
        if not count:
            return codec
        clusters = load_clusters(folder)
        if (list(chain(*clusters)), len(clusters)) != (codec.labels, count):
            raise UsageError(
                f"{folder / FILE}: its clusters are not those of 'labels' and 'clusters' in "
                "config.json; restore both as they were published"
            )
        return replace(codec, clusters=clusters)

    def check_run(self, settings: Any) -> Any:
        """Refuse more labels or clusters than there are."""
        if settings.cluster_beam and settings.cluster_beam > self.clusters:
            raise UsageError(
                f"cluster_beam={settings.cluster_beam} is more than the {self.clusters} clusters "
                "of the model"
            )
        if settings.n_best > len(self.labels):
            raise UsageError(
                f"n_best={settings.n_best} is more than the {len(self.labels)} labels of the model"
            )
        return super().check_run(settings)

    @contextmanager
    def using(self, settings: Any) -> Iterator[None]:
        """Rank the labels of as many clusters as are asked for."""
        heads = [one.head for one in self.model.everyone()] if self.clusters else []
        usual = [head.beam for head in heads]
        for head in heads:
            head.beam = settings.cluster_beam or head.beam
        try:
            with super().using(settings):
                yield
        finally:
            for head, beam in zip(heads, usual, strict=True):
                head.beam = beam

    def probabilities(self, items: Sequence[Example], settings: Any) -> Predicted:
        """Return the probability of each label of the texts."""
        probs, truncated = self.text_probabilities([item.text for item in items], settings)
        return Predicted(probs, sum(truncated))

    def text_probabilities(
        self, texts: Sequence[str], settings: Any
    ) -> tuple[np.ndarray, list[bool]]:
        """Return the probability of each label (n, labels), and which texts were truncated."""
        rows = self.encoder.texts(texts, settings.max_length or self.max_length)

        @torch.inference_mode()
        def forward(some: list[Row]) -> list[np.ndarray]:
            batch = collate(some, self.tokenizer.pad, self.device)
            logits = self.model(**batch.inputs).float()
            return list(self.objective.probs(logits).cpu().numpy())

        limits = {"tokens": settings.batch_tokens, "rows": settings.batch_rows}
        probs = in_batches(rows, [len(row.ids) for row in rows], forward, **limits)
        table = np.stack(probs) if probs else np.zeros((0, len(self.labels)), np.float32)
        return table, [row.truncated for row in rows]

    def predict(
        self, inputs: list[Any], settings: Any, *, first: int = 0
    ) -> list[Classified | Valued]:
        """Label texts, or give each a number where the model has a single output."""
        probs, truncated = self.text_probabilities(inputs, settings)
        if any(truncated):
            most = settings.max_length or self.max_length
            log(f"{sum(truncated)} of {len(inputs)} texts were cut at {most} pieces")
        pairs = list(zip(probs, truncated, strict=True))
        if self.regression:
            return [Valued(float(row[0]), cut) for row, cut in pairs]
        return [self._classified(row, settings.threshold, cut) for row, cut in pairs]

    def _classified(self, probs: np.ndarray, threshold: float, cut: bool = False) -> Classified:
        """Choose the likeliest label, or all above a threshold, the likeliest first."""
        order = np.argsort(-probs, kind="stable").tolist()
        chosen = [i for i in order if probs[i] >= threshold] if self.multilabel else order[:1]
        return Classified(self.labels, probs, chosen, self.multilabel, cut)

    def assign(self, probs: np.ndarray, settings: Any) -> np.ndarray:
        """Return a table (n, labels) of the labels that are given to each text."""
        return probs >= settings.threshold if self.multilabel else super().assign(probs, settings)

    def eval_defaults(self) -> dict[str, Any]:
        """Return how the labels of the model's own data were read."""
        own = {key: self.config.get(f"read_{key}") for key in ("labels", "separator")}
        return {key: value for key, value in own.items() if isinstance(value, str)}

    def read_test(self, settings: Any) -> LabelData:
        """Read the part that a model is judged on."""
        data = self.read_part(settings, known=not self.regression)
        if not self.regression and not self.multilabel:
            check_single_labels(data.parts[settings.part])
        return data

    def check_against(self, other: Task[Any, Any]) -> None:
        """Refuse a model of other labels."""
        if self.regression:
            raise UsageError("against= compares labels, and this model gives numbers; leave it out")
        super().check_against(other)

    def score(self, data: Any, predictions: Predicted, settings: Any) -> Judged:
        """Return the scores of labels, or how well numbers go with those that are right."""
        if not self.regression:
            return super().score(data, predictions, settings)
        targets = np.array([example.number for example in data.parts[settings.part]])
        return Judged(value_scores(predictions.probs[:, 0].astype(float), targets), len(targets))

    def outputs(self, data: Any, predictions: Predicted, settings: Any) -> list[dict[str, Any]]:
        """Return the prediction of each text beside its label."""
        rows = []
        for example, probs in zip(data.parts[settings.part], predictions.probs, strict=True):
            row: dict[str, Any] = {"text": example.text, "label": ",".join(example.labels)}
            if self.regression:
                rows.append({**row, "prediction": float(probs[0])})
                continue
            answer = self._classified(probs, settings.threshold)
            rows.append({**row, "prediction": str(answer), "probability": answer.probability})
        return rows

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the settings that a score depends on."""
        if self.regression:
            return super().made_with(settings)
        threshold = settings.threshold if self.multilabel else None
        made = {**super().made_with(settings), "threshold": threshold}
        return made | {"cluster_beam": self.model.head.beam} if self.clusters else made

    def question(self, given: str, settings: Any, expected: Any = None) -> Question:
        """Return a text with its labels and their log-probability."""
        if self.regression:
            raise UsageError("this model gives a number, which has no probability to be changed")
        (row,) = self.encoder.texts([given], settings.max_length or self.max_length)

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            batch = collate([row] * copies, self.tokenizer.pad, self.device)
            logits = self.model(**batch.inputs).double()
            if self.multilabel:  # each label is given or not
                return torch.stack([-logits, logits], -1).log_softmax(-1)
            return logits.log_softmax(-1).unsqueeze(1)

        chosen = expected
        if chosen is None:
            probs = logprobs(1)[0].exp()
            given_labels = probs[:, 1] >= settings.threshold if self.multilabel else probs.argmax(1)
            chosen = given_labels.long().tolist()
        numbers = [n for n, yes in enumerate(chosen) if yes] if self.multilabel else chosen
        tokens = self.encoder.spelled(row, split_words(given))
        pool = getattr(self.model.config, "pool", "mean")
        return Question(
            answer=", ".join(self.labels[n] for n in numbers) or "no label",
            logprobs=logprobs,
            chosen=chosen,
            names=["no", "yes"] if self.multilabel else self.labels,
            places=self.labels if self.multilabel else ["label"],
            tokens=tokens,
            keys=text_keys(len(tokens)),
            expected=chosen,
            reads=None if pool in WHOLE_POOLS else [0],
        )

    def explain(self, given: str, settings: Any) -> Any:
        """Label a text and return a Picture of what each layer attended to."""
        from regard.viewer.picture import Picture
        from regard.viewer.text import label_candidates, text_views

        (row,) = self.encoder.texts([given], settings.max_length or self.max_length)
        batch = collate([row], self.tokenizer.pad, self.device)
        with torch.inference_mode(), watch(self.model) as maps:
            logits = self.model(**batch.inputs).float()
            probs = self.objective.probs(logits)[0].cpu().numpy()
        views = text_views(maps, self.encoder.spelled(row, split_words(given)))
        if self.regression:
            value = str(Valued(float(probs[0])))
            return Picture(title=given, views=views, source=given, output=value, note=value)
        answer = self._classified(probs, settings.threshold)
        candidates = label_candidates(self.labels, probs, answer.chosen, settings.candidates)
        output = str(answer) or "no label"
        return Picture(title=given, views=views, source=given, output=output, **candidates)
