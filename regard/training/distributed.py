"""Data-parallel training over processes: the only place that knows of them.

Each reads its own batches; gradients are all-reduced, and the loss is divided by the tokens of all.
Started by `processes=N`, or by `torchrun --nproc-per-node N -m regard train ...` on one machine or
many; with one process, every function does nothing. On a CPU two processes with a thread each train
a small model faster than one with two threads: they synchronise once a step, not in every product.
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

_PEER_TIMEOUT = 1800  # seconds to wait for the other processes
_CACHE_LINE = 64  # bytes
# exit codes of a process that has finished, or was asked to stop and has saved
_STOPPED = (0, 128 + signal.SIGINT, 128 + signal.SIGTERM)


def rank() -> int:
    """Rank of this process, 0 if it is the only one."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Number of processes."""
    return int(os.environ.get("WORLD_SIZE", 1))


def is_main() -> bool:
    """True if this is rank 0, which writes files and logs."""
    return rank() == 0


def init() -> None:
    """Join the process group, if there is one."""
    if world_size() > 1 and not dist.is_initialized():
        _follow_parent()
        dist.init_process_group("gloo")


def launch(count: int, words: list[str]) -> dict[str, Any]:
    """Run `regard WORDS` in several processes, pass signals on, and return the result of rank 0."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    threads = max(1, torch.get_num_threads() // count)
    # printed only if another process than rank 0 fails
    errors = tempfile.TemporaryFile()  # noqa: SIM115
    group = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    children = [
        subprocess.Popen(
            [sys.executable, "-m", "regard", *words, "--json"],
            env={
                "OMP_NUM_THREADS": str(threads),
                **os.environ,
                **group,
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
    output: list[bytes] = []
    first: subprocess.Popen | None = None  # of those that failed
    reader = threading.Thread(target=lambda: output.append(children[0].stdout.read()))  # type: ignore[union-attr]
    reader.start()
    try:
        while any(child.poll() is None for child in children):
            if ended := [child for child in children if child.poll() not in (None, *_STOPPED)]:
                first = first or ended[0]
                time.sleep(1)  # let the one that failed first print why
                for child in children:
                    child.kill()
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    reader.join()
    if failed := [child.returncode for child in children if child.returncode not in _STOPPED]:
        if children[0].returncode < 0:
            errors.seek(0)
            sys.stderr.buffer.write(errors.read())
        if first is not None and first.returncode < 0:
            name = signal.Signals(-first.returncode).name
            print(f"regard: a process of this training was ended by {name}", file=sys.stderr)
        raise SystemExit(failed[0] if failed[0] > 0 else 128 - failed[0])
    if not output[0].strip():  # interrupted a second time, before there was a result
        raise SystemExit(children[0].returncode)
    return json.loads(output[0])


def _follow_parent() -> None:
    """Exit when the process that started this one is gone, however it ended."""
    parent = os.environ.get("REGARD_PARENT")
    if parent is None:
        return

    def watch() -> None:
        while os.getppid() == int(parent):
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def destroy() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        _SHARED.clear()
        dist.destroy_process_group()


def barrier() -> None:
    """Wait for all processes."""
    if world_size() > 1:
        dist.barrier()


class SharedSum:
    """An all-reduce (sum) through shared memory, for the processes of one machine.

    Loopback sockets take as long for the gradients of a small model as its step does.
    """

    def __init__(self, count: int, dtype: torch.dtype, memory: mmap.mmap):
        """Lay out memory of `bytes_needed` bytes."""
        size = world_size()
        values = torch.frombuffer(
            memory, dtype=dtype, count=(size + 1) * count, offset=_CACHE_LINE * size
        )
        self.rows, self.sums = values[:-count].view(size, count), values[-count:]
        # for each process a counter of barriers and a norm, on a cache line of its own
        self.seen = torch.frombuffer(memory, dtype=torch.int64, count=8 * size).numpy()
        self.norms = torch.frombuffer(memory, dtype=torch.float64, count=8 * size)[1::8]
        self.turn = 0
        share = -(-count // size)
        self.mine = slice(rank() * share, min(count, (rank() + 1) * share))

    @staticmethod
    def bytes_needed(count: int, dtype: torch.dtype) -> int:
        """Size of the shared memory for sums of so many numbers."""
        return _CACHE_LINE * world_size() + (world_size() + 1) * count * dtype.itemsize

    def barrier(self) -> None:
        """Wait for all processes."""
        self.turn += 1
        self.seen[8 * rank()] = self.turn
        started, tries = time.monotonic(), 0
        while (self.seen[::8] < self.turn).any():
            tries += 1
            if tries > 1000:  # it takes longer, so leave the processor to others
                time.sleep(0.0002)
                if time.monotonic() - started > _PEER_TIMEOUT:
                    raise RuntimeError("another process of this training does not answer")

    def reduce(self, max_norm: float = math.inf) -> tuple[Tensor, float]:
        """Sum of all rows, clipped to a norm, and its norm before.

        Each process sums its part, always in one order; the result must not be changed.
        """
        self.barrier()
        mine = self.sums[self.mine]
        torch.sum(self.rows[:, self.mine], 0, out=mine)
        self.norms[rank()] = float(mine.norm())
        self.barrier()
        norm = float(self.norms.norm())
        if norm > max_norm:
            mine *= max_norm / norm
            self.barrier()
        return self.sums, norm


def shared_memory(length: int) -> mmap.mmap | None:
    """Memory that all processes share, or None if one of them cannot map it.

    It is a memfd, so no limit of /dev/shm holds for it. It is allocated at once: where there is
    no room, a process that writes there later would be ended by SIGBUS.
    """
    place, made, memory = torch.tensor([os.getpid(), -1]), -1, None
    if is_main():
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


_SHARED: dict[tuple[int, torch.dtype], SharedSum | None] = {}


def _shared_sum(count: int, dtype: torch.dtype) -> SharedSum | None:
    """Shared sum for so many numbers, if all processes are on one machine."""
    local = "REGARD_PARENT" in os.environ or os.environ.get("LOCAL_WORLD_SIZE") == str(world_size())
    # x86-64 keeps the order of reads and writes of different processes
    if not local or platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
        return None
    if (count, dtype) not in _SHARED:
        memory = shared_memory(SharedSum.bytes_needed(count, dtype))
        _SHARED[count, dtype] = None if memory is None else SharedSum(count, dtype, memory)
    return _SHARED[count, dtype]


def all_reduce_grads(
    tensors: list[Tensor], max_norm: float = math.inf
) -> tuple[list[Tensor], float | Tensor]:
    """Sums of tensors over all processes, clipped to a total norm, and that norm before.

    The sums are valid until the next call and must not be changed, since processes share them. On
    an accelerator the norm stays there, so that the host does not wait for it.
    """
    if world_size() == 1:
        if tensors and tensors[0].device.type != "cpu":
            long = nn.utils.get_total_norm(tensors, foreach=True)
            share = (max_norm / long).clamp(max=1.0)
            for tensor in tensors:
                tensor *= share
            return tensors, long
        if (norm := native.l2_norm(tensors)) is None:
            norm = float(nn.utils.get_total_norm(tensors, foreach=True))
        if norm > max_norm:
            for tensor in tensors:
                tensor *= max_norm / norm
        return tensors, norm
    sizes = [tensor.numel() for tensor in tensors]
    shared = _shared_sum(sum(sizes), torch.float32)
    flat = torch.empty(sum(sizes)) if shared is None else shared.rows[rank()]
    torch.cat([tensor.detach().flatten().cpu() for tensor in tensors], out=flat)
    if shared is None:
        dist.all_reduce(flat)
        if (norm := float(flat.norm())) > max_norm:
            flat *= max_norm / norm
    else:
        flat, norm = shared.reduce(max_norm)
    parts = zip(flat.split(sizes), tensors, strict=True)
    return [part.view(tensor.shape).to(tensor.device) for part, tensor in parts], norm


def all_reduce(*numbers: float) -> list[float]:
    """Sums of numbers over all processes."""
    if world_size() == 1:
        return list(numbers)
    sums = torch.tensor(numbers, dtype=torch.float64)
    if (shared := _shared_sum(len(numbers), torch.float64)) is None:
        dist.all_reduce(sums)
        return sums.tolist()
    shared.rows[rank()] = sums
    return shared.reduce()[0].tolist()


def all_max(number: float) -> float:
    """Largest of the numbers of all processes."""
    size, own = world_size(), rank()
    return max(all_reduce(*(number if n == own else 0.0 for n in range(size))))


def broadcast(number: float) -> float:
    """Number that rank 0 has."""
    return all_reduce(number if is_main() else 0.0)[0]
