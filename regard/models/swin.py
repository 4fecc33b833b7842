"""Hierarchical transformers with attention in shifted windows: Swin and Swin V2."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.dropout import dropout
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    EncoderBlock,
    build_attention,
    build_block,
    build_norm,
    prob_field,
    size_field,
)
from regard.layers.fast.run import run_blocks
from regard.layers.heads import GRID_POOLINGS
from regard.layers.init import INITS
from regard.layers.layout import Layout, halve, token_grid
from regard.layers.norm import LayerNorm
from regard.layers.patches import Patches, check_images, grid_at
from regard.layers.residual import drop_path_schedule
from regard.layers.shapes import Images, Size
from regard.layers.windows import WINDOW_POSITIONS, WindowAttention
from regard.models.declaration import FamilyInfo, size_table
from regard.models.vision import VISION_TASKS, VisionModel, build_head
from regard.settings import setting

_MOST_STAGES = 8


@dataclass(frozen=True)
class SwinConfig:
    """The sizes and parts of a transformer with attention in windows.

    The block is that of the first stage. Each further stage has a quarter of the tokens, vectors
    and feed-forward networks twice as wide, and twice the heads unless `heads` names them for each.
    A window of 0 is one that fits the image; `trained` windows, one for each stage, are what
    continuous positions were learned with if not with these.
    """

    labels: int = setting(1000, "labels; a training takes those of the data", min=0, max=10_000_000)
    channels: int = size_field(3, 4096, "colour channels")
    image: int = size_field(224, 2**16, "image size in pixels")
    patch: int = size_field(4, 2**12, "patch size in pixels")
    depths: tuple[int, ...] = setting((2, 2, 6, 2), "layers of each stage", min=1, max=1000)
    heads: tuple[int, ...] = setting((), "heads of each stage", min=1, max=2**14)
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(96, 3, 384, feed_forward="gelu", dropout=0.0)
    )
    window: int = setting(7, "window of attention in patches; 0: the whole grid", min=0, max=1024)
    fit: str = setting("input", "how windows are fitted to the grid", choices=lambda: _WINDOW_SIZES)
    position: str = setting("table", "position embedding", choices=WINDOW_POSITIONS)
    trained: tuple[int, ...] = setting(
        (), "window size that continuous positions were trained with", min=0, max=1024
    )
    key_bias: bool = setting(True, "bias of the keys")
    merge: str = setting("norm_first", "patch merging", choices=lambda: _MERGES)
    pool: str = setting("mean", "pooling", choices=GRID_POOLINGS)
    drop_path: float = prob_field(0.0, "stochastic depth")
    init: str = setting("normal", "initialisation", choices=INITS)


_SWIN = SwinConfig()
_SWIN_V2 = replace(
    _SWIN,
    image=256,
    window=8,
    fit="image",
    position="continuous",
    key_bias=False,
    merge="norm_last",
    block=replace(_SWIN.block, order="res_post", score="cosine_learned"),
)
_B = {"width": 128, "heads": 4, "ffn_width": 512}
# name -> the parts that make it what it is: Liu et al. 2021, Liu et al. 2022; then the published
# sizes
PRESETS: dict[str, SwinConfig] = {
    "swin": _SWIN,
    "swinv2": _SWIN_V2,
    "swin_t": replace(_SWIN, drop_path=0.2),
    "swin_s": replace(_SWIN, depths=(2, 2, 18, 2), drop_path=0.3),
    "swin_b": replace(_SWIN, depths=(2, 2, 18, 2), block=replace(_SWIN.block, **_B), drop_path=0.5),
    "swinv2_t": replace(_SWIN_V2, drop_path=0.2),
}

# for images of 28 to 32 pixels
SIZES = size_table(
    "depths block.width block.ffn_width block.heads",
    {
        "tiny": ((2, 4, 1), 32, 64, 1),
        "small": ((2, 6, 1), 48, 96, 2),
        "base": ((2, 4, 1), 96, 192, 3),
        "big": ((2, 8, 2), 96, 384, 3),
    },
    image=32,
    patch=2,
    window=0,
    drop_path=0.0,
)
INFO = FamilyInfo("image", VISION_TASKS, PRESETS, SIZES, pretrainers={"masked": "simmim"})


def side(config: SwinConfig) -> int:
    """Side of the windows: if it is left open, that of 4 to 8 with least padding."""
    if config.window:
        return config.window
    grid = -(-config.image // config.patch)
    return min(range(8, 3, -1), key=lambda window: -grid % window)


class NoKeyBias(nn.Linear):
    """Queries, keys and values by one product, of which keys have no bias."""

    def __init__(self, width: int, each: int):
        super().__init__(width, 3 * each, bias=False)
        self.bias = nn.Parameter(torch.zeros(2 * each))

    def forward(self, input: Tensor) -> Tensor:
        """All three side by side."""
        query, value = self.bias.chunk(2)
        return F.linear(input, self.weight, torch.cat([query, torch.zeros_like(query), value]))


class Merge(nn.Module):
    """Patch merging, W norm([x1 x2 x3 x4]): a square of four tokens becomes one, twice as wide."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = LayerNorm(4 * width)
        self.reduce = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Float[Tensor, "b y x w"]) -> Float[Tensor, "b y2 x2 w2"]:
        """Grid half as high and half as wide."""
        return self.reduce(self.norm(squares(x)))


