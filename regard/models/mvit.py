"""Multiscale Vision Transformers, whose attention pools queries, keys and values: MViT, MViTv2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.dropout import add_dropped, dropout
from regard.attention.scores import build_score
from regard.errors import UsageError, lookup
from regard.layers.block import BlockConfig, build_feed_forward, build_norm, prob_field, size_field
from regard.layers.grid import GridPosition
from regard.layers.heads import FirstTokens, GridMean
from regard.layers.init import INITS
from regard.layers.layout import Layout, full_layout, token_grid
from regard.layers.patches import Patches
from regard.layers.residual import drop_path, drop_path_schedule
from regard.layers.shapes import Images, Size, Vectors
from regard.models.declaration import FamilyInfo, size_table
from regard.models.vision import VISION_TASKS, VisionModel, build_head
from regard.settings import setting


@dataclass(frozen=True)
class MViTConfig:
    """The sizes and parts of a transformer of several scales.

    `block` describes the first stage; each further one has half the grid in each direction, and
    width, heads and feed-forward width twice. Keys and values of the first stage are pooled by
    `key_stride`, of each further one by half of that.
    """

    labels: int = setting(1000, "labels; a training takes those of the data", min=0, max=10_000_000)
    channels: int = size_field(3, 4096, "colour channels")
    image: int = size_field(224, 2**16, "image size in pixels")
    patch: int = size_field(7, 2**12, "patch size in pixels")
    stride: int = size_field(4, 2**12, "stride of the patches in pixels")
    depths: tuple[int, ...] = size_field((1, 2, 5, 2), 200, "layers of each stage")
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(
            96, 1, 384, norm_eps=1e-6, feed_forward="gelu", dropout=0.0
        )
    )
    kernel: int = size_field(3, 63, "kernel size of the pooling")
    key_stride: int = size_field(4, 2**12, "stride of keys and values in the first stage")
    pooled_queries: str = setting(
        "all", "which queries are pooled", choices=lambda: _POOLED_QUERIES
    )
    residual: str = setting(
        "query", "residual of the pooled queries", choices=lambda: POOLED_RESIDUALS
    )
    position: str = setting("decomposed", "position embedding", choices=lambda: _MVIT_POSITIONS)
    widen: str = setting("attention", "where the width grows", choices=lambda: _WIDEN)
    tokens: int = setting(0, "class tokens", min=0, max=1)
    pool: str = setting("mean", "pooling", choices=lambda: _MVIT_POOLS)
    drop_path: float = prob_field(0.0, "stochastic depth")
    init: str = setting("normal", "initialisation", choices=INITS)


_V2 = MViTConfig()
_V1 = replace(
    _V2,
    pooled_queries="strided",
    residual="none",
    position="learned",
    widen="feed_forward",
    tokens=1,
    pool="first",
)
# name -> the parts that make it what it is: Fan et al. 2021, Li et al. 2022; then published sizes
PRESETS: dict[str, MViTConfig] = {
    "mvitv2": _V2,
    "mvit": _V1,
    "mvit_b": replace(_V1, depths=(1, 2, 11, 2)),
    "mvitv2_t": _V2,
    "mvitv2_s": replace(_V2, depths=(1, 2, 11, 2)),
}

# for images of 28 to 32 pixels
SIZES = size_table(
    "depths block.width block.ffn_width block.heads",
    {
        "tiny": ((1, 1, 1), 40, 120, 1),
        "small": ((1, 2, 2), 48, 128, 1),
        "base": ((1, 2, 4), 64, 192, 1),
        "big": ((1, 3, 6), 96, 288, 1),
    },
    image=32,
    patch=3,
    stride=2,
)
INFO = FamilyInfo("image", VISION_TASKS, PRESETS, SIZES)


class PoolHeads(nn.Module):
    """norm(w * x): each channel of a head over the grid by a small convolution, with a stride.

    All heads share the weights; tokens before the grid are only normalised.

    Args:
        width: width of a head
        kernel: side of the convolution
        stride: stride of the convolution
        tokens: tokens before the grid
        norm: norm of the output
    """

    def __init__(self, width: int, kernel: int, stride: int, tokens: int, norm: nn.Module):
        super().__init__()
        self.convolution = nn.Conv2d(
            width, width, kernel, stride, padding=kernel // 2, groups=width, bias=False
        )
        self.norm, self.tokens = norm, tokens
        self.kernel, self.stride = kernel, stride

    def grid(self, grid: Size) -> Size:
        """Grid that remains of (height, width) after pooling."""
        height, width = (
            (n + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1 for n in grid
        )
        return height, width

    def forward(self, x: Float[Tensor, "b h l d"], grid: Size) -> Tensor:
        """(b, h, l', d)."""
        b, h, _, d = x.shape
        before, x = x[:, :, : self.tokens], x[:, :, self.tokens :]
        x = self.convolution(x.reshape(b * h, *grid, d).permute(0, 3, 1, 2))
        x = x.permute(0, 2, 3, 1).reshape(b, h, -1, d)
        return self.norm(torch.cat([before, x], 2) if self.tokens else x)


class Unpooled(nn.Module):
    """All tokens as they are."""

    stride = 1

    def grid(self, grid: Size) -> Size:
        """Grid."""
        return grid

    def forward(self, x: Tensor, grid: Size) -> Tensor:
        """Unchanged x."""
        return x


class PoolLargest(nn.Module):
    """Max pooling of the skip connection over the grid."""

    def __init__(self, stride: int, tokens: int):
        super().__init__()
        self.stride, self.tokens = stride, tokens

    def forward(self, x: Vectors, grid: Size) -> Tensor:
        """(b, l', w)."""
        before, x = x[:, : self.tokens], x[:, self.tokens :]
        x = x.unflatten(1, grid).permute(0, 3, 1, 2)
        x = F.max_pool2d(x, self.stride + 1, self.stride, (self.stride + 1) // 2)
        x = x.permute(0, 2, 3, 1).flatten(1, 2)
        return torch.cat([before, x], 1) if self.tokens else x


@lru_cache(maxsize=256)
def _distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """Number how far each of some queries is from each of some keys along the same line.

    The fewer of the two stand further apart; distances between whole numbers are rounded down.
    """
    with torch.inference_mode(False):
        q = torch.arange(queries, device=device).unsqueeze(1) * keys
        k = torch.arange(keys - 1, -1, -1, device=device) * queries
        return (q + k) // min(queries, keys)


class Decomposed(nn.Module):
    """q_i.(R_y(i, j) + C_x(i, j)): a vector for each distance in rows, and for each in columns.

    (Li et al. 2022.) Along a line of another length the vectors are stretched by linear
    interpolation. The tokens before the grid have no place.
    """

    def __init__(self, head_width: int, longest: int, tokens: int):
        super().__init__()
        self.rows = nn.Parameter(0.02 * torch.randn(2 * longest - 1, head_width))
        self.columns = nn.Parameter(0.02 * torch.randn(2 * longest - 1, head_width))
        self.tokens = tokens

    def bias(
        self, q: Float[Tensor, "b h q d"], q_grid: Size, k_grid: Size
    ) -> Float[Tensor, "b h q k"]:
        """Scores of the queries with the distances to all keys."""
        asked = q[:, :, self.tokens :].unflatten(2, q_grid)
        rows = self._between(self.rows, q_grid[0], k_grid[0])
        columns = self._between(self.columns, q_grid[1], k_grid[1])
        down = torch.einsum("bhyxd,ykd->bhyxk", asked, rows.to(q.dtype))
        right = torch.einsum("bhyxd,xkd->bhyxk", asked, columns.to(q.dtype))
        both = (down.unsqueeze(-1) + right.unsqueeze(-2)).flatten(4).flatten(2, 3)
        return F.pad(both, (self.tokens, 0, self.tokens, 0)) if self.tokens else both

    def _between(self, table: Tensor, queries: int, keys: int) -> Tensor:
        """Vectors of the distances from queries to keys, (q, k, d)."""
        length = 2 * max(queries, keys) - 1
        if length != len(table):
            table = F.interpolate(table.T.unsqueeze(0), length, mode="linear")[0].T
        return table[_distances(queries, keys, table.device)]


class LearnedPosition(nn.Module):
    """A learned embedding for each place of the grid and each token before it, added."""

    def __init__(self, width: int, grid: Size, tokens: int):
        super().__init__()
        self.places = GridPosition(width, grid, tokens)

    def forward(self, x: Tensor, grid: Size) -> Tensor:
        """(b, l, w) plus the vectors."""
        return x + self.places.over(grid)


# name -> what is added to the first tokens, and the bias of a layer
_MVIT_POSITIONS: dict[str, tuple[Callable[..., nn.Module], Callable[..., Decomposed | None]]] = {
    "decomposed": (lambda *sizes: Unpooled(), Decomposed),
    "learned": (LearnedPosition, lambda *sizes: None),
    "none": (lambda *sizes: Unpooled(), lambda *sizes: None),
}
# name -> what becomes of the average y, with the pooled queries q
POOLED_RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "query": torch.add,
    "none": lambda y, q: y,
}
# norm -> that of keys: what it adds to all of them alike would change no weight
_KEY_NORMS = {"layer": "layer_nobias"}
# name -> whether queries of a stride are pooled
_POOLED_QUERIES: dict[str, Callable[[int], bool]] = {
    "all": lambda stride: True,
    "strided": lambda stride: stride > 1,
}
# name -> the widths in which a block begins and ends, of the widths of all blocks and its number
_WIDEN: dict[str, Callable[[list[int], int], tuple[int, int]]] = {
    "attention": lambda widths, n: (widths[max(0, n - 1)], widths[n]),
    "feed_forward": lambda widths, n: (widths[n], widths[min(n + 1, len(widths) - 1)]),
}


class PooledAttention(nn.Module):
    """softmax(P_q(Q) P_k(K)' / sqrt(d) + B) P_v(V), where each P pools over the grid.

    Fewer queries make a smaller grid, fewer keys and values cheaper attention (Fan et al. 2021);
    the pooled queries may be added to the output (Li et al. 2022).

    Args:
        config: parts of the model
        block: sizes and parts of the block
        width: width of the input
        stride: stride of the queries
        key_stride: stride of the keys and values
        made_for: side of the grid that positions are learned for
    """

    def __init__(
        self,
        config: MViTConfig,
        block: BlockConfig,
        width: int,
        stride: int,
        key_stride: int,
        made_for: int,
    ):
        super().__init__()
        self.heads, self.drop = block.heads, block.attention_dropout
        if block.width % block.heads:
            raise UsageError(
                f"heads={block.heads} does not divide width={block.width}; choose one that does"
            )
        head_width = block.width // block.heads
        self.qkv = nn.Linear(width, 3 * block.width, bias=block.bias)
        self.out = nn.Linear(block.width, block.width, bias=block.bias)

        def pool(stride: int, norm: str = block.norm) -> PoolHeads:
            made = build_norm(replace(block, width=head_width, norm=norm))
            return PoolHeads(head_width, config.kernel, stride, config.tokens, made)

        pooled = lookup("pooled_queries", config.pooled_queries, _POOLED_QUERIES)(stride)
        self.pool_q = pool(stride) if pooled else Unpooled()
        self.pool_k = pool(key_stride, _KEY_NORMS.get(block.norm, block.norm))
        self.pool_v = pool(key_stride)
        lengths = [part.grid((made_for, 1))[0] for part in (self.pool_q, self.pool_k)]
        position = lookup("position", config.position, _MVIT_POSITIONS)[1]
        self.position = position(head_width, max(lengths), config.tokens)
        self.score = build_score(block.score, head_width, block.heads)
        self.residual = lookup("residual", config.residual, POOLED_RESIDUALS)

    def grids(self, grid: Size) -> tuple[tuple[int, int], tuple[int, int]]:
        """Grids of the queries and of the keys."""
        return self.pool_q.grid(grid), self.pool_k.grid(grid)

    def forward(self, x: Vectors, grid: Size) -> Float[Tensor, "b q w"]:
        """Let the pooled queries of a grid attend to its pooled keys and values."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = self.pool_q(q, grid), self.pool_k(k, grid), self.pool_v(v, grid)
        y = attend(
            q,
            k,
            v,
            score=self.score,
            bias=None if self.position is None else self.position.bias(q, *self.grids(grid)),
            dropout=self.drop if self.training else 0.0,
            watch=self,
        )
        return self.out(self.residual(y, q).transpose(1, 2).flatten(2))


def _projection(width: int, out_width: int) -> nn.Linear | None:
    return None if width == out_width else nn.Linear(width, out_width)


class PooledBlock(nn.Module):
    """Pooling attention, then a feed-forward network; the skip around attention is pooled, too.

    Args:
        config: parts of the model
        block: sizes and parts of the block
        widths: width of the input and of the output
        stride: stride of the queries
        key_stride: stride of the keys and values
        made_for: side of the grid that positions are learned for
        path: probability of stochastic depth
    """

    def __init__(
        self,
        config: MViTConfig,
        block: BlockConfig,
        widths: tuple[int, int],
        stride: int,
        key_stride: int,
        made_for: int,
        path: float,
    ):
        super().__init__()
        width, out_width = widths
        self.norm_attention = build_norm(replace(block, width=width))
        self.attention = PooledAttention(config, block, width, stride, key_stride, made_for)
        # a skip of another width is a projection of what is normalised
        self.past_attention = _projection(width, block.width)
        self.shrink = PoolLargest(stride, config.tokens) if stride > 1 else Unpooled()
        self.norm_feed_forward = build_norm(block)
        self.feed_forward = build_feed_forward(block, out_width)
        self.past_feed_forward = _projection(block.width, out_width)
        self.path, self.drop = path, block.dropout

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return add_dropped(x, drop_path(y, self.path, self.training), self.drop, self.training)

    def forward(self, x: Vectors, grid: Size) -> Tensor:
        """Tokens of the grid that is left."""
        normed = self.norm_attention(x)
        past = x if self.past_attention is None else self.past_attention(normed)
        past = self.shrink(past, grid)
        x = self._add(past, self.attention(normed, grid))
        normed = self.norm_feed_forward(x)
        past = x if self.past_feed_forward is None else self.past_feed_forward(normed)
        return self._add(past, self.feed_forward(normed))


_MVIT_POOLS: dict[str, Callable[[int], nn.Module]] = {
    "mean": GridMean,
    "first": lambda tokens: FirstTokens(1),
}


class MViT(VisionModel):
    """The Multiscale Vision Transformer: stages of ever fewer and wider tokens, and a head.

    Images may be of any size.
    """

    def __init__(self, config: MViTConfig):
        super().__init__()
        self.config = config
        block, stages = config.block, len(config.depths)
        if not 0 < stages < 10:
            raise UsageError(f"depths={config.depths}; expected a number for each of 1 to 9 stages")
        if block.order != "pre" or block.kv_heads or block.head_width:
            raise UsageError(
                f"block.order={block.order}, kv_heads={block.kv_heads} and head_width="
                f"{block.head_width}; blocks that pool have order=pre and none of the others"
            )
        self.stem = Patches(
            config.channels,
            block.width,
            config.patch,
            stride=config.stride,
            padding=config.patch // 2,
        )
        grid = self.stem.grid((config.image, config.image))
        self.tokens = None
        if config.tokens:
            self.tokens = nn.Parameter(0.02 * torch.randn(config.tokens, block.width))
        elif config.pool == "first":
            raise UsageError("pool=first with tokens=0; choose tokens=1, or pool=mean")
        place = lookup("position", config.position, _MVIT_POSITIONS)[0]
        self.position = place(block.width, grid, config.tokens)
        stage_of = [n for n, depth in enumerate(config.depths) for _ in range(depth)]
        widths = [block.width << stage for stage in stage_of]
        widen = lookup("widen", config.widen, _WIDEN)
        paths = drop_path_schedule(config.drop_path, len(stage_of))
        self.blocks = nn.ModuleList()
        for n, (stage, path) in enumerate(zip(stage_of, paths, strict=True)):
            inside = replace(
                block,
                width=widths[n],
                heads=block.heads << stage,
                ffn_width=block.ffn_width << stage,
            )
            stride = 1 if n == 0 or stage == stage_of[n - 1] else 2
            keys = max(1, config.key_stride >> stage)
            made = PooledBlock(config, inside, widen(widths, n), stride, keys, grid[0], path)
            self.blocks.append(made)
            grid = made.attention.grids(grid)[0]
        self.out_width = widths[-1]
        self.norm = build_norm(replace(block, width=self.out_width))
        self.pool = lookup("pool", config.pool, _MVIT_POOLS)(config.tokens)
        self.head = build_head(self.out_width, config.labels)
        lookup("init", config.init, INITS)(self)

    def grid(self, size: Size) -> Size:
        """Number of tokens of the last stage in each direction for (height, width)."""
        grid = self.stem.grid(size)
        for block in cast(Sequence[PooledBlock], self.blocks):
            grid = block.attention.grids(grid)[0]
        return grid

    def features(self, images: Images) -> Vectors:
        """Last vectors: that of the token before the grid, then row by row."""
        x = self.stem(images)
        grid = self.stem.grid((images.shape[2], images.shape[3]))
        if self.tokens is not None:
            x = torch.cat([self.tokens.to(x.dtype).expand(x.shape[0], -1, -1), x], 1)
        x = dropout(self.position(x, grid), self.config.block.dropout, self.training)
        for block in cast(Sequence[PooledBlock], self.blocks):
            x, grid = block(x, grid), block.attention.pool_q.grid(grid)
        return self.norm(x)

    def layout(self, size: Size) -> dict[str, Layout]:
        """Layout of each layer's attention over an image of (height, width)."""
        layers, grid, stride = {}, self.stem.grid(size), self.config.stride
        for n, block in enumerate(cast(Sequence[PooledBlock], self.blocks)):
            pools = block.attention.pool_q, block.attention.pool_k
            queries, keys = (
                token_grid(pool.grid(grid), stride * pool.stride, size, self.config.tokens)
                for pool in pools
            )
            layers[f"blocks.{n}.attention"] = full_layout(queries, keys)
            grid, stride = pools[0].grid(grid), stride * pools[0].stride
        return layers
