"""Blocks taken apart for the kernels that do a whole one at once."""

from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import tell
from regard.attention.masks import Mask
from regard.attention.multihead import MultiHead
from regard.attention.positions import Rotary
from regard.attention.scores import Dot
from regard.attention.watch import watcher
from regard.layers.feedforward import FeedForward, GatedFeedForward, gelu_tanh
from regard.layers.norm import GainNorm, LayerNorm, RMSNorm
from regard.layers.residual import PreNorm
from regard.native.functions import LONGEST, Sizes, laid
from regard.native.functions import blocks as native_blocks

# as the kernels number them
ACTS = [F.relu, F.gelu, gelu_tanh, F.silu]
# of a block that looks only at its own texts
SUBLAYERS = ["attention", "feed_forward", "around_attention", "around_feed_forward"]
# Wider ones are left to PyTorch, whose products of many rows at once are better then.
WIDEST = 256


class Parts(NamedTuple):
    """What a block is made of."""

    weights: list[Tensor | None]
    columns: int  # a bit for each matrix that is laid by columns
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    act: int
    norm: type[nn.Module]
    eps: float
    scale: float
    position: Rotary | None


def take_apart(look: MultiHead, think: nn.Module, around: list[nn.Module]) -> Parts | None:
    """Take a block apart, if the kernels know every part of it."""
    if type(look) is not MultiHead or any(type(one) is not PreNorm for one in around):
        return None
    norms = [cast(PreNorm, one).norm for one in around]
    kind, position = type(norms[0]), look.position
    if (
        type(think) not in (FeedForward, GatedFeedForward)
        or cast(Any, think).act not in ACTS
        or kind not in (LayerNorm, GainNorm, RMSNorm)
        or type(norms[1]) is not kind
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
    if not plain(look, think, *around, *norms, *there):
        return None
    pairs = map(pair, [norms[0], *matrices[:2], norms[1], *matrices[2:]])
    weights = list(chain.from_iterable(pairs))
    if not all(map(readable, weights)):
        return None
    columns = sum(1 << i for i, m in enumerate(matrices) if m and not m.weight.is_contiguous())
    return Parts(
        weights,
        columns,
        look.qkv.in_features,
        look.heads,
        look.kv_heads,
        look.head_width,
        think.inner.out_features,
        ACTS.index(think.act),
        kind,
        cast(Any, norms[0]).eps,
        look.head_width**-0.5 if look.score.scale is None else look.score.scale,
        cast(Rotary, position) if look.turns else None,
    )


def plain(*modules: nn.Module) -> bool:
    """Tell whether nobody listens to these modules or computes their weights."""
    return not any(
        m._forward_hooks or m._forward_pre_hooks or "parametrizations" in m._modules
        for m in modules
    )


def readable(x: Tensor | None) -> bool:
    """Tell whether a kernel can read a weight where it lies."""
    return x is None or (
        x.dtype == torch.float32 and x.is_cpu and (x.is_contiguous() or x.t().is_contiguous())
    )


def pair(module: nn.Module | None) -> list[Tensor | None]:
    """Return the weight and the bias of a module."""
    return [getattr(module, "weight", None), getattr(module, "bias", None)]


def added(mask: Mask | None, bias: Tensor | None, like: Tensor, keys: int) -> Tensor | None:
    """Return what a mask and a bias add to the scores of (b, q, w), blind rows -inf throughout."""
    if mask is None:
        return bias
    extra, blind = mask.additive(slice(0, like.shape[1]), slice(0, keys), like)
    extra = extra if blind is None else extra.masked_fill(blind, -torch.inf)
    return extra if bias is None else extra + bias


def learn(
    blocks: Sequence[Any], x: Tensor, at: Tensor, mask: Mask | None, bias: Tensor | None
) -> Tensor | None:
    """Pass x through blocks that are trained, by a kernel, if there is one for all of them."""
    if not torch.is_grad_enabled() or x.ndim != 3 or not x.numel():
        return None
    b, l, w = x.shape
    if l > LONGEST or w > WIDEST or not x.is_cpu or x.dtype != torch.float32:
        return None
    if bias is not None and bias.requires_grad:
        return None
    apart = [parts for block in blocks if (parts := _trained(block)) is not None]
    if len(apart) < len(blocks) or any(parts[1:] != apart[0][1:] for parts in apart[1:]):
        return None
    first = apart[0]
    causal = mask is not None and bias is None and mask.aligned(l, l)
    turn, extra = None, None if causal else added(mask, bias, x, l)
    centred = first.norm is not RMSNorm
    n = Sizes(b, l, *first[2:8], centred, causal, eps=first.eps, scale=first.scale)
    if first.position is not None:
        turn = first.position.turns(x.dtype, first.head_width, at).squeeze(-2).contiguous()
        n.turn_b, n.turn_l = turn.stride(0) if turn.ndim == 3 else 0, turn.stride(-2)
    if extra is not None:
        extra = laid(extra, b, first.heads, l, l)
        n.bias_b, n.bias_h, n.bias_q = extra.stride()[:3]
    weights = list(chain.from_iterable(parts.weights for parts in apart))
    found = native_blocks(n, x.contiguous(), weights, turn, extra)
    if found is None:
        return None
    if watcher() is not None:
        for block, qkv in zip(blocks, found[1], strict=True):
            q, k = qkv.transpose(1, 2).split([first.heads, first.kv_heads, first.kv_heads], 1)[:2]
            tell(block.attention, q, k, block.attention.score, bias, mask)
    return found[0]


def _trained(block: Any) -> Parts | None:
    """Take a block that is trained apart, all of whose weights learn and that drops nothing."""
    if not block.training or list(block._modules) != SUBLAYERS:
        return None
    look, think = block.attention, block.feed_forward
    around = [block.around_attention, block.around_feed_forward]
    parts = take_apart(look, think, around)
    if parts is None or parts.columns or parts.ffn_width % 16:
        return None
    if look.dropout or think.drop or any(one.drop or one.path for one in around):
        return None
    learning = all(one is None or one.requires_grad for one in parts.weights)
    return parts if learning else None
