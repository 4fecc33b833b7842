"""Causal language models: GPT-2, LLaMA, Mistral, Qwen, Gemma, GPT-NeoX, ..."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

from jaxtyping import Float, Int, Num
from torch import Tensor, nn

from regard.attention.masks import Causal, Document, Mask, Prefix, Sliding, mask_names, own_mask
from regard.attention.multihead import Cache
from regard.attention.places import places
from regard.attention.positions import POSITIONS, RotaryScaling, of_layer, with_aliases
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    EncoderBlock,
    block_position,
    build_block,
    build_final_norm,
    build_norm,
    size_field,
)
from regard.layers.context import windowed, within
from regard.layers.embed import RoundedEmbed
from regard.layers.fast.greedy import DecoderParts, continue_texts, why_no_steps, why_not_greedy
from regard.layers.fast.kernel_weights import known_functions
from regard.layers.fast.run import run_blocks
from regard.layers.init import INITS
from regard.layers.norm import NORMS
from regard.layers.shapes import Ids, Lengths, Vectors
from regard.layers.vocabulary import CappedHead, VocabularyLinear
from regard.models.declaration import FamilyInfo
from regard.models.state import State, take_caches
from regard.settings import setting


@dataclass(frozen=True)
class GPTConfig:
    """The sizes and parts of a decoder-only transformer."""

    vocab: int = size_field(50257, 10_000_000, "vocabulary; a training takes that of the tokenizer")
    depth: int = size_field(12, 1000, "layers")
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(768, 12, 3072, feed_forward="gelu_tanh")
    )
    position: str = setting("learned", "position embedding", choices=with_aliases(POSITIONS))
    position_base: float = setting(10_000.0, "base of the sinusoids or rotations")
    position_share: float = setting(1.0, "share of each head that is rotated", min=0.0, max=1.0)
    near_base: float | None = setting(None, "base of the rotations in windows", above=0.0, max=1e12)
    scaling: RotaryScaling = field(default_factory=RotaryScaling)
    max_length: int = size_field(1024, 10_000_000, "maximum positions")
    window: int | None = size_field(None, 10_000_000, "window of local attention")
    window_layers: tuple[int, ...] | None = setting(None, "layers with a window; all unless given")
    prompt: str = setting("causal", "attention over a prompt", choices=lambda: _PROMPTS)
    mask: str = setting("none", "a mask of your own, beside the usual", choices=mask_names)
    embed_norm: str = setting("none", "norm of the embeddings", choices=lambda: ("none", *NORMS))
    scale_embedding: bool = setting(False, "multiply embeddings by the root of the width")
    tie: bool = setting(True, "tie the head to the embeddings")
    head_bias: bool = setting(False, "bias of the vocabulary head")
    logit_cap: float | None = setting(None, "soft cap of the logits", min=1e-3, max=1e9)
    init: str = setting("gpt", "initialisation", choices=INITS)


def _like(config: GPTConfig, block: dict[str, Any], **changes: Any) -> GPTConfig:
    return replace(config, block=replace(config.block, **block), **changes)


_GPT2 = GPTConfig()
_RMS = {"norm": "rms", "norm_eps": 1e-6, "feed_forward": "swiglu", "bias": False}
_LLAMA = GPTConfig(
    32000, 32, BlockConfig(4096, 32, 11008, **_RMS), position="rotary", max_length=2048, tie=False
)
_GEMMA = GPTConfig(
    256000,
    28,
    BlockConfig(3072, 16, 24576, head_width=256, **_RMS),
    position="rotary",
    max_length=8192,
    scale_embedding=True,
)
_GEMMA = _like(_GEMMA, {"norm": "rms_plus1", "feed_forward": "geglu_tanh"})
# name -> the parts and published sizes of a family's first member: Radford et al. 2019, Touvron et
# al. 2023, Jiang et al. 2023, Scao et al. 2022, Chowdhery et al. 2022 (its 8B), Qwen team 2024 (7B)
# and 2025 (8B), Black et al. 2022, Gemma team 2024 (7B), 2024 (2B) and 2025 (1B)
PRESETS: dict[str, GPTConfig] = {
    "gpt2": _GPT2,
    "llama": _LLAMA,
    "mistral": _like(
        _LLAMA,
        {"ffn_width": 14336, "kv_heads": 8, "norm_eps": 1e-5},
        max_length=32768,
        window=4096,
    ),
    "bloom": _like(
        _GPT2,
        {"width": 14336, "heads": 112, "ffn_width": 57344},
        vocab=250880,
        depth=70,
        position="alibi",
        max_length=2048,
        embed_norm="layer",
    ),
    "palm": _like(
        _LLAMA,
        {"heads": 16, "ffn_width": 16384, "kv_heads": 1, "norm": "layer_nobias", "norm_eps": 1e-5}
        | {"order": "parallel"},
        vocab=256000,
        tie=True,
    ),
    "qwen2": _like(
        _LLAMA,
        {"width": 3584, "heads": 28, "ffn_width": 18944, "kv_heads": 4, "attention_bias": "qkv"},
        vocab=152064,
        depth=28,
        position_base=1e6,
        max_length=32768,
    ),
    "qwen3": _like(
        _LLAMA,
        {"ffn_width": 12288, "kv_heads": 8, "head_width": 128, "head_norm": "rms"},
        vocab=151936,
        depth=36,
        position_base=1e6,
        max_length=40960,
    ),
    "gpt_neox": _like(
        _GPT2,
        {"width": 6144, "heads": 64, "ffn_width": 24576, "order": "parallel_norms"}
        | {"feed_forward": "gelu"},
        vocab=50432,
        depth=44,
        position="rotary_part",
        position_share=0.25,
        max_length=2048,
        tie=False,
    ),
    "gemma": _GEMMA,
    "gemma2": _like(
        _GEMMA,
        {"width": 2304, "heads": 8, "ffn_width": 9216, "kv_heads": 4, "order": "sandwich"}
        | {"score": "capped", "score_cap": 50.0},
        depth=26,
        window=4096,
        window_layers=tuple(range(0, 26, 2)),
        logit_cap=30.0,
    ),
    "gemma3": _like(
        _GEMMA,
        {"width": 1152, "heads": 4, "ffn_width": 6912, "kv_heads": 1, "order": "sandwich"}
        | {"head_norm": "rms_plus1"},
        vocab=262144,
        depth=26,
        position_base=1e6,
        near_base=1e4,
        max_length=32768,
        window=512,
        window_layers=tuple(i for i in range(26) if i % 6 != 5),
    ),
}

# name -> depth, width, heads
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 4, "width": 128, "heads": 4},
    "small": {"depth": 6, "width": 384, "heads": 6},
    "base": {"depth": 12, "width": 768, "heads": 12},
    "big": {"depth": 24, "width": 1024, "heads": 16},
}
_TRAINED_LENGTH = 1024  # tokens that a model of a named size is made for


def resize(config: GPTConfig, size: dict[str, int]) -> GPTConfig:
    """Config in its own proportions, but of this depth, width and number of heads."""
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
    window = config.window and _TRAINED_LENGTH * config.window // config.max_length
    return replace(config, depth=depth, block=block, max_length=_TRAINED_LENGTH, window=window)


_GPT_TASKS = {"language": {}, "prefix": {"prompt": "bidirectional"}, "embed": {}}
INFO = FamilyInfo("text", _GPT_TASKS, PRESETS, SIZES, resize)


def _none(lengths: Tensor) -> None:
    """Attend causally within prompts."""


def _whole(lengths: Tensor) -> Tensor:
    """Attend in both directions within prompts."""
    return lengths


# name -> the length of the bidirectional prefix, by the lengths of prompts
_PROMPTS: dict[str, Callable[[Tensor], Tensor | None]] = {
    "causal": _none,
    "bidirectional": _whole,
}


class GPT(nn.Module):
    """A causal language model: decoder blocks with self-attention only, and a vocabulary head."""

    # the cache of a layer, and the state of decoding
    cache: type[Cache] = Cache
    state: type[State] = State

    def __init__(self, config: GPTConfig, attention: Callable[[], nn.Module] | None = None):
        """Build the model; the attention of each block may be given by what makes it."""
        super().__init__()
        self.config = config
        block = config.block
        build = partial(
            block_position,
            config.position,
            block,
            max_length=config.max_length,
            bidirectional=config.prompt == "bidirectional",
            share=config.position_share,
        )
        position = near = build(base=config.position_base, scaling=config.scaling)
        if config.near_base is not None:  # of the layers with a window (Gemma 3)
            near = build(base=config.near_base)
        self.near = windowed(config)
        self.embed = RoundedEmbed(
            config.vocab,
            block.width,
            position,
            block.width**0.5 if config.scale_embedding else 1.0,
            block.dropout,
            norm=build_norm(block, config.embed_norm),
        )
        self.blocks = nn.ModuleList(
            build_block(
                block,
                of_layer(near if i in self.near else position),
                attention=None if attention is None else attention(),
            )
            for i in range(config.depth)
        )
        self.norm = build_final_norm(block)
        if config.logit_cap is None:
            self.head = VocabularyLinear(block.width, config.vocab, bias=config.head_bias)
        else:
            sizes = block.width, config.vocab, config.head_bias, config.logit_cap
            self.head = CappedHead(*sizes)
        if config.tie:
            self.head.weight = self.embed.tokens.weight
        self.prefix_of = lookup("prompt", config.prompt, _PROMPTS)
        lookup("init", config.init, INITS)(self)

    def hidden(
        self,
        ids: Ids,
        lengths: Lengths | None = None,
        *,
        at: Num[Tensor, "... l 1"] | None = None,
        documents: Ids | None = None,
        prefix: Lengths | None = None,
    ) -> Vectors:
        """Last vectors, before the head.

        Padding comes last, so that no real token attends to it. Packed `documents`, numbered, do
        not attend to each other, and positions are counted from their own beginning. The first
        `prefix` tokens of each text attend to each other in both directions.

        Args:
            ids: token ids
            lengths: real tokens of each text; all unless given
            at: positions; from 0 on unless given
            documents: number of the packed document that each token belongs to
            prefix: first tokens of each text that see each other in both directions
        """
        if at is None and documents is not None:
            at = within(documents)
        if at is None:
            at = places(0, ids.shape[1], ids.device)
        masks = self._masks(at, documents, prefix)
        return self._read(ids, at, at, masks)

    def _read(
        self,
        ids: Tensor,
        at: Tensor,
        everything: Tensor,
        masks: Sequence[Mask | None],
        caches: Sequence[Cache] | None = None,
    ) -> Tensor:
        """Pass tokens through all blocks, with the cached keys and values before them."""
        x, mask = self.embed(ids, at), masks[0]
        shared = self.embed.position.shared(at, everything, mask)
        rest = {"norm": self.norm, "at": at, "mask": masks, "bias": shared, "caches": caches}
        return run_blocks(self.blocks, x, **rest)

    def _masks(
        self, at: Tensor, documents: Tensor | None, prefix: Tensor | None
    ) -> list[Mask | None]:
        """Mask of each layer for tokens that are read at once."""
        far = Causal() if prefix is None else Prefix(prefix)
        if documents is not None:
            if prefix is not None:
                raise UsageError(
                    "packed documents have no prefix; give documents or prefix, not both"
                )
            far = far & Document(documents)
        far, length = cast(Mask, own_mask(self.config.mask, at, at, far)), at.shape[-2]
        window = self.config.window
        near = far if window is None or length <= window else Sliding(window) & far
        return self._by_layer(far, near)

    def _by_layer(self, far: Mask | None, near: Mask | None) -> list[Mask | None]:
        """Give each layer the causal mask, or the one with a window."""
        return [near if i in self.near else far for i in range(len(self.blocks))]

    def forward(self, *texts: Any, **rest: Any) -> Float[Tensor, "b l vocab"]:
        """Logits of the token after each token; takes what `hidden` takes."""
        return self.head(self.hidden(*texts, **rest))

    def start(
        self, source: Int[Tensor, "b s"], lengths: Lengths | None = None, *, capacity: int = 256
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
            at = places(0, length, source.device)
            masks = self._masks(at, None, self.prefix_of(prompts))
            if bool((prompts != length).any()):
                at = at.expand(len(source), -1, -1)  # each will go on from a place of its own
            self._read(source[:, :-1], at, at, masks, caches)
        # keys outside of one layer's window are still needed by a layer without one
        window = self.config.window if len(self.near) == len(self.blocks) else None
        return self.state(caches, capacity, prompts=prompts, window=window)

    def step(self, ids: Ids, state: State) -> tuple[Float[Tensor, "b l vocab"], State]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        at, everything, mask = state.take(ids.shape[1])
        mask = own_mask(self.config.mask, at, everything, mask)
        near, window = mask, self.config.window
        if self.near and state.window is None and everything.shape[-2] > cast(int, window):
            near = Sliding(cast(int, window), at, everything) & mask
        masks, tokens = self._by_layer(mask, near), ids.reshape(state.sentences, -1)
        x = self._read(tokens, at, everything, masks, state.caches)
        return self.head.step_logits(x, state.caches[0]).view(*ids.shape, -1), state

    def continue_texts(
        self,
        texts: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        ends: Sequence[int] = (),
        never: Sequence[int] = (),
    ) -> list[tuple[list[int], list[float]]] | None:
        """The most likely tokens after each text and their log-probabilities, all steps in C.

        Returns nothing where the kernel does not know the model exactly.
        """
        more = {"ends": ends, "never": never}
        return continue_texts(self, self._parts(), _FUNCTIONS, texts, limits, **more)

    def why_no_engine(self) -> str:
        """Why `continue_texts` gives none; "" where it gives some."""
        if (parts := self._parts()) is None:
            own = f"{type(self).__name__} with a {self.config.prompt} prompt"
            return own if self.config.mask == "none" else f"{own} and the mask {self.config.mask}"
        return why_not_greedy(self, parts, _FUNCTIONS)

    def why_no_steps(self) -> str:
        """Why its steps are not computed in C, whoever searches; "" where they are."""
        return why_no_steps(list(self.blocks), self.norm, self.head)

    def _parts(self) -> DecoderParts | None:
        """What a kernel must know of it, unless it is another class or reads in another way."""
        usual = self.config.prompt == "causal" and self.config.mask == "none"
        if type(self) is not GPT or not usual:
            return None
        return DecoderParts(self.embed, list(self.blocks), self.norm, self.head, self.config.window)


_FUNCTIONS = known_functions(GPT)
