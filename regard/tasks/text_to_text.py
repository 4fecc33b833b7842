"""Text to text: any task as a text that is read and one that is written, after T5 and BART.

A prefix before the input names the task: `summarize: ...`. Before there are pairs to learn from, a
model may learn from plain text: to mend what was taken out of it or put in disorder.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.attention.positions import has_table
from regard.data.batches import Batches
from regard.data.corrupt import corrupt_spans, cut_texts, infill, permute_parts
from regard.data.documents import Texts, load_texts
from regard.data.store import Store, build_store, store_key
from regard.data.table import Table
from regard.data.text import Corpus, PairReader
from regard.data.tokenize import train_tokenizer
from regard.decode import search
from regard.errors import UsageError, log, lookup
from regard.files import cache_folder
from regard.metrics.evaluation import Evaluation
from regard.metrics.text import METRICS
from regard.models import family
from regard.tasks.evaluation import EvalSettings, evaluate, read_test
from regard.tasks.run import (
    Data,
    Report,
    Work,
    build_model,
    resolve_task,
    save_generation,
    settle_tokenizer,
    shape_of,
    train_task,
)
from regard.tasks.translate import (
    SHORT,
    SIZES,
    Batch,
    TranslateSettings,
    Translation,
    build_tokenizers,
    corpus_hash,
    load,
    make_batch,
    translation_loss,
)
from regard.tasks.translator import (
    RunSettings,
    Translated,
    Translator,
    around,
    load_tokenizers,
    save_tokenizers,
    setting,
)
from regard.training.loop import Trainable, at_least, mix

NAME = "text"
FAMILY = "transformer"
TransformerConfig, _ = family(FAMILY)
GENERATION = {"beam": 4, "length_penalty": "average", "alpha": 1.0}
SENTINEL = "<extra_id_{}>"  # how T5's tokenizers name their sentinels
SENTINELS = 100
LONGEST = 4096  # pieces that are read of an input, where positions set no bound
LONGEST_PREFIX = 1000  # characters


@dataclass(frozen=True)
class TextSettings(TranslateSettings):
    """Everything that a text-to-text run can be told."""

    vocabularies: str = field(default="joint", metadata={"help": "joint or separate"})
    like: str | None = field(
        default=None, metadata={"help": "transformer, t5, t5_1.1, bart or marian"}
    )
    objective: str = field(
        default="pairs", metadata={"help": "pairs; or on plain text spans (T5) or noise (BART)"}
    )
    prefix: str = field(default="", metadata={"help": "before every input, such as summarize"})
    metric: str = field(default="bleu", metadata={"help": "bleu, rouge or answers"})
    share: float | None = field(
        default=None,
        metadata={"help": "of a text that is taken out (spans 0.15, noise 0.3)", "above": 0}
        | {"max": 0.9},
    )
    mean_span: float = field(default=3.0, metadata=at_least(1, "pieces taken out at once", 100))


def resolve(values: Mapping[str, Any]) -> TextSettings:
    """Make full settings of what a user gave: the size fills in what is not said."""
    goal = lookup("objective", str(values.get("objective", "pairs")), OBJECTIVES)
    row = values.get("like")
    if row and values.get("init"):
        raise UsageError(f"like={row} is for a new model; the one in init= has its parts already")
    settings = resolve_task(
        TextSettings,
        values,
        model=shape_of(FAMILY, values, str(row or "transformer")),
        sizes=SIZES,
        short=SHORT,
        of=goal.of,
    )
    lookup("metric", settings.metric, METRICS)
    if settings.vocabularies not in ("joint", "separate"):
        raise UsageError(f"vocabularies='{settings.vocabularies}' is not one of joint, separate")
    if goal.marks and (settings.vocabularies != "joint" or settings.bpe_dropout):
        raise UsageError(
            f"objective={settings.objective} reads and writes the same text; it goes with "
            "vocabularies=joint and without bpe_dropout"
        )
    return settings


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


# What there is to learn


class Pairs(Translation):
    """Outputs are guessed from their inputs."""

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return the loss, and the scores of what is written greedily, on the validation part."""
        scores = {"loss": self.valid_loss(model)}
        scores["better"] = -scores["loss"]
        some = self.some(self.decoded)
        if some:
            writer = TextToText(model, self.source, self.target, {"to": self.language})
            outputs = [str(answer) for answer in writer.run([p.source for p in some], beam=1)]
            metric = METRICS[self.settings.metric]  # type: ignore[attr-defined]
            for score in metric.judge(outputs, [[p.target for p in some]], self.language):
                scores[score.name.lower().replace(" ", "_")] = score.value
                if score.name == metric.main:
                    scores["better"] = score.value
        return scores


