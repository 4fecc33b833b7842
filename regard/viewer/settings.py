"""The keys of `regard look`."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TypeVar

from regard.errors import UsageError
from regard.settings import setting

H = TypeVar("H")


@dataclass(frozen=True)
class LookSettings:
    """What is drawn of a model's attention, whatever its task, and where to."""

    GROUP = "picture"

    out: str | None = setting(None, "file to write: .html to explore, .png to print", group="files")
    layers: tuple[str | int, ...] | None = setting(
        None, "layers to draw, by any part of their name: 3, cross, decoder.3; all unless given"
    )
    heads: tuple[str | int, ...] | None = setting(
        None, "heads to draw: numbers, mean, max or all; as many as fit unless given"
    )
    movie: bool = setting(False, "play what a training with watch_every= recorded; takes no input")
    candidates: int = setting(5, "candidates to show with their probability", min=1, max=100_000)
    beams: bool = setting(False, "show the tree of hypotheses of the beam search")
    view: str = setting(
        "attention",
        "attention as it is, or followed up to each layer (rollout) or through all (flow)",
        choices=lambda: ("attention", *import_module("regard.viewer.rollout").FOLLOWED),
    )
    cause: str = setting(
        "none", "measure what the answer depends on: true, or some of tokens, heads and edges"
    )
    lens: bool = setting(False, "what the model would answer after each layer")
    patch: bool = setting(
        False, "patch activations of the first input into the second, position by position"
    )


@dataclass(frozen=True)
class HypothesisSettings:
    """Which hypothesis of a search is drawn."""

    GROUP = "picture"

    hypothesis: int | None = setting(
        None, "hypothesis to draw, 1 is the best; a page has all of n_best= unless given", min=1
    )

    def wanted(self, found: Sequence[H]) -> H:
        """The hypothesis to draw of those that were found, best first."""
        number = self.hypothesis or 1
        if number > len(found):
            raise UsageError(
                f"hypothesis={number}: the search returned {len(found)}; raise n_best= and beam="
            )
        return found[number - 1]


@dataclass(frozen=True)
class ImageLookSettings(LookSettings):
    """What is drawn of how a model attends over an image."""

    GROUP = "picture"

    view: str = setting(
        "attention",
        "view of the attention, or the first filters",
        choices="regard.viewer.image:VIEWS",
    )
    at: str = setting(
        "class", "the query: class (token), mean (over all patches), or a pixel x,y of the photo"
    )
    image: int | None = setting(None, "pixels per side that images are resized to", min=1, max=4096)
    threads: int | None = setting(None, "CPU threads", min=1, max=1024, group="machine")


@dataclass(frozen=True)
class SoundLookSettings(LookSettings):
    """What is drawn of how a model attends over the spectrogram of a sound."""

    GROUP = "picture"

    view: str = setting(
        "attention", "view of the attention", choices="regard.viewer.sound:SOUND_VIEWS"
    )
    at: str = setting("mean", "the query: mean (over all frames), or a time in seconds")
    threads: int | None = setting(None, "CPU threads", min=1, max=1024, group="machine")
