"""Language modelling: what causal and masked models share, and the two objectives."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard import native
from regard.data.batches import moved
from regard.data.conversation import OWN, TEMPLATES
from regard.data.documents import Texts, TokenisedTexts, load_texts
from regard.data.masking import MaskedBatches, WholeWordMasking
from regard.data.split import Split
from regard.data.tokenize import with_characters
from regard.data.tokenizer import Tokenizer
from regard.data.windows import CausalBatches, TokenBatch, TokenBatches, evenly_spread, spans_of
from regard.decode.generate import NEW_TOKENS, GenerateOptions
from regard.errors import UsageError
from regard.layers.vocabulary import CappedHead
from regard.models import family
from regard.models.protocols import Model, TextModel
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.settings import setting
from regard.tasks.frame.settings import (
    EvalSettings,
    QuantiseSettings,
    RunSettings,
    TrainSettings,
)
from regard.training.loss import (
    linear_cross_entropy,
    loss_names,
    own_loss,
    reference_cross_entropy,
    true_places,
)

GPTConfig, _ = family("gpt")
_SMALL_VOCAB = 1000  # tokens of a vocabulary whose logits are quicker made all at once
_AT_ONCE = 16  # tokens of a text that are read at once by quantised products
_LARGEST_LOSS = 700.0  # whose exponential is a number


@dataclass(frozen=True)
class TextFormat:
    """Where the texts are in a file."""

    GROUP = "data"

    columns: str | None = setting(None, "the text column of a table")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")


@dataclass(frozen=True)
class LanguageTrain(TextFormat, TrainSettings):
    """What a training of a language model can be told."""

    schedule: str = "cosine"
    weight_decay: float = 0.1
    beta2: float = 0.99
    objective: str = setting("causal", "training objective", choices=lambda: LANGUAGE_OBJECTIVES)
    family: str = setting("gpt", "model family", group="model")
    like: str | None = setting(None, "model preset", group="model")
    tokenizer: str = setting("bpe", "tokenizer", choices=with_characters)
    pieces: int = setting(4000, "vocabulary size", min=300, max=1_000_000)
    context: int = setting(128, "context length in tokens", min=2, max=1_000_000)
    batch_tokens: int = setting(2048, "tokens per batch", min=1, group="optimiser")
    loss: str = setting("auto", "loss: auto, or one of your own", choices=loss_names)
    label_smoothing: float = setting(0.0, "label smoothing", min=0, max=0.9)
    mask_share: float = setting(0.15, "share of words to mask, if masked", above=0, max=1)
    template: str = setting("plain", "chat template of conversations", choices=TEMPLATES)
    valid_tokens: int = setting(
        200_000, "tokens read at a validation; 0: all of the part", min=0, group="length"
    )
    model: GPTConfig = field(default_factory=GPTConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class LanguageRun(RunSettings, GenerateOptions):
    """What a run of a language model can be told."""

    echo: bool = setting(True, "begin the answer with the prompt")
    scores: bool = setting(False, "print the score of each answer")
    forced: bool = setting(False, "generate nothing: score the given texts")
    chat: bool = setting(False, "answer as in a conversation")
    template: str | None = setting(
        None, "chat template; own is the checkpoint's", choices=lambda: (*TEMPLATES, OWN)
    )
    system: str = setting("", "system message of a conversation")
    batch_tokens: int = setting(16_384, "tokens per batch", min=1, group="machine")
    batch_rows: int = setting(64, "texts per batch", min=1, group="machine")


@dataclass(frozen=True)
class QuantisedRun(QuantiseSettings, LanguageRun):
    """What a run can be told that is not looked at."""


@dataclass(frozen=True)
class LanguageEvalSettings(TextFormat, RunSettings, EvalSettings):
    """What an evaluation of a language model can be told."""

    data: str | None = setting(None, "test data: a folder or file of text")
    batch_tokens: int = setting(8192, "tokens per batch", min=1, group="machine")


@dataclass(frozen=True)
class LanguageEval(QuantiseSettings, LanguageEvalSettings):
    """What an evaluation of a causal language model can be told."""

    context: int | None = setting(None, "context length in tokens", min=2, max=10_000_000)
    outputs: str | None = setting(None, "a file for the loss of each text; .jsonl has more fields")


@dataclass(frozen=True)
class LanguageCodec:
    """The tokenizer of a language model, and how texts were read in its training."""

    tokenizer: Tokenizer
    running: bool = False  # whether one running text, rather than documents
    context: int | None = None  # tokens read at once, if fewer than the model has positions
    mask: int | None = None  # the token of a masked model that stands for a masked one
    chat: Mapping[str, Any] | None = None  # the checkpoint's own chat template
    template: str | None = None  # of the conversations that it was trained on

    @cached_property
    def masking(self) -> WholeWordMasking:
        """Return the whole-word masking of the tokenizer."""
        return WholeWordMasking(self.tokenizer)

    def save(self, folder: Path) -> None:
        """Write the tokenizer."""
        self.tokenizer.save(folder / "tokenizer.json")

    def facts(self) -> dict[str, Any]:
        """Return what config.json says of it."""
        mask = {} if self.mask is None else {"mask": self.mask}
        template = {} if self.template is None else {"template": self.template}
        return {"running": self.running, "context": self.context, **mask, **template}

    def hashes(self) -> list[str]:
        """Return the hash of the tokenizer."""
        return [self.tokenizer.sha]

    @classmethod
    def load(cls, folder: Path, model: Model, config: Mapping[str, Any]) -> "LanguageCodec":
        """Read the tokenizer of a folder, and check that it and the context fit the model."""
        tokenizer: Tokenizer = load_tokenizer(folder)
        if tokenizer.vocab > model.config.vocab:
            raise UsageError(
                f"{folder}: the tokenizer has {tokenizer.vocab} pieces, "
                f"the model only {model.config.vocab}"
            )
        context, longest = config.get("context"), model.config.max_length
        if context is not None and (type(context) is not int or not 2 <= context <= longest):
            raise UsageError(
                f"{folder / 'config.json'}: 'context' is {context!r:.40}, not 2 to {longest}"
            )
        template = config.get("template")
        if template is not None and template not in TEMPLATES:
            raise UsageError(
                f"{folder / 'config.json'}: 'template' is {template!r:.40}; expected one of "
                f"{', '.join(TEMPLATES)}"
            )
        return cls(tokenizer, bool(config.get("running")), context, template=template)


def read_training_texts(settings: LanguageTrain) -> Texts:
    """Read the texts to train and to validate on."""
    return load_texts(
        str(settings.data),
        valid=settings.valid,
        test=settings.test,
        key=settings.columns,
        header=settings.header,
    )


def read_test_texts(settings: LanguageEvalSettings, trained: Split | None) -> Texts:
    """Read the part that a language model is judged on."""
    return load_texts(
        str(settings.data),
        test=settings.test,
        key=settings.columns,
        header=settings.header,
        need=(settings.part,),
        trained=trained,
    )


# The objectives


def next_token_loss(model: TextModel, hidden: Tensor, writes: Tensor, smoothing: float) -> Tensor:
    """Return the summed cross-entropy of the next tokens (b, l), given the last hidden states."""
    head = model.head
    if isinstance(head, CappedHead):  # whose logits are more than a product
        return F.cross_entropy(
            head(hidden).flatten(0, 1).float(),
            writes.flatten(),
            ignore_index=-1,
            reduction="sum",
            label_smoothing=smoothing,
        )
    small = head.out_features <= _SMALL_VOCAB
    cross_entropy = reference_cross_entropy if small else linear_cross_entropy
    return cross_entropy(
        hidden.flatten(0, 1), head.weight, writes.flatten(), bias=head.bias, smoothing=smoothing
    )


def _step_loss(model: Any, reads: Tensor, writes: Tensor) -> Tensor:
    """Return the same, of ids that are read by the products of decoding, which may be in int8."""
    total, state = torch.zeros(()), model.start(reads[:, :1], capacity=reads.shape[1])
    for some, wanted in zip(reads.split(_AT_ONCE, 1), writes.split(_AT_ONCE, 1), strict=True):
        logits, state = model.step(some, state)
        wanted = wanted.flatten()
        total += F.cross_entropy(logits.flatten(0, 1), wanted, ignore_index=-1, reduction="sum")
    return total


@torch.inference_mode()
def span_loss(
    model: TextModel,
    ids: np.ndarray,
    spans: np.ndarray,
    tokens: int,
    learnt: np.ndarray | None = None,
) -> tuple[float, int]:
    """Return the summed loss over spans of ids, each read by itself, and how many it sums.

    A batch holds at most so many tokens. `learnt` tells which of the ids count, if not all do.
    """
    device, active = next(model.parameters()).device, native.scope(model)
    order = np.argsort(spans[:, 0] - spans[:, 1], kind="stable")
    total, count = 0.0, 0
    while len(order):
        length = int(np.diff(spans[order[0]])[0])
        rows, order = np.split(order, [max(1, tokens // length)])
        places = spans[rows, :1] + np.arange(length)
        real = places < spans[rows, 1:]
        inside = np.minimum(places, len(ids) - 1)
        taken = ids[inside].astype(np.int64)
        if learnt is not None:
            real = real & (learnt[inside] > 0)
        reads, writes = (
            torch.from_numpy(x).to(device)
            for x in (taken[:, :-1], np.where(real, taken, -1)[:, 1:])
        )
        # what stands after the end of a span is read, but nothing sees it
        if active is not None and active.dtype == torch.int8 and reads.numel():
            total += float(_step_loss(model, reads, writes))
        else:
            total += float(next_token_loss(model, model.hidden(reads), writes, 0.0))
        count += int(real[:, 1:].sum())
    return total, count


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats."""
    return math.exp(min(loss, _LARGEST_LOSS))


