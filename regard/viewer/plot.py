"""Plots of scores with their intervals, and of curves, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from regard.errors import UsageError
from regard.files import write_atomically
from regard.metrics.interval import Interval
from regard.viewer.png import COLOURS, INK, LINE, SOFT, fonts_for, spell, style, width_of

Points = Sequence[tuple[float, Interval]]

DOT, SEED = COLOURS(0.65), "#9fb4ee"
# told apart by colour, and when these run out by dash and mark
LOOKS = [
    (dash, mark, f"C{colour}")
    for (dash, mark), colour in product((("-", "o"), ("--", "s"), (":", "^")), range(10))
]
DASHED = 10  # how much further the same colour is found with the next dash
DPI = 130
MOST_ROWS = 120
LONGEST = 40


def draw_scores(
    path: str | Path,
    title: str,
    labels: Sequence[str],
    panels: Mapping[str, Sequence[Interval | None]],
) -> None:
    """Draw a panel for each score: a row for each label, with a dot for the mean, a bar for its
    interval, and a stroke for each number behind it.
    """
    if len(labels) > MOST_ROWS:
        raise UsageError(f"{len(labels)} rows are too many for one plot, which holds {MOST_ROWS}")
    names = [shorten(label) for label in labels]
    fonts, missing = fonts_for("".join(sorted(set("".join([title, *names, *panels])))))
    wide = max(map(width_of, names), default=1) * 8.5 / 72 + 0.25
    high = 0.24 * len(names) + 0.3
    width, height = wide + 3.4 * len(panels) + 0.2, high + 1.05
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.12 / width, 1 - 0.3 / height, spell(title, missing), **style(fonts, 10.5, INK))
    for number, (name, found) in enumerate(panels.items()):
        left = wide + 3.4 * number + 0.1
        place = figure.add_axes(
            (left / width, 0.55 / height, 3.1 / width, high / height), ylim=(len(names) - 0.4, -0.6)
        )
        plain(place)
        for row, one in enumerate(found):
            place.axhline(row, color=LINE, linewidth=0.6, zorder=0)
            if one is None:
                continue
            place.plot(one.values, [row] * len(one.values), "|", color=SEED, markersize=10)
            place.errorbar(
                one.mean,
                row,
                xerr=one.half,
                fmt="o",
                color=DOT,
                markersize=5,
                linewidth=1.4,
                capsize=3,
            )
        place.set_xlabel(spell(name, missing), **style(fonts, 9, SOFT))
        place.locator_params(axis="x", nbins=6)
        place.set_yticks([])
        if number == 0:
            for row, label in enumerate(names):
                where = {"transform": place.get_yaxis_transform(), "ha": "right", "va": "center"}
                place.text(-0.03, row, spell(label, missing), **where, **style(fonts, 8.5, INK))
    save(figure, path)


def draw_curves(
    path: str | Path,
    title: str,
    lines: Mapping[str, Points],
    axes: tuple[str, str],
    trained: float | None = None,
    log: bool = True,
    looks: Mapping[str, int] | None = None,
    hollow: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Draw a line through the means of each label, with bars for their intervals.

    Doubling x is always the same way, unless `log` is off; `trained` is marked. `looks` are the
    numbers of the labels among LOOKS, if not as they come; `hollow` the points of a label that
    stand for too little.
    """
    names = {label: shorten(label) for label in lines}
    fonts, missing = fonts_for("".join(sorted(set("".join([title, *axes, *names.values()])))))
    room = max(map(width_of, names.values()), default=1) * 8 / 72 + 0.75
    high = max(4.0, 0.19 * len(names) + 0.4)
    width, height = 6.2 + room, high + 1.1
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.12 / width, 1 - 0.3 / height, spell(title, missing), **style(fonts, 10.5, INK))
    place = figure.add_axes((0.75 / width, 0.6 / height, 5.3 / width, high / height))
    plain(place)
    if log:
        place.set_xscale("log", base=2)
    if trained is not None:
        place.axvline(trained, color=SOFT, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
    for number, (label, points) in enumerate(lines.items()):
        dash, mark, colour = LOOKS[(looks or {}).get(label, number) % len(LOOKS)]
        aside = 2 ** (0.16 * (number / max(1, len(lines) - 1) - 0.5))  # so that bars do not overlap
        aside = aside if log else 1.0
        place.errorbar(
            [x * aside for x, _ in points],
            [one.mean for _, one in points],
            yerr=[one.half or 0.0 for _, one in points],
            label=spell(names[label], missing),
            color=colour,
            linestyle=dash,
            marker=mark,
            markersize=3.5,
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
        )
        for place_of in (hollow or {}).get(label, ()):
            x, one = points[place_of]
            place.plot(x * aside, one.mean, mark, color=colour, markerfacecolor="white", zorder=5)
    if log:
        ticks = sorted({x for points in lines.values() for x, _ in points})
        place.set_xticks(ticks, [f"{x:g}" for x in ticks])
        place.minorticks_off()
    place.set_xlabel(spell(axes[0], missing), **style(fonts, 9, SOFT))
    place.set_ylabel(spell(axes[1], missing), **style(fonts, 9, SOFT))
    # in the order of the lines' right ends, from top to bottom; those that end early come first
    far = {label: (-points[-1][0], points[-1][1].mean) for label, points in lines.items() if points}
    order = sorted(far, key=lambda label: (far[label][0], far[label][1]))[::-1]
    handles = {label: h for h, label in zip(*place.get_legend_handles_labels(), strict=True)}
    told = [handles[spell(names[label], missing)] for label in order]
    legend = place.legend(
        told,
        [spell(names[label], missing) for label in order],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        frameon=False,
        prop={"family": fonts, "size": 8},
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    save(figure, path)


def plain(place: Axes) -> None:
    """Leave no more lines around a plot than are read."""
    for side in ("top", "right"):
        place.spines[side].set_visible(False)
    for edge in place.spines.values():
        edge.set_color(LINE)
    place.tick_params(labelsize=8, colors=SOFT, length=2.5, color=LINE)
    place.grid(axis="both", color=LINE, linewidth=0.5)
    place.set_axisbelow(True)
    place.ticklabel_format(useOffset=False)


def shorten(label: str) -> str:
    """Cut a label that is too long for its place."""
    return label if len(label) <= LONGEST else label[: LONGEST - 1] + "…"


def save(figure: Figure, path: str | Path) -> None:
    """Write a figure as PNG, wholly or not at all."""
    stream = BytesIO()
    figure.savefig(stream, format="png", dpi=DPI)
    write_atomically(path, stream.getvalue())
