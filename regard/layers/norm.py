"""Norms by name."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.native import scope
from regard.native.torch_private import traced

_rms_norm = F.rms_norm  # as PyTorch has it


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
        weight = self.weight
        quick = None if torch.is_grad_enabled() else self._prepared(x, weight)
        if quick is None:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # a third of PyTorch's steps, which count where vectors are few: sqrt(width) x over the
        # hypotenuse of |x| and sqrt(width eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, quick[0])).mul_(quick[1])

    def _prepared(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """sqrt(width eps) and sqrt(width) weight, where they cannot change."""
        active = scope(self)
        if active is None or active.copies is None or F.rms_norm is not _rms_norm or traced():
            return None
        exact = weight.dtype in (torch.float32, torch.float64) and type(weight) is nn.Parameter
        if not exact or x.dtype != weight.dtype or not (weight.is_cpu and x.is_cpu):
            return None
        key = id(self)
        if (ready := active.copies.get(key)) is None or ready[0] != self.eps:
            root, plain = weight.numel() ** 0.5, weight.detach()
            floor, scale = plain.new_tensor(root * self.eps**0.5), plain * root
            ready = active.copies[key] = self.eps, (floor, scale)
        return ready[1]


class GemmaNorm(nn.Module):
    """x / sqrt(mean of squares + eps) * (1 + weight), rounded once at the end (Gemma)."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale each vector to a root mean square of one."""
        half = x.dtype in (torch.float16, torch.bfloat16)
        wide, weight = (x.float(), self.weight.float()) if half else (x, self.weight)
        return F.rms_norm(wide, weight.shape, 1 + weight, self.eps).to(x.dtype)


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
    "rms_plus1": GemmaNorm,
    "lecture": LectureNorm,
}
"""Norms by name; add your own under a new one."""
