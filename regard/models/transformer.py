"""The Transformer of "Attention Is All You Need" (Vaswani et al. 2017)."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.masks import Mask, Padding
from regard.attention.places import places
from regard.attention.positions import POSITIONS, Position, of_layer, with_aliases
from regard.errors import lookup
from regard.layers.block import (
    BlockConfig,
    EncoderBlock,
    block_position,
    build_final_norm,
    build_norm,
    size_field,
)
from regard.layers.embed import TIES, TokenEmbedding, tie, ties
from regard.layers.fast.engine import Engine, Parts, engine_of, why_no_engine
from regard.layers.fast.kernel_weights import known_functions
from regard.layers.fast.run import run_blocks
from regard.layers.init import INITS
from regard.layers.norm import NORMS
from regard.layers.shapes import Ids, Lengths
from regard.layers.vocabulary import VocabularyLinear
from regard.models.declaration import EncoderDecoderConfig, FamilyInfo, size_table
from regard.models.decoder import TransformerDecoder
from regard.models.state import State
from regard.settings import setting


@dataclass(frozen=True)
class TransformerConfig(EncoderDecoderConfig):
    """The sizes and parts of an encoder-decoder."""

    block: BlockConfig = field(default_factory=BlockConfig)
    tie: str = setting("all", "tied embeddings", choices=TIES)
    position: str = setting("sinusoidal", "position embedding", choices=with_aliases(POSITIONS))
    position_base: float = setting(10_000.0, "base of the sinusoids or rotations")
    position_layout: str = setting("pairs", "order of sine and cosine", choices=("pairs", "halves"))
    max_length: int = size_field(1024, 10_000_000, "maximum positions")
    scale_embedding: bool = setting(True, "multiply embeddings by the root of the width")
    embed_norm: str = setting("none", "norm of the embeddings", choices=lambda: ("none", *NORMS))
    scale_head: bool = setting(False, "divide the logits by the root of the width")
    head_bias: bool = setting(False, "bias of the vocabulary head")
    init: str = setting("scaled", "initialisation", choices=INITS)


_T5 = TransformerConfig(
    position="t5",
    scale_embedding=False,
    scale_head=True,
    init="t5",
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
        init="normal",
        block=BlockConfig(order="post", feed_forward="gelu"),
    ),
    "marian": TransformerConfig(
        position_layout="halves",
        head_bias=True,
        block=BlockConfig(order="post", feed_forward="swish"),
    ),
}

SIZES = size_table(
    "encoder_depth decoder_depth block.width block.ffn_width block.heads",
    {
        "tiny": (4, 4, 128, 256, 4),
        "small": (3, 3, 256, 1024, 4),
        "base": (6, 6, 512, 2048, 8),
        "big": (6, 6, 1024, 4096, 16),
    },
)
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
    """The encoder-decoder transformer."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        self.config = config
        block = config.block
        tie_sides, tie_head = ties(config)

        def position(bidirectional: bool) -> Position:
            return block_position(
                config.position,
                block,
                base=config.position_base,
                layout=config.position_layout,
                max_length=config.max_length,
                bidirectional=bidirectional,
            )

        source_position, target_position = position(True), position(False)
        scale = block.width**0.5 if config.scale_embedding else 1.0

        def embed(vocab: int, position: Position) -> TokenEmbedding:
            norm = build_norm(block, config.embed_norm)
            return TokenEmbedding(vocab, block.width, position, scale, block.dropout, norm=norm)

        self.source = embed(config.source_vocab, source_position)
        self.target = embed(config.target_vocab, target_position)
        if tie_sides:
            tie(self.target.tokens, self.source.tokens)
        self.encoder = nn.ModuleList(
            EncoderBlock(block, of_layer(source_position)) for _ in range(config.encoder_depth)
        )
        self.decoder = TransformerDecoder(block, config.decoder_depth, target_position)
        self.encoder_norm, self.decoder_norm = build_final_norm(block), build_final_norm(block)
        self.before_head = Scale(block.width**-0.5) if config.scale_head else nn.Identity()
        self.head = VocabularyLinear(block.width, config.target_vocab, bias=config.head_bias)
        if tie_head:
            self.head.weight = self.target.tokens.weight
        lookup("init", config.init, INITS)(self)

    def encode(
        self, source: Int[Tensor, "b s"], mask: Mask | None = None
    ) -> Float[Tensor, "b s w"]:
        """Read source tokens into a memory."""
        at = places(0, source.shape[1], source.device)
        x = self.source(source, at)
        shared = self.source.position.shared(at, at, mask)
        rest = {"norm": self.encoder_norm, "at": at, "mask": mask, "bias": shared}
        return run_blocks(self.encoder, x, **rest)

    def hidden(
        self,
        source: Int[Tensor, "b s"],
        target: Int[Tensor, "b t"],
        source_lengths: Lengths | None = None,
        target_lengths: Lengths | None = None,
    ) -> Float[Tensor, "b t w"]:
        """Decoder's last vectors, before the head."""
        mask = Padding.of(source_lengths, source.shape[1])
        x = self.decoder(self.target, target, self.encode(source, mask), mask)
        return self.before_head(self.decoder_norm(x))

    def forward(self, *texts: Any) -> Float[Tensor, "b t vocab"]:
        """Logits of the token after each target token; takes what `hidden` takes."""
        return self.head(self.hidden(*texts))

    def start(
        self, source: Int[Tensor, "b s"], lengths: Lengths | None = None, *, capacity: int = 256
    ) -> State:
        """Encode the sources, and allocate what decoding will need."""
        mask = Padding.of(lengths, source.shape[1])
        memory = self.encode(source, mask)
        return self.decoder.start(memory, mask, capacity=capacity)

    def step(self, ids: Ids, state: State) -> tuple[Float[Tensor, "b l vocab"], State]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        x = self.before_head(self.decoder_norm(self.decoder.step(self.target, ids, state)))
        return self.head.step_logits(x, state.caches[0]).view(*ids.shape, -1), state

    def engine(
        self, never: Sequence[int] = (), before: Engine | None = None, during: object = None
    ) -> Engine | None:
        """What translates in C with this model, where all of it is known; never some tokens."""
        parts = self._parts()
        return None if parts is None else engine_of(self, parts, never, _FUNCTIONS, before, during)

    def why_no_engine(self) -> str:
        """Why `engine` gives none; "" where it gives one."""
        parts = self._parts()
        if parts is None:
            return f"{type(self).__name__} with {type(self.before_head).__name__} before its head"
        return why_no_engine(self, parts, _FUNCTIONS)

    def _parts(self) -> Parts | None:
        """What an engine must know of it, unless it is another class or scales in another way."""
        scale = self.before_head
        if type(self) is not Transformer or type(scale) not in (nn.Identity, Scale):
            return None
        return Parts(
            self.source,
            self.target,
            list(self.encoder),
            list(self.decoder),
            self.encoder_norm,
            self.decoder_norm,
            self.head,
            scale.factor if isinstance(scale, Scale) else 1.0,
        )


_FUNCTIONS = known_functions(Transformer, TransformerDecoder, Scale)
