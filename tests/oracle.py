"""The oracle of attention: loops in fp64 by the textbook, and strategies of what to ask."""

import math
from collections.abc import Callable
from itertools import product

import torch
from hypothesis import strategies as st
from torch import Tensor

from regard.attention.masks import Causal, Document, Mask, Padding, Prefix, Sliding, Window
from regard.attention.scores import SCORES, Additive, Bilinear, Cosine, Dot, Gaussian, ScoreFunction

Allowed = Callable[[int, int, int], bool]  # may query i of sentence b look at key j?


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_score(name: str, width: int, key_width: int) -> tuple[ScoreFunction, Callable]:
    """Return a score, and its textbook formula for one query (d) and some keys (n, c)."""
    if name == "dot":
        return Dot(), lambda q, k: k @ q / math.sqrt(width)
    if name == "product":
        return SCORES[name](width), lambda q, k: k @ q
    if name == "disentangled":
        return SCORES[name](width), lambda q, k: k @ q / math.sqrt(3 * width)
    if name == "cosine":
        return Cosine(0.5), lambda q, k: k @ q / (q.norm() * k.norm(dim=-1)) / 0.5
    if name == "gaussian":
        return Gaussian(1.5), lambda q, k: -((q - k) ** 2).sum(-1) / (2 * 1.5**2)
    torch.manual_seed(7)
    if name == "bilinear":
        score = Bilinear(width, key_width).double()
        weight = score.weight.detach() / math.sqrt(key_width)
        return score, lambda q, k: k @ (q @ weight)
    score = Additive(width, key_width, hidden=3).double()
    w, b, u = score.query.weight.detach(), score.query.bias.detach(), score.key.weight.detach()
    return score, lambda q, k: (w @ q + b + k @ u.T).tanh() @ score.vector.detach()


def loop(q, k, v, formula, bias, allowed: Allowed | None, weigh) -> Tensor:
    """Attend one sentence, head and query at a time."""
    lead, (queries, keys) = q.shape[:-2], (q.shape[-2], k.shape[-2])
    out = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype)
    group = lead[-1] // k.shape[-3] if len(lead) > 1 else 1
    bias = None if bias is None else bias.expand(*lead, queries, keys)
    for place in product(*(range(n) for n in lead)):
        other = (*place[:-1], place[-1] // group) if len(lead) > 1 else place
        for i in range(queries):
            seen = [j for j in range(keys) if not allowed or allowed((place or (0,))[0], i, j)]
            scores = formula(q[place][i], k[other][seen])
            if bias is not None:
                scores = scores + bias[place][i][seen]
            if (scores > -math.inf).any():
                out[place][i] = weigh(place, i, seen, scores) @ v[other][seen]
    return out


@st.composite
def masks(draw, batch: int, queries: int, keys: int) -> tuple[Mask, Allowed]:
    """Draw a mask and, apart from it, what it should allow."""
    kind = draw(st.sampled_from(["causal", "sliding", "window", "prefix", "document", "padding"]))
    seed = draw(st.integers(0, 99))
    rand = torch.Generator().manual_seed(seed)
    if kind == "padding":
        keep = torch.rand(batch, keys, generator=rand) < 0.7
        return Padding(keep), lambda b, i, j: bool(keep[b, j])
    if kind == "document":
        q, k = (torch.randint(0, 3, (batch, n), generator=rand) for n in (queries, keys))
        return Document(q, k), lambda b, i, j: bool(q[b, i] == k[b, j])
    how = draw(st.sampled_from(["count", "coordinates", "batch"]))
    if how == "count":
        a, b = draw(st.integers(-3, 5)), draw(st.integers(-3, 5))
        q_at, k_at = a, b
        q_of, k_of = (lambda _, i: [a + i]), (lambda _, j: [b + j])
    else:
        c = draw(st.integers(1, 2))
        q_at, k_at = (
            torch.randint(-3, 9, ((batch, n, c) if how == "batch" else (n, c)), generator=rand)
            for n in (queries, keys)
        )
        row = (lambda at, b: at[b]) if how == "batch" else (lambda at, b: at)
        q_of, k_of = (
            (lambda b, i: row(q_at, b)[i].tolist()),
            (lambda b, j: row(k_at, b)[j].tolist()),
        )
    size = draw(st.integers(1, 4))
    if kind == "causal":
        return Causal(q_at, k_at), lambda b, i, j: k_of(b, j)[0] <= q_of(b, i)[0]
    if kind == "prefix":
        lengths = torch.randint(0, 4, (batch,), generator=rand)
        mask = Prefix(lengths if seed % 2 else int(lengths[0]), q_at, k_at)
        first = (lambda b: lengths[b]) if seed % 2 else (lambda b: lengths[0])
        return mask, lambda b, i, j: k_of(b, j)[0] < max(first(b), q_of(b, i)[0] + 1)

    def pairs(b, i, j):
        return zip(q_of(b, i), k_of(b, j), strict=True)

    if kind == "sliding":
        near = lambda b, i, j: all(abs(x - y) < size for x, y in pairs(b, i, j))  # noqa: E731
        return Sliding(size, q_at, k_at), near
    same = lambda b, i, j: all(x // size == y // size for x, y in pairs(b, i, j))  # noqa: E731
    return Window(size, q_at, k_at), same
