"""Superposition: more features than dimensions, in the toy model of Elhage et al. (2022).

Features x in [0, 1]^n, each zero with the probability `sparsity`, are squeezed into m dimensions
and read out again as ReLU(W'Wx + b). Hundreds of toy models are trained at once: their parameters
are stacked, and no operation mixes them, Adam included.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any, Literal

import torch
from torch import Tensor

from regard import UsageError
from regard.data import mix
from regard.metrics import Named, markdown
from regard.settings import setting
from regard.training import Progress

_MOST_NUMBERS = 2**28  # of activations in a step, which bounds memory
_MOST_EXACT = 6  # features up to which a loss is computed without sampling
_TINY = 0.01  # a weight so small that its feature is as good as its mean
_CHUNK = 256  # models of the phase diagram that are trained together, to fit a cache
# features per dimension: what one feature takes of a dimension, by the shape it is part of
_FRACTIONS = {
    "dedicated": 1.0,
    "tetrahedron": 3 / 4,
    "triangle": 2 / 3,
    "digon": 1 / 2,
    "pentagon": 2 / 5,
    "square antiprism": 3 / 8,
    "not represented": 0.0,
}
_STICKS = 0.03  # how near to a fraction a feature counts as sticking to it


@dataclass(frozen=True)
class SuperpositionSettings:
    """What the toy models are like, how they are trained, and what is drawn of them."""

    view: Literal["models", "phase", "fractions"] = setting(
        "models",
        "models (W'W and polygons), phase (two features in one dimension, by sparsity and "
        "importance) or fractions (features per dimension against sparsity)",
    )
    n: int | None = setting(None, "features; 5, of fractions 40", min=1, max=4096)
    m: int | None = setting(None, "dimensions; 2, of fractions 8", min=1, max=4096)
    sparsity: tuple[float, ...] | None = setting(
        None, "probabilities of a feature to be zero, each a model", min=0.0, below=1.0
    )
    importance: float | None = setting(
        None, "weight of each feature in the loss by that of the one before; 1", above=0.0, max=10.0
    )
    tries: int | None = setting(
        None,
        "starts of each model, of which the best is kept; 8, of fractions 4, of phase 2",
        min=1,
        max=1024,
    )
    grid: int = setting(32, "models along each side of the phase diagram", min=2, max=128)
    steps: int | None = setting(None, "steps of training", min=1, max=10**6)
    batch: int | None = setting(None, "samples of a step", min=1, max=2**16)
    lr: float = setting(0.02, "learning rate, which falls to 0 along a cosine", above=0.0, max=1.0)
    seed: int = setting(1, "of weights and samples", min=0)
    out: str | None = setting(None, "PNG file for the picture")


@dataclass(frozen=True, eq=False)
class Toys:
    """Toy models side by side: W (models, m, n) and b (models, n), with what they were taught."""

    W: Tensor
    b: Tensor
    sparsity: Tensor  # (models,)
    importance: Tensor  # (models, n)

    def __len__(self) -> int:
        return len(self.W)

    def __getitem__(self, chosen: Any) -> "Toys":
        chosen = [chosen] if isinstance(chosen, int) else chosen
        return Toys(*(part[chosen] for part in vars(self).values()))

    def losses(self, samples: int = 200_000, seed: int = 0) -> Tensor:
        """Return the expected loss of each: exact for up to 6 features, else by sampling."""
        if self.W.shape[2] <= _MOST_EXACT:
            return exact_losses(self.W, self.b, self.sparsity, self.importance).float()
        generator = torch.Generator().manual_seed(mix(seed, "losses"))
        parts = max(1, samples // 2000)
        with torch.no_grad():
            return sum((_loss(self, 2000, generator) for _ in range(parts)), torch.zeros(1)) / parts

    def dimensionality(self) -> Tensor:
        """Return what share of a dimension each feature has (models, n): 1/2 in a digon, ..."""
        gram = self.W.mT @ self.W
        squares = gram.diagonal(dim1=1, dim2=2)
        shared = (gram**2).sum(2).clamp(min=1e-12)
        return torch.where(squares > 1e-3, squares**2 / shared, 0.0)

    def features_per_dimension(self) -> Tensor:
        """Return how many features each model holds in a dimension: the squared norm of W by m."""
        return (self.W**2).sum((1, 2)) / self.W.shape[1]


def draw(sparsity: Tensor, n: int, samples: int, generator: torch.Generator) -> Tensor:
    """Draw samples (models, samples, n) of which at least one feature is not zero.

    Of the others all is known, and at a high sparsity nearly all are such: so the first feature
    that is there is drawn by its (truncated geometric) distribution, those after it as ever. All
    models share the same random numbers.
    """
    zero = sparsity.clamp(min=1e-6).view(-1, 1, 1)
    chance = torch.rand(samples, 1, generator=generator)
    first = (torch.log1p(-chance * (1 - zero**n)) / zero.log()).floor().clamp(max=n - 1)
    place = torch.arange(n)
    there = torch.rand(samples, n, generator=generator) >= zero
    there = (place == first) | ((place > first) & there)
    return there * torch.rand(samples, n, generator=generator)


def _loss(toys: Toys, samples: int, generator: torch.Generator) -> Tensor:
    """Return an estimate of the loss of each model, its features weighed and summed."""
    n = toys.W.shape[2]
    x = draw(toys.sparsity, n, samples, generator)
    b, importance = toys.b.unsqueeze(1), toys.importance.unsqueeze(1)
    y = torch.relu(x @ toys.W.mT @ toys.W + b)
    some = (importance * (y - x) ** 2).sum(2).mean(1)
    none = (toys.importance * torch.relu(toys.b) ** 2).sum(1)
    empty = toys.sparsity**n
    return (1 - empty) * some + empty * none


def train_toys(
    sparsity: Tensor,
    importance: Tensor,
    m: int,
    *,
    steps: int = 1500,
    batch: int = 256,
    lr: float = 0.02,
    seed: int = 1,
    progress: Progress | None = None,
) -> Toys:
    """Train as many toy models at once as there are sparsities; importance is (models, n)."""
    count, n = importance.shape
    if count * batch * n > _MOST_NUMBERS:
        raise UsageError(
            f"{count} models x batch={batch} x n={n} are more than {_MOST_NUMBERS:,} numbers a "
            "step; choose a smaller batch, n or tries"
        )
    generator = torch.Generator().manual_seed(mix(seed, "superposition"))
    W = (torch.randn(count, m, n, generator=generator) * n**-0.5).requires_grad_()
    b = torch.zeros(count, n, requires_grad=True)
    toys = Toys(W, b, sparsity, importance)
    # so that the gradients of all models are about as large, whatever their sparsity
    scale = 1 / (1 - sparsity).clamp(min=1e-6)
    optimiser = torch.optim.Adam([W, b], lr=lr)
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = (scale * _loss(toys, batch, generator)).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if progress is not None:
            progress.update(1)
    return Toys(W.detach(), b.detach(), sparsity, importance)


def best_of(toys: Toys, tries: int) -> Toys:
    """Return of each `tries` neighbours the one with the least loss."""
    losses = toys.losses().view(-1, tries)
    return toys[torch.arange(len(losses)) * tries + losses.argmin(1)]


# ---- Closed forms


def _antiderivative(t: Tensor, times: int) -> Tensor:
    """Return ReLU(t)^times / times!, the antiderivative of a step taken so many times."""
    if times == 0:
        return (t > 0).to(t.dtype)
    return torch.relu(t) ** times / math.factorial(times)


def _mean_of_relu(a: Tensor, c: Tensor, power: int) -> Tensor:
    """Return the mean of ReLU(a.x + c)^power / power! over x uniform in a cube; a is (..., axes).

    Integrating along each axis in turn leaves a sum over the corners of the cube, with signs.
    """
    axes = a.shape[-1]
    corners = torch.tensor(list(product((0.0, 1.0), repeat=axes)), dtype=a.dtype)
    signs = (-1.0) ** (axes - corners.sum(1))
    whole = _antiderivative(a @ corners.T + c.unsqueeze(-1), axes + power) @ signs
    return whole / a.prod(-1)


def _expected_square(a: Tensor, c: Tensor, own: int | None) -> Tensor:
    """Return the mean of (x_own - ReLU(a.x + c))^2 over a cube, or without x_own, if that is 0."""
    # dividing by a tiny weight would lose all digits: of what lies below, the mean is as good
    sized = torch.where(a.abs() < _TINY, torch.where(a < 0, -_TINY, _TINY), a)
    c = c + 0.5 * (a - sized).sum(-1)
    square = 2 * _mean_of_relu(sized, c, 2)
    if own is None:
        return square
    mine = sized[..., own]
    others = sized[..., [axis for axis in range(a.shape[-1]) if axis != own]]
    # by parts along the own axis: the integral of x F is x G - the integral of G
    upper = _mean_of_relu(others, c + mine, 2) / mine
    area = (_mean_of_relu(others, c + mine, 3) - _mean_of_relu(others, c, 3)) / mine**2
    left_out = (a[..., own] - mine) / 12 * _mean_of_relu(sized, c, 0)
    return 1 / 3 - 2 * (upper - area + left_out) + square


def exact_losses(W: Tensor, b: Tensor, sparsity: Tensor, importance: Tensor) -> Tensor:
    """Return the expected losses of toy models in closed form: a sum over what is not zero."""
    n = W.shape[2]
    if n > _MOST_EXACT:
        raise UsageError(f"a closed form for {n} features takes too long; at most {_MOST_EXACT}")
    W, b, zero, importance = (x.double() for x in (W, b, sparsity, importance))
    gram = W.mT @ W
    total = torch.zeros(len(W), dtype=torch.float64)
    for count in range(n + 1):
        weight = (1 - zero) ** count * zero ** (n - count)
        if bool((weight < 1e-6 * (1 - zero)).all()):  # so rarely are so many there
            continue
        for there in combinations(range(n), count):
            for i in range(n):
                if not bool(importance[:, i].any()):
                    continue
                own = there.index(i) if i in there else None
                square = _expected_square(gram[:, i, list(there)], b[:, i], own)
                total = total + weight * importance[:, i] * square
    return total


def polygon(corners: int, length: Tensor | float = 1.0) -> Tensor:
    """Return the W whose columns are the corners of a regular polygon of some radius.

    Two features in one dimension, of opposite signs, are a digon.
    """
    if corners == 2:
        return length * torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    turn = 2 * math.pi * torch.arange(corners, dtype=torch.float64) / corners
    return length * torch.stack([turn.cos(), turn.sin()])


def polygon_loss(corners: int, sparsity: float) -> tuple[float, float, float]:
    """Return the least loss of a regular polygon of features, and its length and bias.

    All features are of importance 1. The loss of a given length and bias is a closed form, of
    which the least is looked for; at a high sparsity it is p^2/3 for a digon and 3p^2/8 for a
    triangle, where p = 1 - sparsity, but 0.081p for a pentagon.
    """
    shape = torch.tensor([1.05, -0.05], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([shape], max_iter=60, line_search_fn="strong_wolfe")
    zero = torch.tensor([sparsity], dtype=torch.float64)
    one = corners * torch.eye(corners, dtype=torch.float64)[:1]  # all corners are alike

    def loss() -> Tensor:
        optimiser.zero_grad()
        W = polygon(corners, shape[0]).unsqueeze(0)
        value = exact_losses(W, shape[1].expand(1, corners), zero, one).sum() / (1 - sparsity)
        value.backward()
        return value

    optimiser.step(loss)
    least = float(loss().detach()) * (1 - sparsity)
    return least, float(shape[0].detach()), float(shape[1].detach())


def least_losses(sparsity: Tensor, importance: Tensor) -> Tensor:
    """Return the least losses (models, 3) of what two features can do with one dimension.

    The second feature weighs `importance`. The first is alone (the other is read out as its mean),
    or the second is, or they are opposite each other.
    """
    p = (1 - sparsity).double()
    variance = p / 3 - p**2 / 4
    weights = torch.stack([torch.ones_like(p), importance.double()], 1)
    W = torch.tensor([1.0, -1.0], dtype=torch.float64).repeat(len(p), 1).requires_grad_()
    b = torch.zeros(len(p), 2, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([W, b], lr=0.03)
    steps = 150
    for step in range(steps):
        for group in optimiser.param_groups:
            group["lr"] = 0.03 * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimiser.zero_grad()
        (exact_losses(W.unsqueeze(1), b, sparsity, weights) / p).sum().backward()
        optimiser.step()
    with torch.no_grad():
        both = exact_losses(W.unsqueeze(1), b, sparsity, weights)
    return torch.stack([weights[:, 1] * variance, variance, both], 1)


# ---- What is asked for


@dataclass(frozen=True, eq=False)
class Superposition(Named):
    """Toy models that were trained, and what became of their features."""

    view: str
    n: int
    m: int
    sparsity: list[float]
    losses: list[float]
    features_per_dimension: list[float]
    dimensionality: list[list[float]]
    table: dict[str, Any]
    toys: Toys
    path: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all that JSON can hold."""
        plain = {name: self[name] for name in self.keys() if name != "toys"}
        return {**plain, "W": self.toys.W.tolist(), "b": self.toys.b.tolist()}

    def __str__(self) -> str:
        wrote = f"\nwrote {self.path}" if self.path else ""
        if self.view == "phase":
            shares = ", ".join(f"{name} {share:.0%}" for name, share in self.table.items())
            return f"{len(self.losses)} models of two features in one dimension: {shares}{wrote}"
        rows = [["sparsity", "loss", "features per dimension", "shapes"]]
        for number, (s, loss) in enumerate(zip(self.sparsity, self.losses, strict=True)):
            held = self.features_per_dimension[number]
            shapes = shapes_of(torch.tensor(self.dimensionality[number]))
            told = ", ".join(f"{count} in {name}" for name, count in shapes.items())
            rows.append([f"{s:g}", f"{loss:.3e}", f"{held:.2f}", told])
        title = f"{self.n} features in {self.m} dimensions, each the best of its tries"
        return f"{title}\n{markdown(rows)}{wrote}"


