"""A trained classifier as its user has it: texts in, labels out, and a look at how."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.features import split_words
from regard.data.labelled import (
    Example,
    ExampleFormat,
    ExampleReader,
    hash_items,
    load_labelled,
)
from regard.decode.search import in_batches
from regard.errors import UsageError, log
from regard.metrics.baselines import Baselines
from regard.metrics.bleu import Score
from regard.metrics.evaluation import Evaluation, made_here, write_outputs
from regard.metrics.labels import (
    Error,
    LabelEvaluation,
    by_class,
    compare,
    confusion,
    count,
    scores_of,
    units,
)
from regard.settings import fill, setting
from regard.tasks.embed import pearson, spearman
from regard.tasks.labelling import (
    WAYS,
    Read,
    Reader,
    Row,
    collate,
    known_only,
    labels_of,
    longest_of,
    reader_of,
)
from regard.tasks.run import load_tokenizer
from regard.tasks.runners import Answer, Runner

TOLD = 100  # labels whose chances a JSON line names


@dataclass(frozen=True)
class ClassifierSettings:
    """How to label texts."""

    n_best: int = setting(1, "labels a line, the likeliest first", min=1, max=100_000)
    scores: bool = setting(False, "tell the probability of each label")
    threshold: float = setting(0.5, "of a label where there are several", min=0, max=1)
    max_length: int | None = setting(None, "pieces read of a text", min=1, max=100_000)
    batch_tokens: int = setting(4096, "pieces read at once", min=1)
    batch_rows: int = setting(128, "texts read at once", min=1)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)


@dataclass(frozen=True)
class ClassifierEvalSettings(ClassifierSettings):
    """What to judge on, and how."""

    data: str | None = setting(None, "a folder or file of texts with labels")
    part: str = setting("test", "test, valid or train")
    test: str | None = setting(None, "which test file of the folder")
    columns: str | None = setting(None, "text and label, such as 2,1")
    header: bool | None = setting(None, "whether a table begins with one; recognised unless told")
    labels: str | None = setting(None, "coarse or fine, for labels such as NUM:date")
    separator: str | None = setting(None, "between several labels in a column")
    encoding: str = setting("auto", "auto, utf-8 or latin1")
    skip_bad: bool = setting(False, "leave bad rows out")
    errors: int = setting(10, "errors to show", min=0, max=100_000)
    samples: int = setting(1000, "of the bootstrap", min=100, max=100_000)
    outputs: str | None = setting(None, "a file for the answers; .jsonl tells more")


@dataclass(frozen=True, repr=False)
class Classified(Answer):
    """The labels of one text, and how likely each label is."""

    labels: Sequence[str]  # all that the model knows
    chances: np.ndarray
    chosen: Sequence[int]
    several: bool = False
    cut: bool = False

    def __str__(self) -> str:
        return ",".join(self.labels[i] for i in self.chosen)

    @property
    def label(self) -> str | list[str]:
        """Return the label, or all of them where there may be several."""
        names = [self.labels[i] for i in self.chosen]
        return names if self.several else names[0]

    @property
    def probability(self) -> float | list[float]:
        """Return how likely the label is, or each of them where there may be several."""
        chances = [float(self.chances[i]) for i in self.chosen]
        return chances if self.several else chances[0]

    def keys(self) -> list[str]:
        """Return all names that there are."""
        return ["label", "probability", *super().keys()]

    def __repr__(self) -> str:
        return f"Classified(label={self.label!r}, probability={self.probability!r})"

    def _ranked(self) -> list[int]:
        return np.argsort(-self.chances, kind="stable").tolist()

    def lines(self, how: ClassifierSettings) -> Iterator[str]:
        """Write the labels as lines, each with its probability if asked."""
        rows = [[i] for i in self._ranked()[: how.n_best]] if how.n_best > 1 else [self.chosen]
        for row in rows:
            told = ",".join(f"{self.chances[i]:.4f}" for i in row)
            names = ",".join(self.labels[i] for i in row)
            yield f"{names}\t{told}" if how.scores else names

    def record(self, how: ClassifierSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        all_chances = {
            self.labels[i]: round(float(self.chances[i]), 6) for i in self._ranked()[:TOLD]
        }
        chances = [round(float(self.chances[i]), 6) for i in self.chosen]
        found = {
            "prediction": self.label,
            "probability": chances if self.several else chances[0],
            "probabilities": all_chances,
        }
        return {**found, "cut": True} if self.cut else found


@dataclass(frozen=True)
class Valued(Answer):
    """The number that a model with one label gives to a text: its logit as it is."""

    value: float
    cut: bool = False

    def __str__(self) -> str:
        return f"{self.value:.6g}"

    def lines(self, how: ClassifierSettings) -> Iterator[str]:
        """Write the number."""
        yield str(self)

    def record(self, how: ClassifierSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        return {"prediction": self.value, **({"cut": True} if self.cut else {})}


class Classifier(Runner[Classified | Valued]):
    """A model with its tokenizer and its labels."""

    task = "classify"
    settings = ClassifierSettings
    eval_settings = ClassifierEvalSettings

    def __init__(self, model: Any, reader: Reader, labels: list[str], config: dict[str, Any]):
        self.model, self.reader, self.labels, self.config = model, reader, labels, config
        self.tokenizer = reader.tokenizer
        self.several = config.get("several") is True
        self.valued = len(labels) == 1 and not self.several
        self.way = WAYS["several" if self.several else "value" if self.valued else "one"]
        self.longest: int = config.get("max_length") or model.config.max_length
        self.device = next(model.parameters()).device
        self.baselines: Baselines | None = None

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "Classifier":
        """Put a loaded model together with the tokenizer beside it."""
        if model.config.head != "classify":
            raise UsageError(
                f"{folder / 'config.json'}: a head of {model.config.head!r:.40}, which labels no "
                "texts; train one with: regard train classify init=..."
            )
        labels = labels_of(folder, model, config)
        if not isinstance(config.get("several", False), bool):
            raise UsageError(f"{folder / 'config.json'}: 'several' is no true or false")
        longest = longest_of(config, folder, model)
        reader = reader_of(config, folder, model, load_tokenizer(folder))
        found = cls(model, reader, labels, {**config, "max_length": longest})
        found.baselines = Baselines.load(folder, len(labels))
        return found

    def check(self, settings: dict[str, Any]) -> ClassifierSettings:
        """Make full settings of what a user gave."""
        how = fill(ClassifierSettings, settings)
        if how.n_best > len(self.labels):
            raise UsageError(
                f"n_best={how.n_best} is more than the {len(self.labels)} labels of the model"
            )
        if how.max_length and how.max_length > self.model.config.max_length:
            raise UsageError(
                f"max_length={how.max_length} is more than the {self.model.config.max_length} "
                "places of the model"
            )
        return how

    def answer(
        self, inputs: list[Any], *, first: int = 0, **settings: Any
    ) -> list[Classified | Valued]:
        """Label texts, or give each a number where the model has one label only."""
        how = self.check(settings)
        for text in inputs:
            if not isinstance(text, str):
                raise UsageError(f"{text!r:.60} is no text; give a list of texts")
        if how.threads:
            torch.set_num_threads(how.threads)
        chances, cut = self.chances(inputs, how)
        if any(cut):
            log(f"{sum(cut)} of {len(inputs)} texts were cut at {self._most(how)} pieces")
        if self.valued:
            return [Valued(float(row[0]), was) for row, was in zip(chances, cut, strict=True)]
        return [
            Classified(self.labels, row, self.choose(row, how.threshold), self.several, was)
            for row, was in zip(chances, cut, strict=True)
        ]

    def _most(self, how: ClassifierSettings) -> int:
        return how.max_length or self.longest

    def choose(self, chances: np.ndarray, threshold: float) -> list[int]:
        """Return the likeliest label, or all above a threshold, the likeliest first."""
        order = np.argsort(-chances, kind="stable").tolist()
        return [i for i in order if chances[i] >= threshold] if self.several else order[:1]

    def chances(
        self, texts: Sequence[str], how: ClassifierSettings
    ) -> tuple[np.ndarray, list[bool]]:
        """Return how likely each label is, (n, labels), and which texts had to be cut."""
        rows = self.reader.texts(texts, self._most(how))

        @torch.inference_mode()
        def judge(some: list[Row]) -> list[np.ndarray]:
            read = collate(some, self.tokenizer.pad, self.device)
            logits = text_logits(self.model, read).float()
            return list(self.way.chances(logits).cpu().numpy())

        lengths = [len(row.ids) for row in rows]
        found = in_batches(rows, lengths, judge, tokens=how.batch_tokens, rows=how.batch_rows)
        table = np.stack(found) if found else np.zeros((0, len(self.labels)), np.float32)
        return table, [row.cut for row in rows]

    # Judging

    def table(self, examples: Sequence[Example], labels: Sequence[str]) -> np.ndarray:
        """Return which of the labels each text has, (n, labels)."""
        numbers = {label: i for i, label in enumerate(labels)}
        table = np.zeros((len(examples), len(labels)), dtype=bool)
        for row, example in zip(table, examples, strict=True):
            row[[numbers[label] for label in example.labels]] = True
        return table

    def found(self, chances: np.ndarray, threshold: float) -> np.ndarray:
        """Return which labels are given to each text, (n, labels)."""
        table = np.zeros(chances.shape, dtype=bool)
        for row, some in zip(table, chances, strict=True):
            row[self.choose(some, threshold)] = True
        return table

    def evaluate(
        self,
        settings: dict[str, Any],
        *,
        against: "Classifier | None" = None,
        names: tuple[str, str] = ("model", ""),
    ) -> Evaluation:
        """Label a test set and judge the labels."""
        how = fill(ClassifierEvalSettings, {**self._own(), **settings})
        if how.data is None:
            raise UsageError("data is missing; add data=FILE or data=FOLDER with texts and labels")
        if how.threads:
            torch.set_num_threads(how.threads)
        reader = ExampleReader(
            ExampleFormat(
                how.columns,
                how.labels or "coarse",
                how.separator,
                how.encoding,
                how.skip_bad,
                how.header,
            )
        )
        data = load_labelled(
            how.data, reader, test=how.test, need=(how.part,), trained=self.trained
        )
        if self.valued:
            return self._judge_values(data, how, against, names)
        examples = known_only(
            data.parts[how.part],
            self.labels,
            lambda example: example.labels,
            "is none of the model's",
            data.notes,
            skip_bad=how.skip_bad,
        )
        one_label_each(examples, self.several)
        texts = [example.text for example in examples]
        started = time.perf_counter()
        chances, cut = self.chances(texts, how)
        seconds = time.perf_counter() - started
        if any(cut):
            data.notes.append(f"{sum(cut):,} texts were cut at {self._most(how)} pieces")
        wanted, found = self.table(examples, self.labels), self.found(chances, how.threshold)
        if how.outputs:
            write_outputs(how.outputs, self._outputs(examples, chances, how.threshold))
        comparison = []
        if against is not None:
            theirs = self._theirs(against, texts, how)
            name = "micro F1" if self.several else "accuracy"
            ours = units(wanted, found)
            comparison = [compare(ours, units(wanted, theirs), name, how.samples)]
        table = None
        if not self.several:
            numbers = wanted.argmax(1), found.argmax(1)
            table = confusion(*numbers, len(self.labels)).tolist()
        made_with = {
            "data": how.data,
            "part": how.part,
            "data_hash": hash_items(examples),
            "left_out": len(data.parts[how.part]) - len(examples),
            "tokenizers": [self.tokenizer.sha],
            "max_length": self._most(how),
            "threshold": how.threshold if self.several else None,
            **made_here(),
        }
        return LabelEvaluation(
            names[0],
            scores_of(wanted, found, chances, several=self.several),
            len(examples),
            seconds,
            made_with,
            names[1] or None,
            comparison,
            "texts",
            list(self.labels),
            by_class(count(wanted, found), self.labels),
            table,
            self._errors(examples, wanted, found, chances)[: how.errors],
            notes=data.notes,
            baselines={} if self.baselines is None else self.baselines.scores(texts, wanted),
        )

    def _outputs(
        self, examples: Sequence[Example], chances: np.ndarray, threshold: float
    ) -> list[dict[str, Any]]:
        """Return what was answered to each text, beside its right labels."""
        rows = []
        for example, row in zip(examples, chances, strict=True):
            answer = Classified(self.labels, row, self.choose(row, threshold), self.several)
            told = {"prediction": str(answer), "probability": answer.probability}
            rows.append({"text": example.text, "label": ",".join(example.labels), **told})
        return rows

    def _judge_values(
        self, data: Any, how: ClassifierEvalSettings, against: Any, names: tuple[str, str]
    ) -> Evaluation:
        """Compare the numbers of a test set with those that are right."""
        if against is not None:
            raise UsageError("against= compares labels, and this model gives numbers; leave it out")
        examples: list[Example] = data.parts[how.part]
        right = np.array([_number(example) for example in examples])
        started = time.perf_counter()
        found = self.chances([example.text for example in examples], how)[0][:, 0].astype(float)
        seconds = time.perf_counter() - started
        if how.outputs:
            rows = zip(examples, found.tolist(), strict=True)
            write_outputs(
                how.outputs,
                [{"text": e.text, "label": e.labels[0], "prediction": x} for e, x in rows],
            )
        signature = f"texts:{len(examples)}"
        scores = [
            Score("Spearman", spearman(found, right), signature, 4),
            Score("Pearson", pearson(found, right), signature, 4),
            Score("mean squared error", float(((found - right) ** 2).mean()), signature, 4),
        ]
        made_with = {
            "data": how.data,
            "part": how.part,
            "data_hash": hash_items(examples),
            "tokenizers": [self.tokenizer.sha],
            "max_length": self._most(how),
            **made_here(),
        }
        return Evaluation(names[0], scores, len(examples), seconds, made_with, of="texts")

    def _own(self) -> dict[str, Any]:
        """Return how the labels of the model's own data were read."""
        own = {key: self.config.get(f"read_{key}") for key in ("labels", "separator")}
        return {key: value for key, value in own.items() if isinstance(value, str)}

    def _theirs(
        self, other: "Classifier", texts: Sequence[str], how: ClassifierEvalSettings
    ) -> np.ndarray:
        """Return which of our labels another model gives to each text."""
        if set(other.labels) != set(self.labels) or other.several != self.several:
            raise UsageError(
                "against= names a model of other labels "
                f"({', '.join(other.labels[:6])}); compare models of the same"
            )
        chances, _ = other.chances(texts, how)
        order = [other.labels.index(label) for label in self.labels]
        return other.found(chances, how.threshold)[:, order]

    def _errors(
        self,
        examples: Sequence[Example],
        wanted: np.ndarray,
        found: np.ndarray,
        chances: np.ndarray,
    ) -> list[Error]:
        """Return the wrong answers, those that the model was surest of first."""
        rows = np.flatnonzero((wanted != found).any(1))
        # how sure it was that a label is there, or is not there, though it is the other way
        sure = np.where(found, chances, (1 - chances) * self.several) * (wanted != found)
        order = rows[np.argsort(-sure[rows].max(1, initial=0.0), kind="stable")]
        return [
            Error(
                examples[i].where,
                examples[i].text,
                ",".join(examples[i].labels) or "none",
                ",".join(self.labels[k] for k in np.flatnonzero(found[i]).tolist()) or "none",
                float(sure[i].max()),
            )
            for i in order.tolist()
        ]

    # Looking

    def picture(self, text: str, *, candidates: int = 5, **settings: Any):
        """Label a text and gather all there is to see of how it was done."""
        from regard.viewer.picture import Picture, View

        how = self.check(settings)
        (row,) = self.reader.texts([text], self._most(how))
        read = collate([row], self.tokenizer.pad, self.device)
        with torch.inference_mode(), watch(self.model) as maps:
            logits = text_logits(self.model, read).float()
            chances = self.way.chances(logits)[0].cpu().numpy()
        pieces = self.reader.shown(row, split_words(text))
        views = []
        for name in maps.names():
            weights = maps[name].weights()[0].cpu().numpy()
            pooled = weights.shape[1] != len(pieces) or "blocks." not in name
            rows = ["text"] * weights.shape[1] if pooled else pieces
            views.append(View(name, weights, rows, pieces, "cross" if pooled else "self"))
        if self.valued:
            value = str(Valued(float(chances[0])))
            return Picture(title=text, views=views, source=text, output=value, note=value)
        answer = Classified(self.labels, chances, self.choose(chances, how.threshold), self.several)
        order = answer._ranked()[:candidates]
        told = ", ".join(f"{self.labels[i]} {chances[i]:.4f}" for i in order)
        return Picture(
            title=text,
            views=views,
            source=text,
            output=str(answer) or "no label",
            alternatives=[
                (self.labels[i], float(chances[i])) for i in order if i not in answer.chosen
            ],
            note=f"probabilities: {told}",
        )


def _number(example: Example) -> float:
    """Return the number that is right for a text."""
    try:
        (told,) = example.labels
        return float(told)
    except ValueError as error:
        raise UsageError(
            f"{example.where}: {','.join(example.labels)!r:.60} is no number, which is what this "
            "model gives to a text"
        ) from error


def one_label_each(examples: Sequence[Example], several: bool) -> None:
    """Refuse a text with more than one label where there is one each."""
    for example in examples:
        if not several and len(example.labels) != 1:
            raise UsageError(
                f"{example.where}: {len(example.labels)} labels; this model gives each text one"
            )


def text_logits(model: Any, read: Read) -> Tensor:
    """Return the logits (b, labels) of texts, the mean over the model's members."""
    types = {} if read.types is None else {"types": read.types}
    return model(read.ids, read.lengths, **types)


def member_logits(member: Any, read: Read) -> Tensor:
    """Return the logits (b, labels) of texts that one member alone gives."""
    types = {} if read.types is None else {"types": read.types}
    return member.head(member.hidden(read.ids, read.lengths, **types), read.lengths)
