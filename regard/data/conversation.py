"""Conversations as token ids: chat templates, built in or of a checkpoint's own."""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError, lookup

_ROLES = ("system", "user", "assistant")
_MAX_MESSAGES = 10_000
OWN = "own"  # the name of a checkpoint's own template
_START_TIMEOUT = 60.0  # seconds that the rendering process may take to begin
RENDER_TIMEOUT = 3.0  # and to render a conversation
_MAX_ERROR = 200  # characters of a template's error that are shown


class Message(NamedTuple):
    """What somebody said."""

    role: str
    content: str


class SpecialToken(str):
    """A special token of a template, which no message can spell."""


# The parts of a conversation up to where the assistant is to speak.
Render = Callable[[Sequence[Message]], list[str]]


@dataclass(frozen=True)
class ChatTemplate:
    """A way to write a conversation down, the text that ends an answer, and how one is written."""

    render: Render
    stop: str
    answer: Callable[[str], list[str]] = lambda content: [content]  # after what was rendered


def plain(messages: Sequence[Message]) -> list[str]:
    """Write every round on lines that begin with who speaks."""
    said = [f"{message.role.capitalize()}: {message.content}\n" for message in messages]
    return ["".join(said) + "Assistant:"]


def chatml(messages: Sequence[Message]) -> list[str]:
    """Put each message between special tokens, as Qwen and many others do."""
    start, end = SpecialToken("<|im_start|>"), SpecialToken("<|im_end|>")
    parts: list[str] = []
    for role, content in messages:
        parts += [start, f"{role}\n{content}", end, "\n"]
    return [*parts, start, "assistant\n"]


def llama2(messages: Sequence[Message]) -> list[str]:
    """Put instructions between [INST] and [/INST], as LLaMA 2 and Mistral do."""
    parts: list[str] = []
    system = ""
    for role, content in messages:
        if role == "system":
            system = f"<<SYS>>\n{content}\n<</SYS>>\n\n"
        elif role == "user":
            parts += [SpecialToken("<s>"), f"[INST] {system}{content} [/INST]"]
            system = ""
        else:
            parts += [f" {content} ", SpecialToken("</s>")]
    return parts


def alpaca(messages: Sequence[Message]) -> list[str]:
    """Write instructions and responses under headings."""
    headings = {"user": "### Instruction:\n", "assistant": "### Response:\n", "system": ""}
    said = [f"{headings[message.role]}{message.content}\n\n" for message in messages]
    return ["".join(said) + "### Response:\n"]


TEMPLATES = {
    "plain": ChatTemplate(plain, "\nUser:", lambda content: [f" {content}"]),
    "chatml": ChatTemplate(
        chatml, "<|im_end|>", lambda content: [content, SpecialToken("<|im_end|>")]
    ),
    "llama2": ChatTemplate(llama2, "</s>", lambda content: [f" {content} ", SpecialToken("</s>")]),
    "alpaca": ChatTemplate(alpaca, "\n### Instruction:"),
}


def stop_text(template: str) -> str:
    """Text that ends an answer; a checkpoint's own template ends by its end token."""
    return TEMPLATES[template].stop if template in TEMPLATES else ""


def is_message(given: Any) -> bool:
    """True if this is meant for a message of a conversation."""
    return isinstance(given, dict) and not given.keys().isdisjoint(Message._fields)


def read_messages(given: Any, where: str = "messages", *, answered: bool = False) -> list[Message]:
    """Conversation that a user gave as dicts; refuses a malformed one.

    One to learn from is `answered`: some of it is said by the assistant, who may end it.
    """
    if not isinstance(given, list) or not 0 < len(given) <= _MAX_MESSAGES:
        raise UsageError(f"{where}: expected a list of messages")
    messages = []
    for number, one in enumerate(given, 1):
        role, content = (one.get(key) if isinstance(one, dict) else None for key in Message._fields)
        if role not in _ROLES or not isinstance(content, str):
            raise UsageError(
                f"{where}: message {number} is {one!r:.60}; expected a role ({', '.join(_ROLES)}) "
                "and a content that is text"
            )
        messages.append(Message(role, content))
    if answered:
        if not any(message.role == "assistant" for message in messages):
            raise UsageError(f"{where}: the assistant says nothing, so there is nothing to learn")
    elif messages[-1].role == "assistant":
        raise UsageError(
            f"{where}: the assistant has the last word; end with a message of the user"
        )
    return messages


