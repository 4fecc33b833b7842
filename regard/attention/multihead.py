"""Multi-head attention, and the keys and values that decoding caches."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Required, TypedDict

import torch
from jaxtyping import Bool, Float, Num
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import as_mask, attend
from regard.attention.masks import Mask
from regard.attention.places import places
from regard.attention.positions import Position
from regard.attention.scores import build_score
from regard.attention.shapes import join_rows
from regard.errors import UsageError
from regard.native.torch_private import has_global_hooks, has_hooks


class Memory(NamedTuple):
    """Keys and values (b, h, k, d) of what cross-attention reads, projected once."""

    k: Tensor
    v: Tensor

    def by_columns(self) -> "Memory":
        """Lay keys out by columns: products with a few queries at a time are far faster then."""
        return Memory(self.k.mT.contiguous().mT, self.v.contiguous())

    def to(self, dtype: torch.dtype) -> "Memory":
        """Both in a data type: PyTorch's products need that of the queries."""
        return Memory(self.k.to(dtype), self.v.to(dtype))

    def keep(self, select: "RowSelect") -> "Memory":
        """Go on with some sentences only."""
        return Memory(select(self.k), select(self.v))

    def join(self, other: "Memory") -> "Memory":
        """Keys and values of both, laid out as here."""
        both = Memory(join_rows(self.k, other.k, 2), join_rows(self.v, other.v, 2))
        return both if self.k.stride(-1) == 1 else both.by_columns()


class RowSelect:
    """A selection of rows, in place: only rows that are not where they shall be are copied."""

    def __init__(self, rows: Tensor):
        self.rows, self.count = rows, len(rows)
        self.to = (rows != torch.arange(self.count, device=rows.device)).nonzero().squeeze(1)
        self.origin = rows[self.to]

    def __call__(self, x: Tensor, used: int | None = None) -> Tensor:
        """Selected rows; only the first `used` positions of axis 2 are copied."""
        if len(self.to):
            x[self.to, :, :used] = x[self.origin, :, :used]
        return x[: self.count]


class Cache:
    """Keys and values (b, h, k, d) of texts that grow, in memory that is allocated ahead.

    The hypotheses of a sentence share its row; a mask tells which of the keys each of them sees, so
    that a beam branches and drops hypotheses without copying a key.

    Args:
        rows: texts
        heads: key and value heads
        capacity: keys that there is memory for
        width: width of a head
        like: tensor whose dtype and device the memory has
    """

    def __init__(self, rows: int, heads: int, capacity: int, width: int, like: Tensor):
        self.k = like.new_empty(rows, heads, capacity, width)
        self.v = like.new_empty(rows, heads, capacity, width)
        self._at: list[Tensor] = []
        self.length = 0

    @property
    def at(self) -> Tensor | None:
        """Positions of the keys, concatenated only when asked for."""
        if len(self._at) > 1:
            self._at = [torch.cat(self._at, dim=-2)]
        return self._at[0] if self._at else None

    @property
    def room(self) -> int:
        """Number of keys that memory is allocated for."""
        return self.v.shape[-2]

    def take(self, count: int, at: Tensor) -> int:
        """Reserve room for the keys and values of new positions and return where it begins."""
        start, end = self.length, self.length + count
        if end > self.room:
            self.compact(None, 2 * end)
        self._at.append(at)
        self.length = end
        return start

    def append(self, k: Tensor, v: Tensor, at: Tensor) -> Memory:
        """Add the keys and values of new positions and return all so far."""
        count = k.shape[-2]
        start = self.take(count, at)
        self.k.narrow(2, start, count).copy_(k)
        self.v.narrow(2, start, count).copy_(v)
        end = self.length
        return Memory(self.k.narrow(2, 0, end), self.v.narrow(2, 0, end))

    def compact(self, places: Tensor | None, capacity: int) -> None:
        """Move all keys, or those at some places (b, k), into new memory of a capacity."""
        rows, heads, _, width = self.v.shape
        k, v = self.k[:, :, : self.length], self.v[:, :, : self.length]
        if places is not None:
            index = places[:, None, :, None].expand(-1, heads, -1, width)
            k, v = k.gather(2, index), v.gather(2, index)
            if (at := self.at) is not None:
                at = at.expand(rows, -1, -1)
                self._at = [at.gather(1, places.unsqueeze(-1).expand(-1, -1, at.shape[-1]))]
            self.length = places.shape[1]
        self.k = k.new_empty(rows, heads, capacity, width)
        self.v = v.new_empty(rows, heads, capacity, width)
        self.k[:, :, : self.length], self.v[:, :, : self.length] = k, v

    def keep(self, select: RowSelect) -> None:
        """Go on with some sentences only."""
        self.k, self.v = select(self.k, self.length), select(self.v, self.length)
        if (at := self.at) is not None and at.ndim == 3:
            self._at = [at[select.rows]]

    def join(self, other: "Cache") -> None:
        """Go on with the sentences of another cache too; the shorter one gets zeros at its end."""
        if self.at is not None and other.at is not None:
            at = self.at.expand(len(self.v), -1, -1)
            self._at = [join_rows(at, other.at.expand(len(other.v), -1, -1), 1)]
        self.k = join_rows(self.k[:, :, : self.length], other.k[:, :, : other.length], 2)
        self.v = join_rows(self.v[:, :, : self.length], other.v[:, :, : other.length], 2)
        self.length = self.room


