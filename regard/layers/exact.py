"""What kernels may take: blocks known by every part, and whether they still are what they were.

Nothing is assumed of a part but what is looked at here. Anything unknown means PyTorch.
"""

from collections.abc import Sequence
from itertools import chain
from operator import is_
from types import FunctionType
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from regard.attention import multihead
from regard.attention.multihead import MultiHead
from regard.attention.positions import POSITIONS, Position, Rotary, Yarn
from regard.attention.scores import Dot
from regard.layers import residual
from regard.layers.block import EncoderBlock
from regard.layers.feedforward import FeedForward, GatedFeedForward, gelu_tanh
from regard.layers.norm import GainNorm, LayerNorm, RMSNorm
from regard.layers.residual import PreNorm
from regard.native.torch_private import HOOKS, dtype, has_global_hooks, has_hooks, requires_grad

# as the kernels number them
ACTS = (F.relu, F.gelu, gelu_tanh, F.silu)
# positions that change nothing in a block, or turn queries and keys; as they are, no subclass
KNOWN_POSITIONS = frozenset(POSITIONS.values())
TURNING = (Rotary, Yarn)
FEED_FORWARDS = (FeedForward, GatedFeedForward)
NORMS = (LayerNorm, GainNorm, RMSNorm)
# what an instance may have instead of what its class says
OVERRIDES = ("forward", "_call_impl", "_compiled_call_impl", "_slow_forward")


def _functions(owner: Any) -> list[tuple[dict[str, Any], str, Any]]:
    """Return all functions and properties of a class or module, with where they are looked up."""
    kinds = (FunctionType, property, staticmethod, classmethod)
    names = [name for name, value in vars(owner).items() if isinstance(value, kinds)]
    return [(cast(dict, vars(owner)), name, vars(owner)[name]) for name in names]


_CLASSES = [EncoderBlock, MultiHead, PreNorm, *FEED_FORWARDS, *NORMS, Dot, Position, *TURNING]
_CLASSES += [*Dot.__mro__[1:-1], nn.Linear, nn.LayerNorm]
_LOOKED_UP = [
    *((torch_module.Module.__dict__, name) for name in ("__call__", "_call_impl", "__getattr__")),
    *((vars(F), name) for name in ("linear", "layer_norm", "rms_norm")),
    (vars(F), "scaled_dot_product_attention"),
    (vars(multihead), "attend"),
    *((vars(residual), name) for name in ("add_dropped", "drop_path")),
]
# everything that PyTorch would run for a known block: where it is looked up, its name, what it was
_KNOWN = [*chain.from_iterable(map(_functions, _CLASSES))]
_KNOWN += [(cast(dict, place), name, place[name]) for place, name in _LOOKED_UP]
_PLACES = [(place, name) for place, name, _ in _KNOWN]
_WERE = [value for *_, value in _KNOWN]


def untouched() -> bool:
    """Tell whether no known class or function was replaced and nobody listens to all modules."""
    if has_global_hooks():
        return False
    return all(map(is_, [place.get(name) for place, name in _PLACES], _WERE))


class Parts(NamedTuple):
    """What a block is made of."""

    weights: list[Tensor | None]
    columns: int  # a bit for each matrix that is laid by columns
    width: int
    heads: int
    kv_heads: int
    head_width: int
    ffn_width: int
    act: int
    norm: type[nn.Module]
    eps: float
    scale: float
    position: Rotary | None


def take_apart(block: nn.Module, training: bool) -> Parts | None:
    """Take a block apart, if every part of it is known exactly and drops nothing in training."""
    if type(block) is not EncoderBlock or not plain(block):
        return None
    look, think = block.attention, block.feed_forward
    around: list[Any] = [block.around_attention, block.around_feed_forward]
    if (
        type(look) is not MultiHead
        or type(think) not in FEED_FORWARDS
        or any(type(one) is not PreNorm for one in around)
    ):
        return None
    think, norms = cast(Any, think), [one.norm for one in around]
    position, score, kind = look.position, look.score, type(norms[0])
    if (
        kind not in NORMS
        or type(norms[1]) is not kind
        or norms[0].eps != norms[1].eps
        or type(score) is not Dot
        or vars(score).keys() != {"scale"}
        or type(position) not in KNOWN_POSITIONS
        or look.compares
        or (look.turns and type(position) not in TURNING)
        or not any(think.act is act for act in ACTS)
    ):
        return None
    gate = think.gate if type(think) is GatedFeedForward else None
    matrices: list[Any] = [look.qkv, look.out, gate, think.inner, think.outer]
    there = [matrix for matrix in matrices if matrix is not None]
    modules = [block, look, think, *around, *norms, position, *there]
    if (
        any(type(matrix) is not nn.Linear for matrix in there)
        or not plain(*modules)
        or any(m.training != training for m in modules[:5])
        or (training and _drops(look, think, *around))
    ):
        return None
    h, g, d = look.heads, look.kv_heads, look.head_width
    w, f = look.out.weight.shape[0], think.inner.weight.shape[0]
    shapes = [(w,), ((h + 2 * g) * d, w), (w, h * d), (w,), (f, w), (f, w), (w, f)]
    weights: list[Tensor | None] = []
    owners = [norms[0], *matrices[:2], norms[1], *matrices[2:]]
    for module, shape in zip(owners, shapes, strict=True):
        weight, bias = pair(module)
        known = module is None or readable(weight, shape)
        if not known or not (bias is None or readable(bias, shape[:1])):
            return None
        weights += [weight, bias]
    columns = sum(1 << i for i, m in enumerate(matrices) if m and not m.weight.is_contiguous())
    return Parts(
        weights,
        columns,
        w,
        h,
        g,
        d,
        f,
        next(i for i, act in enumerate(ACTS) if think.act is act),
        kind,
        norms[0].eps,
        d**-0.5 if score.scale is None else score.scale,
        cast(Rotary, position) if look.turns else None,
    )


