"""No two texts of a picture are printed over each other, whatever is drawn."""

import shutil
from itertools import combinations

import numpy as np
import pytest
import torch
from matplotlib import font_manager
from matplotlib.text import Text
from matplotlib.transforms import Affine2D

import regard
from regard.insight import words
from regard.insight.directions import Direction, DirectionSettings, strips
from regard.lab.report import Compared
from regard.lab.trends import draw_trends
from regard.lab.variants import grid
from regard.viewer import fonts
from regard.viewer.drawing import Plot, draw_plots
from regard.viewer.effects import draw_tables
from regard.viewer.panels import Sheet
from regard.viewer.picture import Picture, ValueTable


def corners(text: Text, renderer) -> np.ndarray:
    """Corners (4, 2) of a text, which may be turned about its anchor."""
    turned = text.get_rotation()
    text.set_rotation(0)
    (x0, y0), (x1, y1) = Text.get_window_extent(text, renderer).get_points()
    text.set_rotation(turned)
    upright = np.array([[x0, y0], [x1, y0], [x1, y1], [x0, y1]])
    at = text.get_transform().transform(text.get_position())
    return Affine2D().rotate_deg_around(*at, turned).transform(upright) if turned else upright


def shared(one: np.ndarray, other: np.ndarray) -> float:
    """How deep two rectangles lie in each other, in pixels, by their separating axis."""
    depth = np.inf
    for box in (one, other):
        for side in np.diff(box[:3], axis=0):
            normal = np.array([-side[1], side[0]]) / (np.linalg.norm(side) or 1.0)
            a, b = one @ normal, other @ normal
            depth = min(depth, min(a.max(), b.max()) - max(a.min(), b.min()))
    return depth


def overprinted(sheet: Sheet) -> list[tuple[str, str]]:
    """Pairs of texts of a picture that are printed over each other."""
    figure = sheet.figure
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()  # type: ignore[attr-defined]
    hidden = {
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        for label in (tick.label1, tick.label2)
        if not label.get_visible()
        or not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [t for t in figure.findobj(Text) if t.get_text().strip() and t not in hidden]
    boxes = [(t.get_text(), corners(t, renderer)) for t in texts if t.get_visible()]
    return [(a, b) for (a, x), (b, y) in combinations(boxes, 2) if shared(x, y) > 1.5]


def test_the_check_itself_sees_what_is_overprinted():
    def paint(axes):
        axes.text(0.5, 0.5, "one label")
        axes.text(0.52, 0.5, "another label")

    assert overprinted(draw_plots("title", [[Plot(paint)]])) == [("one label", "another label")]


def test_words_in_a_plane_are_beside_each_other():
    generator = torch.Generator().manual_seed(0)
    for count in (4, 40):
        names = [f"word{n}" for n in range(count)]
        vectors = torch.randn(count, 8, generator=generator) ** 3  # many close to the middle
        read = words.Read("text", names, vectors, [vectors, vectors + 1])

        def reading(task, text, read=read):
            return read

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(words, "read_words", reading)
            for texts in (["one"], ["one", "two"]):
                drawing = words.compare_word(None, texts, "word0")
                assert overprinted(drawing.sheet) == []


def test_a_word_of_one_text_is_compared_with_the_others_of_it():
    drawing = regard.look("shakespeare", "cat dog bear cow", word="cat")
    rows = [name for name in drawing.numbers if not name.startswith("different")]
    assert rows == ["cat and dog", "cat and bear", "cat and cow"]
    loaded = regard.load("shakespeare")
    read = words.read_words(loaded, "cat dog bear cow")
    for place, name in enumerate(rows, 1):
        last = [*drawing.numbers[name].values()][-1]
        both = read.layers[-1][[0, place]]
        assert last == pytest.approx(float(torch.cosine_similarity(*both, dim=0)), abs=1e-6)


@pytest.mark.parametrize("shares", [["0.1", "1"], ["1", "1.01", "1.02", "2", "9"]])
def test_trends_of_like_variants_can_be_read(shares):
    varied = {"like": [f"a-rather-long-name-{n}" for n in range(5)], "lr": shares}
    variants = grid("images", varied)
    made = Compared("images", "out", varied, variants, [1], "all", "")
    for number, variant in enumerate(variants):
        told = {"accuracy": 70.0 + 0.01 * number, "better": 70.0}
        rest = {"examples": 1000, "speed": 50.0 + 0.01 * number, "progress": []}
        about = {"name": variant.name, "variant": variant.values, "seed": 1}
        made.runs.append({**about, **rest, "finished": True, "scores": told})
    drawn = draw_trends(made, "images")
    assert drawn is not None and overprinted(drawn.sheet) == []


def test_film_strips_have_their_names_above_them():
    class Space:
        def paint(self, z):
            return torch.zeros(len(z), 1, 8, 8, dtype=torch.uint8)

    settings = DirectionSettings(steps=7)
    direction = Direction("Ankle boot to T-shirt/top or pullover", torch.ones(3), 0, 1)
    rows = strips(direction, torch.zeros(2, 3), Space(), settings)  # type: ignore[arg-type]
    assert [plot.title for plot in rows[0]][0] == "+0"
    sheet = draw_plots("title", rows, size=(1.05, 1.05), bare=True, headings=[direction.name])
    assert overprinted(sheet) == []
    assert direction.name in [text.get_text() for text in sheet.figure.texts]


@pytest.mark.parametrize("heads", [2, 12, 24])
@pytest.mark.parametrize("scale", [0.01, 1.0, 12_345.0])
def test_tables_hold_numbers_of_any_size(heads, scale):
    values = scale * np.random.default_rng(0).normal(size=(4, heads))
    rows = [f"encoder.blocks.{n}.attention" for n in range(4)]
    tables = [
        ValueTable("loss added if a decoder layer reads an encoder layer", values, rows, columns)
        for columns in ([str(n) for n in range(heads)], [f"encoder.{n}" for n in range(heads)])
    ]
    note = "; ".join(f"part {n} of what was found" for n in range(12))
    sheet = draw_tables(Picture("Beliefs", tables=tables, note=note))
    assert overprinted(sheet) == []
    written = " ".join(text.get_text() for text in sheet.figure.texts)
    assert note in written  # nothing of what was found is cut off


def test_a_font_installed_later_is_found(tmp_path, monkeypatch):
    """matplotlib remembers the fonts of the first run, in a file that it never looks at again."""
    home = font_manager.fontManager
    mono = (e for e in home.ttflist if e.name == "DejaVu Sans Mono")
    other = next(entry for entry in mono if fonts._upright(entry))
    folder = tmp_path / "fonts"
    folder.mkdir()
    shutil.copy(other.fname, folder / "Later.ttf")
    monkeypatch.setattr(home, "ttflist", [e for e in home.ttflist if e.name == fonts.PLAIN_FONT])
    letter = next(
        chr(code)
        for code in sorted(fonts.letters_in(other) - fonts.letters_in(fonts._plain()))
        if chr(code).isprintable()
    )
    monkeypatch.setattr(fonts, "findSystemFonts", lambda: [str(folder / "Later.ttf")])
    fonts.fonts_for.cache_clear()
    fonts.add_new_fonts.cache_clear()
    found, missing = fonts.fonts_for(letter)
    assert missing == frozenset() and "DejaVu Sans Mono" in found
    fonts.fonts_for.cache_clear()
    fonts.add_new_fonts.cache_clear()
