"""Kernels that compute whole stacks of blocks: one for training, one for decoding.

Each is tried by `try_kernel` and returns None where it does not know every part exactly.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.attend import record_attention
from regard.attention.masks import Mask
from regard.attention.multihead import Cache
from regard.attention.watch import watcher
from regard.layers.fast.half import try_half
from regard.layers.fast.kernel_weights import BlockWeights, checked_plan, kernel_weights
from regard.layers.fast.read import try_read
from regard.layers.fast.stack import CrossMemory, try_stack
from regard.layers.norm import RMSNorm
from regard.native.functions import MAX_KERNEL_LENGTH, BlockSizes, laid
from regard.native.functions import blocks as native_blocks

# Wider blocks are left to PyTorch, whose products of many rows at once are better then.
_WIDEST_TRAINED = 256


def try_kernel(
    blocks: list[nn.Module],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    masks: list[Any],
    bias: Tensor | None,
    caches: Sequence[Cache] | None,
    memory: CrossMemory | None = None,
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
        if (y := try_read(blocks, x, norm, at, mask, bias)) is not None:
            return y
        return try_train_kernel(blocks, x, norm, at, mask, bias)
    return try_stack(blocks, x, norm, at, mask, bias, caches, memory)


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
    """Weights of blocks that are alike and in training, if all of them learn."""
    parts = [part for block in blocks if (part := kernel_weights(block, True)) is not None]
    if len(parts) < len(blocks) or any(part[1:] != parts[0][1:] for part in parts):
        return None
    weights = chain.from_iterable(part.weights for part in parts)
    learning = all(one is None or one.requires_grad for one in weights)
    fits = not parts[0].columns and not parts[0].ffn_width % 16
    return parts if learning and fits else None


def mask_and_bias(mask: Mask | None, bias: Tensor | None, like: Tensor, keys: int) -> Tensor | None:
    """Mask plus a bias as one bias for (b, q, w), fully masked rows -inf throughout."""
    if mask is None:
        return bias
    extra, fully_masked = mask.additive(slice(0, like.shape[1]), slice(0, keys), like)
    extra = extra if fully_masked is None else extra.masked_fill(fully_masked, -torch.inf)
    return extra if bias is None else extra + bias
