"""Masks: a tile is a part of the whole, a span misses nothing, and & is intersection."""

from collections.abc import Callable
from itertools import combinations, product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.attention.attend import attend
from regard.attention.masks import Causal, Document, Mask, Padding, Prefix, Sliding, Window
from regard.errors import UsageError

BATCH = 2
places = st.one_of(
    st.integers(-4, 6),
    st.tuples(st.booleans(), st.integers(1, 2), st.integers(0, 50)),
)


def at(place, length: int, coordinates: int):
    """Return where a side stands: counted from a number, or by coordinates."""
    if isinstance(place, int):
        return place
    batched, _, seed = place
    shape = (BATCH, length, coordinates) if batched else (length, coordinates)
    return torch.randint(-3, 12, shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def single(draw, queries: int, keys: int) -> Mask:
    rand = torch.Generator().manual_seed(draw(st.integers(0, 50)))
    kind = draw(st.sampled_from([Causal, Sliding, Window, Prefix, Document, Padding]))
    if kind is Padding:
        return Padding(torch.rand(BATCH, keys, generator=rand) < 0.6)
    if kind is Document:
        lead = (BATCH,) if draw(st.booleans()) else ()
        q, k = (torch.randint(0, 3, (*lead, n), generator=rand) for n in (queries, keys))
        return Document(q, k)
    places_q, places_k = draw(places), draw(places)
    both = (places_q, places_k)
    coordinates = min(1 if isinstance(place, int) else place[1] for place in both)
    q_at, k_at = at(places_q, queries, coordinates), at(places_k, keys, coordinates)
    if kind is Causal:
        return Causal(q_at, k_at)
    if kind is Prefix and draw(st.booleans()):
        return Prefix(torch.randint(0, 9, (BATCH,), generator=rand), q_at, k_at)
    return kind(draw(st.integers(1, 5)), q_at, k_at)


@st.composite
def some(draw, queries: int, keys: int) -> Mask:
    mask = draw(single(queries, keys))
    for _ in range(draw(st.integers(0, 2))):
        mask = mask & draw(single(queries, keys))
    return mask


def whole(mask: Mask, queries: int, keys: int) -> torch.Tensor:
    return mask.tile(slice(0, queries), slice(0, keys)).expand(BATCH, 1, queries, keys)


@given(st.data(), st.integers(1, 12), st.integers(1, 12))
def test_a_tile_is_a_part_of_the_whole_and_a_span_misses_nothing(data, queries: int, keys: int):
    mask = data.draw(some(queries, keys))
    everything = whole(mask, queries, keys)
    a, b = sorted(data.draw(st.tuples(*[st.integers(0, queries)] * 2)))
    c, d = sorted(data.draw(st.tuples(*[st.integers(0, keys)] * 2)))
    tile = mask.tile(slice(a, b), slice(c, d)).expand(BATCH, 1, b - a, d - c)
    assert torch.equal(tile, everything[..., a:b, c:d])

    span = mask.span(slice(a, b), keys)
    assert 0 <= span.start <= span.stop <= keys
    outside = everything[..., a:b, :].clone()
    outside[..., span] = False
    assert not outside.any()

    if not mask.by_query:  # then one row tells all
        assert torch.equal(everything, everything[..., :1, :].expand_as(everything))
    if mask.aligned(queries, keys):
        assert torch.equal(everything[0, 0], torch.ones(queries, keys).tril().bool())


@given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_and_is_intersection(data, queries: int, keys: int):
    one, two = data.draw(single(queries, keys)), data.draw(single(queries, keys))
    both = whole(one, queries, keys) & whole(two, queries, keys)
    assert torch.equal(whole(one & two, queries, keys), both)
    assert (one & None) is one and (None & one) is one


@given(st.data(), st.integers(1, 9), st.integers(1, 9))
def test_the_additive_form_says_the_same(data, queries: int, keys: int):
    mask = data.draw(some(queries, keys))
    bias, blind = mask.additive(slice(0, queries), slice(0, keys), torch.zeros(()))
    seen = whole(mask, queries, keys)
    nowhere = ~seen.any(-1, keepdim=True)
    assert (blind is not None) == bool(nowhere.any())
    assert torch.equal((bias == 0).expand(seen.shape), seen | nowhere)
    assert torch.equal((bias == -torch.inf).expand(seen.shape), ~(seen | nowhere))


def test_spans_spare_work():
    assert Causal().span(slice(10, 20), 100) == slice(0, 20)
    assert Causal(50).span(slice(10, 20), 100) == slice(0, 70)
    assert Sliding(3).span(slice(10, 20), 100) == slice(8, 22)
    assert Window(8).span(slice(10, 20), 100) == slice(8, 24)
    assert (Causal() & Sliding(3)).span(slice(10, 20), 100) == slice(8, 20)


@pytest.mark.parametrize("kind", [Sliding, Window])
def test_a_span_is_from_the_first_key_that_is_seen_to_the_last(kind: Callable[..., Mask]):
    for size, q_at, k_at in product((1, 2, 3, 5), (-4, 0, 3, 7), (-5, 0, 2, 4, 9)):
        mask = kind(size, q_at, k_at)
        everything = mask.tile(slice(0, 8), slice(0, 10))
        for first, last in combinations(range(9), 2):
            seen = everything[first:last].any(0).nonzero().flatten().tolist()
            span = mask.span(slice(first, last), 10)
            assert list(range(10)[span]) == list(range(seen[0], seen[-1] + 1) if seen else ())


def test_causal_goes_by_position_not_by_corner():
    assert Causal(7).tile(slice(0, 1), slice(0, 8)).all()  # one cached query sees all before it
    assert Causal().aligned(8, 8) and Causal(2, 2).aligned(8, 8)
    assert not Causal(7).aligned(1, 8) and not Causal(1).aligned(8, 8)
    assert not (Causal() & Sliding(3)).aligned(8, 8)
    chunk = Causal(3).tile(slice(0, 2), slice(0, 5))
    assert chunk.tolist() == [[True] * 4 + [False], [True] * 5]


def test_lengths_make_padding_only_where_there_is_some():
    assert Padding.of(None, 3) is None
    assert Padding.of(torch.tensor([3, 3]), 3) is None
    mask = Padding.of(torch.tensor([3, 1]), 3)
    assert mask is not None
    assert mask.keep.tolist() == [[True, True, True], [True, False, False]]


def test_a_prefix_is_seen_by_all_and_the_rest_is_causal():
    tile = Prefix(2).tile(slice(0, 4), slice(0, 4))
    assert tile.int().tolist() == [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]


def test_windows_have_two_dimensions_too():
    grid = torch.cartesian_prod(torch.arange(4), torch.arange(4))
    tile = Window(2, grid, grid).tile(slice(0, 16), slice(0, 16))
    assert tile.sum(-1).eq(4).all()
    assert tile[0].nonzero().flatten().tolist() == [0, 1, 4, 5]


@pytest.mark.parametrize("shape", [(7,), (5, 7), (2, 3, 5, 7), (3, 1, 7), (2, 1, 1, 7)])
def test_a_boolean_tensor_is_a_mask_like_any_other(shape: tuple[int, ...]):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
    table = torch.rand(shape) < 0.6
    seen = table & Causal(2).tile(slice(0, 5), slice(0, 7))
    expected = attend(q, k, k, mask=seen)
    torch.testing.assert_close(attend(q, k, k, mask=Causal(2) & table), expected)
    torch.testing.assert_close(attend(q, k, k, mask=table & Causal(2)), expected)


@pytest.mark.parametrize(
    "other", [torch.ones(5, 6, dtype=torch.bool), torch.ones(5, 7), [[True]], "causal"]
)
def test_what_is_no_mask_for_these_scores_is_refused_by_name(other):
    x = torch.randn(2, 3, 7, 4)
    with pytest.raises(UsageError, match="mask .*(5, 6|torch.float32|True|causal)"):
        attend(x[:, :, :5], x, x, mask=Causal(2) & other)
