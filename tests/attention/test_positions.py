"""Positions: moving is a rotation, and a dot product of rotated vectors knows only distance."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from regard.attention.masks import Causal
from regard.attention.multihead import MultiHead
from regard.attention.once import one_pass
from regard.attention.positions import (
    POSITION_ALIASES,
    POSITIONS,
    ROTARY_SCALINGS,
    Disentangled,
    GrowingTable,
    Learned,
    Position,
    Rotary,
    RotaryScaling,
    Sinusoidal,
    T5Bias,
    build_position,
    sinusoids,
    slopes,
)
from regard.errors import UsageError
from regard.layers.block import BlockConfig
from regard.layers.embed import TokenEmbedding
from regard.models.bert import Bert, BertConfig
from regard.models.gpt import GPT, GPTConfig


def count(n: int, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + n).unsqueeze(-1)


@pytest.mark.parametrize("base", [10_000.0, 100_000.0])
@given(st.integers(0, 400), st.integers(-50, 400), st.sampled_from([2, 8, 16]))
def test_moving_is_a_rotation_that_does_not_depend_on_where(base: float, k: int, d: int, width):
    move = torch.zeros(width, width, dtype=torch.float64)
    for i in range(width // 2):
        angle = d / base ** (2 * i / width)
        move[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] = torch.tensor(
            [[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]],
            dtype=torch.float64,
        )
    here, there = (sinusoids(torch.tensor([[n]]), width, base)[0] for n in (k, k + d))
    torch.testing.assert_close(there, move @ here, atol=1e-9, rtol=0)
    torch.testing.assert_close(move @ move.T, torch.eye(width, dtype=torch.float64))


@pytest.mark.parametrize("base", [10_000.0, 100_000.0])
def test_sinusoids_are_the_formula(base: float):
    table = sinusoids(count(50), 6, base)
    for k in (0, 1, 49):
        for i in range(3):
            angle = k / base ** (2 * i / 6)
            assert table[k, 2 * i] == pytest.approx(math.sin(angle), abs=1e-12)
            assert table[k, 2 * i + 1] == pytest.approx(math.cos(angle), abs=1e-12)


def test_halves_are_pairs_in_another_order():
    pairs, halves = (sinusoids(count(9), 8, layout=layout) for layout in ("pairs", "halves"))
    assert torch.equal(torch.cat([pairs[:, 0::2], pairs[:, 1::2]], -1), halves)


def test_coordinates_share_the_width():
    at = torch.cartesian_prod(torch.arange(3), torch.arange(5))
    both = sinusoids(at, 16)
    each = [sinusoids(at[:, i : i + 1], 8) for i in range(2)]
    torch.testing.assert_close(both, torch.cat(each, -1))
    with pytest.raises(UsageError):
        sinusoids(at, 10)


def test_sinusoids_are_added_to_the_input_in_its_own_precision():
    x = torch.randn(2, 5, 8)
    at = count(5, start=1000)
    y = Sinusoidal(8).embed(x, at)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y - x, sinusoids(at, 8).float().expand(2, 5, 8))
    batched = torch.stack([count(5), at])
    torch.testing.assert_close(Sinusoidal(8).embed(x, batched)[1], y[1])


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 3000), st.integers(1, 2))
def test_rotated_products_know_only_the_distance(i: int, j: int, shift: int, coordinates: int):
    rand = torch.Generator().manual_seed(i)
    q, k = torch.randn(2, 1, 1, 1, 8, generator=rand, dtype=torch.float64)
    turn = Rotary(head_width=8).rotate

    def product(a: int, b: int) -> torch.Tensor:
        a_at, b_at = (torch.tensor([[n, 2 * n][:coordinates]]) for n in (a, b))
        return (turn(q, a_at) * turn(k, b_at)).sum()

    torch.testing.assert_close(product(i, j), product(i + shift, j + shift), atol=1e-9, rtol=0)
    turned = turn(q, torch.tensor([[i]]))
    torch.testing.assert_close(turned.norm(), q.norm(), atol=1e-12, rtol=0)
    torch.testing.assert_close(turn(q, torch.tensor([[0]])), q)


def test_rotation_does_something():
    x = torch.randn(1, 1, 2, 8, dtype=torch.float64)
    turned = Rotary(head_width=8).rotate(x, count(2))
    assert not torch.allclose(turned[:, :, 1], x[:, :, 1])
    with pytest.raises(UsageError):
        Rotary(head_width=7)


def test_rotary_attention_does_not_change_when_all_moves():
    torch.manual_seed(0)
    layer = MultiHead(16, 2, position=Rotary(head_width=8)).double()
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    here = layer(x, at=count(6), mask=Causal())
    torch.testing.assert_close(here, layer(x, at=count(6, start=500), mask=Causal()))
    assert torch.equal(here, layer(x, mask=Causal()))  # positions count up unless told
    assert not torch.allclose(here, layer(x, at=count(6) * 2, mask=Causal()))


def test_learned_positions_are_rows_and_end():
    part = Learned(8, max_length=5)
    x = torch.zeros(2, 5, 8)
    assert torch.equal(part.embed(x, count(5))[1], part.table.weight)
    assert torch.equal(part.embed(x[:, :1], count(1, 3))[0], part.table.weight[3:4])
    with pytest.raises(UsageError, match="position 5 is past the 5 learned ones"):
        part.embed(x, count(5, start=1))


def test_no_position_does_nothing():
    part, x = Position(), torch.randn(1, 3, 8)
    assert part.embed(x, count(3)) is x and part.rotate(x, count(3)) is x
    assert part.bias(x, x, count(3), count(3)) is None
    assert part.shared(count(3), count(3)) is None


def test_names_and_their_other_names_lead_somewhere():
    assert set(POSITION_ALIASES.values()) <= set(POSITIONS)
    for part in POSITIONS.values():
        settings = {"base": 1e4, "layout": "pairs", "max_length": 9}
        assert isinstance(part(16, 2, 8, **settings), Position)


def test_an_embedding_is_a_one_hot_product():
    torch.manual_seed(0)
    embed = TokenEmbedding(11, 8, Position(), scale=8**0.5, drop=0.0)
    ids = torch.randint(0, 11, (2, 5))
    product = F.one_hot(ids, 11).float() @ embed.tokens.weight * 8**0.5
    torch.testing.assert_close(embed(ids, count(5)), product)


SCALED = {
    "linear": (RotaryScaling("linear", 4.0), {"factor": 4.0}),
    "llama3": (
        RotaryScaling("llama3", 8.0, 8192),
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama3, short": (
        RotaryScaling("llama3", 3.0, 40, low=1.5, high=7.0),
        {
            "factor": 3.0,
            "low_freq_factor": 1.5,
            "high_freq_factor": 7.0,
            "original_max_position_embeddings": 40,
        },
    ),
    "yarn": (
        RotaryScaling("yarn", 16.0, 4096),
        {"factor": 16.0, "original_max_position_embeddings": 4096},
    ),
    "yarn, told": (
        RotaryScaling("yarn", 2.5, 300, beta_fast=20, beta_slow=2, attention_factor=1.3),
        {
            "factor": 2.5,
            "original_max_position_embeddings": 300,
            "beta_fast": 20,
            "beta_slow": 2,
            "attention_factor": 1.3,
        },
    ),
    "yarn, of rates that never turn so often": (
        RotaryScaling("yarn", 4.0, 2**22),
        {"factor": 4.0, "original_max_position_embeddings": 2**22},
    ),
    "yarn, tiny": (
        RotaryScaling("yarn", 4.0, 7),
        {"factor": 4.0, "original_max_position_embeddings": 7},
    ),
}


@pytest.mark.parametrize("case", SCALED)
@pytest.mark.parametrize("head_width,base", [(64, 10_000.0), (24, 500_000.0)])
def test_stretched_rotary_positions_are_those_of_public_models(case, head_width: int, base: float):
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    ours, theirs = SCALED[case]
    config = LlamaConfig(
        hidden_size=4 * head_width,
        num_attention_heads=4,
        max_position_embeddings=int(
            theirs["factor"] * theirs.get("original_max_position_embeddings", 512)
        ),
        rope_parameters={"rope_type": ours.kind, "rope_theta": base, **theirs},
    )
    rates, factor = ROPE_INIT_FUNCTIONS[ours.kind](config, device=torch.device("cpu"))
    part = Rotary(head_width=head_width, base=base, scaling=ours)
    torch.testing.assert_close(part.rates(head_width).float(), rates, atol=0, rtol=3e-6)
    assert part.stretch == pytest.approx(factor, abs=1e-12)
    plain = Rotary(head_width=head_width, base=base).rates(head_width).float()
    most = (plain / rates).max()
    assert 1 < most <= 1.001 * theirs["factor"]
    if "never" not in case:  # else even the slowest is divided by less
        assert most == pytest.approx(theirs["factor"], rel=1e-3)


def test_stretching_reaches_the_queries():
    x = torch.randn(1, 1, 5, 8, dtype=torch.float64)
    plain, linear = Rotary(head_width=8), Rotary(head_width=8, scaling=RotaryScaling("linear", 4.0))
    torch.testing.assert_close(linear.rotate(x, count(5) * 4), plain.rotate(x, count(5)))
    told = RotaryScaling("yarn", 4.0, 64, attention_factor=3.0)
    longer = Rotary(head_width=8, scaling=told).rotate(x, count(5))
    torch.testing.assert_close(longer.norm(dim=-1), 3 * x.norm(dim=-1))
    yarn = build_position("yarn", 8, 1, 8, max_length=256)
    assert isinstance(yarn, Rotary)
    assert (yarn.scaling.kind, yarn.scaling.original_length) == ("yarn", 64)
    assert set(ROTARY_SCALINGS) == {"none", "linear", "llama3", "yarn"}
    for wrong in (RotaryScaling("yarm"), RotaryScaling("llama3", low=4.0)):
        with pytest.raises(UsageError, match=r"^.*$"):
            Rotary(head_width=8, scaling=wrong)


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 6, 7, 8, 12, 16, 20, 32, 112])
def test_slopes_are_those_of_bloom(heads: int):
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor

    mask = torch.ones(1, 30)
    theirs = build_alibi_tensor(mask, heads, torch.float32)  # (heads, 1, keys): slope * position
    assert torch.equal(torch.tensor(slopes(heads)), theirs[:, 0, 1])
    ours = build_position("alibi", 0, heads, 0).shared(count(30), count(30))
    assert ours is not None
    for row in (5, 29):  # a constant for the row is the only difference
        apart = (ours[:, row] - theirs[:, 0])[:, : row + 1]
        torch.testing.assert_close(apart, apart[:, :1].expand_as(apart), atol=1e-5, rtol=0)


@pytest.mark.parametrize("buckets,furthest", [(32, 128), (16, 40), (8, 5), (320, 1280)])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_buckets_are_those_of_t5(bidirectional: bool, buckets: int, furthest: int):
    from transformers.models.t5.modeling_t5 import T5Attention

    distances = torch.arange(-3000, 3000)
    theirs = T5Attention._relative_position_bucket(-distances, bidirectional, buckets, furthest)
    part = T5Bias(8, 2, bidirectional=bidirectional, buckets=buckets, furthest=furthest)
    assert torch.equal(part.bucket(distances), theirs)
    assert theirs.max() == buckets - 1
    bias = part.shared(count(200), count(200))
    assert bias is not None
    torch.testing.assert_close(bias[:, 190, 3], part.table[part.bucket(torch.tensor(187))])
    with pytest.raises(UsageError, match="even number of buckets"):
        T5Bias(8, 2, buckets=7)


@given(st.lists(st.integers(-300, 3000), min_size=1, max_size=9), st.sampled_from([2, 6]))
def test_a_table_is_its_function(numbers: list[int], width: int):
    table = GrowingTable(lambda at: torch.stack([at, at.cos()], -1).repeat(1, width // 2))
    for some in (numbers[:1], numbers, numbers[::-1]):
        at = torch.tensor(some).unsqueeze(-1)
        rows = table(at, torch.float64)
        assert rows.shape == (len(some), 1, width)
        assert torch.equal(rows[..., -1], at.double().cos())
        torch.testing.assert_close(table(at / 2, torch.float64)[..., 0], at.double() / 2)
        assert table(at, torch.float32).dtype == torch.float32


def test_a_table_takes_little_memory():
    made = []
    table = GrowingTable(lambda at: made.append(len(at)) or at.unsqueeze(-1).expand(-1, 64))
    far = torch.tensor([0, 10**9])
    assert torch.equal(table(far, torch.float64)[:, 0], far.double())
    assert sum(made) < 10  # nobody computed what lies between
    for n in range(1000):
        table(torch.tensor([n]), torch.float32)
    assert sum(made) < 5000  # nor all anew for each
    assert table(torch.empty(0, 1, dtype=torch.long), torch.float32).shape == (0, 1, 64)


def test_angles_are_computed_once_for_all_layers(monkeypatch: pytest.MonkeyPatch):
    part, x, at = Rotary(head_width=8), torch.randn(2, 1, 5, 8), count(5)
    asked = []
    both = part._both
    monkeypatch.setattr(part, "_both", lambda *args: asked.append(args) or both(*args))
    with one_pass():
        first = part.rotate(x, at)
        for _ in range(3):
            assert torch.equal(part.rotate(x, at), first)
        assert len(asked) == 1
        part.rotate(x, at.clone())
        assert len(asked) == 2
    at += 1  # the same tensor, and yet another
    with one_pass():
        moved = part.rotate(x, at)
    assert len(asked) == 3 and not torch.equal(moved, first)
    assert torch.equal(moved, part.rotate(x, count(5, start=1)))
    assert part.rotate(x.double(), at).dtype == torch.float64


def test_what_is_kept_serves_in_and_out_of_training():
    part, at = Rotary(head_width=8), count(4)
    wave = Sinusoidal(8, base=77.0)
    with torch.inference_mode():
        seen = part.rotate(torch.ones(1, 1, 4, 8), at), wave.embed(torch.ones(1, 4, 8), at)
        inside = count(3)
        part.rotate(torch.ones(1, 1, 3, 8), inside)
    x = torch.ones(1, 1, 4, 8, requires_grad=True)
    y = torch.ones(1, 4, 8, requires_grad=True)
    assert torch.equal(part.rotate(x, at), seen[0]) and torch.equal(wave.embed(y, at), seen[1])
    (part.rotate(x, at).sum() + wave.embed(y, at).square().sum()).backward()
    part.rotate(x[:, :, :3], inside).sum().backward()


def test_threads_may_share_positions():
    part, wave = Rotary(head_width=8), Sinusoidal(8, base=91.0)
    x = torch.randn(1, 1, 1, 8, dtype=torch.float64)

    def write(first: int) -> bool:
        """Ask for one position after another, as a text is written."""
        right = True
        for n in range(first, first + 300):
            at = torch.tensor([[n]])
            cos, sin = (f(n * part.rates(8)) for f in (torch.cos, torch.sin))
            a, b = x.chunk(2, -1)
            turned = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
            right &= torch.allclose(part.rotate(x, at), turned, atol=1e-9)
            right &= torch.allclose(wave.embed(x[0], at), x[0] + sinusoids(at, 8, 91.0), atol=1e-9)
        return right

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write, [0, 250, 500, 1000]))


def test_positions_that_count_along_a_line_say_so():
    at = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    for name in ("alibi", "t5", "kerple_log", "kerple_power", "fire"):
        with pytest.raises(UsageError, match="along one line, not 2 coordinates"):
            build_position(name, 8, 2, 4).shared(at, at)


@pytest.mark.parametrize("name", POSITIONS)
def test_functional_gradients_are_those_of_autograd_and_nothing_is_left_behind(name: str):
    torch.manual_seed(0)
    block = BlockConfig(16, 2, 24, dropout=0.0)
    if issubclass(POSITIONS[name], Disentangled):
        model: torch.nn.Module = Bert(BertConfig(20, 2, replace(block, score=name), position=name))
    else:
        model = GPT(GPTConfig(20, 2, block, position=name, max_length=16))
    model.double()
    weights, ids = dict(model.named_parameters()), torch.randint(0, 20, (2, 9))

    def loss(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.func.functional_call(model, weights, (ids,)).square().sum()

    expected = torch.autograd.grad(model(ids).square().sum(), [*weights.values()])
    for _ in range(2):
        found = torch.func.grad(loss)({key: value.detach() for key, value in weights.items()})
        torch.testing.assert_close([*found.values()], [*expected])
    assert all(a is b for a, b in zip(model.parameters(), weights.values(), strict=True))
    again = torch.autograd.grad(model(ids).square().sum(), [*weights.values()])
    torch.testing.assert_close(again, expected)
