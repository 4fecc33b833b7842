"""Biases of the scores that depend on the distance alone, shared by all layers."""

import math
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.masks import Mask
from regard.attention.positions.absolute import Learned
from regard.attention.positions.base import (
    MAX_TABLE,
    Position,
    by_head,
    distance_range,
    relative_distance,
)
from regard.errors import UsageError


class Distance(Position):
    """A bias for each head that is a function of the distance alone, the same in all layers."""

    def values(self, distance: Tensor) -> Tensor:
        """Bias (h, n) of queries this far (n) after their keys."""
        raise NotImplementedError

    def shared(self, q_at: Tensor, k_at: Tensor, mask: Mask | None = None) -> Tensor | None:
        """Bias of all pairs, (h, q, k) or (b, h, q, k)."""
        pairs = relative_distance(q_at, k_at)
        one_by_one = pairs.is_meta or pairs.is_floating_point() or torch.compiler.is_compiling()
        low, count = (0, pairs.numel()) if one_by_one else distance_range(pairs, q_at, k_at)
        if count < pairs.numel():  # each distance once
            values = self.values(torch.arange(low, low + count, device=pairs.device))
            values = values.index_select(1, (pairs - low).flatten())
        else:
            values = self.values(pairs.flatten())
        return by_head(values, pairs)


class ALiBi(Distance):
    """A penalty -m|i - j|, steep in some heads and flat in others (Press et al. 2022)."""

    def __init__(self, width: int = 0, heads: int = 1, head_width: int = 0, **rest):
        super().__init__()
        self.slopes = slopes(heads)

    def values(self, distance: Tensor) -> Tensor:
        """Distance times each head's slope."""
        steep = torch.tensor(self.slopes, dtype=torch.float32, device=distance.device)
        return -steep.unsqueeze(1) * distance.abs()


def slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), ... for n heads; what n lacks to a power of two comes between.

    In fp32 step by step, so that they are to the last bit those that BLOOM was trained with.
    """
    power = 1 << heads.bit_length() - 1

    def row(n: int, exponents: range) -> list[float]:
        first = torch.tensor(2.0 ** (-8 / n), dtype=torch.float32, device="cpu")
        return (first ** torch.tensor(list(exponents), dtype=torch.int32, device="cpu")).tolist()

    return row(power, range(1, power + 1)) + row(2 * power, range(1, 2 * (heads - power), 2))


class T5Bias(Distance):
    """A learned bias for each bucket of distances, wider the further away (Raffel et al. 2020).

    Args:
        width: width of the embeddings
        heads: attention heads
        head_width: width of a head
        bidirectional: whether keys may come after queries
        buckets: buckets of distances
        furthest: distance from which on all share a bucket
        rest: settings of other positions
    """

    def __init__(
        self,
        width: int = 0,
        heads: int = 1,
        head_width: int = 0,
        *,
        bidirectional: bool = False,
        buckets: int = 32,
        furthest: int = 128,
        **rest,
    ):
        super().__init__()
        if buckets < 4 or buckets % 2 or furthest <= buckets // 2:
            raise UsageError(
                f"t5 positions need an even number of buckets, at least 4, and furthest above half "
                f"of it, not {buckets} and {furthest}"
            )
        self.sides, self.buckets, self.furthest = 1 + bidirectional, buckets, furthest
        self.table = nn.Parameter(torch.empty(buckets, heads))
        nn.init.normal_(self.table, std=max(1, width) ** -0.5)

    def bucket(self, distance: Tensor) -> Tensor:
        """Bucket of queries this far after their keys; the later keys come second."""
        each = self.buckets // self.sides
        later = (distance < 0) * each if self.sides == 2 else 0
        distance = distance.abs() if self.sides == 2 else distance.clamp(min=0)
        exact = each // 2
        # in fp32 and in this order, since a bucket begins where the logarithm is a whole number
        wide = torch.log(distance.float() / exact) / math.log(self.furthest / exact)
        wide = exact + (wide * (each - exact)).clamp(0, each - exact - 1).long()
        return later + torch.where(distance < exact, distance, wide)

    def values(self, distance: Tensor) -> Tensor:
        """Rows of the buckets."""
        return self.table.T.index_select(1, self.bucket(distance).long())


class LearnedT5(Learned):
    """A learned vector for each position, and T5's bias for each distance (MPNet, Song 2020)."""

    def __init__(self, width: int, heads: int = 1, head_width: int = 0, **rest: Any):
        super().__init__(width, heads, head_width, **rest)
        self.distances = T5Bias(width, heads, head_width, **rest)

    def shared(self, q_at: Tensor, k_at: Tensor, mask: Mask | None = None) -> Tensor | None:
        """Bias of all pairs, (h, q, k) or (b, h, q, k)."""
        return self.distances.shared(q_at, k_at, mask)


