"""Watching: recording the attention maps of a model without changing its output."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import update_wrapper
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import UsageError, nearest

Pick = int | slice | Sequence[int] | None


def _numbers(pick: Pick, size: int, what: str) -> list[int]:
    """Numbers that a choice of one, some or all means."""
    chosen = (
        range(size)
        if pick is None
        else range(size)[pick]
        if isinstance(pick, slice)
        else [pick]
        if isinstance(pick, int)
        else pick
    )
    for number in chosen:
        if not -size <= number < size:
            raise UsageError(f"{what} {number} is not there; choose from 0 to {size - 1}")
    return [number % size for number in chosen]


@dataclass
class Map:
    """The attention map of one layer: weights (b, h, q, k), computed only where asked for."""

    name: str
    shape: tuple[int, int, int, int]
    compute: Callable[[int, list[int], slice], Tensor] = field(repr=False)
    row_tokens: list[list[str]] | None = None
    column_tokens: list[list[str]] | None = None

    def weights(self, batch: Pick = None, heads: Pick = None, rows: Pick = None) -> Tensor:
        """Weights of chosen sentences, heads and queries, (b, h, q, k)."""
        b, h, q, _ = self.shape
        picked_heads = _numbers(heads, h, "head")
        picked_rows = _numbers(rows, q, "row")
        spans = _runs(picked_rows)
        return torch.stack(
            [
                torch.cat([self.compute(i, picked_heads, span) for span in spans], dim=-2)
                for i in _numbers(batch, b, "sentence")
            ]
        )

    def __getitem__(self, place) -> Tensor:
        """Weights by plain indices for sentence, head, row and column."""
        places = place if isinstance(place, tuple) else (place,)
        picks = [slice(i, i + 1) if isinstance(i, int) and i >= 0 else i for i in places[:3]]
        picks = [[i] if isinstance(i, int) else i for i in picks]
        weights = self.weights(*picks)
        after = tuple(0 if isinstance(i, int) else slice(None) for i in places[:3])
        return weights[after + tuple(places[3:])]


def _runs(rows: list[int]) -> list[slice]:
    """Join rows that follow each other, so that each run is one tile."""
    runs: list[slice] = []
    for row in rows:
        if runs and runs[-1].stop == row and row - runs[-1].start < 512:
            runs[-1] = slice(runs[-1].start, row + 1)
        else:
            runs.append(slice(row, row + 1))
    return runs


def _concatenated(maps: list[Map]) -> Map:
    """Concatenate the rows of maps."""
    b, h, _, k = maps[0].shape
    rows = [(each, row) for each in maps for row in range(each.shape[2])]

    def compute(sentence: int, heads: list[int], span: slice) -> Tensor:
        parts = [each.compute(sentence, heads, slice(i, i + 1)) for each, i in rows[span]]
        return torch.cat(parts, dim=-2)

    return Map(maps[0].name, (b, h, len(rows), k), compute)


def _stacked(maps: list[Map]) -> Map:
    """Make one map of maps of one sentence each, whose weights are zero where they are shorter."""
    queries, keys = (max(each.shape[n] for each in maps) for n in (2, 3))

    def compute(sentence: int, heads: list[int], span: slice) -> Tensor:
        each = maps[sentence]
        start, stop = (min(n, each.shape[2]) for n in (span.start, span.stop))
        tile = each.compute(0, heads, slice(start, stop))
        rest = span.stop - span.start - (stop - start)
        return F.pad(tile, (0, keys - each.shape[3], 0, rest))

    return Map(maps[0].name, (len(maps), maps[0].shape[1], queries, keys), compute)


class Maps:
    """The attention of a model's layers by name, such as decoder.3.cross."""

    def __init__(self, model: "nn.Module | Watched", outer: "Maps | None" = None):
        """Watch a model or a filter, and tell another watcher around this one as well."""
        self._outer = outer
        self._names: dict[int, list[str]] = {}
        self._seen: dict[int, int] = {}
        inside = (
            model.named_modules(remove_duplicate=False)
            if isinstance(model, nn.Module)
            else [(model.name, model)]
        )
        for name, module in inside:
            self._names.setdefault(id(module), []).append(name)
        self._maps: dict[str, list[Map]] = {}

    def record(self, module: object, shape: tuple, compute: Callable) -> None:
        """Record that a module attended; one that stands in several places does so in turn."""
        if self._outer is not None:
            self._outer.record(module, shape, compute)
        if names := self._names.get(id(module)):
            turn = self._seen[id(module)] = self._seen.get(id(module), -1) + 1
            name = names[turn % len(names)]
            self._maps.setdefault(name, []).append(Map(name, shape, compute))

    def join(self, module: object, last: int) -> None:
        """Make one map of so many last ones that a module has left."""
        if self._outer is not None:
            self._outer.join(module, last)
        for name in self._names.get(id(module), [])[:1]:
            maps = self._maps.get(name, [])
            if last > 1:
                self._maps[name] = [*maps[:-last], _concatenated(maps[-last:])]

    def stack(self, before: list[dict[str, int]]) -> None:
        """Make one map of all that each layer has left since there were so many of it."""
        first, *outer = before
        if self._outer is not None:
            self._outer.stack(outer)
        for name, maps in self._maps.items():
            old, new = maps[: first.get(name, 0)], maps[first.get(name, 0) :]
            self._maps[name] = [*old, _stacked(new)] if len(new) > 1 else maps

    def counts(self) -> list[dict[str, int]]:
        """Number of maps of each layer, here and in the watchers around."""
        own = {name: len(maps) for name, maps in self._maps.items()}
        return [own, *([] if self._outer is None else self._outer.counts())]

    def count(self, module: object) -> int:
        """Number of maps of a module that stands in one place."""
        return sum(len(self._maps.get(name, [])) for name in self._names.get(id(module), [])[:1])

    def names(self) -> list[str]:
        """Names of all layers that attended, in order."""
        return list(self._maps)

    def calls(self, name: str) -> list[Map]:
        """One map for each time that a layer attended."""
        if not self._maps:
            raise UsageError(
                f"no attention named '{name}' was seen: nothing attended while this was watched; "
                "run the model that is watched within the with block"
            )
        if name not in self._maps:
            raise UsageError(
                f"no attention named '{name}' was seen; choose from {', '.join(self._maps)}."
                + nearest(name, self._maps)
            )
        return self._maps[name]

    def __getitem__(self, name: str) -> Map:
        return self.calls(name)[-1]

    def __contains__(self, name: str) -> bool:
        return name in self._maps

    def __iter__(self) -> Iterator[str]:
        return iter(self._maps)

    def __len__(self) -> int:
        return len(self._maps)

    def __repr__(self) -> str:
        rows = [
            f"  {name}: {'x'.join(map(str, maps[-1].shape))}"
            + (f", the last of {len(maps)}" if len(maps) > 1 else "")
            for name, maps in self._maps.items()
        ]
        return "\n".join(["Maps (sentences x heads x queries x keys)", *(rows or ["  none yet"])])


