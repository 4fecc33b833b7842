"""Compiling the C kernels for this processor, once, and why they are off where they are."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from threading import Lock

import torch

from regard.errors import UsageError
from regard.files import alone, cache_folder, make_folder, replacing, sha256, write_atomically
from regard.native import ready
from regard.native.processor import cpu_description

SOURCE_FOLDER = Path(__file__).resolve().parent
_COMPILERS = ("gcc", "cc", "clang")
_FLAGS = ["-O3", "-march=native", "-fno-math-errno", "-Wno-psabi", "-fopenmp", "-fPIC"]
_FLAGS += ["-mprefer-vector-width=512"] if platform.machine() == "x86_64" else []
# A compiler that takes longer than this is given up, in seconds.
COMPILE_SECONDS = 120
# Letters of a library's hash by which it is named.
_HASHED = 16
# A failure is remembered for a day, in seconds.
_REMEMBER_FAILURE = 24 * 3600
# What a compiler says when it was the machine that failed, which is not remembered.
_TRANSIENT = (b"No space left", b"terminated program", b"Cannot allocate memory", b"out of memory")

# name of a kernel -> its arguments: an address (p), a whole number (l) or a fraction (d); what it
# returns stands behind >
_SIGNATURES = {
    "regard_checksum": "plp",
    "regard_engine_new": "pp>p",
    "regard_engine_free": "p",
    "regard_crew_new": "pp>p",
    "regard_crew_run": "ppl>l",
    "regard_crew_free": "p",
    "regard_step": "pp>l",
    "regard_write": "ppp>l",
    "regard_read": "pp>l",
    "regard_remember": "pp>l",
    "regard_try": ">l",
    "regard_bilateral": "p>l",
    "regard_nonlocal_means": "p>l",
    "regard_argmax": "pllpp",
    "regard_attend": "pppppdppp",
    "regard_attend_back": "pppppdpppppp",
    "regard_attend_half": "ppppdpp",
    "regard_squares": "lppp",
    "regard_adamw": "lppppppppddd",
    "regard_block": "pppppppp",
    "regard_block_back": "ppppppppppl",
}
# those that need nothing of PyTorch
PLAIN_KERNELS = tuple(_SIGNATURES)[: list(_SIGNATURES).index("regard_nonlocal_means") + 1]
_C_TYPES = {"p": ctypes.c_void_p, "l": ctypes.c_long, "d": ctypes.c_double}
_one_at_a_time = Lock()


@dataclass(frozen=True)
class Status:
    """Whether the C kernels can be used here, and why not."""

    enabled: bool
    reason: str = ""
    ready: bool = False  # those of decoding and filters came with the package

    def __str__(self) -> str:
        off = f"off, PyTorch computes instead: {self.reason}"
        if self.ready:
            off = f"on for decoding and filters; PyTorch computes the rest: {self.reason}"
        return f"C kernels: {'on' if self.enabled else off}"


def library() -> ctypes.CDLL | None:
    """Return the kernels, compiled if they are not yet; None where that cannot be."""
    with _one_at_a_time:
        return load()[0]


def status() -> Status:
    """Status of the kernels: usable, or the reason why not; compiles them if need be."""
    with _one_at_a_time:
        made, reason = load()
    return Status(made is not None, reason, plain() is not made)


def plain() -> ctypes.CDLL | None:
    """Kernels in plain C, of decoding and filters: those that came with the package, or `library`.

    Where others were compiled that fail, these are still there.
    """
    return brought() or library()


@cache
def brought() -> ctypes.CDLL | None:
    """The kernels that came with the package, if they work on this processor."""
    if switched_off():
        return None
    try:
        make_folder(cache_folder())
        found = ready.chosen(ready.READY, cache_folder())
        return None if found is None else _typed(ready.load(found), PLAIN_KERNELS)
    except (OSError, AttributeError):
        return None


@cache
def load() -> tuple[ctypes.CDLL | None, str]:
    """Return the kernels, or why there are none; for one thread at a time."""
    if why := unavailable():
        return None, why
    try:
        return _linked(), ""
    except subprocess.TimeoutExpired as error:
        return None, f"{error.cmd[0]} took more than {COMPILE_SECONDS} seconds"
    except subprocess.CalledProcessError as error:
        return None, f"{error.cmd[0]} failed: {_first_error(error.stderr)}"
    except (OSError, AttributeError, UsageError) as error:
        return None, str(error)


def unavailable() -> str:
    """Why kernels are not even tried here: switched off, another system, no compiler; else ""."""
    if why := switched_off():
        return why
    if not sys.platform.startswith("linux"):
        return f"they are made for Linux, and this is {sys.platform}"
    return "" if _compiler() else f"there is no C compiler ({', '.join(_COMPILERS)}); install one"


def switched_off() -> str:
    """The words that kernels are switched off by, else ""."""
    told = os.environ.get("REGARD_NATIVE", "1")
    return f"REGARD_NATIVE={told} switches them off" if told in ("0", "") else ""


def _compiler() -> str | None:
    return next(filter(None, map(shutil.which, _COMPILERS)), None)


def _linked() -> ctypes.CDLL:
    """Return the compiled kernels as a library of this process."""
    try:
        made = ctypes.CDLL(str(built()), mode=os.RTLD_NOW)
    except OSError:  # the cache may have been deleted in between
        made = ctypes.CDLL(str(built()), mode=os.RTLD_NOW)
    return _typed(made, _SIGNATURES)


def _typed(made: ctypes.CDLL, names: Iterable[str]) -> ctypes.CDLL:
    """A library whose kernels know what they take and return."""
    for name in names:
        takes, _, gives = _SIGNATURES[name].partition(">")
        kernel = getattr(made, name)
        kernel.argtypes, kernel.restype = [_C_TYPES[one] for one in takes], _C_TYPES.get(gives)
    return made


def _libraries() -> list[str]:
    """Return the libraries of PyTorch that the kernels are linked with, as they are loaded here.

    They have its threads, so that no threads wait for others, and its matrix products. Were they
    only made global instead, whatever is loaded later, such as CTranslate2, would take these
    products for its own, and compute wrong numbers.
    """
    # maps are in the order of addresses, which change; and other packages may bring their own
    lines = Path("/proc/self/maps").read_text().splitlines()
    paths = sorted({line.split()[-1] for line in lines if "/" in line}, key=_beside_pytorch)
    loaded = {Path(path).name.partition(".")[0]: path for path in paths}
    return [loaded[name] for name in ("libtorch_cpu", "libgomp", "libiomp5") if name in loaded]


def _beside_pytorch(path: str) -> tuple[bool, str]:
    """Sort libraries so that those of PyTorch's own folder come last."""
    return Path(path).is_relative_to(Path(torch.__file__).resolve().parent), path


