"""Kernels that compute whole stacks of blocks: one for training, one for decoding.

Each is tried by `try_kernel` and returns None where it does not know every part exactly.
"""

import ctypes
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard import native
from regard.attention.attend import record_attention
from regard.attention.masks import Mask
from regard.attention.multihead import Cache, Memory
from regard.attention.watch import watcher
from regard.layers.fast.half import try_half
from regard.layers.fast.kernel_weights import (
    BlockWeights,
    checked_plan,
    kernel_can_read,
    kernel_weights,
    unmodified,
    weight_and_bias,
)
from regard.layers.norm import RMSNorm
from regard.native.functions import BLOCK_WEIGHTS, MAX_KERNEL_LENGTH, BlockSizes, laid
from regard.native.functions import blocks as native_blocks

# Wider blocks are left to PyTorch, whose products of many rows at once are better then.
_WIDEST_TRAINED = 256
# Of more tokens at once, as in a prompt, PyTorch's products are better, too.
_MAX_DECODED_TOKENS = 32
_CROSS_WEIGHTS = 6  # of a block, after its others
_MEMORY_STRETCH = 64  # keys of a memory that are read at once, as in decode.c


def try_kernel(
    blocks: list[nn.Module],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    masks: list[Any],
    bias: Tensor | None,
    caches: Sequence[Cache] | None,
    memory: "CrossMemory | None" = None,
) -> Tensor | None:
    """Run a stack by a kernel, if there is one for blocks that all have the same mask.

    Args:
        blocks: blocks of the stack
        x: input (b, l, w)
        norm: norm after the last block
        at: positions of x
        masks: mask of each block
        bias: added to the scores of all blocks
        caches: keys and values of decoding, one for each block
        memory: what blocks with cross-attention read
    """
    mask = masks[0]
    if any(one is not mask for one in masks) or not (mask is None or isinstance(mask, Mask)):
        return None
    if caches is None:
        if (y := try_half(blocks, x, mask, bias)) is not None:
            return y if norm is None else norm(y)
        return try_train_kernel(blocks, x, norm, at, mask, bias)
    return try_decode_kernel(blocks, x, norm, at, mask, bias, caches, memory)


def try_train_kernel(
    blocks: list[Any],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    mask: Mask | None,
    bias: Tensor | None,
) -> Tensor | None:
    """Pass x through blocks in training, by a kernel that also has their gradients.

    Args:
        blocks: blocks of the stack
        x: input (b, l, w)
        norm: norm after the last block
        at: positions of x
        mask: mask of all blocks
        bias: added to the scores of all blocks
    """
    if not torch.is_grad_enabled() or x.ndim != 3 or not x.numel() or type(x) is not Tensor:
        return None
    b, l, w = x.shape
    if l > MAX_KERNEL_LENGTH or w > _WIDEST_TRAINED or not x.is_cpu or x.dtype != torch.float32:
        return None
    if bias is not None and (bias.requires_grad or type(bias) is not Tensor):
        return None
    parts = checked_plan("train", blocks, lambda: _trained(blocks))
    if parts is None or parts[0].width != w:
        return None
    first = parts[0]
    causal = mask is not None and bias is None and mask.aligned(l, l)
    cos_sin, extra = None, None if causal else mask_and_bias(mask, bias, x, l)
    centred = first.norm is not RMSNorm
    n = BlockSizes(b, l, *first[2:8], centred, causal, eps=first.eps, scale=first.scale)
    if first.position is not None:
        cos_sin = first.position.cos_sin(x.dtype, first.head_width, at).squeeze(-2).contiguous()
    if extra is not None:
        extra = laid(extra, b, first.heads, l, l)
    weights = list(chain.from_iterable(part.weights for part in parts))
    watched = watcher() is not None
    answer = native_blocks(blocks[0], n, x.contiguous(), weights, cos_sin, extra, watched)
    if answer is None:
        return None
    y, projected = answer
    if projected is not None:
        for block, qkv in zip(blocks, projected, strict=True):
            q, k = qkv.transpose(1, 2).split([first.heads, first.kv_heads, first.kv_heads], 1)[:2]
            record_attention(block.attention, q, k, block.attention.score, bias, mask)
    return y if norm is None else norm(y)


def _trained(blocks: Sequence[nn.Module]) -> list[BlockWeights] | None:
    """Return the weights of blocks that are alike and in training, if all of them learn."""
    parts = [part for block in blocks if (part := kernel_weights(block, True)) is not None]
    if len(parts) < len(blocks) or any(part[1:] != parts[0][1:] for part in parts):
        return None
    weights = chain.from_iterable(part.weights for part in parts)
    learning = all(one is None or one.requires_grad for one in weights)
    fits = not parts[0].columns and not parts[0].ffn_width % 16
    return parts if learning and fits else None


