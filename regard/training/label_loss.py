"""Losses of labels, with label smoothing, class weights and R-Drop."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.training.loss import own_loss

_MOST_WEIGHT = 100.0  # of a label in the loss
_IMBALANCED = 5  # times as often: labels that the user should hear of


def _balanced(counts: np.ndarray, rows: int) -> np.ndarray:
    """Weigh every label alike, however rare it is; the mean over all rows is one."""
    return rows / (len(counts) * np.maximum(counts, 1))


# name -> the weight of each label in the loss, from its count among so many rows
CLASS_WEIGHTS: dict[str, Callable[[np.ndarray, int], np.ndarray] | None] = {
    "none": None,
    "balanced": _balanced,
}


def class_weights(
    name: str, counts: np.ndarray, rows: int, multilabel: bool = False
) -> Tensor | None:
    """Weight of each label in the loss; of several a row, that of its presence."""
    weigh = CLASS_WEIGHTS[name]
    if weigh is None:
        return None
    weights = (rows - counts) / np.maximum(counts, 1) if multilabel else weigh(counts, rows)
    return torch.from_numpy(np.clip(weights, 1 / _MOST_WEIGHT, _MOST_WEIGHT).astype(np.float32))


def imbalance_notes(counts: np.ndarray, labels: Sequence[str], name: str) -> list[str]:
    """Warn that some labels are much rarer than others, unless class weights make up for it."""
    low, high = int(counts.argmin()), int(counts.argmax())
    if CLASS_WEIGHTS[name] is not None or counts[high] < _IMBALANCED * max(1, counts[low]):
        return []
    return [
        f"uneven labels: {labels[high]!r:.40} occurs {int(counts[high]):,} times, "
        f"{labels[low]!r:.40} {int(counts[low]):,}; judge by macro F1, too, or set "
        "class_weights=balanced to let each label weigh alike"
    ]


def soft_loss(logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Summed cross-entropy of targets (b, labels) that sum to one, weighted by label."""
    targets = targets if weights is None else targets * weights
    return -(targets * logits.float().log_softmax(-1)).sum()


def target_loss(name: str, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Summed loss of targets (b, labels): cross-entropy, or that of the user of a name."""
    if name == "auto":
        return soft_loss(logits, targets, weights)
    return own_loss(name, logits, targets)


class LabelLoss(NamedTuple):
    """The summed loss of logits, R-Drop's divergence of two of them, and their probabilities."""

    loss: Callable[[Tensor, Tensor, float, Tensor | None], Tensor]
    divergence: Callable[[Tensor, Tensor], Tensor]
    probs: Callable[[Tensor], Tensor]


def _single(logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
    return F.cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=smoothing)


def _single_divergence(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.log_softmax(-1), b.log_softmax(-1)
    return ((p.exp() - q.exp()) * (p - q)).sum()


def _multi(
    logits: Tensor,
    targets: Tensor,
    smoothing: float,
    weights: Tensor | None,
    counted: Tensor | None = None,
) -> Tensor:
    targets = targets * (1 - smoothing) + smoothing / 2
    return F.binary_cross_entropy_with_logits(
        logits, targets.to(logits.dtype), counted, pos_weight=weights, reduction="sum"
    )


def _multi_divergence(a: Tensor, b: Tensor) -> Tensor:
    return ((a.sigmoid() - b.sigmoid()) * (a - b)).sum()


# one label a row, any number of them, or a number, which is the only logit itself
LABEL_LOSSES: dict[str, LabelLoss] = {
    "single": LabelLoss(_single, _single_divergence, lambda logits: logits.softmax(-1)),
    "multi": LabelLoss(_multi, _multi_divergence, torch.sigmoid),
    "value": LabelLoss(
        lambda logits, targets, smoothing, weights: F.mse_loss(logits, targets, reduction="sum"),
        lambda a, b: (a - b).square().sum(),
        lambda logits: logits,
    ),
}


def clustered(labels: int, clusters: int, beam: int) -> LabelLoss:
    """Loss of labels that stand cluster by cluster, of logits (b, clusters + labels).

    It is the loss of the text's clusters, and that of labels inside the clusters that a text has or
    is taken for: its own, and the `beam` likeliest, as they will be ranked later.
    """
    numbers = torch.arange(clusters)
    cluster = numbers.repeat_interleave(labels // clusters + (numbers < labels % clusters))

    def loss(logits: Tensor, targets: Tensor, smoothing: float, weights: Tensor | None) -> Tensor:
        matched, ranked = logits[:, :clusters], logits[:, clusters:]
        of = cluster.to(logits.device)
        own = torch.zeros_like(matched).index_add_(1, of, targets.to(matched)).clamp(max=1)
        seen = own.bool().scatter(1, matched.topk(min(beam, clusters)).indices, True)
        inside = _multi(ranked, targets, smoothing, weights, counted=seen[:, of].to(ranked))
        return _multi(matched, own, smoothing, None) + inside

    return LabelLoss(loss, _multi_divergence, torch.sigmoid)


def label_loss(
    kind: LabelLoss,
    logits: Callable[[], Tensor],
    targets: Tensor,
    smoothing: float,
    r_drop: float,
    weights: Tensor | None = None,
) -> Tensor:
    """Summed loss; with R-Drop (Wu et al. 2021), of two passes that should agree.

    Args:
        kind: loss of a batch of logits
        logits: computes the logits, with new dropout at each call
        targets: targets of the batch
        smoothing: label smoothing
        r_drop: weight of the R-Drop term; 0 disables it
        weights: weight of each class
    """
    one = logits().float()
    if not r_drop:
        return kind.loss(one, targets, smoothing, weights)
    two = logits().float()
    both = kind.loss(one, targets, smoothing, weights) + kind.loss(two, targets, smoothing, weights)
    return both / 2 + r_drop / 4 * kind.divergence(one, two)
