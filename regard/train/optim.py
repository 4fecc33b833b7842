"""The optimiser and the rate of learning over time."""

import math
from collections.abc import Callable

import torch
from torch import nn


def inverse_sqrt(step: int, steps: int, warmup: int) -> float:
    """Rise in a line, then fall with the square root of time, as in the paper."""
    return min((step + 1) / max(1, warmup), math.sqrt(max(1, warmup) / (step + 1)))


def cosine(step: int, steps: int, warmup: int) -> float:
    """Rise in a line, then fall along half a cosine to a hundredth."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def constant(step: int, steps: int, warmup: int) -> float:
    """Rise in a line, then stay."""
    return min(1.0, (step + 1) / max(1, warmup))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "inverse_sqrt": inverse_sqrt,
    "cosine": cosine,
    "constant": constant,
}


def build_optimiser(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
) -> torch.optim.AdamW:
    """Make AdamW, fused, that lets matrices decay but neither biases nor norms."""
    learning = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in learning if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in learning if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    return torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, fused=True)
