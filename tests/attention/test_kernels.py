"""Every implementation of attention equals loops in fp64, over generated shapes and masks."""

from contextlib import ExitStack

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard import native
from regard.attention import kernels
from regard.attention.attend import attend
from regard.attention.kernels import KERNELS, Problem
from regard.attention.masks import Causal, Padding, Sliding
from regard.attention.scores import Dot
from regard.filters.bilateral import bilateral
from regard.filters.nonlocal_means import PatchScore, nonlocal_means
from regard.filters.pixels import pixel_coordinates
from regard.native import build
from regard.native.processor import unsupported_reason
from tests.oracle import Allowed, loop, make_score, masks, randn

TOLERANCE = {torch.float64: 1e-9, torch.float32: 2e-5, torch.bfloat16: 4e-2}
FUSED = ["dot", "product", "disentangled", "cosine", "gaussian", "bilinear"]
# what each kernel is for, so that it answers often; what it does not take, it must pass on
ASKS = {
    "given": {"given": True},
    "small_query": {"columns": True, "grad": False, "mask": "none", "scores": FUSED},
    "native": {"long": True, "grad": True, "dtypes": [torch.float32], "mask": "causal"},
    "products": {"bias": True, "mask": "padding", "scores": FUSED},
    "fused": {"mask": "causal", "scores": FUSED},
    "tiled": {"mask": "any", "scores": FUSED},
    "plain": {},
}
LEAST = 30  # answers of each kernel


@st.composite
def problems(draw, ask: dict) -> dict:
    """Draw an attention to compute, and what a loop needs to know of it."""
    long = ask.get("long", False)
    b, groups, each = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    sizes = st.integers(48, 70) if long else st.integers(1, 20)
    queries, keys = draw(sizes), draw(sizes)
    d = draw(st.integers(1, 9))
    e = d if long else draw(st.integers(1, 9))
    name = "dot" if long else draw(st.sampled_from(ask.get("scores", [*FUSED, "additive"])))
    dtype = draw(st.sampled_from(ask.get("dtypes", list(TOLERANCE))))
    dtype = torch.float64 if name in ("bilinear", "additive") else dtype
    seed = draw(st.integers(0, 10_000))
    q, k, v = (
        randn(*shape, seed=seed + n).to(dtype)
        for n, shape in enumerate(
            [(b, groups * each, queries, d), (b, groups, keys, d), (b, groups, keys, e)]
        )
    )
    if ask.get("columns") and keys > 1 and d > 1:
        k = k.mT.contiguous().mT
    bias = None
    if ask.get("bias") or draw(st.integers(0, 3)) == 0:
        shape = [n if draw(st.booleans()) else 1 for n in (b, groups * each, queries, keys)]
        bias = randn(*shape, seed=seed + 3).to(dtype)
    kind = ask.get("mask", draw(st.sampled_from(["none", "causal", "any"])))
    mask, allowed = None, None
    if kind == "causal" and draw(st.booleans()):
        mask, allowed = Causal(), lambda b, i, j: j <= i
        k, v = (x[..., :queries, :] for x in (k, v))
        q, keys = q[..., : k.shape[-2], :], k.shape[-2]
        bias = None
    elif kind == "padding" and draw(st.booleans()):
        lengths = torch.tensor([draw(st.integers(0, keys)) for _ in range(b)])
        mask, allowed = Padding.of(lengths, keys), lambda b, i, j: j < lengths[b]
    elif kind == "any":
        mask, allowed = draw(masks(b, q.shape[-2], keys))
    weights = None
    if ask.get("given"):
        weights = randn(*q.shape[:-1], keys, seed=seed + 4).softmax(-1).to(dtype)
    return {
        "q": q,
        "k": k,
        "v": v,
        "name": name,
        "bias": bias,
        "mask": mask,
        "allowed": allowed,
        "weights": weights,
        "grad": ask.get("grad", draw(st.booleans())),
        "tile": draw(st.sampled_from([1, kernels.TILE_NUMBERS])),
    }


