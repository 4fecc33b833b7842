"""Language models: from text to a model that continues a text, answers in a chat, or fills gaps."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from regard.attention.positions import POSITION_ALIASES, has_table
from regard.data.characters import Characters
from regard.data.conversation import write_out
from regard.data.documents import (
    Texts,
    TokenisedTexts,
    count_bytes,
    tokenise_texts,
)
from regard.data.tokenize import train_tokenizer
from regard.data.tokenizer import Tokenizer, mask_id
from regard.data.windows import spans_of
from regard.errors import UsageError, lookup
from regard.metrics.baselines import FREQUENCIES, frequency_loss
from regard.metrics.score import Score
from regard.modalities.text import CONVERSATIONS
from regard.models.protocols import Model
from regard.pretrained.chat_template import check_chat
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.settings import SHORT_KEYS
from regard.tasks.parts import (
    Judge,
    Learnt,
    Lesson,
    Objective,
    ScoredPredictions,
    System,
    Task,
    build_model,
    usual_settings,
)
from regard.tasks.runner import Runner
from regard.tasks.text.generate import Completer
from regard.tasks.text.language_modelling import (
    LANGUAGE_OBJECTIVES,
    LanguageCodec,
    LanguageEval,
    LanguageTrain,
    perplexity,
    read_test_texts,
    read_training_texts,
    span_loss,
)

_CHARACTERS = "characters"  # a tokenizer, beside those that train_tokenizer learns


class Losses(NamedTuple):
    """The summed loss over the tokens of a part, how many there are, and how they were read."""

    total: float
    tokens: int
    context: int
    running: bool


def learn_tokenizer(texts: Texts, settings: LanguageTrain) -> Tokenizer:
    """Learn how to cut texts into tokens."""
    characters = settings.tokenizer == _CHARACTERS  # of which none may be missed
    some = texts["train"] if characters else texts.sample("train")
    written = (write_out(text, settings.template) for text in some)
    if characters:
        return Characters.learn(written)
    return train_tokenizer(written, kind=settings.tokenizer, vocab=settings.pieces)


_SIZES = {
    "tiny": (0.002, 128, 2048, 4000, 5000),
    "small": (0.001, 256, 4096, 8000, 10_000),
    "base": (0.0006, 512, 32_768, 32_000, 100_000),
    "big": (0.0003, 1024, 131_072, 32_000, 300_000),
}


class LanguageObjective(Objective[LanguageTrain, Texts, LanguageCodec]):
    """Learns to predict tokens: the next one, or those that are masked."""

    Settings = LanguageTrain
    sizes = {
        size: dict(zip(("lr", "context", "batch_tokens", "pieces", "steps"), row, strict=True))
        for size, row in _SIZES.items()
    }
    short = {
        **SHORT_KEYS,
        "kv_heads": "model.block.kv_heads",
        "bias": "model.block.bias",
        "rung": "model.rung",
        "gates": "model.gates",
    }

    serves = {name: each.runs_as for name, each in LANGUAGE_OBJECTIVES.items()}

    def resolve(
        self, task: Task, values: Mapping[str, Any], origin: Origin | None
    ) -> LanguageTrain:
        """Settings with the head of the objective, and as many positions as the context needs."""
        objective = lookup("objective", str(values.get("objective", "causal")), LANGUAGE_OBJECTIVES)
        settings = usual_settings(task, values, origin, serves=objective.runs_as)
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

    def read(self, settings: LanguageTrain, origin: Origin | None) -> Texts:
        """A running text, or documents."""
        return read_training_texts(settings)

    def codec(
        self, data: Texts, settings: LanguageTrain, learnt: Learnt, origin: Origin | None
    ) -> LanguageCodec:
        """The tokenizer, and how texts are read."""
        talks = data.talks("train")
        if talks and settings.objective != "causal":
            raise UsageError(
                f"objective={settings.objective} learns from texts; for answers of conversations "
                "choose objective=causal"
            )
        tokenizer = learnt(lambda: learn_tokenizer(data, settings))
        mask = mask_id(tokenizer) if settings.objective == "masked" else None
        template = settings.template if talks else None
        return LanguageCodec(tokenizer, data.running, settings.context, mask, template=template)

    def model(
        self, data: Texts, codec: LanguageCodec, settings: LanguageTrain, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Model for this vocabulary; a mask may come after it."""
        vocab = max(codec.tokenizer.vocab, 0 if codec.mask is None else codec.mask + 1)
        if origin is not None:
            vocab = max(vocab, settings.model.vocab)
        config = replace(settings.model, vocab=vocab)
        return settings.family, build_model(settings.family, config, settings, origin)

    def lesson(self, runner: Runner[Any], data: Texts, settings: LanguageTrain) -> Lesson:
        """Windows of the training part, and the cross-entropy of the tokens to predict."""
        objective, codec, model = (
            LANGUAGE_OBJECTIVES[settings.objective],
            runner.codec,
            runner.model,
        )
        texts = tokenise_texts(
            data, codec.tokenizer, template=settings.template, context=settings.context
        )

        def baselines() -> dict[str, dict[str, float]]:
            """Loss of the frequencies of tokens on the validation part."""
            ids = {part: texts.columns[part].ids for part in ("train", "valid")}
            for part, learnt in texts.learnt.items():
                ids[part] = ids[part][learnt > 0]
            if not len(ids["valid"]):
                return {}
            return {FREQUENCIES: {"loss": frequency_loss(ids["train"], ids["valid"])}}

        return Lesson(
            batches=objective.batches(texts, codec, settings),
            count=lambda batch: (batch.tokens, batch.read),
            loss=lambda batch: objective.loss(
                model, batch, settings.label_smoothing, settings.loss
            ),
            validate=lambda share: objective.validate(model, texts, codec, settings),
            title=f"A {settings.objective} language model of {codec.tokenizer.vocab:,} tokens",
            baselines=baselines,
            generation=objective.generation,
            runs_as=objective.runs_as,
            dynamic=not data.running,
        )