class NormedMerge(Merge):
    """norm(W [x1 x2 x3 x4]), as in Swin V2."""

    def __init__(self, width: int):
        super().__init__(width)
        self.norm = LayerNorm(2 * width)

    def forward(self, x: Float[Tensor, "b y x w"]) -> Float[Tensor, "b y2 x2 w2"]:
        """Grid half as high and half as wide."""
        return self.norm(self.reduce(squares(x)))


def squares(x: Float[Tensor, "b y x w"]) -> Float[Tensor, "b y2 x2 w4"]:
    """Put the four tokens of each square side by side, column by column; what is missing is 0."""
    _, height, width, _ = x.shape
    if height % 2 or width % 2:
        x = F.pad(x, (0, 0, 0, width % 2, 0, height % 2))
    return x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 4, 2, 5).flatten(3)


_MERGES: dict[str, type[Merge]] = {"norm_first": Merge, "norm_last": NormedMerge}


def _by_input(window: int, grid: int) -> tuple[int, int, str]:
    return window, window // 2, "shrink"


def _by_image(window: int, grid: int) -> tuple[int, int, str]:
    return (window, window // 2, "keep") if grid > window else (max(1, grid), 0, "keep")


# name -> window, shift of every second block and what becomes of them on another grid, from the
# window and the grid of a stage for the image that the model is made for: small images have small
# windows, or only models for small images do
_WINDOW_SIZES: dict[str, Callable[[int, int], tuple[int, int, str]]] = {
    "input": _by_input,
    "image": _by_image,
}


class Stage(nn.Module):
    """Blocks whose windows are shifted in every second one, then patch merging."""

    def __init__(self, config: SwinConfig, number: int, paths: list[float]):
        super().__init__()
        block = stage_block(config, number)
        last = number + 1 == len(config.depths)
        grid = config.image // config.patch >> number
        window, shift, fit = lookup("fit", config.fit, _WINDOW_SIZES)(side(config), grid)
        trained = config.trained[number] if config.trained else 0
        position = lookup("position", config.position, WINDOW_POSITIONS)

        def build(number: int, path: float) -> nn.Module:
            qkv = None if config.key_bias else NoKeyBias(block.width, block.width)
            inside = build_attention(
                block, position(block.width, block.heads, window, trained), qkv=qkv
            )
            windows = WindowAttention(inside, window, shift if number % 2 else 0, fit)
            return build_block(block, path=path, attention=windows)

        self.blocks = nn.ModuleList(build(n, path) for n, path in enumerate(paths))
        merge = lookup("merge", config.merge, _MERGES)
        self.merge = nn.Identity() if last else merge(block.width)

    def forward(self, x: Float[Tensor, "b y x w"]) -> Float[Tensor, "b y2 x2 w2"]:
        """Pass a grid of tokens through all blocks, and merge it."""
        at = grid_at(x.shape[1], x.shape[2], 0, x.device)
        return self.merge(run_blocks(self.blocks, x, at=at))


def stage_block(config: SwinConfig, number: int) -> BlockConfig:
    """Config of the blocks of a stage."""
    block = config.block
    if block.kv_heads not in (None, block.heads) or block.head_width is not None:
        raise UsageError("the heads of a stage share its width; leave kv_heads and head_width out")
    return replace(
        block,
        width=block.width << number,
        heads=config.heads[number] if config.heads else block.heads << number,
        kv_heads=None,
        ffn_width=block.ffn_width << number,
    )


def _check(config: SwinConfig) -> None:
    """Refuse a config whose stages do not go together."""
    stages = len(config.depths)
    if not 1 <= stages <= _MOST_STAGES:
        raise UsageError(f"depths names {stages} stages; expected 1 to {_MOST_STAGES}")
    for name in ("heads", "trained"):
        if (count := len(getattr(config, name))) not in (0, stages):
            raise UsageError(f"{name} are for {count} stages; expected {stages}, as depths has")
    if config.heads and config.heads[0] != config.block.heads:
        raise UsageError(f"heads={config.heads[0]},... but block.heads={config.block.heads}")
    if config.patch > config.image:
        raise UsageError(f"patch={config.patch} is larger than image={config.image}")


class Swin(VisionModel):
    """The Swin Transformer: stages of attention within shifted windows, each on a coarser grid.

    Images may be of any size: patches, windows and squares that they do not fill are padded.
    """

    def __init__(self, config: SwinConfig):
        super().__init__()
        _check(config)
        self.config = config
        block, stages = config.block, len(config.depths)
        self.stem = Patches(config.channels, block.width, config.patch, flatten=False)
        self.stem_norm = LayerNorm(block.width)
        paths = drop_path_schedule(config.drop_path, sum(config.depths))
        starts = [sum(config.depths[:n]) for n in range(stages + 1)]
        self.stages = nn.ModuleList(
            Stage(config, n, paths[starts[n] : starts[n + 1]]) for n in range(stages)
        )
        last = stage_block(config, stages - 1)
        self.out_width = last.width
        self.norm = build_norm(last)
        self.pool = lookup("pool", config.pool, GRID_POOLINGS)(last.width)
        self.head = build_head(last.width, config.labels)
        lookup("init", config.init, INITS)(self)

    def grid(self, size: Size) -> Size:
        """Number of tokens of the features of an image of (height, width) in each direction."""
        each = self.config.patch << (len(self.config.depths) - 1)
        height, width = (-(-n // each) for n in size)
        return height, width

    def patches(self, images: Images) -> Float[Tensor, "b h w e"]:
        """Vectors of the patches as a grid."""
        check_images(images, self.config.channels)
        down, right = (-n % self.config.patch for n in images.shape[2:])
        if down or right:
            images = F.pad(images, (0, right, 0, down))
        return self.stem_norm(self.stem(images))

    def encode(self, patches: Float[Tensor, "b h w e"]) -> Float[Tensor, "b l o"]:
        """Pass a grid of patches through all stages; return the last vectors, row by row."""
        x = dropout(patches, self.config.block.dropout, self.training)
        for stage in self.stages:
            x = stage(x)
        return self.norm(x.flatten(1, 2))

    def features(self, images: Images) -> Float[Tensor, "b l o"]:
        """Last vectors of images, row by row."""
        return self.encode(self.patches(images))

    def layout(self, size: Size) -> dict[str, Layout]:
        """Layout of each layer's attention over an image of (height, width)."""
        stride = self.config.patch
        grid = -(-size[0] // stride), -(-size[1] // stride)
        layers, whole = {}, token_grid(grid, stride, size)
        for n, stage in enumerate(cast(Sequence[Stage], self.stages)):
            whole = token_grid(grid, stride, size)
            for m, block in enumerate(cast(Sequence[EncoderBlock], stage.blocks)):
                tokens = cast(WindowAttention, block.attention).place(*grid)
                name = f"stages.{n}.blocks.{m}.attention.inside"
                layers[name] = Layout(whole, whole, tokens, tokens)
            grid, stride = halve(grid), 2 * stride
        return {**layers, **self.pool_layout(whole)}
