"""Residual networks, plain or with attention between their blocks."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.positions import with_aliases
from regard.errors import UsageError, lookup
from regard.layers.block import BlockConfig, EncoderBlock, prob_field, size_field
from regard.layers.convolution import ConvNorm, identity, relu
from regard.layers.fast.run import run_blocks
from regard.layers.grid import COMPUTED, build_grid_position
from regard.layers.heads import Mean
from regard.layers.layout import Layout, full_layout, halve, token_grid
from regard.layers.patches import check_images, grid_at
from regard.layers.residual import drop_path, drop_path_schedule
from regard.layers.shapes import Images, Size, Vectors
from regard.models.declaration import FamilyInfo
from regard.models.vision import (
    ConvolutionConfig,
    ConvolutionModel,
    build_head,
)
from regard.settings import setting


@dataclass(frozen=True)
class ResNetConfig(ConvolutionConfig):
    """The sizes and parts of a residual network, stage by stage."""

    widths: tuple[int, ...] = size_field((64, 128, 256, 512), 2**16, "widths of each stage")
    depths: tuple[int, ...] = size_field((2, 2, 2, 2), 1000, "layers of each stage")
    kind: str = setting("basic", "residual block", choices=lambda: _RESIDUAL_LAYERS)
    # how many blocks of attention each stage has, evenly between its other blocks
    attention: tuple[int, ...] = setting((), "blocks of attention in each stage", min=0, max=1000)
    head_width: int = size_field(32, 2**12, "width of a head")
    ffn_times: float = setting(
        2.0, "feed-forward width as a multiple of the width", min=0.01, max=64.0
    )
    position: str = setting(
        "rotary", "position embedding of the attention", choices=with_aliases(COMPUTED)
    )
    drop_path: float = prob_field(0.0, "stochastic depth")


_SMALL = ResNetConfig(image=32, stem="small", stem_width=32, widths=(32, 64, 128), depths=(2, 2, 2))
# name -> He et al. 2016, for small images and as published; and with attention between its blocks
PRESETS: dict[str, ResNetConfig] = {
    "resnet": _SMALL,
    "resnet_attention": replace(_SMALL, depths=(1, 1, 1), attention=(0, 2, 4)),
    "resnet18": ResNetConfig(),
    "resnet50": ResNetConfig(widths=(256, 512, 1024, 2048), depths=(3, 4, 6, 3), kind="bottleneck"),
}

# name -> widths and depths of a plain network; widths, depths and attention of one with attention
SIZES: dict[str, tuple[tuple, tuple]] = {
    "tiny": (((16, 32, 64), (3, 3, 3)), ((16, 32, 64), (1, 1, 1), (0, 3, 5))),
    "small": (((32, 64, 136), (2, 3, 2)), ((32, 64, 128), (1, 1, 1), (0, 2, 4))),
    "base": (((64, 128, 256), (2, 2, 2)), ((64, 128, 256), (1, 1, 1), (0, 2, 3))),
    "big": (((64, 128, 256, 512), (2, 2, 2, 2)), ((96, 192, 384), (1, 1, 1), (0, 4, 6))),
}


def resize(config: ResNetConfig, size: tuple[tuple, tuple]) -> ResNetConfig:
    """Config in a size, for small images; attention takes the place of some blocks."""
    widths, depths, *attention = size[1] if any(config.attention) else size[0]
    return replace(
        config,
        image=32,
        stem="small",
        stem_width=widths[0],
        widths=widths,
        depths=depths,
        kind="basic",
        attention=attention[0] if attention else (),
    )


INFO = FamilyInfo(
    "image",
    {"images": {}, "pretrain": {"labels": 0}, "features": {"labels": 0}},
    PRESETS,
    SIZES,
    resize,
)


class LargeStem(nn.Module):
    """A 7x7 convolution and the largest of 3x3, each of which halves the image."""

    halves = 2

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.first = ConvNorm(channels, width, 7, 2)

    def forward(self, x: Tensor) -> Tensor:
        """(b, width, h / 4, w / 4)."""
        return F.max_pool2d(self.first(x), 3, 2, 1)


class SmallStem(nn.Module):
    """A 3x3 convolution that keeps every pixel."""

    halves = 0

    def __init__(self, channels: int, width: int):
        super().__init__()
        self.first = ConvNorm(channels, width)

    def forward(self, x: Tensor) -> Tensor:
        """(b, width, h, w)."""
        return self.first(x)


_RESNET_STEMS: dict[str, type[LargeStem] | type[SmallStem]] = {
    "large": LargeStem,
    "small": SmallStem,
}


def _basic(channels: int, width: int, stride: int) -> list[ConvNorm]:
    """Make two 3x3 convolutions."""
    return [ConvNorm(channels, width, 3, stride), ConvNorm(width, width, act=identity)]


def _bottleneck(channels: int, width: int, stride: int) -> list[ConvNorm]:
    """Make a 3x3 convolution between two of 1x1, on a quarter of the width."""
    inner = width // 4
    return [
        ConvNorm(channels, inner, 1),
        ConvNorm(inner, inner, 3, stride),
        ConvNorm(inner, width, 1, act=identity),
    ]


_RESIDUAL_LAYERS: dict[str, Callable[[int, int, int], list[ConvNorm]]] = {
    "basic": _basic,
    "bottleneck": _bottleneck,
}


class ResidualBlock(nn.Module):
    """relu(x + f(x)), where f is a few convolutions and x is projected if its shape changes.

    Args:
        kind: key of RESIDUAL_LAYERS
        channels: channels of the input
        width: channels of the output
        stride: stride of the block
        path: probability of stochastic depth
    """

    def __init__(self, kind: str, channels: int, width: int, stride: int, path: float):
        super().__init__()
        self.layers = nn.Sequential(
            *lookup("kind", kind, _RESIDUAL_LAYERS)(channels, width, stride)
        )
        same = channels == width and stride == 1
        self.short = nn.Identity() if same else ConvNorm(channels, width, 1, stride, identity)
        self.path = path

    def forward(self, x: Tensor) -> Tensor:
        """(b, width, h / stride, w / stride) of (b, channels, h, w)."""
        y = drop_path(self.layers(x), self.path, self.training)
        return relu(y + self.short(x))


class GridAttention(nn.Module):
    """A block of self-attention between all places of a grid."""

    def __init__(self, config: ResNetConfig, width: int, path: float):
        super().__init__()
        if width % config.head_width:
            raise UsageError(
                f"head_width={config.head_width} does not divide the width {width} of a stage with "
                "attention; choose one that does"
            )
        heads = width // config.head_width
        position = build_grid_position(config.position, width, heads, config.head_width)
        block = BlockConfig(
            width, heads, max(1, round(width * config.ffn_times)), feed_forward="gelu", dropout=0.0
        )
        self.position = position
        self.block = EncoderBlock(block, position, path)

    def forward(self, x: Tensor) -> Tensor:
        """(b, c, h, w) of the same."""
        height, width = x.shape[2:]
        at = grid_at(height, width, 0, x.device)
        tokens = self.position.embed(x.permute(0, 2, 3, 1).flatten(1, 2), at)
        tokens = run_blocks([self.block], tokens, at=at)
        return tokens.unflatten(1, (height, width)).permute(0, 3, 1, 2)


def _spread(depth: int, attention: int) -> list[bool]:
    """Order of a stage's blocks, True for attention: evenly, and last."""
    after = [-(-(n + 1) * depth // attention) for n in range(attention)]
    order: list[bool] = []
    for n in range(depth):
        order += [False, *[True] * after.count(n + 1)]
    return order


class ResNet(ConvolutionModel):
    """A residual network: stages of convolutions, each on a grid half as high and half as wide.

    Between them there may be blocks of self-attention over the whole grid.
    """

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        attention = config.attention or (0,) * len(config.widths)
        if not len(config.widths) == len(config.depths) == len(attention) > 0:
            raise UsageError(
                f"widths={config.widths}, depths={config.depths} and attention={attention}; "
                "each needs a number for every stage"
            )
        self.out_width = config.widths[-1]
        self.stem = lookup("stem", config.stem, _RESNET_STEMS)(config.channels, config.stem_width)
        orders = [_spread(*pair) for pair in zip(config.depths, attention, strict=True)]
        paths = iter(drop_path_schedule(config.drop_path, sum(map(len, orders))))
        self.stages = nn.ModuleList()
        channels = config.stem_width
        for number, (width, order) in enumerate(zip(config.widths, orders, strict=True)):
            stage = nn.ModuleList()
            for place, looks in enumerate(order):
                stride = 2 if number and not place else 1
                if looks:
                    stage.append(GridAttention(config, width, next(paths)))
                else:
                    stage.append(ResidualBlock(config.kind, channels, width, stride, next(paths)))
                channels = width
            self.stages.append(stage)
        # the output of attention has not been through a rectifier and a norm
        self.norm = nn.LayerNorm(self.out_width) if attention[-1] else nn.Identity()
        self.pool = Mean()
        self.head = build_head(self.out_width, config.labels)
        self.init_convolutions()

    def features(self, images: Images) -> Vectors:
        """Vectors of the last grid, row by row."""
        check_images(images, self.config.channels)
        # so that the channels of a place lie together: faster, and tokens for free
        x = self.stem(images.contiguous(memory_format=torch.channels_last))
        for stage in self.stages:
            for block in stage.children():
                x = block(x)
        return self.norm(x.permute(0, 2, 3, 1).flatten(1, 2))

    def layout(self, size: Size) -> dict[str, Layout]:
        """Layout of each layer's attention over an image of (height, width)."""
        layers, grid, stride = {}, size, 1
        for _ in range(self.stem.halves):
            grid, stride = halve(grid), 2 * stride
        for n, stage in enumerate(self.stages):
            if n:
                grid, stride = halve(grid), 2 * stride
            whole = token_grid(grid, stride, size)
            for m, block in enumerate(stage.children()):
                if isinstance(block, GridAttention):
                    layers[f"stages.{n}.{m}.block.attention"] = full_layout(whole, whole)
        return layers