def load_codec(folder: Path, model: Model, config: dict[str, Any]) -> LanguageCodec:
    """Read the tokenizer, and the chat template of a checkpoint."""
    codec = LanguageCodec.load(folder, model, config)
    if "chat" not in config:
        return codec
    try:
        return replace(codec, chat=check_chat(config["chat"]))
    except UsageError as error:
        raise UsageError(f"{folder / 'config.json'}: {error}") from None


def tokenised_part(codec: LanguageCodec, texts: Texts, part: str, context: int) -> TokenisedTexts:
    """Tokens of a part, as one running text for a model that was trained on such."""
    given = Texts({"valid": texts[part]}, texts.running)
    return tokenise_texts(
        given,
        codec.tokenizer,
        ("valid",),
        template=codec.template or "plain",
        context=context,
        joined=codec.running and not (texts.running or texts.talks(part)),
    )


class LossJudge(Judge[Texts, LanguageEval, Losses]):
    """Judges a causal language model by its loss over texts."""

    Settings = LanguageEval

    def read(self, runner: Runner[Any], settings: LanguageEval) -> Texts:
        """The part that a model is judged on."""
        return read_test_texts(settings, runner.trained)

    def predict(
        self,
        runner: Runner[Any],
        data: Texts,
        settings: LanguageEval,
        like: Runner[Any] | None = None,
    ) -> Losses:
        """Loss over a part."""
        codec, config = runner.codec, runner.model.config
        context = settings.context or runner.predictor.window
        if has_table(config.position) and context > config.max_length:
            raise UsageError(
                f"context={context} is more than the {config.max_length} places "
                "that the model has learnt"
            )
        if settings.outputs and data.talks(settings.part):
            raise UsageError("outputs= is for texts; it does not tell answers from questions")
        texts = tokenised_part(codec, data, settings.part, context)
        column, learnt = texts.columns["valid"], texts.learnt.get("valid")
        spans = spans_of(column.offsets, context)
        total, count = span_loss(runner.model, column.ids, spans, settings.batch_tokens, learnt)
        return Losses(total, count, context, texts.running)

    def score(
        self,
        runner: Runner[Any],
        data: Texts,
        predictions: Losses,
        settings: LanguageEval,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """Loss per token, perplexity and bits per byte."""
        total, tokens, context, running = predictions
        if not tokens:
            raise UsageError(f"{settings.data}: no token to predict in so short a text")
        texts, loss = data[settings.part], total / tokens
        size = count_bytes(data, settings.part)
        kind, sha = "running" if running else "documents", runner.codec.tokenizer.sha[:8]
        signature = f"tokens:{tokens}|context:{context}|{kind}|tokenizer:{sha}"
        scores = [
            Score("loss", loss, f"nats a token|{signature}", 4),
            Score("perplexity", perplexity(loss), signature, 3),
            Score("bits per byte", total / size / math.log(2), f"bytes:{size}|{signature}", 4),
        ]
        return ScoredPredictions(
            scores,
            sum(map(len, texts)),
            made_with={"context": context},
            rows=text_rows(runner, data, predictions, settings) if settings.outputs else (),
        )


def text_rows(
    runner: Runner[Any], data: Texts, predictions: Losses, settings: LanguageEval
) -> list[dict[str, Any]]:
    """Loss of each text, or of each span that is read of a running one."""
    context, tokens = predictions.context, settings.batch_tokens
    column = tokenised_part(runner.codec, data, settings.part, context).columns["valid"]
    spans = np.stack([column.offsets[:-1], column.offsets[1:]], 1)
    if predictions.running:
        spans = spans_of(column.offsets, context)
    records: list[dict[str, Any]] = []
    for start, end in spans.tolist():
        row = column.ids[start:end].tolist()
        total, count = runner.predictor.row_loss(row, context, tokens)
        loss, text = total / count if count else None, runner.codec.tokenizer.decode(row)
        records.append({"text": text, "tokens": count, "loss": loss, "prediction": loss})
    return records


LANGUAGE = Task(
    name="language",
    holds="text",
    inputs=CONVERSATIONS,
    target="",
    unit="characters",
    objective=LanguageObjective(),
    predictor=Completer,
    judge=LossJudge(),
    judged=LanguageEval,
    load_codec=load_codec,
)
