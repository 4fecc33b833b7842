"""Convolutional subsampling: fewer, wider frames of a spectrogram."""

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.attention.masks import Padding
from regard.attention.once import once
from regard.errors import UsageError

Size = TypeVar("Size", int, Tensor)

# frames of the spectrogram for one frame of output -> the strides of the convolutions over time
_STRIDES: dict[int, tuple[int, ...]] = {2: (2, 1), 4: (2, 2)}


def zero_padding(x: Tensor, mask: Padding | None) -> Tensor:
    """Vectors (b, l, w) with those of padding set to zero, whatever stands there."""
    if mask is None:
        return x
    return x.masked_fill(~mask.keep.unsqueeze(-1), 0.0)


def on_real(f: Callable[[Tensor], Tensor], x: Tensor, mask: Padding | None) -> Tensor:
    """Result of f for the real vectors (n, w) of (b, l, w), zero at padding."""
    rows = x.flatten(0, 1)
    if mask is None:
        return f(rows).unflatten(0, x.shape[:2])
    if torch.compiler.is_exporting():  # a program cannot leave rows out
        return zero_padding(f(rows).unflatten(0, x.shape[:2]), mask)
    real = once(lambda: mask.keep.flatten().nonzero().squeeze(1), mask)
    y = f(rows.index_select(0, real))
    return y.new_zeros(len(rows), y.shape[-1]).index_copy(0, real, y).unflatten(0, x.shape[:2])


class Subsampling(nn.Module):
    """relu(W2 * relu(W1 * x)) and a linear layer: convolutions of 3 by 3 over time and frequency.

    Both halve the frequencies, and one or both halve the time. Padding is zero before each.
    """

    def __init__(self, mels: int, channels: int, width: int, factor: int):
        super().__init__()
        if factor not in _STRIDES:
            raise UsageError(
                f"subsampling={factor}; expected {' or '.join(map(str, _STRIDES))} frames of the "
                "spectrogram for each frame of output"
            )
        self.strides = _STRIDES[factor]
        sizes = [1, *[channels] * len(self.strides)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, (stride, 2), padding=1)
            for (before, after), stride in zip(pairwise(sizes), self.strides, strict=True)
        )
        for _ in self.strides:
            mels = halved(mels)
        self.project = nn.Linear(channels * mels, width)

    def out_lengths(self, lengths: Tensor) -> Tensor:
        """Number of frames after subsampling."""
        for stride in self.strides:
            lengths = halved(lengths) if stride == 2 else lengths
        return lengths

    def forward(self, x: Tensor, mask: Padding | None) -> tuple[Tensor, Padding | None]:
        """Vectors (b, s, w) of spectrograms (b, t, mels), and which of them are padding."""
        x = zero_padding(x, mask).unsqueeze(-1)  # channels last, as they lie throughout
        for convolution, stride in zip(self.convolutions, self.strides, strict=True):
            x = convolution(x.movedim(-1, 1)).movedim(1, -1)
            if mask is not None:
                # of a sound of n frames, (n + 1) // 2 are left: each stands where an even one did
                mask = Padding(mask.keep[:, ::stride])
                x = x.masked_fill_(~mask.keep[..., None, None], 0.0)
            x = x.relu_()
        return self.project(x.flatten(2)), mask


def halved(size: Size) -> Size:
    """Length after a convolution of 3 with a stride of 2."""
    return (size + 1) // 2
