"""Tagging: one label for each word of a text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.data.features import split_words
from regard.data.labelled import Sentence, SentenceFormat
from regard.data.rows import TextBatch, TokenRow, collate
from regard.data.word_windows import WordPlaces, WordWindow, sentence_windows, word_places
from regard.decode.batching import in_batches
from regard.errors import UsageError
from regard.metrics.linear import neighbours
from regard.modalities.text import WORDS, LabelData, LabelSource, TextFormat
from regard.modalities.tokens import text_keys
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.answers import TAG_FORMATS, Tagged
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import Question
from regard.tasks.frame.settings import Asked
from regard.tasks.labels.classifier import of_valid
from regard.tasks.labels.judge import LabelJudge
from regard.tasks.labels.objective import label_lesson
from regard.tasks.labels.settings import LinearTrain
from regard.tasks.parts import Learnt, Lesson, Predictor, Task, V
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
from regard.viewer.picture import Picture
from regard.viewer.settings import LookSettings

TextOrWords = str | Sequence[str]  # a text, or its words


@dataclass(frozen=True)
class SentenceSettings:
    """Where words and tags are in a file."""

    GROUP = "data"

    column: str | None = setting(None, "column of the tags: upos, xpos, deprel, or a number")
    columns: str | None = setting(None, "columns of a table: the lists of words and of tags")

    def reading(self) -> LabelSource:
        """How words and tags lie in files."""
        of: Any = self  # a training or an evaluation
        return LabelSource(SentenceFormat(self.column, of.encoding, of.skip_bad, self.columns))


@dataclass(frozen=True)
class TagTrain(SentenceSettings, LinearTrain, LabelTrain):
    """What a training of a tagger can be told."""

    join: str = setting("first", "vector of a word, of those of its tokens", choices=lambda: JOINS)

    def facts(self) -> dict[str, Any]:
        """How words are represented, and where the tags stood."""
        return {"join": self.join, "column": self.column}


@dataclass(frozen=True)
class TagRun(EncoderRun):
    """How to tag words."""

    format: str = setting("slash", "format of the answers", choices=TAG_FORMATS)
    words: str = setting(
        "raw", "raw: punctuation is split off; spaces: tokenised already", choices=lambda: _SPLITS
    )
    scores: bool = setting(False, "print the probability of each tag")
    max_length: int | None = setting(None, "maximum tokens per window", min=8, max=100_000)


@dataclass(frozen=True)
class TagLook(LookSettings, TagRun):
    """How to tag words while one looks."""


@dataclass(frozen=True)
class TagEval(SentenceSettings, LabelEval, TagRun):
    """What an evaluation of a tagger can be told."""


_SPLITS: dict[str, Callable[[str], list[str]]] = {"spaces": str.split, "raw": split_words}


def _first(x: Tensor, places: WordPlaces) -> Tensor:
    return x[places.starts]


def _mean(x: Tensor, places: WordPlaces) -> Tensor:
    total = x.new_zeros(len(places.starts), x.shape[-1])
    total = total.index_add(0, places.words, x[places.tokens])
    return total / torch.bincount(places.words, minlength=len(places.starts)).unsqueeze(-1)


# name -> how the vectors of a word's tokens (flat) become that of the word
JOINS: dict[str, Callable[[Tensor, WordPlaces], Tensor]] = {"first": _first, "mean": _mean}


def windows_of(
    codec: LabelTextCodec, sentences: Sequence[Sequence[str]], longest: int
) -> list[WordWindow]:
    """Overlapping windows of sentences."""
    return [
        window
        for n, words in enumerate(sentences)
        for window in sentence_windows(codec.encoder, words, longest, n)
    ]


def word_logits(codec: LabelTextCodec, model: Any, batch: LabelBatch) -> Tensor:
    """Logits (words, labels) of the words of a batch."""
    hidden = model.hidden(**batch.texts.inputs)
    return model.head(JOINS[codec.join](hidden.flatten(0, 1), batch.words))


class Tagger(Predictor[Tagged, TagRun, TagLook, TextOrWords]):
    """Gives each word of a text the most probable of its tags."""

    Settings, Look = TagRun, TagLook

    def __init__(self, model: nn.Module, codec: LabelTextCodec, config: Mapping[str, Any]):
        super().__init__(model, codec, config)
        self.labels, self.plain, self.defaults = codec.labels, TagRun(), {}

    def check(self, settings: V) -> V:
        """Refuse more tokens than the model has positions for."""
        self.format_for(settings)
        return settings

    def format_for(self, settings: Asked) -> TextFormat:
        """Format for windows of as many tokens as are asked for."""
        return WORDS.format_for(self.codec.format, settings)

    def part_probabilities(self, part: Sequence[Sentence], settings: TagRun) -> np.ndarray:
        """Probability of each tag of all words of a part."""
        words = [sentence.words for sentence in part]
        return np.concatenate(self.word_probabilities(words, settings))

    def word_probabilities(
        self, sentences: Sequence[Sequence[str]], settings: TagRun
    ) -> list[np.ndarray]:
        """Probability of each tag of each word of sentences, (words, tags)."""
        windows = windows_of(self.codec, sentences, self.format_for(settings).longest)
        lengths = [len(window.row.ids) for window in windows]
        limits = {"tokens": settings.batch_tokens, "rows": settings.batch_rows}
        probs = in_batches(windows, lengths, partial(self._forward, settings=settings), **limits)
        answers: list[list[np.ndarray]] = [[] for _ in sentences]
        for window, some in zip(windows, probs, strict=True):
            answers[window.sentence].append(some)
        nothing = np.zeros((0, len(self.labels)), dtype=np.float32)
        return [np.concatenate(some) if some else nothing for some in answers]

    def _logits(self, windows: Sequence[WordWindow], settings: Asked) -> Tensor:
        """Logits (words, labels) of the words of windows; a linear part is added."""
        rows, pad = [window.row for window in windows], self.codec.tokenizer.pad
        texts = collate(rows, pad, self.device)
        places = word_places(windows, texts.ids.shape[1], self.device)
        logits = word_logits(self.codec, self.model, LabelBatch(texts, places.starts, places))
        if (beside := self.codec.baselines) is None:
            return logits

        def read() -> list[tuple[str, ...]]:
            return [x for _, _, s, w in windows for x in neighbours(w)[s.tag_from : s.tag_to]]

        return beside.added(logits, read, of_valid(settings))

    @torch.inference_mode()
    def _forward(self, windows: list[WordWindow], settings: Asked) -> list[np.ndarray]:
        """Probability of each tag of the words of each window."""
        logits = self._logits(windows, settings).float()
        sizes = [window.span.tag_to - window.span.tag_from for window in windows]
        return np.split(logits.softmax(-1).cpu().numpy(), np.cumsum(sizes)[:-1])

    def predict(
        self, inputs: list[TextOrWords], settings: TagRun, *, first: int = 0
    ) -> list[Tagged]:
        """Tag texts, or lists of words."""
        sentences = [self._words(given, settings) for given in inputs]
        probs = self.word_probabilities(sentences, settings)
        return [self._tagged(*both) for both in zip(sentences, probs, strict=True)]

    def _words(self, given: TextOrWords, settings: TagRun) -> list[str]:
        return _SPLITS[settings.words](given) if isinstance(given, str) else list(given)

    def _tagged(self, words: Sequence[str], probs: np.ndarray) -> Tagged:
        tags = [self.labels[i] for i in probs.argmax(1).tolist()]
        return Tagged(words, tags, probs.max(1).tolist())

    # Looking

    @property
    def caveat(self) -> str:
        """Why attention has no part in an answer, where a linear model alone gives it."""
        return self.codec.baselines.caveat if self.codec.baselines else ""

    def _looked_at(
        self, given: TextOrWords, settings: TagLook
    ) -> tuple[list[str], list[WordWindow]]:
        """Words of a text that is looked at, and its windows."""
        words = self._words(given, settings)
        if not words:
            raise UsageError("there is nothing to look at in an empty text")
        return words, windows_of(self.codec, [words], self.format_for(settings).longest)

    def answer_logprobs(
        self, given: TextOrWords, settings: TagLook, expected: Any = None
    ) -> Question:
        """The first window of a text with its tags and their log-probability."""
        words, (window, *_) = self._looked_at(given, settings)
        count = window.span.tag_to - window.span.tag_from

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            logits = self._logits([window] * copies, settings)
            return logits.double().log_softmax(-1).view(copies, count, -1)

        chosen = logprobs(1)[0].argmax(-1).tolist() if expected is None else list(expected)
        tokens = self.codec.encoder.spelled(window.row)
        return Question(
            answer=" ".join(self.labels[n] for n in chosen),
            logprobs=logprobs,
            chosen=chosen,
            names=self.labels,
            places=words[:count],
            tokens=tokens,
            keys=text_keys(len(tokens)),
            expected=chosen,
            caveat=self.caveat,
        )

    def explain(self, given: TextOrWords, settings: TagLook) -> Picture:
        """What each layer attended to in the first window of a text while it was tagged."""
        from regard.viewer.text import candidate_steps, text_views

        words, (window, *rest) = self._looked_at(given, settings)
        with watch(self.model) as maps:
            (probs,) = self._forward([window], settings)
        shown = self._tagged(words[: len(probs)], probs)
        word_ids: list[int] = window.row.word_ids.tolist()
        tags = [shown.tags[n] if 0 <= n < len(probs) else "" for n in word_ids]
        steps = candidate_steps(
            torch.from_numpy(probs), self.labels, candidates=settings.candidates
        )
        text = " ".join(words)
        return Picture(
            title=text,
            views=text_views(maps, self.codec.encoder.spelled(window.row), writes=tags),
            steps=steps,
            source=text,
            output=str(shown),
            note="; ".join(
                filter(None, ("the first of several windows" * bool(rest), self.caveat))
            ),
        )


def load_codec(folder: Path, model: Model, config: dict[str, Any]) -> LabelTextCodec:
    """Tokenizer, features, tags and baselines of a folder."""
    codec = load_text_codec("tag", WORDS, folder, model, config)
    join = config.get("join", "first")
    if not isinstance(join, str) or join not in JOINS:
        raise UsageError(
            f"{folder / 'config.json'}: 'join' is {join!r:.40}; choose from {', '.join(JOINS)}"
        )
    return replace(codec, join=join)


class TagJudge(LabelJudge[LabelData, TagEval]):
    """Judges tags, of which the words of a sentence are resampled together."""

    def rows(
        self, runner: Runner[Any], part: Sequence[Sentence], probs: np.ndarray, settings: TagEval
    ) -> list[dict[str, Any]]:
        """Predicted tags of each sentence beside the right ones."""
        tags = iter(runner.codec.labels[i] for i in probs.argmax(1).tolist())
        whole, rows = str(settings.outputs).endswith(".jsonl"), []
        for words, right, _ in part:
            predicted = [next(tags) for _ in words]
            row = {"words": list(words), "tags": list(right), "prediction": predicted}
            text = " ".join(f"{word}/{tag}" for word, tag in zip(words, predicted, strict=True))
            rows.append(row if whole else {"prediction": text})
        return rows


class TagObjective(TextLabels[TagTrain]):
    """Learns a tag of each word."""

    def resolve(self, task: Task, values: Mapping[str, Any], origin: Origin | None) -> TagTrain:
        """Refuse an ensemble."""
        settings = super().resolve(task, values, origin)
        members = getattr(settings.model, "members", 1)
        if members > 1:
            raise UsageError(f"members={members} label whole texts; leave it out here")
        return settings

    def codec(
        self, data: LabelData, settings: TagTrain, learnt: Learnt, origin: Origin | None
    ) -> LabelTextCodec:
        """The usual codec, which joins the tokens of a word as it is told."""
        return replace(super().codec(data, settings, learnt, origin), join=settings.join)

    def lesson(self, runner: Runner[Any], data: LabelData, settings: TagTrain) -> Lesson:
        """Batches of windows of sentences, and the numbers of their tags."""
        train, longest = data["train"], settings.max_length
        codec = runner.codec
        windows = windows_of(codec, [sentence.words for sentence in train], longest)
        numbers = {label: n for n, label in enumerate(codec.labels)}
        targets = [
            np.array([numbers[tag] for tag in train[n].tags[span.tag_from : span.tag_to]])
            for _, n, span, _ in windows
        ]
        if more := len(windows) - len(train):
            data.notes.append(
                f"some sentences are longer than max_length={longest} pieces and are "
                f"read in overlapping windows ({more:,} more than sentences)"
            )

        def make(picked: np.ndarray, rows: list[TokenRow], texts: TextBatch) -> LabelBatch:
            pairs = zip(picked.tolist(), rows, strict=True)
            places = word_places(
                [windows[i]._replace(row=row) for i, row in pairs], texts.ids.shape[1]
            )
            right = np.concatenate([targets[i] for i in picked.tolist()])
            return LabelBatch(texts, torch.from_numpy(right), places)

        def again(i: int, key: int) -> TokenRow:
            _, n, span, _ = windows[i]
            return codec.encoder.words(train[n].words[span.first : span.last], longest, key)

        rows = [window.row for window in windows]
        batches = text_batches(rows, codec.encoder, make, again, settings)
        loss = text_loss(runner, settings, partial(word_logits, codec))
        lesson = label_lesson(runner, data, settings, batches, loss, {}, note_uneven=False)
        return replace(lesson, title=f"One of {len(codec.labels)} tags for each word")


TAG = Task(
    name="tag",
    holds="words and tags",
    inputs=WORDS,
    predictor=Tagger,
    judge=TagJudge(lambda *about: {"column": about[-1].column, **made_with(*about)}, top=False),
    load_codec=load_codec,
    objective=TagObjective("tag", WORDS, TagTrain, sizes=ENCODER_SIZES, short=LABEL_SHORT_KEYS),
    target="tags",
    unit="words",
    judged=TagEval,
)
