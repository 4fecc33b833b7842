"""Positions on a grid: learned, or computed of both coordinates."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.places import range_of
from regard.attention.positions import POSITION_ALIASES, Position, build_position
from regard.errors import UsageError, lookup


class GridPosition(Position):
    """A learned embedding for each place of a grid and for each token before it.

    Over a grid of another size it is resized by bicubic interpolation.
    """

    def __init__(self, width: int, grid: tuple[int, int], tokens: int):
        super().__init__()
        self.grid, self.tokens = grid, tokens
        self.table = nn.Embedding(tokens + grid[0] * grid[1], width)

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add the embeddings of a whole grid, whose last place is furthest on both axes."""
        # without numbers only how many there are can matter
        if torch.compiler.is_exporting() and len(at) == self.table.num_embeddings:
            return x + self.table.weight
        last = (len(at) - self.tokens - 1, 0) if at.is_meta else range_of(at).last
        return x + self.over((last[0] + 1, last[1] + 1))

    def over(self, grid: tuple[int, int]) -> Tensor:
        """Embeddings of the tokens and of a grid's places row by row, (l, w)."""
        table = self.table.weight
        if grid == self.grid:
            return table
        places = table[self.tokens :].unflatten(0, self.grid).permute(2, 0, 1).unsqueeze(0)
        places = F.interpolate(places, size=grid, mode="bicubic", align_corners=False)
        return torch.cat([table[: self.tokens], places[0].flatten(1).T])


# what can be computed of several coordinates, each of which has an even part of the width
COMPUTED = ("sinusoidal", "rotary", "none")


def build_grid_position(
    name: str, width: int, heads: int, head_width: int, base: float = 10_000.0, axes: int = 2
) -> Position:
    """Make a position that is computed of the coordinates of a grid, of which there are `axes`.

    Args:
        name: key of the positions of a grid
        width: width of the embeddings
        heads: attention heads
        head_width: width of a head
        base: base of the sinusoids or rotations
        axes: coordinates of a token
    """
    short = POSITION_ALIASES.get(name, name)
    lookup("position", short, dict.fromkeys(COMPUTED))
    part = 2 * axes
    if (short == "sinusoidal" and width % part) or (short == "rotary" and head_width % part):
        raise UsageError(
            f"position={name} on a grid needs a width, {width}, and a head_width, {head_width}, "
            f"that {part} divides"
        )
    return build_position(short, width, heads, head_width, base=base)
