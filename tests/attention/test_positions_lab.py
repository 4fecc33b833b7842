"""Every position against a loop in fp64 that is written from its formula, gradients included."""

import math
import pickle
from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from regard.attention.masks import Causal, Document, Mask, Padding, Prefix
from regard.attention.multihead import Cache, MultiHead
from regard.attention.positions import (
    POSITIONS,
    PerLayer,
    Position,
    RotaryScaling,
    build_position,
    distance,
    of_layer,
)
from regard.errors import UsageError
from regard.layers.embed import TokenEmbedding
from regard.models.transformer import Transformer, TransformerConfig

WIDTH, HEADS, KV_HEADS, HEAD_WIDTH, LONGEST = 12, 4, 2, 6, 64
# positions that are nothing but a change of the attention; what is added to the input and what is
# looked up like words have tests of their own
ADDED = ("sinusoidal", "learned", "learned_t5", "disentangled")
NAMES = [name for name in POSITIONS if name not in ADDED]
SETTINGS = {
    "yarn": {"scaling": RotaryScaling("yarn", 4.0, 64)},
    "rotary_part": {"share": 0.7},
    "shaw": {"clip": 3},
    "cope": {"most": 3},
    "fire": {"hidden": 5},
}


def of_one_layer(position: Position) -> Position:
    """Return the position of a layer that is a stack by itself."""
    return of_layer(position) if isinstance(position, PerLayer) else position


def layer_of(name: str, bidirectional: bool = False) -> MultiHead:
    """Return a layer in fp64 whose parameters are all far from zero."""
    torch.manual_seed(0)
    position = build_position(
        name,
        WIDTH,
        HEADS,
        HEAD_WIDTH,
        max_length=LONGEST,
        bidirectional=bidirectional,
        **SETTINGS.get(name, {}),
    )
    layer = MultiHead(
        WIDTH, HEADS, kv_heads=KV_HEADS, head_width=HEAD_WIDTH, position=of_one_layer(position)
    ).double()
    for parameter in layer.parameters():
        parameter.data += 0.5 * torch.randn_like(parameter)
    return layer


def run(layer: MultiHead, x: Tensor, at: Tensor, mask: Mask | None) -> Tensor:
    """Attend as a model does: what layers share is computed outside."""
    shared = layer.position.shared(at, at, mask)
    return layer(x, at=at, mask=mask, bias=shared)


# Formulas: (the part, head, query (d), its position, keys (n, d), their positions) -> scores (n).
# The keys are those that the query may see, in order.


def dots(q: Tensor, keys: Tensor) -> Tensor:
    return torch.stack([(q * k).sum() for k in keys]) / math.sqrt(HEAD_WIDTH)


def plain(part, head, q, i, keys, js) -> Tensor:
    return dots(q, keys)


def turned(x: Tensor, angles: list[float]) -> Tensor:
    """Turn the pairs (n, n + d/2) as complex numbers."""
    half = len(x) // 2
    pairs = [torch.complex(x[n], x[n + half]) for n in range(half)]
    factors = [torch.tensor(complex(math.cos(a), math.sin(a))) for a in angles]
    pairs = [pair * factor for pair, factor in zip(pairs, factors, strict=True)]
    return torch.stack([z.real for z in pairs] + [z.imag for z in pairs])


