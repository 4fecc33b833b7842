"""From token numbers to vectors."""

from torch import Tensor, nn

from regard.attention.dropout import dropout
from regard.attention.positions import Position


class Embed(nn.Module):
    """A row of the embedding matrix for each token, scaled, plus its position."""

    def __init__(self, vocab: int, width: int, position: Position, scale: float, drop: float):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.position = position
        self.scale, self.drop = scale, drop

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        """Embed token numbers (b, l) at their positions."""
        x = self.tokens(ids) * self.scale
        return dropout(self.position.embed(x, at), self.drop, self.training)