class Holder(Protocol):
    """What has a model, such as that which regard.load returns."""

    @property
    def model(self) -> nn.Module: ...


class Watched:
    """A function that attends without being a module, such as a filter; it records itself.

    Args:
        function: what it computes, by a tensor and keywords.
        shape: of its map (sentences, heads, queries, keys), by the tensor.
        rows: rows of weights (queries, keys) of one sentence, by the tensor and the keywords.
    """

    def __init__(self, function: Callable[..., Tensor], shape: Callable, rows: Callable):
        update_wrapper(self, function)
        self.name, self.function = function.__name__, function
        self.shape, self.rows = shape, rows

    def __call__(self, x: Tensor, **settings: Any) -> Tensor:
        out = self.function(x, **settings)
        if (recorder := watcher()) is not None:

            def compute(sentence: int, heads: list[int], span: slice) -> Tensor:
                return self.rows(x, sentence, span, **settings).expand(len(heads), -1, -1)

            recorder.record(self, self.shape(x), compute)
        return out


_WATCHER: ContextVar[Maps | None] = ContextVar("watcher", default=None)


def watcher() -> Maps | None:
    """Active recorder of attention maps, if any."""
    return _WATCHER.get()


def module_of(model: nn.Module | Holder) -> nn.Module:
    """Module, or that of what regard.load returned."""
    module = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(module, nn.Module):
        raise UsageError(
            f"{model!r:.60} is not a model; give a module, or what regard.load returned"
        )
    return module


@contextmanager
def watch(model: nn.Module | Holder | Watched) -> Iterator[Maps]:
    """Collect the attention of every layer of a model while the block runs.

    The model is a module, what regard.load returned, or a filter of regard.filters. `maps[name]` is
    the attention of a layer when it was last computed, `maps.calls(name)` that of each time: in
    decoding, of each step.
    """
    maps = Maps(model if isinstance(model, Watched) else module_of(model), watcher())
    token = _WATCHER.set(maps)
    try:
        yield maps
    finally:
        _WATCHER.reset(token)


@contextmanager
def as_one(module: object) -> Iterator[None]:
    """Show what a module attends to step by step while the block runs as one map, row by row."""
    recorder = watcher()
    before = 0 if recorder is None else recorder.count(module)
    yield
    if recorder is not None:
        recorder.join(module, recorder.count(module) - before)


@contextmanager
def as_batch() -> Iterator[None]:
    """Show what is attended to sentence by sentence while the block runs as maps of one batch."""
    recorder = watcher()
    before = [] if recorder is None else recorder.counts()
    yield
    if recorder is not None:
        recorder.stack(before)
