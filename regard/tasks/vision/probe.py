"""What the vectors of an encoder are worth: labels by neighbours, or by one linear map."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from regard.data.image_format import ImageFormat
from regard.data.images import ImageData, Images
from regard.errors import UsageError
from regard.modalities.image import IMAGE
from regard.models.protocols import ImageEncoder
from regard.tasks import task
from regard.tasks.frame.media import MediaCodec
from regard.tasks.runner import Runner
from regard.tasks.vision.photos import read_images

if TYPE_CHECKING:
    from regard.tasks.vision.images import EvalImages

_CHUNK = 2048  # vectors that are compared with all others at once
_TEMPERATURE = 0.07  # of the votes of neighbours (Wu et al. 2018)
_DECAYS = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)  # weight decays of the linear map to choose from
_FOLDS = 5  # one of so many parts is held out to choose by
_STEPS = 100
_KNOWN, _QUERIES = 5000, 1000  # images by which neighbours are judged while training


def pooled(model: ImageEncoder, images: Tensor) -> Tensor:
    """Return the vector (n, w) of each image that a head would read."""
    return model.pool(model.features(images))


@torch.inference_mode()
def vectors(model: ImageEncoder, images: Images, format: ImageFormat, batch: int = 256) -> Tensor:
    """Return the vectors (n, w) of all images of a part."""
    device = next(model.parameters()).device
    parts = np.split(np.arange(len(images)), range(batch, len(images), batch))
    rows = [pooled(model, format.normalise(images.read(p).to(device))) for p in parts]
    return torch.cat(rows).float().cpu()


class Known(NamedTuple):
    """Vectors whose labels are known, and how many labels there are."""

    vectors: Tensor
    labels: Tensor
    classes: int


def by_neighbours(known: Known, queries: Tensor, neighbours: int = 20) -> Tensor:
    """Return the probabilities (n, classes) of labels by attention to the nearest vectors."""
    keys, queries = F.normalize(known.vectors, dim=-1), F.normalize(queries, dim=-1)
    votes = F.one_hot(known.labels, known.classes).float()
    rows = []
    for some in queries.split(_CHUNK):
        near = (some @ keys.mT).topk(min(neighbours, len(keys)))
        weights = ((near.values - near.values[:, :1]) / _TEMPERATURE).exp()
        probs = (weights[..., None] * votes[near.indices]).sum(1)
        rows.append(probs / probs.sum(-1, keepdim=True))
    return torch.cat(rows)


def neighbour_accuracy(encoder: ImageEncoder, data: ImageData, format: ImageFormat) -> float:
    """Return the accuracy of the labels that nearest neighbours of train vote for, in percent."""
    train, valid = data.parts["train"], data.parts["valid"]
    every = max(1, len(train) // _KNOWN)
    known = train.pick(np.arange(0, len(train), every)[:_KNOWN])
    some = valid.pick(np.arange(min(_QUERIES, len(valid))))
    theirs, ours = (vectors(encoder, part, format) for part in (known, some))
    probs = by_neighbours(Known(theirs, known.labels, len(data.classes)), ours)
    return 100 * float((probs.argmax(1) == some.labels).float().mean())


def fit_linear(known: Known, decay: float) -> Callable[[Tensor], Tensor]:
    """Return logistic regression of labels on standardised vectors, fitted by L-BFGS."""
    mean, spread = known.vectors.mean(0), known.vectors.std(0, correction=0).clamp_min(1e-6)
    x = (known.vectors - mean) / spread
    weight = torch.zeros(x.shape[1], known.classes, requires_grad=True)
    bias = torch.zeros(known.classes, requires_grad=True)
    optimiser = torch.optim.LBFGS([weight, bias], max_iter=_STEPS, line_search_fn="strong_wolfe")

    def error() -> Tensor:
        optimiser.zero_grad()
        loss = F.cross_entropy(x @ weight + bias, known.labels) + decay / 2 * weight.square().sum()
        loss.backward()
        return loss

    with torch.enable_grad():
        optimiser.step(error)  # type: ignore[arg-type]
    weight, bias = weight.detach(), bias.detach()
    return lambda queries: ((queries - mean) / spread @ weight + bias).softmax(-1)


def fit_best_linear(known: Known) -> tuple[Callable[[Tensor], Tensor], float]:
    """Return a linear map from vectors to probabilities, and its weight decay.

    The decay is chosen on every fifth vector of a label; then all are learnt from.
    """
    order = known.labels.argsort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    held_out = place % _FOLDS == _FOLDS - 1
    decay = _DECAYS[-2]
    if held_out.any():
        some = Known(known.vectors[~held_out], known.labels[~held_out], known.classes)
        queries, targets = known.vectors[held_out], known.labels[held_out]

        def loss(decay: float) -> float:
            return float(
                F.nll_loss(fit_linear(some, decay)(queries).clamp_min(1e-9).log(), targets)
            )

        decay = min(_DECAYS, key=loss)
    return fit_linear(known, decay), decay


class Probe(NamedTuple):
    """What a probe has learnt: probabilities of labels by vectors, and what a score names of it."""

    probabilities: Callable[[Tensor], Tensor]
    facts: dict[str, Any]


def _knn(known: Known, settings: "EvalImages") -> Probe:
    def near(queries: Tensor) -> Tensor:
        return by_neighbours(known, queries, settings.neighbours)

    return Probe(near, {"neighbours": settings.neighbours})


def _linear(known: Known, settings: "EvalImages") -> Probe:
    probabilities, decay = fit_best_linear(known)
    return Probe(probabilities, {"decay": decay})


PROBES: dict[str, Callable[[Known, Any], Probe]] = {"linear": _linear, "knn": _knn}


class Probed(nn.Module):
    """An encoder with a probe on its vectors."""

    def __init__(self, encoder: Any, probabilities: Callable[[Tensor], Tensor]):
        super().__init__()
        self.encoder, self.probabilities = encoder, probabilities

    def forward(self, images: Tensor) -> Tensor:
        """Return log-probabilities (n, labels)."""
        probs = self.probabilities(pooled(self.encoder, images).float().cpu())
        return probs.clamp_min(1e-9).log()


def probed(
    runners: Sequence[Runner[Any]], settings: "EvalImages"
) -> "list[tuple[Runner[Any], EvalImages]]":
    """Probes on the vectors of models that probe= asks to be judged; none without it."""
    if settings.probe is None:
        for key, usual in (("share", 1.0), ("neighbours", 20)):
            if getattr(settings, key) != usual:
                raise UsageError(f"{key}= is of a probe; add probe=linear or probe=knn")
        return []
    return [(_probed(runner, settings), settings) for runner in runners]


def _probed(runner: Any, settings: "EvalImages") -> Runner[Any]:
    """The model to judge: with probe=, labels that are learnt from the vectors of a model."""
    if settings.part == "train":
        raise UsageError("part=train is what a probe learns from; choose part=test or part=valid")
    data = read_images(runner, settings, need=("train", settings.part), trained=None)
    if len(data.classes) < 2:
        raise UsageError(f"{settings.data}: one label, {data.classes}; expected at least two")
    train = data["train"].part(settings.share)
    format = runner.codec.format
    known = Known(vectors(runner.model, train, format), train.labels, len(data.classes))
    assert settings.probe is not None  # or nothing would be probed
    probe = PROBES[settings.probe](known, settings)
    model = Probed(runner.model, probe.probabilities).eval()
    facts = {"probe": settings.probe, "share": settings.share, **probe.facts}
    return Runner(task("images"), model, MediaCodec(IMAGE, format, data.classes), {"probe": facts})
