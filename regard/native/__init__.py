"""Kernels in C for a processor, made once where there is a compiler; without one, PyTorch does it.

The sources lie beside this file. They are compiled for the processor at hand at their first use,
which takes a few seconds, and kept in REGARD_CACHE or the user's cache. REGARD_NATIVE=0 goes
without. No kernel runs unless somebody has switched kernels on for a model by `fast`: training and
running models from the command line or by regard.train and regard.load(...).run do.
"""

import ctypes
import hashlib
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache, wraps
from pathlib import Path
from threading import Lock
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from regard.errors import UsageError
from regard.files import alone, cache_folder, replacing, write_atomically
from regard.native.torch_private import traced
from regard.processor import cpu_description

P = ParamSpec("P")
T = TypeVar("T")
HERE = Path(__file__).resolve().parent
FLAGS = ["-O3", "-march=native", "-mprefer-vector-width=512", "-fno-math-errno"]
FLAGS += ["-Wno-psabi", "-fopenmp", "-fPIC"]
# A compiler that takes longer than this is given up, in seconds.
PATIENCE = 120
# One that failed is not asked again for a day, in seconds: the disk may have been full.
FAILED_FOR = 24 * 3600
# What a compiler says when it was the machine that failed, which may be well a moment later.
FOR_NOW = (b"No space left", b"terminated program", b"Cannot allocate memory", b"out of memory")


# name of a kernel -> what it takes: an address (p), a whole number (l) or a fraction (d)
KERNELS = {
    "regard_write": "pppppppp",
    "regard_likeliest": "pllpp",
    "regard_attend": "pppppdppp",
    "regard_attend_back": "pppppdpppppp",
    "regard_squares": "lppp",
    "regard_adamw": "lppppppppddd",
    "regard_block": "pppppppp",
    "regard_block_back": "ppppppppppl",
}
# tensors without behaviour of their own
PLAIN = (Tensor, torch.nn.Parameter)
TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "d": ctypes.c_double}


_one_at_a_time = Lock()


def library() -> ctypes.CDLL | None:
    """Return the kernels, compiled if they are not yet; nothing where that cannot be."""
    with _one_at_a_time:
        return load()


@cache
def load() -> ctypes.CDLL | None:
    """Return the kernels as `library` does, for one thread only."""
    if os.environ.get("REGARD_NATIVE", "1") in ("0", "") or not sys.platform.startswith("linux"):
        return None
    try:
        # symbols that the kernels leave open are those of the libraries that PyTorch has loaded:
        # its threads, so that nobody's threads wait for each other, and its matrix products
        for name in ("libgomp", "libiomp5", "libtorch_cpu"):
            if (path := _loaded(name)) is not None:
                ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        try:
            made = ctypes.CDLL(str(_built()), mode=os.RTLD_NOW)
        except OSError:  # the cache may have been deleted in between
            made = ctypes.CDLL(str(_built()), mode=os.RTLD_NOW)
        for name, takes in KERNELS.items():
            kernel = getattr(made, name)
            kernel.argtypes, kernel.restype = [TYPES[one] for one in takes], None
        return made
    except (OSError, AttributeError, UsageError, subprocess.SubprocessError):
        return None


class Scope:
    """Where kernels are switched on: for the modules of a model, as they are now."""

    def __init__(self, model: Any, frozen: bool):
        # held, so that no other object gets the number of one of them
        module = model if hasattr(model, "modules") else getattr(model, "model", None)
        if module is None:
            raise UsageError(
                f"{model!r:.60} is no model; give a module, or what regard.load returned"
            )
        self.modules = list(module.modules())
        self.members = frozenset(map(id, self.modules))
        self.plans: dict[object, Any] = {}  # what kernels have made of blocks, checked at each use
        # weights laid out anew, only where nobody changes weights: by the module's number
        self.copies: dict[int, Any] | None = {} if frozen else None


_SCOPE: ContextVar[Scope | None] = ContextVar("fast", default=None)


@contextmanager
def fast(model: Any, on: bool = True, *, frozen: bool = False) -> Iterator[None]:
    """Let kernels compute what they know exactly of a model, while the block runs.

    Everything else (own classes and functions, hooks, parametrizations, other dtypes or devices,
    adapters, ...) is found out at each call and left to PyTorch. `on=False` switches kernels off
    inside. `frozen=True` promises that nobody changes the model inside: then it is looked at once
    for each text that is written, and weights may be laid out anew.
    """
    token = _SCOPE.set(Scope(model, frozen) if on else None)
    try:
        yield
    finally:
        _SCOPE.reset(token)


def fast_run(method: Callable[P, T]) -> Callable[P, T]:
    """Let kernels compute for a runner's model while it answers: nobody changes weights then."""

    @wraps(method)
    def run(*words: P.args, **settings: P.kwargs) -> T:
        runner: Any = words[0]
        with fast(runner.model, frozen=True):
            return method(*words, **settings)

    return run


def scope(of: object = None) -> Scope | None:
    """Return where kernels are switched on, if they are: for a module, if one is given."""
    found = _SCOPE.get()
    return found if found is None or of is None or id(of) in found.members else None


