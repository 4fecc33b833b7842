"""Attention masks: small objects that combine with & and can give any tile.

True means that the query may see the key. Positions are an int (they count up from it) or
coordinates of shape (l, c) or (b, l, c); tiles broadcast to (b, h, q, k).
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.attention.once import once
from regard.attention.shapes import as_bhqk, cheap_to_ask, join_rows
from regard.errors import UsageError, lookup

At = Tensor | int


def _part(at: At, span: slice) -> Tensor:
    """Coordinates of a span of positions, (l, c) or (b, l, c)."""
    if isinstance(at, int):
        return torch.arange(at + span.start, at + span.stop).unsqueeze(-1)
    return at[..., span, :]


def _grid(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Lay queries along rows and keys along columns, with a head axis where there is a batch."""
    q, k = q.unsqueeze(-2), k.unsqueeze(-3)
    return (q.unsqueeze(1) if q.ndim == 4 else q), (k.unsqueeze(1) if k.ndim == 4 else k)


class Mask:
    """The base of all masks: which keys each query may see."""

    by_query = True  # whether queries differ in what they may see; else a tile is one row

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Mask of the rows and columns: true where a query may see a key."""
        raise NotImplementedError

    def span(self, rows: slice, keys: int) -> slice:
        """Range of keys outside of which none of these rows sees any."""
        return slice(0, keys)

    def aligned(self, queries: int, keys: int) -> bool:
        """True if this is just the causal triangle from the first position on."""
        return False

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse a mask that does not broadcast to scores of a shape."""

    def __and__(self, other: "Mask | Tensor | None") -> "Mask":
        """Allow what both allow; a boolean tensor broadcasts to (b, h, q, k)."""
        if other is None:
            return self
        return Both(self, other if isinstance(other, Mask) else TensorMask(boolean(other)))

    __rand__ = __and__

    def additive(self, rows: slice, columns: slice, like: Tensor) -> tuple[Tensor, Tensor | None]:
        """Mask as a bias of 0 and -inf, and which rows are fully masked, if any.

        Those rows get 0 throughout, so that no NaN arises in them or in their gradient; the caller
        blanks them. All layers of a model ask the same, so it is computed once a forward pass.
        """

        def make() -> tuple[Tensor, Tensor | None]:
            tile = self.tile(rows, columns).to(like.device)
            fully_masked: Tensor | None = ~tile.any(-1, keepdim=True)
            if cheap_to_ask(fully_masked) and not bool(fully_masked.any()):
                fully_masked = None
            seen = tile if fully_masked is None else tile | fully_masked
            bias = torch.zeros(tile.shape, dtype=like.dtype, device=like.device)
            return bias.masked_fill_(~seen, float("-inf")), fully_masked

        ends = rows.start, rows.stop, columns.start, columns.stop
        return once(make, self, ends=ends, dtype=like.dtype, device=like.device)


def boolean(mask: Any) -> Tensor:
    """Refuse what is no mask and no boolean tensor."""
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        return mask
    got = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else f"{mask!r:.60}"
    raise UsageError(
        f"mask is {got}; expected a mask such as Causal(), or a boolean tensor that is True "
        "where one may look (what is added to scores goes into bias)"
    )


class Both(Mask):
    """The intersection of two masks."""

    def __init__(self, one: Mask, other: Mask):
        self.one, self.other = one, other
        self.by_query = one.by_query or other.by_query

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse either mask if it does not broadcast to scores of a shape."""
        self.one.check(shape)
        self.other.check(shape)

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Pairs that both masks allow."""
        one, other = self.one.tile(rows, columns), self.other.tile(rows, columns)
        # positions that just count up know no device
        device = other.device if one.device.type == "cpu" else one.device
        return one.to(device) & other.to(device)

    def span(self, rows: slice, keys: int) -> slice:
        """Intersection of two ranges."""
        a, b = self.one.span(rows, keys), self.other.span(rows, keys)
        start = max(a.start, b.start)
        return slice(start, max(start, min(a.stop, b.stop)))


class PositionMask(Mask):
    """A mask that compares the position of a query with that of a key, by `allowed`."""

    def __init__(self, q_at: At = 0, k_at: At = 0):
        self.q_at, self.k_at = q_at, k_at

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """True where a query at q (..., c) may see a key at k (..., c); they broadcast."""
        raise NotImplementedError

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Comparison of all these positions."""
        return self.allowed(*_grid(_part(self.q_at, rows), _part(self.k_at, columns)))

    def _offset(self) -> int | None:
        """Distance from keys to queries if both just count up.

        None for a class from elsewhere: it may allow other pairs than what it is made from.
        """
        if type(self).__module__ != __name__:
            return None
        if isinstance(self.q_at, int) and isinstance(self.k_at, int):
            return self.q_at - self.k_at
        return None


class Causal(PositionMask):
    """Causal mask: a query sees the keys up to its own position."""

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """Compare the first coordinates."""
        return k[..., 0] <= q[..., 0]

    def span(self, rows: slice, keys: int) -> slice:
        """Keys up to the last row's own position."""
        offset = self._offset()
        stop = keys if offset is None else min(keys, max(0, rows.stop + offset))
        return slice(0, stop)

    def aligned(self, queries: int, keys: int) -> bool:
        """True if queries and keys are the same positions."""
        return self._offset() == 0 and bool(queries == keys)


