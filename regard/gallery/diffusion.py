"""Diffusion: particles beside the heat equation, and Perona and Malik's steps in one row."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from torch import Tensor

from regard import UsageError
from regard.filters import MAX_STEP, as_rgb, heat, perona_malik, read_photo
from regard.gallery.drawn import Drawn
from regard.gallery.filters import shrink
from regard.settings import setting
from regard.viewer import DOT, Drawing, Plot, draw_plots

_BINS, _REACH = 81, 4.0  # of the histogram, and standard deviations that it covers to each side
_PATHS, _TIMES = 40, 100  # particles whose paths are drawn, and steps of every path
_LATTICE = 5  # places of the heat equation in a bin, an odd number
_MAX_SHOWN = 12


@dataclass(frozen=True)
class ParticleSettings(Drawn):
    """Settings of the particles."""

    c: float = setting(0.5, "the constant c of the heat equation u_t = c div(grad u)", above=0)
    time: float = setting(1.0, "time until which they move", above=0)
    particles: int = setting(200_000, "particles", min=1000, max=5_000_000)
    seed: int = setting(1, "random seed", min=0, max=2**63 - 1)


@dataclass(frozen=True)
class PeronaMalikSettings(Drawn):
    """Settings of the row of anisotropic diffusion."""

    photo: Path | None = setting(None, "photo; a drawn one with noise unless given")
    size: int = setting(100, "longer side to which it is resized", min=8, max=512)
    steps: tuple[int, ...] = setting((10, 20, 30, 60, 100), "iterations that are shown")
    k: float = setting(10.0, "edge threshold K, of values 0 to 255", above=0, max=10_000)
    step: float = setting(0.25, "step size, at most 0.25", above=0, max=MAX_STEP)


def walk(settings: ParticleSettings) -> Tensor:
    """Return where W(t) of all particles is after each of TIMES steps, (TIMES + 1, particles)."""
    generator = torch.Generator().manual_seed(settings.seed)
    steps = torch.randn(_TIMES, settings.particles, generator=generator)
    steps *= math.sqrt(settings.time / _TIMES)
    return torch.cat([steps.new_zeros(1, settings.particles), steps.cumsum_(0)])


def solve_heat(variance: float, edges: np.ndarray) -> np.ndarray:
    """Return the share of heat in each bin, when all of it was in the middle at first.

    Solved by the explicit steps of `regard filter heat`, on LATTICE places a bin: in lengths of a
    place, 2 c t is the variance there.
    """
    cell = (edges[1] - edges[0]) / _LATTICE
    line = torch.zeros(1, 1, 1, (len(edges) - 1) * _LATTICE, dtype=torch.float64)
    line[..., line.shape[-1] // 2] = 1.0
    needed = variance / cell**2 / 2
    steps = math.ceil(needed / MAX_STEP)
    solved = heat(line, steps=steps, step=needed / steps)
    return solved.view(-1, _LATTICE).sum(1).numpy()


def draw_particles(settings: ParticleSettings) -> Drawing:
    """Draw particles dx = sqrt(2 c) dW, and the slide's dx = c dW, beside the heat equation."""
    paths = walk(settings)
    rule, slide = math.sqrt(2 * settings.c), settings.c
    variance = 2 * settings.c * settings.time
    reach = _REACH * math.sqrt(variance)
    edges = np.linspace(-reach, reach, _BINS + 1)
    middles = (edges[1:] + edges[:-1]) / 2
    kernel = np.diff([math.erf(x / math.sqrt(2 * variance)) / 2 for x in edges])
    solved = solve_heat(variance, edges)
    ours, theirs = (
        np.histogram((factor * paths[-1]).numpy(), edges)[0] / settings.particles
        for factor in (rule, slide)
    )
    times = np.linspace(0, settings.time, _TIMES + 1)
    spread = paths.double().var(1).numpy()

    def trails(axes: Axes) -> None:
        axes.plot(times, rule * paths[:, :_PATHS], linewidth=0.6, color=DOT, alpha=0.5)
        axes.plot(times, 2 * np.sqrt(2 * settings.c * times), "--", color="C3", linewidth=1)
        axes.plot(times, -2 * np.sqrt(2 * settings.c * times), "--", color="C3", linewidth=1)

    def density(axes: Axes) -> None:
        wide = edges[1] - edges[0]
        axes.bar(middles, ours / wide, wide, color="#cdd9fb", label="particles, sqrt(2c) dW")
        axes.step(middles, theirs / wide, where="mid", color="C1", linewidth=1, label="c dW")
        axes.plot(middles, solved / wide, color=DOT, linewidth=1.5, label="heat equation")
        axes.plot(middles, kernel / wide, ":", color="black", linewidth=1.1, label="Gaussian")
        axes.legend(fontsize=6, loc="upper left")

    def growth(axes: Axes) -> None:
        axes.plot(times, rule**2 * spread, color=DOT, linewidth=1.5, label="sqrt(2c) dW")
        axes.plot(times, 2 * settings.c * times, ":", color="black", label="2 c t")
        axes.plot(times, slide**2 * spread, color="C1", linewidth=1.5, label="c dW")
        axes.legend(fontsize=6.5)

    def apart(a: np.ndarray, b: np.ndarray) -> float:
        return float(np.abs(a - b).sum() / 2)

    notes = (
        f"u_t = c div(grad u) with c = {settings.c:g} spreads heat with variance 2 c t, so its "
        "particles move by dx = sqrt(2 c) dW. The slide has dx = c dW, whose variance is c^2 t: "
        "the same c stands for two constants, which agree at c = 2 alone.",
    )
    title = "Particles, and the heat equation"
    plots = [
        Plot(trails, f"{_PATHS} particles; dashed: two standard deviations", "time", "place"),
        Plot(density, f"where {settings.particles:,} particles are at the end", "place", "density"),
        Plot(growth, "variance", "time"),
    ]
    numbers = {
        "variance at the end": {
            "particles, sqrt(2c) dW": rule**2 * float(spread[-1]),
            "particles, c dW": slide**2 * float(spread[-1]),
            "2 c t": variance,
            "c^2 t": slide**2 * settings.time,
        },
        "total variation distance from the heat equation": {
            "particles, sqrt(2c) dW": apart(ours, solved),
            "particles, c dW": apart(theirs, solved),
            "Gaussian": apart(kernel, solved),
        },
    }
    sheet = draw_plots(title, [plots], notes=notes, size=(2.9, 2.4))
    return Drawing(title, numbers, notes, sheet)


