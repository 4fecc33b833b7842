"""Models that read a text and say how it goes on: GPT-2, LLaMA, Mistral, BLOOM and PaLM."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from regard.attention.masks import Causal, Document, Mask, Prefix, Sliding
from regard.attention.multihead import Cache
from regard.attention.positions import RotaryScaling, build_position, of_layer
from regard.errors import Mistake, choose
from regard.layers.block import (
    BlockConfig,
    EncoderBlock,
    build_block,
    build_final_norm,
    build_norm,
    size,
)
from regard.layers.embed import Embed
from regard.layers.parts import learn
from regard.layers.stack import Stack
from regard.layers.start import STARTS
from regard.layers.vocabulary import Head
from regard.models.state import State, take_caches


@dataclass(frozen=True)
class GPTConfig:
    """The sizes and parts of a decoder that reads nothing but its own text."""

    vocab: int = size(50257, 10_000_000)
    depth: int = size(12, 1000)
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(768, 12, 3072, feed_forward="gelu_tanh")
    )
    position: str = "learned"
    position_base: float = 10_000.0
    scaling: RotaryScaling = field(default_factory=RotaryScaling)
    max_length: int = size(1024, 10_000_000)
    window: int | None = size(None, 10_000_000)
    prompt: str = "causal"
    embed_norm: str = "none"
    scale_embedding: bool = False
    tie: bool = True
    head_bias: bool = False
    start: str = "gpt"


# name -> the parts and published sizes of a family's first member: Radford et al. 2019, Touvron et
# al. 2023, Jiang et al. 2023, Scao et al. 2022, Chowdhery et al. 2022 (its 8B)
ROWS: dict[str, GPTConfig] = {
    "gpt2": GPTConfig(),
    "llama": GPTConfig(
        32000,
        32,
        BlockConfig(4096, 32, 11008, norm="rms", norm_eps=1e-6, feed_forward="swiglu", bias=False),
        position="rotary",
        max_length=2048,
        tie=False,
    ),
    "mistral": GPTConfig(
        32000,
        32,
        BlockConfig(4096, 32, 14336, 8, norm="rms", feed_forward="swiglu", bias=False),
        position="rotary",
        max_length=32768,
        window=4096,
        tie=False,
    ),
    "bloom": GPTConfig(
        250880,
        70,
        BlockConfig(14336, 112, 57344, feed_forward="gelu_tanh"),
        position="alibi",
        max_length=2048,
        embed_norm="layer",
    ),
    "palm": GPTConfig(
        256000,
        32,
        BlockConfig(
            4096,
            16,
            16384,
            1,
            norm="layer_nobias",
            order="parallel",
            feed_forward="swiglu",
            bias=False,
        ),
        position="rotary",
        max_length=2048,
    ),
}

# name -> depth, width, heads
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 4, "width": 128, "heads": 4},
    "small": {"depth": 6, "width": 384, "heads": 6},
    "base": {"depth": 12, "width": 768, "heads": 12},
    "big": {"depth": 24, "width": 1024, "heads": 16},
}
LENGTH = 1024  # tokens that a model of a named size is made for


def sized(name: str, row: str = "gpt2") -> GPTConfig:
    """Return the config of a row, in its proportions, with the sizes of a name."""
    config = choose("row", row, ROWS)
    size = dict(choose("size", name, SIZES))
    depth, heads, old = size.pop("depth"), size["heads"], config.block
    shared = max(1, heads * (old.kv_heads or old.heads) // old.heads)
    shared = next(n for n in range(shared, 0, -1) if heads % n == 0)
    ffn_width = -(size["width"] * old.ffn_width // -old.width) + 31 & ~31
    block = replace(
        old, **size, ffn_width=ffn_width, kv_heads=None if old.kv_heads is None else shared
    )
    window = config.window and LENGTH * config.window // config.max_length
    return replace(config, depth=depth, block=block, max_length=LENGTH, window=window)


# name -> how much of prompts of some lengths is read in both directions
PROMPTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "causal": lambda lengths: None,
    "bidirectional": lambda lengths: lengths,
}


class GPT(nn.Module):
    """A stack of blocks that look back, and a head that says which token comes next."""

    # what a layer remembers of texts that grow, and what decoding carries
    cache: type[Cache] = Cache
    state: type[State] = State

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        block = config.block
        position = build_position(
            config.position,
            block.width,
            block.heads,
            block.head_width or block.width // max(1, block.heads),
            base=config.position_base,
            max_length=config.max_length,
            bidirectional=config.prompt == "bidirectional",
            scaling=config.scaling,
        )
        norm = replace(block, norm=config.embed_norm)
        self.embed = Embed(
            config.vocab,
            block.width,
            position,
            block.width**0.5 if config.scale_embedding else 1.0,
            block.dropout,
            norm=None if config.embed_norm == "none" else build_norm(norm),
        )
        self.blocks = nn.ModuleList(
            build_block(block, of_layer(position)) for _ in range(config.depth)
        )
        self.norm = build_final_norm(block)
        self.head = Head(block.width, config.vocab, bias=config.head_bias)
        if config.tie:
            self.head.weight = self.embed.tokens.weight
        self.prefix_of = choose("prompt", config.prompt, PROMPTS)
        choose("start", config.start, STARTS)(self)

    def hidden(
        self,
        ids: Int[Tensor, "b l"],
        lengths: Int[Tensor, " b"] | None = None,
        *,
        at: Num[Tensor, "... l 1"] | None = None,
        documents: Int[Tensor, "b l"] | None = None,
        prefix: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b l w"]:
        """Return the last vectors, before the head.

        Padding comes last, so that no real token sees it. Packed `documents`, told apart by their
        numbers, do not see each other and are counted from their own beginning. The first `prefix`
        tokens of each text see each other in both directions.
        """
        if at is None and documents is not None:
            at = within(documents).unsqueeze(-1)
        if at is None:
            at = torch.arange(ids.shape[1], device=ids.device).unsqueeze(-1)
        mask = self._mask(ids.shape[1], documents, prefix)
        return self._read(ids, at, at, mask, [None] * len(self.blocks))

    def _read(
        self,
        ids: Tensor,
        at: Tensor,
        everything: Tensor,
        mask: Mask | None,
        caches: Sequence[Cache | None],
        stack: Stack | None = None,
    ) -> Tensor:
        """Pass tokens through all blocks, with the keys that stand before them."""
        x = self.embed(ids, at)
        shared = self.embed.position.shared(at, everything, mask)
        if stack is not None:
            return stack(x, at, mask, shared, cast(list[Cache], caches))
        if caches[0] is None and (y := learn(list(self.blocks), x, at, mask, shared)) is not None:
            return self.norm(y)
        for block, cache in zip(self.blocks, caches, strict=True):
            x = block(x, at=at, mask=mask, bias=shared, cache=cache)
        return self.norm(x)

    def _mask(self, length: int, documents: Tensor | None, prefix: Tensor | None) -> Mask:
        """Say who may look at whom among tokens that are read at once."""
        mask = Causal() if prefix is None else Prefix(prefix)
        if self.config.window is not None and length > self.config.window:
            mask = mask & Sliding(self.config.window)
        if documents is not None:
            if prefix is not None:
                raise Mistake("packed documents have no prefix; give documents or prefix, not both")
            mask = mask & Document(documents)
        return mask

    def forward(
        self,
        ids: Int[Tensor, "b l"],
        lengths: Int[Tensor, " b"] | None = None,
        *,
        at: Num[Tensor, "... l 1"] | None = None,
        documents: Int[Tensor, "b l"] | None = None,
        prefix: Int[Tensor, " b"] | None = None,
    ) -> Float[Tensor, "b l vocab"]:
        """Return the logits of the token after each token."""
        return self.head(self.hidden(ids, lengths, at=at, documents=documents, prefix=prefix))

    def start(
        self,
        source: Int[Tensor, "b s"],
        lengths: Int[Tensor, " b"] | None = None,
        *,
        hypotheses: int = 1,
        capacity: int = 256,
    ) -> State:
        """Read prompts but for their last tokens, with which the first step begins."""
        length = source.shape[1] - 1
        if length < 0 or (lengths is not None and bool((lengths < 1).any())):
            raise Mistake("an empty prompt has no last token to go on from; begin with <s>")
        layers = [block.attention for block in cast(list[EncoderBlock], list(self.blocks))]
        like = self.embed.tokens.weight
        caches = take_caches(layers, len(source), like, hypotheses, 2 * length, self.cache)
        prompts = source.new_full((len(source),), length) if lengths is None else lengths - 1
        if length:
            mask = self._mask(length, None, self.prefix_of(prompts))
            at = torch.arange(length, device=source.device).unsqueeze(-1)
            if bool((prompts != length).any()):
                at = at.expand(len(source), -1, -1)  # each will go on from a place of its own
            self._read(source[:, :-1], at, at, mask, caches)
        window = self.config.window
        plain = hypotheses == 1 and self.cache is Cache
        stack = Stack.of(list(self.blocks), self.norm) if plain else None
        return self.state(caches, hypotheses, capacity, prompts=prompts, window=window, stack=stack)

    def step(
        self, ids: Int[Tensor, "b l"], state: State
    ) -> tuple[Float[Tensor, "b l vocab"], State]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        at, everything, mask = state.take(ids.shape[1])
        stack = state.stack if ids.shape[1] == 1 else None
        x = self._read(ids.reshape(state.sentences, -1), at, everything, mask, state.caches, stack)
        return self.head.write(x).view(*ids.shape, -1), state


def within(documents: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
    """Count tokens from the beginning of their own document."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - place.masked_fill(~new, 0).cummax(1).values
