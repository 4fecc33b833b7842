"""Several processes that train one model together: the only place that knows of them.

Each reads its own batches; gradients are added up, and the loss is divided by the tokens of all.
Started by `processes=N`, or by `torchrun --nproc-per-node N -m regard train ...` on one machine or
many; alone, every function does nothing. On a CPU two processes with a thread each train a small
model faster than one with two threads, since they meet once a step and not in every product.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """Return the number of this process, 0 if it is alone."""
    return int(os.environ.get("RANK", 0))


def size() -> int:
    """Return how many processes there are."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_first() -> bool:
    """Tell whether this process is the one that writes files and talks."""
    return rank() == 0


def join() -> None:
    """Meet the other processes."""
    if size() > 1 and not dist.is_initialized():
        _follow_parent()
        dist.init_process_group("gloo")


def launch(count: int, words: list[str]) -> dict[str, Any]:
    """Run `regard WORDS` in several processes, hand signals on, and return what the first says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, torch.get_num_threads() // count)
    # told only if one of the others is the one that fails
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    together = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "regard", *words, "--json"],
            env={
                "OMP_NUM_THREADS": str(threads),
                **os.environ,
                **together,
                "RANK": str(number),
                "REGARD_PARENT": str(os.getpid()),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if number == 0 else subprocess.DEVNULL,
            stderr=None if number == 0 else errors,
            start_new_session=True,  # so that a signal reaches them once, through us
        )
        for number in range(count)
    ]

    def pass_on(number: int, frame: Any) -> None:
        for child in children:
            if child.poll() is None:
                child.send_signal(number)

    before = {n: signal.signal(n, pass_on) for n in (signal.SIGINT, signal.SIGTERM)}
    said: list[bytes] = []
    reader = threading.Thread(target=lambda: said.append(children[0].stdout.read()))  # type: ignore[union-attr]
    reader.start()
    try:
        while any(child.poll() is None for child in children):
            if any(child.poll() for child in children):
                time.sleep(1)  # the one that failed first has said why; let it
                for child in children:
                    child.kill()
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    reader.join()
    if failed := [child.returncode for child in children if child.returncode]:
        if children[0].returncode < 0:
            errors.seek(0)
            sys.stderr.buffer.write(errors.read())
        raise SystemExit(failed[0] if failed[0] > 0 else 128 - failed[0])
    return json.loads(said[0])


def _follow_parent() -> None:
    """End with the process that started this one, however it ended."""
    parent = os.environ.get("REGARD_PARENT")
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def leave() -> None:
    """Part from the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def wait() -> None:
    """Go on once all have come here."""
    if size() > 1:
        dist.barrier()


_BUFFERS: dict[int, Tensor] = {}  # fresh memory of this size costs as much as the message


def add_up(tensors: list[Tensor]) -> list[Tensor]:
    """Return the sum of every tensor over all processes, in one message.

    The sums are valid until the next call, since they share memory that is used again.
    """
    if size() == 1:
        return tensors
    count = sum(tensor.numel() for tensor in tensors)
    if count not in _BUFFERS:
        _BUFFERS[count] = torch.empty(count)
    flat = _BUFFERS[count]
    torch.cat([tensor.detach().flatten().cpu() for tensor in tensors], out=flat)
    dist.all_reduce(flat)
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [
        part.view(tensor.shape).to(tensor.device)
        for part, tensor in zip(parts, tensors, strict=True)
    ]


def total(*numbers: float) -> list[float]:
    """Return the sums of some numbers over all processes."""
    if size() == 1:
        return list(numbers)
    sums = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(sums)
    return sums.tolist()


def first_says(number: float) -> float:
    """Return the number that the first process has."""
    return total(number if is_first() else 0.0)[0]
