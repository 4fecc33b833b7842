"""Answers of tasks: labels, tags, a number, a vector, texts, or why there is none."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, Self

import numpy as np
from typing_extensions import TypeVar

from regard.decode.alignment import Alignment
from regard.errors import UsageError
from regard.metrics.outliers import NONE
from regard.tasks.frame.settings import RunSettings
from regard.tasks.labels.settings import OneLabelRun
from regard.tasks.parts import Answer


class ShowsScores(Protocol):
    """Settings that say whether an answer is printed with its score."""

    @property
    def scores(self) -> bool:
        """Whether it is."""
        ...


class ShowsAlignments(ShowsScores, Protocol):
    """The same, of texts that may be given and aligned."""

    @property
    def forced(self) -> bool:
        """Whether texts are given, to be scored."""
        ...

    @property
    def alignments(self) -> str:
        """How alignments are written, if they are."""
        ...


class ShowsTags(ShowsScores, Protocol):
    """The same, of tags."""

    @property
    def format(self) -> str:
        """How tags are written, a key of TAG_FORMATS."""
        ...


N = TypeVar("N", bound=ShowsScores, default=ShowsScores)
_IN_RECORD = 100  # labels whose probabilities a JSON line has


@dataclass(frozen=True, repr=False)
class Classified(Answer[OneLabelRun]):
    """The labels of one text, and how likely each label is."""

    labels: Sequence[str]  # all that the model knows
    probabilities: np.ndarray
    chosen: Sequence[int]
    several: bool = False
    cut: bool = False
    none: bool = False  # whether the input is none of what was learnt, whatever is likeliest
    notes: Sequence[str] = ()  # what was done to the input

    def __str__(self) -> str:
        return NONE if self.none else ",".join(self.labels[i] for i in self.chosen)

    @property
    def label(self) -> str | list[str]:
        """Return the label, or all of them where there may be several."""
        names = [NONE] if self.none else [self.labels[i] for i in self.chosen]
        return names if self.several else names[0]

    @property
    def probability(self) -> float | list[float]:
        """Return how likely the label is, or each of them where there may be several.

        That of "none of these" is not known: NaN.
        """
        if self.none:
            return math.nan
        probs = [float(self.probabilities[i]) for i in self.chosen]
        return probs if self.several else probs[0]

    def keys(self) -> list[str]:
        """Return all names that there are."""
        return ["label", "probability", *super().keys()]

    def __repr__(self) -> str:
        return f"Classified(label={self.label!r}, probability={self.probability!r})"

    def ranked(self) -> list[int]:
        """Return the numbers of all labels, the most probable first."""
        return np.argsort(-self.probabilities, kind="stable").tolist()

    def lines(self, settings: OneLabelRun) -> Iterator[str]:
        """Write the labels as lines, each with its probability if asked."""
        rows = [self.chosen]
        if settings.n_best > 1:
            rows = [[i] for i in self.ranked()[: settings.n_best]]
        if self.none:
            yield f"{NONE}\t" if settings.scores else NONE
            rows = rows[:-1]
        for row in rows:
            probs = ",".join(f"{self.probabilities[i]:.4f}" for i in row)
            names = ",".join(self.labels[i] for i in row)
            yield f"{names}\t{probs}" if settings.scores else names

    def record(self, settings: OneLabelRun) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        ranked = {
            self.labels[i]: round(float(self.probabilities[i]), 6)
            for i in self.ranked()[:_IN_RECORD]
        }
        probs = [round(float(self.probabilities[i]), 6) for i in self.chosen]
        fields = {
            "prediction": self.label,
            "probability": None if self.none else probs if self.several else probs[0],
            "probabilities": ranked,
            **({"notes": list(self.notes)} if self.notes else {}),
        }
        return {**fields, "cut": True} if self.cut else fields


@dataclass(frozen=True)
class Valued(Answer):
    """The number that a model with a single output gives to an input: its logit."""

    value: float
    cut: bool = False  # whether the input was truncated

    def __str__(self) -> str:
        return f"{self.value:.6g}"

    @property
    def label(self) -> NoReturn:
        """Refused: there is none."""
        raise UsageError("this model has a single output, so it gives no label; read value")

    probability = label

    def record(self, settings: RunSettings) -> dict[str, Any]:
        """Return the fields that the prediction adds to a JSON line."""
        return {"prediction": self.value, **({"cut": True} if self.cut else {})}


@dataclass(frozen=True)
class Embedded(Answer):
    """The vector of one input."""

    vector: np.ndarray
    cut: bool = False  # whether the input was longer than the model reads

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.vector, dtype=dtype, copy=copy)

    def __str__(self) -> str:
        return " ".join(f"{number:.8g}" for number in self.vector.tolist())

    def record(self, settings: RunSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        fields = {"prediction": [float(f"{number:.8g}") for number in self.vector.tolist()]}
        return {**fields, "cut": True} if self.cut else fields


class NBest(Answer[N]):
    """An answer with a score; `others` are the next best."""

    others: list[Any]

    def certainty(self) -> float:
        """Return the score, or the probability, that is printed behind it."""
        raise NotImplementedError

    def fields(self) -> dict[str, Any]:
        """Return what a JSON line says of it alone."""
        raise NotImplementedError

    def lines(self, settings: N) -> Iterator[str]:
        """Write the answers as lines, each with its score after ` ||| ` if asked for."""
        scored = settings.scores or getattr(settings, "forced", False)
        for one in [self, *self.others]:
            yield f"{one} ||| {one.certainty():.6f}" if scored else str(one)

    def record(self, settings: N) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        rows = [one.fields() for one in [self, *self.others]]
        return {**rows[0], "n_best": rows} if self.others else rows[0]


@dataclass
class RankedText(NBest[N]):
    """A text with its score; `others` are the next best."""

    text: str
    score: float = 0.0
    others: list[Self] = field(default_factory=list[Self], kw_only=True)

    def __str__(self) -> str:
        return self.text

    def certainty(self) -> float:
        """Return the score."""
        return self.score

    def fields(self) -> dict[str, Any]:
        """Return what a JSON line says of it alone."""
        return {"prediction": self.text, "score": round(self.score, 6)}


@dataclass
class Filled(NBest):
    """A text with its masks filled in, and how likely that is; `others` are the next best."""

    text: str
    words: list[str] = field(default_factory=list[str])
    probability: float = 1.0
    guesses: list[list[tuple[str, float]]] = field(
        default_factory=list[list[tuple[str, float]]]
    )  # of each mask by itself
    others: list["Filled"] = field(default_factory=list["Filled"])

    def __str__(self) -> str:
        return self.text

    def certainty(self) -> float:
        """Return the probability."""
        return self.probability

    def fields(self) -> dict[str, Any]:
        """Return what a JSON line says of it alone."""
        fields = {"prediction": self.text, "words": self.words}
        return {**fields, "probability": round(self.probability, 6)}

    def record(self, settings: ShowsScores) -> dict[str, Any]:
        """Return the fields of a JSON line, with the candidates of each mask."""
        masks = [
            [{"word": word, "probability": round(p, 6)} for word, p in some]
            for some in self.guesses
        ]
        return {**super().record(settings), "masks": masks}


@dataclass
class Written(NBest):
    """A prompt, its completion, and how likely that is; `others` are the next best."""

    given: str
    completion: str
    score: float = 0.0
    logprob: float = 0.0
    others: list["Written"] = field(default_factory=list["Written"])

    def __str__(self) -> str:
        return self.given + self.completion

    def certainty(self) -> float:
        """Return the score."""
        return self.score

    def fields(self) -> dict[str, Any]:
        """Return what a JSON line says of it alone."""
        return {"prediction": self.completion, "score": round(self.score, 6)}


@dataclass
class Generated(RankedText[ShowsAlignments]):
    """A generated text with its score; `others` are the next best hypotheses."""

    logprob: float = 0.0
    alignment: Alignment | None = None

    def lines(self, settings: ShowsAlignments) -> Iterator[str]:
        """Write the hypotheses as lines, each with what was asked for after ` ||| `."""
        for answer in [self, *self.others]:
            parts = [answer.text]
            if settings.scores or settings.forced:
                parts.append(f"{answer.score:.6f}")
            if answer.alignment is not None:
                pharaoh = settings.alignments == "pharaoh"
                record = json.dumps(answer.alignment.record(), ensure_ascii=False)
                parts.append(str(answer.alignment) if pharaoh else record)
            yield " ||| ".join(parts)

    def fields(self) -> dict[str, Any]:
        """Return what a JSON line says of it alone."""
        own = super().fields()
        return own if self.alignment is None else {**own, "alignment": self.alignment.record()}


@dataclass(frozen=True)
class Tagged(Answer[ShowsTags]):
    """The words of one text, their tags, and the probabilities of these."""

    words: Sequence[str]
    tags: Sequence[str]
    probabilities: Sequence[float]

    def __str__(self) -> str:
        return " ".join(f"{word}/{tag}" for word, tag in zip(self.words, self.tags, strict=True))

    def lines(self, settings: ShowsTags) -> Iterator[str]:
        """Write the words with their tags, and the probabilities of these if asked."""
        yield from TAG_FORMATS[settings.format](self, settings)

    def record(self, settings: ShowsTags) -> dict[str, Any]:
        """Return the fields that the prediction adds to a JSON line."""
        fields: dict[str, Any] = {"prediction": list(self.tags), "words": list(self.words)}
        if settings.scores:
            fields["probabilities"] = [round(value, 6) for value in self.probabilities]
        return fields

    def rows(self, settings: ShowsTags) -> Iterator[tuple[str, ...]]:
        """Return a word, its tag and, if asked, its probability, one after the other."""
        for word, tag, value in zip(self.words, self.tags, self.probabilities, strict=True):
            yield (word, tag, f"{value:.4f}") if settings.scores else (word, tag)


def _columns(tagged: Tagged, settings: ShowsTags) -> Iterator[str]:
    yield from ("\t".join(row) for row in tagged.rows(settings))
    yield ""


def _slash(tagged: Tagged, settings: ShowsTags) -> Iterator[str]:
    yield " ".join("/".join(row) for row in tagged.rows(settings))


def _jsonl(tagged: Tagged, settings: ShowsTags) -> Iterator[str]:
    fields = tagged.record(settings)
    whole = {"words": fields.pop("words"), "tags": fields.pop("prediction"), **fields}
    yield json.dumps(whole, ensure_ascii=False)


TAG_FORMATS: dict[str, Callable[[Tagged, ShowsTags], Iterator[str]]] = {
    "slash": _slash,
    "columns": _columns,
    "jsonl": _jsonl,
}


@dataclass(frozen=True)
class Unread(Answer):
    """What is answered for an image or a sound that cannot be read."""

    why: str

    def __str__(self) -> str:
        return ""

    def lines(self, settings: RunSettings) -> Iterator[str]:
        """Leave the lines of the answer empty."""
        yield from [""] * getattr(settings, "n_best", 1)

    def record(self, settings: RunSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        return {"prediction": None, "error": self.why}
