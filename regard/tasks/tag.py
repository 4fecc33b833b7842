"""Tagging: from sentences with a tag for each word to a model that tags words."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.labelled import Sentence, SentenceFormat, SentenceReader, load_labelled
from regard.errors import lookup
from regard.metrics.baselines import Baselines
from regard.metrics.labels import count, log_loss, macro_f1, micro_f1, ones
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
    weigh,
)
from regard.tasks.run import Data, Report, Work, save_tokenizer, settle_tokenizer, train_task
from regard.tasks.tagger import (
    JOINS,
    Part,
    Places,
    Tagger,
    TaggerSettings,
    cut_sentence,
    places,
    word_logits,
)
from regard.training.loop import Trainable

NAME = "tag"


@dataclass(frozen=True)
class TagSettings(LabelSettings):
    """Everything that a run that learns tags of words can be told."""

    column: str | None = field(
        default=None, metadata={"help": "of the tags: upos, xpos, deprel, or a number"}
    )
    columns: str | None = field(
        default=None, metadata={"help": "of a table: the lists of words and of tags"}
    )
    join: str = field(default="first", metadata={"help": "of a word's pieces: first or mean"})


def resolve(values: Mapping[str, Any]) -> TagSettings:
    """Make full settings of what a user gave: the size fills in what is not said."""
    settings = resolve_labels(TagSettings, values, "tag", "words and tags")
    lookup("join", settings.join, JOINS)
    return settings


class Batch(NamedTuple):
    """Sentences, where their words stand, and the tags that are right."""

    read: Read
    at: Places
    wanted: Tensor


class Tagging(Trainable):
    """The task as the training loop sees it."""

    def __init__(
        self,
        sentences: Sequence[Sentence],
        settings: TagSettings,
        reader: Reader,
        *,
        valid: Sequence[Sentence],
        judge: Any,
        numbers: Mapping[str, int],
    ):
        self.settings, self.reader = settings, reader
        self.sentences, self.valid, self.judge = sentences, valid, judge
        self.parts = [
            part
            for n, sentence in enumerate(sentences)
            for part in cut_sentence(reader, sentence.words, settings.max_length, n)
        ]
        self.wanted = [
            np.array([numbers[tag] for tag in sentences[n].tags[window.tag_from : window.tag_to]])
            for _, n, window in self.parts
        ]
        often = np.bincount(np.concatenate(self.wanted), minlength=len(numbers))
        self.weights = weigh(settings.class_weights, often, int(often.sum()))
        again = self._again if reader.sampler is not None else None
        self.feed = Feed([part.row for part in self.parts], settings, reader, again)

    def _again(self, i: int, key: int) -> Row:
        """Read a window with its words cut by a key."""
        _, n, window = self.parts[i]
        words = self.sentences[n].words[window.first : window.last]
        return self.reader.words(words, self.settings.max_length, key)

    def batch(self, n: int) -> Batch:
        """Return batch n, always the same for the same seed and n."""
        picked, rows, read = self.feed[n]
        device = self.settings.device
        parts = [
            Part(row, *self.parts[i][1:]) for i, row in zip(picked.tolist(), rows, strict=True)
        ]
        at = places(parts, read.ids.shape[1], device)
        wanted = np.concatenate([self.wanted[i] for i in picked.tolist()])
        return Batch(read, at, torch.from_numpy(wanted).to(device))

    def epoch(self) -> float:
        """Return in how many batches all sentences are read once."""
        return self.feed.batches.len_epoch()

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the words, which the loss counts, and the tokens that were read."""
        return len(batch.wanted), batch.read.tokens

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed loss of the tags."""
        settings = self.settings
        return label_loss(
            WAYS["one"],
            lambda: word_logits(model, batch.read, batch.at, settings.join),
            batch.wanted,
            settings.label_smoothing,
            settings.r_drop,
            None if self.weights is None else self.weights.to(settings.device),
        )

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return loss, accuracy and F1 on the validation part."""
        tagger: Tagger = self.judge(model)
        words = [sentence.words for sentence in self.valid]
        chances = np.concatenate(tagger.chances(words, TaggerSettings()))
        size = len(tagger.labels)
        wanted, found = ones(tagger.numbers(self.valid), size), ones(chances.argmax(1), size)
        counts = count(wanted, found)
        scores = {
            "loss": log_loss(wanted, chances, False),
            "accuracy": micro_f1(counts),
            "macro_f1": macro_f1(counts),
        }
        return {**scores, "better": scores["accuracy" if self.weights is None else "macro_f1"]}


def train(values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None) -> Report:
    """Train a tagger in a folder, or go on with one that was begun there."""
    settings = resolve(values)
    format = SentenceFormat(settings.column, settings.encoding, settings.skip_bad, settings.columns)

    def read() -> Data:
        assert settings.data is not None
        data = load_labelled(
            settings.data, SentenceReader(format), valid=settings.valid, test=settings.test
        )
        labels = label_list([sentence.tags for sentence in data.parts["train"]], settings.data)
        data.parts["valid"] = known_only(
            data.parts["valid"],
            labels,
            lambda sentence: sentence.tags,
            "does not occur in train",
            data.notes,
            skip_bad=settings.skip_bad,
        )
        return Data((data, labels), data.sha, data.notes, data.split)

    def prepare(data: Data, folder: Path, begun: dict[str, Any] | None) -> Work:
        parts, labels = data.parts[0].parts, data.parts[1]
        texts = [" ".join(sentence.words) for sentence in parts["train"]]
        tokenizer = settle_tokenizer(
            folder, settings, begun, lambda: learn_tokenizer(texts, settings)
        )
        about = {
            "labels": labels,
            "join": settings.join,
            "column": settings.column,
            "max_length": settings.max_length,
            "features": settings.features,
        }
        features = settle_features(
            folder, settings, begun, lambda: (sentence.words for sentence in parts["train"])
        )
        reader = Reader(tokenizer, features, sampler_of(settings, tokenizer))
        model = build_labeller(settings, reader, labels, NAME)
        known = {label: i for i, label in enumerate(labels)}
        task = Tagging(
            parts["train"],
            settings,
            reader,
            valid=parts["valid"],
            judge=lambda model: Tagger(model, reader, labels, about),
            numbers=known,
        )
        words, right = (
            {
                part: [one for sentence in parts[part] for one in getattr(sentence, side)]
                for part in ("train", "valid")
            }
            for side in ("words", "tags")
        )
        table = {
            part: ones([known[tag] for tag in tags], len(labels)) for part, tags in right.items()
        }
        usual = "the commonest tag of each word"
        baselines = Baselines.learn(usual, words["train"], table["train"])
        windows = len(task.parts) - len(parts["train"])
        if windows:
            data.notes.append(
                f"some sentences are longer than max_length={settings.max_length} pieces and are "
                f"read in overlapping windows ({windows:,} more than sentences)"
            )

        def save(folder: Path) -> None:
            save_tokenizer(folder, tokenizer)
            baselines.save(folder)

        return Work(
            FAMILY,
            model,
            task,
            f"One of {len(labels)} tags for each word",
            about=about,
            facts={"tokenizers": [tokenizer.sha], "labels": len(labels)},
            save=save,
            baselines=baselines.scores(words["valid"], table["valid"]),
        )

    return train_task(
        NAME, values, settings, read=read, prepare=prepare, recipe=recipe, quiet=quiet
    )
