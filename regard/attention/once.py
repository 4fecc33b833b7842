"""A cache for one forward pass: what all layers of a model need alike is computed once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_PASS: ContextVar[dict[tuple, tuple[Any, Any]] | None] = ContextVar("pass", default=None)


@contextmanager
def one_pass() -> Iterator[None]:
    """Keep what `once` computes while the block runs, and no longer: its inputs may change."""
    if torch.compiler.is_compiling():  # it finds common subexpressions by itself
        yield
        return
    token = _PASS.set({})
    try:
        yield
    finally:
        _PASS.reset(token)


def once(make: Callable[[], T], *of: object, **by: object) -> T:
    """Return make(), cached for the same objects `of` and equal values `by`."""
    known = _PASS.get()
    if known is None or torch.compiler.is_compiling():
        return make()
    key = (*map(id, of), *by.items())
    if key not in known:
        known[key] = make(), of  # held, so that no other object gets their numbers
    return known[key][0]
