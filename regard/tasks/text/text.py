"""Text to text: any task as a text that is read and one that is written, after T5 and BART.

A prefix before the input names the task: `summarize: ...`. Before there are pairs to learn from, a
model may be pretrained on plain text by denoising: to restore what was masked or shuffled.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

from regard.data.denoising import CORRUPTIONS, DenoisingBatches
from regard.data.documents import Texts, load_texts
from regard.data.pairs import Corpus, Pair, PairReader
from regard.data.parallel import PairBatch
from regard.data.parts import Dataset
from regard.data.table import Table
from regard.data.text_rows import mapped
from regard.data.tokenize import train_tokenizer
from regard.data.tokenizer import Tokenizer
from regard.decode.constraints import MAX_TEXT_TOKENS
from regard.errors import UsageError, log
from regard.metrics.text import TEXT_METRICS, BleuMetric, MeanMetric
from regard.modalities.text import TEXT
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.settings import EvalSettings, TrainSettings
from regard.tasks.parts import Batches, Configured, Task, V
from regard.tasks.text.sequence import (
    ENCODER_DECODER,
    PairCodec,
    Pairs,
    PairTrainSettings,
    SequenceObjective,
    Sources,
    load_pair_codec,
)
from regard.tasks.text.text_judge import PairEvalSettings, TextJudge
from regard.tasks.text.writer import PairLookSettings, PairRunSettings, TextWriter, WriteSettings

# training objective -> what its data hold
_OBJECTIVES = {"pairs": "pairs of texts", **dict.fromkeys(CORRUPTIONS, "text")}
_LONGEST = 4096  # tokens that are read of an input, where positions set no bound
_LONGEST_PREFIX = 1000  # characters
_PREFIX = "put before every input, such as summarize"
_SPLIT = "answer sentence by sentence"


@dataclass(frozen=True)
class TextSettings(PairTrainSettings):
    """What a text-to-text training can be told."""

    vocabularies: str = setting(
        "joint", "vocabularies of both sides", choices=("joint", "separate")
    )
    objective: str = setting(
        "pairs", "training objective; on plain text spans (T5) or noise (BART)", choices=_OBJECTIVES
    )
    prefix: str = setting("", _PREFIX)
    metric: str = setting("bleu", "metric", choices=TEXT_METRICS)
    share: float | None = setting(
        None, "share of a text that is masked (spans 0.15, noise 0.3)", above=0, max=0.9
    )
    mean_span: float = setting(3.0, "mean length of a masked span", min=1, max=100)


@dataclass(frozen=True)
class TextRunSettings(PairRunSettings):
    """What a run can be told."""

    prefix: str = setting("", _PREFIX)
    split: bool = setting(False, _SPLIT)


@dataclass(frozen=True)
class TextLookSettings(PairLookSettings):
    """What look can be told."""

    prefix: str = setting("", _PREFIX)


@dataclass(frozen=True)
class TextEvalSettings(PairEvalSettings):
    """What an evaluation can be told."""

    metric: str = setting("bleu", "metric", choices=TEXT_METRICS, group="scores")


# Prefixes


def lead(prefix: str) -> str:
    """What is put before an input: `summarize: ` for summarize, all else as it is."""
    return f"{prefix}: " if prefix[-1:].isalnum() else prefix


def read_prefixes(path: Path, headed: bool) -> dict[str, str]:
    """The task that a file names for its rows in a column or key `task`, by their place."""
    first = next((row.value for row in Table(path) if row.value is not None), [])
    named = "task" in (cell.strip().casefold() for cell in first)
    if not isinstance(first, dict) and not (named and headed):
        return {}
    # rows without a task, and those that were dropped before, are no concern here
    reader = PairReader(path, columns=("task", "task"), skip_bad=True)
    return {pair.where: pair.source for pair in reader}


def with_prefixes(corpus: Corpus, prefix: str) -> Corpus:
    """Put the prefix of its row, or else one for all, before every input."""
    places = {pairs[0].where for pairs in corpus.parts.values() if len(pairs)}
    tasks: dict[str, str] = {}
    for part in corpus.files.values():
        if part.target_path is None:
            tasks |= read_prefixes(part.path, headed=f"{part.path}:1" not in places)
    if not tasks and not prefix:
        return corpus

    def prefixed(pair: Pair) -> Pair:
        return replace(pair, source=lead(tasks.get(pair.where, prefix)) + pair.source)

    parts = {name: mapped(pairs, prefixed) for name, pairs in corpus.parts.items()}
    return replace(corpus, parts=parts)


class PrefixedTexts(Sources[TextSettings]):
    """Whole texts, after a prefix that names what is to be done with them."""

    as_given = {"prefix": ""}  # pairs have their prefixes, which may differ from row to row
    sentences = False

    def title(self, data: Dataset[Any], settings: TextSettings) -> str:
        """What it is trained on."""
        return f"text to text, learnt from {_OBJECTIVES[settings.objective]}"

    def about(self, data: Dataset[Any], settings: TextSettings) -> dict[str, Any]:
        """Prefix, metric and objective, and the language of targets."""
        about = {key: getattr(settings, key) for key in ("prefix", "metric", "objective")}
        return {**about, "to": data.target if isinstance(data, Corpus) else None}

    def prepare(self, corpus: Corpus, settings: TrainSettings | EvalSettings) -> Corpus:
        """Pairs with the prefix of each row before its source."""
        told = settings.prefix if isinstance(settings, TextSettings | TextRunSettings) else ""
        return with_prefixes(corpus, told)

    def defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The prefix that the model was trained with."""
        return {"prefix": config.get("prefix", "")}

    def check(self, settings: V, positions: int | None) -> V:
        """Refuse a long prefix, and more tokens than there are positions."""
        if not isinstance(settings, WriteSettings):
            return settings
        if len(settings.prefix) > _LONGEST_PREFIX:
            raise UsageError(
                f"prefix= has {len(settings.prefix)} letters; expected at most a short text"
            )
        if positions is None:
            return settings
        most = positions - 1
        if settings.max_length is None:
            return replace(settings, max_length=most) if most < MAX_TEXT_TOKENS else settings
        if settings.max_length > most:
            raise UsageError(
                f"max_length={settings.max_length} is more than the {most} it has learned"
            )
        return settings

    def positions(self, model: Model) -> int | None:
        """Number of positions of a learned table."""
        return ENCODER_DECODER.room(model.config)

    def longest(self, model: Model, frame: int) -> int:
        """Most tokens that are read: as many as there are positions for."""
        return (self.positions(model) or max(_LONGEST, model.config.max_length)) - frame

    def prompt(self, text: str, settings: WriteSettings) -> str:
        """A text after its prefix."""
        return lead(settings.prefix) + text

    def cut(self, ids: list[int], longest: int) -> list[int]:
        """Tokens of a source up to the longest; what is cut off is told."""
        if len(ids) > longest:
            log(f"a text of {len(ids):,} pieces is read only up to {longest:,}")
        return ids[:longest]

    def opening(self, tokenizer: Tokenizer, settings: WriteSettings) -> list[int]:
        """Nothing: no answer has a forced beginning."""
        return []


