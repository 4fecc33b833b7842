"""What convolutional networks are made of."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class BatchNorm(nn.Module):
    """(x - mean) / sqrt(var + eps) * weight + bias, mean and variance of a channel over the batch.

    Outside training they are running averages. These are parameters without a gradient, so that
    they are saved, averaged and frozen with the others: where they do not require one, the running
    averages stay as they are and are used in training, too.
    """

    MEMORY = 0.1

    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))
        self.mean = nn.Parameter(torch.zeros(width))
        self.var = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise each channel of (b, c, ...)."""
        if not (self.training and self.mean.requires_grad):
            mean, var = self.mean.detach(), self.var.detach()
            return F.batch_norm(x, mean, var, self.weight, self.bias, eps=self.eps)
        new = torch.stack([self.mean.detach(), self.var.detach()])
        mean, var = new
        y = F.batch_norm(x, mean, var, self.weight, self.bias, True, self.MEMORY, self.eps)
        with torch.no_grad():
            # a step that is not finite is skipped, and must leave nothing behind
            if new.is_meta or new.isfinite().all():
                self.mean.copy_(mean)
                self.var.copy_(var)
        return y


def statistics(model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of a model that are averages of what was seen, not learned."""
    norms = [part for part in model.modules() if isinstance(part, BatchNorm)]
    return {p for norm in norms for p in (norm.mean, norm.var)}


def relu(x: Tensor) -> Tensor:
    """Cut what is negative, in place."""
    return x.relu_()


class ConvNorm(nn.Module):
    """act(norm(W * x)): a convolution without bias, a batch norm, and what bends it."""

    def __init__(
        self,
        channels: int,
        width: int,
        kernel: int = 3,
        stride: int = 1,
        act: Callable[[Tensor], Tensor] = relu,
    ):
        super().__init__()
        self.convolution = nn.Conv2d(
            channels, width, kernel, stride, padding=kernel // 2, bias=False
        )
        self.norm = BatchNorm(width)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Return (b, width, h / stride, w / stride) of (b, channels, h, w)."""
        return self.act(self.norm(self.convolution(x)))


def unbent(x: Tensor) -> Tensor:
    """Return x as it is."""
    return x
