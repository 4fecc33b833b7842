"""How a model learns to write one text for another, from pairs or by restoring a text."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, cast

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from regard.attention.positions import has_table
from regard.data.batches import IndexBatches as LengthBatches
from regard.data.batches import moved
from regard.data.pairs import Corpus, load_pairs
from regard.data.parallel import SIDES, PairBatch, PairBatches, learn_tokenizers, make_batch
from regard.data.parts import Dataset
from regard.data.tokenize import TOKENIZERS
from regard.data.tokenizer import Tokenizer
from regard.decode.writer import EncoderDecoder
from regard.errors import UsageError
from regard.metrics.lengths import add_joined
from regard.metrics.text import BleuMetric, MeanMetric
from regard.models import config_family, family
from regard.models.folder import load_folder
from regard.models.protocols import Model
from regard.pretrained.tokenizer_folder import load_tokenizers, save_tokenizers
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.recipe import save_generation
from regard.tasks.frame.settings import SHORT_KEYS, EvalSettings, TrainSettings
from regard.tasks.parts import (
    Batches,
    Learnt,
    Lesson,
    Objective,
    Task,
    V,
    build_model,
    usual_settings,
)
from regard.tasks.runner import Runner
from regard.training.loss import loss_names, own_sequence_loss, sequence_loss

if TYPE_CHECKING:
    from regard.tasks.text.writer import TextWriter, WriteSettings

TransformerConfig, _ = family("transformer")
_FRAME = 4  # special tokens for which there is room around a text
_LONGEST_PART = 400  # tokens; a longer sentence is read in parts, as the model never saw such
_VOCABULARIES = ("auto", "joint", "separate")
PAIR_SHORT_KEYS: Mapping[str, str | tuple[str, ...]] = {
    **SHORT_KEYS,
    "kv_heads": "model.block.kv_heads",
    "depth": ("model.encoder_depth", "model.decoder_depth"),
}

# of a batch with label smoothing and a weight of R-Drop
Loss = Callable[[EncoderDecoder, PairBatch, float, float], Tensor]


@dataclass(frozen=True)
class PairFormat:
    """Where the pairs are in a file."""

    GROUP = "data"

    source: str | None = setting(None, "source language", key="from")
    target: str | None = setting(None, "target language", key="to")
    columns: str | None = setting(None, "source and target columns, such as 2,1")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    skip_bad: bool = setting(False, "skip bad rows")


@dataclass(frozen=True)
class PairTrainSettings(PairFormat, TrainSettings):
    """What a training on pairs of texts can be told."""

    like: str | None = setting(None, "model preset", group="model")
    joined: int = setting(0, "also train on pairs joined up to this many words", min=0, max=10_000)
    tokenizer: str = setting("bpe", "tokenizer", choices=TOKENIZERS)
    pieces: int = setting(6000, "vocabulary size", min=300, max=1_000_000)
    vocabularies: str = setting("auto", "vocabularies of both sides", choices=_VOCABULARIES)
    bpe_dropout: float = setting(0.0, "BPE dropout", min=0, max=1)
    batch_tokens: int = setting(2048, "tokens per batch", min=1, group="optimiser")
    max_length: int = setting(256, "maximum tokens of a side", min=1, max=100_000)
    loss: str = setting("auto", "loss: auto, or one of your own", choices=loss_names)
    label_smoothing: float = setting(0.1, "label smoothing", min=0, max=0.9)
    r_drop: float = setting(0.0, "weight of the R-Drop term", min=0, max=100)
    valid_sentences: int = setting(
        500, "sentences to decode at a validation", min=0, group="length"
    )
    model: TransformerConfig = field(default_factory=TransformerConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class PairCodec:
    """The tokenizers of source and target, and what config.json says beside the model."""

    source: Tokenizer
    target: Tokenizer
    about: Mapping[str, Any] | None = None

    def save(self, folder: Path) -> None:
        """Write the tokenizers, one if both are the same."""
        save_tokenizers(folder, self.tokenizers)

    @property
    def tokenizers(self) -> tuple[Tokenizer, Tokenizer]:
        """Both."""
        return self.source, self.target

    def facts(self) -> dict[str, Any]:
        """What config.json says."""
        return dict(self.about or {})

    def hashes(self) -> list[str]:
        """Hashes of both tokenizers."""
        return [self.source.sha, self.target.sha]


T = TypeVar("T", bound=PairTrainSettings, default=PairTrainSettings)


# What differs between tasks


class Stack:
    """How one model reads a source and a target: as the encoder-decoder that it is."""

    like: str | None = None  # the preset of a new model, unless the user names one
    serves = ""  # the task that changes its config, if one does

    def room(self, config: Any) -> int | None:
        """Tokens of a side for which there are positions; None where they set no bound."""
        return config.max_length if has_table(getattr(config, "position", "none")) else None

    def config(self, config: Any, codec: PairCodec, longest: int, rows: int, new: bool) -> Any:
        """Config for vocabularies, with room for texts longer than in training.

        Args:
            config: of the model, but for its vocabularies.
            codec: the tokenizers.
            longest: tokens of a side in training.
            rows: of the vocabularies that are no tokens, such as sentinels.
            new: whether the model is begun anew.
        """
        if new:
            config = replace(
                config,
                source_vocab=codec.source.vocab + rows,
                target_vocab=codec.target.vocab + rows,
            )
            if codec.source is not codec.target:
                apart = {"all": "target", "embeddings": "none"}
                config = replace(config, tie=apart.get(config.tie, config.tie))
        if new or self.room(config) is None:  # a learned table has the rows it has
            config = replace(config, max_length=max(config.max_length, 4 * longest + 2))
        return config

    def writer(self, model: nn.Module) -> EncoderDecoder:
        """The model as one that reads a source, then a target."""
        return cast(EncoderDecoder, model)

    def maps(self, maps: Any, length: int) -> Any:
        """Attention over a pair, of which the source has this length, as an encoder-decoder's."""
        return maps


