"""Text generation by a causal language model: prompts continued, whatever the context window."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from regard import native
from regard.data.batches import pad
from regard.data.seeds import mix
from regard.data.tokenizer import Tokenizer
from regard.decode.batching import in_batches
from regard.decode.constraints import Adjust, forbid
from regard.decode.decoder import decode
from regard.decode.options import Decoding
from regard.decode.rules import GenerationConfig, RuleInputs
from regard.decode.writer import Writer
from regard.errors import UsageError
from regard.settings import setting

REPLACEMENT = "\ufffd"  # what a character that is not complete decodes to
NEW_TOKENS = 200  # that are generated, unless the user or the checkpoint says otherwise


@dataclass(frozen=True)
class GenerateOptions(Decoding):
    """How a prompt is continued: by sampling, unless temperature=0 or a beam is given."""

    GROUP = "decoding"

    beam: int = setting(1, "beam size; above 1 nothing is sampled", min=1, max=1000)
    temperature: float = setting(0.8, "sampling temperature; 0 is greedy", min=0, max=100)
    max_length: int | None = setting(
        None, f"maximum number of new tokens; {NEW_TOKENS} unless given", min=1, max=1_000_000
    )
    repetition_penalty: float = setting(1.0, "repetition penalty", min=0.001, max=1000)
    stop: str = setting("", "text that ends the answer")

    @property
    def sampling(self) -> bool:
        """True if tokens are sampled."""
        return self.beam == 1 and self.temperature > 0


@dataclass
class Continuation:
    """A text that is being generated: its prompt, and the tokens after it so far."""

    line: int  # its number, which seeds sampling
    prompt: list[int]
    limit: int  # tokens that may be generated
    rank: int = 0  # among the answers to one line
    ids: list[int] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)  # log-probability of each, and of the end

    @property
    def reached_end(self) -> bool:
        """True if the end was generated, which is not among the ids."""
        return len(self.steps) > len(self.ids)


class TextStreamer:
    """Passes a text on piece by piece as its tokens come, and nothing that may still change."""

    def __init__(
        self, decode: Callable[[list[int]], str], stop: str, on_text: Callable[[str], None]
    ):
        self.decode, self.stop, self.on_text = decode, stop, on_text
        self.ids: list[int] = []
        self.sent = 0  # characters

    def put(self, token: int) -> None:
        """Take the next token."""
        self.ids.append(token)
        text = self.decode(self.ids)
        if self.stop:
            text = text.partition(self.stop)[0]
        held = max((n for n in range(len(self.stop)) if text.endswith(self.stop[:n])), default=0)
        self.finish(text[: len(text) - held])

    def finish(self, text: str) -> None:
        """Pass on what is still missing of a text."""
        if len(text) > self.sent:
            self.on_text(text[self.sent :])
            native.doubt()  # it may have changed the model
            self.sent = len(text)


class TextGenerator:
    """Continues prompts with a causal language model and its tokenizer, by its checkpoint's rules.

    Args:
        model: causal language model
        tokenizer: its tokenizer
        vocab: number of logits
        window: maximum number of tokens that the model reads at once
        rules: generation_config.json beyond the options; None for a model trained with Regard
        device: device that the model is on
    """

    def __init__(
        self,
        model: Writer,
        tokenizer: Tokenizer,
        vocab: int,
        window: int,
        *,
        rules: Any = None,
        device: torch.device | str = "cpu",
    ):
        self.model, self.tokenizer, self.window = model, tokenizer, window
        self.device = torch.device(device)
        if rules is not None:
            rules = {"eos_token_id": list(tokenizer.ends), **rules}
        self.rules = GenerationConfig(rules, tokenizer.eos, vocab)
        self.ends = self.rules.all_ends
        self.never = [*range(tokenizer.rows, vocab), *tokenizer.never]  # most have no spelling

    def limit(self, prompt: Sequence[int], max_length: int | None) -> int:
        """Number of tokens that may follow a prompt, which a checkpoint's own limit counts."""
        longest = self.rules.longest
        if max_length is None and longest is None:
            self.rules.tell(f"no max_length is given, so up to {NEW_TOKENS} tokens follow, not 20")
        if max_length is not None or longest is None:
            return max_length or NEW_TOKENS
        if longest <= len(prompt):
            raise UsageError(
                f"a text of {len(prompt)} tokens has no room to go on, as the model's own "
                f"max_length is {longest}; set max_length="
            )
        return longest - len(prompt)

    def generate(
        self,
        texts: list[Continuation],
        options: GenerateOptions,
        *,
        stop: str = "",
        streamer: TextStreamer | None = None,
        batch_tokens: int = 16_384,
        batch_rows: int = 64,
    ) -> list[list[Continuation]]:
        """Continue texts in batches of so many tokens and rows; the best of each come first.

        Args:
            texts: prompts
            options: how to search or sample
            stop: text that ends an answer
            streamer: gets pieces of text as they are written
            batch_tokens: maximum number of tokens in a batch
            batch_rows: maximum number of prompts in a batch
        """
        workers = torch.get_num_threads() if self.device.type == "cpu" else 1
        return in_batches(
            texts,
            [len(text.prompt) + text.limit for text in texts],
            lambda some: self._in_turns(some, options, stop, streamer),
            tokens=batch_tokens,
            rows=min(batch_rows, max(1, -(-len(texts) // workers))),
            workers=workers,
        )

    def _in_turns(
        self,
        texts: list[Continuation],
        options: GenerateOptions,
        stop: str,
        streamer: TextStreamer | None,
    ) -> list[list[Continuation]]:
        """Continue the texts of a batch.

        What does not fit into the model's window is generated in several turns, each of which reads
        the last of what there is again.
        """
        finished: list[list[Continuation]] = [[] for _ in texts]
        waiting, turn, now = list(enumerate(texts)), 0, options
        while waiting:
            lines = [
                text.line if turn == 0 else 1000 * text.line + text.rank for _, text in waiting
            ]
            some = [text for _, text in waiting]
            continued = self._turn(some, now, lines, stop, streamer)
            later = []
            for (place, _), answers in zip(waiting, continued, strict=True):
                for text in answers:
                    over = text.reached_end or self._is_over(text.ids, stop)
                    if over or len(text.ids) >= text.limit:
                        finished[place].append(text)
                    else:
                        later.append((place, text))
            waiting, turn = later, turn + 1
            now = replace(options, n_best=1, seed=mix(options.seed, turn))
        return finished

    def _turn(
        self,
        texts: list[Continuation],
        options: GenerateOptions,
        lines: list[int],
        stop: str,
        streamer: TextStreamer | None,
    ) -> list[list[Continuation]]:
        """Continue some texts as far as the window reaches."""
        prompts, room = [], []
        for text in texts:
            left = text.limit - len(text.ids)
            read = max(self.window - left + 1, self.window // 2)
            prompts.append((text.prompt + text.ids)[-read:])
            room.append(min(left, self.window - len(prompts[-1]) + 1))
            if options.beam > 1 and room[-1] < left:
                raise UsageError(
                    f"max_length={text.limit} does not fit into the {self.window} tokens that "
                    f"the model reads at once; with a beam choose up to {self.window // 2}"
                )
        written = [list(text.ids) for text in texts]

        def on_token(number: int, token: int) -> bool:
            written[number].append(token)
            over = self._is_over(written[number], stop)
            if streamer is not None and token not in self.ends:
                streamer.put(token)
            return over

        one = options.beam == options.n_best == 1
        rows = [np.asarray(row, dtype=np.int64) for row in prompts]
        ids, lengths = (x.to(self.device) for x in pad(rows, self.tokenizer.pad))
        constraints = replace(
            self.rules.constraints,
            begin=ids.gather(1, lengths.unsqueeze(1) - 1),
            adjust=self._adjust(texts, room, options.repetition_penalty),
            max_length=room,
            lines=lines,
            on_token=on_token if one and (stop or streamer is not None) else None,
        )
        hypotheses = decode(self.model, ids, lengths, options, constraints)
        return [
            [
                replace(text, rank=text.rank + k, ids=text.ids + h.ids, steps=text.steps + h.steps)
                for k, h in enumerate(some)
            ]
            for text, some in zip(texts, hypotheses, strict=True)
        ]

    def _adjust(
        self, texts: list[Continuation], room: list[int], repetition_penalty: float
    ) -> list[Adjust]:
        """Changes of the logits of some texts, which may get so many tokens now."""
        forbidden: list[Adjust] = [forbid(*self.never)] if self.never else []
        # none but the last of several turns comes to an end
        limits = [
            n if len(text.ids) + n >= text.limit else -1
            for text, n in zip(texts, room, strict=True)
        ]
        given = RuleInputs(
            self.ends,
            [text.prompt + text.ids for text in texts],
            [text.prompt for text in texts],
            limits,
            [len(text.ids) for text in texts],
        )
        return [*forbidden, *self.rules.changes(given, repetition_penalty=repetition_penalty)]

    def _is_over(self, ids: list[int], stop: str) -> bool:
        """True if a text ends here, by a token or by the text that was to stop it."""
        if not ids:
            return False
        if ids[-1] in self.ends:
            return True
        # every token spells a byte or more, so that a new stop lies among the last
        return bool(stop) and stop in self.tokenizer.decode(ids[-len(stop.encode()) - 8 :])

    def completion(self, prompt: list[int], ids: list[int]) -> str:
        """Text that follows a prompt, with the space between them."""
        before = prompt[-16:]
        given, whole = self.tokenizer.decode(before), self.tokenizer.decode([*before, *ids])
        return whole[len(given) :] if whole.startswith(given) else self.tokenizer.decode(ids)
