"""Transformers that look at images as sets of patches: ViT, DeiT, CCT, and one token a pixel."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.dropout import dropout
from regard.attention.positions import ALIASES, Position, build_position
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    build_block,
    build_final_norm,
    build_norm,
    share,
    size,
)
from regard.layers.depth import rising
from regard.layers.heads import Attentive
from regard.layers.patches import Convolutions, EarlyConvolutions, Patches, grid_at
from regard.layers.run import run_blocks
from regard.layers.start import STARTS
from regard.models.declaration import FamilyInfo


@dataclass(frozen=True)
class ViTConfig:
    """The sizes and parts of a transformer that reads images."""

    labels: int = field(default=1000, metadata={"min": 0, "max": 10_000_000})
    channels: int = size(3, 4096)
    image: int = size(224, 2**16)
    patch: int = size(16, 2**12)
    depth: int = size(12, 1000)
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(
            768, 12, 3072, norm_eps=1e-6, feed_forward="gelu", dropout=0.0
        )
    )
    stem: str = "patches"
    position: str = "learned"
    position_base: float = 10_000.0
    tokens: int = field(default=1, metadata={"min": 0, "max": 2})
    pool: str = "first"
    drop_path: float = share(0.0)
    start: str = "normal"
    embed_norm: str = "none"


# name -> width, heads, feed-forward width and depth of the published models
_PUBLISHED = {
    "ti16": (192, 3, 768, 12),
    "s16": (384, 6, 1536, 12),
    "b16": (768, 12, 3072, 12),
    "l16": (1024, 16, 4096, 24),
}


def _published(kind: ViTConfig, name: str) -> ViTConfig:
    width, heads, ffn_width, depth = _PUBLISHED[name]
    block = replace(kind.block, width=width, heads=heads, ffn_width=ffn_width)
    return replace(kind, block=block, depth=depth)


_VIT = ViTConfig()
_DEIT = replace(_VIT, tokens=2, pool="both")
# name -> the parts that make it what it is: Dosovitskiy et al. 2021, Touvron et al. 2021,
# Hassani et al. 2021, Xiao et al. 2021, Oquab et al. 2024; then the published sizes
PRESETS: dict[str, ViTConfig] = {
    "vit": _VIT,
    "deit": _DEIT,
    "cct": replace(_VIT, stem="convolution", tokens=0, pool="attention"),
    "early": replace(_VIT, stem="early", tokens=0, pool="attention"),
    "dinov2": replace(
        _VIT, image=518, patch=14, pool="first_mean", block=replace(_VIT.block, order="scaled")
    ),
    "pixel": replace(_VIT, image=32, patch=1, position="rotary"),
    **{f"vit_{name}": _published(_VIT, name) for name in _PUBLISHED},
    **{f"deit_{name}": _published(_DEIT, name) for name in ("ti16", "s16", "b16")},
}

# name -> depth, width, feed-forward width, heads, for images of 28 to 32 pixels
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 4, "width": 96, "ffn_width": 192, "heads": 3},
    "small": {"depth": 7, "width": 128, "ffn_width": 256, "heads": 4},
    "base": {"depth": 10, "width": 192, "ffn_width": 384, "heads": 6},
    "big": {"depth": 12, "width": 256, "ffn_width": 1024, "heads": 8},
}


def resize(config: ViTConfig, size: dict[str, int]) -> ViTConfig:
    """Return a config in a size, for small images."""
    depth, block = size["depth"], {name: n for name, n in size.items() if name != "depth"}
    patch, block = min(4, config.patch), replace(config.block, **block)
    return replace(config, depth=depth, image=32, patch=patch, block=block)


INFO = FamilyInfo(
    "image",
    {"images": {}, "pretrain": {"labels": 0}},
    PRESETS,
    SIZES,
    resize,
    pretrainers={"masked": "mae"},
)


class Grid(Position):
    """A learned vector for each place of a grid and for each token before it, added to the input.

    Over a grid of another size it is stretched by cubic interpolation.
    """

    def __init__(self, width: int, grid: tuple[int, int], tokens: int):
        super().__init__()
        self.grid, self.tokens = grid, tokens
        self.table = nn.Embedding(tokens + grid[0] * grid[1], width)

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add the vectors of a whole grid, which ends with its last place."""
        # without numbers only how many there are can matter
        last = [len(at) - self.tokens - 1, 0] if at.is_meta else at[-1].tolist()
        return x + self.over((last[0] + 1, last[1] + 1))

    def over(self, grid: tuple[int, int]) -> Tensor:
        """Return the vectors of the tokens and of a grid's places row by row, (l, w)."""
        table = self.table.weight
        if grid == self.grid:
            return table
        places = table[self.tokens :].unflatten(0, self.grid).permute(2, 0, 1).unsqueeze(0)
        places = F.interpolate(places, size=grid, mode="bicubic", align_corners=False)
        return torch.cat([table[: self.tokens], places[0].flatten(1).T])


def _learned(config: ViTConfig, grid: tuple[int, int]) -> Position:
    return Grid(config.block.width, grid, config.tokens)


# what can be computed of two coordinates, each of which has half of the width
COMPUTED = ("sinusoidal", "rotary", "none")


def build_place(
    name: str, width: int, heads: int, head_width: int, base: float = 10_000.0
) -> Position:
    """Make a position that is computed of the two coordinates of a grid."""
    short = ALIASES.get(name, name)
    lookup("position", short, dict.fromkeys(COMPUTED))
    if (short == "sinusoidal" and width % 4) or (short == "rotary" and head_width % 4):
        raise UsageError(
            f"position={name} on a grid needs a width, {width}, and a head_width, {head_width}, "
            "that four divides"
        )
    return build_position(short, width, heads, head_width, base=base)