def encode_truncated(
    messages: Sequence[Message],
    template: str,
    tokenizer: Tokenizer,
    room: int,
    *,
    begin: Sequence[int] = (),
    own: Mapping[str, Any] | None = None,
) -> list[int]:
    """Encode a conversation, without its oldest rounds if there is no room for all.

    `begin` is put before what a built-in template writes, unless that begins so; `own` is what
    `encode_own` takes, for template="own".
    """
    rounds = list(messages)
    while True:
        if template == OWN:
            assert own is not None
            ids = encode_own(rounds, own, tokenizer)
        else:
            ids = encode(rounds, template, tokenizer)
            if ids[: len(begin)] != list(begin):
                ids = [*begin, *ids]
        oldest = next((i for i, m in enumerate(rounds[:-1]) if m.role != "system"), None)
        if len(ids) <= room or oldest is None:
            return ids
        end = oldest + 1
        while template == OWN and end < len(rounds) - 1 and rounds[end].role != "user":
            end += 1  # a template may insist on turns
        del rounds[oldest:end]


def encode(messages: Sequence[Message], template: str, tokenizer: Tokenizer) -> list[int]:
    """Encode a conversation; only the template's own special tokens become such."""
    parts = lookup("template", template, TEMPLATES).render(messages)
    return _encode_parts(parts, tokenizer, tokenizer.encode)


class Conversation(str):
    """The messages of a conversation to learn from, as JSON."""

    def messages(self) -> list[Message]:
        """Messages."""
        return [Message(*one) for one in json.loads(self)]

    @classmethod
    def of(cls, given: Any, where: str) -> "Conversation":
        """Check and keep the messages of a JSON line."""
        return cls(json.dumps(read_messages(given, where, answered=True), ensure_ascii=False))


def write_out(text: str, template: str) -> str:
    """Text as it is, or a conversation as a template writes it."""
    if not isinstance(text, Conversation):
        return text
    said = text.messages()
    last = [] if said[-1].role != "assistant" else [said.pop()]
    chosen = lookup("template", template, TEMPLATES)
    return "".join([*chosen.render(said), *(p for m in last for p in chosen.answer(m.content))])


