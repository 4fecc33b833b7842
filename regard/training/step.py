"""A step of the optimiser: its settings, what it trains, and how long it takes."""

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_all_start_methods
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention.kernels import deferred_checks
from regard.data.batches import moved
from regard.data.seeds import mix
from regard.errors import UsageError
from regard.files import delete
from regard.files.weights import learned_state
from regard.native import fast
from regard.native.allocator import reuse_memory
from regard.native.processor import DTYPES, check_device, check_dtype
from regard.settings import setting
from regard.training import distributed, sharding
from regard.training.ahead import ahead
from regard.training.callbacks import LOGGERS, ON_ERROR, check_loggers
from regard.training.checkpoint import optimiser_names, optimiser_tensors, save_checkpoint
from regard.training.optim import OPTIMISERS, SCHEDULES, build_optimiser
from regard.training.plan import MIN_DECODED, StepCost

_MEASURING_SHARE = 0.05  # of the time, spent on timing steps


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
    batches: int | None = setting(
        None, "batches of a step, over all processes; one each unless given", min=1, max=2**20
    )
    ema: float = setting(0.0, "EMA decay; 0 disables it", min=0, max=0.99999)
    average: int = setting(0, "last checkpoints to average; 0 disables it", min=0, max=100)
    valid_every: int | None = setting(None, "steps between validations", min=1, group="length")
    save_every: float = setting(120.0, "seconds between checkpoints", min=0, group="files")
    log: tuple[str, ...] | None = setting(
        ("tensorboard",),
        "where to log, several by commas; none: nowhere",
        choices=LOGGERS,
        group="files",
    )
    async_: bool = setting(
        False,
        "write checkpoints while training goes on, from a copy of the state",
        key="async",
        group="files",
    )
    callback_error: str = setting(
        "continue",
        "what a run does without a callback or logger that has failed: continue, or save and stop",
        choices=ON_ERROR,
        group="files",
    )
    patience: int = setting(
        0, "early stopping: validations without improvement; 0 disables it", min=0, group="length"
    )
    device: str = setting("cpu", "device: cpu, cuda, cuda:1, mps", group="machine")
    dtype: str = setting(
        "float32", "data type; bfloat16 by autocast", choices=DTYPES, group="machine"
    )
    parallel: str = setting(
        "ddp",
        "what processes share: batches (ddp), or weights and optimiser state too (fsdp), or these "
        "with others of their host alone (hsdp)",
        choices=("ddp", "fsdp", "hsdp"),
        group="machine",
    )
    processes: int = setting(1, "data-parallel processes", min=1, max=64, group="machine")
    restarts: int = setting(
        0,
        "times that processes go on from the last checkpoint after one of them has failed",
        min=0,
        max=10_000,
        group="machine",
    )
    timeout: float = setting(
        60.0, "seconds of silence after which a process is named as lost", min=1, group="machine"
    )
    workers: int = setting(
        0,
        "processes that make batches ahead of time; 0: the training does",
        min=0,
        max=64,
        group="machine",
    )
    threads: int | None = setting(None, "CPU threads", min=1, max=1024, group="machine")
    recompute: bool = setting(
        False,
        "keep only the inputs of layers for the backward pass, and compute the rest again",
        group="machine",
    )
    compile: bool = setting(False, "compile the model with torch.compile", group="machine")


def check(settings: LoopSettings) -> None:
    """Refuse devices that cannot be used, and two lengths, before anything is written."""
    if settings.steps is not None and settings.epochs is not None:
        raise UsageError(
            f"steps={settings.steps} and epochs={settings.epochs:g} both say how long; keep one"
        )
    check_loggers(settings.log or ())
    check_dtype(settings.dtype, check_device(settings.device))
    if settings.workers and "fork" not in get_all_start_methods():
        raise UsageError(f"workers={settings.workers}: this system cannot fork; leave it out")


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
        """Batch n, always the same for the same n."""

    @abstractmethod
    def count(self, batch: Any) -> tuple[int, int]:
        """Number of tokens by which the loss is divided, and number read in all."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Summed loss of a batch."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Scores on the validation part; `better` is the one to raise."""

    def epoch(self) -> float:
        """Number of batches in an epoch."""
        raise UsageError("epochs= has no meaning for this task; give steps= or minutes=")


def train_mode(model: nn.Module) -> None:
    """Set training mode; a frozen batch norm keeps and uses its running statistics."""
    model.train()
    for part in sharding.batch_norms(model):
        if part.affine and not part.weight.requires_grad:
            part.eval()


def one_step(
    model: nn.Module, task: Trainable, settings: LoopSettings, optimiser, n: int, lr: float
) -> tuple[float, float, int, bool]:
    """Make one update; return loss per token, gradient norm, tokens read, and if all was finite.

    Args:
        model: model to train
        task: gives batches and losses
        settings: settings of the loop
        optimiser: updates the weights
        n: number of the step
        lr: learning rate of the step
    """
    numbers = batch_numbers(settings, n)
    batches = [(number, moved(task.batch(number), settings.device)) for number in numbers]
    counts = [task.count(batch) for _, batch in batches]
    total, read = distributed.all_reduce(*(sum(column) for column in zip(*counts, strict=True)))
    with deferred_checks() as checks:
        summed = _backward(model, task, settings, batches, total)
    loss, norm, checked = _share_grads(optimiser, settings, summed, checks.total(summed))
    if not math.isfinite(checked):  # what lies behind a mask may have spread
        optimiser.zero_grad(set_to_none=True)
        summed = _backward(model, task, settings, batches, total)
        loss, norm, _ = _share_grads(optimiser, settings, summed, 0.0)
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        for group in optimiser.param_groups:
            group["lr"] = lr * group.get("scale", 1.0)
        optimiser.step()
    optimiser.zero_grad(set_to_none=True)
    return loss, norm, int(read), finite


