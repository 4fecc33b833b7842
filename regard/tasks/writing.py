"""A trained language model as its user has it: it goes on writing, chats, and shows how."""

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from torch import Tensor

from regard.attention.positions import has_table
from regard.attention.watch import watch
from regard.data.batches import pad
from regard.data.documents import Texts, encode_running, hash_texts, load_texts, stretches
from regard.decode import search
from regard.decode.rules import Given, Ways
from regard.decode.search import in_batches
from regard.errors import UsageError, lookup
from regard.metrics.bleu import Score
from regard.metrics.evaluation import Evaluation, made_here, score_both, write_outputs
from regard.native import fast_run
from regard.pretrained.chat_template import check_chat
from regard.settings import fill, setting
from regard.tasks import chat
from regard.tasks.chat_template import encode_own
from regard.tasks.language import stretch_loss
from regard.tasks.run import load_tokenizer
from regard.tasks.runners import Answer, Runner
from regard.tasks.translator import own_settings
from regard.training.loop import mix

OnText = Callable[[str], None]
LOST = "\ufffd"  # what a character that is not complete decodes to
SEEN = 24  # tokens that are written to be looked at, unless told


@dataclass(frozen=True)
class WriteSettings:
    """How to go on writing."""

    max_length: int = setting(200, "most tokens to write", min=1, max=1_000_000)
    temperature: float = setting(0.8, "of drawing; 0 takes the likeliest", min=0, max=100)
    top_k: int | None = setting(None, "draw among so many", min=1)
    top_p: float | None = setting(None, "draw among the likeliest with this mass", min=0, max=1)
    min_p: float | None = setting(None, "draw above this share of the likeliest", min=0, max=1)
    repetition_penalty: float = setting(1.0, "against what a text has", min=0.001, max=1000)
    seed: int = setting(1, "of the draws", min=0)
    stop: str = setting("", "text that ends the answer")
    echo: bool = setting(True, "begin the answer with the text that was given")
    beam: int = setting(1, "hypotheses followed; above 1 nothing is drawn", min=1, max=1000)
    length_penalty: str = setting("average", "average, gnmt or none")
    alpha: float | None = setting(None, "exponent of the length penalty", min=-10, max=10)
    n_best: int = setting(1, "answers a line", min=1, max=1000)
    scores: bool = setting(False, "tell the score of each answer")
    forced: bool = setting(False, "write nothing: tell how likely each text is")
    chat: bool = setting(False, "answer as in a conversation")
    template: str | None = setting(
        None, "how a conversation is written down: plain, chatml, llama2, alpaca, or own"
    )
    system: str = setting("", "what the model is told before a conversation")
    batch_tokens: int = setting(16_384, "tokens written at once", min=1)
    batch_rows: int = setting(64, "texts written at once", min=1)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)

    @property
    def draws(self) -> bool:
        """Tell whether answers are drawn at random."""
        return self.beam == 1 and self.temperature > 0


@dataclass(frozen=True)
class JudgeSettings:
    """What to judge a language model on."""

    data: str | None = setting(None, "a folder or file of text")
    part: str = setting("test", "test, valid or train")
    test: str | None = setting(None, "which test file of the folder")
    columns: str | None = setting(None, "the text's column in a table")
    header: bool | None = setting(None, "whether a table begins with one; recognised unless told")
    context: int | None = setting(None, "tokens read at once", min=2, max=10_000_000)
    outputs: str | None = setting(None, "a file for the loss of each text; .jsonl tells more")
    batch_tokens: int = setting(8192, "tokens read at once by all texts", min=1)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)


@dataclass
class Written(Answer):
    """One answer: what was given, how it goes on, and how likely that is; `others` come next."""

    given: str
    completion: str
    score: float = 0.0
    logprob: float = 0.0
    others: list["Written"] = field(default_factory=list)

    def __str__(self) -> str:
        return self.given + self.completion

    def lines(self, settings: WriteSettings) -> Iterator[str]:
        """Write the answers, each with its score after ` ||| ` if that was asked for."""
        for answer in [self, *self.others]:
            told = [str(answer)]
            if settings.scores or settings.forced:
                told.append(f"{answer.score:.6f}")
            yield " ||| ".join(told)

    def record(self, settings: WriteSettings) -> dict[str, Any]:
        """Return the fields of a JSON line."""
        found: dict[str, Any] = {"prediction": self.completion, "score": round(self.score, 6)}
        if self.others:
            found["n_best"] = [found.copy(), *(other.record(settings) for other in self.others)]
        return found


