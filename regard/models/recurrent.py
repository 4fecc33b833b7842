"""Recurrent encoder-decoders, with a fixed context vector or with attention to the source."""

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.dropout import dropout
from regard.attention.masks import Mask, Padding
from regard.errors import lookup
from regard.layers.block import size_field
from regard.layers.embed import TIES, tie, ties
from regard.layers.init import INITS
from regard.layers.recurrent.attention import ReinforceTape
from regard.layers.recurrent.cells import Cell, init_cells
from regard.layers.recurrent.decoder import (
    CellConfig,
    RecurrentDecoder,
    RecurrentState,
    build_cells,
)
from regard.layers.vocabulary import VocabularyLinear
from regard.models.declaration import EncoderDecoderConfig, FamilyInfo, size_table
from regard.models.stateful import StatefulDecoder
from regard.settings import setting


@dataclass(frozen=True)
class RecurrentConfig(EncoderDecoderConfig):
    """The sizes and parts of a recurrent encoder-decoder."""

    encoder_depth: int = size_field(1, 1000, "encoder layers")
    decoder_depth: int = size_field(1, 1000, "decoder layers")
    block: CellConfig = field(default_factory=CellConfig)
    direction: str = setting(
        "both", "reading direction of the encoder", choices=lambda: _READING_DIRECTIONS
    )
    tie: str = setting("all", "tied embeddings", choices=TIES)
    max_length: int = size_field(1024, 10_000_000, "maximum positions")
    head_bias: bool = setting(False, "bias of the vocabulary head")
    init: str = setting("scaled", "initialisation", choices=INITS)


# name -> for each network of the encoder, whether it runs backward
_READING_DIRECTIONS: dict[str, tuple[bool, ...]] = {
    "forward": (False,),
    "backward": (True,),
    "both": (False, True),
}

# name -> the parts that make the family what it is: Cho et al. 2014 (as the fixed context that
# Bahdanau et al. compare with, but read in both directions, so that only the attention differs),
# Sutskever et al. 2014, Bahdanau et al. 2015 and Luong et al. 2015
PRESETS: dict[str, RecurrentConfig] = {
    "rnnsearch": RecurrentConfig(),
    "rnnenc": RecurrentConfig(block=CellConfig(attention="none")),
    "seq2seq": RecurrentConfig(
        encoder_depth=4,
        decoder_depth=4,
        direction="backward",
        block=CellConfig(1000, attention="none", readout="tanh"),
    ),
    "luong": RecurrentConfig(
        encoder_depth=4,
        decoder_depth=4,
        direction="forward",
        block=CellConfig(1000, attention="bilinear", order="input_feeding", readout="tanh"),
    ),
}

SIZES = size_table(
    "encoder_depth decoder_depth block.width",
    {"tiny": (1, 1, 128), "small": (1, 1, 256), "base": (2, 2, 512), "big": (4, 4, 1024)},
)
# reading word by word takes as many steps, all of which are counted
INFO = FamilyInfo("pair", {"translate": {}}, PRESETS, SIZES, cost_length=64)


class _PermuteRows(torch.autograd.Function):
    """Apply an involutive row permutation; its gradient is the same permutation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> Tensor:  # noqa: D102
        ctx.save_for_backward(order)
        return x.flatten(0, 1).index_select(0, order).view(x.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # noqa: D102
        (order,) = ctx.saved_tensors
        grad = grads[0].contiguous()
        return grad.flatten(0, 1).index_select(0, order).view(grad.shape), None


class RecurrentEncoder(nn.Module):
    """A recurrent encoder: forward, backward, or both concatenated."""

    def __init__(self, config: CellConfig, depth: int, direction: str):
        super().__init__()
        self.from_end = lookup("direction", direction, _READING_DIRECTIONS)
        self.width, self.drop = config.width, config.dropout
        ways, width = len(self.from_end), config.width
        inner = [width] + [ways * width] * (depth - 1)
        self.layers = nn.ModuleList(
            nn.ModuleList(build_cells(config, each, 1)[0] for _ in self.from_end) for each in inner
        )
        self.out_width = ways * width

    def forward(self, x: Float[Tensor, "b s w"], mask: Mask | None) -> Float[Tensor, "b s m"]:
        """Outputs for each word; backward cells begin at the last real one."""
        order = self._backwards(x, mask)
        for layer in self.layers:
            said = []
            for backward, cell in zip(self.from_end, cast(list[Cell], layer), strict=True):
                begin = (x.new_zeros(len(x), self.width),) * cell.parts
                y, _ = cell(_PermuteRows.apply(x, order) if backward else x, begin)
                said.append(_PermuteRows.apply(y, order) if backward else y)
            x = dropout(torch.cat(said, -1), self.drop, self.training)
        return x

    def gist(self, memory: Float[Tensor, "b s m"], mask: Mask | None) -> Float[Tensor, "b m"]:
        """Last output of each direction."""
        last = memory[:, -1]
        if isinstance(mask, Padding):
            ends = mask.keep.sum(1).sub(1).clamp(min=0)
            last = memory[torch.arange(len(ends), device=ends.device), ends]
        parts = zip(
            self.from_end,
            last.split(self.width, -1),
            memory[:, 0].split(self.width, -1),
            strict=True,
        )
        whole = torch.cat([first if backward else last for backward, last, first in parts], -1)
        return whole if not isinstance(mask, Padding) else whole * mask.keep[:, :1]

    @staticmethod
    def _backwards(x: Tensor, mask: Mask | None) -> Tensor:
        """Permutation of rows (b s, ...) that reverses the real words of each text."""
        b, s = x.shape[:2]
        place = torch.arange(s, device=x.device).expand(b, s)
        turned = s - 1 - place
        if isinstance(mask, Padding):
            turned = torch.where(mask.keep, mask.keep.sum(1, keepdim=True) - 1 - place, place)
        return (turned + s * torch.arange(b, device=x.device).unsqueeze(1)).flatten()


class Recurrent(StatefulDecoder):
    """A recurrent encoder-decoder, with attention (Bahdanau et al. 2015) or without."""

    def __init__(self, config: RecurrentConfig):
        super().__init__()
        self.config = config
        block = config.block
        tie_sides, tie_head = ties(config)
        self.source = nn.Embedding(config.source_vocab, block.width)
        self.encoder = RecurrentEncoder(block, config.encoder_depth, config.direction)
        self.decoder = RecurrentDecoder(
            block, config.target_vocab, self.encoder.out_width, config.decoder_depth
        )
        if tie_sides:
            tie(self.decoder.tokens, self.source)
        self.head = VocabularyLinear(block.width, config.target_vocab, bias=config.head_bias)
        if tie_head:
            self.head.weight = self.decoder.tokens.weight
        lookup("init", config.init, INITS)(self)
        init_cells(self)

    def encode(
        self, source: Int[Tensor, "b s"], mask: Mask | None = None
    ) -> Float[Tensor, "b s m"]:
        """Read source tokens into a memory."""
        x = self.source(source) * self.decoder.scale
        return self.encoder(dropout(x, self.decoder.drop, self.training), mask)

    def _begin(self, source: Tensor, lengths: Tensor | None) -> RecurrentState:
        mask = Padding.of(lengths, source.shape[1])
        memory = self.encode(source, mask)
        return self.decoder.begin(memory, mask, context=self.encoder.gist(memory, mask))

    def _read(
        self, ids: Tensor, state: RecurrentState, draws: ReinforceTape | None = None
    ) -> Tensor:
        return self.decoder.read(ids, state, draws)[0]
