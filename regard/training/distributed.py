"""Several processes that train one model together: the only place that knows of them.

Each reads its own batches; gradients are added up, and the loss is divided by the tokens of all.
Started by `processes=N`, or by `torchrun --nproc-per-node N -m regard train ...` on one machine or
many; alone, every function does nothing. On a CPU two processes with a thread each train a small
model faster than one with two threads, since they meet once a step and not in every product.
"""

import json
import math
import mmap
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard import native

PATIENCE = 1800  # seconds until the others are given up
LINE = 64  # bytes that a processor fetches at once


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
    first: subprocess.Popen | None = None  # of those that failed
    reader = threading.Thread(target=lambda: said.append(children[0].stdout.read()))  # type: ignore[union-attr]
    reader.start()
    try:
        while any(child.poll() is None for child in children):
            if ended := [child for child in children if child.poll()]:
                first = first or ended[0]
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
        if first is not None and first.returncode < 0:
            name = signal.Signals(-first.returncode).name
            print(f"regard: a process of this training was ended by {name}", file=sys.stderr)
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
        _BOARDS.clear()
        dist.destroy_process_group()


def wait() -> None:
    """Go on once all have come here."""
    if size() > 1:
        dist.barrier()


class Board:
    """Memory that processes of one machine share, in which they add numbers up.

    Loopback sockets take as long for the gradients of a small model as its step does.
    """

    def __init__(self, count: int, dtype: torch.dtype, memory: mmap.mmap):
        """Lay out memory of the length that `needs` tells."""
        before = LINE * size()
        here = torch.frombuffer(memory, dtype=dtype, count=(size() + 1) * count, offset=before)
        self.rows, self.sums = here[:-count].view(size(), count), here[-count:]
        # for each process how often it was here, and a length, on a line of memory of its own
        self.seen = torch.frombuffer(memory, dtype=torch.int64, count=8 * size()).numpy()
        self.lengths = torch.frombuffer(memory, dtype=torch.float64, count=8 * size())[1::8]
        self.turn = 0
        share = -(-count // size())
        self.mine = slice(rank() * share, min(count, (rank() + 1) * share))

    @staticmethod
    def needs(count: int, dtype: torch.dtype) -> int:
        """Return how many bytes of memory the sums of so many numbers need."""
        return LINE * size() + (size() + 1) * count * dtype.itemsize

    def meet(self) -> None:
        """Go on once all have come here."""
        self.turn += 1
        self.seen[8 * rank()] = self.turn
        started, tries = time.monotonic(), 0
        while (self.seen[::8] < self.turn).any():
            tries += 1
            if tries > 1000:  # somebody takes longer, so let others have the processor
                time.sleep(0.0002)
                if time.monotonic() - started > PATIENCE:
                    raise RuntimeError("another process of this training does not answer")

    def add_up(self, most: float = math.inf) -> tuple[Tensor, float]:
        """Return the sum of all rows, made no longer than `most`, and how long it was.

        Each process works on its part of the sum, always in one order; nobody may change it.
        """
        self.meet()
        mine = self.sums[self.mine]
        torch.sum(self.rows[:, self.mine], 0, out=mine)
        self.lengths[rank()] = float(mine.norm())
        self.meet()
        length = float(self.lengths.norm())
        if length > most:
            mine *= most / length
            self.meet()
        return self.sums, length


def shared_memory(length: int) -> mmap.mmap | None:
    """Return memory that all processes share, or nothing if one of them cannot have it.

    It is a file without a name, so no limit of /dev/shm holds for it. The room is taken at once:
    where there is none, a process that writes there later is ended by SIGBUS.
    """
    place, made, memory = torch.tensor([os.getpid(), -1]), -1, None
    if is_first():
        with suppress(OSError):
            made = os.memfd_create("regard")
            os.posix_fallocate(made, 0, length)
            place[1] = made
    dist.broadcast(place, 0)
    process, number = place.tolist()
    with suppress(OSError):
        if number >= 0:
            handle = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            try:
                memory = mmap.mmap(handle, length)
            finally:
                os.close(handle)
    together = torch.tensor([memory is not None], dtype=torch.int64)
    dist.all_reduce(together, dist.ReduceOp.MIN)  # all have opened it, or nobody uses it
    if made >= 0:
        os.close(made)
    return memory if together.item() else None


_BOARDS: dict[tuple[int, torch.dtype], Board | None] = {}


def _board(count: int, dtype: torch.dtype) -> Board | None:
    """Return the memory for so many numbers, if all processes are on one machine."""
    local = "REGARD_PARENT" in os.environ or os.environ.get("LOCAL_WORLD_SIZE") == str(size())
    # where reads and writes of different processes keep their order by themselves
    if not local or platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
        return None
    if (count, dtype) not in _BOARDS:
        memory = shared_memory(Board.needs(count, dtype))
        _BOARDS[count, dtype] = None if memory is None else Board(count, dtype, memory)
    return _BOARDS[count, dtype]


def add_up(tensors: list[Tensor], most: float = math.inf) -> tuple[list[Tensor], float]:
    """Return the sums of tensors over all processes, together no longer than `most`, and how long.

    The sums are valid until the next call and may not be changed, since processes share them.
    """
    if size() == 1:
        if (long := native.length(tensors)) is None:
            long = float(nn.utils.get_total_norm(tensors, foreach=True))
        if long > most:
            for tensor in tensors:
                tensor *= most / long
        return tensors, long
    sizes = [tensor.numel() for tensor in tensors]
    board = _board(sum(sizes), torch.float32)
    flat = torch.empty(sum(sizes)) if board is None else board.rows[rank()]
    torch.cat([tensor.detach().flatten().cpu() for tensor in tensors], out=flat)
    if board is None:
        dist.all_reduce(flat)
        if (long := float(flat.norm())) > most:
            flat *= most / long
    else:
        flat, long = board.add_up(most)
    parts = zip(flat.split(sizes), tensors, strict=True)
    return [part.view(tensor.shape).to(tensor.device) for part, tensor in parts], long


def total(*numbers: float) -> list[float]:
    """Return the sums of some numbers over all processes."""
    if size() == 1:
        return list(numbers)
    sums = torch.tensor(numbers, dtype=torch.float64)
    if (board := _board(len(numbers), torch.float64)) is None:
        dist.all_reduce(sums)
        return sums.tolist()
    board.rows[rank()] = sums
    return board.add_up()[0].tolist()


def first_says(number: float) -> float:
    """Return the number that the first process has."""
    return total(number if is_first() else 0.0)[0]
