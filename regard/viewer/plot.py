"""Plots of scores with their intervals, and of curves, as PNG."""

import math
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from regard.errors import UsageError
from regard.files import write_atomically
from regard.metrics.interval import Interval
from regard.viewer.fonts import cut, text_width
from regard.viewer.panels import BLUES, LINE, SOFT, Sheet

Points = Sequence[tuple[float, Interval]]

DOT, SEED = BLUES(0.65), "#9fb4ee"
# told apart by colour, and when these run out by dash and marker
_STYLES = [
    (dash, marker, f"C{colour}")
    for (dash, marker), colour in product((("-", "o"), ("--", "s"), (":", "^")), range(10))
]
DASHED = 10  # how much further the same colour is found with the next dash
_MAX_ROWS = 120
_MAX_LABEL = 24  # font sizes


def draw_scores(
    path: str | Path,
    title: str,
    labels: Sequence[str],
    panels: Mapping[str, Sequence[Interval | None]],
) -> None:
    """Draw a panel for each score: a row for each label, with a dot for the mean, a bar for its
    interval, and a stroke for each number behind it.
    """
    if len(labels) > _MAX_ROWS:
        raise UsageError(f"{len(labels)} rows are too many for one plot, which holds {_MAX_ROWS}")
    names = [cut(label, _MAX_LABEL) for label in labels]
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

    Args:
        path: file to write
        title: title of the plot
        lines: points of each line
        labels: labels of the x and the y axis
        trained: value of x that is marked
        log: logarithmic x axis
        styles: style number of each line; in order unless given
        hollow: points of a line drawn hollow, since they stand for too little
    """
    names = {name: cut(name, _MAX_LABEL) for name in lines}
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
        dash, marker, colour = _STYLES[(styles or {}).get(name, number) % len(_STYLES)]
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
        set_ticks(axes, ticks, [f"{x:g}" for x in ticks])
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


def set_ticks(axes: Axes, places: Sequence[float], labels: Sequence[str], size: float = 8) -> None:
    """Mark places of the x axis, and label as many of them as there is room for."""
    across = axes.bbox.width * 72 / axes.figure.dpi
    low, high = axes.get_xlim()  # now, since whatever was drawn is reckoned with
    at = axes.transData.transform([(x, axes.get_ylim()[0]) for x in places])[:, 0]
    at = (at - axes.bbox.x0) / axes.bbox.width * across
    shown, free = [], -math.inf
    for x, label in zip(at, labels, strict=True):
        half = text_width(label) * size / 2
        fits = x - half > free
        shown.append(label if fits else "")
        free = x + half + 0.4 * size if fits else free
    axes.set_xticks(places, shown)
    axes.set_xlim(low, high)


def label_points(
    axes: Axes, points: Sequence[tuple[float, float, str, Any]], size: float = 7
) -> None:
    """Write the label (x, y, label, colour) of each point beside it, where nothing else stands.

    The rings around a point are tried from the nearest on; a label that is far from its point gets
    a line to it, and one that finds no room is left out. What is drawn later must not change the
    limits of the axes.
    """
    axes.set(xlim=axes.get_xlim(), ylim=axes.get_ylim())
    points_of_pixel = 72 / axes.figure.dpi
    at = axes.transData.transform([point[:2] for point in points]) * points_of_pixel
    inside = [float(x) * points_of_pixel for x in axes.bbox.extents]
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in at]
    angles = np.arange(16) * math.pi / 8 + math.pi / 4  # the upper right first
    rings = [(reach, angle) for reach in (5, 9, 14, 20, 28, 38, 50) for angle in angles]
    left_out = 0
    for (x, y), (*place, label, colour) in zip(at, points, strict=True):
        wide, high = text_width(label) * size + 1, 1.3 * size
        for reach, angle in rings:
            right, up = reach * math.cos(angle), reach * math.sin(angle)
            left = x + right - (0 if right > 1 else wide if right < -1 else wide / 2)
            low = y + up - (0 if up > 1 else high if up < -1 else high / 2)
            box = left, low, left + wide, low + high
            if _shared(box, inside) > wide * high - 1e-6 and not any(
                _shared(box, other) for other in taken
            ):
                break
        else:
            left_out += 1
            continue
        taken.append(box)
        axes.annotate(
            label,
            (place[0], place[1]),
            xytext=(left - x, low - y),
            va="bottom",
            textcoords="offset points",
            fontsize=size,
            color=colour,
            parse_math=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.4, "alpha": 0.6}
            if reach > 9
            else None,
        )
    if left_out:
        told = f"{left_out} of {len(points)} labels had no room"
        where = {"transform": axes.transAxes, "ha": "right", "va": "bottom"}
        axes.text(1, 1.01, told, fontsize=6, color=SOFT, **where)


def _shared(one: Sequence[float], other: Sequence[float]) -> float:
    """Area that two boxes (left, low, right, high) share."""
    wide = min(one[2], other[2]) - max(one[0], other[0])
    high = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, wide) * max(0.0, high)


def plain(axes: Axes) -> None:
    """Leave no more lines around a plot than are read."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=8, colors=SOFT, length=2.5, color=LINE)
    axes.grid(axis="both", color=LINE, linewidth=0.5)
    axes.set_axisbelow(True)
    axes.ticklabel_format(useOffset=False)
