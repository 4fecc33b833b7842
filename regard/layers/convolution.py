"""Parts of convolutional networks."""

from collections.abc import Callable

from torch import Tensor, nn


def relu(x: Tensor) -> Tensor:
    """Apply the rectifier in place."""
    return x.relu_()


class ConvNorm(nn.Module):
    """act(norm(W * x)): a convolution without bias, a batch norm and an activation.

    Args:
        channels: channels of the input
        width: channels of the output
        kernel: side of the kernel
        stride: stride of the convolution
        act: activation
    """

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
        self.norm = nn.BatchNorm2d(width)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """(b, width, h / stride, w / stride) of (b, channels, h, w)."""
        return self.act(self.norm(self.convolution(x)))


def identity(x: Tensor) -> Tensor:
    """Identity."""
    return x
