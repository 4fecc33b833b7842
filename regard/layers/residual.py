"""Orders of norm and residual connection around a sublayer f, and stochastic depth."""

from collections.abc import Callable
from copy import deepcopy
from typing import cast

import torch
from torch import Tensor, nn

from regard.attention.dropout import add_dropped


def drop_path(x: Tensor, rate: float, training: bool = True) -> Tensor:
    """Zero whole examples of x (b, ...) with probability `rate` and scale the rest, in training."""
    if not training or rate <= 0:
        return x
    kept = torch.rand(len(x), device=x.device).ge_(rate).div_(1 - rate).to(x.dtype)
    return x * kept.view(-1, *(1,) * (x.ndim - 1))


def drop_path_schedule(rate: float, depth: int) -> list[float]:
    """Stochastic-depth rate of each block, from 0 linearly up to `rate`."""
    return [rate * n / max(1, depth - 1) for n in range(depth)]


class Residual(nn.Module):
    """A residual connection with a norm, dropout and stochastic depth (`path`)."""

    final_norm = True  # whether a stack of these ends with a norm

    def __init__(self, norm: nn.Module, drop: float, path: float = 0.0):
        super().__init__()
        self.norm, self.drop, self.path = norm, drop, path


class PreNorm(Residual):
    """x + f(norm(x)); a stack of these ends with a norm."""

    def forward(self, x: Tensor, f: Callable[..., Tensor], **given: object) -> Tensor:
        """Add what f makes of the normalised x."""
        if not self.training:
            return x + f(self.norm(x), **given)
        y = drop_path(f(self.norm(x), **given), self.path, self.training)
        return add_dropped(x, y, self.drop, self.training)


class HalfStep(PreNorm):
    """x + f(norm(x)) / 2: a half-step residual (Macaron network, Lu et al. 2019)."""

    def forward(self, x: Tensor, f: Callable[..., Tensor], **given: object) -> Tensor:
        """Add half of what f makes of the normalised x."""
        y = drop_path(f(self.norm(x), **given), self.path, self.training)
        return add_dropped(x, y, self.drop, self.training, 0.5)


class PostNorm(Residual):
    """norm(x + f(x)), as in the paper's formula."""

    final_norm = False

    def forward(self, x: Tensor, f: Callable[..., Tensor], **given: object) -> Tensor:
        """Normalise the sum."""
        y = drop_path(f(x, **given), self.path, self.training)
        return self.norm(add_dropped(x, y, self.drop, self.training))


class ResPostNorm(PreNorm):
    """x + norm(f(x)): what is added is normalised, not what it is added to (Swin V2)."""

    def forward(self, x: Tensor, f: Callable[..., Tensor], **given: object) -> Tensor:
        """Add the normalised f of x."""
        y = drop_path(self.norm(f(x, **given)), self.path, self.training)
        return add_dropped(x, y, self.drop, self.training)


class SandwichNorm(PreNorm):
    """x + after(f(norm(x))): what is read is normalised, and what is added too (Gemma 2)."""

    def __init__(self, norm: nn.Module, drop: float, path: float = 0.0):
        super().__init__(norm, drop, path)
        self.after = deepcopy(norm)

    def forward(self, x: Tensor, f: Callable[..., Tensor], **given: object) -> Tensor:
        """Add the normalised f of the normalised x."""
        y = drop_path(self.after(f(self.norm(x), **given)), self.path, self.training)
        return add_dropped(x, y, self.drop, self.training)


class ScaledPreNorm(PreNorm):
    """x + scale * f(norm(x)), each channel with a scale it learns (LayerScale, in DINOv2)."""

    def __init__(self, norm: nn.Module, drop: float, path: float = 0.0):
        super().__init__(norm, drop, path)
        self.scale = nn.Parameter(torch.ones(cast(Tensor, norm.weight).shape))

    def forward(self, x: Tensor, f: Callable[..., Tensor], **given: object) -> Tensor:
        """Add the scaled f of the normalised x."""
        y = drop_path(f(self.norm(x), **given) * self.scale, self.path, self.training)
        return add_dropped(x, y, self.drop, self.training)
