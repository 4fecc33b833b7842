"""Where attention stands on an image: the query at a point, and the weight of each key there."""

import math
import re
from dataclasses import replace

import numpy as np

from regard.errors import UsageError
from regard.layers.layout import TokenGrid
from regard.viewer.picture import Placement, QueryPoint, View


def parse_query_point(
    at: str, size: tuple[int, int], crop: tuple[float, float, float, float]
) -> QueryPoint:
    """Read at=: class, mean, or a pixel x,y of a photo of `size` (width, height).

    The model sees `crop` (left, top, right, bottom) of the photo, on which the point is from 0
    to 1.
    """
    word = at.strip().lower()
    if word == "class" or word == "mean":
        return word
    pixel = re.fullmatch(r"(\d{1,6})\s*[,x ]\s*(\d{1,6})", word)
    if pixel is None:
        raise UsageError(f"at={at:.40}; expected class, mean, or a pixel such as at=120,80")
    x, y = int(pixel[1]), int(pixel[2])
    left, top, right, bottom = crop
    if x >= size[0] or y >= size[1]:
        raise UsageError(
            f"at={at} is outside of the photo; its pixels are 0,0 to {size[0] - 1},{size[1] - 1}"
        )
    point = (x + 0.5 - left) / (right - left), (y + 0.5 - top) / (bottom - top)
    if not all(0 <= share < 1 for share in point):
        raise UsageError(
            f"at={at} is not seen by the model, which takes {math.ceil(left)},{math.ceil(top)} to "
            f"{math.ceil(right) - 1},{math.ceil(bottom) - 1} of the photo; choose a pixel in there"
        )
    return point


def placement_of(view: View) -> Placement:
    """Placement of a view that stands on an image."""
    assert view.placement is not None, f"{view.name} stands on no image"
    return view.placement


def token_at(grid: TokenGrid, query: QueryPoint) -> int | None:
    """Token at a query point; None is all of them."""
    names, cells = len(grid.names), grid.height * grid.width
    if query == "mean" or (query == "class" and not names):
        return None
    if isinstance(query, int):
        return query
    if query == "class" or not cells:
        return 0
    x, y = query
    row = min(grid.height - 1, max(0, int(y / grid.cell_height)))
    column = min(grid.width - 1, max(0, int(x / grid.cell_width)))
    return names + row * grid.width + column


def cell_of(grid: TokenGrid, token: int) -> tuple[int, int] | None:
    """Row and the column of a token, if it stands on the grid."""
    cell = token - len(grid.names)
    return divmod(cell, grid.width) if cell >= 0 else None


def token_name(grid: TokenGrid, token: int) -> str:
    """Name a token: as it is called, by the time it begins at, or by its column and row."""
    cell = cell_of(grid, token)
    if cell is None:
        return grid.names[token]
    return f"{cell[1] * grid.seconds:.2f} s" if grid.seconds else f"{cell[1]}, {cell[0]}"


def query_row(placement: Placement, query: QueryPoint) -> int | None:
    """Row of a view whose query is at a point, or nearest to it; None is all rows."""
    grid, tokens = placement.query_grid, placement.query_tokens
    token = token_at(grid, query)
    if token is None:
        return None
    (rows,) = np.nonzero(tokens == token)
    if len(rows):
        return int(rows[0])
    cell = cell_of(grid, token)
    assert cell is not None  # named tokens are always kept
    cells = tokens - len(grid.names)
    distance = np.hypot(cells // grid.width - cell[0], cells % grid.width - cell[1])
    return int(np.where(cells < 0, np.inf, distance).argmin())


def token_weights(view: View, query: QueryPoint) -> np.ndarray:
    """Attention of a query point to each token of an image, (heads, tokens)."""
    placement = placement_of(view)
    row, keys = query_row(placement, query), placement.key_tokens
    heads, rows, _ = view.weights.shape
    weights = view.weights if row is None else view.weights[:, row : row + 1]
    if len(keys) == 1:
        weights = weights.mean(1, keepdims=True)
    else:
        weights = weights / (rows if row is None else 1)
        keys = keys if row is None else keys[row : row + 1]
    inside, count = keys >= 0, len(placement.key_grid)
    tokens = keys[inside]
    return np.stack([np.bincount(tokens, weights[h][inside], count)[:count] for h in range(heads)])


def grid_weights(view: View, query: QueryPoint) -> np.ndarray:
    """Attention of a query point to each cell of the grid, (heads, height, width)."""
    grid = placement_of(view).key_grid
    return token_weights(view, query)[:, len(grid.names) :].reshape(-1, grid.height, grid.width)


def sample_tokens(grid: TokenGrid, count: int, query: QueryPoint) -> np.ndarray:
    """Choose about `count` tokens evenly over a grid, with all named ones and the query's."""
    step = 1
    while -(-grid.height // step) * -(-grid.width // step) > max(1, count):
        step += 1
    rows, columns = (np.arange(min(step, n) // 2, n, step) for n in (grid.height, grid.width))
    cells = (rows[:, None] * grid.width + columns).ravel() + len(grid.names)
    token = token_at(grid, query)
    always = [*range(len(grid.names)), *([] if token is None else [token])]
    return np.unique(np.concatenate([always, cells]).astype(int))


def subsample_queries(view: View, max_weights: int, query: QueryPoint) -> View:
    """Keep the queries of some points of an image, so that few enough weights are left."""
    placement = view.placement
    if placement is None or view.weights.size <= max_weights:
        return view
    heads, _, columns = view.weights.shape
    kept = sample_tokens(placement.query_grid, max_weights // (heads * columns), query)
    (rows,) = np.nonzero(np.isin(placement.query_tokens, kept))
    keys = placement.key_tokens
    return replace(
        view,
        weights=view.weights[:, rows],
        row_tokens=[view.row_tokens[row] for row in rows.tolist()],
        placement=replace(
            placement,
            query_tokens=placement.query_tokens[rows],
            key_tokens=keys if len(keys) == 1 else keys[rows],
        ),
    )
