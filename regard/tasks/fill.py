"""A model that fills in words that are masked in a text."""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.attention.watch import watch
from regard.data.documents import Texts, hash_texts, load_texts
from regard.data.rows import Row, collate
from regard.decode.search import in_batches
from regard.errors import UsageError
from regard.metrics.bleu import Score
from regard.metrics.evaluation import Evaluation, made_here, score_both, write_outputs
from regard.settings import fill, setting
from regard.tasks.language import MaskedSettings, MaskedTokens, mask_of
from regard.tasks.run import load_tokenizer
from regard.tasks.runners import Answer, Runner
from regard.training.loop import at_least

NAME = "fill"
MASKS = ("[MASK]", "<mask>")  # how people write it, whatever the tokenizer says
TOLD = 5  # guesses that a JSON line names for each mask


@dataclass(frozen=True)
class FillSettings:
    """How to fill texts in."""

    n_best: int = setting(1, "texts a line, the likeliest first", min=1, max=1000)
    scores: bool = setting(False, "tell the probability of each")
    batch_tokens: int = setting(4096, "pieces read at once", min=1)
    batch_rows: int = setting(128, "texts read at once", min=1)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)


@dataclass(frozen=True)
class FillEvalSettings:
    """What to judge on, and how."""

    data: str | None = setting(None, "a folder or file of text")
    part: str = setting("test", "test, valid or train")
    test: str | None = setting(None, "which test file of the folder")
    columns: str | None = setting(None, "the text's column in a table")
    header: bool | None = setting(None, "whether a table begins with one; recognised unless told")
    context: int | None = setting(None, "tokens read at once", min=8, max=10_000_000)
    mask_share: float = field(
        default=0.15, metadata={"help": "words to guess", "above": 0, "max": 1}
    )
    tokens: int = field(default=0, metadata=at_least(0, "read in all; 0: as many as there are"))
    outputs: str | None = setting(None, "a file for the guesses; .jsonl tells more")
    batch_tokens: int = setting(8192, "tokens read at once by all texts", min=1)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)


def train(values: Mapping[str, Any], **more: Any) -> Any:
    """Refuse: what is run here is trained as a language."""
    raise UsageError("fill has no training of its own; use: regard train language objective=masked")


# what a picture says of no mask, of one and of more
NOTES = (
    "read, with nothing to fill in; write {} for a word that is to be guessed",
    "",
    "each mask by itself, the others still masked",
)


