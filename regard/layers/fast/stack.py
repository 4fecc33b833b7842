"""Stacks of blocks that write texts, and vocabulary heads, by kernels that read packed weights.

Packed weights are copies: they hold as long as the modules are what they were made of, and their
numbers have the same checksum. Whatever is not known exactly is left to PyTorch.
"""

import ctypes
import math
from collections.abc import Container, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn

from regard import native
from regard.attention.attend import record_attention
from regard.attention.masks import Mask
from regard.attention.multihead import Cache, Memory
from regard.attention.watch import watcher
from regard.errors import UsageError
from regard.layers.fast.kernel_weights import (
    BlockWeights,
    checked_plan,
    kernel_can_read,
    kernel_weights,
    unmodified,
    weight_and_bias,
)
from regard.layers.norm import RMSNorm
from regard.layers.residual import PostNorm, PreNorm
from regard.native.functions import BLOCK_WEIGHTS, laid

# No more weights than this are held a second time.
MOST_PACKED_BYTES = 2**30


class StackShape(ctypes.Structure):
    """Sizes of an engine or a stack, as in block.h."""

    names = ["width", "heads", "kv_heads", "head_width", "ffn_width", "act", "gated", "centred"]
    names += ["post", "readers", "writers", "target_vocab", "bytes"]
    _fields_ = [(name, ctypes.c_long) for name in names]
    fractions = ["eps", "scale", "source_scale", "target_scale", "head_scale"]
    _fields_ += [(name, ctypes.c_double) for name in fractions]


class Past(ctypes.Structure):
    """Keys and values of texts so far, as in write.c."""

    names = ["room", "rows", "longest", "keys", "values", "memory", "key_b", "key_g", "key_s"]
    names += ["value_b", "value_g", "value_s", "half", "memory_keys", "memory_values"]
    names += ["memory_mask", "memory_mask_b", "memory_mask_t", "queries", "asked"]
    _fields_ = [(name, ctypes.c_long) for name in names]


class _Step(ctypes.Structure):
    names = ["sentences", "tokens", "before", "causal", "threads", "turn", "bias", "mask"]
    names += ["turn_b", "turn_t", "mask_b", "mask_t", "bias_b", "bias_h", "bias_t", "x", "logits"]
    _fields_ = [("past", Past)] + [(name, ctypes.c_long) for name in names]


class PackedWeights:
    """Weights of blocks, of the norm after them, or of a head, packed for products in C."""

    def __init__(self, library: ctypes.CDLL, shape: StackShape, weights: Sequence[Tensor | None]):
        self.library, self.shape = library, shape
        # so that the memory of those that are not copied stays, whatever becomes of the model
        self.weights = [None if w is None else w.detach() for w in weights]
        self.numbers = native.numbers(self.weights)
        self.checksum = native.checksum(self.library, self.numbers)
        self.handle = library.regard_engine_new(ctypes.byref(shape), self.numbers)

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.regard_engine_free(self.handle)

    def holds(self) -> bool:
        """True if the numbers are those that were packed."""
        return self.checksum == native.checksum(self.library, self.numbers)

    @property
    def bytes(self) -> int:
        """Size of the weights that are held a second time."""
        return sum(w.nbytes for w in self.weights if w is not None and w.ndim == 2)


def refuse_int8(of: nn.Module) -> None:
    """Refuse to compute in float32 where int8 was asked for."""
    active = native.scope(of)
    if active is not None and active.dtype == torch.int8:
        raise UsageError(
            "quantise=int8 is done by kernels in C, which do not know this model or cannot be used "
            "here (regard doctor MODEL tells why); leave quantise out"
        )


def packed_bytes(scope: native.Scope) -> int:
    """Size of all weights that are held a second time."""
    return sum(made.bytes for made, _ in scope.kept.values() if made is not None)


