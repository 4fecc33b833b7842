"""The implementations of attention, in one table: each computes what `attend` promises, or passes.

`compute` takes the first kernel of KERNELS that answers; a kernel returns None where it does not
apply. The table is open: put one of your own before the others, and every model uses it.

Attention is computed in three more places, which are tested against the same oracle but cannot be
entries here: the C kernels of whole blocks (regard/native/train.c and write.c, which
`layers.fast.run.run_blocks` chooses) never hand out one layer's queries and keys; and the windowed
bilateral filter and non-local means (regard/filters) go through the offsets of the window and
weigh each pair of pixels once for both sides, in running sums, without a matrix of scores. As an
entry here they would have to be given queries, keys and a mask for each pixel first, which costs
more than all that they do.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard.attention.dropout import dropout as drop
from regard.attention.masks import Mask
from regard.attention.normalisers import Normaliser, softmax
from regard.attention.scores import Dot, Prepared, ScoreFunction
from regard.attention.shapes import repeat_kv, rows_of, tile_of
from regard.native.functions import attend as native_attend
from regard.native.torch_private import under_transform

# A masked attention with more entries than this is computed some rows at a time.
TILE_NUMBERS = 2**22
# So few queries, as in decoding, are faster by two plain products where keys are laid as columns.
_MAX_SMALL_QUERIES = 16

# The average of the values, and all weights where these are in memory.
Answer = tuple[Tensor, Tensor | None]


class Problem:
    """One attention to compute, with queries (b, h, q, d), keys (b, g, k, d), values (b, g, k, e).

    `product` is set where the weights are a softmax of scaled dot products plus a bias, and
    `dense` where moreover there is no dropout, and no mask but the `causal` triangle that fused
    kernels know.

    Args:
        q: queries
        k: keys
        v: values
        score: score of queries and keys
        bias: added to the scores
        mask: which keys each query may see
        normalise: function of the scores that gives the weights
        weights: the weights themselves, if they are given
        dropout: probability that a weight is dropped
        add_values: function of the weights whose result is added to the average
        module: module that attends
    """

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        score: ScoreFunction,
        bias: Tensor | None = None,
        mask: Mask | None = None,
        *,
        normalise: Normaliser = softmax,
        weights: Tensor | None = None,
        dropout: float = 0.0,
        add_values: Callable[[Tensor], Tensor] | None = None,
        module: object = None,
    ):
        self.q, self.k, self.v, self.score, self.bias, self.mask = q, k, v, score, bias, mask
        self.normalise, self.weights, self.module = normalise, weights, module
        self.dropout, self.add_values = dropout, add_values
        self.product: Prepared | None = None
        self.causal = False
        if (
            normalise is softmax
            and add_values is None
            and weights is None
            and hasattr(score, "prepare")
        ):
            ready: Prepared = score.prepare(q, k)  # pyright: ignore
            if ready.key_bias is not None:
                key_bias = repeat_kv(ready.key_bias.unsqueeze(-2), q.shape[1])
                bias = key_bias if bias is None else bias + key_bias
            self.product = Prepared(ready.q, ready.k, bias, ready.scale)
            if mask is not None and bias is None and q.shape[-2] > 1:
                self.causal = mask.aligned(q.shape[-2], k.shape[-2])
        self.dense = self.product if dropout <= 0 and (mask is None or self.causal) else None


def compute(problem: Problem) -> Answer:
    """Compute an attention by the first kernel of the table that answers."""
    for kernel in KERNELS.values():
        if (answer := kernel(problem)) is not None:
            return answer
    raise LookupError("no kernel of KERNELS computes this attention; 'plain' computes any")


def given(p: Problem) -> Answer | None:
    """Average with given weights, which a mask sets to zero."""
    if p.weights is None:
        return None
    weights, v, tainted = p.weights, p.v, None
    if p.mask is not None:
        tile = p.mask.tile(slice(0, weights.shape[-2]), slice(0, v.shape[-2])).to(v.device)
        (v,), tainted = _clean(tile, weights.shape[1], v)
        weights = weights.masked_fill(~tile, 0.0)
    return _average(p, weights, v, tainted), weights


def small_query(p: Problem) -> Answer | None:
    """Attend with few queries without gradients: all heads that share keys ask in one product."""
    if p.mask is not None or p.q.shape[-2] > _MAX_SMALL_QUERIES or torch.is_grad_enabled():
        return None
    if p.product is None or p.product.k.stride(-1) == 1 or p.q.device.type != "cpu":
        return None
    if p.dropout > 0 or torch.compiler.is_exporting():  # a program may get any number of queries
        return None
    q, k, bias, scale = p.product
    b, h, rows, d = q.shape
    groups, keys = k.shape[1], k.shape[-2]
    flat = q.reshape(b * groups, -1, d)
    scores = torch.baddbmm(
        q.new_empty(()).expand(len(flat), flat.shape[1], keys),
        flat,
        k.flatten(0, 1).mT,
        beta=0,
        alpha=scale,
    ).view(b, h, rows, keys)
    if bias is not None:
        scores += bias
    weights = scores.softmax(-1).view(b * groups, -1, keys)
    return torch.bmm(weights, p.v.flatten(0, 1)).view(b, h, rows, -1), None


def native(p: Problem) -> Answer | None:
    """Attend by the C kernel for training, where kernels are switched on for the module."""
    if p.module is None or p.dense is None:
        return None
    q, k, bias, scale = p.dense
    out = native_attend(p.module, q, k, p.v, bias, scale, p.causal)
    return None if out is None else (out, None)


def products(p: Problem) -> Answer | None:
    """Attend by matrix products, in place between them, where a CPU's fused kernel cannot.

    It has no gradient of the bias, and no dropout. The mask is the same for all queries, as of
    padding, or there is none.
    """
    mask = p.mask
    if p.product is None or (mask is not None and mask.by_query) or p.q.device.type != "cpu":
        return None
    q, k, bias, scale = p.product
    if p.dropout <= 0 and (bias is None or not bias.requires_grad):
        return None
    scores = (q * scale) @ repeat_kv(k, q.shape[1]).mT
    if bias is not None:
        scores += bias
    fully_masked = None
    if mask is not None:
        if not (_finite(p.k) and _finite(p.v)):
            return None
        extra, fully_masked = mask.additive(slice(0, q.shape[-2]), slice(0, k.shape[-2]), q)
        scores += extra
    out = drop(scores.softmax(-1), p.dropout) @ repeat_kv(p.v, q.shape[1])
    if not _finite(out):  # as where the bias is -inf throughout a row
        return None
    return (out if fully_masked is None else out.masked_fill(fully_masked, 0.0)), None


def fused(p: Problem) -> Answer | None:
    """Attend by PyTorch's scaled_dot_product_attention, in memory linear in the length."""
    if p.dense is None:
        return None
    q, k, bias, scale = p.dense
    if bias is not None:
        bias = bias.expand(*bias.shape[:-2], q.shape[-2], k.shape[-2]).to(q.dtype)
    out = F.scaled_dot_product_attention(
        q, k, p.v, bias, is_causal=p.causal, scale=scale, enable_gqa=k.shape[1] != q.shape[1]
    )
    # what is masked may be NaN, and the kernel multiplies it by a zero weight, or its gradient;
    # the last row sees every key, but not that one is infinite if its score is -inf
    if p.causal and not (
        _finite(out[..., -1, :]) and (not torch.is_grad_enabled() or _finite(p.k))
    ):
        return None
    return out, None