def shapes_of(dimensionality: Tensor) -> dict[str, int]:
    """Return how many features stick to the fraction of each shape; the rest are `between`."""
    found: dict[str, int] = {}
    for value in dimensionality.tolist():
        name = min(_FRACTIONS, key=lambda shape: abs(_FRACTIONS[shape] - value))
        name = name if abs(_FRACTIONS[name] - value) <= _STICKS else "between"
        found[name] = found.get(name, 0) + 1
    return dict(sorted(found.items(), key=lambda row: -row[1]))


def superposition(settings: SuperpositionSettings, *, quiet: bool = True) -> Superposition:
    """Train toy models of superposition, hundreds at once, and draw what their features do."""
    if settings.out is not None and not settings.out.lower().endswith(".png"):
        raise UsageError(f"out={settings.out}; expected a file that ends in .png")
    view, defaults = _VIEWS[settings.view]
    for name in ("n", "m", "sparsity", "importance"):
        if settings.view == "phase" and getattr(settings, name) is not None:
            raise UsageError(f"{name}= is not for view=phase, which has its own; leave it out")
    missing = {key: value for key, value in defaults.items() if getattr(settings, key) is None}
    return view(replace(settings, **missing), quiet)


def _report(
    asked: SuperpositionSettings, toys: Toys, table: Mapping[str, Any], path: str | None
) -> Superposition:
    """Put the result together."""
    return Superposition(
        asked.view,
        toys.W.shape[2],
        toys.W.shape[1],
        [round(s, 6) for s in toys.sparsity.tolist()],
        toys.losses().tolist(),
        toys.features_per_dimension().tolist(),
        toys.dimensionality().tolist(),
        dict(table),
        toys,
        path,
    )