def try_decode_kernel(
    blocks: list[Any],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    mask: Mask | None,
    bias: Tensor | None,
    caches: Sequence[Cache],
    memory: "CrossMemory | None" = None,
) -> Tensor | None:
    """Pass the next tokens of each text through blocks that decode, by a kernel.

    Args:
        blocks: blocks of the stack
        x: input (b, l, w)
        norm: norm after the last block
        at: positions of x
        mask: mask of all blocks
        bias: added to the scores of all blocks
        caches: keys and values, one for each block
        memory: what blocks with cross-attention read
    """
    first = caches[0]
    if (
        (memory is None and (norm is None or first.length == 0))
        or (memory is not None and not memory.readable())
        or x.shape[-2] > _MAX_DECODED_TOKENS
        or torch.is_grad_enabled()
        or x.ndim != 3
        or not x.numel()
        or any(type(y) is not Tensor for y in (x, bias) if y is not None)
        or x.dtype != torch.float32
        or not x.is_cpu
        or not all(map(_ready, caches))
    ):
        return None
    modules = [*blocks, *([] if norm is None else [norm])]
    kernel = checked_plan("decode", modules, lambda: DecodeKernel.of(blocks, norm), during=first)
    library = None if kernel is None else native.kernels(blocks[0])
    if kernel is None or library is None or kernel.shape.width != x.shape[-1]:
        return None
    if kernel.crosses != (memory is not None):
        return None
    return kernel(library, x, at, mask, bias, list(caches), memory)


def _ready(cache: Cache) -> bool:
    """True if a kernel can add to a cache."""
    exact = type(cache) is Cache and "append" not in vars(cache)
    return exact and cache.k.dtype == cache.v.dtype == torch.float32 and cache.k.is_cpu


class CrossMemory(NamedTuple):
    """What the cross-attention of each block of a decoder reads, and its mask."""

    layers: Sequence[Memory]
    mask: Mask | None = None

    def readable(self) -> bool:
        """True if a kernel can read all of it: heads of numbers side by side."""
        first = self.layers[0]
        steps, kind = (first.k.stride(), first.v.stride()), first.k.dtype
        half = kind == torch.bfloat16 and not first.k.shape[-1] % 16
        return (
            (self.mask is None or isinstance(self.mask, Mask))
            and (half or kind == torch.float32)
            and all(
                type(x) is Tensor and x.dtype == kind and x.is_cpu and x.stride(-1) == 1
                for layer in self.layers
                for x in layer
            )
            and all((one.k.stride(), one.v.stride()) == steps for one in self.layers)
        )


def reads_memory(blocks: Sequence[nn.Module], memory: Tensor) -> bool:
    """True if a kernel will decode with blocks that read a memory."""
    if not blocks or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if type(memory) is not Tensor or memory.dtype != torch.float32 or not memory.is_cpu:
        return False
    kernel = checked_plan("decode", blocks, lambda: DecodeKernel.of(blocks, None))
    return kernel is not None and native.kernels(blocks[0]) is not None


def mask_and_bias(mask: Mask | None, bias: Tensor | None, like: Tensor, keys: int) -> Tensor | None:
    """Return a mask plus a bias as one bias for (b, q, w), fully masked rows -inf throughout."""
    if mask is None:
        return bias
    extra, fully_masked = mask.additive(slice(0, like.shape[1]), slice(0, keys), like)
    extra = extra if fully_masked is None else extra.masked_fill(fully_masked, -torch.inf)
    return extra if bias is None else extra + bias


class _Shape(ctypes.Structure):
    names = ["layers", "width", "heads", "kv_heads", "head_width", "ffn_width", "act", "centred"]
    _fields_ = [(name, ctypes.c_long) for name in names] + [
        (name, ctypes.c_double) for name in ("eps", "scale")
    ]


class _Step(ctypes.Structure):
    names = ["sentences", "tokens", "room", "past", "turn", "turn_b", "turn_t"]
    names += ["bias", "bias_b", "bias_h", "bias_t", "last", "last_shift"]
    names += ["memory", "key_b", "key_g", "key_s", "value_b", "value_g", "value_s"]
    names += ["memory_bias", "memory_bias_b", "memory_bias_h", "memory_bias_t"]
    names += ["threads", "memory_half"]
    _fields_ = [(name, ctypes.c_long) for name in names]


