"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017)."""

from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.masks import Causal, Mask, Padding
from regard.attention.once import one_pass
from regard.attention.positions import Position, build_position, of_layer
from regard.errors import UsageError, lookup
from regard.layers.block import (
    RESIDUALS,
    BlockConfig,
    DecoderBlock,
    EncoderBlock,
    build_norm,
    size,
)
from regard.layers.embed import Embed
from regard.layers.run import run_blocks
from regard.layers.start import STARTS
from regard.layers.vocabulary import Head
from regard.models.declaration import FamilyInfo
from regard.models.state import State, take_caches


@dataclass(frozen=True)
class TransformerConfig:
    """The sizes and parts of an encoder-decoder."""

    source_vocab: int = size(8000, 10_000_000)
    target_vocab: int = size(8000, 10_000_000)
    encoder_depth: int = size(6, 1000)
    decoder_depth: int = size(6, 1000)
    block: BlockConfig = field(default_factory=BlockConfig)
    tie: str = "all"
    position: str = "sinusoidal"
    position_base: float = 10_000.0
    position_layout: str = "pairs"
    max_length: int = size(1024, 10_000_000)
    scale_embedding: bool = True
    embed_norm: str = "none"
    scale_head: bool = False
    head_bias: bool = False
    start: str = "scaled"


# name -> do target embeddings share those of the source, and the head those of the target
TIES: dict[str, tuple[bool, bool]] = {
    "all": (True, True),
    "target": (False, True),
    "embeddings": (True, False),
    "none": (False, False),
}


def ties(config: Any) -> tuple[bool, bool]:
    """Tell whether both sides share their embeddings, and whether the head has the target's."""
    sides, head = lookup("tie", config.tie, TIES)
    if sides and config.source_vocab != config.target_vocab:
        raise UsageError(
            f"tie={config.tie} needs one vocabulary, not {config.source_vocab} and "
            f"{config.target_vocab} pieces; choose tie=target"
        )
    return sides, head


_T5 = TransformerConfig(
    position="t5",
    scale_embedding=False,
    scale_head=True,
    start="t5",
    block=BlockConfig(norm="rms", norm_eps=1e-6, score="product", bias=False),
)
# name -> the parts that make the family what it is: Vaswani et al. 2017, Raffel et al. 2020, its
# version 1.1 (Shazeer 2020), Lewis et al. 2020, Junczys-Dowmunt et al. 2018
PRESETS: dict[str, TransformerConfig] = {
    "transformer": TransformerConfig(),
    "t5": _T5,
    "t5_1.1": replace(
        _T5, tie="embeddings", scale_head=False, block=replace(_T5.block, feed_forward="geglu_tanh")
    ),
    "bart": TransformerConfig(
        position="learned",
        embed_norm="layer",
        scale_embedding=False,
        head_bias=True,
        start="normal",
        block=BlockConfig(order="post", feed_forward="gelu"),
    ),
    "marian": TransformerConfig(
        position_layout="halves",
        head_bias=True,
        block=BlockConfig(order="post", feed_forward="swish"),
    ),
}

SIZES: dict[str, dict[str, Any]] = {
    name: {
        "encoder_depth": depth,
        "decoder_depth": depth,
        "block": {"width": width, "ffn_width": ffn_width, "heads": heads},
    }
    for name, depth, width, ffn_width, heads in (
        ("tiny", 4, 128, 256, 4),
        ("small", 3, 256, 1024, 4),
        ("base", 6, 512, 2048, 8),
        ("big", 6, 1024, 4096, 16),
    )
}
INFO = FamilyInfo("pair", {"translate": {}, "text": {}}, PRESETS, SIZES)


