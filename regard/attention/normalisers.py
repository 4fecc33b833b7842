"""From scores to attention weights, by name: softmax, argmax, or a sample of the softmax."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

Normaliser = Callable[[Tensor], Tensor]


def softmax(scores: Tensor) -> Tensor:
    """Weights that sum to one; a row of -inf throughout gives zeros."""
    fully_masked = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(fully_masked, 0.0).softmax(-1).masked_fill(fully_masked, 0.0)


def argmax(scores: Tensor) -> Tensor:
    """Weight one for the best key."""
    best = F.one_hot(scores.argmax(-1), scores.shape[-1]).to(scores.dtype)
    return best.masked_fill(scores == -torch.inf, 0.0)


class Sample:
    """Hard attention: weight one for a key drawn by the softmax; keeps the log-probability."""

    def __init__(self, generator: torch.Generator | None = None):
        self.generator = generator
        self.log_probability: Tensor | None = None

    def __call__(self, scores: Tensor) -> Tensor:
        """Draw a key for each query."""
        seeing = scores.amax(-1, keepdim=True) > -torch.inf
        log = scores.masked_fill(~seeing, 0.0).log_softmax(-1)
        flat = log.detach().exp().flatten(0, -2)
        drawn = torch.multinomial(flat, 1, generator=self.generator).view(*log.shape[:-1], 1)
        self.log_probability = (log.gather(-1, drawn) * seeing).squeeze(-1)
        return torch.zeros_like(scores).scatter_(-1, drawn, 1.0) * seeing


NORMALISERS: dict[str, Callable[[], Normaliser]] = {
    "softmax": lambda: softmax,
    "argmax": lambda: argmax,
    "sample": Sample,
}
