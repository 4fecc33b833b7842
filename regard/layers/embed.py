"""Token embeddings."""

from typing import Protocol

import torch
from torch import Tensor, nn

from regard.attention.dropout import dropout
from regard.attention.positions import Position
from regard.errors import UsageError, lookup

# name -> do target embeddings share those of the source, and the head those of the target
TIES: dict[str, tuple[bool, bool]] = {
    "all": (True, True),
    "target": (False, True),
    "embeddings": (True, False),
    "none": (False, False),
}


class TwoVocabularies(Protocol):
    """Config of a model with a vocabulary on either side."""

    @property
    def tie(self) -> str:
        """What shares embeddings, a name of TIES."""
        ...

    @property
    def source_vocab(self) -> int:
        """Number of pieces of the source vocabulary."""
        ...

    @property
    def target_vocab(self) -> int:
        """Number of pieces of the target vocabulary."""
        ...


def ties(config: TwoVocabularies) -> tuple[bool, bool]:
    """True if both sides share their embeddings, and true if the head has the target's."""
    sides, head = lookup("tie", config.tie, TIES)
    if sides and config.source_vocab != config.target_vocab:
        raise UsageError(
            f"tie={config.tie} needs one vocabulary, not {config.source_vocab} and "
            f"{config.target_vocab} pieces; choose tie=target"
        )
    return sides, head


def tie(module: nn.Module, to: nn.Module) -> None:
    """Give a module the parameters of another of its kind.

    One module in two places would keep the weights that torch.func.functional_call lends it.
    """
    for part, other in zip(module.modules(), to.modules(), strict=True):
        part._parameters.update(other._parameters)


class TokenEmbedding(nn.Module):
    """A row of the embedding matrix for each token, scaled, plus its type and its position.

    The sum may be normalised; a table narrower than the model is widened last (ALBERT), and then
    position and norm are as wide as the table.

    Args:
        vocab: rows of the matrix
        width: width of the model
        position: position encoding that is added
        scale: factor of the rows
        drop: dropout of the sum
        norm: norm of the sum
        types: token types; 0: none
        inner_width: width of the table; the model's unless given
    """

    def __init__(
        self,
        vocab: int,
        width: int,
        position: Position,
        scale: float,
        drop: float,
        *,
        norm: nn.Module | None = None,
        types: int = 0,
        inner_width: int | None = None,
    ):
        super().__init__()
        inner = inner_width or width
        self.tokens = nn.Embedding(vocab, inner)
        self.types = nn.Embedding(types, inner) if types else None
        self.position = position
        self.norm = norm or nn.Identity()
        self.widen = nn.Identity() if inner == width else nn.Linear(inner, width)
        self.scale, self.drop = scale, drop

    def forward(self, ids: Tensor, at: Tensor, types: Tensor | None = None) -> Tensor:
        """Embed token numbers (b, l) at their positions; tokens are of type 0 unless told.

        A token may be of several types at once, (b, l, k): their vectors are added.
        """
        x = self.scaled(self.tokens(ids))
        if self.types is not None:
            x = x + (self.types.weight[0] if types is None else self._kind(types, x))
        x = self.norm(self.position.embed(x, at))
        return self.widen(dropout(x, self.drop, self.training))

    def scaled(self, x: Tensor) -> Tensor:
        """Rows of the table times the scale."""
        return x if self.scale == 1 else x * self.scale

    def _kind(self, types: Tensor, x: Tensor) -> Tensor:
        assert self.types is not None
        return self.types(types).view(*x.shape[:-1], -1, x.shape[-1]).sum(-2)


class RoundedEmbed(TokenEmbedding):
    """Embeddings whose scale is rounded to their own precision first, as Gemma was trained."""

    def scaled(self, x: Tensor) -> Tensor:
        """Rows of the table times the rounded scale."""
        return x if self.scale == 1 else x * torch.tensor(self.scale, dtype=x.dtype)
