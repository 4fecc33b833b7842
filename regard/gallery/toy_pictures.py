"""Pictures of toy models of superposition."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import ListedColormap

from regard.files import write_atomically
from regard.viewer import LINE, SOFT, Sheet, plain

_MAX_MODELS = 12  # columns of one picture
_PHASES = ("#e3e7ee", "#9fb4ee", "#2f5bd8")  # first only, second only, both
_SHARES = "viridis"  # of a dimension


def draw_models(path: str | Path, toys: Any) -> None:
    """Draw W'W of each model, and its features: as points of the plane if there are two axes."""
    shown = min(len(toys), _MAX_MODELS)
    W, b = toys.W[:shown].numpy(), toys.b[:shown].numpy()
    share = toys.dimensionality()[:shown].numpy()
    n, m = W.shape[2], W.shape[1]
    wide, down = 1.9, 0.0
    title = f"{n} features in {m} dimension{'s' if m > 1 else ''}: W'W and b, and the features"
    sheet = Sheet(0.4 + shown * (wide + 0.25), wide * (1 + n / (n + 2)) + 1.35, [title])
    sheet.write(title, 0.15, 0.32, 10.5)
    for number in range(shown):
        left = 0.2 + number * (wide + 0.25)
        sheet.write(f"sparsity {float(toys.sparsity[number]):.3g}", left, 0.62, 9, SOFT)
        gram = W[number].T @ W[number]
        picture = np.concatenate([gram, np.full((n, 1), np.nan), b[number][:, None]], 1)
        axes = sheet.axes(left, 0.72, wide, wide * n / (n + 2), xticks=[], yticks=[])
        axes.imshow(picture, cmap="RdBu", vmin=-1.2, vmax=1.2, aspect="auto")
        axes.set_frame_on(False)
        down = 0.72 + wide * n / (n + 2) + 0.15
        if m == 2:
            axes = sheet.axes(left, down, wide, wide, xlim=(-1.5, 1.5), ylim=(-1.5, 1.5))
            for x, y in W[number].T:
                axes.plot([0, x], [0, y], color=SOFT, linewidth=0.8)
            colours = {"c": share[number], "cmap": _SHARES, "vmin": 0, "vmax": 1}
            axes.scatter(*W[number], s=26, zorder=3, **colours)
            axes.set(xticks=[], yticks=[])
            for edge in axes.spines.values():
                edge.set_color(LINE)
        else:
            axes = sheet.axes(left + 0.2, down, wide - 0.2, wide, xlim=(0, 1.5))
            norms = np.linalg.norm(W[number], axis=0)
            axes.barh(range(n), norms, color=_colours(share[number]))
            axes.set_ylim(n - 0.5, -0.5)
            axes.set_xlabel("length of each feature", **sheet.style(8, SOFT))
            plain(axes)
    sheet.write(
        "below: yellow has a dimension of its own, green half of one, violet none",
        0.2,
        down + wide + 0.3,
        8,
        SOFT,
    )
    write_atomically(path, sheet.png())


def _colours(share: np.ndarray) -> Any:
    from matplotlib import colormaps

    return colormaps[_SHARES](share)


def draw_fractions(path: str | Path, toys: Any, fractions: Mapping[str, float]) -> None:
    """Draw features per dimension, and each feature's share of a dimension, against sparsity."""
    across = 1 / (1 - toys.sparsity.numpy())
    n, m = toys.W.shape[2], toys.W.shape[1]
    title = f"{n} features in {m} dimensions, by how rare a feature is"
    sheet = Sheet(8.6, 6.7, [title, *fractions])
    sheet.write(title, 0.15, 0.32, 10.5)
    axes = sheet.axes(0.75, 0.55, 6.2, 1.7)
    plain(axes)
    axes.plot(across, toys.features_per_dimension().numpy(), "o-", color="#2f5bd8", markersize=3.5)
    axes.set_xscale("log")
    axes.set_ylabel("features per dimension", **sheet.style(8.5, SOFT))
    axes = sheet.axes(0.75, 2.55, 6.2, 3.5, ylim=(-0.04, 1.06))
    plain(axes)
    share = toys.dimensionality().numpy()
    aside = np.exp(np.linspace(-0.04, 0.04, n))  # so that equal shares are seen to be many
    axes.plot(
        (across[:, None] * aside).ravel(),
        share.ravel(),
        ".",
        color="#2f5bd8",
        markersize=3,
        alpha=0.5,
    )
    for name, value in fractions.items():
        axes.axhline(value, color="#d8552f", linewidth=0.6, zorder=0)
        near = [other - value for other in fractions.values() if 0 < abs(other - value) < 0.04]
        va = "center" if not near else "top" if max(near) > 0 else "bottom"
        axes.text(1.01, value, name, transform=axes.get_yaxis_transform(), va=va, fontsize=8)
    axes.set_xscale("log")
    axes.set_xlabel("1 / (1 - sparsity)", **sheet.style(8.5, SOFT))
    axes.set_ylabel("share of a dimension, of each feature", **sheet.style(8.5, SOFT))
    write_atomically(path, sheet.png())


def draw_phases(
    path: str | Path, found: Any, expected: Any, dense: Any, weights: Any, names: Sequence[str]
) -> None:
    """Draw the phases that were trained beside those of the least closed-form loss."""
    title = "Two features, one dimension: what is represented"
    sheet = Sheet(8.4, 4.5, [title, *names])
    sheet.write(title, 0.15, 0.32, 10.5)
    low, high = math.log10(float(weights[0])), math.log10(float(weights[-1]))
    rare = math.log10(1 / float(dense[-1]))
    for number, (heading, phases) in enumerate((("trained", found), ("closed form", expected))):
        left = 0.75 + number * 3.9
        sheet.write(heading, left, 0.65, 9, SOFT)
        axes = sheet.axes(left, 0.75, 3.3, 2.9)
        axes.imshow(
            phases.numpy(),
            extent=(low, high, rare, 0),
            aspect="auto",
            interpolation="nearest",
            cmap=ListedColormap(_PHASES),
            vmin=0,
            vmax=2,
        )
        axes.set_ylabel("1 / (1 - sparsity)" if not number else "", **sheet.style(8.5, SOFT))
        axes.set_xlabel("importance of the second feature", **sheet.style(8.5, SOFT))
        axes.set_xticks([-1, 0, 1], ["0.1", "1", "10"])
        axes.set_yticks([0, 1, 2], ["1", "10", "100"])
        axes.tick_params(labelsize=8, colors=SOFT, length=2.5)
    for number, (name, colour) in enumerate(zip(names, _PHASES, strict=True)):
        axes = sheet.axes(0.75 + number * 2, 4.22, 0.16, 0.16, xticks=[], yticks=[])
        axes.set_facecolor(colour)
        sheet.write(name, 1.0 + number * 2, 4.36, 8.5, SOFT)
    write_atomically(path, sheet.png())
