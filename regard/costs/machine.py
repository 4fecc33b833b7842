"""How fast this machine is at best: products, memory, and calls."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

_SECONDS_MEASURED = 0.25  # spent on each measurement


@dataclass(frozen=True)
class Machine:
    """The roof of the roofline: no computation is faster."""

    rate: float  # floating-point operations a second in products of matrices
    bandwidth: float  # bytes a second from and to memory
    call: float  # seconds of an operation on nearly nothing
    threads: int

    def __str__(self) -> str:
        return (
            f"{self.rate / 1e9:.0f} GFLOP/s, {self.bandwidth / 1e9:.1f} GB/s, "
            f"{self.call * 1e6:.1f} us a call, "
            f"{self.threads} thread{'s' if self.threads > 1 else ''}"
        )


def least(act: Callable[[], object], seconds: float = _SECONDS_MEASURED) -> float:
    """Return the shortest time that something takes, of as many as there is time for."""
    act()
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        begun = time.perf_counter()
        act()
        now = time.perf_counter()
        best = min(best, now - begun)
        if now > end:
            return best


@cache
def _measure(threads: int) -> Machine:
    with torch.no_grad():
        n = 1024
        a, b, out = (torch.ones(n, n, device="cpu") for _ in range(3))
        rate = 2 * n**3 / least(lambda: torch.mm(a, b, out=out))
        big = torch.ones(2**24, device="cpu")  # 64 MiB, more than a cache holds
        into = torch.empty_like(big)
        bandwidth = 2 * 4 * big.numel() / least(lambda: into.copy_(big))
        small = torch.ones(1, device="cpu")
        call = least(lambda: [small + small for _ in range(100)], _SECONDS_MEASURED / 5) / 100
    return Machine(rate, bandwidth, call, threads)


def machine() -> Machine:
    """Measure this machine in about half a second, once for each number of threads."""
    return _measure(torch.get_num_threads())
