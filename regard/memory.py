"""Memory that is used again."""

import ctypes
import gc
from contextlib import suppress
from functools import cache


@cache
def reuse_memory() -> None:
    """Let the C library keep memory that is freed, up to 2 GB, for the next step.

    Otherwise the activations and logits of each step come in pages that the system must first find
    and clear, which can cost more than what is computed in them. And let Python's collector leave
    alone what is there by now, most of it for good: it goes through all of it again and again.
    """
    gc.freeze()
    with suppress(OSError, AttributeError):  # another C library than GNU's
        library = ctypes.CDLL(None)
        library.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD at its largest
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
