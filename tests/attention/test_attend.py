"""The core's laws: a loop in fp64 equals attention, and what is masked never matters."""

import itertools
import math
from collections.abc import Callable
from itertools import product

import pytest
import torch
from beartype import beartype
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import jaxtyped
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import regard.attention.attend as core
from regard.attention import kernels
from regard.attention.dropout import add_dropped, dropout, dropout_mask
from regard.attention.masks import Causal, Document, Mask, Padding, Sliding, Window
from regard.attention.multihead import Cache, MultiHead
from regard.attention.normalisers import Sample
from regard.attention.scores import HEAD_SCORES, SCORES, Bilinear, build_score
from regard.errors import UsageError
from tests.oracle import loop, make_score, masks, randn

attend = jaxtyped(typechecker=beartype)(core.attend)  # shapes in signatures hold while testing


@st.composite
def questions(draw) -> dict:
    """Draw all that one can ask of attend."""
    axes = draw(st.integers(0, 3))
    lead = [draw(st.integers(1, 2)) for _ in range(axes)]
    kv_lead = list(lead)
    if axes > 1:
        lead[-1] *= draw(st.integers(1, 3))
    long = draw(st.sampled_from([False, False, False, True])) and math.prod(lead) < 4
    lengths = st.integers(17, 24) if long else st.integers(1, 9)
    queries, keys = draw(lengths), draw(lengths)
    name = draw(st.sampled_from(list(SCORES)))
    width, value_width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    key_width = draw(st.integers(1, 5)) if name in ("bilinear", "additive") else width
    seed = draw(st.integers(0, 10_000))
    bias = None
    if draw(st.booleans()):
        shape = [n if draw(st.booleans()) else 1 for n in (*lead, queries, keys)]
        bias = randn(*shape[draw(st.integers(0, len(shape) - 1)) :], seed=seed + 1)
        if draw(st.booleans()):
            bias = bias.masked_fill(bias > 1.0, -torch.inf)
    chosen = [
        draw(masks(lead[0] if lead else 1, queries, keys)) for _ in range(draw(st.integers(0, 3)))
    ]
    mask = None
    for one, _ in chosen:
        mask = one & mask
    return {
        "q": randn(*lead, queries, width, seed=seed + 2),
        "k": randn(*kv_lead, keys, key_width, seed=seed + 3),
        "v": randn(*kv_lead, keys, value_width, seed=seed + 4),
        "name": name,
        "bias": bias,
        "mask": mask,
        "allowed": (lambda b, i, j: all(f(b, i, j) for _, f in chosen)) if chosen else None,
        "normalise": draw(st.sampled_from(["softmax", "softmax", "argmax", "sample", "given"])),
        "tile": draw(st.sampled_from([1, kernels.TILE_NUMBERS])),
    }


