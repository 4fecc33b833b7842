"""A model is a PyTorch module like any other: copied, pickled, quantised, masked, rebuilt."""

import copy
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.attention.attend import attend
from regard.attention.masks import Causal, Padding
from regard.attention.multihead import MultiHead
from regard.errors import UsageError
from regard.layers.block import RESIDUALS, BlockConfig, EncoderBlock, ResidualOrder
from regard.layers.residual import PreNorm
from regard.models import MODELS, family, preset
from tests.models.test_models import (
    FAMILIES,
    GPT,
    KINDS,
    WRITERS,
    ask,
    begin,
    sentences,
    source_and_target,
)


def build(name: str, kind: str) -> nn.Module:
    """Return one small model, its weights enlarged so that differences would show."""
    torch.manual_seed(0)
    model = family(name)[1](FAMILIES[name][kind]).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    return model


@pytest.mark.parametrize(("name", "kind"), KINDS)
@torch.no_grad()
def test_a_copy_says_the_same(name, kind):
    model = build(name, kind)
    texts = sentences(model, [5, 3])
    wanted = ask(model, texts)  # whatever a model keeps is there by now
    for other in (pickle.loads(pickle.dumps(model)), copy.deepcopy(model)):
        assert torch.equal(ask(other, texts), wanted)


@pytest.mark.parametrize("name", sorted(set(MODELS) - set(FAMILIES)))
def test_a_model_that_sees_can_be_pickled(name):
    model = family(name)[1](preset(name, "tiny")).eval()
    other = pickle.loads(pickle.dumps(model))
    images = torch.rand(1, *(getattr(model.config, "channels", 3), 32, 32))
    if name == "series":
        images = torch.rand(1, 32, model.config.channels)
    assert [n for n, _ in other.named_parameters()] == [n for n, _ in model.named_parameters()]
    if name not in ("captioner", "denoiser", "whisper"):
        given = (images, torch.tensor([[2, 3, 4]])) if name == "clip" else (images,)
        with torch.no_grad():
            assert torch.equal(other(*given), model(*given))