class KerpleLog(Distance):
    """A penalty -r1 log(1 + r2|i - j|), r1 and r2 positive and learned (Chi et al. 2022)."""

    def __init__(self, width: int = 0, heads: int = 1, head_width: int = 0, **rest):
        super().__init__()
        # the logarithms are learned, so that what they stand for stays positive
        self.log_r1 = nn.Parameter(torch.rand(heads).mul_(2).clamp_(min=0.01).log_())
        self.log_r2 = nn.Parameter(torch.rand(heads).clamp_(min=0.01).log_())

    def values(self, distance: Tensor) -> Tensor:
        """Penalties."""
        r1, r2 = (x.exp().unsqueeze(1) for x in (self.log_r1, self.log_r2))
        return -r1 * torch.log1p(r2 * distance.abs())


class KerplePower(Distance):
    """A penalty -r1 |i - j|^r2, r1 positive, r2 in (0, 2), both learned; it begins as ALiBi."""

    def __init__(self, width: int = 0, heads: int = 1, head_width: int = 0, **rest):
        super().__init__()
        self.log_r1 = nn.Parameter(torch.tensor(slopes(heads)).log_())
        self.logit_r2 = nn.Parameter(torch.zeros(heads))

    def values(self, distance: Tensor) -> Tensor:
        """Penalties."""
        r1, r2 = self.log_r1.exp().unsqueeze(1), 2 * self.logit_r2.sigmoid().unsqueeze(1)
        return -r1 * distance.abs().to(r1.dtype) ** r2


class Fire(Position):
    """A learned function of the distance as a share of the length so far (Li et al. 2024).

    bias = f(psi(|i - j|) / psi(max(L, i, j))), psi(x) = log(c x + 1), with f a small network, and
    c and L learned. The share is at most one however long the text is.

    Args:
        width: width of the embeddings
        heads: attention heads
        head_width: width of a head
        max_length: four times the length that L begins with
        hidden: width of the network
        rest: settings of other positions
    """

    def __init__(
        self,
        width: int = 0,
        heads: int = 1,
        head_width: int = 0,
        *,
        max_length: int = 1024,
        hidden: int = 32,
        **rest,
    ):
        super().__init__()
        self.log_c = nn.Parameter(torch.tensor(0.1).log_())
        self.log_length = nn.Parameter(torch.tensor(max(1.0, max_length / 4)).log_())
        # no last bias: a softmax would not feel it
        self.inner = nn.Parameter(torch.empty(hidden, 1).uniform_(-1, 1))
        self.inner_bias = nn.Parameter(torch.empty(hidden).uniform_(-1, 1))
        self.outer = nn.Parameter(torch.empty(heads, hidden))
        nn.init.uniform_(self.outer, -(hidden**-0.5), hidden**-0.5)

    def shared(self, q_at: Tensor, k_at: Tensor, mask: Mask | None = None) -> Tensor | None:
        """Bias of all pairs, (h, q, k) or (b, h, q, k)."""
        c = self.log_c.exp()
        distances = relative_distance(q_at, k_at).abs()
        furthest = torch.maximum(torch.maximum(q_at, k_at.mT), self.log_length.exp())
        share = torch.log1p(c * distances) / torch.log1p(c * furthest)
        # some pairs at a time, which where nothing is learned is all the memory that is needed
        parts = share.flatten().split(MAX_TABLE // len(self.inner))
        return by_head(torch.cat([self._network(part) for part in parts], 1), share)

    def _network(self, share: Tensor) -> Tensor:
        """Bias of shares (n), (h, n)."""
        inner = torch.addmm(self.inner_bias.unsqueeze(1), self.inner, share.unsqueeze(0))
        return self.outer @ inner.relu_()
