"""Absolute positions: sinusoids and learned vectors, added to the input."""

from functools import partial

import torch
from torch import Tensor, nn

from regard.attention.places import range_of
from regard.attention.positions.base import GrowingTable, Position
from regard.errors import UsageError


def rates(width: int, base: float, device: torch.device | None = None) -> Tensor:
    """1 / base^(2i/w) for i < w/2, in fp64."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


def _waves(width: int, base: float, layout: str, at: Tensor) -> Tensor:
    """sin and cos of fp64 numbers (...) at all rates, (..., width)."""
    angles = at.unsqueeze(-1) * rates(width, base, at.device)
    both = torch.stack([angles.sin(), angles.cos()], dim=-1 if layout == "pairs" else -2)
    return both.flatten(-2)


def sinusoids(at: Tensor, width: int, base: float = 10_000.0, layout: str = "pairs") -> Tensor:
    """sin and cos of each coordinate at `width` wavelengths from 2 pi to base * 2 pi.

    P[k, 2i] = sin(k / base^(2i/w)), P[k, 2i+1] = cos(same): in pairs (sin, cos, sin, cos, ...), or
    as halves (all sines, then all cosines). Coordinates share the width evenly.
    """
    return _waves(coordinate_width(width, at), base, layout, at.to(torch.float64)).flatten(-2)


def coordinate_width(width: int, at: Tensor) -> int:
    """Part of a width that each coordinate gets."""
    each = width // at.shape[-1]
    if each % 2 or each * at.shape[-1] != width:
        raise UsageError(f"sinusoids need an even width for each coordinate, not {width}")
    return each


_TABLES: dict[tuple[int, float, str], GrowingTable] = {}


def sinusoid_table(*which) -> GrowingTable:
    """The one table of the sinusoids of a width, base and layout."""
    if which not in _TABLES:
        _TABLES[which] = GrowingTable(partial(_waves, *which))
    return _TABLES[which]


class Sinusoidal(Position):
    """Sines and cosines of the position, added to the input (Vaswani et al. 2017).

    Moving by D is a rotation that does not depend on where: P[k+D] = M_D P[k].

    Args:
        width: width of the embeddings
        heads: attention heads
        head_width: width of a head
        base: base of the wavelengths
        layout: order of sines and cosines: pairs or halves
        rest: settings of other positions
    """

    def __init__(self, width: int, heads=1, head_width=0, *, base=1e4, layout="pairs", **rest):
        super().__init__()
        if width % 2:
            raise UsageError(f"sinusoidal positions need an even width, not {width}")
        self.width, self.base, self.layout = width, base, layout

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add the sinusoids."""
        table = sinusoid_table(coordinate_width(self.width, at), self.base, self.layout)
        return x + table(at, x.dtype).flatten(-2)


class Learned(Position):
    """A learned vector for each position, added to the input."""

    def __init__(self, width: int, heads=1, head_width=0, *, max_length=512, **rest):
        super().__init__()
        self.table = nn.Embedding(max_length, width)

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add the vectors of the positions."""
        last = self.table.num_embeddings
        known = not (at.is_meta or torch.compiler.is_compiling())
        in_doubt = known and at.numel() > 0 and max(range_of(at).last) >= last
        if in_doubt and (furthest := int(at.max())) >= last:
            raise UsageError(
                f"position {furthest} is past the {last} learned ones; "
                "shorten the input or train with a larger max_length"
            )
        return x + self.table(at[..., 0])
