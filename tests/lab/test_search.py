"""A search is a function of its seed: drawn, halved, interrupted and ended the same."""

import json
import math
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.cli import main
from regard.errors import UsageError
from regard.lab.search import SettingRange, draw, kept, shares
from tests.lab.test_compare import FORK, Steps, results
from tests.zoo import LABELS

TINY: dict[str, Any] = {**LABELS, "few": False, "steps": 12, "valid_every": 2, "threads": 1}
SPACE = {"lr": "0.0003..0.3", "width": "16,32", "dropout": "0..0.3"}
SEARCH = {"search": "random", "trials": 9, "quiet": True}


def given(zoo, out: Path, **more: Any) -> dict[str, Any]:
    plain = {key: value for key, value in TINY.items() if key not in SPACE}
    return {**plain, **SPACE, **SEARCH, "data": str(zoo.data("classify")), "out": str(out), **more}


def ended(out: Path) -> dict[str, Any]:
    """All that a search gives but the time it took."""
    found = results(out)
    keys = ("name", "variant", "finished", "scores", "steps", "failed")
    runs = [{key: run.get(key) for key in keys} for run in found["runs"]]
    return {"runs": runs, **{key: found[key] for key in ("search", "finished", "varied")}}


@pytest.fixture(scope="module")
def whole(zoo, tmp_path_factory) -> Path:
    """A search that nothing interrupted."""
    out = tmp_path_factory.mktemp("search") / "lab"
    regard.compare("classify", **given(zoo, out))
    return out


def test_trials_follow_from_the_seed_and_more_of_them_begin_with_the_same():
    space = {
        "lr": SettingRange(1e-4, 1e-1),
        "depth": SettingRange(1, 6, True),
        "norm": ["layer", "rms"],
    }
    few, many = draw(space, 9, 3), draw(space, 400, 3)
    assert few == many[:9] and few != draw(space, 9, 4)
    rates = [trial.values["lr"] for trial in many]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates)
    below = sum(rate < math.sqrt(1e-5) for rate in rates)
    assert 150 < below < 250  # half of them below the geometric mean
    assert {trial.values["depth"] for trial in many} == set(range(1, 7))
    even = [SettingRange(0, 1).draw(random.Random(n)) for n in range(400)]
    assert 150 < sum(one < 0.5 for one in even) < 250


def test_trials_never_repeat():
    assert len({str(one.values) for one in draw({"norm": ["a", "b"], "n": ["c", "d"]}, 4, 1)}) == 4


def test_at_least_one_trial_is_left_and_what_has_no_score_never_goes_on():
    assert [len(shares(n)) for n in (1, 2, 3, 8, 9, 30)] == [1, 1, 2, 2, 3, 3]
    row = {"step": 6, "loss": 1.0}
    runs = [
        {"name": n, "finished": False, "planned": 12, "progress": [{**row, "better": score}]}
        for n, score in enumerate((None, 0.3, 0.9, 0.9, 0.1))
    ]
    runs.append({"name": 5, "finished": False, "failed": "the loss is not finite"})
    assert [run["name"] for run in kept(runs, 0.5)] == [2, 3]  # of equal ones those drawn first
    runs[3]["progress"][0]["loss"] = 0.5
    assert [run["name"] for run in kept(runs, 0.5)] == [3, 2]


def test_the_worse_are_stopped_and_the_best_is_what_a_training_alone_gives(whole, zoo, tmp_path):
    found = results(whole)
    assert [(rung["trials"], len(rung["best"])) for rung in found["search"]["rungs"]] == [
        (9, 3),
        (3, 1),
        (1, 1),
    ]
    assert sorted(run["steps"] for run in found["runs"]) == [2] * 6 + [6] * 2 + [12]
    (best,) = (run for run in found["runs"] if run["finished"])
    first = sorted(found["runs"], key=lambda run: -run["progress"][0]["better"])
    assert found["finished"] and best["progress"][0]["better"] >= first[2]["progress"][0]["better"]
    assert found["variants"][0]["name"] == best["name"]
    alone = {key: value for key, value in given(zoo, tmp_path / "run").items() if key not in SEARCH}
    regard.train("classify", **{**alone, **best["variant"]}, quiet=True)
    weights = (Path(best["folder"]) / "model.safetensors").read_bytes()
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == weights
    table = (whole / "table.md").read_text()
    assert "9 trials drawn at random by seed 1 from lr=0.0003..0.3" in table
    assert f"regard train --from {best['folder']} out=" in table
    assert (whole / "trends.png").stat().st_size > 5000


