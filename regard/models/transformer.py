"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017)."""

from dataclasses import dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.masks import Causal, Mask, Padding
from regard.attention.multihead import Cache, Memory
from regard.attention.positions import ALIASES, POSITIONS, Position
from regard.errors import Mistake, choose
from regard.layers.block import (
    RESIDUALS,
    BlockConfig,
    DecoderBlock,
    EncoderBlock,
    build_norm,
    size,
)
from regard.layers.embed import Embed
from regard.layers.start import STARTS

# Decoding takes memory for this many keys at first.
ROOM = 64


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
    head_bias: bool = False
    start: str = "scaled"


# name -> depth of each stack, width, feed-forward width, heads
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 4, "width": 128, "ffn_width": 256, "heads": 4},
    "small": {"depth": 3, "width": 256, "ffn_width": 1024, "heads": 4},
    "base": {"depth": 6, "width": 512, "ffn_width": 2048, "heads": 8},
    "big": {"depth": 6, "width": 1024, "ffn_width": 4096, "heads": 16},
}


def sized(name: str, config: TransformerConfig | None = None) -> TransformerConfig:
    """Return a config with the sizes that a name stands for."""
    config = config or TransformerConfig()
    size = dict(choose("size", name, SIZES))
    depth = size.pop("depth")
    block = replace(config.block, **size)
    return replace(config, encoder_depth=depth, decoder_depth=depth, block=block)


class Lineage(Mask):
    """A text stands on its own past among all keys of its sentence: seen is (b, q, k)."""

    def __init__(self, seen: Tensor):
        self.seen = seen

    def tile(self, rows: slice, columns: slice) -> Tensor:
        """Return the same answer for every head."""
        return self.seen[:, None, rows, columns]


class State:
    """What decoding carries: sentences with their memory, times hypotheses with their past.

    The hypotheses of a sentence write into one cache, and `seen` tells which of its keys each of
    them stands on. So to move hypotheses is to change a mask; no key is copied.
    """

    def __init__(
        self,
        memories: list[Memory],
        caches: list[Cache],
        mask: Mask | None,
        hypotheses: int,
        capacity: int,
    ):
        self.memories, self.caches, self.mask = memories, caches, mask
        self.hypotheses, self.capacity = hypotheses, capacity
        self.length = 0  # tokens of each hypothesis that have been read
        self.seen = memories[0].k.new_ones((self.sentences, hypotheses, 0), dtype=torch.bool)
        self.parted = hypotheses > 1  # until then, all see all

    @property
    def sentences(self) -> int:
        """Return how many sentences are still being written."""
        return self.memories[0].k.shape[0]

    def take(self, tokens: int) -> Mask | None:
        """Count new tokens of each hypothesis in, and return who may look at whom."""
        start, each, cache = self.length, self.hypotheses, self.caches[0]
        if start + tokens > self.capacity:
            raise Mistake(
                f"position {start + tokens} is past the {self.capacity} that memory was taken for; "
                "ask for a larger max_length"
            )
        if self.parted and cache.length + each * tokens > cache.room:
            self._forget(each * tokens)
        self.length += tokens
        past = self.seen.repeat_interleave(tokens, 1)
        own = torch.ones(tokens, tokens, dtype=torch.bool, device=past.device).tril()
        own = torch.block_diag(*[own] * each) if each > 1 else own
        seen = torch.cat([past, own.expand(self.sentences, -1, -1)], dim=2)
        self.seen = seen[:, tokens - 1 :: tokens]
        if self.parted:
            return Lineage(seen)
        return None if tokens == 1 else Causal(start)

    def select(self, parents: Tensor) -> "State":
        """Let hypothesis j of sentence i continue hypothesis parents[i, j] of that sentence."""
        self.hypotheses = parents.shape[1]
        self.parted = self.parted or self.hypotheses > 1
        self.seen = self.seen.gather(1, parents.unsqueeze(-1).expand(-1, -1, self.seen.shape[2]))
        return self

    def keep(self, sentences: Tensor) -> "State":
        """Go on with these sentences only."""
        for cache in self.caches:
            cache.keep(sentences)
        self.memories = [memory.keep(sentences) for memory in self.memories]
        self.seen = self.seen[sentences]
        if isinstance(self.mask, Padding):
            self.mask = Padding(self.mask.keep[sentences])
        return self

    def _forget(self, new: int) -> None:
        """Drop the keys that no hypothesis stands on any more, so that new ones have room."""
        live = self.seen.any(1)
        most = int(live.sum(1).max())
        places = live.to(torch.uint8).sort(dim=1, descending=True, stable=True).indices[:, :most]
        self.seen = self.seen.gather(2, places.unsqueeze(1).expand(-1, self.hypotheses, -1))
        for cache in self.caches:
            cache.compact(places, max(ROOM, 2 * (most + new)))


