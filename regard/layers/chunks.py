"""Chunks: an array of any rank becomes tokens by being cut up and projected, with coordinates."""

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.multihead import is_linear
from regard.attention.once import cached_by_size
from regard.attention.places import Range, within_range
from regard.errors import UsageError

_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@cached_by_size(64)
def chunk_at(grid: tuple[int, ...], before: int = 0, device: torch.device | None = None) -> Tensor:
    """Coordinates (l, c) of a grid, the last axis fastest, after tokens without any.

    The same tensor for the same grid, by which positions know that nothing has changed.
    """
    with torch.inference_mode(False):
        axes = [torch.arange(n, device=device) for n in grid]
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).flatten(0, -2)
        at = F.pad(places, (0, 0, before, 0))
        return within_range(at, Range(0, tuple(n - 1 for n in grid)))


def _each(number: int | Sequence[int], axes: int, name: str) -> tuple[int, ...]:
    """Number for each axis, of one for all or one for each."""
    numbers = (number,) * axes if isinstance(number, int) else tuple(number)
    if len(numbers) != axes:
        raise UsageError(f"{name}={numbers} for {axes} axes; give one number, or one for each axis")
    return numbers


class Chunks(nn.Module):
    """Chunks of an array, each projected to a vector: W chunk + b.

    The array (b, c, n1, ..., nr) has channels and any number of axes: one for a series, two for
    an image, three for a volume. It is a convolution, and where chunks do not overlap one matrix
    product; the weight is that of the convolution with all axes but the first as one. What lies
    after the last whole chunk of an axis is not seen; where a `partial` chunk counts, it is filled
    up with zeros instead.

    Args:
        channels: channels of the array
        width: width of the vectors
        chunk: length of a chunk along each axis
        stride: steps between chunks; their length unless given
        padding: zeros before and after each axis
        bias: bias of the projection
        partial: whether an incomplete last chunk counts
        flatten: whether chunks come as (b, chunks, width) instead of a grid
    """

    def __init__(
        self,
        channels: int,
        width: int,
        chunk: Sequence[int],
        *,
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        bias: bool = True,
        partial: bool = False,
        flatten: bool = True,
    ):
        super().__init__()
        self.channels, self.chunk = channels, tuple(chunk)
        self.axes = len(self.chunk)
        if not self.axes or min(self.chunk) < 1:
            raise UsageError(
                f"chunk={self.chunk}; expected a length for each axis, such as 8 or 4,4"
            )
        self.stride = _each(self.chunk if stride is None else stride, self.axes, "stride")
        self.padding = _each(padding, self.axes, "padding")
        if min(self.stride) < 1 or any(s > n for s, n in zip(self.stride, self.chunk, strict=True)):
            raise UsageError(f"stride={self.stride}; expected 1 to the chunk's {self.chunk}")
        self.partial, self.complete = partial, self._fill if partial else nn.Identity()
        self.project = nn.Linear(channels * math.prod(self.chunk), width, bias=bias)
        overlap = self.stride != self.chunk or any(self.padding)
        known = overlap and self.axes in _CONVOLUTIONS
        self.embed = self._convolution if known else self._product
        self.flatten = nn.Flatten(1, self.axes) if flatten else nn.Identity()

    def grid(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Number of chunks of an array of (n1, ..., nr) along each axis."""
        return tuple(self._count(n, axis) for axis, n in enumerate(shape))

    def _count(self, n: Any, axis: int) -> Any:
        """Number of chunks of an axis of so many places, for a number or a tensor."""
        chunk, stride = self.chunk[axis], self.stride[axis]
        rest = n + 2 * self.padding[axis] - chunk
        if not self.partial:
            return rest // stride + 1
        count = (rest + stride - 1) // stride + 1
        return count.clamp(min=1) if isinstance(count, Tensor) else torch.sym_max(count, 1)

    def names(self, shape: Sequence[int]) -> list[str]:
        """Name the chunks of an array of (n1, ..., nr) by the places that each covers."""
        spans = []
        for n, count, chunk, stride in zip(
            shape, self.grid(shape), self.chunk, self.stride, strict=True
        ):
            ends = ((k * stride, min(n, k * stride + chunk) - 1) for k in range(count))
            spans.append([f"{a}" if b <= a else f"{a}-{b}" for a, b in ends])
        return [",".join(parts) for parts in product(*spans)]

    def token_lengths(self, lengths: Tensor, shape: Sequence[int]) -> Tensor:
        """Number of tokens of each array whose first axis has so many real places.

        `shape` (n1, ..., nr) is that of all arrays. The first axis is the slowest, so the tokens
        of the real places come first.
        """
        return self._count(lengths, 0) * math.prod(self.grid(shape)[1:])

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Vectors (b, l, width), or (b, g1, ..., gr, width), of arrays (b, c, n1, ..., nr).

        With `lengths` (b), what comes after the real places of the first axis is taken for zero.
        """
        self._check(x)
        if lengths is not None:
            real = torch.arange(x.shape[2], device=x.device) < lengths.unsqueeze(-1)
            x = x.masked_fill(~real.view(x.shape[0], 1, -1, *[1] * (self.axes - 1)), 0.0)
        return self.flatten(self.embed(self.complete(x)))

    def _check(self, x: Tensor) -> None:
        if x.ndim != self.axes + 2 or x.shape[1] != self.channels:
            axes = ", ".join(f"n{n + 1}" for n in range(self.axes))
            raise UsageError(
                f"an array {tuple(x.shape)}; expected (batch, {self.channels}, {axes}), with "
                f"{self.channels} channels"
            )
        if min(self.grid(x.shape[2:])) < 1:
            raise UsageError(f"an array {tuple(x.shape)} is smaller than a chunk of {self.chunk}")

    def _fill(self, x: Tensor) -> Tensor:
        """Add zeros after each axis, up to the end of its last chunk."""
        shape, ends = x.shape[2:], []
        for axis, count in enumerate(self.grid(shape)):
            whole = (count - 1) * self.stride[axis] + self.chunk[axis] - 2 * self.padding[axis]
            ends = [0, torch.sym_max(0, whole - shape[axis]), *ends]  # the last axis first
        return F.pad(x, ends)

    def _product(self, x: Tensor) -> Tensor:
        x = (
            F.pad(x, [n for n in reversed(self.padding) for _ in range(2)])
            if any(self.padding)
            else x
        )
        for axis, (chunk, stride) in enumerate(zip(self.chunk, self.stride, strict=True), 2):
            x = x.unfold(axis, chunk, stride)
        return self.project(x.movedim(1, self.axes + 1).flatten(self.axes + 1))

    def _convolution(self, x: Tensor) -> Tensor:
        if not is_linear(self.project):
            return self._product(x)
        weight = self.project.weight.unflatten(1, (self.channels, *self.chunk))
        convolve = _CONVOLUTIONS[self.axes]
        return convolve(x, weight, self.project.bias, self.stride, self.padding).movedim(1, -1)
