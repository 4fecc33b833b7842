"""Residual networks of local attention instead of convolutions: LR-Net."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.scores import Dot, Gaussian
from regard.errors import UsageError, lookup
from regard.layers.block import prob_field, size_field
from regard.layers.convolution import ConvNorm, identity, relu
from regard.layers.heads import GRID_POOLINGS
from regard.layers.layout import Layout, halve, token_grid
from regard.layers.patches import check_images
from regard.layers.residual import drop_path, drop_path_schedule
from regard.layers.shapes import Images, Size, Vectors
from regard.models.declaration import FamilyInfo, size_table
from regard.models.vision import (
    VISION_TASKS,
    ConvolutionConfig,
    ConvolutionModel,
    build_head,
)
from regard.settings import setting


@dataclass(frozen=True)
class LocalConfig(ConvolutionConfig):
    """The sizes and parts of a network of local relations, a number for each stage."""

    inner_widths: tuple[int, ...] = size_field(
        (100, 200, 400, 800), 2**16, "bottleneck widths of each stage"
    )
    widths: tuple[int, ...] = size_field((256, 512, 1024, 2048), 2**18, "widths of each stage")
    depths: tuple[int, ...] = size_field((3, 4, 6, 3), 200, "layers of each stage")
    window: int = size_field(7, 63, "window of attention in pixels")
    channels_per_head: int = setting(8, "channels per head", min=1, max=1024)
    prior_width: int = size_field(8, 4096, "width of the network of offsets")
    relation: str = setting("product", "score of a pair of pixels", choices=lambda: _RELATIONS)
    pool: str = setting("mean", "pooling", choices=GRID_POOLINGS)
    drop_path: float = prob_field(0.0, "stochastic depth")


# name -> the parts that make it what it is, and its published size: Hu et al. 2019
PRESETS: dict[str, LocalConfig] = {"lrnet": LocalConfig(), "lrnet50": LocalConfig()}

# for images of 28 to 32 pixels
SIZES = size_table(
    "stem_width inner_widths widths depths",
    {
        "tiny": (32, (32, 64, 128), (64, 128, 256), (1, 1, 3)),
        "small": (32, (48, 96, 208), (96, 192, 416), (1, 3, 3)),
        "base": (64, (80, 160, 320), (160, 320, 640), (2, 4, 4)),
        "big": (64, (128, 256, 512), (256, 512, 1024), (2, 4, 6)),
    },
    image=32,
    stem="small",
)
INFO = FamilyInfo("image", VISION_TASKS, PRESETS, SIZES)


# the score of keys outside of the image, so that their weight is zero
OUTSIDE = -1e9
_QUERY_TILE = 4  # queries to a side of a tile

# name -> how two numbers are related
_RELATIONS: dict[str, Dot | Gaussian] = {"product": Dot(1.0), "squared": Gaussian(0.5**0.5)}


class LocalRelation(nn.Module):
    """The local relation layer: softmax over a window around i of r(q_i, k_j) + g(j - i).

    (Hu et al. 2019.) Queries and keys are single numbers for every `channels_per_head` channels, r
    is their product or minus their squared difference, g a small network of the offset; the values
    are x itself, and `out` mixes its channels afterwards. Queries are taken in square tiles with
    all keys that any of them may see, so that the cost is linear in the pixels.

    Args:
        width: channels
        window: side of the window, an odd number
        channels_per_head: channels that share a query and a key
        stride: steps between queries
        relation: key of RELATIONS
        prior_width: width of the network of offsets
        out: mixes the channels of the output
    """

    def __init__(
        self,
        width: int,
        *,
        window: int = 7,
        channels_per_head: int = 8,
        stride: int = 1,
        relation: str = "product",
        prior_width: int = 8,
        out: nn.Module | None = None,
    ):
        super().__init__()
        if not window % 2:
            raise UsageError(f"window={window} has no middle; choose an odd number, such as 7")
        self.width, self.window, self.stride = width, window, stride
        self.channels_per_head = channels_per_head
        self.groups = -(-width // channels_per_head)
        self.query = nn.Linear(width, self.groups, bias=False)
        self.key = nn.Linear(width, self.groups, bias=False)
        self.relation = lookup("relation", relation, _RELATIONS)
        # what is added to all scores of a query changes none of its weights: no last bias
        self.prior = nn.Sequential(
            nn.Conv1d(2, prior_width, 1),
            nn.ReLU(),
            nn.Conv1d(prior_width, self.groups, 1, bias=False),
        )
        self.out = nn.Linear(width, width, bias=False) if out is None else out

    def grid(self, grid: Size) -> Size:
        """Number of queries of a grid of (height, width) in each direction."""
        return -(-grid[0] // self.stride), -(-grid[1] // self.stride)

    def place(self, height: int, width: int) -> Int[Tensor, "tiles keys"]:
        """Place on the grid, row by row, of each key of a tile; -1 is outside."""
        return _keys(height, width, self.window, self.stride)

    def asked(self, height: int, width: int) -> Int[Tensor, "tiles queries"]:
        """Place on the grid of queries of each query of a tile; -1 is padding."""
        return _queries(*self.grid((height, width)))

    def laid_out(self, grid: Size, stride: int, size: Size) -> Layout:
        """Layout of the layer on a grid of a stride over an image of (height, width)."""
        queries = token_grid(self.grid(grid), stride * self.stride, size)
        near = torch.stack([row.nonzero().squeeze(1) for row in self.bias()[0].isfinite()])
        tokens = self.asked(*grid), self.place(*grid)
        return Layout(queries, token_grid(grid, stride, size), *tokens, near)

    def bias(self) -> Float[Tensor, "g q k"]:
        """Bias of the offsets in a tile, -inf outside of a query's window."""
        weight = self.key.weight
        offsets = _offsets(self.window, weight.device, weight.dtype)
        known = F.pad(self.prior(offsets), (0, 1), value=-torch.inf)
        return known[:, _seen(self.window, self.stride, weight.device)]

    def forward(self, x: Float[Tensor, "b w y x"]) -> Float[Tensor, "b w yy xx"]:
        """Let every place, or one in `stride` in each direction, attend to its window."""
        b, grid = x.shape[0], (x.shape[2], x.shape[3])
        place, asked = self.place(*grid), self.asked(*grid)
        x = x.permute(0, 2, 3, 1)
        q = self._tiles(self.query(x[:, :: self.stride, :: self.stride]), asked)
        k = self._tiles(self.key(x), place)
        v = self._tiles(F.pad(x, (0, self.groups * self.channels_per_head - self.width)), place)
        q, k, key_bias, scale = self.relation.prepare(q, k)
        far = torch.where(place < 0, OUTSIDE, 0.0).to(x).repeat(b, 1).unsqueeze(1)
        far = (far if key_bias is None else far + key_bias).expand(k.shape[:-1])
        # a coordinate of the keys, since as a bias it would be as large as all weights
        q = F.pad(q * scale, (0, 1), value=1.0)
        k = torch.cat([k, far.unsqueeze(-1)], -1)
        y = attend(q, k, v, score="product", bias=self.bias(), watch=self)
        return self.out(self._lay(y, b, self.grid(grid))).permute(0, 3, 1, 2)

    def _tiles(self, x: Tensor, place: Tensor) -> Tensor:
        """Cut a grid (b, y, x, w) into tiles (b * tiles, groups, places, w / groups)."""
        x = F.pad(x.flatten(1, 2), (0, 0, 0, 1))  # the last row is padding
        index = place.where(place >= 0, x.shape[1] - 1).flatten().to(x.device)
        cut = x.index_select(1, index).view(
            -1, place.shape[1], self.groups, x.shape[-1] // self.groups
        )
        return cut.transpose(1, 2)

    def _lay(self, y: Tensor, b: int, grid: Size) -> Tensor:
        """Lay tiles (b * tiles, groups, queries, w / groups) back as a grid (b, y, x, w)."""
        rows, columns = (-(-n // _QUERY_TILE) for n in grid)
        y = y.view(b, rows, columns, self.groups, _QUERY_TILE, _QUERY_TILE, -1).permute(
            0, 1, 4, 2, 5, 3, 6
        )
        y = y.reshape(b, rows * _QUERY_TILE, columns * _QUERY_TILE, -1)
        return y[:, : grid[0], : grid[1], : self.width]


def _squares(grid: Size, side: int, step: int, before: int) -> Tensor:
    """Number the places of squares that begin every `step` of a grid, -1 outside of it."""
    lines, there = [], []
    for length in grid:
        starts = torch.arange(-(-length // step)) * step - before
        line = starts.unsqueeze(1) + torch.arange(side)
        lines.append(line)
        there.append((line >= 0) & (line < length))
    place = lines[0][:, None, :, None] * grid[1] + lines[1][:, None, :]
    place = place.masked_fill(~(there[0][:, None, :, None] & there[1][:, None, :]), -1)
    return place.reshape(-1, side**2)


@lru_cache(maxsize=64)
def _keys(height: int, width: int, window: int, stride: int) -> Tensor:
    with torch.inference_mode(False), torch.device("cpu"):
        side = (_QUERY_TILE - 1) * stride + window
        return _squares((height, width), side, _QUERY_TILE * stride, window // 2)


@lru_cache(maxsize=64)
def _queries(height: int, width: int) -> Tensor:
    with torch.inference_mode(False), torch.device("cpu"):
        return _squares((height, width), _QUERY_TILE, _QUERY_TILE, 0)


@lru_cache(maxsize=64)
def _offsets(window: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Offset of each place of a window from its middle, from -1 to 1, (2, n)."""
    with torch.inference_mode(False):
        line = torch.arange(window, device=device, dtype=dtype) - window // 2
        return torch.cartesian_prod(line, line).T / max(1, window // 2)


@lru_cache(maxsize=64)
def _seen(window: int, stride: int, device: torch.device) -> Tensor:
    """Number the place of each key of a tile in the window of each query; the last is none."""
    with torch.inference_mode(False):
        side = (_QUERY_TILE - 1) * stride + window
        first = torch.arange(_QUERY_TILE, device=device).unsqueeze(1) * stride
        line = torch.arange(side, device=device) - first
        there = (line >= 0) & (line < window)
        place = line[:, None, :, None] * window + line[:, None, :]
        place = place.masked_fill(~(there[:, None, :, None] & there[:, None, :]), window**2)
        return place.reshape(_QUERY_TILE**2, side**2)


class RelationNorm(nn.Module):
    """relu(norm(relation(x)))."""

    def __init__(self, relation: LocalRelation):
        super().__init__()
        self.relation = relation
        self.norm = nn.BatchNorm2d(relation.width)

    def forward(self, x: Tensor) -> Tensor:
        """(b, w, y / stride, x / stride) of (b, w, y, x)."""
        return relu(self.norm(self.relation(x)))


def _relation(config: LocalConfig, width: int, stride: int, out: nn.Module | None = None):
    return RelationNorm(
        LocalRelation(
            width,
            window=config.window,
            channels_per_head=config.channels_per_head,
            stride=stride,
            relation=config.relation,
            prior_width=config.prior_width,
            out=out,
        )
    )


class SmallLocalStem(nn.Module):
    """Every pixel by itself, then a relation that halves the image.

    What mixes the channels here is what comes before the relation, so nothing does after it.
    """

    halves = 1

    def __init__(self, config: LocalConfig):
        super().__init__()
        self.first = ConvNorm(config.channels, config.stem_width, 1)
        self.relation = _relation(config, config.stem_width, 2, nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """(b, w, y / 2, x / 2)."""
        return self.relation(self.first(x))


class LargeLocalStem(SmallLocalStem):
    """The same, and the largest of 3x3, which halves once more."""

    halves = 2

    def forward(self, x: Tensor) -> Tensor:
        """(b, w, y / 4, x / 4)."""
        return F.max_pool2d(super().forward(x), 3, 2, 1)


_LOCAL_STEMS: dict[str, type[SmallLocalStem]] = {"large": LargeLocalStem, "small": SmallLocalStem}


class RelationBlock(nn.Module):
    """A bottleneck, relu(x + f(x)), with a local relation; x is projected if its shape changes.

    Args:
        config: parts of the model
        channels: channels of the input
        inner: channels inside
        width: channels of the output
        stride: stride of the relation
        path: probability of stochastic depth
    """

    def __init__(
        self, config: LocalConfig, channels: int, inner: int, width: int, stride: int, path: float
    ):
        super().__init__()
        self.narrow = ConvNorm(channels, inner, 1)
        self.look = _relation(config, inner, stride)
        self.widen = ConvNorm(inner, width, 1, act=identity)
        same = channels == width and stride == 1
        self.short = nn.Identity() if same else ConvNorm(channels, width, 1, stride, identity)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        """(b, width, y / stride, x / stride) of (b, channels, y, x)."""
        y = self.widen(self.look(self.narrow(x)))
        return relu(drop_path(y, self.path, self.training) + self.short(x))


class Local(ConvolutionModel):
    """A local relation network: stages of residual blocks of attention within small windows.

    It has no convolution but those of single pixels. Images may be of any size.
    """

    def __init__(self, config: LocalConfig):
        super().__init__()
        self.config = config
        if not 0 < len(config.widths) == len(config.inner_widths) == len(config.depths) < 20:
            raise UsageError(
                f"widths={config.widths}, inner_widths={config.inner_widths} and depths="
                f"{config.depths}; each needs a number for every stage, of which there are 1 to 19"
            )
        self.out_width = config.widths[-1]
        self.stem = lookup("stem", config.stem, _LOCAL_STEMS)(config)
        paths = iter(drop_path_schedule(config.drop_path, sum(config.depths)))
        self.stages = nn.ModuleList()
        channels = config.stem_width
        for number, depth in enumerate(config.depths):
            inner, width = config.inner_widths[number], config.widths[number]
            stage = nn.ModuleList()
            for place in range(depth):
                stride = 2 if number and not place else 1
                stage.append(RelationBlock(config, channels, inner, width, stride, next(paths)))
                channels = width
            self.stages.append(stage)
        self.pool = lookup("pool", config.pool, GRID_POOLINGS)(self.out_width)
        self.head = build_head(self.out_width, config.labels)
        self.init_convolutions()

    def features(self, images: Images) -> Vectors:
        """Vectors of the last grid, row by row."""
        check_images(images, self.config.channels)
        # so that the channels of a place lie together
        x = self.stem(images.contiguous(memory_format=torch.channels_last))
        for stage in cast(Sequence[nn.ModuleList], self.stages):
            for block in stage:
                x = block(x)
        return x.permute(0, 2, 3, 1).flatten(1, 2)

    def layout(self, size: Size) -> dict[str, Layout]:
        """Layout of each layer's attention over an image of (height, width)."""
        layers = {"stem.relation.relation": self.stem.relation.relation.laid_out(size, 1, size)}
        grid, stride = size, 1
        for _ in range(self.stem.halves):
            grid, stride = halve(grid), 2 * stride
        for n, stage in enumerate(cast(Sequence[nn.ModuleList], self.stages)):
            for m, block in enumerate(cast(Sequence[RelationBlock], stage)):
                relation = block.look.relation
                name = f"stages.{n}.{m}.look.relation"
                layers[name] = relation.laid_out(grid, stride, size)
                grid, stride = relation.grid(grid), stride * relation.stride
        return {**layers, **self.pool_layout(token_grid(grid, stride, size))}
