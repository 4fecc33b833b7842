"""The language-model head, fast for the few rows of a decoding step too."""

from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard import native
from regard.layers.fast.kernel_weights import kernel_can_read, unmodified, unpatched
from regard.native import Scope, scope
from regard.native.torch_private import traced

# For every product MKL lays out weights anew. Where they are as large, and rows about as many as a
# layout is for, it pays to do that once; with fewer or more rows the plain product is as fast.
LARGE_VOCABULARY = 2**22
FEWEST, ROWS = 9, 16
# Of so many rows our own product is faster, where weights are laid by columns.
_MOST_ROWS = 32
# No more weights than this are held a second time.
MOST_COPIED_BYTES = 2**30
# A layout costs about as much as it saves in so many steps.
STEPS_BEFORE_COPY = 8

_one_at_a_time = Lock()


class VocabularyLinear(nn.Linear):
    """Output projection to vocabulary logits: x W^T + b."""

    def step_logits(self, x: Tensor) -> Tensor:
        """Return the logits of a decoding step, many of which read the same weights."""
        rows = x.numel() // max(1, x.shape[-1])
        if rows <= _MOST_ROWS and (logits := self._by_columns(x, rows)) is not None:
            return logits
        laid_out = self._lay_out(x) if FEWEST <= rows <= ROWS else None
        if laid_out is None:
            return self(x)
        flat = F.pad(x.reshape(rows, -1), (0, 0, 0, ROWS - rows))
        y = torch.ops.mkl._mkl_linear(flat, laid_out, self.weight, self.bias, ROWS)
        return y[:rows].view(*x.shape[:-1], -1)

    def _known(self, x: Tensor) -> bool:
        """True if this is the plain product of numbers that a kernel can read, and no more."""
        weight = self._parameters.get("weight")
        return (
            scope(self) is not None
            and type(self) is VocabularyLinear
            and VocabularyLinear.forward is nn.Linear.forward
            and type(x) is Tensor
            and type(weight) is nn.Parameter
            and not torch.is_grad_enabled()
            and x.dtype == weight.dtype == torch.float32
            and x.device == weight.device == torch.device("cpu")
            and not traced()
            and unmodified(self)
            and unpatched()
        )

    def _by_columns(self, x: Tensor, rows: int) -> Tensor | None:
        """Return the product by a kernel, if the weights are laid by columns."""
        weight, bias = self.weight, self.bias
        if not self._known(x) or not rows or not kernel_can_read(weight, tuple(weight.shape)):
            return None
        if weight.is_contiguous() or not (bias is None or kernel_can_read(bias, weight.shape[:1])):
            return None
        made = native.kernels(self)
        if made is None:
            return None
        flat, (wide, width) = x.reshape(rows, -1).contiguous(), weight.shape
        y = x.new_empty(*x.shape[:-1], wide)
        places = flat.data_ptr(), weight.data_ptr(), native.address(bias), y.data_ptr()
        made.regard_product(rows, *places, width, wide, 1)
        return y

    def _lay_out(self, x: Tensor) -> Tensor | None:
        """Return the weights as MKL likes them, or nothing where that cannot be or does not pay.

        That is done only where weights cannot change, and only for a head without hooks.
        """
        weight, active = self._parameters.get("weight"), scope(self)
        if (
            active is None
            or active.copies is None
            or weight is None
            or weight.numel() < LARGE_VOCABULARY
            or weight.is_inference()
            or not torch.backends.mkl.is_available()
            or not self._known(x)
        ):
            return None
        with _one_at_a_time:
            return self._laid_out(active, weight)

    def _laid_out(self, active: Scope, weight: Tensor) -> Tensor | None:
        """Return the weights laid out in a scope, once they were asked for often enough."""
        assert active.copies is not None
        known = active.copies.get(id(self), Laid())
        state = weight.data_ptr(), weight._version
        if known.out is not None and known.state == state:
            return known.out
        room = held(active) - known.bytes + weight.nbytes <= MOST_COPIED_BYTES
        out = None
        if room and known.steps + 1 >= STEPS_BEFORE_COPY:
            out = torch.ops.mkl._mkl_reorder_linear_weight(weight.detach().contiguous(), ROWS)
        size = 0 if out is None else weight.nbytes
        active.copies[id(self)] = Laid(known.steps + 1, state, out, size)
        return out


class CappedHead(VocabularyLinear):
    """cap tanh(logits / cap): logits that never pass a cap (Gemma 2)."""

    def __init__(self, width: int, vocab: int, bias: bool = False, cap: float = 30.0):
        super().__init__(width, vocab, bias=bias)
        self.cap = cap

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits of all tokens."""
        return torch.tanh(super().forward(input) / self.cap) * self.cap

    def step_logits(self, x: Tensor) -> Tensor:
        """Return the logits of a decoding step."""
        return self(x)


class Laid(NamedTuple):
    """Weights in MKL's layout, made once they were used in so many steps."""

    steps: int = 0
    state: tuple[int, int] = (0, 0)
    out: Tensor | None = None
    bytes: int = 0


def held(active: Scope) -> int:
    """Bytes of weights that are held a second time."""
    return sum(one.bytes for one in (active.copies or {}).values() if isinstance(one, Laid))
