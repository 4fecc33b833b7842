"""How good the vectors of an encoder are: labels by their neighbours, or by one linear map."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from regard.data.image_format import ImageFormat
from regard.data.images import Images

ROWS = 2048  # vectors that are compared with all others at once
SHARPNESS = 1 / 0.07  # of the votes of neighbours (Wu et al. 2018)
DECAYS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # of the linear map, from which one is chosen
PARTS = 5  # one of so many parts is kept to choose by
STEPS = 100


def pooled(model: Any, images: Tensor) -> Tensor:
    """Return the vector (n, w) of which a head would read the label of each image."""
    return model.pool(model.features(images))


@torch.inference_mode()
def vectors(model: Any, images: Images, format: ImageFormat, batch: int = 256) -> Tensor:
    """Return the vectors (n, w) of all images of a part."""
    device = next(model.parameters()).device
    parts = np.split(np.arange(len(images)), range(batch, len(images), batch))
    found = [pooled(model, format.normalise(images.read(p).to(device))) for p in parts]
    return torch.cat(found).float().cpu()


class Known(NamedTuple):
    """Vectors whose labels are known, and how many labels there are."""

    vectors: Tensor
    labels: Tensor
    classes: int


def by_neighbours(known: Known, asked: Tensor, neighbours: int = 20) -> Tensor:
    """Return the chances (n, classes) of labels by the votes of the nearest in angle."""
    theirs, ours = F.normalize(known.vectors, dim=-1), F.normalize(asked, dim=-1)
    votes = F.one_hot(known.labels, known.classes).float()
    found = []
    for some in ours.split(ROWS):
        near = (some @ theirs.mT).topk(min(neighbours, len(theirs)))
        weights = ((near.values - near.values[:, :1]) * SHARPNESS).exp()
        chances = (weights[..., None] * votes[near.indices]).sum(1)
        found.append(chances / chances.sum(-1, keepdim=True))
    return torch.cat(found)


def fit_linear(known: Known, decay: float) -> Callable[[Tensor], Tensor]:
    """Return logistic regression of labels on standardised vectors, fitted by L-BFGS."""
    mean, spread = known.vectors.mean(0), known.vectors.std(0, correction=0).clamp_min(1e-6)
    x = (known.vectors - mean) / spread
    weight = torch.zeros(x.shape[1], known.classes, requires_grad=True)
    bias = torch.zeros(known.classes, requires_grad=True)
    search = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def error() -> Tensor:
        search.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, known.labels) + decay / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        search.step(error)  # type: ignore[arg-type]
    weight, bias = weight.detach(), bias.detach()
    return lambda asked: ((asked - mean) / spread @ weight + bias).softmax(-1)


def fit_line(known: Known) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return a linear map from vectors to chances, and its decay, chosen on a part of the known.

    Every fifth vector of a label is kept to choose by; then all are learnt from.
    """
    order = known.labels.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    kept = place % PARTS == PARTS - 1
    decay = DECAYS[-2]
    if kept.any():
        some = Known(known.vectors[~kept], known.labels[~kept], known.classes)
        there, wanted = known.vectors[kept], known.labels[kept]

        def missed(decay: float) -> float:
            return float(F.nll_loss(fit_linear(some, decay)(there).clamp_min(1e-9).log(), wanted))

        decay = min(DECAYS, key=missed)
    return fit_linear(known, decay), decay
