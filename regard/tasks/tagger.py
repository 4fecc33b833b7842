"""A trained tagger as its user has it: words in, a tag for each out, and a look at how."""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.features import split_words
from regard.data.labelled import (
    Sentence,
    SentenceFormat,
    SentenceReader,
    hash_items,
    load_labelled,
)
from regard.decode.search import in_batches
from regard.errors import UsageError, lookup
from regard.metrics.baselines import Baselines
from regard.metrics.evaluation import made_here, write_outputs
from regard.metrics.labels import (
    Error,
    LabelEvaluation,
    by_class,
    compare,
    confusion,
    count,
    ones,
    scores_of,
    units,
)
from regard.settings import fill, setting
from regard.tasks.labelling import (
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

AROUND = 6  # words shown to both sides of an error


@dataclass(frozen=True)
class TaggerSettings:
    """How to tag words."""

    format: str = setting("slash", "slash, columns or jsonl")
    words: str = setting("spaces", "between spaces, or raw: signs stand alone")
    scores: bool = setting(False, "tell the probability of each tag")
    max_length: int | None = setting(None, "pieces read at once", min=8, max=100_000)
    batch_tokens: int = setting(4096, "pieces in a batch", min=1)
    batch_rows: int = setting(128, "sentences in a batch", min=1)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)


@dataclass(frozen=True)
class TaggerEvalSettings(TaggerSettings):
    """What to judge on, and how."""

    data: str | None = setting(None, "a folder or file of words with tags")
    part: str = setting("test", "test, valid or train")
    test: str | None = setting(None, "which test file of the folder")
    column: str | None = setting(None, "of the tags: upos, xpos, deprel, or a number")
    columns: str | None = setting(None, "of a table: the lists of words and of tags")
    encoding: str = setting("auto", "auto, utf-8 or latin1")
    skip_bad: bool = setting(False, "leave bad sentences out")
    errors: int = setting(10, "errors to show", min=0, max=100_000)
    samples: int = setting(1000, "of the bootstrap", min=100, max=100_000)
    outputs: str | None = setting(None, "a file for the answers; .jsonl tells more")


