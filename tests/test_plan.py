"""What follows from the length of a training: warm-up, validations, and the time they take."""

import json
import math

import pytest

import regard
from regard.api import plan as plan_recipe
from regard.errors import UsageError
from regard.recipes import RECIPES, recipe
from regard.settings import describe
from regard.tasks import TASKS
from regard.tasks import task as task_class
from regard.training.loop import LoopSettings, check
from regard.training.plan import Cost, budget, default_warmup, make_plan


@pytest.mark.parametrize("steps", [1, 5, 10, 147, 2000, 12_000, 300_000])
def test_the_warmup_is_a_tenth_of_the_steps_at_most(steps):
    plan = make_plan(LoopSettings(steps=steps))
    assert plan.warmup == min(4000, steps // 10) == default_warmup(steps)
    assert plan.steps == steps and not plan.notes


@pytest.mark.parametrize("steps", [1, 2, 11, 12, 13, 147, 1862, 11_999, 12_000, 50_000])
def test_a_run_validates_a_dozen_times_or_every_thousand_steps(steps):
    every = make_plan(LoopSettings(steps=steps)).valid_every
    at = [n for n in range(1, steps + 1) if n % every == 0 or n == steps]
    assert at[-1] == steps and len(at) <= max(12, math.ceil(steps / 1000))
    assert len(at) >= min(steps, 7)


# seconds, seconds a step, a save, a validation, rows that it decodes
BUDGETS = {
    "translate, two minutes": (120.0, Cost(0.73, 0.1, 8.0, 500)),
    "captioning, two minutes": (110.0, Cost(0.5, 0.3, 25.0, 500)),
    "classify, two minutes": (120.0, Cost(0.06, 0.05, 0.4)),
    "an hour": (3600.0, Cost(0.2, 0.5, 12.0, 500)),
    "a second": (1.0, Cost(0.01, 0.001, 0.002)),
    "validation for nothing": (60.0, Cost(0.1)),
    "a big model that is slow to save": (600.0, Cost(2.0, 10.0, 5.0, 100)),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_all_that_a_run_does_fits_into_its_minutes(name):
    seconds, cost = BUDGETS[name]
    plan = make_plan(LoopSettings(minutes=1.0), cost=cost, seconds=seconds)
    validations = math.ceil(plan.steps / plan.valid_every)
    judging = validations * (cost.save + plan.valid_share * cost.validation)
    assert 0.85 * seconds < plan.steps * cost.step + judging <= seconds
    assert judging <= 0.2 * seconds
    assert validations >= 4 or judging > 0.1 * seconds
    assert plan.valid_share == 1 or plan.valid_share * cost.decoded >= 50
    assert plan.warmup == default_warmup(plan.steps)


def test_an_own_interval_of_validations_is_kept_and_counted():
    cost = Cost(0.1, 0.0, 2.0, 500)
    plan = make_plan(LoopSettings(minutes=1.0, valid_every=20), cost=cost, seconds=60.0)
    assert plan.valid_every == 20 and plan.valid_share == 1
    assert plan.steps == int(57 / 0.2)


def test_a_validation_that_takes_all_the_time_is_told_and_training_has_its_half():
    plan = make_plan(LoopSettings(minutes=1.0), cost=Cost(0.1, 0.0, 100.0), seconds=60.0)
    assert plan.steps == 300 and plan.valid_every == 300
    assert plan.notes == [
        "a validation takes about 100 s, much of the 60 s there are; "
        "give a smaller part with valid=, or more minutes"
    ]


def test_fewer_rows_to_decode_are_told():
    plan = make_plan(LoopSettings(minutes=2.0), cost=Cost(0.5, 0.3, 25.0, 500), seconds=110.0)
    rows = math.ceil(plan.valid_share * 500)
    assert plan.notes == [f"validations decode {rows:,} of 500 rows to save time"]


def test_no_time_is_one_step():
    assert budget(1e-9, Cost(0.1, 1.0, 1.0)).steps == 1


def test_of_steps_and_minutes_the_shorter_holds_and_is_told():
    cost = Cost(0.1)
    few = make_plan(LoopSettings(steps=50, minutes=1.0), cost=cost, seconds=60.0)
    assert few.steps == 50
    assert few.notes == ["steps=50 and minutes=1: what ends first holds, here steps (50 steps)"]
    many = make_plan(LoopSettings(steps=5000, minutes=1.0), cost=cost, seconds=60.0)
    assert many.steps == 570
    assert many.notes == [
        "steps=5000 and minutes=1: what ends first holds, here minutes (570 steps)"
    ]


def test_epochs_become_steps():
    assert make_plan(LoopSettings(epochs=2.5), epoch=40.0).steps == 100
    assert make_plan(LoopSettings(epochs=0.001), epoch=40.0).steps == 1
    both = make_plan(LoopSettings(epochs=3, minutes=1.0), epoch=40.0, cost=Cost(0.1), seconds=60.0)
    assert both.steps == 120 and "here epochs (120 steps)" in both.notes[0]
    with pytest.raises(UsageError, match="steps=5 and epochs=2 both say how long; keep one"):
        check(LoopSettings(steps=5, epochs=2.0))
    with pytest.raises(UsageError, match="add steps=, epochs= or minutes="):
        make_plan(LoopSettings())


def test_a_warmup_longer_than_the_run_is_told():
    plan = make_plan(LoopSettings(steps=147, warmup=1000))
    assert plan.warmup == 1000
    assert plan.notes == [
        "warmup=1,000 is not over after 147 steps, so the peak learning rate is never reached; "
        "without warmup= it takes 14 steps"
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_of_another_length_has_a_warmup_of_that_length(name):
    _, values, _ = plan_recipe(name, {"minutes": 1, "data": "somewhere"})
    assert not {"steps", "epochs", "warmup", "valid_every"} & set(values)
    _, values, _ = plan_recipe(name, {"steps": 7, "warmup": 3, "data": "somewhere"})
    assert (values["steps"], values["warmup"]) == (7, 3) and "minutes" not in values
    _, values, _ = plan_recipe(name, {"data": "somewhere"})
    assert {**values, **recipe(name).SETTINGS} == values


@pytest.mark.parametrize("name", TASKS)
def test_no_task_has_a_warmup_of_its_own(name):
    kinds = {row.key: row for row in describe(LoopSettings)}
    assert kinds["warmup"].default == "none"
    module = task_class(name)
    sizes = getattr(module, "SIZES", {})
    assert not any("warmup" in row for row in sizes.values())


# Real runs


@pytest.fixture
def pairs(tmp_path):
    lines = [f"word{i % 17} and word{i % 5}\twort{i % 17} und wort{i % 5}" for i in range(300)]
    (tmp_path / "pairs.tsv").write_text("\n".join(lines) + "\n")
    return tmp_path / "pairs.tsv"


TINY = {
    "depth": 1,
    "width": 16,
    "heads": 2,
    "ffn_width": 16,
    "pieces": 300,
    "batch_tokens": 200,
    "threads": 1,
    "quiet": True,
}


def test_minutes_hold_for_everything(pairs, tmp_path):
    out = tmp_path / "out"
    regard.train("translate", data=pairs, out=out, minutes=0.05, **TINY)
    kept = json.loads((out / "recipe.json").read_text())
    assert kept["warmup"] == default_warmup(kept["steps"]) and kept["settings"]["warmup"] is None
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = [row["lr"] for row in rows if "lr" in row]
    assert rates.index(max(rates)) in (kept["warmup"] - 1, kept["warmup"])
    judged = [row["step"] for row in rows if "valid/loss" in row]
    assert judged[-1] == kept["steps"] and len(judged) <= 12
    steps, judging = kept["steps"] * kept["seconds_a_step"], kept["seconds_a_validation"]
    assert steps + judging <= 0.05 * 60 or kept["steps"] == 1


def test_epochs_read_all_data_so_often(pairs, tmp_path):
    seen = []
    for epochs in (1, 3):
        out = tmp_path / str(epochs)
        report = regard.train("translate", data=pairs, out=out, epochs=epochs, **TINY)
        seen.append(report.steps)
        assert report.finished
    assert seen[1] == 3 * seen[0] > 3
    kept = json.loads((out / "recipe.json").read_text())
    assert (kept["settings"]["epochs"], kept["settings"]["steps"]) == (3, None)


def test_a_run_of_before_keeps_the_warmup_it_was_begun_with(pairs, tmp_path, monkeypatch):
    settings = {"data": pairs, "schedule": "constant", **TINY}
    whole = tmp_path / "whole"
    regard.train("translate", out=whole, steps=6, warmup=4, **settings)
    path = whole / "recipe.json"
    kept = json.loads(path.read_text())
    del kept["warmup"], kept["valid_share"], kept["settings"]["epochs"]
    path.write_text(json.dumps(kept))
    for checkpoint in (whole / "checkpoints").iterdir():
        if int(checkpoint.name.split("-")[1]) > 2:
            for file in checkpoint.iterdir():
                file.unlink()
            checkpoint.rmdir()
    before = (whole / "metrics.jsonl").read_text()
    regard.train("translate", out=whole, steps=6, **settings)
    after = (whole / "metrics.jsonl").read_text()
    one, two = (
        [json.loads(line)["lr"] for line in text.splitlines() if "lr" in json.loads(line)]
        for text in (before, after)
    )
    assert one == two
