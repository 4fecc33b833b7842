"""Norms by name."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LayerNorm(nn.LayerNorm):
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__(width, eps=eps)


class RMSNorm(nn.Module):
    """x / sqrt(mean of squares + eps) * weight."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale each vector to a root mean square of one."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class LectureNorm(nn.Module):
    """(x - mean) / (std + eps) * weight + bias, std unbiased: the norm of the lectures' program."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Centre each vector and divide by its standard deviation."""
        mean = x.mean(-1, keepdim=True)
        return self.weight * (x - mean) / (x.std(-1, keepdim=True) + self.eps) + self.bias


class GainNorm(nn.LayerNorm):
    """(x - mean) / sqrt(var + eps) * weight: PaLM's layer norm, which has no bias."""

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__(width, eps=eps, bias=False)


NORMS: dict[str, type[nn.Module]] = {
    "layer": LayerNorm,
    "layer_nobias": GainNorm,
    "rms": RMSNorm,
    "lecture": LectureNorm,
}
