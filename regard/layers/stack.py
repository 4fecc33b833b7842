"""A stack of blocks that reads one token of each text at a time, as one call of a kernel."""

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard import native
from regard.attention.attend import tell
from regard.attention.masks import Mask
from regard.attention.multihead import Cache
from regard.attention.watch import watcher
from regard.layers.block import EncoderBlock
from regard.layers.norm import RMSNorm
from regard.layers.parts import Parts, added, pair, plain, readable, take_apart
from regard.native.functions import laid


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

    def __init__(
        self,
        blocks: Sequence[EncoderBlock],
        norm: nn.Module,
        parts: Sequence[Parts],
        library: ctypes.CDLL,
    ):
        first = parts[0]
        self.blocks, self.position, self.norm = blocks, first.position, norm
        # so that their memory stays, whatever becomes of the model
        self.weights = [w.detach() for part in parts for w in part.weights if w is not None]
        centred = first.norm is not RMSNorm
        self.shape = _Shape(len(blocks), *first[2:8], centred, first.eps, first.scale)
        rows = [[*map(native.address, part.weights), part.columns] for part in parts]
        self.layers = torch.tensor(rows, dtype=torch.int64)
        self.kernel = library.regard_write
        self.places = (ctypes.c_void_p * (2 * len(blocks)))()

    @classmethod
    def of(cls, blocks: Sequence[nn.Module], norm: nn.Module) -> "Stack | None":
        """Return the stack of blocks that a norm ends, if there is a kernel for all of them."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        parts = [part for block in blocks if (part := _apart(block)) is not None]
        if not parts or len(parts) < len(blocks) or not plain(norm):
            return None
        first = parts[0]
        ends = type(norm) is first.norm and cast(Any, norm).eps == first.eps
        if not ends or not all(map(readable, pair(norm))):
            return None
        library = native.kernels()
        if library is None or any(part[2:] != first[2:] for part in parts):
            return None
        return cls(cast(Sequence[EncoderBlock], blocks), norm, parts, library)

    def __call__(
        self, x: Tensor, at: Tensor, mask: Mask | None, bias: Tensor | None, caches: list[Cache]
    ) -> Tensor:
        """Pass (b, t, w) through all blocks, each of them adding to its cache, and the norm."""
        shape, (b, t, _), past = self.shape, x.shape, caches[0].length
        h, d, keys = shape.heads, shape.head_width, past + t
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
        for i, place in enumerate(chain((c.k for c in caches), (c.v for c in caches))):
            self.places[i] = place.data_ptr()
        x = x.clone(memory_format=torch.contiguous_format)
        q = x.new_empty(len(caches), b, t, h, d)
        room = shape.width + (2 * h + 2 * shape.kv_heads) * d + 2 * shape.ffn_width
        scratch = x.new_empty(b * t * room + b * shape.kv_heads * (keys + 16))
        half = ctypes.sizeof(self.places) // 2
        values = ctypes.byref(self.places, half)
        self.kernel(
            ctypes.byref(shape),
            self.layers.data_ptr(),
            ctypes.byref(step),
            self.places,
            values,
            x.data_ptr(),
            q.data_ptr(),
            scratch.data_ptr(),
        )
        if watcher() is not None:
            for block, cache, asked in zip(self.blocks, caches, q, strict=True):
                look = block.attention
                tell(look, asked.transpose(1, 2), cache.k[:, :, :keys], look.score, bias, mask)
        return x


def _apart(block: nn.Module) -> Parts | None:
    """Take a block that is not trained apart, if nobody listens to it."""
    if type(block) is not EncoderBlock or block.training or not plain(block):
        return None
    around: list[nn.Module] = [block.around_attention, block.around_feed_forward]
    return take_apart(block.attention, block.feed_forward, around)
