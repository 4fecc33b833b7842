"""Several processes that train one model together: the only place that knows of them.

Each reads its own batches; gradients are added up, and the loss is divided by the tokens of all.
Started by `torchrun --nproc-per-node N -m regard train ...`; alone, every function does nothing.
"""

import os

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
        dist.init_process_group("gloo")


def leave() -> None:
    """Part from the other processes."""
    if dist.is_initialized():
        dist.destroy_process_group()


def wait() -> None:
    """Go on once all have come here."""
    if size() > 1:
        dist.barrier()


def add_up(tensors: list[Tensor]) -> None:
    """Replace every tensor by its sum over all processes, in one message."""
    if size() == 1:
        return
    flat = torch.cat([tensor.detach().flatten().cpu() for tensor in tensors])
    dist.all_reduce(flat)
    start = 0
    for tensor in tensors:
        part = flat[start : start + tensor.numel()]
        tensor.detach().copy_(part.view(tensor.shape))
        start += tensor.numel()


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
