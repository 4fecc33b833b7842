"""Patch embeddings: from images to tokens."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import UsageError
from regard.layers.chunks import Chunks, chunk_at
from regard.layers.convolution import ConvNorm


def grid_at(height: int, width: int, before: int = 0, device: torch.device | None = None) -> Tensor:
    """Coordinates (l, 2) of a grid row by row, and of tokens before it, which have none.

    The same tensor for the same grid.
    """
    return chunk_at((height, width), before, device)


def check_images(images: Tensor, channels: int, least: int = 1) -> None:
    """Refuse what is no batch of images of so many channels, at least so large."""
    if images.ndim != 4 or images.shape[1] != channels:
        raise UsageError(
            f"images {tuple(images.shape)}; expected (batch, {channels}, height, width), with "
            f"{channels} channels"
        )
    if min(images.shape[2:]) < least:
        raise UsageError(
            f"an image of {images.shape[2]}x{images.shape[3]} pixels; expected at least "
            f"{least}x{least}, so enlarge it or choose a smaller patch"
        )


class Patches(Chunks):
    """Patches of an image, each projected to a vector: square chunks of an array with two axes.

    Pixels right of and below the last whole patch are not seen.

    Args:
        channels: channels of the image
        width: width of the vectors
        patch: side of a patch
        stride: pixels between patches; their side unless given
        padding: zeros around the image
        bias: bias of the projection
        flatten: whether patches come as (b, patches, width) instead of a grid
    """

    def __init__(
        self,
        channels: int,
        width: int,
        patch: int,
        *,
        stride: int | None = None,
        padding: int = 0,
        bias: bool = True,
        flatten: bool = True,
    ):
        more = {"stride": stride, "padding": padding, "bias": bias, "flatten": flatten}
        super().__init__(channels, width, (patch, patch), **more)
        self.patch = patch

    def grid(self, shape: Sequence[int]) -> tuple[int, int]:
        """Number of patches of an image of (height, width) in each direction."""
        height, width = super().grid(shape)
        return height, width

    def _check(self, x: Tensor) -> None:
        check_images(x, self.channels, self.patch - 2 * self.padding[0])


def halvings(patch: int) -> int:
    """Number of halvings of an image that make a patch of so many pixels one token."""
    steps = patch.bit_length() - 1
    if patch != 2**steps or not steps:
        raise UsageError(f"patch={patch}; convolutions halve an image, so choose 2, 4, 8 or so")
    return steps


class Convolutions(nn.Module):
    """Tokens by small convolutions, each of which halves the image (CCT, Hassani et al. 2021).

    Convolution, rectifier and the largest of 3x3: neighbours are looked at before there are
    tokens, which helps where data are few. `patch` is how many pixels a token stands for in each
    direction.
    """

    def __init__(self, channels: int, width: int, patch: int):
        super().__init__()
        self.channels, steps = channels, halvings(patch)
        widths = [channels, *(max(1, width >> 2 * n) for n in reversed(range(steps)))]
        self.layers = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1, bias=False) for before, after in pairwise(widths)
        )

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Number of tokens of an image of (height, width) in each direction."""
        height, width = (-(-n // 2 ** len(self.layers)) for n in size)
        return height, width

    def forward(self, images: Tensor) -> Tensor:
        """Vectors (b, h * w, width) of images (b, c, ...)."""
        check_images(images, self.channels)
        for layer in self.layers:
            images = F.max_pool2d(layer(images).relu_(), 3, 2, 1)
        return images.flatten(2).mT


class EarlyConvolutions(nn.Module):
    """Tokens by convolutions with batch norm (Xiao et al. 2021: early convolutions).

    One sees every pixel; then for each halving one that halves, and one more but for the last; a
    matrix makes tokens of it. The width doubles with each halving.
    """

    def __init__(self, channels: int, width: int, patch: int):
        super().__init__()
        self.channels, self.steps = channels, halvings(patch)
        widths = [max(1, width >> self.steps - n) for n in range(self.steps + 1)]
        layers = [ConvNorm(channels, widths[0])]
        for n, (before, after) in enumerate(pairwise(widths), 1):
            layers.append(ConvNorm(before, after, 3, 2))
            if n < self.steps:
                layers.append(ConvNorm(after, after))
        self.layers = nn.Sequential(*layers)
        self.project = nn.Linear(width, width)

    def grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Number of tokens of an image of (height, width) in each direction."""
        height, width = (-(-n // 2**self.steps) for n in size)
        return height, width

    def forward(self, images: Tensor) -> Tensor:
        """Vectors (b, h * w, width) of images (b, c, ...)."""
        check_images(images, self.channels)
        made = self.layers(images.contiguous(memory_format=torch.channels_last))
        return self.project(made.permute(0, 2, 3, 1).flatten(1, 2))
