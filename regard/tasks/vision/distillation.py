"""Distillation: a student learns the labels or the probabilities of a trained classifier."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.errors import UsageError
from regard.models.protocols import ImageClassifier
from regard.tasks.frame.media import MediaCodec
from regard.tasks.frame.origin import Origin


def _hard(logits: Tensor, theirs: Tensor, temperature: float) -> Tensor:
    return F.cross_entropy(logits.float(), theirs.argmax(-1), reduction="sum")


def _soft(logits: Tensor, theirs: Tensor, temperature: float) -> Tensor:
    ours, theirs = (x.float().div(temperature).log_softmax(-1) for x in (logits, theirs))
    return temperature**2 * F.kl_div(ours, theirs, reduction="sum", log_target=True)


# what is learnt of a teacher: its labels (DeiT, Touvron et al. 2021), or its probabilities (Hinton
# et al. 2015)
DISTILS: dict[str, Callable[[Tensor, Tensor, float], Tensor]] = {"hard": _hard, "soft": _soft}


class Teacher:
    """A trained classifier of the same labels, asked about the images of each batch."""

    def __init__(self, origin: Origin, theirs: MediaCodec, ours: MediaCodec, device: str):
        folder, labels, format = origin.folder, ours.labels, ours.format
        if set(theirs.labels) != set(labels):
            raise UsageError(
                f"teacher={folder} knows other labels ({', '.join(theirs.labels[:6])}); "
                "take one that was trained on the same"
            )
        if theirs.format.channels != format.channels:
            raise UsageError(
                f"teacher={folder} reads {theirs.format.channels} channels, the data have "
                f"{format.channels}; set channels={theirs.format.channels}"
            )
        self.order = [theirs.labels.index(label) for label in labels]
        self.model = origin.model.to(device).eval().requires_grad_(False)
        self.size = theirs.format.size
        # from images as the student sees them to those of the teacher
        (mean, std), (mean2, std2) = (
            [torch.tensor(values, device=device)[:, None, None] for values in each.moments()]
            for each in (format, theirs.format)
        )
        self.scale, self.shift = std / std2, (mean - mean2) / std2

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Return its logits (b, labels)."""
        images = images * self.scale + self.shift
        if images.shape[-1] != self.size:
            images = F.interpolate(images, size=self.size, mode="bilinear", antialias=True)
        return self.model(images)[:, self.order]


def two_heads(model: ImageClassifier, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logits of the head for labels and of DeiT's for a teacher, or the same twice."""
    pooled = model.pool(model.features(images))
    if hasattr(model.head, "each"):
        return model.head.each(pooled)
    logits = model.head(pooled)
    return logits, logits
