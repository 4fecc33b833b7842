"""Very many labels: clusters are even and make sense, and ranking within them finds the labels."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from torch import Tensor
from torch.nn import functional as F

from regard.errors import UsageError
from regard.layers.xbert import (
    ClusterRanker,
    HashedTfidf,
    balanced_clusters,
    cluster_targets,
    label_centroids,
    multi_hot,
    ranker_inputs,
)
from regard.metrics.labels import precision_at_k
from regard.models import preset
from regard.models.bert import Bert

TOPICS, EACH = 16, 20  # 320 labels
NOISE = 200  # tokens that any text may have
VOCAB = NOISE + TOPICS * 6 + TOPICS * EACH * 2
LENGTH = 24


def texts(count: int, seed: int) -> tuple[Tensor, list[list[int]]]:
    """Return texts and their labels, of which few are frequent and most are rare.

    A label has two tokens of its own and shares six with its topic; half of a text is noise.
    """
    rng = torch.Generator().manual_seed(seed)
    labels = TOPICS * EACH
    order = torch.randperm(labels, generator=torch.Generator().manual_seed(7))
    frequency = torch.empty(labels)
    frequency[order] = 1 / torch.arange(5, labels + 5)
    ids = torch.randint(0, NOISE, (count, LENGTH), generator=rng)
    targets = []
    for row in ids:
        topic = int(torch.multinomial(frequency.view(TOPICS, EACH).sum(1), 1, generator=rng))
        own = frequency[topic * EACH : (topic + 1) * EACH]
        number = int(torch.randint(1, 4, (1,), generator=rng))
        chosen = (torch.multinomial(own, number, generator=rng) + topic * EACH).tolist()
        targets.append(sorted(chosen))
        for i, label in enumerate(chosen):
            shared = torch.randint(0, 6, (2,), generator=rng) + NOISE + topic * 6
            private = NOISE + TOPICS * 6 + 2 * label + torch.randint(0, 2, (2,), generator=rng)
            row[i * 4 : i * 4 + 4] = torch.cat([shared, private])
    return ids, targets


def trained_matcher(ids: Tensor, targets: list[list[int]], clusters: int) -> Bert:
    """Return a small encoder that has learned to which clusters texts belong."""
    torch.manual_seed(0)
    config = replace(preset("bert", "tiny"), vocab=VOCAB, depth=1, position="none", init="scaled")
    block = replace(config.block, width=32, ffn_width=64, order="pre", dropout=0.0)
    config = replace(config, block=block, head="classify", labels=clusters, pool="mean")
    model = Bert(config)
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-2)
    right = multi_hot(targets, clusters)
    for _ in range(60):
        rows = torch.randint(0, len(ids), (32,))
        logits = model(ids[rows])
        loss = F.binary_cross_entropy_with_logits(logits, right[rows], reduction="sum")
        loss.div(32).backward()
        optimiser.step()
        optimiser.zero_grad()
    return model.eval()


def test_many_labels_are_found_far_better_than_by_frequency():
    ids, targets = texts(1500, 0)
    test_ids, test_targets = texts(300, 1)
    tfidf = HashedTfidf(VOCAB)
    tfidf.fit(ids.tolist())
    clusters = balanced_clusters(label_centroids(tfidf(ids), targets, TOPICS * EACH), TOPICS)
    model = trained_matcher(ids, cluster_targets(targets, clusters), TOPICS)
    features, matched = ranker_inputs(model, tfidf, ids)
    ranker = ClusterRanker(clusters, features.shape[1])
    ranker.fit(features, targets, matched)
    ranked, scores = ranker(*ranker_inputs(model, tfidf, test_ids))
    ours = precision_at_k(ranked.numpy(), test_targets)
    usual = multi_hot(targets, TOPICS * EACH).sum(0).topk(5).indices
    baseline = precision_at_k(usual.expand(300, -1).numpy(), test_targets)
    assert baseline["precision@1"] < 0.2
    assert all(ours[name] > 3 * baseline[name] for name in ours)
    assert ours["precision@1"] > 0.85
    assert (scores.diff(dim=1) <= 0).all() and scores.max() < 0


def test_labels_of_alike_texts_fall_together():
    ids, targets = texts(1500, 0)
    tfidf = HashedTfidf(VOCAB)
    tfidf.fit(ids.tolist())
    seen = sorted({label for row in targets for label in row})
    ranked = balanced_clusters(label_centroids(tfidf(ids), targets, TOPICS * EACH), TOPICS)
    together = [
        max(torch.bincount(ranked[[n for n in seen if n // EACH == topic]])).item()
        for topic in range(TOPICS)
    ]
    assert sum(together) > 0.8 * len(seen)


@given(some.integers(1, 60), some.integers(1, 60), some.integers(0, 3))
def test_clusters_are_even(count: int, clusters: int, seed: int):
    vectors = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    if clusters > count:
        with pytest.raises(UsageError, match="clusters"):
            balanced_clusters(vectors, clusters)
        return
    sizes = torch.bincount(balanced_clusters(vectors, clusters, seed=seed), minlength=clusters)
    assert sizes.sum() == count and sizes.max() - sizes.min() <= 1


def test_tfidf_knows_no_order_and_no_padding():
    tfidf = HashedTfidf(10, width=4)
    tfidf.fit([[1, 2, 3], [1, 2], [1, 5]])
    one = tfidf(torch.tensor([[1, 2, 3, 3, 9, 9]]), torch.tensor([4]))
    other = tfidf(torch.tensor([[3, 3, 2, 1]]))
    torch.testing.assert_close(one, other)
    assert tfidf.idf[1] == 0 and tfidf.idf[3] > tfidf.idf[2] > 0
    assert one.norm() == pytest.approx(1) and not tfidf(torch.tensor([[1, 1]])).any()


def test_precision_counts_right_labels():
    ranked = torch.tensor([[4, 1, 2, 3, 0], [0, 1, 2, 3, 4]])
    scores = precision_at_k(ranked.numpy(), [[4, 2], [9]])
    assert scores == pytest.approx({"precision@1": 0.5, "precision@3": 1 / 3, "precision@5": 0.2})
