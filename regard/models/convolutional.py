"""Convolutional sequence-to-sequence learning (Gehring et al. 2017)."""

import math
from dataclasses import dataclass, field
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.dropout import dropout
from regard.attention.masks import Mask, Padding
from regard.attention.places import places
from regard.attention.positions import Position, build_position
from regard.errors import lookup
from regard.layers.block import prob_field, size_field
from regard.layers.embed import TIES, TokenEmbedding, tie, ties
from regard.layers.init import distinct_parts
from regard.layers.recurrent.attention import ReinforceTape
from regard.layers.recurrent.decoder import RecurrentState
from regard.layers.shapes import Vectors
from regard.layers.vocabulary import VocabularyLinear
from regard.models.declaration import EncoderDecoderConfig, FamilyInfo, size_table
from regard.models.stateful import StatefulDecoder
from regard.settings import setting

_HALF = math.sqrt(0.5)  # keeps the variance of a sum of two


@dataclass(frozen=True)
class GatedConfig:
    """What a layer of gated convolutions is made of."""

    width: int = size_field(512, 2**16, "model width")
    kernel: int = size_field(3, 255, "kernel size of the convolutions")
    dropout: float = prob_field(0.2, "dropout")


@dataclass(frozen=True)
class ConvolutionalConfig(EncoderDecoderConfig):
    """The sizes and parts of a convolutional encoder-decoder."""

    encoder_depth: int = size_field(15, 1000, "encoder layers")
    decoder_depth: int = size_field(15, 1000, "decoder layers")
    block: GatedConfig = field(default_factory=GatedConfig)
    position: str = setting("learned", "position embedding", choices=lambda: _ADDED_POSITIONS)
    tie: str = setting("all", "tied embeddings", choices=TIES)
    max_length: int = size_field(1024, 10_000_000, "maximum positions")
    head_bias: bool = setting(False, "bias of the vocabulary head")


# positions that are added to embeddings
_ADDED_POSITIONS = dict.fromkeys(["learned", "sinusoidal", "none"])

PRESETS: dict[str, ConvolutionalConfig] = {"convs2s": ConvolutionalConfig()}

SIZES = size_table(
    "encoder_depth decoder_depth block.width",
    {"tiny": (3, 3, 128), "small": (4, 4, 224), "base": (8, 8, 512), "big": (15, 15, 768)},
)
INFO = FamilyInfo("pair", {"translate": {}}, PRESETS, SIZES)


