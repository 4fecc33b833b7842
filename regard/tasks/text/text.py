"""Text to text: any task as a text that is read and one that is written, after T5 and BART.

A prefix before the input names the task: `summarize: ...`. Before there are pairs to learn from, a
model may be pretrained on plain text by denoising: to restore what was masked or shuffled.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from regard.attention.positions import has_table
from regard.data.denoising import CORRUPTIONS, DenoisingBatches
from regard.data.documents import Texts, load_texts
from regard.data.pairs import Corpus, PairReader
from regard.data.table import Table
from regard.data.tokenize import train_tokenizer
from regard.data.tokenizer import Tokenizer
from regard.decode.constraints import MAX_TOKENS
from regard.errors import UsageError, log, lookup
from regard.metrics.text import METRICS
from regard.models import family
from regard.models.protocols import Model
from regard.pretrained.tokenizer_folder import load_tokenizers, save_tokenizers
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.task import Learnt
from regard.tasks.text.pair_settings import (
    PairEvalSettings,
    PairLookSettings,
    PairRunSettings,
    PairTrainSettings,
)
from regard.tasks.text.pairs import PairCodec
from regard.tasks.text.seq2seq import Seq2Seq

TransformerConfig, _ = family("transformer")
# training objective -> what its data hold
OBJECTIVES = {"pairs": "pairs of texts", **dict.fromkeys(CORRUPTIONS, "text")}
LONGEST = 4096  # tokens that are read of an input, where positions set no bound
FRAME = 4  # special tokens for which there is room around a text
LONGEST_PREFIX = 1000  # characters
PREFIX = "put before every input, such as summarize"
SPLIT = "answer sentence by sentence"


@dataclass(frozen=True)
class TextSettings(PairTrainSettings):
    """What a text-to-text training can be told."""

    vocabularies: str = setting(
        "joint", "vocabularies of both sides", choices=("joint", "separate")
    )
    objective: str = setting(
        "pairs", "training objective; on plain text spans (T5) or noise (BART)", choices=OBJECTIVES
    )
    prefix: str = setting("", PREFIX)
    metric: str = setting("bleu", "metric", choices=METRICS)
    share: float | None = setting(
        None, "share of a text that is masked (spans 0.15, noise 0.3)", above=0, max=0.9
    )
    mean_span: float = setting(3.0, "mean length of a masked span", min=1, max=100)
    model: TransformerConfig = field(default_factory=TransformerConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class TextRunSettings(PairRunSettings):
    """What a run can be told."""

    prefix: str = setting("", PREFIX)
    split: bool = setting(False, SPLIT)


@dataclass(frozen=True)
class TextLookSettings(PairLookSettings):
    """What look can be told."""

    prefix: str = setting("", PREFIX)


@dataclass(frozen=True)
class TextEvalSettings(PairEvalSettings, TextRunSettings):
    """What an evaluation can be told."""

    metric: str = setting("bleu", "metric", choices=METRICS, group="scores")


# Prefixes


def lead(prefix: str) -> str:
    """Return what is put before an input: `summarize: ` for summarize, all else as it is."""
    return f"{prefix}: " if prefix[-1:].isalnum() else prefix


def read_prefixes(path: Path, headed: bool) -> dict[str, str]:
    """Return the task that a file names for its rows in a column or key `task`, by their place."""
    first = next((row.value for row in Table(path) if row.value is not None), [])
    named = "task" in (cell.strip().casefold() for cell in first)
    if not isinstance(first, dict) and not (named and headed):
        return {}
    # rows without a task, and those that were dropped before, are no concern here
    reader = PairReader(path, columns=("task", "task"), skip_bad=True)
    return {pair.where: pair.source for pair in reader}


def with_prefixes(corpus: Corpus, prefix: str) -> Corpus:
    """Put the prefix of its row, or else one for all, before every input."""
    places = {pair.where for pairs in corpus.parts.values() for pair in pairs}
    tasks: dict[str, str] = {}
    for part in corpus.files.values():
        if part.target_path is None:
            tasks |= read_prefixes(part.path, headed=f"{part.path}:1" not in places)
    parts = {
        name: [replace(p, source=lead(tasks.get(p.where, prefix)) + p.source) for p in pairs]
        for name, pairs in corpus.parts.items()
    }
    return replace(corpus, parts=parts)


# The task


class TextToText(Seq2Seq):
    """Answers texts with texts, each kind of task asked for by a prefix."""

    name = "text"
    holds = "pairs of texts"
    Train = TextSettings
    Run = TextRunSettings
    Look = TextLookSettings
    Eval = TextEvalSettings
    generation = {"beam": 4, "length_penalty": "average", "alpha": 1.0}
    noted = ("prefix", "metric", "objective", "to")
    as_given = {"prefix": ""}  # pairs have their prefixes, which may differ from row to row

    @property
    def positions(self) -> int | None:
        """Return how many positions a learned table has."""
        shape = self.model.config
        return shape.max_length if has_table(shape.position) else None

    def longest_source(self) -> int:
        """Return the most tokens that are read: as many as it has positions for."""
        room = self.positions or max(LONGEST, self.model.config.max_length)
        return room - len(self.framed([]))

    # ---- Training

    @classmethod
    def needs(cls, values: Mapping[str, Any]) -> str:
        """Return what the data of an objective hold."""
        return lookup("objective", str(values.get("objective", "pairs")), OBJECTIVES)

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Refuse settings that do not fit each other."""
        if origin is not None and has_table(settings.model.position) and "max_length" not in values:
            room = max(1, settings.model.max_length - FRAME)  # no more than it has learned
            settings = replace(settings, max_length=min(settings.max_length, room))
        denoising = settings.objective in CORRUPTIONS
        if denoising and (settings.vocabularies != "joint" or settings.bpe_dropout):
            raise UsageError(
                f"objective={settings.objective} reads and writes the same text; it goes with "
                "vocabularies=joint and without bpe_dropout"
            )
        return settings

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> Any:
        """Read pairs, or plain text for denoising."""
        if settings.objective in CORRUPTIONS:
            keys = ("valid", "test", "header")
            options = {key: getattr(settings, key) for key in keys}
            return load_texts(settings.data, key=settings.columns, **options)
        return with_prefixes(super().read(settings, origin), settings.prefix)

    @classmethod
    def make_codec(
        cls, data: Corpus | Texts, settings: Any, learnt: Learnt, origin: Origin | None
    ) -> PairCodec:
        """Learn the tokenizers from pairs or from plain text."""
        about = {key: getattr(settings, key) for key in ("prefix", "metric", "objective")}
        if isinstance(data, Corpus):
            codec = super().make_codec(data, settings, learnt, origin)
            return PairCodec(*codec.tokenizers, {**about, "to": data.target})

        def learn() -> tuple[Tokenizer, Tokenizer]:
            lines = (line for text in data["train"] for line in text.splitlines())
            both = train_tokenizer(lines, kind=settings.tokenizer, vocab=settings.pieces)
            return both, both

        source, target = learnt(learn, load=load_tokenizers, save=save_tokenizers)
        return PairCodec(source, target, {**about, "to": None})

    @classmethod
    def make_model(
        cls, data: Corpus | Texts, codec: PairCodec, settings: Any, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Build the model, with rows for the sentinels of its objective."""
        config: Any = settings.model
        if origin is not None and has_table(config.position):
            frame = 1 + len(codec.source.frame([], "source"))
            if settings.max_length + frame > config.max_length:
                raise UsageError(
                    f"max_length={settings.max_length} is more than the {config.max_length} "
                    f"positions that init={settings.init} has learned, {frame} of them for special "
                    "tokens"
                )
        if origin is None:
            denoised = CORRUPTIONS.get(settings.objective)
            more = denoised.sentinels if denoised else 0
            config = replace(
                config,
                source_vocab=codec.source.vocab + more,
                target_vocab=codec.target.vocab + more,
                max_length=max(config.max_length, 4 * settings.max_length + 2),
            )
            if codec.source is not codec.target:
                apart = {"all": "target", "embeddings": "none"}
                config = replace(config, tie=apart.get(config.tie, config.tie))
        name = cls.families()[0]
        return name, cls.build(name, config, settings, origin)

    def batches(self, data: Corpus | Texts, settings: Any) -> Any:
        """Return batches of pairs, or of corrupted texts."""
        if isinstance(data, Corpus):
            return super().batches(data, settings)
        self.denoising = DenoisingBatches(
            data,
            self.codec.source,
            settings.objective,
            vocab=self.model.config.source_vocab,
            share=settings.share,
            mean_span=settings.mean_span,
            tokens=settings.batch_tokens,
            longest=settings.max_length,
            seed=settings.seed,
            device=settings.device,
        )
        return self.denoising

    def decodes(self, data: Corpus | Texts, settings: Any) -> int:
        """Return how many texts a validation decodes: none in denoising."""
        return super().decodes(data, settings) if isinstance(data, Corpus) else 0

    def validate(self, data: Corpus | Texts, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the loss, and for pairs the scores of what is written greedily."""
        if isinstance(data, Corpus):
            return super().validate(data, settings, share)
        loss = self.mean_loss(self.denoising.valid())
        return {"loss": loss, "better": -loss}

    def valid_scores(
        self, outputs: list[str], references: list[str], settings: Any
    ) -> dict[str, float]:
        """Return all scores of the metric; `better` is its main one."""
        metric = METRICS[settings.metric]
        judged = metric.score(outputs, [references], self.config.get("to"))
        scores = {score.name.lower().replace(" ", "_"): score.value for score in judged}
        return {**scores, "better": next(s.value for s in judged if s.name == metric.main)}

    def title(self, data: Corpus | Texts, settings: Any) -> str:
        """Return what it was trained on."""
        return f"text to text, learnt from {OBJECTIVES[settings.objective]}"

    # ---- Using

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: dict[str, Any]) -> PairCodec:
        """Read the tokenizers, and check the prefix and the metric."""
        prefix, metric = config.get("prefix", ""), config.get("metric", "bleu")
        if not isinstance(prefix, str) or len(prefix) > LONGEST_PREFIX:
            raise UsageError(
                f"{folder / 'config.json'}: 'prefix' is {prefix!r:.40}, not a short text"
            )
        if metric not in METRICS:
            raise UsageError(f"{folder / 'config.json'}: unknown metric {metric!r:.40}")
        return super().load_codec(folder, model, config)

    @property
    def own(self) -> dict[str, Any]:
        """Return the model's own defaults, its prefix among them."""
        return {"prefix": self.config.get("prefix", ""), **super().own}

    def eval_defaults(self) -> dict[str, Any]:
        """Return the metric that the model was trained by."""
        return {"metric": self.config.get("metric", "bleu")}

    def check_run(self, settings: Any) -> Any:
        """Refuse a long prefix, and more tokens than there are positions."""
        settings = super().check_run(settings)
        if len(settings.prefix) > LONGEST_PREFIX:
            raise UsageError(
                f"prefix= has {len(settings.prefix)} letters; expected at most a short text"
            )
        if self.positions is None:
            return settings
        most = self.positions - 1
        if settings.max_length is None:
            return replace(settings, max_length=most) if most < MAX_TOKENS else settings
        if settings.max_length > most:
            raise UsageError(
                f"max_length={settings.max_length} is more than the {most} it has learned"
            )
        return settings

    def prompt(self, text: str, settings: Any) -> str:
        """Put the prefix before an input."""
        return lead(settings.prefix) + text

    def opening(self, settings: Any) -> list[int]:
        """Return nothing: no answer has a forced beginning."""
        return []

    def encode_source(self, text: str, settings: Any) -> list[int]:
        """Split an input into ids; what is too long is cut off."""
        ids, longest = super().encode_source(text, settings), self.decoder.longest
        if len(ids) > longest:
            log(f"a text of {len(ids):,} pieces is read only up to {longest:,}")
        return ids[:longest]

    # ---- Judging

    def metric(self, settings: Any) -> Any:
        """Return the metric that was asked for."""
        return METRICS[settings.metric]

    def check_eval(self, settings: Any, given: Mapping[str, Any]) -> None:
        """Refuse what has no meaning here."""
        super().check_eval(settings, given)
        if settings.joined:
            raise UsageError(
                "joined= is for translators: joined inputs of another task are no input"
            )

    def prepared(self, corpus: Corpus, settings: Any) -> Corpus:
        """Put the prefix of each row before its input."""
        return with_prefixes(corpus, settings.prefix)
