"""How the attention of a layer is laid over an image, or over the spectrogram of a sound."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

_LEADING_TOKENS = ("class", "teacher")  # the names of the tokens before a grid


@dataclass(frozen=True)
class TokenGrid:
    """The tokens of an image: named ones such as the class token, then a grid row by row.

    `cell_height` and `cell_width` are those of a cell of the grid, as shares of the image's; a
    column of a spectrogram lasts `seconds`.
    """

    names: tuple[str, ...]
    height: int
    width: int
    cell_height: float
    cell_width: float
    seconds: float = 0.0

    def __len__(self) -> int:
        return len(self.names) + self.height * self.width


class Layout(NamedTuple):
    """The tokens that the queries and keys of each tile (a window, or the whole grid) are.

    -1 is padding. `near` holds the keys that each query may attend to, if not all of its tile.
    """

    query_grid: TokenGrid
    key_grid: TokenGrid
    query_tokens: Int[Tensor, "tiles q"]
    key_tokens: Int[Tensor, "tiles k"]
    near: Int[Tensor, "q n"] | None = None


def token_grid(
    grid: tuple[int, int], stride: float, size: tuple[int, int], tokens: int = 0
) -> TokenGrid:
    """Grid of cells of `stride` pixels over an image of (height, width)."""
    return TokenGrid(_LEADING_TOKENS[:tokens], *grid, stride / size[0], stride / size[1])


def time_grid(columns: int, stride: int, frames: int) -> TokenGrid:
    """Columns of `stride` frames over a spectrogram of so many frames."""
    return TokenGrid((), 1, columns, 1.0, stride / frames)


def full_layout(queries: TokenGrid, keys: TokenGrid) -> Layout:
    """Lay out a layer in which every query attends to every key."""
    query_tokens, key_tokens = (torch.arange(len(grid)).unsqueeze(0) for grid in (queries, keys))
    return Layout(queries, keys, query_tokens, key_tokens)


def pool_layout(keys: TokenGrid) -> Layout:
    """Lay out attention pooling: one query that stands for the image attends to every key."""
    return full_layout(TokenGrid(("image",), 0, 0, 1.0, 1.0), keys)


def halve(grid: tuple[int, int]) -> tuple[int, int]:
    """Grid half as high and half as wide, rounded up."""
    return -(-grid[0] // 2), -(-grid[1] // 2)
