"""Captions of images: an encoder of any family that sees, and a decoder that writes what it saw."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, cast

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.attention.masks import Causal
from regard.attention.normalisers import softmax
from regard.attention.once import one_pass
from regard.attention.positions import build_position, of_layer
from regard.errors import UsageError, lookup
from regard.layers.block import BlockConfig, DecoderBlock, build_final_norm, build_norm, size
from regard.layers.embed import Embed
from regard.layers.recurrent import (
    CellConfig,
    Draws,
    RecurrentDecoder,
    RecurrentState,
    Soft,
    start_cells,
)
from regard.layers.start import STARTS
from regard.layers.vocabulary import Head
from regard.models import family, vit
from regard.models.declaration import FamilyInfo
from regard.models.local import LocalConfig
from regard.models.mvit import MViTConfig
from regard.models.resnet import ResNetConfig
from regard.models.state import State, take_caches
from regard.models.swin import SwinConfig
from regard.models.vit import ViTConfig


@dataclass(frozen=True)
class EncoderConfig:
    """What sees: a family, and the config of that one."""

    family: str = "vit"
    vit: ViTConfig | None = field(default_factory=lambda: vit.INFO.preset("tiny", "cct"))
    resnet: ResNetConfig | None = None
    swin: SwinConfig | None = None
    mvit: MViTConfig | None = None
    local: LocalConfig | None = None

    @classmethod
    def of(cls, family: str, config: Any) -> "EncoderConfig":
        """Return the encoder of a family that a config describes."""
        lookup("family", family, dict.fromkeys(FAMILIES))
        return cls(**{**dict.fromkeys(FAMILIES), "family": family, family: config})

    @property
    def own(self) -> Any:
        """Return the config of the family."""
        lookup("family", self.family, dict.fromkeys(FAMILIES))
        config = getattr(self, self.family)
        if config is None:
            raise UsageError(
                f"encoder.family={self.family}, but encoder.{self.family} is none; give its sizes"
            )
        return config


FAMILIES = tuple(each.name for each in fields(EncoderConfig) if each.name != "family")


@dataclass(frozen=True)
class WriterConfig:
    """What writes: a transformer of blocks, or a recurrent network of cells; and its sizes."""

    kind: str = "transformer"
    vocab: int = size(4000, 10_000_000)
    depth: int = size(2, 1000)
    block: BlockConfig = field(
        default_factory=lambda: BlockConfig(128, 4, 512, feed_forward="gelu", dropout=0.1)
    )
    cell: CellConfig = field(default_factory=CellConfig)
    position: str = "sinusoidal"
    max_length: int = size(128, 1_000_000)
    start: str = "scaled"


@dataclass(frozen=True)
class CaptionerConfig:
    """What sees and what writes; `sight` is image, or blind for what images are worth."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)
    decoder: WriterConfig = field(default_factory=WriterConfig)
    sight: str = "image"

    @property
    def image(self) -> int:
        """Return the side of the images that the encoder is made for."""
        return self.encoder.own.image

    @property
    def channels(self) -> int:
        """Return how many channels an image has."""
        return self.encoder.own.channels

    @property
    def max_length(self) -> int:
        """Return how long a caption may be."""
        return self.decoder.max_length


# name -> depth, width, feed-forward width and heads of what writes
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"depth": 2, "width": 128, "ffn_width": 512, "heads": 4},
    "small": {"depth": 3, "width": 192, "ffn_width": 768, "heads": 6},
    "base": {"depth": 4, "width": 256, "ffn_width": 1024, "heads": 8},
    "big": {"depth": 6, "width": 512, "ffn_width": 2048, "heads": 8},
}


def sized_writer(name: str, config: WriterConfig | None = None) -> WriterConfig:
    """Return the config of a decoder with the sizes that a name stands for."""
    config = config or WriterConfig()
    sizes = dict(lookup("size", name, SIZES))
    blocks = sizes.pop("depth")
    depth = blocks if config.kind == "transformer" else config.depth
    block, cell = replace(config.block, **sizes), replace(config.cell, width=2 * sizes["width"])
    return replace(config, depth=depth, block=block, cell=cell)


_RECURRENT = WriterConfig("recurrent", depth=1)
_HARD = replace(_RECURRENT, cell=replace(_RECURRENT.cell, normalise="sample"))
# name -> what makes it what it is: blocks, or Xu et al. 2015 with soft or with hard attention
PRESETS: dict[str, CaptionerConfig] = {
    "captioner": CaptionerConfig(),
    "show_attend_tell": CaptionerConfig(decoder=_RECURRENT),
    "show_attend_tell_hard": CaptionerConfig(decoder=_HARD),
    "blind_captioner": CaptionerConfig(sight="blind"),
}


def resize(config: CaptionerConfig, name: str) -> CaptionerConfig:
    """Return a config whose encoder and decoder are of a named size."""
    encoder = EncoderConfig.of("vit", vit.INFO.preset(name, "cct"))
    return replace(config, encoder=encoder, decoder=sized_writer(name, config.decoder))