def by_loops(ask: dict) -> Tensor:
    """Compute an attention by the oracle, in fp64."""
    q, k, v = (ask[name].detach().double() for name in "qkv")
    _, formula = make_score(ask["name"], q.shape[-1], k.shape[-1])
    weights = ask["weights"]
    bias = None if weights is not None or ask["bias"] is None else ask["bias"].detach().double()

    def weigh(place: tuple, i: int, seen: list[int], scores: Tensor) -> Tensor:
        return scores.softmax(0) if weights is None else weights.double()[place][i][seen]

    return loop(q, k, v, formula, bias, ask["allowed"], weigh)


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_equals_the_loop_or_passes(name: str):
    if name == "native" and build.unavailable():
        pytest.skip(build.unavailable())
    answers, ask = 0, dict(ASKS[name])
    if unsupported_reason("bfloat16"):  # which this processor cannot compute in
        ask.setdefault("dtypes", [torch.float64, torch.float32])

    @settings(max_examples=120 if name != "native" else 80)
    @given(problems(ask))
    def law(ask: dict) -> None:
        nonlocal answers
        q, k, v, bias = (ask[part] for part in ("q", "k", "v", "bias"))
        score, _ = make_score(ask["name"], q.shape[-1], k.shape[-1])
        module = nn.Identity()
        with ExitStack() as stack:
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(kernels, "TILE_NUMBERS", ask["tile"])
            stack.enter_context(native.fast(module))
            stack.enter_context(torch.set_grad_enabled(ask["grad"]))
            if ask["grad"]:
                for x in (q, k, v, *([bias] if name == "products" else [])):
                    x.requires_grad_()
            problem = Problem(
                q, k, v, score, bias, ask["mask"], weights=ask["weights"], module=module
            )
            answer = KERNELS[name](problem)
        if answer is None:
            return
        answers += 1
        close = TOLERANCE[q.dtype]
        torch.testing.assert_close(
            answer[0].detach().double(), by_loops(ask), atol=close, rtol=close
        )

    law()
    assert answers >= LEAST


@settings(max_examples=30)
@given(st.data())
@pytest.mark.parametrize("filter", ["bilateral", "nonlocal_means"])
def test_windowed_filters_equal_the_loop(filter: str, data):
    high, wide = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    channels, radius = data.draw(st.integers(1, 3)), data.draw(st.integers(0, 4))
    image = randn(1, channels, high, wide, seed=data.draw(st.integers(0, 999))).sigmoid()
    at = pixel_coordinates(image)
    if filter == "bilateral":
        out = bilateral(image, sigma_s=1.5, sigma_r=0.3, window=2 * radius + 1)
        k = torch.cat([at / 1.5, image[0].flatten(1).mT / 0.3], 1)
        formula = lambda q, k: -((q - k) ** 2).sum(-1) / 2  # noqa: E731
    else:
        out = nonlocal_means(image, h=0.3, patch=3, window=2 * radius + 1)
        k = PatchScore(0.3, 3).keys(image)[0]
        formula = lambda q, k: -((q - k) ** 2).sum(-1) / 0.3**2  # noqa: E731
    allowed: Allowed = lambda b, i, j: bool((at[i] - at[j]).abs().max() <= radius)  # noqa: E731
    v = image[0].flatten(1).mT
    right = loop(k, k, v, formula, None, allowed, lambda place, i, seen, x: x.softmax(0))
    torch.testing.assert_close(out[0].flatten(1).mT, right, atol=1e-9, rtol=1e-9)


def test_the_table_is_open_and_asked_in_order(monkeypatch: pytest.MonkeyPatch):
    q = randn(1, 2, 5, 4)
    asked = []

    def mine(problem: Problem) -> tuple[Tensor, None] | None:
        asked.append(problem.mask)
        return None if problem.mask is None else (problem.v * 0 + 7, None)

    monkeypatch.setattr(kernels, "KERNELS", {"mine": mine, **KERNELS})
    assert attend(q, q, q, mask=Sliding(2)).eq(7).all()
    right = attend(q, q, q)
    assert len(asked) == 2 and not right.eq(7).any()
    monkeypatch.setattr(kernels, "KERNELS", {"plain": KERNELS["plain"]})
    torch.testing.assert_close(attend(q, q, q), right)
    monkeypatch.setattr(kernels, "KERNELS", {})
    with pytest.raises(LookupError, match="no kernel"):
        attend(q, q, q)


def test_who_computes_what():
    q, k, v = (randn(2, 4, 6, 8, seed=n).float() for n in range(3))
    first = {
        "given": Problem(q, k, v, Dot(), weights=torch.ones(2, 4, 6, 6)),
        "small_query": Problem(q, k.mT.contiguous().mT, v, Dot()),
        "products": Problem(q, k, v, Dot(), torch.zeros(1, 1, 6, 6, requires_grad=True)),
        "fused": Problem(q, k, v, Dot(), mask=Causal()),
        "tiled": Problem(q, k, v, Dot(), mask=Sliding(2)),
        "plain": Problem(q, k, v, Dot(), mask=Sliding(2), dropout=0.5),
    }
    with torch.no_grad():
        for name, problem in first.items():
            took = [one for one, kernel in KERNELS.items() if kernel(problem) is not None]
            assert took[0] == name
