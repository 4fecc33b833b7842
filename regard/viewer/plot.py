"""Plots of scores with their intervals, and of curves, as PNG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path

from matplotlib.axes import Axes

from regard.errors import UsageError
from regard.files import write_atomically
from regard.metrics.interval import Interval
from regard.viewer.fonts import cut, text_width
from regard.viewer.panels import BLUES, LINE, SOFT, Sheet

Points = Sequence[tuple[float, Interval]]

DOT, SEED = BLUES(0.65), "#9fb4ee"
# told apart by colour, and when these run out by dash and marker
STYLES = [
    (dash, marker, f"C{colour}")
    for (dash, marker), colour in product((("-", "o"), ("--", "s"), (":", "^")), range(10))
]
DASHED = 10  # how much further the same colour is found with the next dash
MAX_ROWS = 120
MAX_LABEL = 24  # font sizes


def draw_scores(
    path: str | Path,
    title: str,
    labels: Sequence[str],
    panels: Mapping[str, Sequence[Interval | None]],
) -> None:
    """Draw a panel for each score: a row for each label, with a dot for the mean, a bar for its
    interval, and a stroke for each number behind it.
    """
    if len(labels) > MAX_ROWS:
        raise UsageError(f"{len(labels)} rows are too many for one plot, which holds {MAX_ROWS}")
    names = [cut(label, MAX_LABEL) for label in labels]
    left = max(map(text_width, names), default=1) * 8.5 / 72 + 0.25
    high = 0.24 * len(names) + 0.3
    sheet = Sheet(left + 3.4 * len(panels) + 0.2, high + 1.05, [title, *names, *panels])
    sheet.write(title, 0.12, 0.3, 10.5)
    for number, (score, intervals) in enumerate(panels.items()):
        axes = sheet.axes(left + 3.4 * number + 0.1, 0.5, 3.1, high, ylim=(len(names) - 0.4, -0.6))
        plain(axes)
        for row, one in enumerate(intervals):
            axes.axhline(row, color=LINE, linewidth=0.6, zorder=0)
            if one is None:
                continue
            axes.plot(one.values, [row] * len(one.values), "|", color=SEED, markersize=10)
            bar = {"fmt": "o", "color": DOT, "markersize": 5, "linewidth": 1.4, "capsize": 3}
            axes.errorbar(one.mean, row, xerr=one.half, **bar)
        axes.set_xlabel(sheet.spell(score), **sheet.style(9, SOFT))
        axes.locator_params(axis="x", nbins=6)
        axes.set_yticks([])
        if not number:
            for row, name in enumerate(names):
                where = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
                axes.text(-0.03, row, sheet.spell(name), **where, **sheet.style(8.5))
    write_atomically(path, sheet.png())


def draw_curves(
    path: str | Path,
    title: str,
    lines: Mapping[str, Points],
    labels: tuple[str, str],
    trained: float | None = None,
    log: bool = True,
    styles: Mapping[str, int] | None = None,
    hollow: Mapping[str, Sequence[int]] | None = None,
) -> None:
    """Draw a line through the means of each name, with bars for their intervals.

    `labels` are those of x, whose axis is logarithmic unless `log` is off, and y; x = `trained` is
    marked. `styles` are the numbers of the lines among STYLES, if not as they come; `hollow` the
    points of a line that stand for too little.
    """
    names = {name: cut(name, MAX_LABEL) for name in lines}
    room = max(map(text_width, names.values()), default=1) * 8 / 72 + 0.75
    high = max(4.0, 0.19 * len(names) + 0.4)
    sheet = Sheet(6.2 + room, high + 1.1, [title, *labels, *names.values()])
    sheet.write(title, 0.12, 0.3, 10.5)
    axes = sheet.axes(0.75, 0.5, 5.3, high)
    plain(axes)
    if log:
        axes.set_xscale("log", base=2)
    if trained is not None:
        axes.axvline(trained, color=SOFT, linewidth=0.8, linestyle=(0, (2, 3)), zorder=0)
    handles = {}
    for number, (name, points) in enumerate(lines.items()):
        dash, marker, colour = STYLES[(styles or {}).get(name, number) % len(STYLES)]
        # aside, so that bars do not overlap
        aside = 2 ** (0.16 * (number / max(1, len(lines) - 1) - 0.5)) if log else 1.0
        handles[name] = axes.errorbar(
            [x * aside for x, _ in points],
            [one.mean for _, one in points],
            yerr=[one.half or 0.0 for _, one in points],
            color=colour,
            linestyle=dash,
            marker=marker,
            markersize=3.5,
            linewidth=1.3,
            elinewidth=0.8,
            capsize=2,
        )
        for index in (hollow or {}).get(name, ()):
            x, one = points[index]
            white = {"color": colour, "markerfacecolor": "white", "zorder": 5}
            axes.plot(x * aside, one.mean, marker, **white)
    if log:
        ticks = sorted({x for points in lines.values() for x, _ in points})
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks])
        axes.minorticks_off()
    axes.set_xlabel(sheet.spell(labels[0]), **sheet.style(9, SOFT))
    axes.set_ylabel(sheet.spell(labels[1]), **sheet.style(9, SOFT))
    # in the order of the lines' right ends, from top to bottom; those that end early come first
    ends = {name: (-points[-1][0], points[-1][1].mean) for name, points in lines.items() if points}
    order = sorted(ends, key=lambda name: ends[name])[::-1]
    legend = axes.legend(
        [handles[name] for name in order],
        [sheet.spell(names[name]) for name in order],
        loc="upper left",
        bbox_to_anchor=(1.01, 1.02),
        frameon=False,
        prop={"family": sheet.fonts, "size": 8},
    )
    for text in legend.get_texts():
        text.set_parse_math(False)
    write_atomically(path, sheet.png())


def plain(axes: Axes) -> None:
    """Leave no more lines around a plot than are read."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for edge in axes.spines.values():
        edge.set_color(LINE)
    axes.tick_params(labelsize=8, colors=SOFT, length=2.5, color=LINE)
    axes.grid(axis="both", color=LINE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.ticklabel_format(useOffset=False)
