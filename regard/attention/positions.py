"""Where tokens stand: position encodings by name.

A position `at` has coordinates: (l, c) or (b, l, c), c = 1 for text and sound, 2 for images.
A part overrides only the verbs it needs.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.masks import Mask
from regard.attention.once import once
from regard.attention.shapes import repeat_kv
from regard.errors import UsageError, lookup

Project = Callable[[Tensor], tuple[Tensor, Tensor]]

# Tables of sines take memory for at most this many numbers; what lies beyond is computed anew.
ROWS = 2**22


class Position(nn.Module):
    """No position at all: every verb leaves things as they are."""

    per_layer = False  # whether each layer has parameters of its own
    causal_only = False  # whether it makes no sense to look ahead
    adds_values = False  # whether add_values does anything

    def __init__(self, width: int = 0, heads: int = 1, head_width: int = 0, **settings: object):
        super().__init__()

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add to the input (b, l, w) what depends on its positions."""
        return x

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Turn projected queries or keys (b, h, l, d) by their positions."""
        return x

    def shared(self, q_at: Tensor, k_at: Tensor, mask: Mask | None = None) -> Tensor | None:
        """Return a bias that all layers share, computed once a forward."""
        return None

    def bias(
        self,
        q: Tensor,
        k: Tensor,
        q_at: Tensor,
        k_at: Tensor,
        mask: Mask | None = None,
        project: Project | None = None,
    ) -> Tensor | None:
        """Return a layer's own bias from its projected, unrotated queries and keys.

        `project` applies the layer's query and key projections to vectors (l, w) and returns both,
        (h, l, d), for those positions that are looked up like words.
        """
        return None

    def add_values(self, weights: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        """Return what the positions themselves add to the average of the values, (b, h, q, d)."""
        raise NotImplementedError


class PerLayer(Position):
    """Stands for the positions of a stack whose layers each have their own."""

    def __init__(self, make: Callable[[], Position]):
        super().__init__()
        self.make = make


def of_layer(position: Position) -> Position:
    """Return the position of the next layer: the stack's, or a fresh one."""
    return position.make() if isinstance(position, PerLayer) else position


