"""Plant bugs, one at a time, and see whether the tests of that part catch each.

python bench/planted.py [--quick] [--jobs 2] [--limit 300] [NAME ...]

A bug is a row of planted.tsv: a name, a file, a text that occurs there once, what takes its place,
and the tests of the part. It is put into a copy of the tree, and those tests run until the first
failure; the test that failed must pass in the copy without the bug. A NAME chooses the rows whose
name or file contains it.
"""

import argparse
import ctypes
import importlib
import io
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from shlex import split
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
# what every test imports; the processes that run them are forked from one that has it
IMPORTED = ["numpy", "torch", "torch.nn.utils.parametrize", "torch.utils.checkpoint", "pytest"]
IMPORTED += ["hypothesis", "safetensors.torch", "jaxtyping", "tokenizers", "sacrebleu.metrics"]
IMPORTED += ["transformers.modeling_utils", "matplotlib.figure", "PIL.Image", "soxr", "soundfile"]
FAILED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


class Bug(NamedTuple):
    """A text of a file, what takes its place, and the tests that should tell (pytest's words)."""

    name: str
    file: str
    old: str
    new: str
    tests: str


# a handful over several folders, which take under two minutes
QUICK = ("window-keys", "yarn-last-rate", "whisper-floor-by-frame", "ema-batch-counts")


def read_bugs() -> list[Bug]:
    """Return the rows of the table; the first seven are those that survived at first."""
    rows = (ROOT / "bench" / "planted.tsv").read_text(encoding="utf-8").splitlines()[1:]
    return [Bug(*(cell.replace("\\n", "\n") for cell in row.split("\t"))) for row in rows]


def copy_tree(to: Path) -> None:
    """Copy what git knows of the tree."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)


def run_tests(tree: Path, words: list[str], answer: Connection) -> None:
    """Run tests of a tree in this process until the first failure, and send what came of it."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # end with who asks
    os.chdir(tree)
    sys.path.insert(0, str(tree))
    os.environ["PYTHONPATH"] = str(tree)
    import pytest

    told = io.StringIO()
    options = ["-x", "-q", "-rfE", "--tb=line", "-p", "no:cacheprovider", "-p", "no:xdist"]
    with redirect_stdout(told), redirect_stderr(told):
        code = int(pytest.main([*options, *words]))
    answer.send((code, told.getvalue()))


def judge(tree: Path, words: list[str], limit: float) -> tuple[int | None, str]:
    """Return pytest's exit code and output; None where it took longer than so many seconds."""
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=run_tests, args=(tree, words, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(limit) else (None, "")
    except EOFError:  # as of a segmentation fault
        process.join()
        return process.exitcode or 1, f"the process died with {process.exitcode}"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def plant(bug: Bug, tree: Path, limit: float) -> tuple[str, str]:
    """Put a bug into a copy of the tree, run the tests of its part; return what came of it."""
    path = tree / "regard" / bug.file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    if text.count(bug.old) != 1 or bug.new == bug.old:
        return "stale", f"the text occurs {text.count(bug.old)} times"
    words = [f"tests/{word}" if word.endswith(".py") else word for word in split(bug.tests)]
    path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    try:
        code, told = judge(tree, words, limit)
    finally:
        path.write_text(text, encoding="utf-8")
    if code == 0:
        return "survived", ""
    if code is None:
        return "caught", f"no end within {limit:g} s"
    found = FAILED.search(told)
    if found is None:
        died = "died" in told
        return ("caught" if died else "broken"), told.strip().splitlines()[-1][:100]
    test = found[1]
    clean, _ = judge(tree, [test], limit)
    return ("caught" if clean == 0 else "broken"), test.removeprefix("tests/")


def work(bugs: SimpleQueue, answers: SimpleQueue, limit: float) -> None:
    """Plant bug after bug in a copy of one's own."""
    with tempfile.TemporaryDirectory(prefix="planted-") as place:
        tree = Path(place) / "tree"
        copy_tree(tree)
        os.environ["TMPDIR"] = tempfile.tempdir = place
        cache, compiled = Path(place) / "cache", Path(place) / "compiled"
        os.environ["REGARD_CACHE"] = str(compiled)
        compile_kernels = [sys.executable, "-c", "from regard.native import build; build.status()"]
        subprocess.run(compile_kernels, cwd=tree, check=True)
        os.environ["REGARD_CACHE"] = str(cache)
        for bug in iter(bugs.get, None):
            shutil.rmtree(cache, ignore_errors=True)  # nothing that another bug has made
            shutil.copytree(compiled, cache)
            answers.put((bug, *plant(bug, tree, limit)))


def main() -> None:
    """Plant the chosen bugs, print a row for each and the share that was caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names or files of bugs")
    parser.add_argument("--quick", action="store_true", help="a handful only")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of tests")
    chosen = parser.parse_args()
    names = QUICK if chosen.quick else chosen.names or [""]
    bugs = [
        bug for bug in read_bugs() if any(name in bug.name or name in bug.file for name in names)
    ]
    if not bugs:
        parser.error(f"no bug is called {' or '.join(names)}")
    os.environ.setdefault("REGARD_DATA", str(ROOT.parent / "shared" / "data"))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True
    for name in IMPORTED:
        importlib.import_module(name)
    fork = multiprocessing.get_context("fork")
    asked, answers = fork.SimpleQueue(), fork.SimpleQueue()
    for bug in (*bugs, *[None] * chosen.jobs):
        asked.put(bug)
    workers = [
        fork.Process(target=work, args=(asked, answers, chosen.limit)) for _ in range(chosen.jobs)
    ]
    for worker in workers:
        worker.start()
    counts: Counter[str] = Counter()
    print(f"{'bug':28} {'file':36} {'result':9} by", flush=True)
    for _ in bugs:
        bug, result, why = answers.get()
        counts[result] += 1
        print(f"{bug.name:28} {bug.file:36} {result:9} {why}", flush=True)
    for worker in workers:
        worker.join()
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    print(f"ratio planted_caught {counts['caught'] / len(bugs):.4f}")
    sys.exit(1 if counts["stale"] or counts["broken"] else 0)


if __name__ == "__main__":
    main()
