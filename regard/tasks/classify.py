"""Classifying: from texts with labels to a model that labels texts; images go to their task."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.features import split_words
from regard.data.image_files import holds_images
from regard.data.labelled import Example, ExampleFormat, ExampleReader, load_labelled
from regard.errors import UsageError, lookup
from regard.metrics.baselines import Baselines, worth_of_order
from regard.metrics.labels import count, log_loss, macro_f1, micro_f1
from regard.tasks.classifier import Classifier, ClassifierSettings, member_logits, one_label_each
from regard.tasks.labelling import (
    FAMILY,
    SHORT,  # noqa: F401 (the command line lists them)
    WAYS,
    Feed,
    LabelSettings,
    Read,
    Reader,
    Row,
    build_labeller,
    known_only,
    label_list,
    label_loss,
    learn_tokenizer,
    resolve_labels,
    sampler_of,
    settle_features,
    uneven,
    weigh,
)
from regard.tasks.run import Data, Report, Work, save_tokenizer, settle_tokenizer, train_task
from regard.tasks.vision.images import ClassifyImages as images
from regard.training.loop import Trainable, at_least, mix

NAME = "classify"
NOISE, SURE = 0.3, 3.0  # of embeddings that begin by counts, and of the head above them


@dataclass(frozen=True)
class ClassifySettings(LabelSettings):
    """Everything that a run that learns labels of texts can be told."""

    columns: str | None = field(default=None, metadata={"help": "text and label, such as 2,1"})
    labels: str = field(
        default="coarse", metadata={"help": "coarse or fine, for labels such as NUM:date"}
    )
    separator: str | None = field(
        default=None, metadata={"help": "between several labels in a column"}
    )
    valid_by: str = field(
        default="text", metadata={"help": "text, or whole where texts are parts of others"}
    )
    threshold: float = field(
        default=0.5, metadata=at_least(0, "of a label where there are several", 1)
    )
    embeddings: str = field(
        default="random", metadata={"help": "begin at random, or by naive_bayes for few texts"}
    )


FEW = 10_000  # texts, for which other settings are better; chosen on parts of SST-2 and TREC
WORTH = 1.0  # percent that order is worth to naive Bayes where it tells something
# where the order of words tells little, a small model that begins as naive Bayes
BAG: dict[str, Any] = {
    "tokenizer": "unigram",
    "pieces": 4000,
    "embeddings": "naive_bayes",
    "depth": 1,
    "width": 64,
    "heads": 2,
    "ffn_width": 128,
    "lr": 0.001,
    "dropout": 0.3,
    "head_dropout": 0.3,
    "word_dropout": 0.2,
    "ema": 0.99,
    "epochs": 3,
}
# where it tells more, one that learns it
ORDER: dict[str, Any] = {"tokenizer": "unigram", "pieces": 2000, "ema": 0.99, "epochs": 10}
# who says one of these has an opinion on all of them
TOGETHER = (
    ("tokenizer", "pieces", "features", "embeddings", "bpe_dropout"),
    ("size", "depth", "width", "heads", "ffn_width", "lr"),
    ("steps", "epochs"),
)


def suited(values: Mapping[str, Any], texts: Sequence[str], numbers: np.ndarray) -> dict[str, Any]:
    """Add what suits few texts with labels of some numbers to what a user said."""
    said = {key for key, value in values.items() if value is not None}
    said |= {key for key, long in SHORT.items() if long in said}
    if len(texts) > FEW or said & {"init", "like"}:
        return dict(values)
    for some in TOGETHER:
        if said & set(some):
            said |= set(some)
    if not set(BAG) - said:
        return dict(values)
    worth = worth_of_order(texts, numbers, int(numbers.max()) + 1)
    few = ORDER if worth > WORTH or not {"embeddings", "width"}.isdisjoint(said) else BAG
    return {**values, **{key: value for key, value in few.items() if key not in said}}


def resolve(values: Mapping[str, Any]) -> Any:
    """Make full settings of what a user gave: the size fills in what is not said."""
    return images.resolve(values) if holds_images(values.get("data")) else of_texts(values)


def of_texts(values: Mapping[str, Any]) -> ClassifySettings:
    """Make full settings of what a user gave for texts."""
    settings = resolve_labels(ClassifySettings, values, "classify", "texts and labels")
    lookup("embeddings", settings.embeddings, EMBEDDINGS)
    if settings.embeddings != "random" and (settings.init or settings.like):
        raise UsageError(
            f"embeddings={settings.embeddings} is for a new model of the usual kind; "
            "leave it out with init= or like="
        )
    return settings


def begin_by_counts(
    model: Any, rows: Sequence[Row], wanted: np.ndarray, settings: ClassifySettings
) -> None:
    """Let a new model begin as naive Bayes over tokens, as far as its parts let it.

    Of its vector, a token has in the direction of each label how much likelier it is there, and
    noise in all others; the head reads these directions of the mean.
    """
    labels = wanted.shape[1]
    generator = torch.Generator().manual_seed(mix(settings.seed, "embeddings"))
    often = np.ones((model.config.vocab, labels))  # Laplace's rule
    for row, right in zip(rows, wanted, strict=True):
        often[np.unique(row.ids)] += right
    logs = np.log(often / often.sum(0))
    logs = np.clip(logs - logs.mean(1, keepdims=True), -3, 3)
    with torch.no_grad():
        for one in model.everyone():
            table, head = one.embed.tokens.weight, one.head.out.weight
            width = table.shape[1]
            if labels > width // 2 or head.shape[1] != width:
                return
            ways = torch.randn(width, labels, generator=generator)
            ways = torch.linalg.qr(ways - ways.mean(0)).Q.T  # a norm takes the mean away
            noise = NOISE * torch.randn(table.shape, generator=generator)
            begun = noise - noise @ ways.T @ ways + torch.from_numpy(logs).float() @ ways
            table.copy_(begun)
            head.copy_(SURE * ways)


# name -> what becomes of the weights of a new model, given texts and their labels
EMBEDDINGS: dict[str, Callable[[Any, Sequence[Row], np.ndarray, ClassifySettings], None]] = {
    "random": lambda model, rows, wanted, settings: None,
    "naive_bayes": begin_by_counts,
}


class Batch(NamedTuple):
    """Texts, and the labels that are right."""

    read: Read
    wanted: Tensor


class Classification(Trainable):
    """The task as the training loop sees it.

    What is right comes as numbers, so that they can also be those of clusters of labels.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        wanted: np.ndarray,
        settings: ClassifySettings,
        reader: Reader,
        *,
        valid: Sequence[Example] = (),
        judge: Any = None,
        again: Any = None,
    ):
        """Take rows with numbers (n,) or, for several labels, a table (n, labels) of them."""
        self.settings, self.wanted = settings, wanted
        self.way = WAYS["one" if wanted.ndim == 1 else "several"]
        several = wanted.ndim > 1
        often = wanted.sum(0) if several else np.bincount(wanted)
        self.weights = weigh(settings.class_weights, often, len(wanted), several)
        self.feed = Feed(rows, settings, reader, again)
        self.valid, self.judge = valid, judge

    def batch(self, n: int) -> Batch:
        """Return batch n, always the same for the same seed and n."""
        picked, _, read = self.feed[n]
        return Batch(read, torch.from_numpy(self.wanted[picked]).to(self.settings.device))

    def epoch(self) -> float:
        """Return in how many batches all texts are read once."""
        return self.feed.batches.len_epoch()

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the texts, which the loss counts, and the tokens that were read."""
        return len(batch.wanted), batch.read.tokens

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed loss of the labels, which every member learns by itself."""
        settings = self.settings
        losses = [
            label_loss(
                self.way,
                partial(member_logits, member, batch.read),
                batch.wanted,
                settings.label_smoothing,
                settings.r_drop,
                None if self.weights is None else self.weights.to(settings.device),
            )
            for member in model.everyone()
        ]
        return torch.stack(losses).mean()

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return loss, accuracy and F1 on the validation part."""
        classifier: Classifier = self.judge(model)
        how = ClassifierSettings()
        chances, _ = classifier.chances([example.text for example in self.valid], how)
        wanted = classifier.table(self.valid, classifier.labels)
        found = classifier.found(chances, self.settings.threshold)
        counts = count(wanted, found)
        scores = {
            "loss": log_loss(wanted, chances, classifier.several),
            "accuracy": 100 * float((wanted == found).all(1).mean()),
            "macro_f1": macro_f1(counts),
        }
        balanced = self.weights is not None
        return {**scores, "better": scores["macro_f1"] if balanced else micro_f1(counts)}


def train(values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None) -> Report:
    """Train a classifier in a folder, or go on with one that was begun there.

    Images are handed over to the task that knows them.
    """
    if holds_images(values.get("data")):
        return images.train(values, quiet=quiet, recipe=recipe)
    settings = of_texts(values)
    reader = ExampleReader(
        ExampleFormat(
            settings.columns,
            settings.labels,
            settings.separator,
            settings.encoding,
            settings.skip_bad,
            settings.header,
        )
    )

    def read() -> Data:
        assert settings.data is not None
        data = load_labelled(
            settings.data,
            reader,
            valid=settings.valid,
            test=settings.test,
            by=settings.valid_by,
        )
        train = data.parts["train"]
        labels = label_list([example.labels for example in train], settings.data)
        data.parts["valid"] = known_only(
            data.parts["valid"],
            labels,
            lambda example: example.labels,
            "does not occur in train",
            data.notes,
            skip_bad=settings.skip_bad,
        )
        for part in data.parts.values():
            one_label_each(part, reader.several)
        return Data((data, labels), data.sha, data.notes, data.split)

    whole = read()
    if recipe is None and not reader.several:
        numbers = {label: n for n, label in enumerate(whole.parts[1])}
        train = whole.parts[0].parts["train"]
        right = np.array([numbers[example.labels[0]] for example in train])
        settings = of_texts(suited(values, [example.text for example in train], right))

    def prepare(data: Data, folder: Path, begun: dict[str, Any] | None) -> Work:
        parts, labels = data.parts[0].parts, data.parts[1]
        train: list[Example] = parts["train"]
        texts = [example.text for example in train]
        tokenizer = settle_tokenizer(
            folder, settings, begun, lambda: learn_tokenizer(texts, settings)
        )
        about = {
            "labels": labels,
            "several": reader.several,
            "max_length": settings.max_length,
            "features": settings.features,
            "read_labels": settings.labels,
            "read_separator": settings.separator,
        }
        features = settle_features(
            folder, settings, begun, lambda: (split_words(text) for text in texts)
        )
        sampler = sampler_of(settings, tokenizer)
        as_run = Reader(tokenizer, features, sampler)
        model = build_labeller(settings, as_run, labels, NAME)
        rows = as_run.texts(texts, settings.max_length)
        if not all(len(row.ids) <= settings.max_length for row in rows):
            raise UsageError(
                f"max_length={settings.max_length} leaves no room for a text; raise it"
            )
        if cut := sum(row.cut for row in rows):
            data.notes.append(
                f"{cut:,} of {len(rows):,} texts are longer than max_length={settings.max_length} "
                "pieces and were cut"
            )

        def judge(model: Any) -> Classifier:
            return Classifier(model, as_run, labels, about)

        def again(i: int, key: int) -> Row:
            return as_run.texts([texts[i]], settings.max_length, [key])[0]

        wanted, asked = (judge(model).table(some, labels) for some in (train, parts["valid"]))
        data.notes.extend(uneven(wanted.sum(0), labels, settings.class_weights))
        baselines = Baselines.learn("naive Bayes", texts, wanted)
        EMBEDDINGS[settings.embeddings](model, rows, wanted, settings)
        task = Classification(
            rows,
            wanted.astype(np.float32) if reader.several else wanted.argmax(1),
            settings,
            as_run,
            valid=parts["valid"],
            judge=judge,
            again=again if sampler is not None else None,
        )

        def save(folder: Path) -> None:
            save_tokenizer(folder, tokenizer)
            baselines.save(folder)

        return Work(
            FAMILY,
            model,
            task,
            f"{'Several of' if reader.several else 'One of'} {len(labels)} labels for a text",
            about=about,
            facts={"tokenizers": [tokenizer.sha], "labels": len(labels), "cut": cut},
            save=save,
            baselines=baselines.scores([example.text for example in parts["valid"]], asked),
        )

    return train_task(
        NAME, values, settings, read=lambda: whole, prepare=prepare, recipe=recipe, quiet=quiet
    )