def quantised(model: nn.Module) -> nn.Module:
    """Return a model whose matrices are of eight bits, as PyTorch makes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def alike(x: Tensor, y: Tensor) -> float:
    """Return the cosine of two answers."""
    return float(nn.functional.cosine_similarity(x.flatten(), y.flatten(), dim=0))


@pytest.mark.parametrize(("name", "kind"), KINDS)
@torch.no_grad()
def test_a_quantised_model_runs(name, kind):
    model = family(name)[1](FAMILIES[name][kind]).eval()
    texts = sentences(model, [5, 3])
    assert alike(ask(quantised(model), texts), ask(model, texts)) > 0.9


@pytest.mark.parametrize(("name", "kind"), WRITERS)
@torch.no_grad()
def test_a_quantised_model_writes(name, kind):
    model: Any = quantised(family(name)[1](FAMILIES[name][kind]).eval())
    source, target = source_and_target(model, [5, 5])
    lengths = torch.tensor([5, 5])
    with regard.fast(model):
        state = begin(model, source, target[:, :1], lengths, capacity=5)
        said = [model.step(ids, state)[0] for ids in target.split(1, dim=1)]
    assert torch.cat(said, 1).isfinite().all()
    if isinstance(model, GPT) and model.config.prompt == "causal":
        whole = model(torch.cat([source, target], 1))[:, 5:]
        assert alike(torch.cat(said, 1), whole) > 0.99


MASKS = {
    "(q, k)": lambda b, h, q, k: torch.ones(q, k, dtype=torch.bool).tril(),
    "(b, 1, 1, k)": lambda b, h, q, k: torch.arange(k) < torch.tensor([3, 5]).view(b, 1, 1, 1),
    "(b, h, q, k)": lambda b, h, q, k: torch.rand(b, h, q, k) < 0.6,
    "(q, 1)": lambda b, h, q, k: torch.arange(q).view(q, 1) != 2,
}


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("score", ["dot", "additive"])
def test_a_boolean_tensor_is_a_mask(name, score):
    torch.manual_seed(0)
    look, x = MultiHead(16, 4, score=score), torch.randn(2, 6, 16)
    mask = MASKS[name](2, 4, 6, 6)
    q, k, v = (y.transpose(1, 2) for y in look.qkv(x).unflatten(-1, (12, 4)).split(4, 2))
    scores = look.score(q, k).masked_fill(~mask, -torch.inf)
    wanted = scores.softmax(-1).nan_to_num(0.0) @ v
    torch.testing.assert_close(attend(q, k, v, score=look.score, mask=mask), wanted)
    wanted = look.out(wanted.transpose(1, 2).flatten(2))
    torch.testing.assert_close(look(x, mask=mask), wanted)
    block = EncoderBlock(BlockConfig(16, 4, 16, dropout=0.0))
    at = torch.arange(6).unsqueeze(-1)
    seen = block(x, at=at, mask=mask)
    if name == "(q, k)":
        torch.testing.assert_close(seen, block(x, at=at, mask=Causal()))
    if name == "(b, 1, 1, k)":
        torch.testing.assert_close(seen, block(x, at=at, mask=Padding(mask[:, 0, 0])))


def test_leading_axes_of_a_boolean_mask():
    q = torch.randn(2, 3, 4, 5, 8)
    mask = torch.rand(2, 1, 4, 5, 5) < 0.7
    whole = attend(q, q, q, mask=mask)
    for i in range(3):
        part = attend(q[:, i], q[:, i], q[:, i], mask=mask[:, 0])
        torch.testing.assert_close(whole[:, i], part)


@pytest.mark.parametrize(
    ("mask", "told"),
    [
        (torch.zeros(5, 5), "mask is a tensor of torch.float32; expected .* boolean tensor"),
        (torch.ones(5, 5).long(), "torch.int64"),
        (torch.ones(4, 5, dtype=torch.bool), r"a mask \(4, 5\) does not broadcast"),
        ([True] * 5, "mask is \\[True"),
    ],
)
def test_what_is_no_mask_is_refused(mask, told):
    x = torch.randn(1, 2, 5, 8)
    with pytest.raises(UsageError, match=told):
        attend(x, x, x, mask=mask)
    with pytest.raises(UsageError, match=told):
        MultiHead(16, 2)(torch.randn(1, 5, 16), mask=mask)


class Swapped(EncoderBlock):
    """The usual four parts in another order."""

    calls = 0

    def forward(self, x, *, at, mask=None, bias=None, cache=None):
        """Apply the feed-forward network before attention."""
        type(self).calls += 1
        x = self.around_feed_forward(x, self.feed_forward)
        look = lambda x: self.attention(x, at=at, mask=mask, bias=bias, cache=cache)  # noqa: E731
        return self.around_attention(x, look)


def test_an_own_block_is_what_is_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(RESIDUALS, "swapped", ResidualOrder(PreNorm, Swapped))
    monkeypatch.setattr(Swapped, "calls", 0)
    text = tmp_path / "text.txt"
    text.write_text("to be or not to be that is the question\n" * 60)
    keys = {
        "data": str(text),
        "tokenizer": "characters",
        "width": 32,
        "heads": 2,
        "depth": 2,
        "ffn_width": 64,
        "dropout": 0.0,
        "context": 32,
        "batch_tokens": 128,
        "steps": 5,
        "warmup": 1,
        "lr": 0.01,
    }
    scores = {}
    for native in ("1", "0"):
        if native == "0":
            monkeypatch.setattr("regard.native.library", lambda: None)
        out = str(tmp_path / native)
        made = regard.compare("language", order="pre,swapped", out=out, quiet=True, seeds=1, **keys)
        scores[native] = [made.score(v, made.main).mean for v in made.variants]
        assert Swapped.calls > 10
        Swapped.calls = 0
    assert scores["1"] == pytest.approx(scores["0"], rel=1e-4)
    assert scores["1"][0] != pytest.approx(scores["1"][1], rel=1e-3)