def built() -> Path:
    """Return the compiled kernels, from the cache if they are there."""
    compiler = _compiler()
    if compiler is None:
        raise UsageError(unavailable())
    sources = sorted(SOURCE_FOLDER.glob("*.c"))
    key = hashlib.blake2b(digest_size=12)
    for part in [*sources, *sorted(SOURCE_FOLDER.glob("*.h"))]:
        key.update(part.read_bytes())
    age = os.stat(compiler).st_mtime_ns
    made_by = [_FLAGS, compiler, age, platform.machine(), cpu_description(), torch.__version__]
    made_by += _libraries()
    key.update(repr(made_by).encode())
    name = cache_folder() / f"native-{key.hexdigest()}"
    make_folder(name.parent)
    _check_private(name.parent)
    made = _intact(name)
    if made is None:
        with alone(name.with_suffix(".lock")):  # others wait and find it made, or find it failed
            made = _intact(name) or _compile(compiler, sources, name)
    _check_private(made)
    return made


def _intact(name: Path) -> Path | None:
    """Return the compiled kernels of a name, if their hash is the one that their file is named by.

    Code that was cut short or changed would end the process, or compute something else. Hashing it
    takes less than a millisecond.
    """
    for made in sorted(name.parent.glob(f"{name.name}-*.so")):
        with suppress(OSError):
            if made.stem.endswith(sha256(made)[:_HASHED]):
                return made
    return None


def _check_private(path: Path) -> None:
    """Refuse a cache in which somebody else could have put code for us to run."""
    info = path.stat()
    if info.st_uid != os.getuid():
        raise UsageError(f"{path} belongs to user {info.st_uid}, not to user {os.getuid()}")
    if info.st_mode & 0o022:
        mode = f"{info.st_mode & 0o777:o}"
        raise UsageError(f"others may write to {path} (mode {mode}); run chmod go-w {path}")


def _compile(compiler: str, sources: list[Path], name: Path) -> Path:
    """Compile the kernels, unless the same compiler failed at them not long ago."""
    failed = name.with_suffix(".failed")
    with suppress(OSError):
        if abs(time.time() - failed.stat().st_mtime) < _REMEMBER_FAILURE:
            raise UsageError(
                f"{compiler} failed earlier: {_first_error(failed.read_bytes())}; it is asked "
                f"again a day after, or once {failed} is deleted"
            )
    if sys.stderr.isatty():
        print("compiling kernels for this processor, once", file=sys.stderr)
    try:
        with tempfile.TemporaryDirectory() as place:
            objects = [str(Path(place) / f"{source.stem}.o") for source in sources]
            pairs = zip(map(str, sources), objects, strict=True)
            with ThreadPoolExecutor() as pool:
                list(pool.map(_run, ([compiler, *_FLAGS, "-c", a, "-o", b] for a, b in pairs)))
            places = dict.fromkeys(f"-Wl,-rpath,{Path(path).parent}" for path in _libraries())
            linked = [*_libraries(), *places, "-Wl,--allow-shlib-undefined"]
            whole = Path(place) / "whole.so"
            _run([compiler, "-shared", *objects, *linked, "-o", str(whole)])
            for damaged in name.parent.glob(f"{name.name}-*.so"):
                damaged.unlink(missing_ok=True)
            made = name.with_name(f"{name.name}-{sha256(whole)[:_HASHED]}.so")
            with replacing(made) as new:
                shutil.copyfile(whole, new)
                new.chmod(0o700)
            return made
    except subprocess.CalledProcessError as error:  # one that took too long is asked again
        said = error.stderr or b""
        if not any(words in said for words in _TRANSIENT):
            write_atomically(failed, (said.strip() or str(error).encode())[-2000:] + b"\n")
        raise


def _run(command: list[str]) -> None:
    """Run a compiler, silently."""
    subprocess.run(command, check=True, capture_output=True, timeout=COMPILE_SECONDS)


def _first_error(said: bytes | None) -> str:
    """Return the first line of a compiler's output that tells of an error, or the first line."""
    lines = (said or b"").decode(errors="replace").strip().splitlines() or ["it said nothing"]
    return next((line for line in lines if "error" in line), lines[0])[:200]
