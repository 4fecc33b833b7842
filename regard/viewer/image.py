"""What a model looks at in an image: maps of any layer laid on it, rollout, and first filters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.watch import Map, Maps
from regard.errors import UsageError
from regard.layers.heads import Attentive
from regard.layers.patches import Patches
from regard.layers.windows import Windows
from regard.models.denoiser import Around, Denoiser, DenoiserBlock
from regard.models.local import Local, LocalRelation
from regard.models.mvit import MViT, PooledBlock
from regard.models.resnet import GridAttention, ResNet
from regard.models.swin import Swin
from regard.models.vit import ViT
from regard.viewer.laid import name_of, on_grid, some
from regard.viewer.picture import Laid, Lattice, Picture, Spot, Tile, View

MOST_HELD = 150_000_000  # weights, of which each takes four bytes
MOST_ROLLED = 8_000_000  # numbers of one rollout
FINEST = 64  # cells to a side of a rollout
MOST_FILTERS = 256
NAMES = ("class", "teacher")  # of the tokens before a grid


class Layout(NamedTuple):
    """How one layer lies on an image: the tokens that each tile's queries and keys are."""

    rows: Lattice
    columns: Lattice
    asked: Tensor  # (tiles, q), of which -1 is none
    place: Tensor  # (tiles, k)
    near: Tensor | None = None  # (q, n), the keys that a query may see, if not all


# ---- how the layers of each family lie on an image --------------------------------------------


def _lattice(grid: tuple[int, int], step: float, size: tuple[int, int], names=()) -> Lattice:
    return Lattice(tuple(names), *grid, step / size[0], step / size[1])


def _full(rows: Lattice, columns: Lattice) -> Layout:
    asked, place = (torch.arange(len(side)).unsqueeze(0) for side in (rows, columns))
    return Layout(rows, columns, asked, place)


def _pooled(model: Any, last: Lattice) -> Iterator[tuple[str, Layout]]:
    """Give the attention that makes one vector of all, where a model has it."""
    if isinstance(model.pool, Attentive):
        yield "pool", _full(Lattice(("image",), 0, 0, 1.0, 1.0), last)


def _vit(model: ViT, size: tuple[int, int]) -> Iterator[tuple[str, Layout]]:
    names = NAMES[: model.config.tokens]
    whole = _lattice(model.grid(size), model.config.patch, size, names)
    for n in range(len(model.blocks)):
        yield f"blocks.{n}.attention", _full(whole, whole)
    yield from _pooled(model, whole)


