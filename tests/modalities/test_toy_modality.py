"""A modality is one file and one row: it is classified, run, examined, costed, looked at, cut."""

import json
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.cli import main
from regard.modalities import MODALITIES
from regard.tasks import TASKS, TaskEntry

HERE = Path(__file__).parents[1]
EXAMPLES = ("regard train clouds data=set.clouds", "regard train clouds data=set.clouds steps=9")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    import toy_modality

    monkeypatch.setitem(TASKS, "clouds", TaskEntry("toy_modality", "TASK", EXAMPLES))
    monkeypatch.setitem(MODALITIES, "cloud", toy_modality.CLOUDS)


@pytest.fixture(scope="module")
def clouds(tmp_path_factory) -> Path:
    path, rng = tmp_path_factory.mktemp("clouds") / "set.clouds", np.random.default_rng(0)
    rows = []
    for n in range(160):
        angles = rng.uniform(0, 2 * np.pi, 12)
        ring = np.stack([np.cos(angles), np.sin(angles)], 1)
        points = ring if n % 2 else ring * rng.uniform(0, 0.5, (12, 1))
        rows.append({"points": points.round(3).tolist(), "label": ("disc", "ring")[n % 2]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_it_is_a_small_file():
    lines = (HERE / "toy_modality.py").read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= 120


def test_it_is_classified_run_judged_looked_at_and_cut(clouds, tmp_path, capsys):
    run = tmp_path / "run"
    words = ["train", "classify", f"data={clouds}", "steps=150", "width=32", "depth=1", "heads=2"]
    assert main([*words, f"out={run}", "--quiet"]) == 0
    config = json.loads((run / "config.json").read_text())
    assert config["task"] == "clouds" and config["cloud"]["channels"] == 2
    model = regard.load(run)
    angles = np.linspace(0, 6, 12)
    ring = np.stack([np.cos(angles), np.sin(angles)], 1)
    assert str(model.run(ring)) == "ring" and str(model.run(ring * 0.2)) == "disc"
    capsys.readouterr()
    assert main(["run", str(run), str(clouds)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 160
    assert main(["eval", str(run), f"data={clouds}", "part=valid", "--json"]) == 0
    judged = json.loads(capsys.readouterr().out)
    assert judged["scores"][0]["name"] == "accuracy" and judged["scores"][0]["value"] > 80
    page = tmp_path / "look.html"
    assert main(["look", str(run), str(clouds), f"out={page}"]) == 0 and page.exists()
    picture = tmp_path / "causes.png"
    assert main(["look", str(run), str(clouds), "cause=tokens", f"out={picture}"]) == 0
    assert picture.exists()


def test_the_doctor_examines_it_and_its_cost_is_counted(clouds, tmp_path, capsys):
    assert main(["doctor", str(clouds), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["task"] == "clouds" == found["forecast"]["task"] and found["healthy"]
    assert found["parts"]["train"]["clouds"] == 160
    run = tmp_path / "run"
    words = ["train", "clouds", f"data={clouds}", "steps=1", "width=16", "depth=1", "heads=2"]
    assert main([*words, f"out={run}", "--quiet"]) == 0
    capsys.readouterr()
    assert main(["cost", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["multiply_adds"] > 0
