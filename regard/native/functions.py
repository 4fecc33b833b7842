"""The kernels for training as functions that PyTorch can differentiate.

Each returns nothing where its kernel cannot be used; the caller then does it by PyTorch.
"""

import ctypes
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from regard.native import address, addresses, kernels

# A thread takes so many rows through a block at once: what it makes of them fits its cache.
ROWS = 128
WEIGHTS = 14  # of a block, some of which may be missing
# Longer texts are left to PyTorch's kernel, which does not hold all weights of a head at once.
LONGEST = 256
# So are a few words, with which it is as fast.
SHORTEST = 48


def _kernels(*tensors: Tensor) -> ctypes.CDLL | None:
    """Return the kernels, if they can work on these tensors, whose gradients are wanted."""
    if not torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
        return None
    if any(x.dtype != torch.float32 or not x.is_cpu for x in tensors):
        return None
    return kernels()


def laid(bias: Tensor, *shape: int) -> Tensor:
    """Show a bias to a kernel as (b, h, q, k), of which the last must be in one piece."""
    bias = bias.to(torch.float32).expand(shape)
    return bias if bias.stride(-1) == 1 else bias.contiguous()


class _Attend(Function):
    """softmax(scale q k' + bias) v for queries (b, h, q, d)."""

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, scale, causal, made):  # noqa: D102
        b, h, rows, d = q.shape
        steps = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]]
        steps += [0, 0, 0] if bias is None else bias.stride()[:3]
        # laid so that heads stand side by side, as they are wanted next
        out = q.new_empty(b, rows, h, d).transpose(1, 2)
        spread, sound = q.new_empty(b, h, rows, 2), torch.empty(1, dtype=torch.int64)
        sizes = [b, h, k.shape[1], rows, k.shape[2], d, int(causal), *steps, *out.stride()[:3]]
        places = [q.data_ptr(), k.data_ptr(), v.data_ptr(), address(bias), scale]
        made.regard_attend(
            (ctypes.c_long * 40)(*sizes),
            *places,
            out.data_ptr(),
            spread.data_ptr(),
            sound.data_ptr(),
        )
        ctx.save_for_backward(q, k, v, bias, out, spread)
        ctx.rest = sizes, scale, made
        ctx.mark_non_differentiable(sound)
        return out, sound

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads):  # noqa: D102  # pyright: ignore
        q, k, v, bias, out, spread = ctx.saved_tensors
        sizes, scale, made = ctx.rest
        grad = grads[0] if grads[0].stride(-1) == 1 else grads[0].contiguous()
        # laid as they were projected, heads side by side
        dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
        steps = [*grad.stride()[:3], *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3]]
        made.regard_attend_back(
            (ctypes.c_long * 40)(*sizes, *steps),
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), address(bias), scale),
            *(x.data_ptr() for x in (out, spread, grad, dq, dk, dv)),
        )
        return dq, dk, dv, None, None, None, None


def attend(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool
) -> Tensor | None:
    """Attend as PyTorch's kernel does, if texts are short and all numbers are finite."""
    made = _kernels(q, k, v)
    fits = q.shape[-1] == v.shape[-1] and max(q.shape[-2], k.shape[-2]) <= LONGEST
    fits = fits and min(q.shape[-2], k.shape[-2]) >= SHORTEST
    if made is None or not fits or not (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if bias is not None and (bias.requires_grad or bias.dtype != q.dtype or not bias.is_cpu):
        return None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    bias = None if bias is None else laid(bias, *q.shape[:3], k.shape[2])
    out, sound = _Attend.apply(q, k, v, bias, scale, causal, made)
    return out if sound.item() else None


class Sizes(ctypes.Structure):
    """What the kernel of a block must know, as in train.c."""

    names = ["b", "l", "w", "h", "g", "d", "f", "act", "centred", "causal", "some"]
    names += ["turn_b", "turn_l", "bias_b", "bias_h", "bias_q"]
    _fields_ = [(name, ctypes.c_long) for name in names] + [
        (name, ctypes.c_double) for name in ("eps", "scale")
    ]


class _Blocks(Function):
    """Blocks on top of each other: x + look(norm(x)), then x + think(norm(x))."""

    @staticmethod
    def forward(ctx: Any, n: Sizes, made, turn, bias, x, *weights):  # noqa: D102
        rows, depth = n.b * n.l, len(weights) // WEIGHTS
        gated = weights[8] is not None
        sizes = [(n.h + 2 * n.g) * n.d, n.h * n.d, 2 * n.h, n.w, n.f * gated, n.f, 2, 2]
        kept = x.new_empty(depth, rows * sum(sizes))
        xs = [x, *(torch.empty_like(x) for _ in range(depth))]
        sound, all_sound = torch.empty(1, dtype=torch.int64), True
        shared = ctypes.byref(n), address(turn), address(bias)
        ctx.places = []
        for i in range(depth):
            own = addresses(weights[i * WEIGHTS : (i + 1) * WEIGHTS])
            starts = [rows * end * 4 + kept[i].data_ptr() for end in accumulate([0, *sizes[:-1]])]
            places = shared[0], own, xs[i].data_ptr(), *shared[1:], (ctypes.c_void_p * 8)(*starts)
            made.regard_block(*places, xs[i + 1].data_ptr(), sound.data_ptr())
            all_sound = all_sound and bool(sound.item())
            ctx.places.append(places)
        ctx.save_for_backward(kept, turn, bias, *xs[:-1], *weights)
        alive = [w.detach() for w in weights if w is not None]  # whatever becomes of the model
        ctx.rest = n, made, depth, alive
        ctx.set_materialize_grads(False)
        qkv = kept[:, : rows * sizes[0]]
        ctx.mark_non_differentiable(qkv)
        return xs[-1], qkv if all_sound else None

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads):  # noqa: D102  # pyright: ignore
        n, made, depth, _ = ctx.rest
        x, weights = ctx.saved_tensors[3], ctx.saved_tensors[3 + depth :]
        grad, found = grads[0].contiguous(), []
        for i in reversed(range(depth)):
            some = weights[i * WEIGHTS : (i + 1) * WEIGHTS]
            sizes = [0 if one is None else one.numel() for one in some]
            ends = zip(sizes, accumulate(sizes), strict=True)
            starts = (ctypes.c_long * WEIGHTS)(*(end - size if size else -1 for size, end in ends))
            sums, dx = x.new_empty(torch.get_num_threads(), sum(sizes)), torch.empty_like(x)
            places = grad.data_ptr(), dx.data_ptr(), sums.data_ptr()
            made.regard_block_back(*ctx.places[i], *places, starts, sum(sizes))
            parts = zip(sums[0].split(sizes), some, strict=True)
            found = [
                *(
                    None if one is None else part if one.ndim == 1 else part.view(one.shape)
                    for part, one in parts
                ),
                *found,
            ]
            grad = dx
        return None, None, None, None, grad, *found


def blocks(
    n: Sizes, x: Tensor, weights: list[Tensor | None], turn: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Pass x through blocks; return it, and all queries, keys and values (n, b, l, heads, d)."""
    made = _kernels(x)
    if made is None:
        return None
    n.some = max(1, -(-ROWS // n.l))
    y, qkv = _Blocks.apply(n, made, turn, bias, x, *weights)  # pyright: ignore
    return None if qkv is None else (y, qkv.view(-1, n.b, n.l, n.h + 2 * n.g, n.d))
