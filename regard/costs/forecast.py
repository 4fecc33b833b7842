"""What a training on accelerators takes: time, memory and traffic, forecast without any of them."""

import copy
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.costs.accelerators import (
    ACCELERATORS,
    SIZES,
    Load,
    MeasuredTraining,
    Setup,
    Work,
    fitted,
    measurements,
    seconds,
    traffic,
)
from regard.costs.count import Counted, count, pretend, tensors
from regard.errors import UsageError
from regard.metrics.results import Named
from regard.settings import setting
from regard.training.sharding import layers_of, local, shard

FLOAT = 4  # bytes of a number


@dataclass(frozen=True)
class TrainingSettings:
    """A training on accelerators, to forecast."""

    kind: str | None = setting(
        None, "forecast a training on accelerators of this kind", choices=ACCELERATORS
    )
    devices: int = setting(1, "accelerators", min=1, max=2**16)
    per_host: int = setting(8, "accelerators of a host", min=1, max=1024)
    parallel: str = setting(
        "ddp",
        "what accelerators share: batches (ddp), weights too (fsdp), or those within a host (hsdp)",
        choices=("ddp", "fsdp", "hsdp"),
    )
    batches: int | None = setting(
        None, "batches of a step, over all accelerators; one each unless given", min=1, max=2**20
    )
    dtype: str | None = setting(
        None,
        "data type; bfloat16 unless given, where the accelerator has it",
        choices=("float32", "bfloat16"),
    )
    recompute: bool = setting(False, "compute layers again in the backward pass, to save memory")
    ema: float = setting(0.0, "EMA decay; 0 disables it", min=0, max=0.99999)
    steps: int | None = setting(None, "steps of the training", min=1, max=2**40)
    tokens: float | None = setting(
        None, "or its tokens; of pairs, those of one side", min=1, max=1e18
    )

    def setup(self) -> Setup | None:
        """Devices and how they share a training, if one is asked for."""
        if self.kind is None:
            for each in fields(TrainingSettings):  # they would say nothing
                if getattr(self, each.name) != each.default:
                    raise UsageError(
                        f"{each.name}={getattr(self, each.name)} is of a training on accelerators; "
                        f"add kind=, one of {', '.join(ACCELERATORS)}"
                    )
            return None
        if self.steps and self.tokens:
            raise UsageError(
                f"steps={self.steps} and tokens={self.tokens:g} both say how long; keep one"
            )
        batches, kind = self.batches or self.devices, ACCELERATORS[self.kind]
        if batches % self.devices:
            fits = -(-batches // self.devices) * self.devices
            raise UsageError(
                f"batches={batches} is no multiple of devices={self.devices}; choose {fits}"
            )
        if (
            self.parallel == "hsdp"
            and self.devices > self.per_host
            and self.devices % self.per_host
        ):
            raise UsageError(
                f"parallel=hsdp needs as many devices on one host as on another, and "
                f"devices={self.devices} is no multiple of per_host={self.per_host}"
            )
        dtype = self.dtype or ("bfloat16" if "bfloat16" in kind.rates else "float32")
        if dtype not in kind.rates:
            raise UsageError(f"dtype={dtype}: {self.kind} computes in {', '.join(kind.rates)}")
        share = (dtype, self.parallel, batches // self.devices, float(self.recompute))
        return Setup(self.kind, self.devices, self.per_host, *share)


@dataclass(frozen=True)
class TrainingForecast(Named):
    """What a training would take on accelerators, as public measurements have it."""

    setup: Setup
    step_seconds: float
    spent: dict[str, float]  # seconds of a step by what takes them; a part of them is at once
    memory: dict[str, int]  # bytes of a device by what they hold
    capacity: int
    from_host: int  # bytes that a device receives in a step
    from_network: int
    steps: int | None
    step_tokens: int | None
    nearest: str  # what was measured that is most like it
    nearest_ratio: float  # and its forecast over the truth

    @property
    def seconds(self) -> float | None:
        """Return the time of all steps."""
        return self.steps and self.steps * self.step_seconds

    @property
    def bound(self) -> str:
        """Return what a step waits for most, or that there is no room for it."""
        if sum(self.memory.values()) > self.capacity:
            return "does not fit"
        return max(self.spent, key=lambda what: self.spent[what])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        more = {"setup": self.setup._asdict(), "seconds": self.seconds, "bound": self.bound}
        return asdict(self) | more | {"memory_bytes": sum(self.memory.values())}


def forecast(
    model: nn.Module, inputs: tuple[Tensor, ...], setup: Setup, options: TrainingSettings
) -> TrainingForecast:
    """TrainingForecast a training of a model on the meta device.

    Args:
        model: the model.
        inputs: a batch of a device.
        setup: the devices.
        options: how long it is, and what else takes memory.
    """
    batch, again = loads(model, inputs)
    total = held = whole = sum(p.numel() for p in model.parameters())
    size, spread = SIZES[setup.dtype], min(setup.devices, setup.per_host)
    # weights cast to a smaller type, and a buffer in which gradients are added up
    copies = (size < FLOAT) * size * total + (setup.devices > 1) * FLOAT * total
    if setup.parallel != "ddp":
        spread = spread if setup.parallel == "hsdp" else setup.devices
        held, whole, gathered = shards(model, spread)
        copies = size * gathered + FLOAT * whole
    work = Work(batch, again, total, held, whole)
    activations, loss = kept(model, inputs, bool(setup.recompute))
    memory = {"weights": FLOAT * held, "gradients": FLOAT * held, "moments": 2 * FLOAT * held}
    memory |= {"EMA": FLOAT * held * bool(options.ema), "activations": activations * size // FLOAT}
    memory |= {"loss": loss, "copies": copies}
    spent = seconds(work, setup, fitted())
    step, (near, far) = spent.pop("step"), traffic(work, setup)
    tokens = setup.devices * setup.accumulate * inputs[0].numel()
    if inputs[0].is_floating_point():
        if options.tokens:
            raise UsageError(f"tokens={options.tokens:g}: only texts have tokens; give steps=")
        tokens = None

    def unlike(row: MeasuredTraining) -> float:
        pairs = [(row.work.parameters, total), (row.setup.devices, setup.devices)]
        pairs.append((row.length, inputs[0].shape[-1]))
        return sum(abs(math.log(a / b)) for a, b in pairs) + 100 * (row.setup.kind != setup.kind)

    steps = math.ceil(options.tokens / tokens) if options.tokens and tokens else options.steps
    like = min(measurements(), key=unlike)
    told = seconds(like.work, like.setup, fitted())["step"] / like.step_seconds
    capacity = int(ACCELERATORS[setup.kind].memory)
    return TrainingForecast(
        setup,
        step,
        spent,
        memory,
        capacity,
        int(near),
        int(far),
        steps,
        tokens,
        like.title,
        told,
    )


def _count(model: nn.Module, run: Callable[[], Tensor], backward: bool) -> Counted:
    for parameter in model.parameters():
        parameter.grad = None
    with pretend(), torch.enable_grad():
        return count(run, model=model.train(), backward=backward)


def _step(model: nn.Module, inputs: tuple[Tensor, ...]) -> Counted:
    """Count a step with a loss over what the model predicts."""
    return _count(model, lambda: next(tensors(model(*inputs))).float().log_softmax(-1), True)


def _load(counted: Counted) -> Load:
    products = counted.products
    moved = sum(moved for _, moved in counted.calls)
    linear = counted.multiply_adds - products["attention"]
    return Load(linear, products["attention"], moved, len(counted.calls))


@contextmanager
def _instead(layers: list[nn.Module], wrapped: Callable[[nn.Module], Callable]) -> Iterator[None]:
    """Have layers run another function than their own inside the context."""
    for layer in layers:
        layer.forward = wrapped(layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _again(layer: nn.Module) -> Callable:
    # a backward pass runs outside of the function mode that is on
    more = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), pretend())}
    return partial(checkpoint, layer.forward, **more)


def loads(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Load, Load]:
    """Count what a batch asks of a device, and what recomputing all layers adds to it."""
    plain, layers = _load(_step(model, inputs)), layers_of(model)
    with _instead(layers, _again):
        step = _load(_step(model, inputs))
    return plain, Load(*(a - b for a, b in zip(step, plain, strict=True)))


def kept(model: nn.Module, inputs: tuple[Tensor, ...], recompute: bool) -> tuple[int, int]:
    """Count the bytes that a backward pass needs of a model, and of a loss over its predictions.

    If layers are recomputed these are what they read, and all that one of them needs at a time.
    """
    layers, most = layers_of(model) if recompute else [], 0

    def run() -> Tensor:
        return next(tensors(model(*inputs)))

    def alone(layer: nn.Module) -> Callable:
        forward = layer.forward

        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal most
            out: list[Any] = []
            most = max(most, count(lambda: out.append(forward(*args, **kwargs)), model=layer).kept)
            return out[0]

        return counted

    with _instead(layers, alone):
        _count(model, run, False)
    with _instead(layers, _again):
        alone_kept = _count(model, run, False).kept
        judged = _count(model, lambda: run().float().log_softmax(-1), False).kept
    return alone_kept + most, judged - alone_kept


def shards(model: nn.Module, devices: int) -> tuple[int, int, int]:
    """Shard a model as a training does: weights that a device holds, those that all hold, and
    how many are gathered at once.

    The processes are PyTorch's fake ones, so that sizes are real and nothing is sent.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise UsageError("a forecast shards in processes of its own; ask for it outside of a run")
    model = copy.deepcopy(model)
    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    total = sum(p.numel() for p in model.parameters())
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=devices)
    try:
        with patch.dict(os.environ, RANK="0", WORLD_SIZE=str(devices)):
            shard(model, "cpu")
        parts = [(p, local(p)) for p in model.parameters()]
        whole = sum(p.numel() for p, part in parts if part is p)
        held = sum(part.numel() for _, part in parts)
    finally:
        dist.destroy_process_group()
    # weights and gradients of the root; of layers, those of one, and the weights of the next
    root = total - whole - sum(sizes)
    return held, whole, 2 * root + 3 * max(sizes, default=0)