def _swin(model: Swin, size: tuple[int, int]) -> Iterator[tuple[str, Layout]]:
    step = model.config.patch
    grid = -(-size[0] // step), -(-size[1] // step)
    whole = _lattice(grid, step, size)
    for n, stage in enumerate(model.stages):
        whole = _lattice(grid, step, size)
        for m, block in enumerate(cast(Sequence[Any], stage.blocks)):
            windows: Windows = block.attention
            place = windows.place(*grid)
            yield f"stages.{n}.blocks.{m}.attention.inside", Layout(whole, whole, place, place)
        grid, step = (-(-grid[0] // 2), -(-grid[1] // 2)), 2 * step
    yield from _pooled(model, whole)


def _mvit(model: MViT, size: tuple[int, int]) -> Iterator[tuple[str, Layout]]:
    names, step = NAMES[: model.config.tokens], model.config.stride
    grids = model.grids(size)
    for n, block in enumerate(cast(Sequence[PooledBlock], model.blocks)):
        rows, columns = grids[f"blocks.{n}.attention"]
        pools = block.attention.pool_q, block.attention.pool_k
        queries, keys = (step * getattr(pool, "stride", 1) for pool in pools)
        yield (
            f"blocks.{n}.attention",
            _full(_lattice(rows, queries, size, names), _lattice(columns, keys, size, names)),
        )
        step = queries


def _local(model: Local, size: tuple[int, int]) -> Iterator[tuple[str, Layout]]:
    step, last = 1, None
    for name, grid in model.grids(size).items():
        relation = cast(LocalRelation, model.get_submodule(name))
        columns = _lattice(grid, step, size)
        last = _lattice(relation.grid(grid), step * relation.stride, size)
        asked, place = relation.asked(*grid), relation.place(*grid)
        near = torch.stack([row.nonzero().squeeze(1) for row in relation.bias()[0].isfinite()])
        yield name, Layout(last, columns, asked, place, near)
        stem = name.startswith("stem.")
        step = 2**model.stem.halves if stem else step * relation.stride
    if last is not None:
        yield from _pooled(model, last)


def _resnet(model: ResNet, size: tuple[int, int]) -> Iterator[tuple[str, Layout]]:
    grid, step = size, 1
    for halves, stage in enumerate([None, *model.stages]):
        for _ in range(model.stem.halves if stage is None else min(1, halves - 1)):
            grid, step = (-(-grid[0] // 2), -(-grid[1] // 2)), 2 * step
        whole = _lattice(grid, step, size)
        for m, block in enumerate(() if stage is None else stage.children()):
            if isinstance(block, GridAttention):
                yield f"stages.{halves - 1}.{m}.block.attention", _full(whole, whole)


def _denoiser(model: Denoiser, size: tuple[int, int]) -> Iterator[tuple[str, Layout]]:
    grid = model.grid(size)
    whole = _lattice(grid, model.config.patch, size)
    for n, block in enumerate(cast(Sequence[DenoiserBlock], model.blocks)):
        if isinstance(block.around, Around):
            place = block.around.attention.place(*grid)
            yield f"blocks.{n}.around.attention.inside", Layout(whole, whole, place, place)


LAYOUTS: dict[type[nn.Module], Callable[..., Iterator[tuple[str, Layout]]]] = {
    ViT: _vit,
    Swin: _swin,
    MViT: _mvit,
    Local: _local,
    ResNet: _resnet,
    Denoiser: _denoiser,
}


def layouts(model: nn.Module, size: tuple[int, int]) -> dict[str, Layout]:
    """Return how each layer lies on an image of (height, width), by the name of its map."""
    found = {}
    for outer, module in model.named_modules():
        for name, layout in LAYOUTS.get(type(module), lambda *_: iter(()))(module, size):
            found[f"{outer}.{name}" if outer else name] = layout
    return found


# ---- maps -------------------------------------------------------------------------------------


def views_of(model: nn.Module, maps: Maps, size: tuple[int, int]) -> list[View]:
    """Lay what was watched of one image of (height, width) on it, layer by layer."""
    known = layouts(model, size)
    total = sum(int(np.prod(maps[name].shape)) for name in maps if name in known)
    if total > MOST_HELD:
        raise UsageError(
            f"{total:,} attention weights are too many to look at, {MOST_HELD:,} are held; "
            "choose a smaller image="
        )
    return [_view(maps[name], known[name]) for name in maps if name in known]


def _view(seen: Map, layout: Layout) -> View:
    tiles, heads, q, _ = seen.shape
    if (tiles, q) != layout.asked.shape:
        raise ValueError(f"{seen.name}: {tiles} x {q} queries, but {tuple(layout.asked.shape)}")
    weights = seen.weights().float().cpu()
    sees = layout.place.unsqueeze(1)
    if layout.near is not None:
        near = layout.near.expand(tiles, -1, -1)
        weights = weights.gather(3, near.unsqueeze(1).expand(-1, heads, -1, -1))
        sees = sees.expand(-1, q, -1).gather(2, near)
    asks, order = layout.asked.flatten().sort()
    order = order[asks >= 0]
    weights = weights.transpose(0, 1).flatten(1, 2)[:, order]
    alike = tiles == 1 and layout.near is None
    sees = layout.place if alike else sees.expand(-1, q, -1).flatten(0, 1)[order]
    laid = Laid(layout.rows, layout.columns, asks[asks >= 0].numpy(), sees.numpy())
    return make_view(seen.name.removesuffix(".inside"), weights.numpy(), laid)


def make_view(name: str, weights: np.ndarray, laid: Laid) -> View:
    """Make a view of weights (heads, rows, columns) that lie on an image."""
    rows = [name_of(laid.rows, token) for token in laid.asks.tolist()]
    columns = [""] * weights.shape[2]
    if len(laid.sees) == 1:
        columns = [name_of(laid.columns, token) for token in laid.sees[0].tolist()]
    return View(name, weights, rows, columns, laid=laid)


def lattice_of(encoder: Any, size: tuple[int, int]) -> Lattice:
    """Return how the features of an image of (height, width) lie on it."""
    far = 2**16  # over so many pixels a cell's size is known to the pixel
    step = round(far / encoder.grid((far, far))[0])
    names = NAMES[: getattr(encoder.config, "tokens", 0)]
    return _lattice(encoder.grid(size), step, size, names)


def word_views(
    encoder: Any, maps: Maps, size: tuple[int, int], words: Sequence[str], of: Sequence[int]
) -> list[View]:
    """Lay on an image where each word of a caption looked, by the layers that look at a memory.

    `of` says to which word each piece belongs; what its pieces looked at is taken as the mean.
    """
    columns = lattice_of(encoder, size)
    rows = Lattice(tuple(words), 0, 0, 1.0, 1.0)
    share = torch.zeros(len(words), len(of))
    share[torch.tensor(of), torch.arange(len(of))] = 1.0
    share = share / share.sum(1, keepdim=True)
    laid = Laid(rows, columns, np.arange(len(words)), np.arange(len(columns))[None])
    found = []
    for name in maps:
        if name.endswith(".cross"):
            weights = maps[name].weights(rows=slice(0, len(of)))[0].float().cpu()
            view = make_view(name, (share @ weights).numpy(), laid)
            found.append(replace(view, kind="cross"))
    if not found:
        raise UsageError("this model looks at no image while it writes; choose view=attention")
    return found


# ---- rollout ----------------------------------------------------------------------------------


def rollout(views: Sequence[View], spot: Spot = "class", name: str = "rollout") -> View:
    """Follow what the last of some layers looks at down to where the first began.

    Attention rollout (Abnar and Zuidema 2020): the product of (A + 1) / 2 over all layers, A the
    mean over heads. Where the grid changes between layers, a token is made of those under it.
    """
    laid = [cast(Laid, view.laid) for view in views]
    first, last = laid[0], laid[-1]
    below = [max(first.rows, first.columns, key=len), *(each.rows for each in laid[:-1])]
    asks = some(last.rows, MOST_ROLLED // max(map(len, below)), spot)
    found = torch.zeros(len(asks), len(last.rows))
    found[torch.arange(len(asks)), torch.from_numpy(asks)] = 1.0
    for view, each, source in zip(views[::-1], laid[::-1], below[::-1], strict=True):
        looked = _onto((_matrix(view).T @ found.T).T, each.columns, source)
        stays = each.rows.height * each.rows.width  # what only reads the others leaves nothing
        found = (looked + _onto(found, each.rows, source)) / 2 if stays else looked
    fine = below[0]
    every = -(-max(fine.height, fine.width) // FINEST)
    coarse = replace(
        fine,
        height=-(-fine.height // every),
        width=-(-fine.width // every),
        down=every * fine.down,
        right=every * fine.right,
    )
    weights = _onto(found, fine, coarse).unsqueeze(0).numpy()
    sees = np.arange(len(coarse))[None]
    view = make_view(name, weights, Laid(last.rows, coarse, asks, sees))
    return replace(view, kind="rollout", heads=("mean",))


def _matrix(view: View) -> Tensor:
    """Return the mean over heads from every token to every token, each row's sum 1."""
    laid = cast(Laid, view.laid)
    weights = torch.from_numpy(view.weights.mean(0))
    sees = torch.from_numpy(laid.sees)
    weights = weights * (sees >= 0)
    weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-30)
    shape = len(laid.rows), len(laid.columns)
    if len(sees) == 1 and torch.equal(sees[0], torch.arange(shape[1])):
        return weights
    sees = sees.expand_as(weights)
    rows = torch.from_numpy(laid.asks).unsqueeze(1).expand_as(sees)
    there = sees >= 0
    index = torch.stack([rows[there], sees[there]])
    return torch.sparse_coo_tensor(index, weights[there], shape, check_invariants=False)


def _onto(x: Tensor, lattice: Lattice, other: Lattice) -> Tensor:
    """Share what the tokens of a lattice have (n, tokens) among those of another under them."""
    if lattice == other:
        return x
    names = len(lattice.names)
    grid = x[:, names:].unflatten(1, (lattice.height, lattice.width))
    down = _shares(lattice.height, lattice.down, other.height, other.down)
    right = _shares(lattice.width, lattice.right, other.width, other.right)
    grid = (down.T @ grid @ right).flatten(1)
    return torch.cat([x[:, :names], grid], 1)


def _shares(cells: int, step: float, others: int, other: float) -> Tensor:
    """Return which share of each cell of a line lies on each cell of another, rows' sums 1."""
    start, begin = torch.arange(cells)[:, None] * step, torch.arange(others) * other
    both = torch.minimum(start + step, begin + other) - torch.maximum(start, begin)
    both = both.clamp(min=0).masked_fill(both < 1e-6 * min(step, other), 0.0)
    # a cell that stands beyond the other line belongs to its end
    both[both.sum(1) == 0, -1] = 1.0
    return both / both.sum(1, keepdim=True)


def rollouts(views: Sequence[View], spot: Spot = "class") -> list[View]:
    """Return the rollout up to each layer: how what one place knows of grows with depth."""
    return [rollout(views[: n + 1], spot, view.name) for n, view in enumerate(views)]


# ---- tiles ------------------------------------------------------------------------------------


def filters(model: nn.Module) -> list[Tile]:
    """Return what the first layer looks for, the strongest first: patches, or small kernels.

    A local relation has no filters but what it thinks of distances: the weights that these alone
    would give.
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
    order = strength.argsort(descending=True, stable=True)[:MOST_FILTERS].tolist()
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
    return [Tile(str(n), pixels) for n, pixels in enumerate(shown[:MOST_FILTERS])]


def as_bytes(images: Tensor) -> list[np.ndarray]:
    """Return images (n, c, h, w) of numbers from 0 to 1, or of bytes, as bytes (h, w[, 3])."""
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
    """
    sides = {"original": original, "masked": masked, "rebuilt": rebuilt}
    if not original.shape == masked.shape == rebuilt.shape or original.ndim != 4:
        shapes = ", ".join(f"{name} {tuple(side.shape)}" for name, side in sides.items())
        raise ValueError(f"{shapes}; expected three times (n, c, h, w)")
    rows = zip(*(as_bytes(side) for side in sides.values()), strict=True)
    tiles = [Tile(name, pixels) for row in rows for name, pixels in zip(sides, row, strict=True)]
    return Picture(title, tiles=tiles, across=len(sides), note=note)


# ---- pictures ---------------------------------------------------------------------------------


def _attention(model: nn.Module, maps: Maps, size: tuple[int, int], spot: Spot) -> Picture:
    views = views_of(model, maps, size)
    if not views:
        raise UsageError(
            "this model has no attention to look at; choose view=filters, or a family such as vit, "
            "swin, mvit, local or resnet_attention"
        )
    return Picture("", [*views, rollout(views, spot)], opens=clearest(views, spot))


def clearest(views: Sequence[View], spot: Spot) -> tuple[str, int | str]:
    """Return the layer and head that tell places apart most, as seen from a spot.

    That is the one furthest from looking everywhere alike: of least entropy, for its places.
    """

    def told(view: View) -> list[float]:
        cells = on_grid(view, spot).reshape(len(view.heads), -1).astype(np.float64)
        shares = cells / np.maximum(cells.sum(1, keepdims=True), 1e-30)
        entropy = -(shares * np.log(np.maximum(shares, 1e-30))).sum(1)
        return (1 - entropy / max(np.log(cells.shape[1]), 1e-9)).tolist()

    found = [(value, view, head) for view in views for head, value in enumerate(told(view))]
    _, view, head = max(found, key=lambda each: each[0])
    return view.name, view.heads[head]


def _rollout(model: nn.Module, maps: Maps, size: tuple[int, int], spot: Spot) -> Picture:
    views = _attention(model, maps, size, spot).views[:-1]
    return Picture("", rollouts(views, spot), opens=(views[-1].name, "mean"))


def _filters(model: nn.Module, maps: Maps, size: tuple[int, int], spot: Spot) -> Picture:
    return Picture("What the first layer looks for, the strongest first", tiles=filters(model))


# name -> what is seen of a model that was watched while it saw an image of (height, width)
VIEWS: dict[str, Callable[[nn.Module, Maps, tuple[int, int], Spot], Picture]] = {
    "attention": _attention,
    "rollout": _rollout,
    "filters": _filters,
}


def show(
    view: Callable[..., Picture],
    model: nn.Module,
    maps: Maps,
    size: tuple[int, int],
    photo: np.ndarray,
    spot: Spot,
    **told: Any,
) -> Picture:
    """Make a picture of what was watched, with the photo and what else there is to tell."""
    picture = view(model, maps, size, spot)
    return picture if picture.tiles else replace(picture, photo=photo, spot=spot, **told)