class Scale(nn.Module):
    """x times a constant."""

    def __init__(self, factor: float):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Scale every number."""
        return x * self.factor


class Transformer(nn.Module):
    """An encoder that reads, and a decoder that writes while it looks at what was read."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        block = config.block
        tie_sides, tie_head = ties(config)
        head_width = block.head_width or block.width // max(1, block.heads)

        def position(bidirectional: bool) -> Position:
            return build_position(
                config.position,
                block.width,
                block.heads,
                head_width,
                base=config.position_base,
                layout=config.position_layout,
                max_length=config.max_length,
                bidirectional=bidirectional,
            )

        source_position, target_position = position(True), position(False)
        scale = block.width**0.5 if config.scale_embedding else 1.0

        def embed(vocab: int, position: Position) -> Embed:
            named = replace(block, norm=config.embed_norm)
            norm = None if config.embed_norm == "none" else build_norm(named)
            return Embed(vocab, block.width, position, scale, block.dropout, norm=norm)

        self.source = embed(config.source_vocab, source_position)
        self.target = embed(config.target_vocab, target_position)
        if tie_sides:
            self.target.tokens = self.source.tokens
        self.encoder = nn.ModuleList(
            EncoderBlock(block, of_layer(source_position)) for _ in range(config.encoder_depth)
        )
        self.decoder = nn.ModuleList(
            DecoderBlock(block, of_layer(target_position)) for _ in range(config.decoder_depth)
        )
        final = lookup("order", block.order, RESIDUALS).final_norm
        self.encoder_norm = build_norm(block) if final else nn.Identity()
        self.decoder_norm = build_norm(block) if final else nn.Identity()
        self.before_head = Scale(block.width**-0.5) if config.scale_head else nn.Identity()
        self.head = Head(block.width, config.target_vocab, bias=config.head_bias)
        if tie_head:
            self.head.weight = self.target.tokens.weight
        lookup("start", config.start, STARTS)(self)

    def encode(
        self, source: Int[Tensor, "b s"], mask: Mask | None = None
    ) -> Float[Tensor, "b s w"]:
        """Read source tokens into a memory."""
        at = torch.arange(source.shape[1], device=source.device).unsqueeze(-1)
        x = self.source(source, at)
        shared = self.source.position.shared(at, at, mask)
        rest = {"norm": self.encoder_norm, "at": at, "mask": mask, "bias": shared}
        return run_blocks(self.encoder, x, **rest)

    def hidden(
        self,
        source: Int[Tensor, "b s"],
        target: Int[Tensor, "b t"],
        source_lengths: Int[Tensor, " b"] | None = None,
        target_lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b t w"]:
        """Return the decoder's last vectors, before the head."""
        mask = Padding.of(source_lengths, source.shape[1])
        memory = self.encode(source, mask)
        at = torch.arange(target.shape[1], device=target.device).unsqueeze(-1)
        # padding comes last, so that a causal mask already hides it from every real token
        causal = Causal()
        x = self.target(target, at)
        shared = self.target.position.shared(at, at, causal)
        with one_pass():
            for block in self.decoder:
                x = block(x, memory, at=at, mask=causal, memory_mask=mask, bias=shared)
        return self.before_head(self.decoder_norm(x))

    def forward(
        self,
        source: Int[Tensor, "b s"],
        target: Int[Tensor, "b t"],
        source_lengths: Int[Tensor, " b"] | None = None,
        target_lengths: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b t vocab"]:
        """Return the logits of the token after each target token."""
        return self.head(self.hidden(source, target, source_lengths, target_lengths))

    def start(
        self,
        source: Int[Tensor, "b s"],
        lengths: Int[Tensor, " b"] | None = None,
        *,
        capacity: int = 256,
    ) -> State:
        """Read the sources and take the memory that writing will need."""
        mask = Padding.of(lengths, source.shape[1])
        memory = self.encode(source, mask)
        blocks = cast(list[DecoderBlock], list(self.decoder))
        memories = [block.cross.read(memory).by_columns() for block in blocks]
        caches = take_caches([block.attention for block in blocks], len(source), memory)
        return State(caches, capacity, memories=memories, mask=mask)

    def step(
        self, ids: Int[Tensor, "b l"], state: State
    ) -> tuple[Float[Tensor, "b l vocab"], State]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        at, everything, mask = state.take(ids.shape[1])
        x = self.target(ids.reshape(state.sentences, -1), at)
        shared = self.target.position.shared(at, everything, mask)
        rest = {"at": at, "mask": mask, "memory_mask": state.mask, "bias": shared}
        with one_pass():
            layers = zip(self.decoder, state.memories, state.caches, strict=True)
            for block, memory, cache in layers:
                x = block(x, memory, **rest, cache=cache)
        x = self.before_head(self.decoder_norm(x))
        return self.head.step_logits(x).view(*ids.shape, -1), state