class CausalObjective:
    """Every token is predicted from those before it."""

    runs_as = "language"  # the task that runs the trained model, and that its families serve
    generation = {"temperature": 0.8, "top_p": 0.95, "max_length": NEW_TOKENS}

    def batches(
        self, texts: TokenisedTexts, codec: LanguageCodec, settings: LanguageTrain
    ) -> TokenBatches:
        """Return the batches of a training."""
        return CausalBatches(
            texts,
            context=settings.context,
            batch_tokens=settings.batch_tokens,
            seed=settings.seed,
        )

    def loss(self, model: TextModel, batch: TokenBatch, smoothing: float, own: str) -> Tensor:
        """Return the summed cross-entropy of the next tokens, or a loss of the user's own."""
        hidden = model.hidden(batch.reads, documents=batch.documents)
        if own != "auto":
            real = true_places(batch.writes >= 0, batch.tokens)
            logits = model.head(hidden.flatten(0, 1)[real])
            return own_loss(own, logits, batch.writes.flatten()[real])
        return next_token_loss(model, hidden, batch.writes, smoothing)

    def validate(
        self, model: TextModel, texts: TokenisedTexts, codec: LanguageCodec, settings: LanguageTrain
    ) -> dict[str, float]:
        """Return loss per token, perplexity and bits per byte on the validation part."""
        column = texts.columns["valid"]
        spans = spans_of(column.offsets, settings.context)
        if not len(spans):
            raise UsageError(
                "the validation part has no token to predict; give more text with valid="
            )
        # of all that could be predicted, whatever is left out of a validation
        learnt = texts.learnt.get("valid")
        asked = (spans[:, 1] - spans[:, 0] - 1).sum() if learnt is None else learnt.sum()
        tokens_per_byte = asked / max(1, texts.bytes["valid"])
        some = spans[evenly_spread(len(spans), settings.context, settings.valid_tokens)]
        batch = max(4096, settings.batch_tokens)
        total, count = span_loss(model, column.ids, some, batch, learnt)
        loss = total / max(1, count)
        return {
            "loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": loss * float(tokens_per_byte) / math.log(2),
            "better": -loss,
        }


