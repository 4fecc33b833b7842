"""Reading and changing what flows through a model, by the paths of its modules.

A place is a path and, after its last dot, what of the module is meant: `in` and `out`, its first
argument and its result; and of a module that attends `queries` (b, h, q, d) and `keys`
(b, h, k, d) as they are compared, `weights` (b, h, q, k), `mask` (the same, True where a query may
look), `heads` (b, h, q, d), the averages of the values before they are projected, and `memory`
(b, k, w), what cross-attention reads. `heads.2` and `weights.2` are those of one head.

`*` in a path stands for one of its parts, `**` for any number of them: `encoder.*.out` is the
residual stream after every block, `encoder.*.feed_forward.outer.in` the hidden vectors of its
feed-forward network.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.kernels import Problem, attention_weights, compute
from regard.attention.masks import TensorMask
from regard.attention.shapes import as_bhqk
from regard.attention.watch import Holder, Maps, module_of, watch
from regard.errors import UsageError, nearest

# What a place becomes: a tensor that broadcasts to it, a number, or a function of what it is.
Change = Tensor | float | Callable[[Tensor], Tensor]
_OF_ATTENTION = ("queries", "keys", "weights", "mask", "heads")
INTERVENTION_PLACES = ("in", "out", "memory", *_OF_ATTENTION)


@dataclass(frozen=True)
class Place:
    """What of a module is meant: the module, the kind of place, and which head if one."""

    name: str
    module: nn.Module
    turn: int  # which of the calls of a module that stands in several places, of
    turns: int
    kind: str
    head: int | None = None

    @property
    def path(self) -> str:
        """Path of the module; "" is the model itself."""
        return self.name.removesuffix(f".{self.head}").removesuffix(self.kind).removesuffix(".")


# A place and a function of what is there, and all that this context asks of modules by their ids.
_Request = tuple[Place, Callable[[Tensor], Tensor]]
_Asked = dict[int, list[_Request]]
_ASKED: ContextVar[_Asked | None] = ContextVar("asked", default=None)


def intervening() -> bool:
    """True if something is recorded or changed, so that batches must come in their order."""
    return _ASKED.get() is not None


def _matcher(path: str) -> re.Pattern[str]:
    words = {"*": r"[^.]+", "**": r".+"}
    return re.compile(r"\.".join(words.get(part, re.escape(part)) for part in path.split(".")))


def _split(name: str) -> tuple[str, str, int | None]:
    """Split the name of a place into the path of its module, its kind, and its head."""
    found = re.fullmatch(r"(?:(.*)\.)?(weights|heads)\.(\d+)", name)
    if found:
        return found[1] or "", found[2], int(found[3])
    path, _, kind = name.rpartition(".")
    if kind not in INTERVENTION_PLACES:
        raise UsageError(
            f"'{name:.60}' ends in '{kind:.20}'; "
            f"a place ends in {', '.join(INTERVENTION_PLACES)}, as in "
            f"encoder.0.out.{nearest(kind, INTERVENTION_PLACES)}"
        )
    return path, kind, None


def _places(model: nn.Module, names: Iterable[str]) -> list[list[Place]]:
    """All places of a model that each name stands for; refuses one with the nearest."""
    modules = list(model.named_modules(remove_duplicate=False))
    shared: dict[int, list[str]] = {}
    for each, module in modules:
        shared.setdefault(id(module), []).append(each)
    return [_named(name, dict(modules), shared) for name in names]


def _named(
    name: str, paths: Mapping[str, nn.Module], shared: Mapping[int, list[str]]
) -> list[Place]:
    path, kind, head = _split(name)
    matcher = _matcher(path)
    chosen = [path] if path in paths and "*" not in path else []
    if "*" in path:
        chosen = [each for each in paths if matcher.fullmatch(each)]
    if not chosen:
        raise UsageError(
            f"no module '{path:.80}' in the model; its modules are {', '.join(paths)[:300]} ..."
            + nearest(path, paths)
        )
    ending = kind if head is None else f"{kind}.{head}"
    return [
        Place(
            f"{each}.{ending}" if each else ending,
            paths[each],
            shared[id(paths[each])].index(each),
            len(shared[id(paths[each])]),
            kind,
            head,
        )
        for each in chosen
    ]


def compute_asked(problem: Problem) -> tuple[Problem, Tensor, Tensor | None]:
    """Compute an attention with what `record` and `change` ask of its module.

    Return what was computed in the end, its output, and its weights where these are in memory.
    """
    asked = _ASKED.get()
    if not asked or id(problem.module) not in asked:
        return problem, *compute(problem)
    of_kind: dict[str, list[Callable[[Tensor], Tensor]]] = {kind: [] for kind in _OF_ATTENTION}
    for place, function in asked[id(problem.module)]:
        if place.kind in of_kind:
            of_kind[place.kind].append(function)
    p, mask, given = problem, problem.mask, problem.weights
    q, k = p.q, p.k
    for function in of_kind["queries"]:
        q = function(q)
    for function in of_kind["keys"]:
        k = function(k)
    shape = (*p.q.shape[:3], p.k.shape[2])
    for function in of_kind["mask"]:
        everything = torch.ones(shape, dtype=torch.bool, device=p.q.device)
        mask = TensorMask(as_bhqk("mask", function(everything), shape)) & mask
    if of_kind["weights"]:
        tile = None if mask is None else mask.tile(slice(0, shape[2]), slice(0, shape[3]))
        if given is None:
            given = attention_weights(q, k, p.score, p.bias, tile, p.normalise)
        for function in of_kind["weights"]:
            given = function(given)
    if mask is not p.mask or given is not p.weights or q is not p.q or k is not p.k:
        more = {"weights": given, "dropout": p.dropout, "add_values": p.add_values}
        p = Problem(
            q, k, p.v, p.score, p.bias, mask, normalise=p.normalise, module=p.module, **more
        )
    out, weights = compute(p)
    for function in of_kind["heads"]:
        out = function(out)
    return p, out, weights


def _at_head(place: Place, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Apply a function to one head of what has heads along its second axis."""
    if place.head is None:
        return function
    head = place.head

    def one(x: Tensor) -> Tensor:
        if head >= x.shape[1]:
            raise UsageError(f"{place.name}: there are heads 0 to {x.shape[1] - 1}")
        changed = x.clone()
        changed[:, head] = function(x[:, head])
        return changed

    return one


