"""C kernels for a CPU, compiled once where there is a compiler; without one, PyTorch computes.

The sources lie beside this file. They are compiled for the processor at hand at their first use,
which takes a few seconds, and kept in REGARD_CACHE or the user's cache. REGARD_NATIVE=0 switches
them off, and `status` says why they are off. No kernel runs unless kernels are switched on for a
model by `fast`: training and running models from the command line or by regard.train and
regard.load(...).run do.
"""

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.errors import UsageError
from regard.native.build import Status, library, plain, status
from regard.native.torch_private import traced

__all__ = ["Scope", "Status", "adamw", "fast", "kernels", "l2_norm", "library"]
__all__ += ["argmax", "plain", "scope", "status"]

# tensors without behaviour of their own
PLAIN_TENSORS = (Tensor, torch.nn.Parameter)


class Scope:
    """Where kernels are switched on: for a model with the modules that it has then."""

    def __init__(
        self,
        model: object,
        frozen: bool,
        dtype: torch.dtype = torch.float32,
        kept: dict[object, Any] | None = None,
    ):
        module: Any = model if hasattr(model, "modules") else getattr(model, "model", None)
        if module is None:
            raise UsageError(
                f"{model!r:.60} is not a model; give a module, or what regard.load returned"
            )
        self.model = module
        self.plans: dict[object, Any] = {}  # what kernels have made of blocks, checked at each use
        self.kept = {} if kept is None else kept  # those with packed weights, for longer than this
        # weights laid out anew, only where weights are frozen: by the module's id
        self.copies: dict[int, Any] | None = {} if frozen else None
        self.dtype = dtype
        self.half = frozen and dtype == torch.bfloat16  # whether products may be in bfloat16

    @cached_property
    def members(self) -> dict[int, Any]:
        """The modules by their ids; held, so that no other object gets the id of one of them."""
        found = {id(self.model): self.model}
        left = [self.model]
        for one in left:  # as modules() finds them, at a tenth of its cost
            new = {id(m): m for m in one._modules.values() if m is not None and id(m) not in found}
            left += new.values()
            found.update(new)
        return found

    def covers(self, module: object) -> bool:
        """True if a module is the model or one of its modules."""
        return module is self.model or id(module) in self.members


_SCOPE: ContextVar[Scope | None] = ContextVar("fast", default=None)


@contextmanager
def fast(
    model: object,
    on: bool = True,
    *,
    frozen: bool = False,
    dtype: torch.dtype = torch.float32,
    kept: dict[object, Any] | None = None,
) -> Iterator[None]:
    """Let kernels compute what they know exactly of a model, while the block runs.

    Everything else (own classes and functions, hooks, parametrizations, other dtypes or devices,
    adapters, ...) is recognised at each call and left to PyTorch. `on=False` switches kernels off
    inside. `frozen=True` promises that the model does not change inside: then it is checked once
    for each text that is decoded, and weights may be laid out anew. With `dtype=torch.bfloat16`,
    too, encoders that a kernel knows multiply in bfloat16, and sum in float32; with `torch.int8`
    texts are written by products in bytes, or not at all. Packed weights are put into `kept`, for
    those who come back.
    """
    token = _SCOPE.set(Scope(model, frozen, dtype, kept) if on else None)
    try:
        yield
    finally:
        _SCOPE.reset(token)


def doubt() -> None:
    """Look at a model anew before the next step: others may have had it in their hands."""
    if (active := _SCOPE.get()) is not None:
        for _, fingerprint in (*active.plans.values(), *active.kept.values()):
            if fingerprint is not None:
                fingerprint.checked.clear()


def scope(of: object = None) -> Scope | None:
    """Return where kernels are switched on, if they are: for a module, if one is given."""
    active = _SCOPE.get()
    return active if active is None or of is None or active.covers(of) else None


