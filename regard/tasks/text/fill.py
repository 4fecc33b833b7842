"""Filling in: a masked language model predicts the words that are masked in a text."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.data.batches import pad
from regard.data.documents import Texts, tokenise_texts
from regard.data.gaps import GapText, PartlyFilled
from regard.data.masking import MaskedBatches
from regard.data.tokenizer import mask_id
from regard.decode.batching import in_batches
from regard.errors import UsageError
from regard.metrics.score import Score
from regard.modalities.text import TEXT
from regard.modalities.tokens import text_keys
from regard.models.protocols import Model
from regard.settings import setting
from regard.tasks.frame.answers import Filled
from regard.tasks.frame.question import Question
from regard.tasks.frame.settings import RunSettings
from regard.tasks.parts import Judge, Predictor, ScoredPredictions, System, Task, V
from regard.tasks.runner import Runner
from regard.tasks.text.language import LANGUAGE
from regard.tasks.text.language_modelling import (
    LanguageCodec,
    LanguageEvalSettings,
    MaskedScores,
    masked_scores,
    read_test_texts,
)
from regard.viewer.picture import Picture
from regard.viewer.settings import LookSettings

_CANDIDATES = 5  # that a JSON line names for each mask
# what a picture says of no mask, of one and of more
_NOTES = (
    "read, with nothing to fill in; write {} for a word that is to be predicted",
    "",
    "each mask by itself, the others still masked",
)


@dataclass(frozen=True)
class FillRun(RunSettings):
    """What a run can be told."""

    n_best: int = setting(1, "texts to return per input, the likeliest first", min=1, max=1000)
    scores: bool = setting(False, "print the probability of each text")
    batch_tokens: int = setting(4096, "tokens per batch", min=1, group="machine")
    batch_rows: int = setting(128, "texts per batch", min=1, group="machine")


@dataclass(frozen=True)
class FillLook(LookSettings, FillRun):
    """What look can be told."""


@dataclass(frozen=True)
class FillEval(LanguageEvalSettings):
    """What an evaluation can be told."""

    context: int | None = setting(None, "context length in tokens", min=8, max=10_000_000)
    mask_share: float = setting(0.15, "share of words to mask", above=0, max=1)
    tokens: int = setting(0, "maximum tokens read; 0: all", min=0)


class Candidates(NamedTuple):
    """The likeliest tokens of a place, the best first, with their log-probabilities."""

    ids: list[int]
    logprobs: list[float]


class MaskedPredictions(NamedTuple):
    """The scores over masked tokens, and if asked for the prediction of each."""

    scores: MaskedScores
    records: list[dict[str, Any]]


class Filler(Predictor[Filled, FillRun, FillLook, str]):
    """Fills in the masks of texts."""

    Settings, Look = FillRun, FillLook

    def __init__(self, model: nn.Module, codec: LanguageCodec, config: Mapping[str, Any]):
        super().__init__(model, codec, config)
        self.defaults = {}  # nothing is decoded
        tokenizer = self.tokenizer = codec.tokenizer
        # tokens that the model reads at once
        self.window: int = codec.context or self.model.config.max_length
        self.gaps = GapText(tokenizer, self.window)
        special = tokenizer.special_ids | {tokenizer.unk, self.gaps.mask}
        self.allowed = torch.zeros(self.model.config.vocab, dtype=torch.bool, device=self.device)
        self.allowed[[n for n, piece in enumerate(self.gaps.pieces) if piece]] = True
        self.allowed[[number for number in special if number is not None]] = False

    def check(self, settings: V) -> V:
        """Refuse to return more texts than there are words."""
        if isinstance(settings, FillRun) and settings.n_best > int(self.allowed.sum()):
            raise UsageError(
                f"n_best={settings.n_best} is more than the words that the model knows"
            )
        return settings

    # Filling in

    def predict(self, inputs: list[str], settings: FillRun, *, first: int = 0) -> list[Filled]:
        """Fill in the masks of texts; `first` is the number of the first, for what is refused.

        Several masks of a text are filled from left to right, each given those before it, by a beam
        of the likeliest texts.
        """
        started = [self.gaps.encode(text, first + n) for n, text in enumerate(inputs, 1)]
        count = min(max(settings.n_best, _CANDIDATES), int(self.allowed.sum()))
        candidates = self.candidates(started, settings, count, every=True)
        beams = [
            likeliest([(text, some[:1])], settings.n_best)
            for text, some in zip(started, candidates, strict=True)
        ]
        while unfilled := [n for n, beam in enumerate(beams) if beam[0].places]:
            flat = [text for n in unfilled for text in beams[n]]
            found = iter(self.candidates(flat, settings, settings.n_best))
            for n in unfilled:
                beams[n] = likeliest([(text, next(found)) for text in beams[n]], settings.n_best)
        return [
            self.filled(text, beam, some, settings.n_best)
            for text, beam, some in zip(inputs, beams, candidates, strict=True)
        ]

    def candidates(
        self, texts: Sequence[PartlyFilled], settings: FillRun, count: int, every: bool = False
    ) -> list[list[Candidates]]:
        """The likeliest tokens at the first mask that is left of each text, or at every."""

        @torch.inference_mode()
        def judge(some: list[PartlyFilled]) -> list[list[Candidates]]:
            ids, lengths = pad([text.ids for text in some], self.tokenizer.pad)
            at = [text.places if every else text.places[:1] for text in some]
            hidden = self.model.hidden(ids.to(self.device), lengths.to(self.device))
            top = self.logprobs(hidden, at).topk(count)
            found = map(Candidates, top.indices.tolist(), top.values.tolist())
            return [[next(found) for _ in places] for places in at]

        lengths = [len(text.ids) for text in texts]
        batches = {"tokens": settings.batch_tokens, "rows": settings.batch_rows}
        return in_batches(texts, lengths, judge, **batches)

    def logprobs(self, hidden: Tensor, at: Sequence[Sequence[int]]) -> Tensor:
        """The log-probability of each token at places of each text; -inf if no word."""
        rows = [row for row, places in enumerate(at) for _ in places]
        columns = [column for places in at for column in places]
        logprobs = self.model.head(hidden[rows, columns]).float().log_softmax(-1)
        return logprobs.masked_fill(~self.allowed, -math.inf)

    def filled(
        self, text: str, beam: Sequence[PartlyFilled], each: Sequence[Candidates], count: int
    ) -> Filled:
        """The answer to a text: so many fillings, and the candidates of each mask."""
        guesses = [
            [(self.gaps.word(i), math.exp(p)) for i, p in zip(*some, strict=True)][:_CANDIDATES]
            for some in each
        ]
        answers = []
        for one in beam:
            words = [self.gaps.word(token) for token in one.chosen]
            filled = self.gaps.fill_in(text, one.chosen)
            answers.append(Filled(filled, words, math.exp(one.logprob), guesses))
        # as many lines for an empty text, in which there is nothing to choose
        answers += [answers[-1]] * (count - len(answers))
        return replace(answers[0], others=answers[1:])

    # Looking

    def answer_logprobs(self, given: str, settings: FillLook, expected: Any = None) -> Question:
        """A text with the words at its masks and their log-probability."""
        text = self.gaps.encode(given, 1)
        if not text.places:
            raise UsageError("there is nothing to look at in an empty text")
        ids = torch.from_numpy(text.ids)[None].to(self.device)

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            hidden = self.model.hidden(ids.expand(copies, -1))
            flat = self.logprobs(hidden, [text.places] * copies)
            return flat.view(copies, len(text.places), -1)

        chosen = logprobs(1)[0].argmax(-1).tolist() if expected is None else list(expected)
        tokens = self.pieces(text.ids.tolist())
        return Question(
            answer=" ".join(self.gaps.word(token) for token in chosen),
            logprobs=logprobs,
            chosen=chosen,
            names=self.gaps.pieces,
            places=[tokens[place] for place in text.places],
            tokens=tokens,
            keys=text_keys(len(tokens)),
            expected=chosen,
            reads=list(text.places),
        )

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Tokens as they are shown."""
        pieces, mask = self.gaps.pieces, self.gaps.mask
        return [self.gaps.mask_token if i == mask else pieces[i] for i in ids]

    def explain(self, given: str, settings: FillLook) -> Picture:
        """Fill a text in and gather where the model looked; one without a mask is only read."""
        from regard.viewer.text import candidate_steps, text_views

        text = self.gaps.encode(given, 1, needs_mask=False)
        (answer,) = self.predict([given], settings) if text.places else (Filled(given),)
        with torch.inference_mode(), watch(self.model) as maps:
            hidden = self.model.hidden(torch.from_numpy(text.ids)[None].to(self.device))
            logprobs = self.logprobs(hidden, [text.places])
        count = min(settings.candidates, int(self.allowed.sum()))
        return Picture(
            title=given,
            views=text_views(maps, self.pieces(text.ids.tolist())),
            steps=candidate_steps(logprobs.exp(), self.gaps.pieces, candidates=count),
            source=given,
            output=answer.text,
            alternatives=[(one.text, one.probability) for one in answer.others],
            note=_NOTES[min(len(text.places), 2)].format(self.gaps.mask_token),
        )