def _computed(config: ViTConfig, grid: tuple[int, int]) -> Position:
    block = config.block
    head_width = block.head_width or block.width // max(1, block.heads)
    return build_place(config.position, block.width, block.heads, head_width, config.position_base)


# name -> how to make the position of a config, made for a grid
PLACES: dict[str, Callable[[ViTConfig, tuple[int, int]], Position]] = {
    "learned": _learned,
    **dict.fromkeys(COMPUTED, _computed),
}

STEMS: dict[str, Callable[[int, int, int], Patches | Convolutions | EarlyConvolutions]] = {
    "patches": Patches,
    "patches_nobias": partial(Patches, bias=False),
    "convolution": Convolutions,
    "early": EarlyConvolutions,
}


class First(nn.Module):
    """The vectors of the first tokens, one after the other."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, count * w) of (b, l, w)."""
        return x[:, : self.count].flatten(1)


class GridMean(nn.Module):
    """The mean over the grid, without the tokens before it."""

    def __init__(self, before: int):
        super().__init__()
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, w) of (b, l, w)."""
        return x[:, self.before :].mean(1)


class FirstAndMean(nn.Module):
    """The vector of the first token beside the mean over the grid (DINOv2)."""

    def __init__(self, before: int):
        super().__init__()
        self.mean = GridMean(before)

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, 2 * w) of (b, l, w)."""
        return torch.cat([x[:, 0], self.mean(x)], -1)


class WideHead(nn.Linear):
    """A head on two vectors side by side."""

    def __init__(self, width: int, labels: int):
        super().__init__(2 * width, labels)


class Pair(nn.Module):
    """DeiT's two heads: the mean of what one makes of its token and the other of its own."""

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.label, self.teacher = nn.Linear(width, labels), nn.Linear(width, labels)

    def each(self, x: Float[Tensor, "b ww"]) -> tuple[Tensor, Tensor]:
        """Return the logits of the head that learns labels, and of the one that learns a teacher's.

        x are the vectors of both tokens, as `pool` lays them side by side.
        """
        one, other = x.chunk(2, -1)
        return self.label(one), self.teacher(other)

    def forward(self, x: Float[Tensor, "b ww"]) -> Float[Tensor, "b labels"]:
        """Return the mean of both logits."""
        one, other = self.each(x)
        return (one + other) / 2


# name -> how many tokens before the grid it needs, how to make it, and the head on it
Heads = type[nn.Linear] | type[WideHead] | type[Pair]
POOLS: dict[str, tuple[int, Callable[[ViTConfig], nn.Module], Heads]] = {
    "first": (1, lambda config: First(1), nn.Linear),
    "both": (2, lambda config: First(2), Pair),
    "first_mean": (1, lambda config: FirstAndMean(config.tokens), WideHead),
    "mean": (0, lambda config: GridMean(config.tokens), nn.Linear),
    "attention": (0, lambda config: Attentive(config.block.width), nn.Linear),
}


class ViT(nn.Module):
    """A stack of blocks in which every patch of an image sees every other, and a head.

    The tokens before the grid are learned: one to stand for the image, another to learn from a
    teacher (DeiT). Images may be of any size.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        block = config.block
        self.out_width = block.width
        self.stem = lookup("stem", config.stem, STEMS)(config.channels, block.width, config.patch)
        made_for = self.stem.grid((config.image, config.image))
        if min(made_for) < 1:
            raise UsageError(f"patch={config.patch} is larger than image={config.image}")
        needed, pool, head = lookup("pool", config.pool, POOLS)
        if config.tokens < needed:
            raise UsageError(
                f"pool={config.pool} with tokens={config.tokens}; it reads {needed} tokens before "
                "the patches, or choose pool=mean"
            )
        self.tokens = nn.Embedding(config.tokens, block.width) if config.tokens else None
        name = ALIASES.get(config.position, config.position)
        self.position = lookup("position", name, PLACES)(config, made_for)
        self.embed_norm = nn.Identity()
        if config.embed_norm != "none":
            self.embed_norm = build_norm(replace(block, norm=config.embed_norm))
        self.blocks = nn.ModuleList(
            build_block(block, self.position, path)
            for path in rising(config.drop_path, config.depth)
        )
        self.norm = build_final_norm(block)
        self.pool = pool(config)
        self.head = head(block.width, config.labels) if config.labels else nn.Identity()
        lookup("start", config.start, STARTS)(self)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Return how many patches an image of (height, width) has in each direction."""
        return self.stem.grid(size)

    def embed(
        self, images: Float[Tensor, "b c y x"]
    ) -> tuple[Float[Tensor, "b l w"], Int[Tensor, "l 2"]]:
        """Return the tokens of images, with what is known of their places, and where they stand."""
        x = self.stem(images)
        if self.tokens is not None:
            x = torch.cat([self.tokens.weight.to(x.dtype).expand(len(x), -1, -1), x], 1)
        height, width = self.grid((images.shape[2], images.shape[3]))
        at = grid_at(height, width, self.config.tokens, images.device)
        x = self.embed_norm(self.position.embed(x, at))
        return dropout(x, self.config.block.dropout, self.training), at

    def encode(
        self, tokens: Float[Tensor, "b l w"], at: Int[Tensor, "... l 2"]
    ) -> Float[Tensor, "b l w"]:
        """Let tokens look at each other, be they all of an image's or some."""
        return run_blocks(self.blocks, tokens, norm=self.norm, at=at)

    def features(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b l w"]:
        """Return the last vectors: those of the tokens before the grid, then row by row."""
        return self.encode(*self.embed(images))

    def forward(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b labels"]:
        """Return the logits of the labels, or what they would be made of."""
        return self.head(self.pool(self.features(images)))