class CorruptedText(Pairs[TextSettings]):
    """Plain text that was masked or shuffled, and is to be restored."""

    def check(self, settings: TextSettings) -> None:
        """Refuse what only pairs can be learnt with."""
        if settings.vocabularies != "joint" or settings.bpe_dropout:
            raise UsageError(
                f"objective={settings.objective} reads and writes the same text; it goes with "
                "vocabularies=joint and without bpe_dropout"
            )

    def read(self, settings: TextSettings) -> Dataset[Any]:
        """Texts to be corrupted."""
        return load_texts(
            str(settings.data),
            key=settings.columns,
            valid=settings.valid,
            test=settings.test,
            header=settings.header,
        )

    def learn(self, data: Dataset[Any], settings: TextSettings) -> tuple[Tokenizer, Tokenizer]:
        """One tokenizer for both sides."""
        lines = (line for text in cast(Texts, data).sample("train") for line in text.splitlines())
        both = train_tokenizer(lines, kind=settings.tokenizer, vocab=settings.pieces)
        return both, both

    def rows(self, settings: TextSettings) -> int:
        """Number of sentinels."""
        return CORRUPTIONS[settings.objective].sentinels

    def batches(self, data: Dataset[Any], writer: TextWriter, settings: TextSettings) -> Batches:
        """Batches of corrupted texts."""
        return DenoisingBatches(
            cast(Texts, data),
            writer.codec.source,
            settings.objective,
            vocab=writer.model.config.source_vocab,
            share=settings.share,
            mean_span=settings.mean_span,
            tokens=settings.batch_tokens,
            longest=settings.max_length,
            seed=settings.seed,
        )

    def facts(self, batches: Any) -> dict[str, Any]:
        """Nothing is left out."""
        return {"left_out": 0}

    def valid(
        self, batches: Any, data: Dataset[Any], writer: Any, settings: TextSettings, share: float
    ) -> Iterable[PairBatch]:
        """Batches of the validation part, always corrupted alike."""
        return batches.valid()

    def decoded(self, data: Dataset[Any], settings: TextSettings) -> int:
        """None: only the loss is told."""
        return 0


_SOURCES = PrefixedTexts()
_MATERIALS: dict[str, Pairs[TextSettings]] = {
    "pairs": Pairs(_SOURCES),
    **dict.fromkeys(CORRUPTIONS, CorruptedText(_SOURCES)),
}


def load_text_codec(folder: Path, model: Model, config: dict[str, Any]) -> PairCodec:
    """Read the tokenizers, and check the prefix and the metric."""
    prefix, metric = config.get("prefix", ""), config.get("metric", "bleu")
    if not isinstance(prefix, str) or len(prefix) > _LONGEST_PREFIX:
        raise UsageError(f"{folder / 'config.json'}: 'prefix' is {prefix!r:.40}, not a short text")
    if metric not in TEXT_METRICS:
        raise UsageError(f"{folder / 'config.json'}: unknown metric {metric!r:.40}")
    return load_pair_codec(folder, model, config)


def metric_of(settings: TextSettings | TextEvalSettings) -> MeanMetric | BleuMetric:
    """The metric that settings name."""
    return TEXT_METRICS[settings.metric]


TEXT_TO_TEXT = Task(
    name="text",
    holds="pairs of texts, or text to be restored",
    inputs=TEXT,
    target="text",
    unit="sentences",
    objective=SequenceObjective(
        TextSettings,
        {"beam": 4, "length_penalty": "average", "alpha": 1.0},
        metric_of,
        sources=_SOURCES,
        material=lambda settings: _MATERIALS[settings.objective],
        main_only=False,
    ),
    predictor=Configured(partial(TextWriter, sources=_SOURCES), TextRunSettings, TextLookSettings),
    judge=TextJudge(metric_of, TextEvalSettings, _SOURCES),
    load_codec=load_text_codec,
)
