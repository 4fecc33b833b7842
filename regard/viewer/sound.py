"""Attention over a sound: its spectrogram as the image that is looked at, and its words in time."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from PIL import Image
from torch import nn

from regard.attention.watch import Maps
from regard.errors import UsageError, lookup
from regard.layers.layout import TokenGrid, time_grid
from regard.viewer.image import (
    flow,
    image_views,
    lowest_entropy_head,
    rollout,
    rollouts,
    word_views,
)
from regard.viewer.overlays import head_panels, uniform_weight
from regard.viewer.panels import BLUES, HEAT, INK, LINE, MARGIN, SOFT, TITLE, Sheet
from regard.viewer.picture import Choice, Picture, QueryPoint, Recording, View, choose_views
from regard.viewer.placement import placement_of

_HEIGHT = 192  # pixels of a spectrogram
_PER_FRAME = 3  # pixels, as long as it is no wider than
_WIDTHS = 480, 1920
_SHOWN = 0.1  # a unit whose posterior is never higher is not drawn
_WIDE, _PITCH = 10.5, 0.14  # inches of a PNG, and of a row of an alignment
_MAX_ALIGNED = 60  # words of one alignment
_MAX_MAPS = 48


def spectrogram_photo(spectrogram: np.ndarray) -> np.ndarray:
    """Log spectrogram (frames, mels) as an image, low frequencies at the bottom."""
    low, high = np.percentile(spectrogram, (5, 99.5))
    grey = np.clip((spectrogram.T[::-1] - low) / max(1e-6, high - low), 0, 1)
    wide = int(np.clip(_PER_FRAME * len(spectrogram), *_WIDTHS))
    pixels = Image.fromarray((255 * grey).round().astype(np.uint8))
    return np.asarray(pixels.resize((wide, _HEIGHT), Image.Resampling.BICUBIC))


def parse_moment(at: str, seconds: float) -> QueryPoint:
    """Read at=: mean, or a moment of a sound of so many seconds."""
    word = at.strip().lower().removesuffix("s").strip()
    if word == "mean":
        return "mean"
    try:
        moment = float(word)
    except ValueError:
        raise UsageError(f"at={at:.40}; expected mean, or seconds such as at=1.2") from None
    if not 0 <= moment < seconds:
        raise UsageError(f"at={at:.40} is outside of the sound, which lasts {seconds:.2f} s")
    return moment / seconds, 0.5


def _timed(view: View, seconds: float) -> View:
    """Name the columns of a view by their times."""
    placement = placement_of(view)

    def named(grid: TokenGrid) -> TokenGrid:
        return replace(grid, seconds=grid.cell_width * seconds) if grid.height else grid

    grids = {"query_grid": named(placement.query_grid), "key_grid": named(placement.key_grid)}
    return replace(view, placement=replace(placement, **grids))


def _attention(views: list[View], query: QueryPoint) -> list[View]:
    return [*views, rollout(views, query)] if views else []


# name -> the views of an encoder's attention
SOUND_VIEWS: dict[str, Callable[[list[View], QueryPoint], list[View]]] = {
    "attention": _attention,
    "rollout": lambda views, query: list(rollouts(views, query)),
    "flow": lambda views, query: [flow(views, query)],
}


def sound_picture(
    model: nn.Module,
    maps: Maps,
    spectrogram: np.ndarray,
    recording: Recording,
    *,
    stride: int,
    view: str = "attention",
    query: QueryPoint = "mean",
    words: Sequence[str] = (),
    word_of: Sequence[int] = (),
    first: int = 0,
    **about: Any,
) -> Picture:
    """Make a picture of what was watched while a model read a spectrogram (frames, mels).

    Args:
        model: model that was watched
        maps: attention that was watched
        spectrogram: features (frames, mels)
        recording: the sound
        stride: frames per column of attention
        view: name of the view
        query: frame that attends, or the mean of all
        words: words that a decoder wrote
        word_of: word of each token
        first: step at which the words begin
        about: further fields of the picture
    """
    choose = lookup("view", view, SOUND_VIEWS)
    frames, mels = spectrogram.shape
    encoded = image_views(model, maps, (mels, frames))
    views = choose([_timed(each, recording.seconds) for each in encoded], query)
    opens = lowest_entropy_head(views, query) if views else None
    if words:
        grid = time_grid(-(-frames // stride), stride, frames)
        crosses = [
            _timed(each, recording.seconds)
            for each in word_views(maps, grid, words, word_of, first)
        ]
        views, opens = [*views, *crosses], (crosses[-1].name, "mean")
    if not views:
        raise UsageError("this model has no attention to look at")
    photo = spectrogram_photo(spectrogram)
    shown = {"photo": photo, "query": query, "recording": recording, "opens": opens}
    return Picture(views=views, **{"title": "", **shown, **about})


# ---- PNG --------------------------------------------------------------------------------------


def draw_recording(picture: Picture, layers: Choice = None, heads: Choice = None) -> Sheet:
    """Draw a spectrogram with its words and posteriors, and chosen heads of attention over time."""
    recording, photo = picture.recording, picture.photo
    assert recording is not None and photo is not None
    chosen = choose_views(picture, layers)
    if heads is None:
        many = sum(len(view.heads) for view in chosen.views) > _MAX_MAPS // 2
        heads = "mean" if many or len(chosen.views) > 2 else "all"
    views = choose_views(chosen, heads=heads).views
    if sum(len(view.heads) for view in views) > _MAX_MAPS:
        raise UsageError(
            f"more than {_MAX_MAPS} maps are too many for one PNG; choose some with layers= and "
            "heads=, or save as .html"
        )
    texts = [word.text for word in recording.words]
    notes = [line for line in (picture.output and f"→ {picture.output}", picture.note) if line]
    left = 0.9
    high = {"photo": 1.5, "words": 0.3 if texts else 0.0, "overlay": 0.55}
    posteriors = recording.posteriors
    high["posteriors"] = 0.0 if posteriors is None else 1.0
    rows = [(view, head) for view in views for head in range(len(view.heads))]
    heights = [_map_height(view, high["overlay"]) for view, _ in rows]
    gaps = 0.32
    total = TITLE + 0.2 * len(notes) + sum(high[key] for key in ("photo", "words", "posteriors"))
    total += sum(each + gaps for each in heights) + 1.0
    names = [*texts, *recording.units, *(name for view in views for name in view.row_tokens)]
    sheet = Sheet(_WIDE + left + MARGIN, total, [picture.title, *notes, *names])
    sheet.head(picture.title, notes)
    down = TITLE + 0.2 * len(notes) + 0.1
    span = 0.0, recording.seconds

    def below(height: float, space: float = 0.08) -> Axes:
        nonlocal down
        axes = sheet.axes(left, down, _WIDE, height, xlim=span, yticks=[])
        axes.tick_params(labelsize=7, colors=SOFT, length=2, color=LINE, labelbottom=False)
        down += height + space
        return axes

    axes = below(high["photo"], 0.02)
    axes.imshow(photo, extent=(*span, 0, 1), aspect="auto", cmap="magma")
    if texts:
        axes = below(high["words"], 0.04)
        axes.set(ylim=(0, 1))
        for word in recording.words:
            axes.axvspan(word.start, word.end, color=BLUES(0.12), linewidth=0)
            middle = (word.start + word.end) / 2
            axes.text(
                middle, 0.5, sheet.spell(word.text), ha="center", va="center", **sheet.style(8)
            )
    if posteriors is not None:
        axes = below(high["posteriors"])
        axes.set(ylim=(0, 1.05))
        _draw_posteriors(axes, sheet, recording)
    axes.tick_params(labelbottom=True)
    axes.set_xlabel("seconds", **sheet.style(7, SOFT))
    down += 0.3
    for (view, head), height in zip(rows, heights, strict=True):
        name = f"head {view.heads[head]}" if str(view.heads[head]).isdecimal() else view.heads[head]
        sheet.write(f"{view.name}, {name}", left, down + 0.12, 7.5, INK, _WIDE)
        down += 0.18
        axes = below(height, gaps - 0.18)
        _draw_map(axes, sheet, picture, view, head)
    return sheet


def _map_height(view: View, overlay: float) -> float:
    """Height of a head's map: words below each other, or one spectrogram."""
    if view.kind != "cross":
        return overlay
    return _PITCH * min(_MAX_ALIGNED, len(view.row_tokens)) + 0.02


