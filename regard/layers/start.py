"""How weights begin: starts by name."""

from collections.abc import Callable

from torch import nn

from regard.attention.multihead import MultiHead
from regard.layers.feedforward import FeedForward, GatedFeedForward


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


def normal(model: nn.Module) -> None:
    """Start every matrix as BERT does, by a narrow normal distribution, and every bias at zero."""
    for part in model.modules():
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def gpt(model: nn.Module) -> None:
    """Start as BERT, but what is added to the residual smaller the more often it is (GPT-2)."""
    normal(model)
    last = [part.out for part in model.modules() if isinstance(part, MultiHead)]
    networks = (FeedForward, GatedFeedForward)
    last += [part.outer for part in model.modules() if isinstance(part, networks)]
    for linear in last:
        nn.init.normal_(linear.weight, std=0.02 / len(last) ** 0.5)


def t5(model: nn.Module) -> None:
    """Start as T5: all that is computed about one large, queries smaller as nothing scales them."""
    normal(model)
    for part in model.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=part.in_features**-0.5)
    for part in model.modules():
        if isinstance(part, nn.Embedding):  # after the head, which may be the same matrix
            nn.init.normal_(part.weight, std=1.0)
        if isinstance(part, MultiHead):
            queries = part.qkv.weight[: part.heads * part.head_width]
            nn.init.normal_(queries, std=(part.qkv.in_features * part.head_width) ** -0.5)


STARTS: dict[str, Callable[[nn.Module], None]] = {
    "glorot": glorot,
    "scaled": scaled,
    "normal": normal,
    "gpt": gpt,
    "t5": t5,
}
