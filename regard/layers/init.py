"""Initialisations of weights by name."""

from collections.abc import Callable, Iterator

from torch import nn

from regard.attention.multihead import MultiHead
from regard.layers.feedforward import FeedForward, GatedFeedForward


def distinct_parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model, of tables that are one and the same only the first."""
    tables: set[int] = set()
    for part in model.modules():
        if isinstance(part, nn.Embedding):
            if id(part.weight) in tables:
                continue
            tables.add(id(part.weight))
        yield part


def glorot(model: nn.Module) -> None:
    """Initialise every matrix, embeddings included, by Glorot's rule and every bias with zeros."""
    for part in distinct_parts(model):
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.xavier_uniform_(part.weight)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)
    for part in distinct_parts(model):
        if isinstance(part, MultiHead):
            part.reset_parameters()


def scaled(model: nn.Module) -> None:
    """Initialise as Glorot, but embeddings with a standard deviation of width^-1/2.

    Times sqrt(width) they are then as large as sinusoids.
    """
    glorot(model)
    for part in distinct_parts(model):
        if isinstance(part, nn.Embedding):
            nn.init.normal_(part.weight, std=part.embedding_dim**-0.5)


def normal(model: nn.Module) -> None:
    """Initialise every matrix as BERT, by a normal distribution of std 0.02, biases with zeros."""
    for part in distinct_parts(model):
        if isinstance(part, nn.Linear | nn.Embedding):
            nn.init.normal_(part.weight, std=0.02)
        if isinstance(part, nn.Linear) and part.bias is not None:
            nn.init.zeros_(part.bias)


def gpt(model: nn.Module) -> None:
    """Initialise as BERT, but residual projections smaller by 1 / sqrt(their number) (GPT-2)."""
    normal(model)
    last = [part.out for part in distinct_parts(model) if isinstance(part, MultiHead)]
    networks = (FeedForward, GatedFeedForward)
    last += [part.outer for part in distinct_parts(model) if isinstance(part, networks)]
    for linear in last:
        nn.init.normal_(linear.weight, std=0.02 / len(last) ** 0.5)


def t5(model: nn.Module) -> None:
    """Initialise as T5: unit variance of every output; queries smaller, as scores are unscaled."""
    normal(model)
    for part in distinct_parts(model):
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=part.in_features**-0.5)
    for part in distinct_parts(model):
        if isinstance(part, nn.Embedding):  # after the head, which may be the same matrix
            nn.init.normal_(part.weight, std=1.0)
        if isinstance(part, MultiHead):
            queries = part.qkv.weight[: part.heads * part.head_width]
            nn.init.normal_(queries, std=(part.qkv.in_features * part.head_width) ** -0.5)


INITS: dict[str, Callable[[nn.Module], None]] = {
    "glorot": glorot,
    "scaled": scaled,
    "normal": normal,
    "gpt": gpt,
    "t5": t5,
}
