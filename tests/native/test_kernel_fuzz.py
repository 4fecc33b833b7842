"""Whatever somebody does to a model, kernels change nothing of what it computes.

Each change is made to two equal models: one runs where kernels are switched on, as the training
loop and the runners do, the other in plain PyTorch. It is made after kernels have taken the model.
"""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from regard import native
from regard.attention import kernels as attention_kernels
from regard.attention.kernels import KERNELS
from regard.attention.masks import Causal
from regard.attention.multihead import MultiHead
from regard.attention.positions import Position, Rotary
from regard.attention.scores import Cosine, Dot
from regard.data.characters import Characters
from regard.layers import feedforward, lora
from regard.layers.block import RESIDUALS, BlockConfig, EncoderBlock
from regard.layers.fast import kernels as block_kernels
from regard.layers.feedforward import FeedForward, GatedFeedForward
from regard.layers.norm import LayerNorm, RMSNorm
from regard.layers.residual import PostNorm, PreNorm
from regard.layers.vocabulary import VocabularyLinear
from regard.models import gpt
from regard.models.gpt import GPT, GPTConfig
from regard.native import build, fast
from regard.tasks.text.language import LANGUAGE
from regard.tasks.text.language_modelling import LanguageCodec
from regard.training.fit import Fit
from regard.training.plan import Plan
from regard.training.step import LoopSettings, Trainable

needs = pytest.mark.skipif(bool(build.unavailable()), reason=build.unavailable())
LETTERS = Characters("abcdefghijklmnopqrstuvwxyz ")
KINDS = {
    "llama": {"norm": "rms", "feed_forward": "swiglu", "bias": False, "position": "rotary"},
    "gpt2": {"norm": "layer", "feed_forward": "gelu", "bias": True, "position": "learned"},
}


def build(kind: str = "llama", order: str = "pre") -> GPT:
    """Make a small model that is sure of itself."""
    torch.manual_seed(2)
    inside = dict(KINDS[kind])
    position = inside.pop("position")
    block = BlockConfig(32, 4, 64, dropout=0.0, order=order, **inside)
    model = GPT(GPTConfig(LETTERS.vocab, 2, block, position=position, max_length=64))
    for p in model.parameters():
        nn.init.normal_(p, mean=float(p.ndim < 2), std=0.3)
    return model


# Where a change is made: in the last block, so that all before it is seen as well
PLACES: dict[str, Callable[[GPT], nn.Module]] = {
    "block": lambda m: m.blocks[1],
    "attention": lambda m: m.blocks[1].attention,
    "qkv": lambda m: m.blocks[1].attention.qkv,
    "out": lambda m: m.blocks[1].attention.out,
    "feed_forward": lambda m: m.blocks[1].feed_forward,
    "inner": lambda m: m.blocks[1].feed_forward.inner,
    "outer": lambda m: m.blocks[1].feed_forward.outer,
    "around": lambda m: m.blocks[1].around_attention,
    "norm": lambda m: m.blocks[1].around_feed_forward.norm,
    "last_norm": lambda m: m.norm,
    "head": lambda m: m.head,
    "embed": lambda m: m.embed,
}


def scaled(x: Any, by: float = 1.1) -> Any:
    """Change what came out of a module, or what goes into one."""
    if isinstance(x, tuple):
        return tuple(y if y is None else y * by for y in x[:1]) + x[1:]
    return x * by


def before(module: nn.Module, x: tuple) -> Any:
    """Change what goes into a module, if it is made of fractions."""
    return scaled(x) if x[0].is_floating_point() else None


def own_forward(module: nn.Module) -> None:
    """Give an instance a forward of its own."""
    old = module.forward
    module.forward = lambda *x, **more: old(*x, **more) * 1.1


def compiled(module: nn.Module) -> None:
    """Let a module run what torch.compile would have made of it."""
    old = module.forward
    module._compiled_call_impl = lambda *x, **more: old(*x, **more) * 1.1


