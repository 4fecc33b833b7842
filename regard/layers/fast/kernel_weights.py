"""The weights of blocks that kernels know by every part, and whether those are still the same.

Nothing is assumed of a part but what is checked here. Anything unknown means PyTorch.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from operator import is_
from threading import RLock
from types import FunctionType
from typing import Any, NamedTuple, cast
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules import module as torch_module

from regard import native
from regard.attention import attend, intervene, kernels, multihead
from regard.attention.kernels import KERNELS
from regard.attention.multihead import MultiHead
from regard.attention.positions import POSITIONS, Position, Rotary, Yarn
from regard.attention.scores import Dot
from regard.layers import residual
from regard.layers.block import DecoderBlock, EncoderBlock
from regard.layers.feedforward import FeedForward, GatedFeedForward, gelu_tanh
from regard.layers.norm import GainNorm, LayerNorm, RMSNorm
from regard.layers.residual import PostNorm, PreNorm
from regard.native.torch_private import (
    HOOKS,
    dtype,
    has_global_hooks,
    has_hooks,
    requires_grad,
    size,
    traced,
)

# as the kernels number them
_ACTS = (F.relu, F.gelu, gelu_tanh, F.silu)
# positions that change nothing in a block, or rotate queries and keys; exact classes only
_KNOWN_POSITIONS = frozenset(POSITIONS.values())
_ROTATING = (Rotary, Yarn)
_KNOWN_FEED_FORWARDS = (FeedForward, GatedFeedForward)
_KNOWN_NORMS = (LayerNorm, GainNorm, RMSNorm)
_one_at_a_time = RLock()
_NO_PLAN = (None, None)
# what an instance may have instead of what its class says
_OVERRIDES = ("forward", "_call_impl", "_compiled_call_impl", "_slow_forward")


# functions as they were: where each is looked up, its name, and what it was
Functions = list[tuple[dict[str, Any], str, Any]]


def known_functions(*owners: Any) -> Functions:
    """All functions and properties of classes or modules, with where they are looked up."""
    kinds = (FunctionType, property, staticmethod, classmethod)
    return [
        (cast(dict, vars(owner)), name, value)
        for owner in owners
        for name, value in vars(owner).items()
        if isinstance(value, kinds)
    ]


def unchanged_functions(known: Functions) -> bool:
    """True if each function is still what it was."""
    return all([place.get(name) is value for place, name, value in known])


_CLASSES = [
    EncoderBlock,
    DecoderBlock,
    MultiHead,
    PreNorm,
    PostNorm,
    *_KNOWN_FEED_FORWARDS,
    *_KNOWN_NORMS,
    Dot,
    Position,
    *_ROTATING,
]
_CLASSES += [*Dot.__mro__[1:-1], nn.Linear, nn.LayerNorm]
_LOOKED_UP = [
    *((torch_module.Module.__dict__, name) for name in ("__call__", "_call_impl", "__getattr__")),
    *((vars(F), name) for name in ("linear", "layer_norm", "rms_norm")),
    (vars(F), "scaled_dot_product_attention"),
    (vars(multihead), "attend"),
    *((vars(residual), name) for name in ("add_dropped", "drop_path")),
    *((vars(attend), name) for name in ("compute_asked", "Problem")),
    (vars(intervene), "compute"),
    (vars(kernels), "KERNELS"),
    *((KERNELS, name) for name in KERNELS),
]
# everything that PyTorch would run for a known block: where it is looked up, its name, what it was
_KNOWN = known_functions(*_CLASSES)
_KNOWN += [(cast(dict, place), name, place[name]) for place, name in _LOOKED_UP]
_PLACES = [(place, name) for place, name, _ in _KNOWN]
_WERE = [value for *_, value in _KNOWN]
_KERNELS = len(KERNELS)


def unpatched() -> bool:
    """True if nobody has patched a known class or function, or hooked all modules."""
    if has_global_hooks() or len(KERNELS) != _KERNELS:
        return False
    return all(map(is_, [place.get(name) for place, name in _PLACES], _WERE))


class BlockWeights(NamedTuple):
    """The weights and sizes of a block, as kernels need them."""

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
    order: type[nn.Module]


def kernel_weights(
    block: nn.Module, training: bool, order: type[nn.Module] = PreNorm
) -> BlockWeights | None:
    """Weights of a block, if each part is known exactly and there is no dropout.

    One that decodes may have cross-attention; its weights come last.
    """
    kinds = (EncoderBlock,) if training else (EncoderBlock, DecoderBlock)
    if type(block) not in kinds or not unmodified(block):
        return None
    block = cast(Any, block)
    attention, ffn = block.attention, block.feed_forward
    cross = block.cross if type(block) is DecoderBlock else None
    around: list[Any] = [block.around_attention, block.around_feed_forward]
    around += [] if cross is None else [block.around_cross]
    if (
        type(attention) is not MultiHead
        or type(ffn) not in _KNOWN_FEED_FORWARDS
        or not (cross is None or _reads_alike(cross, attention))
        or any(type(one) is not order for one in around)
    ):
        return None
    ffn, norms = cast(Any, ffn), [one.norm for one in around]
    position, score, kind = attention.position, attention.score, type(norms[0])
    if (
        kind not in _KNOWN_NORMS
        or any(type(norm) is not kind or norm.eps != norms[0].eps for norm in norms)
        or type(score) is not Dot
        or vars(score).keys() != {"scale"}
        or type(position) not in _KNOWN_POSITIONS
        or attention.needs_key_positions
        or (attention.uses_rotation and type(position) not in _ROTATING)
        or not any(ffn.act is act for act in _ACTS)
    ):
        return None
    gate = ffn.gate if type(ffn) is GatedFeedForward else None
    matrices: list[Any] = [attention.qkv, attention.out, gate, ffn.inner, ffn.outer]
    matrices += [] if cross is None else [cross.qkv, cross.out]
    there = [matrix for matrix in matrices if matrix is not None]
    modules = [block, attention, ffn, *around, *norms, position, *there]
    modules += [] if cross is None else [cross, cross.position]
    if (
        any(type(matrix) is not nn.Linear for matrix in there)
        or not unmodified(*modules)
        or any(m.training != training for m in (block, attention, ffn, *around, cross or block))
        or (training and _drops(attention, ffn, *around))
    ):
        return None
    h, g, d = attention.heads, attention.kv_heads, attention.head_width
    w, f = attention.out.weight.shape[0], ffn.inner.weight.shape[0]
    shapes = [(w,), ((h + 2 * g) * d, w), (w, h * d), (w,), (f, w), (f, w), (w, f)]
    weights: list[Tensor | None] = []
    owners = [norms[0], *matrices[:2], norms[1], *matrices[2:5]]
    if cross is not None:
        owners += [norms[2], *matrices[5:]]
        shapes += [shapes[0], shapes[1], shapes[2]]
    for module, shape in zip(owners, shapes, strict=True):
        weight, bias = weight_and_bias(module)
        known = module is None or kernel_can_read(weight, shape)
        if not known or not (bias is None or kernel_can_read(bias, shape[:1])):
            return None
        weights += [weight, bias]
    columns = sum(1 << i for i, m in enumerate(matrices) if m and not m.weight.is_contiguous())
    return BlockWeights(
        weights,
        columns,
        w,
        h,
        g,
        d,
        f,
        next(i for i, act in enumerate(_ACTS) if ffn.act is act),
        kind,
        norms[0].eps,
        d**-0.5 if score.scale is None else score.scale,
        cast(Rotary, position) if attention.uses_rotation else None,
        order,
    )


def _reads_alike(cross: nn.Module, attention: MultiHead) -> bool:
    """True if cross-attention is known exactly, and of the same sizes as self-attention."""
    if type(cross) is not MultiHead or type(cross.score) is not Dot:
        return False
    sizes = [(m.heads, m.kv_heads, m.head_width) for m in (cross, attention)]
    return (
        sizes[0] == sizes[1]
        and vars(cross.score) == vars(attention.score)
        and type(cross.position) in _KNOWN_POSITIONS
        and not cross.needs_key_positions
        and not cross.uses_rotation
    )


def _drops(attention: MultiHead, ffn: Any, *around: PreNorm) -> bool:
    """True if there is dropout or stochastic depth."""
    return bool(attention.dropout or ffn.drop or any(one.drop or one.path for one in around))


def unmodified(*modules: nn.Module) -> bool:
    """True if modules run as their classes say: no hook, no method of an instance's own."""
    for module in modules:
        own = vars(module)
        if has_hooks(module) or any(own.get(name) for name in _OVERRIDES):
            return False
        if not own.keys().isdisjoint(_METHODS[type(module)]):
            return False
    return True


