"""Window attention: self-attention within windows of a grid, linear in its size."""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.masks import Document, Mask
from regard.attention.multihead import MultiHead
from regard.attention.once import cached_by_size, once
from regard.attention.positions import Position, Rotary
from regard.errors import UsageError, lookup
from regard.layers.patches import grid_at


class Permutation(NamedTuple):
    """Where each token of a new order comes from, and which of them are padding."""

    origin: Tensor
    empty: Tensor

    @classmethod
    def of(cls, origin: Tensor) -> "Permutation":
        """Make one from places in the old order, of which -1 is padding."""
        return cls(origin.clamp(min=0), (origin < 0).nonzero().squeeze(1))

    def __call__(self, x: Tensor) -> Tensor:
        """Tokens of x (b, l, w) in the new order."""
        moved = x.index_select(1, self.origin)
        return moved.index_fill_(1, self.empty, 0.0) if len(self.empty) else moved


class PermuteFn(torch.autograd.Function):
    """A permutation whose gradient is its inverse: PyTorch would add up what is only moved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Permutation, back: Permutation) -> Tensor:
        ctx.there, ctx.back = there, back
        return there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return PermuteFn.apply(grads[0], ctx.back, ctx.there), None, None


class WindowPartition(NamedTuple):
    """How the tokens of a grid go into its windows and back; None where there is one window."""

    place: Tensor
    there: Permutation | None
    back: Permutation | None


@lru_cache(maxsize=64)
def partition(
    height: int, width: int, window: int, shift: int, device: torch.device
) -> WindowPartition:
    """Partition a grid into windows, cyclically shifted by so many tokens down and to the right.

    There is as much padding after the grid as windows need.

    Args:
        height: rows of the grid
        width: columns of the grid
        window: side of a window
        shift: tokens that windows are shifted by
        device: device of the indices
    """
    with torch.inference_mode(False):  # what is made there cannot be trained with
        high, wide = (-(-n // window) * window for n in (height, width))
        rows, columns = ((torch.arange(n, device=device) + shift) % n for n in (high, wide))
        at = rows.unsqueeze(1) * width + columns
        at = at.masked_fill((rows >= height).unsqueeze(1) | (columns >= width), -1)
        place = at.unflatten(1, (-1, window)).unflatten(0, (-1, window)).transpose(1, 2)
        place = place.reshape(-1, window**2)
        if len(place) == 1 and (height, width) == (high, wide):
            return WindowPartition(place, None, None)
        flat = place.flatten()
        if flat.is_meta:
            back = flat.new_empty(height * width)
            return WindowPartition(place, Permutation(flat, flat[:0]), Permutation(back, back[:0]))
        back = flat.argsort()[-height * width :]  # padding is first in order
        return WindowPartition(place, Permutation.of(flat), Permutation.of(back))


@cached_by_size(8)
def shift_mask(
    height: int, width: int, window: int, shift: int, batch: int, device: torch.device
) -> Mask | None:
    """Mask of shifted windows: no attention across edges that the shift has joined.

    Args:
        height: rows of the grid
        width: columns of the grid
        window: side of a window
        shift: tokens that windows are shifted by
        batch: images
        device: device of the mask
    """
    if not shift:
        return None
    with torch.inference_mode(False):
        high, wide = (-(-n // window) * window for n in (height, width))
        place = partition(high, wide, window, shift, device).place
        round_down, round_right = place // wide < shift, place % wide < shift
        return Document((2 * round_down + round_right).repeat(batch, 1))


def _shrink(window: int, shift: int, height: int, width: int) -> tuple[int, int]:
    """Let windows be no larger than the grid, and shift none that fills one of its sides."""
    least = min(height, width)
    return (window, shift) if least > window else (least, 0)


def _keep(window: int, shift: int, height: int, width: int) -> tuple[int, int]:
    """Let windows be as they are, whatever the grid."""
    return window, shift


# name -> what becomes of a window and its shift on a grid
_WINDOW_FITS: dict[str, Callable[[int, int, int, int], tuple[int, int]]] = {
    "shrink": _shrink,
    "keep": _keep,
}


class WindowAttention(nn.Module):
    """Window attention: each token of a grid attends to its own window (Swin).

    Shifted windows cross the borders of those that are not. A grid that they do not fill is padded
    with zeros, which are attended to as tokens are.
    """

    def __init__(self, attention: MultiHead, window: int, shift: int = 0, fit: str = "shrink"):
        super().__init__()
        if not 0 <= shift < window:
            raise UsageError(f"shift={shift} is not within a window={window}; choose less")
        self.inside = attention
        self.window, self.shift = window, shift
        self.fit = partial(lookup("fit", fit, _WINDOW_FITS), window, shift)

    def place(self, height: int, width: int) -> Int[Tensor, "windows tokens"]:
        """Place on the grid, row by row, of each token of a window; -1 is padding."""
        return partition(height, width, *self.fit(height, width), torch.device("cpu")).place

    def forward(self, x: Float[Tensor, "b y x w"], **nothing: Any) -> Float[Tensor, "b y x w"]:
        """Attend within the windows of a grid, from which positions follow."""
        b, height, width, w = x.shape
        window, shift = self.fit(height, width)
        _, there, back = partition(height, width, window, shift, x.device)
        tokens = x.flatten(1, 2)
        if there is not None:
            tokens = PermuteFn.apply(tokens, there, back)
        tokens = self.inside(
            tokens.reshape(-1, window**2, w),
            at=grid_at(window, window, 0, x.device),
            mask=shift_mask(height, width, window, shift, b, x.device),
        ).reshape(b, -1, w)
        if back is not None:
            tokens = PermuteFn.apply(tokens, back, there)
        return tokens.view(b, height, width, w)


class Offsets(Position):
    """A bias for each offset of one token of a window from another, and for each head."""

    def __init__(self, heads: int, window: int):
        super().__init__()
        self.heads, self.window = heads, window

    def each(self) -> Float[Tensor, "n h"]:
        """Bias of every offset, row by row."""
        raise NotImplementedError

    def _rows(self, at: Tensor) -> Tensor:
        """Offset from each key to each query, (h, q * k)."""
        offset = at.unsqueeze(1) - at.unsqueeze(0) + self.window - 1
        rows = offset[..., 0] * (2 * self.window - 1) + offset[..., 1]
        return rows.flatten().expand(self.heads, -1)

    def bias(self, q, k, q_at, k_at, mask=None, project=None) -> Tensor | None:
        """Bias of the offsets in a window, (h, q, k)."""
        rows = once(lambda: self._rows(q_at), q_at, window=self.window, heads=self.heads)
        return self.each().T.gather(1, rows).view(self.heads, len(q_at), len(k_at))


class OffsetTable(Offsets):
    """A learned number for each offset (Swin, Liu et al. 2021)."""

    def __init__(self, heads: int, window: int):
        super().__init__(heads, window)
        self.table = nn.Parameter(torch.zeros((2 * window - 1) ** 2, heads))

    def each(self) -> Tensor:
        """Table."""
        return self.table


@lru_cache(maxsize=64)
def _spaced(window: int, reach: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """sign(o) log2(1 + 8 |o| / reach) / 3 of both coordinates of every offset o, (n, 2)."""
    with torch.inference_mode(False):
        side = torch.arange(1 - window, window, dtype=torch.float64, device=device)
        side = side.sign() * torch.log2(1 + 8 * side.abs() / reach) / 3
        return torch.cartesian_prod(side, side).to(dtype)


class OffsetNetwork(Offsets):
    """16 sigmoid(W2 relu(W1 o + b)) of the logarithm of each offset o (Swin V2, Liu et al. 2022).

    So a window may grow after training: offsets are measured by the one that was `trained` with.
    """

    hidden = 512

    def __init__(self, heads: int, window: int, trained: int = 0):
        super().__init__(heads, window)
        self.reach = max(1, (trained or window) - 1)
        self.inner = nn.Linear(2, self.hidden)
        self.outer = nn.Linear(self.hidden, heads, bias=False)

    def each(self) -> Tensor:
        """Output of the network for every offset."""
        weight = self.inner.weight
        offsets = _spaced(self.window, self.reach, weight.device, weight.dtype)
        return 16 * self.outer(F.relu(self.inner(offsets))).sigmoid()


def _rotary(width: int, heads: int, window: int, trained: int) -> Position:
    return Rotary(width, heads, width // heads)


# name -> how to make one from the width, the heads, the window and the one it was trained with
WINDOW_POSITIONS: dict[str, Callable[[int, int, int, int], Position]] = {
    "none": lambda width, heads, window, trained: Position(),
    "table": lambda width, heads, window, trained: OffsetTable(heads, window),
    "continuous": lambda width, heads, window, trained: OffsetNetwork(heads, window, trained),
    "rotary": _rotary,
}
