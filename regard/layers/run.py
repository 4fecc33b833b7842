"""The one door to kernels that do whole blocks: PyTorch runs a stack, unless they know it all."""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from regard import native
from regard.attention.attend import record_attention
from regard.attention.masks import Mask
from regard.attention.multihead import Cache
from regard.attention.once import one_pass
from regard.attention.watch import watcher
from regard.layers.exact import Print, take_apart, untouched
from regard.layers.norm import RMSNorm
from regard.layers.stack import Stack, added
from regard.native.functions import LONGEST, Sizes, laid
from regard.native.functions import blocks as native_blocks
from regard.native.torch_private import traced

# Wider ones are left to PyTorch, whose products of many rows at once are better then.
WIDEST = 256
# So many tokens of a text are read by PyTorch, too.
FEW = 32


def run_blocks(
    blocks: Iterable[nn.Module],
    x: Tensor,
    *,
    norm: nn.Module | None = None,
    at: Tensor,
    mask: Mask | Sequence[Mask | None] | None = None,
    bias: Tensor | None = None,
    caches: Sequence[Cache] | None = None,
) -> Tensor:
    """Pass (b, l, w) through blocks, and the norm that ends them, if there is one.

    There may be a mask for each block. `caches` are those of texts that are written; the blocks
    add to them.
    """
    some = list(blocks)
    masks = list(mask) if isinstance(mask, list | tuple) else [mask] * len(some)
    if some and not torch.compiler.is_compiling() and native.scope(some[0]) is not None:
        y = _by_kernel(some, x, norm, at, masks, bias, caches)
        if y is not None:
            return y
    with one_pass():
        for block, own, cache in zip(some, masks, caches or [None] * len(some), strict=True):
            given = {"mask": own, "bias": bias, "cache": cache}
            x = block(x, at=at, **{name: y for name, y in given.items() if y is not None})
        return x if norm is None else norm(x)


def _by_kernel(
    blocks: list[nn.Module],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    masks: list[Any],
    bias: Tensor | None,
    caches: Sequence[Cache] | None,
) -> Tensor | None:
    """Let a kernel do it, if there is one for blocks that all have the same mask."""
    mask = masks[0]
    if any(one is not mask for one in masks) or not (mask is None or isinstance(mask, Mask)):
        return None
    if caches is None:
        return _learn(blocks, x, norm, at, mask, bias)
    return _write(blocks, x, norm, at, mask, bias, caches)


def _taken(
    name: str, modules: Sequence[nn.Module], take: Callable[[], Any], during: object = None
) -> Any:
    """Return what a kernel has made of modules, made anew if anything but numbers has changed.

    Where a model is frozen that is looked at once for each text (`during` its cache lives), and
    then only whether somebody has begun to listen.
    """
    found = native.scope(modules[0])
    if found is None or traced():
        return None
    key = (name, *map(id, modules))
    known, told = found.plans.get(key, (None, None))
    if told is not None and found.copies is not None and during in told.checked:
        return known if told.unheard() else None
    if not untouched():
        return None
    if told is not None and told.same():
        if during is not None:
            told.checked.add(during)
        return known
    known = take()
    found.plans[key] = (known, Print(modules)) if known is not None else (None, None)
    return known


def _learn(
    blocks: list[Any],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    mask: Mask | None,
    bias: Tensor | None,
) -> Tensor | None:
    """Pass x through blocks that are trained, by a kernel, if there is one for all of them."""
    if not torch.is_grad_enabled() or x.ndim != 3 or not x.numel() or type(x) is not Tensor:
        return None
    b, l, w = x.shape
    if l > LONGEST or w > WIDEST or not x.is_cpu or x.dtype != torch.float32:
        return None
    if bias is not None and (bias.requires_grad or type(bias) is not Tensor):
        return None
    apart = _taken("learn", blocks, lambda: _trained(blocks))
    if apart is None or apart[0].width != w:
        return None
    first = apart[0]
    causal = mask is not None and bias is None and mask.aligned(l, l)
    turn, extra = None, None if causal else added(mask, bias, x, l)
    centred = first.norm is not RMSNorm
    n = Sizes(b, l, *first[2:8], centred, causal, eps=first.eps, scale=first.scale)
    if first.position is not None:
        turn = first.position.turns(x.dtype, first.head_width, at).squeeze(-2).contiguous()
    if extra is not None:
        extra = laid(extra, b, first.heads, l, l)
    weights = list(chain.from_iterable(parts.weights for parts in apart))
    watched = watcher() is not None
    found = native_blocks(blocks[0], n, x.contiguous(), weights, turn, extra, watched)
    if found is None:
        return None
    y, seen = found
    if seen is not None:
        for block, qkv in zip(blocks, seen, strict=True):
            q, k = qkv.transpose(1, 2).split([first.heads, first.kv_heads, first.kv_heads], 1)[:2]
            record_attention(block.attention, q, k, block.attention.score, bias, mask)
    return y if norm is None else norm(y)


def _trained(blocks: Sequence[nn.Module]) -> list[Any] | None:
    """Take blocks apart that are alike and trained, all of whose weights learn."""
    apart = [parts for block in blocks if (parts := take_apart(block, True)) is not None]
    if len(apart) < len(blocks) or any(parts[1:] != apart[0][1:] for parts in apart):
        return None
    weights = chain.from_iterable(parts.weights for parts in apart)
    learning = all(one is None or one.requires_grad for one in weights)
    fits = not apart[0].columns and not apart[0].ffn_width % 16
    return apart if learning and fits else None


def _write(
    blocks: list[Any],
    x: Tensor,
    norm: nn.Module | None,
    at: Tensor,
    mask: Mask | None,
    bias: Tensor | None,
    caches: Sequence[Cache],
) -> Tensor | None:
    """Pass the next token of each text through blocks that write, by a kernel, if there is one."""
    first = caches[0]
    if (
        norm is None
        or first.length == 0
        or x.shape[-2] > FEW
        or torch.is_grad_enabled()
        or x.ndim != 3
        or not x.numel()
        or any(type(y) is not Tensor for y in (x, bias) if y is not None)
        or x.dtype != torch.float32
        or not x.is_cpu
        or not all(map(_ready, caches))
    ):
        return None
    take = lambda: Stack.of(blocks, norm)  # noqa: E731
    stack: Stack | None = _taken("write", [*blocks, norm], take, first)
    made = None if stack is None else native.kernels(blocks[0])
    if made is None or stack is None or stack.shape.width != x.shape[-1]:
        return None
    return stack(made, x, at, mask, bias, list(caches))


def _ready(cache: Cache) -> bool:
    """Tell whether a kernel can add to a cache."""
    exact = type(cache) is Cache and "append" not in vars(cache) and not cache.columns
    return exact and cache.k.dtype == cache.v.dtype == torch.float32 and cache.k.is_cpu
