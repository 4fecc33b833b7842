"""Windows of tokens over texts, in batches: crops of a running text, or packed documents."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.data.documents import TokenisedTexts
from regard.data.store import Column
from regard.errors import UsageError


class TokenWindow(NamedTuple):
    """Rows of tokens (b, l), and which document each is of; without documents a row is all one.

    `learnt` tells which tokens are to be predicted, if not all are.
    """

    ids: np.ndarray
    documents: np.ndarray | None = None
    learnt: np.ndarray | None = None


class Windows:
    """Batch n of windows over the tokens of a part, a pure function of (seed, n)."""

    ids: np.ndarray  # all tokens of the part
    rows: int  # windows a batch
    span: np.ndarray  # 0, 1, ... of a window

    def __getitem__(self, n: int) -> TokenWindow:
        """Batch n."""
        raise NotImplementedError

    @property
    def tokens(self) -> int:
        """Tokens of a batch."""
        return self.rows * len(self.span)


class TextCrops(Windows):
    """Batch n of a running text: crops from random places."""

    def __init__(self, ids: np.ndarray, rows: int, length: int, seed: int):
        if len(ids) < 2:
            raise UsageError(f"a text of {len(ids)} tokens is too short to learn from; give more")
        self.ids, self.rows, self.seed = ids, rows, seed % 2**64
        self.span = np.arange(min(length, len(ids)))

    def __getitem__(self, n: int) -> TokenWindow:
        """Batch n."""
        rng = np.random.Generator(np.random.PCG64([self.seed, n]))
        starts = rng.integers(0, len(self.ids) - len(self.span) + 1, (self.rows, 1))
        return TokenWindow(self.ids[starts + self.span])


class Packed(Windows):
    """Batch n of documents laid end to end.

    Each epoch shuffles the documents, lays windows over their row of tokens, one every `stride`,
    and shuffles these. A document that goes on in the next window is read there as a new text.
    """

    def __init__(
        self,
        column: Column,
        rows: int,
        length: int,
        stride: int,
        seed: int,
        learnt: np.ndarray | None = None,
    ):
        self.ids, self.starts, self.learnt = column.ids, column.offsets[:-1], learnt
        self.lengths = np.diff(column.offsets)
        self.seed, self.stride = seed % 2**64, stride
        self.span = np.arange(min(length, len(self.ids)))
        self.windows = (len(self.ids) - len(self.span)) // stride + 1
        self.rows = min(rows, self.windows)
        self.count = self.windows // self.rows  # batches an epoch
        self._plans: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Order of the documents, where each begins in it, and that of the windows."""
        if epoch not in self._plans:
            rng = np.random.Generator(np.random.PCG64([self.seed, epoch]))
            order = rng.permutation(len(self.lengths))
            begins = np.concatenate([[0], np.cumsum(self.lengths[order])[:-1]])
            self._plans = dict(list(self._plans.items())[-1:])
            self._plans[epoch] = order, begins, rng.permutation(self.windows)
        return self._plans[epoch]

    def __getitem__(self, n: int) -> TokenWindow:
        """Batch n."""
        epoch, place = divmod(n, self.count)
        order, begins, windows = self._plan(epoch)
        first = windows[place * self.rows : (place + 1) * self.rows, None] * self.stride
        places = first + self.span
        documents = np.searchsorted(begins, places, side="right") - 1
        at = self.starts[order[documents]] + places - begins[documents]
        learnt = None if self.learnt is None else self.learnt[at] > 0
        return TokenWindow(self.ids[at], documents - documents[:, :1], learnt)


class TokenBatch(NamedTuple):
    """Windows of tokens that a language model reads, and the tokens that it is to predict."""

    reads: Tensor
    documents: Tensor | None
    places: Tensor | None  # where to predict, in the flat windows; everywhere if None
    writes: Tensor  # -1 where there is nothing to predict
    tokens: int  # that are predicted
    read: int


class TokenBatches:
    """Batch n of a language model's training, a pure function of (seed, n)."""

    windows: Windows

    def __getitem__(self, n: int) -> TokenBatch:
        """Batch n."""
        raise NotImplementedError

    def epoch(self) -> float:
        """Number of batches in which as many tokens are read as there are."""
        return len(self.windows.ids) / self.windows.tokens


class CausalBatches(TokenBatches):
    """Windows in which every token is predicted from those before it."""

    def __init__(self, texts: TokenisedTexts, *, context: int, batch_tokens: int, seed: int):
        column, rows = texts.columns["train"], max(1, batch_tokens // context)
        self.windows = (
            TextCrops(column.ids, rows, context + 1, seed)
            if texts.running
            else Packed(column, rows, context + 1, context, seed, texts.learnt.get("train"))
        )

    def __getitem__(self, n: int) -> TokenBatch:
        """Batch n."""
        ids, numbers, learnt = self.windows[n]
        rows = torch.from_numpy(ids.astype(np.int64))
        reads, writes = rows[:, :-1], rows[:, 1:]
        if numbers is None:
            return TokenBatch(reads, None, None, writes, writes.numel(), writes.numel())
        documents = torch.from_numpy(numbers)
        inside = documents[:, 1:] == documents[:, :-1]  # nothing follows the end of a document
        if learnt is not None:
            inside &= torch.from_numpy(learnt[:, 1:])
        writes = writes.masked_fill(~inside, -1)
        return TokenBatch(reads, documents[:, :-1], None, writes, int(inside.sum()), writes.numel())


def spans_of(offsets: np.ndarray, length: int) -> np.ndarray:
    """Cut rows of tokens into spans (n, 2): from where to where to read.

    Each begins with the last token of the one before, so that every token but the first of a row
    is predicted once, after at most so many others.
    """
    begins, ends = offsets[:-1], offsets[1:]
    counts = np.maximum(1, -(-(ends - begins - 1) // length))
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    starts = np.repeat(begins, counts) + length * within
    spans = np.stack([starts, np.minimum(np.repeat(ends, counts), starts + length + 1)], 1)
    return spans[spans[:, 1] - spans[:, 0] > 1]


def evenly_spread(count: int, each: int, most: int) -> np.ndarray:
    """Choose among so many windows, evenly, those of at most so many tokens in all; 0: all."""
    some = min(count, max(1, most // each)) if most else count
    return np.linspace(0, count - 1, some).astype(np.int64)
