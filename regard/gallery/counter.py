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


def draw(settings: CounterSettings) -> Drawing:
    """Draw both, and how the periods of their digits grow."""
    digits = count(settings.bits)
    positions = torch.arange(len(digits))
    width = 2 * (settings.width // 2)
    sinusoidal = POSITIONS["sinusoidal"](width, base=settings.base)
    vectors = sinusoidal.embed(
        torch.zeros(len(digits), width, dtype=torch.float64), positions.unsqueeze(-1)
    )
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

    notes = (
        "The last digit changes at every number, the one before it half as often, and so on. "
        "Sinusoids do the same without jumps, so that nearby positions are alike and every pair "
        "turns by the same angle from each position to the next.",
    )
    title = "A binary counter, and sinusoids"
    plots = [
        Plot(counter, "counter: one digit a column", "worth of the digit", "position"),
        Plot(sinusoid, f"sinusoids, base {settings.base:g}", "coordinate", "position"),
        Plot(curves, "period of a digit, of a pair", "digit, pair", "positions"),
    ]
    sheet = draw_plots(title, [plots], notes=notes, size=(2.6, 3.6), widths=(1.7, 2.6, 2.6))
    numbers = {
        "period of digit": {f"{n}": float(period) for n, period in enumerate(bits)},
        "period of pair": {f"{n}": period for n, period in enumerate(waves[: len(bits)])},
    }
    return Drawing(title, numbers, notes, sheet)