class Sliding(PositionMask):
    """Sliding window: a query sees keys nearer than a width in every coordinate."""

    def __init__(self, width: int, q_at: At = 0, k_at: At = 0):
        super().__init__(q_at, k_at)
        self.width = width

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """Compare the distance with the width."""
        return ((q - k).abs() < self.width).all(-1)

    def span(self, rows: slice, keys: int) -> slice:
        """Keys near these rows."""
        offset = self._offset()
        if offset is None:
            return slice(0, keys)
        start = min(keys, max(0, rows.start + offset - self.width + 1))
        return slice(start, max(start, min(keys, rows.stop + offset + self.width - 1)))


class Window(PositionMask):
    """Window partition: a query sees the keys in its own window of a size."""

    def __init__(self, size: int, q_at: At = 0, k_at: At = 0):
        super().__init__(q_at, k_at)
        self.size = size

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """Compare the numbers of the windows."""
        return (q // self.size == k // self.size).all(-1)

    def span(self, rows: slice, keys: int) -> slice:
        """Windows that these rows lie in."""
        if self._offset() is None:
            return slice(0, keys)
        first, last = self.q_at + rows.start, self.q_at + rows.stop - 1
        start = first // self.size * self.size - self.k_at
        stop = (last // self.size + 1) * self.size - self.k_at
        start = min(keys, max(0, start))
        return slice(start, max(start, min(keys, stop)))


class Prefix(PositionMask):
    """Prefix-LM mask: all see the prefix; what comes after it is causal."""

    def __init__(self, length: int | Tensor, q_at: At = 0, k_at: At = 0):
        super().__init__(q_at, k_at)
        self.length = length if isinstance(length, int) else length.view(-1, 1, 1, 1)

    def allowed(self, q: Tensor, k: Tensor) -> Tensor:
        """Compare with the prefix and with the query."""
        device = q.device if isinstance(self.length, int) else self.length.device
        q, k = q.to(device), k.to(device)
        return (k[..., 0] < self.length) | (k[..., 0] <= q[..., 0])


class Document(Mask):
    """Document mask: packed sequences do not see each other."""

    def __init__(self, q_document: Tensor, k_document: Tensor | None = None):
        self.q = q_document
        self.k = q_document if k_document is None else k_document

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Compare the documents' numbers."""
        q, k = _grid(self.q[..., rows].unsqueeze(-1), self.k[..., columns].unsqueeze(-1))
        return (q == k).all(-1)


class TensorMask(Mask):
    """A boolean tensor as a mask: it broadcasts to (b, h, q, k), True where one may look."""

    def __init__(self, table: Tensor):
        self.table = table if table.ndim > 1 else table.expand(1, -1)
        self.by_query = self.table.shape[-2] > 1

    def check(self, shape: tuple[int, ...]) -> None:
        """Refuse a table that does not broadcast to scores of a shape."""
        lead = shape[:-2]
        as_bhqk("mask", self.table, (*(lead[:1] or (1,)), math.prod(lead[1:]), *shape[-2:]))

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Cut a part out of the table."""
        part = self.table if self.table.shape[-2] == 1 else self.table[..., rows, :]
        return part if part.shape[-1] == 1 else part[..., columns]


class Padding(Mask):
    """Key padding mask: keep (b, k) is True for real keys."""

    by_query = False

    def __init__(self, keep: Tensor):
        self.keep = keep

    @classmethod
    def of(cls, lengths: Tensor | None, size: int) -> "Padding | None":
        """Make the mask of sequences of these lengths padded to a size, if there is any padding."""
        if lengths is None:
            return None
        keep = torch.arange(size, device=lengths.device) < lengths.unsqueeze(-1)
        return None if cheap_to_ask(keep) and bool(keep.all()) else cls(keep)

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Same answer for every query."""
        return self.keep[:, None, None, columns]


MASKS: dict[str, Callable[[At, At], Mask]] = {}
"""Masks of the user by name, made of the positions of queries and of keys."""


def mask_names() -> tuple[str, ...]:
    """What the mask of a model can be beside its usual one: none, or one of the user's."""
    return ("none", *MASKS)


def own_mask(name: str, q_at: At, k_at: At, usual: Mask | None) -> Mask | None:
    """The usual mask of a model, and that of the user of a name."""
    return usual if name == "none" else lookup("mask", name, MASKS)(q_at, k_at) & usual


def join_padding(
    masks: tuple[Mask | None, Mask | None], read: tuple[Tensor, Tensor]
) -> Mask | None:
    """Mask of the rows of two memories (b, ..., k, d), the shorter one padded to the longer."""
    if masks == (None, None) and read[0].shape[-2] == read[1].shape[-2]:
        return None
    keep: list[Tensor] = []
    for mask, memory in zip(masks, read, strict=True):
        assert mask is None or isinstance(mask, Padding)
        all_real = torch.ones(len(memory), memory.shape[-2], dtype=torch.bool, device=memory.device)
        keep.append(all_real if mask is None else mask.keep)
    return Padding(join_rows(keep[0], keep[1], 1))
