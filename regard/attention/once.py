"""What all layers of a model ask for with the same words, computed once a forward pass."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

T = TypeVar("T")
_PASS: ContextVar[dict[tuple, tuple[Any, Any]] | None] = ContextVar("pass", default=None)


@contextmanager
def one_pass() -> Iterator[None]:
    """Remember answers while the block runs, and no longer: what they are made of may change."""
    if torch.compiler.is_compiling():  # it sees for itself what is asked twice
        yield
        return
    token = _PASS.set({})
    try:
        yield
    finally:
        _PASS.reset(token)


def once(make: Callable[[], T], *of: object, **by: object) -> T:
    """Return make(), from memory if it was made `of` the same objects and `by` equal values."""
    known = _PASS.get()
    if known is None or torch.compiler.is_compiling():
        return make()
    key = (*map(id, of), *by.items())
    if key not in known:
        known[key] = make(), of  # held, so that no other object gets their numbers
    return known[key][0]
