"""Encoders in bfloat16, where that is asked for: matrices are converted once for all calls.

Sums of products, softmax, norms and the residual stream stay in float32. Blocks of which not every
part is known exactly, such as those with a hook, are left to PyTorch in float32.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import native
from regard.attention.attend import record_attention
from regard.attention.kernels import Problem, compute
from regard.attention.masks import Mask
from regard.attention.multihead import Memory
from regard.attention.watch import watcher
from regard.layers.fast.alone import each_alone
from regard.layers.fast.kernel_weights import checked_plan, kernel_weights
from regard.layers.fast.read import real_lengths
from regard.native.functions import BLOCK_WEIGHTS

_CROSS = slice(16, 18)  # where the first matrix of cross-attention stands among a block's weights


def try_half(blocks: list[Any], x: Tensor, mask: Mask | None, bias: Tensor | None) -> Tensor | None:
    """Pass x through the blocks of an encoder in bfloat16, each sequence of the batch alone."""
    lengths = real_lengths(x, mask) if half_asked(blocks, x) and bias is None else None
    if lengths is None:
        return None
    weights = checked_plan("half", blocks, lambda: _halves(blocks))
    if weights is None or any(len(some) != BLOCK_WEIGHTS for some in weights):
        return None

    def encode(x: Tensor) -> Tensor:
        for block, some in zip(blocks, weights, strict=True):
            x = _pass(block, some, x)
        return x

    return each_alone(encode, x, lengths)


def half_memories(blocks: Sequence[Any], memory: Tensor) -> list[Memory] | None:
    """Keys and values of the cross-attention of decoder blocks, in bfloat16."""
    if not half_asked(blocks, memory):
        return None
    weights = checked_plan("half_memory", blocks, lambda: _halves(blocks))
    if weights is None:
        return None
    sounds, layers = memory.to(torch.bfloat16), []
    for block, some in zip(blocks, weights, strict=True):
        (weight, shift), cross = some[_CROSS], block.cross
        first = cross.heads * cross.head_width
        shift = None if shift is None else shift[first:]
        kv = torch.stack([F.linear(one, weight[first:], shift) for one in sounds])
        kv = kv.unflatten(-1, (-1, cross.head_width)).transpose(1, 2)
        layers.append(Memory(*kv.chunk(2, dim=1)))
    return layers


def half_asked(modules: Sequence[nn.Module], x: Tensor) -> bool:
    """True if modules shall compute in bfloat16, and can with an input (b, l, w) like this."""
    active = native.scope(modules[0]) if modules and not torch.is_grad_enabled() else None
    fits = type(x) is Tensor and x.dtype == torch.float32 and x.is_cpu and x.ndim == 3
    return active is not None and active.half and fits and bool(x.numel())


def _halves(blocks: Sequence[nn.Module]) -> list[list[Tensor | None]] | None:
    """Weights of blocks in bfloat16, if each part is known exactly and none rotates."""
    parts = [kernel_weights(block, False) for block in blocks]
    if any(part is None or part.position is not None for part in parts):
        return None
    return [
        [None if w is None else w.detach().to(torch.bfloat16).contiguous() for w in part.weights]
        for part in parts
        if part is not None
    ]


def _pass(block: Any, weights: Sequence[Any], x: Tensor) -> Tensor:
    """Pass (1, l, w) through a block, as EncoderBlock has it."""
    _, _, qkv, qkv_b, out, out_b, _, _, gate, gate_b, inner, inner_b, outer, outer_b = weights
    layer, ffn, kind = block.attention, block.feed_forward, torch.bfloat16
    y = F.linear(block.around_attention.norm(x).to(kind), qkv, qkv_b)
    heads = y.unflatten(-1, (-1, layer.head_width)).transpose(1, 2)
    q, k, v = heads.split([layer.heads, layer.kv_heads, layer.kv_heads], 1)
    y, _ = compute(Problem(q, k, v, layer.score, module=layer))
    if watcher() is not None:
        record_attention(layer, q.float(), k.float(), layer.score, None, None)
    x = x + F.linear(y.transpose(1, 2).flatten(2), out, out_b)
    y = block.around_feed_forward.norm(x).to(kind)
    up = F.linear(y, inner, inner_b)
    up = ffn.act(up) if gate is None else ffn.act(F.linear(y, gate, gate_b)) * up
    return x + F.linear(up, outer, outer_b)
