"""Peers in processes of their own, as their users have them: none gains by what another one set."""

import contextlib
import multiprocessing
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

# what a peer does once it is made; may be given something and may answer
Act = Callable[..., Any]
FLAGS = ("avx", "fma", "amx", "asimd", "sve")


@contextlib.contextmanager
def as_in(folder: str) -> Iterator[None]:
    """Processes that are started inside run this bench and Regard as they are in another folder."""
    main: Any = sys.modules["__main__"]
    here, paths, other = main.__file__, sys.path[:], Path(folder).resolve()
    main.__file__ = str(other / "bench" / Path(here).name)
    sys.path[:0] = [str(other), str(other / "bench")]  # its other benches, too
    try:
        yield
    finally:
        main.__file__, sys.path[:] = here, paths


# seconds on the wall, or of the processor, which others at work on the machine do not change
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def _serve(
    make: Callable[..., Act], args: tuple, threads: int, pipe: Connection, by: str = "wall"
) -> None:
    """Be a peer: do as told, and tell how long it took."""
    torch.set_num_threads(threads)
    torch.manual_seed(1)
    act = make(*args)
    pipe.send(None)
    with contextlib.suppress(EOFError):  # nobody is left to ask
        while (given := pipe.recv()) is not None:
            start = CLOCKS[by]()
            answer = act(*given)
            pipe.send((CLOCKS[by]() - start, answer))


class Peer:
    """One of those that are compared, made by a function in a process of its own."""

    def __init__(self, make: Callable[..., Act], *args: Any, threads: int, by: str = "wall"):
        spawn = multiprocessing.get_context("spawn")
        self.pipe, theirs = spawn.Pipe()
        words = (make, args, threads, theirs, *([] if by == "wall" else [by]))
        self.process = spawn.Process(target=_serve, args=words, daemon=True)
        self.process.start()
        theirs.close()
        self.pipe.recv()

    def act(self, *given: Any) -> tuple[float, Any]:
        """Do it once; return the seconds and the answer."""
        self.pipe.send(given)
        return self.pipe.recv()

    def ask(self, *given: Any) -> Any:
        """The answer alone, of one who tells the time himself."""
        return self.act(*given)[1]

    def end(self) -> None:
        """Let the process end."""
        self.pipe.send(None)
        self.process.join()

    def takes(self, *given: Any) -> Callable[[], float]:
        """Return what does it once and tells the seconds."""
        return lambda: self.act(*given)[0]


def machine() -> str:
    """Return the processor, its flags that decide about speed, and the version of PyTorch."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().split("\n\n")[0].splitlines() if info.exists() else []
    facts: dict[str, str] = {}
    for line in lines:
        key, _, value = line.partition(":")
        facts[key.strip()] = value.strip()
    flags = sorted(f for f in facts.get("flags", "").split() if f.startswith(FLAGS))
    name = facts.get("model name") or platform.processor() or platform.machine()
    return (
        f"machine: {name}, {os.cpu_count()} cores; {' '.join(flags) or 'flags unknown'}; "
        f"PyTorch {torch.__version__} ({torch.backends.cpu.get_cpu_capability()})"
    )


def takes(act: Act, by: str = "wall") -> Callable[[], float]:
    """Return what does something in this process and tells the seconds."""

    def seconds() -> float:
        start = CLOCKS[by]()
        act()
        return CLOCKS[by]() - start

    return seconds


def in_turn(acts: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Let everybody take a turn in each round, after one to warm up; return the median seconds."""
    taken: dict[str, list[float]] = {name: [] for name in acts}
    for act in acts.values():
        act()
    for turn in range(rounds):
        for name in acts if turn % 2 else reversed(acts):
            taken[name].append(acts[name]())
    return {name: statistics.median(some) for name, some in taken.items()}