def kernels(of: object = None) -> ctypes.CDLL | None:
    """Return the kernels where they are switched on, unless somebody must see each operation."""
    return None if scope(of) is None or traced() else library()


def _loaded(name: str) -> str | None:
    """Return the path of a library of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if (path := line.split()[-1]).rpartition("/")[2].startswith(f"{name}."):
            return path
    return None


def _built() -> Path:
    """Return the compiled kernels, from the cache if they are there."""
    compiler = next(filter(None, map(shutil.which, ("gcc", "cc", "clang"))), None)
    if compiler is None:
        raise OSError("there is no compiler")
    sources = sorted(HERE.glob("*.c"))
    key = hashlib.blake2b(digest_size=12)
    for part in [*sources, *sorted(HERE.glob("*.h"))]:
        key.update(part.read_bytes())
    age = os.stat(compiler).st_mtime_ns
    told = [FLAGS, compiler, age, platform.machine(), cpu_description(), torch.__version__]
    key.update(repr(told).encode())
    made = cache_folder() / f"native-{key.hexdigest()}.so"
    if not made.exists():
        with alone(made.with_suffix(".lock")):  # others wait and find it made, or find it failed
            if not made.exists():
                _compile(compiler, sources, made)
    if made.stat().st_uid != os.getuid():
        raise OSError(f"{made} belongs to somebody else")
    return made


def _compile(compiler: str, sources: list[Path], made: Path) -> None:
    """Compile the kernels, unless the same compiler failed at them not long ago."""
    failed = made.with_suffix(".failed")
    with suppress(OSError):
        if abs(time.time() - failed.stat().st_mtime) < FAILED_FOR:
            raise UsageError(f"{compiler} failed: {failed.read_text(errors='replace')}")
    if sys.stderr.isatty():
        print("compiling kernels for this processor, once", file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory() as place, replacing(made) as new:
            objects = [str(Path(place) / f"{source.stem}.o") for source in sources]
            pairs = zip(map(str, sources), objects, strict=True)
            with ThreadPoolExecutor() as pool:
                list(pool.map(_run, ([compiler, *FLAGS, "-c", a, "-o", b] for a, b in pairs)))
            _run([compiler, "-shared", *objects, "-o", str(new)])
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or b""
        if not any(words in said for words in FOR_NOW):
            write_atomically(failed, (said.strip() or str(error).encode())[-2000:] + b"\n")
        raise


def _run(command: list[str]) -> None:
    """Run a compiler, silently."""
    subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)


def likeliest(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the first likeliest token of each row (b, n) and its log-probability, if it can."""
    made = kernels() if _flat(logits) else None
    if made is None:
        return None
    rows, count = logits.shape
    best = torch.empty(rows, dtype=torch.int64)
    likely = torch.empty(rows)
    made.regard_likeliest(logits.data_ptr(), rows, count, best.data_ptr(), likely.data_ptr())
    return best, likely


def _flat(*tensors: Tensor) -> bool:
    """Tell whether kernels can go through tensors number by number."""
    return all(
        type(x) in PLAIN and x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()
        for x in tensors
    )


def address(x: Tensor | None) -> int:
    """Return where the numbers of a tensor begin, 0 if there is none."""
    return 0 if x is None else x.data_ptr()


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    """Return where some tensors begin, as a kernel takes it."""
    return (ctypes.c_void_p * len(tensors))(*map(address, tensors))


def _sizes(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_long * len(tensors))(*(x.numel() for x in tensors))


def length(tensors: Sequence[Tensor]) -> float | None:
    """Return the length of all numbers of some tensors as one vector, if it can."""
    made = kernels() if tensors and _flat(*tensors) else None
    if made is None:
        return None
    found = ctypes.c_double()
    made.regard_squares(len(tensors), addresses(tensors), _sizes(tensors), ctypes.byref(found))
    return math.sqrt(found.value) if found.value >= 0 else math.nan


def adamw(
    rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, float, float, float]],
    beta1: float,
    beta2: float,
    eps: float,
) -> bool:
    """Move weights by AdamW, if it can.

    A row is a weight, its gradient, their mean and that of their squares, the number of the step,
    the rate and the decay.
    """
    made = kernels()
    p, g, m, v, steps, rates, decays = zip(*rows, strict=True)
    if made is None or not _flat(*p, *g, *m, *v):
        return False
    numbers = ctypes.c_double * len(rows)
    rate = numbers(*(lr / (1 - beta1**n) for lr, n in zip(rates, steps, strict=True)))
    keep = numbers(*(1 - lr * decay for lr, decay in zip(rates, decays, strict=True)))
    far = numbers(*((1 - beta2**n) ** -0.5 for n in steps))
    places = [addresses(x) for x in (p, g, m, v)]
    made.regard_adamw(len(rows), *places, _sizes(p), rate, keep, far, beta1, beta2, eps)
    torch.autograd.graph.increment_version([*p, *m, *v])  # as every change in place does
    return True
