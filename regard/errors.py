"""What goes wrong by the user's hand, said in one line."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


class Mistake(Exception):
    """A user's mistake, told in one line: the value, what was expected, and the remedy."""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the sentence that suggests the nearest of the names, or nothing."""
    close = get_close_matches(name.lower(), list(names), n=1, cutoff=0.6)
    return f" Did you mean '{close[0]}'?" if close else ""


def choose(kind: str, name: str, table: Mapping[str, T]) -> T:
    """Look a name up in a table of parts, or refuse it with the nearest match."""
    if name in table:
        return table[name]
    names = sorted(table)
    raise Mistake(
        f"unknown {kind} '{name}'; choose from {', '.join(names)}.{nearest(str(name), names)}"
    )