class _Methods(dict):
    """The names of all methods of a class, its parents' but for nn.Module's among them."""

    def __missing__(self, kind: type) -> frozenset[str]:
        owners = [one for one in kind.__mro__ if one not in (object, nn.Module)]
        names = frozenset(chain.from_iterable(vars(one) for one in owners))
        self[kind] = names - {"training"}
        return self[kind]


_METHODS = _Methods()


def kernel_can_read(x: Tensor | None, shape: tuple[int, ...]) -> bool:
    """True if a kernel can read a weight where it lies."""
    return (
        type(x) is nn.Parameter
        and x.shape == shape
        and x.dtype == torch.float32
        and x.is_cpu
        and x.layout == torch.strided
        and not x.is_neg()
        and (x.is_contiguous() or x.t().is_contiguous())
    )


def weight_and_bias(module: nn.Module | None) -> tuple[Tensor | None, Tensor | None]:
    """Weight and the bias that a module has as parameters."""
    own = {} if module is None else module._parameters
    return own.get("weight"), own.get("bias")


class Fingerprint:
    """All that determines what modules compute, but for the numbers of their weights.

    Kernels read those anew each time; any other change is found by `same`.
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
        asked = (type, Tensor.data_ptr, size, Tensor.stride, dtype, requires_grad)
        return [list(map(ask, some)) for ask in asked]

    def unhooked(self) -> bool:
        """True if there is no hook on any of the modules."""
        return not any(self.hooks)

    def same(self) -> bool:
        """True if nothing but numbers has changed."""
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


def checked_plan(
    name: str,
    modules: Sequence[nn.Module],
    make: Callable[[], Any],
    during: object = None,
    packed: bool = False,
) -> Any:
    """Plan of a kernel for modules, made anew if more than numbers has changed.

    One that has `packed` numbers is also asked whether it still `holds` those of the modules.
    Where a model is frozen that is checked once for each text (as long as its cache, `during`,
    lives), and then only whether somebody has added a hook or replaced a function.

    Args:
        name: kind of plan
        modules: what it is made of
        make: makes it, or nothing if a part is not known
        during: what lives as long as the text
        packed: whether it is kept for those who come back
    """
    scope = native.scope(modules[0])
    if scope is None or traced() or not unpatched():
        return None
    key, plans = (name, scope.dtype, *map(id, modules)), scope.kept if packed else scope.plans
    made, fingerprint = found = plans.get(key, _NO_PLAN)
    if fingerprint is not None and scope.copies is not None and during in fingerprint.checked:
        return made if fingerprint.unhooked() else None
    if fingerprint is None or not fingerprint.same() or (packed and not made.holds()):
        with _one_at_a_time:
            if plans.get(key, _NO_PLAN) is not found:  # another thread has made it
                return checked_plan(name, modules, make, during, packed)
            plans.pop(key, None)  # there may be no room for both
            made = make()
            fingerprint = None if made is None else Fingerprint(modules)
            plans[key] = _NO_PLAN if made is None else (made, fingerprint)
    if fingerprint is not None and during is not None:
        fingerprint.checked.add(during)
    return made
