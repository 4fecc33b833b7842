"""The language-model head, fast for the few rows of a decoding step too."""

import torch
from torch import Tensor, nn

from regard.layers.fast.stack import refuse_int8, step_logits


class VocabularyLinear(nn.Linear):
    """Output projection to vocabulary logits: x W^T + b."""

    def step_logits(self, x: Tensor, during: object = None) -> Tensor:
        """Logits of a decoding step, many of which read the same weights.

        In frozen models those are looked at once for each text, as long as `during` lives.
        """
        known = type(self) is VocabularyLinear and VocabularyLinear.forward is nn.Linear.forward
        logits = step_logits(self, x, during) if known else None
        if logits is None:
            refuse_int8(self)
        return self(x) if logits is None else logits


class CappedHead(VocabularyLinear):
    """cap tanh(logits / cap): logits that never pass a cap (Gemma 2)."""

    def __init__(self, width: int, vocab: int, bias: bool = False, cap: float = 30.0):
        super().__init__(width, vocab, bias=bias)
        self.cap = cap

    def forward(self, input: Tensor) -> Tensor:
        """Logits of all tokens."""
        return torch.tanh(super().forward(input) / self.cap) * self.cap
