"""How weights begin: starts by name."""

from collections.abc import Callable

from torch import nn

from regard.attention.multihead import MultiHead


def glorot(model: nn.Module) -> None:
    """Start every matrix, embeddings included, by Glorot's rule and every bias at zero."""
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.xavier_uniform_(part.weight)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for part in model.modules():
        if isinstance(part, MultiHead):
            part.start()


def scaled(model: nn.Module) -> None:
    """Start as Glorot, but embeddings as large, times sqrt(width), as sinusoids are."""
    glorot(model)
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=part.embedding_dim**-0.5)


STARTS: dict[str, Callable[[nn.Module], None]] = {"glorot": glorot, "scaled": scaled}
