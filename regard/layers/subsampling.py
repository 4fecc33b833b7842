"""Convolutional subsampling: fewer, wider frames of a spectrogram."""

from torch import Tensor, nn

from regard.attention.masks import Padding
from regard.errors import UsageError

# frames of the spectrogram for one frame of output -> the strides of the convolutions over time
STRIDES: dict[int, tuple[int, ...]] = {2: (2, 1), 4: (2, 2)}


def zero_padding(x: Tensor, mask: Padding | None) -> Tensor:
    """Return vectors (b, l, ...) with those of padding set to zero, whatever stands there."""
    if mask is None:
        return x
    keep = mask.keep.view(*mask.keep.shape, *(1,) * (x.ndim - 2))
    return x.masked_fill(~keep, 0.0)


class Subsampling(nn.Module):
    """relu(W2 * relu(W1 * x)) and a linear layer: convolutions of 3 by 3 over time and frequency.

    Both halve the frequencies, and one or both halve the time. Padding is zero before each.
    """

    def __init__(self, mels: int, channels: int, width: int, factor: int):
        super().__init__()
        if factor not in STRIDES:
            raise UsageError(
                f"subsampling={factor}; expected {' or '.join(map(str, STRIDES))} frames of the "
                "spectrogram for each frame of output"
            )
        self.strides = STRIDES[factor]
        sizes = [1, *[channels] * len(self.strides)]
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, (stride, 2), padding=1)
            for before, after, stride in zip(sizes, sizes[1:], self.strides, strict=False)
        )
        for _ in self.strides:
            mels = halved(mels)
        self.project = nn.Linear(channels * mels, width)

    def out_lengths(self, lengths: Tensor) -> Tensor:
        """Return how many frames sounds of so many frames become."""
        for stride in self.strides:
            lengths = halved(lengths) if stride == 2 else lengths
        return lengths

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Return vectors (b, s, w) of spectrograms (b, t, mels), and their lengths."""
        mask = Padding.of(lengths, x.shape[1])
        x = x.unsqueeze(-1)  # (b, t, mels, channels), which a convolution reads as it lies
        for convolution, stride in zip(self.convolutions, self.strides, strict=True):
            x = convolution(zero_padding(x, mask).movedim(-1, 1)).relu_().movedim(1, -1)
            if stride == 2:
                lengths = halved(lengths)
                mask = Padding.of(lengths, x.shape[1])
        return zero_padding(self.project(x.flatten(2)), mask), lengths


def halved(size):
    """Return how many places are left after a convolution of 3 with a stride of 2."""
    return (size + 1) // 2
