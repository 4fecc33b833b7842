"""Bidirectional text encoders: BERT and what followed it, up to ModernBERT."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from regard.attention.masks import Document, Mask, Padding, Sliding, mask_names, own_mask
from regard.attention.places import places
from regard.attention.positions import (
    POSITIONS,
    Disentangled,
    Distances,
    Position,
    Rotary,
    of_layer,
    with_aliases,
)
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    EncoderBlock,
    block_position,
    build_block,
    build_final_norm,
    build_norm,
    prob_field,
    size_field,
)
from regard.layers.context import windowed, within
from regard.layers.embed import TokenEmbedding, tie
from regard.layers.fast.run import run_blocks
from regard.layers.feedforward import FEED_FORWARDS
from regard.layers.heads import (
    POOLERS,
    ClassificationHead,
    ClusterClassify,
    NoHead,
    TokenClassify,
    Transform,
    VocabularyHead,
)
from regard.layers.init import INITS
from regard.layers.norm import NORMS
from regard.layers.shapes import Ids, Lengths, Vectors
from regard.models.declaration import FamilyInfo, size_table, with_changes
from regard.models.ensemble import Ensemble, mean_of_members
from regard.settings import setting


@dataclass(frozen=True)
class BertConfig:
    """The sizes and parts of an encoder.

    Some layers, or all, may attend only within a window; their rotary positions may have a base of
    their own.
    """

    vocab: int = size_field(30522, 10_000_000, "vocabulary; a training takes that of the tokenizer")
    depth: int = size_field(12, 1000, "layers")
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
    layers: str = setting(
        "own", "whether layers share their weights", choices=lambda: _LAYER_WEIGHTS
    )
    position: str = setting("learned", "position embedding", choices=with_aliases(POSITIONS))
    position_base: float = setting(10_000.0, "base of the sinusoids or rotations")
    distances: Distances = field(default_factory=Distances)
    window: int | None = size_field(None, 10_000_000, "window of local attention")
    window_layers: tuple[int, ...] | None = setting(None, "layers with a window; all unless given")
    near_base: float | None = setting(None, "base of the rotations in windows", above=0.0, max=1e12)
    mask: str = setting("none", "a mask of your own, beside the usual", choices=mask_names)
    max_length: int = size_field(512, 10_000_000, "maximum positions")
    inner_width: int | None = size_field(
        None, 2**20, "width of the embeddings; the model's unless given"
    )
    types: int = setting(2, "token types", min=0, max=100_000)
    embed_norm: str = setting("layer", "norm of the embeddings", choices=lambda: ("none", *NORMS))
    first_norm: str = setting(
        "same", "norm of the first block", choices=lambda: ("same", "none", *NORMS)
    )
    head: str = setting("words", "head", choices=lambda: _HEADS)
    labels: int = size_field(2, 10_000_000, "labels; a training takes those of the data")
    clusters: int = setting(0, "clusters of labels; 0: none", min=0, max=100_000)
    cluster_beam: int = size_field(4, 100_000, "clusters whose labels are ranked")
    pool: str = setting("first", "pooling of a classifier", choices=POOLERS)
    head_dropout: float = prob_field(0.1, "dropout before the head")
    head_act: str = setting(
        "same", "activation of the head", choices=lambda: ("same", *FEED_FORWARDS)
    )
    head_bias: bool = setting(True, "bias of the vocabulary head")
    transform: str = setting("none", "layer before the head", choices=lambda: _TRANSFORMS)
    transform_bias: bool = setting(True, "bias of that layer")
    tie: bool = setting(True, "tie the head to the embeddings")
    init: str = setting("normal", "initialisation", choices=INITS)
    members: int = size_field(1, 100, "models of an ensemble")


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

SIZES = size_table(
    "depth block.width block.ffn_width block.heads",
    {
        "tiny": (2, 128, 512, 2),
        "small": (4, 256, 1024, 4),
        "base": (12, 768, 3072, 12),
        "big": (24, 1024, 4096, 16),
    },
)


def resize(config: BertConfig, size: dict[str, Any]) -> BertConfig:
    """Config in a size; a factorised embedding is at most half as wide as the model."""
    inner = config.inner_width and min(config.inner_width, size["block.width"] // 2)
    return with_changes(config, {**size, "inner_width": inner})


_BERT_TASKS = {"fill": {"head": "words"}, "classify": {"head": "classify"}, "tag": {"head": "tag"}}
INFO = FamilyInfo("text", {**_BERT_TASKS, "embed": {}}, PRESETS, SIZES, resize)


# name -> how many layers have weights of their own: each, or the first alone (ALBERT)
_LAYER_WEIGHTS: dict[str, Callable[[int], int]] = {
    "own": lambda depth: depth,
    "shared": lambda depth: 1,
}


def _act(config: BertConfig) -> Callable:
    """Activation of a head: one by its name, or that of the blocks."""
    name = config.block.feed_forward if config.head_act == "same" else config.head_act
    return lookup("activation of a head", name, FEED_FORWARDS)[1]


def _words(config: BertConfig) -> nn.Module:
    inner = config.inner_width or config.block.width
    norm = build_norm(config.block, width=inner)
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
    return Transform(block.width, _act(config), build_norm(block), config.transform_bias)


# name -> the first layer of a classification head
_TRANSFORMS: dict[str, Callable[[BertConfig], nn.Module]] = {
    "none": lambda config: nn.Identity(),
    "dense": _dense,
}


def _transform(config: BertConfig) -> nn.Module:
    return lookup("transform", config.transform, _TRANSFORMS)(config)


def _classify(config: BertConfig) -> nn.Module:
    shape = config.block.width, config.labels, config.head_dropout, config.pool, _transform(config)
    if not config.clusters:
        return ClassificationHead(*shape)
    return ClusterClassify(*shape, clusters=config.clusters, beam=config.cluster_beam)


# name -> the head
_HEADS: dict[str, Callable[[BertConfig], nn.Module]] = {
    "none": lambda config: NoHead(),
    "words": _words,
    "classify": _classify,
    "tag": lambda config: TokenClassify(
        config.block.width, config.labels, config.head_dropout, _transform(config)
    ),
}


def _position(config: BertConfig, base: float) -> Position:
    """Make the position of tokens."""
    block = config.block
    return block_position(
        config.position,
        block,
        config.inner_width,
        base=base,
        max_length=config.max_length,
        bidirectional=True,
        distances=config.distances,
        norm_eps=block.norm_eps,
    )


class Bert(nn.Module):
    """A bidirectional encoder: self-attention over the whole text, and a head.

    The head is a named part: none gives the vectors (b, l, w) themselves, words the logits of the
    words (b, l, vocab), classify those of a label for the text (b, labels), tag those of a label
    for each token (b, l, labels). With other members it is the first of an ensemble.
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
        norm = build_norm(block, config.embed_norm, inner)
        self.embed = TokenEmbedding(
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
        numbers = iter(range(config.depth))

        def build() -> nn.Module:
            number = next(numbers)
            place = of_layer(near if number in self.near else position)
            if number or config.first_norm == "same":
                return build_block(block, place)
            if block.order != "pre":
                raise UsageError("first_norm is that of a block with order=pre; leave it out")
            norm = build_norm(block, config.first_norm)
            return EncoderBlock(block, place, attention_norm=norm)

        own = lookup("layers", config.layers, _LAYER_WEIGHTS)(config.depth)
        self.blocks = nn.ModuleList(build() for _ in range(own))
        if own < config.depth and (config.near_base is not None or config.first_norm != "same"):
            raise UsageError(
                f"layers={config.layers} are one, which near_base and first_norm tell apart; "
                "leave them out"
            )
        self.norm = build_final_norm(block)
        self.head = lookup("head", config.head, _HEADS)(config)
        if config.tie and isinstance(self.head, VocabularyHead):
            self.head.out.weight = self.embed.tokens.weight
        lookup("init", config.init, INITS)(self)
        for _ in range(own, config.depth):
            with torch.device("meta"):
                layer = build()
            tie(layer, self.blocks[0])
            self.blocks.append(layer)
        self.members = Ensemble(Bert, config)

    def hidden(
        self,
        ids: Ids,
        lengths: Lengths | None = None,
        *,
        types: Int[Tensor, "b l *k"] | None = None,
        at: Num[Tensor, "... l c"] | None = None,
        documents: Ids | None = None,
    ) -> Vectors:
        """Last vectors.

        Packed `documents`, numbered, do not attend to each other, and positions are counted from
        their own beginning. Tokens are of type 0 unless given; a token may be of several.

        Args:
            ids: token ids
            lengths: real tokens of each text; all unless given
            types: token types; 0 unless given, several for a token if there is a last axis
            at: positions; from 0 on unless given
            documents: number of the packed document that each token belongs to
        """
        mask: Mask | None = Padding.of(lengths, ids.shape[1])
        if documents is not None:
            mask = Document(documents) & mask
            at = within(documents) if at is None else at
        if at is None:
            at = places(0, ids.shape[1], ids.device)
        if types is not None and not self.config.types:
            raise UsageError("this model has no types of tokens; leave types out")
        mask = own_mask(self.config.mask, at, at, mask)
        x = self.embed(ids, at, types)
        shared = self.embed.position.shared(at, at, mask)
        near, window = mask, self.config.window
        if window is not None and window < ids.shape[1]:
            near = Sliding(window) & mask
        masks = [near if i in self.near else mask for i in range(len(self.blocks))]
        return run_blocks(self.blocks, x, norm=self.norm, at=at, mask=masks, bias=shared)

    def forward(
        self, ids: Ids, lengths: Lengths | None = None, **rest: Any
    ) -> Float[Tensor, "b ..."]:
        """Output of the head, the mean over the members; takes what `hidden` takes."""
        return mean_of_members(
            self, lambda member: member.head(member.hidden(ids, lengths, **rest), lengths)
        )