class Normed(nn.Module):
    """A linear map whose rows have a length and a direction (Salimans and Kingma 2016)."""

    def __init__(self, inner: int, outer: int, gain: float = 1.0):
        super().__init__()
        self.gain = gain
        self.direction = nn.Parameter(torch.empty(outer, inner))
        self.length = nn.Parameter(torch.empty(outer))
        self.bias = nn.Parameter(torch.zeros(outer))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise so that the variance of the output is that of the input, times the gain."""
        nn.init.normal_(self.direction, std=math.sqrt(self.gain / self.direction.shape[1]))
        with torch.no_grad():
            self.length.copy_(self.direction.norm(dim=1))

    def forward(self, x: Tensor) -> Tensor:
        """W x + b."""
        scale = self.length / self.direction.norm(dim=1)
        return F.linear(x, self.direction * scale.unsqueeze(1), self.bias)


class GatedConvolution(nn.Module):
    """A convolution of width `kernel` and a gated linear unit."""

    def __init__(self, config: GatedConfig):
        super().__init__()
        self.kernel, self.drop = config.kernel, config.dropout
        gain = 4 * (1 - config.dropout)  # of which the gate leaves a quarter
        self.map = Normed(config.kernel * config.width, 2 * config.width, gain)

    def forward(self, x: Vectors) -> Float[Tensor, "b t w"]:
        """One vector for each full window."""
        x = dropout(x, self.drop, self.training)
        places = x.shape[1] - self.kernel + 1
        near = [x[:, i : i + places] for i in range(self.kernel)]
        return F.glu(self.map(torch.cat(near, -1)))


class EncoderLayer(nn.Module):
    """A centred convolution with a residual."""

    def __init__(self, config: GatedConfig):
        super().__init__()
        self.gated = GatedConvolution(config)
        before = (config.kernel - 1) // 2
        self.around = (0, 0, before, config.kernel - 1 - before)

    def forward(self, x: Float[Tensor, "b s w"], keep: Tensor | None) -> Float[Tensor, "b s w"]:
        """Convolve; padding is zero."""
        x = x if keep is None else x * keep
        return (x + self.gated(F.pad(x, self.around))) * _HALF


class Cross(nn.Module):
    """Attention to the source: keys are encoder outputs, values add the embeddings."""

    heads = 1

    def __init__(self, width: int):
        super().__init__()
        self.ask, self.out = Normed(width, width), Normed(width, width)

    def forward(
        self,
        x: Float[Tensor, "b q w"],
        words: Float[Tensor, "b q w"],
        keys: Float[Tensor, "b s w"],
        values: Float[Tensor, "b s w"],
        mask: Mask | None,
    ) -> Float[Tensor, "b q w"]:
        """Weighted mean of the values, scaled by the root of their number.

        Args:
            x: states of the decoder
            words: embeddings of its words
            keys: outputs of the encoder
            values: outputs of the encoder plus embeddings
            mask: which places are real
        """
        q = (self.ask(x) + words) * _HALF
        seen = attend(
            q.unsqueeze(1),
            keys.unsqueeze(1),
            values.unsqueeze(1),
            score="product",
            mask=mask,
            watch=self,
        ).squeeze(1)
        count = keys.shape[1]
        if isinstance(mask, Padding):
            count = mask.keep.sum(1).clamp(min=1).to(seen.dtype).view(-1, 1, 1)
        return self.out(seen * count**0.5)


class DecoderLayer(nn.Module):
    """A causal convolution, then attention to the source."""

    def __init__(self, config: GatedConfig):
        super().__init__()
        self.gated = GatedConvolution(config)
        self.cross = Cross(config.width)

    def forward(
        self,
        x: Float[Tensor, "r t w"],
        words: Float[Tensor, "r t w"],
        past: Float[Tensor, "r k w"],
        state: RecurrentState,
    ) -> tuple[Float[Tensor, "r t w"], Tensor]:
        """Read new tokens after the cached ones, and return the cache then."""
        whole = torch.cat([past, x], 1)
        y = self.gated(whole)
        asks, said = (z.reshape(state.sentences, -1, z.shape[-1]) for z in (y, words))
        seen = self.cross(asks, said, state.keys, state.memory, state.mask).view(y.shape)
        return (x + (y + seen) * _HALF) * _HALF, whole[:, whole.shape[1] - past.shape[1] :]


class Convolutional(StatefulDecoder):
    """A convolutional encoder-decoder with attention in every decoder layer."""

    def __init__(self, config: ConvolutionalConfig):
        super().__init__()
        self.config = config
        block = config.block
        width = block.width
        tie_sides, tie_head = ties(config)
        lookup("position", config.position, _ADDED_POSITIONS)

        def embed(vocab: int, both: bool) -> TokenEmbedding:
            position: Position = build_position(
                config.position,
                width,
                1,
                width,
                max_length=config.max_length,
                bidirectional=both,
            )
            return TokenEmbedding(vocab, width, position, 1.0, block.dropout)

        self.source, self.target = (
            embed(config.source_vocab, True),
            embed(config.target_vocab, False),
        )
        if tie_sides:
            tie(self.target.tokens, self.source.tokens)
        gain = 1 - block.dropout
        self.source_in, self.target_in = Normed(width, width, gain), Normed(width, width, gain)
        self.source_out, self.target_out = Normed(width, width), Normed(width, width)
        self.encoder = nn.ModuleList(EncoderLayer(block) for _ in range(config.encoder_depth))
        self.decoder = nn.ModuleList(DecoderLayer(block) for _ in range(config.decoder_depth))
        self.head = VocabularyLinear(width, config.target_vocab, bias=config.head_bias)
        if tie_head:
            self.head.weight = self.target.tokens.weight
        for part in distinct_parts(self):
            if isinstance(part, nn.Embedding):
                nn.init.normal_(part.weight, std=0.1)

    def encode(
        self, source: Int[Tensor, "b s"], mask: Mask | None = None
    ) -> tuple[Float[Tensor, "b s w"], Float[Tensor, "b s w"]]:
        """Encode source tokens to keys, and to values that have the embeddings added."""
        words = self.source(source, self._at(source, 0))
        keep = mask.keep.unsqueeze(-1) if isinstance(mask, Padding) else None
        x = self.source_in(words)
        for layer in self.encoder:
            x = layer(x, keep)
        keys = _ScaleGradient.apply(self.source_out(x), 0.5 / len(self.decoder))
        return keys, (keys + words) * _HALF

    @staticmethod
    def _at(ids: Tensor, first: int | Tensor) -> Tensor:
        """Positions (l, 1) of tokens (r, l) from the first on, or (r, l, 1) for sentences' own."""
        if isinstance(first, int):
            return places(first, first + ids.shape[1], ids.device)
        first = first.repeat_interleave(len(ids) // len(first)).unsqueeze(1)
        return (torch.arange(ids.shape[1], device=ids.device) + first).unsqueeze(-1)

    def _begin(self, source: Tensor, lengths: Tensor | None) -> RecurrentState:
        mask = Padding.of(lengths, source.shape[1])
        keys, memory = self.encode(source, mask)
        block = self.config.block
        past = memory.new_zeros(len(source), block.kernel - 1, block.width)
        return RecurrentState(memory, keys, mask, [(past,)] * len(self.decoder))

    def _read(
        self, ids: Tensor, state: RecurrentState, draws: ReinforceTape | None = None
    ) -> Tensor:
        """Pass the next tokens of all hypotheses through all layers."""
        words = self.target(ids, self._at(ids, state.length))
        x = self.target_in(words)
        for i, layer in enumerate(cast(list[DecoderLayer], self.decoder)):
            x, past = layer(x, words, *state.parts[i], state)
            state.parts[i] = (past,)
        state.length += ids.shape[1]
        return dropout(self.target_out(x), self.config.block.dropout, self.training)


class _ScaleGradient(torch.autograd.Function):
    """x, with its gradient scaled: every decoder layer attends to the same keys."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:  # noqa: D102
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        return grads[0] * ctx.factor, None