def encode_answers(
    conversation: Conversation, template: str, tokenizer: Tokenizer, context: int
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield for each answer the ids that the assistant reads before it, and those it is to write.

    What is read is what `run` would give it to read, without the oldest rounds if there is no room
    for all in a context.
    """
    chosen = lookup("template", template, TEMPLATES)
    messages = conversation.messages()
    for place, message in enumerate(messages):
        if message.role != "assistant":
            continue
        before, parts = messages[:place], chosen.answer(message.content)
        whole = _encode_parts([*chosen.render(before), *parts], tokenizer, tokenizer.encode)
        prompt = encode(before, template, tokenizer)
        if whole[: len(prompt)] == prompt:
            written = whole[len(prompt) :]
        else:  # tokens do not end where the prompt does
            written = _encode_parts(parts, tokenizer, tokenizer.encode)
        written = [*written, *([] if written[-1:] == [tokenizer.eos] else [tokenizer.eos])]
        room = max(context - len(written), context // 2)
        yield encode_truncated(before, template, tokenizer, room, begin=[tokenizer.bos]), written


def _encode_parts(
    parts: Iterable[str], tokenizer: Tokenizer, encode: Callable[[str], list[int]]
) -> list[int]:
    """Look up the special tokens; what is text between two of them is encoded together."""
    joined: list[int | str] = []
    for part in parts:
        number = tokenizer.token_to_id(part) if isinstance(part, SpecialToken) else None
        if number is not None:
            joined.append(number)
        elif joined and isinstance(joined[-1], str):
            joined[-1] += part
        else:
            joined.append(str(part))
    ids: list[int] = []
    for part in joined:
        ids += [part] if isinstance(part, int) else encode(part)
    return ids


# A checkpoint's own template


class Renderer:
    """A child process that renders templates; it is killed when one takes too long."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def __call__(
        self, template: str, messages: Sequence[Message], tokens: Mapping[str, str]
    ) -> str:
        """Conversation as the template writes it."""
        said = [message._asdict() for message in messages]
        request = json.dumps({"template": template, "messages": said, "tokens": tokens})
        with self.lock:
            line = self._ask(self._started(), request, RENDER_TIMEOUT)
        if line is None:
            raise UsageError(
                f"the folder's chat template takes over {RENDER_TIMEOUT:.0f} s; choose template="
            )
        answer = json.loads(line)
        if "error" in answer:
            words = "".join(c if c.isprintable() else " " for c in answer["error"])
            raise UsageError(
                f"the folder's chat template: {words[:_MAX_ERROR]}; or choose template=plain"
            )
        return answer["text"]

    def _started(self) -> "subprocess.Popen[str]":
        """Child process, started if there is none."""
        if self.child is not None and self.child.poll() is None:
            return self.child
        self.child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("render_chat.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        ready = self._ask(self.child, None, _START_TIMEOUT)
        if ready is None or ready.strip() != "ready":
            self.child.kill()
            raise UsageError(
                "the folder's chat template needs jinja2 3.1.6 or newer; pip install -U jinja2, "
                "or choose template=plain"
            )
        return self.child

    def _ask(self, child: "subprocess.Popen[str]", line: str | None, limit: float) -> str | None:
        """Next line of the child, or None if it took too long or has ended."""
        assert child.stdin is not None and child.stdout is not None
        timer = threading.Timer(limit, child.kill)
        timer.daemon = True
        timer.start()
        try:
            if line is not None:
                child.stdin.write(line + "\n")
                child.stdin.flush()
            if answer := child.stdout.readline():
                return answer
        except OSError:
            pass
        finally:
            timer.cancel()
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            with suppress(OSError):
                pipe.close()
        return None


render = Renderer()


def encode_own(
    messages: Sequence[Message], own: Mapping[str, Any], tokenizer: Tokenizer
) -> list[int]:
    """Encode a conversation by a checkpoint's own template, with the special tokens it may write.

    What the template writes is read with its special tokens; those that a message spells out are
    text like any other.
    """
    template, tokens = own["template"], own["tokens"]
    special = sorted(tokenizer.special_tokens, key=len, reverse=True)
    if not any(token in content for _, content in messages for token in special):
        return tokenizer.encode(render(template, messages, tokens), specials=True)
    said = "".join(message.content for message in messages)
    breaker = next((c for c in map(chr, range(0xE000, 0xF900)) if c not in said), chr(0xFFFF))

    def broken(text: str) -> str:
        for token in special:
            text = text.replace(token, token[:1] + breaker + token[1:])
        return text

    text = render(template, [Message(role, broken(said)) for role, said in messages], tokens)
    parts: list[str] = [text]
    for token in special:
        parts = [piece for part in parts for piece in _split_at(part, token)]
    return _encode_parts(
        filter(None, parts), tokenizer, lambda part: tokenizer.encode(part.replace(breaker, ""))
    )


def _split_at(text: str, token: str) -> list[str]:
    """Split a text at a special token, which is kept."""
    if isinstance(text, SpecialToken):
        return [text]
    first, *rest = text.split(token)
    return [first, *(piece for part in rest for piece in (SpecialToken(token), part))]
