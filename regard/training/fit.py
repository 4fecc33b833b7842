"""A training run from its first step to its last. It knows no task, only a Trainable."""

import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.errors import UsageError, lookup, printable
from regard.files import write_atomically
from regard.files.weights import buffers_of, learned_state, stored_names
from regard.native import fast
from regard.native.allocator import reuse_memory
from regard.training import distributed, sharding
from regard.training.ahead import ahead
from regard.training.callbacks import LOGGERS, Callback, Callbacks, Started
from regard.training.checkpoint import (
    Stored,
    checkpoints,
    is_complete,
    load_checkpoint,
    newest_complete,
    optimiser_names,
    optimiser_tensors,
    prune,
    restore_optimiser,
    save_checkpoint,
)
from regard.training.optim import SCHEDULES, build_optimiser
from regard.training.plan import Plan, StepCost, plan_again
from regard.training.progress import Progress
from regard.training.run_folder import (
    METRICS_FILE,
    StopSignal,
    errors_of_folder,
    truncate_metrics,
    write_row,
)
from regard.training.step import LoopSettings, Trainable, batch_numbers, one_step, train_mode

_LEFT = 1000  # in place of the number of a signal: a callback stopped the run
_MAX_SKIPPED = 10  # steps in a row whose loss or gradient is not finite


@dataclass
class Outcome:
    """How a run ended."""

    step: int
    finished: bool
    scores: dict[str, float] = field(default_factory=dict)
    signal: int | None = None  # that stopped it
    notes: list[str] = field(default_factory=list)


class Stopwatch:
    """Mean seconds of what is done again and again, by name."""

    def __init__(self):
        self.times: dict[str, list[float]] = {}

    def add(self, name: str, seconds: float) -> None:
        """Count one more."""
        self.times.setdefault(name, []).append(seconds)

    def mean(self, name: str, default: float | None) -> float:
        """Mean so far, or a default if there was none."""
        times = self.times.get(name)
        return sum(times) / len(times) if times else default or 0.0


class StepWatcher(Protocol):
    """What looks on while a model learns, every so many steps."""

    every: int

    def settle(self, steps: int) -> None:
        """Choose `every` for a run of so many steps."""
        ...

    def __call__(self, step: int) -> None:
        """Look at the model after a step."""
        ...


def _tie(scores: Mapping[str, float]) -> float:
    """What decides between equal scores: how well an encoder alone does, or else the loss."""
    return scores.get("encoder_accuracy", -scores.get("loss", math.inf))


