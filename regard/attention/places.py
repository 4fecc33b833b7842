"""Positions of which the host knows the range, so that it need not wait for an accelerator."""

from typing import NamedTuple

import torch
from torch import Tensor

from regard.attention.once import once
from regard.attention.shapes import has_numbers


class Range(NamedTuple):
    """The smallest coordinate of positions (..., l, c), the largest of each axis, and their order.

    Args:
        first: smallest coordinate of all axes
        last: largest coordinate of each axis
        counts: whether positions (l, 1) count up by one
    """

    first: int
    last: tuple[int, ...]
    counts: bool = False


def within_range(at: Tensor, known: Range) -> Tensor:
    """The same positions, with a range that the host knows."""
    if not torch.compiler.is_compiling():
        at.known_range = known  # type: ignore[attr-defined]
    return at


def places(start: int, stop: int, device: torch.device | None = None) -> Tensor:
    """Positions (l, 1) from `start` up to, not including, `stop`."""
    at = torch.arange(start, stop, device=device).unsqueeze(-1)
    return within_range(at, Range(start, (stop - 1,), counts=True))


def known_range(at: Tensor) -> Range | None:
    """Range of positions, if the host knows it."""
    return getattr(at, "known_range", None)


def range_of(at: Tensor) -> Range:
    """Range of positions: as it is known, or else read, once a forward pass."""
    known = known_range(at)
    return known if known is not None else once(lambda: _read(at), at)


def _read(at: Tensor) -> Range:
    axes = at.flatten(0, -2) if at.ndim > 1 else at.unsqueeze(-1)
    low, high = torch.aminmax(axes, dim=0)
    ends = torch.cat([low.amin().view(1), high]).tolist()
    return Range(ends[0], tuple(ends[1:]))


def count_up(at: Tensor) -> bool:
    """True if positions are (l, 1), each one further than the last."""
    if at.ndim != 2 or at.shape[-1] != 1:
        return False
    known = known_range(at)
    if not has_numbers(at) or (known is not None and known.counts):
        return True
    return once(lambda: bool((at.diff(dim=0) == 1).all()), at, what="counts up")
