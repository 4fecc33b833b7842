"""Stacks of encoders by a kernel that reads packed weights, each sequence of a batch alone."""

import ctypes
import math
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard import native
from regard.attention.masks import Mask, Padding
from regard.attention.multihead import Memory
from regard.attention.once import one_pass
from regard.attention.watch import watcher
from regard.layers.fast.stack import packed_stack, reads_memory

# Weights are checked at each call. Of more than this only long sequences are worth that.
_FEW_WEIGHTS, _LONG = 2**24, 256


class _Reading(ctypes.Structure):
    names = ["sequences", "longest", "threads", "lengths", "x"]
    _fields_ = [(name, ctypes.c_long) for name in names]


class _Memories(ctypes.Structure):
    names = ["engine", "sentences", "length", "threads", "half", "memory", "keys", "values"]
    _fields_ = [(name, ctypes.c_long) for name in [*names, "next", "failed"]]


def try_read(
    blocks: list[Any],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    mask: Mask | None,
    bias: Tensor | None,
) -> Tensor | None:
    """Pass sequences (b, l, w) through the blocks of an encoder and the norm after them.

    Padding comes out as zeros. Where somebody watches, PyTorch passes them through beside it and is
    watched, so that the output has the same bits.

    Args:
        blocks: blocks of the encoder
        x: input (b, l, w)
        norm: norm after the last block
        at: positions of x
        mask: mask of all blocks
        bias: added to the scores of all blocks
    """
    fits = type(x) is Tensor and x.dtype == torch.float32 and x.is_cpu and x.ndim == 3
    if not fits or torch.is_grad_enabled() or bias is not None:
        return None
    if not x.numel() or (lengths := real_lengths(x, mask)) is None:
        return None
    weights = len(blocks) * sum(w.numel() for w in blocks[0].parameters())
    asked = cast(native.Scope, native.scope(blocks[0])).dtype
    if asked != torch.int8 and weights > _FEW_WEIGHTS and x.shape[1] < _LONG:
        return None
    stack = packed_stack(blocks, norm)
    if stack is None or stack.crosses or stack.first.position is not None:
        return None
    if stack.packed.shape.width != x.shape[-1]:
        return None
    y = x.clone(memory_format=torch.contiguous_format)
    places = lengths.data_ptr(), y.data_ptr()
    job = _Reading(*x.shape[:2], torch.get_num_threads(), *places)
    done = stack.packed.library.regard_read(stack.packed.handle, ctypes.byref(job))
    if not done or not math.isfinite(y.sum().item()):
        return None
    if watcher() is not None:
        with one_pass():
            for block in blocks:
                x = block(x, at=at, **({} if mask is None else {"mask": mask}))
    return y


def packed_memories(blocks: list[Any], memory: Tensor) -> list[Memory] | None:
    """Keys and values (b, g, s, d) of a memory (b, s, w) for decoder blocks that a kernel knows.

    They are bfloat16 where products are int8.
    """
    scope = native.scope(blocks[0]) if blocks and reads_memory(blocks, memory) else None
    stack = None if scope is None or not memory.numel() else packed_stack(blocks, None)
    if stack is None or not stack.crosses or stack.packed.shape.width != memory.shape[-1]:
        return None
    memory, first = memory.contiguous(), stack.first
    half = scope is not None and scope.dtype == torch.int8 and first.head_width % 16 == 0
    shape = len(memory), first.kv_heads, memory.shape[1], first.head_width
    kind = torch.bfloat16 if half else torch.float32
    made = [[torch.empty(shape, dtype=kind) for _ in blocks] for _ in "kv"]
    keys, values = map(native.addresses, made)
    sizes = 0, *memory.shape[:2], torch.get_num_threads(), half, memory.data_ptr()
    job = _Memories(*sizes, ctypes.addressof(keys), ctypes.addressof(values))
    if not stack.packed.library.regard_remember(stack.packed.handle, ctypes.byref(job)):
        return None
    return [Memory(k, v) for k, v in zip(*made, strict=True)]


def real_lengths(x: Tensor, mask: Mask | None) -> Tensor | None:
    """Number of real vectors of each sequence (b, l, w), if nothing but padding after is masked."""
    if mask is None:
        return torch.full(x.shape[:1], x.shape[1])
    if type(mask) is not Padding:
        return None
    lengths = mask.keep.sum(1)
    first = torch.arange(x.shape[1]) < lengths.unsqueeze(1)
    return lengths if torch.equal(mask.keep, first) else None
