"""Starting the processes of a training: `processes=N` here, or torchrun, or srun."""

import ctypes
import json
import logging
import os
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

_PR_SET_PDEATHSIG = 1  # of prctl(2)
# exit codes that another attempt would not change: an error of use, or stopped and saved as asked
_FINAL = (2, 128 + signal.SIGINT, 128 + signal.SIGTERM)
_FIRST_HOST = re.compile(r"([^,\[]*)(?:\[(\w+)[^\]]*\])?([^,\[]*)")


def launch(count: int, words: list[str], restarts: int = 0) -> dict[str, Any]:
    """Run `regard WORDS` in several processes and return the result of rank 0.

    A group of which one fails is started again, so that all go on from the last checkpoint. Every
    attempt has a store of its own: in an old one stand the addresses of the dead.
    """
    given = {"OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // count)), **os.environ}
    ours = {"REGARD_PARENT": str(os.getpid())}
    code, told = 0, ""
    for left in range(restarts, -1, -1):
        with tempfile.TemporaryDirectory() as logs, _environment({**given, **ours}):
            code = _attempt(count, words, logs)
            told = "".join(path.read_text() for path in Path(logs).glob("*/*/0/stdout.log"))
        if code == 0 or code in _FINAL or not left:
            break
        print(f"regard: started again, {left - 1} more times at most", file=sys.stderr, flush=True)
    if code in (0, *_FINAL[1:]) and told.strip():
        return json.loads(told)
    raise SystemExit(code)


def _attempt(count: int, words: list[str], logs: str) -> int:
    """Run a group of processes to its end; return an exit code as shells count it."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id="regard",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,  # it would repeat an error of use, too
        logs_specs=DefaultLogsSpecs(logs, {n: Std.ALL if n else Std.OUT for n in range(count)}),
    )
    logging.disable(logging.CRITICAL)  # what torch's launcher says of signals and exit codes
    before = {n: signal.getsignal(n) for n in _handled(config.signals_to_handle)}
    try:
        elastic_launch(config, sys.executable)("-m", "regard", *words, "--json")
        return 0
    except SignalException as stopped:
        return 128 + stopped.sigval
    except ChildFailedError as failed:
        codes = {number: one.exitcode for number, one in failed.failures.items()}
        # the first of them has failed first; others were ended because of it
        rank = next((n for n, code in codes.items() if code in _FINAL), next(iter(codes)))
        if rank:  # what rank 0 says was shown already
            errors = next(Path(logs).glob(f"*/*/{rank}/stderr.log"))
            sys.stderr.write(errors.read_text(errors="replace"))
        if (code := codes[rank]) < 0:
            name = signal.Signals(-code).name
            print(f"regard: rank {rank} was ended by {name}", file=sys.stderr, flush=True)
        return code if code > 0 else 128 - code
    finally:
        logging.disable(logging.NOTSET)
        with suppress(ValueError):  # not in the main thread, which alone gets signals
            for number, handler in before.items():
                signal.signal(number, handler)


def _handled(names: str) -> list[signal.Signals]:
    return [signal.Signals[name] for name in names.split(",")]


@contextmanager
def _environment(values: MutableMapping[str, str]) -> Iterator[None]:
    """Have other environment variables inside the context."""
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def end_with_parent() -> None:
    """Let the kernel end this process when the one that started it has ended, however it did."""
    with suppress(OSError, AttributeError):  # there is no prctl but in Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def follow_parent() -> None:
    """End this process with the one that started it, if that is a launcher."""
    if "REGARD_PARENT" in os.environ or "TORCHELASTIC_RUN_ID" in os.environ:
        end_with_parent()
        if os.environ.get("REGARD_PARENT", str(os.getppid())) != str(os.getppid()):
            os._exit(1)  # it had ended before


def adopt_slurm() -> None:
    """Read rank and world size from the variables of `srun`, unless torchrun has set them.

    A script given to `sbatch` has some of them, too, but is no task of a step.
    """
    env = os.environ
    if "RANK" in env or "SLURM_STEP_NODELIST" not in env or int(env.get("SLURM_NTASKS", 1)) < 2:
        return
    match = _FIRST_HOST.match(env["SLURM_STEP_NODELIST"])
    first = "".join(part or "" for part in match.groups()) if match else ""
    job = int(env.get("SLURM_JOB_ID", 0)) + int(env.get("SLURM_STEP_ID", 0))
    names = {"RANK": "PROCID", "WORLD_SIZE": "NTASKS", "LOCAL_RANK": "LOCALID"}
    env.update({ours: env[f"SLURM_{theirs}"] for ours, theirs in names.items()})
    env.setdefault("MASTER_ADDR", first)
    env.setdefault("MASTER_PORT", str(20000 + job % 20000))
    each, rest = divmod(int(env["WORLD_SIZE"]), int(env.get("SLURM_STEP_NUM_NODES", 10**9)))
    if each and not rest:
        env["LOCAL_WORLD_SIZE"] = str(each)
