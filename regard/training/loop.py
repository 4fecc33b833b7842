"""The training loop. It knows no task: a Trainable brings batches, their loss and an evaluation."""

import fcntl
import json
import math
import os
import signal
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from regard.data.seeds import mix
from regard.errors import UsageError, lookup
from regard.files import refuse, sweep, write_atomically
from regard.files.weights import buffers_of, copy_stored, learned_state, stored_names
from regard.native import fast
from regard.native.allocator import reuse_memory
from regard.native.processor import DTYPES, check_dtype
from regard.settings import setting
from regard.training import checkpoint as keep
from regard.training import distributed
from regard.training.optim import OPTIMISERS, SCHEDULES, build_optimiser
from regard.training.plan import MIN_DECODED, Cost, Plan, plan_again
from regard.training.progress import Progress

MAX_SKIPPED = 10  # steps in a row whose loss or gradient is not finite
MEASURING_SHARE = 0.05  # of the time, spent on timing steps


@dataclass(frozen=True)
class LoopSettings:
    """Hyperparameters of the training loop, whatever is trained."""

    GROUP = "optimiser"

    steps: int | None = setting(None, "optimiser steps", min=1, group="length")
    epochs: float | None = setting(
        None, "passes over the training data", above=0, max=1e6, group="length"
    )
    minutes: float | None = setting(
        None, "time budget, validation included", min=0.01, group="length"
    )
    seed: int = setting(1, "random seed", min=0, max=2**62)
    optimiser: str = setting("adamw", "optimiser", choices=OPTIMISERS)
    lr: float = setting(1e-3, "peak learning rate", min=0, max=100)
    warmup: int | None = setting(None, "warm-up steps; a tenth of all unless given", min=0)
    schedule: str = setting("inverse_sqrt", "learning-rate schedule", choices=SCHEDULES)
    weight_decay: float = setting(0.01, "weight decay", min=0, max=10)
    layer_decay: float = setting(1.0, "layer-wise learning-rate decay", above=0, max=1)
    beta2: float = setting(0.98, "AdamW beta2", min=0, max=0.99999)
    clip: float = setting(1.0, "gradient clipping norm; 0 disables it", min=0)
    accumulate: int = setting(1, "gradient accumulation steps", min=1)
    ema: float = setting(0.0, "EMA decay; 0 disables it", min=0, max=0.99999)
    average: int = setting(0, "last checkpoints to average; 0 disables it", min=0, max=100)
    valid_every: int | None = setting(None, "steps between validations", min=1, group="length")
    save_every: float = setting(120.0, "seconds between checkpoints", min=0, group="files")
    patience: int = setting(
        0, "early stopping: validations without improvement; 0 disables it", min=0, group="length"
    )
    device: str = setting("cpu", "device: cpu, cuda, cuda:1, mps", group="machine")
    dtype: str = setting(
        "float32", "data type; bfloat16 by autocast", choices=DTYPES, group="machine"
    )
    processes: int = setting(1, "data-parallel processes", min=1, max=64, group="machine")
    threads: int | None = setting(None, "CPU threads", min=1, max=1024, group="machine")
    compile: bool = setting(False, "compile the model with torch.compile", group="machine")


def check(settings: LoopSettings) -> None:
    """Refuse devices that cannot be used, and two lengths, before anything is written."""
    if settings.steps is not None and settings.epochs is not None:
        raise UsageError(
            f"steps={settings.steps} and epochs={settings.epochs:g} both say how long; keep one"
        )
    try:
        device = torch.empty(1, device=settings.device).device.type
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:100]
        raise UsageError(f"device='{settings.device}' cannot be used ({reason}); try cpu") from None
    check_dtype(settings.dtype, device)


class Trainable(ABC):
    """What the loop trains: batches, their loss, and an evaluation on the validation part."""

    # learning-rate multipliers by the beginning of a parameter's name
    lr_scales: Mapping[str, float] = MappingProxyType({})
    # rows that a validation decodes, if fewer would do; 0: it needs all
    decoded: int = 0
    # the share of them that it does decode, set by the plan of a short run
    valid_share: float = 1.0

    @abstractmethod
    def batch(self, n: int) -> Any:
        """Return batch n, always the same for the same n."""

    @abstractmethod
    def count(self, batch: Any) -> tuple[int, int]:
        """Return by how many tokens the loss is divided, and how many were read in all."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the summed loss of a batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the scores on the validation part; `better` is the one to raise."""

    def epoch(self) -> float:
        """Return the number of batches in an epoch."""
        raise UsageError("epochs= has no meaning for this task; give steps= or minutes=")


