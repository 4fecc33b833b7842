"""Feed-forward networks, by name."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.dropout import dropout


class FeedForward(nn.Module):
    """W2 act(W1 x + b1) + b2.

    Args:
        width: width of the input
        ffn_width: width inside
        act: activation
        bias: whether the matrices have a bias
        drop: dropout inside
        out_width: width of the output; the input's unless given
    """

    gated = False

    def __init__(
        self,
        width: int,
        ffn_width: int,
        act: Callable,
        bias: bool,
        drop: float,
        out_width: int | None = None,
    ):
        super().__init__()
        if self.gated:
            self.gate = nn.Linear(width, ffn_width, bias=bias)
        self.inner = nn.Linear(width, ffn_width, bias=bias)
        self.outer = nn.Linear(ffn_width, out_width or width, bias=bias)
        self.act, self.drop = act, drop

    def forward(self, x: Tensor) -> Tensor:
        """Project up, apply the activation, project down."""
        return self.outer(dropout(self.act(self.inner(x)), self.drop, self.training))


class GatedFeedForward(FeedForward):
    """W2 (act(W1 x) * W3 x)."""

    gated = True

    def forward(self, x: Tensor) -> Tensor:
        """Project up twice, gate one half with the other, project down."""
        return self.outer(dropout(self.act(self.gate(x)) * self.inner(x), self.drop, self.training))


# GELU by its tanh approximation, as in GPT-2
gelu_tanh = partial(F.gelu, approximate="tanh")


def gelu_quick(x: Tensor) -> Tensor:
    """GELU as CLIP approximates it, x sigmoid(1.702 x)."""
    return x * torch.sigmoid(1.702 * x)


FEED_FORWARDS: dict[str, tuple[type[nn.Module], Callable]] = {
    "relu": (FeedForward, F.relu),
    "gelu": (FeedForward, F.gelu),
    "gelu_tanh": (FeedForward, gelu_tanh),
    "gelu_quick": (FeedForward, gelu_quick),
    "swish": (FeedForward, F.silu),
    "swiglu": (GatedFeedForward, F.silu),
    "geglu": (GatedFeedForward, F.gelu),
    "geglu_tanh": (GatedFeedForward, gelu_tanh),
}
"""Feed-forward networks by name: class and activation."""
