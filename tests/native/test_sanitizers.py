"""The kernels read and write nothing that is not theirs: their tests under ASan and UBSan.

It takes minutes, so it runs only with REGARD_SLOW=1. OpenMP's threads stay two, so that what they
share is shared.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[1]
FLAGS = [
    "-fsanitize=address,undefined,float-cast-overflow",
    "-fno-sanitize-recover=undefined",
    "-g",
    "-O1",
]
TESTS = {
    # but for those that start processes of their own
    "native/test_native.py": "not compiler and not compiled and not loaded_later",
    "native/test_kernel_autograd.py": "finite or unpacked or behind",
    "native/test_kernel_fuzz.py": "nothing or take_what or written",
    "native/test_engine.py": "test",
    "native/test_crew.py": "test",
    "native/test_write.py": "test",
    "native/test_read.py": "test",
    "tasks/test_quantised.py": "rounded or finite or nothing",
    "filters/test_filters.py": "kernels",
}
RUN = """
import sys
from regard import native
from regard.native import build
build._FLAGS += {flags!r}
build.COMPILE_SECONDS = 900
assert native.library() is not None, "the kernels could not be compiled"
import pytest
sys.exit(pytest.main({words!r}))
"""


def preloaded() -> str | None:
    """Return the libraries of the sanitizers, which must be loaded first."""
    if (compiler := shutil.which("gcc")) is None:
        return None
    asked = ([compiler, f"-print-file-name={name}.so"] for name in ("libasan", "libubsan"))
    found = [subprocess.run(ask, capture_output=True, text=True).stdout.strip() for ask in asked]
    return ":".join(found) if all(map(os.path.isabs, found)) else None


@pytest.mark.skipif(os.environ.get("REGARD_SLOW") != "1", reason="slow; set REGARD_SLOW=1")
@pytest.mark.skipif(preloaded() is None, reason="there are no sanitizers here")
@pytest.mark.parametrize("name", TESTS)
def test_kernels_touch_only_what_is_theirs(name, tmp_path):
    words = ["-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", "-s"]
    words += [str(HERE / name), "-k", TESTS[name]]
    environment = {
        **os.environ,
        "LD_PRELOAD": str(preloaded()),
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=1",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "REGARD_CACHE": str(tmp_path),
        "OMP_NUM_THREADS": "2",
    }
    program = RUN.format(flags=FLAGS, words=words)
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    told = found.stdout + found.stderr
    told = told[:3000] + told[-3000:] if len(told) > 6000 else told
    assert found.returncode == 0, told
    assert "runtime error" not in told and "AddressSanitizer" not in told, told
    assert " passed" in told, told
