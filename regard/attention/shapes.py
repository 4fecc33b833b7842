"""The axes of attention: anything laid out as batch, heads, queries and keys."""

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.errors import UsageError


def has_numbers(x: Tensor) -> bool:
    """True if the numbers of a tensor can be read: not on meta, nor while a program is exported."""
    return not (x.is_meta or torch.compiler.is_exporting())


def cheap_to_ask(x: Tensor) -> bool:
    """True if the numbers of a tensor can be read without waiting for an accelerator."""
    return x.device.type == "cpu" and has_numbers(x)


def as_bhqd(x: Tensor) -> Tensor:
    """View (*lead, q, d) as (b, h, q, d): the first leading axis is the batch, others are heads."""
    if x.ndim == 4:
        return x
    return x.flatten(1, -3) if x.ndim > 4 else x[(None,) * (3 - x.ndim)].unsqueeze(-3)


def as_bhqk(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """View what broadcasts to the scores (*lead, q, k) as (b, h, q, k), any of them possibly 1."""
    try:
        x.expand(shape)
    except RuntimeError:
        raise UsageError(
            f"a {name} {tuple(x.shape)} does not broadcast to the scores {shape}"
        ) from None
    x = x[(None,) * (len(shape) - x.ndim)]
    return as_bhqd(x.expand(-1, *shape[1:-2], -1, -1) if len(shape) > 4 else x)


def repeat_kv(x: Tensor, heads: int) -> Tensor:
    """Repeat the heads of keys or values (b, g, ...) for grouped queries, to (b, heads, ...)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def rows_of(x: Tensor, rows: slice) -> Tensor:
    """Some rows of (..., n, d); all of them are x itself."""
    count = rows.stop - rows.start
    return x if count == x.shape[-2] else x.narrow(-2, rows.start, count)


def tile_of(x: Tensor, rows: slice, columns: slice) -> Tensor:
    """Tile of what broadcasts to (..., q, k)."""
    x = x[..., rows, :] if x.shape[-2] > 1 else x
    return x[..., columns] if x.shape[-1] > 1 else x


def heads_of(x: Tensor, sentence: int, heads: list[int]) -> Tensor:
    """One sentence and some heads of what broadcasts to (b, h, q, k)."""
    x = x[(None,) * (4 - x.ndim)]
    x = x[sentence : sentence + 1] if x.shape[0] > 1 else x
    return x[:, heads] if x.shape[1] > 1 else x


def join_rows(one: Tensor, other: Tensor, axis: int) -> Tensor:
    """Rows of both, the shorter ones filled up along an axis with zeros."""
    size = max(one.shape[axis], other.shape[axis])
    after = (0, 0) * (one.ndim - 1 - axis)
    return torch.cat([F.pad(x, (*after, 0, size - x.shape[axis])) for x in (one, other)])
