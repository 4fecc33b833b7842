"""The lectures' figures about cost, counted with our own models and layers."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from regard import attend, cost
from regard.costs import PRODUCTS, binary, count_operations, pretend, short, table, tensors
from regard.gallery.claims import (
    KEYS,
    LENGTH,
    RESULTS,
    WIDTH,
    Gradients,
    HeadCost,
    Published,
    gradients,
    head_costs,
    least_seconds,
)

# ---- attention matrices of images


@dataclass(frozen=True)
class Matrices:
    """The attention of a whole image by each head of a number of layers."""

    model: str
    grid: int  # tokens in each direction
    entries: int  # that one head of one layer computes
    heads: int  # of all layers
    lecture: str

    @property
    def bytes(self) -> int:
        """Return the memory of one head's entries."""
        return 4 * self.entries  # of float32

    @property
    def total(self) -> int:
        """Return the memory of all heads and layers."""
        return self.bytes * self.heads


_LARGE = {"depth": 48, "block.width": 1024, "block.heads": 16, "tokens": 0, "pool": "mean"}
# what it is -> the model, what is set in it, the tokens in each direction, and the lectures' words
_IMAGES: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "a token a pixel, R = 128": (
        "vit",
        _LARGE | {"image": 128, "patch": 1},
        128,
        "R^4 entries, 768 GB",
    ),
    "ViT, patches of 16": (
        "vit",
        _LARGE | {"image": 224, "patch": 16},
        14,
        "38,416, 150 KB, 112 MB",
    ),
    "ViT, patches of 14": (
        "vit",
        _LARGE | {"image": 224, "patch": 14},
        16,
        "65,536, 256 KB, 192 MB",
    ),
    "patches of 4, no windows": (
        "vit",
        _LARGE | {"image": 224, "patch": 4, "depth": 1, "block.heads": 1},
        56,
        "H^2 W^2 = 9.8M",
    ),
    "patches of 4, windows of 7": ("swin_t", {}, 56, "M^2 H W"),
}


def matrices() -> list[Matrices]:
    """Count the attention matrices of images, of Swin those of its first stage."""
    return [_matrices(what, *row) for what, row in _IMAGES.items()]


