"""A binary counter beside sinusoids: both write a position in digits of growing periods."""

import math
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from torch import Tensor

from regard import POSITIONS
from regard.gallery.drawn import Drawn
from regard.settings import setting
from regard.viewer import BLUES, Drawing, Plot, draw_plots

_FAR = 1_000_000  # a position beyond any text
_STEPS = 10_000  # positions after it, and after the first, from which it must differ


@dataclass(frozen=True)
class CounterSettings(Drawn):
    """Settings of the counter and the sinusoids."""

    bits: int = setting(5, "digits of the counter; it counts to their end", min=2, max=10)
    width: int = setting(32, "coordinates of the sinusoids, even", min=4, max=1024)
    base: float = setting(10_000.0, "base of their wavelengths; 100,000 in another lecture", min=2)


def count(bits: int) -> Tensor:
    """Return the digits of all numbers of so many bits, the last digit first, (2^bits, bits)."""
    return (torch.arange(2**bits).unsqueeze(1) >> torch.arange(bits)) & 1


def periods_of_bits(digits: Tensor) -> list[int]:
    """Return after how many positions each digit repeats itself: measured, not assumed."""
    rows = len(digits)
    return [
        next((p for p in range(1, rows) if torch.equal(column[p:], column[:-p])), rows)
        for column in digits.T
    ]


def periods_of_sinusoids(vectors: Tensor) -> list[float]:
    """Return the period of each pair (sin, cos), from its turn between the first two positions."""
    pairs = vectors[:2].unflatten(-1, (-1, 2))
    turn = torch.atan2(pairs[1, :, 0], pairs[1, :, 1]) - torch.atan2(pairs[0, :, 0], pairs[0, :, 1])
    return (2 * math.pi / turn).tolist()


def sinusoids(settings: CounterSettings, positions: Tensor) -> Tensor:
    """Return the sinusoidal vectors of some positions, (positions, width), in fp64."""
    width = 2 * (settings.width // 2)
    position = POSITIONS["sinusoidal"](width, base=settings.base)
    zeros = torch.zeros(len(positions), width, dtype=torch.float64)
    return position.embed(zeros, positions.unsqueeze(-1))


def distances(vectors: Tensor) -> Tensor:
    """Return how far each vector but the first is from the first."""
    return (vectors[1:] - vectors[0]).double().norm(dim=-1)


def draw(settings: CounterSettings) -> Drawing:
    """Draw both, and how the periods of their digits grow."""
    digits = count(settings.bits)
    positions = torch.arange(len(digits))
    vectors = sinusoids(settings, positions)
    places = torch.arange(_STEPS + 1)
    near, far = (sinusoids(settings, begin + places) for begin in (0, _FAR))
    apart = distances(near)
    counted = distances((places.unsqueeze(1) >> torch.arange(settings.bits)) & 1)
    bits, waves = periods_of_bits(digits), periods_of_sinusoids(vectors)

    def counter(axes: Axes) -> None:
        axes.imshow(digits.flip(1), cmap=BLUES, vmin=0, vmax=1.6, aspect="auto")
        if len(digits) <= 32:
            for row, column in digits.flip(1).nonzero().tolist():
                axes.text(column, row, "1", ha="center", va="center", fontsize=6, color="white")
        axes.set_xticks(range(settings.bits), [str(2**n) for n in reversed(range(settings.bits))])

    def sinusoid(axes: Axes) -> None:
        axes.imshow(vectors, cmap="RdBu", vmin=-1, vmax=1, aspect="auto", interpolation="nearest")

    def curves(axes: Axes) -> None:
        axes.semilogy(range(len(bits)), bits, "s-", linewidth=1.2, markersize=4, label="counter")
        axes.semilogy(range(len(waves)), waves, "o-", linewidth=1.2, markersize=3, label="sinusoid")
        axes.legend(fontsize=7)

    def differences(axes: Axes) -> None:
        shown = min(_STEPS, 4 * len(digits))
        axes.plot(places[1 : shown + 1], counted[:shown], linewidth=1, label="counter")
        axes.plot(places[1 : shown + 1], apart[:shown], linewidth=1.2, label="sinusoids")
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=7)

    notes = (
        "The last digit changes at every number, the one before it half as often, and so on. "
        "Sinusoids do the same without jumps, so that nearby positions are alike and every pair "
        "turns by the same angle from each position to the next.",
        f"Bounded: no coordinate is beyond 1. Unique: of {_STEPS:,} further positions none has the "
        f"vector of the first; the nearest is {float(apart.min()):.2f} away. Unlimited: the same "
        f"from position {_FAR:,} on, where a counter has begun anew many times and a learned table "
        "has no row.",
    )
    title = "A binary counter, and sinusoids"
    plots = [
        Plot(counter, "counter: one digit a column", "worth of the digit", "position"),
        Plot(sinusoid, f"sinusoids, base {settings.base:g}", "coordinate", "position"),
        Plot(curves, "period of a digit, of a pair", "digit, pair", "positions"),
        Plot(differences, "distance from position 0", "position"),
    ]
    sheet = draw_plots(title, [plots], notes=notes, size=(2.6, 3.6), widths=(1.7, 2.6, 2.6, 2.6))
    numbers = {
        "period of digit": {f"{n}": float(period) for n, period in enumerate(bits)},
        "period of pair": {f"{n}": period for n, period in enumerate(waves[: len(bits)])},
        "largest coordinate": {"sinusoids": float(torch.cat([near, far]).abs().max())},
        f"nearest of {_STEPS:,} further positions": {
            "sinusoids": float(apart.min()),
            f"sinusoids, from {_FAR:,} on": float(distances(far).min()),
            "counter": float(counted.min()),
        },
    }
    return Drawing(title, numbers, notes, sheet)
