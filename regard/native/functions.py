"""The C kernels for training as autograd functions.

Each returns nothing where its kernel cannot be used; the caller then does it by PyTorch.
"""

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from regard.errors import UsageError
from regard.native import PLAIN_TENSORS, address, addresses, kernels, scope
from regard.native.torch_private import packs_saved_tensors

# A thread takes so many rows through a block at once: what it makes of them fits its cache.
_ROWS_AT_ONCE = 128
BLOCK_WEIGHTS = 14  # of a block, some of which may be missing
# Longer texts are left to PyTorch's kernel, which does not hold all weights of a head at once.
MAX_KERNEL_LENGTH = 256
# So are a few words, with which it is as fast.
_MIN_KERNEL_LENGTH = 48


def _kernels(of: object, *tensors: Tensor) -> ctypes.CDLL | None:
    """Return the kernels, if they can work on these tensors, whose gradients will be computed.

    Whoever packs what autograd keeps, as torch.utils.checkpoint does, gets it from PyTorch: it is
    unpacked, or computed again, where kernels may be switched off.
    """
    if not torch.is_grad_enabled() or packs_saved_tensors():
        return None
    if any(
        x.dtype != torch.float32 or not x.is_cpu or type(x) not in PLAIN_TENSORS for x in tensors
    ):
        return None
    return kernels(of)


def _refuse_double_backward() -> None:
    """Refuse second derivatives."""
    if torch.is_grad_enabled():
        raise UsageError(
            "kernels have no second derivatives; compute these outside of regard.fast, or set "
            "REGARD_NATIVE=0"
        )


def _in_rows(x: Any) -> Any:
    """Return a tensor, if there is one, with the numbers of a row side by side, as kernels read."""
    if x is None or (x.stride(-1) == 1 and x.dtype == torch.float32 and x.is_cpu):
        return x
    return x.to("cpu", torch.float32).contiguous()


def laid(bias: Tensor, *shape: int) -> Tensor:
    """Show a bias to a kernel as (b, h, q, k), of which the last must be in one piece."""
    bias = bias.to(torch.float32).expand(shape)
    return bias if bias.stride(-1) == 1 else bias.contiguous()


def _sizes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, out: Tensor, causal: bool):
    """Return shapes and steps in memory as the kernel of attention takes them."""
    b, h, rows, d = q.shape
    steps = [*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]]
    steps += [0, 0, 0] if bias is None else bias.stride()[:3]
    return [b, h, k.shape[1], rows, k.shape[2], d, int(causal), *steps, *out.stride()[:3]]


class _Attend(Function):
    """softmax(scale q k' + bias) v for queries (b, h, q, d)."""

    @staticmethod
    def forward(ctx: Any, q, k, v, bias, scale, causal, made):  # noqa: D102
        b, h, rows, d = q.shape
        # laid so that heads stand side by side, as the next product reads them
        out = q.new_empty(b, rows, h, d).transpose(1, 2)
        spread, sound = q.new_empty(b, h, rows, 2), torch.empty(1, dtype=torch.int64)
        made.regard_attend(
            (ctypes.c_long * 40)(*_sizes(q, k, v, bias, out, causal)),
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), address(bias), scale),
            *(out.data_ptr(), spread.data_ptr(), sound.data_ptr()),
        )
        ctx.save_for_backward(q, k, v, bias, out, spread)
        ctx.rest = scale, causal, made
        ctx.mark_non_differentiable(sound)
        return out, sound

    @staticmethod
    def backward(ctx: Any, *grads):  # noqa: D102  # pyright: ignore
        _refuse_double_backward()
        q, k, v, bias, out, spread = map(_in_rows, ctx.saved_tensors)
        (scale, causal, made), grad = ctx.rest, _in_rows(grads[0])
        # laid as they were projected, heads side by side
        dq, dk, dv = (x.new_empty(x.transpose(1, 2).shape).transpose(1, 2) for x in (q, k, v))
        steps = [*grad.stride()[:3], *dq.stride()[:3], *dk.stride()[:3], *dv.stride()[:3]]
        made.regard_attend_back(
            (ctypes.c_long * 40)(*_sizes(q, k, v, bias, out, causal), *steps),
            *(q.data_ptr(), k.data_ptr(), v.data_ptr(), address(bias), scale),
            *(x.data_ptr() for x in (out, spread.contiguous(), grad, dq, dk, dv)),
        )
        return dq, dk, dv, None, None, None, None