@dataclass(frozen=True)
class Tagged(Answer):
    """The words of one text, their tags, and how likely these are."""

    words: Sequence[str]
    tags: Sequence[str]
    chances: Sequence[float]

    def __str__(self) -> str:
        return " ".join(f"{word}/{tag}" for word, tag in zip(self.words, self.tags, strict=True))

    def lines(self, how: TaggerSettings) -> Iterator[str]:
        """Write the words with their tags, and the probabilities of these if asked."""
        yield from lookup("format", how.format, FORMATS)(self, how)

    def record(self, how: TaggerSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        found: dict[str, Any] = {"prediction": list(self.tags), "words": list(self.words)}
        if how.scores:
            found["probabilities"] = [round(chance, 6) for chance in self.chances]
        return found

    def rows(self, how: TaggerSettings) -> Iterator[tuple[str, ...]]:
        """Return a word, its tag and, if asked, its probability, one after the other."""
        for word, tag, chance in zip(self.words, self.tags, self.chances, strict=True):
            yield (word, tag, f"{chance:.4f}") if how.scores else (word, tag)


def _columns(tagged: Tagged, how: TaggerSettings) -> Iterator[str]:
    yield from ("\t".join(row) for row in tagged.rows(how))
    yield ""


def _slash(tagged: Tagged, how: TaggerSettings) -> Iterator[str]:
    yield " ".join("/".join(row) for row in tagged.rows(how))


def _jsonl(tagged: Tagged, how: TaggerSettings) -> Iterator[str]:
    found = tagged.record(how)
    yield json.dumps(
        {"words": found.pop("words"), "tags": found.pop("prediction"), **found}, ensure_ascii=False
    )


FORMATS: dict[str, Callable[[Tagged, TaggerSettings], Iterator[str]]] = {
    "slash": _slash,
    "columns": _columns,
    "jsonl": _jsonl,
}
SPLITS: dict[str, Callable[[str], list[str]]] = {"spaces": str.split, "raw": split_words}


# From pieces to words and back


class Window(NamedTuple):
    """Some words of a sentence that are read together, and those of them that are tagged there."""

    first: int
    last: int
    tag_from: int
    tag_to: int


def windows(sizes: Sequence[int], room: int) -> list[Window]:
    """Cut a sentence into windows of at most so many pieces; neighbours share up to half of them.

    Each word is tagged in the window that shows more of what stands around it.
    """
    found: list[Window] = []
    ends = np.concatenate([[0], np.cumsum(np.minimum(sizes, room))])
    first, tag_from = 0, 0
    while first < len(sizes):
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + room, side="right")) - 1)
        if last >= len(sizes):
            found.append(Window(first, len(sizes), tag_from, len(sizes)))
            break
        # half of it is read again, unless the next word would not fit beside that
        least = max(ends[last] - room // 2, ends[last + 1] - room)
        again = max(first + 1, min(last, int(np.searchsorted(ends, least))))
        tag_to = (again + last) // 2 if again < last else last
        found.append(Window(first, last, tag_from, tag_to))
        first, tag_from = again, tag_to
    return found


class Part(NamedTuple):
    """A window as the model reads it, and where in its row the words stand that are tagged."""

    row: Row
    sentence: int
    window: Window


class Places(NamedTuple):
    """Where words stand among the flat vectors of a batch.

    Of each word the place of its first piece; of each piece its place and its word.
    """

    starts: Tensor
    pieces: Tensor
    owner: Tensor


def places(parts: Sequence[Part], width: int, device: Any = "cpu") -> Places:
    """Find the tagged words of rows that are padded to a width."""
    starts, pieces, owner, before = [], [], [], 0
    for n, (row, _, window) in enumerate(parts):
        low, high = window.tag_from - window.first, window.tag_to - window.first
        at = np.flatnonzero((row.owner >= low) & (row.owner < high))
        word = row.owner[at] - low
        first = np.flatnonzero(np.diff(word, prepend=-1))
        starts.append(n * width + at[first])
        pieces.append(n * width + at)
        owner.append(before + word)
        before += high - low
    tensors = (
        torch.from_numpy(np.concatenate(some)).to(device) for some in (starts, pieces, owner)
    )
    return Places(*tensors)


def _first(x: Tensor, at: Places) -> Tensor:
    return x[at.starts]


def _mean(x: Tensor, at: Places) -> Tensor:
    total = x.new_zeros(len(at.starts), x.shape[-1]).index_add(0, at.owner, x[at.pieces])
    return total / torch.bincount(at.owner, minlength=len(at.starts)).unsqueeze(-1)


# name -> how the vectors of a word's pieces (flat) become that of the word
JOINS: dict[str, Callable[[Tensor, Places], Tensor]] = {"first": _first, "mean": _mean}


def word_logits(model: Any, read: Read, at: Places, join: str) -> Tensor:
    """Return the logits (words, labels) of the words of a batch."""
    types = {} if read.types is None else {"types": read.types}
    hidden = model.hidden(read.ids, read.lengths, **types)
    return model.head(JOINS[join](hidden.flatten(0, 1), at))


def cut_sentence(
    reader: Reader, words: Sequence[str], longest: int, sentence: int = 0
) -> list[Part]:
    """Read the words of a sentence in windows that are no longer than the longest."""
    pieces, found = reader.pieces(words), []
    for window in windows([len(some) for some in pieces], reader.room(longest)):
        some = slice(window.first, window.last)
        row = reader.row(words[some], pieces[some], longest)
        found.append(Part(row, sentence, window))
    return found


class Tagger(Runner[Tagged]):
    """A model with its tokenizer and its tags."""

    task = "tag"
    settings = TaggerSettings
    eval_settings = TaggerEvalSettings

    def __init__(self, model: Any, reader: Reader, labels: list[str], config: dict[str, Any]):
        self.model, self.reader, self.labels, self.config = model, reader, labels, config
        self.tokenizer = reader.tokenizer
        self.join: str = config.get("join", "first")
        self.longest: int = config.get("max_length") or model.config.max_length
        self.device = next(model.parameters()).device
        self.baselines: Baselines | None = None

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "Tagger":
        """Put a loaded model together with the tokenizer beside it."""
        path = folder / "config.json"
        if model.config.head != "tag":
            raise UsageError(
                f"{path}: a head of {model.config.head!r:.40}, which labels no words; "
                "train one with: regard train tag init=..."
            )
        labels = labels_of(folder, model, config)
        join = config.get("join", "first")
        if not isinstance(join, str) or join not in JOINS:
            raise UsageError(f"{path}: 'join' is {join!r:.40}; choose from {', '.join(JOINS)}")
        longest = longest_of(config, folder, model)
        reader = reader_of(config, folder, model, load_tokenizer(folder))
        found = cls(model, reader, labels, {**config, "max_length": longest})
        found.baselines = Baselines.load(folder, len(labels))
        return found

    def check(self, settings: dict[str, Any]) -> TaggerSettings:
        """Make full settings of what a user gave."""
        how = fill(TaggerSettings, settings)
        lookup("format", how.format, FORMATS)
        lookup("words", how.words, SPLITS)
        if how.max_length and how.max_length > self.model.config.max_length:
            raise UsageError(
                f"max_length={how.max_length} is more than the {self.model.config.max_length} "
                "places of the model"
            )
        return how

    def answer(self, inputs: list[Any], *, first: int = 0, **settings: Any) -> list[Tagged]:
        """Tag texts, or lists of words."""
        how = self.check(settings)
        split = SPLITS[how.words]
        sentences = []
        for text in inputs:
            words = split(text) if isinstance(text, str) else text
            if not isinstance(words, list | tuple) or not all(
                isinstance(word, str) and word.strip() for word in words
            ):
                raise UsageError(f"{text!r:.60} is neither text nor words; give a list of either")
            sentences.append(list(words))
        if how.threads:
            torch.set_num_threads(how.threads)
        answers = []
        for words, chances in zip(sentences, self.chances(sentences, how), strict=True):
            best = chances.argmax(1)
            tags = [self.labels[i] for i in best.tolist()]
            answers.append(Tagged(words, tags, chances[np.arange(len(best)), best].tolist()))
        return answers

    def chances(self, sentences: Sequence[Sequence[str]], how: TaggerSettings) -> list[np.ndarray]:
        """Return how likely each tag is for each word of sentences, (words, tags)."""
        longest = how.max_length or self.longest
        parts = [
            part
            for n, words in enumerate(sentences)
            for part in cut_sentence(self.reader, words, longest, n)
        ]

        @torch.inference_mode()
        def judge(some: list[Part]) -> list[np.ndarray]:
            read = collate([part.row for part in some], self.tokenizer.pad, self.device)
            at = places(some, read.ids.shape[1], self.device)
            logits = word_logits(self.model, read, at, self.join).float()
            sizes = [part.window.tag_to - part.window.tag_from for part in some]
            return np.split(logits.softmax(-1).cpu().numpy(), np.cumsum(sizes)[:-1])

        lengths = [len(part.row.ids) for part in parts]
        found = in_batches(parts, lengths, judge, tokens=how.batch_tokens, rows=how.batch_rows)
        answers: list[list[np.ndarray]] = [[] for _ in sentences]
        for part, chances in zip(parts, found, strict=True):
            answers[part.sentence].append(chances)
        nothing = np.zeros((0, len(self.labels)), dtype=np.float32)
        return [np.concatenate(some) if some else nothing for some in answers]

    # Judging

    def numbers(self, sentences: Sequence[Sentence]) -> np.ndarray:
        """Return the numbers of all tags of sentences, one after the other."""
        known = {label: i for i, label in enumerate(self.labels)}
        return np.array([known[tag] for s in sentences for tag in s.tags], dtype=np.int64)

    def evaluate(
        self,
        settings: dict[str, Any],
        *,
        against: "Tagger | None" = None,
        names: tuple[str, str] = ("model", ""),
    ) -> LabelEvaluation:
        """Tag a test set and judge the tags."""
        own = self.config.get("column")
        how = fill(TaggerEvalSettings, {**({"column": own} if own else {}), **settings})
        if how.data is None:
            raise UsageError("data is missing; add data=FILE or data=FOLDER with words and tags")
        if how.threads:
            torch.set_num_threads(how.threads)
        format = SentenceFormat(how.column, how.encoding, how.skip_bad, how.columns)
        data = load_labelled(
            how.data,
            SentenceReader(format),
            test=how.test,
            need=(how.part,),
            trained=self.trained,
        )
        sentences: list[Sentence] = known_only(
            data.parts[how.part],
            self.labels,
            lambda sentence: sentence.tags,
            "is none of the model's",
            data.notes,
            skip_bad=how.skip_bad,
        )
        words = [sentence.words for sentence in sentences]
        started = time.perf_counter()
        chances = np.concatenate(self.chances(words, how))
        seconds = time.perf_counter() - started
        right, best, size = self.numbers(sentences), chances.argmax(1), len(self.labels)
        wanted, found = ones(right, size), ones(best, size)
        of = np.repeat(np.arange(len(words)), [len(some) for some in words])
        if how.outputs:
            tags = iter(self.labels[i] for i in best.tolist())
            rows = []
            for one in sentences:
                given = [next(tags) for _ in one.words]
                told = " ".join(f"{w}/{t}" for w, t in zip(one.words, given, strict=True))
                row = {"words": list(one.words), "tags": list(one.tags), "prediction": given}
                rows.append(row if how.outputs.endswith(".jsonl") else {"prediction": told})
            write_outputs(how.outputs, rows)
        comparison = []
        if against is not None:
            if set(against.labels) != set(self.labels):
                raise UsageError("against= names a model of other tags; compare models of the same")
            place = np.array([self.labels.index(label) for label in against.labels])
            theirs = place[np.concatenate(against.chances(words, how)).argmax(1)]
            both = units(wanted, found, of), units(wanted, ones(theirs, size), of)
            comparison = [compare(*both, "accuracy", how.samples)]
        made_with = {
            "data": how.data,
            "part": how.part,
            "column": how.column,
            "data_hash": hash_items(sentences),
            "left_out": len(data.parts[how.part]) - len(sentences),
            "tokenizers": [self.tokenizer.sha],
            "max_length": how.max_length or self.longest,
            **made_here(),
        }
        return LabelEvaluation(
            names[0],
            scores_of(
                wanted, found, chances, several=False, of=of, samples=how.samples, what="words"
            ),
            len(right),
            seconds,
            made_with,
            names[1] or None,
            comparison,
            "words",
            list(self.labels),
            by_class(count(wanted, found), self.labels),
            confusion(right, best, size).tolist(),
            self._errors(sentences, right, best, chances)[: how.errors],
            notes=data.notes,
            baselines=self._baselines(words, wanted),
        )

    def _baselines(
        self, words: Sequence[Sequence[str]], wanted: np.ndarray
    ) -> dict[str, dict[str, float]]:
        if self.baselines is None:
            return {}
        return self.baselines.scores([word for some in words for word in some], wanted)

    def _errors(
        self,
        sentences: Sequence[Sentence],
        right: np.ndarray,
        best: np.ndarray,
        chances: np.ndarray,
    ) -> list[Error]:
        """Return the wrong tags, those that the model was surest of first."""
        every = [(sentence, i) for sentence in sentences for i in range(len(sentence.words))]
        wrong = np.flatnonzero(right != best)
        order = wrong[np.argsort(-chances[wrong, best[wrong]], kind="stable")]
        found = []
        for n in order.tolist():
            (words, _, where), i = every[n]
            shown = [
                *words[max(0, i - AROUND) : i],
                f"[{words[i]}]",
                *words[i + 1 : i + 1 + AROUND],
            ]
            tags = self.labels[right[n]], self.labels[best[n]]
            found.append(Error(where, " ".join(shown), *tags, float(chances[n, best[n]])))
        return found

    # Looking

    def picture(self, text: str | Sequence[str], *, candidates: int = 5, **settings: Any):
        """Tag a text and gather all there is to see of how it was done, in its first window."""
        from regard.viewer.picture import Picture, Step, View

        how = self.check(settings)
        words = SPLITS[how.words](text) if isinstance(text, str) else list(text)
        if not words:
            raise UsageError("there is nothing to look at in an empty text")
        part, *rest = cut_sentence(self.reader, words, how.max_length or self.longest)
        read = collate([part.row], self.tokenizer.pad, self.device)
        at = places([part], read.ids.shape[1], self.device)
        with torch.inference_mode(), watch(self.model) as maps:
            chances = word_logits(self.model, read, at, self.join).float().softmax(-1).cpu()
        pieces = self.reader.shown(part.row, words)
        best = [self.labels[i] for i in chances.argmax(1).tolist()]
        tagged = range(len(best))
        tags = [best[n] if n in tagged else "" for n in part.row.owner.tolist()]
        views = [
            View(name, maps[name].weights()[0].cpu().numpy(), pieces, pieces, "self", tags)
            for name in maps.names()
        ]
        steps = []
        for row in chances:
            top = row.topk(min(candidates, len(self.labels)))
            pairs = [(self.labels[i], p) for p, i in zip(*(x.tolist() for x in top), strict=True)]
            steps.append(Step(*pairs[0], pairs))
        shown = Tagged(words[: len(best)], best, chances.amax(1).tolist())
        return Picture(
            title=" ".join(words),
            views=views,
            steps=steps,
            source=" ".join(words),
            output=str(shown),
            note="the first of several windows" if rest else "",
        )
