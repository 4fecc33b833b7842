"""The head's product in writing, whose weights are packed once."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrize import register_parametrization

from regard import native
from regard.layers.fast import stack
from regard.layers.fast.stack import packed_bytes
from regard.layers.lora import LowRank
from regard.layers.vocabulary import VocabularyLinear
from regard.models import family, preset
from regard.native import fast
from tests.searching import greedy

pytestmark = pytest.mark.skipif(native.plain() is None, reason="no kernels here")
ROWS = 16


@pytest.fixture(params=[True, False], ids=["bias", "nobias"])
def head(request) -> VocabularyLinear:
    torch.manual_seed(0)
    return VocabularyLinear(23, 37, bias=request.param).eval()


def exact(head: nn.Linear, x):
    bias = None if head.bias is None else head.bias.double()
    return F.linear(x.double(), head.weight.double(), bias).float()


@torch.no_grad()
def written(head: VocabularyLinear, x):
    """Write twice: to pack the weights, and then with what was packed."""
    with fast(head, frozen=True):
        one, other = head.step_logits(x), head.step_logits(x)
        HELD.append(packed_bytes(native.scope(head)))
    assert torch.equal(one, other)
    return other


HELD: list[int] = []  # bytes, at the end of each time


def test_changed_weights_are_seen_at_once_where_they_may_change(head):
    x = torch.randn(ROWS, 23)
    with torch.no_grad():
        with fast(head):
            for _ in range(3):
                torch.testing.assert_close(head.step_logits(x), exact(head, x))
                head.weight.data.copy_(head.weight.data * 2)
                torch.testing.assert_close(head.step_logits(x, head), exact(head, x))
                head.weight.detach().numpy()[3, 4] += 1
                torch.testing.assert_close(head.step_logits(x, head), exact(head, x))
        head.step_logits(x)
        assert native.scope(head) is None


@pytest.mark.parametrize("rows", [0, 1, 2, 11, 12, 13, 16, 25, 100])
def test_any_number_of_rows(head, rows):
    x = torch.randn(rows, 1, 23)
    torch.testing.assert_close(written(head, x), exact(head, x))
    assert (HELD[-1] > 0) == (rows > 0)
    if rows % 4 == 0:
        x = x.view(rows // 4, 4, 23)
        torch.testing.assert_close(written(head, x), exact(head, x))


def test_only_so_many_weights_are_held_twice(head, monkeypatch):
    x = torch.randn(ROWS, 23)
    with monkeypatch.context() as change:
        change.setattr(stack, "MOST_PACKED_BYTES", head.weight.nbytes - 1)
        torch.testing.assert_close(written(head, x), exact(head, x))
        assert HELD[-1] == 0
    written(head, x)
    assert HELD[-1] == head.weight.nbytes


@pytest.mark.parametrize("change", ["in place", "optimiser", "load", "data", "inference"])
def test_changed_weights_are_seen(head, change):
    x = torch.randn(ROWS, 23)
    old = written(head, x)
    if change == "in place":
        with torch.no_grad():
            head.weight.mul_(2)
    elif change == "optimiser":
        head(x).sum().backward()
        torch.optim.AdamW(head.parameters(), lr=0.1).step()
    elif change == "load":
        head.load_state_dict(VocabularyLinear(23, 37, bias=head.bias is not None).state_dict())
    elif change == "data":
        head.weight.data = torch.randn(37, 23)
    else:
        with torch.inference_mode():
            head.weight.add_(1)
    new = written(head, x)
    torch.testing.assert_close(new, exact(head, x))
    assert not torch.allclose(new, old)


def test_what_learns_is_plain(head):
    x = torch.randn(ROWS, 23, requires_grad=True)
    with fast(head, frozen=True):
        head.step_logits(x).sum().backward()
        assert packed_bytes(native.scope(head)) == 0
    assert x.grad is not None and head.weight.grad is not None


@torch.no_grad()
def test_what_lora_adds_counts(head):
    x = torch.randn(ROWS, 23)
    old = written(head, x)
    register_parametrization(head, "weight", LowRank(head.weight, 2, 2.0))
    torch.testing.assert_close(written(head, x), old)
    nn.init.ones_(head.parametrizations.weight[0].up)
    torch.testing.assert_close(written(head, x), exact(head, x))
    assert not torch.allclose(written(head, x), old)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers_stay_what_they_are(head, dtype, request):
    if dtype == torch.bfloat16:
        request.getfixturevalue("bfloat16")
    head.to(dtype)
    x = torch.randn(ROWS, 23, dtype=dtype)
    assert torch.equal(written(head, x), F.linear(x, head.weight, head.bias))


@pytest.mark.usefixtures("bfloat16")
def test_mixed_precision_is_asked_first(head):
    x = torch.randn(ROWS, 23)
    assert written(head, x).dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert written(head, x).dtype == torch.bfloat16


@pytest.mark.parametrize("tie", [True, False])
def test_texts_are_written_that_way_and_are_the_same(tie):
    torch.manual_seed(0)
    config = replace(preset("gpt", "tiny", "llama"), vocab=97, tie=tie)
    model = family("gpt")[1](config).eval()
    ids = torch.randint(3, 90, (ROWS, 4))

    def texts() -> list[list[int]]:
        found = greedy(model, ids, max_length=5, begin=ids[:, -1], eos=-1)
        return [one.ids for (one,) in found]

    plain = texts()
    with fast(model, frozen=True):
        assert texts() == plain
        assert packed_bytes(native.scope(model)) >= model.head.weight.nbytes