def _drops(look: MultiHead, think: Any, *around: PreNorm) -> bool:
    """Tell whether anything is left out by chance."""
    return bool(look.dropout or think.drop or any(one.drop or one.path for one in around))


def plain(*modules: nn.Module) -> bool:
    """Tell whether modules run as their classes say: no hook, no forward of an instance's own."""
    for module in modules:
        own = vars(module)
        if has_hooks(module) or any(own.get(name) for name in OVERRIDES):
            return False
        if not own.keys().isdisjoint(_METHODS[type(module)]):
            return False
    return True


class _Methods(dict):
    """The names of all methods of a class, its parents' but for nn.Module's among them."""

    def __missing__(self, kind: type) -> frozenset[str]:
        owners = [one for one in kind.__mro__ if one not in (object, nn.Module)]
        names = frozenset(chain.from_iterable(vars(one) for one in owners))
        found = self[kind] = names - {"training"}
        return found


_METHODS = _Methods()


def readable(x: Tensor | None, shape: tuple[int, ...]) -> bool:
    """Tell whether a kernel can read a weight where it lies."""
    return (
        type(x) is nn.Parameter
        and x.shape == shape
        and x.dtype == torch.float32
        and x.is_cpu
        and x.layout == torch.strided
        and not x.is_neg()
        and (x.is_contiguous() or x.t().is_contiguous())
    )


def pair(module: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the weight and the bias that a module has as parameters."""
    own = {} if module is None else module._parameters
    return own.get("weight"), own.get("bias")


class Print:
    """What modules are made of, so finely that no change of what they compute goes unseen.

    Weights may change their numbers, which kernels read anew each time, but nothing else.
    """

    def __init__(self, roots: Sequence[nn.Module]):
        self.checked: WeakSet[Any] = WeakSet()  # what was found the same for
        modules = dict.fromkeys(m for root in roots for m in root.modules())
        self.modules, self.kinds = list(modules), list(map(type, modules))
        self.own = [vars(module) for module in modules]
        self.was = [dict(own) for own in self.own]
        self.inside = [own[name] for own in self.own for name in ("_modules", "_parameters")]
        self.inside += [own["_buffers"] for own in self.own]
        # what a score is made of is no module
        scores = [own["score"] for own in self.own if "score" in own]
        self.own += [vars(score) for score in scores]
        self.was += [dict(vars(score)) for score in scores]
        self.hooks = [own[name] for own in self.was if "_modules" in own for name in HOOKS]
        self.held = self._held()
        self.tensors = [one for one in self.held if isinstance(one, Tensor)]
        self.laid = self._laid()

    def _held(self) -> list[Any]:
        return list(chain.from_iterable(map(dict.values, self.inside)))

    def _laid(self) -> list[Any]:
        some = self.tensors
        asked = (type, Tensor.data_ptr, Tensor.stride, dtype, requires_grad)
        return [list(map(ask, some)) for ask in asked]

    def unheard(self) -> bool:
        """Tell whether nobody listens to one of the modules, or to all."""
        return not any(self.hooks) and not has_global_hooks()

    def same(self) -> bool:
        """Tell whether nothing but numbers has changed."""
        try:
            held = self._held()
            return (
                not any(self.hooks)
                and len(held) == len(self.held)
                and all(map(is_, held, self.held))
                and self.kinds == list(map(type, self.modules))
                and self.own == self.was
                and self.laid == self._laid()
            )
        except (RuntimeError, TypeError, ValueError):  # what cannot be compared is another
            return False