def _packed(
    shape: StackShape, weights: Sequence[Tensor | None], of: object
) -> PackedWeights | None:
    """Weights packed in the data type that products are asked for in, where there is room."""
    scope, library = native.scope(of), native.plain()
    if scope is None or library is None:
        return None
    shape.bytes = scope.dtype == torch.int8
    new = sum(w.nbytes for w in weights if w is not None and w.ndim == 2)
    if new + packed_bytes(scope) > MOST_PACKED_BYTES:
        return None
    made = PackedWeights(library, shape, weights)
    return made if made.handle else None


def packed_head(head: nn.Linear, during: object = None) -> PackedWeights | None:
    """The weights of a vocabulary head, if a kernel knows it exactly."""

    def make() -> PackedWeights | None:
        weight, bias = weight_and_bias(head)
        known = kernel_can_read(weight, tuple(cast(Tensor, weight).shape)) and unmodified(head)
        if not known or not (bias is None or kernel_can_read(bias, (head.out_features,))):
            return None
        shape = StackShape(
            head.in_features, 1, 1, 1, 1, target_vocab=head.out_features, head_scale=1
        )
        return _packed(shape, [*[None] * 10, weight, bias], head)

    return checked_plan("head", [head], make, during, packed=True)


def step_logits(head: nn.Linear, x: Tensor, during: object) -> Tensor | None:
    """Logits (..., vocab) of the rows of a decoding step, by a kernel that knows the head."""
    if torch.is_grad_enabled() or not _plain(x) or not x.numel():
        return None
    made = packed_head(head, during)
    if made is None or made.shape.width != x.shape[-1]:
        return None
    y = x.clone(memory_format=torch.contiguous_format)
    logits = x.new_empty(*x.shape[:-1], head.out_features)
    rows = x.numel() // x.shape[-1]
    step = _Step(sentences=rows, tokens=1, threads=torch.get_num_threads())
    step.x, step.logits = y.data_ptr(), logits.data_ptr()
    done = made.library.regard_step(made.handle, ctypes.byref(step))
    return logits if done else None


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


