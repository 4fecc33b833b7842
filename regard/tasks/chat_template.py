"""A folder's own chat template: found, rendered by a child process, and made ids."""

import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.tasks.chat import Mark, Message, together

LONGEST_START = 60.0  # seconds that the child process may take to begin
LONGEST = 3.0  # and to render a conversation
LONGEST_MISTAKE = 200


class Renderer:
    """A child process that renders templates; it is ended when one takes too long."""

    def __init__(self) -> None:
        self.child: subprocess.Popen[str] | None = None
        self.lock = threading.Lock()

    def __call__(self, template: str, messages: Sequence[Message], tokens: dict[str, str]) -> str:
        """Return a conversation as the template writes it."""
        said = [message._asdict() for message in messages]
        asked = json.dumps({"template": template, "messages": said, "tokens": tokens})
        with self.lock:
            answer = self._ask(self._begun(), asked, LONGEST)
        if answer is None:
            raise UsageError(
                f"the folder's chat template takes over {LONGEST:.0f} s; choose template="
            )
        told = json.loads(answer)
        if "mistake" in told:
            words = "".join(c if c.isprintable() else " " for c in told["mistake"])
            raise UsageError(
                f"the folder's chat template: {words[:LONGEST_MISTAKE]}; or choose template=plain"
            )
        return told["text"]

    def _begun(self) -> "subprocess.Popen[str]":
        """Return the child process, started if there is none."""
        if self.child is not None and self.child.poll() is None:
            return self.child
        pipes = {name: subprocess.PIPE for name in ("stdin", "stdout")}
        self.child = subprocess.Popen(
            [sys.executable, "-P", str(Path(__file__).with_name("render.py"))],
            **pipes,  # type: ignore[arg-type]
            stderr=subprocess.DEVNULL,
            text=True,
            encoding="utf-8",
        )
        began = self._ask(self.child, None, LONGEST_START)
        if began is None or began.strip() != "ready":
            self.child.kill()
            raise UsageError(
                "the folder's chat template needs jinja2 3.1.6 or newer; pip install -U jinja2, "
                "or choose template=plain"
            )
        return self.child

    def _ask(self, child: "subprocess.Popen[str]", line: str | None, limit: float) -> str | None:
        """Return the next line of the child, or None if it took too long or has ended."""
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


def encode_own(messages: Sequence[Message], told: dict[str, Any], tokenizer: Any) -> list[int]:
    """Write a conversation as ids by a folder's own template.

    What the template writes is read with its special tokens; those that a message spells out are
    text like any other.
    """
    template, tokens = told["template"], told["tokens"]
    marks = sorted(tokenizer.special_tokens, key=len, reverse=True)
    if not any(mark in content for _, content in messages for mark in marks):
        return tokenizer.encode(render(template, messages, tokens), specials=True)
    said = "".join(message.content for message in messages)
    breaker = next((c for c in map(chr, range(0xE000, 0xF900)) if c not in said), chr(0xFFFF))

    def broken(text: str) -> str:
        for mark in marks:
            text = text.replace(mark, mark[:1] + breaker + mark[1:])
        return text

    text = render(template, [Message(role, broken(said)) for role, said in messages], tokens)
    ids: list[int] = []
    for part in together(_marked(text, marks), tokenizer):
        ids += [part] if isinstance(part, int) else tokenizer.encode(part.replace(breaker, ""))
    return ids


def _marked(text: str, marks: Sequence[str]) -> list[str]:
    """Part a text at its special tokens."""
    parts: list[str] = [text]
    for mark in marks:
        parts = [
            piece
            for part in parts
            for piece in ([part] if isinstance(part, Mark) else _around(part, mark))
        ]
    return [part for part in parts if part]


def _around(text: str, mark: str) -> list[str]:
    first, *rest = text.split(mark)
    return [first, *(piece for one in rest for piece in (Mark(mark), one))]
