"""Draws positions.png: what each position does, computed by its own class before any training."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from torch import Tensor

from regard.attention.masks import Causal
from regard.attention.positions import ROTARY_SCALINGS, RotaryScaling, build_position, of_layer

FAR = 256
TEXT = ["Tom", "ran", ".", "He", "fell", ".", "He", "got", "up", "."]


def build(name: str, width: int = 64, heads: int = 1, **settings: Any) -> Any:
    """Return a position for heads of the same width in all."""
    return of_layer(build_position(name, width, heads, width // heads, **settings))


def at(count: int, first: int = 0) -> Tensor:
    """Return positions in a row."""
    return torch.arange(first, first + count).unsqueeze(-1)


def back(part: Any, last: int) -> Tensor:
    """Return the shared bias (heads, distances) of a query for all keys before it."""
    return part.shared(at(1, last), at(last + 1))[:, 0].flip(-1)


def lines(place: Axes, rows: Any, labels: Any) -> None:
    """Draw a bias over distance, one line for each row."""
    for row, label in zip(rows, labels, strict=True):
        place.plot(row, linewidth=1.2, label=label)
    place.set_xlabel("distance back", fontsize=8)
    place.legend(fontsize=6.5, frameon=False)


def image(place: Axes, values: Tensor, across: str) -> None:
    """Draw numbers between -1 and 1 in colours, positions downwards."""
    place.imshow(values, aspect="auto", cmap="RdBu", vmin=-1, vmax=1, interpolation="nearest")
    place.set_xlabel(across, fontsize=8)
    place.set_ylabel("position", fontsize=8)


def sinusoidal(place: Axes) -> None:
    """Draw the vectors that are added."""
    image(place, build("sinusoidal").embed(torch.zeros(1, 128, 64), at(128))[0], "coordinate")


def turning(name: str, place: Axes) -> None:
    """Draw the cosine of the angle by which each pair is turned."""
    ones = torch.cat([torch.ones(32), torch.zeros(32)]).expand(1, 1, FAR, 64)
    turned = build(name, max_length=4 * FAR).rotate(ones, at(FAR))[0, 0]
    image(place, turned[:, :32] / turned[0, 0], "pair")


def rates(place: Axes) -> None:
    """Draw how far each pair turns from a position to the next, by the way of stretching."""
    for kind in ROTARY_SCALINGS:
        scaling = RotaryScaling(kind, factor=4.0, original_length=FAR)
        place.semilogy(build("rotary", scaling=scaling).rates(64), linewidth=1.2, label=kind)
    place.set_xlabel("pair", fontsize=8)
    place.legend(fontsize=6.5, frameon=False)


def by_head(name: str, heads: int, place: Axes) -> None:
    """Draw the bias of all heads as they begin."""
    lines(place, back(build(name, heads=heads), FAR), [f"head {n}" for n in range(heads)])


def t5(place: Axes) -> None:
    """Draw the bias of two heads; buckets are as wide as each other on this axis."""
    by_head("t5", 2, place)
    place.set_xscale("symlog", linthresh=16)
    place.set_xticks([0, 8, 16, 32, 64, 128, 256], ["0", "8", "16", "32", "64", "128", "256"])


def kerple_power(place: Axes) -> None:
    """Draw three powers, among which training chooses, scaled to meet far away."""
    part, powers = build("kerple_power", 66, 3), torch.tensor([0.5, 1.0, 1.5])
    part.logit_r2.copy_(torch.logit(powers / 2))
    part.log_r1.copy_((16 / FAR**powers).log())
    lines(place, back(part, FAR), [f"r2 = {power:.1f}" for power in powers.tolist()])


def fire(place: Axes) -> None:
    """Draw the share of the length, which f(x) = -x shows as it is."""
    part, queries = build("fire", hidden=1, max_length=FAR), (64, 128, 256)
    for parameter, value in ((part.inner, 1), (part.inner_bias, 0), (part.outer, -1)):
        parameter.fill_(value)
    lines(place, [back(part, q)[0] for q in queries], [f"query at {q}" for q in queries])


def asked(name: str, place: Axes) -> None:
    """Draw what three random queries make of each distance."""
    part, queries = build(name, 16), torch.randn(3, 1, 1, 1, 16)
    rows = [part.bias(q, torch.zeros(1, 1, 48, 16), at(1, 47), at(48)) for q in queries]
    lines(place, [row[0, 0, 0].flip(-1) for row in rows], ["query 0", "query 1", "query 2"])


def cope(place: Axes) -> None:
    """Draw the bias of a head whose gates open at full stops and whose bias is minus the count."""
    part, count = build("cope", 2, most=8), len(TEXT)
    part.table.copy_(torch.stack([torch.zeros(9), -torch.arange(9)], 1) * 2**0.5)
    stops = torch.tensor([20.0 if word == "." else -20.0 for word in TEXT])
    k = torch.stack([stops, torch.zeros(count)], 1)[None, None]
    bias = part.bias(torch.ones(1, 1, count, 2), k, at(count), at(count), Causal())[0, 0]
    seen = torch.ones(count, count).tril().bool()
    place.imshow(bias.masked_fill(~seen, torch.nan), cmap="Reds_r", vmin=-4, vmax=1, aspect="auto")
    for row, column in seen.nonzero().tolist():
        number = f"{round(bias[row, column].item())}"
        place.text(column, row, number, ha="center", va="center", fontsize=6)
    place.set_xticks(range(count), TEXT, rotation=90)
    place.set_yticks(range(count), TEXT)


PANELS = {
    "sinusoidal: what is added": sinusoidal,
    "rotary: cosine of the turn": partial(turning, "rotary"),
    "yarn: the same, stretched 4 times": partial(turning, "yarn"),
    "rotary: rates by scaling": rates,
    "alibi: bias": partial(by_head, "alibi", 4),
    "kerple_log: bias": partial(by_head, "kerple_log", 4),
    "kerple_power: bias by power": kerple_power,
    "fire: bias with f(x) = -x": fire,
    "t5: bias": t5,
    "shaw: bias, clipped at 16": partial(asked, "shaw"),
    "xl: bias": partial(asked, "xl"),
    "cope: a head that counts sentences": cope,
}


@torch.no_grad()
def main() -> None:
    """Draw all panels."""
    torch.manual_seed(1)
    figure = Figure(figsize=(13, 8.4), facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    for place, (title, draw) in zip(figure.subplots(3, 4).flat, PANELS.items(), strict=True):
        draw(place)
        place.set_title(title, fontsize=9, loc="left")
        place.tick_params(labelsize=7)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=90)


if __name__ == "__main__":
    main()
