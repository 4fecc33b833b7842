"""Attention: the one weighted average that everything else is made of."""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from regard.attention.intervene import compute_asked
from regard.attention.kernels import Problem, attention_weights
from regard.attention.masks import Mask, TensorMask, boolean
from regard.attention.normalisers import NORMALISERS, Normaliser, softmax
from regard.attention.scores import SCORES, ScoreFunction
from regard.attention.shapes import as_bhqd, as_bhqk, heads_of, tile_of
from regard.attention.watch import watcher
from regard.errors import UsageError, lookup


def attend(
    q: Float[Tensor, "*heads q d"],
    k: Float[Tensor, "*kv_heads k c"],
    v: Float[Tensor, "*kv_heads k e"],
    *,
    score: str | ScoreFunction = "dot",
    bias: Float[Tensor, "..."] | None = None,
    mask: Mask | Bool[Tensor, "..."] | None = None,
    normalise: str | Tensor | Normaliser = "softmax",
    dropout: float = 0.0,
    add_values: Callable[[Tensor], Tensor] | None = None,
    watch: object = None,
) -> Float[Tensor, "*heads q e"]:
    """Attention: softmax(score(q, k) + bias) v, an average of the values for each query.

    The first leading axis is the batch, the others are heads; keys and values may have fewer heads
    than queries if those divide theirs (grouped-query attention). The bias broadcasts to
    (*heads, q, k). A mask may be a boolean tensor that broadcasts alike, True where a query may
    look; a fully masked row gives zeros, and what stands at a masked place never matters.
    `normalise` is a name, a function of scores, or given weights. `add_values` returns what else is
    added to the average, from the weights (b, h, q, k). `watch` is the module that attends, for
    watchers and kernels. Which kernel computes it, regard.attention.kernels decides.

    Args:
        q: queries
        k: keys
        v: values
        score: name of a score, or a function of queries and keys
        bias: added to the scores; broadcasts to (*heads, q, k)
        mask: a Mask, or a boolean tensor, True where a query may look
        normalise: softmax, argmax, a function of scores, or given weights
        dropout: probability that a weight is dropped
        add_values: function of the weights (b, h, q, k) whose result is added to the average
        watch: module that attends, for watchers and kernels
    """
    if isinstance(score, str):
        score = _named_score(score, q.shape[-1])
    flat, lead = q.ndim == 4, q.shape[:-2]
    q, k, v = _check_shapes(as_bhqd(q), as_bhqd(k), as_bhqd(v))
    if not isinstance(normalise, Tensor) and hasattr(score, "key_width"):
        _check_widths(score, q.shape[-1], k.shape[-1])
    shape = (*lead, q.shape[-2], k.shape[-2])
    if bias is not None:
        bias = as_bhqk("bias", bias, shape).to(q.dtype)
    mask = as_mask(mask, shape)
    weights, normaliser = None, softmax
    if isinstance(normalise, Tensor):
        weights = as_bhqd(normalise.expand(*lead, *normalise.shape[-2:]))
    elif isinstance(normalise, str):
        normaliser = lookup("normaliser", normalise, NORMALISERS)()
    else:
        normaliser = normalise
    problem = Problem(
        q,
        k,
        v,
        score,
        bias,
        mask,
        normalise=normaliser,
        weights=weights,
        dropout=dropout,
        add_values=add_values,
        module=watch,
    )
    problem, out, used = compute_asked(problem)
    if watch is not None and watcher() is not None:
        # a sample cannot be drawn again, and given weights come from no score
        fixed = used if problem.weights is not None or normaliser is not softmax else None
        what = problem.q, problem.k, score, bias, problem.mask, normaliser, fixed
        record_attention(watch, *what)
    return out if flat else out.view(*lead, *out.shape[-2:])


def record_attention(
    module: object,
    q: Tensor,
    k: Tensor,
    score: ScoreFunction,
    bias: Tensor | None,
    mask: Mask | None,
    normalise: Normaliser = softmax,
    weights: Tensor | None = None,
) -> None:
    """Record this call's queries and keys (b, h, l, d) for the active watcher, if any.

    Args:
        module: module that attends
        q: queries
        k: keys
        score: score of queries and keys
        bias: added to the scores
        mask: which keys each query may see
        normalise: function of the scores that gives the weights
        weights: the weights themselves, if they are given
    """
    if (recorder := watcher()) is not None:
        shape = (*q.shape[:3], k.shape[2])
        compute = _lazy_weights(q, k, score, bias, mask, normalise, weights)
        recorder.record(module, shape, compute)


def _lazy_weights(q, k, score, bias, mask, normalise, weights) -> Callable[..., Tensor]:
    """Function that computes the weights of chosen heads and rows when it is called."""
    q, k = q.detach(), k.detach().clone()  # a cache moves its rows when sentences leave
    bias, weights = (None if x is None else x.detach() for x in (bias, weights))
    group, columns = q.shape[1] // k.shape[1], slice(0, k.shape[-2])

    def compute(sentence: int, heads: list[int], rows: slice) -> Tensor:
        if weights is not None:
            return weights[sentence, heads, rows]
        with torch.no_grad():
            some_q = heads_of(q, sentence, heads)[..., rows, :]
            some_k = heads_of(k, sentence, [head // group for head in heads])
            tile = None if bias is None else tile_of(bias, rows, columns)
            some_bias = None if tile is None else heads_of(tile, sentence, heads)
            seen = None if mask is None else heads_of(mask.tile(rows, columns), sentence, heads)
            some = score.of(heads) if hasattr(score, "of") else score
            return attention_weights(some_q, some_k, some, some_bias, seen, normalise)[0]

    return compute


def _named_score(name: str, width: int) -> ScoreFunction:
    """Score of a name, if it is nothing but a formula."""
    score = lookup("score", name, SCORES)(width)
    if isinstance(score, nn.Module):
        raise UsageError(
            f"score '{name}' has weights to learn; make it once with SCORES['{name}']({width}) "
            "and pass that as score"
        )
    return score


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Refuse shapes that do not fit, and let all sentences share one set of keys and values."""
    if q.shape[1] % k.shape[1] or k.shape[0] not in (1, q.shape[0]) or k.shape[:-1] != v.shape[:-1]:
        raise UsageError(
            f"queries {tuple(q.shape)}, keys {tuple(k.shape)} and values {tuple(v.shape)} do not "
            "fit; key heads must divide query heads, keys and values must be as many"
        )
    if k.shape[0] != q.shape[0]:
        k, v = (x.expand(q.shape[0], -1, -1, -1) for x in (k, v))
    return q, k, v


def _check_widths(score: Any, queries: int, keys: int) -> None:
    """Refuse keys that a score cannot compare with queries of a width."""
    if keys != (expected := score.key_width(queries)):
        raise UsageError(
            f"queries of width {queries} and keys of width {keys} do not fit; "
            f"{type(score).__name__} compares these with keys of width {expected}"
        )


def as_mask(mask: Any, shape: tuple[int, ...]) -> Mask | None:
    """Make a mask of a boolean tensor that broadcasts to the scores; refuse anything else."""
    if mask is None:
        return None
    if isinstance(mask, Mask):
        mask.check(shape)
        return mask
    return TensorMask(as_bhqk("mask", boolean(mask), shape))