def is_linear(linear: nn.Module) -> bool:
    """True if a module is W x + b and nothing else, so that a part of W is a part of it."""
    kind, own = type(linear), vars(linear)
    return (
        isinstance(linear, nn.Linear)
        and kind.forward is nn.Linear.forward
        and kind.__call__ is nn.Module.__call__
        and "forward" not in own
        and not has_hooks(linear)
        and not has_global_hooks()
    )


class SelfAttentionInputs(TypedDict, total=False):
    """What a block hands to its self-attention beside the vectors."""

    at: Required[Tensor]
    mask: Mask | None
    bias: Tensor | None
    cache: Cache | None


class MultiHead(nn.Module):
    """Attention in several subspaces at once: concat(head_1, ..., head_h) W_O.

    head_i = attend(x Wq_i, m Wk_i, m Wv_i), where m is x itself or a memory. The three projections
    are one matrix, queries first, so that self-attention is one product.

    Args:
        width: width of the input and the output
        heads: query heads
        kv_heads: key and value heads; as many as queries unless given
        head_width: width of a head; width / heads unless given
        bias: bias of queries, keys and values
        out_bias: bias of the output projection; as `bias` unless given
        dropout: probability that an attention weight is dropped
        score: name of a score, or a function of queries and keys
        position: rotates queries and keys, or adds to scores and values
        qkv: input projection, if it is shared or given
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        kv_heads: int | None = None,
        head_width: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        dropout: float = 0.0,
        score: Any = "dot",
        position: Position | None = None,
        qkv: nn.Linear | None = None,
    ):
        super().__init__()
        kv_heads = kv_heads or heads
        if head_width is None:
            if heads < 1 or width % heads:
                raise UsageError(
                    f"heads={heads} does not divide width={width}; choose one that does"
                )
            head_width = width // heads
        if kv_heads < 1 or heads % kv_heads:
            raise UsageError(f"kv_heads={kv_heads} does not divide heads={heads}")
        self.heads, self.kv_heads, self.head_width = heads, kv_heads, head_width
        self.dropout = dropout
        self.qkv = qkv or nn.Linear(width, (heads + 2 * kv_heads) * head_width, bias=bias)
        self.out = nn.Linear(heads * head_width, width, bias=bias if out_bias is None else out_bias)
        self.score = build_score(score, head_width, heads) if isinstance(score, str) else score
        self.position = position or Position()

    @property
    def uses_rotation(self) -> bool:
        """True if the position rotates queries and keys."""
        return getattr(self.position.rotate, "__func__", None) is not Position.rotate

    @property
    def needs_key_positions(self) -> bool:
        """True if the position has a bias or values of its own, for which keys have places."""
        own = getattr(self.position.bias, "__func__", None) is not Position.bias
        return own or self.position.adds_values

    def _split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:-1], heads, self.head_width).transpose(1, 2)

    def ready(self, qkv: Tensor) -> Tensor:
        """Projected queries, keys and values (b, l, h, d) as attention takes them."""
        return qkv

    def read(self, memory: Tensor) -> Memory:
        """Project what cross-attention reads to keys and values."""
        first, last = self.heads, self.heads + 2 * self.kv_heads
        k, v = self._project_heads(memory, first, last).chunk(2, dim=-1)
        return Memory(self._split(k, self.kv_heads), self._split(v, self.kv_heads))

    def _project_queries(self, x: Tensor) -> Tensor:
        return self._split(self._project_heads(x, 0, self.heads), self.heads)

    def _project_heads(self, x: Tensor, first: int, last: int) -> Tensor:
        """Project to some of the heads of queries, keys and values: by their rows of the matrix.

        A matrix of another kind, or one with hooks, projects to all of them.
        """
        some = slice(first * self.head_width, last * self.head_width)
        if not is_linear(self.qkv):
            return self.qkv(x)[..., some]
        weight, bias = self.qkv.weight, self.qkv.bias
        return F.linear(x, weight[some], None if bias is None else bias[some])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (h, l, d) of vectors (l, w)."""
        both = [self.heads, self.kv_heads]
        qk = self._split(self._project_heads(x, 0, sum(both)).unsqueeze(0), sum(both))
        q, k = qk.squeeze(0).split(both)
        return q, k

    def forward(
        self,
        x: Float[Tensor, "b q w"],
        memory: Float[Tensor, "b k w"] | Memory | None = None,
        *,
        at: Num[Tensor, "... q c"] | None = None,
        memory_at: Num[Tensor, "... k c"] | None = None,
        mask: Mask | Bool[Tensor, "..."] | None = None,
        bias: Float[Tensor, "..."] | None = None,
        cache: Cache | None = None,
    ) -> Float[Tensor, "b q w"]:
        """Self-attention of x, or cross-attention of x to a memory.

        Args:
            x: input that queries are made of
            memory: what keys and values are made of, or both ready-made; x itself unless given
            at: positions of x
            memory_at: positions of the memory
            mask: which keys each query may see
            bias: added to the scores
            cache: keys and values so far, to which those of x are added
        """
        if memory is None:
            if at is None:
                start = 0 if cache is None else cache.length
                at = places(start, start + x.shape[1], x.device)
            memory_at = at
            q, q_rot, k, v = self._project_self(x, at)
        else:
            q, q_rot, k, v = self._project_cross(x, memory, at, memory_at)
        if cache is not None and memory_at is not None:
            k, v = cache.append(k, v, memory_at)
        mask = as_mask(mask, (*q.shape[:-1], k.shape[-2]))
        add_values = None
        if self.needs_key_positions and at is not None and memory_at is not None:
            memory_at = memory_at if cache is None else cache.at
            assert memory_at is not None
            q_rot = self.position.query(q_rot)
            own = self.position.bias(q, k, at, memory_at, mask, self._project)
            bias = own if bias is None else bias if own is None else bias + own
            if self.position.adds_values:
                add_values = partial(self.position.add_values, q_at=at, k_at=memory_at)
        y = attend(
            q_rot,
            k,
            v,
            score=self.score,
            bias=bias,
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            add_values=add_values,
            watch=self,
        )
        return self.out(y.transpose(1, 2).flatten(2))

    def _project_self(self, x: Tensor, at: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries of x as projected and as rotated, and its keys and values."""
        both = [self.heads, self.kv_heads]
        # split before heads and places are transposed, so that gradients meet as they are laid
        qkv = self.ready(self.qkv(x).unflatten(-1, (-1, self.head_width)))
        if not self.uses_rotation:
            q, k, v = (part.transpose(1, 2) for part in qkv.split([*both, self.kv_heads], dim=2))
            return q, q, k, v
        qk, v = qkv.split_with_sizes([sum(both), self.kv_heads], 2)
        qk, v = qk.transpose(1, 2), v.transpose(1, 2)
        q_rot, k = self.position.rotate(qk, at).split_with_sizes(both, 1)
        return qk[:, : self.heads] if self.needs_key_positions else q_rot, q_rot, k, v

    def _project_cross(
        self, x: Tensor, memory: Tensor | Memory, at: Tensor | None, memory_at: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries of x as projected and as rotated, and keys and values of a memory."""
        q = self._project_queries(x)
        k, v = memory if isinstance(memory, Memory) else self.read(memory)
        if at is None or memory_at is None:
            return q, q, k, v
        return q, self.position.rotate(q, at), self.position.rotate(k, memory_at), v

    def reset_parameters(self) -> None:
        """Initialise queries, keys and values by Glorot, as the separate matrices that they are."""
        sizes = [n * self.head_width for n in (self.heads, self.kv_heads, self.kv_heads)]
        for part in self.qkv.weight.split(sizes):
            nn.init.xavier_uniform_(part)


class NormedMultiHead(MultiHead):
    """Attention that normalises each head's queries and keys before it compares them (Qwen3)."""

    def __init__(self, *sizes: int, norm: Callable[[int], nn.Module], **settings: Any):
        super().__init__(*sizes, **settings)
        self.q_norm, self.k_norm = norm(self.head_width), norm(self.head_width)

    def ready(self, qkv: Tensor) -> Tensor:
        """Normalise queries and keys (b, l, h, d), not values."""
        q, k, v = qkv.split([self.heads, self.kv_heads, self.kv_heads], dim=2)
        return torch.cat([self.q_norm(q), self.k_norm(k), v], dim=2)

    def read(self, memory: Tensor) -> Memory:
        """Project what cross-attention reads to keys, which are normalised, and values."""
        k, v = super().read(memory)
        return Memory(self.k_norm(k), v)

    def _project_queries(self, x: Tensor) -> Tensor:
        return self.q_norm(super()._project_queries(x))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, k = super()._project(x)
        return self.q_norm(q), self.k_norm(k)
