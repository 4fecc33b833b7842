"""The logits of all tokens, quick for the rows of a step in writing too."""

from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# For every product MKL lays out weights anew. Where they are as large, and rows about as many as a
# layout is for, it pays to do that once; with fewer or more rows the plain product is as fast.
LARGE = 2**22
FEWEST, ROWS = 9, 16
# No more weights than this are held a second time.
MOST_BYTES = 2**30

# of each head: the state of its weights, and the weights as they are laid
_laid_out: "WeakKeyDictionary[Head, tuple[tuple[int, int], Tensor]]" = WeakKeyDictionary()
_one_at_a_time = Lock()


class Head(nn.Linear):
    """x W^T + b: what comes next, as a number for each token that there is."""

    def write(self, x: Tensor) -> Tensor:
        """Return the logits of a step in writing, many of which ask the same weights."""
        rows = x.numel() // max(1, x.shape[-1])
        laid_out = self._lay_out(x) if FEWEST <= rows <= ROWS else None
        if laid_out is None:
            return self(x)
        flat = F.pad(x.reshape(rows, -1), (0, 0, 0, ROWS - rows))
        y = torch.ops.mkl._mkl_linear(flat, laid_out, self.weight, self.bias, ROWS)
        return y[:rows].view(*x.shape[:-1], -1)

    def _lay_out(self, x: Tensor) -> Tensor | None:
        """Return the weights as MKL likes them, or nothing where that cannot be or does not pay."""
        weight = self._parameters.get("weight")  # nothing where it is computed, as by LoRA
        if (
            weight is None
            or weight.numel() < LARGE
            or torch.is_grad_enabled()
            or weight.is_inference()
            or not x.dtype == weight.dtype == torch.float32
            or not x.device == weight.device == torch.device("cpu")
            or torch.is_autocast_enabled("cpu")
            or torch.compiler.is_compiling()
            or not torch.backends.mkl.is_available()
        ):
            return None
        state = weight.data_ptr(), weight._version
        before, laid_out = _laid_out.get(self, (None, None))
        if before == state:
            return laid_out
        with _one_at_a_time:
            _laid_out.pop(self, None)
            if held() + weight.nbytes > MOST_BYTES:
                return None
            plain = weight.detach().contiguous()
            laid_out = torch.ops.mkl._mkl_reorder_linear_weight(plain, ROWS)
            _laid_out[self] = state, laid_out
            return laid_out


class CappedHead(Head):
    """cap tanh(logits / cap): logits that never pass a cap (Gemma 2)."""

    def __init__(self, width: int, vocab: int, bias: bool = False, cap: float = 30.0):
        super().__init__(width, vocab, bias=bias)
        self.cap = cap

    def forward(self, input: Tensor) -> Tensor:
        """Return the logits of all tokens."""
        return torch.tanh(super().forward(input) / self.cap) * self.cap

    def write(self, x: Tensor) -> Tensor:
        """Return the logits of a step in writing."""
        return self(x)


def held() -> int:
    """Return how many bytes of weights are held a second time."""
    return sum(head.weight.nbytes for head in _laid_out)
