"""Linear maps that are quick with a few rows too, as when texts are written."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# For a product with a few rows MKL lays out the weights anew each time, which takes longer than the
# product itself. Here they are laid out once for so many rows at a time; fewer than four need no
# layout, and beyond the last figure the plain product is as fast.
ROWS, FEWEST, MOST = 16, 4, 48
# One row alone gains by a layout of its own where the weights do not fit a core's cache.
LARGE = 2**22
# No more weights than this are held a second time.
MOST_BYTES = 2**30

Part = tuple[int, int | None, int]  # first and last output, rows that it is laid out for
_laid_out: "WeakKeyDictionary[Linear, dict[Part, tuple[tuple[int, int], Tensor]]]"
_laid_out = WeakKeyDictionary()
_one_at_a_time = Lock()
_WRITING: ContextVar[bool] = ContextVar("writing", default=False)


@contextmanager
def writing() -> Iterator[None]:
    """Expect many products with the same weights and a few rows each, until left."""
    before = _WRITING.set(True)
    try:
        yield
    finally:
        _WRITING.reset(before)


class Linear(nn.Linear):
    """x W^T + b; in writing, W is laid out only once for all products with a few rows."""

    def forward(self, input: Tensor) -> Tensor:
        """Map the last axis."""
        return self.part(input)

    def part(self, x: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Map the last axis to some of the outputs."""
        weight, bias = self.weight, self.bias
        if first or last is not None:
            weight, bias = weight[first:last], None if bias is None else bias[first:last]
        rows = x.numel() // max(1, x.shape[-1])
        each = 1 if rows == 1 and weight.numel() >= LARGE else ROWS
        if not FEWEST <= rows <= MOST and each > 1:
            return F.linear(x, weight, bias)
        laid_out = self._lay_out(x, (first, last, each))
        if laid_out is None:
            return F.linear(x, weight, bias)
        product = torch.ops.mkl._mkl_linear
        if rows == each:
            return product(x, laid_out, weight, bias, each)
        flat = F.pad(x.reshape(rows, -1), (0, 0, 0, -rows % each))
        found = [product(some, laid_out, weight, bias, each) for some in flat.split(each)]
        return torch.cat(found)[:rows].view(*x.shape[:-1], -1)

    def _lay_out(self, x: Tensor, part: Part) -> Tensor | None:
        """Return some of the weights as MKL likes them, or nothing where that cannot be."""
        weight = self._parameters.get("weight")  # nothing where it is computed, as by LoRA
        if (
            not _WRITING.get()
            or torch.is_grad_enabled()
            or weight is None
            or weight.is_inference()
            or not x.dtype == weight.dtype == torch.float32
            or not x.device == weight.device == torch.device("cpu")
            or torch.is_autocast_enabled("cpu")
            or torch.compiler.is_compiling()
            or not torch.backends.mkl.is_available()
        ):
            return None
        state = weight.data_ptr(), weight._version
        before, laid_out = _laid_out.get(self, {}).get(part, (None, None))
        if before == state:
            return laid_out
        with _one_at_a_time:
            known = _laid_out.setdefault(self, {})
            known.pop(part, None)
            first, last, rows = part
            some = weight.detach()[first:last].contiguous()
            if held() + some.nbytes > MOST_BYTES:
                return None
            known[part] = state, torch.ops.mkl._mkl_reorder_linear_weight(some, rows)
            return known[part][1]


def held() -> int:
    """Return how many bytes of weights are held a second time."""
    return sum(
        layer.weight[first:last].nbytes
        for layer, parts in _laid_out.items()
        for first, last, _ in parts
    )
