"""Memory that is used again."""

import ctypes
from contextlib import suppress
from functools import cache


@cache
def reuse_memory() -> None:
    """Let the C library keep memory that is freed, up to 2 GB.

    Otherwise the activations and logits of each step come in pages that the system must first find
    and clear, which can cost more than what is computed in them.
    """
    with suppress(OSError, AttributeError):  # another C library than GNU's
        library = ctypes.CDLL(None)
        library.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD at its largest
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
