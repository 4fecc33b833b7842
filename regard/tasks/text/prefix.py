"""Translation by a decoder alone: the source is a prefix that is read in both directions.

One stack does the work of an encoder and a decoder with the same weights: source, end, begin,
target, end are one text, of which only the target is predicted (a prefix language model, Raffel et
al. 2020).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.watch import Maps
from regard.modalities.text import TEXT
from regard.models import family
from regard.settings import setting
from regard.tasks.parts import Configured, Task
from regard.tasks.text.sequence import (
    PAIR_SHORT_KEYS,
    PairCodec,
    PairTrainSettings,
    SequenceObjective,
    Stack,
    load_pair_codec,
)
from regard.tasks.text.text_judge import TextJudge
from regard.tasks.text.translate import GENERATION, bleu
from regard.tasks.text.writer import PairLookSettings, PairRunSettings, TextWriter

GPTConfig, _ = family("gpt")


@dataclass(frozen=True)
class PrefixSettings(PairTrainSettings):
    """What a training of translation by a decoder alone can be told."""

    vocabularies: str = setting("joint", "one embedding table for both sides", choices=("joint",))
    like: str = setting("llama", "model preset", group="model")
    model: GPTConfig = field(default_factory=GPTConfig)  # type: ignore[valid-type]


class PrefixLM:
    """A decoder as an encoder-decoder: it reads a source, then a target right after it."""

    def __init__(self, decoder: Any):
        self.model = decoder
        self.head, shape = self.model.head, self.model.config
        vocab, half = shape.vocab, shape.max_length // 2
        self.config = SimpleNamespace(source_vocab=vocab, target_vocab=vocab, max_length=half)

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Name each attention by what its target rows do with the source."""
        for number, block in enumerate(self.model.blocks):
            yield f"decoder.{number}.cross", block.attention

    def hidden(
        self, source: Tensor, target: Tensor, lengths: Tensor | None = None, **more: Any
    ) -> Tensor:
        """Last vectors of the target (b, t, w), which stands right after its source."""
        (count, long), short = source.shape, target.shape[1]
        if lengths is None:
            lengths = source.new_full((count,), long)
        begin = lengths.unsqueeze(1)
        place = torch.arange(long + short, device=source.device).expand(count, -1)
        ids = torch.where(
            place < begin,
            source.gather(1, place.clamp(max=long - 1)),
            target.gather(1, (place - begin).clamp(0, short - 1)),
        )
        x = self.model.hidden(ids, prefix=self.model.prefix_of(lengths))
        own = begin + torch.arange(short, device=source.device)
        return x.gather(1, own.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def __call__(self, source: Tensor, target: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits after each token of the target."""
        return self.head(self.hidden(source, target, lengths))

    def start(self, source: Tensor, lengths: Tensor | None = None, **rest: Any) -> Any:
        """Read the sources; the first step begins with the begin of the target."""
        more = None if lengths is None else lengths + 1
        return self.model.start(F.pad(source, (0, 1)), more, **rest)

    def step(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read the next tokens of all hypotheses for the logits after each."""
        return self.model.step(ids, state)


class _Block:
    """The weights of some rows of a layer's attention over some columns."""

    def __init__(self, whole: Any, rows: slice, columns: slice):
        self.whole, self.rows, self.columns = whole, rows, columns

    def weights(self, **picks: Any) -> Tensor:
        """Weights (b, h, q, k) of chosen heads."""
        return self.whole.weights(**picks)[..., self.rows, self.columns]


def as_encoder_decoder(maps: Maps, length: int) -> dict[str, _Block]:
    """One stack's attention as an encoder-decoder's, of a source of some length."""
    source, target = slice(0, length), slice(length, None)
    sides = {
        "encoder.{}.self": (source, source),
        "decoder.{}.self": (target, target),
        "decoder.{}.cross": (target, source),
    }
    return {
        name.format(number): _Block(maps[layer], *both)
        for name, both in sides.items()
        for number, layer in enumerate(maps.names())
    }


class DecoderAlone(Stack):
    """How a decoder reads a source and a target, as one text."""

    like, serves = "llama", "prefix"

    def room(self, config: Any) -> int | None:
        """Tokens of a side for which there are positions: half of them."""
        room = super().room(config)
        return None if room is None else room // 2

    def config(self, config: Any, codec: PairCodec, longest: int, rows: int, new: bool) -> Any:
        """Config for a vocabulary, with room for source and target."""
        config = replace(config, vocab=codec.source.vocab)
        longest = max(config.max_length, 8 * longest + 4)
        return replace(config, max_length=longest) if new else config

    def writer(self, model: nn.Module) -> PrefixLM:
        """The decoder as one that reads a source, then a target."""
        return PrefixLM(model)

    def maps(self, maps: Any, length: int) -> Any:
        """Attention over a pair as an encoder-decoder's."""
        return as_encoder_decoder(maps, length)


_STACK = DecoderAlone()
PREFIX = Task(
    name="prefix",
    holds="pairs of sentences",
    inputs=TEXT,
    target="text",
    unit="sentences",
    objective=SequenceObjective(
        PrefixSettings,
        GENERATION,
        bleu,
        stack=_STACK,
        short={**PAIR_SHORT_KEYS, "depth": "model.depth", "bias": "model.block.bias"},
    ),
    predictor=Configured(partial(TextWriter, stack=_STACK), PairRunSettings, PairLookSettings),
    judge=TextJudge(bleu),
    load_codec=partial(load_pair_codec, stack=_STACK),
)