class MaskedObjective:
    """Some words are masked, and predicted from all around them (Devlin et al. 2019)."""

    runs_as = "fill"
    generation: dict[str, Any] = {}

    def batches(
        self, texts: TokenisedTexts, codec: LanguageCodec, settings: LanguageTrain
    ) -> TokenBatches:
        """Return the batches of a training."""
        return self._batches(texts, "train", codec, settings, settings.seed)

    def _batches(
        self,
        texts: TokenisedTexts,
        part: str,
        codec: LanguageCodec,
        settings: LanguageTrain,
        seed: int,
    ) -> MaskedBatches:
        return MaskedBatches(
            texts,
            part,
            codec.masking,
            context=settings.context,
            batch_tokens=settings.batch_tokens,
            share=settings.mask_share,
            seed=seed,
        )

    def loss(self, model: TextModel, batch: TokenBatch, smoothing: float, own: str) -> Tensor:
        """Return the summed cross-entropy of the masked tokens, or a loss of the user's own."""
        logits = masked_logits(model, batch)
        if own != "auto":
            return own_loss(own, logits, batch.writes)
        return F.cross_entropy(logits, batch.writes, reduction="sum", label_smoothing=smoothing)

    def validate(
        self, model: TextModel, texts: TokenisedTexts, codec: LanguageCodec, settings: LanguageTrain
    ) -> dict[str, float]:
        """Return loss, perplexity and accuracy on the validation part, always masked alike."""
        batches = self._batches(texts, "valid", codec, settings, 0)
        scores = masked_scores(model, batches, settings.valid_tokens)
        return {**scores._asdict(), "better": -scores.loss}


def masked_logits(model: TextModel, batch: TokenBatch) -> Tensor:
    """Return the logits at the masked places."""
    hidden = model.hidden(batch.reads, documents=batch.documents)
    return model.head(hidden.flatten(0, 1)[batch.places])


class MaskedScores(NamedTuple):
    """How well masked tokens are predicted."""

    loss: float
    perplexity: float
    accuracy: float  # in percent


@torch.inference_mode()
def masked_scores(
    model: TextModel,
    batches: MaskedBatches,
    most: int,
    on_batch: Callable[[Tensor, Tensor], None] | None = None,
) -> MaskedScores:
    """Return the scores over as many batches as the part has, or over so many tokens; 0: all.

    `on_batch` is given the logits and the targets of each batch.
    """
    windows = batches.windows
    count = max(1, len(windows.ids) // windows.tokens)
    total = right = tokens = 0.0
    device = next(model.parameters()).device
    for n in evenly_spread(count, windows.tokens, most).tolist():
        batch = moved(batches[n], device)
        logits = masked_logits(model, batch).float()
        total += float(F.cross_entropy(logits, batch.writes, reduction="sum"))
        right += float((logits.argmax(1) == batch.writes).sum())
        if on_batch is not None:
            on_batch(logits, batch.writes)
        tokens += batch.tokens
    loss = total / tokens
    return MaskedScores(loss, perplexity(loss), 100 * right / tokens)


LANGUAGE_OBJECTIVES: dict[str, CausalObjective | MaskedObjective] = {
    "causal": CausalObjective(),
    "masked": MaskedObjective(),
}
