"""The bilateral filter and non-local means over a window, by kernels in C."""

import ctypes

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard import native
from regard.filters.pixels import largest, mirrored
from regard.native.torch_private import traced

_MOST_CHANNELS = 4


class _Filter(ctypes.Structure):
    names = ["channels", "guides", "high", "wide", "radius", "patch", "threads"]
    _fields_ = [(name, ctypes.c_void_p) for name in ("image", "guide", "out")]
    _fields_ += [(name, ctypes.c_long) for name in names]
    _fields_ += [(name, ctypes.c_double) for name in ("content", "position", "noise")]


def _can(*images: Tensor) -> bool:
    """True if a kernel can read images, and nobody asks for gradients or follows the operations."""
    return not traced() and all(
        type(x) is Tensor
        and x.dtype == torch.float32
        and x.is_cpu
        and x.shape[1] <= _MOST_CHANNELS
        and not (torch.is_grad_enabled() and x.requires_grad)
        and largest(x) < 1e6  # and is finite
        for x in images
    )


def try_bilateral(
    image: Float[Tensor, "n c h w"],
    guide: Float[Tensor, "m e h w"],
    radius: int,
    content: float,
    position: float,
) -> Float[Tensor, "n c h w"] | None:
    """Filter by the weights exp(content * |difference|^2 + position * distance^2), or None."""
    made = native.plain() if _can(image, guide) else None
    if made is None:
        return None
    image, guide = image.contiguous(), guide.expand(len(image), -1, -1, -1).contiguous()
    out = torch.empty_like(image)
    for x, by, y in zip(image, guide, out, strict=True):
        sizes = len(x), len(by), *x.shape[1:], radius, 1, torch.get_num_threads()
        job = _Filter(x.data_ptr(), by.data_ptr(), y.data_ptr(), *sizes, content, position)
        if not made.regard_bilateral(ctypes.byref(job)):
            return None
    return out


def try_nonlocal_means(
    image: Float[Tensor, "n c h w"], radius: int, patch: int, content: float, noise: float
) -> Float[Tensor, "n c h w"] | None:
    """Filter by exp(min(0, content * squared difference of patches + noise)), or None."""
    made = native.plain() if _can(image) else None
    if made is None:
        return None
    out = torch.empty_like(image, memory_format=torch.contiguous_format)
    for x, y in zip(image, out, strict=True):
        down, right = (mirrored(n, patch // 2, x.device).numpy() for n in x.shape[1:])
        padded = x.detach().numpy().take(down, 1).take(right, 2)
        padded = np.append(padded, np.zeros(32, padded.dtype))  # it is read a vector at a time
        sizes = len(x), len(x), *x.shape[1:], radius, patch, torch.get_num_threads()
        job = _Filter(0, padded.ctypes.data, y.data_ptr(), *sizes, content, 0.0, noise)
        if not made.regard_nonlocal_means(ctypes.byref(job)):
            return None
    return out
