"""The tokens of one input: their names, and which of them each key of an attention is."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import UsageError
from regard.layers.layout import Layout, TokenGrid

# the token (tiles, k) that each key of an attention is, by its name and number of keys; None where
# its keys are none of these tokens, -1 for a single such key
Keys = Callable[[str, int], Tensor | None]


class InputTokens(NamedTuple):
    """Tokens of an input that can be cut, and where they stand."""

    tokens: Sequence[str]
    keys: Keys
    grid: TokenGrid | None = None  # on which they stand, of an image or a sound
    reads: Sequence[int] | None = None  # those that the answer is read from, all unless given
    size: int = 1  # tokens that a model reads of one copy, if more than those of the input


def text_keys(count: int) -> Keys:
    """Return which token each key is where a model reads one text of so many tokens."""
    return lambda name, keys: torch.arange(count)[None] if keys == count else None


def window_keys(columns: int, step: int) -> Keys:
    """Return which cell of so many columns each key is, where an input is the start of a window.

    What comes after the input is none of them.
    """

    def of(name: str, keys: int) -> Tensor | None:
        if keys < columns or not (name.startswith("encoder") or name.endswith("cross")):
            return None
        places = torch.arange(keys)
        return torch.where(places < columns, places // step, -1)[None]

    return of


def grid_keys(layouts: Mapping[str, Layout]) -> tuple[TokenGrid, Keys]:
    """Return the coarsest grid of some layers, and in which of its cells each key stands.

    Where a layer's grid is finer, all keys in a cell are one token of the input.
    """
    grids = [each.key_grid for each in layouts.values() if each.key_grid.height]
    if not grids:
        raise UsageError("this model attends to no places of its input, so none can be cut")
    coarse = min(grids, key=lambda grid: grid.height * grid.width)
    found = {
        name: cells_of(each.key_grid, coarse)[each.key_tokens] for name, each in layouts.items()
    }
    for name, each in layouts.items():
        found[name][each.key_tokens < 0] = -1  # padding
    return coarse, lambda name, keys: found.get(name)


def cells_of(grid: TokenGrid, coarse: TokenGrid) -> Tensor:
    """Return which cell of a coarse grid each token of a grid stands in; -1 for names."""

    def line(count: int, step: float, others: int, other: float) -> Tensor:
        return ((torch.arange(count) + 0.5) * step / other).long().clamp(max=others - 1)

    rows = line(grid.height, grid.cell_height, coarse.height, coarse.cell_height)
    columns = line(grid.width, grid.cell_width, coarse.width, coarse.cell_width)
    cells = (rows[:, None] * coarse.width + columns).flatten()
    return torch.cat([torch.full((len(grid.names),), -1), cells])
