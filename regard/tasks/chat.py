"""Conversations as text: how rounds are written down for a model that only goes on writing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from regard.errors import UsageError, lookup

ROLES = ("system", "user", "assistant")
MOST_MESSAGES = 10_000


class Message(NamedTuple):
    """What somebody said."""

    role: str
    content: str


class Mark(str):
    """A special token of a template, which no message can spell."""


# The parts of a conversation up to where the assistant is to speak.
Render = Callable[[Sequence[Message]], list[str]]


@dataclass(frozen=True)
class Template:
    """A way to write a conversation down, and the text that ends an answer."""

    render: Render
    stop: str


def plain(messages: Sequence[Message]) -> list[str]:
    """Write every round on lines that begin with who speaks."""
    said = [f"{message.role.capitalize()}: {message.content}\n" for message in messages]
    return ["".join(said) + "Assistant:"]


def chatml(messages: Sequence[Message]) -> list[str]:
    """Put each message between marks, as Qwen and many others do."""
    parts: list[str] = []
    for role, content in messages:
        parts += [Mark("<|im_start|>"), f"{role}\n{content}", Mark("<|im_end|>"), "\n"]
    return [*parts, Mark("<|im_start|>"), "assistant\n"]


def llama2(messages: Sequence[Message]) -> list[str]:
    """Put what is asked between [INST] marks, as LLaMA 2 and Mistral do."""
    parts: list[str] = []
    system = ""
    for role, content in messages:
        if role == "system":
            system = f"<<SYS>>\n{content}\n<</SYS>>\n\n"
        elif role == "user":
            parts += [Mark("<s>"), f"[INST] {system}{content} [/INST]"]
            system = ""
        else:
            parts += [f" {content} ", Mark("</s>")]
    return parts


def alpaca(messages: Sequence[Message]) -> list[str]:
    """Write instructions and responses under headings."""
    headings = {"user": "### Instruction:\n", "assistant": "### Response:\n", "system": ""}
    said = [f"{headings[message.role]}{message.content}\n\n" for message in messages]
    return ["".join(said) + "### Response:\n"]


TEMPLATES = {
    "plain": Template(plain, "\nUser:"),
    "chatml": Template(chatml, "<|im_end|>"),
    "llama2": Template(llama2, "</s>"),
    "alpaca": Template(alpaca, "\n### Instruction:"),
}


def stop_of(template: str | None) -> str:
    """Return the text that ends an answer; a folder's own template ends by its end token."""
    found = TEMPLATES.get(template or "")
    return found.stop if found else ""


def read_messages(given: Any, where: str = "messages") -> list[Message]:
    """Make messages of what a user gave, or say what is wrong with it."""
    if not isinstance(given, list) or not 0 < len(given) <= MOST_MESSAGES:
        raise UsageError(f"{where}: expected a list of messages")
    found = []
    for number, one in enumerate(given, 1):
        role, content = (one.get(key) if isinstance(one, dict) else None for key in Message._fields)
        if role not in ROLES or not isinstance(content, str):
            raise UsageError(
                f"{where}: message {number} is {one!r:.60}; expected a role ({', '.join(ROLES)}) "
                "and a content that is text"
            )
        found.append(Message(role, content))
    if found[-1].role == "assistant":
        raise UsageError(
            f"{where}: the assistant has the last word; end with a message of the user"
        )
    return found


def encode(messages: Sequence[Message], template: str, tokenizer: Any) -> list[int]:
    """Write a conversation as token ids; only the template's own marks become special tokens."""
    ids: list[int] = []
    for part in together(lookup("template", template, TEMPLATES).render(messages), tokenizer):
        ids += [part] if isinstance(part, int) else tokenizer.encode(part)
    return ids


def together(parts: Iterable[str], tokenizer: Any) -> list[int | str]:
    """Look up the marks that are tokens; the rest is text, joined between them."""
    found: list[int | str] = []
    for part in parts:
        number = mark_of(part, tokenizer) if isinstance(part, Mark) else None
        if number is not None:
            found.append(number)
        elif found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(str(part))
    return found


def mark_of(mark: str, tokenizer: Any) -> int | None:
    """Return the number of a special token, if the tokenizer has it."""
    return tokenizer.token_to_id(mark)