def tiled(p: Problem) -> Answer | None:
    """Attend under a mask, some rows at a time and over no keys outside of their span."""
    mask = p.mask
    if p.product is None or mask is None or p.causal or p.dropout > 0:
        return None
    ready_q, ready_k, bias, scale = p.product
    queries, keys, training = p.q.shape[-2], p.k.shape[-2], torch.is_grad_enabled()
    score = Dot(scale)

    def block(q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: slice):
        """Attend with the queries of some rows over the keys that they may see."""
        extra, fully_masked = mask.additive(rows, columns, q)
        if bias is not None:
            extra = extra + tile_of(bias, rows, columns)
        return compute(Problem(q, k, v, score, extra, module=p.module))[0], fully_masked

    sound = not training or (_finite(p.k) and _finite(p.v))
    exporting = torch.compiler.is_exporting()  # a program takes all rows at once, however many
    step = max(1, queries)
    if mask.by_query and not exporting:
        step = max(16, TILE_NUMBERS // max(1, keys * p.q.shape[0]))
    parts = []
    for start in (0,) if exporting else range(0, max(1, queries), step):
        rows = slice(start, queries if exporting else min(queries, start + step))
        columns = slice(0, keys) if exporting else mask.span(rows, keys)
        args = (
            rows_of(ready_q, rows),
            rows_of(ready_k, columns),
            rows_of(p.v, columns),
            rows,
            columns,
        )
        if step < queries and training:
            # otherwise each block would keep its tile of the mask for the backward pass
            part, fully_masked = checkpoint(block, *args, use_reentrant=False)
        else:
            part, fully_masked = block(*args)
        sound = sound and _finite(part)
        parts.append(part if fully_masked is None else part.masked_fill(fully_masked, 0.0))
    if not sound:
        return None
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)), None