def killed(settings: dict[str, Any], cache: str, at: int) -> None:
    """Search until a step, and die before it."""
    os.environ["REGARD_CACHE"] = cache
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        Steps(patch, at, lambda: os.kill(os.getpid(), signal.SIGKILL))
        regard.compare("classify", **settings)


@pytest.mark.parametrize("at", [8, 22, 35])
def test_a_search_that_was_killed_goes_on_and_ends_the_same(at, whole, zoo, tmp_path, monkeypatch):
    settings = given(zoo, tmp_path / "lab", save_every=0)
    process = FORK.Process(target=killed, args=(settings, os.environ["REGARD_CACHE"], at))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    steps = Steps(monkeypatch)
    regard.compare("classify", **settings)
    assert steps.count == 36 - (at - 1)  # 9 * 2 + 3 * 4 + 6, none of them twice
    assert ended(tmp_path / "lab") == ended(whole)


def test_what_was_compared_but_not_noted_is_not_trained_again(whole, zoo, tmp_path, monkeypatch):
    out = shutil.copytree(whole, tmp_path / "lab")
    (out / "results.json").unlink()
    steps = Steps(monkeypatch)
    regard.compare("classify", **given(zoo, out))
    assert steps.count == 0 and ended(out) == ended(whole)


def test_in_parallel_and_from_the_command_line_it_is_the_same(whole, zoo, tmp_path, capsys):
    settings = {**given(zoo, tmp_path / "lab", parallel=2), "quiet": None}
    words = [f"{key}={value}" for key, value in settings.items() if value is not None]
    assert main(["compare", "classify", *words]) == 0, capsys.readouterr().err
    assert ended(tmp_path / "lab") == ended(whole)
    assert "Best: trial-" in capsys.readouterr().out


def test_a_trial_that_diverges_is_out_and_the_others_go_on(zoo, tmp_path, monkeypatch):
    def diverge():
        raise UsageError("the loss is not finite")

    Steps(monkeypatch, 4, diverge)
    made = regard.compare("classify", **given(zoo, tmp_path / "lab"))
    assert made.finished and [run["name"] for run in made.failed] == ["trial-2"]
    assert "trial-2" not in json.dumps(made.to_dict()["search"]["rungs"])
    assert "seed 1 failed: the loss is not finite" in str(made)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"lr": "1..0.1"}, "lr=1..0.1 is no range; write the lower end first"),
        ({"lr": "0.1..1e999"}, "lr=0.1..1e999 is no range"),
        ({"norm": "0..1"}, "norm is no number; list values: norm=A,B"),
        ({"depth": "1.5..3"}, "depth=1.5..3 has an end that is not a whole number"),
        ({"lr": "0.1..0.2,0.4"}, "has a range in a list"),
        ({"lrr": "0.1..0.2"}, "unknown key 'lrr'; did you mean 'lr'"),
        ({"steps": "4..8"}, "steps cannot be searched"),
        ({"seeds": 3}, "seeds=3: a search trains each trial with one seed"),
        ({"seed": "1,2"}, "seed=1,2: a search trains each trial with one seed"),
        ({"minutes": 1}, "minutes=1: a search compares trials at a share of their steps"),
        ({"processes": 2}, "processes=2 cannot be searched; use parallel="),
        ({"search": "grid"}, "unknown search 'grid'"),
        ({"search": None}, "is a range; add search=random"),
        ({"lr": 0.1, "dropout": 0.1}, "trials=9 are more than there are to draw, about 2"),
        ({"lr": 0.1, "dropout": 0.1, "width": 16}, "search= has nothing to draw from"),
        ({"lr": 0.1, "dropout": 0.1, "search": None}, "trials=9 are those of a search"),
    ],
)
def test_what_cannot_be_searched_is_refused_before_anything_is_trained(zoo, tmp_path, more, said):
    with pytest.raises(UsageError) as told:
        regard.compare("classify", **given(zoo, tmp_path / "lab", **more))
    assert said in str(told.value) and "\n" not in str(told.value)
    assert not (tmp_path / "lab").exists()