@dataclass
class Outcome:
    """How a run ended."""

    step: int
    finished: bool
    scores: dict[str, float] = field(default_factory=dict)
    signal: int | None = None  # that stopped it
    notes: list[str] = field(default_factory=list)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise refuse(error, folder) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"{folder}: another training is writing here; choose another out="
            ) from None
        sweep(folder)
        try:
            yield
        except BaseException:
            _remove_if_empty(folder, made)
            raise


def _remove_if_empty(folder: Path, made: Sequence[Path]) -> None:
    """Remove the folders that a failed start has made, if nothing was written there."""
    with suppress(OSError):
        if folder not in made or [path.name for path in folder.iterdir()] != [".lock"]:
            return
        (folder / ".lock").unlink()
        for place in made:
            place.rmdir()


class StopSignal:
    """Catches Ctrl-C and SIGTERM, so that the step can be finished and saved."""

    def __init__(self):
        self.asked = 0  # the number of the signal that was caught

    def __enter__(self) -> "StopSignal":
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread, which alone gets signals
                break
        return self

    def _ask(self, number, frame) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = number

    def __exit__(self, *error) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def measure(
    model: nn.Module, task: Trainable, settings: LoopSettings, folder: Path, seconds: float
) -> Cost:
    """Time some steps, a checkpoint and a validation, for a run of so many seconds.

    Weights, optimiser and random numbers of the run are as if this had not happened. Where a
    validation decodes many rows, it is timed on a share of them.
    """
    reuse_memory()
    train_mode(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimiser = build_optimiser(model, name=settings.optimiser, lr=0.0)
    times = []
    started = time.perf_counter()
    number, limit = 0, min(8.0, MEASURING_SHARE * seconds)
    with fast(model):
        while number < 5 or distributed.broadcast(
            time.perf_counter() - started < limit and number < 60
        ):
            begun = time.perf_counter()
            one_step(model, task, settings, optimiser, 7919 * number + 13, 0.0)
            times.append(time.perf_counter() - begun)
            number += 1
    step = sum(times[2:]) / len(times[2:])
    model.load_state_dict(before)
    for parameter in model.parameters():
        parameter.grad = None
    save = validation = 0.0
    if distributed.is_main():
        begun = time.perf_counter()
        named = learned_state(model)
        kept = keep.optimiser_tensors(optimiser, keep.optimiser_names(optimiser, named))
        with tempfile.TemporaryDirectory(prefix=".", suffix=".tmp", dir=folder) as place:
            home = Path(place) / "checkpoints"
            keep.save_checkpoint(home, 0, {"raw": named, "optimiser": kept}, {})
        save = time.perf_counter() - begun
        validation = _time_validation(model, task)
    step, save, validation = (distributed.broadcast(x) for x in (step, save, validation))
    return Cost(step, save, validation, task.decoded)


def _time_validation(model: nn.Module, task: Trainable) -> float:
    """Return the seconds of a validation on the whole part."""
    begun, share = time.perf_counter(), 1.0
    if task.decoded > MIN_DECODED:
        task.valid_share = share = MIN_DECODED / task.decoded
    model.eval()
    try:
        task.evaluate(model)
    finally:
        train_mode(model)
        task.valid_share = 1.0
    return (time.perf_counter() - begun) / share


def train_mode(model: nn.Module) -> None:
    """Set training mode; a frozen batch norm keeps and uses its running statistics."""
    model.train()
    for part in model.modules():
        batch_norm = isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d)
        if batch_norm and part.affine and not part.weight.requires_grad:
            part.eval()


