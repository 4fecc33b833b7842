"""Clusters of labels, for extreme multi-label classification (X-BERT, Chang et al. 2019).

A label is the mean TF-IDF vector of its texts (PIFA); balanced k-means puts labels of similar texts
into clusters of the same size, so that few clusters hold all labels that a text may have.
"""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.features import split_words
from regard.data.labelled import Example
from regard.data.labels import MOST_LABELS
from regard.errors import UsageError
from regard.files import read_json, write_json

FILE = "clusters.json"
_MOST_COLUMNS = 8192  # of a TF-IDF vector
_MOST_NUMBERS = 2**26  # of all vectors of labels: 256 MB


def label_vectors(texts: Sequence[Sequence[str]], targets: Sequence[Sequence[int]]) -> Tensor:
    """Mean TF-IDF vector (labels, columns) of the words of each label's texts.

    Counts are logarithms, vectors of length one; more words than columns are hashed into these
    (Weinberger et al. 2009).
    """
    numbers: dict[str, int] = {}
    ids = [np.array([numbers.setdefault(w, len(numbers)) for w in text], int) for text in texts]
    rows = [np.unique(row, return_counts=True) for row in ids]
    frequency = np.bincount(np.concatenate([row for row, _ in rows]), minlength=len(numbers))
    idf = np.log((len(rows) + 1) / (frequency + 1))
    labels = 1 + max(chain.from_iterable(targets))
    columns = min(max(1, len(numbers)), _MOST_COLUMNS, max(1, _MOST_NUMBERS // labels))
    total = np.zeros((labels, columns), np.float32)
    for (row, counts), some in zip(rows, targets, strict=True):
        values = np.log1p(counts) * idf[row]
        values *= 1 - 2 * (row // columns % 2)  # so that words in one column do not add up
        values /= max(float(np.linalg.norm(values)), 1e-9)
        np.add.at(total, (np.asarray(some, int)[:, None], row % columns), values)
    return F.normalize(torch.from_numpy(total), dim=-1)


def balanced_clusters(vectors: Tensor, clusters: int, *, rounds: int = 20, seed: int = 0) -> Tensor:
    """Cluster of each vector (n, f); the first clusters may have one more than others.

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


def cluster_labels(
    examples: Sequence[Example], labels: list[str], clusters: int, seed: int
) -> list[list[str]]:
    """Labels of each cluster, by the texts that have them."""
    numbers = {label: n for n, label in enumerate(labels)}
    words = [split_words(example.text.lower()) for example in examples]
    vectors = label_vectors(words, [[numbers[one] for one in e.labels] for e in examples])
    assigned = balanced_clusters(vectors, clusters, seed=seed)
    return [
        [labels[n] for n in (assigned == cluster).nonzero().flatten().tolist()]
        for cluster in range(clusters)
    ]


def save_clusters(folder: Path, clusters: list[list[str]]) -> None:
    """Write the labels of each cluster beside a model."""
    write_json(folder / FILE, {"clusters": clusters})


def load_clusters(folder: Path) -> list[list[str]]:
    """Read the clusters of a folder, or say what is wrong with the file."""
    path = folder / FILE
    clusters: Any = read_json(path).get("clusters")
    good = isinstance(clusters, list) and all(isinstance(some, list) for some in clusters)
    labels = list(chain.from_iterable(clusters)) if good else []
    if not labels or not all(isinstance(label, str) for label in labels):
        raise UsageError(f"{path}: 'clusters' is {clusters!r:.40}; expected lists of labels")
    if len(set(labels)) != len(labels) or len(labels) > MOST_LABELS:
        raise UsageError(f"{path}: expected at most {MOST_LABELS:,} labels, each in one cluster")
    if [len(some) for some in clusters] != [
        len(some) for some in np.array_split(np.arange(len(labels)), len(clusters))
    ]:
        raise UsageError(f"{path}: expected clusters of the same size, the first up to one larger")
    return clusters
