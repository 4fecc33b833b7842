"""Data-parallel training over processes: the only place that knows of them.

Each reads its own batches; gradients are all-reduced, and the loss is divided by the tokens of all.
How they are started, `launch` knows; with one process, every function does nothing. On a CPU two
processes with a thread each train a small model faster than one with two threads: they synchronise
once a step, not in every product.
"""

import json
import math
import mmap
import os
import platform
import select
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from regard import native
from regard.errors import UsageError
from regard.training.launch import follow_parent

_ARRIVAL = 1800  # seconds in which all processes must have started
# rank 0 may validate for hours while others wait; who is gone is seen by heartbeats
_EVER = timedelta(days=7)
_CACHE_LINE = 64  # bytes
# words of gloo's and NCCL's errors when another process is gone
_CUT_OFF = ("/gloo/", "NCCL", "Connection closed by peer", "Connection reset by peer")


def rank() -> int:
    """Rank of this process, 0 if it is the only one."""
    return int(os.environ.get("RANK", 0))


def world_size() -> int:
    """Number of processes."""
    return int(os.environ.get("WORLD_SIZE", 1))


def host_size() -> int:
    """Number of processes on this machine, 0 if that is not known."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 0))


def _is_local() -> bool:
    """True if all processes are on this machine."""
    return host_size() == world_size()


def is_main() -> bool:
    """True if this is rank 0, which writes files and logs."""
    return rank() == 0


@contextmanager
def joined(device: str = "cpu", timeout: float = 60.0) -> Iterator[None]:
    """Be one of the processes of a group inside the context, if there is a group.

    All leave together. Whoever finds that another is gone or silent says so and ends, since the
    sums that it waits for will not come.
    """
    if world_size() == 1 or dist.is_initialized():
        yield
        return
    follow_parent()
    left = threading.Event()
    store = _meet(timeout)
    own = store.clone()  # type: ignore[attr-defined] # a connection that no other thread waits for
    own.set_timeout(_EVER)  # PyTorch never ends a call that was cancelled
    watcher = threading.Thread(target=_watch, args=(own, timeout, left), daemon=True)
    watcher.start()
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    place = {"store": store, "rank": rank(), "world_size": world_size()}
    try:
        dist.init_process_group(backend, timeout=_EVER, **place)
        yield
        dist.barrier()
    except RuntimeError as error:  # of gloo or NCCL
        lost = isinstance(error, dist.DistError)  # such as an address that never comes
        if not lost and not any(word in str(error) for word in _CUT_OFF):
            raise
        _end(f"lost the connection to another process ({str(error).splitlines()[0][:200]})")
    finally:
        left.set()
        watcher.join()  # a thread that is in a call of the store when Python ends aborts it
    _SHARED.clear()
    dist.destroy_process_group()


def _meet(timeout: float) -> PrefixStore:
    """Wait until all processes have come, and return their store.

    Its keys begin with the number of the attempt: a process that torchrun starts again must not
    read the addresses of the dead.
    """
    wait = timedelta(seconds=_ARRIVAL)
    meeting, *_ = next(iter(rendezvous("env://", timeout=wait)))
    store = PrefixStore(f"regard-{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", meeting)
    store.set(f"place-{rank()}", f"{os.getpid()} {socket.gethostname()}")
    store.set(f"alive-{rank()}", "0")
    for peer in range(world_size()):
        try:
            store.wait([f"place-{peer}", f"alive-{peer}"], wait)
        except RuntimeError:
            _end(f"rank {peer} has not come within {_ARRIVAL} s")
        pid, host = store.get(f"place-{peer}").decode().split()
        _PLACES[peer] = f"rank {peer} on {host}"
        if _is_local() and peer != rank():
            with suppress(OSError, AttributeError):  # an old kernel
                _PEERS[os.pidfd_open(int(pid))] = peer
    store.set_timeout(timedelta(seconds=timeout))
    return store


def _watch(store: PrefixStore, timeout: float, left: threading.Event) -> None:
    """End this process if another, or the store, has told nothing for some time."""
    count, pause = world_size(), min(5.0, timeout / 6)
    news: deque[tuple[list[bytes], float]] = deque([([b""] * count, time.monotonic())], 1)
    teller = threading.Thread(target=_tell, args=(store, pause, left, news), daemon=True)
    teller.start()
    seen, since, turn = [b""] * count, [time.monotonic()] * count, time.monotonic()
    woken = turn
    while not left.wait(pause):
        if time.monotonic() - turn > pause + timeout / 2:  # it was itself stopped, as all may be
            woken = time.monotonic()
            since = [woken] * count
        turn, (now, answered) = time.monotonic(), news[0]
        if turn - max(answered, woken) > timeout:
            _end(f"the store of this training, {_address()}, has been silent for {timeout:g} s")
        for peer, value in enumerate(now):
            if value != seen[peer]:
                seen[peer], since[peer] = value, answered
            elif answered - since[peer] > timeout:
                _end(f"{_PLACES[peer]} has been silent for {timeout:g} s")
    teller.join(5)  # it may wait for a store that is gone


def _tell(store: PrefixStore, pause: float, left: threading.Event, news: deque[Any]) -> None:
    """Tell the others that this process lives, and hear what they tell.

    A call waits for an answer for ever if the host of the store is cut off.
    """
    keys, pulse = [f"alive-{peer}" for peer in range(world_size())], 0
    while not left.wait(pause):
        pulse += 1
        with suppress(RuntimeError):
            store.set(keys[rank()], str(pulse))
            news.append((store.multi_get(keys), time.monotonic()))


def _address() -> str:
    return f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"


def _end(why: str) -> NoReturn:
    """Say why this process cannot go on, and end it: nothing that it holds would be right."""
    print(f"regard: rank {rank()} ends: {why}", file=sys.stderr, flush=True)
    os._exit(1)


@dataclass(frozen=True)
class Group:
    """Processes that do something together: the place of this one, and how many they are."""

    rank: int = 0
    size: int = 1
    own: Any = None  # group of torch.distributed, if a thread of each process is meant

    def gather(self, value: Any) -> list[Any]:
        """What each of them has, by rank; it is sent as JSON."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(data)]), self.own)
        texts = [torch.zeros(int(max(sizes)), dtype=torch.uint8) for _ in sizes]
        dist.all_gather(texts, nn.functional.pad(data, (0, len(texts[0]) - len(data))), self.own)
        both = zip(texts, sizes, strict=True)
        return [json.loads(text[: int(size)].numpy().tobytes()) for text, size in both]