def test_a_loop_in_fp64_equals_attention():
    shapes = set()

    @settings(max_examples=700)
    @given(questions())
    def law(ask: dict) -> None:
        q, k, v, mask, bias = (ask[name] for name in ("q", "k", "v", "mask", "bias"))
        shapes.add((*(tuple(x.shape) for x in (q, k, v)), bias is not None and bias.shape))
        score, formula = make_score(ask["name"], q.shape[-1], k.shape[-1])
        weights = randn(*q.shape[:-1], k.shape[-2], seed=5).softmax(-1)
        sample = Sample(torch.Generator().manual_seed(3))
        normalise = {"given": weights, "sample": sample}.get(ask["normalise"], ask["normalise"])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "TILE_NUMBERS", ask["tile"])
            out = attend(q, k, v, score=score, bias=bias, mask=mask, normalise=normalise)

        def weigh(place, i: int, seen: list[int], scores: Tensor) -> Tensor:
            if ask["normalise"] == "given":
                return weights[place][i][seen]
            if ask["normalise"] == "softmax":
                return (scores - scores.max()).exp() / (scores - scores.max()).exp().sum()
            # one key was taken: which one is seen from its value
            group = q.shape[-3] // k.shape[-3] if len(place) > 1 else 1
            values = v[(*place[:-1], place[-1] // group) if len(place) > 1 else place][seen]
            taken = (values - out[place][i]).abs().amax(-1) < 1e-12
            logs = scores - scores.logsumexp(0)
            if ask["normalise"] == "argmax":
                said = logs.max()
            else:
                assert sample.log_probability is not None
                said = sample.log_probability.view(*q.shape[:-1])[place][i]
            assert said > -math.inf and (logs[taken] - said).abs().min() < 1e-9
            return taken.to(out) / taken.sum()

        if ask["normalise"] == "given":
            bias = None  # weights from elsewhere ask for no scores
        expected = loop(q, k, v, formula, bias, ask["allowed"], weigh)
        torch.testing.assert_close(out.detach(), expected, atol=1e-9, rtol=1e-9)

    law()
    assert len(shapes) >= 300


@pytest.mark.parametrize("normalise", ["softmax", "argmax", "given"])
@pytest.mark.parametrize("mask", [None, Causal(), Document(torch.zeros(5), torch.arange(6) // 6)])
def test_what_is_added_to_values_is_weighted_as_they_are(normalise: str, mask: Mask | None):
    q, k, v = randn(2, 4, 5, 3), randn(2, 2, 6, 3, seed=1), randn(2, 2, 6, 3, seed=2)
    more = randn(5, 6, 3, seed=3)  # a vector for each pair
    how = randn(5, 6, seed=4).softmax(-1) if normalise == "given" else normalise
    seen = []

    def add(weights: Tensor) -> Tensor:
        seen.append(weights)
        return torch.einsum("bhqk,qkd->bhqd", weights, more)

    out = attend(q, k, v, mask=mask, normalise=how, add_values=add)
    for b, h, i in product(range(2), range(4), range(5)):
        right = sum(seen[0][b, h, i, j] * (v[b, h // 2, j] + more[i, j]) for j in range(6))
        torch.testing.assert_close(out[b, h, i], right, atol=1e-12, rtol=0)
    plain = attend(q, k, v, mask=mask, normalise=how)
    torch.testing.assert_close(out - add(seen[0]), plain, atol=1e-12, rtol=0)
    torch.manual_seed(0)  # dropout drops the same of both
    attend(q, k, v, mask=mask, dropout=0.5, add_values=add)
    torch.manual_seed(0)
    dropped = attend(q, k, v, mask=mask, dropout=0.5)
    torch.testing.assert_close(seen[-1] @ v.repeat_interleave(2, 1), dropped, atol=1e-12, rtol=0)


def test_sampling_draws_by_the_softmax():
    q, k, v = randn(1, 4), randn(3, 4, seed=1), torch.eye(3, dtype=torch.float64)
    sample = Sample(torch.Generator().manual_seed(0))
    drawn = attend(q.expand(20_000, 4), k, v, normalise=sample)
    assert drawn.sum(-1).eq(1).all()
    torch.testing.assert_close(drawn.mean(0, keepdim=True), attend(q, k, v), atol=0.02, rtol=0)
    q.requires_grad_()
    attend(q, k, v, normalise=sample)
    assert sample.log_probability is not None
    (grad,) = torch.autograd.grad(sample.log_probability.sum(), q)
    assert grad.abs().sum() > 0  # what REINFORCE needs


@pytest.mark.parametrize("tile", [1, kernels.TILE_NUMBERS])
@pytest.mark.parametrize("name", SCORES)
def test_gradients_are_right(name: str, tile: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels, "TILE_NUMBERS", tile)
    score, _ = make_score(name, 2, 2)
    keep = torch.tensor([[True] * 4 + [False]])
    for mask, queries in [
        (None, 2),
        (Causal(), 5),
        (Causal(-2) & Padding(keep), 3),  # two rows see nothing
        (Sliding(2, 0, 3), 18),  # most rows see nothing
    ]:
        q, k, v = randn(1, 4, queries, 2), randn(1, 2, 5, 2, seed=1), randn(1, 2, 5, 1, seed=2)
        bias = randn(1, 1, queries, 5, seed=3)
        parameters = list(score.parameters()) if isinstance(score, nn.Module) else []

        def f(q, k, v, bias, *_, mask=mask):
            return attend(q, k, v, score=score, mask=mask, bias=bias)

        inputs = [x.requires_grad_() for x in (q, k, v, bias, *parameters)]
        torch.autograd.gradcheck(f, inputs, fast_mode=True)


@pytest.mark.parametrize("name", [name for name in SCORES if name != "additive"])
def test_the_fused_way_equals_the_score_itself(name: str):
    score, _ = make_score(name, 4, 4)
    q, k, v = randn(2, 4, 6, 4), randn(2, 2, 7, 4, seed=1), randn(2, 2, 7, 3, seed=2)
    for mask in (None, Causal(1), Window(3)):
        fused = attend(q, k, v, score=score, mask=mask)
        plain = attend(q, k, v, score=lambda q, k: score(q, k), mask=mask)
        torch.testing.assert_close(fused, plain, atol=1e-12, rtol=0)


NOTHING_LATER = {
    "whole": (Causal(), 0),
    "with a bias": (Causal(), 1),
    "and padding": (Causal() & Padding(torch.ones(1, 20, dtype=torch.bool)), 0),
    "sliding": (Causal() & Sliding(5), 0),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("case", NOTHING_LATER)
@pytest.mark.parametrize("tile", [1, kernels.TILE_NUMBERS])
def test_the_future_has_no_gradient(case: str, name: str, tile: int, monkeypatch):
    monkeypatch.setattr(kernels, "TILE_NUMBERS", tile)
    mask, biased = NOTHING_LATER[case]
    score, _ = make_score(name, 4, 4)
    q, k, v = (randn(1, 2, 20, 4, seed=i).float().requires_grad_() for i in range(3))
    bias = randn(20, 20).float() if biased else None
    if isinstance(score, nn.Module):
        score.float()
    out = attend(q, k, v, score=score, mask=mask, bias=bias)
    for now in (0, 7, 18):
        for grad in torch.autograd.grad(out[:, :, now].sum(), (q, k, v), retain_graph=True):
            assert grad[:, :, now + 1 :].eq(0).all()
        assert torch.autograd.grad(out[:, :, now].sum(), v, retain_graph=True)[0][:, :, now].any()


def test_the_future_has_no_gradient_when_cached():
    torch.manual_seed(0)
    layer = MultiHead(8, 2, kv_heads=1).double()
    x = randn(2, 9, 8).requires_grad_()
    full = layer(x, mask=Causal())
    cache = Cache(2, 1, 16, 4, x)
    for unused in (cache.k, cache.v):
        unused.fill_(torch.nan)  # memory that is not yet used is never read
    layer(x[:, :4], mask=Causal(), cache=cache)
    rest = layer(x[:, 4:], mask=Causal(4), cache=cache)
    torch.testing.assert_close(rest, full[:, 4:], atol=1e-12, rtol=0)
    for now in range(5):
        (cached,) = torch.autograd.grad(rest[:, now].sum(), x, retain_graph=True)
        (whole,) = torch.autograd.grad(full[:, 4 + now].sum(), x, retain_graph=True)
        assert cached[:, 5 + now :].eq(0).all() and whole[:, 5 + now :].eq(0).all()
        torch.testing.assert_close(cached, whole, atol=1e-12, rtol=0)


def test_one_cached_query_sees_all_before_it():
    q, k, v = randn(1, 1, 1, 4), randn(1, 1, 6, 4, seed=1), randn(1, 1, 6, 4, seed=2)
    torch.testing.assert_close(attend(q, k, v, mask=Causal(5)), attend(q, k, v))
    torch.testing.assert_close(attend(q, k, v, mask=Causal()), v[:, :, :1])


# name -> mask over 20 queries and 20 keys, keys to poison, rows that see none of them
POISONED = {
    "causal": (Causal(), [19], range(19)),
    "causal from the middle": (Causal(), [9, 10], range(9)),
    "cached": (Causal(-3), [16, 18], range(19)),
    "padding": (Padding(torch.arange(20).lt(17)[None]), [17, 19], range(20)),
    "all": (Padding(torch.zeros(1, 20, dtype=torch.bool)), [0, 19], range(20)),
    "blind rows": (Document(torch.arange(20) // 10, torch.zeros(20)), [3], range(10, 20)),
    "both": (Causal() & Padding(torch.arange(20).ge(2)[None]), [0, 1], range(20)),
    "window": (Window(5), [0, 4], range(5, 20)),
    "sliding": (Sliding(3), [10], [*range(8), *range(13, 20)]),
}


@pytest.mark.parametrize("case", POISONED)
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("tile", [1, kernels.TILE_NUMBERS])
def test_poison_at_a_masked_place_never_leaks(case: str, name: str, tile: int, monkeypatch):
    monkeypatch.setattr(kernels, "TILE_NUMBERS", tile)
    mask, places, rows = POISONED[case]
    rows, places = list(rows), list(places)
    score, _ = make_score(name, 4, 4)

    def run(poison: float | None, where: str, normalise: str = "softmax") -> list[Tensor]:
        inputs = {x: randn(1, 2, 20, 4, seed=i).abs() for i, x in enumerate("qkv")}
        inputs["b"] = randn(20, 20, seed=9)
        if poison is not None and where == "b":
            inputs["b"][torch.meshgrid(torch.tensor(rows), torch.tensor(places), indexing="ij")] = (
                poison
            )
        elif poison is not None:
            inputs[where][:, :, places] = poison
        q, k, v, b = (x.requires_grad_() for x in inputs.values())
        bias = b if where == "b" else None

        def ask() -> Tensor:
            return attend(q, k, v, score=score, mask=mask, bias=bias, normalise=normalise)[
                :, :, rows
            ]

        with torch.no_grad():
            untrained = ask()
        out = ask()
        grads = torch.autograd.grad(out.square().sum(), (q, k, v, b), allow_unused=True)
        return [untrained, out, *(g for g in grads if g is not None)]

    for where in "kvb":
        clean = run(None, where)
        assert clean[0].isfinite().all()
        for poison in (math.nan, math.inf, -math.inf):
            for ours, right in zip(run(poison, where), clean, strict=True):
                torch.testing.assert_close(ours, right, atol=1e-12, rtol=0)
    for where in "kv":
        for ours, right in zip(
            run(math.nan, where, "argmax"), run(None, where, "argmax"), strict=True
        ):
            torch.testing.assert_close(ours, right, atol=1e-12, rtol=0)


def test_poison_at_a_seen_place_is_not_hidden():
    q, k, v = (randn(1, 1, 6, 4, seed=i) for i in range(3))
    v[:, :, 3] = math.nan
    for normalise in ("softmax", torch.full((6, 6), 1 / 6, dtype=torch.float64)):
        out = attend(q, k, v, mask=Causal(), normalise=normalise)
        assert out[:, :, :3].isfinite().all() and out[:, :, 3:].isnan().all()


def test_a_row_of_minus_infinity_gives_zeros():
    q, k, v = (randn(1, 1, 3, 4, seed=i).requires_grad_() for i in range(3))
    bias = torch.zeros(3, 3, dtype=torch.float64)
    bias[1] = -math.inf
    keep = torch.tensor([[True, True, False]])
    cases = [(mask, drop) for mask in (None, Padding(keep)) for drop in (0.0, 1e-9)]
    for learned, (mask, drop) in itertools.product((False, True), cases):
        given = bias.clone().requires_grad_(learned)
        out = attend(q, k, v, bias=given, mask=mask, dropout=drop)
        assert out[0, 0, 1].eq(0).all() and out.isfinite().all()
        for grad in torch.autograd.grad(out.sum(), (q, k, v)):
            assert grad.isfinite().all()


@pytest.mark.parametrize("queries,keys,batch", [(0, 3, 2), (3, 0, 2), (3, 3, 0)])
def test_nothing_asked_or_nothing_to_see_gives_no_error(queries: int, keys: int, batch: int):
    q, k, v = randn(batch, 2, queries, 4), randn(batch, 2, keys, 4), randn(batch, 2, keys, 4)
    for mask in (None, Causal(), Causal() & Sliding(2), Window(2)):
        for dtype in (torch.float32, torch.float64):
            out = attend(q.to(dtype), k.to(dtype), v.to(dtype), mask=mask)
            assert out.shape == q.shape and out.isfinite().all()


@pytest.mark.parametrize("name", SCORES)
def test_padding_and_neighbours_never_matter(name: str):
    score, _ = make_score(name, 4, 4)
    q, k, v = (randn(3, 2, 7, 4, seed=i) for i in range(3))
    lengths = torch.tensor([7, 3, 5])
    together = attend(q, k, v, score=score, mask=Padding.of(lengths, 7))
    for i, n in enumerate(lengths.tolist()):
        alone = attend(q[i : i + 1], k[i : i + 1, :, :n], v[i : i + 1, :, :n], score=score)
        torch.testing.assert_close(together[i : i + 1], alone, atol=1e-12, rtol=0)


def test_projected_heads_are_a_low_rank_bilinear_score():
    torch.manual_seed(0)
    width, heads = 12, 3
    layer = MultiHead(width, heads, bias=False).double()
    x, memory = randn(2, 5, width), randn(2, 7, width, seed=1)
    d = layer.head_width
    wq, wk, wv = layer.qkv.weight.detach().unflatten(0, (3, heads, d))
    seen = []
    for h in range(heads):
        score = Bilinear(width).double()
        # W = Wq Wk', times what the two scales differ by
        score.weight.data = wq[h].T @ wk[h] * math.sqrt(width / d)
        assert torch.linalg.matrix_rank(score.weight) == d
        seen.append(attend(x, memory, memory @ wv[h].T, score=score))
    torch.testing.assert_close(layer(x, memory), layer.out(torch.cat(seen, -1)))


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_grouped_heads_equal_repeated_ones(kv_heads: int):
    torch.manual_seed(0)
    few, many = MultiHead(16, 4, kv_heads=kv_heads).double(), MultiHead(16, 4).double()
    nn.init.normal_(few.qkv.bias)
    for ours, theirs in ((few.qkv.weight, many.qkv.weight), (few.qkv.bias, many.qkv.bias)):
        q, k, v = ours.data.split([16, 4 * kv_heads, 4 * kv_heads])
        k, v = (
            x.unflatten(0, (kv_heads, 4)).repeat_interleave(4 // kv_heads, 0).flatten(0, 1)
            for x in (k, v)
        )
        theirs.data = torch.cat([q, k, v])
    many.out.load_state_dict(few.out.state_dict())
    x, memory = randn(2, 5, 16), randn(2, 6, 16, seed=1)
    for mask in (None, Causal()):
        torch.testing.assert_close(few(x, mask=mask), many(x, mask=mask))
    torch.testing.assert_close(few(x, memory), many(x, memory))


@pytest.mark.parametrize("score", SCORES)
def test_every_score_serves_in_heads(score: str):
    torch.manual_seed(0)
    layer = MultiHead(8, 2, kv_heads=1, score=score)
    x = randn(2, 5, 8).float()
    layer(x, mask=Causal()).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    grad = layer.qkv.weight.grad
    assert grad is not None and all(part.abs().max() > 1e-6 for part in grad.split([8, 4, 4]))


def test_shared_keys_need_no_copies():
    q, k, v = randn(3, 2, 5, 4), randn(1, 2, 6, 4, seed=1), randn(1, 2, 6, 4, seed=2)
    ours = attend(q, k, v, mask=Causal(2))
    theirs = attend(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1), mask=Causal(2))
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(attend(q, k[0, 0], v[0, 0]), attend(q, k[:, :1], v[:, :1]))


def test_a_mask_serves_in_and_out_of_training():
    mask, (q, k, v) = Sliding(2), (randn(1, 1, 4, 2, seed=i).requires_grad_() for i in range(3))
    with torch.inference_mode():
        before = attend(q, k, v, mask=mask)
    after = attend(q, k, v, mask=mask)
    after.sum().backward()
    torch.testing.assert_close(before, after, atol=1e-12, rtol=0)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda q: attend(q, q[:, :3], q[:, :3]),
        lambda q: core.attend(q, q, q[:, :, :2]),
        lambda q: core.attend(q, q[:3].repeat(2, 1, 1, 1), q),
        lambda q: attend(q, q, q, bias=torch.zeros(3, 5)),
        lambda q: attend(q, q, q, score="dots"),
        lambda q: attend(q, q, q, score="additive"),
        lambda q: attend(q, q, q, normalise="softmx"),
        lambda q: MultiHead(10, 4),
        lambda q: MultiHead(12, 0),
        lambda q: MultiHead(12, 4, kv_heads=3),
        lambda q: MultiHead(12, 4, kv_heads=-2),
        lambda q: MultiHead(12, 4, score="dott"),
    ],
)
def test_what_does_not_fit_is_a_mistake(wrong: Callable):
    with pytest.raises(UsageError, match=r"^.*$"):  # one line
        wrong(torch.zeros(4, 4, 6, 8))


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operation makes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, Tensor):
                self.bytes = max(self.bytes, x.untyped_storage().nbytes())
        return out


def test_memory_is_linear_in_the_length():
    at = torch.arange(4096)
    for mask in (None, Causal(), Sliding(64), Document(at // 2048) & Causal()):
        q = randn(1, 1, 4096, 8).float().requires_grad_()
        with Largest() as seen:
            attend(q, q, q, mask=mask).sum().backward()
        assert seen.bytes <= 4 * kernels.TILE_NUMBERS < 4 * 4096**2


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.999])
def test_dropout_keeps_the_mean_whatever_share_its_bytes_can_meet(p: float):
    share = min(255, max(1, round(256 * p))) / 256  # of 256 bytes, all of them as likely
    values = dropout_mask(torch.empty(40_000), p).unique().tolist()
    assert values == [0.0, pytest.approx(1 / (1 - share), rel=1e-6)]


def test_dropout_keeps_the_mean_and_is_seeded():
    x = torch.ones(400, 1000)
    torch.manual_seed(1)
    y = dropout(x, 0.25)
    torch.manual_seed(1)
    assert torch.equal(y, dropout(x, 0.25))
    assert abs(float(y.mean()) - 1) < 0.01 and abs(float((y == 0).float().mean()) - 0.25) < 0.01
    assert dropout(x, 0.25, training=False) is x
    torch.manual_seed(1)
    torch.testing.assert_close(add_dropped(x, x, 0.25), x + y)
    assert torch.equal(add_dropped(x, x, 0.25, training=False), x + x)
    q, k = randn(1, 1, 3, 4), randn(1, 1, 2000, 4, seed=1)
    v = torch.ones(1, 1, 2000, 1, dtype=torch.float64)
    thinned = attend(q, k, v, dropout=0.5)
    assert not torch.equal(thinned, attend(q, k, v))
    torch.testing.assert_close(thinned, attend(q, k, v), atol=0.2, rtol=0)


@pytest.mark.parametrize("score", [*SCORES, *HEAD_SCORES])
def test_keys_of_another_width_than_a_score_takes_are_refused(score: str):
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 6, 7)
    with pytest.raises(UsageError, match="queries of width 8 and keys of width 7"):
        attend(q, k, k, score=build_score(score, 8, 4))
    given = torch.full((5, 6), 1 / 6)
    assert torch.allclose(attend(q, k, k, normalise=given)[:, :, 0], k.mean(2), atol=1e-6)