def kernels(of: object = None) -> ctypes.CDLL | None:
    """Return the kernels where they are switched on; None under torch.compile or a tracing mode."""
    return None if scope(of) is None or traced() else library()


def argmax(logits: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the argmax of each row of logits (b, n) and its log-probability, or None."""
    made = kernels() if _flat(logits) else None
    if made is None:
        return None
    rows, count = logits.shape
    best = torch.empty(rows, dtype=torch.int64)
    likely = torch.empty(rows)
    made.regard_argmax(logits.data_ptr(), rows, count, best.data_ptr(), likely.data_ptr())
    return best, likely


def _flat(*tensors: Tensor) -> bool:
    """True if tensors are contiguous float32 on the CPU."""
    return all(
        type(x) in PLAIN_TENSORS and x.dtype == torch.float32 and x.is_cpu and x.is_contiguous()
        for x in tensors
    )


def address(x: Tensor | None) -> int:
    """Return where the numbers of a tensor begin, 0 if there is none."""
    return 0 if x is None else x.data_ptr()


def addresses(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    """Return where some tensors begin, as a kernel takes it."""
    return (ctypes.c_void_p * len(tensors))(*map(address, tensors))


class Numbers(ctypes.Structure):
    """Where a matrix or vector lies, and its steps in memory."""

    _fields_ = [("at", ctypes.c_void_p)] + [
        (name, ctypes.c_long) for name in ("rows", "columns", "row_step", "column_step")
    ]


def numbers(tensors: Sequence[Tensor | None]) -> ctypes.Array:
    """Matrices and vectors as a kernel takes them, each of which may be missing."""
    rows = [
        (x.data_ptr(), *x.shape, *x.stride()) if x is not None and x.ndim == 2
        else (address(x), 0 if x is None else len(x), 1, 1, 1)
        for x in tensors
    ]  # fmt: skip
    return (Numbers * len(rows))(*rows)


def checksum(made: ctypes.CDLL, of: ctypes.Array) -> tuple[int, int]:
    """Two sums of numbers, by the kernels that were made for them."""
    sums = (ctypes.c_uint64 * 2)()
    made.regard_checksum(of, len(of), sums)
    return sums[0], sums[1]


def _sizes(tensors: Sequence[Tensor]) -> ctypes.Array:
    return (ctypes.c_long * len(tensors))(*(x.numel() for x in tensors))


def l2_norm(tensors: Sequence[Tensor]) -> float | None:
    """Return the L2 norm of some tensors as one vector, or None where no kernel can."""
    made = kernels() if tensors and _flat(*tensors) else None
    if made is None:
        return None
    squares = ctypes.c_double()
    made.regard_squares(len(tensors), addresses(tensors), _sizes(tensors), ctypes.byref(squares))
    return math.sqrt(squares.value) if squares.value >= 0 else math.nan


def adamw(
    rows: Sequence[tuple[Tensor, Tensor, Tensor, Tensor, float, float, float]],
    beta1: float,
    beta2: float,
    eps: float,
) -> bool:
    """Make a step of AdamW and return True, or False where no kernel can.

    A row is a weight, its gradient, both moments, the number of the step, the learning rate and
    the weight decay.
    """
    made = kernels()
    p, g, m, v, steps, rates, decays = zip(*rows, strict=True)
    if made is None or not _flat(*p, *g, *m, *v):
        return False
    numbers = ctypes.c_double * len(rows)
    rate = numbers(*(lr / (1 - beta1**n) for lr, n in zip(rates, steps, strict=True)))
    keep = numbers(*(1 - lr * decay for lr, decay in zip(rates, decays, strict=True)))
    far = numbers(*((1 - beta2**n) ** -0.5 for n in steps))
    places = [addresses(x) for x in (p, g, m, v)]
    made.regard_adamw(len(rows), *places, _sizes(p), rate, keep, far, beta1, beta2, eps)
    torch.autograd.graph.increment_version([*p, *m, *v])  # as every change in place does
    return True