def one_step(
    model: nn.Module, task: Trainable, settings: LoopSettings, optimiser, n: int, lr: float
) -> tuple[float, float, int, bool]:
    """Make one update; return loss per token, gradient norm, tokens read, and if all was finite."""
    rank, size, parts = distributed.rank(), distributed.world_size(), settings.accumulate
    rng = torch.default_generator if settings.device == "cpu" else torch  # torch: all devices
    rng.manual_seed(mix(settings.seed, "step", n, rank))
    batches = [task.batch((n * parts + i) * size + rank) for i in range(parts)]
    counts = [task.count(batch) for batch in batches]
    total, read = distributed.all_reduce(*(sum(column) for column in zip(*counts, strict=True)))
    loss, kind = torch.zeros(()), DTYPES[settings.dtype]
    for batch in batches:
        with torch.autocast(settings.device.split(":")[0], kind, enabled=kind is not torch.float32):
            part = task.loss(model, batch) / total
        part.backward()
        loss += part.detach().cpu()
    trained = (p for group in optimiser.param_groups for p in group["params"])
    parameters = [p for p in trained if p.grad is not None]
    grads = [p.grad for p in parameters if p.grad is not None]
    grads, norm = distributed.all_reduce_grads(grads, settings.clip or math.inf)
    for parameter, grad in zip(parameters, grads, strict=True):
        parameter.grad = grad
    (loss,) = distributed.all_reduce(float(loss))
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        for group in optimiser.param_groups:
            group["lr"] = lr * group.get("scale", 1.0)
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return loss, norm, int(read), finite


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


