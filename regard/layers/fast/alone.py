"""Each sequence of a padded batch computed by itself."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from regard.attention.watch import as_batch


def each_alone(f: Callable[[Tensor], Tensor], x: Tensor, lengths: Tensor) -> Tensor:
    """Result of f for each sequence of a batch (b, l, w) without padding, padded again with zeros.

    f maps (1, n, w) to (1, m, v) or (1, v). Products and sums of other shapes are rounded in other
    orders, so only this way is a sequence the same to the last bit in every batch. Instead of an
    empty one f reads a vector of zeros, and what it makes of that is padding.
    """
    parts, sizes = [], lengths.tolist()
    with as_batch():
        for row, n in zip(x, sizes, strict=True):
            alone = row[:n].clone() if n else torch.zeros_like(row[:1])
            parts.append(f(alone.unsqueeze(0)))
    if parts[0].ndim == 2:
        return torch.cat(parts)
    parts = [y[0] if n else torch.zeros_like(y[0]) for y, n in zip(parts, sizes, strict=True)]
    return pad_sequence(parts, batch_first=True)


def computed_alone(x: Tensor, training: bool) -> bool:
    """True if sequences are computed each alone: on a CPU, where nothing is learned."""
    return not training and x.device.type == "cpu" and not torch.compiler.is_compiling()
