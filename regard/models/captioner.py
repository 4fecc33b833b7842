"""Image captioning: an encoder of any vision family, and a decoder with attention to it."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.attention.normalisers import softmax
from regard.attention.positions import POSITIONS, with_aliases
from regard.errors import UsageError, lookup
from regard.layers.block import (
    BlockConfig,
    build_norm,
    size_field,
)
from regard.layers.init import INITS
from regard.layers.recurrent.attention import NORMALISES, ReinforceTape, SoftAttention
from regard.layers.recurrent.cells import init_cells
from regard.layers.recurrent.decoder import CellConfig, RecurrentDecoder, RecurrentState
from regard.layers.shapes import Ids, Images, Vectors
from regard.layers.vocabulary import VocabularyLinear
from regard.models import preset
from regard.models.declaration import FamilyInfo
from regard.models.decoder import TextDecoder
from regard.models.image_encoder import AroundEncoder, EncoderConfig, build_encoder
from regard.models.protocols import ImageEncoder
from regard.models.state import State
from regard.settings import setting


@dataclass(frozen=True)
class DecoderConfig:
    """The caption decoder: a transformer of blocks or a recurrent network of cells."""

    kind: str = setting("transformer", "caption decoder", choices=lambda: _CAPTION_DECODERS)
    vocab: int = size_field(4000, 10_000_000, "vocabulary; a training takes that of the tokenizer")
    depth: int = size_field(2, 1000, "layers")
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(128, 4, 512, feed_forward="gelu", dropout=0.1)
    )
    cell: CellConfig = field(default_factory=CellConfig)
    position: str = setting("sinusoidal", "position embedding", choices=with_aliases(POSITIONS))
    max_length: int = size_field(128, 1_000_000, "maximum positions")
    init: str = setting("scaled", "initialisation", choices=INITS)


@dataclass(frozen=True)
class CaptionerConfig(AroundEncoder):
    """Encoder and decoder; `sight` is image, or blind for a baseline that sees no image."""

    decoder: DecoderConfig = field(default_factory=DecoderConfig)
    sight: str = setting(
        "image", "image; or blind, a baseline without images", choices=lambda: _IMAGE_ENCODERS
    )

    @property
    def max_length(self) -> int:
        """Maximum length of a caption."""
        return self.decoder.max_length


_RECURRENT = DecoderConfig("recurrent", depth=1)
_HARD = replace(_RECURRENT, cell=replace(_RECURRENT.cell, normalise="sample"))
# name -> a transformer decoder, or Xu et al. 2015 with soft or with hard attention
PRESETS: dict[str, CaptionerConfig] = {
    "captioner": CaptionerConfig(),
    "show_attend_tell": CaptionerConfig(decoder=_RECURRENT),
    "show_attend_tell_hard": CaptionerConfig(decoder=_HARD),
    "blind_captioner": CaptionerConfig(sight="blind"),
}

# name -> that of the encoder's size; depth, width, feed-forward width and heads of the decoder
SIZES: dict[str, tuple[str, int, dict[str, int]]] = {
    "tiny": ("tiny", 2, {"width": 128, "ffn_width": 512, "heads": 4}),
    "small": ("small", 3, {"width": 192, "ffn_width": 768, "heads": 6}),
    "base": ("base", 4, {"width": 256, "ffn_width": 1024, "heads": 8}),
    "big": ("big", 6, {"width": 512, "ffn_width": 2048, "heads": 8}),
}


def resize(config: CaptionerConfig, size: tuple[str, int, dict[str, int]]) -> CaptionerConfig:
    """Config in a size; the encoder is then a CCT of that size."""
    name, blocks, block = size
    old = config.decoder
    decoder = replace(
        old,
        depth=blocks if old.kind == "transformer" else old.depth,
        block=replace(old.block, **block),
        cell=replace(old.cell, width=2 * block["width"]),
    )
    encoder = EncoderConfig("vit", preset("vit", name, "cct"))
    return replace(config, encoder=encoder, decoder=decoder)


INFO = FamilyInfo("image+text", {"caption": {}}, PRESETS, SIZES, resize)


# Encoders


class Blind(nn.Module):
    """Learned vectors instead of features, the same for every image: a baseline without sight."""

    def __init__(self, config: EncoderConfig):
        super().__init__()
        with torch.device("meta"):
            encoder: ImageEncoder = build_encoder(config)
            self.config, self.out_width = encoder.config, encoder.out_width
            side = self.config.image
            features = encoder.features(torch.empty(1, self.config.channels, side, side))
        self.grid: Callable[[tuple[int, int]], tuple[int, int]] = encoder.grid
        self.constant = nn.Embedding(features.shape[1], self.out_width)

    def features(self, images: Images) -> Vectors:
        """Same vectors for every image."""
        return self.constant.weight.expand(len(images), -1, -1)


# sight -> what makes features of images
_IMAGE_ENCODERS: dict[str, Callable[[EncoderConfig], Any]] = {
    "image": build_encoder,
    "blind": Blind,
}


# Decoders


class AttentionTape(ReinforceTape):
    """The attention weights of every word of some captions, recorded to train with them."""

    def __init__(self):
        super().__init__()
        self.weights: list[Tensor] = []  # of all captions of an image, (b, q, s) at each call

    def _table(self, calls: list[Tensor], rows: int) -> Tensor:
        """Records of every word of every caption, (n, t, ...).

        A decoder attends for all captions word by word, or for all words of them at once.
        """
        each = rows // len(calls[0])
        whole = torch.stack([call.unflatten(1, (each, -1)) for call in calls], 2)
        return whole.flatten(2, 3).flatten(0, 1)

    def loss(self, losses: Float[Tensor, "n t"], real: Bool[Tensor, "n t"] | None = None) -> Tensor:
        """Zero, with the gradient of REINFORCE for the losses of real words."""
        if not self.log_probs:
            return super().loss(losses, real)
        tape = ReinforceTape()
        tape.log_probs = [self._table(self.log_probs, len(losses))]
        tape.baselines = [self._table(self.baselines, len(losses))]
        return tape.loss(losses, real)

    def doubly_stochastic(self, real: Bool[Tensor, "n t"]) -> Tensor:
        """Sum of (1 - sum over words of weight)^2 over all places of all captions.

        Doubly stochastic attention (Xu et al. 2015): every place should be attended to once.
        """
        weights = self._table(self.weights, len(real))
        return (1 - weights.masked_fill(~real.unsqueeze(-1), 0.0).sum(1)).square().sum()


class RecordedSoftmax(SoftAttention):
    """Soft attention whose weights are recorded on a tape, if there is one."""

    def forward(self, q: Tensor, draws: ReinforceTape | None) -> Any:
        """Softmax, or one that records its weights."""
        if not isinstance(draws, AttentionTape):
            return super().forward(q, draws)

        def record(scores: Tensor) -> Tensor:
            weights = softmax(scores)
            draws.weights.append(weights.squeeze(1))
            return weights

        return record


class CaptionDecoder(nn.Module):
    """Projected features as the memory, a decoder that reads it, and a vocabulary head."""

    head: VocabularyLinear

    def __init__(self, width: int, memory_width: int, memory_norm: nn.Module):
        super().__init__()
        self.project = nn.Linear(memory_width, width)
        self.memory_norm = memory_norm

    def remember(self, features: Float[Tensor, "b s f"]) -> Float[Tensor, "b s w"]:
        """Project features to the memory of the decoder."""
        return self.memory_norm(self.project(features))


class TransformerCaptionDecoder(CaptionDecoder, TextDecoder):
    """A transformer decoder with cross-attention to the features of the image."""

    def __init__(self, config: DecoderConfig, memory_width: int):
        block = config.block
        super().__init__(block.width, memory_width, build_norm(block))
        self.add_parts(config.vocab, block, config.depth, config.position, config.max_length)
        lookup("init", config.init, INITS)(self)

    def hidden(
        self, target: Int[Tensor, "n t"], memory: Float[Tensor, "b s w"], tape: Any = None
    ) -> Float[Tensor, "n t w"]:
        """Last vectors; the captions of an image follow each other."""
        return self.norm(self.blocks(self.embed, target, memory))

    def start(self, memory: Float[Tensor, "b s w"], *, capacity: int) -> State:
        """Project the memory for every block, and allocate what decoding will need."""
        return self.blocks.start(memory, capacity=capacity)

    def step(self, ids: Ids, state: State) -> Vectors:
        """Last vectors of the next tokens of all hypotheses."""
        return self.norm(self.blocks.step(self.embed, ids, state)).view(*ids.shape, -1)


class RecurrentCaptionDecoder(CaptionDecoder):
    """A recurrent decoder with attention to the features of the image (Xu et al. 2015)."""

    def __init__(self, config: DecoderConfig, memory_width: int):
        width = config.cell.width
        super().__init__(width, memory_width, nn.LayerNorm(width))
        normalises = {**NORMALISES, "softmax": lambda width: RecordedSoftmax()}
        self.inner = RecurrentDecoder(config.cell, config.vocab, width, config.depth, normalises)
        self.head = VocabularyLinear(width, config.vocab, bias=False)
        self.head.weight = self.inner.tokens.weight
        lookup("init", config.init, INITS)(self)
        init_cells(self)

    def hidden(
        self,
        target: Int[Tensor, "n t"],
        memory: Float[Tensor, "b s w"],
        tape: AttentionTape | None = None,
    ) -> Float[Tensor, "n t w"]:
        """Last vectors; the captions of an image follow each other."""
        state = self.inner.begin(memory)
        each = len(target) // max(1, len(memory))
        state.select(torch.zeros(len(memory), each, dtype=torch.long, device=target.device))
        return self.inner.read(target, state, tape)[0]

    def start(self, memory: Float[Tensor, "b s w"], *, capacity: int) -> RecurrentState:
        """First state, computed of the mean of the memory."""
        return self.inner.begin(memory)

    def step(self, ids: Ids, state: RecurrentState) -> Vectors:
        """Last vectors of the next tokens of all hypotheses."""
        return self.inner.read(ids, state)[0]


# name -> the decoder, made from its config and the width of the features
_CAPTION_DECODERS: dict[str, type[TransformerCaptionDecoder] | type[RecurrentCaptionDecoder]] = {
    "transformer": TransformerCaptionDecoder,
    "recurrent": RecurrentCaptionDecoder,
}


class Captioner(nn.Module):
    """An image encoder and a caption decoder with attention to its features (Xu et al. 2015)."""

    def __init__(self, config: CaptionerConfig):
        super().__init__()
        self.config = config
        self.encoder = lookup("sight", config.sight, _IMAGE_ENCODERS)(config.encoder)
        decoder = lookup("decoder", config.decoder.kind, _CAPTION_DECODERS)
        self.decoder = decoder(config.decoder, self.encoder.out_width)

    @property
    def head(self) -> VocabularyLinear:
        """Vocabulary head of the decoder."""
        return self.decoder.head

    def encode(self, images: Images) -> Float[Tensor, "b s w"]:
        """Memory of images: their projected features."""
        return self.decoder.remember(self.encoder.features(images))

    @staticmethod
    def attention_tape() -> AttentionTape:
        """Tape that records the attention of a recurrent decoder, to train with it."""
        return AttentionTape()

    def hidden(
        self, images: Images, target: Int[Tensor, "n t"], tape: AttentionTape | None = None
    ) -> Float[Tensor, "n t w"]:
        """Decoder's last vectors, before the head.

        There may be several captions of each image, which is encoded once: those of the first
        image come first.
        """
        if len(target) % max(1, len(images)):
            raise UsageError(
                f"{len(target)} captions of {len(images)} images; expected as many of each"
            )
        return self.decoder.hidden(target, self.encode(images), tape)

    def forward(self, images: Images, target: Int[Tensor, "n t"]) -> Float[Tensor, "n t vocab"]:
        """Logits of the token after each token of the captions."""
        return self.head(self.hidden(images, target))

    def start(self, source: Images, lengths: Tensor | None = None, *, capacity: int = 256) -> Any:
        """Encode the images once, and allocate what decoding will need."""
        return self.decoder.start(self.encode(source), capacity=capacity)

    def step(self, ids: Ids, state: Any) -> tuple[Float[Tensor, "b l vocab"], Any]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        return self.head.step_logits(self.decoder.step(ids, state), state), state
