"""Models that read a text and say how it goes on: GPT-2, LLaMA, Qwen, Gemma, GPT-NeoX, ..."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from regard.attention.masks import Causal, Document, Mask, Prefix, Sliding
from regard.attention.multihead import Cache
from regard.attention.positions import RotaryScaling, build_position, of_layer
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    EncoderBlock,
    build_block,
    build_final_norm,
    build_norm,
    size,
)
from regard.layers.embed import RoundedEmbed
from regard.layers.run import run_blocks
from regard.layers.start import STARTS
from regard.layers.vocabulary import CappedHead, Head
from regard.models.declaration import FamilyInfo
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
    position_share: float = field(default=1.0, metadata={"min": 0.0, "max": 1.0})
    near_base: float | None = field(default=None, metadata={"above": 0.0, "max": 1e12})
    scaling: RotaryScaling = field(default_factory=RotaryScaling)
    max_length: int = size(1024, 10_000_000)
    window: int | None = size(None, 10_000_000)
    window_layers: tuple[int, ...] | None = None
    prompt: str = "causal"
    embed_norm: str = "none"
    scale_embedding: bool = False
    tie: bool = True
    head_bias: bool = False
    logit_cap: float | None = field(default=None, metadata={"min": 1e-3, "max": 1e9})
    start: str = "gpt"


# name -> the parts and published sizes of a family's first member: Radford et al. 2019, Touvron et
# al. 2023, Jiang et al. 2023, Scao et al. 2022, Chowdhery et al. 2022 (its 8B), Qwen team 2024 (7B)
# and 2025 (8B), Black et al. 2022, Gemma team 2024 (7B), 2024 (2B) and 2025 (1B)
PRESETS: dict[str, GPTConfig] = {
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
    "qwen2": GPTConfig(
        152064,
        28,
        BlockConfig(
            3584,
            28,
            18944,
            4,
            norm="rms",
            norm_eps=1e-6,
            feed_forward="swiglu",
            bias=False,
            attention_bias="qkv",
        ),
        position="rotary",
        position_base=1e6,
        max_length=32768,
        tie=False,
    ),
    "qwen3": GPTConfig(
        151936,
        36,
        BlockConfig(
            4096,
            32,
            12288,
            8,
            128,
            norm="rms",
            norm_eps=1e-6,
            feed_forward="swiglu",
            bias=False,
            head_norm="rms",
        ),
        position="rotary",
        position_base=1e6,
        max_length=40960,
        tie=False,
    ),
    "gpt_neox": GPTConfig(
        50432,
        44,
        BlockConfig(6144, 64, 24576, order="parallel_norms", feed_forward="gelu"),
        position="rotary_part",
        position_share=0.25,
        max_length=2048,
        tie=False,
    ),
    "gemma": GPTConfig(
        256000,
        28,
        BlockConfig(
            3072,
            16,
            24576,
            head_width=256,
            norm="rms_plus1",
            norm_eps=1e-6,
            feed_forward="geglu_tanh",
            bias=False,
        ),
        position="rotary",
        max_length=8192,
        scale_embedding=True,
    ),
    "gemma2": GPTConfig(
        256000,
        26,
        BlockConfig(
            2304,
            8,
            9216,
            4,
            256,
            norm="rms_plus1",
            norm_eps=1e-6,
            order="sandwich",
            feed_forward="geglu_tanh",
            score="capped",
            bias=False,
            score_cap=50.0,
        ),
        position="rotary",
        max_length=8192,
        window=4096,
        window_layers=tuple(range(0, 26, 2)),
        scale_embedding=True,
        logit_cap=30.0,
    ),
    "gemma3": GPTConfig(
        262144,
        26,
        BlockConfig(
            1152,
            4,
            6912,
            1,
            256,
            norm="rms_plus1",
            norm_eps=1e-6,
            order="sandwich",
            feed_forward="geglu_tanh",
            bias=False,
            head_norm="rms_plus1",
        ),
        position="rotary",
        position_base=1e6,
        near_base=1e4,
        max_length=32768,
        window=512,
        window_layers=tuple(i for i in range(26) if i % 6 != 5),
        scale_embedding=True,
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


def resize(config: GPTConfig, size: dict[str, int]) -> GPTConfig:
    """Return a config in its own proportions, but of this depth, width and number of heads."""
    depth, width, heads, old = size["depth"], size["width"], size["heads"], config.block
    shared = max(1, heads * (old.kv_heads or old.heads) // old.heads)
    shared = next(n for n in range(shared, 0, -1) if heads % n == 0)
    ffn_width = -(width * old.ffn_width // -old.width) + 31 & ~31
    wide = old.head_width and width // heads * (old.head_width * old.heads) // old.width
    block = replace(
        old,
        width=width,
        heads=heads,
        ffn_width=ffn_width,
        kv_heads=None if old.kv_heads is None else shared,
        head_width=wide and -(wide // -8) * 8,
    )
    window = config.window and LENGTH * config.window // config.max_length
    return replace(config, depth=depth, block=block, max_length=LENGTH, window=window)


INFO = FamilyInfo(
    "text",
    {"language": {}, "prefix": {"prompt": "bidirectional"}, "embed": {}},
    PRESETS,
    SIZES,
    resize,
)


def _none(lengths: Tensor) -> None:
    """Read nothing of a prompt in both directions."""


def _whole(lengths: Tensor) -> Tensor:
    """Read all of a prompt in both directions."""
    return lengths


# name -> how much of prompts of some lengths is read in both directions
PROMPTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "causal": _none,
    "bidirectional": _whole,
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
        build = partial(
            build_position,
            config.position,
            block.width,
            block.heads,
            block.head_width or block.width // max(1, block.heads),
            max_length=config.max_length,
            bidirectional=config.prompt == "bidirectional",
            share=config.position_share,
        )
        position = near = build(base=config.position_base, scaling=config.scaling)
        if config.near_base is not None:  # of the layers that see only what is near (Gemma 3)
            near = build(base=config.near_base)
        self.near = windowed(config)
        norm = replace(block, norm=config.embed_norm)
        self.embed = RoundedEmbed(
            config.vocab,
            block.width,
            position,
            block.width**0.5 if config.scale_embedding else 1.0,
            block.dropout,
            norm=None if config.embed_norm == "none" else build_norm(norm),
        )
        self.blocks = nn.ModuleList(
            build_block(block, of_layer(near if i in self.near else position))
            for i in range(config.depth)
        )
        self.norm = build_final_norm(block)
        if config.logit_cap is None:
            self.head = Head(block.width, config.vocab, bias=config.head_bias)
        else:
            sizes = block.width, config.vocab, config.head_bias, config.logit_cap
            self.head = CappedHead(*sizes)
        if config.tie:
            self.head.weight = self.embed.tokens.weight
        self.prefix_of = lookup("prompt", config.prompt, PROMPTS)
        lookup("start", config.start, STARTS)(self)

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
        masks = self._masks(ids.shape[1], documents, prefix)
        return self._read(ids, at, at, masks)

    def _read(
        self,
        ids: Tensor,
        at: Tensor,
        everything: Tensor,
        masks: Sequence[Mask | None],
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """Pass tokens through all blocks, with the keys that stand before them."""
        x, mask = self.embed(ids, at), masks[0]
        shared = self.embed.position.shared(at, everything, mask)
        rest = {"norm": self.norm, "at": at, "mask": masks, "bias": shared, "caches": caches}
        return run_blocks(self.blocks, x, **rest)

    def _masks(
        self, length: int, documents: Tensor | None, prefix: Tensor | None
    ) -> list[Mask | None]:
        """Say, for each layer, who may look at whom among tokens that are read at once."""
        far = Causal() if prefix is None else Prefix(prefix)
        if documents is not None:
            if prefix is not None:
                raise UsageError(
                    "packed documents have no prefix; give documents or prefix, not both"
                )
            far = far & Document(documents)
        window = self.config.window
        near = far if window is None or length <= window else Sliding(window) & far
        return self._by_layer(far, near)

    def _by_layer(self, far: Mask | None, near: Mask | None) -> list[Mask | None]:
        """Give each layer the mask of those that see everything before, or of those that do not."""
        return [near if i in self.near else far for i in range(len(self.blocks))]

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
        capacity: int = 256,
    ) -> State:
        """Read prompts but for their last tokens, with which the first step begins."""
        length = source.shape[1] - 1
        if length < 0 or (lengths is not None and bool((lengths < 1).any())):
            raise UsageError("an empty prompt has no last token to go on from; begin with <s>")
        layers = [block.attention for block in cast(list[EncoderBlock], list(self.blocks))]
        like = self.embed.tokens.weight
        caches = take_caches(layers, len(source), like, 2 * length, self.cache)
        prompts = source.new_full((len(source),), length) if lengths is None else lengths - 1
        if length:
            masks = self._masks(length, None, self.prefix_of(prompts))
            at = torch.arange(length, device=source.device).unsqueeze(-1)
            if bool((prompts != length).any()):
                at = at.expand(len(source), -1, -1)  # each will go on from a place of its own
            self._read(source[:, :-1], at, at, masks, caches)
        # what one layer no longer sees, another may
        window = self.config.window if len(self.near) == len(self.blocks) else None
        return self.state(caches, capacity, prompts=prompts, window=window)

    def step(
        self, ids: Int[Tensor, "b l"], state: State
    ) -> tuple[Float[Tensor, "b l vocab"], State]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        at, everything, mask = state.take(ids.shape[1])
        near, window = mask, self.config.window
        if self.near and state.window is None and everything.shape[-2] > cast(int, window):
            near = Sliding(cast(int, window), at, everything) & mask
        masks, tokens = self._by_layer(mask, near), ids.reshape(state.sentences, -1)
        x = self._read(tokens, at, everything, masks, state.caches)
        return self.head.step_logits(x).view(*ids.shape, -1), state


def windowed(config: Any) -> frozenset[int]:
    """Return the numbers of the layers that see only what is within the window."""
    layers = range(config.depth)
    if config.window is None:
        return frozenset()
    return frozenset(layers if config.window_layers is None else config.window_layers) & set(layers)


def within(documents: Int[Tensor, "b l"]) -> Int[Tensor, "b l"]:
    """Count tokens from the beginning of their own document."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return place - place.masked_fill(~new, 0).cummax(1).values
