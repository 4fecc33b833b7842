"""Transformers whose attention pools what it asks and what it looks at: MViT and MViTv2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.dropout import add_dropped, dropout
from regard.attention.scores import build_score
from regard.errors import UsageError, lookup
from regard.layers.block import BlockConfig, build_feed_forward, build_norm, share, size
from regard.layers.depth import drop_path, rising
from regard.layers.patches import Patches
from regard.layers.start import STARTS
from regard.models.declaration import FamilyInfo
from regard.models.vit import First, Grid, GridMean


@dataclass(frozen=True)
class MViTConfig:
    """The sizes and parts of a transformer of several scales.

    `block` describes the first stage; each further one has half the grid in each direction, and
    width, heads and feed-forward width twice. Keys and values of the first stage are pooled by
    `key_stride`, of each further one by half of that.
    """

    labels: int = field(default=1000, metadata={"min": 0, "max": 10_000_000})
    channels: int = size(3, 4096)
    image: int = size(224, 2**16)
    patch: int = size(7, 2**12)
    stride: int = size(4, 2**12)
    depths: tuple[int, ...] = size((1, 2, 5, 2), 200)
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(
            96, 1, 384, norm_eps=1e-6, feed_forward="gelu", dropout=0.0
        )
    )
    kernel: int = size(3, 63)
    key_stride: int = size(4, 2**12)
    pooled_queries: str = "all"
    residual: str = "query"
    position: str = "decomposed"
    widen: str = "attention"
    tokens: int = field(default=0, metadata={"min": 0, "max": 1})
    pool: str = "mean"
    drop_path: float = share(0.0)
    start: str = "normal"


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
SIZES: dict[str, dict[str, Any]] = {
    name: {
        "image": 32,
        "patch": 3,
        "stride": 2,
        "depths": depths,
        "block": {"width": width, "ffn_width": ffn_width, "heads": 1},
    }
    for name, depths, width, ffn_width in (
        ("tiny", (1, 1, 1), 40, 120),
        ("small", (1, 2, 2), 48, 128),
        ("base", (1, 2, 4), 64, 192),
        ("big", (1, 3, 6), 96, 288),
    )
}
INFO = FamilyInfo("image", {"images": {}, "pretrain": {"labels": 0}}, PRESETS, SIZES)


class PoolHeads(nn.Module):
    """norm(w * x): each channel of a head over the grid by a small convolution, with a stride.

    All heads share the weights; tokens before the grid are only normalised.
    """

    def __init__(self, width: int, kernel: int, stride: int, tokens: int, norm: nn.Module):
        super().__init__()
        self.convolution = nn.Conv2d(
            width, width, kernel, stride, padding=kernel // 2, groups=width, bias=False
        )
        self.norm, self.tokens = norm, tokens
        self.kernel, self.stride = kernel, stride

    def grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return what remains of a grid of (height, width)."""
        height, width = (
            (n + 2 * (self.kernel // 2) - self.kernel) // self.stride + 1 for n in grid
        )
        return height, width

    def forward(self, x: Float[Tensor, "b h l d"], grid: tuple[int, int]) -> Tensor:
        """Return (b, h, l', d)."""
        b, h, _, d = x.shape
        before, x = x[:, :, : self.tokens], x[:, :, self.tokens :]
        x = self.convolution(x.reshape(b * h, *grid, d).permute(0, 3, 1, 2))
        x = x.permute(0, 2, 3, 1).reshape(b, h, -1, d)
        return self.norm(torch.cat([before, x], 2) if self.tokens else x)


class AsIs(nn.Module):
    """All tokens as they are."""

    def grid(self, grid: tuple[int, int]) -> tuple[int, int]:
        """Return the grid."""
        return grid

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return x."""
        return x


class PoolLargest(nn.Module):
    """The largest of neighbouring tokens, channel by channel: how what is passed by shrinks."""

    def __init__(self, stride: int, tokens: int):
        super().__init__()
        self.stride, self.tokens = stride, tokens

    def forward(self, x: Float[Tensor, "b l w"], grid: tuple[int, int]) -> Tensor:
        """Return (b, l', w)."""
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
        self, q: Float[Tensor, "b h q d"], q_grid: tuple[int, int], k_grid: tuple[int, int]
    ) -> Float[Tensor, "b h q k"]:
        """Return what the queries make of the distances to all keys."""
        asked = q[:, :, self.tokens :].unflatten(2, q_grid)
        rows = self._between(self.rows, q_grid[0], k_grid[0])
        columns = self._between(self.columns, q_grid[1], k_grid[1])
        down = torch.einsum("bhyxd,ykd->bhyxk", asked, rows.to(q.dtype))
        right = torch.einsum("bhyxd,xkd->bhyxk", asked, columns.to(q.dtype))
        both = (down.unsqueeze(-1) + right.unsqueeze(-2)).flatten(4).flatten(2, 3)
        return F.pad(both, (self.tokens, 0, self.tokens, 0)) if self.tokens else both

    def _between(self, table: Tensor, queries: int, keys: int) -> Tensor:
        """Return the vectors of the distances from queries to keys, (q, k, d)."""
        wanted = 2 * max(queries, keys) - 1
        if wanted != len(table):
            table = F.interpolate(table.T.unsqueeze(0), wanted, mode="linear")[0].T
        return table[_distances(queries, keys, table.device)]


class Placeless(nn.Module):
    """No bias at all."""

    def bias(self, q: Tensor, q_grid: tuple[int, int], k_grid: tuple[int, int]) -> Tensor | None:
        """Return nothing."""
        return None


class GridAdded(nn.Module):
    """Adds a learned vector for each place of the grid and each token before it."""

    def __init__(self, width: int, grid: tuple[int, int], tokens: int):
        super().__init__()
        self.places = Grid(width, grid, tokens)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return (b, l, w) plus the vectors."""
        return x + self.places.over(grid)


def _alone(y: Tensor, q: Tensor) -> Tensor:
    """Return the average without the queries."""
    return y


# name -> what is added to the first tokens, and the bias of a layer
PLACES: dict[str, tuple[Callable[..., nn.Module], Callable[..., Decomposed | Placeless]]] = {
    "decomposed": (lambda *sizes: AsIs(), Decomposed),
    "learned": (GridAdded, lambda *sizes: Placeless()),
    "none": (lambda *sizes: AsIs(), lambda *sizes: Placeless()),
}
# name -> what becomes of the average y, with the pooled queries q
RESIDUALS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "query": torch.add,
    "none": _alone,
}
# norm -> that of keys: what it adds to all of them alike would change no weight
KEY_NORMS = {"layer": "layer_nobias"}
# name -> whether queries of a stride are pooled
POOLED_QUERIES: dict[str, Callable[[int], bool]] = {
    "all": lambda stride: True,
    "strided": lambda stride: stride > 1,
}
# name -> the widths in which a block begins and ends, of the widths of all blocks and its number
WIDEN: dict[str, Callable[[list[int], int], tuple[int, int]]] = {
    "attention": lambda widths, n: (widths[max(0, n - 1)], widths[n]),
    "feed_forward": lambda widths, n: (widths[n], widths[min(n + 1, len(widths) - 1)]),
}


class PooledAttention(nn.Module):
    """softmax(P_q(Q) P_k(K)' / sqrt(d) + B) P_v(V), where each P pools over the grid.

    Fewer queries make a smaller grid, fewer keys and values a cheaper look at it (Fan et al.
    2021); the pooled queries may be added to what they find (Li et al. 2022).
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

        pooled = lookup("pooled_queries", config.pooled_queries, POOLED_QUERIES)(stride)
        self.pool_q = pool(stride) if pooled else AsIs()
        self.pool_k = pool(key_stride, KEY_NORMS.get(block.norm, block.norm))
        self.pool_v = pool(key_stride)
        lengths = [part.grid((made_for, 1))[0] for part in (self.pool_q, self.pool_k)]
        position = lookup("position", config.position, PLACES)[1]
        self.position = position(head_width, max(lengths), config.tokens)
        self.score = build_score(block.score, head_width, block.heads)
        self.residual = lookup("residual", config.residual, RESIDUALS)

    def grids(self, grid: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the grids of the queries and of the keys."""
        return self.pool_q.grid(grid), self.pool_k.grid(grid)

    def forward(self, x: Float[Tensor, "b l w"], grid: tuple[int, int]) -> Float[Tensor, "b q w"]:
        """Let the pooled tokens of a grid look at its pooled tokens."""
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = self.pool_q(q, grid), self.pool_k(k, grid), self.pool_v(v, grid)
        y = attend(
            q,
            k,
            v,
            score=self.score,
            bias=self.position.bias(q, *self.grids(grid)),
            dropout=self.drop if self.training else 0.0,
            watch=self,
        )
        return self.out(self.residual(y, q).transpose(1, 2).flatten(2))


class PassBy(nn.Module):
    """What goes past a part of as many channels: its input."""

    def forward(self, x: Tensor, normed: Tensor) -> Tensor:
        """Return x."""
        return x


class Widened(nn.Linear):
    """What goes past a part of more channels: its normalised input, projected."""

    def forward(self, x: Tensor, normed: Tensor) -> Tensor:  # type: ignore[override]
        """Return W norm(x) + b."""
        return super().forward(normed)


def _past(width: int, out_width: int) -> PassBy | Widened:
    return PassBy() if width == out_width else Widened(width, out_width)


class PooledBlock(nn.Module):
    """Look around with fewer and fewer tokens, then think; what is passed by is pooled, too."""

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
        self.past_attention = _past(width, block.width)
        self.shrink = PoolLargest(stride, config.tokens) if stride > 1 else AsIs()
        self.norm_feed_forward = build_norm(block)
        self.feed_forward = build_feed_forward(block)
        self.past_feed_forward = _past(block.width, out_width)
        if out_width != block.width:
            self.feed_forward.outer = nn.Linear(block.ffn_width, out_width, bias=block.bias)
        self.path, self.drop = path, block.dropout

    def _add(self, x: Tensor, y: Tensor) -> Tensor:
        return add_dropped(x, drop_path(y, self.path, self.training), self.drop, self.training)

    def forward(self, x: Float[Tensor, "b l w"], grid: tuple[int, int]) -> Tensor:
        """Return the tokens of the grid that is left."""
        normed = self.norm_attention(x)
        past = self.shrink(self.past_attention(x, normed), grid)
        x = self._add(past, self.attention(normed, grid))
        normed = self.norm_feed_forward(x)
        return self._add(self.past_feed_forward(x, normed), self.feed_forward(normed))


POOLS: dict[str, Callable[[int], nn.Module]] = {"mean": GridMean, "first": lambda tokens: First(1)}


class MViT(nn.Module):
    """Stages of blocks with ever fewer and wider tokens, and a head.

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
        place = lookup("position", config.position, PLACES)[0]
        self.position = place(block.width, grid, config.tokens)
        stage_of = [n for n, depth in enumerate(config.depths) for _ in range(depth)]
        widths = [block.width << stage for stage in stage_of]
        widen = lookup("widen", config.widen, WIDEN)
        paths = rising(config.drop_path, len(stage_of))
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
        self.pool = lookup("pool", config.pool, POOLS)(config.tokens)
        self.head = nn.Linear(self.out_width, config.labels) if config.labels else nn.Identity()
        lookup("start", config.start, STARTS)(self)

    def grids(self, size: tuple[int, int]) -> dict[str, tuple[tuple[int, int], tuple[int, int]]]:
        """Return the grids of the queries and of the keys of each layer, by the name of its map.

        Both come after the tokens before the grid.
        """
        found, grid = {}, self.stem.grid(size)
        for n, block in enumerate(cast(Sequence[PooledBlock], self.blocks)):
            found[f"blocks.{n}.attention"] = both = block.attention.grids(grid)
            grid = both[0]
        return found

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return how many tokens the last stage has in each direction for (height, width)."""
        return self.grids(size)[f"blocks.{len(self.blocks) - 1}.attention"][0]

    def features(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b l w"]:
        """Return the last vectors: that of the token before the grid, then row by row."""
        x = self.stem(images)
        grid = self.stem.grid((images.shape[2], images.shape[3]))
        if self.tokens is not None:
            x = torch.cat([self.tokens.to(x.dtype).expand(len(x), -1, -1), x], 1)
        x = dropout(self.position(x, grid), self.config.block.dropout, self.training)
        for block in cast(Sequence[PooledBlock], self.blocks):
            x, grid = block(x, grid), block.attention.pool_q.grid(grid)
        return self.norm(x)

    def forward(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b labels"]:
        """Return the logits of the labels, or what they would be made of."""
        return self.head(self.pool(self.features(images)))