def batch_numbers(settings: LoopSettings, n: int) -> range:
    """Numbers of the batches that this process reads in step n."""
    rank, size = distributed.rank(), distributed.world_size()
    each = settings.batches or size
    return range(n * each + rank, (n + 1) * each, size)


def _on_host(*numbers: float | Tensor) -> list[float]:
    """Numbers as the host knows them; those on an accelerator are read all at once."""
    tensors = [x for x in numbers if isinstance(x, Tensor)]
    read = iter(torch.stack([x.float() for x in tensors]).tolist())
    return [next(read) if isinstance(x, Tensor) else x for x in numbers]


def _share_grads(
    optimiser: torch.optim.Optimizer, settings: LoopSettings, loss: Tensor, checked: float | Tensor
) -> tuple[float, float, float]:
    """Add gradients and losses of all processes up; return loss, norm before clipping, and checks.

    A parameter that some processes have no gradient of counts as zero there; one that none has a
    gradient of keeps none, as in a single process.
    """
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    if distributed.world_size() == 1:
        parameters = [p for p in parameters if p.grad is not None]
    has = [p.grad is not None for p in parameters]
    grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    grads, norm = sharding.sum_grads(grads, settings.clip or math.inf)
    told, norm, checked = _on_host(loss, norm, checked)
    told, checked, *has = distributed.all_reduce(told, checked, *has)
    for parameter, grad, some in zip(parameters, grads, has, strict=True):
        parameter.grad = grad if some else None
    return told, norm, checked


def _backward(
    model: nn.Module,
    task: Trainable,
    settings: LoopSettings,
    batches: list[tuple[int, Any]],
    total: float,
) -> Tensor:
    """Add the gradients of numbered batches up; return their summed loss divided by a total.

    What is random depends on the number of a batch alone, not on which process reads it.
    """
    rng = torch.default_generator if settings.device == "cpu" else torch  # torch: all devices
    loss, kind = torch.zeros((), device=settings.device), DTYPES[settings.dtype]
    for number, batch in batches:
        last = number == batches[-1][0]
        rng.manual_seed(mix(settings.seed, "step", number, 0))
        with torch.autocast(settings.device.split(":")[0], kind, enabled=kind is not torch.float32):
            part = sharding.loss_of(model, task.loss, batch, last) / total
        part.backward()
        loss += part.detach()
    return loss


def measure(
    model: nn.Module, task: Trainable, settings: LoopSettings, folder: Path, seconds: float
) -> StepCost:
    """Time some steps, a checkpoint and a validation, for a run of so many seconds.

    Weights, optimiser and random numbers of the run are as if this had not happened. Where a
    validation decodes many rows, it is timed on a share of them.

    Args:
        model: model to train
        task: gives batches and losses
        settings: settings of the loop
        folder: where the checkpoint is written
        seconds: time budget of the run
    """
    reuse_memory()
    train_mode(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimiser = build_optimiser(model, name=settings.optimiser, lr=0.0)
    times = []
    started = time.perf_counter()
    number, limit = 0, min(8.0, _MEASURING_SHARE * seconds)
    numbers = (i for n in count() for i in batch_numbers(settings, 7919 * n + 13))
    with fast(model, not sharding.is_sharded(model)), ahead(task, settings.workers, numbers) as fed:
        while number < 5 or distributed.broadcast(
            time.perf_counter() - started < limit and number < 60
        ):
            begun = time.perf_counter()
            one_step(model, fed, settings, optimiser, 7919 * number + 13, 0.0)
            times.append(time.perf_counter() - begun)
            number += 1
    step = sum(times[2:]) / len(times[2:])
    model.load_state_dict(before)
    for parameter in model.parameters():
        parameter.grad = None
    begun, named, validation = time.perf_counter(), learned_state(model), 0.0
    kept = optimiser_tensors(optimiser, optimiser_names(optimiser, named))
    if distributed.is_main() or sharding.is_sharded(model):
        own, firsts = sharding.to_save({"raw": named, "optimiser": kept})
        place, by = folder / ".measured.tmp", sharding.group_of(model)
        save_checkpoint(place / "checkpoints", 0, own, {}, firsts, by)
        if distributed.is_main():
            delete(place)
    save = time.perf_counter() - begun
    with sharding.gathered(model):
        if distributed.is_main():
            validation = _time_validation(model, task)
    step, save, validation = (distributed.broadcast(x) for x in (step, save, validation))
    return StepCost(step, save, validation, task.decoded)


def _time_validation(model: nn.Module, task: Trainable) -> float:
    """Seconds of a validation on the whole part."""
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
