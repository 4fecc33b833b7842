"""X-BERT: extreme multi-label classification by label clusters (Chang et al. 2019).

An encoder cannot have a well-trained output for each of thousands of labels, most of which have few
texts. So labels of similar texts are clustered; the encoder is fine-tuned to predict the clusters
of a text (the matcher: any model with a head over the clusters, its logits through a sigmoid), and
logistic regressions, one a label, rank the labels inside a cluster.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import UsageError
from regard.layers.heads import Mean

Labels = Sequence[Sequence[int]]  # the labels of each text


class HashedTfidf(nn.Module):
    """TF-IDF vectors of tokens, with log counts and of length one.

    A vocabulary larger than `width` is hashed into it (feature hashing, Weinberger et al. 2009).
    """

    idf: Tensor

    def __init__(self, vocab: int, width: int = 8192):
        super().__init__()
        self.width = min(vocab, width)
        self.register_buffer("idf", torch.ones(vocab))

    def fit(self, texts: Iterable[Sequence[int]]) -> None:
        """Compute inverse document frequencies; a token that is in every text has none."""
        frequency, count = torch.zeros_like(self.idf), 0
        for ids in texts:
            frequency[torch.tensor(sorted(set(ids)), dtype=torch.long)] += 1
            count += 1
        self.idf.copy_(torch.log((count + 1) / (frequency + 1)))

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the vectors (b, width) of texts (b, l)."""
        real = torch.ones_like(ids, dtype=torch.bool)
        if lengths is not None:
            real = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(-1)
        sign = 1 - 2 * (ids // self.width % 2)  # so that colliding tokens do not add up
        values = (self.idf[ids] * sign).masked_fill(~real, 0.0)
        sums = values.new_zeros(len(ids), self.width).scatter_add_(1, ids % self.width, values)
        return F.normalize(sums.sign() * sums.abs().log1p(), dim=-1)


def label_centroids(features: Tensor, targets: Labels, labels: int) -> Tensor:
    """Return for each label the mean of the features (n, f) of its texts, of length one."""
    rows, columns = _indices(targets)
    total = features.new_zeros(labels, features.shape[1])
    return F.normalize(total.index_add_(0, columns, features[rows]), dim=-1)


def _indices(targets: Labels) -> tuple[Tensor, Tensor]:
    """Return the row and the label of every target."""
    pairs = [(i, label) for i, row in enumerate(targets) for label in row]
    rows, labels = torch.tensor(pairs, dtype=torch.long).view(-1, 2).unbind(1)
    return rows, labels


def balanced_clusters(vectors: Tensor, clusters: int, *, rounds: int = 20, seed: int = 0) -> Tensor:
    """Return the cluster of each vector (n, f); the sizes of clusters differ by one at most.

    Bisecting spherical 2-means: those vectors that are closest to the first of two centroids,
    compared with the second, make up the first part, whose size is given.
    """
    if not 1 <= clusters <= len(vectors):
        raise UsageError(
            f"{clusters} clusters of {len(vectors)} labels; choose at most one a label"
        )
    rng = torch.Generator().manual_seed(seed)
    assigned = torch.zeros(len(vectors), dtype=torch.long)
    parts = [(torch.arange(len(vectors)), 0, clusters)]  # numbers, first cluster, clusters
    while parts:
        numbers, first, count = parts.pop()
        if count == 1:
            assigned[numbers] = first
            continue
        left = count // 2
        # the larger clusters come first in every part
        size = len(numbers) // count * left + min(left, len(numbers) % count)
        points = vectors[numbers]
        start = points[int(torch.randint(len(points), (1,), generator=rng))]
        centroids = torch.stack([start, points[(points @ start).argmin()]])  # the farthest from it
        order = torch.arange(len(points))
        for _ in range(rounds):
            margin = points @ (centroids[0] - centroids[1])
            new = margin.argsort(descending=True, stable=True)
            if torch.equal(new, order):
                break
            order = new
            halves = order[:size], order[size:]
            centroids = torch.stack([F.normalize(points[half].mean(0), dim=0) for half in halves])
        parts.append((numbers[order[:size]], first, left))
        parts.append((numbers[order[size:]], first + left, count - left))
    return assigned


def cluster_targets(targets: Labels, clusters: Tensor) -> list[list[int]]:
    """Return the clusters of each text's labels, which the matcher is trained to predict."""
    return [sorted({int(clusters[label]) for label in row}) for row in targets]


def multi_hot(targets: Labels, labels: int) -> Tensor:
    """Return a one for each label of each text, (n, labels)."""
    table = torch.zeros(len(targets), labels)
    table[_indices(targets)] = 1.0
    return table


@torch.no_grad()
def ranker_inputs(
    model: nn.Module, tfidf: HashedTfidf, ids: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return features of texts (b, l) for the ranker, (b, f), and the matcher's logits.

    The features are the mean of the encoder's hidden states, and the TF-IDF vector.
    """
    x = model.hidden(ids, lengths)  # type: ignore[operator]
    mean = F.normalize(Mean()(x, lengths), dim=-1)
    return torch.cat([mean, tfidf(ids, lengths)], dim=-1), model.head(x, lengths)  # type: ignore[operator]


class ClusterRanker(nn.Module):
    """A logistic regression for each label, against the other labels of its cluster only."""

    clusters: Tensor

    def __init__(self, clusters: Tensor, features: int):
        super().__init__()
        self.register_buffer("clusters", clusters)
        self.weight = nn.Parameter(torch.zeros(len(clusters), features))
        self.bias = nn.Parameter(torch.zeros(len(clusters)))

    def fit(
        self,
        features: Tensor,
        targets: Labels,
        matched: Tensor,
        *,
        top: int = 4,
        weight_decay: float = 1e-5,
        steps: int = 20,
    ) -> None:
        """Fit the labels of each cluster on its positive and hard negative texts.

        Those are the texts with a label of the cluster, and those for which it is among the `top`
        clusters by the matcher's logits (n, clusters), as it will be at test time.
        """
        rows, labels = _indices(targets)
        used = torch.zeros_like(matched, dtype=torch.bool)
        used.scatter_(1, matched.topk(min(top, matched.shape[1])).indices, True)
        used[rows, self.clusters[labels]] = True
        for number in range(matched.shape[1]):
            inside = (self.clusters == number).nonzero().squeeze(1)
            texts = used[:, number].nonzero().squeeze(1)
            if len(inside) and len(texts):
                shape = len(features), len(self.clusters)
                table = _submatrix(rows, labels, texts, inside, shape)
                self._fit(inside, features[texts], table, weight_decay, steps)

    def _fit(
        self, inside: Tensor, x: Tensor, targets: Tensor, weight_decay: float, steps: int
    ) -> None:
        """Fit the logistic regressions of some labels, all at once."""
        weight, bias = (p.detach()[inside].requires_grad_() for p in (self.weight, self.bias))
        optimiser = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimiser.zero_grad()
            logits = F.linear(x, weight, bias)
            value = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / len(x)
            value = value + weight_decay * weight.square().sum()
            value.backward()
            return value

        optimiser.step(loss)  # type: ignore[arg-type]
        self.weight.data[inside], self.bias.data[inside] = weight.detach(), bias.detach()

    @torch.no_grad()
    def forward(self, features: Tensor, matched: Tensor, *, top: int = 4, best: int = 5):
        """Return the best labels (n, best) of texts with their log-probabilities, best first.

        The probability of a label is that of its cluster times its own inside the cluster.
        """
        likely = matched.topk(min(top, matched.shape[1])).indices
        scores = features.new_full((len(features), len(self.clusters)), -torch.inf)
        for number in likely.unique().tolist():
            inside = (self.clusters == number).nonzero().squeeze(1)
            rows = (likely == number).any(1).nonzero().squeeze(1)
            logits = F.linear(features[rows], self.weight[inside], self.bias[inside])
            both = F.logsigmoid(logits) + F.logsigmoid(matched[rows, number]).unsqueeze(1)
            scores[rows.unsqueeze(1), inside] = both
        ranked = scores.topk(min(best, len(self.clusters)))
        return ranked.indices, ranked.values


def _submatrix(
    rows: Tensor, labels: Tensor, some_rows: Tensor, some_labels: Tensor, shape: tuple[int, int]
) -> Tensor:
    """Return the ones at (row, label) pairs in the chosen rows and columns of a matrix."""
    row, column = torch.full((shape[0],), -1), torch.full((shape[1],), -1)
    row[some_rows] = torch.arange(len(some_rows))
    column[some_labels] = torch.arange(len(some_labels))
    here = (row[rows] >= 0) & (column[labels] >= 0)
    table = torch.zeros(len(some_rows), len(some_labels))
    table[row[rows[here]], column[labels[here]]] = 1.0
    return table