def other_class(module: nn.Module) -> None:
    """Make a module one of a subclass that computes something else."""
    kind = type(module)
    forward = lambda self, *x, **more: kind.forward(self, *x, **more) * 1.1  # noqa: E731
    module.__class__ = type(f"My{kind.__name__}", (kind,), {"forward": forward})


HOW: dict[str, Callable[[nn.Module], Any]] = {
    "forward hook": lambda m: m.register_forward_hook(lambda _, x, y: scaled(y)),
    "kwargs hook": lambda m: m.register_forward_hook(
        lambda _, x, more, y: scaled(y), with_kwargs=True
    ),
    "pre-hook": lambda m: m.register_forward_pre_hook(before),
    "backward hook": lambda m: m.register_full_backward_hook(lambda _, x, y: scaled(x)),
    "backward pre-hook": lambda m: m.register_full_backward_pre_hook(lambda _, y: scaled(y)),
    "own forward": own_forward,
    "compiled": compiled,
    "subclass": other_class,
}


class LoRA(nn.Module):
    """A hand-made low-rank addition around a matrix, as peft makes them."""

    def __init__(self, inner: nn.Linear):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.inner = inner
        sizes = (2, inner.in_features), (inner.out_features, 2)
        self.down, self.up = (
            nn.Parameter(torch.randn(size, generator=generator) * 0.2) for size in sizes
        )

    def forward(self, x: Tensor) -> Tensor:
        """Add a low-rank product."""
        return self.inner(x) + x @ self.down.T @ self.up.T


class Noisy(nn.Linear):
    """A matrix of another kind."""

    def forward(self, x: Tensor) -> Tensor:
        """Bend what comes out."""
        return super().forward(x).tanh()


class Swapped(EncoderBlock):
    """The usual parts in another order."""

    def forward(self, x, *, at, mask=None, bias=None, cache=None):
        """Think, then look around."""
        x = self.around_feed_forward(x, self.feed_forward)
        look = lambda x: self.attention(x, at=at, mask=mask, bias=bias, cache=cache)  # noqa: E731
        return self.around_attention(x, look)


class Own(nn.Parameter):
    """A parameter that computes in a way of its own."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        """Double what linear maps give."""
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * 2 if func is F.linear else out


class Twice(nn.Module):
    """A parametrization."""

    def forward(self, x: Tensor) -> Tensor:
        """Return 1.1 x."""
        return 1.1 * x


class Shifted(Rotary):
    """Positions of another kind."""

    def rotate(self, x: Tensor, at: Tensor) -> Tensor:
        """Count twice as fast."""
        return super().rotate(x, at * 2)


def replace(place: str, name: str, make: Callable[[Any], Any]) -> Callable[[GPT], None]:
    """Return what puts something else in the place of a part."""

    def change(model: GPT) -> None:
        owner = PLACES[place](model)
        setattr(owner, name, make(getattr(owner, name)))

    return change


def as_class(kind: type, old: nn.Linear) -> nn.Linear:
    """Return a matrix of another class with the same weights."""
    new = kind(old.in_features, old.out_features, bias=old.bias is not None)
    new.load_state_dict(old.state_dict())
    return new


def edit(place: str, change: Callable[[Tensor], Any], name: str = "weight") -> Callable:
    """Return what changes a parameter."""
    return lambda model: change(getattr(PLACES[place](model), name))


def no_grad(change: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return a change of numbers in place, which autograd does not see."""
    return torch.no_grad()(change)


def set_data(p: Any) -> None:
    """Give a parameter other memory."""
    p.data = p.data * 1.2


def turned(p: Any) -> None:
    """Lay a parameter by columns."""
    p.data = p.data.t().contiguous().t()


def doubled(model: GPT) -> None:
    """Let one matrix be of another precision, and what is around it fit that."""
    outer = PLACES["outer"](model).double()
    outer.register_forward_pre_hook(lambda _, x: (x[0].double(),))
    outer.register_forward_hook(lambda _, x, y: y.float())


def _grown(p: Tensor) -> None:
    """Let a gradient grow once it is there."""
    p.grad.mul_(1.1)


def frozen(model: GPT) -> None:
    """Let some parameters learn nothing."""
    PLACES["qkv"](model).weight.requires_grad_(False)