def _matrices(
    what: str, name: str, changes: Mapping[str, Any], grid: int, lecture: str
) -> Matrices:
    settings = {f"model.{key}": value for key, value in changes.items()}
    shape = cost(name, growth=False, **settings).attention.shapes[0]
    heads = shape.heads * shape.layers
    return Matrices(what, grid, shape.entries // heads, heads, lecture)


# ---- four layers, and what they cost by the length n and the width d


class LayerKind(NamedTuple):
    """One way to process a sequence."""

    cost: str
    run: Callable[..., Tensor]  # of a sequence (n, d) and what is made before
    sizes: tuple[tuple[int, int], ...]  # lengths and widths that are timed: longer, then wider
    # weights for a width, and what is set in layer i of a stack
    make: Callable[[int, torch.device | str], tuple[Tensor, ...]] = lambda d, device: ()
    reach: Callable[[int], dict[str, int]] = lambda i: {}


_NEAR = 32  # r, the neighbours of restricted attention
_KERNEL = 3  # k, the width of a convolution


def self_attention(x: Tensor) -> Tensor:
    """Let every position look at all."""
    x = x[None, None]
    return attend(x, x, x)[0, 0]


def restricted(x: Tensor) -> Tensor:
    """Let every position look at NEAR positions around it."""
    padded = F.pad(x, (0, 0, _NEAR // 2, _NEAR // 2 - 1))
    near = padded.unfold(0, _NEAR, 1).mT.unsqueeze(1)
    return attend(x[:, None, None], near, near)[:, 0, 0]


def recurrent(x: Tensor, inner: Tensor, outer: Tensor) -> Tensor:
    """Carry a state from each position to the next: h_t = tanh(W h_(t-1) + U x_t)."""
    state, states = x.new_zeros(1, x.shape[1]), []
    for row in (x @ outer).unsqueeze(1).unbind():
        state = torch.addmm(row, state, inner).tanh()
        states.append(state)
    return torch.cat(states)


def convolution(x: Tensor, weight: Tensor, dilation: int = 1) -> Tensor:
    """Mix a position with those before it, KERNEL in all, which may stand apart."""
    padded = F.pad(x.T[None], ((_KERNEL - 1) * dilation, 0))
    return F.conv1d(padded, weight, dilation=dilation)[0].T


def _square(width: int, device: torch.device | str) -> Tensor:
    return torch.eye(width, device=device)


_LAYERS: dict[str, LayerKind] = {
    "self-attention": LayerKind("n^2 d", self_attention, ((1024, 64), (4096, 64), (1024, 256))),
    "recurrent": LayerKind(
        "n d^2",
        recurrent,
        ((64, 256), (256, 256), (64, 1024)),
        lambda d, device: (_square(d, device), _square(d, device)),
    ),
    "convolution": LayerKind(
        "k n d^2",
        convolution,
        ((512, 128), (2048, 128), (512, 512)),
        lambda d, device: (torch.ones(d, d, _KERNEL, device=device),),
        lambda i: {"dilation": _KERNEL**i},
    ),
    "restricted": LayerKind("r n d", restricted, ((2048, 64), (8192, 64), (2048, 256))),
}
_LENGTHS = (256, 1024)  # at which chains and paths are counted
TIMED_SECONDS = 0.3  # spent on the clock of each layer


@dataclass(frozen=True)
class Complexity:
    """How a layer's cost grows with the length n and the width d."""

    layer: str
    cost: str
    multiply_adds: tuple[float, float]  # the counted powers of n and d
    time: tuple[float, float]  # and the measured ones
    sequential: tuple[int, int]  # products that must wait for each other, at both _LENGTHS
    path: tuple[int, int]  # steps between the first position and the last


class _Depth(TorchDispatchMode):
    """Follows the longest chain of products in which each needs the last."""

    def __init__(self) -> None:
        super().__init__()
        self.depths: dict[int, tuple[int, Tensor]] = {}  # holds on to all: no two have one name
        self.longest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        depth = max((self.depths.get(id(x), (0,))[0] for x in tensors(args)), default=0)
        depth += func._overloadpacket in PRODUCTS
        self.longest = max(self.longest, depth)
        self.depths |= {id(x): (depth, x) for x in tensors(out)}
        return out


def _counted(layer: LayerKind, n: int, d: int) -> int:
    with pretend(), torch.no_grad():
        inputs = (torch.empty(n, d, device="meta"), *layer.make(d, "meta"))
        return count_operations(lambda: layer.run(*inputs)).multiply_adds


def _chain(layer: LayerKind, n: int) -> int:
    """Count the products of a layer that must wait for each other."""
    with pretend(), torch.no_grad(), _Depth() as seen:
        layer.run(torch.empty(n, 8, device="meta"), *layer.make(8, "meta"))
    return seen.longest


def _path(layer: LayerKind, n: int) -> int:
    """Count the layers until the last position depends on the first, or the steps inside one."""
    x = torch.linspace(-1e-3, 1e-3, n * 4).view(n, 4).requires_grad_()
    weights = layer.make(4, "cpu")
    seen = torch.zeros(n, 4)
    seen[-1] = 1.0
    for depth in range(n):
        y = layer.run(x, *weights, **layer.reach(depth))
        (seen,) = torch.autograd.grad(y, x, seen)
        if seen[0].any():
            return (depth + 1) * (n if layer.run is recurrent else 1)
        seen = (seen != 0).float()  # whether it depends, not how much, or what is far would vanish
    raise AssertionError(f"{n} layers do not reach from one end to the other")


def _seconds(layer: LayerKind) -> list[float]:
    """Return the least processor time at each of a layer's sizes, all in turn for a while."""
    inputs = [(torch.ones(n, d), *layer.make(d, "cpu")) for n, d in layer.sizes]
    best, end = [math.inf] * len(inputs), time.perf_counter() + TIMED_SECONDS
    with torch.no_grad():
        while time.perf_counter() < end or math.inf in best:
            for i, given in enumerate(inputs):
                layer.run(*given)  # what another size has driven out of the cache comes back
                begun = time.process_time()
                layer.run(*given)
                spent = time.process_time() - begun
                best[i] = min(best[i], spent or math.inf)  # a limit makes the clock coarse
    return best


def _powers(layer: LayerKind, measured: Sequence[float]) -> tuple[float, float]:
    """Return the powers of n and d by which what was measured at each size grows."""
    (n, d), longer, wider = layer.sizes
    first, long, wide = measured
    return (
        math.log(long / first) / math.log(longer[0] / n),
        math.log(wide / first) / math.log(wider[1] / d),
    )


def complexity() -> list[Complexity]:
    """Measure how the cost of four layers grows, by counting and in processor time."""
    short_n, long_n = _LENGTHS
    return [
        Complexity(
            name,
            layer.cost,
            _powers(layer, [_counted(layer, n, d) for n, d in layer.sizes]),
            _powers(layer, _seconds(layer)),
            (_chain(layer, short_n), _chain(layer, long_n)),
            (_path(layer, short_n), _path(layer, long_n)),
        )
        for name, layer in _LAYERS.items()
    ]


# ---- self-attention is cheaper while n < d


@dataclass(frozen=True)
class Short:
    """Self-attention beside a recurrent layer of the same width, at one length."""

    length: int
    width: int
    attention: int  # multiply-adds
    recurrent: int
    attention_seconds: float
    recurrent_seconds: float


_SHORT_WIDTH, _SHORT_LENGTHS = 256, (32, 128, 256, 512, 2048)


def short_sequences() -> list[Short]:
    """Count and time self-attention and a recurrent layer below n = d, at it, and beyond."""
    rows, d = [], _SHORT_WIDTH
    for n in _SHORT_LENGTHS:
        counted, seconds = [], []
        for layer in (_LAYERS["self-attention"], _LAYERS["recurrent"]):
            counted.append(_counted(layer, n, d))
            given = torch.ones(n, d), *layer.make(d, "cpu")
            with torch.inference_mode():
                seconds.append(least_seconds(lambda run=layer.run, x=given: run(*x)))
        rows.append(Short(n, d, *counted, *seconds))
    return rows


# ---- training the Transformer


@dataclass(frozen=True)
class PublishedTraining:
    """A published training: what is counted for it, and what the paper estimates."""

    size: str
    parameters: int
    steps: int
    tokens: int  # of each side in a batch
    step: int  # multiply-adds
    hours: float
    paper: float  # its estimate

    @property
    def flops(self) -> float:
        """Return the operations of all steps: a multiply-add is two."""
        return 2.0 * self.step * self.steps

    @property
    def chips(self) -> float:
        """Return what all chips would do in the time, at the rate that the paper takes."""
        return self.hours * 3600 * _CHIPS * RATE


_VOCABULARY = 37_000
TOKENS, _SENTENCE = 25_000, 25  # of a batch on each side, and of a sentence
_CHIPS, RATE = 8, 9.5e12  # P100s, and the operations a second that the paper takes for one
# size -> steps, hours, and the paper's estimate (Vaswani et al. 2017, sections 5.2 and 6.1)
_PUBLISHED = {"base": (100_000, 12.0, 3.3e18), "big": (300_000, 84.0, 2.3e19)}


def trainings() -> list[PublishedTraining]:
    """Count the training of Transformer base and big."""
    return [_training(size, *row) for size, row in _PUBLISHED.items()]


def _training(size: str, steps: int, hours: float, paper: float) -> PublishedTraining:
    words = {f"model.{side}_vocab": _VOCABULARY for side in ("source", "target")}
    batch = TOKENS // _SENTENCE
    counted = cost("transformer", size=size, length=_SENTENCE, batch=batch, growth=False, **words)
    step = counted.training_multiply_adds
    return PublishedTraining(size, counted.parameters, steps, TOKENS, step, hours, paper)


_WHY = (
    "The paper multiplies hours by chips by what one of them is taken to do, {rate} TFLOPS. The "
    "count holds the matrix products that the model asks for. So the chips spent {share} of that "
    "rate on them: the rest is memory traffic, softmax, norms, the optimiser, exchange between "
    "chips, and padding."
)


# ---- all of it


@dataclass(frozen=True)
class Lectures:
    """All tables."""

    matrices: list[Matrices]
    complexity: list[Complexity]
    trainings: list[PublishedTraining]
    heads: list[HeadCost]
    gradients: list[Gradients]
    short: list[Short]
    results: tuple[Published, ...] = RESULTS

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        record = asdict(self)
        for row, one in zip(record["matrices"], self.matrices, strict=True):
            row |= {"bytes": one.bytes, "total": one.total}
        for row, one in zip(record["trainings"], self.trainings, strict=True):
            row |= {"flops": one.flops, "chips": one.chips}
        return record

    def __str__(self) -> str:
        parts = [self._matrices(), self._complexity(), self._short(), self._heads()]
        parts += [self._gradients(), self._trainings(), self._results()]
        return "\n\n".join("\n".join(part) for part in parts)

    def _matrices(self) -> list[str]:
        rows = [["attention of an image", "grid", "entries", "memory", "heads", "all", "lecture"]]
        for row in self.matrices:
            size = f"{row.grid}x{row.grid}"
            entries, heads = f"{row.entries:,}", f"{row.heads:,}"
            memory, total = binary(row.bytes), binary(row.total)
            rows.append([row.model, size, entries, memory, heads, total, row.lecture])
        return table(rows)

    def _complexity(self) -> list[str]:
        rows = [["layer", "cost", "n, d counted", "n, d in time", "in sequence", "path"]]
        for row in self.complexity:
            counted, clock = (
                ", ".join(f"{power:.{digits}f}" for power in powers)
                for powers, digits in ((row.multiply_adds, 2), (row.time, 1))
            )
            chain, path = (f"{a}, {b}" for a, b in (row.sequential, row.path))
            rows.append([row.layer, row.cost, counted, clock, chain, path])
        return [
            *table(rows),
            f"powers of the length n and the width d; k = {_KERNEL}, r = {_NEAR}; products that "
            f"wait for each other,",
            "and steps from the first position to the last, "
            f"at n = {_LENGTHS[0]} and {_LENGTHS[1]}",
        ]

    def _trainings(self) -> list[str]:
        rows = [["Transformer", "parameters", "steps", "tokens", "a step", "counted", "paper", ""]]
        for row in self.trainings:
            rows.append(
                [
                    row.size,
                    short(row.parameters),
                    f"{row.steps:,}",
                    f"2 x {row.tokens:,}",
                    f"{2 * row.step:.2e}",
                    f"{row.flops:.1e} FLOP",
                    f"{row.paper:.1e} FLOP",
                    f"{row.hours:g} h x {_CHIPS} x {RATE:.1e} = {row.chips:.1e}",
                ]
            )
        share = " and ".join(f"{100 * row.flops / row.chips:.0f}%" for row in self.trainings)
        return [*table(rows), _WHY.format(rate=RATE / 1e12, share=share)]

    def _short(self) -> list[str]:
        rows = [["n", "d", "self-attention", "recurrent", "times", "self-attention", "recurrent"]]
        for row in self.short:
            counted = [f"{n:,}" for n in (row.attention, row.recurrent)]
            clock = [f"{1e3 * t:.2f} ms" for t in (row.attention_seconds, row.recurrent_seconds)]
            times = f"{row.attention / row.recurrent:.3g}"
            rows.append([f"{row.length:,}", str(row.width), *counted, times, *clock])
        return [*table(rows), "multiply-adds: self-attention is the cheaper one while n < d"]

    def _heads(self) -> list[str]:
        rows = [["heads", "d_k", "multiply-adds", "time"]]
        for row in self.heads:
            time = f"{1e3 * row.seconds:.1f} ms"
            rows.append([str(row.heads), str(row.head_width), f"{row.multiply_adds:,}", time])
        told = f"self-attention of width {WIDTH} over {LENGTH} tokens: all heads cost about one"
        return [*table(rows), told]

    def _gradients(self) -> list[str]:
        rows = [["d_k", "variance of q k", "gradient", "scaled"]]
        for row in self.gradients:
            sizes = f"{row.variance:.4g}", f"{row.plain:.2g}", f"{row.scaled:.2g}"
            rows.append([f"{row.head_width:,}", *sizes])
        return [
            *table(rows),
            f"size of the softmax's gradient over {KEYS} random keys, the median; scaled by "
            "1/sqrt(d_k)",
        ]

    def _results(self) -> list[str]:
        rows = [["WMT 2014", "EN-DE BLEU", "EN-FR BLEU", "EN-DE FLOP", "EN-FR FLOP"]]
        for row in self.results:
            scores = [f"{x:g}" if x else "" for x in (row.german, row.french)]
            flops = [f"{x:.1e}" if x else "" for x in (row.german_flops, row.french_flops)]
            rows.append([row.model, *scores, *flops])
        return [*table(rows), "as published (Vaswani et al. 2017); FLOPs are estimates, see above"]


@dataclass(frozen=True)
class LectureSettings:
    """The tables have nothing to set."""


def lectures(settings: LectureSettings) -> Lectures:
    """Count all figures of the lectures."""
    measured = head_costs(), gradients(), short_sequences()
    return Lectures(matrices(), complexity(), trainings(), *measured)
