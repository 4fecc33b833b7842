"""Sentences in overlapping windows of tokens, and where their words stand in a batch of those."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.rows import RowEncoder, TokenRow


class Span(NamedTuple):
    """The words of a sentence that are read in one window, and those of them that are tagged."""

    first: int
    last: int
    tag_from: int
    tag_to: int


class WordWindow(NamedTuple):
    """A window as a row of tokens, the number of its sentence, its words, and all words of that."""

    row: TokenRow
    sentence: int
    span: Span
    words: Sequence[str] = ()


class WordPlaces(NamedTuple):
    """Where words stand among the flat tokens of a batch.

    Of each word the place of its first token; of each token its place and its word.
    """

    starts: Tensor
    tokens: Tensor
    words: Tensor


def spans(sizes: Sequence[int], room: int) -> list[Span]:
    """Part words of so many tokens each into windows; neighbours share up to half of them.

    Each word is tagged in the window that shows more of its context.
    """
    parts: list[Span] = []
    ends = np.concatenate([[0], np.cumsum(np.minimum(sizes, room))])
    first, tag_from = 0, 0
    while first < len(sizes):
        last = max(first + 1, int(np.searchsorted(ends, ends[first] + room, side="right")) - 1)
        if last >= len(sizes):
            parts.append(Span(first, len(sizes), tag_from, len(sizes)))
            break
        # half of it is read again, unless the next word would not fit beside that
        least = max(ends[last] - room // 2, ends[last + 1] - room)
        again = max(first + 1, min(last, int(np.searchsorted(ends, least))))
        tag_to = (again + last) // 2 if again < last else last
        parts.append(Span(first, last, tag_from, tag_to))
        first, tag_from = again, tag_to
    return parts


def sentence_windows(
    encoder: RowEncoder, words: Sequence[str], max_length: int, sentence: int = 0
) -> list[WordWindow]:
    """Encode the words of a sentence in windows of at most so many tokens."""
    pieces, windows = encoder.pieces(words), []
    for span in spans([len(some) for some in pieces], encoder.room(max_length)):
        some = slice(span.first, span.last)
        row = encoder.row(words[some], pieces[some], max_length)
        windows.append(WordWindow(row, sentence, span, words))
    return windows


def word_places(windows: Sequence[WordWindow], length: int, device: Any = "cpu") -> WordPlaces:
    """Places of the tagged words of windows that are padded to a length."""
    starts, tokens, words, before = [], [], [], 0
    for n, (row, _, span, _) in enumerate(windows):
        low, high = span.tag_from - span.first, span.tag_to - span.first
        at = np.flatnonzero((row.word_ids >= low) & (row.word_ids < high))
        word = row.word_ids[at] - low
        first = np.flatnonzero(np.diff(word, prepend=-1))
        starts.append(n * length + at[first])
        tokens.append(n * length + at)
        words.append(before + word)
        before += high - low
    parts = (torch.from_numpy(np.concatenate(some)).to(device) for some in (starts, tokens, words))
    return WordPlaces(*parts)
