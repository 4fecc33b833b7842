"""Kill processes of groups that train, start the groups again, and look at the weights.

    python bench/kill_groups.py 1000 runs/kills.jsonl     the first 1,000 cases, or what is left
    python bench/kill_groups.py 60 FILE few               a sample: six groups
    python bench/kill_groups.py 20 FILE restarts          three kills in each run with restarts=3

A case is a task, a kind of parallelism, a number of ranks, and a moment. One rank is killed there
by SIGKILL: at a random time; or before, between or after changes of files while the store of the
data is built, while a checkpoint is written, or while a second attempt restores it (after a kill at
a random time). Then the same command has to end with the weights, optimiser and losses, to the
bit, of a run that nothing disturbed. Ranks are forked from a process that has imported everything,
and find each other by the variables that torchrun sets. Each case is a line of the file of results.

With `restarts` the command is one of the shell, with processes= and restarts=3, of which a rank is
killed three times: soon after it was started, or after a further step was saved.
"""

import importlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch._dynamo  # noqa: E402 # what the first step of a process would import
import torch.distributed.fsdp  # noqa: E402
import torch.distributed.tensor  # noqa: E402
import torch.utils.tensorboard  # noqa: E402, F401
from kills import leftovers  # noqa: E402

from regard.cli import main as command  # noqa: E402
from regard.files import cache_folder, sha256  # noqa: E402
from regard.native import library  # noqa: E402
from regard.tasks import task as task_named  # noqa: E402
from regard.training import distributed, fit  # noqa: E402
from regard.training.checkpoint import checkpoints  # noqa: E402
from tests.tones import RATE  # noqa: E402
from tests.zoo import ANIMALS  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
CALLS = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir")  # all that changes a folder
COMMON = "depth=1 width=8 heads=2 ffn_width=16 threads=1 log=none batches=4 steps=6 valid_every=3 "
COMMON += "save_every=0 dropout=0.1 ema=0.9 average=2 timeout=20 warmup=2"
HEARD = f"kernel=7 rate={RATE} mels=20 model.channels=8 batch_seconds=3"
# task -> its data and its settings beside the common ones
TASKS = {
    "language": ("fill", "tokenizer=characters batch_tokens=64"),
    "translate": ("translate", "from=en to=de pieces=300 batch_tokens=64 valid_sentences=2"),
    "tag": ("tag", "pieces=300 batch_tokens=64"),
    "classify": ("images", "patch=4 batch=4 augment=crop linear=false"),
    "transcribe": ("transcribe", f"{HEARD} subsampling=2 speeds=1 valid=0.05"),
    "denoise": ("denoise", "every=1 window=4 image=16 batch=2 valid=0.1"),
}
PARALLEL, RANKS = ("ddp", "fsdp"), (1, 2, 4)
KINDS = ("time", "save", "store", "restart")
FEW = {  # the groups of a sample
    "language": ("fsdp", 4),
    "translate": ("ddp", 2),
    "tag": ("fsdp", 1),
    "classify": ("fsdp", 2),
    "transcribe": ("ddp", 1),
    "denoise": ("ddp", 4),
}
PATIENCE = 60  # seconds, after which a process hangs that should have ended