def rotary(part, head, q, i, keys, js) -> Tensor:
    rates = [10_000 ** (-2 * n / HEAD_WIDTH) for n in range(HEAD_WIDTH // 2)]
    keys = [turned(k, [j * rate for rate in rates]) for k, j in zip(keys, js, strict=True)]
    return dots(turned(q, [i * rate for rate in rates]), torch.stack(keys))


def rotary_part(part, head, q, i, keys, js) -> Tensor:
    width = int(HEAD_WIDTH * 0.7)
    rates = [10_000 ** (-2 * n / width) for n in range(-(-width // 2))]

    def some(x: Tensor, place: float) -> Tensor:
        cut = 2 * len(rates)
        return torch.cat([turned(x[:cut], [place * rate for rate in rates]), x[cut:]])

    keys = [some(k, j) for k, j in zip(keys, js, strict=True)]
    return dots(some(q, i), torch.stack(keys))


def yarn(part, head, q, i, keys, js) -> Tensor:
    original, factor, rates = 64, 4.0, []
    edges = [
        HEAD_WIDTH / 2 * math.log(original / (turns * 2 * math.pi), 10_000) for turns in (32, 1)
    ]
    first, last = max(0, math.floor(edges[0])), math.ceil(edges[1])
    for n in range(HEAD_WIDTH // 2):
        rate = 10_000 ** (-2 * n / HEAD_WIDTH)
        slow = min(1.0, max(0.0, (n - first) / (last - first)))
        rates.append(rate * (1 - slow) + rate / factor * slow)
    keys = [turned(k, [j * rate for rate in rates]) for k, j in zip(keys, js, strict=True)]
    scores = dots(turned(q, [i * rate for rate in rates]), torch.stack(keys))
    return scores * (0.1 * math.log(factor) + 1) ** 2


def alibi(part, head, q, i, keys, js) -> Tensor:
    slope = 2.0 ** (-8 / HEADS * (head + 1))
    return dots(q, keys) - torch.tensor([slope * abs(i - j) for j in js])


def bucket(distance: int, sides: int) -> int:
    each, first = 32 // sides, 0
    if sides == 2:
        first, distance = (16 if distance < 0 else 0), abs(distance)
    exact, distance = each // 2, max(0, distance)
    if distance < exact:
        return first + distance
    wide = math.log(distance / exact) / math.log(128 / exact) * (each - exact)
    return first + min(each - 1, exact + int(wide))


def t5(part, head, q, i, keys, js) -> Tensor:
    return dots(q, keys) + torch.stack([part.table[bucket(i - j, part.sides), head] for j in js])


def shaw(part, head, q, i, keys, js) -> Tensor:
    places = [part.keys[3 + max(-3, min(3, j - i))] for j in js]
    return dots(q, torch.stack([k + a for k, a in zip(keys, places, strict=True)]))


def shaw_values(part, i: int, js: list[int]) -> Tensor:
    return torch.stack([part.values[3 + max(-3, min(3, j - i))] for j in js])


def xl(part, head, q, i, keys, js) -> Tensor:
    scores = []
    weight = part.relative.weight[head * HEAD_WIDTH : (head + 1) * HEAD_WIDTH]
    for k, j in zip(keys, js, strict=True):
        angles = [(i - j) / 10_000 ** (2 * n / WIDTH) for n in range(WIDTH // 2)]
        waves = torch.tensor([f(a) for a in angles for f in (math.sin, math.cos)])
        r = weight @ waves
        u, v = part.u[head, 0], part.v[head, 0]
        scores.append(q @ k + q @ r + u @ k + v @ r)
    return torch.stack(scores) / math.sqrt(HEAD_WIDTH)


def kerple_log(part, head, q, i, keys, js) -> Tensor:
    r1, r2 = part.log_r1[head].exp(), part.log_r2[head].exp()
    return dots(q, keys) - torch.stack([r1 * (1 + r2 * abs(i - j)).log() for j in js])


def kerple_power(part, head, q, i, keys, js) -> Tensor:
    r1, r2 = part.log_r1[head].exp(), 2 / (1 + (-part.logit_r2[head]).exp())
    powers = [torch.tensor(float(abs(i - j))) ** r2 if i != j else 0 * r2 for j in js]
    return dots(q, keys) - r1 * torch.stack(powers)


def fire(part, head, q, i, keys, js) -> Tensor:
    def psi(x) -> Tensor:
        return (part.log_c.exp() * x + 1).log()

    biases = []
    for j in js:
        longest = torch.maximum(part.log_length.exp(), torch.tensor(float(max(i, j))))
        share = psi(abs(i - j)) / psi(longest)
        inner = [
            (w * share + b).clamp(min=0)
            for w, b in zip(part.inner[:, 0], part.inner_bias, strict=True)
        ]
        biases.append(torch.stack(inner) @ part.outer[head])
    return dots(q, keys) + torch.stack(biases)


def cope(part, head, q, i, keys, js) -> Tensor:
    scores = []
    for at in range(len(js)):
        between = [t for t in range(len(js)) if js[at] <= js[t] <= i]
        zero = torch.zeros(())
        p = sum((1 / (1 + (-dots(q, keys[t : t + 1])[0]).exp()) for t in between), zero)
        p = p if p < 3 else torch.tensor(3.0)
        low = math.floor(p.item())
        e = part.table[low] * (low + 1 - p) + part.table[min(3, low + 1)] * (p - low)
        scores.append(q @ (keys[at] + e))
    return torch.stack(scores) / math.sqrt(HEAD_WIDTH)


FORMULAS: dict[str, Callable[..., Tensor]] = {
    "none": plain,
    "rotary": rotary,
    "rotary_part": rotary_part,
    "yarn": yarn,
    "alibi": alibi,
    "t5": t5,
    "shaw": shaw,
    "xl": xl,
    "kerple_log": kerple_log,
    "kerple_power": kerple_power,
    "fire": fire,
    "cope": cope,
}


def loop(name: str, layer: MultiHead, x: Tensor, at: Tensor, seen: Tensor) -> Tensor:
    """Attend one sentence, head and query at a time; seen is (b, q, k)."""
    d = HEAD_WIDTH
    rows = []
    for b in range(len(x)):
        projected = x[b] @ layer.qkv.weight.T + layer.qkv.bias
        where = (at[b] if at.ndim == 3 else at)[:, 0].tolist()
        for i in range(x.shape[1]):
            heads = []
            for h in range(HEADS):
                group = h // (HEADS // KV_HEADS)
                q = projected[i, h * d : (h + 1) * d]
                k = projected[:, (HEADS + group) * d : (HEADS + group + 1) * d]
                v = projected[:, (HEADS + KV_HEADS + group) * d :][:, :d]
                visible = [j for j in range(x.shape[1]) if seen[b, i, j]]
                js = [where[j] for j in visible]
                if not visible:
                    heads.append(torch.zeros(d))
                    continue
                scores = FORMULAS[name](layer.position, h, q, where[i], k[visible], js)
                weights = (scores - scores.max()).exp()
                values = v[visible]
                if name == "shaw":
                    values = values + shaw_values(layer.position, where[i], js)
                heads.append(weights / weights.sum() @ values)
            rows.append(layer.out.weight @ torch.cat(heads) + layer.out.bias)
    return torch.stack(rows).view(x.shape)


@pytest.fixture(autouse=True)
def in_fp64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_every_position_has_a_formula():
    assert set(FORMULAS) == set(NAMES)


LENGTH = 6
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1], [0, 1, 1, 1, 1, 1]])
TRIANGLE = torch.ones(2, LENGTH, LENGTH, dtype=torch.bool).tril()
# kind -> positions, mask, what it lets through, and whether it looks ahead
KINDS: dict[str, tuple[Tensor, Mask | None, Tensor, bool]] = {
    "causal": (torch.arange(LENGTH).unsqueeze(-1), Causal(), TRIANGLE, False),
    "gaps": (torch.tensor([0, 1, 7, 30, 31, 190]).unsqueeze(-1), Causal(), TRIANGLE, False),
    "packed": (
        torch.tensor([[0, 1, 2, 3, 0, 1], [0, 0, 1, 2, 3, 4]]).unsqueeze(-1),
        Causal() & Document(DOCUMENTS),
        TRIANGLE & (DOCUMENTS.unsqueeze(2) == DOCUMENTS.unsqueeze(1)),
        False,
    ),
    "ragged": (
        torch.tensor([[3, 4, 5, 6, 7, 8], [20, 21, 22, 23, 24, 25]]).unsqueeze(-1),
        Causal(),
        TRIANGLE,
        False,
    ),
    "both ways": (
        torch.arange(LENGTH).unsqueeze(-1),
        Padding.of(torch.tensor([6, 4]), LENGTH),
        (torch.arange(LENGTH) < torch.tensor([6, 4])[:, None])[:, None].expand(2, LENGTH, LENGTH),
        True,
    ),
    "all": (
        torch.tensor([0, 1, 7, 30, 31, 90]).unsqueeze(-1),
        None,
        torch.ones(2, LENGTH, LENGTH, dtype=torch.bool),
        True,
    ),
}


CASES = [
    (name, kind)
    for name in NAMES
    for kind, (*_, bidirectional) in KINDS.items()
    if not (bidirectional and POSITIONS[name].causal_only)
]


@pytest.mark.parametrize("name,kind", CASES)
def test_a_loop_from_the_formula_equals_the_layer(name: str, kind: str):
    at, mask, seen, bidirectional = KINDS[kind]
    layer = layer_of(name, bidirectional)
    x = torch.randn(2, LENGTH, WIDTH).requires_grad_()
    ours, right = run(layer, x, at, mask), loop(name, layer, x, at, seen)
    torch.testing.assert_close(ours, right, atol=1e-9, rtol=0)
    learned = dict(layer.named_parameters())
    with_x = [x, *learned.values()]
    probe = torch.randn_like(ours)
    grads = torch.autograd.grad((ours * probe).sum(), with_x, allow_unused=True)
    rights = torch.autograd.grad((right * probe).sum(), with_x, allow_unused=True)
    for who, one, other in zip(["x", *learned], grads, rights, strict=True):
        other = torch.zeros_like(one) if other is None else other
        torch.testing.assert_close(one, other, atol=1e-8, rtol=1e-8, msg=f"gradient of {who}")


@pytest.mark.parametrize("name", [name for name in NAMES if name != "none"])
def test_a_loop_without_the_position_does_not(name: str):
    at, mask, seen, _ = KINDS["causal"]
    layer, x = layer_of(name), torch.randn(2, LENGTH, WIDTH)
    assert (run(layer, x, at, mask) - loop("none", layer, x, at, seen)).abs().max() > 1e-2


class Seen(Mask):
    """What each query stands on: (b, q, k)."""

    def __init__(self, seen: Tensor):
        self.seen = seen

    def tile(self, rows: slice, columns: slice) -> Tensor:
        return self.seen[:, None, rows, columns]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("chunks", [[1] * 7, [4, 1, 2]])
def test_cached_equals_full(name: str, chunks: list[int]):
    layer, x = layer_of(name), torch.randn(2, 7, WIDTH)
    for first in (0, torch.tensor([0, 5]).view(2, 1, 1)):  # all alike, or each with its own past
        at = torch.arange(7).unsqueeze(-1) + first
        full = run(layer, x, at, Causal())
        cache, parts, start = Cache(2, KV_HEADS, 8, HEAD_WIDTH, x), [], 0
        with torch.no_grad():
            for size in chunks:
                now = slice(start, start + size)
                mask = None if size == 1 else Causal(start)
                shared = layer.position.shared(at[..., now, :], at[..., : now.stop, :], mask)
                new = x[:, now], at[..., now, :]
                parts.append(layer(new[0], at=new[1], mask=mask, bias=shared, cache=cache))
                start += size
        torch.testing.assert_close(torch.cat(parts, 1), full, atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_texts_that_share_a_cache_stand_on_their_own_past(name: str):
    """Columns p0 p1 a2 b2 b3 a3: two texts with one beginning, each at the same positions."""
    layer, columns = layer_of(name), torch.randn(1, 8, WIDTH)
    texts = {"a": [0, 1, 2, 5, 6], "b": [0, 1, 3, 4, 7]}
    at = torch.tensor([0, 1, 2, 2, 3, 3, 4, 4]).unsqueeze(-1)
    own = torch.zeros(1, 8, 8, dtype=torch.bool)
    for text in texts.values():
        for i, query in enumerate(text):
            own[0, query, text[: i + 1]] = True
    cache = Cache(1, KV_HEADS, 16, HEAD_WIDTH, columns)
    parts, start = [], 0
    with torch.no_grad():
        for size in (2, 2, 2, 2):  # as a beam of two writes
            stop = start + size
            mask = Seen(own[:, start:stop, :stop])
            shared = layer.position.shared(at[start:stop], at[:stop], mask)
            new = columns[:, start:stop]
            parts.append(layer(new, at=at[start:stop], mask=mask, bias=shared, cache=cache))
            start = stop
    ours = torch.cat(parts, 1)
    for text in texts.values():
        right = run(layer, columns[:, text], torch.arange(5).unsqueeze(-1), Causal())
        torch.testing.assert_close(ours[:, text], right, atol=1e-10, rtol=0)


@pytest.mark.parametrize("mask", ["padding", "documents", "future"])
def test_contextual_positions_count_neither_padding_nor_the_future(mask: str):
    layer, x = layer_of("cope"), torch.randn(1, 6, WIDTH)
    at = torch.arange(6).unsqueeze(-1)
    keep = torch.tensor([[True, False, True, True, False, True]])
    documents = torch.tensor([[0, 1, 0, 0, 1, 0]])
    hides = {
        "padding": Causal() & Padding(keep),
        "documents": Causal() & Document(documents),
        "future": Causal(),
    }[mask]
    real = [0, 2, 3, 5] if mask != "future" else [0, 1, 2]
    hidden = [n for n in range(6) if n not in real]
    before = run(layer, x, at, hides)[:, real]
    other = x.clone()
    other[:, hidden] = 10 * torch.randn(1, len(hidden), WIDTH)
    assert torch.equal(run(layer, other, at, hides)[:, real], before)
    # and what is hidden leaves no gap: the real ones count as if they stood alone
    alone = run(layer, x[:, real], at[: len(real)], Causal())
    torch.testing.assert_close(before, alone, atol=1e-12, rtol=0)
    poisoned = x.clone()
    poisoned[:, hidden] = math.nan
    ours = run(layer, poisoned, at, hides)[:, real]
    torch.testing.assert_close(ours, before, atol=1e-12, rtol=0)


def test_contextual_positions_in_a_prefix_count_back_from_the_query():
    layer, x = layer_of("cope"), torch.randn(2, LENGTH, WIDTH)
    at, lengths = torch.arange(LENGTH).unsqueeze(-1), torch.tensor([3, 5])
    seen = TRIANGLE | (torch.arange(LENGTH) < lengths[:, None])[:, None]
    ours = run(layer, x, at, Prefix(lengths))
    torch.testing.assert_close(ours, loop("cope", layer, x, at, seen), atol=1e-9, rtol=0)


def test_positions_that_only_look_back_are_refused_where_one_looks_ahead():
    for name, part in POSITIONS.items():
        if part.causal_only:
            with pytest.raises(UsageError, match="counts what came before"):
                build_position(name, WIDTH, HEADS, HEAD_WIDTH, bidirectional=True)
    with pytest.raises(UsageError, match="Did you mean 'rotary'"):
        build_position("rotery", WIDTH, HEADS, HEAD_WIDTH)


def test_an_encoder_says_which_positions_it_cannot_have():
    with pytest.raises(UsageError, match="position 'cope' counts what came before"):
        Transformer(TransformerConfig(9, 9, 1, 1, position="cope"))


def test_a_long_text_is_computed_in_parts(monkeypatch: pytest.MonkeyPatch):
    position, at = build_position("fire", WIDTH, HEADS, HEAD_WIDTH), torch.arange(20).unsqueeze(-1)
    at = torch.stack([at, at + 7])
    whole = position.shared(at, at)
    monkeypatch.setattr(distance, "MAX_TABLE", 32 * 50)
    torch.testing.assert_close(position.shared(at, at), whole, atol=1e-12, rtol=0)


@pytest.mark.parametrize("name", POSITIONS)
def test_layers_share_what_they_should(name: str):
    position = build_position(name, WIDTH, HEADS, HEAD_WIDTH, max_length=LONGEST)
    layers = [of_layer(position) for _ in range(3)]
    if POSITIONS[name].per_layer:
        assert not list(position.parameters())  # the stack itself learns nothing
        assert len({id(layer) for layer in layers}) == 3
        assert all(list(layer.parameters()) for layer in layers)
    else:
        assert not any(list(layer.parameters()) for layer in layers)  # the stack alone learns
    at = torch.arange(5).unsqueeze(-1)
    bias = position.shared(at, at)
    assert bias is None or bias.shape == (HEADS, 5, 5)
    bias = position.shared(at.expand(3, -1, -1), at)
    assert bias is None or bias.shape == (3, HEADS, 5, 5)


@pytest.mark.parametrize("name", NAMES)
def test_a_position_begins_as_something_to_learn_from(name: str):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    position = of_one_layer(build_position(name, 64, 8, 8, max_length=256))
    layer = MultiHead(64, 8, position=position)
    x = torch.randn(2, 100, 64)
    at = torch.arange(100).unsqueeze(-1)
    run(layer, x, at, Causal()).square().mean().backward()
    for who, parameter in layer.named_parameters():
        grad = parameter.grad
        assert grad is not None and grad.isfinite().all() and grad.abs().max() > 1e-9, who
    shared = position.shared(at, at)
    if shared is not None:
        seen = shared.detach().masked_fill(torch.ones(100, 100).triu(1) > 0, 0.0)
        assert shared.dtype == torch.float32 and 0.01 < seen.abs().max() <= 100
    with torch.device("meta"):
        ghost = of_one_layer(build_position(name, 64, 8, 8, max_length=256))
        assert all(p.is_meta for p in ghost.parameters())
        run(MultiHead(64, 8, position=ghost), x.to("meta"), at.to("meta"), Causal())
    shapes = {who: p.shape for who, p in position.named_parameters()}
    assert {who: p.shape for who, p in ghost.named_parameters()} == shapes


@pytest.mark.parametrize("name", ["kerple_log", "kerple_power", "fire"])
def test_no_step_of_learning_makes_a_kernel_invalid(name: str):
    position = build_position(name, WIDTH, HEADS, HEAD_WIDTH)
    at = torch.arange(50).unsqueeze(-1)
    for _ in range(5):
        for parameter in position.parameters():
            parameter.data += 3 * torch.randn_like(parameter)
        bias = position.shared(at, at)
        assert bias is not None and bias.isfinite().all()
        if name != "fire":  # further away is never liked better
            assert bool((bias[:, 0, 1:] <= bias[:, 0, :-1]).all())


def test_kerple_with_power_one_is_alibi():
    at = torch.arange(20).unsqueeze(-1)
    ours, right = (build_position(n, 0, HEADS, 0).shared(at, at) for n in ("kerple_power", "alibi"))
    torch.testing.assert_close(ours, right.double(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["sinusoidal", "learned"])
def test_what_is_added_to_the_input_is_the_same_in_any_order(name: str):
    torch.manual_seed(0)
    position = build_position(name, WIDTH, HEADS, HEAD_WIDTH, max_length=LONGEST)
    embed = TokenEmbedding(11, WIDTH, position, 1.0, 0.0)
    ids, at = torch.randint(0, 11, (2, 7)), torch.randint(0, LONGEST, (2, 7, 1))
    full = embed(ids, at)
    for b in range(2):
        for i in range(7):
            right = embed.tokens.weight[ids[b, i]] + (
                position.table.weight[at[b, i, 0]]
                if name == "learned"
                else torch.tensor(
                    [
                        f(at[b, i, 0].item() / 10_000 ** (2 * n / WIDTH))
                        for n in range(WIDTH // 2)
                        for f in (math.sin, math.cos)
                    ]
                )
            )
            torch.testing.assert_close(full[b, i], right)
    step = torch.stack([embed(ids[:, [i]], at[:, [i]])[:, 0] for i in range(7)], 1)
    assert torch.equal(step, full)


def test_a_layer_with_positions_can_be_copied_and_saves_nothing_but_parameters():
    for name in NAMES:
        layer = layer_of(name)
        x, at = torch.randn(1, 5, WIDTH), torch.arange(5).unsqueeze(-1)
        before = run(layer, x, at, Causal())
        assert torch.equal(run(deepcopy(layer), x, at, Causal()), before)
        assert set(layer.state_dict()) == {n for n, _ in layer.named_parameters()}
    stack = pickle.loads(pickle.dumps(build_position("shaw", WIDTH, HEADS, HEAD_WIDTH)))
    assert isinstance(of_layer(stack), POSITIONS["shaw"])
