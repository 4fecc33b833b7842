"""The one weighted average that everything else is made of."""

import math
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch._C._functorch import peek_interpreter_stack
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard.attention.dropout import dropout as drop
from regard.attention.masks import Given, Mask
from regard.attention.scores import SCORES, Score
from regard.attention.watch import watcher
from regard.errors import UsageError, lookup
from regard.native.functions import attend as native_attend

# A masked attention with more entries than this is computed some rows at a time.
TILE = 2**22
# So few queries, as in writing, are faster with two plain products than with the kernel.
FEW = 16


def softmax(scores: Tensor) -> Tensor:
    """Return weights that sum to one; a row of -inf throughout gives zeros."""
    blind = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def argmax(scores: Tensor) -> Tensor:
    """Return weight one for the best key."""
    best = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    return best.masked_fill(scores == -torch.inf, 0.0)


class Sample:
    """Hard attention: weight one for a key drawn by the softmax; keeps the log-probability."""

    def __init__(self, generator: torch.Generator | None = None):
        self.generator = generator
        self.log_probability: Tensor | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """Draw a key for each query."""
        seeing = scores.amax(-1, keepdim=True) > -torch.inf
        log = scores.masked_fill(~seeing, 0.0).log_softmax(-1)
        flat = log.detach().exp().flatten(0, -2)
        drawn = torch.multinomial(flat, 1, generator=self.generator).view(*log.shape[:-1], 1)
        self.log_probability = (log.gather(-1, drawn) * seeing).squeeze(-1)
        return torch.zeros_like(scores).scatter_(-1, drawn, 1.0) * seeing


NORMALISERS: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
    "softmax": lambda: softmax,
    "argmax": lambda: argmax,
    "sample": Sample,
}


def attend(
    q: Float[Tensor, "*heads q d"],
    k: Float[Tensor, "*kv_heads k c"],
    v: Float[Tensor, "*kv_heads k e"],
    *,
    score: str | Score = "dot",
    bias: Float[Tensor, "..."] | None = None,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    normalise: str | Tensor | Callable[[Tensor], Tensor] = "softmax",
    dropout: float = 0.0,
    add_values: Callable[[Tensor], Tensor] | None = None,
    watch: object = None,
) -> Float[Tensor, "*heads q e"]:
    """Average the values, weighted by how well each query matches each key.

    The first leading axis is the batch, the others are heads; keys and values may have fewer heads
    than queries if those divide theirs. The bias broadcasts to (*heads, q, k). A row that may look
    nowhere gives zeros, and what stands at a masked place never matters. A mask may be a boolean
    tensor that broadcasts to (*heads, q, k), True where one may look. `normalise` is a name, a
    function of scores, or given weights. `add_values` returns what else is added to the average,
    from the weights (b, h, q, k). `watch` is the module on whose behalf this is asked.
    """
    if isinstance(score, str):
        score = _named(score, q.shape[-1])
    flat, lead = q.ndim == 4, q.shape[:-2]
    q, k, v = _fitted(_four(q), _four(k), _four(v))
    shape = (*lead, q.shape[-2], k.shape[-2])
    if bias is not None:
        bias = _broadcast("bias", bias, shape).to(q.dtype)
    mask = as_mask(mask, shape)
    given, normal = None, softmax
    if isinstance(normalise, Tensor):
        given = _four(normalise.expand(*lead, *normalise.shape[-2:]))
        out, given = _given(given, v, mask, dropout, add_values)
    else:
        named = isinstance(normalise, str)
        normal = lookup("normaliser", normalise, NORMALISERS)() if named else normalise
        plain = dropout > 0 or add_values is not None or not hasattr(score, "prepare")
        if normal is softmax and not plain:
            out = _fused(q, k, v, score, bias, mask, watch)
        else:
            out, weights = _plain(q, k, v, score, bias, mask, normal, dropout, add_values)
            given = None if normal is softmax else weights  # a draw cannot be drawn again
    tell(watch, q, k, score, bias, mask, normal, given)
    return out if flat else out.view(*lead, *out.shape[-2:])


