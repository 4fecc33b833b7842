"""Positions: moving is a rotation, and a dot product of rotated vectors knows only distance."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from regard.attention.masks import Causal
from regard.attention.multihead import MultiHead
from regard.attention.positions import (
    ALIASES,
    POSITIONS,
    Learned,
    Position,
    Rotary,
    Sinusoidal,
    sinusoids,
)
from regard.errors import Mistake
from regard.layers.embed import Embed


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
    with pytest.raises(Mistake):
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
    with pytest.raises(Mistake):
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
    with pytest.raises(Mistake, match="position 5 is past the 5 learned ones"):
        part.embed(x, count(5, start=1))


def test_no_position_does_nothing():
    part, x = Position(), torch.randn(1, 3, 8)
    assert part.embed(x, count(3)) is x and part.rotate(x, count(3)) is x
    assert part.bias(x, x, count(3), count(3)) is None
    assert part.shared(count(3), count(3)) is None


def test_names_and_their_other_names_lead_somewhere():
    assert set(ALIASES.values()) <= set(POSITIONS)
    for part in POSITIONS.values():
        settings = {"base": 1e4, "layout": "pairs", "max_length": 9}
        assert isinstance(part(16, 2, 8, **settings), Position)


def test_an_embedding_is_a_one_hot_product():
    torch.manual_seed(0)
    embed = Embed(11, 8, Position(), scale=8**0.5, drop=0.0)
    ids = torch.randint(0, 11, (2, 5))
    product = F.one_hot(ids, 11).float() @ embed.tokens.weight * 8**0.5
    torch.testing.assert_close(embed(ids, count(5)), product)
