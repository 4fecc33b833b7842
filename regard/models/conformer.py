"""Speech encoders: the Conformer (Gulati et al. 2020), and a transformer on the same stem."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.attention.dropout import dropout
from regard.attention.masks import Padding
from regard.attention.places import places
from regard.attention.positions import POSITIONS, Position, of_layer, with_aliases
from regard.attention.shapes import cheap_to_ask
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    EncoderBlock,
    block_position,
    build_final_norm,
    prob_field,
    size_field,
)
from regard.layers.conformer import CONVOLUTION_NORMS, ConformerBlock
from regard.layers.fast.alone import computed_alone, each_alone
from regard.layers.fast.run import run_blocks
from regard.layers.heads import POOLERS, ClassificationHead, NoHead, TokenClassify
from regard.layers.init import INITS
from regard.layers.layout import Layout, full_layout, time_grid
from regard.layers.residual import drop_path_schedule
from regard.layers.shapes import Ids, Lengths, Vectors
from regard.layers.subsampling import Subsampling, zero_padding
from regard.layers.vocabulary import VocabularyLinear
from regard.models.declaration import FamilyInfo, size_table, with_changes
from regard.models.decoder import TextDecoder
from regard.models.state import State
from regard.settings import setting

Sound = Float[Tensor, "b t mels"]


@dataclass(frozen=True)
class ConformerConfig:
    """The sizes and parts of a speech encoder, and its heads: CTC, a decoder, both, or labels."""

    mels: int = size_field(80, 4096, "number of mel filters")
    vocab: int = setting(
        32, "vocabulary; a training takes that of the tokenizer", min=0, max=10_000_000
    )
    labels: int = setting(0, "labels; a training takes those of the data", min=0, max=10_000_000)
    subsampling: int = setting(4, "frames per vector of the encoder", min=2, max=4)
    channels: int = size_field(144, 2**16, "channels of the subsampling")
    encoder: str = setting("conformer", "encoder blocks", choices=lambda: _SPEECH_ENCODERS)
    depth: int = size_field(16, 1000, "layers")
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(144, 4, 576, feed_forward="swish", dropout=0.1)
    )
    kernel: int = size_field(31, 2**12, "kernel size of the convolutions")
    convolution_norm: str = setting("batch", "norm of the convolutions", choices=CONVOLUTION_NORMS)
    position: str = setting("xl", "position embedding", choices=with_aliases(POSITIONS))
    position_base: float = setting(10_000.0, "base of the sinusoids or rotations")
    max_frames: int = size_field(4096, 10_000_000, "maximum frames")
    drop_path: float = prob_field(0.0, "stochastic depth")
    ctc: bool = setting(True, "CTC head")
    decoder_depth: int = setting(0, "decoder layers", min=0, max=1000)
    decoder_position: str = setting(
        "sinusoidal", "position embedding of the decoder", choices=with_aliases(POSITIONS)
    )
    max_length: int = size_field(512, 10_000_000, "maximum positions")
    pool: str = setting("mean", "pooling", choices=POOLERS)
    init: str = setting("scaled", "initialisation", choices=INITS)


_CONFORMER = ConformerConfig()
# name -> Gulati et al. 2020; the encoder of Vaswani et al. 2017 on the same stem
PRESETS: dict[str, ConformerConfig] = {
    "conformer": _CONFORMER,
    "speech_transformer": replace(
        _CONFORMER, encoder="transformer", position="sinusoidal", depth=32
    ),
}

# micro is for a few words, as spoken digits; small, base and big are S, M and L of the paper
SIZES = size_table(
    "depth block.width block.ffn_width block.heads channels kernel",
    {
        "micro": (4, 48, 144, 4, 24, 15),
        "tiny": (4, 144, 576, 4, 64, 31),
        "small": (16, 144, 576, 4, 144, 31),
        "base": (16, 256, 1024, 4, 256, 31),
        "big": (17, 512, 2048, 8, 512, 31),
    },
)


def resize(config: ConformerConfig, size: dict[str, Any]) -> ConformerConfig:
    """Config in a size; a transformer has twice as many blocks, each half as large."""
    deeper = 2 if config.encoder == "transformer" else 1
    return with_changes(config, {**size, "depth": deeper * size["depth"]})


_CONFORMER_TASKS: dict[str, dict[str, Any]] = {
    "transcribe": {"labels": 0},
    "sounds": {"vocab": 0, "decoder_depth": 0},
}
INFO = FamilyInfo("sound", _CONFORMER_TASKS, PRESETS, SIZES, resize, cost_length=1000)


def _conformer(config: ConformerConfig, position: Position, path: float) -> nn.Module:
    parts = {"kernel": config.kernel, "norm": config.convolution_norm}
    return ConformerBlock(config.block, position, path, **parts)


def _transformer(config: ConformerConfig, position: Position, path: float) -> nn.Module:
    return EncoderBlock(config.block, position, path)


# name -> how to make a block of the encoder, and the norm after the last of them
Make = Callable[[ConformerConfig, Position, float], nn.Module]
_SPEECH_ENCODERS: dict[str, tuple[Make, Callable[[BlockConfig], nn.Module]]] = {
    "conformer": (_conformer, lambda block: nn.Identity()),
    "transformer": (_transformer, build_final_norm),
}


class SpeechTextDecoder(TextDecoder):
    """A transformer decoder of texts with cross-attention to frames, and its tied head."""

    def __init__(self, config: ConformerConfig):
        super().__init__()
        place, length = config.decoder_position, config.max_length
        self.add_parts(config.vocab, config.block, config.decoder_depth, place, length)

    def forward(self, target: Tensor, memory: Tensor, mask: Padding | None) -> Tensor:
        """Last vectors of whole targets."""
        return self.norm(self.blocks(self.embed, target, memory, mask))

    def step(self, ids: Tensor, state: State) -> Tensor:
        """Last vectors of the next tokens of all hypotheses."""
        return self.norm(self.blocks.step(self.embed, ids, state))


def build_readout(config: ConformerConfig) -> nn.Module:
    """Make what stands on the frames: logits of labels, of CTC, or nothing."""
    if config.labels:
        return ClassificationHead(
            config.block.width, config.labels, config.block.dropout, config.pool
        )
    if config.vocab and config.ctc:
        return TokenClassify(config.block.width, config.vocab, 0.0)
    return NoHead()


def check(config: ConformerConfig) -> None:
    """Refuse heads that do not fit each other."""
    if config.labels and (config.vocab or config.decoder_depth):
        raise UsageError(
            f"labels={config.labels} beside vocab={config.vocab}; a model has labels or writes "
            "text: set one of them to 0"
        )
    if config.decoder_depth and not config.vocab:
        raise UsageError(
            f"decoder_depth={config.decoder_depth} without a vocabulary; set vocab, or 0 blocks"
        )
    if config.vocab and not (config.ctc or config.decoder_depth):
        raise UsageError(
            f"vocab={config.vocab} without a head that writes; set ctc=true or decoder_depth"
        )


class Conformer(nn.Module):
    """A speech encoder of Conformer or transformer blocks: CTC, a decoder, both, or labels.

    Padding of a sound and its neighbours in a batch never matter: where nothing is learned, not to
    the last bit. Blank, in CTC, is token 0.
    """

    def __init__(self, config: ConformerConfig):
        super().__init__()
        check(config)
        self.config = config
        block = config.block
        self.stride, self.out_width = config.subsampling, block.width
        self.stem = Subsampling(config.mels, config.channels, block.width, config.subsampling)
        self.position = block_position(
            config.position,
            block,
            base=config.position_base,
            max_length=config.max_frames,
            bidirectional=True,
        )
        make, final_norm = lookup("encoder", config.encoder, _SPEECH_ENCODERS)
        self.encoder = nn.ModuleList(
            make(config, of_layer(self.position), path)
            for path in drop_path_schedule(config.drop_path, config.depth)
        )
        self.norm = final_norm(block)
        self.readout = build_readout(config)
        self.decoder = SpeechTextDecoder(config) if config.decoder_depth else None
        lookup("init", config.init, INITS)(self)

    def out_lengths(self, lengths: Lengths) -> Lengths:
        """Number of the encoder's frames for sounds of so many frames."""
        return self.stem.out_lengths(lengths)

    def encode(
        self, sound: Sound, lengths: Lengths | None = None
    ) -> tuple[Float[Tensor, "b s w"], Lengths]:
        """Read spectrograms into a memory, zero at padding, and return its lengths too."""
        (memory,), lengths = self.encode_at(sound, lengths, [len(self.encoder)])
        return memory, lengths

    def encode_at(
        self, sound: Sound, lengths: Lengths | None, depths: Sequence[int]
    ) -> tuple[list[Float[Tensor, "b s w"]], Lengths]:
        """Memory as it is after each of these numbers of blocks, and its lengths.

        The depths ascend; CTC on one in the middle is intermediate CTC (Lee and Watanabe 2021).
        """
        if lengths is None:
            lengths = torch.full((sound.shape[0],), sound.shape[1], device=sound.device)
        out = self.out_lengths(lengths)
        if computed_alone(sound, self.training):
            each = each_alone(lambda one: torch.cat(self._encode(one, depths), -1), sound, lengths)
            return list(each.split(self.out_width, -1)), out
        if sound.is_meta:
            return self._encode(sound, depths), out
        if cheap_to_ask(lengths):  # what is padding in all of them is left out
            sound = sound[:, : max(1, int(lengths.max()))]
        return self._encode(sound, depths, lengths), out

    def _encode(
        self, sound: Sound, depths: Sequence[int], lengths: Lengths | None = None
    ) -> list[Float[Tensor, "b s w"]]:
        x, mask = self.stem(sound, Padding.of(lengths, sound.shape[1]))
        at = places(0, x.shape[1], x.device)
        x = dropout(self.position.embed(x, at), self.config.block.dropout, self.training)
        bias = self.position.shared(at, at, mask)
        blocks, memories = list(self.encoder), []
        for begin, end in pairwise([0, *depths]):
            x = run_blocks(blocks[begin:end], x, at=at, mask=mask, bias=bias)
            memories.append(zero_padding(self.norm(x), mask))
        return memories

    def layout(self, size: tuple[int, int]) -> dict[str, Layout]:
        """Layout of the encoder's attention over a spectrogram of (mels, frames)."""
        columns = int(self.out_lengths(torch.tensor([size[1]])))
        grid = time_grid(columns, self.stride, size[1])
        return {f"encoder.{n}.attention": full_layout(grid, grid) for n in range(len(self.encoder))}

    def forward(
        self,
        sound: Sound,
        lengths: Lengths | None = None,
        target: Int[Tensor, "b l"] | None = None,
    ) -> Float[Tensor, "b *s n"]:
        """Logits of labels (b, labels), or of CTC (b, s, vocab).

        Without either they are the vectors of the frames (b, s, w). Given a target they are the
        decoder's, of the token after each target token (b, l, vocab).
        """
        if target is not None:
            return self.head(self.hidden(sound, target, lengths))
        return self._read(*self.encode(sound, lengths))

    def _read(self, memory: Tensor, lengths: Tensor | None) -> Tensor:
        if lengths is not None and computed_alone(memory, self.training):
            return each_alone(self.readout, memory, lengths)
        return self.readout(memory, lengths)

    def ctc_logits(
        self, memory: Float[Tensor, "b s w"], lengths: Lengths | None = None
    ) -> Float[Tensor, "b s vocab"]:
        """Logits of every token, and of blank (0), in each frame of a memory.

        With the lengths of the memory, those of a sound are the same to the last bit in any batch.
        """
        if not (self.config.ctc and self.config.vocab):
            raise UsageError("this model has no CTC head; it was made with ctc=false or vocab=0")
        return self._read(memory, lengths)

    @property
    def head(self) -> VocabularyLinear:
        """Head of the decoder."""
        return self._writer.head

    @property
    def _writer(self) -> SpeechTextDecoder:
        if self.decoder is None:
            raise UsageError("this model has no decoder; it was made with decoder_depth=0")
        return self.decoder

    def decode(
        self, memory: Float[Tensor, "b s w"], lengths: Lengths, target: Int[Tensor, "b l"]
    ) -> Vectors:
        """Decoder's last vectors for whole targets over a memory, before the head."""
        return self._writer(target, memory, Padding.of(lengths, memory.shape[1]))

    def hidden(
        self,
        sound: Sound,
        target: Int[Tensor, "b l"],
        lengths: Lengths | None = None,
        target_lengths: Lengths | None = None,
    ) -> Vectors:
        """Decoder's last vectors of whole targets, before the head."""
        return self.decode(*self.encode(sound, lengths), target)

    def start(self, source: Sound, lengths: Lengths | None = None, *, capacity: int = 256) -> State:
        """Encode the sounds, and allocate what decoding will need."""
        return self.start_from(*self.encode(source, lengths), capacity=capacity)

    def start_from(
        self, memory: Float[Tensor, "b s w"], lengths: Lengths, *, capacity: int = 256
    ) -> State:
        """Allocate what decoding needs over a memory that was encoded before."""
        mask = Padding.of(lengths, memory.shape[1])
        return self._writer.blocks.start(memory, mask, capacity=capacity)

    def step(self, ids: Ids, state: State) -> tuple[Float[Tensor, "b l vocab"], State]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        x = self._writer.step(ids, state)
        return self.head.step_logits(x, state.caches[0]).view(*ids.shape, -1), state
