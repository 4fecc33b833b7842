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
from regard.training.optim import SCHEDULES
from regard.training.plan import Plan, StepCost, budget, default_warmup, make_plan, plan_again
from regard.training.step import LoopSettings, check


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
    "translate, two minutes": (120.0, StepCost(0.73, 0.1, 8.0, 500)),
    "captioning, two minutes": (110.0, StepCost(0.5, 0.3, 25.0, 500)),
    "classify, two minutes": (120.0, StepCost(0.06, 0.05, 0.4)),
    "an hour": (3600.0, StepCost(0.2, 0.5, 12.0, 500)),
    "a second": (1.0, StepCost(0.01, 0.001, 0.002)),
    "validation for nothing": (60.0, StepCost(0.1)),
    "a big model that is slow to save": (600.0, StepCost(2.0, 10.0, 5.0, 100)),
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
    cost = StepCost(0.1, 0.0, 2.0, 500)
    plan = make_plan(LoopSettings(minutes=1.0, valid_every=20), cost=cost, seconds=60.0)
    assert plan.valid_every == 20 and plan.valid_share == 1
    assert plan.steps == int(0.97 * 60 / 0.2)


def test_a_validation_that_takes_all_the_time_is_told_and_training_has_its_half():
    plan = make_plan(LoopSettings(minutes=1.0), cost=StepCost(0.1, 0.0, 100.0), seconds=60.0)
    assert plan.steps == 300 and plan.valid_every == 300
    assert plan.notes == [
        "a validation takes about 100 s, much of the 60 s there are; "
        "give a smaller part with valid=, or more minutes"
    ]


def test_fewer_rows_to_decode_are_told():
    plan = make_plan(LoopSettings(minutes=2.0), cost=StepCost(0.5, 0.3, 25.0, 500), seconds=110.0)
    rows = math.ceil(plan.valid_share * 500)
    assert plan.notes == [f"validations decode {rows:,} of 500 rows to save time"]


def test_no_time_is_one_step():
    assert budget(1e-9, StepCost(0.1, 1.0, 1.0)).steps == 1


def test_of_steps_and_minutes_the_shorter_holds_and_is_told():
    cost = StepCost(0.1)
    few = make_plan(LoopSettings(steps=50, minutes=1.0), cost=cost, seconds=60.0)
    assert few.steps == 50
    assert few.notes == ["steps=50 and minutes=1: what ends first holds, here steps (50 steps)"]
    many = make_plan(LoopSettings(steps=5000, minutes=1.0), cost=cost, seconds=60.0)
    assert many.steps == 581
    assert many.notes == [
        "steps=5000 and minutes=1: what ends first holds, here minutes (581 steps)"
    ]


def test_epochs_become_steps():
    assert make_plan(LoopSettings(epochs=2.5), epoch=40.0).steps == 100
    assert make_plan(LoopSettings(epochs=0.001), epoch=40.0).steps == 1
    both = make_plan(
        LoopSettings(epochs=3, minutes=1.0), epoch=40.0, cost=StepCost(0.1), seconds=60.0
    )
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


@pytest.mark.parametrize("name", [name for name in TASKS if task_class(name).objective])
def test_no_task_has_a_warmup_of_its_own(name):
    kinds = {row.key: row for row in describe(LoopSettings)}
    assert kinds["warmup"].default == "none"
    assert (sizes := task_class(name).sizes)
    assert not any("warmup" in row for row in sizes.values())


# Plans that are made again

SPEEDS = {  # seconds of a step as a function of the seconds that have passed, and as measured
    "as measured": (lambda t: 0.1, 0.1),
    "slow while it was measured": (lambda t: 0.1, 0.5),
    "quick while it was measured": (lambda t: 0.5, 0.1),
    "busy from the middle on": (lambda t: 0.1 if t < 50 else 0.3, 0.1),
    "busy in the middle": (lambda t: 0.4 if 30 < t < 70 else 0.1, 0.1),
    "hardly a step": (lambda t: 9.0, 45.0),
}


TWO_MINUTES = LoopSettings(minutes=2.0)


def walk(speed, measured, settings=TWO_MINUTES):
    """Return all plans of a run, the seconds it took and its validations, by a simulated clock."""
    cost, spent, validated = StepCost(measured, 0.1, 1.0), 0.0, []
    plans = [make_plan(settings, cost=cost, seconds=120.0)]
    step, since, times = 0, 0, []
    while step < plans[-1].steps:
        if step == plans[-1].next_step:
            mean = sum(times[since:]) / len(times[since:])
            cost = StepCost(mean, validation=1.1)
            plans.append(plan_again(settings, plans[-1], step, spent, cost))
            since = step
        times.append(speed(spent))
        spent += times[-1]
        step += 1
        if plans[-1].validates(step) or step == plans[-1].steps:
            validated.append(step)
            spent += 1.1
    return plans, spent, validated