ALONE = Group()


def everyone(thread: bool = False) -> Group:
    """All processes, or a thread of each of them, which must all ask for it."""
    own = dist.new_group(timeout=_EVER, backend="gloo") if thread and world_size() > 1 else None
    return Group(rank(), world_size(), own)


def hosts() -> tuple[int, int]:
    """Number of hosts, and of processes on each."""
    own = host_size()
    follows = own and int(os.environ.get("LOCAL_RANK", -1)) == rank() % own
    if everyone().gather([own, follows]) != [[own, True]] * world_size():
        raise UsageError(
            "parallel=hsdp needs as many processes on one host as on another, and ranks host by "
            "host; start them by torchrun or srun, or give parallel=fsdp"
        )
    return world_size() // own, own


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
        tries = 0
        while (self.seen[::8] < self.turn).any():
            tries += 1
            if tries > 1000:  # it takes longer, so leave the processor to others
                time.sleep(0.0002)
                if tries % 64 == 0 and (gone := select.select(list(_PEERS), [], [], 0)[0]):
                    _end(f"rank {_PEERS[gone[0]]} has ended")

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


_PLACES: dict[int, str] = {}  # what ranks are called
_PEERS: dict[int, int] = {}  # ranks by a handle that is readable when the process has ended
_SHARED: dict[tuple[int, torch.dtype], SharedSum | None] = {}


def _shared_sum(count: int, dtype: torch.dtype) -> SharedSum | None:
    """Shared sum for so many numbers, if all processes are on one machine."""
    # x86-64 keeps the order of reads and writes of different processes
    if not _is_local() or platform.machine() != "x86_64" or not hasattr(os, "memfd_create"):
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
    if not tensors:
        return tensors, 0.0
    device = tensors[0].device
    if world_size() == 1:
        norm = native.l2_norm(tensors) if device.type == "cpu" else None
        if norm is None:
            norm = nn.utils.get_total_norm(tensors, foreach=True)
        return tensors, clip(tensors, norm, max_norm)
    sizes = [tensor.numel() for tensor in tensors]
    shared = _shared_sum(sum(sizes), torch.float32) if device.type == "cpu" else None
    flat = torch.empty(sum(sizes), device=device) if shared is None else shared.rows[rank()]
    torch.cat([tensor.detach().flatten() for tensor in tensors], out=flat)
    if shared is None:
        dist.all_reduce(flat)
        norm = clip([flat], _norm(flat), max_norm)
    else:
        flat, norm = shared.reduce(max_norm)
    parts = zip(flat.split(sizes), tensors, strict=True)
    return [part.view(tensor.shape) for part, tensor in parts], norm


def _norm(flat: Tensor) -> Tensor:
    """Norm of the gradients of all processes: on a CPU rounded as a `SharedSum` rounds it."""
    if flat.device.type != "cpu":
        return flat.norm()
    shares = flat.split(-(-len(flat) // world_size()))
    return torch.tensor([float(share.norm()) for share in shares], dtype=torch.float64).norm()


def clip(tensors: list[Tensor], norm: float | Tensor, max_norm: float) -> float | Tensor:
    """Scale tensors of a norm down to the largest that is allowed; return the norm before."""
    if isinstance(norm, Tensor) and norm.device.type != "cpu":
        share = (max_norm / norm).clamp(max=1.0)
    elif (norm := float(norm)) > max_norm:
        share = max_norm / norm
    else:
        return norm
    for tensor in tensors:
        tensor *= share
    return norm


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
