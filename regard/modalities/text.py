"""Texts: strings, lists of words, and conversations."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from regard.data.conversation import is_message
from regard.data.documents import TEXT_KEYS, load_texts
from regard.data.labelled import WORD_KEYS
from regard.data.parts import Dataset
from regard.data.split import Split
from regard.errors import UsageError
from regard.modalities.base import Choose, FoundInputs, Modality, made_up_text


class Text(Modality[Any]):
    """Texts as strings, and files whose lines or rows are texts."""

    name, key, one, many = "text", "src", "text", "texts"
    in_rows = True
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
        self, rows: list[Mapping[str, Any]], column: Choose, format: Any = None, columns: Any = None
    ) -> list[Any]:
        """Return the texts of a column, or lists of words or messages, kept as arrays by frames."""
        cells = super().rows(rows, column, format, columns)
        return [cell.tolist() if isinstance(cell, np.ndarray) else cell for cell in cells]

    def check(self, given: Any, settings: Any = None, format: Any = None) -> Any:
        """Return a text, or refuse what is none."""
        if not isinstance(given, str):
            raise UsageError(f"{given!r:.60} is no text; give a text, or a list or table of texts")
        return given

    def decode(self, given: Any, format: Any, notes: list[str] | None = None) -> Any:
        """Return the text itself."""
        return given

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
        self, config: Any, batch: int, size: int, beside: bool = False
    ) -> tuple[Tensor, ...]:
        """Return texts of so many tokens, or pairs of these."""
        return (made_up_text(batch, size),) * (2 if beside else 1)

    def found(
        self, path: str, format: Any = None, columns: str | None = None
    ) -> FoundInputs | None:
        """Return nothing: the lines or rows of a file are texts."""
        return None


class Words(Text):
    """Texts, or lists of their words."""

    columns = (*WORD_KEYS, *Text.columns)

    def rows(
        self, rows: list[Mapping[str, Any]], column: Choose, format: Any = None, columns: Any = None
    ) -> list[Any]:
        """Return the words or texts of a column; words come in lists."""
        cells, name = super().rows(rows, column), column(list(map(str, rows[0])))
        if name in WORD_KEYS and not all(isinstance(cell, list) for cell in cells):
            raise UsageError(f"{cells[0]!r:.60} in {name} is no list of words; give a list a row")
        return cells

    def check(self, given: Any, settings: Any = None, format: Any = None) -> Any:
        """Return a text or a list of words, or refuse it."""
        words = isinstance(given, list | tuple)
        if words and not all(isinstance(word, str) and word.strip() for word in given):
            words = False
        if not words and not isinstance(given, str):
            raise UsageError(f"{given!r:.60} is neither text nor words; give a list of either")
        return given


class Conversations(Text):
    """Texts, or conversations as lists of messages."""

    columns = ("messages", *TEXT_KEYS, *Text.columns)

    def is_one(self, given: Any) -> bool:
        """Tell whether one text or one conversation was given, rather than several."""
        said = given.get("messages") if isinstance(given, dict) else given
        talk = isinstance(said, list) and said and all(is_message(one) for one in said)
        return bool(talk) or super().is_one(given)

    def check(self, given: Any, settings: Any = None, format: Any = None) -> Any:
        """Return a text, or a conversation as a list of messages."""
        given = given.get("messages") if isinstance(given, dict) else given
        return given if isinstance(given, list) else super().check(given)


TEXT, WORDS, CONVERSATIONS = Text(), Words(), Conversations()
