"""Heads and pooling: vocabulary logits, labels of texts and images, labels of tokens.

A head reads vectors (b, l, w) and, where padding would matter, the lengths of the texts.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.attention.attend import attend
from regard.attention.dropout import dropout
from regard.attention.masks import Padding
from regard.errors import UsageError, lookup


class NoHead(nn.Module):
    """The vectors themselves."""

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Identity."""
        return x


class VocabularyHead(nn.Module):
    """W norm(act(T x + t)) + b: BERT's head for masked language modelling.

    W is as wide as the embeddings, with which it can be tied.

    Args:
        width: width of the model
        vocab: number of words
        act: activation
        norm: norm before the last matrix
        inner_width: width of the embeddings
        bias: bias of the words
        transform_bias: bias of the first matrix
    """

    def __init__(
        self,
        width: int,
        vocab: int,
        act: Callable,
        norm: nn.Module,
        inner_width: int,
        *,
        bias: bool = True,
        transform_bias: bool = True,
    ):
        super().__init__()
        self.transform = nn.Linear(width, inner_width, bias=transform_bias)
        self.norm = norm
        self.out = nn.Linear(inner_width, vocab, bias=bias)
        self.act = act

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits of every word, (..., vocab)."""
        return self.out(self.norm(self.act(self.transform(x))))


class Transform(nn.Module):
    """norm(act(W x + b)): the first layer of ModernBERT's classification heads."""

    def __init__(self, width: int, act: Callable, norm: nn.Module, bias: bool):
        super().__init__()
        self.dense = nn.Linear(width, width, bias=bias)
        self.norm = norm
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        """Vectors of the same width."""
        return self.norm(self.act(self.dense(x)))


class First(nn.Module):
    """The first token's vector as it is."""

    def __init__(self, width: int = 0, drop: float = 0.0):
        super().__init__()

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """First vector (b, w) of each text (b, l, w)."""
        return x[:, 0]


class FirstTokens(nn.Module):
    """The vectors of the first tokens side by side."""

    def __init__(self, count: int):
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        """(b, count * w) of (b, l, w)."""
        return x[:, : self.count].flatten(1)


class GridMean(nn.Module):
    """The mean over a grid, without the tokens before it."""

    def __init__(self, before: int):
        super().__init__()
        self.before = before

    def forward(self, x: Tensor) -> Tensor:
        """(b, w) of (b, l, w)."""
        return x[:, self.before :].mean(1)


class Pooler(nn.Module):
    """act(W x + b) of the first token, which stands for the whole text."""

    def __init__(self, width: int, drop: float = 0.0, act: Callable = torch.tanh):
        super().__init__()
        self.dense = nn.Linear(width, width)
        self.act, self.drop = act, drop

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Vector (b, w) for each text (b, l, w)."""
        return self.act(self.dense(dropout(x[:, 0], self.drop, self.training)))


def fill_padding(x: Tensor, lengths: Tensor, value: float) -> Tensor:
    """Vectors (b, l, w) with a value in place of all numbers behind each text's length."""
    real = torch.arange(x.shape[1], device=x.device) < lengths.unsqueeze(-1)
    return x.masked_fill(~real.unsqueeze(-1), value)