class Marks(NamedTuple):
    """The tokens that stand for what was taken out of a text."""

    mask: int
    sentinels: list[int]


def marks_of(tokenizer: Any, vocab: int, needed: int) -> Marks:
    """Find the marks in a tokenizer that has them, or among the spare rows of a vocabulary."""
    spare = list(range(tokenizer.vocab, vocab))
    named = [tokenizer.token_to_id(SENTINEL.format(n)) for n in range(SENTINELS)]
    sentinels = [n for n in named if n is not None] or spare
    mask = tokenizer.mask if tokenizer.mask is not None else (sentinels or [-1])[0]
    if mask < 0 or len(sentinels) < min(needed, 2):
        raise UsageError(
            f"the model has no tokens to mark what is taken out ({len(sentinels)} found); "
            "begin with a model that was trained by objective=spans or noise, or without init="
        )
    return Marks(mask, sentinels)


class Mending(Trainable):
    """A text is guessed from what is left of it."""

    share = 0.15

    def __init__(self, texts: Texts, settings: TextSettings, tokenizer: Any, vocab: int):
        self.settings, self.tokenizer = settings, tokenizer
        self.marks = marks_of(tokenizer, vocab, OBJECTIVES[settings.objective].marks)
        self.taken = self.share if settings.share is None else settings.share
        self.stores = {part: self._tokenise(texts, part) for part in ("train", "valid")}
        self.batches = self._batches("train", settings.batch_tokens, settings.seed)

    def _tokenise(self, texts: Texts, part: str) -> Store:
        """Cut a part into stretches of tokens, or find them there already."""
        longest = self.settings.max_length
        key = store_key(texts.sha, self.tokenizer.sha, part, longest, "mending")
        folder = cache_folder() / "stores" / key
        try:
            return Store.open(folder)
        except UsageError:
            found = cut_texts(texts.parts[part], self.tokenizer, longest)
            return build_store(folder, (row for row in found if len(row[0]) > 1))

    def _batches(self, part: str, tokens: int, seed: int) -> Batches:
        lengths = self.stores[part].lengths(0)
        return Batches([lengths + 1, self.guessed(lengths) + 1], tokens, seed)

    def guessed(self, lengths: np.ndarray) -> np.ndarray:
        """Return about how many tokens are guessed of texts of some lengths."""
        return lengths

    def spoil(self, ids: np.ndarray, sentences: np.ndarray, seed: int) -> tuple:
        """Return what is read and what is to be written for a text."""
        raise NotImplementedError

    def epoch(self) -> float:
        """Return in how many batches all texts are read once."""
        return self.batches.len_epoch()

    def _batch(self, part: str, rows: np.ndarray, n: int) -> Batch:
        store = self.stores[part]
        seeds = [mix(self.settings.seed, part, n, int(i)) for i in rows]
        both = [self.spoil(store[0][i], store[1][i], s) for i, s in zip(rows, seeds, strict=True)]
        sources, targets = zip(*both, strict=True)
        return make_batch(sources, targets, self.tokenizer, self.tokenizer, self.settings.device)

    def batch(self, n: int) -> Batch:
        """Return batch n, always the same for the same seed and n."""
        return self._batch("train", self.batches[n], n)

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the tokens that the loss counts, and all that were read."""
        return batch.tokens, batch.read

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed cross-entropy of what is to be written."""
        return translation_loss(model, batch, self.settings.label_smoothing, self.settings.r_drop)

    @torch.inference_mode()
    def evaluate(self, model: Any) -> dict[str, float]:
        """Return the cross-entropy a token on the validation part, always spoilt alike."""
        plan = self._batches("valid", max(4096, self.settings.batch_tokens), 0)
        total = tokens = 0.0
        for n in range(plan.len_epoch(0)):
            batch = self._batch("valid", plan[n], 0)
            total += float(translation_loss(model, batch, 0.0, 0.0))
            tokens += batch.tokens
        return {"loss": total / tokens, "better": -total / tokens}


