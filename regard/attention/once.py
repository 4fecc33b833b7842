"""A cache for one forward pass: what all layers of a model need alike is computed once."""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from typing import Any, TypeVar

import torch

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
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
    """make(), cached for the same objects `of` and equal values `by`."""
    known = _PASS.get()
    if known is None or torch.compiler.is_compiling():
        return make()
    key = (*map(id, of), *by.items())
    if key not in known:
        known[key] = make(), of  # held, so that no other object gets their numbers
    return known[key][0]


def cached_by_size(maxsize: int) -> Callable[[F], F]:
    """Decorator: lru_cache of a function of sizes, left out where sizes are symbols of an export.

    What is made while a program is exported is part of that, and no tensor to keep.
    """

    def decorate(f: F) -> F:
        cached: Any = lru_cache(maxsize)(f)

        @wraps(f)
        def made(*sizes: Hashable) -> Any:
            return f(*sizes) if torch.compiler.is_exporting() else cached(*sizes)

        return made  # pyright: ignore[reportReturnType]

    return decorate
