"""Attention laid on an image: which row asks from a place, and where on the image it looks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from regard.viewer.picture import Laid, Lattice, Spot, View


def token_at(lattice: Lattice, spot: Spot) -> int | None:
    """Return the token that stands at a spot; None is all of them."""
    names, cells = len(lattice.names), lattice.height * lattice.width
    if spot == "mean" or (spot == "class" and not names):
        return None
    if isinstance(spot, int):
        return spot
    if spot == "class" or not cells:
        return 0
    x, y = spot
    row = min(lattice.height - 1, max(0, int(y / lattice.down)))
    column = min(lattice.width - 1, max(0, int(x / lattice.right)))
    return names + row * lattice.width + column


def cell_of(lattice: Lattice, token: int) -> tuple[int, int] | None:
    """Return the row and the column of a token, if it stands on the grid."""
    place = token - len(lattice.names)
    return divmod(place, lattice.width) if place >= 0 else None


def name_of(lattice: Lattice, token: int) -> str:
    """Name a token: as it is called, or by its column and row."""
    cell = cell_of(lattice, token)
    return lattice.names[token] if cell is None else f"{cell[1]}, {cell[0]}"


def row_at(laid: Laid, spot: Spot) -> int | None:
    """Return the row that asks from a spot, or from the nearest place; None is all of them."""
    token = token_at(laid.rows, spot)
    if token is None:
        return None
    (found,) = np.nonzero(laid.asks == token)
    if len(found):
        return int(found[0])
    cell = cell_of(laid.rows, token)
    assert cell is not None  # named tokens are always kept
    place = laid.asks - len(laid.rows.names)
    far = np.hypot(place // laid.rows.width - cell[0], place % laid.rows.width - cell[1])
    return int(np.where(place < 0, np.inf, far).argmin())


def lay(view: View, spot: Spot) -> np.ndarray:
    """Return how much each token of an image is looked at from a spot, (heads, tokens)."""
    laid = view.laid
    assert laid is not None
    row = row_at(laid, spot)
    heads, rows, _ = view.weights.shape
    weights = view.weights if row is None else view.weights[:, row : row + 1]
    if laid.sees.shape[0] == 1:
        weights, sees = weights.mean(1, keepdims=True), laid.sees
    else:
        weights = weights / (rows if row is None else 1)
        sees = laid.sees if row is None else laid.sees[row : row + 1]
    there = sees >= 0
    where, count = sees[there], len(laid.columns)
    return np.stack([np.bincount(where, weights[h][there], count)[:count] for h in range(heads)])


def on_grid(view: View, spot: Spot) -> np.ndarray:
    """Return how much each cell of an image's grid is looked at, (heads, height, width)."""
    assert view.laid is not None
    columns = view.laid.columns
    found = lay(view, spot)[:, len(columns.names) :]
    return found.reshape(-1, columns.height, columns.width)


def some(lattice: Lattice, most: int, spot: Spot) -> np.ndarray:
    """Choose at most so many tokens, evenly over the grid, with those that are always wanted."""
    every = 1
    while -(-lattice.height // every) * -(-lattice.width // every) > max(1, most):
        every += 1
    rows, columns = (
        np.arange(min(every, n) // 2, n, every) for n in (lattice.height, lattice.width)
    )
    grid = (rows[:, None] * lattice.width + columns).ravel() + len(lattice.names)
    token = token_at(lattice, spot)
    asked = [] if token is None else [token]
    return np.unique(np.concatenate([np.arange(len(lattice.names)), grid, asked]).astype(int))


def thin(view: View, most: int, spot: Spot) -> View:
    """Keep the rows of a view that ask from some places, so that few enough weights are left."""
    laid = view.laid
    if laid is None or view.weights.size <= most:
        return view
    heads, _, columns = view.weights.shape
    (rows,) = np.nonzero(np.isin(laid.asks, some(laid.rows, most // (heads * columns), spot)))
    sees = laid.sees if laid.sees.shape[0] == 1 else laid.sees[rows]
    return replace(
        view,
        weights=view.weights[:, rows],
        row_tokens=[view.row_tokens[row] for row in rows.tolist()],
        laid=replace(laid, asks=laid.asks[rows], sees=sees),
    )
