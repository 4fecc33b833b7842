"""The context of a text's tokens: windows of some layers, and packed documents."""

from collections.abc import Sequence
from typing import Protocol

import torch
from jaxtyping import Int
from torch import Tensor

from regard.attention.places import Range, within_range


class Windows(Protocol):
    """Config of a model of which some layers attend only within a window."""

    @property
    def depth(self) -> int:
        """Number of layers."""
        ...

    @property
    def window(self) -> int | None:
        """Number of tokens of the window; None: there is none."""
        ...

    @property
    def window_layers(self) -> Sequence[int] | None:
        """Numbers of the layers that have it; None: all."""
        ...


def windowed(config: Windows) -> frozenset[int]:
    """Numbers of the layers that attend only within the window."""
    layers = range(config.depth)
    if config.window is None:
        return frozenset()
    return frozenset(layers if config.window_layers is None else config.window_layers) & set(layers)


def within(documents: Int[Tensor, "b l"]) -> Int[Tensor, "b l 1"]:
    """Position of each token from the beginning of its own document."""
    place = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    new = torch.ones_like(documents, dtype=torch.bool)
    new[:, 1:] = documents[:, 1:] != documents[:, :-1]
    at = (place - place.masked_fill(~new, 0).cummax(1).values).unsqueeze(-1)
    return within_range(at, Range(0, (documents.shape[1] - 1,)))
