"""Vision Transformers: ViT, DeiT, CCT, DINOv2, and one with a token for each pixel."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.dropout import dropout
from regard.attention.positions import POSITION_ALIASES, Position, of_layer, with_aliases
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    build_block,
    build_final_norm,
    build_norm,
    prob_field,
    size_field,
)
from regard.layers.fast.run import run_blocks
from regard.layers.grid import COMPUTED, GridPosition, build_grid_position
from regard.layers.heads import Attentive, FirstTokens, GridMean
from regard.layers.init import INITS
from regard.layers.layout import Layout, full_layout, token_grid
from regard.layers.norm import NORMS
from regard.layers.patches import Convolutions, EarlyConvolutions, Patches, grid_at
from regard.layers.residual import drop_path_schedule
from regard.layers.shapes import Images, Size, Vectors
from regard.models.declaration import FamilyInfo, size_table, with_changes
from regard.models.vision import VISION_TASKS, VisionModel
from regard.settings import setting


@dataclass(frozen=True)
class ViTConfig:
    """The sizes and parts of a Vision Transformer."""

    labels: int = setting(1000, "labels; a training takes those of the data", min=0, max=10_000_000)
    channels: int = size_field(3, 4096, "colour channels")
    image: int = size_field(224, 2**16, "image size in pixels")
    patch: int = size_field(16, 2**12, "patch size in pixels")
    depth: int = size_field(12, 1000, "layers")
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(
            768, 12, 3072, norm_eps=1e-6, feed_forward="gelu", dropout=0.0
        )
    )
    stem: str = setting("patches", "stem, before the blocks", choices=lambda: _VIT_STEMS)
    position: str = setting(
        "learned", "position embedding", choices=lambda: with_aliases(_GRID_POSITIONS)()
    )
    position_base: float = setting(10_000.0, "base of the sinusoids or rotations")
    tokens: int = setting(1, "class tokens", min=0, max=2)
    pool: str = setting("first", "pooling", choices=lambda: _VIT_POOLS)
    drop_path: float = prob_field(0.0, "stochastic depth")
    init: str = setting("normal", "initialisation", choices=INITS)
    embed_norm: str = setting("none", "norm of the embeddings", choices=lambda: ("none", *NORMS))


_PUBLISHED = size_table(
    "block.width block.heads block.ffn_width depth",
    {
        "ti16": (192, 3, 768, 12),
        "s16": (384, 6, 1536, 12),
        "b16": (768, 12, 3072, 12),
        "l16": (1024, 16, 4096, 24),
    },
)
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
    **{f"vit_{name}": with_changes(_VIT, size) for name, size in _PUBLISHED.items()},
    **{f"deit_{name}": with_changes(_DEIT, _PUBLISHED[name]) for name in ("ti16", "s16", "b16")},
}

# for images of 28 to 32 pixels
SIZES = size_table(
    "depth block.width block.ffn_width block.heads",
    {
        "tiny": (4, 96, 192, 3),
        "small": (7, 128, 256, 4),
        "base": (10, 192, 384, 6),
        "big": (12, 256, 1024, 8),
    },
    image=32,
)


def resize(config: ViTConfig, size: dict[str, Any]) -> ViTConfig:
    """Config in a size, with patches of at most 4 pixels."""
    return with_changes(config, {**size, "patch": min(4, config.patch)})


_MASKED = {"masked": "mae"}
INFO = FamilyInfo("image", VISION_TASKS, PRESETS, SIZES, resize, pretrainers=_MASKED)


def _learned(config: ViTConfig, grid: Size) -> Position:
    return GridPosition(config.block.width, grid, config.tokens)


def _computed(config: ViTConfig, grid: Size) -> Position:
    block, base = config.block, config.position_base
    return build_grid_position(config.position, block.width, block.heads, block.per_head, base)


# name -> how to make the position of a config for a grid
_GRID_POSITIONS: dict[str, Callable[[ViTConfig, tuple[int, int]], Position]] = {
    "learned": _learned,
    **dict.fromkeys(COMPUTED, _computed),
}

_VIT_STEMS: dict[str, Callable[[int, int, int], Patches | Convolutions | EarlyConvolutions]] = {
    "patches": Patches,
    "patches_nobias": partial(Patches, bias=False),
    "convolution": Convolutions,
    "early": EarlyConvolutions,
}


class FirstAndMean(nn.Module):
    """The vector of the first token beside the mean over the grid (DINOv2)."""

    def __init__(self, before: int):
        super().__init__()
        self.mean = GridMean(before)

    def forward(self, x: Tensor) -> Tensor:
        """(b, 2 * w) of (b, l, w)."""
        return torch.cat([x[:, 0], self.mean(x)], -1)


class WideHead(nn.Linear):
    """A head on two vectors side by side."""

    def __init__(self, width: int, labels: int):
        super().__init__(2 * width, labels)


class DistilledHeads(nn.Module):
    """DeiT's two heads, of the class token and of the distillation token: the mean of both."""

    def __init__(self, width: int, labels: int):
        super().__init__()
        self.label, self.teacher = nn.Linear(width, labels), nn.Linear(width, labels)

    def each(self, x: Float[Tensor, "b ww"]) -> tuple[Tensor, Tensor]:
        """Logits of the head trained on labels, and of the one trained on a teacher.

        x are the vectors of both tokens side by side.
        """
        one, other = x.chunk(2, -1)
        return self.label(one), self.teacher(other)

    def forward(self, x: Float[Tensor, "b ww"]) -> Float[Tensor, "b labels"]:
        """Mean of both logits."""
        one, other = self.each(x)
        return (one + other) / 2


