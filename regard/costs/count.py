"""Counting what a computation takes, on tensors that have a shape and no numbers."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


def _product(a: Tensor, b: Tensor) -> int:
    """Count the multiply-adds of a product of matrices, or of many."""
    return a.numel() * (b.shape[-1] if b.ndim > 1 else 1)


def _convolution(x: Tensor, weight: Tensor, out: Tensor, transposed: bool) -> int:
    return (x if transposed else out).numel() * math.prod(weight.shape[1:])


def _between(q: Tensor, k: Tensor, v: Tensor, scores: int, averages: int) -> int:
    """Count products of all queries with all keys, and of as many weights with all values."""
    pairs = math.prod(q.shape[:-1]) * k.shape[-2]
    return pairs * (scores * q.shape[-1] + averages * v.shape[-1])


# operation -> its kind, and its multiply-adds from its arguments and what it returns; a backward
# pass of attention computes the scores again, and two products for each of the forward pass
PRODUCTS: dict[Any, tuple[str, Callable[[Sequence[Any], Any], int]]] = {
    aten.mm: ("linear", lambda a, out: _product(a[0], a[1])),
    aten.addmm: ("linear", lambda a, out: _product(a[1], a[2])),
    aten.mv: ("linear", lambda a, out: _product(a[0], a[1])),
    aten.addmv: ("linear", lambda a, out: _product(a[1], a[2])),
    aten.dot: ("linear", lambda a, out: _product(a[0], a[1])),
    aten.bmm: ("attention", lambda a, out: _product(a[0], a[1])),
    aten.baddbmm: ("attention", lambda a, out: _product(a[1], a[2])),
    aten._scaled_dot_product_flash_attention_for_cpu: (
        "attention",
        lambda a, out: _between(a[0], a[1], a[2], 1, 1),
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        "attention",
        lambda a, out: _between(a[1], a[2], a[3], 3, 2),
    ),
    aten.convolution: ("convolution", lambda a, out: _convolution(a[0], a[1], out, a[6])),
    aten.convolution_backward: (
        "convolution",
        lambda a, out: _convolution(a[1], a[2], a[0], a[7]) * sum(map(bool, a[10][:2])),
    ),
}
# operations that write weights of attention to memory, or of the kernel what stands for them
_WEIGHT_OF: dict[Any, Callable[[Any], Tensor]] = {
    aten._softmax: lambda out: out,
    aten._safe_softmax: lambda out: out,
    aten._scaled_dot_product_flash_attention_for_cpu: lambda out: out[1],
}
_NO_NUMBER = (aten._local_scalar_dense, aten.is_nonzero)
_NO_TRAFFIC = (aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided)


@contextmanager
def pretend() -> Iterator[None]:
    """Compute on the meta device, with shapes alone, as a processor would with numbers.

    A number that a model asks for, such as whether all of its keys are finite, is zero.
    """
    with _Kernel(), _Zeros():
        yield


class _Kernel(TorchFunctionMode):
    """Attends without numbers by the kernel that is taken with them, wherever it is."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not F.scaled_dot_product_attention or not args[0].is_meta:
            return func(*args, **kwargs)
        return self.attend(*args, **kwargs)

    @staticmethod
    def attend(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, **rest):
        by_kernel = (
            not dropout_p
            and (attn_mask is None or not attn_mask.requires_grad)
            and q.shape[-1] == v.shape[-1]
            and all(x.ndim == 4 and x.stride(-1) == 1 and x.shape[-2] for x in (q, k, v))
        )
        if not by_kernel:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask, dropout_p, is_causal, scale=scale, **rest
            )
        return aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
        )[0]


class _Zeros(TorchDispatchMode):
    """Answers 0 where a number is wanted that is not there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func._overloadpacket in _NO_NUMBER and args[0].is_meta:
            return False if func._overloadpacket is aten.is_nonzero else 0
        return func(*args, **(kwargs or {}))


@dataclass
class Counted:
    """What a computation took."""

    products: Counter[str] = field(default_factory=Counter)  # multiply-adds by kind
    modules: Counter[str] = field(default_factory=Counter)  # and by the modules they were done in
    weights: int = 0  # bytes of attention weights that the forward pass wrote
    kept: int = 0  # bytes that a backward pass needs
    calls: list[tuple[int, int]] = field(default_factory=list, repr=False)  # products and bytes

    @property
    def multiply_adds(self) -> int:
        """Return the multiply-adds of all kinds."""
        return self.products.total()

    def seconds(self, rate: float, bandwidth: float, call: float) -> float:
        """Return the least time: each call takes its products or its bytes, whichever is longer."""
        return sum(max(2 * p / rate, b / bandwidth) + call for p, b in self.calls)


def tensors(values: Any) -> Iterator[Tensor]:
    """Yield the tensors among arguments and results."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from tensors(value)


def storage(x: Tensor) -> int:
    """Return the memory that a tensor lies in, by a number."""
    return x.untyped_storage()._cdata


def _bytes(x: Tensor) -> int:
    """Return the bytes that are behind a tensor, of which one may be shown many times."""
    return min(x.numel() * x.itemsize, x.untyped_storage().nbytes())


class _Counting(TorchDispatchMode):
    """Adds up every operation."""

    def __init__(self, counted: Counted, where: list[str]):
        super().__init__()
        self.counted, self.where = counted, where

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        packet, products = func._overloadpacket, 0
        if packet in PRODUCTS:
            kind, formula = PRODUCTS[packet]
            products = formula(args, out)
            self.counted.products[kind] += products
            self.counted.modules.update(dict.fromkeys(self.where, products))
        if packet in _WEIGHT_OF:
            self.counted.weights += _bytes(_WEIGHT_OF[packet](out))
        given, made = list(tensors(args)), list(tensors(out))
        shown = {storage(x) for x in given}
        views = not func._schema.is_mutable and all(storage(x) in shown for x in made)
        if made and not views and packet not in _NO_TRAFFIC:
            self.counted.calls.append((products, sum(map(_bytes, given + made))))
        return out


@contextmanager
def _places(model: nn.Module | None, where: list[str]) -> Iterator[None]:
    """Keep a list of the modules that are at work."""
    if model is None:
        yield
        return
    handles = []
    for name, module in model.named_modules():
        if (
            type(module) is nn.Linear
        ):  # some take a part of its matrix, unless somebody listens to it
            continue
        enter = module.register_forward_pre_hook(lambda *_, name=name: where.append(name))
        leave = module.register_forward_hook(lambda *_: (where.pop(), None)[1], always_call=True)
        handles += [enter, leave]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def count(
    run: Callable[[], Any], *, backward: bool = False, model: nn.Module | None = None
) -> Counted:
    """Count what a function takes, and with `backward` also what a step of training does with it.

    What is kept for a backward pass is counted wherever gradients are on, without the weights of
    the model and each memory once. Products are told apart by the modules of the `model`.
    """
    counted, where = Counted(), []
    own = {storage(p) for p in model.parameters()} if model is not None else set()
    kept: dict[int, Tensor] = {}  # holds on to them, so that no memory has two names

    def pack(x: Tensor) -> Tensor:
        if storage(x) not in own:
            kept.setdefault(storage(x), x.detach())
        return x

    with ExitStack() as stack:
        stack.enter_context(_Counting(counted, where))
        stack.enter_context(_places(model, where))
        with saved_tensors_hooks(pack, lambda x: x):
            out = run()
        counted.kept = sum(x.untyped_storage().nbytes() for x in kept.values())
        written = counted.weights
        if backward:
            out.sum().backward()
            counted.weights = written
    return counted