def _train_best(asked: SuperpositionSettings, sparsities: Sequence[float], quiet: bool) -> Toys:
    """Train several starts at each sparsity, and keep the best."""
    assert asked.n and asked.m and asked.tries and asked.importance
    if asked.m > asked.n:
        raise UsageError(f"m={asked.m} dimensions for n={asked.n} features; expected at most n")
    sparsity = torch.tensor(list(sparsities)).repeat_interleave(asked.tries)
    weights = asked.importance ** torch.arange(asked.n, dtype=torch.float32)
    importance = weights.expand(len(sparsity), asked.n)
    steps, batch = asked.steps or 3000, asked.batch or 256
    with Progress("toy models", steps, quiet=quiet) as progress:
        toys = train_toys(
            sparsity,
            importance,
            asked.m,
            steps=steps,
            batch=batch,
            lr=asked.lr,
            seed=asked.seed,
            progress=progress,
        )
    return best_of(toys, asked.tries)


def _models(asked: SuperpositionSettings, quiet: bool) -> Superposition:
    """Train models of some sparsities, and draw W'W and, in a plane, their features."""
    from regard.gallery.toy_pictures import draw_models

    toys = _train_best(asked, asked.sparsity or (0.0, 0.7, 0.9, 0.97, 0.99), quiet)
    if asked.out:
        draw_models(asked.out, toys)
    return _report(asked, toys, {}, asked.out)


