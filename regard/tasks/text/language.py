"""Language models: from text to a model that continues a text, answers in a chat, or fills gaps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn

from regard.attention.positions import POSITION_ALIASES, has_table
from regard.data.characters import Characters
from regard.data.conversation import TEMPLATES, write_out
from regard.data.documents import (
    Texts,
    count_bytes,
    encode_documents,
    encode_running,
    has_conversations,
    tokenise_texts,
)
from regard.data.tokenize import train_tokenizer, with_characters
from regard.data.tokenizer import Tokenizer, mask_id
from regard.data.windows import TokenBatch, TokenBatches, spans_of
from regard.decode.generate import NEW_TOKENS
from regard.errors import UsageError, lookup
from regard.metrics.baselines import FREQUENCIES, frequency_loss
from regard.metrics.score import Score
from regard.models import family, serving, task_changes
from regard.models.protocols import Model
from regard.pretrained.chat_template import check_chat
from regard.settings import setting
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import SHORT, TrainSettings
from regard.tasks.frame.task import Judged, Learnt
from regard.tasks.text.generate import TextGeneration
from regard.tasks.text.language_modelling import (
    OBJECTIVES,
    LanguageCodec,
    LanguageEvalSettings,
    TextFormat,
    perplexity,
    read_test_texts,
    read_training_texts,
    span_loss,
)

GPTConfig, _ = family("gpt")
CHARACTERS = "characters"  # a tokenizer, beside those that train_tokenizer learns


@dataclass(frozen=True)
class LanguageTrain(TextFormat, TrainSettings):
    """What a training of a language model can be told."""

    schedule: str = "cosine"
    weight_decay: float = 0.1
    beta2: float = 0.99
    objective: str = setting("causal", "training objective", choices=OBJECTIVES)
    family: str | None = setting(None, "model family", group="model")
    like: str | None = setting(None, "model preset", group="model")
    tokenizer: str = setting("bpe", "tokenizer", choices=with_characters)
    pieces: int = setting(4000, "vocabulary size", min=300, max=1_000_000)
    context: int = setting(128, "context length in tokens", min=2, max=1_000_000)
    batch_tokens: int = setting(2048, "tokens per batch", min=1, group="optimiser")
    label_smoothing: float = setting(0.0, "label smoothing", min=0, max=0.9)
    mask_share: float = setting(0.15, "share of words to mask, if masked", above=0, max=1)
    template: str = setting("plain", "chat template of conversations", choices=TEMPLATES)
    valid_tokens: int = setting(
        200_000, "tokens read at a validation; 0: all of the part", min=0, group="length"
    )
    model: GPTConfig = field(default_factory=GPTConfig)  # type: ignore[valid-type]


@dataclass(frozen=True)
class LanguageEval(LanguageEvalSettings):
    """What an evaluation of a causal language model can be told."""

    context: int | None = setting(None, "context length in tokens", min=2, max=10_000_000)
    outputs: str | None = setting(None, "a file for the loss of each text; .jsonl has more fields")


class Losses(NamedTuple):
    """The summed loss over the tokens of a part, how many there are, and how they were read."""

    total: float
    tokens: int
    context: int
    running: bool


def learn_tokenizer(texts: Sequence[str], settings: LanguageTrain) -> Tokenizer:
    """Learn how to cut texts into tokens."""
    if settings.tokenizer == CHARACTERS:
        return Characters.learn(texts)
    return train_tokenizer(texts, kind=settings.tokenizer, vocab=settings.pieces)


def size_row(lr: float, context: int, batch_tokens: int, pieces: int, steps: int) -> dict[str, Any]:
    """Return what a size means for training."""
    row = {"lr": lr, "context": context, "batch_tokens": batch_tokens}
    return {**row, "pieces": pieces, "steps": steps}


class LanguageModel(TextGeneration):
    """Continues texts token by token; trained with objective=masked it is run by `fill`."""

    name, holds, unit, target = "language", "text", "characters", ""
    Train, Eval = LanguageTrain, LanguageEval
    generation: Mapping[str, Any] = {"temperature": 0.8, "top_p": 0.95, "max_length": NEW_TOKENS}
    sizes = {
        "tiny": size_row(0.002, 128, 2048, 4000, 5000),
        "small": size_row(0.001, 256, 4096, 8000, 10_000),
        "base": size_row(0.0006, 512, 32_768, 32_000, 100_000),
        "big": size_row(0.0003, 1024, 131_072, 32_000, 300_000),
    }
    short = {
        **SHORT,
        "kv_heads": "model.block.kv_heads",
        "bias": "model.block.bias",
        "rung": "model.rung",
        "gates": "model.gates",
    }

    # ---- Training

    @classmethod
    def trainable_families(cls, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the families that serve the objective."""
        objective = str(values.get("objective", "causal"))
        return serving(lookup("objective", objective, OBJECTIVES).runs_as)

    @classmethod
    def defaults(cls, shape: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Return a config with the head of the objective."""
        runs_as = OBJECTIVES[str(values.get("objective", "causal"))].runs_as
        return replace(shape, **task_changes(cls.family_of(values, origin), runs_as))

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Return settings with as many positions as the context needs."""
        model, longest = settings.model, settings.model.max_length
        if origin is None and "model.max_length" not in values:
            # a table has no rows for positions that are never trained
            table = has_table(model.position)
            longest = settings.context if table else max(longest, settings.context)
        if origin is not None and "context" not in values:  # no more than it has learned
            settings = replace(settings, context=min(settings.context, longest))
        if settings.context > longest:
            raise UsageError(
                f"context={settings.context} is more than the model's max_length={longest}"
            )
        model = replace(model, max_length=longest)
        sinusoidal = POSITION_ALIASES.get(model.position, model.position) == "sinusoidal"
        given = origin is not None or "model.scale_embedding" in values
        if sinusoidal and settings.objective == "causal" and not given:
            model = replace(model, scale_embedding=True)  # or positions drown the tokens
        return replace(settings, model=model)

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> Texts:
        """Read a running text, or documents."""
        return read_training_texts(settings)

    @classmethod
    def make_codec(
        cls, data: Texts, settings: Any, learnt: Learnt, origin: Origin | None
    ) -> LanguageCodec:
        """Learn the tokenizer."""
        talks = has_conversations(data["train"])
        if talks and settings.objective != "causal":
            raise UsageError(
                f"objective={settings.objective} learns from texts; for answers of conversations "
                "choose objective=causal"
            )
        written = [write_out(text, settings.template) for text in data["train"]]
        tokenizer = learnt(lambda: learn_tokenizer(written, settings))
        mask = mask_id(tokenizer) if settings.objective == "masked" else None
        template = settings.template if talks else None
        return LanguageCodec(tokenizer, data.running, settings.context, mask, template=template)

    @classmethod
    def make_model(
        cls, data: Texts, codec: LanguageCodec, settings: Any, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Build the model for this vocabulary; a mask may come after it."""
        vocab = max(codec.tokenizer.vocab, 0 if codec.mask is None else codec.mask + 1)
        if origin is not None:
            vocab = max(vocab, settings.model.vocab)
        config = replace(settings.model, vocab=vocab)
        return settings.family, cls.build(settings.family, config, settings, origin)

    def batches(self, data: Texts, settings: Any) -> TokenBatches:
        """Return windows of the training part."""
        self.dynamic = not data.running
        if self.runs_as(settings) != self.name:
            self.generation = {}
        how = {"template": settings.template, "context": settings.context}
        self.texts = tokenise_texts(data, self.tokenizer, **how)
        return OBJECTIVES[settings.objective].batches(self.texts, self.codec, settings)

    def count(self, batch: TokenBatch) -> tuple[int, int]:
        """Return the tokens that the loss counts, and all that were read."""
        return batch.tokens, batch.read

    def loss(self, batch: TokenBatch, settings: Any) -> Tensor:
        """Return the summed cross-entropy of the tokens to predict."""
        objective = OBJECTIVES[settings.objective]
        return objective.loss(self.model, batch, settings.label_smoothing)

    def validate(self, data: Texts, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the scores of the objective on the validation part."""
        objective = OBJECTIVES[settings.objective]
        return objective.validate(self.model, self.texts, self.codec, settings)

    def baselines(self, data: Texts, settings: Any) -> dict[str, dict[str, float]]:
        """Loss of the frequencies of tokens on the validation part."""
        ids = {part: self.texts.columns[part].ids for part in ("train", "valid")}
        for part, learnt in self.texts.learnt.items():
            ids[part] = ids[part][learnt > 0]
        if not len(ids["valid"]):
            return {}
        return {FREQUENCIES: {"loss": frequency_loss(ids["train"], ids["valid"])}}

    def title(self, data: Texts, settings: Any) -> str:
        """Return what the model card says that the model is."""
        return f"A {settings.objective} language model of {self.tokenizer.vocab:,} tokens"

    def runs_as(self, settings: Any) -> str:
        """Return the task that the trained model is run by."""
        return OBJECTIVES[settings.objective].runs_as

    # ---- Using

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: dict[str, Any]) -> LanguageCodec:
        """Read the tokenizer, and the chat template of a checkpoint."""
        codec = LanguageCodec.load(folder, model, config)
        if "chat" not in config:
            return codec
        try:
            return replace(codec, chat=check_chat(config["chat"]))
        except UsageError as error:
            raise UsageError(f"{folder / 'config.json'}: {error}") from None

    def read_test(self, settings: Any) -> Texts:
        """Read the part that the model is judged on."""
        return read_test_texts(settings, self.trained)

    def rows(self, texts: Texts, part: str) -> tuple[list[list[int]], bool]:
        """Return the ids of all texts of a part, and whether they are one running text."""
        if texts.running or self.codec.running:
            parts = (ids for text in texts[part] for ids in encode_running(self.tokenizer, text))
            return [[i for ids in parts for i in ids]], True
        encoded = self.tokenizer.encode_batch(texts[part])
        return [[self.tokenizer.bos, *ids, self.tokenizer.eos] for ids in encoded], False

    def predict_examples(self, data: Texts, settings: Any) -> Losses:
        """Return the loss over a part."""
        context, config = settings.context or self.window, self.model.config
        if has_table(config.position) and context > config.max_length:
            raise UsageError(
                f"context={context} is more than the {config.max_length} places "
                "that the model has learnt"
            )
        texts, learnt = data[settings.part], None
        if has_conversations(texts):
            if settings.outputs:
                raise UsageError("outputs= is for texts; it does not tell answers from questions")
            template = self.codec.template or "plain"
            pairs = list(encode_documents(texts, self.tokenizer, template, context))
            rows, running = [ids for ids, _ in pairs], False
            learnt = np.concatenate([np.asarray(flags) for _, flags in pairs])
        else:
            rows, running = self.rows(data, settings.part)
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        ids = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
        spans = spans_of(offsets, context)
        total, count = span_loss(self.model, ids, spans, settings.batch_tokens, learnt)
        return Losses(total, count, context, running)

    def judge(self, data: Texts, predictions: Losses, settings: Any) -> Judged:
        """Return loss per token, perplexity and bits per byte."""
        total, tokens, context, running = predictions
        if not tokens:
            raise UsageError(f"{settings.data}: no token to predict in so short a text")
        texts, loss = data[settings.part], total / tokens
        size = count_bytes(texts)
        kind = "running" if running else "documents"
        signature = f"tokens:{tokens}|context:{context}|{kind}|tokenizer:{self.tokenizer.sha[:8]}"
        scores = [
            Score("loss", loss, f"nats a token|{signature}", 4),
            Score("perplexity", perplexity(loss), signature, 3),
            Score("bits per byte", total / size / math.log(2), f"bytes:{size}|{signature}", 4),
        ]
        return Judged(scores, sum(map(len, texts)))

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the settings that a score depends on."""
        return {"context": settings.context or self.window}

    def outputs(self, data: Texts, predictions: Losses, settings: Any) -> list[dict[str, Any]]:
        """Return the loss of each text, or of each span that is read of a running one."""
        rows, running = self.rows(data, settings.part)
        if running:
            spans = spans_of(np.array([0, len(rows[0])]), predictions.context).tolist()
            rows = [rows[0][start:end] for start, end in spans]
        records = []
        with self.using(settings):
            for row in rows:
                total, count = self.row_loss(row, predictions.context, settings.batch_tokens)
                loss, text = total / count if count else None, self.tokenizer.decode(row)
                records.append({"text": text, "tokens": count, "loss": loss, "prediction": loss})
        return records
