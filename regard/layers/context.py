"""The context of a text's tokens: windows of some layers, and packed documents."""

from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from regard.attention.places import Range, within_range


def windowed(config: Any) -> frozenset[int]:
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