def tell(
    watch: object,
    q: Tensor,
    k: Tensor,
    score: Score,
    bias: Tensor | None,
    mask: Mask | None,
    normal: Callable[[Tensor], Tensor] = softmax,
    given: Tensor | None = None,
) -> None:
    """Tell whoever watches what queries (b, h, q, d) of a module ask of which keys."""
    if watch is not None and (seer := watcher()) is not None:
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        seer.see(watch, shape, _rows_of(q, k, score, bias, mask, normal, given))


def _named(name: str, width: int) -> Score:
    """Return the score of a name, if it is nothing but a formula."""
    score = lookup("score", name, SCORES)(width)
    if isinstance(score, nn.Module):
        raise UsageError(
            f"score '{name}' has weights to learn; make it once with SCORES['{name}']({width}) "
            "and pass that as score"
        )
    return score


def _four(x: Tensor) -> Tensor:
    """Lay any leading axes out as batch and heads."""
    if x.ndim == 4:
        return x
    return x.flatten(1, -3) if x.ndim > 4 else x[(None,) * (3 - x.ndim)].unsqueeze(-3)


def _fitted(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Refuse what does not fit, and let all sentences share one set of keys and values."""
    if q.shape[1] % k.shape[1] or k.shape[0] not in (1, q.shape[0]) or k.shape[:-1] != v.shape[:-1]:
        raise UsageError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not "
            "fit; key heads must divide query heads, keys and values must be as many"
        )
    if k.shape[0] != q.shape[0]:
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    return q, k, v


def as_mask(mask: Any, shape: tuple[int, ...]) -> Mask | None:
    """Make a mask of a boolean tensor that broadcasts to the scores; refuse anything else."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        told = f"a tensor of {mask.dtype}" if isinstance(mask, Tensor) else f"{mask!r:.60}"
        raise UsageError(
            f"mask is {told}; expected a mask such as Causal(), or a boolean tensor that is True "
            "where one may look (what is added to scores goes into bias)"
        )
    return Given(_broadcast("mask", mask, shape))


def _broadcast(what: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Lay what broadcasts to a shape out as (b, h, q, k), any of them possibly one."""
    try:
        x.expand(shape)
    except RuntimeError:
        raise UsageError(
            f"a {what} {tuple(x.shape)} does not broadcast to the scores {shape}"
        ) from None
    x = x[(None,) * (len(shape) - x.ndim)]
    return _four(x.expand(-1, *shape[1:-2], -1, -1) if len(shape) > 4 else x)


def _grouped(x: Tensor, heads: int) -> Tensor:
    """Give every query head its own view of the shared keys or values."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _cut(x: Tensor, rows: slice) -> Tensor:
    """Take some rows of (..., n, d); all of them are x itself."""
    count = rows.stop - rows.start
    return x if count == x.shape[-2] else x.narrow(-2, rows.start, count)


def _slice(bias: Tensor, rows: slice, columns: slice) -> Tensor:
    """Cut a tile out of a bias whose axes may be broadcast."""
    bias = bias[..., rows, :] if bias.shape[-2] > 1 else bias
    return bias[..., columns] if bias.shape[-1] > 1 else bias


def _fused(
    q: Tensor, k: Tensor, v: Tensor, score, bias: Tensor | None, mask: Mask | None, of: object
) -> Tensor:
    """Attend by PyTorch's kernel, in memory linear in the length."""
    ready_q, ready_k, key_bias, scale = score.prepare(q, k)
    extra_bias = bias
    if key_bias is not None:
        key_bias = _grouped(key_bias.unsqueeze(-2), q.shape[1])
        extra_bias = key_bias if bias is None else bias + key_bias
    grouped = k.shape[1] != q.shape[1]
    few = q.shape[-2] <= FEW and q.device.type == "cpu" and not torch.is_grad_enabled()

    def kernel(
        q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, causal: bool = False
    ) -> Tensor:
        if few and not causal and k.stride(-1) != 1:
            return _few(q, k, v, extra, scale)
        if not causal and (out := native_attend(of, q, k, v, extra, scale, False)) is not None:
            return out
        # a CPU's kernel has no gradient of a bias, and PyTorch's way around is slower than this
        if extra is not None and extra.requires_grad and q.device.type == "cpu":
            scores = ((q * scale) @ _grouped(k, q.shape[1]).mT).add_(extra)
            return scores.softmax(-1) @ _grouped(v, q.shape[1])
        return F.scaled_dot_product_attention(
            q, k, v, _full(extra, q, k), is_causal=causal, scale=scale, enable_gqa=grouped
        )

    if mask is None:
        return kernel(ready_q, ready_k, v, extra_bias)
    queries, keys, training = q.shape[-2], k.shape[-2], torch.is_grad_enabled()
    # something masked may be NaN, and the kernel multiplies it by a zero weight, or its gradient
    if extra_bias is None and queries > 1 and mask.aligned(queries, keys):
        if (out := native_attend(of, ready_q, ready_k, v, None, scale, True)) is not None:
            return out
        out = kernel(ready_q, ready_k, v, None, causal=True)
        # the last row sees every key, but not that one is infinite if its score is -inf
        if _finite(out[..., -1, :]) and (not training or _finite(k)):
            return out
        return _plain(q, k, v, score, bias, mask, softmax)[0]

    def block(q: Tensor, k: Tensor, v: Tensor, rows: slice, columns: slice):
        """Attend with the queries of some rows over the keys that they may see."""
        extra, blind = mask.additive(rows, columns, q)
        if extra_bias is not None:
            extra = extra + _slice(extra_bias, rows, columns)
        return kernel(q, k, v, extra), blind

    sound = not training or (_finite(k) and _finite(v))
    step = max(16, TILE // max(1, keys * q.shape[0])) if mask.by_query else max(1, queries)
    parts = []
    for start in range(0, max(1, queries), step):
        rows = slice(start, min(queries, start + step))
        columns = mask.span(rows, keys)
        args = _cut(ready_q, rows), _cut(ready_k, columns), _cut(v, columns), rows, columns
        if step < queries and training:
            # otherwise each block would keep its tile of the mask for the backward pass
            part, blind = checkpoint(block, *args, use_reentrant=False)
        else:
            part, blind = block(*args)
        sound = sound and _finite(part)
        parts.append(part if blind is None else part.masked_fill(blind, 0.0))
    out = parts[0] if len(parts) == 1 else torch.cat(parts, dim=-2)
    return out if sound else _plain(q, k, v, score, bias, mask, softmax)[0]


def _few(q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, scale: float) -> Tensor:
    """Attend with few queries: all heads that share keys ask them in one product."""
    b, h, rows, d = q.shape
    groups, keys = k.shape[1], k.shape[-2]
    asked = q.reshape(b * groups, -1, d)
    scores = torch.baddbmm(
        q.new_empty(()).expand(len(asked), asked.shape[1], keys),
        asked,
        k.flatten(0, 1).mT,
        beta=0,
        alpha=scale,
    ).view(b, h, rows, keys)
    if extra is not None:
        scores += extra
    weights = scores.softmax(-1).view(b * groups, -1, keys)
    return torch.bmm(weights, v.flatten(0, 1)).view(b, h, rows, -1)


def _finite(x: Tensor) -> bool:
    """Tell whether there is neither NaN nor infinity in x; a compiled graph or vmap cannot ask."""
    if x.is_meta or torch.compiler.is_compiling():
        return True
    try:
        return math.isfinite(x.detach().sum(dtype=torch.float32).item())
    except RuntimeError:
        if peek_interpreter_stack() is None:
            raise
        return True


def _full(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """Show a bias to the kernel in the shape it wants, without copying it."""
    if bias is None:
        return None
    return bias.expand(*bias.shape[:-2], q.shape[-2], k.shape[-2]).to(q.dtype)


def _weights(q, k, score, bias, tile, normal) -> Tensor:
    """Return all weights (b, h, q, k), never looking at a masked number."""
    scores = score(q, _grouped(k, q.shape[1]))
    if bias is not None:
        scores = scores + bias
    if tile is not None:
        scores = scores.masked_fill(~tile.to(scores.device), -torch.inf)
    return normal(scores)


def _plain(
    q, k, v, score, bias, mask, normal, dropout: float = 0.0, add_values: Callable | None = None
) -> tuple[Tensor, Tensor]:
    """Attend with all weights in memory, for scores and normalisers that no kernel has."""
    tile = None if mask is None else mask.tile(slice(0, q.shape[-2]), slice(0, k.shape[-2]))
    (k, v), tainted = _clean(tile, q.shape[1], k, v)
    weights = _weights(q, k, score, bias, tile, normal)
    return _average(weights, v, tainted, dropout, add_values), weights


def _given(
    weights: Tensor, v: Tensor, mask: Mask | None, dropout: float, add_values: Callable | None
) -> tuple[Tensor, Tensor]:
    """Average with weights from elsewhere, except where one may not look."""
    tainted = None
    if mask is not None:
        tile = mask.tile(slice(0, weights.shape[-2]), slice(0, v.shape[-2])).to(v.device)
        (v,), tainted = _clean(tile, weights.shape[1], v)
        weights = weights.masked_fill(~tile, 0.0)
    return _average(weights, v, tainted, dropout, add_values), weights


def _average(
    weights: Tensor, v: Tensor, tainted: Tensor | None, dropout: float, add_values: Callable | None
) -> Tensor:
    """Return the weighted average of the values and of what is added, NaN in the tainted rows."""
    weights = drop(weights, dropout)
    out = weights @ _grouped(v, weights.shape[1])
    out = out if add_values is None else out + add_values(weights)
    return out if tainted is None else out.masked_fill(tainted, torch.nan)


def _clean(tile: Tensor | None, heads: int, *sides: Tensor) -> tuple[list[Tensor], Tensor | None]:
    """Blank keys and values that are NaN or infinite, and tell which queries do look at one."""
    if tile is None or all(_finite(x) for x in sides):
        return list(sides), None
    bad = torch.stack([~x.isfinite().all(-1) for x in sides]).any(0)
    seen = tile.to(bad.device) & _grouped(bad, heads).unsqueeze(-2)
    return [x.masked_fill(bad.unsqueeze(-1), 0.0) for x in sides], seen.any(-1, keepdim=True)


def _rows_of(q, k, score, bias, mask, normal, given) -> Callable[[int, list[int], slice], Tensor]:
    """Remember what the weights come from, so that any of them can be computed later."""
    q, k = q.detach(), k.detach().clone()  # a cache moves its rows when sentences leave
    bias, given = (None if x is None else x.detach() for x in (bias, given))
    group, columns = q.shape[1] // k.shape[1], slice(0, k.shape[-2])

    def compute(sentence: int, heads: list[int], rows: slice) -> Tensor:
        if given is not None:
            return given[sentence, heads, rows]
        with torch.no_grad():
            some_q = _pick(q, sentence, heads)[..., rows, :]
            some_k = _pick(k, sentence, [head // group for head in heads])
            some_bias = (
                None if bias is None else _pick(_slice(bias, rows, columns), sentence, heads)
            )
            tile = None if mask is None else _pick(mask.tile(rows, columns), sentence, heads)
            some = score.of(heads) if hasattr(score, "of") else score
            return _weights(some_q, some_k, some, some_bias, tile, normal)[0]

    return compute


def _pick(x: Tensor, sentence: int, heads: list[int]) -> Tensor:
    """Take a sentence and some heads of what broadcasts to (b, h, q, k)."""
    x = x[(None,) * (4 - x.ndim)]
    x = x[sentence : sentence + 1] if x.shape[0] > 1 else x
    return x[:, heads] if x.shape[1] > 1 else x
