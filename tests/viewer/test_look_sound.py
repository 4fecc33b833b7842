"""Looking at sounds: attention lies on its moment, and a page plays what is pointed at."""

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
import torch

from regard.attention.watch import watch
from regard.errors import UsageError
from regard.layers.layout import TokenGrid, time_grid
from regard.models import family, preset
from regard.viewer.html import page
from regard.viewer.image import placed_view, rollout
from regard.viewer.notebook import draw
from regard.viewer.picture import Picture, Placement, Recording
from regard.viewer.placement import grid_weights, token_name
from regard.viewer.sound import _timed, parse_moment, sound_picture, spectrogram_photo
from tests.viewer.test_look import browser, data_of, visit  # noqa: F401

RATE, SECONDS, STRIDE = 8000, 2.0, 4
FRAMES = 200
COLUMNS = FRAMES // STRIDE


class Said(NamedTuple):
    text: str
    start: float
    end: float
    confidence: float | None = None


def recorded() -> Picture:
    """Two words of one second each; every moment attends to the one a tenth of a second later."""
    samples = np.sin(2 * np.pi * 440 * np.arange(int(RATE * SECONDS)) / RATE).astype(np.float32)
    words = [Said("one", 0.0, 1.0, 0.9), Said("<b>two</b>", 1.0, 2.0)]
    posteriors = np.zeros((COLUMNS, 3), np.float32)
    posteriors[:, 0] = 1.0
    posteriors[12], posteriors[37] = (0.1, 0.9, 0.0), (0.2, 0.0, 0.8)
    grid = time_grid(COLUMNS, STRIDE, FRAMES)
    later = np.zeros((2, COLUMNS, COLUMNS), np.float32)
    shift = round(0.1 * SECONDS * COLUMNS / SECONDS / SECONDS)
    for row in range(COLUMNS):
        later[:, row, min(COLUMNS - 1, row + shift)] = 1.0
    keys = np.arange(COLUMNS)[None]
    inner = placed_view("encoder.0.attention", later, Placement(grid, grid, keys[0], keys))
    halves = np.zeros((2, 2, COLUMNS), np.float32)
    halves[:, 0, : COLUMNS // 2] = halves[:, 1, COLUMNS // 2 :] = 2 / COLUMNS
    names = TokenGrid(("one", "<b>two</b>"), 0, 0, 1.0, 1.0)
    cross = placed_view(
        "decoder.0.cross", halves, Placement(names, grid, np.arange(2), keys), kind="cross"
    )
    views = [_timed(inner, SECONDS), _timed(cross, SECONDS)]
    spectrogram = np.random.default_rng(0).normal(size=(FRAMES, 40)).astype(np.float32)
    return Picture(
        "two words",
        [views[0], rollout(views[:1], "mean"), views[1]],
        output="one <b>two</b>",
        photo=spectrogram_photo(spectrogram),
        query="mean",
        recording=Recording(samples, RATE, words, posteriors, ["", "one", "two"]),
        opens=("encoder.0.attention", "0"),
    )


def test_a_column_is_named_by_its_time():
    grid = recorded().views[0].placement.query_grid
    assert grid.seconds == pytest.approx(SECONDS / COLUMNS)
    assert token_name(grid, 25) == "1.00 s"


def test_a_moment_looks_from_its_column():
    view = recorded().views[0]
    weights = grid_weights(view, parse_moment("1.0", SECONDS))
    shift = weights[0, 0].argmax() - COLUMNS // 2
    assert weights.shape == (2, 1, COLUMNS) and weights[0].sum() == 1 and shift > 0


@pytest.mark.parametrize("at", ["2.5", "-1", "noon", "nan"])
def test_a_moment_outside_of_the_sound_is_refused(at):
    with pytest.raises(UsageError, match="at="):
        parse_moment(at, SECONDS)


def test_rollout_over_time_keeps_its_mass_and_its_seconds():
    view = recorded().views[1]
    placement = view.placement
    assert np.allclose(view.weights.sum(2), 1, atol=1e-5)
    grid = placement.key_grid
    assert grid.height == 1 and grid.cell_height == 1.0
    assert grid.seconds * grid.width == pytest.approx(SECONDS)


def test_a_page_holds_the_sound_and_its_words():
    picture = recorded()
    text = page(picture)
    data = data_of(text)["pictures"][0]["recording"]
    assert [word[0] for word in data["words"]] == ["one", "<b>two</b>"]
    assert data["words"][0][1:] == [0, 1, 0.9] and data["words"][1][3] is None
    assert data["seconds"] == SECONDS and data["rate"] == RATE
    assert "<b>two" not in text  # nothing that was said can become markup


@pytest.mark.parametrize("layers", [None, "encoder", "cross"])
def test_a_png_is_drawn(layers):
    assert draw(recorded(), layers).startswith(b"\x89PNG")


def test_pointing_at_a_word_lights_its_stretch_and_a_click_plays_it(visit):  # noqa: F811
    tab = visit(recorded(), tab="image")
    tab.wait_for_selector(".word")
    assert tab.locator(".tabs button").first.inner_text() == "On the sound"
    before = tab.locator(".photo canvas").screenshot()
    tab.hover(".word >> nth=1")
    assert tab.locator(".detail h2").inner_text() == "1.48 s looks at"
    assert tab.locator(".photo canvas").screenshot() != before
    tab.click(".word >> nth=1")
    tab.wait_for_selector(".playhead:not([hidden])")
    assert tab.evaluate("document.querySelector('.playhead').style.left >= '50%'")
    tab.click("text=■ Stop")
    tab.wait_for_selector(".playhead", state="hidden")


def test_a_written_word_asks_for_itself(visit):  # noqa: F811
    tab = visit(recorded(), tab="image")
    tab.select_option("#layer", label="decoder.0.cross")
    tab.hover(".word >> nth=0")
    assert tab.locator(".detail h2").inner_text() == "one looks at"


def test_every_layer_of_a_speech_model_is_placed_on_its_sound():
    torch.manual_seed(0)
    config = replace(preset("conformer", "micro"), vocab=9, decoder_depth=1)
    model = family("conformer")[1](config).eval()
    sound = torch.randn(1, 202, config.mels)  # the last column is half a one
    with watch(model) as maps, torch.inference_mode():
        model.hidden(sound, torch.tensor([[1, 5, 6, 7]]))
    recording = Recording(np.zeros(16160, np.float32), RATE)
    told = {"stride": model.stride, "words": ["a", "b"], "word_of": [0, 0, 1]}
    picture = sound_picture(model, maps, sound[0].numpy(), recording, **told)
    names = [view.name for view in picture.views]
    assert names[: config.depth] == [f"encoder.{n}.attention" for n in range(config.depth)]
    assert names[-1] == "decoder.blocks.0.cross"
    exact = maps["encoder.1.attention"].weights()[0].numpy()
    assert np.array_equal(picture.views[1].weights, exact)
    cross = maps["decoder.blocks.0.cross"].weights()[0].numpy()
    assert np.allclose(picture.views[-1].weights[:, 0], cross[:, :2].mean(1), atol=1e-6)
