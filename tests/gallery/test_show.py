"""The pictures of the lectures: each name draws itself, and the numbers behind it are right."""

import io
import json
import math
import re
import shlex
import subprocess
import sys
from itertools import groupby

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.cli import main
from regard.filters.diffusion import matching_sigma
from regard.gallery import PIECES, tiles
from regard.gallery.claims import softmax_gradient
from regard.gallery.counter import count, periods_of_bits, periods_of_sinusoids
from regard.gallery.diffusion import ParticleSettings, solve_heat, walk
from regard.gallery.drawn import Drawn
from regard.gallery.receptive_fields import ReceptiveFieldSettings, fields
from regard.insight import held_in
from regard.verbs import VERBS, spelled_anew

# what makes a picture fast
FEW = {"particles": {"particles": 2000}, "heads": {"steps": 20, "heads": [1, 2]}}
DRAWN = [name for name, piece in PIECES.items() if issubclass(piece.settings_class(), Drawn)]


@pytest.mark.parametrize("name", DRAWN)
def test_every_name_is_a_picture_and_a_page(name, tmp_path):
    drawing = regard.show(name, out=tmp_path / "shown.png", **FEW.get(name, {}))
    image = Image.open(tmp_path / "shown.png")
    assert min(image.size) > 200
    assert len(set(np.asarray(image.convert("L")).ravel().tolist())) > 20  # not blank
    page = drawing.html()
    assert "<script" not in page and "data:image/png;base64," in page
    assert all(str(row) in page for row in list(drawing.numbers)[:1])
    assert all(math.isfinite(n) for row in drawing.numbers.values() for n in row.values())
    drawing.save(tmp_path / "shown.html")
    assert (tmp_path / "shown.html").read_text() == page
    json.dumps(drawing.to_dict())


def test_without_a_name_all_is_on_one_page_with_its_command(tmp_path, capsys, monkeypatch):
    some = [tile for tile in tiles.TILES if "temper" in tile.command or "lectures" in tile.command]
    some += [tile for tile in tiles.TILES if "texture" in tile.command]
    monkeypatch.setattr(tiles, "TILES", some)
    monkeypatch.chdir(tmp_path)
    assert main(["show"]) == 0
    said = capsys.readouterr().out
    assert all(name in said for name in PIECES) and said.endswith("wrote gallery.html\n")
    page = (tmp_path / "gallery.html").read_text()
    assert page.count("<li ") == 3 and page.count("data:image/png;base64,") == 2
    assert "regard show temperature out=temperature.png" in page and "<script" not in page
    assert "default-src 'none'" in page and str(tmp_path.parent) not in page
    assert page.index("A1</a>") < page.index("F6</a>")  # in the order of the table
    for words, wrong in (
        (["out=gallery.png"], "ends in .html"),
        (["photo=nowhere.png"], "nowhere.png"),
        (["foto=x.png"], "unknown key 'foto'"),
    ):
        assert main(["show", *words]) == 2
        assert wrong in capsys.readouterr().err


def test_every_piece_has_its_tile_in_the_order_of_the_lectures():
    shown = [shlex.split(tile.command) for tile in tiles.TILES]
    assert {words[1] for words in shown if words[0] == "show"} == set(PIECES)
    order = [re.findall(r"[A-Z]", tile.rows)[0] for tile in tiles.TILES]
    assert [key for key, _ in groupby(order) if key != "A"] == ["F", "R", "P", "T", "V", "I"]


def test_fields_and_favourite_patches_of_a_model_of_ones_own_are_drawn(zoo, tmp_path):
    own = {"model": str(zoo.model("images")), "data": str(zoo.data("images"))}
    seen = regard.show("receptive_fields", **own, images=4, out=tmp_path / "fields.png").numbers
    assert seen["trained, side"]["stem"] == 4 < seen["trained, side"]["blocks.1"] == 16
    assert seen["trained, side of half"]["stem"] <= 4
    asked = {**own, "layers": "stem", "channels": 2, "patches": 4, "images": 30}
    drawn = regard.show("filters", **asked, out=tmp_path / "liked.png")
    assert len(drawn.numbers) == 2 and all(name.startswith("stem, ") for name in drawn.numbers)
    assert all(row["largest side"] == 4 for row in drawn.numbers.values())
    for name in ("fields.png", "liked.png"):
        grey = np.asarray(Image.open(tmp_path / name).convert("L"))
        assert min(grey.shape) > 150 and len(np.unique(grey)) > 20


def test_one_head_gives_the_average_of_two_look_ups_and_two_heads_give_both():
    numbers = regard.show("heads", heads=[1, 2], steps=250).numbers
    average = numbers["the average of both"]["error"]
    assert 0.4 < average < 0.6
    assert numbers["1 head"]["error"] > 0.95 * average
    assert numbers["2 heads"]["error"] < 0.05 * average


