"""What a training would take: time and memory, measured by a few steps on a sample of the data."""

import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from regard.metrics.mixture import MIXED_ROWS
from regard.modalities.base import plural
from regard.tasks.frame.recipe import parameters
from regard.tasks.prepare import PreparedRun, prepare
from regard.training.step import one_step

MEASURED_STEPS = 3  # besides the first, which counts only where it takes all the time
_SECONDS = 0.8  # after which no further step is begun


@dataclass(frozen=True)
class Forecast:
    """Time and memory of a training of a size on this machine."""

    task: str
    size: str
    parameters: int
    a_second: float
    of: str
    minutes_an_epoch: float
    memory_mb: float
    threads: int
    chosen: str = ""  # by the data, and why

    def __str__(self) -> str:
        digits = 1 if self.a_second < 10 else 0
        return (
            f"forecast for {self.task} size={self.size}: about {self.parameters:,} parameters, "
            f"{self.a_second:,.{digits}f} {self.of}/s on {plural(self.threads, 'thread')}, "
            f"{self.minutes_an_epoch:.1f} minutes an epoch, {self.memory_mb:,.0f} MB of memory"
            + (f"\n  {self.chosen}" if self.chosen else "")
        )


def forecast_training(
    kind: Any, values: Mapping[str, Any], sample: Any, total: int
) -> Forecast | None:
    """Measure some steps of a training on a sample of data of which there are `total` rows.

    `values` are settings of the training that say where the data are and how they are read. Where
    these settle which model is trained, all of them are read instead of the sample.
    """
    of = kind.inputs.counted
    with tempfile.TemporaryDirectory() as folder:
        if total <= 2 * kind.few_rows:  # before a validation part is split off
            rows, given = total, {key: value for key, value in values.items() if value is not None}
        else:
            data, rows = kind.inputs.write_sample(Path(folder), sample, kind.target, values)
            given = {"data": data} | ({"size": values["size"]} if values["size"] else {})
            given |= {"few": False} if kind.few_rows else {}
            known = {field.name for field in fields(kind.Train)}
            given |= {"broken": "skip"} if "broken" in known else {}
            given |= {"linear": False} if "linear" in known and total > MIXED_ROWS else {}
        if not rows:
            return None
        out = Path(folder) / "run"
        out.mkdir()
        run = prepare(kind, {**given, "out": str(out)})
        seconds, read, saved = _measure_steps(run)
        epoch = run.training.epoch()
    count = parameters(run.runner.model)
    read = rows / epoch if of != "tokens" else read
    # weights, gradient, two moments and an average; what a batch leaves for the backward pass
    memory = 4 * 5 * count + saved
    return Forecast(
        kind.name,
        run.settings.size,
        count,
        round(read / seconds, 1),
        of,
        round(epoch * max(1.0, total / rows) * seconds / 60, 3),
        round(memory / 2**20 + 300, 1),
        torch.get_num_threads(),
        str(run.choice or ""),
    )


# Steps


class PlainAdam:
    """Adam's update: torch.optim does the same, but imports the compiler, which takes seconds."""

    def __init__(self, model: nn.Module):
        learning = [p for p in model.parameters() if p.requires_grad]
        self.param_groups: list[dict[str, Any]] = [{"params": learning}]
        self.moments = [(torch.zeros_like(p), torch.zeros_like(p)) for p in learning]

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        (group,) = self.param_groups
        for p, (mean, square) in zip(group["params"], self.moments, strict=True):
            if p.grad is not None:
                mean.lerp_(p.grad, 0.1)
                square.mul_(0.98).addcmul_(p.grad, p.grad, value=0.02)
                p.addcdiv_(mean, square.sqrt().add_(1e-9), value=-group["lr"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradient."""
        for p in self.param_groups[0]["params"]:
            p.grad = None


@contextmanager
def _counting_saved(model: nn.Module, sizes: dict[int, int]) -> Iterator[None]:
    """Note the bytes of each memory that is kept for the backward pass, but for the weights."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return x

    with saved_tensors_hooks(pack, lambda x: x):
        yield


def _measure_steps(run: PreparedRun) -> tuple[float, float, int]:
    """Return the seconds of a step, the tokens that it reads, and the bytes kept for backward.

    Time and tokens are the median of some steps, without the first.
    """
    model, training, saved = run.runner.model, run.training, dict[int, int]()
    model.train()
    optimiser = PlainAdam(model)
    times, reads = [], []
    started = time.perf_counter()
    while len(times) <= MEASURED_STEPS and (not times or time.perf_counter() - started < _SECONDS):
        begun, first = time.perf_counter(), not times
        with _counting_saved(model, saved if first else {}):
            _, _, read, _ = one_step(model, training, run.settings, optimiser, len(times), 1e-4)
        times.append(time.perf_counter() - begun)
        reads.append(read)
    some = slice(min(1, len(times) - 1), None)
    return statistics.median(times[some]), statistics.median(reads[some]), sum(saved.values())