def attend(
    of: object,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    causal: bool,
) -> Tensor | None:
    """Attend for a module as PyTorch's kernel does, if texts are short and all is finite."""
    if q.dtype == torch.bfloat16:
        return None if bias is not None or causal else _attend_half(of, q, k, v, scale)
    made = None if of is None else _kernels(of, q, k, v)
    if made is None:
        return None
    fits = q.shape[-1] == v.shape[-1] and max(q.shape[-2], k.shape[-2]) <= MAX_KERNEL_LENGTH
    fits = fits and min(q.shape[-2], k.shape[-2]) >= _MIN_KERNEL_LENGTH
    if not fits or not (q.requires_grad or k.requires_grad or v.requires_grad):
        return None
    if bias is not None and (
        bias.requires_grad
        or bias.dtype != q.dtype
        or not bias.is_cpu
        or type(bias) not in PLAIN_TENSORS
    ):
        return None
    q, k, v = map(_in_rows, (q, k, v))
    bias = None if bias is None else laid(bias, *q.shape[:3], k.shape[2])
    out, sound = _Attend.apply(q, k, v, bias, scale, causal, made)
    return out if sound.item() else None


def _attend_half(of: object, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor | None:
    """Attend in bfloat16 where that is asked for, without gradients and with heads of width 64."""
    active, sides = scope(of), (q, k, v)
    if active is None or not active.half or torch.is_grad_enabled() or not q.numel():
        return None
    if any(type(x) not in PLAIN_TENSORS or x.dtype != q.dtype or not x.is_cpu for x in sides):
        return None
    if any(x.shape[-1] != 64 or x.stride(-1) != 1 for x in sides) or (made := kernels(of)) is None:
        return None
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    done = torch.zeros(1, dtype=torch.int64)
    numbers = (ctypes.c_long * 40)(*_sizes(q, k, v, None, out, False))
    sides = (x.data_ptr() for x in (q, k, v))
    made.regard_attend_half(numbers, *sides, scale, out.data_ptr(), done.data_ptr())
    return out if done.item() else None


class BlockSizes(ctypes.Structure):
    """What the kernel of a block must know, as in train.c."""

    names = ["b", "l", "w", "h", "g", "d", "f", "act", "centred", "causal", "some"]
    names += ["turn_b", "turn_l", "bias_b", "bias_h", "bias_q"]
    _fields_ = [(name, ctypes.c_long) for name in names] + [
        (name, ctypes.c_double) for name in ("eps", "scale")
    ]


class _Blocks(Function):
    """A stack of pre-norm blocks: x + attention(norm(x)), then x + ffn(norm(x))."""

    @staticmethod
    def forward(ctx: Any, n: BlockSizes, made, watched, turn, bias, x, *weights):  # noqa: D102
        depth = len(weights) // BLOCK_WEIGHTS
        kept = [x.new_empty(sum(_kept(n, weights))) for _ in range(depth)]
        xs = [x, *(torch.empty_like(x) for _ in range(depth))]
        sound, all_sound = torch.empty(1, dtype=torch.int64), True
        for i in range(depth):
            places = _places(
                n, turn, bias, xs[i], kept[i], weights[i * BLOCK_WEIGHTS :][:BLOCK_WEIGHTS]
            )
            made.regard_block(*places, xs[i + 1].data_ptr(), sound.data_ptr())
            all_sound = all_sound and bool(sound.item())
            if not all_sound:
                break
        ctx.save_for_backward(turn, bias, *kept, *xs[:-1], *weights)
        ctx.rest = n, made, depth
        ctx.set_materialize_grads(False)
        y = xs[-1] if all_sound else torch.empty(0)
        qkv = torch.stack([one[: _kept(n, weights)[0]] for one in kept]) if watched else None
        if qkv is not None:
            ctx.mark_non_differentiable(qkv)
        return y, qkv

    @staticmethod
    def backward(ctx: Any, *grads):  # noqa: D102  # pyright: ignore
        _refuse_double_backward()
        n, made, depth = ctx.rest
        if grads[0] is None:
            return (None,) * (6 + depth * BLOCK_WEIGHTS)
        turn, bias, *saved = ctx.saved_tensors  # as hooks that pack them give them back
        turn, bias = _in_rows(turn), _in_rows(bias)
        saved: list[Any] = [None if one is None else _flat(one) for one in saved]
        kept, xs, weights = saved[:depth], saved[depth : 2 * depth], saved[2 * depth :]
        grad, weight_grads = grads[0].contiguous(), []
        for i in reversed(range(depth)):
            some = weights[i * BLOCK_WEIGHTS : (i + 1) * BLOCK_WEIGHTS]
            sizes = [0 if one is None else one.numel() for one in some]
            ends = zip(sizes, accumulate(sizes), strict=True)
            starts = (ctypes.c_long * BLOCK_WEIGHTS)(
                *(end - size if size else -1 for size, end in ends)
            )
            sums, dx = grad.new_empty(torch.get_num_threads(), sum(sizes)), torch.empty_like(grad)
            places = grad.data_ptr(), dx.data_ptr(), sums.data_ptr()
            own = _places(n, turn, bias, xs[i], kept[i], some)
            made.regard_block_back(*own, *places, starts, sum(sizes))
            parts = zip(sums[0].split(sizes), some, strict=True)
            weight_grads = [
                *(
                    None if one is None else part if one.ndim == 1 else part.view(one.shape)
                    for part, one in parts
                ),
                *weight_grads,
            ]
            grad = dx
        return None, None, None, None, None, grad, *weight_grads


def _kept(n: BlockSizes, weights: Sequence[Tensor | None]) -> list[int]:
    """Numbers of each kind that a block saves for the backward pass, as in train.c."""
    gated = weights[8] is not None
    each = [(n.h + 2 * n.g) * n.d, n.h * n.d, 2 * n.h, n.w, n.f * gated, n.f, 2, 2]
    return [n.b * n.l * size for size in each]


def _places(n: BlockSizes, turn: Any, bias: Any, x: Tensor, kept: Tensor, weights: Sequence[Any]):
    """Return where all is that a kernel reads of a block, both on the way there and back."""
    if turn is not None:
        n.turn_b, n.turn_l = turn.stride(0) if turn.ndim == 3 else 0, turn.stride(-2)
    if bias is not None:
        n.bias_b, n.bias_h, n.bias_q = bias.stride()[:3]
    ends = accumulate([0, *_kept(n, weights)[:-1]])
    starts = (ctypes.c_void_p * 8)(*(kept.data_ptr() + 4 * end for end in ends))
    own = addresses(weights)
    return ctypes.byref(n), own, x.data_ptr(), address(turn), address(bias), starts


def _flat(x: Tensor) -> Tensor:
    """Return a tensor as a kernel reads it, whatever a hook has made of it."""
    ready = x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()
    return x if ready else x.to("cpu", torch.float32).contiguous()


def blocks(
    of: object,
    n: BlockSizes,
    x: Tensor,
    weights: list[Tensor | None],
    turn: Tensor | None,
    bias: Tensor | None,
    watched: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    """Pass x through blocks, if all numbers stay finite.

    Returns it, and if it is watched all queries, keys and values (n, b, l, heads, d).
    """
    made = _kernels(of, x)
    if made is None:
        return None
    n.some = max(1, -(-_ROWS_AT_ONCE // n.l))
    y, qkv = _Blocks.apply(n, made, watched, turn, bias, x, *weights)  # pyright: ignore
    if not y.numel():
        return None
    return y, None if qkv is None else qkv.view(-1, n.b, n.l, n.h + 2 * n.g, n.d)