@dataclass(frozen=True)
class Case:
    """Where one of a group is killed."""

    number: int
    task: str
    parallel: str
    ranks: int
    kind: str
    victim: int
    place: float  # of the time or of the moments of its kind, from 0 to 1
    told: bool  # the others get SIGTERM at once, as from torchrun; else they notice by themselves

    @classmethod
    def of(cls, number: int, few: bool = False) -> "Case":
        """The case of a number; each 144 in a row have all tasks, ways, ranks and kinds.

        Of `few`, each 24 have all tasks and kinds, and a task has always the same group.
        """
        rng, left = random.Random(number), 55 * number % 144  # neighbours differ in all
        chosen: list[Any] = []
        for names in (tuple(TASKS), PARALLEL, RANKS, KINDS):
            left, one = divmod(left, len(names))
            chosen.append(names[one])
        if few:
            task = list(TASKS)[number % len(TASKS)]
            chosen = [task, *FEW[task], KINDS[number // len(TASKS) % len(KINDS)]]
        task, parallel, ranks, kind = chosen
        victim = rng.randrange(ranks)
        if kind == "save" and rng.random() < 0.5:
            victim = 0  # who writes the most
        place, told = rng.random(), rng.random() < 0.5
        return cls(number, task, parallel, ranks, kind, victim, place, told)


class Deadly:
    """Counts moments of a process by phase, and kills it at one of them."""

    def __init__(self, phase: str = "", at: int = -1):
        self.deadly, self.at = phase, at
        self.phases, self.counts = ["store"], Counter[str]()
        for name in CALLS:
            setattr(os, name, self.around(getattr(os, name)))
        for name, phase in (("save", "save"), ("restore", "restart")):
            setattr(fit.Fit, name, self.during(phase, getattr(fit.Fit, name)))

    def moment(self) -> None:
        """Die here, if it is the moment."""
        phase = self.phases[-1]
        if phase == self.deadly and self.counts[phase] == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.counts[phase] += 1

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function with a moment before and one after."""

        def act(*given: Any, **more: Any) -> Any:
            self.moment()
            try:
                return function(*given, **more)
            finally:
                self.moment()

        return act

    def during(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is a phase of its own; after the first one, training has begun."""
        inner = self.around(function)

        def act(*given: Any, **more: Any) -> Any:
            self.phases.append(phase)
            try:
                return inner(*given, **more)
            finally:
                self.phases.pop()
                self.phases[0] = "train"

        return act


class Group:
    """Ranks of one training, each a process."""

    def __init__(self, words: list[str], ranks: int, home: Path, cache: Path):
        self.words, self.ranks, self.home, self.cache = words, ranks, home, cache
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.pids: dict[int, int] = {}
        self.codes: dict[int, int] = {}

    def start(self, victim: int = -1, phase: str = "", at: int = -1) -> "Group":
        """Fork all ranks, one of which may die at a moment."""
        for rank in range(self.ranks):
            (self.home / f"met-{rank}").unlink(missing_ok=True)
        sys.stdout.flush()
        for rank in range(self.ranks):
            pid = os.fork()
            if pid == 0:
                self._train(rank, *((phase, at) if rank == victim else ("", -1)))
            self.pids[rank] = pid
        return self

    def _train(self, rank: int, phase: str, at: int) -> None:
        code = 70
        try:
            os.environ["REGARD_CACHE"] = str(self.cache)
            if self.ranks > 1:
                place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks}
                place |= {"LOCAL_WORLD_SIZE": self.ranks, "MASTER_ADDR": "127.0.0.1"}
                os.environ |= {k: str(v) for k, v in {**place, "MASTER_PORT": self.port}.items()}
            meet = distributed._meet

            def met(timeout: float) -> Any:
                store = meet(timeout)
                (self.home / f"met-{rank}").touch()
                return store

            distributed._meet = met
            deadly = Deadly(phase, at)
            with (
                open(self.home / f"said-{rank}", "a") as said,
                redirect_stdout(said),
                redirect_stderr(said),
            ):
                os.dup2(said.fileno(), 2)
                code = command(self.words)
            told = {"moments": deadly.counts, "modules": [*sys.modules]}
            (self.home / f"told-{rank}").write_text(json.dumps(told))
        finally:
            os._exit(code)

    def wait(self, seconds: float) -> bool:
        """Wait for all ranks to end; True if they do."""
        limit = time.monotonic() + seconds
        while len(self.codes) < self.ranks and time.monotonic() < limit:
            self.look()
            time.sleep(0.003)
        return len(self.codes) == self.ranks

    def look(self) -> None:
        """Note the exit codes of those who have ended."""
        for rank, pid in self.pids.items():
            if rank not in self.codes:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.codes[rank] = os.waitstatus_to_exitcode(status)

    def signal(self, number: signal.Signals, only: int | None = None) -> None:
        """Send a signal to those who live."""
        for rank, pid in self.pids.items():
            if rank not in self.codes and only in (None, rank):
                os.kill(pid, number)

    def end_after_kill(self, told: bool) -> str:
        """Let the others end, once one was killed; what is wrong, or nothing."""
        met = all((self.home / f"met-{rank}").exists() for rank in range(self.ranks))
        if told and met:
            self.signal(signal.SIGTERM)
        if not met:  # those who have not met wait for the one that was killed, as under a launcher
            self.signal(signal.SIGKILL)
        if not self.wait(PATIENCE):
            self.signal(signal.SIGKILL)
            self.wait(10)
            return f"others hang {PATIENCE} s after a kill"
        return ""

    def said(self) -> str:
        """The last words of all."""
        paths = (self.home / f"said-{rank}" for rank in range(self.ranks))
        return "\n".join(path.read_text()[-800:] for path in paths if path.exists())


def result(out: Path) -> dict[str, Any]:
    """All of a run that must not depend on kills: weights, state of the optimiser, losses."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    timed = ("tokens_per_second", "seconds")
    last = out / "checkpoints" / (out / "last").read_text().strip()
    found: dict[str, Any] = {
        "metrics": [{k: v for k, v in row.items() if k not in timed} for row in rows],
        "best": (out / "best").read_text(),
        "last": last.name,
    }
    for path in (out / "model.safetensors", *sorted(last.glob("*.safetensors"))):
        found[path.name] = sha256(path)
    return found


class Bench:
    """Data, and runs that nothing disturbed, with which others are compared."""

    def __init__(self, home: Path):
        self.home = home
        self.whole: dict[tuple[str, str, int], tuple[dict[str, Any], float, list[Counter]]] = {}
        library()  # compiled once
        self.cache = home / "cache"
        self.cache.mkdir()
        for path in cache_folder().glob("native-*"):
            shutil.copy(path, self.cache)
        for task, (animal, _) in TASKS.items():
            task_named(task)  # imported once
            (home / animal).mkdir()
            ANIMALS[animal].data(home / animal)

    def words(self, case: Case, out: Path) -> list[str]:
        """The command of a case."""
        animal, more = TASKS[case.task]
        data = self.home / animal
        data = data / "speech.tsv" if (data / "speech.tsv").exists() else data
        given = f"train {case.task} data={data} out={out} parallel={case.parallel} {COMMON} {more}"
        return [*given.split(), "--quiet"]

    def undisturbed(self, case: Case) -> tuple[dict[str, Any], float, list[Counter]]:
        """What a case has to end with, its seconds, and the moments of each rank by phase."""
        key = (case.task, case.parallel, case.ranks)
        if key not in self.whole:
            home = self.home / "-".join(map(str, key))
            home.mkdir()
            warm = Group(self.words(case, home / "warm"), case.ranks, home, self.fresh(home))
            self._complete(warm)
            group = Group(self.words(case, home / "out"), case.ranks, home, self.fresh(home))
            begun = time.monotonic()
            moments = [self._complete(group)]
            seconds = time.monotonic() - begun
            group.codes.clear()
            moments.append(self._complete(group))  # which restores what is complete
            for first, second in zip(*moments, strict=True):
                first["restart"] = second["restart"]
            self.whole[key] = (result(home / "out"), seconds, moments[0])
            shutil.rmtree(home)
        return self.whole[key]

    def _complete(self, group: Group) -> list[Counter[str]]:
        """Let a group train to its end; the moments of each rank by phase."""
        shutil.rmtree(group.cache / "stores", ignore_errors=True)
        assert group.start().wait(300) and not any(group.codes.values()), group.said()
        told = [json.loads((group.home / f"told-{n}").read_text()) for n in range(group.ranks)]
        for name in told[0]["modules"]:  # imported once for all that follow
            if name not in sys.modules:
                with suppress(ImportError):
                    importlib.import_module(name)
        return [Counter(one["moments"]) for one in told]

    def fresh(self, home: Path) -> Path:
        """A cache with kernels, and without any store."""
        folder = home / "cache"
        if not folder.exists():
            folder.mkdir()
            for path in self.cache.iterdir():
                os.link(path, folder / path.name)
        return folder

    def kill(self, case: Case, home: Path) -> tuple[int, str]:
        """Kill a rank, and go on; how many kills there were, and what is wrong."""
        whole, seconds, moments = self.undisturbed(case)
        words, kills = self.words(case, home / "out"), 0
        again = [] if case.kind != "restart" else [(case.kind, moments[case.victim]["restart"])]
        counts = {"time": 0, "restart": 0}
        first = case.kind if case.kind not in counts else ""
        for phase, count in [(first, moments[case.victim][first]), *again]:
            group = Group(words, case.ranks, home, self.fresh(home))
            at = int(case.place * count)
            group.start(case.victim, phase, at if phase else -1)
            if not phase:
                limit = time.monotonic() + case.place * seconds
                while time.monotonic() < limit and not group.codes:
                    time.sleep(0.002)
                    group.look()
                group.signal(signal.SIGKILL, case.victim)
            limit = time.monotonic() + 300
            while not group.codes and time.monotonic() < limit:
                time.sleep(0.003)
                group.look()
            killed = group.codes.get(case.victim) == -signal.SIGKILL
            if fault := group.end_after_kill(case.told):
                return kills, f"{fault}: {group.said()}"
            kills += killed
            usual = {0, 1, 143, -signal.SIGKILL, -signal.SIGTERM}
            if killed and not {*group.codes.values()} <= usual:
                return kills, f"exit codes {group.codes} after a kill: {group.said()}"
        group = Group(words, case.ranks, home, self.fresh(home)).start()
        if not group.wait(300) or any(group.codes.values()):
            group.signal(signal.SIGKILL)
            group.wait(10)
            return kills, f"exit codes {group.codes} of the same command: {group.said()}"
        if left := leftovers(home):
            return kills, f"{left[0]} is left"
        found = result(home / "out")
        wrong = sorted(k for k in {*found, *whole} if found.get(k) != whole.get(k))
        return kills, f"other {', '.join(wrong)}" if wrong else ""

    def restart(self, case: Case, home: Path) -> tuple[int, str]:
        """Kill a rank of each of three attempts of one command; the kills, and what is wrong."""
        whole, rng = self.undisturbed(case)[0], random.Random(case.number)
        words = [*self.words(case, home / "out"), f"processes={case.ranks}", "restarts=3"]
        env = {**os.environ, "REGARD_CACHE": str(self.fresh(home)), "PYTHONPATH": str(ROOT)}
        with open(home / "said-0", "w") as said:
            command = [sys.executable, "-m", "regard", *words]
            launcher = subprocess.Popen(command, env=env, stdout=said, stderr=said)
        kills, before = 0, set[int]()
        for kill in range(3):
            ranks = [rank for rank in _workers(launcher) if rank not in before]
            while len(ranks) < case.ranks and launcher.poll() is None:
                time.sleep(0.01)
                ranks = [rank for rank in _workers(launcher) if rank not in before]
            until, least = time.monotonic() + rng.uniform(0, 2.5), 2 * kill + rng.randint(1, 2)
            by_time = rng.random() < 0.5
            while launcher.poll() is None:
                steps = [step for step, _ in checkpoints(home / "out" / "checkpoints")]
                if time.monotonic() > until if by_time else max(steps, default=0) >= least:
                    break
                time.sleep(0.005)
            with suppress(ProcessLookupError, IndexError):
                os.kill(rng.choice(ranks), signal.SIGKILL)
                kills += 1
            before |= {*ranks}
        try:
            code = launcher.wait(300)
        except subprocess.TimeoutExpired:
            launcher.kill()
            return kills, f"hangs: {(home / 'said-0').read_text()[-800:]}"
        if code:
            return kills, f"exit code {code}: {(home / 'said-0').read_text()[-800:]}"
        found = result(home / "out")
        wrong = sorted(k for k in {*found, *whole} if found.get(k) != whole.get(k))
        left = [str(path) for path in leftovers(home)]
        return kills, f"other {', '.join(wrong)}; left {left}" if wrong or left else ""


def _workers(launcher: subprocess.Popen[Any]) -> list[int]:
    """Processes that a launcher has started."""
    found: list[int] = []
    for path in Path(f"/proc/{launcher.pid}/task").glob("*/children"):
        with suppress(OSError):
            found += map(int, path.read_text().split())
    return sorted(found)


@contextmanager
def bench() -> Iterator[Bench]:
    """A bench with a temporary folder of its own."""
    with tempfile.TemporaryDirectory(prefix="kills-") as place:
        yield Bench(Path(place))


def run(numbers: Iterable[int], path: Path, way: str = "") -> int:
    """Run the cases that a file does not have yet, and count all that it has then.

    Args:
        numbers: of the cases.
        path: the file of results.
        way: restarts, few or nothing.
    """
    rows = []
    if path.exists():
        for line in path.read_text().splitlines():
            with suppress(ValueError):  # the last one of a bench that was killed itself
                rows.append(json.loads(line))
    done = {row["number"] for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    with bench() as ours, open(path, "a") as file:
        for number in sorted({*numbers} - done):
            case, begun = Case.of(number, way == "few"), time.monotonic()
            home = ours.home / f"case-{number}"
            home.mkdir()
            kills, fault = (ours.restart if way == "restarts" else ours.kill)(case, home)
            told = {**asdict(case), **({"kind": way} if way == "restarts" else {})}
            took = round(time.monotonic() - begun, 2)
            rows.append({**told, "kills": kills, "fault": fault, "seconds": took})
            file.write(json.dumps(rows[-1]) + "\n")
            file.flush()
            if fault:
                print(json.dumps(rows[-1]), flush=True)
            shutil.rmtree(home)
    for key in ("task", "parallel", "ranks", "kind"):
        told = Counter[Any]()
        for row in rows:
            told[row[key]] += row["kills"]
        print(f"kills by {key}: {', '.join(f'{k} {n}' for k, n in told.items())}")
    faults = [row for row in rows if row["fault"]]
    kills = sum(row["kills"] for row in rows)
    print(f"{len(rows)} cases, {kills} kills, {len(faults)} faults")
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(run(range(int(sys.argv[1])), Path(sys.argv[2]), *sys.argv[3:]))
