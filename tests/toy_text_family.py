"""A toy family: self-attention between the tokens of a text, and a head for labels."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.attention.masks import Padding
from regard.attention.multihead import MultiHead
from regard.layers.block import size_field
from regard.layers.heads import ClassificationHead
from regard.models.declaration import FamilyInfo, size_table


@dataclass(frozen=True)
class ToyConfig:
    """Its sizes."""

    vocab: int = size_field(1000, 10**6)
    labels: int = size_field(2, 1000)
    max_length: int = size_field(64, 10**6)
    widths: tuple[int, ...] = (16,)


PRESETS = {"toy_text": ToyConfig()}
SIZES = size_table("widths", {"tiny": ((16,),), "small": ((32,),)})
INFO = FamilyInfo("text", {"classify": {}}, PRESETS, SIZES)


class Toy(nn.Module):
    """One layer of self-attention between tokens."""

    def __init__(self, config: ToyConfig):
        super().__init__()
        self.config, width = config, config.widths[-1]
        self.tokens = nn.Embedding(config.vocab, width)
        self.attention = MultiHead(width, 2)
        self.head = ClassificationHead(width, config.labels, 0.0, "mean")

    def hidden(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the vectors of tokens that have attended to each other."""
        x, mask = self.tokens(ids), Padding.of(lengths, ids.shape[1])
        return x + self.attention(x, at=ids.new_zeros(ids.shape[1], 1), mask=mask)

    def forward(self, ids: Tensor, lengths: Tensor | None = None, **rest: Any) -> Tensor:
        """Return the logits of the labels."""
        return self.head(self.hidden(ids, lengths), lengths)
