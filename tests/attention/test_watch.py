"""Watching: exact weights of any layer, head and row, and not a bit of the output changed."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from regard.attention.attend import attend
from regard.attention.masks import Causal, Document, Mask, Padding, Prefix, Sliding, Window
from regard.attention.multihead import Cache, MultiHead, RowSelect
from regard.attention.normalisers import Sample
from regard.attention.scores import SCORES
from regard.attention.watch import watch
from regard.errors import UsageError


class Looker(nn.Module):
    """A layer that does nothing but attend, so that its output is weights times values."""

    def __init__(self, score: str = "dot", **settings):
        super().__init__()
        self.score = SCORES[score](4)
        self.settings = settings

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, score=self.score, watch=self, **self.settings)


def check(looker: Looker, q: Tensor, k: Tensor, v: Tensor) -> None:
    v = v / v.abs().max()  # so that 1e-6 means something
    plain = looker(q, k, v)
    with watch(nn.ModuleDict({"layer": looker})) as maps:
        watched = looker(q, k, v)
    assert torch.equal(plain, watched)
    weights = maps["layer"].weights()
    assert weights.shape == maps["layer"].shape == (*q.shape[:-1], k.shape[-2])
    values = v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)
    torch.testing.assert_close(weights @ values, watched, atol=1e-6, rtol=0)
    # and any part of them is a part of them
    some = maps["layer"].weights(batch=1, heads=[3, 0], rows=slice(2, 5))
    torch.testing.assert_close(some, weights[1:2, [3, 0], 2:5], atol=1e-6, rtol=0)


MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "padding": Padding.of(torch.tensor([8, 3]), 8),
    "blind rows": Padding.of(torch.tensor([8, 0]), 8),
    "window": Window(3),
    "sliding": Causal() & Sliding(2),
    "prefix": Prefix(torch.tensor([2, 5])),
    "document": Document(torch.tensor([[0] * 8, [0] * 4 + [1] * 4])),
}
BIASES = {
    "none": None,
    "keys": (8,),
    "heads": (4, 8, 8),
    "all": (2, 4, 8, 8),
    "batch": (2, 1, 1, 8),
}


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_watched_weights_times_values_are_the_output(score: str, mask: str, kv_heads: int):
    torch.manual_seed(0)
    inputs = (torch.randn(2, h, 8, 4) for h in (4, kv_heads, kv_heads))
    looker = Looker(score, mask=MASKS[mask])
    with torch.no_grad():
        check(looker, *inputs)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("normalise", ["softmax", "argmax", "given"])
def test_so_they_are_with_bias_and_other_normalisers(bias: str, normalise: str):
    torch.manual_seed(0)
    shape = BIASES[bias]
    how = torch.rand(2, 4, 8, 8) if normalise == "given" else normalise
    looker = Looker(
        bias=None if shape is None else torch.randn(shape), normalise=how, mask=Causal()
    )
    check(looker, *(torch.randn(2, h, 8, 4) for h in (4, 2, 2)))


def test_a_draw_is_watched_as_it_was_drawn():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 8, 4) for h in (4, 2, 2))
    looker, plain = Looker(normalise=Sample(), mask=Causal()), Looker(normalise=Sample())
    with watch(nn.ModuleDict({"layer": looker})) as maps:
        torch.manual_seed(1)
        watched = looker(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(watched, looker(q, k, v))
    weights = maps["layer"].weights()
    assert weights.sum(-1).eq(1).all() and weights.amax(-1).eq(1).all()
    assert torch.equal(weights @ v.repeat_interleave(2, dim=1), watched)
    assert not torch.equal(plain(q, k, v), watched)


def test_layers_are_named_and_dropout_is_not_watched():
    torch.manual_seed(0)
    model = nn.ModuleDict({"one": MultiHead(8, 2, dropout=0.5), "two": MultiHead(8, 2)})
    x = torch.randn(2, 5, 8)
    torch.manual_seed(1)
    plain = model["two"](model["one"](x))
    torch.manual_seed(1)
    with watch(model) as maps:
        watched = model["two"](model["one"](x))
        model["two"](x)
    model["one"](x)  # nobody is watching any more
    assert torch.equal(plain, watched)
    assert maps.names() == ["one", "two"] and len(maps.calls("one")) == 1
    assert len(maps.calls("two")) == 2
    torch.testing.assert_close(maps["one"].weights().sum(-1), torch.ones(2, 2, 5))
    with pytest.raises(UsageError, match="Did you mean 'two'"):
        maps["twoo"]
    with pytest.raises(UsageError, match="head 2 is not there"):
        maps["one"].weights(heads=2)


def test_a_layer_that_stands_in_several_places_has_all_their_names():
    torch.manual_seed(0)
    shared, own = MultiHead(8, 2), MultiHead(8, 2)
    model = nn.ModuleDict({"blocks": nn.ModuleList([shared, own, shared, shared])})
    x = torch.randn(1, 5, 8)
    with watch(model) as maps:
        for _ in range(2):
            y = x
            inputs = []
            for block in model["blocks"]:
                inputs.append(y)
                y = block(y)
    assert maps.names() == [f"blocks.{n}" for n in range(4)]
    assert all(len(maps.calls(name)) == 2 for name in maps)
    for n in (0, 2, 3):  # each place has its own map, and it is that of its own input
        with watch(shared) as alone:
            shared(inputs[n])
        for call in maps.calls(f"blocks.{n}"):
            assert torch.equal(call.weights(), alone[""].weights())
            assert call.name == f"blocks.{n}"


def test_what_is_added_to_values_is_watched_as_if_it_were_not():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, 8, 4) for h in (4, 2, 2))
    more = torch.randn(8, 4)
    looker = Looker(mask=Causal(), add_values=lambda weights: weights @ more)
    plain = looker(q, k, v)
    with watch(nn.ModuleDict({"layer": looker})) as maps:
        assert torch.equal(looker(q, k, v), plain)
    weights = maps["layer"].weights()
    values = v.repeat_interleave(2, dim=1) + more
    torch.testing.assert_close(weights @ values, plain, atol=1e-6, rtol=0)


def test_indices_pick_as_they_do_in_a_tensor():
    torch.manual_seed(0)
    layer = MultiHead(8, 2)
    with watch(nn.ModuleDict({"layer": layer})) as maps:
        layer(torch.randn(2, 5, 8))
    found, weights = maps["layer"], maps["layer"].weights()
    for place in (0, (1, 0), (0, 1, 3), (-1, -1, -1), (0, 1, 3, 2), (slice(None), 1, slice(1, 3))):
        torch.testing.assert_close(found[place], weights[place])


def test_maps_of_cached_steps_stay_right_when_sentences_leave():
    torch.manual_seed(0)
    layer, x = MultiHead(8, 2), torch.randn(3, 4, 8)
    with watch(nn.ModuleDict({"layer": layer})) as maps, torch.no_grad():
        layer(x, mask=Causal())
        cache = Cache(3, 2, 8, 4, x)
        layer(x[:, :3], mask=Causal(), cache=cache)
        layer(x[:, 3:], cache=cache)
        cache.keep(RowSelect(torch.tensor([2, 0])))  # in place
    full, first, second = (one.weights() for one in maps.calls("layer"))
    torch.testing.assert_close(first, full[:, :, :3, :3])
    torch.testing.assert_close(second, full[:, :, 3:])


class Taken(TorchDispatchMode):
    """Adds up the memory of all that operations make, as if none were given back."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if _is(x)}
        for x in tree_leaves(out):
            if _is(x) and x.untyped_storage().data_ptr() not in known:
                self.bytes += x.untyped_storage().nbytes()
        return out


def _is(x: object) -> bool:
    return isinstance(x, Tensor)


@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Padding(torch.ones(1, 8192).bool())])
def test_one_row_of_one_head_at_8192_takes_little(mask: Mask | None):
    q, k, v = torch.randn(3, 1, 8, 8192, 64).unbind()
    looker = Looker(mask=mask)
    looker.score = SCORES["dot"](64)
    with watch(nn.ModuleDict({"layer": looker})) as maps, torch.no_grad(), Taken() as taken:
        # the attention itself is another test's matter, and slow
        looker(q[:, :, -64:], k, v)
        before = taken.bytes
        row = maps["layer"].weights(heads=5, rows=-1)
    assert row.shape == (1, 1, 1, 8192)
    assert taken.bytes - before < 10e6 and taken.bytes < 100e6
