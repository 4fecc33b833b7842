"""A classifier of two parts: an encoder, and a linear model that is added where rows are few."""

from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.nn import functional as F

from regard.errors import UsageError
from regard.files import write_atomically
from regard.files.hashes import verify

MIXTURE_FILE = "linear.safetensors"
MIXED_ROWS = 20_000  # of a training part up to which a linear model is added
_WEIGHTS = (0.0, 0.125, 0.25, 0.5, 1.0, 2.0)
_MAX_WEIGHT, _MAX_BYTES = 100.0, 10_000
_SMOOTHING = 0.02  # of labels, so that rows which are all right ask for no endless weights
_MAX_COMPARED = 2000  # rows by which weights are chosen
ALONE = (  # why no other tool takes it
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
        """Weights under which rows (n, labels) that neither was fitted on are likeliest.

        They are never less often right there than the linear model alone is. To keep less than half
        of that, the loss must be lower by more than its standard error.
        """
        some = torch.linspace(0, len(targets) - 1, min(len(targets), _MAX_COMPARED)).long()
        encoder, linear, targets = encoder[some], linear[some], targets[some]

        def judged(one: "Mixture") -> tuple[Tensor, int]:
            logits = one.logits(encoder, linear)
            how: Any = {"reduction": "none", "label_smoothing": _SMOOTHING}
            return F.cross_entropy(logits, targets, **how), int((logits.argmax(1) == targets).sum())

        alone = cls(0.0, 1.0)
        before, right = judged(alone)
        found = {
            cls(*both): judged(cls(*both)) for both in product(_WEIGHTS, _WEIGHTS) if any(both)
        }
        for one in sorted(found, key=lambda one: float(found[one][0].mean())):
            gain = before - found[one][0]
            error = float(gain.std()) / len(gain) ** 0.5 if len(gain) > 1 else float("inf")
            enough = 0.0 if one.linear >= 0.5 else error
            if found[one][1] >= right and float(gain.mean()) > enough:
                return one
        return alone

    @classmethod
    def load(cls, folder: Path) -> "Mixture | None":
        """Read the weights of a folder, if there are any, or say what is wrong with the file."""
        path = folder / MIXTURE_FILE
        if not path.is_file():
            return None
        verify(folder, MIXTURE_FILE)
        try:
            tables = load(path.read_bytes()[:_MAX_BYTES])
            read = cls(*(float(tables[key]) for key in cls._fields))
        except (SafetensorError, OSError, ValueError, TypeError, KeyError, RuntimeError):
            read = None
        if read is None or not all(0 <= weight <= _MAX_WEIGHT for weight in read):
            raise UsageError(
                f"{path}: not the weights (0 to {_MAX_WEIGHT:g}) of an encoder and a linear model; "
                "restore it as it was published"
            )
        return read


_LEAST = -60.0  # log-probability, so that zero times that of an impossible label is zero


def save_mixture(folder: Path, scores: Mapping[str, float]) -> None:
    """Write the weights that are among the scores of published weights, if any are."""
    path = folder / MIXTURE_FILE
    if not all(key in scores for key in _KEYS):
        path.unlink(missing_ok=True)
        return
    chosen = Mixture(*(scores[key] for key in _KEYS))
    tables = {key: torch.tensor(value) for key, value in chosen._asdict().items()}
    write_atomically(path, save(tables))