def buffered(model: GPT) -> None:
    """Let a weight be a buffer."""
    outer = PLACES["outer"](model)
    weight = outer._parameters.pop("weight").detach() * 1.1
    outer.register_buffer("weight", weight)


CHANGES: dict[str, Callable[[GPT], Any]] = {
    **{
        f"{how} of {place}": lambda m, how=how, place=place: HOW[how](PLACES[place](m))
        for how in HOW
        for place in PLACES
    },
    "nothing": lambda m: None,
    # other matrices
    "LoRA by hand": replace("attention", "qkv", LoRA),
    "LoRA around the feed-forward network": replace("feed_forward", "outer", LoRA),
    "LoRA of ours": lambda m: (
        lora.adapt(m, "*.qkv", 2, 8.0),
        [nn.init.normal_(p, std=0.1) for p in lora.adapters(m)],
    ),
    "subclass of nn.Linear": replace("attention", "out", lambda old: as_class(Noisy, old)),
    "subclass that changes nothing": replace(
        "attention", "out", lambda old: as_class(type("Same", (nn.Linear,), {}), old)
    ),
    "a function for a matrix": replace(
        "attention", "out", lambda old: nn.Sequential(old, nn.Tanh())
    ),
    "parametrization": lambda m: parametrize.register_parametrization(
        PLACES["qkv"](m), "weight", Twice()
    ),
    "parametrized norm": lambda m: parametrize.register_parametrization(
        PLACES["norm"](m), "weight", Twice()
    ),
    "weight norm": lambda m: parametrizations.weight_norm(PLACES["inner"](m)),
    "old weight norm": lambda m: nn.utils.weight_norm(PLACES["inner"](m)),
    "spectral norm": lambda m: parametrizations.spectral_norm(PLACES["inner"](m)),
    # parameters
    "p.data.copy_": edit("qkv", lambda p: p.data.copy_(p.data * 1.2)),
    "p.data of a norm": edit("norm", lambda p: p.data.mul_(1.5)),
    "p.data of the last norm": edit("last_norm", lambda p: p.data.mul_(1.5)),
    "p.data of the head": edit("head", lambda p: p.data.mul_(1.5)),
    "p.data = x": edit("outer", set_data),
    "p.data laid by columns": edit("inner", turned),
    "no_grad mul_": edit("outer", no_grad(lambda p: p.mul_(1.3))),
    "numpy": edit("outer", lambda p: p.detach().numpy().__imul__(1.3)),
    "new Parameter": replace("qkv", "weight", lambda p: nn.Parameter(p.detach() * 1.2)),
    "tensor subclass": replace("outer", "weight", lambda p: Own(p.detach().clone())),
    "tied matrices": lambda m: setattr(
        m.blocks[1].attention.qkv, "weight", m.blocks[0].attention.qkv.weight
    ),
    "tied blocks": lambda m: m.blocks.__setitem__(1, m.blocks[0]),
    "load_state_dict(assign=True)": lambda m: m.load_state_dict(
        {name: p.detach() * 1.1 for name, p in m.state_dict().items()}, assign=True
    ),
    "one part in double": doubled,
    "some parameters frozen": frozen,
    "weight as a buffer": buffered,
    "gradient hook of a parameter": edit("qkv", lambda p: p.register_hook(lambda g: g * 1.1)),
    "post-accumulate hook": edit("qkv", lambda p: p.register_post_accumulate_grad_hook(_grown)),
    # parts
    "another activation": replace("feed_forward", "act", lambda old: torch.tanh),
    "another known activation": replace("feed_forward", "act", lambda old: F.relu),
    "an activation like a known one": replace(
        "feed_forward", "act", lambda old: lambda x: F.relu(x) ** 2
    ),
    "another eps": replace("norm", "eps", lambda old: 0.5),
    "another eps of the last norm": replace("last_norm", "eps", lambda old: 0.5),
    "norm of PyTorch": lambda m: setattr(m.blocks[1].around_attention, "norm", nn.LayerNorm(32)),
    "norm of another kind": lambda m: setattr(m.blocks[1].around_attention, "norm", LayerNorm(32)),
    "another residual": lambda m: setattr(
        m.blocks[1], "around_attention", PostNorm(m.blocks[1].around_attention.norm, 0.0)
    ),
    "another position": replace("attention", "position", lambda old: Shifted(head_width=8)),
    "no position": replace("attention", "position", lambda old: Position()),
    "rotary position instead": replace("attention", "position", lambda old: Rotary(head_width=8)),
    "own rotate": lambda m: setattr(
        m.blocks[1].attention.position, "rotate", lambda x, at: x * 1.2
    ),
    "another scale": replace("attention", "score", lambda old: Dot(0.7)),
    "a scale set later": lambda m: setattr(m.blocks[1].attention.score, "scale", 0.7),
    "own score": lambda m: setattr(
        m.blocks[1].attention.score, "prepare", lambda q, k: Dot(0.9).prepare(q, k)
    ),
    "another score": replace("attention", "score", lambda old: Cosine()),
    "more heads": lambda m: [
        vars(m.blocks[1].attention).update(heads=8, kv_heads=8, head_width=4),
    ],
    "another block": lambda m: m.blocks.__setitem__(
        1, Swapped(m.config.block, m.blocks[1].attention.position)
    ),
    "a block less": lambda m: m.blocks.__delitem__(1),
    "a block more": lambda m: m.blocks.append(copy.deepcopy(m.blocks[0])),
    "blocks change places": lambda m: setattr(m, "blocks", nn.ModuleList(reversed(m.blocks))),
    "own projection": lambda m: setattr(
        m.blocks[1].attention, "_split", lambda x, h: MultiHead._split(m.blocks[1].attention, x, h)
    ),
    "another base of rotary positions": lambda m: setattr(
        m.blocks[1].attention.position, "base", 50.0
    ),
    "a gated feed-forward network": lambda m: setattr(
        m.blocks[1], "feed_forward", GatedFeedForward(32, 48, F.silu, True, 0.0)
    ),
    "a wider feed-forward network": lambda m: setattr(
        m.blocks[1], "feed_forward", FeedForward(32, 80, F.gelu, True, 0.0)
    ),
}

