"""What every position encoding answers, and what several of them share.

A position `at` has coordinates: (l, c) or (b, l, c), c = 1 for text and sound, 2 for images.
A position overrides only the methods it needs.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.masks import Mask
from regard.attention.places import known_range, range_of
from regard.errors import UsageError

Project = Callable[[Tensor], tuple[Tensor, Tensor]]

# Tables hold at most this many numbers; what lies beyond is computed anew.
MAX_TABLE = 2**22


class Position(nn.Module):
    """No position encoding at all: every method leaves things as they are."""

    per_layer = False  # whether each layer has parameters of its own
    causal_only = False  # whether it makes no sense to look ahead
    adds_values = False  # whether add_values does anything

    def __init__(self, width: int = 0, heads: int = 1, head_width: int = 0, **settings: object):
        super().__init__()

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add to the input (b, l, w) what depends on its positions."""
        return x

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Rotate projected queries or keys (b, h, l, d) by their positions."""
        return x

    def query(self, q: Tensor) -> Tensor:
        """Projected queries (b, h, l, d) as they are compared with the keys."""
        return q

    def shared(self, q_at: Tensor, k_at: Tensor, mask: Mask | None = None) -> Tensor | None:
        """Bias that all layers share, computed once a forward."""
        return None

    def bias(
        self,
        q: Tensor,
        k: Tensor,
        q_at: Tensor,
        k_at: Tensor,
        mask: Mask | None = None,
        project: Project | None = None,
    ) -> Tensor | None:
        """Layer's own bias from its projected, unrotated queries and keys.

        `project` applies the layer's query and key projections to vectors (l, w) and returns both,
        (h, l, d), for those positions that are looked up like words.

        Args:
            q: queries (b, h, q, d), not rotated
            k: keys (b, g, k, d), not rotated
            q_at: positions of the queries
            k_at: positions of the keys
            mask: which keys each query may see
            project: projects vectors (l, w) to queries and keys (h, l, d) of the layer
        """
        return None

    def add_values(self, weights: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        """What the positions add to the average of the values, (b, h, q, d)."""
        raise NotImplementedError


class PerLayer(Position):
    """Stands for the positions of a stack whose layers each have their own."""

    def __init__(self, make: Callable[[], Position]):
        super().__init__()
        self.make = make


# what a layer asks of its position; the rest is asked by the stack
_OF_LAYER = ("rotate", "query", "bias", "add_values")


class OfStack(Position):
    """What a layer asks of the position of its stack, whose parameters are the stack's alone.

    Registered in two places, a parameter that torch.func.functional_call replaces would stay so.
    """

    def __init__(self, position: Position):
        super().__init__()
        self.adds_values = position.adds_values
        for name in _OF_LAYER:
            setattr(self, name, getattr(position, name))


def of_layer(position: Position) -> Position:
    """Position of the next layer: the stack's, or a fresh one."""
    if isinstance(position, PerLayer):
        return position.make()
    if all(getattr(type(position), name) is getattr(Position, name) for name in _OF_LAYER):
        return Position()
    return OfStack(position) if any(True for _ in position.parameters()) else position


class GrowingTable:
    """A function of whole numbers as rows (n, width), for a range that grows with what is asked."""

    def __init__(self, make: Callable[[Tensor], Tensor]):
        self.make = make  # from fp64 numbers (n) to rows (n, width)
        self.kept: dict[tuple[torch.dtype, torch.device], tuple[int, Tensor]] = {}

    def __call__(self, at: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of numbers (...), (..., width)."""
        known = not (at.is_meta or at.is_floating_point() or torch.compiler.is_compiling())
        if known and at.numel():
            low, axes, _ = range_of(at)
            high = max(axes)
            first, rows = self.kept.get((dtype, at.device), (0, at.new_empty(0, 1)))
            if low < first or high >= first + len(rows):
                first, rows = self._grow(min(low * 2, first), max(high * 2, 255), dtype, at.device)
            if first <= low and high < first + len(rows):
                return F.embedding(at - first if first else at, rows)
        return self.make(at.to(torch.float64).flatten()).to(dtype).unflatten(0, at.shape)

    def _grow(self, low: int, high: int, dtype: torch.dtype, device: torch.device):
        """Compute the rows from low to high, unless they are too many."""
        with torch.inference_mode(False):
            one = self.make(torch.zeros(1, dtype=torch.float64, device=device))
            if (high - low + 1) * one.shape[-1] > MAX_TABLE:
                return 0, one[:0]
            numbers = torch.arange(low, high + 1, dtype=torch.float64, device=device)
            kept = self.kept[dtype, device] = low, self.make(numbers).to(dtype)
        return kept

    def __reduce__(self):
        return GrowingTable, (self.make,)


def relative_distance(q_at: Tensor, k_at: Tensor) -> Tensor:
    """Distance from each key to each query, (q, k) or (b, q, k)."""
    if q_at.shape[-1] != 1:
        raise UsageError(
            f"these positions count along one line, not {q_at.shape[-1]} coordinates; "
            "choose sinusoidal or rotary"
        )
    return q_at - k_at.mT


def distance_range(distances: Tensor, *sides: Tensor) -> tuple[int, int]:
    """Least of the distances, and how many there are up to the largest.

    `sides` are the positions of queries and of keys; where the host knows their ranges, no number
    is read.
    """
    if distances.is_meta or not distances.numel():
        return 0, 1
    known = [each for at in sides if (each := known_range(at))]
    if len(known) == 2:
        q, k = known
        low, high = q.first - k.last[0], q.last[0] - k.first
    else:
        low, high = (int(x) for x in torch.aminmax(distances))
    return low, high - low + 1


def by_head(values: Tensor, pairs: Tensor) -> Tensor:
    """Lay (h, n) out as (h, q, k) or (b, h, q, k), like pairs without heads."""
    values = values.unflatten(1, pairs.shape)
    return values.transpose(0, 1) if pairs.ndim == 3 else values


def for_heads(index: Tensor, like: Tensor) -> Tensor:
    """Show numbers (q, k) or (b, q, k) to every head of (b, h, q, ...)."""
    index = index.unsqueeze(1) if index.ndim == 3 else index
    return index.expand(*like.shape[:2], *index.shape[-2:])