@pytest.mark.parametrize("heads", ["5", "1,1", "1,2,3,4,6"])
def test_heads_that_cannot_be_compared_are_refused(heads, capsys):
    assert main(["show", "heads", f"heads={heads}"]) == 2
    assert "heads=" in capsys.readouterr().err


def test_command_draws_and_refuses(tmp_path, capsys):
    assert main(["show", "temperature", f"out={tmp_path / 'soft.html'}", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["path"].endswith("soft.html") and told["numbers"]["T = 1"]["score 2"] > 0.4
    for words, wrong in (
        (["temprature"], "Did you mean 'temperature'?"),
        (["scaling", "key=5"], "keys"),
        (["scaling", "out=soft.pdf"], ".png or .html"),
        (["temperature", "temperatures=0,1"], "above 0"),
        (["embedding", "text="], "words"),
        (["filters", "model=shakespeare"], "does not read images"),
        (["receptive_fields", "model=shakespeare"], "does not read images"),
        (["receptive_fields", "model=fashion", "layers=stage"], "Did you mean 'stem'"),
        (["filters", "data=nowhere"], "nowhere"),
        (["perona_malik", "steps=0"], "1 to 5000"),
    ):
        assert main(["show", *words]) == 2
        assert wrong in capsys.readouterr().err
    assert main(["show", "scaling", "--help"]) == 0
    assert "keys that a query attends to" in capsys.readouterr().out


@pytest.mark.parametrize(("old", "name"), VERBS["show"].aliases.items())
def test_a_former_spelling_is_the_piece_of_the_gallery(old, name, capsys):
    words = [*old.split(), "photo.png", "out=x.png"]
    assert spelled_anew(words) == ["show", name, "photo.png", "out=x.png"]
    assert main([*old.split(), "--help"]) == 0 == main(["show", name, "--help"])
    page = capsys.readouterr().out
    assert page[: len(page) // 2] == page[len(page) // 2 :]
    assert page.count(f"  regard show {name}") >= 6  # usage and two examples, twice


@pytest.mark.parametrize("name", PIECES)
def test_every_piece_has_its_page(name, capsys):
    assert main(["show", name, "--help"]) == 0
    page = capsys.readouterr().out
    assert PIECES[name].summary in page and page.count("  regard show ") >= 3


def test_nothing_but_strings_of_the_table_of_verbs_names_the_gallery():
    """Neither `regard` nor its command line load a piece that was not asked for."""
    code = "import sys, regard, regard.cli, regard.api; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "regard.gallery" not in found.stdout.split()


def test_field_of_k_convolutions_is_2k_plus_1_and_of_full_attention_all():
    found = fields(ReceptiveFieldSettings(side=15, depth=4, windows=5))
    reached = {name: [held_in(one).side for one in layers] for name, layers in found.items()}
    assert reached["convolution"] == [3, 5, 7, 9]
    assert reached["local attention"] == [3, 5, 7, 9]
    assert reached["windows, shifted"] == [5, 10, 15, 15]  # by hand: a window, two, all three
    assert reached["full attention"] == [15, 15, 15, 15]
    wider = fields(ReceptiveFieldSettings(side=15, depth=2, window=5, windows=5))
    assert [held_in(one).side for one in wider["convolution"]] == [5, 9]
    # a convolution's field is a square without holes
    assert int((found["convolution"][3] != 0).sum()) == 81


def test_counter_doubles_and_sinusoids_grow_by_one_factor():
    digits = count(4)
    assert [int("".join(map(str, row)), 2) for row in digits.flip(1).tolist()] == list(range(16))
    assert periods_of_bits(digits) == [2, 4, 8, 16]
    numbers = regard.show("counter", width=16, base=100.0).numbers["period of pair"]
    expected = [2 * math.pi * 100 ** (2 * n / 16) for n in range(5)]
    assert list(numbers.values()) == pytest.approx(expected)
    vectors = torch.stack([torch.tensor([0.0, 1.0]), torch.tensor([1.0, 0.0])])
    assert periods_of_sinusoids(vectors) == pytest.approx([4.0])  # a quarter turn a position


def test_sinusoids_are_bounded_unique_and_unlimited_and_a_counter_is_not():
    numbers = regard.show("counter").numbers
    assert numbers["largest coordinate"]["sinusoids"] <= 1
    near, far, counter = numbers["nearest of 10,000 further positions"].values()
    assert near > 0.5 and counter == 0  # after 2^5 positions it begins anew
    assert far == pytest.approx(near, abs=1e-6)  # the same wherever one begins
    narrow = regard.show("counter", width=4, base=2.0).numbers  # few pairs come near once more
    alike = narrow["nearest of 10,000 further positions"]["sinusoids"]
    angles = torch.arange(1, 10_001, dtype=torch.float64)[:, None] * torch.tensor([1.0, 2**-0.5])
    assert 0 < alike < near
    assert alike == pytest.approx(float((2 - 2 * angles.cos()).sum(1).min().sqrt()), rel=1e-4)


def test_one_hot_product_is_the_row_and_rows_learn_as_often_as_they_occur():
    numbers = regard.show("embedding", text="a b a c a", width=3).numbers
    assert set(numbers["largest difference"].values()) == {0.0}
    assert numbers["occurrences"] == {"a": 3.0, "b": 1.0, "c": 1.0}
    assert numbers["gradient of the row"] == numbers["occurrences"]


def test_temperature_goes_from_the_largest_to_even():
    numbers = regard.show("temperature", scores=(3, 1, 0), temperatures=(0.01, 1, 1000)).numbers
    cold, plain, hot = (list(row.values()) for row in numbers.values())
    assert cold[:3] == pytest.approx([1, 0, 0], abs=1e-12) and cold[3] == pytest.approx(0, abs=1e-9)
    assert plain[:3] == pytest.approx(torch.tensor([3.0, 1, 0]).softmax(0).tolist(), rel=1e-6)
    assert hot[:3] == pytest.approx([1 / 3] * 3, abs=1e-3) and hot[3] == pytest.approx(math.log2(3))


def test_gradient_of_softmax_vanishes_unscaled_and_not_scaled():
    scores = torch.randn(7, dtype=torch.float64)
    exact = torch.autograd.functional.jacobian(lambda x: x.softmax(-1), scores)
    assert torch.allclose(softmax_gradient(scores.softmax(-1)), torch.linalg.matrix_norm(exact))
    numbers = regard.show("scaling").numbers
    small, large = numbers["d_k = 4"], numbers["d_k = 1024"]
    assert large["variance of q k"] == pytest.approx(1024, rel=0.1)
    assert large["median gradient"] < 0.05 * large["median gradient, scaled"]
    assert large["gradient"] < 0.5 * small["gradient"]
    scaled = [row["median gradient, scaled"] for row in numbers.values()][2:]
    assert max(scaled) < 1.25 * min(scaled)  # whatever the width
    assert large["largest weight"] > 0.9 > 0.3 > large["largest, scaled"]


def test_particles_are_spread_as_heat_and_the_slides_as_c_squared():
    numbers = regard.show("particles", c=0.3, time=2.0, particles=100_000).numbers
    spread = numbers["variance at the end"]
    assert spread["particles, sqrt(2c) dW"] == pytest.approx(2 * 0.3 * 2, rel=0.02)
    assert spread["particles, c dW"] == pytest.approx(0.3**2 * 2, rel=0.02)
    apart = numbers["total variation distance from the heat equation"]
    assert apart["particles, sqrt(2c) dW"] < 0.015 < 0.3 < apart["particles, c dW"]
    assert apart["Gaussian"] < 1e-3
    agree = regard.show("particles", c=2.0, particles=5000).numbers["variance at the end"]
    assert agree["particles, c dW"] == pytest.approx(agree["particles, sqrt(2c) dW"])


def test_walk_is_one_of_independent_steps():
    paths = walk(ParticleSettings(particles=20_000, time=4.0))
    assert paths[0].abs().max() == 0
    moved = paths.diff(dim=0)
    assert moved.var() == pytest.approx(4.0 / 100, rel=0.01)
    first, second = moved[10], moved[11]
    assert abs(torch.corrcoef(torch.stack([first, second]))[0, 1]) < 0.03


def test_solved_heat_has_the_variance_of_the_matching_filter():
    edges = np.linspace(-4, 4, 82)
    solved = solve_heat(0.5, edges)
    middles = (edges[1:] + edges[:-1]) / 2
    assert solved.sum() == pytest.approx(1, abs=1e-6)
    assert (solved * middles**2).sum() == pytest.approx(0.5, rel=0.01)
    assert matching_sigma(10, 0.2) ** 2 == pytest.approx(2 * 10 * 0.2)


def test_perona_malik_keeps_edges_that_heat_does_not(tmp_path):
    numbers = regard.show("perona_malik").numbers
    kept = {name: list(row.values()) for name, row in numbers.items()}
    assert kept["Perona and Malik: edges"][-1] > 0.8 * kept["Perona and Malik: edges"][0]
    assert kept["heat equation: edges"][-1] < 0.2 * kept["heat equation: edges"][0]
    assert kept["Perona and Malik: elsewhere"][-1] < 0.35 * kept["Perona and Malik: elsewhere"][0]
    stream = io.BytesIO()
    Image.fromarray(np.tile(np.arange(60, dtype=np.uint8) * 4, (40, 1))).save(stream, "PNG")
    (tmp_path / "photo.png").write_bytes(stream.getvalue())
    own = regard.show("perona_malik", photo=tmp_path / "photo.png", steps=(5, 10))
    assert list(own.numbers["heat equation: elsewhere"]) == ["0 steps", "5 steps", "10 steps"]
