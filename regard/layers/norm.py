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
        # of the weight at an address in a version: sqrt(width eps) and sqrt(width) weight
        self._ready: tuple[int, int, Tensor, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Scale each vector to a root mean square of one."""
        weight = self.weight
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return F.rms_norm(x, weight.shape, weight, self.eps)
        ready = self._ready
        if ready is None or ready[0] != weight.data_ptr() or ready[1] != weight._version:
            ready = self._ready = self._prepared(weight)
        if ready is None or x.dtype != weight.dtype or not x.is_cpu:
            return F.rms_norm(x, weight.shape, weight, self.eps)
        # a third of PyTorch's steps, which count where vectors are few: sqrt(width) x over the
        # hypotenuse of |x| and sqrt(width eps)
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return (x / torch.hypot(length, ready[2])).mul_(ready[3])

    def _prepared(self, weight: Tensor) -> tuple[int, int, Tensor, Tensor] | None:
        """Return what the quick way needs, if it can be gone with this weight."""
        exact = weight.dtype in (torch.float32, torch.float64)
        if not exact or not weight.is_cpu or weight.is_inference():
            return None
        root, plain = weight.numel() ** 0.5, weight.detach()
        with torch.inference_mode(False):  # what is made there cannot be copied
            floor, scale = plain.new_tensor(root * self.eps**0.5), plain * root
        return weight.data_ptr(), weight._version, floor, scale


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
