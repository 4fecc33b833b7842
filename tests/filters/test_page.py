"""The page of a filter: its script computes the weights that the filter has."""

import json
import re
import shutil
import subprocess
from importlib.resources import files

import pytest
import torch
from PIL import Image

from regard.cli import main
from regard.filters import FILTERS, WEIGHTS, read_photo

node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")
PIXELS = [(0, 0), (7, 5), (12, 8)]
ASKED = {
    "gaussian": {"sigma": 1.5},
    "bilateral": {"sigma_s": 2.0, "sigma_r": 0.2},
    "bilateral whole": {"sigma_r": "inf", "window": "full"},
    "nonlocal_means": {"h": 0.2, "patch": 3, "window": 7},
    "nonlocal_means plain": {
        **{"h": 0.3, "patch": 5, "window": 5, "distance": "plain", "noise": 0.05},
        "patch_weights": "gaussian",
    },
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A photo in colour and one in grey."""
    home = tmp_path_factory.mktemp("photos")
    noise = torch.rand(9, 13, 3, generator=torch.Generator().manual_seed(1))
    image = Image.fromarray((255 * noise).byte().numpy())
    image.save(home / "rgb.png")
    image.convert("L").save(home / "grey.png")
    return home


def data_of(page: str) -> dict:
    """What the script of a page reads."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found is not None
    return json.loads(found[1])


def computed(photo: dict) -> list[dict]:
    """Weights of some pixels by the script itself."""
    script = files("regard.viewer").joinpath("weights.js").read_text("utf-8")
    run = (
        f"{script}\nconst photo = {json.dumps(photo)};\nphoto.pixels = unpacked(photo.pixels);\n"
        f"const found = {json.dumps(PIXELS)}.map(([x, y]) => weightsAt(photo, x, y));\n"
        "console.log(JSON.stringify(found));"
    )
    said = subprocess.run(["node", "-"], input=run, capture_output=True, text=True, check=True)
    return json.loads(said.stdout)


@node
@pytest.mark.parametrize("kind", ["rgb", "grey"])
@pytest.mark.parametrize("asked", ASKED)
def test_the_script_computes_the_weights_of_the_filter(asked, kind, photos, tmp_path):
    name, settings, out = asked.split()[0], ASKED[asked], tmp_path / "page.html"
    photo = photos / f"{kind}.png"
    words = [f"{key}={value}" for key, value in settings.items()]
    assert main(["filter", name, str(photo), *words, f"out={out}", "--quiet"]) == 0
    image = read_photo(photo).double()
    for (x, y), found in zip(PIXELS, computed(data_of(out.read_text())["photo"]), strict=True):
        ours = WEIGHTS[name](image, (x, y), **settings)
        theirs = torch.zeros_like(ours)
        rows = torch.tensor(found["weights"], dtype=ours.dtype).view(-1, found["wide"])
        down, across = found["top"] + len(rows), found["left"] + found["wide"]
        theirs[found["top"] : down, found["left"] : across] = rows
        torch.testing.assert_close(theirs, ours, rtol=1e-6, atol=1e-9)


@node
def test_the_weights_on_a_page_are_those_of_the_guide(photos, tmp_path):
    out, guide = tmp_path / "page.html", photos / "grey.png"
    words = ["filter", "joint_bilateral", str(photos / "rgb.png"), f"guide={guide}", f"out={out}"]
    assert main([*words, "--quiet"]) == 0
    photo = data_of(out.read_text())["photo"]
    assert photo["channels"] == 1
    ours = WEIGHTS["bilateral"](read_photo(guide).double(), PIXELS[1])
    assert abs(max(computed(photo)[1]["weights"]) - float(ours.max())) < 1e-7


def test_a_page_runs_its_own_script_alone(photos, tmp_path):
    out = tmp_path / "page.html"
    assert main(["filter", "bilateral", str(photos / "rgb.png"), f"out={out}", "--quiet"]) == 0
    page = out.read_text()
    assert (
        "default-src 'none'; script-src 'sha256-" in page and "http" not in page.split("<body")[1]
    )


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["heat", "steps=5"], "come about step by step"),
        (["gaussian", "border=mirror"], "border=cut"),
        (["nonlocal_means", "window=full", "patch=101"], "too many for a page"),
        (["bilateral", "sigma_r=0.1,0.2"], "unknown kind of image"),
    ],
)
def test_what_a_page_cannot_show_is_refused(words, why, tmp_path, capsys):
    Image.new("RGB", (100, 90)).save(tmp_path / "photo.png")
    name, *more = words
    asked = ["filter", name, str(tmp_path / "photo.png"), *more, f"out={tmp_path / 'page.html'}"]
    assert main(asked) == 2
    said = capsys.readouterr().err
    assert why in said and said.count("\n") == 1 and not (tmp_path / "page.html").exists()


def test_every_filter_has_a_page_or_is_refused(photos, tmp_path, capsys):
    for name in FILTERS:
        more = [f"guide={photos / 'grey.png'}"] * (name == "joint_bilateral")
        out = tmp_path / f"{name}.html"
        code = main(["filter", name, str(photos / "rgb.png"), *more, f"out={out}", "--quiet"])
        assert code == (0 if out.exists() else 2)