def _fractions(asked: SuperpositionSettings, quiet: bool) -> Superposition:
    """Train models of many sparsities, and draw how many features a dimension holds."""
    from regard.gallery.toy_pictures import draw_fractions

    dense = [10 ** (-2.4 * step / 23) for step in range(24)]
    toys = _train_best(asked, asked.sparsity or [1 - p for p in dense], quiet)
    shapes = shapes_of(toys.dimensionality().flatten())
    if asked.out:
        draw_fractions(asked.out, toys, _FRACTIONS)
    return _report(asked, toys, shapes, asked.out)


def phase_of(toys: Toys) -> Tensor:
    """Return what models of two features in one dimension do: 0 first, 1 second, 2 both."""
    first, second = toys.W[:, 0].unbind(1)
    opposite = (first * second < 0) & (first.abs() > 0.3) & (second.abs() > 0.3)
    return torch.where(opposite, 2, torch.where(second.abs() > first.abs(), 1, 0))


def _phase(asked: SuperpositionSettings, quiet: bool) -> Superposition:
    """Train two features in one dimension, by sparsity and importance, and draw the phases."""
    from regard.gallery.toy_pictures import draw_phases

    side, tries = asked.grid, asked.tries or 1
    if side * side * tries > 2**16:
        raise UsageError(
            f"grid={side} with tries={tries} are {side * side * tries:,} models; at most 65,536"
        )
    dense = torch.logspace(0, -2, side)
    weights = torch.logspace(-1, 1, side)
    sparsity = (1 - dense).repeat_interleave(side).repeat_interleave(tries)
    second = weights.repeat(side).repeat_interleave(tries)
    importance = torch.stack([torch.ones_like(second), second], 1)
    steps, batch = asked.steps or 1500, asked.batch or 256
    rows = range(0, len(sparsity), _CHUNK * tries)
    parts = []
    with Progress("toy models", steps * len(rows), quiet=quiet) as progress:
        for row in rows:
            some = slice(row, row + _CHUNK * tries)
            how = {"steps": steps, "batch": batch, "lr": asked.lr, "seed": mix(asked.seed, row)}
            toys = train_toys(sparsity[some], importance[some], 1, progress=progress, **how)
            parts.append(best_of(toys, tries) if tries > 1 else toys)
    toys = Toys(*(torch.cat(part) for part in zip(*(vars(p).values() for p in parts), strict=True)))
    found = phase_of(toys).view(side, side)
    expected = least_losses(toys.sparsity, toys.importance[:, 1]).argmin(1).view(side, side)
    names = ("first only", "second only", "superposition")
    table = {name: float((found == number).float().mean()) for number, name in enumerate(names)}
    table["as the closed form says"] = float((found == expected).float().mean())
    if asked.out:
        draw_phases(asked.out, found, expected, dense, weights, names)
    return _report(asked, toys, table, asked.out)


# view -> what trains and draws it, and the settings that it has unless given
_VIEWS: dict[str, tuple[Callable[[SuperpositionSettings, bool], Superposition], dict[str, Any]]] = {
    "models": (_models, {"n": 5, "m": 2, "tries": 8, "importance": 1.0}),
    "phase": (_phase, {"tries": 2}),
    "fractions": (_fractions, {"n": 40, "m": 8, "tries": 4, "importance": 1.0}),
}
