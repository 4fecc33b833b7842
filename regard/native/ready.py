"""Kernels that a wheel brings along: plain C, with no symbol of PyTorch, its matrices or OpenMP.

Each level of processors has a library. The best that the processor announces is used, once a child
process has computed with it. This imports the standard library only: wheels are built without
PyTorch.
"""

import ctypes
import hashlib
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

_HERE = Path(__file__).resolve().parent
READY = _HERE / "ready"
_SOURCES = ("product.c", "packed.c", "translate.c", "write.c", "read.c", "filters.c")
_FLAGS = ["-O3", "-fno-math-errno", "-Wno-psabi", "-fopenmp-simd", "-fPIC", "-shared"]
_V3 = {"avx2", "fma", "bmi1", "bmi2", "f16c", "movbe", "abm"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
_WIDE = ["-march=x86-64-v4", "-mprefer-vector-width=512"]
# machine -> name -> what the processor must announce, and what the compiler is told; the best first
LEVELS: dict[str, dict[str, tuple[set[str], list[str]]]] = {
    "x86_64": {
        "v4-vnni": (_V4 | {"avx512_vnni"}, [*_WIDE, "-mavx512vnni"]),
        "v4": (_V4, _WIDE),
        "v3": (_V3, ["-march=x86-64-v3"]),
    },
    "aarch64": {"v8": ({"asimd"}, ["-march=armv8-a"])},
}
_TRIAL = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).regard_try() != 1)"
_TIMEOUT = 60
_ABOUT = ("model", "flags", "CPU", "Features")  # lines of a processor that tell it from others


def build(compiler: str, folder: Path, machine: str | None = None) -> list[Path]:
    """Compile a library for each level of a kind of machines, this one's if None, into a folder."""
    machine = machine or platform.machine()
    folder.mkdir(parents=True, exist_ok=True)
    sources = [str(_HERE / name) for name in _SOURCES]
    made = []
    for level, (_, told) in LEVELS[machine].items():
        made.append(folder / f"{machine}-{level}.so")
        words = [*_FLAGS, *told, *sources, "-lm", "-lpthread", "-s", "-o", str(made[-1])]
        subprocess.run([compiler, *words], check=True, timeout=10 * _TIMEOUT)
    return made


def platform_tag(libraries: list[Path]) -> str:
    """The tag of a wheel, by the newest version of glibc that libraries ask for."""
    asked = [re.findall(rb"GLIBC_2\.(\d+)", one.read_bytes()) for one in libraries]
    newest = max(int(n) for some in asked for n in some)
    return f"manylinux_2_{newest}_{libraries[0].name.partition('-')[0]}"


@cache
def chosen(place: Path = READY, tried: Path | None = None) -> Path | None:
    """The library of a folder for this processor, once it was tried; None if there is none.

    That it works is remembered in the folder `tried`, if it can be written to.
    """
    machine = platform.machine()
    if not place.is_dir():
        return None
    try:
        info = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return None
    lines = info.splitlines()
    flags = next((x for x in lines if x.startswith(("flags", "Features"))), "").split()
    for level, (needed, _) in LEVELS.get(machine, {}).items():
        made = place / f"{machine}-{level}.so"
        if needed <= set(flags) and made.is_file() and _works(made, info, tried):
            return made
    return None


def _works(library: Path, info: str, tried: Path | None) -> bool:
    """True if a child process computes with a library what it should, now or earlier."""
    about = [line for line in info.splitlines() if line.startswith(_ABOUT)]
    key = hashlib.blake2b(library.read_bytes() + repr(about).encode(), digest_size=12).hexdigest()
    noted = None if tried is None else tried / f"ready-{key}"
    if noted is not None and noted.exists():
        return True
    words = [sys.executable, "-I", "-S", "-c", _TRIAL, str(library)]
    try:
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    if done.returncode == 0 and noted is not None:
        with suppress(OSError):  # it is tried again the next time
            noted.touch()
    return done.returncode == 0


def load(path: Path) -> ctypes.CDLL:
    """A library as part of this process, its names for itself."""
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW)
