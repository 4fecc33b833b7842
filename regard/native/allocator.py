"""The C allocator and the garbage collector, tuned for long runs."""

import ctypes
import gc
from contextlib import suppress
from functools import cache


@cache
def reuse_memory() -> None:
    """Keep freed memory, up to 2 GB, for the next step instead of returning it to the system.

    Otherwise the activations and logits of each step come in fresh pages that the system must zero,
    which can cost more than what is computed in them. And freeze the objects that exist by now,
    most of them for good, so that the garbage collector does not scan them again and again.
    """
    gc.freeze()
    with suppress(OSError, AttributeError):  # another C library than glibc
        library = ctypes.CDLL(None)
        library.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD at its largest
        library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD
