"""What a training on accelerators takes: time, memory and traffic, without any of them at hand."""

import copy
import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.costs.accelerators import Load, Setup, Work
from regard.costs.count import Counted, count, pretend, storage, tensors
from regard.errors import UsageError
from regard.training.sharding import layers_of, local, shard


def _step(model: nn.Module, inputs: tuple[Tensor, ...], backward: bool = True) -> Counted:
    """Count a step with a loss over what the model predicts."""

    def run() -> Tensor:
        return next(tensors(model(*inputs))).float().log_softmax(-1)

    for parameter in model.parameters():
        parameter.grad = None
    with pretend(), torch.enable_grad():
        return count(run, model=model.train(), backward=backward)


def _load(counted: Counted) -> Load:
    products = counted.products
    elementwise = sum(moved for made, moved in counted.calls if not made)
    linear = counted.multiply_adds - products["attention"]
    return Load(linear, products["attention"], elementwise, len(counted.calls))


def loads(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Load, Load, int]:
    """Count what a batch asks of a device, what recomputing all layers adds to it, and the bytes
    that a backward pass then needs: what layers read, and all of the largest of them.
    """
    plain, layers = _load(_step(model, inputs)), layers_of(model)
    inside: list[Counted] = []
    read: dict[int, int] = {}

    def counting(layer: nn.Module, forward: Callable) -> Callable:
        def run(*args: Any, **kwargs: Any) -> Any:
            out: list[Any] = []
            inside.append(count(lambda: out.append(forward(*args, **kwargs)), model=layer))
            given = tensors([*args, *kwargs.values()])
            read.update({storage(x): x.untyped_storage().nbytes() for x in given})
            return out[0]

        return run

    for layer in layers:
        layer.forward = counting(layer, layer.forward)
    try:
        outside = _step(model, inputs, backward=False)
    finally:
        for layer in layers:
            del layer.forward
    again = Load(*map(sum, zip((0,) * 4, *map(_load, inside), strict=True)))
    kept = outside.kept + sum(read.values()) + max((one.kept for one in inside), default=0)
    return plain, again, kept


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
    # the root, the layer at work, and the next one
    return held, whole, total - whole - sum(sizes) + 2 * max(sizes, default=0)
