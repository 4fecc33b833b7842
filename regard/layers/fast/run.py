"""Running a stack of blocks: by a kernel that knows all of it, or block by block in PyTorch."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from regard import native
from regard.attention.masks import Mask
from regard.attention.multihead import Cache
from regard.attention.once import one_pass
from regard.layers.fast.kernels import try_kernel
from regard.layers.fast.stack import CrossMemory, refuse_int8


def run_blocks(
    blocks: Iterable[nn.Module],
    x: Tensor,
    *,
    norm: nn.Module | None = None,
    at: Tensor,
    mask: Mask | Sequence[Mask | None] | None = None,
    bias: Tensor | None = None,
    caches: Sequence[Cache] | None = None,
    memory: CrossMemory | None = None,
) -> Tensor:
    """Pass (b, l, w) through blocks and the final norm, if there is one.

    This alone decides whether a kernel takes the stack. There may be one mask for all blocks or
    one for each. `caches` hold the keys and values of decoding; the blocks add to them. `memory` is
    what blocks with cross-attention read.

    Args:
        blocks: blocks of the stack
        x: input (b, l, w)
        norm: norm after the last block
        at: positions of x
        mask: one for all blocks, or one for each
        bias: added to the scores of all blocks
        caches: keys and values of decoding, to which the blocks add
        memory: what blocks with cross-attention read
    """
    stack = list(blocks)
    masks = list(mask) if isinstance(mask, list | tuple) else [mask] * len(stack)
    if stack and not torch.compiler.is_compiling() and native.scope(stack[0]) is not None:
        y = try_kernel(stack, x, norm, at, masks, bias, caches, memory)
        if y is not None:
            return y
        refuse_int8(stack[0])
    read = [()] * len(stack) if memory is None else [(one.to(x.dtype),) for one in memory.layers]
    shared = {"bias": bias, "memory_mask": memory and memory.mask}
    with one_pass():
        each = zip(stack, read, masks, caches or [None] * len(stack), strict=True)
        for block, one, own, cache in each:
            given = {"mask": own, "cache": cache, **shared}
            x = block(x, *one, at=at, **{name: y for name, y in given.items() if y is not None})
        return x if norm is None else norm(x)
