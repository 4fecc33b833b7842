"""The score of variants by a number that is varied, by time, and by speed, as one figure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from regard.metrics.interval import Interval
from regard.viewer.drawing import Drawing, Plot, draw_plots
from regard.viewer.panels import INK
from regard.viewer.plot import label_points, set_ticks

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from regard.lab.report import Compared, Variant

Points = Sequence[tuple[float, Interval]]


def number_of(value: Any) -> float | None:
    """Return a value as a number, if it is one."""
    try:
        return None if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        return None


def numeric_key(varied: Mapping[str, Sequence[Any]]) -> str | None:
    """Return the first key that is varied over numbers, such as share=0.01,0.1,1."""
    return next((k for k, v in varied.items() if None not in map(number_of, v)), None)


def label_of(variant: Variant, key: str | None) -> str:
    """Return the values of a variant but for one key."""
    rest = [str(value) for name, value in variant.values.items() if name != key]
    return ", ".join(rest) or "all"


def mean_of(runs: Sequence[Mapping[str, Any]], key: str) -> float | None:
    """Return the mean over runs of a number that all of them have."""
    values = [run.get(key) for run in runs]
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known and len(known) == len(values) else None


def by_number(made: Compared, key: str) -> tuple[str, dict[str, Points]]:
    """Return the main score of each line of variants by a key, and what that counts.

    A share of the data is told as the examples that it is.
    """
    examples = key == "share" and all(mean_of([run], "examples") for run in made.done)
    lines: dict[str, list[tuple[float, Interval]]] = {}
    for variant in made.variants:
        score, x = made.score(variant, made.main), number_of(variant.values[key])
        if examples:
            x = mean_of(made.of(variant), "examples")
        if score is not None and x is not None:
            lines.setdefault(label_of(variant, key), []).append((x, score))
    return "training examples" if examples else key, {k: sorted(v) for k, v in lines.items()}


def by_time(
    made: Compared, variants: Sequence[Variant]
) -> dict[str, list[list[tuple[float, float]]]]:
    """Return the main score of each run of some variants by seconds of training."""
    lines: dict[str, list[list[tuple[float, float]]]] = {}
    for variant in variants:
        for run in made.of(variant):
            rows = [(row["seconds"], row.get(made.main)) for row in run.get("progress") or ()]
            curve = [(x, y) for x, y in rows if y is not None]
            if len(curve) > 1:
                lines.setdefault(variant.name, []).append(curve)
    return lines


def draw_trends(made: Compared, title: str) -> Drawing | None:
    """Draw the main score by a number that is varied, by time and by speed, as far as known."""
    key = numeric_key(made.varied)
    if made.search is not None:
        return _searched(made, title)
    whole = list(made.variants)
    if key == "share":  # time and speed are told of those that saw most
        most = max(map(float, made.varied[key]))
        whole = [v for v in whole if number_of(v.values[key]) == most]
    speeds = {v.name: mean_of(made.of(v), "speed") for v in whole}
    if not made.main or not (key or any(speeds.values())):
        return None
    labels = {v.name: label_of(v, "share" if key == "share" else None) for v in made.variants}
    lines = dict.fromkeys([*(label_of(v, key) for v in made.variants), *labels.values()])
    colours = {label: f"C{n % 10}" for n, label in enumerate(lines)}
    numbers: dict[str, dict[str, float]] = {}
    plots: list[Plot] = []
    if key:
        plots.append(_numbered(made, key, colours, numbers))
    if timed := by_time(made, whole):

        def during(axes: Axes) -> None:
            for name, curves in timed.items():
                for number, curve in enumerate(curves):
                    told = {"label": labels[name]} if not number else {}
                    line = {"color": colours[labels[name]], "linewidth": 1.2, **told}
                    axes.plot(*zip(*curve, strict=True), **line)
            axes.legend(fontsize=7)

        plots.append(Plot(during, "by time", "seconds of training", made.main))
        for name, curves in timed.items():
            mean = sum(curve[-1][0] for curve in curves) / len(curves)
            numbers.setdefault(labels[name], {})["seconds"] = mean
    if any(speeds.values()):

        def fast(axes: Axes) -> None:
            points = []
            for variant in whole:
                score, speed = made.score(variant, made.main), speeds[variant.name]
                if score is not None and speed:
                    label = labels[variant.name]
                    how = {"fmt": "o", "markersize": 4, "color": colours[label]}
                    axes.errorbar(speed, score.mean, score.half or 0.0, **how)
                    points.append((speed, score.mean, label, INK))
            axes.margins(0.2)
            label_points(axes, points, 6.5)

        plots.append(Plot(fast, "by speed", "examples a second", made.main))
        for variant in whole:
            if speed := speeds[variant.name]:
                numbers.setdefault(labels[variant.name], {})["examples a second"] = speed
    seeds = ", ".join(map(str, made.seeds))
    notes = [f"Bars are 95% intervals over seeds {seeds}." if len(made.seeds) > 1 else "One seed."]
    sheet = draw_plots(title, [plots], notes=notes, size=(3.4, 2.5))
    return Drawing(title, numbers, notes, sheet)


def _numbered(
    made: Compared,
    key: str,
    colours: Mapping[str, str],
    numbers: dict[str, dict[str, float]],
) -> Plot:
    """Return the plot of the main score by a key, and note its numbers."""
    counted, lines = by_number(made, key)
    for label, points in lines.items():
        told = {f"{made.main}, {x:,.6g} {counted}": one.mean for x, one in points}
        numbers.setdefault(label, {}).update(told)

    def paint(axes: Axes) -> None:
        for label, points in lines.items():
            xs, ys = [x for x, _ in points], [one.mean for _, one in points]
            bars = [one.half or 0.0 for _, one in points]
            how = {"fmt": "o-", "markersize": 3, "color": colours[label], "label": label}
            axes.errorbar(xs, ys, bars, **how)
        every = sorted({x for points in lines.values() for x, _ in points})
        if every[0] > 0 and every[-1] > 8 * every[0]:
            axes.set_xscale("log")
        set_ticks(axes, every, [f"{x:,.6g}" for x in every])
        axes.legend(fontsize=7)

    return Plot(paint, f"by {counted}", counted, made.main)


def _searched(made: Compared, title: str) -> Drawing | None:
    """Draw the main score of each trial by every number that was drawn; those stopped are grey."""
    keys = [key for key, some in made.varied.items() if None not in map(number_of, some)]
    trials = [(v, run) for v in made.variants for run in made.of(v)]
    if not keys or not made.main:
        return None

    def plot(key: str) -> Plot:
        def paint(axes: Axes) -> None:
            for variant, run in trials:
                y = run["scores"].get(made.main)
                if y is not None:
                    colour = "C0" if run["finished"] else "0.75"
                    axes.plot(float(variant.values[key]), y, "o", color=colour, markersize=4)
            every = sorted(map(float, made.varied[key]))
            if every[0] > 0 and every[-1] > 8 * every[0]:
                axes.set_xscale("log")

        return Plot(paint, f"by {key}", key, made.main)

    notes = ["Each dot is a trial; the grey ones were stopped before their last step."]
    numbers = {
        v.name: {key: float(v.values[key]) for key in keys}
        | {made.main: run["scores"].get(made.main), "steps": run["steps"]}
        for v, run in trials
    }
    sheet = draw_plots(title, [[plot(key) for key in keys]], notes=notes, size=(3.4, 2.5))
    return Drawing(title, numbers, notes, sheet)
