"""Very many labels, several a text: cluster them, match texts to clusters, rank what is in these.

X-BERT (Chang et al. 2019): an encoder cannot have a well-trained output for each of thousands of
labels, most of which have few texts. So labels that go with alike texts form clusters; the encoder
learns to which clusters a text belongs (the matcher: any model with a head over the clusters, its
logits through a sigmoid), and small linear models, one a label, tell the labels of a cluster apart.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.errors import UsageError
from regard.layers.heads import Mean

Labels = Sequence[Sequence[int]]  # the labels of each text


class Bags(nn.Module):
    """Texts as bags of tokens: how often each is there, times how rare it is, of length one.

    A vocabulary larger than `width` shares its places (feature hashing, Weinberger et al. 2009).
    """

    rarity: Tensor

    def __init__(self, vocab: int, width: int = 8192):
        super().__init__()
        self.width = min(vocab, width)
        self.register_buffer("rarity", torch.ones(vocab))

    def learn(self, texts: Iterable[Sequence[int]]) -> None:
        """Count in how many of the texts each token is; what is in all of them says nothing."""
        found, count = torch.zeros_like(self.rarity), 0
        for ids in texts:
            found[torch.tensor(sorted(set(ids)), dtype=torch.long)] += 1
            count += 1
        self.rarity.copy_(torch.log((count + 1) / (found + 1)))

    def forward(self, ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the bags (b, width) of texts (b, l)."""
        real = torch.ones_like(ids, dtype=torch.bool)
        if lengths is not None:
            real = torch.arange(ids.shape[1], device=ids.device) < lengths.unsqueeze(-1)
        sign = 1 - 2 * (ids // self.width % 2)  # so that what falls together does not add up
        values = (self.rarity[ids] * sign).masked_fill(~real, 0.0)
        bags = values.new_zeros(len(ids), self.width).scatter_add_(1, ids % self.width, values)
        return F.normalize(bags.sign() * bags.abs().log1p(), dim=-1)


def label_vectors(features: Tensor, wanted: Labels, labels: int) -> Tensor:
    """Return for each label the mean of the features (n, f) of its texts, of length one."""
    texts, numbers = pairs(wanted)
    total = features.new_zeros(labels, features.shape[1])
    return F.normalize(total.index_add_(0, numbers, features[texts]), dim=-1)


def pairs(wanted: Labels) -> tuple[Tensor, Tensor]:
    """Return the numbers of texts and labels that go together."""
    found = [(i, label) for i, row in enumerate(wanted) for label in row]
    texts, labels = torch.tensor(found, dtype=torch.long).view(-1, 2).unbind(1)
    return texts, labels


def cluster(vectors: Tensor, clusters: int, *, rounds: int = 20, seed: int = 0) -> Tensor:
    """Return the cluster of each vector (n, f); the sizes of clusters differ by one at most.

    Again and again the vectors are cut into two parts of given sizes by 2-means on the sphere:
    those that lean most to the first of two centres make up the first part.
    """
    if not 1 <= clusters <= len(vectors):
        raise UsageError(
            f"{clusters} clusters of {len(vectors)} labels; choose at most one a label"
        )
    rand = torch.Generator().manual_seed(seed)
    found = torch.zeros(len(vectors), dtype=torch.long)
    parts = [(torch.arange(len(vectors)), 0, clusters)]  # numbers, first cluster, clusters
    while parts:
        numbers, first, count = parts.pop()
        if count == 1:
            found[numbers] = first
            continue
        left = count // 2
        # the larger clusters come first in every part
        size = len(numbers) // count * left + min(left, len(numbers) % count)
        some = vectors[numbers]
        one = some[int(torch.randint(len(some), (1,), generator=rand))]
        centres = torch.stack([one, some[(some @ one).argmin()]])  # as far apart as can be
        order = torch.arange(len(some))
        for _ in range(rounds):
            lean = some @ (centres[0] - centres[1])
            new = lean.argsort(descending=True, stable=True)
            if torch.equal(new, order):
                break
            order = new
            halves = order[:size], order[size:]
            centres = torch.stack([F.normalize(some[half].mean(0), dim=0) for half in halves])
        parts.append((numbers[order[:size]], first, left))
        parts.append((numbers[order[size:]], first + left, count - left))
    return found


def of_clusters(wanted: Labels, clusters: Tensor) -> list[list[int]]:
    """Return the clusters of each text's labels, which are what the matcher learns."""
    return [sorted({int(clusters[label]) for label in row}) for row in wanted]


def several(wanted: Labels, labels: int) -> Tensor:
    """Return a one for each label of each text, (n, labels)."""
    ones = torch.zeros(len(wanted), labels)
    ones[pairs(wanted)] = 1.0
    return ones


def several_loss(logits: Tensor, wanted: Tensor) -> Tensor:
    """Return the summed loss of labels of which each is there or not by itself."""
    return F.binary_cross_entropy_with_logits(logits, wanted.to(logits.dtype), reduction="sum")


@torch.no_grad()
def read(
    model: nn.Module, bags: Bags, ids: Tensor, lengths: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return what the ranker reads of texts (b, l), (b, f), and the matcher's logits (b, clusters).

    The features are the mean of the encoder's vectors, and the bag.
    """
    x = model.hidden(ids, lengths)  # type: ignore[operator]
    mean = F.normalize(Mean()(x, lengths), dim=-1)
    return torch.cat([mean, bags(ids, lengths)], dim=-1), model.head(x, lengths)  # type: ignore[operator]


class Ranker(nn.Module):
    """A linear model for each label, which need only tell it from the others of its cluster."""

    clusters: Tensor

    def __init__(self, clusters: Tensor, features: int):
        super().__init__()
        self.register_buffer("clusters", clusters)
        self.weight = nn.Parameter(torch.zeros(len(clusters), features))
        self.bias = nn.Parameter(torch.zeros(len(clusters)))

    def learn(
        self,
        features: Tensor,
        wanted: Labels,
        matched: Tensor,
        *,
        most: int = 4,
        decay: float = 1e-5,
        steps: int = 20,
    ) -> None:
        """Fit the labels of each cluster on the texts that belong there, or that seem to.

        Those are the texts with a label of the cluster, and those for which it is among the `most`
        likely ones by the matcher's logits (n, clusters): they will have to be told apart later.
        """
        texts, labels = pairs(wanted)
        asked = torch.zeros_like(matched, dtype=torch.bool)
        asked.scatter_(1, matched.topk(min(most, matched.shape[1])).indices, True)
        asked[texts, self.clusters[labels]] = True
        for number in range(matched.shape[1]):
            mine = (self.clusters == number).nonzero().squeeze(1)
            rows = asked[:, number].nonzero().squeeze(1)
            if len(mine) and len(rows):
                right = _part(texts, labels, rows, mine, len(features), len(self.clusters))
                self._fit(mine, features[rows], right, decay, steps)

    def _fit(self, mine: Tensor, x: Tensor, right: Tensor, decay: float, steps: int) -> None:
        """Fit logistic regressions for some labels, all at once."""
        weight, bias = (p.detach()[mine].requires_grad_() for p in (self.weight, self.bias))
        optimiser = torch.optim.LBFGS([weight, bias], max_iter=steps, line_search_fn="strong_wolfe")

        def loss() -> Tensor:
            optimiser.zero_grad()
            value = several_loss(F.linear(x, weight, bias), right) / len(x)
            value = value + decay * weight.square().sum()
            value.backward()
            return value

        optimiser.step(loss)  # type: ignore[arg-type]
        self.weight.data[mine], self.bias.data[mine] = weight.detach(), bias.detach()

    @torch.no_grad()
    def forward(self, features: Tensor, matched: Tensor, *, most: int = 4, best: int = 5):
        """Return the best labels (n, best) of texts with their log-probabilities, best first.

        A label is as likely as its cluster is by the matcher times itself within the cluster.
        """
        likely = matched.topk(min(most, matched.shape[1])).indices
        scores = features.new_full((len(features), len(self.clusters)), -torch.inf)
        for number in likely.unique().tolist():
            mine = (self.clusters == number).nonzero().squeeze(1)
            rows = (likely == number).any(1).nonzero().squeeze(1)
            inside = F.linear(features[rows], self.weight[mine], self.bias[mine])
            both = F.logsigmoid(inside) + F.logsigmoid(matched[rows, number]).unsqueeze(1)
            scores[rows.unsqueeze(1), mine] = both
        top = scores.topk(min(best, len(self.clusters)))
        return top.indices, top.values


def _part(
    texts: Tensor, labels: Tensor, rows: Tensor, mine: Tensor, count: int, all_labels: int
) -> Tensor:
    """Return a one for each pair of these rows and labels that go together, (rows, mine)."""
    row, column = torch.full((count,), -1), torch.full((all_labels,), -1)
    row[rows], column[mine] = torch.arange(len(rows)), torch.arange(len(mine))
    here = (row[texts] >= 0) & (column[labels] >= 0)
    right = torch.zeros(len(rows), len(mine))
    right[row[texts[here]], column[labels[here]]] = 1.0
    return right


def precision(found: Tensor, wanted: Labels, at: Sequence[int] = (1, 3, 5)) -> dict[str, float]:
    """Return which share of the first 1, 3 and 5 labels found (n, best) is right."""
    right = torch.tensor(
        [
            [label in set(row) for label in line]
            for line, row in zip(found.tolist(), wanted, strict=True)
        ]
    )
    return {f"precision@{k}": right[:, :k].float().sum(1).div(k).mean().item() for k in at}