def drawn_photo() -> Tensor:
    """Return a drawing of 100 x 100 pixels with noise, (1, 100, 100), values 0 to 1."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, 100), torch.linspace(-1, 1, 100), indexing="ij")
    image = 0.25 + 0.15 * (x + 1) / 2
    image = image.where(y < 0.45, torch.tensor(0.55))  # the ground
    image = image.where((x.abs() > 0.7) | (y.abs() > 0.55), 0.8 - 0.1 * y)  # a wall
    image = image.where(((x + 0.3) ** 2 + y**2).sqrt() > 0.25, torch.tensor(0.35))
    image = image.where(((x - 0.35).abs() > 0.2) | (y.abs() > 0.3), torch.tensor(0.15))
    noise = torch.randn(100, 100, generator=torch.Generator().manual_seed(1))
    return (image + 5 / 255 * noise).clamp(0, 1).unsqueeze(0)


def differences(image: Tensor) -> Tensor:
    """Return the sizes of all differences of neighbours, of values 0 to 255, in one row."""
    grey = 255 * image.mean(0)
    return torch.cat([grey.diff(dim=0).flatten(), grey.diff(dim=1).flatten()]).abs()


def draw_perona_malik(settings: PeronaMalikSettings) -> Drawing:
    """Draw an image after some steps of anisotropic diffusion, and of the heat equation."""
    if not 0 < len(settings.steps) <= _MAX_SHOWN or not all(0 < n <= 5000 for n in settings.steps):
        raise UsageError(f"steps= 1 to {_MAX_SHOWN} numbers, each from 1 to 5000")
    photo = drawn_photo() if settings.photo is None else read_photo(settings.photo)
    image = shrink(photo, settings.size)[0]
    before = differences(image)
    edge = before > 3 * settings.k
    own: dict[str, Any] = {"k": settings.k / 255, "step": settings.step}
    shown: dict[str, list[tuple[int, Tensor]]] = {"Perona and Malik": [], "heat equation": []}
    for steps in (0, *settings.steps):
        shown["Perona and Malik"].append((steps, perona_malik(image, steps=steps, **own)))
        shown["heat equation"].append((steps, heat(image, steps=steps, step=settings.step)))

    def paint(image: Tensor) -> Callable[[Axes], None]:
        return lambda axes: axes.imshow(as_rgb(image), interpolation="nearest") and None

    rows = [
        [
            Plot(paint(after), f"{name}, {steps}" if not steps else f"{steps}", bare=True)
            for steps, after in images
        ]
        for name, images in shown.items()
    ]
    numbers: dict[str, dict[str, float]] = {}
    for name, images in shown.items():
        for what, chosen in (("edges", edge), ("elsewhere", ~edge)):
            if chosen.any():
                numbers[f"{name}: {what}"] = {
                    f"{steps} steps": float(differences(after)[chosen].mean())
                    for steps, after in images
                }
    notes = (
        f"K = {settings.k:g} of values 0 to 255, steps of {settings.step:g}, "
        f"{image.shape[-1]} x {image.shape[-2]} pixels. Where neighbours differ by much more than "
        "K nothing flows, so edges stay while the rest grows smooth; heat flows over both. The "
        "numbers are mean differences of neighbours, on edges (over 3 K at first) and elsewhere.",
    )
    title = "Anisotropic diffusion, step by step"
    tall = 1.7 * image.shape[-2] / image.shape[-1]
    sheet = draw_plots(title, rows, notes=notes, size=(1.7, tall), bare=True)
    return Drawing(title, numbers, notes, sheet)