# name -> how many tokens before the grid it needs, how to make it, and the head on it
Heads = type[nn.Linear] | type[WideHead] | type[DistilledHeads]
_VIT_POOLS: dict[str, tuple[int, Callable[[ViTConfig], nn.Module], Heads]] = {
    "first": (1, lambda config: FirstTokens(1), nn.Linear),
    "both": (2, lambda config: FirstTokens(2), DistilledHeads),
    "first_mean": (1, lambda config: FirstAndMean(config.tokens), WideHead),
    "mean": (0, lambda config: GridMean(config.tokens), nn.Linear),
    "attention": (0, lambda config: Attentive(config.block.width), nn.Linear),
}


class ViT(VisionModel):
    """The Vision Transformer: self-attention between all patches of an image, and a head.

    The tokens before the grid are learned: a class token, and one for distillation (DeiT). Images
    may be of any size.
    """

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.config = config
        block = config.block
        self.out_width = block.width
        self.stem = lookup("stem", config.stem, _VIT_STEMS)(
            config.channels, block.width, config.patch
        )
        made_for = self.stem.grid((config.image, config.image))
        if min(made_for) < 1:
            raise UsageError(f"patch={config.patch} is larger than image={config.image}")
        needed, pool, head = lookup("pool", config.pool, _VIT_POOLS)
        if config.tokens < needed:
            raise UsageError(
                f"pool={config.pool} with tokens={config.tokens}; it reads {needed} tokens before "
                "the patches, or choose pool=mean"
            )
        self.tokens = nn.Embedding(config.tokens, block.width) if config.tokens else None
        name = POSITION_ALIASES.get(config.position, config.position)
        self.position = lookup("position", name, _GRID_POSITIONS)(config, made_for)
        self.embed_norm = build_norm(block, config.embed_norm)
        self.blocks = nn.ModuleList(
            build_block(block, of_layer(self.position), path)
            for path in drop_path_schedule(config.drop_path, config.depth)
        )
        self.norm = build_final_norm(block)
        self.pool = pool(config)
        self.head = head(block.width, config.labels) if config.labels else nn.Identity()
        lookup("init", config.init, INITS)(self)

    @property
    def pooled_width(self) -> int:
        """Width of pooled features: two vectors side by side, or one."""
        return self.out_width * (2 if self.config.pool in ("both", "first_mean") else 1)

    def grid(self, size: Size) -> Size:
        """Number of patches of an image of (height, width) in each direction."""
        return self.stem.grid(size)

    def embed(self, images: Images) -> tuple[Vectors, Int[Tensor, "l 2"]]:
        """Embedded tokens of images and their coordinates."""
        x = self.stem(images)
        if self.tokens is not None:
            x = torch.cat([self.tokens.weight.to(x.dtype).expand(x.shape[0], -1, -1), x], 1)
        height, width = self.grid((images.shape[2], images.shape[3]))
        at = grid_at(height, width, self.config.tokens, images.device)
        x = self.embed_norm(self.position.embed(x, at))
        return dropout(x, self.config.block.dropout, self.training), at

    def encode(self, tokens: Vectors, at: Int[Tensor, "... l 2"]) -> Vectors:
        """Pass all or some of the tokens of images through the blocks."""
        return run_blocks(self.blocks, tokens, norm=self.norm, at=at)

    def features(self, images: Images) -> Vectors:
        """Last vectors: those of the tokens before the grid, then row by row."""
        return self.encode(*self.embed(images))

    def layout(self, size: Size) -> dict[str, Layout]:
        """Layout of each layer's attention over an image of (height, width)."""
        grid = token_grid(self.grid(size), self.config.patch, size, self.config.tokens)
        layer = full_layout(grid, grid)
        layers = {f"blocks.{n}.attention": layer for n in range(len(self.blocks))}
        return {**layers, **self.pool_layout(grid)}
