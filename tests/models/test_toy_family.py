"""A family is one file and one row: it is trained, run, judged, counted and looked at."""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from PIL import Image

import regard
from regard.cli import main
from regard.models import MODELS, preset_family, serving

HERE = Path(__file__).parents[1]
ROWS = {
    "toy": ("toy_family", "ToyConfig", "Toy"),
    "toy_text": ("toy_text_family", "ToyConfig", "Toy"),
}
# a command line that knows the families, in a process of its own
COMMAND = [
    sys.executable,
    "-c",
    f"import sys; from regard.models import MODELS; MODELS.update({ROWS!r}); "
    "from regard.cli import main; sys.exit(main())",
]
TRAIN = {
    "images": ["family=toy", "batch=8", "augment=none", "image=8", "model.patch=2"],
    "classify": ["family=toy_text", "tokenizer=characters"],
}


class Toy(NamedTuple):
    """A task, its data, and an input with the answer."""

    task: str
    data: Path
    input: str
    answer: str

    @property
    def train(self) -> list[str]:
        return ["train", self.task, *TRAIN[self.task], f"data={self.data}", "lr=0.01", "--quiet"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for name, row in ROWS.items():
        monkeypatch.setitem(MODELS, name, row)
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture(scope="module", params=TRAIN)
def toy(request, tmp_path_factory) -> Toy:
    home, rand = tmp_path_factory.mktemp("toy"), np.random.default_rng(0)
    if request.param == "classify":
        path = home / "texts.tsv"
        words = [("ab", "cd")[n % 2] * 3 + f" {rand.integers(99)}" for n in range(96)]
        path.write_text("".join(f"{w}\t{'low' if w[0] == 'a' else 'high'}\n" for w in words))
        return Toy("classify", path, "ababab 7", "low")
    for number in range(48):
        label, part = ("dark", "light")[number % 2], "valid" if number % 4 > 1 else "train"
        pixels = rand.integers(0, 120, (8, 8)) + 120 * (number % 2)
        (home / part / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(home / part / label / f"{number}.png")
    return Toy("images", home, str(home / "valid" / "light" / "3.png"), "light")


@pytest.mark.parametrize("name", ROWS)
def test_it_is_a_small_file(name: str):
    assert len((HERE / f"{ROWS[name][0]}.py").read_text().splitlines()) <= 60


def test_it_is_listed_and_found_by_its_presets(capsys):
    assert "toy" in serving("images") and "toy_text" in serving("classify")
    assert preset_family("toy_large") == "toy"
    assert main(["models"]) == 0
    page = capsys.readouterr().out
    assert "family: One layer of self-attention between patches." in page
    assert "family: One layer of self-attention between tokens." in page


def test_its_cost_is_counted(capsys):
    assert main(["cost", "toy", "size=tiny", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["family"], told["input"]) == ("toy", "1 image of 32x32 pixels")
    assert told["attention"]["entries"] == 2 * 64**2
    assert regard.cost("toy_large").parameters > told["parameters"]
    assert regard.cost("toy_text", growth=False).input == "1 text of 64 tokens"


def test_it_trains_runs_is_judged_and_looked_at_by_the_command_line(toy: Toy, tmp_path, capsys):
    run = str(tmp_path / "run")
    assert main([*toy.train, f"out={run}", "steps=60"]) == 0
    capsys.readouterr()
    assert main(["run", run, toy.input]) == 0
    assert capsys.readouterr().out.split()[0] == toy.answer
    assert main(["eval", run, f"data={toy.data}", "part=valid", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][0]["value"] > 90
    page = tmp_path / "look.html"
    assert main(["look", run, toy.input, f"out={page}"]) == 0 and "attention" in page.read_text()
    assert main(["cost", run, "growth=false"]) == 0
    model = regard.load(run)
    with regard.watch(model) as maps:
        model.run(toy.input)
    assert maps["attention"].weights().shape[:2] == (1, 2)


def test_what_it_does_not_serve_is_refused_by_name(tmp_path, capsys):
    assert main(["train", "tag", "family=toy_text", "data=x.tsv", f"out={tmp_path / 'x'}"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