class MaskedJudge(Judge[Texts, FillEval, MaskedPredictions]):
    """Judges a masked language model by the tokens that it predicts at masks."""

    Settings = FillEval

    def read(self, runner: Runner[Any], settings: FillEval) -> Texts:
        """The part that a model is judged on."""
        return read_test_texts(settings, runner.trained)

    def predict(
        self, runner: Runner[Any], data: Texts, settings: FillEval, like: Runner[Any] | None = None
    ) -> MaskedPredictions:
        """Predictions of masked tokens of a part, as at a validation in training."""
        filler, most = runner.predictor, runner.model.config.max_length
        context = settings.context or filler.window
        if context > most:
            raise UsageError(f"context={context} is more than the {most} places of the model")
        texts = Texts({"valid": data[settings.part]}, data.running)
        batches = MaskedBatches(
            tokenise_texts(texts, filler.tokenizer, ("valid",)),
            "valid",
            runner.codec.masking,
            context=context,
            batch_tokens=settings.batch_tokens,
            share=settings.mask_share,
            seed=0,
        )
        records: list[dict[str, Any]] = []
        pieces = dict(enumerate(filler.gaps.pieces))

        def note(logits: Tensor, targets: Tensor) -> None:
            best = logits.softmax(-1).max(-1)
            rows = zip(targets.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
            for right, guess, probability in rows:
                fields = {"token": pieces.get(right, ""), "prediction": pieces.get(guess, "")}
                records.append({**fields, "probability": probability})

        on_batch = note if settings.outputs else None
        scores = masked_scores(runner.model, batches, settings.tokens, on_batch)
        return MaskedPredictions(scores, records)

    def score(
        self,
        runner: Runner[Any],
        data: Texts,
        predictions: MaskedPredictions,
        settings: FillEval,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """Loss, perplexity and accuracy."""
        context, share = settings.context or runner.predictor.window, settings.mask_share
        kind, sha = "running" if data.running else "documents", runner.codec.tokenizer.sha[:8]
        signature = (
            f"mask_share:{share}|whole words|context:{context}|{kind}|seed:0"
            f"|rows:{max(1, settings.batch_tokens // context)}|tokenizer:{sha}"
        )
        scores = [
            Score("loss", predictions.scores.loss, f"nats a masked token|{signature}", 4),
            Score("perplexity", predictions.scores.perplexity, signature, 3),
            Score("accuracy", predictions.scores.accuracy, f"% of masked tokens|{signature}"),
        ]
        return ScoredPredictions(
            scores,
            sum(map(len, data[settings.part])),
            made_with={"context": context, "mask_share": share},
            rows=predictions.records,
        )


def likeliest(
    beam: Sequence[tuple[PartlyFilled, Sequence[Candidates]]], count: int
) -> list[PartlyFilled]:
    """The likeliest ways to fill the first mask that is left of the texts of a beam."""
    filled = [
        text.put(token, logprob)
        for text, some in beam
        for candidates in some
        for token, logprob in zip(*candidates, strict=True)
    ]
    filled.sort(key=lambda text: -text.logprob)
    return filled[:count] or [text for text, _ in beam]


def load_codec(folder: Path, model: Model, config: dict[str, Any]) -> LanguageCodec:
    """Read the tokenizer, and check that the model predicts its tokens."""
    if getattr(model.config, "head", None) != "words":
        raise UsageError(
            f"{folder / 'config.json'}: a model without a head for words, which fills nothing "
            "in; train one with: regard train language objective=masked init=..."
        )
    codec = LanguageCodec.load(folder, model, config)
    if mask_id(codec.tokenizer) >= model.config.vocab:
        raise UsageError(
            f"{folder}: the mask of the tokenizer is {mask_id(codec.tokenizer)}, but the "
            f"model has {model.config.vocab} pieces"
        )
    return codec


FILL = Task(
    name="fill",
    holds="text",
    inputs=TEXT,
    unit="characters",
    predictor=Filler,
    judge=MaskedJudge(),
    judged=FillEval,
    load_codec=load_codec,
    learnt_by=(LANGUAGE, {"objective": "masked"}),
    remedy="; use: regard train language objective=masked",
)
