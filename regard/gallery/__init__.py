"""Pictures and measurements of a course on attention, each by one command: `regard show NAME`.

It stands on what `regard` and its packages export, as anybody's program would, and nothing in the
package stands on it.
"""

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import UsageError, lookup
from regard.gallery.drawn import Drawn
from regard.settings import fill
from regard.verbs import Call


class Piece(NamedTuple):
    """One piece: what it shows, and where its settings and what makes it are."""

    summary: str
    module: str
    settings: str
    make: str = "draw"
    words: tuple[str, ...] = ()
    keys: str = "[out=...] [key=value...]"
    examples: tuple[str, ...] = ()

    def settings_class(self) -> type:
        """Class of its settings."""
        return getattr(import_module(f"regard.gallery.{self.module}"), self.settings)


PIECES: dict[str, Piece] = {
    "receptive_fields": Piece(
        "what a place sees through convolution, local attention, windows and full attention",
        "receptive_fields",
        "ReceptiveFieldSettings",
    ),
    "filters": Piece(
        "what the first layer of a model looks for", "first_layer", "FilterPictureSettings"
    ),
    "counter": Piece("a binary counter beside sinusoidal positions", "counter", "CounterSettings"),
    "embedding": Piece(
        "one-hot vectors times the embedding matrix", "embedding", "EmbeddingSettings"
    ),
    "temperature": Piece(
        "the softmax at several temperatures", "softmax", "TemperatureSettings", "draw_temperature"
    ),
    "scaling": Piece(
        "why scores are divided by the root of d_k: the gradient of the softmax",
        "softmax",
        "ScalingSettings",
        "draw_scaling",
    ),
    "heads": Piece(
        "why many heads: two look-ups at once by one head, two and four",
        "heads",
        "ManyHeadsSettings",
        "draw_many_heads",
    ),
    "particles": Piece(
        "particles dx = c dW beside the heat equation",
        "diffusion",
        "ParticleSettings",
        "draw_particles",
    ),
    "perona_malik": Piece(
        "anisotropic diffusion after 10, 20, 30, 60 and 100 steps",
        "diffusion",
        "PeronaMalikSettings",
        "draw_perona_malik",
    ),
    "superposition": Piece(
        "more features than dimensions: train toy models and see their polygons and phases",
        "superposition",
        "SuperpositionSettings",
        "superposition",
        keys="[n=...] [m=...] [sparsity=...] [out=...]",
        examples=(
            "regard show superposition n=5 m=2 sparsity=0,0.9,0.99 out=pentagon.png",
            "regard show superposition view=phase out=phase.png",
        ),
    ),
    "misconceptions": Piece(
        "two beliefs about attention, measured: nearest neighbours, and layer i reads layer i",
        "misconceptions",
        "MisconceptionSettings",
        "misconceptions",
        ("MODEL",),
        "data=... [key=value...]",
        (
            "regard show misconceptions en-zh data=tatoeba-en-zh examples=100 out=beliefs.png",
            "regard show misconceptions fashion data=fashion-mnist examples=20",
        ),
    ),
    "filter_comparison": Piece(
        "a noisy photo smoothed by five filters, with scores and the weights of a pixel",
        "filters",
        "FilterCompareSettings",
        "compare",
        ("PHOTO",),
        "out=... [key=value...]",
        (
            "regard show filter_comparison photo.png sigma=25 out=compare.png",
            "regard show filter_comparison photo.png weights_at=120,80 out=compare.png",
        ),
    ),
    "bilateral_grid": Piece(
        "the bilateral filter over both of its widths",
        "filters",
        "FilterGridSettings",
        "grid",
        ("PHOTO",),
        "out=... [key=value...]",
        (
            "regard show bilateral_grid photo.png out=grid.png",
            "regard show bilateral_grid photo.png weights_at=120,80 size=128 out=grid.png",
        ),
    ),
    "texture": Piece(
        "a texture grown from a sample, pixel by pixel, by hard attention",
        "texture",
        "TextureSettings",
        "grow",
        ("PHOTO",),
        "out=... [key=value...]",
        (
            "regard show texture cloth.png out=more.png width=128 height=128 patch=15",
            "regard show texture cloth.png out=row.png tolerance=0,0.1,0.5",
        ),
    ),
    "lectures": Piece(
        "the lectures' figures about cost, counted with the layers and models of the package",
        "lectures",
        "LectureSettings",
        "lectures",
        keys="",
        examples=("regard show lectures", "regard show lectures --json"),
    ),
}


def settings_class(name: str | None, values: Mapping[str, Any]) -> type:
    """Class of the settings of a piece, or without a name of the page of all pictures."""
    if name is None:
        return import_module("regard.gallery.tiles").GallerySettings
    return lookup("piece", name, PIECES).settings_class()


def show(
    name: str | None = None,
    /,
    *words: Any,
    out: str | Path | None = None,
    quiet: bool = True,
    **settings: Any,
) -> Any:
    """Make a piece of the gallery by its name; without a name, list them and draw all on a page.

    show(out="gallery.html")
    show("receptive_fields", out="fields.png")
    show("misconceptions", "en-zh", data="test.tsv")["agreement"]

    A drawing is shown inline in a notebook, or saved to `out`, a .png or .html; its `numbers` are
    those behind it. Some pieces read a model or a photo, which is given after the name. The keys
    of a piece: `regard show NAME --help`.
    """
    if name is None:
        tiles = import_module("regard.gallery.tiles")
        told = fill(tiles.GallerySettings, settings | ({} if out is None else {"out": out}))
        pieces = {name: piece.summary for name, piece in PIECES.items()}
        return tiles.draw_gallery(told, pieces, quiet)
    from regard.api import materialise_data

    piece = lookup("piece", name, PIECES)
    words = tuple(Call(list(words), {}).take(piece.words))
    make = getattr(import_module(f"regard.gallery.{piece.module}"), piece.make)
    settings = materialise_data(settings) | ({} if out is None else {"out": out})
    asked = fill(piece.settings_class(), settings)
    told = {"quiet": quiet} if "quiet" in signature(make).parameters else {}
    if not isinstance(asked, Drawn) or asked.out is None:
        return make(asked, *words, **told)
    if asked.out.suffix.lower() not in (".png", ".html", ".htm"):
        raise UsageError(f"out={out}: unknown kind of file; end it in .png or .html")
    drawing = make(asked, *words, **told)
    return replace(drawing, path=str(drawing.save(asked.out)))
