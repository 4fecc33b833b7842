"""What goes wrong by the user's hand, said in one line."""

import sys
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")
LONGEST = 3000  # letters of a message


def printable(text: str) -> str:
    """Return a text as one line in which nothing but what can be seen reaches a terminal.

    Control characters, halves of characters and marks that turn the direction are written as
    Python writes them.
    """
    if text.isprintable():
        return text
    text = text.replace("\r\n", "\n").replace("\n", " ").replace("\t", " ")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class UsageError(Exception):
    """A user's mistake, told in one line: the value, what was expected, and the remedy."""

    def __init__(self, message: str):
        """Take the line, which may quote what a file says, however long."""
        line = printable(str(message))
        super().__init__(line if len(line) <= LONGEST else f"{line[:2000]} ... {line[-900:]}")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the sentence that suggests the nearest of the names, or nothing."""
    close = get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def lookup(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Look a name up in a table of parts, or refuse it with the nearest match."""
    if name in table:
        return table[name]
    names = sorted(table)
    raise UsageError(
        f"unknown {kind} '{name!s:.60}'; choose from {', '.join(names)}.{nearest(str(name), names)}"
    )


def log(message: str, quiet: bool = False) -> None:
    """Say something to the user beside the results."""
    if not quiet:
        print("\n".join(map(printable, message.split("\n"))), file=sys.stderr, flush=True)