class PackedStack(NamedTuple):
    """Blocks that write by a kernel, and what it does not do for them."""

    packed: PackedWeights
    blocks: Sequence[Any]
    first: BlockWeights
    crosses: bool

    @classmethod
    def of(cls, blocks: Sequence[nn.Module], norm: nn.Module | None) -> "PackedStack | None":
        """The stack of blocks, and of a last norm, if all are alike and known exactly."""
        around = getattr(blocks[0], "around_attention", None)
        order = PostNorm if type(around) is PostNorm else PreNorm
        parts = [kernel_weights(block, False, order) for block in blocks]
        first = parts[0]
        if first is None or any(
            part is None or part[2:] != first[2:] or len(part.weights) != len(first.weights)
            for part in parts
        ):
            return None
        weight, shift = weight_and_bias(norm)
        if norm is not None and type(norm) is not nn.Identity:
            ends = type(norm) is first.norm and unmodified(norm)
            ends = ends and cast(Any, norm).eps == first.eps
            ends = ends and kernel_can_read(weight, (first.width,))
            if not ends or not (shift is None or kernel_can_read(shift, (first.width,))):
                return None
        crosses = len(first.weights) > BLOCK_WEIGHTS
        shape = StackShape(*first[2:8])
        shape.gated, shape.centred = first.weights[8] is not None, first.norm is not RMSNorm
        shape.post, shape.head_scale = order is PostNorm, 1.0
        shape.readers, shape.writers = (0, len(blocks)) if crosses else (len(blocks), 0)
        shape.eps, shape.scale = first.eps, first.scale
        weights = [w for part in parts for w in cast(BlockWeights, part).weights]
        ends = [None, None, weight, shift, *[None] * 8]
        packed = _packed(shape, [*weights, *ends], blocks[0])
        return None if packed is None else cls(packed, blocks, first, crosses)

    def holds(self) -> bool:
        """True if the numbers are those that were packed."""
        return self.packed.holds()

    @property
    def bytes(self) -> int:
        """Size of the weights that are held a second time."""
        return self.packed.bytes

    def __call__(
        self,
        x: Tensor,
        at: Tensor,
        mask: Mask | None,
        bias: Tensor | None,
        caches: list[Cache],
        memory: CrossMemory | None = None,
    ) -> Tensor | None:
        """Pass (b, t, w) through all blocks, each of them adding to its cache, and the norm.

        Returns nothing, and leaves the caches as they were, if a number is not finite.

        Args:
            x: input (b, t, w)
            at: positions of x
            mask: mask of all blocks
            bias: added to the scores of all blocks
            caches: keys and values, one for each block
            memory: what blocks with cross-attention read
        """
        first, (b, t, _), past = self.first, x.shape, caches[0].length
        keys = past + t
        step = _Step(sentences=b, tokens=t, before=past, threads=torch.get_num_threads())
        causal = mask is not None and past == 0 and mask.aligned(t, t)
        hidden = None if mask is None or causal else _bytes(mask, b, t, keys)
        if hidden is False:
            return None
        held: list[Any] = [hidden]
        if isinstance(hidden, Tensor):
            step.mask, (step.mask_b, step.mask_t) = hidden.data_ptr(), hidden.stride()[:2]
        step.causal, step.past.rows, step.past.longest = causal, b * t, keys
        if memory is not None and not self._look(step.past, memory, b, t, held):
            return None
        if first.position is not None:
            cos_sin = first.position.cos_sin(x.dtype, first.head_width, at).squeeze(-2)
            step.turn, step.turn_t = cos_sin.data_ptr(), cos_sin.stride(-2)
            step.turn_b = cos_sin.stride(0) if cos_sin.ndim == 3 else 0
            held.append(cos_sin)
        if bias is not None:
            shared = laid(bias, b, first.heads, t, keys)
            step.bias, held = shared.data_ptr(), [*held, shared]
            step.bias_b, step.bias_h, step.bias_t = shared.stride()[:3]
        before = [list(cache._at) for cache in caches]
        for cache in caches:
            cache.take(t, at)
        own = native.addresses([*(c.k for c in caches), *(c.v for c in caches)])
        step.past.room, step.past.keys = caches[0].room, ctypes.addressof(own)
        step.past.values = ctypes.addressof(own) + ctypes.sizeof(own) // 2
        watched = watcher() is not None
        q = x.new_empty(2, len(caches), b, t, first.heads, first.head_width) if watched else None
        if q is not None:
            step.past.queries, step.past.asked = q[0].data_ptr(), q[1].data_ptr()
        y = x.clone(memory_format=torch.contiguous_format)
        step.x = y.data_ptr()
        done = self.packed.library.regard_step(self.packed.handle, ctypes.byref(step))
        if not done or not math.isfinite(y.sum().item()):
            for cache, was in zip(caches, before, strict=True):
                cache.length, cache._at = past, was
            return None
        if q is not None:
            self._record(q.transpose(-2, -3), caches, keys, mask, bias, memory)
        return y

    def _look(self, past: Past, memory: CrossMemory, b: int, t: int, held: list[Any]) -> bool:
        """Tell a kernel where a memory lies; false if it cannot read its mask."""
        (k, v), length = memory.layers[0], memory.layers[0].k.shape[2]
        past.memory, past.longest = length, max(past.longest, length)
        past.half = k.dtype == torch.bfloat16
        past.key_b, past.key_g, past.key_s = k.stride()[:3]
        past.value_b, past.value_g, past.value_s = v.stride()[:3]
        mask = None if memory.mask is None else _bytes(memory.mask, b, t, length)
        read = native.addresses([*(m.k for m in memory.layers), *(m.v for m in memory.layers)])
        past.memory_keys = ctypes.addressof(read)
        past.memory_values = ctypes.addressof(read) + ctypes.sizeof(read) // 2
        held += [mask, read]
        if isinstance(mask, Tensor):
            past.memory_mask = mask.data_ptr()
            past.memory_mask_b, past.memory_mask_t = mask.stride()[:2]
        return mask is not False

    def _record(
        self,
        asks: Tensor,
        caches: list[Cache],
        keys: int,
        mask: Mask | None,
        bias: Tensor | None,
        memory: CrossMemory | None,
    ) -> None:
        """Tell those who watch what was asked (2, blocks, b, h, t, d), and of which keys.

        Args:
            asks: queries of self-attention and of cross-attention
            caches: keys and values, one for each block
            keys: how many keys there are
            mask: mask of all blocks
            bias: added to the scores of all blocks
            memory: what blocks with cross-attention read
        """
        read_by = [None] * len(caches) if memory is None else memory.layers
        for n, (block, cache, one) in enumerate(zip(self.blocks, caches, read_by, strict=True)):
            layer, k = block.attention, cache.k[:, :, :keys]
            record_attention(layer, asks[0, n], k, layer.score, bias, mask)
            if one is not None and memory is not None:
                layer, k = block.cross, one.to(asks.dtype).k
                record_attention(layer, asks[1, n], k, layer.score, None, memory.mask)


