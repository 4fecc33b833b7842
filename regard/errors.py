"""Errors of use, told in one line, and messages to stderr."""

import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache
from typing import Any, TypeVar

T = TypeVar("T")
_MAX_MESSAGE = 3000  # letters of a message


def printable(text: str) -> str:
    """Return a text as one line that is safe to print to a terminal.

    Control characters, lone surrogates and marks of direction are escaped as in Python.
    """
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").replace("\n", " ").replace("\t", " ")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


# what gives commands to a terminal, or changes in which order a line is shown
_COMMANDS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def without_commands(text: str) -> str:
    """Return a text for a terminal: escaped is only what would not be shown but obeyed."""
    return _COMMANDS.sub(lambda found: ascii(found[0])[1:-1], text)


def as_json(value: Any, default: Callable[[Any], Any] = str) -> str:
    """Return a line of JSON as UTF-8 has it, with what a terminal would obey as \\uXXXX."""
    line = json.dumps(value, ensure_ascii=False, default=default)
    return _COMMANDS.sub(lambda found: f"\\u{ord(found[0]):04x}", line)


class UsageError(Exception):
    """An error of use, told in one line: the value, what was expected, and the remedy."""

    def __init__(self, message: str):
        """Keep the message as one printable line, shortened if it quotes too much."""
        line = printable(str(message))
        super().__init__(line if len(line) <= _MAX_MESSAGE else f"{line[:2000]} ... {line[-900:]}")


class BrokenInput(UsageError):
    """An input that cannot be read; whoever reads many may be told to leave it out."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the sentence that suggests the nearest of the names, or nothing."""
    close = get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Look a name up in a table, or refuse it with the nearest match."""
    if name in table:
        return table[name]
    names = sorted(filter(None, table))
    raise UsageError(
        f"unknown {kind} '{name!s:.60}'; choose from {', '.join(names)}.{nearest(str(name), names)}"
    )


@cache
def log_once(message: str) -> None:
    """Print a message to stderr unless this process has done so before."""
    log(message)


def log(message: str, quiet: bool = False) -> None:
    """Print a message to stderr, beside the results."""
    if not quiet:
        print("\n".join(map(printable, message.split("\n"))), file=sys.stderr, flush=True)
