"""The lectures' claims about heads, scaling and short sequences, counted and measured."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import MultiHead
from regard.costs import count_operations, pretend

_SECONDS = 0.2  # spent on the clock of each row
_HEADS, WIDTH, LENGTH = (1, 2, 4, 8, 16), 512, 256
KEYS, TRIALS = 64, 256  # of the softmax whose gradient is measured
_HEAD_WIDTHS = (16, 64, 256, 1024)


def least_seconds(run: Callable[[], object], seconds: float = _SECONDS) -> float:
    """Return the least processor time of some runs, at least one after a first."""
    run()
    best, end = math.inf, time.perf_counter() + seconds
    while time.perf_counter() < end or best == math.inf:
        begun = time.process_time()
        run()
        best = min(best, time.process_time() - begun)
    return best


# ---- all heads cost about one


@dataclass(frozen=True)
class HeadCost:
    """What self-attention of one width takes when it is divided among some heads."""

    heads: int
    head_width: int
    multiply_adds: int
    seconds: float


def head_costs() -> list[HeadCost]:
    """Count and time multi-head attention with d_k = width / heads."""
    rows = []
    for heads in _HEADS:
        with pretend(), torch.no_grad(), torch.device("meta"):
            hollow, empty = MultiHead(WIDTH, heads), torch.empty(1, LENGTH, WIDTH)
            counted = count_operations(lambda made=hollow, x=empty: made(x)).multiply_adds
        attention, x = MultiHead(WIDTH, heads), torch.ones(1, LENGTH, WIDTH)
        with torch.inference_mode():
            seconds = least_seconds(lambda made=attention, x=x: made(x))
        rows.append(HeadCost(heads, WIDTH // heads, counted, seconds))
    return rows


# ---- scaling keeps the gradient of the softmax alive


@dataclass(frozen=True)
class Gradients:
    """The median size of the softmax's gradient, of dot products as they are and scaled."""

    head_width: int
    variance: float  # of the dot products
    plain: float
    scaled: float


def random_scores(width: int, keys: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Return dot products of random queries and keys of a width, (TRIALS, keys), and their scale.

    Coordinates are of variance 1, as those that a layer norm has left.
    """
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(TRIALS, width, 1, generator=generator, dtype=torch.float64)
    k = torch.randn(1, keys, width, generator=generator, dtype=torch.float64)
    return (k @ q).squeeze(-1), torch.tensor(width**-0.5, dtype=torch.float64)


def softmax_gradient(p: Tensor) -> Tensor:
    """Return the size (Frobenius norm) of the softmax's gradient, diag(p) - p p', of weights p.

    Its square is sum p^2 - 2 sum p^3 + (sum p^2)^2.
    """
    second = (p**2).sum(-1)
    return (second - 2 * (p**3).sum(-1) + second**2).clamp(min=0).sqrt()


def gradients() -> list[Gradients]:
    """Measure the gradient of the softmax by the width of queries and keys."""
    rows = []
    for width in _HEAD_WIDTHS:
        scores, scale = random_scores(width, KEYS)
        plain, scaled = (softmax_gradient(x.softmax(-1)) for x in (scores, scores * scale))
        sizes = float(plain.median()), float(scaled.median())
        rows.append(Gradients(width, float(scores.var()), *sizes))
    return rows


# ---- published results


@dataclass(frozen=True)
class Published:
    """A row of the Transformer paper's results: BLEU on newstest2014, and training FLOPs."""

    model: str
    german: float | None
    french: float | None
    german_flops: float | None
    french_flops: float | None


# Vaswani et al. 2017, table 2, as on the slide; the paper has one cost for each Transformer
RESULTS = (
    Published("ByteNet", 23.75, None, None, None),
    Published("Deep-Att + PosUnk", None, 39.2, None, 1.0e20),
    Published("GNMT + RL", 24.6, 39.92, 2.3e19, 1.4e20),
    Published("ConvS2S", 25.16, 40.46, 9.6e18, 1.5e20),
    Published("MoE", 26.03, 40.56, 2.0e19, 1.2e20),
    Published("Deep-Att + PosUnk, ensemble", None, 40.4, None, 8.0e20),
    Published("GNMT + RL, ensemble", 26.30, 41.16, 1.8e20, 1.1e21),
    Published("ConvS2S, ensemble", 26.36, 41.29, 7.7e19, 1.2e21),
    Published("Transformer base", 27.3, 38.1, 3.3e18, 3.3e18),
    Published("Transformer big", 28.4, 41.8, 2.3e19, 2.3e19),
)
