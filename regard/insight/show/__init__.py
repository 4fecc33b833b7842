"""`regard show`: the pictures of the lectures, each by one command, computed when asked for."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from regard.errors import UsageError, lookup
from regard.settings import fill

if TYPE_CHECKING:
    from regard.viewer.drawing import Drawing


class Show(NamedTuple):
    """One picture: what it shows, and where its settings and what draws it are."""

    summary: str
    module: str
    settings: str
    draw: str = "draw"
    loads: bool = False  # it reads a model

    def settings_class(self) -> type:
        """Return the class of its settings."""
        return getattr(import_module(self.module), self.settings)


HERE = "regard.insight.show"
SHOWS: dict[str, Show] = {
    "receptive_fields": Show(
        "what a place sees through convolution, local attention, windows and full attention",
        f"{HERE}.receptive_fields",
        "ReceptiveFieldSettings",
    ),
    "filters": Show(
        "what the first layer of a model looks for",
        f"{HERE}.filters",
        "FilterPictureSettings",
        loads=True,
    ),
    "counter": Show(
        "a binary counter beside sinusoidal positions", f"{HERE}.counter", "CounterSettings"
    ),
    "embedding": Show(
        "one-hot vectors times the embedding matrix", f"{HERE}.embedding", "EmbeddingSettings"
    ),
    "temperature": Show(
        "the softmax at several temperatures",
        f"{HERE}.softmax",
        "TemperatureSettings",
        "draw_temperature",
    ),
    "scaling": Show(
        "why scores are divided by the root of d_k: the gradient of the softmax",
        f"{HERE}.softmax",
        "ScalingSettings",
        "draw_scaling",
    ),
    "particles": Show(
        "particles dx = c dW beside the heat equation",
        f"{HERE}.diffusion",
        "ParticleSettings",
        "draw_particles",
    ),
    "perona_malik": Show(
        "anisotropic diffusion after 10, 20, 30, 60 and 100 steps",
        f"{HERE}.diffusion",
        "PeronaMalikSettings",
        "draw_perona_malik",
    ),
}


def settings_class(name: str | None) -> type | None:
    """Settings class of a picture."""
    return lookup("picture", name, SHOWS).settings_class() if name else None


def show(
    name: str,
    given: Mapping[str, Any],
    *,
    out: str | Path | None = None,
    load: Callable[[str], Any],
) -> "Drawing":
    """Draw one of SHOWS, and write it to `out`, a .png or .html; `load` finds a model by name."""
    one = lookup("picture", name, SHOWS)
    if out is not None and Path(out).suffix.lower() not in (".png", ".html", ".htm"):
        raise UsageError(f"out={out}: unknown kind of file; end it in .png or .html")
    settings = fill(one.settings_class(), given)
    draw = getattr(import_module(one.module), one.draw)
    drawing = (partial(draw, load=load) if one.loads else draw)(settings)
    return drawing if out is None else replace(drawing, path=str(drawing.save(out)))