class Table:
    """A function of whole numbers as rows (n, width), for a range that grows with what is asked."""

    def __init__(self, make: Callable[[Tensor], Tensor]):
        self.make = make  # from fp64 numbers (n) to rows (n, width)
        self.kept: dict[tuple[torch.dtype, torch.device], tuple[int, Tensor]] = {}

    def __call__(self, at: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the rows of numbers (...), (..., width)."""
        known = not (at.is_meta or at.is_floating_point() or torch.compiler.is_compiling())
        if known and at.numel():
            low, high = (int(x) for x in torch.aminmax(at)) if at.numel() > 1 else [int(at)] * 2
            first, rows = self.kept.get((dtype, at.device), (0, at.new_empty(0, 1)))
            if low < first or high >= first + len(rows):
                first, rows = self._grow(min(low * 2, first), max(high * 2, 255), dtype, at.device)
            if first <= low and high < first + len(rows):
                return F.embedding(at - first if first else at, rows)
        return self.make(at.to(torch.float64).flatten()).to(dtype).unflatten(0, at.shape)

    def _grow(self, low: int, high: int, dtype: torch.dtype, device: torch.device):
        """Compute the rows from low to high, unless they are too many."""
        with torch.inference_mode(False):
            one = self.make(torch.zeros(1, dtype=torch.float64, device=device))
            if (high - low + 1) * one.shape[-1] > ROWS:
                return 0, one[:0]
            numbers = torch.arange(low, high + 1, dtype=torch.float64, device=device)
            kept = self.kept[dtype, device] = low, self.make(numbers).to(dtype)
        return kept

    def __reduce__(self):
        return Table, (self.make,)


def rates(width: int, base: float, device: torch.device | None = None) -> Tensor:
    """Return 1 / base^(2i/w) for i < w/2, in fp64."""
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)


def _waves(width: int, base: float, layout: str, at: Tensor) -> Tensor:
    """Return sin and cos of fp64 numbers (...) at all rates, (..., width)."""
    angles = at.unsqueeze(-1) * rates(width, base, at.device)
    both = torch.stack([angles.sin(), angles.cos()], dim=-1 if layout == "pairs" else -2)
    return both.flatten(-2)


def sinusoids(at: Tensor, width: int, base: float = 10_000.0, layout: str = "pairs") -> Tensor:
    """Return sin and cos of each coordinate at `width` wavelengths from 2 pi to base * 2 pi.

    P[k, 2i] = sin(k / base^(2i/w)), P[k, 2i+1] = cos(same): in pairs (sin, cos, sin, cos, ...), or
    as halves (all sines, then all cosines). Coordinates share the width evenly.
    """
    return _waves(_each(width, at), base, layout, at.to(torch.float64)).flatten(-2)


def _each(width: int, at: Tensor) -> int:
    """Return the part of a width that each coordinate gets."""
    each = width // at.shape[-1]
    if each % 2 or each * at.shape[-1] != width:
        raise UsageError(f"sinusoids need an even width for each coordinate, not {width}")
    return each


_TABLES: dict[tuple[int, float, str], Table] = {}


def _table(*which) -> Table:
    """Return the one table of the sinusoids of a width, base and layout."""
    if which not in _TABLES:
        _TABLES[which] = Table(partial(_waves, *which))
    return _TABLES[which]


class Sinusoidal(Position):
    """Sines and cosines of the position, added to the input (Vaswani et al. 2017).

    Moving by D is a rotation that does not depend on where: P[k+D] = M_D P[k].
    """

    def __init__(self, width: int, heads=1, head_width=0, *, base=1e4, layout="pairs", **rest):
        super().__init__()
        if width % 2:
            raise UsageError(f"sinusoidal positions need an even width, not {width}")
        self.width, self.base, self.layout = width, base, layout

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add the sinusoids."""
        table = _table(_each(self.width, at), self.base, self.layout)
        return x + table(at, x.dtype).flatten(-2)


class Learned(Position):
    """A learned vector for each position, added to the input."""

    def __init__(self, width: int, heads=1, head_width=0, *, max_length=512, **rest):
        super().__init__()
        self.table = nn.Embedding(max_length, width)

    def embed(self, x: Tensor, at: Tensor) -> Tensor:
        """Add the vectors of the positions."""
        last = self.table.num_embeddings
        known = not (at.is_meta or torch.compiler.is_compiling())
        if known and at.numel() and int(at.max()) >= last:
            raise UsageError(
                f"position {int(at.max())} is past the {last} learned ones; "
                "shorten the input or train with a larger max_length"
            )
        return x + self.table(at[..., 0])


@dataclass(frozen=True)
class RotaryScaling:
    """How rotary positions are stretched to reach further than they were trained for.

    Kinds: none; linear (all rates divided by the factor); llama3 (only rates whose wavelength is
    past original_length / low, none shorter than original_length / high); yarn (rates that turn
    less than beta_slow times in the original length are divided, those that turn more than
    beta_fast times are not; scores grow by attention_factor squared).
    """

    kind: str = "none"
    factor: float = field(default=1.0, metadata={"min": 0.01, "max": 1e6})
    original_length: int = field(default=0, metadata={"min": 0, "max": 2**40})
    low: float = field(default=1.0, metadata={"min": 1e-3, "max": 1e6})
    high: float = field(default=4.0, metadata={"min": 1e-3, "max": 1e6})
    beta_fast: float = field(default=32.0, metadata={"min": 1e-3, "max": 1e6})
    beta_slow: float = field(default=1.0, metadata={"min": 1e-3, "max": 1e6})
    attention_factor: float | None = field(default=None, metadata={"min": 1e-3, "max": 1e3})


def _linear(plain: Tensor, base: float, by: RotaryScaling) -> Tensor:
    """Divide all rates by the factor."""
    return plain / by.factor


def _llama3(plain: Tensor, base: float, by: RotaryScaling) -> Tensor:
    """Divide the slow rates, keep the fast ones, and go smoothly from these to those."""
    turns = by.original_length * plain / (2 * math.pi)  # in the original length
    keep = ((turns - by.low) / (by.high - by.low)).clamp(0, 1)
    return torch.lerp(plain / by.factor, plain, keep)


def _yarn(plain: Tensor, base: float, by: RotaryScaling) -> Tensor:
    """Divide the slow rates, keep the fast ones, and go evenly by number from these to those."""

    def number(turns: float) -> float:
        """Return which rate turns this often in the original length."""
        return len(plain) * math.log(by.original_length / (turns * 2 * math.pi)) / math.log(base)

    first = max(math.floor(number(by.beta_fast)), 0)
    last = min(math.ceil(number(by.beta_slow)), 2 * len(plain) - 1)
    last = last + 0.001 if last == first else last
    numbers = torch.arange(len(plain), dtype=plain.dtype, device=plain.device)
    return torch.lerp(plain, plain / by.factor, ((numbers - first) / (last - first)).clamp(0, 1))


SCALINGS: dict[str, Callable[[Tensor, float, RotaryScaling], Tensor]] = {
    "none": lambda plain, base, by: plain,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


class Rotary(Position):
    """Queries and keys turned by their position, so that only distance matters (RoPE).

    Pairs are (i, i + d/2), the layout of LLaMA and most public checkpoints.
    """

    def __init__(
        self,
        width: int = 0,
        heads: int = 1,
        head_width: int = 0,
        *,
        base: float = 10_000.0,
        scaling: RotaryScaling | None = None,
        max_length: int = 1024,
        **rest,
    ):
        super().__init__()
        if head_width % 2:
            raise UsageError(f"rotary positions need an even head_width, not {head_width}")
        scaling = scaling or RotaryScaling()
        lookup("rotary scaling", scaling.kind, SCALINGS)
        if not scaling.original_length:
            scaling = replace(scaling, original_length=max(1, int(max_length / scaling.factor)))
        if scaling.kind == "llama3" and scaling.high <= scaling.low:
            raise UsageError(f"llama3 scaling needs high={scaling.high} above low={scaling.low}")
        self.base, self.scaling = base, scaling
        self.tables: dict[tuple, Table] = {}

    @property
    def stretch(self) -> float:
        """Return what queries and keys are multiplied by."""
        if self.scaling.kind != "yarn":
            return 1.0
        factor = self.scaling.attention_factor
        return 0.1 * math.log(max(1.0, self.scaling.factor)) + 1.0 if factor is None else factor

    def rates(self, width: int, device: torch.device | None = None) -> Tensor:
        """Return how far each pair of a width turns from one position to the next, in fp64."""
        return SCALINGS[self.scaling.kind](rates(width, self.base, device), self.base, self.scaling)

    def _turns(self, width: int, at: Tensor) -> Tensor:
        """Return cos, cos, -sin and sin of every rate at fp64 numbers (n), (n, 2 * width)."""
        angles = at.unsqueeze(-1) * self.rates(width, at.device)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([cos, cos, -sin, sin], -1) * self.stretch

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Turn each pair by its angle."""
        both = partial(self._both, x.dtype, x.shape[-1], at)
        cos, sin = once(both, self, at, dtype=x.dtype, width=x.shape[-1])
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)

    def turns(self, dtype: torch.dtype, width: int, at: Tensor) -> Tensor:
        """Return cos, cos, -sin and sin at each coordinate (..., c), (..., c, 2 * width / c)."""
        each = _each(width, at)
        key = each, self.base, self.scaling  # which may be set anew at any time
        if key not in self.tables:
            self.tables[key] = Table(partial(self._turns, each))
        return self.tables[key](at, dtype)

    def _both(self, dtype: torch.dtype, width: int, at: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin for both sides of each pair, the sine of the first side negative."""
        four = self.turns(dtype, width, at).unflatten(-1, (4, -1)).transpose(-3, -2)
        cos, sin = four.flatten(-3).chunk(2, -1)
        return (cos.unsqueeze(1), sin.unsqueeze(1)) if at.ndim == 3 else (cos, sin)


class PartRotary(Rotary):
    """Rotary positions that turn only the first part of each head (GPT-NeoX)."""

    def __init__(
        self, width: int = 0, heads: int = 1, head_width: int = 0, *, share: float = 0.25, **rest
    ):
        super().__init__(width, heads, **rest)
        self.exact = int(head_width * share)
        self.part = self.exact + self.exact % 2
        if self.part > head_width:
            raise UsageError(f"rotary positions need an even head_width, not {head_width}")
        if self.exact % 2 and self.scaling.kind == "yarn":
            raise UsageError(
                f"yarn counts pairs, but position_share={share} turns {self.exact} of {head_width} "
                "channels of a head; choose a share that turns an even number"
            )

    def rates(self, width: int, device: torch.device | None = None) -> Tensor:
        """Return how far each pair turns, by the part as it was before it was made even."""
        return super().rates(self.exact if width == self.part else width, device)

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Turn each pair of the first part by its angle."""
        if not self.part:
            return x
        return torch.cat([super().rotate(x[..., : self.part], at), x[..., self.part :]], -1)


class Yarn(Rotary):
    """Rotary positions stretched by YaRN (Peng et al. 2023) to four times what was trained for.

    Unless told otherwise, max_length is what is to be reached.
    """

    def __init__(self, *sizes: int, scaling: RotaryScaling | None = None, **rest):
        if scaling is None or scaling.kind == "none":
            scaling = RotaryScaling("yarn", factor=4.0)
        super().__init__(*sizes, scaling=scaling, **rest)


def ahead(q_at: Tensor, k_at: Tensor) -> Tensor:
    """Return how far each query stands after each key, (q, k) or (b, q, k)."""
    if q_at.shape[-1] != 1:
        raise UsageError(
            f"these positions count along one line, not {q_at.shape[-1]} coordinates; "
            "choose sinusoidal or rotary"
        )
    return q_at - k_at.mT


def _range(distances: Tensor) -> tuple[int, int]:
    """Return the least of the distances, and how many there are up to the largest."""
    if distances.is_meta or not distances.numel():
        return 0, 1
    low, high = (int(x) for x in torch.aminmax(distances))
    return low, high - low + 1


def _by_head(values: Tensor, pairs: Tensor) -> Tensor:
    """Lay (h, n) out as (h, q, k) or (b, h, q, k), like pairs without heads."""
    values = values.unflatten(1, pairs.shape)
    return values.transpose(0, 1) if pairs.ndim == 3 else values


class Distance(Position):
    """A bias for each head that is a function of the distance alone, the same in all layers."""

    def values(self, distance: Tensor) -> Tensor:
        """Return the bias (h, n) of queries this far (n) after their keys."""
        raise NotImplementedError

    def shared(self, q_at: Tensor, k_at: Tensor, mask: Mask | None = None) -> Tensor | None:
        """Return the bias of all pairs, (h, q, k) or (b, h, q, k)."""
        pairs = ahead(q_at, k_at)
        one_by_one = pairs.is_meta or pairs.is_floating_point() or torch.compiler.is_compiling()
        low, count = (0, pairs.numel()) if one_by_one else _range(pairs)
        if count < pairs.numel():  # each distance once
            values = self.values(torch.arange(low, low + count, device=pairs.device))
            values = values.index_select(1, (pairs - low).flatten())
        else:
            values = self.values(pairs.flatten())
        return _by_head(values, pairs)


class ALiBi(Distance):
    """A penalty -m|i - j|, steep in some heads and flat in others (Press et al. 2022)."""

    def __init__(self, width: int = 0, heads: int = 1, head_width: int = 0, **rest):
        super().__init__()
        self.slopes = slopes(heads)

    def values(self, distance: Tensor) -> Tensor:
        """Return the distance times each head's slope."""
        steep = torch.tensor(self.slopes, dtype=torch.float32, device=distance.device)
        return -steep.unsqueeze(1) * distance.abs()


def slopes(heads: int) -> list[float]:
    """Return 2^(-8/n), 2^(-16/n), ... for n heads; what n lacks to a power of two comes between.

    In fp32 step by step, so that they are to the last bit those that BLOOM was trained with.
    """
    power = 1 << heads.bit_length() - 1

    def row(n: int, exponents: range) -> list[float]:
        first = torch.tensor(2.0 ** (-8 / n), dtype=torch.float32, device="cpu")
        return (first ** torch.tensor(list(exponents), dtype=torch.int32, device="cpu")).tolist()

    return row(power, range(1, power + 1)) + row(2 * power, range(1, 2 * (heads - power), 2))


class T5(Distance):
    """A learned bias for each bucket of distances, wider the further away (Raffel et al. 2020)."""

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
        """Return the bucket of queries this far after their keys; the later keys come second."""
        each = self.buckets // self.sides
        later = (distance < 0) * each if self.sides == 2 else 0
        distance = distance.abs() if self.sides == 2 else distance.clamp(min=0)
        exact = each // 2
        # in fp32 and in this order, since a bucket begins where the logarithm is a whole number
        wide = torch.log(distance.float() / exact) / math.log(self.furthest / exact)
        wide = exact + (wide * (each - exact)).clamp(0, each - exact - 1).long()
        return later + torch.where(distance < exact, distance, wide)

    def values(self, distance: Tensor) -> Tensor:
        """Return the rows of the buckets."""
        return self.table.T.index_select(1, self.bucket(distance).long())


class LearnedT5(Learned):
    """A learned vector for each position, and T5's bias for each distance (MPNet, Song 2020)."""

    def __init__(self, width: int, heads: int = 1, head_width: int = 0, **rest: Any):
        super().__init__(width, heads, head_width, **rest)
        self.distances = T5(width, heads, head_width, **rest)

    def shared(self, q_at: Tensor, k_at: Tensor, mask: Mask | None = None) -> Tensor | None:
        """Return the bias of all pairs, (h, q, k) or (b, h, q, k)."""
        return self.distances.shared(q_at, k_at, mask)


class KerpleLog(Distance):
    """A penalty -r1 log(1 + r2|i - j|), r1 and r2 positive and learned (Chi et al. 2022)."""

    def __init__(self, width: int = 0, heads: int = 1, head_width: int = 0, **rest):
        super().__init__()
        # the logarithms are learned, so that what they stand for stays positive
        self.log_r1 = nn.Parameter(torch.rand(heads).mul_(2).clamp_(min=0.01).log_())
        self.log_r2 = nn.Parameter(torch.rand(heads).clamp_(min=0.01).log_())

    def values(self, distance: Tensor) -> Tensor:
        """Return the penalties."""
        r1, r2 = (x.exp().unsqueeze(1) for x in (self.log_r1, self.log_r2))
        return -r1 * torch.log1p(r2 * distance.abs())


class KerplePower(Distance):
    """A penalty -r1 |i - j|^r2, r1 positive, r2 in (0, 2), both learned; it begins as ALiBi."""

    def __init__(self, width: int = 0, heads: int = 1, head_width: int = 0, **rest):
        super().__init__()
        self.log_r1 = nn.Parameter(torch.tensor(slopes(heads)).log_())
        self.logit_r2 = nn.Parameter(torch.zeros(heads))

    def values(self, distance: Tensor) -> Tensor:
        """Return the penalties."""
        r1, r2 = self.log_r1.exp().unsqueeze(1), 2 * self.logit_r2.sigmoid().unsqueeze(1)
        return -r1 * distance.abs().to(r1.dtype) ** r2


class Fire(Position):
    """A learned function of the distance as a share of the length so far (Li et al. 2024).

    bias = f(psi(|i - j|) / psi(max(L, i, j))), psi(x) = log(c x + 1), with f a small network, and
    c and L learned. The share is at most one however long the text is.
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
        """Return the bias of all pairs, (h, q, k) or (b, h, q, k)."""
        c = self.log_c.exp()
        distances = ahead(q_at, k_at).abs()
        furthest = torch.maximum(torch.maximum(q_at, k_at.mT), self.log_length.exp())
        share = torch.log1p(c * distances) / torch.log1p(c * furthest)
        # some pairs at a time, which where nothing is learned is all the memory that is needed
        parts = share.flatten().split(ROWS // len(self.inner))
        return _by_head(torch.cat([self._network(part) for part in parts], 1), share)

    def _network(self, share: Tensor) -> Tensor:
        """Return the bias of shares (n), (h, n)."""
        inner = torch.addmm(self.inner_bias.unsqueeze(1), self.inner, share.unsqueeze(0))
        return self.outer @ inner.relu_()


def _for_heads(index: Tensor, like: Tensor) -> Tensor:
    """Show numbers (q, k) or (b, q, k) to every head of (b, h, q, ...)."""
    index = index.unsqueeze(1) if index.ndim == 3 else index
    return index.expand(*like.shape[:2], *index.shape[-2:])


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
        """Return which vector each pair has, for every head."""
        rows = (-ahead(q_at, k_at)).clamp(-self.clip, self.clip) + self.clip
        return _for_heads(rows, like)

    def bias(self, q, k, q_at, k_at, mask=None, project=None) -> Tensor | None:
        """Return the products of queries with the vectors of the keys."""
        products = q @ self.keys.T * q.shape[-1] ** -0.5
        return products.gather(-1, self._rows(q_at, k_at, q))

    def add_values(self, weights: Tensor, q_at: Tensor, k_at: Tensor) -> Tensor:
        """Return the average of the vectors of the values: first the weight of each, then they."""
        rows = self._rows(q_at, k_at, weights)
        each = weights.new_zeros(*weights.shape[:-1], len(self.values))
        return each.scatter_add(-1, rows, weights) @ self.values


class XL(Position):
    """Sinusoids of the distance, which queries are compared with (Transformer-XL, Dai et al. 2019).

    e_ij = ((q_i + u).k_j + (q_i + v).W R_(i-j)) / sqrt(d), with u, v and W learned.
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

    def bias(self, q, k, q_at, k_at, mask=None, project=None) -> Tensor | None:
        """Return all of the score but q.k."""
        distances = ahead(q_at, k_at)
        low, count = _range(distances)
        table = _table(self.relative.in_features, self.base, self.layout)
        waves = table(torch.arange(low, low + count, device=q.device), q.dtype)
        places = self.relative(waves).unflatten(-1, (self.heads, -1)).transpose(0, 1)
        place = ((q + self.v) @ places.mT).gather(-1, _for_heads(distances - low, q))
        content = self.u @ repeat_kv(k, self.heads).mT
        return (place + content) * q.shape[-1] ** -0.5


class CoPE(Position):
    """Positions that count what the query asks to be counted (Golovneva et al. 2024).

    p_ij = sum of sigmoid(q_i.k_t / sqrt(d)) over the keys t from j to i that i may see, cut at
    `most`; e_ij = q_i.(k_j + e[p_ij]) / sqrt(d), between whole numbers by interpolation.
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
        """Return the products of queries with the vectors of the counts."""
        scale = q.shape[-1] ** -0.5
        seen = ahead(q_at, k_at) >= 0
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

    span: int = field(default=512, metadata={"min": 2, "max": 10_000_000})
    buckets: int = field(default=256, metadata={"min": 0, "max": 10_000_000})
    norm: str = "layer"


class Disentangled(Position):
    """A vector for each distance, which meets what the tokens say (DeBERTa, He et al. 2021).

    e_ij = (q_i.k_j + q_i.K p_(i-j) + Q p_(i-j).k_j) / sqrt(3 d), where Q and K are the layer's own
    projections; the first term is the score "disentangled". Of n buckets to a side, the first half
    stand for a distance each, the others for ever more of them up to the span.
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
        """Return the row of the table that stands for each distance."""
        if near := self.buckets // 2:
            size = distance.abs().clamp(min=near)
            # in fp32 and in this order, since a bucket begins where the logarithm is a whole number
            reach = torch.tensor((self.span - 1) / near, dtype=torch.float32, device=size.device)
            far = torch.ceil(torch.log(size.float() / near) / reach.log() * (near - 1)) + near
            distance = torch.where(size == near, distance, far.long() * distance.sign())
        return (distance + self.side).clamp(0, 2 * self.side - 1)

    def bias(self, q, k, q_at, k_at, mask=None, project=None) -> Tensor | None:
        """Return what queries make of distances, and distances of keys."""
        rows = self.rows(ahead(q_at, k_at))
        low, count = (0, 2 * self.side) if rows.is_meta else _range(rows)
        assert project is not None
        at_q, at_k = project(self.norm(self.table.weight[low : low + count]))
        rows = _for_heads(rows - low, q)
        from_q = (q @ repeat_kv(at_k.unsqueeze(0), q.shape[1]).mT).gather(-1, rows)
        from_k = (repeat_kv(k, q.shape[1]) @ at_q.mT).gather(-1, rows.mT).mT
        return (from_q + from_k) * (3 * q.shape[-1]) ** -0.5


POSITIONS: dict[str, type[Position]] = {
    "none": Position,
    "sinusoidal": Sinusoidal,
    "learned": Learned,
    "rotary": Rotary,
    "rotary_part": PartRotary,
    "yarn": Yarn,
    "alibi": ALiBi,
    "t5": T5,
    "shaw": Shaw,
    "xl": XL,
    "kerple_log": KerpleLog,
    "kerple_power": KerplePower,
    "fire": Fire,
    "cope": CoPE,
    "disentangled": Disentangled,
    "learned_t5": LearnedT5,
}
ALIASES = {
    "nope": "none",
    "sin": "sinusoidal",
    "absolute": "learned",
    "rope": "rotary",
    "relative": "shaw",
    "transformer_xl": "xl",
    "t5_bias": "t5",
    "kerple": "kerple_log",
}


def has_table(name: str) -> bool:
    """Tell whether positions of a name are looked up in a learned table, which ends."""
    return issubclass(POSITIONS.get(ALIASES.get(name, name), Position), Learned)


def build_position(
    name: str,
    width: int,
    heads: int,
    head_width: int,
    *,
    base: float = 10_000.0,
    layout: str = "pairs",
    max_length: int = 1024,
    bidirectional: bool = False,
    scaling: RotaryScaling | None = None,
    **settings: object,
) -> Position:
    """Make the position of a stack by its name; each block then has `of_layer` of it."""
    part = lookup("position", ALIASES.get(name, name), POSITIONS)
    if part.causal_only and bidirectional:
        raise UsageError(
            f"position '{name}' counts what came before; a model that reads in both directions "
            "needs another, such as rotary"
        )
    make = partial(
        part,
        width,
        heads,
        head_width,
        base=base,
        layout=layout,
        max_length=max_length,
        bidirectional=bidirectional,
        scaling=scaling,
        **settings,
    )
    return PerLayer(make) if part.per_layer else make()