class DecodeKernel:
    """A stack that decodes in one call of C, which reads the weights where they lie."""

    def __init__(
        self, blocks: Sequence[Any], norm: nn.Module | None, parts: Sequence[BlockWeights]
    ):
        first = parts[0]
        self.crosses = len(first.weights) > BLOCK_WEIGHTS
        self.blocks, self.position, self.norm = blocks, first.position, norm
        # so that their memory stays, whatever becomes of the model
        self.weights = [w.detach() for part in parts for w in part.weights if w is not None]
        centred = first.norm is not RMSNorm
        self.shape = _Shape(len(blocks), *first[2:8], centred, first.eps, first.scale)
        none = [0] * (0 if self.crosses else _CROSS_WEIGHTS)
        rows = [[*map(native.address, part.weights), *none, part.columns] for part in parts]
        self.layers = torch.tensor(rows, dtype=torch.int64)

    @classmethod
    def of(cls, blocks: Sequence[nn.Module], norm: nn.Module | None) -> "DecodeKernel | None":
        """Return the kernel of blocks, and of a last norm, if all are alike and known exactly."""
        parts = [part for block in blocks if (part := kernel_weights(block, False)) is not None]
        if not parts or len(parts) < len(blocks):
            return None
        first, (weight, shift) = parts[0], weight_and_bias(norm)
        if norm is not None:
            ends = type(norm) is first.norm and unmodified(norm)
            ends = ends and cast(Any, norm).eps == first.eps
            ends = ends and kernel_can_read(weight, (first.width,))
            if not ends or not (shift is None or kernel_can_read(shift, (first.width,))):
                return None
        # matrices may be laid by rows in one block and by columns in another
        alike = all(part[2:] == first[2:] for part in parts)
        alike = alike and len({len(part.weights) for part in parts}) == 1
        return cls(blocks, norm, parts) if alike else None

    def __call__(
        self,
        library: ctypes.CDLL,
        x: Tensor,
        at: Tensor,
        mask: Mask | None,
        bias: Tensor | None,
        caches: list[Cache],
        memory: CrossMemory | None = None,
    ) -> Tensor | None:
        """Pass (b, t, w) through all blocks, each of them adding to its cache, and the norm.

        Returns nothing, and leaves the caches as they were, if a number is not finite.
        """
        shape, (b, t, _), past = self.shape, x.shape, caches[0].length
        h, d, keys = shape.heads, shape.head_width, past + t
        before = [list(cache._at) for cache in caches]
        for cache in caches:
            cache.take(t, at)
        extra = mask_and_bias(mask, bias, x, keys)
        step = _Step(b, t, caches[0].room, past)
        step.last, step.last_shift = map(native.address, weight_and_bias(self.norm))
        if self.position is not None:
            cos_sin = self.position.cos_sin(x.dtype, d, at).squeeze(-2)
            step.turn, step.turn_t = cos_sin.data_ptr(), cos_sin.stride(-2)
            step.turn_b = cos_sin.stride(0) if cos_sin.ndim == 3 else 0
        if extra is not None:
            extra = laid(extra, b, h, t, keys)
            step.bias = extra.data_ptr()
            step.bias_b, step.bias_h, step.bias_t = extra.stride()[:3]
        own = native.addresses([*(c.k for c in caches), *(c.v for c in caches)])
        read = native.addresses([])
        y = x.clone(memory_format=torch.contiguous_format)
        q = x.new_empty(2 if self.crosses else 1, len(caches), b, t, h, d)
        room = shape.width + (2 * h + 2 * shape.kv_heads) * d + 2 * shape.ffn_width
        room = b * t * room + b * shape.kv_heads * (keys + 16)
        memory_bias = None
        if memory is not None:
            (k, v), length = memory.layers[0], memory.layers[0].k.shape[2]
            step.memory, step.threads = length, torch.get_num_threads()
            step.memory_half = k.dtype == torch.bfloat16
            step.key_b, step.key_g, step.key_s = k.stride()[:3]
            step.value_b, step.value_g, step.value_s = v.stride()[:3]
            memory_bias = mask_and_bias(memory.mask, None, x, length)
            if memory_bias is not None:
                memory_bias = laid(memory_bias, b, h, t, length)
                step.memory_bias = memory_bias.data_ptr()
                strides = memory_bias.stride()[:3]
                step.memory_bias_b, step.memory_bias_h, step.memory_bias_t = strides
            read = native.addresses([*(m.k for m in memory.layers), *(m.v for m in memory.layers)])
            stretches = -(-length // _MEMORY_STRETCH)
            room += t * h * (b * stretches * (d + 2) + step.threads * _MEMORY_STRETCH)
        scratch = x.new_empty(room)
        halves = [ctypes.byref(one, ctypes.sizeof(one) // 2) for one in (own, read)]
        library.regard_decode(
            ctypes.byref(shape),
            self.layers.data_ptr(),
            ctypes.byref(step),
            *(own, halves[0], read, halves[1]),
            y.data_ptr(),
            q[0].data_ptr(),
            q[-1].data_ptr(),
            scratch.data_ptr(),
        )
        if not math.isfinite(y.sum().item()):
            for cache, was in zip(caches, before, strict=True):
                cache.length, cache._at = past, was
            return None
        if watcher() is not None:
            asks = q.transpose(-2, -3)
            read_by = [None] * len(caches) if memory is None else memory.layers
            for n, (block, cache, one) in enumerate(zip(self.blocks, caches, read_by, strict=True)):
                layer, k = block.attention, cache.k[:, :, :keys]
                record_attention(layer, asks[0, n], k, layer.score, bias, mask)
                if one is not None and memory is not None:
                    layer = block.cross
                    k = one.to(x.dtype).k
                    record_attention(layer, asks[1, n], k, layer.score, None, memory.mask)
        return y