@dataclass
class Filled(Answer):
    """A text with its masks filled in, and how likely that is; `others` come next."""

    text: str
    words: list[str] = field(default_factory=list)
    probability: float = 1.0
    guesses: list[list[tuple[str, float]]] = field(default_factory=list)  # of each mask by itself
    others: list["Filled"] = field(default_factory=list)

    def __str__(self) -> str:
        return self.text

    def lines(self, how: FillSettings) -> Iterator[str]:
        """Write the texts, each with its probability after ` ||| ` if that was asked for."""
        for answer in [self, *self.others]:
            yield f"{answer.text} ||| {answer.probability:.6f}" if how.scores else answer.text

    def record(self, how: FillSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        found: dict[str, Any] = self._told()
        found["masks"] = [
            [{"word": word, "probability": round(p, 6)} for word, p in some]
            for some in self.guesses
        ]
        if self.others:
            found["n_best"] = [answer._told() for answer in [self, *self.others]]
        return found

    def _told(self) -> dict[str, Any]:
        told = {"prediction": self.text, "words": self.words}
        return {**told, "probability": round(self.probability, 6)}


class _Guess(NamedTuple):
    """Tokens that are likely somewhere, the likeliest first, with the logarithms of how likely."""

    ids: list[int]
    logs: list[float]


class _Text(NamedTuple):
    """A text that is being filled in: its tokens, the places left, and what was put so far."""

    ids: np.ndarray
    places: list[int]
    chosen: tuple[int, ...] = ()
    log: float = 0.0

    def put(self, token: int, log: float) -> "_Text":
        """Fill the first place that is left."""
        ids = self.ids.copy()
        ids[self.places[0]] = token
        return _Text(ids, self.places[1:], (*self.chosen, token), self.log + log)


class Filler(Runner[Filled]):
    """A model that was trained on masked text, with its tokenizer."""

    task = NAME
    settings = FillSettings
    eval_settings = FillEvalSettings

    def __init__(self, model: Any, tokenizer: Any, config: dict[str, Any]):
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.device = next(model.parameters()).device
        self.longest: int = config.get("context") or model.config.max_length
        self.mask = mask_of(tokenizer)
        self.before, self.after = tokenizer.around("encoder")
        self.own = tokenizer.mask_token or MASKS[0]
        names = sorted({*MASKS, self.own}, key=len, reverse=True)
        self.sign = re.compile("|".join(map(re.escape, names)))
        self.pieces = [tokenizer.pieces([number])[0] for number in range(tokenizer.vocab)]
        self.marked = any(piece.startswith("##") for piece in self.pieces)  # what goes on a word
        self.spaced = any(len(p) > 1 and p[0] == "▁" for p in self.pieces)  # what begins one
        special = tokenizer.special_ids | {tokenizer.unk, self.mask}
        self.allowed = torch.zeros(model.config.vocab, dtype=torch.bool, device=self.device)
        self.allowed[[n for n, piece in enumerate(self.pieces) if piece]] = True
        self.allowed[[number for number in special if number is not None]] = False

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "Filler":
        """Put a loaded model together with the tokenizer beside it."""
        path = folder / "config.json"
        if getattr(model.config, "head", None) != "words":
            raise UsageError(
                f"{path}: a model without a head for words, which fills nothing in; train one "
                "with: regard train language objective=masked init=..."
            )
        tokenizer = load_tokenizer(folder)
        if tokenizer.vocab > model.config.vocab or mask_of(tokenizer) >= model.config.vocab:
            raise UsageError(
                f"{folder}: the tokenizer has {tokenizer.vocab} pieces and the mask "
                f"{mask_of(tokenizer)}, the model only {model.config.vocab}"
            )
        context, longest = config.get("context"), model.config.max_length
        if context is not None and (type(context) is not int or not 2 <= context <= longest):
            raise UsageError(f"{path}: 'context' is {context!r:.40}, not 2 to {longest}")
        return cls(model, tokenizer, config)

    def check(self, settings: dict[str, Any]) -> FillSettings:
        """Make full settings of what a user gave."""
        how = fill(FillSettings, settings)
        if how.n_best > int(self.allowed.sum()):
            raise UsageError(f"n_best={how.n_best} is more than the words that the model knows")
        return how

    # Filling in

    def answer(self, inputs: list[Any], *, first: int = 0, **settings: Any) -> list[Filled]:
        """Fill in the masks of texts; `first` is the number of the first, for what is told.

        Several masks of a text are filled from left to right, each in the light of those before
        it, and the likeliest texts are kept all the way.
        """
        how = self.check(settings)
        for text in inputs:
            if not isinstance(text, str):
                raise UsageError(f"{text!r:.60} is no text; give a list of texts")
        if how.threads:
            torch.set_num_threads(how.threads)
        started = [self._read(text, first + number) for number, text in enumerate(inputs, 1)]
        count = min(max(how.n_best, TOLD), int(self.allowed.sum()))
        told = self._guess(started, how, count, every=True)
        growing = [
            _likeliest([(text, guesses[:1])], how.n_best)
            for text, guesses in zip(started, told, strict=True)
        ]
        while open := [n for n, some in enumerate(growing) if some[0].places]:
            flat = [text for n in open for text in growing[n]]
            found = iter(self._guess(flat, how, how.n_best))
            for n in open:
                growing[n] = _likeliest([(text, next(found)) for text in growing[n]], how.n_best)
        return [
            self._filled(text, some, guesses, how.n_best)
            for text, some, guesses in zip(inputs, growing, told, strict=True)
        ]

    def _read(self, text: str, number: int, *, asked: bool = True) -> _Text:
        """Split a text into the tokens that the model reads, and find the masks among them.

        Where nothing is asked for, there need be none.
        """
        signs = len(self.sign.findall(text))
        if asked and not signs and text.strip():
            raise UsageError(
                f"text {number}: {text[:40]!r} has nothing to fill in; write {self.own} for a word"
            )
        ids = self.encode(text)
        places = [at for at, token in enumerate(ids) if token == self.mask]
        if len(places) != signs:
            raise UsageError(
                f"text {number}: the tokenizer finds {len(places)} of {signs} masks in "
                f"{text[:40]!r}; write {self.own} for a word"
            )
        room = self.longest - len(self.before) - len(self.after)
        start = 0
        if len(ids) > room and not places:
            ids = ids[:room]
        if len(ids) > room:  # read what is around the masks
            if places[-1] - places[0] >= room:
                raise UsageError(f"text {number}: its masks are more than {room} pieces apart")
            middle = (places[0] + places[-1] + 1 - room) // 2
            start = max(0, min(middle, len(ids) - room))
            ids = ids[start : start + room]
        shift = len(self.before) - start
        whole = np.array([*self.before, *ids, *self.after], dtype=np.int64)
        return _Text(whole, [at + shift for at in places])

    def encode(self, text: str) -> list[int]:
        """Split a text with masks into ids, with nothing around them."""
        if self.tokenizer.mask_token:
            return self.tokenizer.encode(self.sign.sub(lambda _: self.own, text), specials=True)
        # a word brings the space before it along, so that a mask stands for both
        first, *rest = self._gaps(text)
        ids = self.tokenizer.encode(first) if first else []
        for part in self.tokenizer.encode_parts(rest):
            ids += [self.mask, *part]
        return ids

    def _gaps(self, text: str) -> list[str]:
        *gaps, last = self.sign.split(text)
        return [gap.removesuffix(" ") if self.spaced else gap for gap in gaps] + [last]

    def _guess(
        self, texts: Sequence[_Text], how: FillSettings, count: int, every: bool = False
    ) -> list[list[_Guess]]:
        """Return what is likeliest at the first place that is left of each text, or at every."""

        @torch.inference_mode()
        def judge(some: list[_Text]) -> list[list[_Guess]]:
            rows = [Row(text.ids, text.ids) for text in some]
            read = collate(rows, self.tokenizer.pad, self.device)
            at = [text.places if every else text.places[:1] for text in some]
            logs = self._logs(self.model.hidden(read.ids, read.lengths), at)
            top = logs.masked_fill(~self.allowed, -math.inf).topk(count)
            guesses = map(_Guess, top.indices.tolist(), top.values.tolist())
            return [[next(guesses) for _ in places] for places in at]

        lengths = [len(text.ids) for text in texts]
        return in_batches(texts, lengths, judge, tokens=how.batch_tokens, rows=how.batch_rows)

    def _logs(self, hidden: Tensor, at: Sequence[Sequence[int]]) -> Tensor:
        """Return the logarithms of how likely each token is at places of each text."""
        rows = [row for row, places in enumerate(at) for _ in places]
        columns = [column for places in at for column in places]
        return self.model.head(hidden[rows, columns]).float().log_softmax(-1)

    def _filled(
        self, text: str, found: Sequence[_Text], guesses: Sequence[_Guess], count: int
    ) -> Filled:
        told = [
            [(self.word(i), math.exp(log)) for i, log in zip(*guess, strict=True)][:TOLD]
            for guess in guesses
        ]
        answers = [
            Filled(
                self.fill_in(text, one.chosen),
                [self.word(token) for token in one.chosen],
                math.exp(one.log),
                told,
            )
            for one in found
        ]
        # as many lines for an empty text, in which there is nothing to choose
        answers += [answers[-1]] * (count - len(answers))
        return replace(answers[0], others=answers[1:])

    def word(self, token: int) -> str:
        """Return how a token is spelt, without a space before it."""
        if self.marked:
            return self.pieces[token].removeprefix("##")
        return self.tokenizer.decode([token]).removeprefix(" ")

    def fill_in(self, text: str, tokens: Sequence[int]) -> str:
        """Put tokens in the place of a text's masks, each with a space before it or none."""
        first, *rest = self._gaps(text)
        whole = first
        for token, gap in zip(tokens, rest, strict=True):
            piece = self.pieces[token]
            if self.marked and piece.startswith("##"):
                whole = whole.removesuffix(" ")
            elif self.spaced and piece.startswith("▁") and whole:
                whole += " "
            whole += self.word(token) + gap
        return whole

    # Judging

    def evaluate(
        self,
        settings: dict[str, Any],
        *,
        against: "Filler | None" = None,
        names: tuple[str, str] = ("model", ""),
    ) -> Evaluation:
        """Measure how well the model guesses words that are hidden in texts."""
        how = fill(FillEvalSettings, settings)
        if how.data is None:
            raise UsageError("data is missing; add data=FILE or data=FOLDER with text")
        if how.threads:
            torch.set_num_threads(how.threads)
        texts = load_texts(
            how.data,
            test=how.test,
            key=how.columns,
            header=how.header,
            need=(how.part,),
            trained=self.trained,
        )
        scores, seconds = score_both(
            lambda model: model._scores(texts, how, how.outputs if model is self else None),
            self,
            against,
            names[1],
        )
        made_with = {
            "data": how.data,
            "part": how.part,
            "data_hash": hash_texts(texts.parts[how.part]),
            "tokenizers": [self.tokenizer.sha],
            "context": how.context or self.longest,
            "mask_share": how.mask_share,
            **made_here(),
        }
        size = sum(map(len, texts.parts[how.part]))
        return Evaluation(
            names[0],
            scores,
            size,
            seconds,
            made_with,
            names[1] or None,
            of="characters",
            notes=texts.notes,
        )

    def _note(self, rows: list[dict[str, Any]], logits: Tensor, writes: Tensor) -> None:
        """Note what was guessed for hidden tokens."""
        best = logits.softmax(-1).max(-1)
        told = zip(writes.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
        for right, guess, chance in told:
            names = [self.pieces[i] if i < len(self.pieces) else "" for i in (right, guess)]
            rows.append({"token": names[0], "prediction": names[1], "probability": chance})

    def _scores(
        self, texts: Texts, how: FillEvalSettings, outputs: str | None = None
    ) -> list[Score]:
        """Return loss, perplexity and share of right guesses, as at a validation in training."""
        context = how.context or self.longest
        if context > self.model.config.max_length:
            raise UsageError(
                f"context={context} is more than the {self.model.config.max_length} places of "
                "the model"
            )
        part = texts.parts[how.part]
        settings = MaskedSettings(
            context=context,
            batch_tokens=how.batch_tokens,
            mask_share=how.mask_share,
            valid_tokens=how.tokens,
            device=str(self.device),
        )
        both = Texts({"train": part, "valid": part}, texts.running)
        rows: list[dict[str, Any]] = []
        note = partial(self._note, rows) if outputs else None
        found = MaskedTokens(both, settings, self.tokenizer).evaluate(self.model, note)
        if outputs:
            write_outputs(outputs, rows)
        kind = "running" if texts.running else "documents"
        signature = f"mask_share:{how.mask_share}|whole words|context:{context}|{kind}|seed:0"
        signature += f"|rows:{max(1, how.batch_tokens // context)}|"
        signature += f"tokenizer:{self.tokenizer.sha[:8]}"
        return [
            Score("loss", found["loss"], f"nats a masked token|{signature}", 4),
            Score("perplexity", found["perplexity"], signature, 3),
            Score("accuracy", found["accuracy"], f"% of masked tokens|{signature}"),
        ]

    # Looking

    def picture(self, text: str, *, candidates: int = 5, **settings: Any):
        """Fill a text in and gather where the model looked, and what else it thought of.

        A text without a mask is only read.
        """
        from regard.viewer.picture import Picture, Step, View

        how = self.check(settings)
        read = self._read(text, 1, asked=False)
        (answer,) = self.answer([text], **settings) if read.places else (Filled(text),)
        with torch.inference_mode(), watch(self.model) as maps:
            hidden = self.model.hidden(torch.from_numpy(read.ids)[None].to(self.device))
            logs = self._logs(hidden, [read.places]).masked_fill(~self.allowed, -math.inf)
        names = [self.own if i == self.mask else self.pieces[i] for i in read.ids.tolist()]
        views = [
            View(name, maps[name].weights()[0].cpu().numpy(), names, names) for name in maps.names()
        ]
        top = logs.exp().topk(min(candidates, int(self.allowed.sum())))
        steps = []
        for ids, chances in zip(top.indices.tolist(), top.values.tolist(), strict=True):
            some = [(self.pieces[i], p) for i, p in zip(ids, chances, strict=True)]
            steps.append(Step(*some[0], some))
        return Picture(
            title=text,
            views=views,
            steps=steps,
            source=text,
            output=answer.text,
            alternatives=[(one.text, one.probability) for one in answer.others[: how.n_best]],
            note=NOTES[min(len(steps), 2)].format(self.own),
        )


def _likeliest(found: Sequence[tuple[_Text, Sequence[_Guess]]], count: int) -> list[_Text]:
    """Return the likeliest ways to fill the first place left of some texts."""
    put = [
        text.put(token, log)
        for text, guesses in found
        for guess in guesses
        for token, log in zip(*guess, strict=True)
    ]
    put.sort(key=lambda text: -text.log)
    return put[:count] or [text for text, _ in found]
