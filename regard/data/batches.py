"""Which examples make up batch n: alike in length, shuffled by epoch, the same whenever asked."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from heapq import heapify, heappush, heapreplace
from typing import Any

import numpy as np
import torch

from regard.errors import UsageError

_REMEMBERED = 4  # epochs whose plans are kept: a resumed run looks back at most one


class IndexBatches:
    """Batch n of example indices under a budget of padded tokens, a pure function of (seed, n)."""

    def __init__(
        self,
        lengths: Sequence[np.ndarray],
        tokens: int,
        seed: int,
        max_rows: int | None = None,
    ):
        """Take one array of lengths a column, the last of which (the target) leads the order."""
        if not lengths or any(len(column) != len(lengths[0]) for column in lengths):
            sizes = [len(column) for column in lengths]
            raise UsageError(f"columns of {sizes} examples; expected one length an example in each")
        if len(lengths[0]) == 0:
            raise UsageError("no examples to make batches of; check the data")
        if tokens < 1:
            raise UsageError(
                f"batch_tokens={tokens}; expected at least 1, such as batch_tokens=4096"
            )
        if max_rows is not None and max_rows < 1:
            raise UsageError(f"{max_rows} rows a batch; expected at least 1")
        # millions of rows are sorted, so their numbers are kept small
        self.source = np.asarray(lengths[0], dtype=np.int32)
        self.target = np.asarray(lengths[-1], dtype=np.int32)
        self.longest = np.ones(len(self.source), np.int32)
        for column in lengths:
            np.maximum(self.longest, column, out=self.longest, casting="unsafe")
        self.tokens = tokens
        self.max_rows = max_rows or len(self.longest)
        self.seed = seed
        # of an epoch, the order of the examples, where each batch begins, and that of the batches
        self._plans: OrderedDict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = OrderedDict()
        # Every epoch has the same number of batches, so that batch n is found without planning
        # the epochs before it. How many the noise asks for hardly differs; one in a hundred is
        # to spare, and where that is too few, an epoch does without the noise.
        plain = len(self._cut(self._order(None)))
        noisy = [len(self._cut(self._order(self._rng(epoch)))) for epoch in range(3)]
        count = max(plain, *noisy)
        self._count = min(count + count // 100, len(self.longest))

    def len_epoch(self, epoch: int = 0) -> int:
        """Number of batches in an epoch (the same in all)."""
        return self._count

    def __getitem__(self, n: int) -> np.ndarray:
        """Example indices of batch n, for any n from 0 without end."""
        if n < 0:
            raise IndexError(f"batch {n}: batches are counted from 0")
        epoch, place = divmod(n, self._count)
        if epoch not in self._plans:
            self._plans[epoch] = self._plan(epoch)
            if len(self._plans) > _REMEMBERED:
                self._plans.popitem(last=False)
        order, starts, batches = self._plans[epoch]
        batch = batches[place]
        return order[starts[batch] : starts[batch + 1]]

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Cut one epoch into its batches and shuffle them."""
        rng = self._rng(epoch)
        for noise in (1.0, 0.0, None):
            order = self._order(None if noise is None else rng, noise or 0.0)
            starts = self._cut(order)
            if len(starts) <= self._count:
                break
        ends = [*starts[1:], len(order)]
        largest = [(start - end, start) for start, end in zip(starts, ends, strict=True)]
        heapify(largest)
        while len(starts) < self._count:  # the first of the largest is halved
            size, start = -largest[0][0], largest[0][1]
            half = -(-size // 2)
            heapreplace(largest, (-half, start))
            heappush(largest, (half - size, start + half))
            starts.append(start + half)
        starts = np.array([*sorted(starts), len(order)])
        return order, starts, rng.permutation(self._count)

    def _rng(self, epoch: int) -> np.random.Generator:
        return np.random.Generator(np.random.PCG64([self.seed % 2**64, epoch]))

    def _order(self, rng: np.random.Generator | None, noise: float = 1.0) -> np.ndarray:
        """Sort the examples by length, with a little noise so that neighbours change by epoch."""
        count = len(self.longest)
        target, ties = self.target, np.arange(count, dtype=np.int32)
        source = self.source.astype(float)
        if rng is not None:
            rng.shuffle(ties)
            for some in _slices(count):
                source[some] += noise * rng.uniform(-0.7, 0.7, some.stop - some.start)
            # One in ten examples is taken for one token longer than it is.
            target = target.copy()
            for some in _slices(count):
                target[some] += rng.random(some.stop - some.start) < 0.1 * noise
        # Sources run up and down in turn, so that they do not jump where the target grows by one.
        np.negative(source, out=source, where=target % 2 == 1)
        narrow = np.int16 if target.max() < 2**15 else np.int32  # is sorted several times faster
        order = np.argsort(target.astype(narrow), kind="stable").astype(np.int32)
        borders = np.flatnonzero(np.diff(target[order])) + 1
        for some in np.split(order, borders):  # one target length each
            some[:] = some[np.lexsort((ties[some], source[some]))]
        return order

    def _cut(self, order: np.ndarray) -> list[int]:
        """Cut the order into batches, each as long as the budget allows: where each begins."""
        longest = self.longest[order]
        starts, start = [], 0
        while start < len(order):
            # No batch can be longer than if all its rows were as short as the first.
            room = max(1, min(self.tokens // int(longest[start]), self.max_rows))
            ahead = np.maximum.accumulate(longest[start : start + room])
            fits = ahead * np.arange(1, len(ahead) + 1) <= self.tokens
            starts.append(start)
            start += max(1, int(fits.sum()))
        return starts


def _slices(count: int) -> Iterator[slice]:
    """Yield what makes up so many rows, a million at once."""
    for start in range(0, count, 1 << 20):
        yield slice(start, min(start + (1 << 20), count))


class Shuffled:
    """Batch n of so many example indices, all seen once an epoch, a pure function of (seed, n)."""

    def __init__(self, examples: int, rows: int, seed: int):
        """Take the number of examples and how many make a batch."""
        if examples < 1 or rows < 1:
            raise UsageError(f"{rows} of {examples} examples a batch; expected at least 1 of 1")
        self.examples, self.rows, self.seed = examples, rows, seed
        self._orders: OrderedDict[int, np.ndarray] = OrderedDict()

    def __getitem__(self, n: int) -> np.ndarray:
        """Example indices of batch n; a batch may end one epoch and begin the next."""
        if n < 0:
            raise IndexError(f"batch {n}: batches are counted from 0")
        epochs, places = np.divmod(np.arange(n * self.rows, (n + 1) * self.rows), self.examples)
        parts = [self._order(int(e))[places[epochs == e]] for e in np.unique(epochs)]
        return np.concatenate(parts)

    def epoch(self) -> float:
        """Number of batches in which all examples are read once."""
        return self.examples / self.rows

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            rng = np.random.Generator(np.random.PCG64([self.seed % 2**64, epoch]))
            self._orders[epoch] = rng.permutation(self.examples)
            if len(self._orders) > _REMEMBERED:
                self._orders.popitem(last=False)
        return self._orders[epoch]


def moved(batch: Any, device: torch.device | str) -> Any:
    """Move all tensors of a batch to a device; for CUDA, from memory that is pinned."""
    if isinstance(batch, torch.Tensor):
        to_cuda = torch.device(device).type == "cuda" and not batch.is_cuda
        return (batch.pin_memory() if to_cuda else batch).to(device, non_blocking=to_cuda)
    if torch.device(device).type == "cpu" or not isinstance(batch, tuple):
        return batch
    parts = (moved(part, device) for part in batch)
    return type(batch)(*parts) if hasattr(batch, "_fields") else tuple(parts)


def pad(rows: Sequence[np.ndarray], value: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stack rows of ids into one (b, l) tensor filled up with a value, and give their lengths."""
    lengths = np.array([len(row) for row in rows], dtype=np.int64)
    table = np.full((len(rows), int(lengths.max(initial=0))), value, dtype=np.int64)
    for place, row in zip(table, rows, strict=True):
        place[: len(row)] = row
    return torch.from_numpy(table), torch.from_numpy(lengths)