# Changes of classes and functions, and of all modules at once: undone afterwards
GLOBAL: dict[str, Callable[[Any], Any]] = {
    **{
        f"{kind.__name__}.{name} replaced": lambda patch, kind=kind, name=name: patch.setattr(
            kind, name, _more(kind, name)
        )
        for kind, name in [
            (EncoderBlock, "forward"),
            (MultiHead, "forward"),
            (MultiHead, "_split"),
            (GatedFeedForward, "forward"),
            (FeedForward, "forward"),
            (PreNorm, "forward"),
            (RMSNorm, "forward"),
            (nn.LayerNorm, "forward"),
            (nn.Linear, "forward"),
            (Rotary, "rotate"),
            (nn.Module, "_call_impl"),
        ]
    },
    "a kernel of attention replaced": lambda patch: patch.setitem(KERNELS, "fused", _halved),
    "a kernel of attention added": lambda patch: patch.setattr(
        attention_kernels, "KERNELS", {"mine": _halved, **KERNELS}
    ),
    "F.linear replaced": lambda patch: patch.setattr(F, "linear", _more(F, "linear")),
    "F.rms_norm replaced": lambda patch: patch.setattr(F, "rms_norm", _more(F, "rms_norm")),
    "F.layer_norm replaced": lambda patch: patch.setattr(F, "layer_norm", _more(F, "layer_norm")),
    "global forward hook": lambda patch: nn.modules.module.register_module_forward_hook(
        lambda m, x, y: y * 1.1 if type(m) is nn.Linear else None
    ),
    "global pre-hook": lambda patch: nn.modules.module.register_module_forward_pre_hook(
        lambda m, x: (x[0] * 1.1, *x[1:]) if type(m) is nn.Linear else None
    ),
    "global backward hook": lambda patch: nn.modules.module.register_module_full_backward_hook(
        lambda m, x, y: scaled(x) if type(m) is nn.Linear and x[0] is not None else None
    ),
}


