"""Score functions of attention: how well a query matches a key, by name."""

import math
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from regard.errors import lookup


class Prepared(NamedTuple):
    """Queries and keys whose scaled dot product, plus a bias for each key, is the score."""

    q: Tensor
    k: Tensor
    key_bias: Tensor | None = None
    scale: float = 1.0


@runtime_checkable
class ScoreFunction(Protocol):
    """A score of queries (..., q, d) against keys (..., k, d)."""

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """All scores, (..., q, k)."""
        ...


class _Product:
    """A score that is a dot product after a change of variables, so that it runs fused."""

    def prepare(self, q: Tensor, k: Tensor) -> Prepared:
        raise NotImplementedError

    def key_width(self, width: int) -> int:
        """Width of the keys that queries of a width are compared with."""
        return width

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        q, k, key_bias, scale = self.prepare(q, k)
        scores = (q * scale) @ k.transpose(-1, -2)
        return scores if key_bias is None else scores + key_bias.unsqueeze(-2)


class Dot(_Product):
    """q.k / sqrt(d), or q.k times a given scale."""

    def __init__(self, scale: float | None = None):
        self.scale = scale

    def prepare(self, q: Tensor, k: Tensor) -> Prepared:
        """q and k as they are, with the scale."""
        return Prepared(q, k, None, q.shape[-1] ** -0.5 if self.scale is None else self.scale)


class Capped:
    """cap tanh(s / cap), s being q.k times a scale: scores that never pass a cap (Gemma 2)."""

    def __init__(self, cap: float = 50.0, scale: float | None = None):
        self.cap, self.dot = cap, Dot(scale)
        self.key_width = self.dot.key_width

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        """All scores, (..., q, k)."""
        return torch.tanh(self.dot(q, k) / self.cap) * self.cap


class Cosine(_Product):
    """The cosine of the angle between q and k over a temperature."""

    def __init__(self, temperature: float = 0.1):
        self.temperature = temperature

    def prepare(self, q: Tensor, k: Tensor) -> Prepared:
        """Both sides at length one, with the scale."""
        q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
        return Prepared(q, k, None, 1 / self.temperature)


class LearnedCosine(nn.Module, _Product):
    """The cosine of the angle between q and k, which each head multiplies as it has learned.

    It learns the logarithm of the factor, of which more than a hundred counts as a hundred
    (Swin V2, Liu et al. 2022).
    """

    most = math.log(100.0)

    def __init__(self, heads: int):
        super().__init__()
        self.factor = nn.Parameter(torch.full((heads, 1, 1), math.log(10.0)))

    def prepare(self, q: Tensor, k: Tensor) -> Prepared:
        """Both sides at length one, the queries times the factor of their head."""
        factor = self.factor.clamp(max=self.most).exp().to(q.dtype)
        q, k = (nn.functional.normalize(x, dim=-1) for x in (q, k))
        return Prepared(q * factor, k)

    def of(self, heads: list[int]) -> "LearnedCosine":
        """Score of some of the heads."""
        some = LearnedCosine(len(heads))
        some.factor = nn.Parameter(self.factor.detach()[heads], requires_grad=False)
        return some

    forward = _Product.__call__


class Gaussian(_Product):
    """-|q - k|^2 / (2 sigma^2): the bilateral filter's and non-local means' score.

    |q - k|^2 = |q|^2 - 2 q.k + |k|^2, and what depends on the query alone leaves the softmax
    unchanged.
    """

    def __init__(self, sigma: float = 1.0):
        self.sigma = sigma

    def prepare(self, q: Tensor, k: Tensor) -> Prepared:
        """q and k with the bias -|k|^2 / (2 sigma^2) for each key."""
        scale = self.sigma**-2
        return Prepared(q, k, k.square().sum(-1) * (-0.5 * scale), scale)


class Bilinear(nn.Module, _Product):
    """q W k' / sqrt(d): the general product, of which projected heads are the low-rank case."""

    def __init__(self, width: int, key_width: int | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, key_width or width))
        nn.init.xavier_uniform_(self.weight)

    def prepare(self, q: Tensor, k: Tensor) -> Prepared:
        """q W and k."""
        return Prepared(q @ self.weight, k, None, self.weight.shape[1] ** -0.5)

    def key_width(self, width: int) -> int:
        """Width of the keys, whatever that of the queries."""
        return self.weight.shape[1]

    forward = _Product.__call__


class Additive(nn.Module):
    """v . tanh(W q + U k): Bahdanau's score, which no dot product can express."""

    def __init__(self, width: int, key_width: int | None = None, hidden: int | None = None):
        super().__init__()
        hidden = hidden or width
        self.query = nn.Linear(width, hidden)
        self.key = nn.Linear(key_width or width, hidden, bias=False)
        self.vector = nn.Parameter(torch.empty(hidden))
        nn.init.uniform_(self.vector, -(hidden**-0.5), hidden**-0.5)

    def key_width(self, width: int) -> int:
        """Width of the keys, whatever that of the queries."""
        return self.key.in_features

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """All scores, (..., q, k)."""
        pre = self.query(q).unsqueeze(-2) + self.key(k).unsqueeze(-3)
        return torch.tanh(pre) @ self.vector


SCORES = {
    "dot": lambda width: Dot(),
    "product": lambda width: Dot(1.0),  # T5, whose weights begin small instead
    # DeBERTa: one of three like it; a head of no width is refused later, by name
    "disentangled": lambda width: Dot((3 * max(width, 1)) ** -0.5),
    "capped": lambda width: Capped(),
    "cosine": lambda width: Cosine(),
    "gaussian": lambda width: Gaussian(),
    "bilinear": Bilinear,
    "additive": Additive,
}
"""Scores by name: each value builds one for a head of a given width."""

# name -> how to make one for a number of heads, each of which learns something of its own
HEAD_SCORES = {"cosine_learned": LearnedCosine}


# name -> how to make one by numbers of its own
_SET_SCORES = {
    "dot": lambda scale, cap: Dot(scale),
    "capped": lambda scale, cap: Capped(50.0 if cap is None else cap, scale),
}


def build_score(
    name: str, width: int, heads: int, *, scale: float | None = None, cap: float | None = None
) -> Any:
    """Make the score of a name for heads of a width, with a scale or cap of its own if it has.

    Args:
        name: key of SCORES or HEAD_SCORES
        width: width of a head
        heads: attention heads
        scale: factor of the products
        cap: soft cap of the scores
    """
    if scale is not None or cap is not None:
        return lookup("score with a scale or cap", name, _SET_SCORES)(scale, cap)
    if name in HEAD_SCORES:
        return HEAD_SCORES[name](heads)
    return lookup("score", name, {**SCORES, **HEAD_SCORES})(width)
