"""Translation by a decoder alone: the source is a prefix that is read in both directions.

One stack does the work of an encoder and a decoder with the same weights: source, end, begin,
target, end are one text, of which only the target is guessed (Raffel et al. 2020 call it a prefix
language model).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.watch import Maps, watch
from regard.data.tokenize import Tokenizer
from regard.errors import UsageError
from regard.models import family
from regard.tasks import translate
from regard.tasks.run import Report, build_model, resolve_task, shape_of
from regard.tasks.translate import SIZES, Batch, TranslateSettings, Translation, Way, train_way
from regard.tasks.translator import Translator

NAME = "prefix"
FAMILY = "gpt"
GPTConfig, _ = family(FAMILY)
SHORT = {**translate.SHORT, "depth": "model.depth", "bias": "model.block.bias"}


@dataclass(frozen=True)
class PrefixSettings(TranslateSettings):
    """Everything that a run of translation by a decoder alone can be told."""

    vocabularies: str = field(default="joint", metadata={"help": "joint, as there is one table"})
    like: str = field(
        default="llama", metadata={"help": "gpt2, llama, qwen3, gemma or another decoder"}
    )
    model: GPTConfig = field(default_factory=GPTConfig)  # type: ignore[valid-type]


def resolve(values: Mapping[str, Any]) -> PrefixSettings:
    """Make full settings of what a user gave: the size fills in what is not said."""
    row = str(values.get("like") or "llama")
    settings = resolve_task(
        PrefixSettings,
        values,
        model=shape_of(FAMILY, values, row, prompt="bidirectional"),
        sizes=SIZES,
        short=SHORT,
        of="pairs of sentences",
    )
    if settings.vocabularies != "joint":
        raise UsageError(
            f"vocabularies={settings.vocabularies}; one stack reads both, choose joint"
        )
    return settings


class Prefixed:
    """A decoder that is spoken to like an encoder-decoder: it reads a source, then a target."""

    def __init__(self, model: Any):
        self.model, self.head = model, model.head
        vocab, half = model.config.vocab, model.config.max_length // 2
        self.config = SimpleNamespace(source_vocab=vocab, target_vocab=vocab, max_length=half)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Return what the decoder has learnt."""
        return self.model.parameters()

    def modules(self) -> Iterator[nn.Module]:
        """Return all parts of the decoder."""
        return self.model.modules()

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Name each attention by what its target rows do with the source."""
        for number, block in enumerate(self.model.blocks):
            yield f"decoder.{number}.cross", block.attention

    def hidden(self, source: Tensor, reads: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the last vectors of the target (b, t, w), which stands right after its source."""
        (count, long), short = source.shape, reads.shape[1]
        if lengths is None:
            lengths = source.new_full((count,), long)
        begin = lengths.unsqueeze(1)
        place = torch.arange(long + short, device=source.device).expand(count, -1)
        ids = torch.where(
            place < begin,
            source.gather(1, place.clamp(max=long - 1)),
            reads.gather(1, (place - begin).clamp(0, short - 1)),
        )
        x = self.model.hidden(ids, prefix=self.model.prefix_of(lengths))
        own = begin + torch.arange(short, device=source.device)
        return x.gather(1, own.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    def __call__(self, source: Tensor, reads: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the logits after each token of the target."""
        return self.head(self.hidden(source, reads, lengths))

    def start(self, source: Tensor, lengths: Tensor | None = None, **rest: Any) -> Any:
        """Read the sources; the first step begins with the begin of the target."""
        more = None if lengths is None else lengths + 1
        return self.model.start(F.pad(source, (0, 1)), more, **rest)

    def step(self, ids: Tensor, state: Any) -> tuple[Tensor, Any]:
        """Read the next tokens of all hypotheses and return the logits after each."""
        return self.model.step(ids, state)


class PrefixTranslation(Translation):
    """The task as the training loop sees it."""

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed cross-entropy of the target alone."""
        return super().loss(Prefixed(model), batch)

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return loss and greedy BLEU on the validation part."""
        return super().evaluate(Prefixed(model))

    def translator(self, model: Any) -> Translator:
        """Return the model as its user will have it."""
        return PrefixTranslator(model, self.source, self.target, {"to": self.language})


class _Part:
    """What some rows of a layer's attention look at among some columns."""

    def __init__(self, whole: Any, rows: slice, columns: slice):
        self.whole, self.rows, self.columns = whole, rows, columns

    def weights(self, **picks: Any) -> Tensor:
        """Return the weights (b, h, q, k) of chosen heads."""
        return self.whole.weights(**picks)[..., self.rows, self.columns]


class _Parts(dict[str, _Part]):
    """One stack's attention as an encoder-decoder's: by side that looks, and side looked at."""

    def __init__(self, maps: Maps, length: int):
        source, target = slice(0, length), slice(length, None)
        ways = {
            "encoder.{}.self": (source, source),
            "decoder.{}.self": (target, target),
            "decoder.{}.cross": (target, source),
        }
        super().__init__(
            {
                way.format(number): _Part(maps[name], *sides)
                for way, sides in ways.items()
                for number, name in enumerate(maps.names())
            }
        )

    def names(self) -> list[str]:
        """Return the names of all parts."""
        return list(self)


class PrefixTranslator(Translator):
    """A decoder with its tokenizer, used as a translator."""

    task = NAME

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> Translator:
        """Put a loaded model together with the tokenizer beside it."""
        return super().load(folder, Prefixed(model), config)

    @torch.inference_mode()
    def maps(self, source: Sequence[int], target: Sequence[int]) -> tuple[Any, Tensor]:
        """Return the attention of every layer and head over one pair, exactly, and the logits."""
        reads = torch.tensor([[self.begin, *target]], device=self.device)
        ids = torch.tensor([list(source)], device=self.device)
        with watch(self.model.model) as maps:
            logits = self.model(ids, reads)
        return _Parts(maps, len(source)), logits[0]


def build(settings: PrefixSettings, tokenizers: tuple[Tokenizer, Tokenizer]) -> Any:
    """Build the model that the settings describe, for this vocabulary."""
    longest = max(settings.model.max_length, 8 * settings.max_length + 4)
    if settings.init:
        longest = settings.model.max_length
    config = replace(settings.model, vocab=tokenizers[0].vocab, max_length=longest)
    return build_model(FAMILY, config, settings)


def train(values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None) -> Report:
    """Train a decoder to translate in a folder, or go on with one that was begun there."""
    way = Way(NAME, FAMILY, build, PrefixTranslation, PrefixTranslator)
    return train_way(way, values, resolve(values), quiet=quiet, recipe=recipe)
