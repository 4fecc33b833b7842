"""Texts: strings, lists of words, and conversations."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from regard.data.conversation import is_message
from regard.data.documents import TEXT_KEYS, load_texts
from regard.data.labelled import (
    WORD_KEYS,
    Example,
    ExampleFormat,
    ExampleReader,
    Labelled,
    Sentence,
    SentenceFormat,
    SentenceReader,
    load_labelled,
)
from regard.data.labels import label_list, label_table, with_known_labels
from regard.data.parts import NEEDED, Dataset, PartsAsked
from regard.data.rows import RowEncoder, TokenRow, collate
from regard.data.split import Split
from regard.errors import UsageError, log
from regard.metrics.linear import neighbours
from regard.modalities.base import (
    Choose,
    FoundInputs,
    Inputs,
    JudgedUnits,
    Modality,
    made_up_text,
)
from regard.modalities.tokens import InputTokens
from regard.models.protocols import ModelConfig

_WHOLE_POOLS = ("mean", "max", "attention", "convolution")  # they read all tokens, not the first


class TextFormat(NamedTuple):
    """How an encoder with a head for labels reads texts."""

    encoder: RowEncoder
    longest: int  # tokens of a text or window
    places: int  # tokens that the model has positions for


class LabelSource(NamedTuple):
    """How texts with labels, or sentences with tags, lie in files."""

    reader: ExampleFormat | SentenceFormat
    by: str = "text"  # what is split off: a text, or whole ones that texts are parts of


@dataclass
class LabelData(Labelled):
    """Examples or sentences by part, and their labels."""

    multilabel: bool = False
    left_out: int = 0  # rows with labels that the model does not know


class Text(Modality[Any, TextFormat, LabelData]):
    """Texts as strings, and files whose lines or rows are texts."""

    name, key, one, many = "text", "src", "text", "texts"
    in_rows, baseline = True, "a linear model of n-grams"
    columns = ("src", "source", "text", "input", "sentence", "question", "review", "prompt")

    def is_one(self, given: Any) -> bool:
        """Tell whether this is one text, rather than several, such as an array of texts."""
        if isinstance(given, np.ndarray):
            return not given.ndim
        return not isinstance(given, Mapping) and super().is_one(given)

    def opened(self, file: Any) -> list[str]:
        """Return the lines of an open file."""
        if not isinstance(read := file.read(), str):
            raise UsageError(f"an open file of {self.key}; open it with mode 'r'")
        return read.splitlines()

    def rows(
        self,
        rows: list[Mapping[str, Any]],
        column: Choose,
        format: TextFormat | None = None,
        columns: Any = None,
    ) -> list[Any]:
        """Return the texts of a column, or lists of words or messages, kept as arrays by frames."""
        cells = super().rows(rows, column, format, columns)
        return [cell.tolist() if isinstance(cell, np.ndarray) else cell for cell in cells]

    def check(self, given: Any, settings: Any = None, format: TextFormat | None = None) -> Any:
        """Return a text, or refuse what is none."""
        if not isinstance(given, str):
            raise UsageError(
                f"{given!r:.60} is not a text; give a text, or a list or table of texts"
            )
        return given

    def decode(self, given: str, format: TextFormat, notes: list[str] | None = None) -> Any:
        """Return a text as a row of tokens."""
        return format.encoder.texts([given], format.longest)[0]

    def load_alone(self, data: str, part: str, trained: Split | None) -> Dataset[Any] | None:
        """Load a plain file or a table of texts."""
        try:
            return load_texts(data, need=(part,), trained=trained)
        except UsageError:
            return None

    def words(self, beside: bool) -> tuple[str, str]:
        """Return what one input and several are called: texts, or pairs of these."""
        return ("pair", "pairs") if beside else (self.one, self.many)

    def example(
        self, config: ModelConfig, batch: int, size: int, beside: bool = False
    ) -> tuple[Tensor, ...]:
        """Return texts of so many tokens, or pairs of these."""
        return (made_up_text(batch, size),) * (2 if beside else 1)

    def found(
        self, path: str, format: TextFormat | None = None, columns: str | None = None
    ) -> FoundInputs | None:
        """Return nothing: the lines or rows of a file are texts."""
        return None

    # With labels

    def reader(self, source: Any) -> ExampleReader | SentenceReader:
        """What reads a file of examples."""
        return ExampleReader(source)

    def load(
        self,
        data: str,
        source: LabelSource,
        format: TextFormat | None = None,
        *,
        classes: Sequence[str] | None = None,
        **asked: Unpack[PartsAsked],
    ) -> LabelData:
        """Load examples, all labels of which are known from train, or to the model."""
        reader = self.reader(source.reader)
        data_of = load_labelled(data, reader, **asked, by=source.by)
        parts, notes, known, why = data_of.parts, data_of.notes, classes, "is none of the model's"
        checked = list(parts)
        if known is None and set(NEEDED) <= parts.keys():  # to be learnt
            known = label_list([item[1] for item in parts["train"]], data)
            checked, why = ["valid"], "does not occur in train"
        before = sum(len(parts[name]) for name in checked)
        if known is not None:
            skip = source.reader.skip_bad
            for name in checked:
                parts[name] = with_known_labels(parts[name], known, why, notes, skip_bad=skip)
        left_out = before - sum(len(parts[name]) for name in checked)
        about = {"notes": notes, "split": data_of.split, "classes": list(known or [])}
        return LabelData(parts, reader.several, left_out, **about)

    def format_for(self, format: TextFormat, settings: Any) -> TextFormat:
        """Format for texts of as many tokens as are asked for."""
        longest = settings.max_length or format.longest
        if longest > format.places:
            raise UsageError(
                f"max_length={longest} is more than the {format.places} places of the model"
            )
        return format._replace(longest=longest)

    def label_table(self, part: Sequence[Example | Sentence], labels: Sequence[str]) -> np.ndarray:
        """Table (n, labels) of the labels of texts or words."""
        return label_table(part, labels)

    def judged(self, part: Sequence[Any], labels: Sequence[str]) -> JudgedUnits:
        """Where each text is, and the text."""

        def told(i: int) -> dict[str, Any]:
            return {"text": part[i].text, "label": ",".join(part[i].labels)}

        return JudgedUnits(lambda i: (part[i].where, part[i].excerpt(0)), told)

    def groups(
        self, inputs: Sequence[str], format: TextFormat, broken: str = "refuse", most: int = 0
    ) -> Iterator[tuple[list[Any], list[list[str]]]]:
        """All texts as rows of tokens, after a line of how many were cut."""
        rows = format.encoder.texts(inputs, format.longest) if inputs else []
        if truncated := sum(row.truncated for row in rows):
            log(f"{truncated} of {len(inputs)} texts were cut at {format.longest} pieces")
        yield rows, [[]] * len(rows)

    def raws(self, part: Sequence[Example], format: TextFormat) -> list[TokenRow]:
        """Texts of a part as rows of tokens."""
        return format.encoder.texts([example.text for example in part], format.longest)

    def length(self, raw: TokenRow, format: TextFormat) -> int:
        """Number of tokens."""
        return len(raw.ids)

    def limits(self, settings: Any, format: TextFormat) -> dict[str, int]:
        """Rows and tokens that a batch of a run may have."""
        return {"tokens": settings.batch_tokens, "rows": settings.batch_rows}

    def collate(
        self,
        raws: Sequence[TokenRow],
        format: TextFormat,
        device: torch.device | str = "cpu",
    ) -> Inputs:
        """Rows padded to the longest."""
        return collate(raws, format.encoder.tokenizer.pad, device).inputs

    def token_names(self, model: Any, raw: TokenRow, format: TextFormat) -> list[str]:
        """Tokens of a text as they are shown."""
        return format.encoder.spelled(raw)

    def tokens(self, model: Any, raw: TokenRow, format: TextFormat) -> InputTokens:
        """Tokens of a text, and which of them the answer is read from."""
        whole = getattr(model.config, "pool", "mean") in _WHOLE_POOLS
        return super().tokens(model, raw, format)._replace(reads=None if whole else [0])

    def vectors(self, part: Sequence[Any], format: Any) -> list[Any]:
        """Texts."""
        return [unit for item in part for unit, _ in item.units]

    def features(self, raws: Sequence[TokenRow], format: TextFormat) -> list[str]:
        """The texts themselves."""
        return [row.text for row in raws]


class Words(Text):
    """Texts, or lists of their words."""

    columns = (*WORD_KEYS, *Text.columns)
    baseline = "a linear model of words and neighbours"

    def rows(
        self,
        rows: list[Mapping[str, Any]],
        column: Choose,
        format: TextFormat | None = None,
        columns: Any = None,
    ) -> list[Any]:
        """Return the words or texts of a column; words come in lists."""
        cells, name = super().rows(rows, column), column(list(map(str, rows[0])))
        if name in WORD_KEYS and not all(isinstance(cell, list) for cell in cells):
            raise UsageError(f"{cells[0]!r:.60} in {name} is no list of words; give a list a row")
        return cells

    def check(self, given: Any, settings: Any = None, format: TextFormat | None = None) -> Any:
        """Return a text or a list of words, or refuse it."""
        words = isinstance(given, list | tuple)
        if words and not all(isinstance(word, str) and word.strip() for word in given):
            words = False
        if not words and not isinstance(given, str):
            raise UsageError(f"{given!r:.60} is neither text nor words; give a list of either")
        return given

    def reader(self, source: Any) -> SentenceReader:
        """What reads a file of words and tags."""
        return SentenceReader(source)

    def vectors(self, part: Sequence[Sentence], format: Any) -> list[tuple[str, ...]]:
        """Each word with its neighbours."""
        return [window for item in part for window in neighbours(item.words)]

    def judged(self, part: Sequence[Any], labels: Sequence[str]) -> JudgedUnits:
        """Where each word is; the words of a sentence are resampled together."""
        units = [(item, n) for item in part for n in range(len(item.units))]
        groups = np.repeat(np.arange(len(part)), [len(item.units) for item in part])

        def told(i: int) -> dict[str, Any]:
            item, n = units[i]
            return {"text": item.words[n], "label": item.tags[n]}

        return JudgedUnits(
            lambda i: (units[i][0].where, units[i][0].excerpt(units[i][1])), told, groups
        )


class Conversations(Text):
    """Texts, or conversations as lists of messages."""

    columns = ("messages", *TEXT_KEYS, *Text.columns)

    def is_one(self, given: Any) -> bool:
        """Tell whether one text or one conversation was given, rather than several."""
        said = given.get("messages") if isinstance(given, dict) else given
        talk = isinstance(said, list) and said and all(is_message(one) for one in said)
        return bool(talk) or super().is_one(given)

    def check(self, given: Any, settings: Any = None, format: TextFormat | None = None) -> Any:
        """Return a text, or a conversation as a list of messages."""
        given = given.get("messages") if isinstance(given, dict) else given
        return given if isinstance(given, list) else super().check(given)


TEXT, WORDS, CONVERSATIONS = Text(), Words(), Conversations()