class Film(Protocol):
    """What looks on while a model learns, every so many steps."""

    every: int

    def settle(self, steps: int) -> None:
        """Choose `every` for a run of so many steps."""
        ...

    def __call__(self, step: int) -> None:
        """Look at the model after a step."""
        ...


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
        film: Film | None = None,
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
        """
        self.lost, self.film = lost, film
        self.model, self.task, self.settings = model, task, settings
        self.folder, self.plans, self.record = Path(folder), list(plans), record
        self.publish, self.quiet = publish, quiet
        self.clock = Stopwatch()
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
        plan = plan_again(self.settings, last, step, spent, Cost(each, validation=validation))
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
        """Return the folder of the checkpoints."""
        return self.folder / "checkpoints"

    def save(self) -> None:
        """Write a checkpoint of everything that the next step depends on.

        Before the first validation its weights are published, so that there is a model to use.
        """
        step = self.counters["step"]
        unscored = self.counters["best"] is None
        if unscored:
            self.counters["published"] = [step]
        names = keep.optimiser_names(self.optimiser, self.state)
        groups = {
            "raw": dict(self.state),
            "optimiser": keep.optimiser_tensors(self.optimiser, names),
        }
        if self.averaged is not None:
            groups["ema"] = self.averaged
        keep.save_checkpoint(self.checkpoints, step, groups, self.counters)
        # those ahead of the present step are damaged
        recent = [path.name for at, path in keep.checkpoints(self.checkpoints) if at <= step][:2]
        averaged = {f"step-{s}" for s in self._to_average()}
        best = self.counters["best_step"]
        keep.prune(self.checkpoints, {*recent, *averaged, f"step-{best}"})
        if unscored:
            self.publish(self.averaged or dict(self.state), {})

    def _to_average(self) -> list[int]:
        """Return the steps of the last validations, whose weights may be averaged at the end."""
        steps, most = range(self.counters["step"], 0, -1), self.settings.average
        return sorted(islice((step for step in steps if self._validates(step)), most))

    def _validates(self, step: int) -> bool:
        """True if the weights are validated after so many steps, the last ones apart."""
        return next(plan for plan in reversed(self.plans) if plan.step < step).validates(step)

    def restore(self) -> None:
        """Load the newest complete checkpoint, if there is any."""
        newest, damaged = keep.newest_complete(self.checkpoints)
        for path in damaged:
            self._note(f"{path} is damaged and was passed over")
        if newest is None:
            self._truncate_metrics(0)
            return
        groups, counters = keep.load_checkpoint(newest)
        self.counters.update(counters)
        with torch.no_grad():
            copy_stored(groups["raw"], self.state)
            if self.averaged is not None:
                copy_stored(groups["ema"], self.averaged)
        names = keep.optimiser_names(self.optimiser, self.state)
        keep.restore_optimiser(self.optimiser, names, groups["optimiser"])
        self._truncate_metrics(self.counters["step"])

    def _note(self, text: str) -> None:
        """Print a note, and keep it for the outcome."""
        self.notes.append(text)
        if not self.quiet:
            print(text, file=sys.stderr)

    def _truncate_metrics(self, step: int) -> None:
        """Drop the lines of metrics.jsonl that a killed run wrote after its last checkpoint."""
        path = self.folder / "metrics.jsonl"
        if not path.exists() or not distributed.is_main():
            return
        kept = []
        for line in path.read_text(errors="replace").splitlines():
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (ValueError, KeyError, TypeError):
                continue
        write_atomically(path, "".join(line + "\n" for line in kept))

    # Training

    def run(self) -> Outcome:
        """Train until the last step, until early stopping, or until a signal."""
        reuse_memory()
        self.restore()
        if self.lost and distributed.is_main():
            self._publish_again()
        distributed.barrier()
        settings, counters = self.settings, self.counters
        started = time.perf_counter() - counters["seconds"]
        saved = time.perf_counter()
        main = distributed.is_main()
        ended, asked = self._is_over(), 0
        with (
            _writing(self.folder),
            fast(self.model),
            _tensorboard(None if ended or not main else self.folder, counters["step"]) as board,
            StopSignal() as stop,
            open(self.folder / "metrics.jsonl" if main else os.devnull, "a") as metrics,
            Progress("train", self.plan.steps, quiet=self.quiet, done=counters["step"]) as bar,
        ):
            self.left = bar.left
            train_mode(self.model)
            if not ended and counters["step"] == 0:
                self._watch()
            while not ended:
                n = counters["step"]
                self._plan_again(bar)
                plan = self.plan
                lr = settings.lr * self.schedule(plan.place(n), plan.steps, plan.warmup)
                begun = time.perf_counter()
                before = [buffer.clone() for buffer in self.buffers]
                loss, norm, tokens, finite = one_step(
                    self.model, self.task, settings, self.optimiser, n, lr
                )
                if not finite:  # a step that is skipped leaves nothing behind
                    for buffer, old in zip(self.buffers, before, strict=True):
                        buffer.copy_(old)
                if main:
                    self.folder.stat()  # nothing is written into a folder that was deleted
                counters["step"] = n + 1
                counters["tokens"] += tokens
                self._after(finite, loss, norm)
                counters["seconds"] = time.perf_counter() - started
                speed = tokens / (time.perf_counter() - begun)
                bar.update(1, loss=loss, tokens=tokens)
                row = {"step": n + 1, "loss": loss, "lr": lr, "grad_norm": norm, "sound": finite}
                _write(metrics, {**row, "tokens_per_second": round(speed, 1)})
                for name in ("loss", "lr", "grad_norm"):
                    board(f"train/{name}" if name == "loss" else name, row[name], n + 1)
                board("tokens_per_second", speed, n + 1)
                self._watch()
                self.clock.add("step", time.perf_counter() - begun)
                due = plan.validates(n + 1) or n + 1 == plan.steps
                begun = time.perf_counter()
                if due and main:
                    self._validate(metrics, board)
                    counters["seconds"] = time.perf_counter() - started
                ended = bool(distributed.broadcast(self._is_over()))
                asked = int(distributed.all_max(stop.asked))
                late = time.perf_counter() - saved > settings.save_every
                if main and (due or ended or late or asked):
                    metrics.flush()
                    os.fsync(metrics.fileno())
                    self.save()
                    saved = time.perf_counter()
                if due:
                    self.clock.add("validation", time.perf_counter() - begun)
                counters["seconds"] = time.perf_counter() - started
                if asked and not ended:
                    break
        if ended and main:
            self._finish()
        signal = asked if asked and not ended else None
        return Outcome(counters["step"], ended, dict(counters["scores"]), signal, self.notes)

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
        if counters["skipped_in_a_row"] >= MAX_SKIPPED:
            kept = self.checkpoints.exists()
            raise UsageError(
                f"{MAX_SKIPPED} steps in a row had a loss or gradient that is not finite "
                f"(loss {loss}, gradient {norm}, step {counters['step']}); "
                f"try a lower learning rate than lr={self.settings.lr} or a longer warmup"
                + (f"; the last good weights are in {self.checkpoints}" if kept else "")
            )

    @contextmanager
    def _with(self, weights: dict[str, Tensor] | None) -> Iterator[None]:
        """Give the model other weights inside the context."""
        if weights is None:
            yield
            return
        own = {name: x.detach().clone() for name, x in self.state.items()}
        with torch.no_grad():
            copy_stored(weights, self.state)
        try:
            yield
        finally:
            with torch.no_grad():
                copy_stored(own, self.state)

    def _score(self, weights: dict[str, Tensor] | None) -> dict[str, float]:
        with self._with(weights):
            self.model.eval()
            try:
                return self.task.evaluate(self.model)
            finally:
                train_mode(self.model)

    def _validate(self, metrics, board) -> None:
        """Evaluate the weights, or their EMA, and publish them if they are the best so far."""
        counters = self.counters
        scores = self._score(self.averaged)
        step = counters["step"]
        valid = {f"valid/{k}": v for k, v in scores.items()}
        _write(metrics, {"step": step, "seconds": round(counters["seconds"], 3), **valid})
        for name, value in scores.items():
            board(f"valid/{name}", value, step)
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
            self.publish(self.averaged or dict(self.state), scores)
            write_atomically(self.folder / "best", f"step-{step}\n")

    def _is_better(self, scores: dict[str, float]) -> bool:
        """Tell whether scores are the best so far; of equal ones, those with the lower loss are."""
        best = self.counters["best"]
        if best is None or scores["better"] != best:
            return best is None or scores["better"] > best
        before = self.counters["scores"].get("loss", -math.inf)
        return scores.get("loss", math.inf) < before

    def _finish(self) -> None:
        """Publish the average of the last checkpoints if it is better than the best of them."""
        if self.settings.average < 2 or self.counters.get("averaged"):
            return
        steps = [s for s in self._to_average() if keep.is_complete(self.checkpoints / f"step-{s}")]
        if len(steps) < 2:
            return
        mean = self._mean(steps)
        scores = self._score(mean)
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

    def _mean(self, steps: list[int]) -> dict[str, Tensor]:
        """Return the mean of the weights (or their EMA) of some checkpoints."""
        group = "ema" if self.averaged is not None else "raw"
        sums: dict[str, Tensor] = {}
        for step in steps:
            tensors = keep.load_checkpoint(self.checkpoints / f"step-{step}")[0][group]
            for name in stored_names(self.state, tensors):
                sums[name] = sums.get(name, 0.0) + tensors[name].double()
        return {
            name: (total / len(steps)).to(self.state[name].dtype) for name, total in sums.items()
        }

    def _publish_again(self) -> None:
        """Publish the best weights so far again, from the checkpoints that hold them."""
        steps = self.counters["published"]
        gone = [s for s in steps if not keep.is_complete(self.checkpoints / f"step-{s}")]
        if gone:
            raise UsageError(
                f"{self.checkpoints / f'step-{gone[0]}'}: damaged or missing, so its weights "
                "cannot be published again; give another out= to begin anew"
            )
        if steps:
            self.publish(self._mean(steps), self.counters["scores"])
            names = " and ".join(f"step-{step}" for step in steps)
            self._note(f"{self.folder}: published again from {self.checkpoints.name}/{names}")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Tell in one line that a run's folder cannot be written to, or is gone."""
    try:
        yield
    except OSError as error:
        if folder.is_dir():
            raise refuse(error, folder) from error
        raise UsageError(
            f"{folder}: was deleted while training; give the command again to begin anew"
        ) from error


def _write(file, row: dict[str, Any]) -> None:
    """Add a line to metrics.jsonl; a number that is not finite becomes null."""
    values = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
    file.write(json.dumps(values) + "\n")


@contextmanager
def _tensorboard(folder: Path | None, step: int) -> Iterator[Callable[[str, float, int], None]]:
    """Yield a function that writes a scalar to TensorBoard, resuming after a step."""
    if folder is None:
        yield lambda name, value, at: None
        return
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1, flush_secs=30) as writer:
        yield lambda name, value, at: writer.add_scalar(name, value, at)
