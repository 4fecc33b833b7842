"""Draws tokens.png: four kinds of input as tokens, and the attention of one encoder in each.

The program is that of tokens.md, block by block.
"""

import re
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from regard.attention.watch import watch

HERE = Path(__file__).parent
SHOWN = 65  # the example of each kind, which was not trained on


def program() -> dict[str, Any]:
    """Run the code of the page, and return its names."""
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", (HERE / "tokens.md").read_text(), re.DOTALL):
        exec(compile(block, "tokens.md", "exec"), names)
    return names


def attention(names: dict[str, Any], kind: str) -> torch.Tensor:
    """Return the weights of the last block, the mean of its heads, between real tokens."""
    made = names["kinds"][kind][0](torch.tensor([SHOWN]))
    with torch.no_grad(), watch(names["encoder"]) as maps:
        names["encode"](*made)
    real = int(made[2]) if len(made) > 2 else made[0].shape[1]
    return maps["1.attention"].weights()[0].mean(0)[:real, :real]


def text(place: Axes, names: dict[str, Any]) -> None:
    """Write the words, a box each."""
    words = names["sentences"][SHOWN]
    for n, word in enumerate(words):
        box = {"boxstyle": "round,pad=0.4", "facecolor": "#eef3fa", "edgecolor": "#8aa4c8"}
        where = (n % 3 + 0.5, 1 - n // 3)
        place.text(*where, word, ha="center", va="center", fontsize=10, bbox=box)
    place.set(xlim=(0, 3), ylim=(-1.6, 1.6))


def grid(place: Axes, rows: range, columns: range) -> None:
    """Draw the borders of chunks."""
    for y in rows:
        place.axhline(y - 0.5, color="white", linewidth=1.2)
    for x in columns:
        place.axvline(x - 0.5, color="white", linewidth=1.2)


def image(place: Axes, names: dict[str, Any]) -> None:
    """Draw the image with its patches."""
    pixels = names["images"][SHOWN].mean(0)
    place.imshow(pixels, cmap="gray", interpolation="nearest", aspect="auto")
    grid(place, range(4, 16, 4), range(4, 16, 4))


def sound(place: Axes, names: dict[str, Any]) -> None:
    """Draw the spectrogram with its pieces, time to the right."""
    shown = names["sounds"][SHOWN].T
    place.imshow(shown, cmap="magma", origin="lower", aspect="auto", interpolation="nearest")
    grid(place, range(20, 80, 20), range(8, shown.shape[1], 8))


def sensors(place: Axes, names: dict[str, Any]) -> None:
    """Draw the three columns over time, and where they are cut."""
    table = names["tables"][SHOWN]
    for n in range(3):
        place.plot(table[:, n] - 3 * n, linewidth=1.2)
    for x in range(5, len(table), 5):
        place.axvline(x - 0.5, color="#999999", linewidth=0.8, linestyle=":")
    place.set_xlim(-0.5, len(table) - 0.5)


KINDS = {
    "text": (text, "text: words"),
    "image": (image, "image: 4 x 4 pixels"),
    "sound": (sound, "sound: 8 frames of 20 pitches"),
    "sensors": (sensors, "three sensors: 5 steps"),
}


def main() -> None:
    """Draw all four beside each other, inputs above and attention below."""
    names = program()
    figure = Figure(figsize=(12, 5.6), layout="constrained")
    FigureCanvasAgg(figure)
    places = figure.subplots(2, 4)
    for (kind, (draw, title)), above, below in zip(KINDS.items(), *places, strict=True):
        draw(above, names)
        above.set_title(title, fontsize=11)
        weights = attention(names, kind)
        below.imshow(weights, cmap="viridis", interpolation="nearest")
        below.set_title(f"{len(weights)} tokens, the last block", fontsize=9)
        below.set_xlabel("looked at", fontsize=8)
        for place in (above, below):
            place.set(xticks=[], yticks=[])
    places[1][0].set_ylabel("looking", fontsize=8)
    figure.savefig(HERE / "tokens.png", dpi=110)


if __name__ == "__main__":
    main()
