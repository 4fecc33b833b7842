"""Kernels that compute whole stacks of blocks: one for training, one for decoding.

Each is tried by `try_kernel` and returns None where it does not know every part exactly.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard import native
from regard.attention.attend import record_attention
from regard.attention.masks import Mask
from regard.attention.multihead import Cache
from regard.attention.watch import watcher
from regard.layers.kernel_weights import (
    BlockWeights,
    Fingerprint,
    kernel_can_read,
    kernel_weights,
    unmodified,
    unpatched,
    weight_and_bias,
)
from regard.layers.norm import RMSNorm
from regard.native.functions import LONGEST, Sizes, laid
from regard.native.functions import blocks as native_blocks
from regard.native.torch_private import traced

# Wider blocks are left to PyTorch, whose products of many rows at once are better then.
WIDEST = 256
# Of more tokens at once, as in a prompt, PyTorch's products are better, too.
MAX_DECODED_TOKENS = 32


def try_kernel(
    blocks: list[nn.Module],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    masks: list[Any],
    bias: Tensor | None,
    caches: Sequence[Cache] | None,
) -> Tensor | None:
    """Run a stack by a kernel, if there is one for blocks that all have the same mask."""
    mask = masks[0]
    if any(one is not mask for one in masks) or not (mask is None or isinstance(mask, Mask)):
        return None
    if caches is None:
        return try_train_kernel(blocks, x, norm, at, mask, bias)
    return try_decode_kernel(blocks, x, norm, at, mask, bias, caches)


def _plan(
    name: str, modules: Sequence[nn.Module], make: Callable[[], Any], during: object = None
) -> Any:
    """Return what `make` makes of modules for a kernel, anew if more than numbers has changed.

    Where a model is frozen that is checked once for each text (as long as its cache, `during`,
    lives), and then only whether somebody has added a hook.
    """
    scope = native.scope(modules[0])
    if scope is None or traced():
        return None
    key = (name, *map(id, modules))
    plan, fingerprint = scope.plans.get(key, (None, None))
    if fingerprint is not None and scope.copies is not None and during in fingerprint.checked:
        return plan if fingerprint.unhooked() else None
    if not unpatched():
        return None
    if fingerprint is not None and fingerprint.same():
        if during is not None:
            fingerprint.checked.add(during)
        return plan
    plan = make()
    scope.plans[key] = (plan, Fingerprint(modules)) if plan is not None else (None, None)
    return plan


def try_train_kernel(
    blocks: list[Any],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    mask: Mask | None,
    bias: Tensor | None,
) -> Tensor | None:
    """Pass x through blocks in training, by a kernel that also has their gradients."""
    if not torch.is_grad_enabled() or x.ndim != 3 or not x.numel() or type(x) is not Tensor:
        return None
    b, l, w = x.shape
    if l > LONGEST or w > WIDEST or not x.is_cpu or x.dtype != torch.float32:
        return None
    if bias is not None and (bias.requires_grad or type(bias) is not Tensor):
        return None
    parts = _plan("train", blocks, lambda: _trained(blocks))
    if parts is None or parts[0].width != w:
        return None
    first = parts[0]
    causal = mask is not None and bias is None and mask.aligned(l, l)
    cos_sin, extra = None, None if causal else mask_and_bias(mask, bias, x, l)
    centred = first.norm is not RMSNorm
    n = Sizes(b, l, *first[2:8], centred, causal, eps=first.eps, scale=first.scale)
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
) -> Tensor | None:
    """Pass the next tokens of each text through blocks that decode, by a kernel."""
    first = caches[0]
    if (
        norm is None
        or first.length == 0
        or x.shape[-2] > MAX_DECODED_TOKENS
        or torch.is_grad_enabled()
        or x.ndim != 3
        or not x.numel()
        or any(type(y) is not Tensor for y in (x, bias) if y is not None)
        or x.dtype != torch.float32
        or not x.is_cpu
        or not all(map(_ready, caches))
    ):
        return None
    modules = [*blocks, norm]
    kernel = _plan("decode", modules, lambda: DecodeKernel.of(blocks, norm), during=first)
    library = None if kernel is None else native.kernels(blocks[0])
    if kernel is None or library is None or kernel.shape.width != x.shape[-1]:
        return None
    return kernel(library, x, at, mask, bias, list(caches))


def _ready(cache: Cache) -> bool:
    """Tell whether a kernel can add to a cache."""
    exact = type(cache) is Cache and "append" not in vars(cache)
    return exact and cache.k.dtype == cache.v.dtype == torch.float32 and cache.k.is_cpu


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
    _fields_ = [(name, ctypes.c_long) for name in names]


class DecodeKernel:
    """A stack that decodes in one call of C, which reads the weights where they lie."""

    def __init__(self, blocks: Sequence[Any], norm: nn.Module, parts: Sequence[BlockWeights]):
        first = parts[0]
        self.blocks, self.position, self.norm = blocks, first.position, norm
        # so that their memory stays, whatever becomes of the model
        self.weights = [w.detach() for part in parts for w in part.weights if w is not None]
        centred = first.norm is not RMSNorm
        self.shape = _Shape(len(blocks), *first[2:8], centred, first.eps, first.scale)
        rows = [[*map(native.address, part.weights), part.columns] for part in parts]
        self.layers = torch.tensor(rows, dtype=torch.int64)

    @classmethod
    def of(cls, blocks: Sequence[nn.Module], norm: nn.Module) -> "DecodeKernel | None":
        """Return the kernel of blocks that a norm ends, if they are alike and known exactly."""
        parts = [part for block in blocks if (part := kernel_weights(block, False)) is not None]
        if not parts or len(parts) < len(blocks) or type(norm) is not parts[0].norm:
            return None
        first, (weight, shift) = parts[0], weight_and_bias(norm)
        ends = unmodified(norm) and cast(Any, norm).eps == first.eps
        ends = ends and kernel_can_read(weight, (first.width,))
        if not ends or not (shift is None or kernel_can_read(shift, (first.width,))):
            return None
        # matrices may be laid by rows in one block and by columns in another
        return cls(blocks, norm, parts) if all(part[2:] == first[2:] for part in parts) else None

    def __call__(
        self,
        library: ctypes.CDLL,
        x: Tensor,
        at: Tensor,
        mask: Mask | None,
        bias: Tensor | None,
        caches: list[Cache],
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
        places = (ctypes.c_void_p * (2 * len(caches)))()
        for i, place in enumerate(chain((c.k for c in caches), (c.v for c in caches))):
            places[i] = place.data_ptr()
        y = x.clone(memory_format=torch.contiguous_format)
        q = x.new_empty(len(caches), b, t, h, d)
        room = shape.width + (2 * h + 2 * shape.kv_heads) * d + 2 * shape.ffn_width
        scratch = x.new_empty(b * t * room + b * shape.kv_heads * (keys + 16))
        values = ctypes.byref(places, ctypes.sizeof(places) // 2)
        library.regard_decode(
            ctypes.byref(shape),
            self.layers.data_ptr(),
            ctypes.byref(step),
            places,
            values,
            y.data_ptr(),
            q.data_ptr(),
            scratch.data_ptr(),
        )
        if not math.isfinite(y.sum().item()):
            for cache, was in zip(caches, before, strict=True):
                cache.length, cache._at = past, was
            return None
        if watcher() is not None:
            for block, cache, own in zip(self.blocks, caches, q.transpose(2, 3), strict=True):
                layer, k = block.attention, cache.k[:, :, :keys]
                record_attention(layer, own, k, layer.score, bias, mask)
        return y