def rates(plans, schedule):
    """Return the learning rate of every step of a run, as a share of the peak."""
    ends = [*(plan.step for plan in plans[1:]), plans[-1].steps]
    return [
        SCHEDULES[schedule](plan.place(step), plan.steps, plan.warmup)
        for plan, end in zip(plans, ends, strict=True)
        for step in range(plan.step, end)
    ]


@pytest.mark.parametrize("name", SPEEDS)
def test_a_run_uses_the_time_it_is_given_whatever_was_measured(name):
    plans, spent, validated = walk(*SPEEDS[name])
    assert 0.9 * 120 < spent < 1.06 * 120 or name == "hardly a step" and 100 < spent < 130
    assert validated[-1] == plans[-1].steps and 4 <= len(validated) <= 16
    gaps = [b - a for a, b in zip(validated[:-1], validated[1:-1], strict=False)]
    assert len(plans) > 5 and all(gap >= 1 for gap in gaps)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", SPEEDS)
def test_the_schedule_follows_the_share_of_the_budget(name, schedule):
    """It warms up, never leaps ahead, and has come to its end with the last step."""
    plans, *_ = walk(*SPEEDS[name])
    found, last = rates(plans, schedule), plans[-1]
    assert len(found) == last.steps and max(found) <= 1 and min(found) > 0
    whole = rates([make_plan(LoopSettings(steps=last.steps))], schedule)
    one = max(0.1, 3 / len(found))  # by which a step of a short run falls at most
    assert found[-1] == pytest.approx(whole[-1], abs=0.02 if len(found) > 50 else one)
    for before, after in zip(plans, plans[1:], strict=False):
        share = before.place(after.step) / before.steps
        assert after.position / after.steps <= share + 1e-9
        assert after.place(after.steps) == pytest.approx(after.steps)
        assert after.warmup == default_warmup(after.steps)


def test_a_measure_that_was_right_changes_next_to_nothing():
    plans, *_ = walk(*SPEEDS["as measured"])
    once = rates(plans[:1], "cosine")
    again = rates(plans, "cosine")
    assert abs(len(once) - len(again)) < 0.06 * len(once)
    assert max(abs(a - b) for a, b in zip(once, again, strict=False)) < 0.15


def test_a_run_that_is_not_timed_is_planned_once_and_to_the_bit_as_ever():
    plan = make_plan(LoopSettings(steps=137))
    assert plan.next_step is None
    assert [plan.place(n) for n in range(137)] == list(range(137))


def test_steps_beside_minutes_hold_however_quick_the_machine_is():
    settings = LoopSettings(minutes=2.0, steps=400)
    plans, spent, _ = walk(*SPEEDS["slow while it was measured"], settings)
    assert plans[0].steps < 400 and plans[-1].steps == 400 and spent < 70
    plans, spent, _ = walk(*SPEEDS["quick while it was measured"], settings)
    assert plans[0].steps == 400 > plans[-1].steps and spent < 126


def test_a_warmup_and_an_interval_of_the_users_own_stay():
    settings = LoopSettings(minutes=2.0, warmup=40, valid_every=30)
    for name in ("slow while it was measured", "quick while it was measured"):
        plans, _, validated = walk(*SPEEDS[name], settings)
        found = rates(plans, "constant")
        assert found[:40] == pytest.approx([(n + 1) / 40 for n in range(40)])
        assert set(found[40:]) == {1.0}
        assert validated == sorted({*range(30, plans[-1].steps + 1, 30), plans[-1].steps})


def test_plans_are_read_as_they_were_written():
    plans, *_ = walk(*SPEEDS["busy from the middle on"])
    for plan in plans:
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan


def test_too_few_steps_are_warned_of():
    slow = make_plan(LoopSettings(minutes=1.0), cost=StepCost(2.0), seconds=60.0)
    assert "29 steps in these minutes are too few" in slow.notes[0]
    assert not make_plan(LoopSettings(minutes=1.0), cost=StepCost(0.1), seconds=60.0).notes
    assert not make_plan(LoopSettings(steps=5)).notes  # as the user has said


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
    plans = [Plan.from_json(row) for row in kept["plans"]]
    assert plans[-1].to_json().items() >= {key: kept[key] for key in ("steps", "warmup")}.items()
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    found = [row["lr"] for row in rows if "lr" in row]
    peak = kept["settings"]["lr"]
    assert found == pytest.approx(
        [peak * rate for rate in rates(plans, kept["settings"]["schedule"])]
    )
    judged = [row["step"] for row in rows if "valid/loss" in row]
    assert judged[-1] == kept["steps"] and len(judged) <= 16


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
