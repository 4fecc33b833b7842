"""The shared layers by their formulas."""

import copy
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.positions import Position, build_position
from regard.errors import UsageError
from regard.layers.block import RESIDUALS, BlockConfig, build_block, build_final_norm
from regard.layers.embed import TokenEmbedding
from regard.layers.feedforward import FEED_FORWARDS
from regard.layers.heads import POOLERS, ClassificationHead
from regard.layers.norm import NORMS, RMSNorm
from regard.native import fast


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, atol=1e-12, rtol=0)


def gauss(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def gauss_tanh(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def swish(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


BENDS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": gauss,
    "gelu_tanh": gauss_tanh,
    "gelu_quick": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "swish": swish,
    "swiglu": swish,
    "geglu": gauss,
    "geglu_tanh": gauss_tanh,
}


@pytest.mark.parametrize("name", FEED_FORWARDS)
def test_a_feed_forward_is_its_formula(name: str):
    torch.manual_seed(0)
    cls, act = FEED_FORWARDS[name]
    network = cls(5, 7, act, True, 0.0).double()
    w = network.state_dict()
    x = numbers(2, 3, 5)
    linear = lambda x, part: x @ w[f"{part}.weight"].T + w[f"{part}.bias"]  # noqa: E731
    gated = name in ("swiglu", "geglu", "geglu_tanh")
    bent = BENDS[name](linear(x, "gate" if gated else "inner"))
    close(network(x), linear(bent * linear(x, "inner") if gated else bent, "outer"))


@pytest.mark.parametrize("order", RESIDUALS)
def test_a_block_is_its_order(order: str):
    torch.manual_seed(0)
    config = BlockConfig(8, 2, 12, dropout=0.0, order=order)
    block, x = build_block(config).double().eval(), numbers(2, 5, 8)
    for parameter in block.parameters():
        nn.init.normal_(parameter)
    at = torch.arange(5).unsqueeze(-1)
    look = lambda x: block.attention(x, at=at)  # noqa: E731
    think = getattr(block, "feed_forward", None)
    norms = [part for part in block.modules() if type(part) in NORMS.values()]
    if order == "parallel":
        (norm,) = norms
        right = x + look(norm(x)) + think(norm(x))
    elif order == "pre":
        y = x + look(norms[0](x))
        right = y + think(norms[1](y))
    elif order == "res_post":
        y = x + norms[0](look(x))
        right = y + norms[1](think(y))
    elif order == "sandwich":
        y = x + norms[1](look(norms[0](x)))
        right = y + norms[3](think(norms[2](y)))
    elif order == "scaled":
        y = x + block.around_attention.scale * look(norms[0](x))
        right = y + block.around_feed_forward.scale * think(norms[1](y))
    elif order == "parallel_norms":
        right = x + look(norms[0](x)) + think(norms[1](x))
    elif order == "attention_only":
        (norm,) = norms
        right = x + look(norm(x))
    else:
        y = norms[0](x + look(x))
        right = norms[1](y + think(y))
    close(block(x, at=at), right)
    assert isinstance(build_final_norm(config), nn.Identity) == (order == "post")
    with pytest.raises(UsageError, match="Did you mean 'parallel'"):
        build_block(replace(config, order="paralel"))


def test_an_embedding_is_the_sum_of_its_parts():
    torch.manual_seed(0)
    ids, types = torch.tensor([[3, 1, 4]]), torch.tensor([[0, 1, 1]])
    at = torch.tensor([[2], [0], [1]])
    position = build_position("learned", 6, 2, 3, max_length=5)
    norm = NORMS["layer"](6)
    embed = TokenEmbedding(7, 10, position, 2.0, 0.0, norm=norm, types=2, inner_width=6).double()
    for parameter in embed.parameters():
        nn.init.normal_(parameter)
    w = embed.state_dict()
    total = 2.0 * w["tokens.weight"][ids] + w["types.weight"][types]
    total = total + w["position.table.weight"][at[:, 0]]
    close(embed(ids, at, types), norm(total) @ w["widen.weight"].T + w["widen.bias"])
    close(embed(ids, at), embed(ids, at, torch.zeros_like(ids)))
    # and nothing of that unless asked for
    assert [name for name, _ in TokenEmbedding(7, 6, Position(), 1.0, 0.0).named_parameters()] == [
        "tokens.weight"
    ]


@pytest.mark.parametrize("kind", POOLERS)
def test_a_label_depends_on_no_padding(kind: str):
    torch.manual_seed(0)
    head, x = ClassificationHead(6, 3, 0.5, kind).double().eval(), numbers(3, 5, 6)
    for parameter in head.parameters():
        nn.init.normal_(parameter)
    lengths = torch.tensor([5, 2, 1])
    logits = head(x, lengths)
    for row, length, found in zip(x, lengths.tolist(), logits, strict=True):
        close(found, head(row[None, :length])[0])
    x[1, 2:], x[2, 1:] = torch.nan, torch.inf
    close(logits, head(x, lengths))


@pytest.mark.parametrize("kind,bend", [("first", torch.tanh), ("deberta", gauss), ("mean", None)])
def test_a_label_is_its_formula(kind: str, bend: Callable[[Tensor], Tensor] | None):
    torch.manual_seed(0)
    head, x = ClassificationHead(6, 3, 0.5, kind).double().eval(), numbers(2, 5, 6)
    w = head.state_dict()
    pooled = x.mean(1)
    if bend is not None:
        pooled = bend(x[:, 0] @ w["pool.dense.weight"].T + w["pool.dense.bias"])
    close(head(x), pooled @ w["out.weight"].T + w["out.bias"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_rms_norm_is_the_same_where_weights_are_laid_out_anew(dtype):
    torch.manual_seed(0)
    norm = RMSNorm(24).to(dtype)
    nn.init.normal_(norm.weight)
    x = torch.randn(3, 5, 24, dtype=dtype)
    x[0, 0], x[0, 1] = 0.0, 1e-4
    with fast(norm, frozen=True), torch.no_grad():
        for norm.eps in (1e-3, 1e-3, 0.5):
            torch.testing.assert_close(norm(x), F.rms_norm(x, (24,), norm.weight, norm.eps))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_rms_norm_is_the_same_with_and_without_gradients(dtype, mode):
    torch.manual_seed(0)
    norm = RMSNorm(24, eps=1e-3).to(dtype)
    x = torch.randn(3, 5, 24, dtype=dtype)
    x[0, 0], x[0, 1] = 0.0, 1e-4
    for _ in range(2):
        with mode():
            for _ in range(2):
                torch.testing.assert_close(norm(x), F.rms_norm(x, (24,), norm.weight, 1e-3))
                torch.testing.assert_close(copy.deepcopy(norm)(x), norm(x))
        with torch.no_grad():
            norm.weight.copy_(torch.rand(24))  # which is seen
    norm(x).sum().backward()
    assert norm.weight.grad is not None and list(norm.state_dict()) == ["weight"]
