"""Attention over an image: the maps of any layer placed on it, rollout, and first filters."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.watch import Map, Maps
from regard.errors import UsageError
from regard.layers.layout import Layout, TokenGrid, token_grid
from regard.layers.patches import Patches
from regard.models.local import LocalRelation
from regard.models.protocols import LaidOut
from regard.viewer.picture import Picture, Placement, QueryPoint, Tile, View
from regard.viewer.placement import (
    grid_weights,
    placement_of,
    sample_tokens,
    token_at,
    token_name,
)
from regard.viewer.rollout import MAX_FLOW_TOKENS, maximum_flow

_MAX_WEIGHTS = 150_000_000  # of all layers; each takes four bytes
_MAX_ROLLOUT = 8_000_000  # numbers of one rollout
_MAX_ROLLOUT_SIDE = 64  # cells
_MAX_FILTERS = 256


def layouts(model: nn.Module, size: tuple[int, int]) -> dict[str, Layout]:
    """Layout of each layer over an image of (height, width), by the name of its map."""
    return {
        f"{outer}.{name}" if outer else name: layout
        for outer, module in model.named_modules()
        if isinstance(module, LaidOut) and callable(module.layout)  # a position names its own
        for name, layout in module.layout(size).items()
    }


# ---- maps -------------------------------------------------------------------------------------


def image_views(model: nn.Module, maps: Maps, size: tuple[int, int]) -> list[View]:
    """Place what was watched of one image of (height, width) on it, layer by layer."""
    known = layouts(model, size)
    total = sum(int(np.prod(maps[name].shape)) for name in maps if name in known)
    if total > _MAX_WEIGHTS:
        raise UsageError(
            f"{total:,} attention weights are too many to look at, {_MAX_WEIGHTS:,} are held; "
            "choose a smaller image="
        )
    return [_placed(maps[name], known[name]) for name in maps if name in known]


def _placed(seen: Map, layout: Layout) -> View:
    """Put the queries of all tiles in the order of their tokens, without padding."""
    tiles, heads, q, _ = seen.shape
    if (tiles, q) != layout.query_tokens.shape:
        shape = tuple(layout.query_tokens.shape)
        raise ValueError(f"{seen.name}: {tiles} x {q} queries, but {shape}")
    weights = seen.weights().float().cpu()
    keys = layout.key_tokens.unsqueeze(1)
    if layout.near is not None:
        near = layout.near.expand(tiles, -1, -1)
        weights = weights.gather(3, near.unsqueeze(1).expand(-1, heads, -1, -1))
        keys = keys.expand(-1, q, -1).gather(2, near)
    queries, order = layout.query_tokens.flatten().sort()
    order = order[queries >= 0]
    weights = weights.transpose(0, 1).flatten(1, 2)[:, order]
    alike = tiles == 1 and layout.near is None
    keys = layout.key_tokens if alike else keys.expand(-1, q, -1).flatten(0, 1)[order]
    tokens = queries[queries >= 0].numpy()
    placement = Placement(layout.query_grid, layout.key_grid, tokens, keys.numpy())
    return placed_view(seen.name.removesuffix(".inside"), weights.numpy(), placement)


def placed_view(name: str, weights: np.ndarray, placement: Placement, **more: Any) -> View:
    """Make a view of weights (heads, rows, columns) that stand on an image."""
    rows = [token_name(placement.query_grid, token) for token in placement.query_tokens.tolist()]
    columns = [""] * weights.shape[2]
    if len(placement.key_tokens) == 1:
        tokens = placement.key_tokens[0].tolist()
        columns = [token_name(placement.key_grid, token) for token in tokens]
    return View(name, weights, rows, columns, placement=placement, **more)


def feature_grid(encoder: Any, size: tuple[int, int]) -> TokenGrid:
    """Grid of an encoder's features of an image of (height, width)."""
    far = 2**16  # over so many pixels a cell's size is known to the pixel
    step = round(far / encoder.grid((far, far))[0])
    return token_grid(encoder.grid(size), step, size, getattr(encoder.config, "tokens", 0))


def caption_views(
    encoder: Any, maps: Maps, size: tuple[int, int], words: Sequence[str], word_of: Sequence[int]
) -> list[View]:
    """Place on an image what each word of a caption attends to, by the layers of cross-attention.

    Args:
        encoder: image encoder
        maps: attention that was watched
        size: height and width of the image
        words: words of the caption
        word_of: word of each token; a word's attention is the mean of its tokens'
    """
    return word_views(maps, feature_grid(encoder, size), words, word_of)


