"""Translation by a decoder alone: the source is a prefix that is read in both directions.

One stack does the work of an encoder and a decoder with the same weights: source, end, begin,
target, end are one text, of which only the target is predicted (a prefix language model, Raffel et
al. 2020).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.watch import Maps
from regard.data.pairs import Corpus
from regard.models import family, task_changes
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.text.pair_settings import PairEvalSettings, PairRunSettings, PairTrainSettings
from regard.tasks.text.pairs import PairCodec
from regard.tasks.text.seq2seq import Seq2Seq

GPTConfig, _ = family("gpt")


@dataclass(frozen=True)
class PrefixSettings(PairTrainSettings):
    """What a training of translation by a decoder alone can be told."""

    vocabularies: str = setting("joint", "one table for both sides", choices=("joint",))
    like: str = setting("llama", "model preset", group="model")
    model: GPTConfig = field(default_factory=GPTConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class PrefixEvalSettings(PairEvalSettings, PairRunSettings):
    """What an evaluation can be told."""


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
        """Return the last vectors of the target (b, t, w), which stands right after its source."""
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
        """Return the logits after each token of the target."""
        return self.head(self.hidden(source, target, lengths))

    def start(self, source: Tensor, lengths: Tensor | None = None, **rest: Any) -> Any:
        """Read the sources; the first step begins with the begin of the target."""
        more = None if lengths is None else lengths + 1
        return self.model.start(F.pad(source, (0, 1)), more, **rest)

    def step(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        return self.model.step(ids, state)


class _Block:
    """The weights of some rows of a layer's attention over some columns."""

    def __init__(self, whole: Any, rows: slice, columns: slice):
        self.whole, self.rows, self.columns = whole, rows, columns

    def weights(self, **picks: Any) -> Tensor:
        """Return the weights (b, h, q, k) of chosen heads."""
        return self.whole.weights(**picks)[..., self.rows, self.columns]


def as_encoder_decoder(maps: Maps, length: int) -> dict[str, _Block]:
    """Return one stack's attention as an encoder-decoder's, of a source of some length."""
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


class PrefixTranslate(Seq2Seq):
    """Translates by a decoder alone; see `regard train prefix --help`."""

    name = "prefix"
    Train = PrefixSettings
    Eval = PrefixEvalSettings
    short = {**Seq2Seq.short, "depth": "model.depth", "bias": "model.block.bias"}

    @classmethod
    def encoder_decoder(cls, model: nn.Module) -> PrefixLM:
        """Return the decoder as one that reads a source, then a target."""
        return PrefixLM(model)

    @classmethod
    def shape(
        cls, name: str, values: Mapping[str, Any], origin: Origin | None, like: str | None = None
    ) -> Any:
        """Return a decoder's config, LLaMA's unless another is named."""
        return super().shape(name, values, origin, like or "llama")

    @classmethod
    def defaults(cls, shape: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Return the config of a decoder that reads its prompt in both directions."""
        return replace(shape, **task_changes("gpt", cls.name))

    @classmethod
    def make_model(
        cls, data: Corpus, codec: PairCodec, settings: Any, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Build the decoder, with room for source and target."""
        config: Any = replace(settings.model, vocab=codec.source.vocab)
        if origin is None:
            longest = max(config.max_length, 8 * settings.max_length + 4)
            config = replace(config, max_length=longest)
        return "gpt", cls.build("gpt", config, settings, origin)

    def finish(self, folder: Path, data: Corpus, settings: Any) -> None:
        """Write down which head aligns best on the validation part."""
        self.save_alignment_head(folder, data["valid"])

    def maps(self, source: Sequence[int], target: Sequence[int]) -> tuple[Any, Tensor]:
        """Return the attention of every layer and head over one pair, exactly, and the logits."""
        maps, logits = super().maps(source, target)
        return as_encoder_decoder(maps, len(source)), logits