class Spans(Mending):
    """Spans are taken out of a text and guessed (T5)."""

    def guessed(self, lengths: np.ndarray) -> np.ndarray:
        """Return how many tokens are taken, and as many sentinels as spans."""
        taken = np.maximum(1, np.round(lengths * self.taken))
        return (taken + np.maximum(1, taken / self.settings.mean_span) + 1).astype(np.int64)

    def spoil(self, ids: np.ndarray, sentences: np.ndarray, seed: int) -> tuple:
        """Return what is left, and what was taken."""
        span = self.settings.mean_span
        return corrupt_spans(ids, self.marks.sentinels, seed, share=self.taken, mean=span)


class Noise(Mending):
    """A text is guessed from its sentences in disorder, each span of some masked as one (BART)."""

    share = 0.3

    def spoil(self, ids: np.ndarray, sentences: np.ndarray, seed: int) -> tuple:
        """Return the spoilt text, and the text."""
        mixed = permute_parts(ids, sentences, mix(seed, "order"))
        span = self.settings.mean_span
        return infill(mixed, self.marks.mask, seed, share=self.taken, mean=span), ids


@dataclass(frozen=True)
class Objective:
    """One way to learn: what its data hold, and how many tokens of its own it needs."""

    of: str
    task: Callable[..., Any]
    marks: int = 0


OBJECTIVES: dict[str, Objective] = {
    "pairs": Objective("pairs of texts", Pairs),
    "spans": Objective("text", Spans, SENTINELS),
    "noise": Objective("text", Noise, 1),
}


# Training


def read_data(settings: TextSettings) -> Data:
    """Read pairs or plain text, as the objective wants."""
    if OBJECTIVES[settings.objective].marks:
        assert settings.data is not None
        key = settings.columns
        texts = load_texts(
            settings.data,
            valid=settings.valid,
            test=settings.test,
            key=key,
            header=settings.header,
        )
        return Data(texts, texts.sha, texts.notes, texts.split)
    corpus = with_prefixes(load(settings), settings.prefix)
    return Data(corpus, corpus_hash(corpus), corpus.notes, corpus.split)


def learn_tokenizers(parts: Texts | Corpus, settings: TextSettings) -> tuple[Any, Any]:
    """Learn how to cut texts into pieces."""
    if isinstance(parts, Corpus):
        return build_tokenizers(parts, settings)
    lines = (line for text in parts.parts["train"] for line in text.splitlines())
    both = train_tokenizer(lines, kind=settings.tokenizer, vocab=settings.pieces)
    return both, both


def build(settings: TextSettings, tokenizers: tuple[Any, Any]) -> Any:
    """Build the model that the settings describe, with rows for the marks of its objective."""
    config: Any = settings.model
    if settings.init and has_table(config.position):
        frame = 1 + sum(map(len, around(tokenizers[0])))
        if settings.max_length + frame > config.max_length:
            raise UsageError(
                f"max_length={settings.max_length} is more than the {config.max_length} positions "
                f"that init={settings.init} has learned, {frame} of them for special tokens"
            )
    if not settings.init:
        marks = OBJECTIVES[settings.objective].marks
        source, target = tokenizers
        config = replace(
            config,
            source_vocab=source.vocab + marks,
            target_vocab=target.vocab + marks,
            max_length=max(config.max_length, 4 * settings.max_length + 2),
        )
        if source is not target:
            apart = {"all": "target", "embeddings": "none"}
            config = replace(config, tie=apart.get(config.tie, config.tie))
    return build_model(FAMILY, config, settings)


def train(values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None) -> Report:
    """Train a text-to-text model in a folder, or go on with one that was begun there."""
    settings = resolve(values)
    goal = OBJECTIVES[settings.objective]

    def prepare(data: Data, folder: Path, begun: dict[str, Any] | None) -> Work:
        tokenizers = settle_tokenizer(
            folder,
            settings,
            begun,
            lambda: learn_tokenizers(data.parts, settings),
            load=load_tokenizers,
            save=save_tokenizers,
        )
        model = build(settings, tokenizers)
        if goal.marks:
            task = goal.task(data.parts, settings, tokenizers[0], model.config.source_vocab)
        else:
            task = goal.task(data.parts, settings, tokenizers, settings.device)

        def save(folder: Path) -> None:
            save_tokenizers(folder, tokenizers)
            if not (folder / "generation_config.json").exists():
                save_generation(folder, GENERATION)

        about = {"prefix": settings.prefix, "metric": settings.metric}
        about["objective"] = settings.objective
        return Work(
            FAMILY,
            model,
            task,
            f"text to text, learnt from {goal.of}",
            about={**about, "to": getattr(data.parts, "target", None)},
            facts={
                "tokenizers": [t.sha for t in tokenizers],
                "left_out": getattr(task, "dropped", 0),
            },
            save=save,
        )

    return train_task(
        NAME,
        values,
        settings,
        read=lambda: read_data(settings),
        prepare=prepare,
        recipe=recipe,
        quiet=quiet,
    )