@dataclass
class _Row:
    """A text that is being written: its prompt, and what was written so far."""

    line: int
    prompt: list[int]
    limit: int  # tokens that may be written
    rank: int = 0  # among the answers to one line
    ids: list[int] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)


class _Teller:
    """Tells a text bit by bit as its tokens come, and nothing that may still change."""

    def __init__(self, decode: Callable[[list[int]], str], stop: str, on_text: OnText):
        self.decode, self.stop, self.on_text = decode, stop, on_text
        self.ids: list[int] = []
        self.told = 0

    def take(self, token: int) -> None:
        """Take the next token."""
        self.ids.append(token)
        text = self.decode(self.ids)
        if self.stop:
            text = text.partition(self.stop)[0]
        held = max((n for n in range(len(self.stop)) if text.endswith(self.stop[:n])), default=0)
        self._tell(text[: len(text) - held])

    def finish(self, text: str) -> None:
        """Tell what is still missing of the whole text."""
        self._tell(text)

    def _tell(self, text: str) -> None:
        if len(text) > self.told:
            self.on_text(text[self.told :])
            self.told = len(text)


class LanguageModel(Runner[Written]):
    """A model that goes on writing, with its tokenizer."""

    task = "language"
    settings = WriteSettings
    eval_settings = JudgeSettings
    from_nothing = True  # an empty text has an answer

    def __init__(self, model: Any, tokenizer: Any, config: dict[str, Any]):
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.device = next(model.parameters()).device
        self.window = config.get("context") or model.config.max_length
        rules = config.get("generation", {}).get("rules")
        ends = list(tokenizer.ends)
        told = None if rules is None else {"eos_token_id": ends, **rules}
        self.ways = Ways(told, tokenizer.eos, model.config.vocab)
        self.ends = self.ways.all_ends

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> "LanguageModel":
        """Put a loaded model together with the tokenizer beside it."""
        tokenizer = load_tokenizer(folder)
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
        try:
            config = {**config, "chat": check_chat(config["chat"])} if "chat" in config else config
        except UsageError as mistake:
            raise UsageError(f"{folder / 'config.json'}: {mistake}") from None
        try:
            made = cls(model, tokenizer, config)
            made.check({})
        except UsageError as mistake:
            raise UsageError(f"{folder / 'generation_config.json'}: {mistake}") from None
        return made

    def check(self, settings: dict[str, Any]) -> WriteSettings:
        """Make full settings of what a user gave, with the model's own defaults."""
        own = own_settings(self.config)
        if "repetition_penalty" in self.ways.rules:
            own["repetition_penalty"] = self.ways.rules["repetition_penalty"]
        how = fill(WriteSettings, {**own, **settings})
        lookup("length_penalty", how.length_penalty, search.PENALTIES)
        if how.template is None:
            how = replace(how, template="own" if "chat" in self.config else "plain")
        own = {"own": None} if "chat" in self.config else {}
        lookup("template", str(how.template), {**chat.TEMPLATES, **own})
        if how.n_best > how.beam and not how.draws:
            raise UsageError(
                f"n_best={how.n_best} is more than beam={how.beam}; widen the beam, or draw "
                "with temperature="
            )
        return how

    # Writing

    def is_one(self, inputs: Any) -> bool:
        """Tell whether one text or one conversation was given, rather than several."""
        talk = isinstance(inputs, list) and inputs and all(isinstance(x, dict) for x in inputs)
        return bool(talk) or super().is_one(inputs)

    @fast_run
    def answer(
        self, inputs: list[Any], *, first: int = 0, on_text: OnText | None = None, **settings: Any
    ) -> list[Written]:
        """Go on with texts, or answer conversations given as lists of messages.

        `first` is the number of the first line, which seeds random draws. `on_text` is told the
        answer to a single text bit by bit as it is written.
        """
        how = self.check(settings)
        if how.threads:
            torch.set_num_threads(how.threads)
        if how.forced:
            return self._judge([self._text(text) for text in inputs], how)
        if any(isinstance(text, list) for text in inputs):
            how = replace(how, chat=True)
        given = [self._prompt(text, how) for text in inputs]
        whole = "max_length" not in settings and "max_length" not in own_settings(self.config)
        rows = [
            _Row(first + i, ids, self._limit(ids, how, whole)) for i, (_, ids) in enumerate(given)
        ]
        stop = how.stop or (chat.stop_of(how.template) if how.chat else "")
        teller = None
        if on_text is not None:
            if len(rows) != 1 or how.n_best > 1 or how.beam > 1:
                raise UsageError(
                    "only one answer can be told bit by bit; leave n_best and beam at 1"
                )
            teller = _Teller(lambda ids: self._shown(rows[0].prompt, ids, how), stop, on_text)

        def write(some: list[_Row]) -> list[list[_Row]]:
            return self._write(some, how, stop, teller)

        lengths = [len(row.prompt) + row.limit for row in rows]
        workers = torch.get_num_threads() if self.device.type == "cpu" else 1
        most = min(how.batch_rows, max(1, -(-len(rows) // workers)))
        done = in_batches(rows, lengths, write, tokens=how.batch_tokens, rows=most, workers=workers)
        told = [
            self._told(shown if how.echo else "", some, stop, how)
            for (shown, _), some in zip(given, done, strict=True)
        ]
        if teller is not None:
            teller.finish(told[0].completion)
        return told

    def _limit(self, prompt: list[int], how: WriteSettings, whole: bool) -> int:
        """Return how many tokens may come after a prompt; a checkpoint may tell it with that."""
        if not whole or self.ways.longest is None:
            return how.max_length
        if self.ways.longest <= len(prompt):
            raise UsageError(
                f"a text of {len(prompt)} tokens has no room to go on, as the model's own "
                f"max_length is {self.ways.longest}; set max_length="
            )
        return self.ways.longest - len(prompt)

    def _text(self, text: Any) -> str:
        if not isinstance(text, str):
            raise UsageError(f"{text!r:.60} is no text; give a list of texts")
        return text

    def _prompt(self, given: Any, how: WriteSettings) -> tuple[str, list[int]]:
        """Return what to show of an input before the answer, and the tokens to go on from."""
        if isinstance(given, list) or how.chat:
            before = [chat.Message("system", how.system)] if how.system else []
            if isinstance(given, list):
                messages = chat.read_messages(given)
                before = before if messages[0].role != "system" else []
            else:
                messages = [chat.Message("user", self._text(given))]
            return "", self.conversation([*before, *messages], how)
        return given, self.encode(self._text(given))

    def encode(self, text: str) -> list[int]:
        """Split a text to go on from into ids, as the model was trained to read them."""
        if self.config.get("running"):
            # such a model knows no begin, but always stands after something
            ids = [i for part in encode_running(self.tokenizer, text or "\n") for i in part]
        else:
            ids = self.tokenizer.frame(self.tokenizer.encode(text), "prompt")
        return ids or [self.tokenizer.bos]

    def conversation(self, messages: Sequence[chat.Message], how: WriteSettings) -> list[int]:
        """Split a conversation into ids; its first rounds are forgotten if there is no room."""
        begin = self.encode("")[:1] if not self.config.get("running") else []
        room = max(self.window - how.max_length, self.window // 2)
        rounds = list(messages)
        while True:
            if how.template == "own":
                ids = encode_own(rounds, self.config["chat"], self.tokenizer)
            else:
                ids = chat.encode(rounds, str(how.template), self.tokenizer)
            if how.template != "own" and begin == [self.tokenizer.bos] and ids[:1] != begin:
                ids = begin + ids
            old = next((i for i, m in enumerate(rounds[:-1]) if m.role != "system"), None)
            if len(ids) <= room or old is None:
                return ids
            last = old + 1
            while how.template == "own" and last < len(rounds) - 1 and rounds[last].role != "user":
                last += 1  # a template may insist on turns
            del rounds[old:last]

    def _write(
        self, rows: list[_Row], how: WriteSettings, stop: str, teller: _Teller | None = None
    ) -> list[list[_Row]]:
        """Write the answers to some prompts.

        What does not fit into the model's window is written in several turns, each of which reads
        the last of what there is again.
        """
        answers: list[list[_Row]] = [[] for _ in rows]
        waiting, turn = list(enumerate(rows)), 0
        while waiting:
            found = self._turn([row for _, row in waiting], how, stop, teller, turn)
            later = []
            for (place, _), texts in zip(waiting, found, strict=True):
                for row in texts:
                    ended = len(row.steps) > len(row.ids) or self._is_over(row.ids, stop)
                    if ended or len(row.ids) >= row.limit:
                        answers[place].append(row)
                    else:
                        later.append((place, row))
            waiting, turn = later, turn + 1
        return answers

    def _turn(
        self, rows: list[_Row], how: WriteSettings, stop: str, teller: _Teller | None, turn: int
    ) -> list[list[_Row]]:
        """Write as much of some texts as fits into the window."""
        prompts, most = [], []
        for row in rows:
            left = row.limit - len(row.ids)
            read = max(self.window - left + 1, self.window // 2)
            prompts.append((row.prompt + row.ids)[-read:])
            most.append(min(left, self.window - len(prompts[-1]) + 1))
            if how.beam > 1 and most[-1] < left:
                raise UsageError(
                    f"max_length={row.limit} does not fit into the {self.window} tokens that "
                    f"the model reads at once; with a beam choose up to {self.window // 2}"
                )
        ids, lengths = self._padded(prompts)
        samples = how.n_best if turn == 0 else 1

        def on_token(number: int, token: int) -> bool:
            written[number].append(token)
            over = self._is_over(written[number], stop)
            if teller is not None and token not in self.ends:
                teller.take(token)
            return over

        written = [list(row.ids) for row in rows]
        rest: dict[str, Any] = {
            "max_length": most,
            "begin": ids.gather(1, lengths.unsqueeze(1) - 1).squeeze(1),
            "adjust": self._adjust(rows, most, how),
            "eos": self.ways.eos,
            "ends": self.ways.ends,
            "length_penalty": how.length_penalty,
            "alpha": how.alpha,
        }
        if how.beam > 1:
            rest |= {"beam": how.beam, "n_best": how.n_best, **self.ways.beam()}
            found = search.beam(self.model, ids, lengths, **rest)
        else:
            if samples == 1 and (stop or teller is not None):
                rest["on_token"] = on_token
            found = search.sample(
                self.model,
                ids,
                lengths,
                samples=samples,
                temperature=how.temperature,
                top_k=how.top_k,
                top_p=how.top_p,
                min_p=how.min_p,
                seed=mix(how.seed, turn) if turn else how.seed,
                lines=[row.line if turn == 0 else 1000 * row.line + row.rank for row in rows],
                **rest,
            )
        return [
            [
                replace(row, rank=row.rank + k, ids=row.ids + h.ids, steps=row.steps + h.steps)
                for k, h in enumerate(some)
            ]
            for row, some in zip(rows, found, strict=True)
        ]

    def _adjust(self, rows: list[_Row], most: list[int], how: WriteSettings) -> list[search.Adjust]:
        """Return what is changed of the logits of some texts, which may get so many tokens."""
        tokenizer = self.tokenizer
        never = list(range(tokenizer.vocab, self.model.config.vocab))  # they have no spelling
        never += tokenizer.never
        changes: list[search.Adjust] = [search.forbid(*never)] if never else []
        before = [row.prompt + row.ids for row in rows]
        # none but the last of several turns comes to an end
        limits = [
            n if len(row.ids) + n >= row.limit else -1 for row, n in zip(rows, most, strict=True)
        ]
        earlier = [len(row.ids) for row in rows]
        given = Given(self.ends, before, [row.prompt for row in rows], limits, earlier)
        return [*changes, *self.ways.changes(given, repetition_penalty=how.repetition_penalty)]

    def _is_over(self, ids: list[int], stop: str) -> bool:
        """Tell whether a text ends here, by a token or by the text that was to stop it."""
        if not ids:
            return False
        if ids[-1] in self.ends:
            return True
        # every token spells a byte or more, so that a new stop lies among the last
        return bool(stop) and stop in self.tokenizer.decode(ids[-len(stop.encode()) - 8 :])

    def _completion(self, prompt: list[int], ids: list[int]) -> str:
        """Return the text that was written after a prompt, with the space between them."""
        before = prompt[-16:]
        given, whole = self.tokenizer.decode(before), self.tokenizer.decode([*before, *ids])
        return whole[len(given) :] if whole.startswith(given) else self.tokenizer.decode(ids)

    def _shown(self, prompt: list[int], ids: list[int], how: WriteSettings) -> str:
        """Return what a user sees of an answer: no half characters, no space around a reply."""
        text = self._completion(prompt, ids).rstrip(LOST)
        return text.strip() if how.chat else text

    def _told(self, given: str, rows: list[_Row], stop: str, how: WriteSettings) -> Written:
        divisor = search.penalty(how.length_penalty, how.alpha)
        answers = []
        for row in rows:
            text = self._shown(row.prompt, row.ids, how)
            text = text.partition(stop)[0] if stop else text
            total = sum(row.steps)
            answers.append(Written(given, text, total / divisor(len(row.steps)), total))
        answers[0].others = answers[1:]
        return answers[0]

    def _padded(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        ids, lengths = pad([np.asarray(row, dtype=np.int64) for row in rows], self.tokenizer.pad)
        return ids.to(self.device), lengths.to(self.device)

    # Judging given texts

    def _judge(self, texts: Sequence[str], how: WriteSettings) -> list[Written]:
        """Tell how likely the model finds given texts."""
        answers = []
        for text in texts:
            ids = np.array(self._whole(text), dtype=np.int64)
            total, count = self.loss(ids, np.array([0, len(ids)]), self.window, how.batch_tokens)
            answers.append(Written(text, "", -total / max(1, count), -total))
        return answers

    def _whole(self, text: str) -> list[int]:
        """Split a text that is not to go on into ids."""
        ids = self.encode(text)
        return ids if self.config.get("running") else [*ids, self.tokenizer.eos]

    def loss(
        self, ids: np.ndarray, offsets: np.ndarray, context: int, tokens: int
    ) -> tuple[float, int]:
        """Return the summed loss over rows of ids, and how many tokens were guessed."""
        spans = stretches(offsets, context)
        return stretch_loss(self.model, ids, spans, tokens) if len(spans) else (0.0, 0)

    @fast_run
    def evaluate(
        self,
        settings: dict[str, Any],
        *,
        against: "LanguageModel | None" = None,
        names: tuple[str, str] = ("model", ""),
    ) -> Evaluation:
        """Measure how well the model guesses the next token of texts."""
        how = fill(JudgeSettings, settings)
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
            lambda model: model._scores(texts, how), self, against, names[1]
        )
        if how.outputs:
            write_outputs(how.outputs, self._losses(texts, how))
        size = sum(map(len, texts.parts[how.part]))
        made_with = {
            "data": how.data,
            "part": how.part,
            "data_hash": hash_texts(texts.parts[how.part]),
            "tokenizers": [self.tokenizer.sha],
            "context": how.context or self.window,
            **made_here(),
        }
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

    def _rows(self, texts: Texts, how: JudgeSettings) -> tuple[list[list[int]], bool]:
        """Return the ids of all texts, and whether they are one running text."""
        parts = texts.parts[how.part]
        if texts.running or bool(self.config.get("running")):
            split = (part for text in parts for part in encode_running(self.tokenizer, text))
            return [[i for part in split for i in part]], True
        encoded = self.tokenizer.encode_batch(parts)
        return [[self.tokenizer.bos, *ids, self.tokenizer.eos] for ids in encoded], False

    def _losses(self, texts: Texts, how: JudgeSettings) -> list[dict[str, Any]]:
        """Return the loss of each text, or of each stretch that is read of a running one."""
        context = how.context or self.window
        rows, running = self._rows(texts, how)
        if running:
            spans = stretches(np.array([0, len(rows[0])]), context).tolist()
            rows = [rows[0][start:end] for start, end in spans]
        told = []
        for row in rows:
            ids = np.asarray(row, dtype=np.int64)
            total, count = self.loss(ids, np.array([0, len(ids)]), context, how.batch_tokens)
            loss = total / count if count else None
            text = self.tokenizer.decode(row)
            told.append({"text": text, "tokens": count, "loss": loss, "prediction": loss})
        return told

    def _scores(self, texts: Texts, how: JudgeSettings) -> list[Score]:
        """Return loss a token, perplexity and bits a byte."""
        context = how.context or self.window
        if has_table(self.model.config.position) and context > self.model.config.max_length:
            raise UsageError(
                f"context={context} is more than the {self.model.config.max_length} places "
                "that the model has learnt"
            )
        parts = texts.parts[how.part]
        rows, running = self._rows(texts, how)
        offsets = np.concatenate([[0], np.cumsum([len(row) for row in rows])])
        ids = np.concatenate([np.asarray(row, dtype=np.int64) for row in rows])
        total, count = self.loss(ids, offsets, context, how.batch_tokens)
        if not count:
            raise UsageError(f"{how.data}: no token to guess in so short a text")
        size = sum(len(text.encode()) for text in parts)
        kind = "running" if running else "documents"
        signature = f"tokens:{count}|context:{context}|{kind}|tokenizer:{self.tokenizer.sha[:8]}"
        loss = total / count
        return [
            Score("loss", loss, f"nats a token|{signature}", 4),
            Score("perplexity", math.exp(min(loss, 700.0)), signature, 3),
            Score("bits per byte", total / size / math.log(2), f"bytes:{size}|{signature}", 4),
        ]

    # Looking

    @torch.inference_mode()
    def maps(self, ids: Sequence[int]) -> tuple[Any, Tensor]:
        """Return the attention of every layer and head over a text, exactly, and the logits."""
        with watch(self.model) as maps:
            logits = self.model(torch.tensor([list(ids)], device=self.device))
        return maps, logits[0]

    def picture(self, text: Any, *, candidates: int = 5, **settings: Any):
        """Go on with a text, or with forced=true only read it, and gather all there is to see."""
        from regard.viewer.picture import Picture, Step, View

        how = self.check({"max_length": SEEN, **settings})
        shown, prompt = self._prompt(text, how)
        others: list[Written] = []
        written = ""
        ids = prompt[-self.window :]
        if not how.forced:
            row, *rest = self._write([_Row(0, prompt, how.max_length)], how, how.stop)[0]
            others = [self._told(shown, [one], how.stop, how) for one in rest]
            written = self._completion(prompt, row.ids)
            end = [self.tokenizer.eos] if len(row.steps) > len(row.ids) else []
            ids = [*prompt, *row.ids, *end][-self.window - 1 :]
        maps, logits = self.maps(ids if how.forced else ids[:-1])
        probabilities = logits.softmax(-1)
        if how.forced:  # the last step is what would come next
            ids = [*ids, int(logits[-1, : self.tokenizer.vocab].argmax())]
        pieces = self.tokenizer.pieces(ids)
        rows, writes = pieces[:-1], pieces[1:]
        views = [
            View(name, maps[name].weights()[0].cpu().numpy(), rows, rows, "self", writes)
            for name in maps.names()
        ]
        top = probabilities[:, : self.tokenizer.vocab].topk(min(candidates, self.tokenizer.vocab))
        steps = []
        for i, number in enumerate(ids[1:]):
            named = [self.tokenizer.pieces([one])[0] for one in top.indices[i].tolist()]
            pairs = list(zip(named, top.values[i].tolist(), strict=True))
            steps.append(Step(writes[i], float(probabilities[i, number]), pairs))
        return Picture(
            title=shown or written,
            views=views,
            steps=steps,
            source=shown,
            output=written,
            alternatives=[(str(other), other.score) for other in others],
            note="read" if how.forced else f"temperature {how.temperature}, seed {how.seed}",
        )

    # Talking

    def say(self, given: Any, number: int, settings: dict[str, Any], out: TextIO) -> Written:
        """Write an answer to a terminal as it comes."""
        how = self.check(settings)

        def tell(text: str) -> None:
            out.write(text)
            out.flush()

        if how.forced or how.n_best > 1 or how.beam > 1:
            (answer,) = self.answer([given], first=number, **settings)
            tell("\n".join(answer.lines(how)))
        else:
            if how.echo and not how.chat:
                tell(given)
            (answer,) = self.answer([given], first=number, on_text=tell, **settings)
        tell("\n")
        return answer

    def session(self, settings: dict[str, Any], out: TextIO = sys.stdout) -> None:
        """Answer what is typed until it ends; a conversation remembers its rounds."""
        how = self.check(settings)
        messages: list[dict[str, str]] = []
        for number in itertools.count():
            try:
                text = input("> ")
            except EOFError:
                out.write("\n")
                return
            given: Any = text
            if how.chat:
                given = [*messages, {"role": "user", "content": text}]
            try:
                answer = self.say(given, number, settings, out)
            except KeyboardInterrupt:  # enough of this answer, not of all
                out.write("\n")
                continue
            if how.chat:
                messages = [*given, {"role": "assistant", "content": answer.completion}]
