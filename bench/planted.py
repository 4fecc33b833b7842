"""Plant bugs, one at a time, and see whether the tests of that part catch each.

python bench/planted.py [--quick] [--jobs 2] [--limit 300] [NAME ...]

A bug is a row of planted.tsv: a name, a file, a text that occurs there once (or, where the file was
moved, in one other), what takes its place, and the tests of the part. It is put into a copy of the
tree, and those tests run until the first failure; the test that failed must pass in the copy
without the bug. A NAME chooses the rows whose name or file contains it.
"""

import argparse
import ctypes
import importlib
import io
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
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
WAIT = 10  # times as long by the clock, since tests wait for processes of their own
DIED = "the process died with"
# modules whose sources are told by their hashes, not by their times, and kernels
COMPILE = [
    ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "regard"],
    ["-c", "from regard.native import build; build.status()"],
]
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


def run_tests(tree: Path, words: list[str], limit: int, answer: Connection) -> None:
    """Run tests of a tree in this process until the first failure, and send what came of it."""
    os.setsid()
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
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


def judge(tree: Path, words: list[str], limit: int) -> tuple[int | None, str]:
    """Return pytest's exit code and output; None where it took more than so many seconds."""
    fork = multiprocessing.get_context("fork")
    mine, theirs = fork.Pipe(duplex=False)
    process = fork.Process(target=run_tests, args=(tree, words, limit, theirs))
    process.start()
    theirs.close()
    try:
        return mine.recv() if mine.poll(WAIT * limit) else (None, "")
    except EOFError:  # it died, as of a segmentation fault
        process.join()
        if process.exitcode in (-signal.SIGXCPU, -signal.SIGKILL):
            return None, ""
        return process.exitcode or 1, f"{DIED} {process.exitcode}"
    finally:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()


def find(bug: Bug, tree: Path) -> list[Path]:
    """Return the bug's file or, where that was moved or split, those with its text."""
    named = tree / "regard" / bug.file
    sources = [path for end in ("py", "c", "h") for path in tree.glob(f"regard/**/*.{end}")]
    texts = {path: path.read_text(encoding="utf-8") for path in sources}
    once = [path for path, text in texts.items() if text.count(bug.old) == 1]
    return [named] if named in once else once


def plant(bug: Bug, tree: Path, limit: int) -> tuple[str, str]:
    """Put a bug into a copy of the tree, run the tests of its part; return what came of it."""
    places = [path for path in find(bug, tree) if bug.new != bug.old]
    if len(places) != 1:
        return "stale", f"the text occurs in {len(places)} files"
    (path,) = places
    text = path.read_text(encoding="utf-8")
    words = [f"tests/{word}" if word.endswith(".py") else word for word in split(bug.tests)]
    path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    try:
        code, told = judge(tree, words, limit)
    finally:
        path.write_text(text, encoding="utf-8")
    if code == 0:
        return "survived", ""
    if code is None:
        return "unfinished", f"no end within {limit} s of processor time"
    if told.startswith(DIED):
        return "caught", told
    found = FAILED.search(told)
    if found is None:
        return "broken", told.strip().splitlines()[-1][:100]
    return "caught", found[1]


def prepare(place: Path) -> None:
    """Copy the tree to a place, and compile what all bugs share."""
    copy_tree(place / "tree")
    os.environ["REGARD_CACHE"] = str(place / "cache")
    for words in COMPILE:
        subprocess.run([sys.executable, *words], cwd=place / "tree", check=True)


def use(place: Path, first: Path) -> Path:
    """Let tests write to a place only, and find there what was compiled; return its tree."""
    os.environ["TMPDIR"] = tempfile.tempdir = str(place)
    os.environ["REGARD_CACHE"] = str(place / "cache")
    shutil.rmtree(place / "cache", ignore_errors=True)  # nothing that another bug has made
    shutil.copytree(first / "cache", place / "cache")
    return place / "tree"


def work(first: Path, bugs: SimpleQueue, answers: SimpleQueue, limit: int) -> None:
    """Plant bug after bug in a copy of one's own."""
    with tempfile.TemporaryDirectory(prefix="planted-") as place:
        shutil.copytree(first / "tree", Path(place) / "tree")
        for bug in iter(bugs.get, None):
            answers.put((bug, *plant(bug, use(Path(place), first), limit)))


def plant_all(
    bugs: Sequence[Bug], first: Path, jobs: int, limit: int
) -> Iterator[tuple[Bug, tuple[str, str]]]:
    """Plant bugs, several at once, and print and yield what came of each."""
    fork = multiprocessing.get_context("fork")
    asked, answers = fork.SimpleQueue(), fork.SimpleQueue()
    for bug in (*bugs, *[None] * jobs):
        asked.put(bug)
    workers = [fork.Process(target=work, args=(first, asked, answers, limit)) for _ in range(jobs)]
    for worker in workers:
        worker.start()
    print(f"{'bug':28} {'file':36} {'result':10} by", flush=True)
    for _ in bugs:
        bug, result, why = answers.get()
        print(f"{bug.name:28} {bug.file:36} {result:10} {why.removeprefix('tests/')}", flush=True)
        yield bug, (result, why)
    for worker in workers:
        worker.join()


def failing(tests: set[str], first: Path, limit: int) -> set[str]:
    """Return which of some tests fail without any bug, too."""
    words = ["--maxfail=1000", *sorted(tests)]
    code, told = judge(first / "tree", words, limit * len(tests)) if tests else (0, "")
    return set() if code == 0 else set(FAILED.findall(told)) or tests


def main() -> None:
    """Plant the chosen bugs, print a row for each and the share that was caught."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of names or files of bugs")
    parser.add_argument("--quick", action="store_true", help="a handful only")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument(
        "--limit", type=int, default=240, help="seconds of processor time for the tests of one"
    )
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
    with tempfile.TemporaryDirectory(prefix="planted-") as first:
        prepare(Path(first))
        results = dict(plant_all(bugs, Path(first), chosen.jobs, chosen.limit))
        caught = {why for result, why in results.values() if result == "caught"}
        tests = {why for why in caught if not why.startswith(DIED)}
        wrong = failing(tests, Path(first), chosen.limit)
    counts = Counter("broken" if why in wrong else result for result, why in results.values())
    for test in wrong:
        print(f"{test} fails without a bug, too")
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    print(f"ratio planted_caught {counts['caught'] / len(bugs):.4f}")
    sys.exit(1 if counts.keys() - {"caught", "survived"} else 0)


if __name__ == "__main__":
    main()
