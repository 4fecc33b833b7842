"""Whisper: sound to text by a transformer of windows of 30 seconds (Radford et al. 2022)."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.dropout import dropout
from regard.attention.masks import Padding
from regard.attention.places import places
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    EncoderBlock,
    block_position,
    build_final_norm,
    size_field,
)
from regard.layers.embed import TokenEmbedding
from regard.layers.fast.alone import each_alone
from regard.layers.fast.greedy import why_no_steps
from regard.layers.fast.half import half_asked
from regard.layers.fast.run import run_blocks
from regard.layers.fast.stack import packed_stack
from regard.layers.init import INITS
from regard.layers.shapes import Ids, Lengths
from regard.layers.subsampling import zero_padding
from regard.layers.vocabulary import VocabularyLinear
from regard.models.declaration import FamilyInfo, size_table
from regard.models.decoder import TransformerDecoder
from regard.models.state import State
from regard.settings import setting

_FRAME_STRIDE = 2  # frames of the spectrogram for each vector of the encoder


@dataclass(frozen=True)
class WhisperConfig:
    """The sizes and parts of a Whisper model."""

    mels: int = size_field(80, 512, "number of mel filters")
    vocab: int = size_field(51865, 10_000_000, "vocabulary; a training takes that of the tokenizer")
    encoder_depth: int = size_field(4, 1000, "encoder layers")
    decoder_depth: int = size_field(4, 1000, "decoder layers")
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(384, 6, 1536, feed_forward="gelu", dropout=0.0)
    )
    max_frames: int = size_field(1500, 1_000_000, "vectors of the encoder, of two frames each")
    max_length: int = size_field(448, 1_000_000, "maximum tokens of a text")
    full_window: bool = setting(True, "pad every sound to the whole window")
    init: str = setting("normal", "initialisation", choices=INITS)

    labels: ClassVar[int] = 0  # it has no head for classes
    ctc: ClassVar[bool] = False  # nor one for CTC


PRESETS: dict[str, WhisperConfig] = {"whisper": WhisperConfig()}
_SIZES = {
    "tiny": (4, 4, 384, 1536, 6),
    "small": (12, 12, 768, 3072, 12),
    "base": (6, 6, 512, 2048, 8),
    "medium": (24, 24, 1024, 4096, 16),
    "big": (32, 32, 1280, 5120, 20),
}
SIZES = size_table("encoder_depth decoder_depth block.width block.ffn_width block.heads", _SIZES)
INFO = FamilyInfo("sound", {"transcribe": {}}, PRESETS, SIZES)


def sinusoid_table(length: int, width: int) -> Float[Tensor, "l w"]:
    """Whisper's sinusoids: sines, then cosines, whose slowest period is 10,000 * 2 pi."""
    rates = 10_000.0 ** -torch.linspace(0, 1, width // 2, dtype=torch.float64)
    angles = torch.arange(length, dtype=torch.float64).unsqueeze(1) * rates
    return torch.cat([angles.sin(), angles.cos()], 1).float()


class Stem(nn.Module):
    """Two convolutions of width 3, the second with stride 2, each with GELU; plus sinusoids."""

    def __init__(self, mels: int, width: int, length: int, drop: float):
        super().__init__()
        if width % 2:
            raise UsageError(f"sinusoidal positions need an even width, not {width}")
        self.first = nn.Conv1d(mels, width, 3, padding=1)
        self.second = nn.Conv1d(width, width, 3, stride=_FRAME_STRIDE, padding=1)
        self.drop = drop
        # part of a checkpoint, but not trained
        self.positions = nn.Buffer(sinusoid_table(length, width))

    def forward(
        self, sound: Float[Tensor, "b t mels"], mask: Padding | None = None
    ) -> Float[Tensor, "b s w"]:
        """One vector for every two frames; those of padding count as zeros."""
        x = F.gelu(self.first(zero_padding(sound, mask).mT))
        x = F.gelu(self.second(zero_padding(x.mT, mask).mT)).mT
        return dropout(x + self.positions[: x.shape[1]], self.drop, self.training)


class Whisper(nn.Module):
    """A transformer that reads log-mel spectrograms and writes what is said."""

    stride = _FRAME_STRIDE

    def __init__(self, config: WhisperConfig):
        super().__init__()
        self.config = config
        block = config.block
        self.out_width = block.width
        self.stem = Stem(config.mels, block.width, config.max_frames, block.dropout)
        self.encoder = nn.ModuleList(EncoderBlock(block) for _ in range(config.encoder_depth))
        position = block_position("learned", block, max_length=config.max_length)
        self.target = TokenEmbedding(config.vocab, block.width, position, 1.0, block.dropout)
        self.decoder = TransformerDecoder(block, config.decoder_depth, position)
        self.encoder_norm, self.decoder_norm = build_final_norm(block), build_final_norm(block)
        self.head = VocabularyLinear(block.width, config.vocab, bias=False)
        self.head.weight = self.target.tokens.weight
        lookup("init", config.init, INITS)(self)

    def why_no_engine(self) -> str:
        """Why the search is not in C; its steps are."""
        return "texts of sounds are searched for in Python"

    def why_no_steps(self) -> str:
        """Why its steps, or its encoder, are not computed in C; "" where both are."""
        if packed_stack(list(self.encoder), self.encoder_norm) is None:
            return "a block of its encoder is one that no kernel knows"
        return why_no_steps(list(self.decoder), self.decoder_norm, self.head)

    def out_lengths(self, lengths: Lengths) -> Lengths:
        """Number of the encoder's vectors for sounds of so many frames, each by itself."""
        if self.config.full_window:
            return torch.full_like(lengths, self.config.max_frames)
        return (lengths + _FRAME_STRIDE - 1) // _FRAME_STRIDE

    def encode(
        self, sound: Float[Tensor, "b t mels"], lengths: Lengths | None = None
    ) -> tuple[Float[Tensor, "b s w"], Lengths]:
        """Memory of spectrograms, zero at padding, and its lengths too.

        Those of a full window hold for the zeros after a sound as well.
        """
        frames, most = sound.shape[1], _FRAME_STRIDE * self.config.max_frames
        if frames > most:
            raise UsageError(
                f"{frames} frames of sound are more than the {most} that this model reads at once; "
                "cut the sound into windows"
            )
        if lengths is None:
            lengths = torch.full((sound.shape[0],), frames, device=sound.device)
        real = Padding.of(lengths, frames)
        if self.config.full_window:
            sound, real = F.pad(zero_padding(sound, real), (0, 0, 0, most - frames)), None
        if half_asked([self], sound):  # rounding makes the least difference in a batch a large one
            each = torch.full_like(lengths, sound.shape[1]) if real is None else lengths
            x = each_alone(self.stem, sound, each)
        else:
            x = self.stem(sound, real)
        lengths = self.out_lengths(lengths)
        mask = Padding.of(lengths, x.shape[1])
        at = places(0, x.shape[1], x.device)
        x = run_blocks(self.encoder, x, norm=self.encoder_norm, at=at, mask=mask)
        return zero_padding(x, mask), lengths

    def decode(
        self, memory: Float[Tensor, "b s w"], lengths: Lengths, target: Int[Tensor, "b l"]
    ) -> Float[Tensor, "b l w"]:
        """Decoder's last vectors for whole targets over a memory, before the head."""
        mask = Padding.of(lengths, memory.shape[1])
        return self.decoder_norm(self.decoder(self.target, target, memory, mask))

    def hidden(
        self,
        sound: Float[Tensor, "b t mels"],
        target: Int[Tensor, "b l"],
        lengths: Lengths | None = None,
        target_lengths: Lengths | None = None,
    ) -> Float[Tensor, "b l w"]:
        """Decoder's last vectors of whole targets, before the head."""
        return self.decode(*self.encode(sound, lengths), target)

    def forward(
        self,
        sound: Float[Tensor, "b t mels"],
        lengths: Lengths | None,
        target: Int[Tensor, "b l"],
    ) -> Float[Tensor, "b l vocab"]:
        """Logits of the token after each target token."""
        return self.head(self.hidden(sound, target, lengths))

    def start(
        self,
        source: Float[Tensor, "b t mels"],
        lengths: Lengths | None = None,
        *,
        capacity: int = 256,
    ) -> State:
        """Encode the sounds, and allocate what decoding will need."""
        return self.start_from(*self.encode(source, lengths), capacity=capacity)

    def start_from(
        self, memory: Float[Tensor, "b s w"], lengths: Lengths, *, capacity: int = 256
    ) -> State:
        """Allocate what decoding needs over a memory that was encoded before."""
        mask = Padding.of(lengths, memory.shape[1])
        return self.decoder.start(memory, mask, capacity=capacity)

    def step(self, ids: Ids, state: State) -> tuple[Float[Tensor, "b l vocab"], State]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        x = self.decoder_norm(self.decoder.step(self.target, ids, state))
        return self.head.step_logits(x, state.caches[0]).view(*ids.shape, -1), state