class Mean(nn.Module):
    """The mean of a text's vectors."""

    def __init__(self, width: int = 0, drop: float = 0.0):
        super().__init__()

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Mean (b, w) of each text (b, l, w), padding left out."""
        if lengths is None:
            return x.mean(1)
        return fill_padding(x, lengths, 0.0).sum(1) / lengths.clamp(min=1).unsqueeze(-1)


class Max(nn.Module):
    """Max pooling over a text's vectors."""

    def __init__(self, width: int = 0, drop: float = 0.0):
        super().__init__()

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Maximum (b, w) of each text (b, l, w), padding left out."""
        return (x if lengths is None else fill_padding(x, lengths, -torch.inf)).amax(1)


class Attentive(nn.Module):
    """Attention pooling: softmax(q x' / sqrt(w)) x with a learned query q, at first the mean."""

    def __init__(self, width: int, drop: float = 0.0):
        super().__init__()
        self.query = nn.Parameter(torch.zeros(1, width))

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Weighted mean (b, w) of each text (b, l, w), padding left out."""
        query = self.query.to(x.dtype).expand(x.shape[0], 1, -1)
        mask = Padding.of(lengths, x.shape[1])
        return attend(query, x, x, mask=mask, watch=self).squeeze(1)


class Convolved(nn.Module):
    """relu(max_i W [x_i ... x_i+n-1]): convolutions over n vectors, max-pooled (Kim 2014)."""

    RUNS = (3, 4, 5)

    def __init__(self, width: int, drop: float = 0.0):
        super().__init__()
        counts = [(width + n) // len(self.RUNS) for n in range(len(self.RUNS))]
        self.runs = nn.ModuleList(
            nn.Conv1d(width, count, n) for count, n in zip(counts, self.RUNS, strict=True)
        )
        self.drop = drop

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Maximum (b, w) over each text (b, l, w), padded with zeros."""
        if lengths is None:
            lengths = torch.full((x.shape[0],), x.shape[1], device=x.device)
        lengths = lengths.unsqueeze(-1)
        real = torch.arange(x.shape[1], device=x.device) < lengths
        x = dropout(x.masked_fill(~real.unsqueeze(-1), 0.0), self.drop, self.training).mT
        most = []
        for n, run in zip(self.RUNS, self.runs, strict=True):
            y = run(F.pad(x, (n - 1, n - 1)))  # every window that holds some of the text
            beyond = torch.arange(y.shape[-1], device=x.device) >= lengths + n - 1
            most.append(y.masked_fill(beyond.unsqueeze(1), -torch.inf).amax(-1))
        return torch.cat(most, -1).relu()


# name -> pooling of a grid of features of a width
GRID_POOLINGS: dict[str, type[Mean] | type[Max] | type[Attentive]] = {
    "mean": Mean,
    "max": Max,
    "attention": Attentive,
}
# name -> how to make one from the width and the dropout; BERT drops nothing before its own
POOLERS: dict[str, Callable[[int, float], nn.Module]] = {
    "first": lambda width, drop: Pooler(width),
    "roberta": Pooler,
    "deberta": lambda width, drop: Pooler(width, act=F.gelu),
    "distilbert": lambda width, drop: Pooler(width, act=F.relu),
    "electra": lambda width, drop: Pooler(width, drop, F.gelu),
    "cls": First,
    **GRID_POOLINGS,
    "convolution": Convolved,
}


class ClassificationHead(nn.Module):
    """Text classification: pooled vectors, and a linear layer.

    Args:
        width: width of the model
        labels: number of labels
        drop: dropout before the linear layer
        kind: key of POOLERS
        transform: layer between pooling and the linear one
    """

    def __init__(
        self,
        width: int,
        labels: int,
        drop: float,
        kind: str = "first",
        transform: nn.Module | None = None,
    ):
        super().__init__()
        self.pool = lookup("pooler", kind, POOLERS)(width, drop)
        self.transform = transform or nn.Identity()
        self.out = nn.Linear(width, labels)
        self.drop = drop

    @torch.no_grad()
    def start_at(self, targets: Tensor) -> None:
        """Let each output begin at the log odds of its label in a table (n, labels) of targets."""
        self.out.bias.copy_(log_odds(targets.sum(0), len(targets)))

    def vector(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Vector (b, w) of each text (b, l, w) that the linear layer reads."""
        return dropout(self.transform(self.pool(x, lengths)), self.drop, self.training)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits (b, labels) of texts (b, l, w)."""
        return self.out(self.vector(x, lengths))


class ClusterClassify(ClassificationHead):
    """Classification into many labels by their clusters (X-BERT, Chang et al. 2019).

    A matcher tells the clusters of a text, and a ranker its labels within each of the `beam`
    likeliest. The labels stand cluster by cluster, the larger clusters first.
    """

    OUTSIDE = -30.0  # the logit of a label that is not ranked, finite as a log-probability is

    def __init__(self, width: int, labels: int, *rest: Any, clusters: int, beam: int):
        if clusters > labels:
            raise UsageError(f"clusters={clusters} of {labels} labels; choose at most one a label")
        super().__init__(width, labels, *rest)
        self.match = nn.Linear(width, clusters)
        self.beam = min(beam, clusters)

    def part(self, cluster: int) -> slice:
        """Positions of the labels of a cluster."""
        size, more = divmod(self.out.out_features, self.match.out_features)
        start = cluster * size + min(cluster, more)
        return slice(start, start + size + (cluster < more))

    @torch.no_grad()
    def start_at(self, targets: Tensor) -> None:
        """Let clusters begin at their log odds, and labels at theirs among the cluster's texts."""
        parts = [self.part(number) for number in range(self.match.out_features)]
        texts = torch.stack([targets[:, part].any(1).sum() for part in parts])
        self.match.bias.copy_(log_odds(texts, len(targets)))
        for part, count in zip(parts, texts, strict=True):
            self.out.bias[part] = log_odds(targets[:, part].sum(0), count)

    def all_logits(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits of all clusters, then of all labels, (b, clusters + labels)."""
        x = self.vector(x, lengths)
        return torch.cat([self.match(x), self.out(x)], dim=-1)

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits (b, labels) of texts (b, l, w).

        The probability of a label is that of its cluster times its own within the cluster.
        """
        x = self.vector(x, lengths)
        matched = self.match(x)
        likely = torch.zeros_like(matched, dtype=torch.bool)
        likely.scatter_(1, matched.topk(self.beam).indices, True)
        if torch.compiler.is_exporting():  # a program ranks all labels
            parts = enumerate(map(self.part, range(self.match.out_features)))
            of = torch.tensor([n for n, some in parts for _ in range(some.start, some.stop)])
            both = logit_of_both(matched[:, of], self.out(x))
            return torch.where(likely[:, of], both, self.OUTSIDE)
        logits = x.new_full((len(x), self.out.out_features), self.OUTSIDE)
        for number in likely.any(0).nonzero().flatten().tolist():
            rows, some = likely[:, number], self.part(number)
            ranked = F.linear(x[rows], self.out.weight[some], self.out.bias[some])
            logits[rows, some] = logit_of_both(matched[rows, number, None], ranked)
        return logits


def log_odds(counts: Tensor, total: Tensor | int) -> Tensor:
    """Logarithm of yes against no, of counts among a total, both raised by a half."""
    return torch.log((counts + 0.5) / (total - counts + 0.5))


def logit_of_both(one: Tensor, other: Tensor) -> Tensor:
    """Logit of the product of two probabilities, given by their logits."""
    both = F.logsigmoid(one) + F.logsigmoid(other)
    not_both = torch.logaddexp(F.logsigmoid(-one), F.logsigmoid(one) + F.logsigmoid(-other))
    return both - not_both


class TokenClassify(nn.Module):
    """Token classification: a linear layer on every vector."""

    def __init__(self, width: int, labels: int, drop: float, transform: nn.Module | None = None):
        super().__init__()
        self.transform = transform or nn.Identity()
        self.out = nn.Linear(width, labels)
        self.drop = drop

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Logits (b, l, labels) of texts (b, l, w)."""
        return self.out(dropout(self.transform(x), self.drop, self.training))