def plain(p: Problem) -> Answer:
    """Attend with all weights in memory: any score, any normaliser, NaN behind a mask."""
    mask, columns = p.mask, slice(0, p.k.shape[-2])
    tile = None if mask is None else mask.tile(slice(0, p.q.shape[-2]), columns)
    (k, v), tainted = _clean(tile, p.q.shape[1], p.k, p.v)
    weights = attention_weights(p.q, k, p.score, p.bias, tile, p.normalise)
    return _average(p, weights, v, tainted), weights


# name -> implementation, in the order in which they are asked
KERNELS: dict[str, Callable[[Problem], Answer | None]] = {
    "given": given,
    "small_query": small_query,
    "native": native,
    "products": products,
    "fused": fused,
    "tiled": tiled,
    "plain": plain,
}


def attention_weights(
    q: Tensor,
    k: Tensor,
    score: ScoreFunction,
    bias: Tensor | None,
    tile: Tensor | None,
    normalise: Normaliser,
) -> Tensor:
    """All weights (b, h, q, k); a masked score never matters, whatever number it is.

    Args:
        q: queries (b, h, q, d)
        k: keys (b, g, k, d)
        score: score of queries and keys
        bias: added to the scores
        tile: True where a query may see a key
        normalise: function of the scores that gives the weights
    """
    scores = score(q, repeat_kv(k, q.shape[1]))
    if bias is not None:
        scores = scores + bias
    if tile is not None:
        scores = scores.masked_fill(~tile.to(scores.device), -torch.inf)
    return normalise(scores)


def _average(p: Problem, weights: Tensor, v: Tensor, tainted: Tensor | None) -> Tensor:
    """Weighted average of the values and of what is added, NaN in the tainted rows."""
    weights = drop(weights, p.dropout)
    out = weights @ repeat_kv(v, weights.shape[1])
    out = out if p.add_values is None else out + p.add_values(weights)
    return out if tainted is None else out.masked_fill(tainted, torch.nan)


def _clean(tile: Tensor | None, heads: int, *sides: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Zero keys and values that are NaN or infinite; return also which queries may see one."""
    if tile is None or all(_finite(x) for x in sides):
        return list(sides), None
    bad = torch.stack([~x.isfinite().all(-1) for x in sides]).any(0)
    seen = tile.to(bad.device) & repeat_kv(bad, heads).unsqueeze(-2)
    return [x.masked_fill(bad.unsqueeze(-1), 0.0) for x in sides], seen.any(-1, keepdim=True)


class DeferredChecks:
    """Sums that are to be finite, on their devices, to be read all at once."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []

    def total(self, like: Tensor) -> Tensor:
        """A number beside `like` that is finite if all sums are; 0 if there are none."""
        return sum((x.to(like.device) for x in self.sums), like.new_zeros((), dtype=torch.float32))


_DEFERRED: ContextVar[DeferredChecks | None] = ContextVar("deferred", default=None)


@contextmanager
def deferred_checks() -> Iterator[DeferredChecks]:
    """Take numbers on accelerators to be finite while a block runs, and note what to ask then.

    Whoever opens the block must ask, and compute again without it where something was not finite:
    what stands behind a mask may have spread.
    """
    token = _DEFERRED.set(checks := DeferredChecks())
    try:
        yield checks
    finally:
        _DEFERRED.reset(token)


def _finite(x: Tensor) -> bool:
    """True if there is neither NaN nor infinity in x; a compiled graph or vmap cannot ask."""
    if x.is_meta or torch.compiler.is_compiling():
        return True
    if x.device.type != "cpu" and (deferred := _DEFERRED.get()) is not None:
        deferred.sums.append(x.detach().sum(dtype=torch.float32))
        return True
    try:
        return math.isfinite(x.detach().sum(dtype=torch.float32).item())
    except RuntimeError:
        if not under_transform():
            raise
        return True
