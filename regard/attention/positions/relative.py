"""Relative positions that meet the content of queries and keys, each layer with its own."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from regard.attention.places import Range, count_up, within_range
from regard.attention.positions.absolute import sinusoid_table
from regard.attention.positions.base import (
    Position,
    distance_range,
    for_heads,
    relative_distance,
)
from regard.attention.shapes import cheap_to_ask, repeat_kv
from regard.errors import UsageError, lookup
from regard.settings import setting


class Shaw(Position):
    """A learned vector for each clipped distance, added to keys and values (Shaw et al. 2018).

    e_ij = q_i.(k_j + a_ij) / sqrt(d), z_i = sum_j w_ij (v_j + b_ij), where a_ij and b_ij depend on
    j - i, cut at plus and minus `clip`.
    """

    per_layer = True
    adds_values = True

    def __init__(
        self, width: int = 0, heads: int = 1, head_width: int = 0, *, clip: int = 16, **rest
    ):
        super().__init__()
        self.clip = clip
        self.keys = nn.Parameter(torch.empty(2 * clip + 1, head_width))
        self.values = nn.Parameter(torch.empty(2 * clip + 1, head_width))
        for part in (self.keys, self.values):
            nn.init.xavier_uniform_(part)

    def _rows(self, q_at: Tensor, k_at: Tensor, like: Tensor) -> Tensor:
        """Index of the vector of each pair, for every head."""
        rows = (-relative_distance(q_at, k_at)).clamp(-self.clip, self.clip) + self.clip
        return for_heads(rows, like)

    def bias(self, q, k, q_at, k_at, mask=None, project=None) -> Tensor | None:
        """Products of queries with the vectors of the keys."""
        products = q @ self.keys.T * q.shape[-1] ** -0.5
        return products.gather(-1, self._rows(q_at, k_at, q))

    def add_values(self, weights: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        """Average of the vectors of the values: first the weight of each, then they."""
        rows = self._rows(q_at, k_at, weights)
        each = weights.new_zeros(*weights.shape[:-1], len(self.values))
        return each.scatter_add(-1, rows, weights) @ self.values


class XL(Position):
    """Sinusoids of the distance, which queries are compared with (Transformer-XL, Dai et al. 2019).

    e_ij = ((q_i + u).k_j + (q_i + v).W R_(i-j)) / sqrt(d), with u, v and W learned.

    Args:
        width: width of the embeddings
        heads: attention heads
        head_width: width of a head
        base: base of the wavelengths
        layout: order of sines and cosines: pairs or halves
        rest: settings of other positions
    """

    per_layer = True

    def __init__(
        self, width: int, heads: int, head_width: int, *, base=1e4, layout="pairs", **rest
    ):
        super().__init__()
        if width % 2:
            raise UsageError(f"xl positions need an even width, not {width}")
        self.heads, self.base, self.layout = heads, base, layout
        self.relative = nn.Linear(width, heads * head_width, bias=False)
        self.u = nn.Parameter(torch.zeros(heads, 1, head_width))
        self.v = nn.Parameter(torch.zeros(heads, 1, head_width))

    def query(self, q: Tensor) -> Tensor:
        """Add u, so that q.k becomes (q + u).k."""
        return q + self.u

    def bias(self, q, k, q_at, k_at, mask=None, project=None) -> Tensor | None:
        """Scores of queries with distances."""
        q = (q + self.v) * q.shape[-1] ** -0.5
        if q_at is k_at and count_up(q_at):
            last = q.shape[-2] - 1
            falling = torch.arange(last, -last - 1, -1, device=q.device)
            places = self._places(within_range(falling, Range(-last, (last,))), q.dtype)
            # all sentences in one product for each head
            products = q.transpose(0, 1).flatten(1, 2) @ places.mT
            return shifted(products.unflatten(1, (q.shape[0], -1))).transpose(0, 1)
        distances = relative_distance(q_at, k_at)
        low, count = distance_range(distances, q_at, k_at)
        rising = torch.arange(low, low + count, device=q.device)
        places = self._places(within_range(rising, Range(low, (low + count - 1,))), q.dtype)
        return (q @ places.mT).gather(-1, for_heads(distances - low, q))

    def _places(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """Vectors of distances (n) for every head, (h, n, d)."""
        table = sinusoid_table(self.relative.in_features, self.base, self.layout)
        waves = self.relative(table(distances, dtype))
        return waves.unflatten(-1, (self.heads, -1)).transpose(0, 1)


def shifted(products: Tensor) -> Tensor:
    """Pairs (..., l, l) of products (..., l, 2l - 1) with distances from l - 1 down.

    In row i a pair (i, j) stands at l - 1 - i + j, so that they are a view, which begins one
    earlier in each row.
    """
    products = products.contiguous()
    *lead, length, count = products.shape
    if torch.compiler.is_exporting():  # a program is told no strides
        at = torch.arange(length, device=products.device)
        at = (at - at.unsqueeze(1) + length - 1).expand(*lead, -1, -1)
        return products.gather(-1, at)
    strides = (*products.stride()[:-2], count - 1, 1)
    return products.as_strided((*lead, length, length), strides, length - 1)


class CoPE(Position):
    """Positions that count what the query asks to be counted (Golovneva et al. 2024).

    p_ij = sum of sigmoid(q_i.k_t / sqrt(d)) over the keys t from j to i that i may see, cut at
    `most`; e_ij = q_i.(k_j + e[p_ij]) / sqrt(d), between whole numbers by interpolation.

    Args:
        width: width of the embeddings
        heads: attention heads
        head_width: width of a head
        max_length: longest text
        most: largest count that is told apart
        rest: settings of other positions
    """

    per_layer = True
    causal_only = True

    def __init__(
        self,
        width: int = 0,
        heads: int = 1,
        head_width: int = 0,
        *,
        max_length: int = 1024,
        most: int = 64,
        **rest,
    ):
        super().__init__()
        self.most = min(most, max_length)
        self.table = nn.Parameter(torch.zeros(self.most + 1, head_width))

    def bias(self, q, k, q_at, k_at, mask=None, project=None) -> Tensor | None:
        """Products of queries with the vectors of the counts."""
        scale = q.shape[-1] ** -0.5
        seen = relative_distance(q_at, k_at) >= 0
        seen = seen.unsqueeze(1) if seen.ndim == 3 else seen
        if mask is not None:
            seen = seen & mask.tile(slice(0, q.shape[-2]), slice(0, k.shape[-2])).to(seen.device)
        gates = (q * scale) @ repeat_kv(k, q.shape[1]).mT
        # not by a product, since what stands at a masked place may be NaN
        gates = gates.sigmoid().masked_fill(~seen, 0.0)
        # the keys that one query sees stand in the order of their positions, in a cache too
        counts = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=self.most)
        below = counts.detach().long().clamp(min=0)  # the query may be NaN, too
        products = q @ self.table.T * scale
        low = products.gather(-1, below)
        high = products.gather(-1, (below + 1).clamp(max=self.most))
        return torch.lerp(low, high, counts - below)


@dataclass(frozen=True)
class Distances:
    """How disentangled positions tell distances apart: near ones each, far ones by logarithm."""

    span: int = setting(512, "largest relative distance", min=2, max=10_000_000)
    buckets: int = setting(256, "buckets of distances", min=0, max=10_000_000)
    norm: str = setting(
        "layer", "norm of the vectors of distances", choices=lambda: Disentangled.norms
    )


class Disentangled(Position):
    """A vector for each distance, which meets what the tokens say (DeBERTa, He et al. 2021).

    e_ij = (q_i.k_j + q_i.K p_(i-j) + Q p_(i-j).k_j) / sqrt(3 d), where Q and K are the layer's own
    projections; the first term is the score "disentangled". Of n buckets to a side, the first half
    stand for a distance each, the others for ever more of them up to the span.

    Args:
        width: width of the embeddings
        heads: attention heads
        head_width: width of a head
        distances: buckets of distances, and their norm
        norm_eps: epsilon of that norm
        rest: settings of other positions
    """

    norms = {"layer": nn.LayerNorm, "none": nn.Identity}

    def __init__(
        self,
        width: int,
        heads: int = 1,
        head_width: int = 0,
        *,
        distances: Distances | None = None,
        norm_eps: float = 1e-7,
        **rest,
    ):
        super().__init__()
        distances = distances or Distances()
        self.span, self.buckets = distances.span, distances.buckets
        if self.buckets and not 4 <= self.buckets < 2 * (self.span - 1):
            raise UsageError(
                f"buckets={self.buckets} does not fit a span of {self.span} distances; choose at "
                "least 4 and less than twice the span, or 0 for a vector each"
            )
        self.side = self.buckets or self.span
        self.table = nn.Embedding(2 * self.side, width)
        self.norm = lookup("norm of distances", distances.norm, self.norms)(width, eps=norm_eps)

    def rows(self, distance: Tensor) -> Tensor:
        """Row of the table that stands for each distance."""
        if near := self.buckets // 2:
            size = distance.abs().clamp(min=near)
            # in fp32 and in this order, since a bucket begins where the logarithm is a whole number
            reach = torch.tensor((self.span - 1) / near, dtype=torch.float32, device=size.device)
            far = torch.ceil(torch.log(size.float() / near) / reach.log() * (near - 1)) + near
            distance = torch.where(size == near, distance, far.long() * distance.sign())
        return (distance + self.side).clamp(0, 2 * self.side - 1)

    def bias(self, q, k, q_at, k_at, mask=None, project=None) -> Tensor | None:
        """Scores of queries with distances, and of distances with keys."""
        rows = self.rows(relative_distance(q_at, k_at))
        # on an accelerator, asking takes longer than what it saves
        low, count = distance_range(rows) if cheap_to_ask(rows) else (0, 2 * self.side)
        assert project is not None
        at_q, at_k = project(self.norm(self.table.weight[low : low + count]))
        rows = for_heads(rows - low, q)
        from_q = (q @ repeat_kv(at_k.unsqueeze(0), q.shape[1]).mT).gather(-1, rows)
        from_k = (repeat_kv(k, q.shape[1]) @ at_q.mT).gather(-1, rows.mT).mT
        return (from_q + from_k) * (3 * q.shape[-1]) ** -0.5