def packed_stack(
    blocks: Sequence[nn.Module], norm: nn.Module | None, during: object = None
) -> PackedStack | None:
    """The stack of blocks, and of the norm after them, if all of it is known exactly."""
    modules = [*blocks, *([] if norm is None else [norm])]
    return checked_plan("write", modules, lambda: PackedStack.of(blocks, norm), during, packed=True)


def _bytes(mask: Mask, b: int, t: int, keys: int) -> Tensor | Literal[False]:
    """A mask as (b, t, keys) bytes, where rows may be the same memory; False if heads differ."""
    tile = mask.tile(slice(0, t), slice(0, keys))
    while tile.ndim > 3:
        if tile.shape[-3] != 1:
            return False
        tile = tile.squeeze(-3)
    tile = tile.to(torch.uint8).expand(b, t, keys)
    return tile if tile.stride(-1) == 1 else tile.contiguous()


def _plain(*tensors: Tensor | None) -> bool:
    """True if tensors are there as plain float32 on the CPU, or are not there."""
    return all(
        x is None or (type(x) is Tensor and x.dtype == torch.float32 and x.is_cpu) for x in tensors
    )


def changed_part(model: nn.Module) -> str:
    """What of a model is in training, or was changed by somebody, else ""."""
    changed = [name for name, m in model.named_modules() if m.training or not unmodified(m)]
    if not changed:
        return ""
    return f"{changed[0] or 'the model'} is in training, has a hook or a method of its own"


def known_embedding(embed: Any, positions: Container[type]) -> bool:
    """True if an embedding is a table of tokens to which a known position is added."""
    return (
        type(embed.position) in positions
        and embed.types is None
        and type(embed.widen) is nn.Identity
        and type(embed.tokens) is nn.Embedding
        and embed.tokens.max_norm is None
        and kernel_can_read(embed.tokens.weight, tuple(embed.tokens.weight.shape))
    )


def try_stack(
    blocks: list[Any],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    mask: Mask | None,
    bias: Tensor | None,
    caches: Sequence[Cache],
    memory: CrossMemory | None = None,
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
    if (
        (memory is not None and not memory.readable())
        or torch.is_grad_enabled()
        or x.ndim != 3
        or not x.numel()
        or not _plain(x, bias)
        or not all(map(_ready, caches))
    ):
        return None
    stack = packed_stack(blocks, norm, caches[0])
    if stack is None or stack.packed.shape.width != x.shape[-1]:
        return None
    if stack.crosses != (memory is not None):
        return None
    return stack(x, at, mask, bias, list(caches), memory)


def _ready(cache: Cache) -> bool:
    """True if a kernel can add to a cache."""
    exact = type(cache) is Cache and "append" not in vars(cache)
    return exact and cache.k.dtype == cache.v.dtype == torch.float32 and cache.k.is_cpu


def reads_memory(blocks: Sequence[nn.Module], memory: Tensor) -> bool:
    """True if a kernel will decode with blocks that read a memory."""
    if not blocks or torch.compiler.is_compiling() or torch.is_grad_enabled():
        return False
    if not _plain(memory):
        return False
    return packed_stack(blocks, None) is not None
