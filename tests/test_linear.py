"""Linear maps with a few rows, whose weights are laid out once."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization

from regard.attention import linear
from regard.attention.linear import MOST, Linear, held, writing
from regard.decode.search import greedy
from regard.layers.lora import LowRank
from regard.models import family, sized

needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="no MKL here")


@pytest.fixture(params=[True, False], ids=["bias", "nobias"])
def layer(request) -> Linear:
    torch.manual_seed(0)
    return Linear(23, 37, bias=request.param).eval()


def exact(layer: nn.Linear, x, first=0, last=None):
    bias = None if layer.bias is None else layer.bias[first:last].double()
    return F.linear(x.double(), layer.weight[first:last].double(), bias).float()


@torch.no_grad()
def written(layer: nn.Linear, x):
    """Map twice as in writing: to lay the weights out, and then with what was laid out."""
    with writing():
        one, other = layer(x), layer(x)
    assert torch.equal(one, other)
    return other


@pytest.mark.parametrize("rows", [0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 32, 33, MOST, MOST + 1, 200])
@pytest.mark.parametrize("part", [(0, None), (0, 20), (11, None), (3, 30)])
@torch.no_grad()
def test_any_number_of_rows_and_any_part(layer, rows, part):
    x = torch.randn(rows, 23)
    with writing():
        for _ in range(2):
            torch.testing.assert_close(layer.part(x, *part), exact(layer, x, *part))
    if part == (0, None):
        found = written(layer, x.view(rows, 1, 23))
        torch.testing.assert_close(found, exact(layer, x).view(rows, 1, 37))


@needs_mkl
@torch.no_grad()
def test_weights_are_laid_out_in_writing_and_forgotten_with_the_layer(layer):
    before, x = held(), torch.randn(2, 3, 23)
    layer(x)
    assert held() == before
    written(layer, x)
    now = held()
    assert now == before + layer.weight.nbytes
    for rows in (1, 2, 5, 20, MOST + 1):
        written(layer, torch.randn(rows, 23))
    copied = copy.deepcopy(layer)
    assert held() == now and copied.state_dict().keys() == layer.state_dict().keys()
    nn.init.zeros_(copied.weight)
    assert torch.equal(written(copied, x), exact(copied, x))
    assert held() == now + layer.weight.nbytes
    del copied
    assert held() == now


@pytest.mark.parametrize("change", ["in place", "optimiser", "load", "data", "inference"])
def test_changed_weights_are_seen(layer, change):
    x = torch.randn(16, 23)
    old = written(layer, x)
    if change == "in place":
        with torch.no_grad():
            layer.weight.mul_(2)
    elif change == "optimiser":
        layer(x).sum().backward()
        torch.optim.AdamW(layer.parameters(), lr=0.1).step()
    elif change == "load":
        layer.load_state_dict(Linear(23, 37, bias=layer.bias is not None).state_dict())
    elif change == "data":
        layer.weight.data = torch.randn(37, 23)
    else:
        with torch.inference_mode():
            layer.weight.add_(1)
    new = written(layer, x)
    torch.testing.assert_close(new, exact(layer, x))
    assert not torch.allclose(new, old)


def test_what_learns_is_plain(layer):
    x, before = torch.randn(16, 23, requires_grad=True), held()
    with writing():
        y = layer(x)
    y.sum().backward()
    assert x.grad is not None and layer.weight.grad is not None and held() == before


@torch.no_grad()
def test_what_lora_adds_counts(layer):
    x = torch.randn(16, 23)
    old = written(layer, x)
    register_parametrization(layer, "weight", LowRank(layer.weight, 2, 2.0))
    torch.testing.assert_close(written(layer, x), old)
    nn.init.ones_(layer.parametrizations.weight[0].up)  # type: ignore[union-attr]
    torch.testing.assert_close(written(layer, x), exact(layer, x))
    assert not torch.allclose(written(layer, x), old)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers_stay_what_they_are(layer, dtype):
    layer.to(dtype)
    x = torch.randn(16, 23, dtype=dtype)
    assert torch.equal(written(layer, x), F.linear(x, layer.weight, layer.bias))


def test_mixed_precision_is_asked_first(layer):
    x = torch.randn(16, 23)
    assert written(layer, x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert written(layer, x).dtype == torch.bfloat16


@needs_mkl
def test_only_so_much_is_held_twice(layer, monkeypatch):
    monkeypatch.setattr(linear, "MOST_BYTES", held() + layer.weight.nbytes - 1)
    x, before = torch.randn(16, 23), held()
    torch.testing.assert_close(written(layer, x), exact(layer, x))
    assert held() == before


@needs_mkl
def test_one_row_of_large_weights_has_a_layout_of_its_own(layer, monkeypatch):
    monkeypatch.setattr(linear, "LARGE", layer.weight.numel())
    x, before = torch.randn(1, 1, 23), held()
    torch.testing.assert_close(written(layer, x), exact(layer, x))
    assert held() > before


@needs_mkl
def test_texts_are_written_that_way():
    torch.manual_seed(0)
    model = family("gpt")[1](sized("gpt", "tiny", "llama")).eval()
    before, ids = held(), torch.randint(3, 90, (5, 4))
    greedy(model, ids, max_length=3, begin=ids[:, -1], eos=-1)
    blocks = sum(p.nbytes for p in model.blocks.parameters() if p.ndim == 2)
    assert held() - before == blocks + model.head.weight.nbytes
