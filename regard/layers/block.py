"""The blocks that families are built from."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Unpack

from torch import Tensor, nn

from regard.attention.dropout import add_dropped
from regard.attention.masks import Mask
from regard.attention.multihead import Memory, MultiHead, NormedMultiHead, SelfAttentionInputs
from regard.attention.positions import Position, build_position
from regard.attention.scores import HEAD_SCORES, SCORES, build_score
from regard.errors import UsageError, lookup
from regard.layers.feedforward import FEED_FORWARDS
from regard.layers.norm import NORMS
from regard.layers.residual import (
    PostNorm,
    PreNorm,
    ResPostNorm,
    SandwichNorm,
    ScaledPreNorm,
    drop_path,
)
from regard.settings import setting


def size_field(default: Any, most: int, help: str = "") -> Any:
    """Describe a size in a config, bounded since a config may come from outside."""
    return setting(default, help, min=1, max=most)


def prob_field(default: float, help: str = "") -> Any:
    """Describe a probability in a config."""
    return setting(default, help, min=0.0, max=0.95)


@dataclass(frozen=True)
class BlockConfig:
    """What a block is made of."""

    width: int = size_field(512, 2**20, "model width")
    heads: int = size_field(8, 2**14, "attention heads")
    ffn_width: int = size_field(2048, 2**22, "feed-forward width")
    kv_heads: int | None = size_field(None, 2**14, "key and value heads; all unless given")
    head_width: int | None = size_field(None, 2**16, "width of a head")
    norm: str = setting("layer", "norm", choices=NORMS)
    norm_eps: float = setting(1e-5, "epsilon of the norms", min=0.0, max=1.0)
    order: str = setting("pre", "order of norm and residual", choices=lambda: RESIDUALS)
    feed_forward: str = setting("relu", "feed-forward network", choices=FEED_FORWARDS)
    score: str = setting("dot", "attention score", choices=lambda: {**SCORES, **HEAD_SCORES})
    bias: bool = setting(True, "biases of linear layers")
    dropout: float = prob_field(0.1, "dropout")
    attention_dropout: float = prob_field(0.0, "dropout of attention weights")
    ffn_dropout: float = prob_field(0.0, "dropout inside the feed-forward network")
    attention_bias: str = setting(
        "same", "biases of the attention's projections", choices=lambda: ATTENTION_BIASES
    )
    head_norm: str = setting("none", "norm of queries and keys", choices=lambda: ("none", *NORMS))
    score_scale: float | None = setting(None, "scale of the scores", min=1e-9, max=1e9)
    score_cap: float | None = setting(None, "soft cap of the scores", min=1e-3, max=1e9)

    @property
    def per_head(self) -> int:
        """Width of a head."""
        return self.head_width or self.width // max(1, self.heads)


# name -> whether queries, keys and values have a bias, and what is made of them, where `bias` is
# what the rest of a block has
ATTENTION_BIASES: dict[str, Callable[[bool], tuple[bool, bool]]] = {
    "same": lambda bias: (bias, bias),
    "all": lambda bias: (True, True),
    "none": lambda bias: (False, False),
    "qkv": lambda bias: (True, False),
    "out": lambda bias: (False, True),
}


def build_norm(config: BlockConfig, name: str = "", width: int | None = None) -> nn.Module:
    """Make the norm that a config names, or one of another name (none: identity) or width."""
    if name == "none":
        return nn.Identity()
    return lookup("norm", name or config.norm, NORMS)(width or config.width, eps=config.norm_eps)


def block_position(
    name: str, config: BlockConfig, width: int | None = None, **settings: Any
) -> Position:
    """Make the position of a stack of blocks, whose embeddings may have another width."""
    width = width or config.width
    return build_position(name, width, config.heads, config.per_head, **settings)


def build_residual(
    config: BlockConfig, path: float = 0.0, norm: nn.Module | None = None
) -> PreNorm | PostNorm:
    """Make the order of norm and residual that a config names, with stochastic depth `path`."""
    norm = build_norm(config) if norm is None else norm
    kind = lookup("order", config.order, RESIDUALS).residual
    if kind is None:
        raise UsageError(f"order={config.order} is of blocks that look only at themselves")
    return kind(norm, config.dropout, path)


def build_attention(
    config: BlockConfig, position: Position | None = None, qkv: nn.Linear | None = None
) -> MultiHead:
    """Make the attention that a config describes; its input projection may be given."""
    bias, out_bias = lookup("attention_bias", config.attention_bias, ATTENTION_BIASES)(config.bias)
    numbers = {"scale": config.score_scale, "cap": config.score_cap}
    kind, more = MultiHead, {}
    if config.head_norm != "none":
        norm = partial(lookup("head_norm", config.head_norm, NORMS), eps=config.norm_eps)
        kind, more = NormedMultiHead, {"norm": norm}
    return kind(
        config.width,
        config.heads,
        kv_heads=config.kv_heads,
        head_width=config.head_width,
        bias=bias,
        out_bias=out_bias,
        dropout=config.attention_dropout,
        score=build_score(config.score, config.per_head, config.heads, **numbers),
        position=position,
        qkv=qkv,
        **more,
    )


def build_feed_forward(config: BlockConfig, out_width: int | None = None) -> nn.Module:
    """Make the feed-forward network that a config names, to vectors as wide or of `out_width`."""
    cls, act = lookup("feed_forward", config.feed_forward, FEED_FORWARDS)
    return cls(config.width, config.ffn_width, act, config.bias, config.ffn_dropout, out_width)


class SelfAttentionBlock(nn.Module):
    """A block of a stack that looks only at itself; its attention may be given."""

    def __init__(
        self,
        config: BlockConfig,
        position: Position | None = None,
        path: float = 0.0,
        attention: Any = None,
        **more: Any,
    ):
        super().__init__()
        self.attention = build_attention(config, position) if attention is None else attention
        self.add_sublayers(config, path, **more)

    def add_sublayers(self, config: BlockConfig, path: float) -> None:
        """Add what follows the attention, and the residuals."""
        raise NotImplementedError


class EncoderBlock(SelfAttentionBlock):
    """Self-attention, then a feed-forward network, each with its residual."""

    def add_sublayers(
        self, config: BlockConfig, path: float, attention_norm: nn.Module | None = None
    ) -> None:
        """Add what follows the attention, and the residuals; the norm before it may be given."""
        self.feed_forward = build_feed_forward(config)
        self.around_attention = build_residual(config, path, attention_norm)
        self.around_feed_forward = build_residual(config, path)

    def forward(self, x: Tensor, **inputs: Unpack[SelfAttentionInputs]) -> Tensor:
        """Pass (b, l, w) through both sublayers."""
        x = self.around_attention(x, self.attention, **inputs)
        return self.around_feed_forward(x, self.feed_forward)


class ParallelBlock(SelfAttentionBlock):
    """Parallel sublayers with one norm: x + attention(norm(x)) + feed_forward(norm(x)) (PaLM)."""

    def add_sublayers(self, config: BlockConfig, path: float) -> None:
        """Add what follows the attention, and the residuals."""
        self.feed_forward = build_feed_forward(config)
        self.around = PreNorm(build_norm(config), config.dropout, path)

    def forward(self, x: Tensor, **inputs: Unpack[SelfAttentionInputs]) -> Tensor:
        """Pass (b, l, w) through both sublayers side by side."""

        def both(x: Tensor) -> Tensor:
            attended = self.attention(x, **inputs)
            return attended + self.feed_forward(x)

        return self.around(x, both)


class ParallelBlocks(SelfAttentionBlock):
    """Parallel sublayers with a norm each: x + attention(norm(x)) + ffn(other_norm(x)) (NeoX)."""

    def add_sublayers(self, config: BlockConfig, path: float) -> None:
        """Add what follows the attention, and the residuals."""
        self.feed_forward = build_feed_forward(config)
        self.look_norm, self.think_norm = build_norm(config), build_norm(config)
        self.drop, self.path = config.dropout, path

    def forward(self, x: Tensor, **inputs: Unpack[SelfAttentionInputs]) -> Tensor:
        """Pass (b, l, w) through both sublayers side by side."""
        attended = self.attention(self.look_norm(x), **inputs)
        for y in (attended, self.feed_forward(self.think_norm(x))):
            y = drop_path(y, self.path, self.training)
            x = add_dropped(x, y, self.drop, self.training)
        return x


class AttentionBlock(SelfAttentionBlock):
    """Self-attention alone, without a feed-forward network: x + attention(norm(x))."""

    def add_sublayers(self, config: BlockConfig, path: float) -> None:
        """Add what follows the attention, and the residuals."""
        self.around_attention = PreNorm(build_norm(config), config.dropout, path)

    def forward(self, x: Tensor, **inputs: Unpack[SelfAttentionInputs]) -> Tensor:
        """Pass (b, l, w) through the attention."""
        return self.around_attention(x, self.attention, **inputs)


class ResidualOrder(NamedTuple):
    """The residual around each sublayer, and the block of a stack that looks only at itself."""

    residual: type[PreNorm] | type[PostNorm] | None
    block: type[SelfAttentionBlock] = EncoderBlock


RESIDUALS: dict[str, ResidualOrder] = {
    "pre": ResidualOrder(PreNorm),
    "post": ResidualOrder(PostNorm),
    "res_post": ResidualOrder(ResPostNorm),
    "sandwich": ResidualOrder(SandwichNorm),
    "scaled": ResidualOrder(ScaledPreNorm),
    "parallel": ResidualOrder(None, ParallelBlock),
    "parallel_norms": ResidualOrder(None, ParallelBlocks),
    "attention_only": ResidualOrder(None, AttentionBlock),
}
"""Orders of norm and residual by name; add your own under a new one."""


def build_block(
    config: BlockConfig,
    position: Position | None = None,
    path: float = 0.0,
    attention: nn.Module | None = None,
) -> SelfAttentionBlock:
    """Make a block of the order that a config names, with stochastic depth `path`.

    Its attention is the one that the config describes, unless another is given.
    """
    return lookup("order", config.order, RESIDUALS).block(config, position, path, attention)


def build_final_norm(config: BlockConfig) -> nn.Module:
    """Make the norm that ends a stack, or nothing where the blocks have normalised already."""
    residual = lookup("order", config.order, RESIDUALS).residual or PreNorm
    return build_norm(config) if residual.final_norm else nn.Identity()


class DecoderBlock(nn.Module):
    """Self-attention, cross-attention to a memory, then a feed-forward network."""

    def __init__(self, config: BlockConfig, position: Position | None = None):
        super().__init__()
        self.attention = build_attention(config, position)
        self.cross = build_attention(config)
        self.feed_forward = build_feed_forward(config)
        self.around_attention = build_residual(config)
        self.around_cross = build_residual(config)
        self.around_feed_forward = build_residual(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | Memory,
        *,
        memory_mask: Mask | None = None,
        **inputs: Unpack[SelfAttentionInputs],
    ) -> Tensor:
        """Pass (b, l, w) through the three sublayers."""
        x = self.around_attention(x, self.attention, **inputs)
        x = self.around_cross(x, self._read, memory=memory, mask=memory_mask)
        return self.around_feed_forward(x, self.feed_forward)

    def _read(self, x: Tensor, memory: Tensor | Memory, mask: Mask | None) -> Tensor:
        """Cross-attention; rows of x that share a memory (a beam's hypotheses) ask it together."""
        sentences = (memory.k if isinstance(memory, Memory) else memory).shape[0]
        together = x.reshape(sentences, -1, x.shape[-1])
        return self.cross(together, memory, mask=mask).view(x.shape)