def _in_turn(place: Place, function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Apply a function to the calls of one of the places in which a shared module stands."""
    if place.turns == 1:
        return function
    calls = -1

    def turn(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return function(x) if calls % place.turns == place.turn else x

    return turn


def _apply(place: Place, function: Callable[[Tensor], Tensor], result: Any) -> Any:
    """Apply a function to a tensor, or to the first part of a tuple."""
    if isinstance(result, Tensor):
        return function(result)
    if isinstance(result, tuple) and result and isinstance(result[0], Tensor):
        first = function(result[0])
        return result if first is result[0] else (first, *result[1:])
    raise UsageError(f"{place.name} is {type(result).__name__}, which is not a tensor")


def _in_context(request: _Request, hook: Callable[..., Any]) -> Callable[..., Any]:
    """Run a hook only in the context that asks for it: every thread calls the hooks of a model."""

    def run(*call: Any) -> Any:
        asked = _ASKED.get() or {}
        return hook(*call) if request in asked.get(id(request[0].module), ()) else None

    return run


def _hook(request: _Request) -> Any:
    """Put a function where a place is, and return the handle that takes it away."""
    place, function = request
    module = place.module

    def after(_: nn.Module, args: tuple, result: Any) -> Any:
        return _apply(place, function, result)

    def before(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        if args:
            return (function(args[0]), *args[1:]), kwargs
        first = next(iter(kwargs), None)
        if first is None:
            raise UsageError(f"{place.name}: the module is called without an argument")
        return args, {**kwargs, first: function(kwargs[first])}

    def reading(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        read = args[where] if len(args) > where else kwargs.get("memory")
        if read is None:
            return None  # self-attention, which reads nothing else
        if not isinstance(read, Tensor):
            raise UsageError(
                f"{place.name}: in decoding the memory is projected once, before it is read; "
                "change what it is made of, such as encoder_norm.out"
            )
        if len(args) > where:
            return (*args[:where], function(read), *args[where + 1 :]), kwargs
        return args, {**kwargs, "memory": function(read)}

    if place.kind == "out":
        return module.register_forward_hook(_in_context(request, after))
    if place.kind == "in":
        return module.register_forward_pre_hook(_in_context(request, before), with_kwargs=True)
    if place.kind == "memory":
        names = list(signature(module.forward).parameters)
        if "memory" not in names:
            raise UsageError(f"{place.name}: this module reads no memory; name a cross-attention")
        where = names.index("memory")
        return module.register_forward_pre_hook(_in_context(request, reading), with_kwargs=True)
    # no kernel computes a whole stack in which somebody listens to a module
    return module.register_forward_hook(lambda *_: None)


@contextmanager
def _intervention(functions: list[_Request]) -> Iterator[None]:
    """Apply functions at their places while the block runs."""
    asked: _Asked = {key: list(value) for key, value in (_ASKED.get() or {}).items()}
    with ExitStack() as stack:
        for place, function in functions:
            request = place, _in_turn(place, _at_head(place, function))
            asked.setdefault(id(place.module), []).append(request)
            stack.callback(_hook(request).remove)
        token = _ASKED.set(asked)
        try:
            yield
        finally:
            _ASKED.reset(token)


class Activations(Mapping[str, Tensor]):
    """What was recorded at each place: the last of it by name, and all by `calls`."""

    def __init__(self, maps: Maps | None = None) -> None:
        self._seen: dict[str, list[Tensor]] = {}
        self._maps = maps
        self._weights: dict[str, Place] = {}

    def calls(self, name: str) -> list[Tensor]:
        """Tensors recorded at a place, one for each time, such as each step of decoding."""
        if name in self._weights and self._maps is not None:
            place = self._weights[name]
            return [each.weights(heads=place.head) for each in self._maps.calls(place.path)]
        if name not in self._seen:
            known = list(self)
            raise UsageError(
                f"nothing was recorded at '{name:.80}'; there is {', '.join(known) or 'nothing'}."
                + nearest(name, known)
            )
        return self._seen[name]

    def __getitem__(self, name: str) -> Tensor:
        return self.calls(name)[-1]

    def __iter__(self) -> Iterator[str]:
        maps = self._maps
        attended = (
            name for name, place in self._weights.items() if maps is not None and place.path in maps
        )
        return iter([*self._seen, *attended])

    def __contains__(self, name: object) -> bool:
        return name in list(iter(self))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        rows = [
            f"  {name}: {tuple(self[name].shape)}, {len(self.calls(name))} times" for name in self
        ]
        return "\n".join(["Activations", *(rows or ["  none yet"])])


@contextmanager
def record(model: nn.Module | Holder, *places: str) -> Iterator[Activations]:
    """Record what is at places of a model, such as encoder.*.out, while the block runs.

    The model and its output stay as they are, to the bit; `acts[name]` is a copy of what was there
    last. Attention weights are computed only when they are asked for.
    """
    module = module_of(model)
    chosen = [each for some in _places(module, places) for each in some]
    for place in chosen:
        if place.kind == "mask":
            raise UsageError(f"{place.name} can be changed, but not recorded; record weights")
    with ExitStack() as stack:
        attended = any(place.kind == "weights" for place in chosen)
        acts = Activations(stack.enter_context(watch(module)) if attended else None)

        def listen(place: Place) -> Callable[[Tensor], Tensor]:
            def keep(x: Tensor) -> Tensor:
                acts._seen.setdefault(place.name, []).append(x.detach().clone())
                return x

            return keep

        acts._weights = {place.name: place for place in chosen if place.kind == "weights"}
        heard = [(place, listen(place)) for place in chosen if place.kind != "weights"]
        stack.enter_context(_intervention(heard))
        yield acts


@contextmanager
def change(model: nn.Module | Holder, changes: Mapping[str, Change]) -> Iterator[None]:
    """Change what is at places of a model while the block runs: by a tensor, number or function.

    A tensor or number takes the place of all that is there; a function is given what is there. A
    mask may only take keys away. A change that was never reached is an error, not a silence.
    """
    module = module_of(model)
    reached: set[str] = set()

    def changing(place: Place, to: Change) -> Callable[[Tensor], Tensor]:
        def changed(x: Tensor) -> Tensor:
            reached.add(place.name)
            y = to(x) if callable(to) else torch.as_tensor(to, dtype=x.dtype, device=x.device)
            try:
                return y.expand(x.shape)
            except RuntimeError:
                raise UsageError(
                    f"{place.name}: {tuple(y.shape)} does not broadcast to {tuple(x.shape)}"
                ) from None

        return changed

    found = zip(_places(module, changes), changes.values(), strict=True)
    chosen = [(place, to) for places, to in found for place in places]
    with _intervention([(place, changing(place, to)) for place, to in chosen]):
        yield
    missed = [place.name for place, _ in chosen if place.name not in reached]
    if missed:
        raise UsageError(
            f"{', '.join(missed[:5])}: not computed inside the `with` block, so nothing was changed"
        )


def cut(
    keys: int | list[int], queries: int | list[int] | None = None, heads: Any = None
) -> Callable[[Tensor], Tensor]:
    """Change of a mask that hides keys from queries, of some heads; all unless given."""

    def indices(which: Any, size: int) -> Tensor:
        chosen = range(size) if which is None else [which] if isinstance(which, int) else which
        for each in chosen:
            if not -size <= each < size:
                raise UsageError(f"there is no {each} to cut; choose from 0 to {size - 1}")
        return torch.tensor([each % size for each in chosen])

    def hide(mask: Tensor) -> Tensor:
        h, q, k = (
            indices(w, n) for w, n in zip((heads, queries, keys), mask.shape[1:], strict=True)
        )
        hidden = mask.clone()
        hidden[:, h[:, None, None], q[:, None], k] = False
        return hidden

    return hide
