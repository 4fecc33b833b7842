"""Planted features: vectors made of known features, which tell whether a dictionary finds truth.

A small copy of SynthSAEBench (Chanin et al. 2026): features fire by Zipf's law, correlated by a
Gaussian copula of low rank; two thirds stand in trees, where a child fires only with its parent
and never with a sibling; directions are nearly orthogonal, many more than there are dimensions.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.data import mix
from regard.insight import SparseAutoencoder
from regard.metrics import Named


@dataclass(frozen=True)
class PlantedConfig:
    """How many features there are, how often they fire, and how they hang together."""

    features: int = 1024
    width: int = 64
    most: float = 0.4  # probability to fire of the most frequent feature
    least: float = 5e-4
    exponent: float = 0.5
    roots: int = 8
    branching: int = 4
    depth: int = 3
    rank: int = 25
    correlation: float = 0.1
    seed: int = 1


class Planted:
    """A generator of vectors with known features; batch n is a function of (seed, n)."""

    def __init__(self, config: PlantedConfig | None = None):
        self.config = c = config or PlantedConfig()
        generator = torch.Generator().manual_seed(mix(c.seed, "planted"))
        self.directions = _spread(torch.randn(c.features, c.width, generator=generator))
        rank = torch.arange(1, c.features + 1).pow(-c.exponent)
        share = (rank - rank[-1]) / (rank[0] - rank[-1])
        chance = c.least + (c.most - c.least) * share
        factor = c.correlation * torch.randn(c.features, c.rank, generator=generator)
        self.factor = factor / factor.pow(2).sum(1, keepdim=True).sqrt().clamp(min=1.0) * 0.99
        self.alone = (1 - self.factor.pow(2).sum(1)).sqrt()
        self.parents, self.levels, self.families = self._trees(chance)
        self.threshold = torch.special.ndtri((1 - self.chance).double()).float()
        self.size = 0.5 + torch.rand(c.features, generator=generator)  # mean size when it fires

    def _trees(self, chance: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Put features into trees; a child fires less often than its parent, by Bayes' rule."""
        c = self.config
        self.chance = chance.clone()
        parents = torch.full((c.features,), -1)
        levels, families = [], []
        above = torch.arange(c.roots)
        next_one = c.roots
        wanted = self.chance.clone()
        for _ in range(c.depth):
            count = len(above) * c.branching
            children = torch.arange(next_one, min(next_one + count, c.features))
            parents[children] = above[torch.arange(len(children)) // c.branching]
            levels.append(children)
            families.append(children.view(-1, c.branching))
            # given that its parent fires, so that it fires as often as Zipf's law says
            ratio = wanted[children] / wanted[parents[children]]
            self.chance[children] = ratio.clamp(max=0.9)
            above, next_one = children, next_one + len(children)
        return parents, levels, families

    @torch.no_grad()
    def sample(self, n: int, count: int) -> tuple[Tensor, Tensor]:
        """Return batch n: the vectors (count, width) and the features (count, features) in them."""
        c = self.config
        generator = torch.Generator().manual_seed(mix(c.seed, "sample", n))
        common = torch.randn(count, c.rank, generator=generator) @ self.factor.T
        own = torch.randn(count, c.features, generator=generator)
        fires = torch.addcmul(common, own, self.alone) > self.threshold
        for children, family in zip(self.levels, self.families, strict=True):
            fires[:, children] &= fires[:, self.parents[children]]
            # of siblings one may stay: far digits of its noise say which, as good as a new draw
            luck = torch.where(fires[:, family], (4096 * own[:, family]).frac().abs(), -1.0)
            fires[:, family] &= luck == luck.max(2, keepdim=True).values
        row, feature = fires.nonzero(as_tuple=True)
        noise = 1 + 0.3 * torch.randn(len(row), generator=generator)
        z = torch.zeros(count, c.features)
        z[row, feature] = self.size[feature] * noise.clamp(min=0.1)
        return z @ self.directions, z


def _spread(directions: Tensor, steps: int = 100, lr: float = 0.01) -> Tensor:
    """Push unit vectors apart, as far as so many fit into so few dimensions."""
    x = directions.clone().requires_grad_()
    optimiser = torch.optim.Adam([x], lr=lr)
    for _ in range(steps):
        unit = x / x.norm(dim=1, keepdim=True)
        overlap = (unit @ unit.T).fill_diagonal_(0.0)
        optimiser.zero_grad()
        overlap.pow(2).sum().backward()
        optimiser.step()
    return (x / x.norm(dim=1, keepdim=True)).detach()


def matched_mean(scores: np.ndarray) -> float:
    """Return the mean score of rows and columns matched one to one, at best (Hungarian method)."""
    cost = -scores if scores.shape[0] <= scores.shape[1] else -scores.T
    n, m = cost.shape
    row_price, price = np.zeros(n + 1), np.zeros(m + 1)
    row_of, way = np.zeros(m + 1, int), np.zeros(m + 1, int)  # column 0 is where a row begins
    for row in range(1, n + 1):
        row_of[0], column = row, 0
        least, used = np.full(m + 1, np.inf), np.zeros(m + 1, bool)
        while row_of[column] or column == 0:
            used[column] = True
            now = row_of[column]
            reduced = cost[now - 1] - row_price[now] - price[1:]
            better = ~used[1:] & (reduced < least[1:])
            least[1:][better], way[1:][better] = reduced[better], column
            column = 1 + int(np.where(used[1:], np.inf, least[1:]).argmin())
            step = least[column]
            row_price[row_of[used]] += step
            price[used] -= step
            least[~used] -= step
        while column:
            before = way[column]
            row_of[column], column = row_of[before], before
    taken = row_of[1:].nonzero()[0]
    return float(-cost[row_of[1:][taken] - 1, taken].mean())


@dataclass(frozen=True)
class Recovered(Named):
    """How much of the truth a dictionary has found."""

    f1: float  # of each feature as a detector of the planted one nearest to it, on average
    mcc: float  # mean cosine of features and planted ones, matched one to one
    l0: float
    true_l0: float
    dead: float  # share of features that never fire
    explained: float  # variance

    def __str__(self) -> str:
        return (
            f"F1 {self.f1:.3f}, MCC {self.mcc:.3f}, L0 {self.l0:.1f} (true {self.true_l0:.1f}), "
            f"dead {self.dead:.1%}, explained variance {self.explained:.3f}"
        )


@torch.no_grad()
def judge_features(
    model: SparseAutoencoder, planted: Planted, *, first: int = 10**9, batches: int = 50
) -> Recovered:
    """Judge a dictionary by batches it has not seen, from number `first` on."""
    learned = model.decoder / model.decoder.norm(dim=1, keepdim=True).clamp(min=1e-8)
    cosine = (learned @ planted.directions.T).abs()
    nearest = cosine.argmax(1)
    counts = torch.zeros(3, len(learned))  # both fire, only the feature, only the planted one
    l0 = true_l0 = total = rest = 0.0
    square, plain, count = 0.0, torch.zeros(planted.config.width), 0
    for n in range(batches):
        x, truth = planted.sample(first + n, 2000)
        z = model.encode(x)
        fires, there = z > 0, truth[:, nearest] > 0
        parts = ((fires & there), (fires & ~there), (~fires & there))
        counts += torch.stack([part.float().sum(0) for part in parts])
        l0, true_l0 = l0 + float(fires.sum()), true_l0 + float((truth > 0).sum())
        rest += float((model.decode(z) - x).pow(2).sum())
        square, plain, count = square + float(x.pow(2).sum()), plain + x.sum(0), count + len(x)
    total = square - float(plain.pow(2).sum()) / count
    both, only, missed = counts
    f1 = 2 * both / (2 * both + only + missed).clamp(min=1)
    return Recovered(
        float(f1.mean()),
        matched_mean(cosine.double().numpy()),
        l0 / count,
        true_l0 / count,
        float(((both + only) == 0).float().mean()),
        1 - rest / total,
    )