def word_views(
    maps: Maps, key_grid: TokenGrid, words: Sequence[str], word_of: Sequence[int], first: int = 0
) -> list[View]:
    """Place what each word attends to on a grid of keys, by the layers of cross-attention.

    Args:
        maps: attention that was watched
        key_grid: grid of the keys
        words: words that were written
        word_of: word of each token
        first: step at which the words begin
    """
    query_grid = TokenGrid(tuple(words), 0, 0, 1.0, 1.0)
    share = torch.zeros(len(words), len(word_of))
    share[torch.tensor(word_of), torch.arange(len(word_of))] = 1.0
    share = share / share.sum(1, keepdim=True)
    keys = np.arange(len(key_grid))[None]
    placement = Placement(query_grid, key_grid, np.arange(len(words)), keys)
    views = []
    for name in maps:
        if name.endswith(".cross"):
            weights = maps[name].weights(rows=slice(first, first + len(word_of)))[0].float().cpu()
            weights = weights[..., : len(key_grid)]  # what comes after it is padding
            views.append(placed_view(name, (share @ weights).numpy(), placement, kind="cross"))
    if not views:
        raise UsageError("this model has no cross-attention to look at; choose view=attention")
    return views


# ---- rollout ----------------------------------------------------------------------------------


def rollout(views: Sequence[View], query: QueryPoint = "class", name: str = "rollout") -> View:
    """Follow the attention of the last of some layers down to the input of the first.

    Attention rollout (Abnar and Zuidema 2020): the product of (A + 1) / 2 over all layers, A the
    mean over heads. Where the grid changes between layers, a token is made of those under it.
    """
    places = [placement_of(view) for view in views]
    first, last = places[0], places[-1].query_grid
    below = [max(first.query_grid, first.key_grid, key=len)]
    below += [place.query_grid for place in places[:-1]]
    tokens = sample_tokens(last, _MAX_ROLLOUT // max(map(len, below)), query)
    rolled = torch.zeros(len(tokens), len(last))
    rolled[torch.arange(len(tokens)), torch.from_numpy(tokens)] = 1.0
    for view, place, source in zip(views[::-1], places[::-1], below[::-1], strict=True):
        attended = resample((_mean_attention(view).T @ rolled.T).T, place.key_grid, source)
        skips = place.query_grid.height * place.query_grid.width  # a pooling query has no residual
        kept = resample(rolled, place.query_grid, source) if skips else attended
        rolled = (attended + kept) / 2
    fine = below[0]
    step = -(-max(fine.height, fine.width) // _MAX_ROLLOUT_SIDE)
    down = max(1, min(step, fine.height))
    coarse = replace(
        fine,
        height=-(-fine.height // down),
        width=-(-fine.width // step),
        cell_height=down * fine.cell_height,
        cell_width=step * fine.cell_width,
        seconds=step * fine.seconds,
    )
    weights = resample(rolled, fine, coarse).unsqueeze(0).numpy()
    placement = Placement(last, coarse, tokens, np.arange(len(coarse))[None])
    return placed_view(name, weights, placement, kind="rollout", heads=("mean",))


def _mean_attention(view: View) -> Tensor:
    """Mean over heads from every token to every token, each row's sum 1."""
    placement = placement_of(view)
    weights = torch.from_numpy(view.weights.mean(0))
    keys = torch.from_numpy(placement.key_tokens)
    weights = weights * (keys >= 0)
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-30)
    shape = len(placement.query_grid), len(placement.key_grid)
    if len(keys) == 1 and torch.equal(keys[0], torch.arange(shape[1])):
        return weights
    keys = keys.expand_as(weights)
    queries = torch.from_numpy(placement.query_tokens).unsqueeze(1).expand_as(keys)
    inside = keys >= 0
    index = torch.stack([queries[inside], keys[inside]])
    return torch.sparse_coo_tensor(index, weights[inside], shape, check_invariants=False)


def resample(x: Tensor, grid: TokenGrid, other: TokenGrid) -> Tensor:
    """Share what the tokens of a grid have (n, tokens) among those of another under them."""
    if grid == other:
        return x
    names = len(grid.names)
    cells = x[:, names:].unflatten(1, (grid.height, grid.width))
    down = _overlap(grid.height, grid.cell_height, other.height, other.cell_height)
    right = _overlap(grid.width, grid.cell_width, other.width, other.cell_width)
    return torch.cat([x[:, :names], (down.T @ cells @ right).flatten(1)], 1)


def _overlap(cells: int, step: float, others: int, other: float) -> Tensor:
    """Share of each cell of a line that lies on each cell of another; rows sum to 1."""
    start, begin = torch.arange(cells)[:, None] * step, torch.arange(others) * other
    both = torch.minimum(start + step, begin + other) - torch.maximum(start, begin)
    both = both.clamp(min=0).masked_fill(both < 1e-6 * min(step, other), 0.0)
    # a cell that stands beyond the other line belongs to its end
    both[both.sum(1) == 0, -1] = 1.0
    return both / both.sum(1, keepdim=True)


def rollouts(views: Sequence[View], query: QueryPoint = "class") -> list[View]:
    """Rollout up to each layer: how the receptive field of a query grows with depth."""
    return [rollout(views[: n + 1], query, view.name) for n, view in enumerate(views)]


def flow(views: Sequence[View], query: QueryPoint = "class") -> View:
    """Attention flow (Abnar and Zuidema 2020) from a query down to the input.

    All layers stand on one grid, but for a pooling at the end.
    """
    grid = placement_of(views[0]).key_grid
    whole = [view for view in views if placement_of(view).query_grid == grid]
    *stack, last = [placement_of(view) for view in views]
    pooled = len(last.query_grid) == 1 and last.key_grid == grid
    if len(whole) + pooled != len(views) or any(each.key_grid != grid for each in stack):
        raise UsageError(
            "view=flow is of layers on one grid, which this model's are not; choose view=rollout"
        )
    size = len(grid)
    if size > MAX_FLOW_TOKENS:
        raise UsageError(
            f"view=flow of {size} tokens; at most {MAX_FLOW_TOKENS} are followed, "
            "choose view=rollout"
        )
    passed = [(np.eye(size) + _dense(view)) / 2 for view in whole]
    token = token_at(grid, query)
    top = np.zeros((size, size))
    if pooled:
        top[0] = _dense(views[-1])[0]
    elif token is None:
        top[0] = 1 / size
    else:
        top[0, token] = 1.0
    flows = [maximum_flow([*passed, top], 0, token) for token in range(size)]
    asks = TokenGrid(("query",), 0, 0, 1.0, 1.0)
    placement = Placement(asks, grid, np.arange(1), np.arange(size)[None])
    weights = np.array(flows, np.float32)[None, None]
    return placed_view("flow", weights, placement, kind="rollout", heads=("flow",))


def _dense(view: View) -> np.ndarray:
    attention = _mean_attention(view)
    return (attention.to_dense() if attention.is_sparse else attention).double().numpy()


# ---- tiles ------------------------------------------------------------------------------------


def filters(model: nn.Module) -> list[Tile]:
    """Filters of the first layer, the strongest first: patches, or small kernels.

    A local relation has none but its prior of distances: the weights that this alone would give.
    """
    for module in model.modules():
        if isinstance(module, Patches):
            shape = -1, module.channels, module.patch, module.patch
            return _filter_tiles(module.project.weight.detach().float().view(shape))
        if isinstance(module, nn.Conv2d) and module.kernel_size != (1, 1) and module.groups == 1:
            return _filter_tiles(module.weight.detach().float())
        if isinstance(module, LocalRelation):
            return _kernel_tiles(module)
    raise UsageError("this model has no filters to look at; choose view=attention or view=rollout")


def _filter_tiles(weight: Tensor) -> list[Tile]:
    weight = weight if weight.shape[1] == 3 else weight.mean(1, keepdim=True)
    strength = weight.flatten(1).norm(dim=1)
    order = strength.argsort(descending=True, stable=True)[:_MAX_FILTERS].tolist()
    most = weight.flatten(1).abs().amax(1).clamp(min=1e-30)
    shown = as_bytes(0.5 + 0.5 * weight / most[:, None, None, None])
    return [Tile(str(n), shown[n]) for n in order]


def _kernel_tiles(relation: LocalRelation) -> list[Tile]:
    window = relation.window
    with torch.no_grad():
        middle = relation.bias()[:, 0]  # of which a query sees its window and no more
    kernels = middle[middle.isfinite()].view(len(middle), window, window).flatten(1).softmax(1)
    kernels = kernels / kernels.amax(1, keepdim=True)
    shown = as_bytes(kernels.view(-1, 1, window, window))
    return [Tile(str(n), pixels) for n, pixels in enumerate(shown[:_MAX_FILTERS])]


def as_bytes(images: Tensor) -> list[np.ndarray]:
    """Images (n, c, h, w) of numbers from 0 to 1, or of bytes, as bytes (h, w[, 3])."""
    if images.dtype != torch.uint8:
        images = (255 * images.detach().float().nan_to_num()).round().clamp(0, 255)
    pixels = images.to("cpu", torch.uint8).permute(0, 2, 3, 1).numpy()
    if pixels.shape[3] not in (1, 3):
        raise ValueError(f"{pixels.shape[3]} channels; expected 1 for grey or 3 for colour")
    return [each[..., 0] if each.shape[2] == 1 else each for each in pixels]


def reconstruction(
    original: Tensor, masked: Tensor, rebuilt: Tensor, title: str = "reconstruction", note: str = ""
) -> Picture:
    """Put images (n, c, h, w) beside what was left of them and what a model made of that.

    Numbers are from 0 to 1, or bytes. Look(...) shows the picture and saves it.

    Args:
        original: images (n, c, h, w)
        masked: what was left of them
        rebuilt: what the model made of that
        title: title of the picture
        note: line below it
    """
    sides = {"original": original, "masked": masked, "rebuilt": rebuilt}
    if not original.shape == masked.shape == rebuilt.shape or original.ndim != 4:
        shapes = ", ".join(f"{name} {tuple(side.shape)}" for name, side in sides.items())
        raise ValueError(f"{shapes}; expected three times (n, c, h, w)")
    rows = zip(*(as_bytes(side) for side in sides.values()), strict=True)
    tiles = [Tile(name, pixels) for row in rows for name, pixels in zip(sides, row, strict=True)]
    return Picture(title, tiles=tiles, tiles_per_row=len(sides), note=note)


# ---- pictures ---------------------------------------------------------------------------------


def _attention(model: nn.Module, maps: Maps, size: tuple[int, int], query: QueryPoint) -> Picture:
    views = image_views(model, maps, size)
    if not views:
        raise UsageError(
            "this model has no attention to look at; choose view=filters, or a family such as vit, "
            "swin, mvit, local or resnet_attention"
        )
    return Picture("", [*views, rollout(views, query)], opens=lowest_entropy_head(views, query))


def lowest_entropy_head(views: Sequence[View], query: QueryPoint) -> tuple[str, int | str]:
    """Layer and head whose attention from a query point is furthest from uniform.

    That is the one of least entropy, as a share of the most there can be over its grid.
    """
    best, least = (views[0].name, views[0].heads[0]), np.inf
    for view in views:
        cells = grid_weights(view, query).reshape(len(view.heads), -1).astype(np.float64)
        shares = cells / np.maximum(cells.sum(1, keepdims=True), 1e-30)
        entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum(1)
        entropy /= max(np.log(cells.shape[1]), 1e-9)
        if entropy.min() < least:
            best, least = (view.name, view.heads[int(entropy.argmin())]), entropy.min()
    return best


def _rollout(model: nn.Module, maps: Maps, size: tuple[int, int], query: QueryPoint) -> Picture:
    views = _attention(model, maps, size, query).views[:-1]
    return Picture("", rollouts(views, query), opens=(views[-1].name, "mean"))


def _flow(model: nn.Module, maps: Maps, size: tuple[int, int], query: QueryPoint) -> Picture:
    views = _attention(model, maps, size, query).views[:-1]
    return Picture("", [flow(views, query)], opens=("flow", "flow"))


def _filters(model: nn.Module, maps: Maps, size: tuple[int, int], query: QueryPoint) -> Picture:
    return Picture("What the first layer looks for, the strongest first", tiles=filters(model))


# name -> what is drawn of a model that was watched while it read an image of (height, width)
VIEWS: dict[str, Callable[[nn.Module, Maps, tuple[int, int], QueryPoint], Picture]] = {
    "attention": _attention,
    "rollout": _rollout,
    "flow": _flow,
    "filters": _filters,
}


def image_picture(
    view: Callable[..., Picture],
    model: nn.Module,
    maps: Maps,
    size: tuple[int, int],
    photo: np.ndarray,
    query: QueryPoint,
    **about: Any,
) -> Picture:
    """Make a picture of what was watched: one of VIEWS over a photo, with its title and output.

    Args:
        view: one of VIEWS
        model: model that was watched
        maps: attention that was watched
        size: height and width that the model read
        photo: pixels to draw on
        query: point or token that attends
        about: further fields of the picture
    """
    picture = view(model, maps, size, query)
    return picture if picture.tiles else replace(picture, photo=photo, query=query, **about)
