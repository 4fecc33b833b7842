"""Language modelling: from text to a model that goes on writing, or fills in what is hidden."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.attention.positions import ALIASES, has_table
from regard.data.characters import Characters
from regard.data.documents import Crops, Packed, Texts, load_texts, store_texts, stretches
from regard.data.store import Column
from regard.data.tokenize import SPACELESS, train_tokenizer
from regard.data.tokenizer import mask_id
from regard.errors import UsageError, lookup
from regard.files import read_json
from regard.layers.vocabulary import CappedHead
from regard.models import family, rows
from regard.settings import describe
from regard.tasks import run
from regard.tasks.run import (
    Data,
    Report,
    TaskSettings,
    Work,
    build_model,
    resolve_task,
    save_generation,
    save_tokenizer,
    settle_tokenizer,
    shape_of,
    train_task,
)
from regard.training.loop import Trainable, at_least
from regard.training.loss import plain_loss, vocabulary_loss

NAME = "language"
GPTConfig, _ = family("gpt")
BertConfig, _ = family("bert")
LadderConfig, _ = family("ladder")
GENERATION = {"temperature": 0.8, "top_p": 0.95, "max_length": 200}

# what a size means for training, on top of the sizes of the model
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"lr": 0.002, "context": 128, "batch_tokens": 2048, "pieces": 4000, "steps": 5000},
    "small": {"lr": 0.001, "context": 256, "batch_tokens": 4096, "pieces": 8000, "steps": 10_000},
    "base": {
        "lr": 0.0006,
        "context": 512,
        "batch_tokens": 32_768,
        "pieces": 32_000,
        "steps": 100_000,
    },
    "big": {
        "lr": 0.0003,
        "context": 1024,
        "batch_tokens": 131_072,
        "pieces": 32_000,
        "steps": 300_000,
    },
}
# short keys for what lies deeper
SHORT = {
    **run.SHORT,
    "kv_heads": "model.block.kv_heads",
    "bias": "model.block.bias",
    "rung": "model.rung",
    "gates": "model.gates",
}
# how texts are cut into tokens, beside what train_tokenizer learns
CHARACTERS = "characters"
SPACELESS_CHARACTER = re.compile(f"[{SPACELESS}]")
FEW = 1000  # tokens of a vocabulary whose logits are quicker made all at once


@dataclass(frozen=True)
class LanguageSettings(TaskSettings):
    """Everything that a language model's run can be told."""

    schedule: str = field(default="cosine", metadata={"help": "fall of the rate"})
    weight_decay: float = field(default=0.1, metadata=at_least(0, "of matrices", 10))
    beta2: float = field(default=0.99, metadata=at_least(0, "AdamW's second memory", 0.99999))
    valid: str | None = field(default=None, metadata={"help": "a file to choose by, or a share"})
    objective: str = field(default="causal", metadata={"help": "causal or masked"})
    family: str | None = field(default=None, metadata={"help": "gpt or ladder; bert if masked"})
    like: str | None = field(
        default=None, metadata={"help": "gpt2, llama, ...; gated, ..., heads; bert, roberta, ..."}
    )
    columns: str | None = field(default=None, metadata={"help": "the text's column in a table"})
    header: bool | None = field(
        default=None, metadata={"help": "whether a table begins with one; recognised unless told"}
    )
    tokenizer: str = field(default="bpe", metadata={"help": "characters, bytes, bpe or unigram"})
    pieces: int = field(default=4000, metadata=at_least(300, "sub-words", 1_000_000))
    context: int = field(default=128, metadata=at_least(2, "tokens read at once", 1_000_000))
    batch_tokens: int = field(default=2048, metadata=at_least(1, "tokens a batch"))
    label_smoothing: float = field(default=0.0, metadata=at_least(0, "spread of the target", 0.9))
    mask_share: float = field(
        default=0.15, metadata={"help": "words to guess, if masked", "above": 0, "max": 1}
    )
    valid_tokens: int = field(
        default=200_000, metadata=at_least(0, "read at a validation; 0: all of the part")
    )
    model: GPTConfig = field(default_factory=GPTConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class MaskedSettings(LanguageSettings):
    """The same, for a model that reads in both directions."""

    model: BertConfig = field(default_factory=BertConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class LadderSettings(LanguageSettings):
    """The same, for a model on a rung between a gated unit and a transformer."""

    model: LadderConfig = field(default_factory=LadderConfig)  # type: ignore[valid-type]


def goal_of(values: Mapping[str, Any]) -> "Objective":
    """Return what is learnt and by which family: as told, that of `init` or `like`, or gpt."""
    goals = lookup("objective", str(values.get("objective", "causal")), OBJECTIVES)
    told = {each: name for name in goals for each in rows(name)}.get(str(values.get("like")))
    if values.get("init"):
        told = read_json(Path(values["init"]) / "config.json").get("family")
    usual = told if told in goals else next(iter(goals))
    return lookup("family", str(values.get("family") or usual), goals)


def resolve(values: Mapping[str, Any]) -> LanguageSettings:
    """Make full settings of what a user gave: the size fills in what is not said."""
    goal = goal_of(values)
    row = values.get("like") or goal.like
    known = {each.key for each in describe(goal.settings)}
    settings = resolve_task(
        goal.settings,
        {**values, "family": goal.family},
        model=shape_of(goal.family, values, row, **goal.changes),
        sizes=SIZES,
        short={key: long for key, long in SHORT.items() if long in known},
        of="text",
    )
    model: Any = settings.model
    longest = model.max_length
    if not values.get("init") and "model.max_length" not in values:
        # a table has no rows for places that are never trained
        longest = settings.context if has_table(model.position) else max(longest, settings.context)
    if settings.context > longest:
        raise UsageError(
            f"context={settings.context} is more than the model's max_length={longest}"
        )
    model = replace(model, max_length=longest)
    waves = ALIASES.get(model.position, model.position) == "sinusoidal"
    told = values.get("init") or "model.scale_embedding" in values
    if waves and settings.objective == "causal" and not told:
        model = replace(model, scale_embedding=True)  # or the waves drown the tokens
    return replace(settings, model=model)


def learn_tokenizer(texts: Sequence[str], settings: LanguageSettings) -> Any:
    """Learn how to cut texts into tokens."""
    if settings.tokenizer == CHARACTERS:
        return Characters.learn(texts)
    return train_tokenizer(texts, kind=settings.tokenizer, vocab=settings.pieces)


class Batch(NamedTuple):
    """Rows of tokens to read, and at which places (flat) to guess which tokens."""

    reads: Tensor
    documents: Tensor | None
    places: Tensor | None  # all of them if None
    writes: Tensor  # -1 where there is nothing to guess
    tokens: int
    read: int


class _Language(Trainable):
    """What both objectives share: the tokenised parts, and what there is to know of them."""

    batches: Crops | Packed

    def __init__(self, texts: Texts, settings: LanguageSettings, tokenizer: Any):
        self.settings, self.tokenizer, self.running = settings, tokenizer, texts.running
        self.stores = store_texts(texts, tokenizer)
        self.rows = max(1, settings.batch_tokens // settings.context)
        self.valid_bytes = sum(len(text.encode()) for text in texts.parts["valid"])

    def column(self, part: str) -> Column:
        """Return the tokens of a part; a running text is one row."""
        column = self.stores[part][0]
        if not self.running:
            return column
        return Column(column.ids, np.array([0, len(column.ids)]))

    def count(self, batch: Batch) -> tuple[int, int]:
        """Return the tokens that the loss counts, and all that were read."""
        return batch.tokens, batch.read

    def epoch(self) -> float:
        """Return in how many batches as many tokens are read as there are."""
        batches = self.batches
        return len(batches.ids) / (batches.rows * len(batches.span))

    def some(self, count: int, each: int) -> np.ndarray:
        """Return which of so many windows are read at a validation, evenly spread over the part."""
        most = self.settings.valid_tokens
        some = count if not most else min(count, max(1, most // each))
        return np.linspace(0, count - 1, some).astype(np.int64)


class NextToken(_Language):
    """Every token is guessed from those before it."""

    def __init__(self, texts: Texts, settings: LanguageSettings, tokenizer: Any):
        super().__init__(texts, settings, tokenizer)
        length, seed = settings.context, settings.seed
        column = self.column("train")
        self.batches = (
            Crops(column.ids, self.rows, length + 1, seed)
            if self.running
            else Packed(column, self.rows, length + 1, length, seed)
        )

    def batch(self, n: int) -> Batch:
        """Return batch n, always the same for the same seed and n."""
        ids, documents = self.batches[n]
        rows = torch.from_numpy(ids.astype(np.int64)).to(self.settings.device)
        reads, writes = rows[:, :-1], rows[:, 1:]
        if documents is None:
            return Batch(reads, None, None, writes, writes.numel(), writes.numel())
        told = torch.from_numpy(documents).to(self.settings.device)
        going_on = told[:, 1:] == told[:, :-1]  # nothing follows the end of a document
        writes = writes.masked_fill(~going_on, -1)
        return Batch(reads, told[:, :-1], None, writes, int(going_on.sum()), writes.numel())

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed cross-entropy of the tokens that come next."""
        hidden = model.hidden(batch.reads, documents=batch.documents)
        return next_loss(model, hidden, batch.writes, self.settings.label_smoothing)

    def evaluate(self, model: Any) -> dict[str, float]:
        """Return loss a token, perplexity and bits a byte on the validation part."""
        column = self.column("valid")
        spans = stretches(column.offsets, self.settings.context)
        if not len(spans):
            raise UsageError(
                "the validation part has no token to guess; give more text with valid="
            )
        # of all that could be guessed a byte, whatever is left out of a validation
        guessed_a_byte = (spans[:, 1] - spans[:, 0] - 1).sum() / max(1, self.valid_bytes)
        some = spans[self.some(len(spans), self.settings.context)]
        tokens = max(4096, self.settings.batch_tokens)
        total, count = stretch_loss(model, column.ids, some, tokens)
        loss = total / count
        return {
            "loss": loss,
            "perplexity": math.exp(min(loss, 700.0)),
            "bits_per_byte": loss * float(guessed_a_byte) / math.log(2),
            "better": -loss,
        }


def next_loss(model: Any, hidden: Tensor, writes: Tensor, smoothing: float) -> Tensor:
    """Return the summed cross-entropy of what comes next (b, l), given the last vectors."""
    head = model.head
    if isinstance(head, CappedHead):  # whose logits are more than a product
        return F.cross_entropy(
            head(hidden).flatten(0, 1).float(),
            writes.flatten(),
            ignore_index=-1,
            reduction="sum",
            label_smoothing=smoothing,
        )
    measure = plain_loss if head.out_features <= FEW else vocabulary_loss
    return measure(
        hidden.flatten(0, 1), head.weight, writes.flatten(), bias=head.bias, smoothing=smoothing
    )


@torch.inference_mode()
def stretch_loss(model: Any, ids: np.ndarray, spans: np.ndarray, tokens: int) -> tuple[float, int]:
    """Return the summed loss over stretches of ids, each read by itself, and how many it sums."""
    device = next(model.parameters()).device
    order = np.argsort(spans[:, 0] - spans[:, 1], kind="stable")
    total, count = 0.0, 0
    while len(order):
        length = int(np.diff(spans[order[0]])[0])
        rows, order = np.split(order, [max(1, tokens // length)])
        places = spans[rows, :1] + np.arange(length)
        real = places < spans[rows, 1:]
        taken = ids[np.minimum(places, len(ids) - 1)].astype(np.int64)
        reads, writes = (
            torch.from_numpy(x).to(device)
            for x in (taken[:, :-1], np.where(real, taken, -1)[:, 1:])
        )
        # what stands after the end of a stretch is read, but nothing sees it
        total += float(next_loss(model, model.hidden(reads), writes, 0.0))
        count += int(real[:, 1:].sum())
    return total, count


class MaskedTokens(_Language):
    """Some words are hidden, and guessed from all around them (Devlin et al. 2019).

    Whole words are chosen; of their tokens 80% become <mask>, 10% any token, 10% stay.
    """

    def __init__(self, texts: Texts, settings: LanguageSettings, tokenizer: Any):
        super().__init__(texts, settings, tokenizer)
        self.mask = mask_of(tokenizer)
        self.words = Words(tokenizer)
        self.batches = self._windows("train", settings.seed)

    def _windows(self, part: str, seed: int) -> Crops | Packed:
        column, length = self.column(part), self.settings.context
        if self.running:
            return Crops(column.ids, self.rows, max(1, length - 2), seed)
        return Packed(column, self.rows, length, length, seed)

    def batch(self, n: int) -> Batch:
        """Return batch n, always the same for the same seed and n."""
        return self._hide(self.batches, self.settings.seed, n)

    def _hide(self, batches: Crops | Packed, seed: int, n: int) -> Batch:
        ids, documents = batches[n]
        ids = ids.astype(np.int64)
        if documents is None:
            ids = np.pad(ids, ((0, 0), (1, 1)))
            ids[:, 0], ids[:, -1] = self.tokenizer.bos, self.tokenizer.eos
        chance = np.random.Generator(np.random.PCG64([seed % 2**64, n, 1]))
        shown, chosen = self.words.hide(ids, self.settings.mask_share, self.mask, chance)
        places = np.flatnonzero(chosen)
        tensors = (
            None if x is None else torch.from_numpy(x).to(self.settings.device)
            for x in (shown, documents, places, ids.ravel()[places])
        )
        return Batch(*tensors, len(places), ids.size)  # type: ignore[arg-type]

    def loss(self, model: Any, batch: Batch) -> Tensor:
        """Return the summed cross-entropy of the hidden tokens."""
        smoothing = self.settings.label_smoothing
        logits = self.logits(model, batch)
        return F.cross_entropy(logits, batch.writes, reduction="sum", label_smoothing=smoothing)

    def logits(self, model: Any, batch: Batch) -> Tensor:
        """Return what the model guesses at the hidden places."""
        hidden = model.hidden(batch.reads, documents=batch.documents)
        return model.head(hidden.flatten(0, 1)[batch.places])

    @torch.inference_mode()
    def evaluate(
        self, model: Any, guessed: Callable[[Tensor, Tensor], None] | None = None
    ) -> dict[str, float]:
        """Return loss and percent of right guesses on the validation part, always hidden alike.

        `guessed` is told the logits of each batch and what is right.
        """
        windows = self._windows("valid", 0)
        each = windows.rows * len(windows.span)
        count = max(1, len(self.column("valid").ids) // each)
        total = right = tokens = 0.0
        for n in self.some(count, each).tolist():
            batch = self._hide(windows, 0, n)
            logits = self.logits(model, batch).float()
            total += float(F.cross_entropy(logits, batch.writes, reduction="sum"))
            right += float((logits.argmax(1) == batch.writes).sum())
            if guessed is not None:
                guessed(logits, batch.writes)
            tokens += batch.tokens
        loss = total / tokens
        perplexity = math.exp(min(loss, 700.0))
        return {
            "loss": loss,
            "perplexity": perplexity,
            "accuracy": 100 * right / tokens,
            "better": -loss,
        }


def mask_of(tokenizer: Any) -> int:
    """Return the number that stands for a hidden token: the tokenizer's own, or one after all."""
    return mask_id(tokenizer)


class Words:
    """Which tokens make one word, seen from their numbers alone."""

    def __init__(self, tokenizer: Any):
        self.special = np.array(sorted(tokenizer.special_ids))
        self.plain = np.setdiff1d(np.arange(tokenizer.vocab), self.special)
        pieces = [tokenizer.pieces([number])[0] for number in range(tokenizer.vocab)]
        marked = any(piece.startswith("##") for piece in pieces)  # WordPiece marks what goes on
        self.joins = np.array(
            [piece.startswith("##") if marked else _within_word(piece[:1]) for piece in pieces]
        )
        self.open = np.array([marked or _within_word(piece[-1:]) for piece in pieces])
        raw = [len(piece) == 6 and piece.startswith("<0x") for piece in pieces]
        for table in (self.joins, self.open):  # the bytes of a letter belong together
            table[raw] = True
            table[self.special] = False

    def starts(self, ids: np.ndarray) -> np.ndarray:
        """Tell for tokens (b, l) where a word begins."""
        starts = np.ones(ids.shape, dtype=bool)
        starts[:, 1:] = ~(self.joins[ids[:, 1:]] & self.open[ids[:, :-1]])
        return starts

    def hide(
        self, ids: np.ndarray, share: float, mask: int, chance: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens (b, l) with a share of the words hidden, and which are to be guessed."""
        word = np.cumsum(self.starts(ids)) - 1
        real = ~np.isin(ids, self.special)
        drawn = chance.random(ids.size)
        chosen = (drawn[word] < share).reshape(ids.shape) & real
        if not chosen.any() and real.any():  # one at least
            chosen = (word == word[np.flatnonzero(real)[0]]).reshape(ids.shape) & real
        how = chance.random(ids.shape)
        other = self.plain[chance.integers(0, len(self.plain), ids.shape)]
        shown = np.where(chosen & (how < 0.8), mask, ids)
        return np.where(chosen & (how >= 0.9), other, shown), chosen


def _within_word(character: str) -> bool:
    """Tell whether a character is part of a word that is written together."""
    return character.isalnum() and not SPACELESS_CHARACTER.match(character)


class Objective(NamedTuple):
    """What a model learns from text."""

    task: type[NextToken] | type[MaskedTokens]
    family: str
    settings: type[LanguageSettings]
    like: str  # the row of the family that is taken unless told
    changes: dict[str, Any]  # of the family's config
    runs_as: str


# what is learnt -> by which families, the usual one first
OBJECTIVES: dict[str, dict[str, Objective]] = {
    "causal": {
        "gpt": Objective(NextToken, "gpt", LanguageSettings, "gpt2", {}, NAME),
        "ladder": Objective(NextToken, "ladder", LadderSettings, "gated", {}, NAME),
    },
    "masked": {
        "bert": Objective(MaskedTokens, "bert", MaskedSettings, "bert", {"head": "words"}, "fill"),
    },
}


def train(values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None) -> Report:
    """Train a language model in a folder, or go on with one that was begun there."""
    settings = resolve(values)
    goal = goal_of(values)

    def read() -> Data:
        assert settings.data is not None
        texts = load_texts(
            settings.data,
            valid=settings.valid,
            test=settings.test,
            key=settings.columns,
            header=settings.header,
        )
        return Data(texts, texts.sha, texts.notes, texts.split)

    def prepare(data: Data, folder: Path, begun: dict[str, Any] | None) -> Work:
        texts: Texts = data.parts
        tokenizer = settle_tokenizer(
            folder, settings, begun, lambda: learn_tokenizer(texts.parts["train"], settings)
        )
        about: dict[str, Any] = {"running": texts.running, "context": settings.context}
        shape: Any = settings.model
        vocab = tokenizer.vocab
        if settings.objective == "masked":
            about["mask"] = mask_of(tokenizer)
            vocab = max(vocab, about["mask"] + 1)
        if settings.init:
            vocab = max(vocab, shape.vocab)
        model = build_model(goal.family, replace(shape, vocab=vocab), settings)
        task = goal.task(texts, settings, tokenizer)

        def save(folder: Path) -> None:
            save_tokenizer(folder, tokenizer)
            if settings.objective == "causal" and not (folder / "generation_config.json").exists():
                save_generation(folder, GENERATION)

        return Work(
            goal.family,
            model,
            task,
            f"A {settings.objective} language model of {tokenizer.vocab:,} tokens",
            about=about,
            facts={"tokenizers": [tokenizer.sha]},
            save=save,
            dynamic=not texts.running,
            runs_as=goal.runs_as,
        )

    return train_task(
        NAME, values, settings, read=read, prepare=prepare, recipe=recipe, quiet=quiet
    )
