"""A stack of blocks that reads one token of each text at a time, as one call of a kernel."""

import ctypes
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import native
from regard.attention.attend import tell
from regard.attention.masks import Mask
from regard.attention.multihead import Cache
from regard.attention.positions import Rotary
from regard.attention.scores import Dot
from regard.attention.watch import watcher
from regard.layers.block import EncoderBlock, PreNorm
from regard.layers.feedforward import FeedForward, GatedFeedForward, gelu_tanh
from regard.layers.norm import GainNorm, LayerNorm, RMSNorm

# as the kernel numbers them
ACTS = [F.relu, F.gelu, gelu_tanh, F.silu]
MATRICES = ["qkv", "out", "gate", "inner", "outer"]


class _Shape(ctypes.Structure):
    names = ["layers", "width", "heads", "kv_heads", "head_width", "ffn_width", "act", "centred"]
    _fields_ = [(name, ctypes.c_long) for name in names] + [
        (name, ctypes.c_double) for name in ("eps", "scale")
    ]


class _Step(ctypes.Structure):
    names = ["sentences", "tokens", "room", "past", "turn", "turn_b", "turn_t"]
    names += ["bias", "bias_b", "bias_h", "bias_t", "last", "last_shift"]
    _fields_ = [(name, ctypes.c_long) for name in names]


class _Parts(NamedTuple):
    """What a block is made of, and what must be alike in all blocks of a stack."""

    weights: list[Tensor | None]
    columns: int
    alike: tuple


class Stack:
    """Blocks whose weights a kernel reads where they lie."""

    def __init__(
        self,
        blocks: Sequence[EncoderBlock],
        norm: nn.Module,
        parts: Sequence[_Parts],
        library: ctypes.CDLL,
    ):
        self.blocks, self.position, self.norm = blocks, parts[0].alike[-1], norm
        self.weights = [part.weights for part in parts]  # so that they stay where they are
        *sizes, _, eps, scale, _ = parts[0].alike
        self.shape = _Shape(len(blocks), *sizes, eps, scale)
        rows = [[*map(_address, part.weights), part.columns] for part in parts]
        self.layers = torch.tensor(rows, dtype=torch.int64)
        self.kernel = library.regard_write
        self.places = (ctypes.c_void_p * (2 * len(blocks)))()

    @classmethod
    def of(cls, blocks: Sequence[nn.Module], norm: nn.Module) -> "Stack | None":
        """Return the stack of blocks that a norm ends, if there is a kernel for all of them."""
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"):
            return None
        parts = [part for block in blocks if (part := _parts(block)) is not None]
        if not parts or len(parts) < len(blocks) or not _plain(norm):
            return None
        first, weights = parts[0].alike, _pair(norm)
        kind, eps = first[-4:-2]
        ends = type(norm) is kind and norm.eps == eps and all(map(_readable, weights))
        if not ends or any(part.alike != first for part in parts):
            return None
        library = native.library()
        some = cast(Sequence[EncoderBlock], blocks)
        return None if library is None else cls(some, norm, parts, library)

    def __call__(
        self, x: Tensor, at: Tensor, mask: Mask | None, bias: Tensor | None, caches: list[Cache]
    ) -> Tensor:
        """Pass (b, t, w) through all blocks, each of them adding to its cache, and the norm."""
        shape, (b, t, _), past = self.shape, x.shape, caches[0].length
        h, d, keys = shape.heads, shape.head_width, past + t
        for cache in caches:
            cache.take(t, at)
        extra = bias
        if mask is not None:
            extra, blind = mask.additive(slice(0, t), slice(0, keys), x)
            if blind is not None:
                extra = extra.masked_fill(blind, -torch.inf)
            extra = extra if bias is None else extra + bias
        step = _Step(b, t, caches[0].room, past)
        step.last, step.last_shift = map(_address, _pair(self.norm))
        if self.position is not None:
            turn = self.position.turns(x.dtype, d, at).squeeze(-2)
            step.turn, step.turn_t = turn.data_ptr(), turn.stride(-2)
            step.turn_b = turn.stride(0) if turn.ndim == 3 else 0
        if extra is not None:
            extra = extra.to(x.dtype).expand(b, h, t, keys)
            extra = extra if extra.stride(-1) == 1 else extra.contiguous()
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


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _plain(*modules: nn.Module) -> bool:
    """Tell whether nobody listens to these modules or computes their weights."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or hasattr(m, "parametrizations") for m in modules
    )


def _parts(block: nn.Module) -> _Parts | None:
    """Take a block apart, if the kernel knows every part of it."""
    if type(block) is not EncoderBlock or block.training:
        return None
    look, think = block.attention, block.feed_forward
    around = [block.around_attention, block.around_feed_forward]
    norms, position = [one.norm for one in around], look.position
    if (
        type(think) not in (FeedForward, GatedFeedForward)
        or think.act not in ACTS
        or any(type(one) is not PreNorm for one in around)
        or any(type(norm) not in (LayerNorm, GainNorm, RMSNorm) for norm in norms)
        or type(norms[0]) is not type(norms[1])
        or norms[0].eps != norms[1].eps
        or type(look.score) is not Dot
        or look.compares
        or (look.turns and type(position).rotate is not Rotary.rotate)
    ):
        return None
    think = cast(FeedForward | GatedFeedForward, think)
    gate = think.gate if isinstance(think, GatedFeedForward) else None
    matrices = [look.qkv, look.out, gate, think.inner, think.outer]
    there = [matrix for matrix in matrices if matrix is not None]
    if not _plain(block, look, think, *around, *norms, *there):
        return None
    weights = list(chain.from_iterable(map(_pair, [norms[0], *matrices[:2], norms[1]])))
    weights += list(chain.from_iterable(map(_pair, matrices[2:])))
    columns = 0
    for i, matrix in enumerate(matrices):
        if matrix is not None and not matrix.weight.is_contiguous():
            columns |= 1 << i
    if not all(map(_readable, weights)):
        return None
    scale = look.head_width**-0.5 if look.score.scale is None else look.score.scale
    sizes = look.qkv.in_features, look.heads, look.kv_heads, look.head_width
    kind, eps = type(norms[0]), norms[0].eps
    more = think.inner.out_features, ACTS.index(think.act), kind is not RMSNorm
    alike = (*sizes, *more, kind, eps, scale, position if look.turns else None)
    return _Parts(weights, columns, alike)


def _readable(x: Tensor | None) -> bool:
    """Tell whether the kernel can read a weight where it lies."""
    return x is None or (
        x.dtype == torch.float32 and x.is_cpu and (x.is_contiguous() or x.t().is_contiguous())
    )


def _pair(module: nn.Module | None) -> list[Tensor | None]:
    """Return the weight and the bias of a module."""
    return [getattr(module, "weight", None), getattr(module, "bias", None)]
