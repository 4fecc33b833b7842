"""Nothing on the way calls what only Linux has: a model trains, resumes, runs and is judged.

There is no macOS and no Windows here. So a program imports the libraries, takes away the calls,
files and modules that these systems lack, and only then imports Regard.
"""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.zoo import LABELS

ROOT = Path(__file__).resolve().parent.parent
WITHOUT = """
import asyncio, builtins, ctypes, importlib, io, multiprocessing, os, signal, subprocess, sys, types
import jiwer, jinja2, opencc, soundfile, soxr
import tempfile, torch, numpy, matplotlib.pyplot, sklearn.linear_model, PIL.Image, rich.progress
import torch.utils.tensorboard, tokenizers, safetensors.torch, sacrebleu, torch._dynamo, fcntl
import matplotlib.font_manager, sklearn.feature_extraction.text, sklearn.svm, sklearn.pipeline

system, held = sys.argv[1], fcntl
class Lacking:
    def find_spec(self, name, path=None, target=None):
        if name in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
missing = {"win32": {"fcntl", "resource", "pwd", "grp", "termios"}, "darwin": set()}[system]
sys.meta_path.insert(0, Lacking())
calls = "sched_getaffinity sched_setaffinity memfd_create posix_fallocate posix_fadvise".split()
if system == "win32":
    calls += "fork getuid geteuid sysconf O_NOFOLLOW O_NONBLOCK killpg setsid RTLD_NOW".split()
    calls += "getpgid mkfifo uname fchmod getloadavg".split()
    for name in "KILL ALRM HUP USR1 USR2 CHLD PIPE QUIT".split():
        delattr(signal, f"SIG{name}")

    def locking(handle, mode, count):  # as documented; it raises what Windows would
        assert os.lseek(handle, 0, os.SEEK_CUR) >= 1 << 30 and count == 1
        try:
            held.flock(handle, held.LOCK_EX | held.LOCK_NB)
        except OSError:
            raise PermissionError(13, "Permission denied") from None
    sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_LOCK=1, LK_NBLCK=2)
for name in calls:
    if hasattr(os, name):
        delattr(os, name)
for name in missing:
    sys.modules.pop(name, None)

def outside(real, folders_open):
    def call(path, *rest, **named):
        place = os.fspath(path) if isinstance(path, (str, os.PathLike)) else ""
        if str(place).startswith(("/proc", "/sys", "/dev/shm")):
            raise FileNotFoundError(2, "No such file or directory", place)
        if system == "win32" and not folders_open and place and os.path.isdir(place):
            raise PermissionError(13, "Permission denied", place)
        return real(path, *rest, **named)
    return call
builtins.open = io.open = outside(io.open, True)
os.open = outside(os.open, False)

class NoGlibc(ctypes.CDLL):
    def __getattr__(self, name):
        if name in ("mallopt", "prctl", "malloc_trim"):
            raise AttributeError(name)
        return super().__getattr__(name)
ctypes.CDLL = NoGlibc
sys.platform = system
"""
WORK = """
from pathlib import Path
import regard
from regard import native
from regard.cli import main
from regard.errors import UsageError
from regard.training.run_folder import locked

home, settings = Path(sys.argv[2]), eval(sys.argv[3])
run = home / "run"
assert "made for Linux" in str(native.status()), native.status()
words = [f"{key}={value}" for key, value in settings.items()]
data = settings["data"]
assert main(["train", "classify", *words, "steps=4", f"out={run}"]) == 0
assert main(["train", "classify", *words, "steps=4", f"out={run}"]) == 0  # it is done
with locked(run):
    try:
        with locked(run):
            raise AssertionError("locked twice")
    except UsageError as error:
        assert "another training is writing here" in str(error)
assert main(["run", str(run), "a red dog"]) == 0
assert main(["eval", str(run), f"data={data}"]) == 0
assert main(["look", str(run), "a red dog", f"out={home / 'look.html'}"]) == 0
assert main(["run", "en-zh", "How are you?"]) == 0
assert main(["doctor", str(run)]) == 0
if system == "win32":
    lab = ["compare", "classify", f"data={data}", "norm=layer,rms", "parallel=2"]
    assert main([*lab, f"out={home / 'two'}"]) == 2
assert not list(home.rglob("*.tmp"))
print("done")
"""


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_a_model_is_trained_and_run_without_what_only_linux_has(system, zoo, tmp_path):
    settings = {**LABELS, "few": "false", "data": str(zoo.data("classify")), "threads": 1}
    program = [sys.executable, "-X", "utf8", "-c", WITHOUT + WORK]
    words = [system, str(tmp_path), repr({k: str(v) for k, v in settings.items()})]
    done = subprocess.run([*program, *words], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("done\n")
    assert ("parallel=2 does not work on Windows" in done.stderr) == (system == "win32")


def test_windows_without_utf_8_is_refused_instead_of_reading_other_letters():
    program = textwrap.dedent("import sys; sys.platform = 'win32'; import regard")
    command = [sys.executable, "-X", "utf8=0", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.stderr.strip().endswith("set PYTHONUTF8=1 before Python starts")