class Transformer(nn.Module):
    """An encoder that reads, and a decoder that writes while it looks at what was read."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        block = config.block
        if config.tie not in ("all", "target", "none"):
            raise Mistake(f"tie='{config.tie}' is not one of all, target, none")
        if config.tie == "all" and config.source_vocab != config.target_vocab:
            raise Mistake(
                f"tie=all needs one vocabulary, not {config.source_vocab} and "
                f"{config.target_vocab} pieces; choose tie=target"
            )
        name = ALIASES.get(config.position, config.position)
        head_width = block.head_width or block.width // max(1, block.heads)

        def position() -> Position:
            return choose("position", name, POSITIONS)(
                block.width,
                block.heads,
                head_width,
                base=config.position_base,
                layout=config.position_layout,
                max_length=config.max_length,
            )

        source_position, target_position = position(), position()
        scale = block.width**0.5 if config.scale_embedding else 1.0
        self.source = Embed(config.source_vocab, block.width, source_position, scale, block.dropout)
        self.target = Embed(config.target_vocab, block.width, target_position, scale, block.dropout)
        if config.tie == "all":
            self.target.tokens = self.source.tokens
        self.encoder = nn.ModuleList(
            EncoderBlock(block, source_position) for _ in range(config.encoder_depth)
        )
        self.decoder = nn.ModuleList(
            DecoderBlock(block, target_position) for _ in range(config.decoder_depth)
        )
        final = choose("order", block.order, RESIDUALS).final_norm
        self.encoder_norm = build_norm(block) if final else nn.Identity()
        self.decoder_norm = build_norm(block) if final else nn.Identity()
        self.head = nn.Linear(block.width, config.target_vocab, bias=config.head_bias)
        if config.tie != "none":
            self.head.weight = self.target.tokens.weight
        choose("start", config.start, STARTS)(self)

    def encode(
        self, source: Int[Tensor, "b s"], mask: Mask | None = None
    ) -> Float[Tensor, "b s w"]:
        """Read source tokens into a memory."""
        at = torch.arange(source.shape[1], device=source.device).unsqueeze(-1)
        x = self.source(source, at)
        shared = self.source.position.shared(at, at, mask)
        for block in self.encoder:
            x = block(x, at=at, mask=mask, bias=shared)
        return self.encoder_norm(x)

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
        for block in self.decoder:
            x = block(x, memory, at=at, mask=causal, memory_mask=mask, bias=shared)
        return self.decoder_norm(x)

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
        hypotheses: int = 1,
        capacity: int = 256,
    ) -> State:
        """Read the sources and take the memory that writing will need."""
        mask = Padding.of(lengths, source.shape[1])
        memory = self.encode(source, mask)
        blocks = cast(list[DecoderBlock], list(self.decoder))
        memories = [block.cross.read(memory).by_columns() for block in blocks]
        caches = [
            Cache(len(source), block.attention.kv_heads, ROOM, block.attention.head_width, memory)
            for block in blocks
        ]
        return State(memories, caches, mask, hypotheses, capacity)

    def step(
        self, ids: Int[Tensor, "b l"], state: State
    ) -> tuple[Float[Tensor, "b l vocab"], State]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        new = ids.shape[1]
        at = torch.arange(state.length, state.length + new, device=ids.device)
        at = at.repeat(state.hypotheses).unsqueeze(-1)
        mask = state.take(new)
        x = self.target(ids.reshape(state.sentences, -1), at)
        before = state.caches[0].at
        if before is not None and before.ndim == 3:
            at = at.expand(len(before), -1, -1)
        everything = at if before is None else torch.cat([before, at], -2)
        shared = self.target.position.shared(at, everything, mask)
        for block, memory, cache in zip(self.decoder, state.memories, state.caches, strict=True):
            x = block(x, memory, at=at, mask=mask, memory_mask=state.mask, bias=shared, cache=cache)
        return self.head(self.decoder_norm(x)).view(*ids.shape, -1), state
