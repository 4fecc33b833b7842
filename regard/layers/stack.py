"""A stack of blocks that reads one token of each text at a time, as one call of a kernel."""

import ctypes
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard import native
from regard.attention.attend import record_attention
from regard.attention.masks import Mask
from regard.attention.multihead import Cache
from regard.attention.watch import watcher
from regard.layers.exact import Parts, pair, plain, readable, take_apart
from regard.layers.norm import RMSNorm
from regard.native.functions import laid


def added(mask: Mask | None, bias: Tensor | None, like: Tensor, keys: int) -> Tensor | None:
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


class Stack:
    """Blocks whose weights a kernel reads where they lie."""

    def __init__(self, blocks: Sequence[Any], norm: nn.Module, parts: Sequence[Parts]):
        first = parts[0]
        self.blocks, self.position, self.norm = blocks, first.position, norm
        # so that their memory stays, whatever becomes of the model
        self.weights = [w.detach() for part in parts for w in part.weights if w is not None]
        centred = first.norm is not RMSNorm
        self.shape = _Shape(len(blocks), *first[2:8], centred, first.eps, first.scale)
        rows = [[*map(native.address, part.weights), part.columns] for part in parts]
        self.layers = torch.tensor(rows, dtype=torch.int64)

    @classmethod
    def of(cls, blocks: Sequence[nn.Module], norm: nn.Module) -> "Stack | None":
        """Return the stack of blocks that a norm ends, if they are alike and known exactly."""
        parts = [part for block in blocks if (part := take_apart(block, False)) is not None]
        if not parts or len(parts) < len(blocks) or type(norm) is not parts[0].norm:
            return None
        first, (weight, shift) = parts[0], pair(norm)
        ends = plain(norm) and cast(Any, norm).eps == first.eps
        ends = ends and readable(weight, (first.width,))
        if not ends or not (shift is None or readable(shift, (first.width,))):
            return None
        # of the numbers that must be alike, how matrices are laid is none
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
        extra = added(mask, bias, x, keys)
        step = _Step(b, t, caches[0].room, past)
        step.last, step.last_shift = map(native.address, pair(self.norm))
        if self.position is not None:
            turn = self.position.turns(x.dtype, d, at).squeeze(-2)
            step.turn, step.turn_t = turn.data_ptr(), turn.stride(-2)
            step.turn_b = turn.stride(0) if turn.ndim == 3 else 0
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
        library.regard_write(
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
            for block, cache, asked in zip(self.blocks, caches, q, strict=True):
                look = block.attention
                record_attention(
                    look, asked.transpose(1, 2), cache.k[:, :, :keys], look.score, bias, mask
                )
        return y
