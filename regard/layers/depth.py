"""Stochastic depth: some examples pass a block by."""

import torch
from torch import Tensor


def drop_path(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Zero whole examples of x (b, ...) with probability `rate` and scale the rest, in training."""
    if not training or rate <= 0:
        return x
    kept = torch.rand(len(x), device=x.device).ge_(rate).div_(1 - rate).to(x.dtype)
    return x * kept.view(-1, *(1,) * (x.ndim - 1))


def drop_path_schedule(rate: float, depth: int) -> list[float]:
    """Return the stochastic-depth rate of each block, from 0 linearly up to `rate`."""
    return [rate * n / max(1, depth - 1) for n in range(depth)]