def _halved(problem: attention_kernels.Problem) -> tuple[Tensor, None]:
    """Attend with all weights in memory, and return half of the average."""
    return KERNELS["plain"](problem)[0] / 2, None  # pyright: ignore


def _more(owner: Any, name: str) -> Callable:
    """Return what gives a little more than a function did."""
    old = getattr(owner, name)
    return lambda *x, **more: old(*x, **more) * 1.05


class Letters(Trainable):
    """A task of the loop's: random letters."""

    def batch(self, n: int) -> Tensor:
        """Return letters that depend on n alone."""
        return torch.randint(4, LETTERS.vocab, (3, 17), generator=torch.Generator().manual_seed(n))

    def count(self, batch: Tensor) -> tuple[int, int]:
        """Count the letters to be guessed."""
        return 48, 48

    def loss(self, model: Any, batch: Tensor) -> Tensor:
        """Return the loss of guessing the next letter."""
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")

    def evaluate(self, model: Any) -> dict[str, float]:
        """Judge nothing."""
        return {"better": 0.0}


def gradients(model: GPT) -> list[Tensor]:
    """Return the loss of a batch and all gradients."""
    model.zero_grad()
    loss = Letters().loss(model.train(), Letters().batch(0))
    loss.backward()
    found = [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    return found


@torch.no_grad()
def logits(model: GPT) -> list[Tensor]:
    """Return what a model says after each letter that it reads by itself."""
    ids = Letters().batch(5)
    state = model.eval().start(ids[:, :6], torch.tensor([6, 4, 5]), capacity=9)
    return [model.step(ids[:, n : n + 1], state)[0].clone() for n in range(6, 12)]


def text(model: GPT) -> list[str]:
    """Write as `regard run` does."""
    runner = LANGUAGE.bind(model.eval(), LanguageCodec(LETTERS), {})
    return [one.completion for one in runner.run(["ab", "of all "], temperature=0, max_length=9)]


def trained(model: GPT, folder: Path) -> list[Tensor]:
    """Train as `regard train` does.

    What keys are shifted by makes no difference, so that its gradient is nothing but noise, which
    AdamW blows up: it is left out.
    """
    settings = LoopSettings(steps=3, lr=1e-3, warmup=1)
    how = {"plans": [Plan(3, 1, 3)], "publish": lambda *_: None, "quiet": True}
    Fit(model.train(), Letters(), settings, folder, **how).run()
    named = {name: p.detach() for name, p in model.named_parameters()}
    shifts = {
        name: p.chunk(3)[::2]
        for name, p in named.items()
        if "qkv" in name and name.endswith("bias")
    }
    return [torch.cat(shifts[name]) if name in shifts else p for name, p in named.items()]


def far(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the largest difference as a share of what is compared."""
    assert len(some) == len(others)
    pairs = [(x.detach().double(), y.detach().double()) for x, y in zip(some, others, strict=True)]
    assert all(x.isfinite().all() and y.isfinite().all() for x, y in pairs)
    return max(float((x - y).norm() / y.norm().clamp_min(1e-4)) for x, y in pairs)


def life(kind: str, change: Callable[[GPT], Any], folder: Path) -> dict[str, Any]:
    """Do with a model all that is done with models, while something is done to it."""
    model = build(kind)
    with fast(model):  # kernels have taken it when it is changed
        gradients(model), logits(model)
        torch.manual_seed(4)
        change(model)
        found = {"gradients": gradients(model), "logits": logits(model)}
    with fast(model, frozen=True):
        found["logits while frozen"] = logits(model)
    found["library gradients"], found["library logits"] = gradients(model), logits(model)
    found["text"] = text(model)
    found["weights"] = trained(model, folder)
    return found


def check(change: Callable[[GPT], Any], kind: str, folder: Path) -> None:
    """Compare the lives of two models to which the same was done, one of them without kernels."""
    found = life(kind, change, folder / "fast")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("library", "plain"):
            patch.setattr(native, name, lambda: None)  # as REGARD_NATIVE=0 does
        wanted = life(kind, change, folder / "plain")
    assert found.pop("text") == wanted.pop("text")
    for name, tensors in found.items():
        assert far(tensors, wanted[name]) < 1e-5, name


# a change that makes no sense of the other kind
ONLY = {"another base of rotary positions": "llama"}


@needs
@pytest.mark.parametrize("name", CHANGES)
def test_what_was_changed_is_what_runs(name, tmp_path):
    kinds = [ONLY[name]] if name in ONLY else list(KINDS)
    kind = kinds[sum(map(ord, name)) % len(kinds)]
    check(CHANGES[name], kind, tmp_path)


@needs
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", GLOBAL)
def test_what_was_changed_for_all_is_what_runs(name, kind, tmp_path):
    with contextlib.ExitStack() as undo:

        def change(model: GPT) -> None:
            patch = undo.enter_context(pytest.MonkeyPatch.context())
            handle = GLOBAL[name](patch)
            if handle is not None:
                undo.callback(handle.remove)

        def once(model: GPT) -> None:
            undo.close()
            change(model)

        check(once, kind, tmp_path)


REPLACED = {
    "F.linear": (F, "linear"),
    "Linear": (nn.Linear, "forward"),
    "Head": (VocabularyLinear, "forward"),
}


@needs
@pytest.mark.parametrize("name", REPLACED)
def test_a_function_replaced_while_a_text_is_written_is_what_runs(name, monkeypatch):
    """In models as they are loaded, whose matrices are laid by columns."""
    model, ids = build("gpt2").eval(), Letters().batch(5)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            part.weight = nn.Parameter(part.weight.detach().t().contiguous().t())
    logits = []
    for on in (True, False):
        with torch.no_grad(), fast(model, on, frozen=True), monkeypatch.context() as patch:
            state = model.start(ids[:, :6], capacity=9)
            model.step(ids[:, 6:7], state)
            patch.setattr(*REPLACED[name], _more(*REPLACED[name]))
            logits.append([model.step(ids[:, n : n + 1], state)[0] for n in (7, 8)])
    assert far(*logits) < 1e-5


@needs
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_lora_of_peft_is_what_runs(kind, merged, tmp_path):
    peft = pytest.importorskip("peft")

    def change(model: GPT) -> None:
        how = {"r": 2, "target_modules": ["qkv", "outer"], "init_lora_weights": False}
        wrapped = peft.get_peft_model(model, peft.LoraConfig(**how))
        if merged:
            wrapped.merge_adapter()
        for p in model.parameters():  # peft lets nothing else learn
            p.requires_grad_(True)

    check(change, kind, tmp_path)


@needs
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_take_what_nobody_has_changed(kind, monkeypatch, tmp_path):
    model, calls = build(kind), []
    for name in ("try_train_kernel", "try_stack"):
        old = getattr(block_kernels, name)

        def noted(*words, name=name, old=old):
            calls.append((name, (y := old(*words)) is not None))
            return y

        monkeypatch.setattr(block_kernels, name, noted)
    gradients(model), logits(model)
    assert not calls  # in library use PyTorch runs what somebody has built
    trained(model, tmp_path)
    assert calls == [("try_train_kernel", True)] * 3
    calls.clear()
    with monkeypatch.context() as patch:
        found = gpt.continue_texts
        patch.setattr(gpt, "continue_texts", lambda *a, **b: calls.append(found(*a, **b)))
        text(model)  # what is found is not passed on, so that the search writes it as well
    wrote = calls[0]
    assert wrote is not None and calls.count(("try_stack", True)) >= 8
    calls.clear()
    with fast(model):
        logits(model)
        with fast(model, on=False):
            logits(model)
    assert calls == [("try_stack", True)] * 7


def test_the_fuzz_is_wide_enough():
    assert len(CHANGES) + len(GLOBAL) >= 120
    assert Causal().aligned(3, 3) and not type("Mine", (Causal,), {})().aligned(3, 3)
    assert RESIDUALS["pre"].block is EncoderBlock and feedforward.FEED_FORWARDS