def _draw_map(axes: Axes, sheet: Sheet, picture: Picture, view: View, head: int) -> None:
    """Draw a head: over the spectrogram, or with a row for each word that was written."""
    assert picture.recording is not None and picture.photo is not None
    seconds = picture.recording.seconds
    if view.kind == "cross":
        weights = view.weights[head][:_MAX_ALIGNED]
        long = weights.shape[1] * placement_of(view).key_grid.cell_width * seconds
        axes.imshow(weights, extent=(0, long, len(weights), 0), aspect="auto", cmap=BLUES)
        axes.set_xlim(0, seconds)
        for row, word in enumerate(view.row_tokens[: len(weights)]):
            place = {"transform": axes.get_yaxis_transform(), "ha": "right", "va": "center"}
            axes.text(-0.005, row + 0.5, sheet.spell(word), **place, **sheet.style(7))
        return
    photo = np.repeat(picture.photo[..., None], 3, 2)
    panel = head_panels(
        replace(view, weights=view.weights[head : head + 1], heads=(head,)), photo, picture.query
    )[0]
    axes.imshow(panel.pixels, extent=(0, seconds, 0, 1), aspect="auto")
    if panel.frame is not None:
        moment = seconds * (panel.frame[0] + panel.frame[2] / 2)
        axes.axvline(moment, color="#35f0ff", linewidth=1)
    told = f"≤{view.weights[head].max():.2g}\neven {uniform_weight(view):.2g}"
    place = {"transform": axes.transAxes, "ha": "right", "va": "center"}
    axes.text(-0.005, 0.5, told, **place, **sheet.style(6.5, SOFT))


def _draw_posteriors(axes: Axes, sheet: Sheet, recording: Recording) -> None:
    """Draw the posterior of each unit over time, named where it is highest; the blank is grey."""
    posteriors = recording.posteriors
    assert posteriors is not None
    times = (np.arange(len(posteriors)) + 0.5) * recording.seconds / max(1, len(posteriors))
    for number, unit in enumerate(recording.units):
        curve = posteriors[:, number]
        if not unit:
            axes.plot(times, curve, color=LINE, linewidth=0.8, zorder=0)
        elif curve.max() >= _SHOWN:
            colour = HEAT(0.1 + 0.75 * (number * 0.381966 % 1))
            axes.fill_between(times, curve, color=colour, alpha=0.55, linewidth=0)
            for peak in _peaks(curve):
                axes.text(
                    times[peak],
                    curve[peak] + 0.03,
                    sheet.spell(unit),
                    ha="center",
                    **sheet.style(6.5, INK),
                )


def _peaks(curve: np.ndarray) -> list[int]:
    """Peaks of a curve, one within each stretch above a half."""
    above = np.flatnonzero(curve >= 0.5)
    runs = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1) if len(above) else []
    return [int(run[curve[run].argmax()]) for run in runs]
