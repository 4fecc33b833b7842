"""A classifier of two parts: an encoder, and a linear model that is added where rows are few."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save
from torch import Tensor
from torch.nn import functional as F

from regard.errors import UsageError
from regard.files import write_atomically
from regard.files.hashes import verify

MIXTURE_FILE = "linear.safetensors"
MIXED_ROWS = 20_000  # of a training part up to which a linear model is added
_WEIGHTS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0)
_MAX_WEIGHT, _MAX_BYTES = 100.0, 2**26
_SMOOTHING = 0.02  # of labels, so that rows which are all right ask for no endless weights
_MAX_COMPARED = 2000  # rows by which weights are chosen
_CLEAR, _PRIOR = 0.5, 10.0  # standard errors of a loss; of a weight, by its square
LINEAR_ALONE = (  # why no other tool takes it
    "only the encoder of a classifier can be exported, and this one has a linear model added to "
    "it; train with linear=false to export"
)
_KEYS = "encoder_weight", "linear_weight"  # among the scores of a validation
UNHEARD = (  # where attention is shown all the same
    "the encoder's weight is 0: the linear model alone answers, and attention has no part in it"
)


class Mixture(NamedTuple):
    """Weights of the log-probabilities of an encoder and of a linear model, which are added."""

    encoder: float
    linear: float

    def logits(self, encoder: Tensor, linear: Tensor) -> Tensor:
        """Logits (n, labels) of both, by the logits of each."""
        one, other = (x.float().log_softmax(-1) for x in (encoder, linear))
        return self.encoder * one.clamp(min=_LEAST) + self.linear * other.clamp(min=_LEAST)

    @property
    def scores(self) -> dict[str, float]:
        """The weights as a validation tells them."""
        return dict(zip(_KEYS, self, strict=True))

    @classmethod
    def choose(cls, encoder: Tensor, linear: Tensor, targets: Tensor) -> "Mixture":
        """Weights by rows (n, labels) that neither was fitted on.

        The mean of pairs of weights, each by its probability given these rows and a prior at the
        linear model alone; that answers alone unless the loss of the best pair is clearly lower.
        """
        some = torch.linspace(0, len(targets) - 1, min(len(targets), _MAX_COMPARED)).long()
        encoder, linear, targets = encoder[some], linear[some], targets[some]
        pairs = torch.tensor([pair for pair in product(_WEIGHTS, _WEIGHTS) if any(pair)])
        how: Any = {"reduction": "none", "label_smoothing": _SMOOTHING}
        logits = (cls(*pair).logits(encoder, linear) for pair in pairs.tolist())
        losses = torch.stack([F.cross_entropy(one, targets, **how) for one in logits])
        means = losses.mean(1)
        alone = int(means.where(pairs[:, 0] == 0, torch.inf).argmin())
        gain = losses[alone] - losses[means.argmin()]
        error = float(gain.std()) / len(gain) ** 0.5 if len(gain) > 1 else float("inf")
        if float(gain.mean()) <= _CLEAR * error:
            return cls(*pairs[alone].tolist())
        far = _PRIOR * ((pairs - torch.tensor([0.0, 1.0])) ** 2).sum(1)
        mean = torch.softmax(-losses.sum(1) - far, 0) @ pairs
        return cls(*(round(weight, 4) for weight in mean.tolist()))


_LEAST = -60.0  # log-probability, so that zero times that of an impossible label is zero


def load_mixture(folder: Path) -> tuple[Mixture | None, dict[str, np.ndarray]]:
    """Read the weights of a folder, if there are any, and arrays of a linear model beside them."""
    path = folder / MIXTURE_FILE
    if not path.is_file():
        return None, {}
    verify(folder, MIXTURE_FILE)
    try:
        with open(path, "rb") as file:
            tables = load(file.read(_MAX_BYTES))
        read = Mixture(*(float(tables.pop(key)) for key in Mixture._fields))
    except (SafetensorError, OSError, ValueError, TypeError, KeyError):
        read, tables = None, {}
    if read is None or not all(0 <= weight <= _MAX_WEIGHT for weight in read):
        raise UsageError(
            f"{path}: not the weights (0 to {_MAX_WEIGHT:g}) of an encoder and a linear model; "
            "restore it as it was published"
        )
    return read, tables


def save_mixture(
    folder: Path, scores: Mapping[str, float], tables: Mapping[str, np.ndarray] | None = None
) -> None:
    """Write the weights that are among the scores of published weights, if any are.

    `tables` are those of the linear model, if it was fitted again since they were chosen.
    """
    path = folder / MIXTURE_FILE
    if not all(key in scores for key in _KEYS):
        path.unlink(missing_ok=True)
        return
    whole = {key: np.ascontiguousarray(table) for key, table in (tables or {}).items()}
    weights = zip(Mixture._fields, (scores[key] for key in _KEYS), strict=True)
    whole |= {key: np.array(value, np.float32) for key, value in weights}
    write_atomically(path, save(whole))
