"""A family is one file and one row: it is trained, run, judged, counted and looked at."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import regard
from regard.cli import main
from regard.models import MODELS, preset_family, serving

HERE = Path(__file__).parent
ROW = ("toy_family", "ToyConfig", "Toy")
# a command line that knows the family, in a process of its own
COMMAND = [
    sys.executable,
    "-c",
    f"import sys; from regard.models import MODELS; MODELS['toy'] = {ROW!r}; "
    "from regard.cli import main; sys.exit(main())",
]
TRAIN = ["train", "images", "family=toy", "batch=8", "augment=none", "image=8", "model.patch=2"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(MODELS, "toy", ROW)
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> Path:
    home = tmp_path_factory.mktemp("photos")
    rand = np.random.default_rng(0)
    for number in range(48):
        label, part = ("dark", "light")[number % 2], "valid" if number % 4 > 1 else "train"
        pixels = rand.integers(0, 120, (8, 8)) + 120 * (number % 2)
        (home / part / label).mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels.astype(np.uint8)).save(home / part / label / f"{number}.png")
    return home


def test_it_is_a_small_file():
    assert len((HERE / "toy_family.py").read_text().splitlines()) <= 60


def test_it_is_listed_and_found_by_its_presets(capsys):
    assert "toy" in serving("images") and preset_family("toy_large") == "toy"
    assert main(["models"]) == 0
    assert "family: One layer of self-attention between patches." in capsys.readouterr().out


def test_its_cost_is_counted(capsys):
    assert main(["cost", "toy", "size=tiny", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["family"], told["input"]) == ("toy", "1 image of 32x32 pixels")
    assert told["attention"]["entries"] == 2 * 64**2
    assert regard.cost("toy_large").parameters > told["parameters"]


def test_it_trains_runs_is_judged_and_looked_at_by_the_command_line(photos, tmp_path, capsys):
    run, photo = str(tmp_path / "run"), str(photos / "valid" / "light" / "3.png")
    assert main([*TRAIN, f"data={photos}", f"out={run}", "steps=60", "lr=0.01", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["run", run, photo]) == 0
    assert capsys.readouterr().out.split()[0] == "light"
    assert main(["eval", run, f"data={photos}", "part=valid", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scores"][0]["value"] > 90
    page = tmp_path / "look.html"
    assert main(["look", run, photo, f"out={page}"]) == 0 and "attention" in page.read_text()
    assert main(["cost", run, "growth=false"]) == 0
    model = regard.load(run)
    with regard.watch(model) as maps:
        model.run(photo)
    assert maps["attention"].weights().shape == (1, 2, 16, 16)


def test_it_resumes_to_the_bit_after_a_kill(photos, tmp_path):
    words = [*TRAIN, f"data={photos}", "steps=200", "valid_every=20", "save_every=0"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}

    def start(name: str) -> subprocess.Popen:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen([*COMMAND, *words, f"out={tmp_path / name}"], env=env, **quiet)

    first = start("a")
    while first.poll() is None and len(list(tmp_path.glob("a/checkpoints/step-*"))) < 2:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    assert all(start(name).wait() == 0 for name in ("a", "b"))
    both = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("a", "b")]
    assert both[0] == both[1]


def test_what_it_does_not_serve_is_refused_by_name(photos, tmp_path, capsys):
    assert main(["train", "denoise", "family=toy", f"data={photos}", f"out={tmp_path / 'x'}"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
