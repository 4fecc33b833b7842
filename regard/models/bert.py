"""Encoders that read a whole text at once: BERT and what followed it, up to ModernBERT."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from regard.attention.masks import Document, Mask, Padding, Sliding
from regard.attention.positions import (
    Disentangled,
    Distances,
    Position,
    Rotary,
    build_position,
    of_layer,
)
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    build_block,
    build_final_norm,
    share,
    size,
)
from regard.layers.embed import Embed
from regard.layers.feedforward import FEED_FORWARDS
from regard.layers.heads import Classify, NoHead, TokenClassify, Transform, VocabularyHead
from regard.layers.norm import NORMS
from regard.layers.residual import PreNorm
from regard.layers.run import run_blocks
from regard.layers.start import STARTS
from regard.models.declaration import FamilyInfo
from regard.models.gpt import windowed, within


@dataclass(frozen=True)
class BertConfig:
    """The sizes and parts of an encoder.

    Some layers, or all, may see only tokens nearer than a window; their rotary positions may have a
    base of their own.
    """

    vocab: int = size(30522, 10_000_000)
    depth: int = size(12, 1000)
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(
            768,
            12,
            3072,
            norm_eps=1e-12,
            order="post",
            feed_forward="gelu",
            attention_dropout=0.1,
        )
    )
    layers: str = "own"
    position: str = "learned"
    position_base: float = 10_000.0
    distances: Distances = field(default_factory=Distances)
    window: int | None = size(None, 10_000_000)
    window_layers: tuple[int, ...] | None = None
    near_base: float | None = field(default=None, metadata={"above": 0.0, "max": 1e12})
    max_length: int = size(512, 10_000_000)
    inner_width: int | None = size(None, 2**20)
    types: int = field(default=2, metadata={"min": 0, "max": 100_000})
    embed_norm: str = "layer"
    first_norm: str = "same"
    head: str = "words"
    labels: int = size(2, 10_000_000)
    pool: str = "first"
    head_dropout: float = share(0.1)
    head_act: str = "same"
    head_bias: bool = True
    transform: str = "none"
    transform_bias: bool = True
    tie: bool = True
    start: str = "normal"
    members: int = size(1, 100)


_BERT = BertConfig()
# name -> the parts that make the family what it is: Devlin et al. 2019, Liu et al. 2019,
# Lan et al. 2020, He et al. 2021, Sanh et al. 2019, Clark et al. 2020, Song et al. 2020,
# Warner et al. 2024
PRESETS: dict[str, BertConfig] = {
    "bert": _BERT,
    "roberta": replace(
        _BERT,
        vocab=50265,
        types=1,
        pool="roberta",
        head_act="gelu",
        block=replace(_BERT.block, norm_eps=1e-5),
    ),
    "albert": replace(
        _BERT,
        vocab=30000,
        layers="shared",
        inner_width=128,
        block=replace(_BERT.block, feed_forward="gelu_tanh", dropout=0.0, attention_dropout=0.0),
    ),
    "deberta": replace(
        _BERT,
        vocab=128100,
        types=0,
        position="disentangled",
        pool="deberta",
        block=replace(_BERT.block, norm_eps=1e-7, score="disentangled"),
    ),
    "distilbert": replace(_BERT, depth=6, types=0, pool="distilbert", head_dropout=0.2),
    "electra": replace(_BERT, inner_width=128, pool="electra", head_act="gelu"),
    "mpnet": replace(
        _BERT,
        vocab=30527,
        max_length=512,
        types=0,
        position="learned_t5",
        pool="roberta",
        head_act="gelu",
        block=replace(_BERT.block, norm_eps=1e-5),
    ),
    "modernbert": replace(
        _BERT,
        vocab=50368,
        depth=22,
        types=0,
        position="rotary",
        position_base=160_000.0,
        window=65,
        window_layers=tuple(i for i in range(22) if i % 3),
        near_base=10_000.0,
        max_length=8192,
        embed_norm="layer_nobias",
        first_norm="none",
        pool="cls",
        head_dropout=0.0,
        transform="dense",
        transform_bias=False,
        block=replace(
            _BERT.block,
            ffn_width=1152,
            norm="layer_nobias",
            norm_eps=1e-5,
            order="pre",
            feed_forward="geglu",
            bias=False,
            dropout=0.0,
            attention_dropout=0.0,
        ),
    ),
}

# name -> depth, width, feed-forward width, heads
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 2, "width": 128, "ffn_width": 512, "heads": 2},
    "small": {"depth": 4, "width": 256, "ffn_width": 1024, "heads": 4},
    "base": {"depth": 12, "width": 768, "ffn_width": 3072, "heads": 12},
    "big": {"depth": 24, "width": 1024, "ffn_width": 4096, "heads": 16},
}


def resize(config: BertConfig, size: dict[str, int]) -> BertConfig:
    """Return a config in a size; a factorised embedding is at most half as wide as the model."""
    depth, block = size["depth"], {name: n for name, n in size.items() if name != "depth"}
    inner = None if config.inner_width is None else min(config.inner_width, size["width"] // 2)
    return replace(config, depth=depth, inner_width=inner, block=replace(config.block, **block))


INFO = FamilyInfo(
    "text",
    {
        "fill": {"head": "words"},
        "classify": {"head": "classify"},
        "tag": {"head": "tag"},
        "embed": {},
    },
    PRESETS,
    SIZES,
    resize,
)


def named_norm(name: str, width: int, eps: float) -> nn.Module:
    """Make the norm of a name, or nothing at all."""
    return nn.Identity() if name == "none" else lookup("norm", name, NORMS)(width, eps=eps)


def _own(build: Callable[[], nn.Module], depth: int) -> list[nn.Module]:
    return [build() for _ in range(depth)]


def _shared(build: Callable[[], nn.Module], depth: int) -> list[nn.Module]:
    return [build()] * depth


# name -> how to make a stack: every layer has its own weights, or all are one (ALBERT)
LAYERS: dict[str, Callable[[Callable[[], nn.Module], int], list[nn.Module]]] = {
    "own": _own,
    "shared": _shared,
}


def _act(config: BertConfig) -> Callable:
    """Return the activation of a head: one by its name, or that of the blocks."""
    name = config.block.feed_forward if config.head_act == "same" else config.head_act
    return lookup("activation of a head", name, FEED_FORWARDS)[1]


def _words(config: BertConfig) -> nn.Module:
    inner = config.inner_width or config.block.width
    norm = named_norm(config.block.norm, inner, config.block.norm_eps)
    return VocabularyHead(
        config.block.width,
        config.vocab,
        _act(config),
        norm,
        inner,
        bias=config.head_bias,
        transform_bias=config.transform_bias,
    )


def _dense(config: BertConfig) -> nn.Module:
    block = config.block
    norm = named_norm(block.norm, block.width, block.norm_eps)
    return Transform(block.width, _act(config), norm, config.transform_bias)


# name -> what a head for labels makes of vectors first
TRANSFORMS: dict[str, Callable[[BertConfig], nn.Module]] = {
    "none": lambda config: nn.Identity(),
    "dense": _dense,
}


def _transform(config: BertConfig) -> nn.Module:
    return lookup("transform", config.transform, TRANSFORMS)(config)


# name -> how to make what stands on top
HEADS: dict[str, Callable[[BertConfig], nn.Module]] = {
    "none": lambda config: NoHead(),
    "words": _words,
    "classify": lambda config: Classify(
        config.block.width, config.labels, config.head_dropout, config.pool, _transform(config)
    ),
    "tag": lambda config: TokenClassify(
        config.block.width, config.labels, config.head_dropout, _transform(config)
    ),
}


def _position(config: BertConfig, base: float) -> Position:
    """Make where tokens stand."""
    block = config.block
    return build_position(
        config.position,
        config.inner_width or block.width,
        block.heads,
        block.head_width or block.width // max(1, block.heads),
        base=base,
        max_length=config.max_length,
        bidirectional=True,
        distances=config.distances,
        norm_eps=block.norm_eps,
    )


def _begin(block: nn.Module, norm: nn.Module) -> None:
    """Give the first block another norm before its attention."""
    around = getattr(block, "around_attention", None)
    if type(around) is not PreNorm:
        raise UsageError("first_norm is that of a block with order=pre; leave it out")
    around.norm = norm


class Bert(nn.Module):
    """A stack of blocks in which every token sees the whole text, and a head.

    The head is a named part: none gives the vectors (b, l, w) themselves, words the logits of the
    words (b, l, vocab), classify those of a label for the text (b, labels), tag those of a label
    for each token (b, l, labels). Other members are encoders beside it that answer by themselves;
    what the model says is the mean of all.
    """

    def __init__(self, config: BertConfig):
        super().__init__()
        self.config = config
        block, inner = config.block, config.inner_width
        position = _position(config, config.position_base)
        if isinstance(position, Disentangled) and inner not in (None, block.width):
            raise UsageError(
                f"disentangled positions are as wide as the model, {block.width}; "
                f"leave inner_width={inner} out"
            )
        norm = named_norm(config.embed_norm, inner or block.width, block.norm_eps)
        self.embed = Embed(
            config.vocab,
            block.width,
            position,
            1.0,
            block.dropout,
            norm=norm,
            types=config.types,
            inner_width=inner,
        )
        self.near, near = windowed(config), position
        if config.near_base is not None:
            near = _position(config, config.near_base)
            if not isinstance(near, Rotary):
                raise UsageError(
                    f"near_base={config.near_base:g} is for rotary positions, not for "
                    f"{config.position}; leave it out"
                )
        places = (near if i in self.near else position for i in range(config.depth))
        build = lookup("layers", config.layers, LAYERS)
        self.blocks = nn.ModuleList(
            build(lambda: build_block(block, of_layer(next(places))), config.depth)
        )
        alike = len({id(block) for block in self.blocks}) < config.depth
        if alike and (config.near_base is not None or config.first_norm != "same"):
            raise UsageError(
                f"layers={config.layers} are one, which near_base and first_norm tell apart; "
                "leave them out"
            )
        if config.first_norm != "same":
            _begin(self.blocks[0], named_norm(config.first_norm, block.width, block.norm_eps))
        self.norm = build_final_norm(block)
        self.head = lookup("head", config.head, HEADS)(config)
        if config.tie and isinstance(self.head, VocabularyHead):
            self.head.out.weight = self.embed.tokens.weight
        lookup("start", config.start, STARTS)(self)
        alone = replace(config, members=1)
        self.members = nn.ModuleList(Bert(alone) for _ in range(config.members - 1))

    def hidden(
        self,
        ids: Int[Tensor, "b l"],
        lengths: Int[Tensor, " b"] | None = None,
        *,
        types: Int[Tensor, "b l *k"] | None = None,
        at: Num[Tensor, "... l c"] | None = None,
        documents: Int[Tensor, "b l"] | None = None,
    ) -> Float[Tensor, "b l w"]:
        """Return the last vectors.

        Packed `documents`, told apart by their numbers, do not see each other and are counted from
        their own beginning. Tokens are of type 0 unless told; a token may be of several.
        """
        mask: Mask | None = Padding.of(lengths, ids.shape[1])
        if documents is not None:
            mask = Document(documents) & mask
            at = within(documents).unsqueeze(-1) if at is None else at
        if at is None:
            at = torch.arange(ids.shape[1], device=ids.device).unsqueeze(-1)
        if types is not None and not self.config.types:
            raise UsageError("this model has no types of tokens; leave types out")
        x = self.embed(ids, at, types)
        shared = self.embed.position.shared(at, at, mask)
        near, window = mask, self.config.window
        if window is not None and window < ids.shape[1]:
            near = Sliding(window) & mask
        masks = [near if i in self.near else mask for i in range(len(self.blocks))]
        return run_blocks(self.blocks, x, norm=self.norm, at=at, mask=masks, bias=shared)

    def forward(
        self,
        ids: Int[Tensor, "b l"],
        lengths: Int[Tensor, " b"] | None = None,
        *,
        types: Int[Tensor, "b l *k"] | None = None,
        at: Num[Tensor, "... l c"] | None = None,
        documents: Int[Tensor, "b l"] | None = None,
    ) -> Float[Tensor, "b ..."]:
        """Return what the head makes of the last vectors, the mean over the members."""
        found = [
            one.head(one.hidden(ids, lengths, types=types, at=at, documents=documents), lengths)
            for one in self.everyone()
        ]
        return found[0] if len(found) == 1 else torch.stack(found).mean(0)

    def everyone(self) -> list["Bert"]:
        """Return this encoder and the members beside it."""
        return [self, *cast("Iterable[Bert]", self.members)]
