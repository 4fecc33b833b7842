"""What autograd can do, it can do where kernels are switched on; what cannot work is refused."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from regard import native
from regard.attention.attend import attend
from regard.attention.masks import Causal, Padding
from regard.attention.multihead import MultiHead
from regard.errors import UsageError
from regard.layers.block import BlockConfig, EncoderBlock
from regard.layers.fast.run import run_blocks
from regard.native import fast
from tests.native.test_kernel_fuzz import KINDS, Letters, build, far, gradients, needs


def to_numpy(x: Tensor) -> np.ndarray:
    """Pack a tensor away."""
    return x.detach().numpy().copy()


PACKS = {
    "numpy": (to_numpy, torch.from_numpy),
    "clone": (lambda x: x.detach().clone(), lambda x: x),
    "columns": (
        lambda x: x.detach().clone(),
        lambda x: x.t().contiguous().t() if x.ndim == 2 else x.clone(),
    ),
    "double": (
        lambda x: x.detach().double() if x.is_floating_point() else x,
        lambda x: x.float() if x.is_floating_point() else x,
    ),
}


@needs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pack", PACKS)
def test_saved_tensors_may_be_packed(pack, kind):
    model = build(kind)
    wanted = gradients(model)
    with fast(model), torch.autograd.graph.saved_tensors_hooks(*PACKS[pack]):
        found = gradients(model)
    assert far(found, wanted) < 1e-5


@needs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pack", PACKS)
def test_a_kernel_reads_what_was_unpacked(pack, kind, monkeypatch):
    """Hooks may also be put on what one function has saved, after the fact."""
    model = build(kind).train()
    wanted = gradients(model)
    with fast(model):
        loss = Letters().loss(model, Letters().batch(0))
    packed = 0
    for node in nodes(loss.grad_fn):
        if "_Blocks" in node.name():
            for raw, saved in zip(node._raw_saved_tensors, node.saved_tensors, strict=True):
                if saved is not None:
                    raw.register_hooks(*PACKS[pack])
                    packed += 1
    assert packed > 15
    loss.backward()
    found = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert far(found, wanted) < 1e-5


def nodes(node) -> set:
    """Return all functions that a gradient goes through."""
    found, todo = set(), [node]
    while todo:
        one = todo.pop()
        if one is not None and one not in found:
            found.add(one)
            todo += [after for after, _ in one.next_functions]
    return found


@needs
def test_memory_that_was_given_back_is_not_read():
    """The parts of a model may go between forward and backward, and a change in place is told."""
    model = build().train()
    wanted = gradients(model)
    with fast(model):
        loss = Letters().loss(model, Letters().batch(0))
    weights = list(model.parameters())
    for module in list(model.modules()):
        module._parameters.clear()
        module._modules.clear()
    del model
    junk = [torch.full((n,), torch.nan) for n in (32, 64, 1024, 2048, 3072)]
    loss.backward()
    assert len(junk) and far([p.grad for p in weights if p.grad is not None], wanted[1:]) < 1e-5
    model = build().train()
    with fast(model):
        loss = Letters().loss(model, Letters().batch(0))
    with torch.no_grad():
        model.blocks[0].attention.qkv.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@needs
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints(reentrant, inside):
    model = build().train()
    wanted = gradients(model)
    again = lambda ids: checkpoint(model, ids, use_reentrant=reentrant)  # noqa: E731
    if reentrant:  # which wants an input with a gradient
        x = torch.ones(1, requires_grad=True)
        again = lambda ids: checkpoint(  # noqa: E731
            lambda ids, x: model(ids) * x, ids, x, use_reentrant=True
        )
    with fast(model):
        loss = Letters().loss(again, Letters().batch(0))
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    found = [loss, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert far(found, wanted) < 1e-5


@needs
def test_transforms_of_functions():
    model = build().train()
    ids = Letters().batch(0)
    weights = {name: p.detach() for name, p in model.named_parameters()}

    def loss(weights: dict[str, Tensor], ids: Tensor) -> Tensor:
        logits = functional_call(model, weights, (ids[:, :-1],))
        return F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())

    wanted = grad(loss)(weights, ids)
    with fast(model):
        found = grad(loss)(weights, ids)
        each = vmap(grad(loss), in_dims=(None, 0))(weights, ids.unsqueeze(1))
        with sdpa_kernel(SDPBackend.MATH):  # PyTorch's other one has no forward derivative
            _, rise = torch.func.jvp(lambda w: loss(w, ids), (weights,), (weights,))
    assert far(list(found.values()), list(wanted.values())) < 1e-5
    mean = [g.mean(0) for g in each.values()]
    assert far(mean, list(wanted.values())) < 1e-4
    along = sum((wanted[name] * weights[name]).sum() for name in wanted)
    assert float(rise) == pytest.approx(float(along), rel=1e-3)


@needs
def test_second_derivatives_are_refused_by_name():
    model = build().train()
    with fast(model):
        loss = Letters().loss(model, Letters().batch(0))
        with pytest.raises(UsageError, match="regard.fast.*REGARD_NATIVE=0"):
            torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    look = nn.Identity()
    q = torch.randn(1, 2, 60, 16, requires_grad=True)
    with fast(look):
        y = attend(q, q, q, mask=Causal(), watch=look)
        with pytest.raises(UsageError, match="regard.fast"):
            torch.autograd.grad(y.sum(), q, create_graph=True)


@needs
def test_modes_and_tracers_see_every_operation():
    from torch.overrides import TorchFunctionMode

    class Seen(TorchFunctionMode):
        names: list[str] = []

        def __torch_function__(self, func, types, args=(), kwargs=None):
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    model = build().train()
    with fast(model), Seen() as mode:
        model(Letters().batch(0))
    assert mode.names.count("linear") > 8
    with fast(model), torch.autocast("cpu", torch.bfloat16):
        assert native.kernels(model) is None
    with fast(model):
        assert native.kernels(model) is not None
        assert native.kernels(nn.Linear(1, 1)) is None  # of another model
    assert native.kernels(model) is None


ODD = {
    "1e4": 1e4,
    "1e18": 1e18,
    "3e38": 3e38,
    "inf": torch.inf,
    "-inf": -torch.inf,
    "nan": torch.nan,
}
FEED_FORWARDS = ["relu", "gelu", "gelu_tanh", "swish", "swiglu", "geglu"]


def pattern(x: Tensor) -> Tensor:
    """Tell where a tensor is not finite, and how."""
    return torch.where(x.isnan(), 2, torch.where(x.isinf(), x.sign(), 0))


@needs
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("feed_forward", FEED_FORWARDS)
def test_what_is_not_finite_stays_so(feed_forward, odd):
    """One number, or a whole row, of the input or of a weight: kernels and PyTorch agree."""
    for norm, looks, whole in itertools.product(("layer", "rms"), (None, Causal()), (False, True)):
        for place in ("x", "qkv", "qkv.bias", "out", "inner", "outer", "norm"):
            torch.manual_seed(0)
            config = BlockConfig(32, 2, 48, 1, None, norm, 1e-5, "pre", feed_forward, dropout=0.0)
            block = EncoderBlock(config)
            x = torch.randn(2, 9, 32)
            parts = {
                "x": x,
                "qkv": block.attention.qkv.weight,
                "qkv.bias": block.attention.qkv.bias,
                "out": block.attention.out.weight,
                "inner": block.feed_forward.inner.weight,
                "outer": block.feed_forward.outer.weight,
                "norm": block.around_attention.norm.weight,
            }
            target = parts[place].data
            if whole:
                target[1] = ODD[odd]
            else:
                target.view(-1)[3] = ODD[odd]
            found = []
            for on in (True, False):
                block.zero_grad()
                leaf = x.clone().requires_grad_()
                with fast(block, on):
                    y = run_blocks([block], leaf, at=torch.arange(9).unsqueeze(-1), mask=looks)
                y.backward(torch.ones_like(y))
                found.append([y.detach(), leaf.grad, *(p.grad for p in block.parameters())])
            where = norm, looks, whole, place
            assert torch.equal(pattern(found[0][0]), pattern(found[1][0])), where
            for one, two in zip(*found, strict=True):
                if odd == "3e38":  # what a sum passes on its way depends on its order
                    continue
                if odd == "1e18":
                    assert bool(one.isfinite().all()) == bool(two.isfinite().all()), where
                else:
                    assert torch.equal(pattern(one), pattern(two)), where


@needs
@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_what_is_not_finite_stays_so_in_writing(kind, odd):
    for place in ("qkv", "out", "inner", "outer"):
        for whole in (False, True):
            model = build(kind).eval()
            block = model.blocks[0]
            linears = {
                "qkv": block.attention.qkv,
                "out": block.attention.out,
                "inner": block.feed_forward.inner,
                "outer": block.feed_forward.outer,
            }
            target = linears[place].weight.data
            if whole:
                target[1] = ODD[odd]
            else:
                target.view(-1)[3] = ODD[odd]
            ids, found = Letters().batch(5), []
            for on in (True, False):
                with fast(model, on):
                    state = model.start(ids[:, :6], torch.tensor([6, 4, 5]), capacity=9)
                    steps = [model.step(ids[:, n : n + 1], state)[0] for n in range(6, 10)]
                found.append(steps)
            for one, two in zip(*found, strict=True):
                assert torch.equal(pattern(one), pattern(two)), (place, whole)


@needs
@torch.inference_mode()
def test_what_is_behind_a_mask_never_matters_in_writing():
    """A NaN in the padding of one prompt stays there."""
    model = build("gpt2").eval()
    ids, lengths = Letters().batch(5), torch.tensor([6, 4, 5])
    with fast(model):
        state = model.start(ids[:, :6], lengths, capacity=9)
        for cache in state.caches:
            cache.k[1, :, 3:5] = torch.nan
            cache.v[1, :, 3:5] = torch.inf
        found = [model.step(ids[:, n : n + 1], state)[0].clone() for n in range(6, 10)]
        state = model.start(ids[:, :6], lengths, capacity=9)
        wanted = [model.step(ids[:, n : n + 1], state)[0].clone() for n in range(6, 10)]
    assert far(found, wanted) < 1e-6


def test_a_mask_that_is_changed_is_seen():
    keep = torch.ones(2, 5, dtype=torch.bool)
    mask, (q, k, v) = Padding(keep), torch.randn(3, 2, 1, 5, 4)
    attend(q, k, v, mask=mask)
    keep[:, 3:] = False
    assert torch.equal(attend(q, k, v, mask=mask), attend(q, k, v, mask=Padding(keep.clone())))


def test_positions_that_are_changed_are_seen():
    torch.manual_seed(0)
    from regard.attention.positions import Position, Rotary

    look = MultiHead(16, 2, position=Rotary(head_width=8))
    x, at = torch.randn(2, 5, 16), torch.arange(5).unsqueeze(-1)
    with torch.inference_mode():
        far_at = at.clone()
        look(x, at=far_at)
        far_at.mul_(3)
        assert torch.equal(look(x, at=far_at), look(x, at=far_at.clone()))
        first = look(x, at=at)
        look.position.base = 50.0
        second = look(x, at=at)
        assert not torch.allclose(first, second)
        fresh = Rotary(head_width=8, base=50.0)
        look.position = fresh
        assert torch.equal(look(x, at=at), second)
        look.position = Position()
        assert not torch.allclose(look(x, at=at), second)


def test_the_numbers_of_a_norm_are_read_anew():
    from regard.layers.norm import RMSNorm

    norm, x = RMSNorm(8), torch.randn(3, 8)
    with torch.inference_mode():
        norm(x)
        norm.weight.data.copy_(torch.arange(8.0))
        assert torch.equal(norm(x), F.rms_norm(x, (8,), norm.weight, norm.eps))


@needs
def test_a_step_of_the_optimiser_is_seen_by_autograd():
    from regard.training.optim import build_optimiser

    model = nn.Linear(4, 4)
    optimiser = build_optimiser(model, lr=1e-2)
    with fast(model):
        for step in range(3):
            loss = model(torch.ones(1, 4)).square().sum()
            loss.backward(retain_graph=True)
            before = model.weight._version
            optimiser.step()
            assert step == 0 or model.weight._version > before
