"""Generation by a language model: texts continued, conversations answered, both as they come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.attention.watch import watch
from regard.data.conversation import (
    OWN,
    TEMPLATES,
    Message,
    encode_truncated,
    read_messages,
    stop_text,
)
from regard.data.documents import encode_running
from regard.data.tokenizer import Tokenizer
from regard.data.windows import spans_of
from regard.decode.generate import (
    NEW_TOKENS,
    REPLACEMENT,
    Continuation,
    TextGenerator,
    TextStreamer,
)
from regard.errors import UsageError, lookup
from regard.modalities.text import TEXT
from regard.modalities.tokens import text_keys
from regard.settings import setting
from regard.tasks.frame.answers import Written
from regard.tasks.frame.question import Question
from regard.tasks.parts import OnText, Predictor, V
from regard.tasks.text.language_modelling import (
    LanguageCodec,
    LanguageRun,
    QuantisedRun,
    span_loss,
)
from regard.viewer.picture import Picture
from regard.viewer.settings import LookSettings

Prompt = str | list[Any]  # a text to continue, or the messages of a conversation
_LOOKED_AT = 24  # tokens that are generated to be looked at, unless told


@dataclass(frozen=True)
class LanguageLook(LookSettings, LanguageRun):
    """What look can be told, beside how a text is continued."""

    max_length: int | None = setting(
        _LOOKED_AT, "maximum number of new tokens", min=1, max=1_000_000, group="decoding"
    )


class Completer(Predictor[Written, LanguageRun, LanguageLook, Prompt]):
    """Continues texts token by token, and answers conversations."""

    Settings = QuantisedRun
    Look = LanguageLook
    from_nothing = True

    def __init__(self, model: nn.Module, codec: LanguageCodec, config: Mapping[str, Any]):
        super().__init__(model, codec, config)
        self.tokenizer: Tokenizer = codec.tokenizer
        # tokens that the model reads at once
        self.window: int = codec.context or self.model.config.max_length
        vocab, rules = self.model.config.vocab, config.get("generation", {}).get("rules")
        # what continues prompts, by the rules of the checkpoint
        self.generator = TextGenerator(
            self.model, self.tokenizer, vocab, self.window, rules=rules, device=self.device
        )
        penalty = {"repetition_penalty"} & set(self.generator.rules.rules)
        self.defaults |= {key: self.generator.rules.rules[key] for key in penalty}

    def check(self, settings: V) -> V:
        """Settings with a chat template, or a refusal of those that contradict each other."""
        if not isinstance(settings, LanguageRun):  # of an evaluation
            return settings
        settings.check()
        own = {} if self.codec.chat is None else {OWN: None}
        template = settings.template or next(iter([*own, self.codec.template or "plain"]))
        lookup("template", template, {**TEMPLATES, **own})
        return replace(settings, template=template)

    def predict(
        self,
        inputs: list[Prompt],
        settings: LanguageRun,
        *,
        first: int = 0,
        on_text: OnText | None = None,
    ) -> list[Written]:
        """Continue texts, or answer conversations given as lists of messages.

        `first` is the number of the first line, which seeds sampling. `on_text` is given the answer
        to a single text piece by piece as it is generated.
        """
        if settings.forced:
            return [self.score_text(TEXT.check(text), settings) for text in inputs]
        if any(isinstance(text, list) for text in inputs):
            settings = replace(settings, chat=True)
        prompts = [self.prompt(given, settings) for given in inputs]
        texts = [
            Continuation(first + i, ids, self.generator.limit(ids, settings.max_length))
            for i, (_, ids) in enumerate(prompts)
        ]
        stop, streamer = self.stop(settings), None
        if on_text is not None:
            ids = texts[0].prompt
            streamer = TextStreamer(lambda new: self.shown(ids, new, settings), stop, on_text)
        continued = self.generator.generate(
            texts,
            settings,
            stop=stop,
            streamer=streamer,
            batch_tokens=settings.batch_tokens,
            batch_rows=settings.batch_rows,
        )
        answers = [
            self.written(given if settings.echo else "", some, settings)
            for (given, _), some in zip(prompts, continued, strict=True)
        ]
        if streamer is not None:
            streamer.finish(answers[0].completion)
        return answers

    def prompt(self, given: Prompt, settings: LanguageRun) -> tuple[str, list[int]]:
        """What to show of an input before the answer, and the tokens to continue."""
        if not isinstance(given, list) and not settings.chat:
            return given, self.encode(TEXT.check(given))
        messages = [Message("user", given)] if isinstance(given, str) else read_messages(given)
        if settings.system and messages[0].role != "system":
            messages = [Message("system", settings.system), *messages]
        return "", self.encode_conversation(messages, settings)

    def encode(self, text: str) -> list[int]:
        """Encode a text to continue, as the model was trained to read it."""
        if self.codec.running:
            # such a model knows no begin, but always stands after something
            ids = [i for part in encode_running(self.tokenizer, text or "\n") for i in part]
        else:
            ids = self.tokenizer.frame(self.tokenizer.encode(text), "prompt")
        return ids or [self.tokenizer.bos]

    def encode_conversation(self, messages: list[Message], settings: LanguageRun) -> list[int]:
        """Encode a conversation; its oldest rounds are dropped if there is no room."""
        room = self.window - (settings.max_length or NEW_TOKENS)
        begins = not self.codec.running and self.encode("")[:1] == [self.tokenizer.bos]
        return encode_truncated(
            messages,
            str(settings.template),
            self.tokenizer,
            max(room, self.window // 2),
            begin=[self.tokenizer.bos] if begins else [],
            own=self.codec.chat,
        )

    def stop(self, settings: LanguageRun) -> str:
        """The text that ends an answer."""
        return settings.stop or (stop_text(str(settings.template)) if settings.chat else "")

    def shown(self, prompt: list[int], ids: list[int], settings: LanguageRun) -> str:
        """What a user sees of an answer: no half characters, no space around a reply."""
        text = self.generator.completion(prompt, ids).rstrip(REPLACEMENT)
        return text.strip() if settings.chat else text

    def written(self, given: str, texts: list[Continuation], settings: LanguageRun) -> Written:
        """The answers to one prompt, up to the text that ends them."""
        divisor = settings.divisor
        stop = self.stop(settings)
        answers: list[Written] = []
        for text in texts:
            completion = self.shown(text.prompt, text.ids, settings)
            completion = completion.partition(stop)[0] if stop else completion
            total = sum(text.steps)
            answers.append(Written(given, completion, total / divisor(len(text.steps)), total))
        answers[0].others = answers[1:]
        return answers[0]

    def stream(
        self, given: Prompt, settings: LanguageRun, on_text: OnText, *, first: int = 0
    ) -> Written:
        """Answer one input, and pass its text on piece by piece while it is generated."""
        if settings.n_best > 1 or settings.beam > 1:
            raise UsageError("only one answer can be streamed; leave n_best and beam at 1")
        return self.predict([given], settings, first=first, on_text=on_text)[0]

    def row_loss(self, ids: Sequence[int], context: int, tokens: int) -> tuple[float, int]:
        """The summed loss of a row of ids, and of how many tokens."""
        row = np.asarray(ids, dtype=np.int64)
        return span_loss(self.model, row, spans_of(np.array([0, len(row)]), context), tokens)

    def score_text(self, text: str, settings: LanguageRun) -> Written:
        """How likely the model finds a given text."""
        ids = self.encode(text)
        ids = ids if self.codec.running else [*ids, self.tokenizer.eos]
        total, count = self.row_loss(ids, self.window, settings.batch_tokens)
        return Written(text, "", -total / max(1, count), -total)

    # Looking

    @torch.inference_mode()
    def maps(self, ids: Sequence[int]) -> tuple[Any, Tensor]:
        """The attention of every layer and head over a text, exactly, and the logits."""
        with watch(self.model) as maps:
            logits = self.model(torch.tensor([list(ids)], device=self.device))
        return maps, logits[0]

    def _continued(self, prompt: list[int], settings: LanguageLook) -> tuple[Any, list[Any]]:
        """The best continuation of a prompt, and the others."""
        text = Continuation(0, prompt, settings.max_length or _LOOKED_AT)
        ((best, *others),) = self.generator.generate([text], settings, stop=settings.stop)
        return best, others

    def _ids_of(self, written: Any) -> list[int]:
        """The ids of a continuation, with the end if it was reached."""
        return [*written.ids, *([self.tokenizer.eos] if written.reached_end else [])]

    def answer_logprobs(
        self, given: Prompt, settings: LanguageLook, expected: Any = None
    ) -> Question:
        """A prompt with its continuation, or with forced=true the next token alone."""
        _, prompt = self.prompt(given, settings)
        vocab = self.tokenizer.rows
        ids = prompt[-self.window :]
        if not ids:
            raise UsageError("there is nothing to look at in an empty text")

        @torch.inference_mode()
        def logprobs(copies: int) -> Tensor:
            rows = torch.tensor([ids], device=self.device).expand(copies, -1)
            return self.model(rows)[..., :vocab].double().log_softmax(-1)

        more = expected
        if more is None and settings.forced:
            more = [int(logprobs(1)[0, -1].argmax())]
        elif more is None:
            more = self._ids_of(self._continued(prompt, settings)[0])
        if not more:
            raise UsageError("the model wrote nothing after this text; raise max_length")
        whole = [*prompt, *more][-self.window - 1 :]
        ids, chosen = whole[:-1], whole[1:]
        first = max(0, len(chosen) - len(more))
        tokens = self.tokenizer.pieces(ids)
        return Question(
            answer=self.tokenizer.decode(more),
            logprobs=logprobs,
            chosen=chosen,
            names=self.tokenizer.pieces,
            places=tokens,
            tokens=tokens,
            keys=text_keys(len(ids)),
            expected=more,
            reads=range(first, len(chosen)),
            first=first,
        )

    def explain(self, given: Prompt, settings: LanguageLook) -> Picture:
        """Continue a text, or only read it, and gather where the model looked."""
        from regard.viewer.text import candidate_steps, text_views

        shown, prompt = self.prompt(given, settings)
        vocab, ids = self.tokenizer.rows, prompt[-self.window :]
        others: list[Continuation] = []
        completion = ""
        if not settings.forced:
            best, others = self._continued(prompt, settings)
            completion = self.generator.completion(prompt, best.ids)
            ids = [*prompt, *self._ids_of(best)][-self.window - 1 :]
        maps, logits = self.maps(ids if settings.forced else ids[:-1])
        if settings.forced:  # the last step is what would come next
            ids = [*ids, int(logits[-1, :vocab].argmax())]
        pieces = self.tokenizer.pieces(ids)
        alternatives: list[tuple[str, float]] = []
        for other in others:
            answer = self.written(shown, [other], settings)
            alternatives.append((str(answer), answer.score))
        how = f"temperature {settings.temperature}, seed {settings.seed}"
        how = f"beam {settings.beam}" if settings.beam > 1 else how
        return Picture(
            title=shown or completion,
            views=text_views(maps, pieces[:-1], writes=pieces[1:]),
            steps=candidate_steps(
                logits.softmax(-1)[:, :vocab],
                self.tokenizer.pieces,
                candidates=settings.candidates,
                chosen=ids[1:],
                tokens=pieces[1:],
            ),
            source=shown,
            output=completion,
            alternatives=alternatives,
            note="read" if settings.forced else how,
        )
