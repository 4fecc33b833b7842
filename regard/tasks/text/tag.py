"""Tagging: one label for each word of a text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.data.features import split_words
from regard.data.labelled import Sentence, SentenceFormat, SentenceReader
from regard.data.rows import Row, TextBatch, TextBatches, collate
from regard.data.word_windows import Window, WordPlaces, sentence_windows, word_places
from regard.decode.batching import in_batches
from regard.errors import UsageError
from regard.modalities.text import WORDS
from regard.models.protocols import Model, TextModel
from regard.settings import setting
from regard.tasks.frame.answers import TAG_FORMATS, Tagged
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import Question, text_keys
from regard.tasks.text.codec import EncoderRun, TextCodec
from regard.tasks.text.label_judge import LabelData, Predicted
from regard.tasks.text.labelling import LabelBatch, LabelEval, Labeller, LabelTrain
from regard.training.label_loss import class_weights


@dataclass(frozen=True)
class SentenceSettings:
    """Where words and tags are in a file."""

    GROUP = "data"

    column: str | None = setting(None, "column of the tags: upos, xpos, deprel, or a number")
    columns: str | None = setting(None, "columns of a table: the lists of words and of tags")


@dataclass(frozen=True)
class TagTrain(SentenceSettings, LabelTrain):
    """What a training of a tagger can be told."""

    join: str = setting("first", "vector of a word, of those of its tokens", choices=lambda: JOINS)


@dataclass(frozen=True)
class TagRun(EncoderRun):
    """How to tag words."""

    format: str = setting("slash", "format of the answers", choices=TAG_FORMATS)
    words: str = setting(
        "raw", "raw: punctuation is split off; spaces: tokenised already", choices=lambda: SPLITS
    )
    scores: bool = setting(False, "print the probability of each tag")
    max_length: int | None = setting(None, "maximum tokens per window", min=8, max=100_000)


@dataclass(frozen=True)
class TagEval(SentenceSettings, LabelEval, TagRun):
    """What an evaluation of a tagger can be told."""


SPLITS: dict[str, Callable[[str], list[str]]] = {"spaces": str.split, "raw": split_words}


def _first(x: Tensor, places: WordPlaces) -> Tensor:
    return x[places.starts]


def _mean(x: Tensor, places: WordPlaces) -> Tensor:
    total = x.new_zeros(len(places.starts), x.shape[-1])
    total = total.index_add(0, places.words, x[places.tokens])
    return total / torch.bincount(places.words, minlength=len(places.starts)).unsqueeze(-1)


# name -> how the vectors of a word's tokens (flat) become that of the word
JOINS: dict[str, Callable[[Tensor, WordPlaces], Tensor]] = {"first": _first, "mean": _mean}


class Tag(Labeller[Tagged]):
    """Labels each word of a text."""

    name, holds, unit, target = "tag", "words and tags", "words", "tags"
    inputs = WORDS
    baseline = "the commonest tag of each word"
    Train, Run, Eval = TagTrain, TagRun, TagEval

    def __init__(self, model: nn.Module, codec: TextCodec, config: Mapping[str, Any] | None = None):
        super().__init__(model, codec, config)
        self.join: str = self.config.get("join", "first")

    # Training

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse an ensemble."""
        settings = super().checked(settings, values, origin)
        members = getattr(settings.model, "members", 1)
        if members > 1:
            raise UsageError(f"members={members} label whole texts; leave it out here")
        return settings

    @classmethod
    def file_reader(cls, settings: Any) -> SentenceReader:
        """Return what reads words and tags."""
        s = settings
        return SentenceReader(SentenceFormat(s.column, s.encoding, s.skip_bad, s.columns))

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> LabelData:
        """Read sentences of words and tags."""
        return cls.read_parts(settings)

    @classmethod
    def label_facts(cls, data: LabelData, settings: Any) -> dict[str, Any]:
        """Return how words are represented, and where the tags stood."""
        return {"join": settings.join, "column": settings.column}

    def batches(self, data: Any, settings: Any) -> TextBatches:
        """Return batches of windows of sentences, and the numbers of their tags."""
        train, longest, device = data["train"], settings.max_length, settings.device
        windows = self._windows([sentence.words for sentence in train], longest)
        numbers = {label: n for n, label in enumerate(self.labels)}
        targets = [
            np.array([numbers[tag] for tag in train[n].tags[span.tag_from : span.tag_to]])
            for _, n, span in windows
        ]
        counts = np.bincount(np.concatenate(targets), minlength=len(numbers))
        weights = class_weights(settings.class_weights, counts, int(counts.sum()))
        self.class_weights = None if weights is None else weights.to(device)
        if more := len(windows) - len(train):
            data.notes.append(
                f"some sentences are longer than max_length={longest} pieces and are "
                f"read in overlapping windows ({more:,} more than sentences)"
            )

        def make(picked: np.ndarray, rows: list[Row], texts: TextBatch) -> LabelBatch:
            pairs = zip(picked.tolist(), rows, strict=True)
            places = word_places(
                [windows[i]._replace(row=row) for i, row in pairs], texts.ids.shape[1], device
            )
            right = np.concatenate([targets[i] for i in picked.tolist()])
            return LabelBatch(texts, torch.from_numpy(right).to(device), places)

        def again(i: int, key: int) -> Row:
            _, n, span = windows[i]
            return self.encoder.words(train[n].words[span.first : span.last], longest, key)

        return self.text_batches([window.row for window in windows], make, again, settings)

    def _windows(self, sentences: Sequence[Sequence[str]], max_length: int) -> list[Window]:
        return [
            window
            for n, words in enumerate(sentences)
            for window in sentence_windows(self.encoder, words, max_length, n)
        ]

    def logits(self, model: TextModel, batch: LabelBatch) -> Tensor:
        """Return the logits (words, labels) of the words of a batch."""
        hidden = model.hidden(**batch.texts.inputs)
        return model.head(JOINS[self.join](hidden.flatten(0, 1), batch.words))

    def title(self, data: Any, settings: Any) -> str:
        """Return what the model card says that the model is."""
        return f"One of {len(self.labels)} tags for each word"

    # Using

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: dict[str, Any]) -> TextCodec:
        """Read tokenizer, features, tags and baselines of a folder."""
        codec = super().load_codec(folder, model, config)
        join = config.get("join", "first")
        if not isinstance(join, str) or join not in JOINS:
            raise UsageError(
                f"{folder / 'config.json'}: 'join' is {join!r:.40}; choose from {', '.join(JOINS)}"
            )
        return codec

    def probabilities(self, items: Sequence[Sentence], settings: Any) -> Predicted:
        """Return the probability of each tag of all words."""
        words = [sentence.words for sentence in items]
        return Predicted(np.concatenate(self.word_probabilities(words, settings)))

    def word_probabilities(
        self, sentences: Sequence[Sequence[str]], settings: Any
    ) -> list[np.ndarray]:
        """Return the probability of each tag of each word of sentences, (words, tags)."""
        windows = self._windows(sentences, settings.max_length or self.max_length)
        lengths = [len(window.row.ids) for window in windows]
        limits = {"tokens": settings.batch_tokens, "rows": settings.batch_rows}
        probs = in_batches(windows, lengths, self._forward, **limits)
        answers: list[list[np.ndarray]] = [[] for _ in sentences]
        for window, some in zip(windows, probs, strict=True):
            answers[window.sentence].append(some)
        nothing = np.zeros((0, len(self.labels)), dtype=np.float32)
        return [np.concatenate(some) if some else nothing for some in answers]

    @torch.inference_mode()
    def _forward(self, windows: list[Window]) -> list[np.ndarray]:
        """Return the probability of each tag of the words of each window."""
        texts = collate([window.row for window in windows], self.tokenizer.pad, self.device)
        places = word_places(windows, texts.ids.shape[1], self.device)
        logits = self.logits(self.model, LabelBatch(texts, places.starts, places)).float()
        sizes = [window.span.tag_to - window.span.tag_from for window in windows]
        return np.split(logits.softmax(-1).cpu().numpy(), np.cumsum(sizes)[:-1])

    def predict(self, inputs: list[Any], settings: Any, *, first: int = 0) -> list[Tagged]:
        """Tag texts, or lists of words."""
        split = SPLITS[settings.words]
        sentences = [split(given) if isinstance(given, str) else list(given) for given in inputs]
        probs = self.word_probabilities(sentences, settings)
        return [self._tagged(*both) for both in zip(sentences, probs, strict=True)]

    def _tagged(self, words: Sequence[str], probs: np.ndarray) -> Tagged:
        tags = [self.labels[i] for i in probs.argmax(1).tolist()]
        return Tagged(words, tags, probs.max(1).tolist())

    def eval_defaults(self) -> dict[str, Any]:
        """Return where the tags of the model's own data stood."""
        return {"column": self.config["column"]} if self.config.get("column") else {}

    def read_test(self, settings: Any) -> LabelData:
        """Read the part that a model is judged on."""
        return self.read_part(settings)

    def outputs(self, data: Any, predictions: Predicted, settings: Any) -> list[dict[str, Any]]:
        """Return the predicted tags of each sentence beside the right ones."""
        tags = iter(self.labels[i] for i in predictions.probs.argmax(1).tolist())
        rows = []
        for words, right, _ in data[settings.part]:
            predicted = [next(tags) for _ in words]
            row = {"words": list(words), "tags": list(right), "prediction": predicted}
            text = " ".join(f"{word}/{tag}" for word, tag in zip(words, predicted, strict=True))
            rows.append(row if settings.outputs.endswith(".jsonl") else {"prediction": text})
        return rows

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the settings that a score depends on."""
        return {"column": settings.column, **super().made_with(settings)}

    def _looked_at(self, given: Any, settings: Any) -> tuple[list[str], list[Window]]:
        """Return the words of a text that is looked at, and its windows."""
        words = SPLITS[settings.words](given) if isinstance(given, str) else list(given)
        if not words:
            raise UsageError("there is nothing to look at in an empty text")
        longest = settings.max_length or self.max_length
        return words, list(sentence_windows(self.encoder, words, longest))

    def question(self, given: str | Sequence[str], settings: Any, expected: Any = None) -> Question:
        """Return the first window of a text with its tags and their log-probability."""
        words, (window, *_) = self._looked_at(given, settings)
        count = window.span.tag_to - window.span.tag_from

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            some = [window] * copies
            texts = collate([window.row] * copies, self.tokenizer.pad, self.device)
            places = word_places(some, texts.ids.shape[1], self.device)
            logits = self.logits(self.model, LabelBatch(texts, places.starts, places))
            return logits.double().log_softmax(-1).view(copies, count, -1)

        chosen = logprobs(1)[0].argmax(-1).tolist() if expected is None else list(expected)
        tokens = self.encoder.spelled(window.row)
        return Question(
            answer=" ".join(self.labels[n] for n in chosen),
            logprobs=logprobs,
            chosen=chosen,
            names=self.labels,
            places=words[:count],
            tokens=tokens,
            keys=text_keys(len(tokens)),
            expected=chosen,
        )

    def explain(self, given: str | Sequence[str], settings: Any) -> Any:
        """Tag a text and return a Picture of what each layer attended to in its first window."""
        from regard.viewer.picture import Picture
        from regard.viewer.text import candidate_steps, text_views

        words, (window, *rest) = self._looked_at(given, settings)
        with watch(self.model) as maps:
            (probs,) = self._forward([window])
        shown = self._tagged(words[: len(probs)], probs)
        word_ids: list[int] = window.row.word_ids.tolist()
        tags = [shown.tags[n] if 0 <= n < len(probs) else "" for n in word_ids]
        steps = candidate_steps(
            torch.from_numpy(probs), self.labels, candidates=settings.candidates
        )
        text = " ".join(words)
        return Picture(
            title=text,
            views=text_views(maps, self.encoder.spelled(window.row), writes=tags),
            steps=steps,
            source=text,
            output=str(shown),
            note="the first of several windows" if rest else "",
        )