# Running


@dataclass(frozen=True)
class TextRunSettings(RunSettings):
    """How to answer."""

    prefix: str = setting("", "put before every input, such as summarize")
    split: bool = setting(False, "answer sentence by sentence")


@dataclass(frozen=True)
class TextEvalSettings(EvalSettings):
    """What to judge on, and how."""

    prefix: str = setting("", "put before every input, such as summarize")
    split: bool = setting(False, "answer sentence by sentence")
    metric: str = setting("bleu", "bleu, rouge or answers")


class TextToText(Translator):
    """A model that answers texts with texts, each kind of task asked for by a prefix."""

    task = NAME
    settings = TextRunSettings
    eval_settings = TextEvalSettings

    def __init__(self, model: Any, source: Any, target: Any, config: dict[str, Any]):
        super().__init__(model, source, target, config)
        shape = model.config
        self.positions = shape.max_length if has_table(shape.position) else None
        room = self.positions or max(LONGEST, shape.max_length)
        self.longest = room - len(self.before) - len(self.after)

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "TextToText":
        """Put a loaded model together with the tokenizers beside it."""
        prefix = config.get("prefix", "")
        if not isinstance(prefix, str) or len(prefix) > LONGEST_PREFIX:
            raise UsageError(
                f"{folder / 'config.json'}: 'prefix' is {prefix!r:.40}, not a short text"
            )
        metric = config.get("metric", "bleu")
        if metric not in METRICS:
            raise UsageError(f"{folder / 'config.json'}: unknown metric {metric!r:.40}")
        made = super().load(folder, model, config)
        assert isinstance(made, TextToText)
        return made

    def check(self, settings: dict[str, Any]) -> TextRunSettings:
        """Make full settings of what a user gave, with the model's own defaults."""
        how: Any = super().check({"prefix": self.config.get("prefix", ""), **settings})
        if len(how.prefix) > LONGEST_PREFIX:
            raise UsageError(
                f"prefix= has {len(how.prefix)} letters; expected at most a short text"
            )
        if self.positions is not None:
            most = self.positions - 1
            if how.max_length is not None and how.max_length > most:
                raise UsageError(
                    f"max_length={how.max_length} is more than the {most} it has learned"
                )
            if how.max_length is None and most < search.LONGEST:
                how = replace(how, max_length=most)
        return how

    def encode_source(self, text: str, how: RunSettings) -> list[int]:
        """Split what is read into ids, its prefix before it; what is too long is cut."""
        ids = self.source_tokenizer.encode(lead(how.prefix) + text)
        if len(ids) > self.longest:
            log(f"a text of {len(ids):,} pieces is read only up to {self.longest:,}")
        return ids[: self.longest]

    def opening(self, how: RunSettings) -> list[int]:
        """Return how every answer must begin: anyhow."""
        return []

    def score(self, pairs: Sequence[tuple[str, str]], **settings: Any) -> list[Translated]:
        """Tell how likely the model finds given answers to inputs."""
        before = lead(self.check(settings).prefix)
        asked = [(before + source, target) for source, target in pairs]
        return super().score(asked, **settings)

    def evaluate(self, settings: dict[str, Any], **more: Any) -> Evaluation:
        """Judge the answers to a test set."""
        own = {"metric": self.config.get("metric", "bleu")}
        prefix = str(settings.get("prefix", self.config.get("prefix", "")))

        def read(runner: Any, how: TextEvalSettings) -> Corpus:
            return with_prefixes(read_test(runner, how), prefix)

        # the inputs have their prefixes already, which may differ from row to row
        return evaluate(
            self,
            {**own, **settings, "prefix": ""},
            keys=TextEvalSettings,
            read=read,
            metric=lambda how: lookup("metric", how.metric, METRICS),
            **more,
        )