INFO = FamilyInfo("image+text", {"caption": {}}, PRESETS, {name: name for name in SIZES}, resize)


# What sees


def _seeing(config: EncoderConfig) -> Any:
    """Build an encoder without what stands on top of its features."""
    own = config.own
    bare = {"labels": 0, "pool": "mean"}
    own = replace(own, **{key: value for key, value in bare.items() if hasattr(own, key)})
    return family(config.family)[1](own)


class Blind(nn.Module):
    """Learned vectors in the place of features: the same for every image.

    With them the same decoder shows what can be written without looking.
    """

    def __init__(self, config: EncoderConfig):
        super().__init__()
        with torch.device("meta"):
            seeing = _seeing(config)
        self.config, self.out_width = seeing.config, seeing.out_width
        self.grid: Callable[[tuple[int, int]], tuple[int, int]] = seeing.grid
        height, width = self.grid((self.config.image, self.config.image))
        count = getattr(self.config, "tokens", 0) + height * width
        self.constant = nn.Embedding(count, self.out_width)

    def features(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b l w"]:
        """Return the same vectors for every image."""
        return self.constant.weight.expand(len(images), -1, -1)


# name -> what there is to look at of images
SIGHTS: dict[str, Callable[[EncoderConfig], Any]] = {"image": _seeing, "blind": Blind}


# What writes


class Looks(Draws):
    """Where each word of some captions looked, noted while it is learnt."""

    def __init__(self):
        super().__init__()
        self.weights: list[Tensor] = []  # of all captions of an image, (b, q, s) at each look

    def _table(self, looks: list[Tensor], rows: int) -> Tensor:
        """Return what was noted for every word of every caption, (n, t, ...).

        A decoder looks for all captions word by word, or for all words of them at once.
        """
        each = rows // len(looks[0])
        whole = torch.stack([look.unflatten(1, (each, -1)) for look in looks], 2)
        return whole.flatten(2, 3).flatten(0, 1)

    def loss(self, losses: Float[Tensor, "n t"], real: Bool[Tensor, "n t"] | None = None) -> Tensor:
        """Return zero, with the gradient that the losses of real words are worth to the draws."""
        apart = Draws()
        for name in ("chances", "baselines"):
            if looks := getattr(self, name):
                setattr(apart, name, [self._table(looks, len(losses))])
        return apart.loss(losses, real)

    def uneven(self, real: Bool[Tensor, "n t"]) -> Tensor:
        """Return the sum of (1 - sum over words of weight)^2 over all places of all captions.

        Doubly stochastic attention (Xu et al. 2015): every place should be looked at once.
        """
        weights = self._table(self.weights, len(real))
        return (1 - weights.masked_fill(~real.unsqueeze(-1), 0.0).sum(1)).square().sum()


class Noted(Soft):
    """A little of every place, which is noted where somebody learns from it."""

    def forward(self, q: Tensor, draws: Draws | None) -> Any:
        """Return the softmax, or one that notes its weights."""
        if not isinstance(draws, Looks):
            return super().forward(q, draws)

        def note(scores: Tensor) -> Tensor:
            weights = softmax(scores)
            draws.weights.append(weights.squeeze(1))
            return weights

        return note


class TransformerDecoder(nn.Module):
    """Blocks that look at what is written, and at the features of the image."""

    def __init__(self, config: WriterConfig, memory_width: int):
        super().__init__()
        block = config.block
        head_width = block.head_width or block.width // max(1, block.heads)
        position = build_position(
            config.position, block.width, block.heads, head_width, max_length=config.max_length
        )
        self.project = nn.Linear(memory_width, block.width)
        self.memory_norm = build_norm(block)
        self.embed = Embed(config.vocab, block.width, position, block.width**0.5, block.dropout)
        self.blocks = nn.ModuleList(
            DecoderBlock(block, of_layer(position)) for _ in range(config.depth)
        )
        self.norm = build_final_norm(block)
        self.head = Head(block.width, config.vocab, bias=False)
        self.head.weight = self.embed.tokens.weight
        lookup("start", config.start, STARTS)(self)

    def remember(self, features: Float[Tensor, "b s f"]) -> Float[Tensor, "b s w"]:
        """Bring features to the width of the decoder."""
        return self.memory_norm(self.project(features))

    def hidden(
        self, target: Int[Tensor, "n t"], memory: Float[Tensor, "b s w"], looks: Looks | None = None
    ) -> Float[Tensor, "n t w"]:
        """Return the last vectors; the captions of an image follow each other."""
        at = torch.arange(target.shape[1], device=target.device).unsqueeze(-1)
        causal = Causal()
        x = self.embed(target, at)
        shared = self.embed.position.shared(at, at, causal)
        with one_pass():
            for block in self.blocks:
                x = block(x, memory, at=at, mask=causal, bias=shared)
        return self.norm(x)

    def start(self, memory: Float[Tensor, "b s w"], *, capacity: int) -> State:
        """Project the memory for every block and take room for what will be written."""
        blocks = cast(list[DecoderBlock], list(self.blocks))
        memories = [block.cross.read(memory).by_columns() for block in blocks]
        caches = take_caches([block.attention for block in blocks], len(memory), memory)
        return State(caches, capacity, memories=memories)

    def step(self, ids: Int[Tensor, "b l"], state: State) -> tuple[Float[Tensor, "b l w"], State]:
        """Read the next tokens of all hypotheses."""
        at, everything, mask = state.take(ids.shape[1])
        x = self.embed(ids.reshape(state.sentences, -1), at)
        shared = self.embed.position.shared(at, everything, mask)
        layers = zip(self.blocks, state.memories, state.caches, strict=True)
        with one_pass():
            for block, memory, cache in layers:
                x = block(x, memory, at=at, mask=mask, bias=shared, cache=cache)
        return self.norm(x).view(*ids.shape, -1), state


class RecurrentWriter(nn.Module):
    """A recurrent network that looks at the features of the image at every word."""

    def __init__(self, config: WriterConfig, memory_width: int):
        super().__init__()
        width = config.cell.width
        self.project = nn.Linear(memory_width, width)
        self.memory_norm = nn.LayerNorm(width)
        self.inner = RecurrentDecoder(config.cell, config.vocab, width, config.depth)
        self.head = Head(width, config.vocab, bias=False)
        self.head.weight = self.inner.tokens.weight
        lookup("start", config.start, STARTS)(self)
        start_cells(self)
        if self.inner.cross is not None and type(self.inner.cross.normalise) is Soft:
            self.inner.cross.normalise = Noted()

    def remember(self, features: Float[Tensor, "b s f"]) -> Float[Tensor, "b s w"]:
        """Bring features to the width of the decoder."""
        return self.memory_norm(self.project(features))

    def hidden(
        self, target: Int[Tensor, "n t"], memory: Float[Tensor, "b s w"], looks: Looks | None = None
    ) -> Float[Tensor, "n t w"]:
        """Return the last vectors; the captions of an image follow each other."""
        state = self.inner.begin(memory)
        each = len(target) // max(1, len(memory))
        state.select(torch.zeros(len(memory), each, dtype=torch.long, device=target.device))
        return self.inner.read(target, state, looks)[0]

    def start(self, memory: Float[Tensor, "b s w"], *, capacity: int) -> RecurrentState:
        """Begin with what the memory is about as a whole."""
        return self.inner.begin(memory)

    def step(
        self, ids: Int[Tensor, "b l"], state: RecurrentState
    ) -> tuple[Float[Tensor, "b l w"], RecurrentState]:
        """Read the next tokens of all hypotheses."""
        return self.inner.read(ids, state)


# name -> what writes, made from its config and the width of the features
DECODERS: dict[str, Callable[[WriterConfig, int], Any]] = {
    "transformer": TransformerDecoder,
    "recurrent": RecurrentWriter,
}


class Captioner(nn.Module):
    """Look at an image, then write a caption and look again at every word (Xu et al. 2015)."""

    def __init__(self, config: CaptionerConfig):
        super().__init__()
        self.config = config
        self.encoder = lookup("sight", config.sight, SIGHTS)(config.encoder)
        writer = lookup("decoder", config.decoder.kind, DECODERS)
        self.decoder = writer(config.decoder, self.encoder.out_width)

    @property
    def head(self) -> Head:
        """Return what makes logits of the decoder's vectors."""
        return self.decoder.head

    def encode(self, images: Float[Tensor, "b c y x"]) -> Float[Tensor, "b s w"]:
        """See images: the memory that every word looks at."""
        return self.decoder.remember(self.encoder.features(images))

    @staticmethod
    def looks() -> Looks:
        """Return what can note where a recurrent decoder looks, to learn from it."""
        return Looks()

    def hidden(
        self,
        images: Float[Tensor, "b c y x"],
        target: Int[Tensor, "n t"],
        looks: Looks | None = None,
    ) -> Float[Tensor, "n t w"]:
        """Return the decoder's last vectors, before the head.

        There may be several captions of each image, which is seen once: those of the first image
        come first.
        """
        if len(target) % max(1, len(images)):
            raise UsageError(
                f"{len(target)} captions of {len(images)} images; expected as many of each"
            )
        return self.decoder.hidden(target, self.encode(images), looks)

    def forward(
        self, images: Float[Tensor, "b c y x"], target: Int[Tensor, "n t"]
    ) -> Float[Tensor, "n t vocab"]:
        """Return the logits of the token after each token of the captions."""
        return self.head(self.hidden(images, target))

    def start(
        self,
        source: Float[Tensor, "b c y x"],
        lengths: Tensor | None = None,
        *,
        capacity: int = 256,
    ) -> Any:
        """See the images once and take the memory that writing will need."""
        return self.decoder.start(self.encode(source), capacity=capacity)

    def step(self, ids: Int[Tensor, "b l"], state: Any) -> tuple[Float[Tensor, "b l vocab"], Any]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        hidden, state = self.decoder.step(ids, state)
        return self.head.step_logits(hidden), state
