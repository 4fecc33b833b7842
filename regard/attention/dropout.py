"""Dropout whose random bits are cheap on a CPU."""

import torch
from torch import Tensor


def dropout_mask(x: Tensor, p: float) -> Tensor:
    """Factors of the entries of x: zero with probability p, else 1 / (1 - p).

    Each 64-bit draw serves eight entries, so p is met to 1/256: a Bernoulli draw for each
    entry costs more than the matrix products of a small model.
    """
    words = torch.empty((x.numel() + 7) // 8, dtype=torch.int64, device=x.device)
    words.random_(-(2**63), None)
    threshold = min(255, max(1, round(p * 256)))
    draws = words.view(torch.uint8)[: x.numel()].view(x.shape)
    kept = torch.ge(draws, threshold, out=torch.empty(x.shape, dtype=x.dtype, device=x.device))
    return kept.mul_(256 / (256 - threshold))


def dropout(x: Tensor, p: float, training: bool = True) -> Tensor:
    """Zero each entry with probability p (to 1/256) and scale the rest, in training only."""
    return x * dropout_mask(x, p) if training and p > 0 else x


def add_dropped(
    x: Tensor, y: Tensor, p: float, training: bool = True, scale: float = 1.0
) -> Tensor:
    """Sum of x and scale times y after dropout, in one pass.

    Args:
        x: residual stream
        y: what is added
        p: probability that an entry of y is dropped
        training: whether anything is dropped
        scale: factor of y
    """
    if training and p > 0:
        return torch.addcmul(x, y, dropout_mask(y, p), value=scale)
    return torch.add(x, y, alpha=scale)
