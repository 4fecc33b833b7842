"""The softmax: what its temperature does, and why scores are divided by the root of d_k."""

import math
from dataclasses import dataclass

import torch
from matplotlib.axes import Axes
from torch import Tensor

from regard import UsageError
from regard.gallery.claims import TRIALS, random_scores, softmax_gradient
from regard.gallery.drawn import Drawn
from regard.settings import setting
from regard.viewer import DOT, SEED, Drawing, Plot, draw_plots

_MAX_NUMBERS = 32


@dataclass(frozen=True)
class TemperatureSettings(Drawn):
    """Settings of the softmax with temperature."""

    scores: tuple[float, ...] = setting((2.0, 1.0, 0.5, 0.0, -1.0), "scores that are compared")
    temperatures: tuple[float, ...] = setting((0.1, 0.5, 1.0, 2.0, 10.0), "temperatures")


@dataclass(frozen=True)
class ScalingSettings(Drawn):
    """Settings of the scaled dot product."""

    keys: int = setting(64, "keys that a query attends to", min=2, max=4096)
    largest: int = setting(1024, "largest d_k; powers of 2 up to it are measured", min=4, max=2**16)
    seed: int = setting(1, "random seed", min=0, max=2**63 - 1)


def entropy(p: Tensor) -> Tensor:
    """Return the entropy in bits of distributions in the last dimension."""
    return -(p * p.clamp(min=1e-45).log2()).sum(-1)


def draw_temperature(settings: TemperatureSettings) -> Drawing:
    """Draw the softmax of some scores at several temperatures, and its entropy."""
    scores, temperatures = settings.scores, settings.temperatures
    for name, given in (("scores", scores), ("temperatures", temperatures)):
        if not 1 < len(given) <= _MAX_NUMBERS or not all(map(math.isfinite, given)):
            raise UsageError(f"{name}= {len(given)} numbers; give 2 to {_MAX_NUMBERS} finite ones")
    if min(temperatures) <= 0:
        raise UsageError(f"temperatures={min(temperatures):g}; expected numbers above 0")
    logits = torch.tensor(scores, dtype=torch.float64)
    at = torch.logspace(-2, 2, 200, dtype=torch.float64)
    curve = entropy((logits / at.unsqueeze(1)).softmax(-1))

    def bars(p: Tensor):
        def paint(axes: Axes) -> None:
            axes.bar(range(len(p)), p, color=DOT, width=0.7)
            axes.set_ylim(0, 1)
            axes.set_xticks(range(len(p)), [f"{score:g}" for score in scores])

        return paint

    def curves(axes: Axes) -> None:
        axes.semilogx(at, curve, color=DOT, linewidth=1.4)
        axes.axhline(math.log2(len(scores)), color=SEED, linewidth=0.9, linestyle="--")

    numbers, plots = {}, []
    for temperature in temperatures:
        p = (logits / temperature).softmax(-1)
        plots.append(Plot(bars(p), f"T = {temperature:g}", "score", "probability"))
        numbers[f"T = {temperature:g}"] = {
            **{f"score {s:g}": value for s, value in zip(scores, p.tolist(), strict=True)},
            "entropy, bits": float(entropy(p)),
        }
    plots.append(Plot(curves, "entropy, bits; dashed: even", "temperature", ""))
    title = "softmax(x / T)"
    notes = (
        "A low temperature picks the largest score, a high one none. The order never changes, and "
        "1 / sqrt(d_k) is a temperature of sqrt(d_k).",
    )
    rows = [plots[i : i + 3] for i in range(0, len(plots), 3)]
    return Drawing(title, numbers, notes, draw_plots(title, rows, notes=notes, size=(2.3, 1.6)))


def draw_scaling(settings: ScalingSettings) -> Drawing:
    """Draw what the width of queries and keys does to the softmax and its gradient."""
    widths = [2**n for n in range(int(math.log2(settings.largest)) + 1)]
    numbers, plain, scaled = {}, {}, {}
    for width in widths:
        scores, scale = random_scores(width, settings.keys, settings.seed)
        plain[width], scaled[width] = scores.softmax(-1), (scores * scale).softmax(-1)
        numbers[f"d_k = {width}"] = {
            "variance of q k": float(scores.var()),
            "largest weight": float(plain[width].amax(-1).mean()),
            "largest, scaled": float(scaled[width].amax(-1).mean()),
            "gradient": float(softmax_gradient(plain[width]).mean()),
            "gradient, scaled": float(softmax_gradient(scaled[width]).mean()),
            "median gradient": float(softmax_gradient(plain[width]).median()),
            "median gradient, scaled": float(softmax_gradient(scaled[width]).median()),
        }

    def lines(names: dict[str, str], log: bool = True):
        def paint(axes: Axes) -> None:
            for label, name in names.items():
                axes.plot(
                    widths,
                    [row[name] for row in numbers.values()],
                    "o-",
                    markersize=3,
                    linewidth=1.3,
                    label=label,
                )
            axes.set_xscale("log", base=2)
            if log:
                axes.set_yscale("log")
            axes.legend(fontsize=7)

        return paint

    def one(shown: Tensor):
        def paint(axes: Axes) -> None:
            axes.bar(range(settings.keys), shown, color=DOT, width=0.9)
            axes.set_ylim(0, 1)

        return paint

    last = widths[-1]
    plots = [
        Plot(lines({"q k": "variance of q k"}), "variance of the scores", "d_k"),
        Plot(
            lines({"unscaled": "largest weight", "scaled": "largest, scaled"}, log=False),
            "largest weight, mean",
            "d_k",
        ),
        Plot(
            lines({"unscaled": "median gradient", "scaled": "median gradient, scaled"}),
            "size of the softmax's gradient, median",
            "d_k",
        ),
        Plot(one(plain[last][0]), f"one query, d_k = {last}, unscaled", "key", "weight"),
        Plot(one(scaled[last][0]), f"the same, scaled by 1/{math.sqrt(last):.4g}", "key", "weight"),
    ]
    title = "Why scores are divided by the root of d_k"
    notes = (
        f"{TRIALS} random queries over {settings.keys} keys, coordinates of variance 1. The "
        "variance of q k is d_k: unscaled, the wider the more one key takes all, and the gradient "
        "of the softmax, diag(p) - p p', first grows a little and then vanishes. Scaled, none of "
        "this depends on d_k.",
    )
    sheet = draw_plots(title, [plots[:3], plots[3:]], notes=notes, size=(2.7, 1.8))
    return Drawing(title, numbers, notes, sheet)