class Fit:
    """One training run in one folder, which can be stopped and resumed at any step."""

    def __init__(
        self,
        model: nn.Module,
        task: Trainable,
        settings: LoopSettings,
        folder: Path,
        *,
        plans: Sequence[Plan],
        publish: Callable[[dict[str, Tensor], dict[str, float]], None],
        record: Callable[[Sequence[Plan]], None] = lambda plans: None,
        quiet: bool = False,
        lost: bool = False,
        film: StepWatcher | None = None,
        callbacks: Sequence[Callback] = (),
        facts: Mapping[str, Any] | None = None,
    ):
        """Train `task` in a folder.

        Args:
            model: what is trained
            task: its batches, loss and evaluation
            settings: hyperparameters
            folder: for checkpoints and metrics
            plans: all plans of the run so far, oldest first; each holds from its step on
            publish: saves the best weights, with their scores
            record: writes all plans down, before the first step of a new one
            quiet: prints nothing
            lost: the published weights are gone, and are published again from a checkpoint
            film: is called every so many steps with the weights, which it leaves alone
            callbacks: are called beside the loggers that `settings.log` names
            facts: settings of the whole run as loggers show them, if there are more
        """
        self.lost, self.film = lost, film
        self.model, self.task, self.settings = model, task, settings
        self.folder, self.plans, self.record = Path(folder), list(plans), record
        self.publish = publish if distributed.is_main() else lambda weights, scores: None
        # those who have parts of the weights validate and save together
        self.acts, self.quiet = distributed.is_main() or sharding.is_sharded(model), quiet
        self.by, self.writers = sharding.group_of(model), sharding.group_of(model, thread=True)
        self.thread = ThreadPoolExecutor(1)
        self.saving: tuple[int, Future[None]] | None = None
        self.clock, self.facts = Stopwatch(), facts
        loggers = [LOGGERS[name]() for name in settings.log or ()]
        members = [*loggers, *callbacks] if distributed.is_main() else []
        self.callbacks = Callbacks(members, self._note, settings.callback_error == "stop")
        self.optimiser = build_optimiser(
            model,
            name=settings.optimiser,
            lr=settings.lr,
            weight_decay=settings.weight_decay,
            betas=(0.9, settings.beta2),
            layer_decay=settings.layer_decay,
            lr_scales=task.lr_scales,
        )
        self.schedule = lookup("schedule", settings.schedule, SCHEDULES)
        # what is frozen need not be kept
        self.state = learned_state(model)
        self.buffers = list(buffers_of(model).values())
        self.statistics = sharding.Statistics(model)
        self.averaged = (
            {name: x.detach().clone() for name, x in self.state.items()} if settings.ema else None
        )
        self.counters: dict[str, Any] = {
            "step": 0,
            "skipped": 0,
            "skipped_in_a_row": 0,
            "best": None,
            "best_step": None,
            "without_gain": 0,
            "tokens": 0,
            "seconds": 0.0,
            "scores": {},  # of the weights that are published
            "published": [],  # the steps whose weights they are, or are the mean of
        }
        self.notes: list[str] = []

    # Plans

    @property
    def plan(self) -> Plan:
        """The plan that holds for the next step."""
        step = self.counters["step"]
        return next(plan for plan in reversed(self.plans) if plan.step <= step)

    def _plan_again(self, bar: Progress) -> None:
        """Plan the rest of the run, if its time has come and that was not done before."""
        last, step = self.plan, self.counters["step"]
        if last is not self.plans[-1] or step != last.next_step:
            return
        spent, each, validation = (
            distributed.broadcast(value)
            for value in (
                self.counters["seconds"],
                self.clock.mean("step", last.seconds_a_step),
                self.clock.mean("validation", last.seconds_a_validation),
            )
        )
        plan = plan_again(self.settings, last, step, spent, StepCost(each, validation=validation))
        self.plans.append(plan)
        self.record(self.plans)
        self.clock = Stopwatch()
        bar.total = plan.steps
        if self.film is not None:
            self.film.settle(plan.steps)
        if not 0.8 < plan.steps / last.steps < 1.25:
            self._note(f"planned again: {plan.steps:,} steps instead of {last.steps:,}")

    # Checkpoints

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on.

        Before the first validation its weights are published, so that there is a model to use.
        """
        step = self.counters["step"]
        unscored = self.counters["best"] is None
        if unscored:
            self.counters["published"] = [step]
        names = optimiser_names(self.optimiser, self.state)
        groups = {"raw": self.state, "optimiser": optimiser_tensors(self.optimiser, names)}
        groups |= {"ema": self.averaged} if self.averaged is not None else {}
        best, averaged = self.counters["best_step"], self._to_average()
        kept = {f"step-{s}" for s in (best, *averaged)}
        self._await_save()
        own, firsts = sharding.to_save(groups, copy=self.settings.async_)
        counters = deepcopy(self.counters)

        def write() -> None:
            save_checkpoint(self.checkpoints, step, own, counters, firsts, self.writers)
            if distributed.is_main():
                # those ahead of the present step are damaged
                recent = [path.name for at, path in checkpoints(self.checkpoints) if at <= step][:2]
                prune(self.checkpoints, {*recent, *kept})

        self.saving = step, self.thread.submit(write)
        if not self.settings.async_:
            self._await_save()
        if unscored:
            with self._with(self.averaged) as weights:
                self.publish(weights, {})

    def _await_save(self) -> None:
        """Wait until the last checkpoint is there, or raise what has hindered it."""
        if self.saving is not None:
            (step, written), self.saving = self.saving, None
            written.result()
            self.callbacks("after_save", step, self.checkpoints / f"step-{step}")

    def _to_average(self) -> list[int]:
        """Steps of the last validations, whose weights may be averaged at the end."""
        steps, most = range(self.counters["step"], 0, -1), self.settings.average
        return sorted(islice((step for step in steps if self._validates(step)), most))

    def _validates(self, step: int) -> bool:
        """True if the weights are validated after so many steps, the last ones apart."""
        return next(plan for plan in reversed(self.plans) if plan.step < step).validates(step)

    def restore(self) -> None:
        """Load the newest complete checkpoint, if there is any."""
        newest, damaged = newest_complete(self.checkpoints, distributed.everyone())
        for path in damaged:
            self._note(f"{path} is damaged and was passed over")
        if newest is not None:
            self._load(newest)
        if distributed.is_main():
            truncate_metrics(self.folder, self.counters["step"])

    def _load(self, path: Path) -> None:
        """Load a checkpoint."""
        groups, counters = load_checkpoint(path)
        self.counters.update(counters)
        with torch.no_grad():
            self._copy(groups["raw"], self.state)
            if self.averaged is not None:
                self._copy(groups["ema"], self.averaged)
        names = optimiser_names(self.optimiser, self.state)
        restore_optimiser(self.optimiser, names, groups["optimiser"])

    def _note(self, text: str) -> None:
        """Print a note, and keep it for the outcome."""
        self.notes.append(text)
        if not self.quiet:
            print(printable(text), file=sys.stderr)

    # Training

    def run(self) -> Outcome:
        """Train until the last step, until early stopping, or until a signal."""
        try:
            return self._run()
        finally:
            with suppress(UsageError, RuntimeError):  # what ended the run says more
                self._await_save()
            self.callbacks("end")

    def _run(self) -> Outcome:
        reuse_memory()
        self.restore()
        if distributed.broadcast(self.lost) and self.acts:
            self._publish_again()
        distributed.barrier()
        settings, counters = self.settings, self.counters
        started = time.perf_counter() - counters["seconds"]
        saved = time.perf_counter()
        main = distributed.is_main()
        if main:
            self.folder.mkdir(parents=True, exist_ok=True)
        ended, asked, told = self._is_over(), 0, self.callbacks
        steps = count(counters["step"])
        numbers = (i for n in steps for i in batch_numbers(settings, n))
        with (
            errors_of_folder(self.folder),
            fast(self.model, not sharding.is_sharded(self.model)),
            StopSignal() as stop,
            ahead(self.task, settings.workers * (not ended), numbers) as task,
            open(self.folder / METRICS_FILE if main else os.devnull, "a") as metrics,
            Progress("train", self.plan.steps, quiet=self.quiet, done=counters["step"]) as bar,
        ):
            self.left = bar.left
            train_mode(self.model)
            if not ended:
                facts = asdict(settings) if self.facts is None else self.facts
                told("begin", Started(self.folder, facts, counters["step"], self.plan.steps))
                asked = int(distributed.all_max(told.stopped * _LEFT))
            if not ended and counters["step"] == 0:
                self._watch()
            while not ended and not asked:
                n = counters["step"]
                self._plan_again(bar)
                plan = self.plan
                lr = settings.lr * self.schedule(plan.place(n), plan.steps, plan.warmup)
                begun = time.perf_counter()
                before = [buffer.clone() for buffer in self.buffers]
                loss, norm, tokens, finite = one_step(
                    self.model, task, settings, self.optimiser, n, lr
                )
                if not finite:  # a step that is skipped leaves nothing behind
                    for buffer, old in zip(self.buffers, before, strict=True):
                        buffer.copy_(old)
                else:
                    self.statistics.share()
                if main:
                    self.folder.stat()  # nothing is written into a folder that was deleted
                counters["step"] = n + 1
                counters["tokens"] += tokens
                self._after(finite, loss, norm)
                counters["seconds"] = time.perf_counter() - started
                speed = tokens / (time.perf_counter() - begun)
                bar.update(1, loss=loss, tokens=tokens)
                row = {"step": n + 1, "loss": loss, "lr": lr, "grad_norm": norm, "sound": finite}
                write_row(metrics, {**row, "tokens_per_second": round(speed, 1)})
                seen = {"train/loss": loss, "lr": lr, "grad_norm": norm, "tokens_per_second": speed}
                told("after_step", n + 1, seen)
                self._watch()
                self.clock.add("step", time.perf_counter() - begun)
                due = plan.validates(n + 1) or n + 1 == plan.steps
                begun = time.perf_counter()
                if due and self.acts:
                    self._validate(metrics)
                    counters["seconds"] = time.perf_counter() - started
                late = time.perf_counter() - saved > settings.save_every
                ended, late = divmod(int(distributed.broadcast(2 * self._is_over() + late)), 2)
                asked = int(distributed.all_max(stop.asked or told.stopped * _LEFT))
                if self.acts and (due or ended or late or asked):
                    metrics.flush()
                    if main:
                        os.fsync(metrics.fileno())
                    self.save()
                    saved = time.perf_counter()
                if due:
                    self.clock.add("validation", time.perf_counter() - begun)
                counters["seconds"] = time.perf_counter() - started
        self._await_save()
        if told.failure:
            raise UsageError(
                f"{told.failure}; saved at step {counters['step']:,} in {self.folder}, where the "
                "same command goes on; callback_error=continue would leave it out"
            )
        if ended and self.acts:
            self._finish()
        signal = asked if asked not in (0, _LEFT) and not ended else None
        return Outcome(counters["step"], bool(ended), dict(counters["scores"]), signal, self.notes)

    def _watch(self) -> None:
        """Let the film look at the model, if its step has come."""
        step = self.counters["step"]
        if self.film is None or not distributed.is_main():
            return
        if step % self.film.every == 0 or step == self.plan.steps:
            self.model.eval()
            try:
                self.film(step)
            finally:
                train_mode(self.model)

    def _is_over(self) -> bool:
        patience = self.settings.patience
        over = self.counters["step"] >= self.plan.steps
        return over or bool(patience and self.counters["without_gain"] >= patience)

    def _after(self, finite: bool, loss: float, norm: float) -> None:
        """Update the EMA, or count a step that was skipped."""
        counters = self.counters
        if finite:
            counters["skipped_in_a_row"] = 0
            if self.averaged is not None:
                # a lower decay early on: the initial weights should not linger
                decay = min(self.settings.ema, (counters["step"] + 1) / (counters["step"] + 10))
                for name, new in self.state.items():
                    if new.is_floating_point():
                        self.averaged[name].lerp_(new.detach(), 1 - decay)
                    else:
                        self.averaged[name].copy_(new)
            return
        counters["skipped"] += 1
        counters["skipped_in_a_row"] += 1
        if counters["skipped_in_a_row"] >= _MAX_SKIPPED:
            kept = self.checkpoints.exists()
            raise UsageError(
                f"{_MAX_SKIPPED} steps in a row had a loss or gradient that is not finite "
                f"(loss {loss}, gradient {norm}, step {counters['step']}); "
                f"try a lower learning rate than lr={self.settings.lr} or a longer warmup"
                + (f"; the last good weights are in {self.checkpoints}" if kept else "")
            )

    @contextmanager
    def _with(self, weights: dict[str, Tensor] | None) -> Iterator[dict[str, Tensor]]:
        """Give the model other weights inside the context, whole; yields what it has."""
        own = {name: x.detach().clone() for name, x in self.state.items()} if weights else {}
        with torch.no_grad():
            self._copy(weights or {}, self.state)
        try:
            with sharding.gathered(self.model):
                yield learned_state(self.model)
        finally:
            with torch.no_grad():
                self._copy(own, self.state)

    def _copy(self, stored: Mapping[str, Tensor], to: dict[str, Tensor]) -> None:
        """Copy tensors, if there are any, or this process's parts, into those of the weights."""
        for name in stored_names(to, stored) if stored else ():
            own = stored.like(name, to[name]) if isinstance(stored, Stored) else stored[name]
            sharding.local(to[name]).copy_(sharding.local(own))

    def _score(self) -> dict[str, float]:
        self.model.eval()
        try:
            return self.task.evaluate(self.model)
        finally:
            train_mode(self.model)

    def _validate(self, metrics) -> None:
        """Evaluate the weights, or their EMA, and publish them if they are the best so far."""
        with self._with(self.averaged) as weights:
            self._judge(metrics, weights)

    def _judge(self, metrics, weights: dict[str, Tensor]) -> None:
        counters = self.counters
        scores = self._score()
        step = counters["step"]
        valid = {f"valid/{k}": v for k, v in scores.items()}
        write_row(metrics, {"step": step, "seconds": round(counters["seconds"], 3), **valid})
        self.callbacks("after_validation", step, valid)
        if not self.quiet:
            shown = "  ".join(f"{k} {v:.4g}" for k, v in scores.items() if k != "better")
            line = f"step {step:,} of {self.plan.steps:,}  {shown}  {self.left()}"
            print(line.rstrip(), file=sys.stderr, flush=True)
        # a lower loss at the same score is the better model, but does not restart the patience
        gained = counters["best"] is None or scores["better"] > counters["best"]
        counters["without_gain"] = 0 if gained else counters["without_gain"] + 1
        if self._is_better(scores):
            counters["best"], counters["best_step"] = scores["better"], step
            counters["scores"], counters["published"] = scores, [step]
            self.publish(weights, scores)
            if distributed.is_main():
                write_atomically(self.folder / "best", f"step-{step}\n")

    def _is_better(self, scores: dict[str, float]) -> bool:
        """True if scores are the best so far; of equal ones, those that `_tie` puts first are."""
        best = self.counters["best"]
        if best is None or scores["better"] != best:
            return best is None or scores["better"] > best
        return _tie(scores) > _tie(self.counters["scores"])

    def _finish(self) -> None:
        """Publish the average of the last checkpoints if it is better than the best of them."""
        if self.settings.average < 2 or self.counters.get("averaged"):
            return
        steps = [s for s in self._to_average() if self._is_complete(s)]
        if len(steps) < 2:
            return
        with self._with(self._mean(steps)) as mean:
            scores = self._score()
            gained = self._is_better(scores)
            self._note(
                f"average of {len(steps)} checkpoints: {scores['better']:.4g} against "
                f"{self.counters['best']:.4g} of the best; {'taken' if gained else 'not taken'}"
            )
            if gained:
                self.publish(mean, scores)
                self.counters["best"], self.counters["scores"] = scores["better"], scores
                self.counters["published"] = steps
        self.counters["averaged"] = True
        self.save()
        self._await_save()

    def _mean(self, steps: list[int]) -> dict[str, Tensor]:
        """Mean of the weights (or their EMA) of some checkpoints."""
        group = "ema" if self.averaged is not None else "raw"
        every = [load_checkpoint(self.checkpoints / f"step-{s}")[0][group] for s in steps]
        means: dict[str, Tensor] = {}
        for name in stored_names(self.state, every[0]):
            own = self.state[name]
            parts = (one.like(name, own).double() for one in every)
            total = sum(parts, torch.zeros((), dtype=torch.float64))
            means[name] = (total / len(steps)).to(own.dtype)
        return means

    def _is_complete(self, step: int) -> bool:
        return is_complete(self.checkpoints / f"step-{step}", self.by)

    def _publish_again(self) -> None:
        """Publish the best weights so far again, from the checkpoints that hold them."""
        steps = self.counters["published"]
        gone = [s for s in steps if not self._is_complete(s)]
        if gone:
            raise UsageError(
                f"{self.checkpoints / f'step-{gone[0]}'}: damaged or missing, so its weights "
                "cannot be published again; give another out= to begin anew"
            )
        if steps:
            with self._with(self._mean(steps)) as weights:
                self.publish(weights, self.counters["scores"])
            names = " and ".join(f"step-{step}" for step in steps)
            self._note(f"{self.folder}: published again from {self.checkpoints.name}/{names}")