class Sources(Generic[T]):
    """How the text that a user gives becomes what a model reads: sentences, as they are."""

    as_given: Mapping[str, Any] = {}  # settings by which a source is read as it stands
    sentences = True  # whether it has sentences to be joined, and words to be aligned

    def title(self, data: Dataset[Any], settings: T) -> str:
        """What a model card says that a model of such data is."""
        pairs = cast(Corpus, data)
        return f"{pairs.source or 'source'} to {pairs.target or 'target'}"

    def about(self, data: Dataset[Any], settings: T) -> dict[str, Any]:
        """What config.json says of the data of a training."""
        pairs = cast(Corpus, data)
        return {"from": pairs.source, "to": pairs.target}

    def prepare(self, corpus: Corpus, settings: TrainSettings | EvalSettings) -> Corpus:
        """Pairs as the model reads them."""
        return corpus

    def defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults of a run that config.json says."""
        return {}

    def check(self, settings: V, positions: int | None) -> V:
        """Settings that fit the positions of a model, or a refusal."""
        return settings

    def positions(self, model: Model) -> int | None:
        """Number of positions that a model has learned, where that bounds a text."""
        return None

    def longest(self, model: Model, frame: int) -> int:
        """Most tokens that are read at once, beside those of a frame."""
        return _LONGEST_PART

    def prompt(self, text: str, settings: "WriteSettings") -> str:
        """What is read for a text."""
        return text

    def cut(self, ids: list[int], longest: int) -> list[int]:
        """Tokens of a source that are read."""
        return ids

    def opening(self, tokenizer: Tokenizer, settings: "WriteSettings") -> list[int]:
        """Tokens that every target begins with."""
        return tokenizer.encode(settings.prefix)


ENCODER_DECODER = Stack()
SENTENCES: Sources[Any] = Sources()


def load_pair_codec(
    folder: Path, model: Model, config: dict[str, Any], stack: Stack = ENCODER_DECODER
) -> PairCodec:
    """Read the tokenizers of a folder, and check that they fit the model."""
    # without a note of where it came from, a folder is one of ours
    codec = PairCodec(*load_tokenizers(folder, None if "imported" in config else False))
    shape = stack.writer(cast(nn.Module, model)).config
    for side in SIDES:
        count, size = getattr(codec, side).vocab, getattr(shape, f"{side}_vocab")
        if count > size:
            raise UsageError(
                f"{folder}: the {side} tokenizer has {count} pieces, the model only {size}"
            )
    for key in ("from", "to"):
        if not isinstance(config.get(key), str | None):
            raise UsageError(f"{folder / 'config.json'}: '{key}' is {config[key]!r:.40}, not text")
    return codec


class Pairs(Generic[T]):
    """What a training reads: pairs of a source and a target."""

    def __init__(self, sources: Sources[T] = SENTENCES):
        self.sources = sources

    def check(self, settings: T) -> None:
        """Refuse nothing."""

    def read(self, settings: T) -> Dataset[Any]:
        """Pairs of texts, as the model reads them."""
        corpus = load_pairs(
            str(settings.data),
            source=settings.source,
            target=settings.target,
            columns=settings.columns,
            header=settings.header,
            valid=settings.valid,
            test=settings.test,
            skip_bad=settings.skip_bad,
        )
        corpus = add_joined(corpus, settings.joined) if settings.joined else corpus
        return self.sources.prepare(corpus, settings)

    def learn(self, data: Dataset[Any], settings: T) -> tuple[Tokenizer, Tokenizer]:
        """Tokenizers of the training part."""
        return learn_tokenizers(
            data["train"], settings.tokenizer, settings.pieces, settings.vocabularies
        )

    def rows(self, settings: T) -> int:
        """None."""
        return 0

    def batches(self, data: Dataset[Any], writer: "TextWriter", settings: T) -> Batches:
        """Batches of pairs of similar length."""
        return PairBatches(
            cast(Corpus, data),
            writer.codec.tokenizers,
            tokens=settings.batch_tokens,
            longest=settings.max_length,
            seed=settings.seed,
            bpe_dropout=settings.bpe_dropout,
        )

    def facts(self, batches: Any) -> dict[str, Any]:
        """Number of pairs that were too long to be learnt from."""
        return {"left_out": batches.left_out}

    def valid(
        self,
        batches: Any,
        data: Dataset[Any],
        writer: "TextWriter",
        settings: T,
        share: float,
    ) -> Iterable[PairBatch]:
        """Batches of the first validation pairs."""
        pairs, tokenizers = data["valid"], writer.codec.tokenizers
        pairs = pairs[: math.ceil(share * len(pairs))]
        encoded = [
            tokenizer.encode_batch([getattr(pair, side) for pair in pairs])
            for side, tokenizer in zip(SIDES, tokenizers, strict=True)
        ]
        most = min(4 * settings.max_length, writer.writer.config.max_length - 2)
        lengths = [np.array([min(len(row), most) + 1 for row in side]) for side in encoded]
        plan = LengthBatches(lengths, max(4096, settings.batch_tokens), 0)
        for n in range(plan.len_epoch()):
            source, target = ([np.asarray(side[i][:most]) for i in plan[n]] for side in encoded)
            yield make_batch(source, target, tokenizers[0], tokenizers[1])

    def decoded(self, data: Dataset[Any], settings: T) -> int:
        """Sentences that a validation decodes."""
        return min(settings.valid_sentences, len(data["valid"]))


class SequenceObjective(Objective[T, Dataset[Any], PairCodec]):
    """Learns targets of sources by cross-entropy.

    Args:
        settings: class of the settings of a training.
        generation: how a model decodes by default.
        metric: by which settings judge what is written at a validation.
        stack: how a model reads a source and a target.
        sources: how a text becomes a source.
        material: what such settings read.
        main_only: whether a validation tells the main score alone.
        losses: of families that do not learn by `sequence_loss`.
        short: short keys for fields of the model's config.
    """

    # what a size means for training, on top of the sizes of the model
    sizes = {
        "tiny": {"lr": 0.003, "batch_tokens": 2048, "pieces": 6000, "steps": 12_000},
        "small": {"lr": 0.0015, "batch_tokens": 4096, "pieces": 8000, "steps": 20_000},
        "base": {"lr": 0.0007, "batch_tokens": 16_384, "pieces": 32_000, "steps": 100_000},
        "big": {"lr": 0.0005, "batch_tokens": 32_768, "pieces": 32_000, "steps": 300_000},
    }

    def __init__(
        self,
        settings: type[T],
        generation: Mapping[str, Any],
        metric: Callable[[T], MeanMetric | BleuMetric],
        *,
        stack: Stack = ENCODER_DECODER,
        sources: Sources[T] = SENTENCES,
        material: Callable[[T], Pairs[T]] = lambda settings: Pairs(),
        main_only: bool = True,
        losses: Mapping[str, Loss] | None = None,
        short: Mapping[str, str | tuple[str, ...]] = PAIR_SHORT_KEYS,
    ):
        self.Settings, self.generation, self.metric = settings, generation, metric
        self.stack, self.sources, self.material = stack, sources, material
        self.main_only, self.losses, self.short = main_only, losses or {}, short

    def resolve(self, task: Task, values: Mapping[str, Any], origin: Origin | None) -> T:
        """Settings whose texts have no more tokens than a model to start from has positions."""
        stack = self.stack
        settings = usual_settings(task, values, origin, like=stack.like, serves=stack.serves)
        self.material(settings).check(settings)
        room = None if origin is None else self.stack.room(settings.model)
        if room is None or "max_length" in values:
            return settings
        return replace(settings, max_length=min(settings.max_length, max(1, room - _FRAME)))

    def read(self, settings: T, origin: Origin | None) -> Dataset[Any]:
        """Parts to train and to validate on."""
        return self.material(settings).read(settings)

    def codec(
        self, data: Dataset[Any], settings: T, learnt: Learnt, origin: Origin | None
    ) -> PairCodec:
        """Tokenizers of both sides, and what config.json notes of the data."""
        source, target = learnt(
            lambda: self.material(settings).learn(data, settings),
            load=load_tokenizers,
            save=save_tokenizers,
        )
        return PairCodec(source, target, self.sources.about(data, settings))

    def model(
        self,
        data: Dataset[Any],
        codec: PairCodec,
        settings: T,
        origin: Origin | None,
    ) -> tuple[str, nn.Module]:
        """Model for these vocabularies."""
        room, frame = self.stack.room(settings.model), 1 + len(codec.source.frame([], "source"))
        if origin is not None and room is not None and settings.max_length + frame > room:
            raise UsageError(
                f"max_length={settings.max_length} is more than the {room} positions that "
                f"init={settings.init} has learned, {frame} of them for special tokens"
            )
        rows = self.material(settings).rows(settings)
        config = self.stack.config(settings.model, codec, settings.max_length, rows, origin is None)
        name = config_family(config)
        return name, build_model(name, config, settings, origin)

    def lesson(self, runner: Runner[Any], data: Dataset[Any], settings: T) -> Lesson:
        """Batches of pairs, and the cross-entropy of their targets."""
        material = self.material(settings)
        writer: TextWriter = runner.predictor
        batches, loss = material.batches(data, writer, settings), self.losses.get(runner.family)
        loss, decoded = loss or sequence_loss, material.decoded(data, settings)

        def learn(batch: PairBatch) -> Tensor:
            if settings.loss != "auto":
                return own_sequence_loss(writer.writer, batch, settings.loss)
            return loss(writer.writer, batch, settings.label_smoothing, settings.r_drop)

        def validate(share: float) -> dict[str, float]:
            """Loss, and the scores of what is written greedily."""
            total = tokens = 0.0
            with torch.inference_mode():
                for batch in material.valid(batches, data, writer, settings, share):
                    batch = moved(batch, settings.device)
                    total += float(loss(writer.writer, batch, 0.0, 0.0))
                    tokens += batch.tokens
            scores = {"loss": total / tokens, "better": -total / tokens}
            some = math.ceil(share * decoded)
            return scores | (self.valid_scores(runner, data, settings, some) if some else {})

        return Lesson(
            batches=batches,
            count=lambda batch: (batch.tokens, batch.read),
            loss=learn,
            validate=validate,
            title=self.sources.title(data, settings),
            facts=material.facts(batches),
            decoded=decoded,
            generation=self.generation,
            finish=lambda folder: self.finish(folder, runner, data),
        )

    def valid_scores(
        self, runner: Runner[Any], data: Dataset[Any], settings: T, count: int
    ) -> dict[str, float]:
        """Scores of what is written greedily for the first validation sources."""
        pairs, metric = data["valid"][:count], self.metric(settings)
        greedy = runner.check({"beam": 1, **self.sources.as_given})
        outputs = [str(answer) for answer in runner.answer([p.source for p in pairs], greedy)]
        judged = metric.score(outputs, [[p.target for p in pairs]], runner.config.get("to"))
        main = next(score for score in judged if score.name == metric.main)
        told = [main] if self.main_only else judged
        scores = {score.name.lower().replace(" ", "_"): score.value for score in told}
        return {**scores, "better": main.value}

    def finish(self, folder: Path, runner: Runner[Any], data: Dataset[Any]) -> None:
        """Note in a folder which head of its model aligns some validation pairs best."""
        if not self.sources.sentences:
            return
        writer: TextWriter = runner.task.load(folder, *load_folder(folder)).predictor
        if head := writer.best_head((pair.source, pair.target) for pair in data["valid"][:50]):
            save_generation(folder, {**self.generation, "alignment_head": head})
