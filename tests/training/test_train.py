"""Laws of the training loop, on a task small enough to compute by hand."""

import copy
import json
import math
import os
import shutil
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from regard.errors import UsageError
from regard.training import checkpoint, run_folder
from regard.training.fit import Fit, Outcome
from regard.training.optim import SCHEDULES, build_optimiser, newton_schulz
from regard.training.plan import Plan, StepCost, make_plan
from regard.training.run_folder import exit_code
from regard.training.step import LoopSettings, Trainable, measure, one_step


class Line(nn.Module):
    """A matrix, a bias and a gain."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.norm = nn.LayerNorm(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class BatchNormed(Line):
    """The same, of inputs whose running statistics are buffers."""

    def __init__(self):
        super().__init__()
        self.seen = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.seen(x))


class Points(Trainable):
    """Learn a fixed map from noise; `spoil` makes some batches infinite."""

    def __init__(self, spoil: Callable[[int], bool] = lambda n: False, scores: list | None = None):
        self.spoil, self.scores = spoil, iter(scores or [])
        self.seen: list[int] = []

    def batch(self, n: int) -> Any:
        self.seen.append(n)
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(n))
        y = torch.stack([x.sum(1), x[:, 0]], 1)
        return (x * math.inf if self.spoil(n) else x), y

    def count(self, batch: Any) -> tuple[int, int]:
        return len(batch[0]), 2 * len(batch[0])

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return (model(batch[0]) - batch[1]).square().sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert not model.training
        x, y = self.batch(10_000)
        with torch.no_grad():
            loss = float((model(x) - y).square().mean())
        return {"loss": loss, "better": next(self.scores, -loss)}


class Published(list):
    """What was published: weights and scores."""

    def __call__(self, weights: dict[str, Tensor], scores: dict[str, float]) -> None:
        self.append(({name: tensor.clone() for name, tensor in weights.items()}, scores))


def fit(
    folder: Path, task=None, *, steps=12, valid_every=4, model=None, **settings
) -> tuple[Fit, Published]:
    folder.mkdir(exist_ok=True)
    published = Published()
    how = LoopSettings(**{"lr": 0.05, "warmup": 3, "save_every": 1000.0, **settings})
    one = Fit(
        model or Line(),
        task or Points(),
        how,
        folder,
        plans=[Plan(steps, how.warmup or 0, valid_every)],
        publish=published,
        quiet=True,
    )
    return one, published


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def steps_of(folder: Path) -> list[int]:
    return sorted(step for step, _ in checkpoint.checkpoints(folder / "checkpoints"))


def same(one: Mapping[str, Tensor], two: Mapping[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


# Rates


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rate_rises_in_a_line_to_one(name):
    schedule = SCHEDULES[name]
    rising = [schedule(step, 100, 10) for step in range(10)]
    assert rising == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert all(0 < schedule(step, 100, 10) <= 1 for step in range(10, 100))


def test_the_rate_falls_with_the_root_of_time():
    falling = SCHEDULES["inverse_sqrt"]
    assert falling(39, 1000, 10) == pytest.approx(1 / 2)
    assert falling(999, 1000, 10) == pytest.approx(1 / 10)


def test_the_rate_falls_along_a_cosine_to_a_hundredth():
    falling = SCHEDULES["cosine"]
    assert falling(10, 110, 10) == pytest.approx(1)
    assert falling(60, 110, 10) == pytest.approx(0.505)
    assert falling(110, 110, 10) == pytest.approx(0.01)
    values = [falling(step, 110, 10) for step in range(10, 111)]
    assert values == sorted(values, reverse=True)


def test_a_constant_rate_stays():
    assert {SCHEDULES["constant"](step, 100, 10) for step in range(9, 100)} == {1.0}


@pytest.mark.parametrize("name", SCHEDULES)
def test_without_warmup_the_first_step_learns(name):
    assert SCHEDULES[name](0, 100, 0) == 1


def test_the_rate_of_each_step_is_written_down_and_used(tmp_path):
    one, _ = fit(tmp_path, schedule="cosine", lr=0.2)
    one.run()
    told = [row["lr"] for row in rows(tmp_path) if "lr" in row]
    assert told == [0.2 * SCHEDULES["cosine"](step, 12, 3) for step in range(12)]
    assert {group["lr"] for group in one.optimiser.param_groups} == {told[-1]}


def test_an_unknown_schedule_is_refused(tmp_path):
    with pytest.raises(UsageError, match="unknown schedule 'cosin'.*'cosine'"):
        fit(tmp_path, schedule="cosin")


# Steps


def test_matrices_decay_and_biases_and_norms_do_not():
    model = Line()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimiser = build_optimiser(model, lr=0.1, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    for name, parameter in model.named_parameters():
        kept = 0.95 if parameter.ndim > 1 else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * kept)


def test_a_long_gradient_is_cut_and_a_short_one_is_not():
    lengths = {}
    for clip in (0.0, 0.5, 1e9):
        model, seen = Line(), []
        optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
        optimiser.register_step_pre_hook(
            lambda *_, m=model, s=seen: s.extend(
                p.grad.clone() for p in m.parameters() if p.grad is not None
            )
        )
        _, norm, _, _ = one_step(model, Points(), LoopSettings(clip=clip), optimiser, 0, 1.0)
        lengths[clip] = float(torch.cat([g.flatten() for g in seen]).norm())
        assert norm == pytest.approx(lengths[1e9] if clip == 1e9 else norm)
        assert norm > 0.6  # told as it was
    assert lengths[0.5] == pytest.approx(0.5, abs=1e-5)
    assert lengths[0.0] == lengths[1e9] > 0.6


def test_what_is_drawn_in_a_step_depends_on_seed_and_number_alone():
    class Drawn(Points):
        def loss(self, model, batch):
            drawn.append(float(torch.rand(())))
            return super().loss(model, batch)

    drawn: list[float] = []
    for seed, n in ((1, 5), (1, 6), (2, 5), (1, 5)):
        torch.manual_seed(len(drawn))
        model = Line()
        torch.rand(len(drawn))
        one_step(model, Drawn(), LoopSettings(seed=seed), build_optimiser(model, lr=0.1), n, 0.1)
    assert drawn[0] == drawn[3]
    assert len(set(drawn)) == 3


def test_accumulation_reads_the_batches_in_their_order():
    model, task = Line(), Points()
    settings = LoopSettings(batches=3)
    for n in range(2):
        one_step(model, task, settings, build_optimiser(model, lr=0.1), n, 0.1)
    assert task.seen == [0, 1, 2, 3, 4, 5]


def test_averaged_weights_follow_the_formula(tmp_path):
    one, published = fit(tmp_path, ema=0.9, steps=12, valid_every=12)
    followed: list[dict[str, Tensor]] = []
    after = one._after

    def noted(sound: bool, loss: float, norm: float) -> None:
        followed.append({name: p.detach().clone() for name, p in one.state.items()})
        after(sound, loss, norm)

    one._after = noted
    mean = {name: p.detach().clone() for name, p in one.state.items()}
    one.run()
    for step, weights in enumerate(followed, 1):
        memory = min(0.9, (step + 1) / (step + 10))
        mean = {name: memory * mean[name] + (1 - memory) * weights[name] for name in mean}
    for name, tensor in published[-1][0].items():
        torch.testing.assert_close(tensor, mean[name], rtol=1e-5, atol=1e-6)
    kept = load_file(tmp_path / "checkpoints" / "step-12" / "ema.safetensors")
    assert same(kept, published[-1][0])
    raw = load_file(tmp_path / "checkpoints" / "step-12" / "raw.safetensors")
    assert same(raw, followed[-1])
    assert not same(raw, kept)


def test_validation_leaves_the_weights_of_training_alone(tmp_path):
    weights = []
    for valid_every in (1, 12):
        one, _ = fit(tmp_path / str(valid_every), ema=0.9, valid_every=valid_every)
        one.run()
        weights.append(one.state)
    assert same(*weights)


# What is kept


def test_the_best_weights_are_published_and_named(tmp_path):
    one, published = fit(tmp_path, Points(scores=[1.0, 3.0, 2.0]))
    outcome = one.run()
    assert (outcome.step, outcome.finished) == (12, True)
    assert [scores["better"] for _, scores in published] == [1.0, 3.0]
    assert (tmp_path / "best").read_text() == "step-8\n"
    assert (tmp_path / "last").read_text() == "step-12\n"
    best = load_file(tmp_path / "checkpoints" / "step-8" / "raw.safetensors")
    assert same(best, published[-1][0])
    assert outcome.scores["better"] == 3.0  # of the weights that are published
    assert [row["valid/better"] for row in rows(tmp_path) if "valid/better" in row] == [1, 3, 2]


def test_only_checkpoints_that_are_needed_stay(tmp_path):
    one, _ = fit(tmp_path, Points(scores=[9.0, 1.0, 1.0, 1.0, 1.0]), steps=20)
    one.run()
    assert steps_of(tmp_path) == [4, 16, 20]  # the best, and the last two
    assert (tmp_path / "best").read_text() == "step-4\n"


def test_checkpoints_to_be_averaged_stay_and_are_averaged(tmp_path):
    one, published = fit(tmp_path, Points(scores=[5, 1, 2, 3, 4, 99]), steps=20, average=3)
    outcome = one.run()
    assert steps_of(tmp_path) == [4, 12, 16, 20]
    read = [load_file(tmp_path / f"checkpoints/step-{s}/raw.safetensors") for s in (12, 16, 20)]
    for name, tensor in published[-1][0].items():
        torch.testing.assert_close(tensor, sum(each[name] for each in read) / 3)
    assert published[-1][1]["better"] == outcome.scores["better"] == 99
    assert "average of 3 checkpoints: 99 against 5 of the best; taken" in outcome.notes
    count = len(published)
    again, more = fit(tmp_path, Points(), steps=20, average=3)
    again.run()
    assert (count, len(more)) == (2, 0)  # once is enough


def test_where_weights_are_averaged_in_training_their_checkpoints_are_too(tmp_path):
    one, published = fit(tmp_path, Points(scores=[5, 1, 2, 99]), average=2, ema=0.9)
    one.run()
    places = [tmp_path / "checkpoints" / f"step-{step}" for step in (8, 12)]
    means = {}
    for group in ("ema", "raw"):
        read = [load_file(place / f"{group}.safetensors") for place in places]
        means[group] = {name: sum(each[name] for each in read) / 2 for name in read[0]}
    taken = published[-1][0]
    for name, tensor in taken.items():
        torch.testing.assert_close(tensor, means["ema"][name])
    assert not all(torch.allclose(taken[name], means["raw"][name]) for name in taken)


def test_an_average_that_is_worse_is_not_taken(tmp_path):
    one, published = fit(tmp_path, Points(scores=[5, 1, 2, -1]), average=3)
    outcome = one.run()
    assert len(published) == 1
    assert outcome.scores["better"] == 5
    assert "not taken" in outcome.notes[-1]


@pytest.mark.parametrize("valid_every", [12, 50])
def test_with_too_few_checkpoints_there_is_no_average(tmp_path, valid_every):
    one, published = fit(tmp_path, average=5, valid_every=valid_every)
    assert one.run().finished
    assert len(published) == 1


def test_a_damaged_checkpoint_is_not_averaged(tmp_path):
    one, _ = fit(tmp_path, Points(scores=[5, 1, 2, 3, 4, 99]), steps=20, average=3)
    finish = one._finish

    def spoil():
        path = tmp_path / "checkpoints" / "step-16" / "raw.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
        finish()

    one._finish = spoil
    assert any("average of 2 checkpoints" in note for note in one.run().notes)


def test_patience_ends_a_run_that_gains_nothing(tmp_path):
    one, _ = fit(tmp_path, Points(scores=[1, 2, 0, 1.9, 2, 7]), steps=100, patience=3)
    outcome = one.run()
    assert (outcome.step, outcome.finished) == (20, True)
    assert (tmp_path / "best").read_text() == "step-20\n"  # as good as step 8, with less loss
    again, published = fit(tmp_path, Points(), steps=100, patience=3)
    assert (again.run().step, published) == (20, [])


def test_a_finished_run_is_left_as_it_is(tmp_path):
    one, _ = fit(tmp_path)
    before = one.run()
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    task = Points()
    again, published = fit(tmp_path, task)
    after = again.run()
    assert (after.step, after.finished, after.scores) == (12, True, before.scores)
    assert (task.seen, published) == ([], [])
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == files


def test_what_is_seen_on_the_board(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for steps in (4, 12):
        fit(tmp_path, steps=steps, valid_every=4)[0].run()
    board = EventAccumulator(str(tmp_path / "tensorboard"))
    board.Reload()
    names = {"train/loss", "lr", "grad_norm", "tokens_per_second", "valid/loss", "valid/better"}
    assert set(board.Tags()["scalars"]) == names
    assert [event.step for event in board.Scalars("train/loss")] == list(range(1, 13))
    assert [event.step for event in board.Scalars("valid/loss")] == [4, 8, 12]
    losses = [row["loss"] for row in rows(tmp_path) if "loss" in row]
    assert [event.value for event in board.Scalars("train/loss")] == pytest.approx(losses)


# What goes wrong


def test_a_step_that_is_not_finite_is_skipped_and_counted(tmp_path):
    weights = {}
    for name, spoil in (("some", lambda n: n in (3, 4, 7)), ("none", lambda n: False)):
        folder = tmp_path / name
        one, _ = fit(folder, Points(spoil), steps=8, ema=0.9)
        before = one.state["linear.weight"].detach().clone()
        assert one.run().finished
        assert not torch.equal(one.state["linear.weight"], before)
        weights[name] = one
    told = [row for row in rows(tmp_path / "some") if "sound" in row]
    assert [row["step"] for row in told if not row["sound"]] == [4, 5, 8]
    assert all(row["loss"] is None for row in told if not row["sound"])  # JSON knows no NaN
    counters = weights["some"].counters
    assert (counters["skipped"], counters["skipped_in_a_row"]) == (3, 1)
    assert weights["none"].counters["skipped"] == 0
    for tensors in (weights["some"].state, weights["some"].averaged):
        assert all(tensor.isfinite().all() for tensor in tensors.values())
    optimiser = weights["some"].optimiser
    assert {int(state["step"]) for state in optimiser.state.values()} == {5}


def test_a_gradient_that_is_not_finite_is_skipped_too(tmp_path):
    class Steep(Points):
        def loss(self, model, batch):
            return next(model.parameters()).sum().mul(0).sqrt()  # 0, and its slope is not a number

    one, _ = fit(tmp_path, Steep(), steps=3)
    before = {name: p.detach().clone() for name, p in one.state.items()}
    one.run()
    assert one.counters["skipped"] == 3
    assert same(before, one.state)


def test_a_step_that_is_skipped_leaves_no_trace_in_buffers(tmp_path):
    one, _ = fit(tmp_path, Points(lambda n: n == 2), steps=2, model=BatchNormed())
    one.run()
    before = {name: tensor.detach().clone() for name, tensor in one.state.items()}
    one.plans = [replace(one.plan, steps=3)]
    one.run()
    assert one.counters["skipped"] == 1 and same(before, one.state)


def test_buffers_are_kept_averaged_published_and_taken_up_again(tmp_path):
    whole, _ = fit(tmp_path / "whole", steps=8, model=BatchNormed(), ema=0.9)
    whole.run()
    half, _ = fit(tmp_path / "parts", steps=4, model=BatchNormed(), ema=0.9)
    half.run()
    rest, published = fit(tmp_path / "parts", steps=8, model=BatchNormed(), ema=0.9)
    rest.run()
    assert same(rest.state, whole.state) and same(rest.averaged, whole.averaged)
    counted = "seen.num_batches_tracked"  # a count has no average
    assert rest.state[counted] == rest.averaged[counted] == published[-1][0][counted] == 8
    assert not torch.equal(rest.averaged["seen.running_mean"], rest.state["seen.running_mean"])
    assert same(published[-1][0], rest.averaged)


def test_ten_in_a_row_stop_the_run(tmp_path):
    one, _ = fit(tmp_path, Points(lambda n: n >= 6), steps=50)
    with pytest.raises(UsageError, match="10 steps in a row.*not finite.*lr=0.05") as mistake:
        one.run()
    assert "\n" not in str(mistake.value)
    assert one.counters["step"] == 16
    # nine in a row do not, and a good step begins the count anew
    one, _ = fit(tmp_path / "nine", Points(lambda n: n % 10 != 0), steps=40)
    assert one.run().finished
    assert one.counters["skipped"] == 36


def test_ten_in_a_row_are_counted_across_a_restart(tmp_path):
    task = Points(lambda n: n >= 6)
    with pytest.raises(UsageError):
        fit(tmp_path, task, steps=50)[0].run()
    task.seen.clear()
    again, _ = fit(tmp_path, task, steps=50)
    with pytest.raises(UsageError, match="10 steps in a row"):
        again.run()
    assert again.counters["step"] == 16
    assert all(tensor.isfinite().all() for tensor in again.state.values())


def test_a_half_written_line_of_metrics_is_forgotten(tmp_path):
    fit(tmp_path, steps=4)[0].run()
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    fit(tmp_path, steps=8)[0].run()
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == list(range(1, 9))


def test_lines_without_any_checkpoint_are_forgotten(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 7.0}\n')
    fit(tmp_path, steps=4)[0].run()
    assert [row["step"] for row in rows(tmp_path) if "loss" in row] == [1, 2, 3, 4]


# Measuring


def test_measuring_leaves_no_trace(tmp_path, monkeypatch):
    outcomes: list[tuple[Outcome, Mapping[str, Tensor]]] = []
    for measured in (False, True):
        one, _ = fit(tmp_path / str(measured), ema=0.9)
        if measured:
            cost = measure(one.model, one.task, LoopSettings(lr=0.05), one.folder, 10.0)
            assert all(0 < seconds < 10 for seconds in (cost.step, cost.save, cost.validation))
            assert not list(one.folder.iterdir())
            assert all(parameter.grad is None for parameter in one.model.parameters())
        outcomes.append((one.run(), one.state))
    assert outcomes[0][0].scores == outcomes[1][0].scores
    assert same(outcomes[0][1], outcomes[1][1])


class Decoding(Points):
    """A validation that takes as long as its rows are many, by a clock of its own."""

    decoded, valid_share = 400, 1.0

    def __init__(self, clock):
        super().__init__()
        self.clock, self.judged = clock, []

    def evaluate(self, model):
        self.judged.append(round(self.decoded * self.valid_share))
        self.clock.now += 0.1 * self.judged[-1]
        return super().evaluate(model)


class Clock:
    """A clock that only goes on when told."""

    now = 0.0

    def perf_counter(self):
        self.now += 0.001
        return self.now


def test_a_costly_validation_is_measured_on_some_rows(tmp_path, monkeypatch):
    clock = Clock()
    monkeypatch.setattr("regard.training.step.time", clock)
    task = Decoding(clock)
    cost = measure(Line(), task, LoopSettings(), tmp_path, 120.0)
    assert task.judged == [50] and task.valid_share == 1.0
    assert cost.validation == pytest.approx(40.0, rel=0.01)
    assert cost.decoded == 400 and cost.step == pytest.approx(0.001)


class Busy(Points):
    """A task whose steps take as long as a machine lets them, by a clock of its own."""

    def __init__(self, clock, speed):
        super().__init__()
        self.clock, self.speed = clock, speed

    def loss(self, model, batch):
        self.clock.now += self.speed(self.clock.now)
        return super().loss(model, batch)

    def evaluate(self, model):
        self.clock.now += 0.5
        return super().evaluate(model)


MACHINES = {
    "quicker than measured": lambda t: 0.05,
    "slower than measured": lambda t: 0.4,
    "busy for a while": lambda t: 0.5 if 5 < t < 15 else 0.05,
}


def timed(folder: Path, monkeypatch, speed, plans=None) -> tuple[Fit, Published]:
    """Return a run of 30 s by a simulated clock, of which 0.1 s a step were measured."""
    clock = Clock()
    monkeypatch.setattr("regard.training.fit.time", clock)
    one, published = fit(
        folder, Busy(clock, speed), minutes=0.5, warmup=None, schedule="cosine", average=3
    )
    first = make_plan(one.settings, cost=StepCost(0.1, 0.0, 0.5), seconds=30.0)
    one.plans = list(plans or [first])
    return one, published


@pytest.mark.parametrize("name", MACHINES)
def test_a_timed_run_is_planned_again_and_repeats_to_the_bit(tmp_path, monkeypatch, name):
    """From any checkpoint, and on a machine of any speed, by the plans that were recorded."""
    recorded: list[Sequence[Plan]] = []
    one, _ = timed(tmp_path / "whole", monkeypatch, MACHINES[name])
    one.record = lambda plans: recorded.append(list(plans))
    done = one.run()
    assert done.finished and done.step == one.plan.steps != one.plans[0].steps
    assert 0.85 * 30 < one.counters["seconds"] < 1.1 * 30
    assert len(recorded) >= 9 and recorded[-1] == one.plans
    assert [plan.step for plan in one.plans] == sorted({plan.step for plan in one.plans})
    found = [
        {k: v for k, v in row.items() if k in ("step", "loss", "lr")} for row in rows(one.folder)
    ]
    for speed in (lambda t: 0.001, lambda t: 3.0):
        again, _ = timed(tmp_path / "again", monkeypatch, speed, one.plans)
        assert again.run().step == done.step and again.plans == one.plans
        assert same(again.state, one.state)
        assert again.counters["scores"] == one.counters["scores"]
        repeated = [
            {k: v for k, v in row.items() if k in ("step", "loss", "lr")}
            for row in rows(again.folder)
        ]
        assert repeated == found
        for step in sorted(steps_of(again.folder))[1:]:  # and from its first checkpoint
            shutil.rmtree(again.checkpoints / f"step-{step}")


@pytest.mark.parametrize("at", [1, 7, 33])
def test_a_timed_run_that_is_broken_off_goes_on_as_it_was_planned(tmp_path, monkeypatch, at):
    """What was planned before the break stands, also if the last checkpoint is older."""

    class Broken(Exception):
        pass

    recorded: list[Plan] = []

    def breaks(one: Fit) -> Callable[..., Any]:
        def record(plans: Sequence[Plan]) -> None:
            recorded[:] = plans

        one.record = record
        return record

    one, _ = timed(tmp_path, monkeypatch, MACHINES["busy for a while"])
    breaks(one)
    recorded[:] = one.plans
    losses: Any = one.task.loss

    def loss(model, batch):
        if one.counters["step"] == at:
            raise Broken
        return losses(model, batch)

    monkeypatch.setattr(one.task, "loss", loss)
    with pytest.raises(Broken):
        one.run()
    before = list(recorded)
    again, _ = timed(tmp_path, monkeypatch, MACHINES["busy for a while"], before)
    breaks(again)
    assert again.run().finished and recorded[: len(before)] == before
    other, _ = timed(tmp_path / "repeated", monkeypatch, MACHINES["busy for a while"], recorded)
    other.run()
    assert other.plans == recorded and same(other.state, again.state)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_run_that_is_stopped_before_its_first_validation_has_a_model(tmp_path, number):
    """That of its last checkpoint, which the first validation replaces."""
    task = Points()
    one, published = fit(tmp_path, task, steps=20, valid_every=10)
    batch = task.batch

    def stop(n):
        if n == 2:
            os.kill(os.getpid(), number)
        return batch(n)

    task.batch = stop
    outcome = one.run()
    assert (outcome.step, outcome.finished, outcome.signal) == (3, False, number)
    assert exit_code(outcome.signal) == 128 + number
    ((weights, scores),) = published
    assert scores == {} and same(weights, one.state) and not outcome.scores
    again, more = fit(tmp_path, steps=20, valid_every=10)
    whole, expected = fit(tmp_path / "whole", steps=20, valid_every=10)
    assert again.run().signal is None and whole.run().finished
    assert same(again.state, whole.state) and len(more) == len(expected)
    assert again.counters["published"] == whole.counters["published"]


# Checkpoints


def test_a_checkpoint_is_whole_or_not_believed(tmp_path):
    tensors = {"raw": {"a": torch.arange(6.0)}, "optimiser": {"a:step": torch.tensor(3.0)}}
    for step in (1, 2, 3):
        checkpoint.save_checkpoint(tmp_path, step, tensors, {"step": step})
    newest = tmp_path / "step-3"
    assert checkpoint.newest_complete(tmp_path) == (newest, [])
    groups, counters = checkpoint.load_checkpoint(newest)
    assert counters == {"step": 3}
    assert torch.equal(groups["raw"]["a"], torch.arange(6.0))
    data = (newest / "raw.safetensors").read_bytes()
    for spoilt in (data[:-1], data[:-1] + b"\x01", b""):
        (newest / "raw.safetensors").write_bytes(spoilt)
        assert not checkpoint.is_complete(newest)
    (newest / "raw.safetensors").write_bytes(data)
    assert checkpoint.is_complete(newest)
    for manifest in ("{}", "[]", "{", "null", '{"raw.safetensors": 1}'):
        (newest / "manifest.json").write_text(manifest)
        assert not checkpoint.is_complete(newest)
    (newest / "manifest.json").unlink()
    (tmp_path / "step-2" / "counters.json").unlink()
    assert checkpoint.newest_complete(tmp_path) == (
        tmp_path / "step-1",
        [newest, tmp_path / "step-2"],
    )


def test_a_manifest_that_leaves_a_file_out_is_not_believed(tmp_path):
    tensors = {"raw": {"a": torch.zeros(1)}, "optimiser": {"a:step": torch.zeros(1)}}
    checkpoint.save_checkpoint(tmp_path, 1, tensors, {"step": 1})
    path = tmp_path / "step-1" / "manifest.json"
    hashes = json.loads(path.read_text())
    del hashes["raw.safetensors"]
    path.write_text(json.dumps(hashes))
    assert not checkpoint.is_complete(tmp_path / "step-1")


def test_a_second_training_in_the_folder_is_refused(tmp_path):
    with (
        run_folder.locked(tmp_path),
        pytest.raises(UsageError, match="another training is writing here; choose another out="),
        run_folder.locked(tmp_path),
    ):
        pass
    with run_folder.locked(tmp_path):
        pass  # free again


def test_what_a_kill_left_half_written_is_tidied_up(tmp_path):
    (tmp_path / ".model.safetensors.123.tmp").write_bytes(b"half")
    with run_folder.locked(tmp_path):
        assert not list(tmp_path.glob(".*.tmp"))


# Muon


def test_orthogonal_matrices_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((3, 16, 40), (2, 40, 16), (1, 24, 48)):
        matrices = torch.randn(shape)
        values = torch.linalg.svdvals(newton_schulz(matrices))
        assert values.min() > 0.5 and values.max() < 1.3
        # and directions stay: nothing that was large changes its sign
        u, s, vt = torch.linalg.svd(matrices, full_matrices=False)
        assert (torch.einsum("nij,nik,nkj->nj", u, newton_schulz(matrices), vt.mT) > 0.5).all()


def test_muon_turns_the_inner_matrices_and_leaves_the_rest_to_adamw():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 6), nn.Linear(6, 3))
    twin = copy.deepcopy(model)
    settings = {"lr": 0.01, "weight_decay": 0.1}
    muon = build_optimiser(model, name="muon", **settings)
    adamw = build_optimiser(twin, **settings)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        one.grad = torch.randn_like(one)
        other.grad = one.grad.clone()
    before = model[1].weight.detach().clone()
    grad = model[1].weight.grad.clone()
    muon.step()
    adamw.step()
    assert torch.equal(model[0].weight, twin[0].weight)
    assert torch.equal(model[1].bias, twin[1].bias)
    # one step: the momentum is a multiple of the gradient
    step = 0.01 * 0.2 * 6**0.5 * newton_schulz(grad[None])[0]
    torch.testing.assert_close(model[1].weight, before * (1 - 0.01 * 0.1) - step)


def test_muon_turns_a_kernel_as_the_matrix_that_it_is():
    torch.manual_seed(0)
    kernel, matrix = nn.Conv2d(3, 8, 2, bias=False), nn.Linear(12, 8, bias=False)
    matrix.weight.data.copy_(kernel.weight.detach().flatten(1))
    kernel.weight.grad = torch.randn_like(kernel.weight)
    matrix.weight.grad = kernel.weight.grad.flatten(1)
    for part in (kernel, matrix):
        build_optimiser(part, name="muon", lr=0.1).step()
    torch.testing.assert_close(kernel.weight.flatten(1), matrix.weight)


@pytest.mark.usefixtures("bfloat16")
def test_torchs_own_muon_goes_the_same_way():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 12, bias=False), nn.Linear(12, 4, bias=False))
    twin = copy.deepcopy(model)
    ours = build_optimiser(model, name="muon", lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon(
        twin.parameters(), lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(5):
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        ours.step()
        theirs.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert (one - other).abs().max() < 0.05 * 5 * 0.02 * 0.2 * 12**0.5  # theirs is bfloat16
