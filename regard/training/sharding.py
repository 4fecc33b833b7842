"""Models whose parameters, gradients and optimiser state are sharded over processes (FSDP).

A parameter is then a DTensor, of which each process has a part; PyTorch gathers a layer when it is
used and adds its gradients up. Its modules take half a second to import, so only `shard` does.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.training import distributed


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Layers that are gathered one by one: the entries of a model's innermost lists of modules.

    A convolution or projection alone is none: what follows may change its output in place, and it
    would not be gathered for the backward pass. Recurrent cells are none: they run once a token,
    and processes whose texts differ in length would gather them at different times.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    inner = [one for one in lists if sum(isinstance(m, nn.ModuleList) for m in one.modules()) == 1]
    layers = [layer for one in inner for layer in one if not hasattr(layer, "gates")]
    return [layer for layer in layers if [*layer.children()] and [*layer.parameters()]]


def recompute(model: nn.Module) -> None:
    """Let layers keep only their inputs for the backward pass, which computes them again."""
    for layer in layers_of(model):
        layer.forward = MethodType(_recomputed, layer)


def _recomputed(layer: nn.Module, *given: Any, **named: Any) -> Any:
    compute = partial(type(layer).forward, layer)
    if not torch.is_grad_enabled():
        return compute(*given, **named)
    again = {"use_reentrant": False, "context_fn": lambda: (nullcontext(), _still(layer))}
    return checkpoint(compute, *given, **again, **named)


@contextmanager
def _still(layer: nn.Module) -> Iterator[None]:
    """Leave the running statistics of batch norms alone, which have seen this batch."""
    kept = [(norm, dict(norm._buffers)) for norm in batch_norms(layer)]
    for norm, buffers in kept:
        norm._buffers.update({name: x if x is None else x.clone() for name, x in buffers.items()})
    try:
        yield
    finally:
        for norm, buffers in kept:
            norm._buffers.update(buffers)


def batch_norms(model: nn.Module) -> list[Any]:
    """Batch norms of a model."""
    return [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]


class Statistics:
    """Running statistics of batch norms, which are one process's after the same batches.

    They decay at each batch of all processes. So each lets its own decay by as many at once, and
    what a batch adds has the weight of its place among those that were read beside it.
    """

    def __init__(self, model: nn.Module):
        """Change what one batch moves."""
        self.weights: list[tuple[Any, float]] = []
        size, after = distributed.world_size(), distributed.world_size() - distributed.rank() - 1
        for norm in batch_norms(model):
            if size > 1 and norm.track_running_stats and norm.momentum:
                moved, norm.momentum = norm.momentum, 1 - (1 - norm.momentum) ** size
                self.weights.append((norm, moved * (1 - moved) ** after / norm.momentum))

    def share(self) -> None:
        """Bring those of all processes together."""
        own = [(norm, weight) for norm, weight in self.weights if norm.training]
        pairs = [(x, weight) for norm, weight in own for x in (norm.running_mean, norm.running_var)]
        sums, _ = distributed.all_reduce_grads([x * weight for x, weight in pairs])
        for (x, _), total in zip(pairs, sums, strict=True):
            x.copy_(total)


def shard(model: Any, device: str, hosts: bool = False) -> None:
    """Shard the parameters of a model over all processes, or over those of each host, in place.

    Parameters that layers share with each other or with the rest of the model, and single numbers,
    stay whole on every process; their gradients are added up as without shards.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    shape = distributed.hosts() if hosts else (distributed.world_size(),)
    names = ("replicas", "shards")[-len(shape) :]
    mesh = init_device_mesh(device.split(":")[0], shape, mesh_dim_names=names)
    layers = layers_of(model)
    inside = {id(module) for layer in layers for module in layer.modules()}
    rest = [part for part in model.modules() if id(part) not in inside]
    groups = [set(layer.parameters()) for layer in layers]
    groups.append({p for part in rest for p in part.parameters(recurse=False)})
    held = Counter(parameter for group in groups for parameter in group)
    kept = {p for p, times in held.items() if times > 1 or p.ndim == 0}
    for part in (*layers, model):
        sharded = fully_shard(part, mesh=mesh, ignored_params=kept)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    # a warning of outputs that are views: nothing in this package changes that of a layer in place
    warnings.filterwarnings("ignore", "FSDP2-wrapped module")
    # the one method for which it is gathered, whatever of the model the loss calls
    model.learn = MethodType(lambda model, loss, batch: loss(model, batch), model)
    register_fsdp_forward_method(model, "learn")


def is_sharded(model: nn.Module) -> bool:
    """True if processes have parts of a model's parameters."""
    return hasattr(type(model), "unshard")


def loss_of(model: Any, loss: Callable[[Any, Any], Tensor], batch: Any, last: bool) -> Tensor:
    """Loss of a batch; gradients of shards are added up over processes after the last of a step."""
    if not is_sharded(model):
        return loss(model, batch)
    model.set_requires_gradient_sync(last)
    return model.learn(loss, batch)


@contextmanager
def gathered(model: Any) -> Iterator[None]:
    """Have all weights of a model on every process inside the context, as ordinary tensors."""
    parts: list[Any] = [part for part in model.modules() if is_sharded(part)]
    if parts:
        with torch.no_grad():  # else a layer that runs first would be the root
            model.learn(lambda *_: torch.zeros(()), None)
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
    finally:
        if parts:  # the next backward pass would prefetch in the order of layers that ran here
            model.reset_iter_state()
        for part in parts:
            part.set_reshard_after_forward(part is not model, recurse=False)


def group_of(model: nn.Module, thread: bool = False) -> distributed.Group:
    """Those who save a model: all processes, or threads of theirs, if each has parts of it."""
    return distributed.everyone(thread) if is_sharded(model) else distributed.ALONE


def local(tensor: Any) -> Any:
    """The part of a tensor that this process has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Any) -> Tensor:
    """A tensor with the parts of all processes, which must all ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def span(tensor: Any) -> tuple[int, int]:
    """First row of the part of a sharded tensor that this process has, and the one after its last.

    Of others, and of single numbers, nothing is said.
    """
    last = tensor.device_mesh.ndim - 1
    each = -(-len(tensor) // tensor.device_mesh.size(last))  # as torch.chunk has them
    first = min(len(tensor), each * tensor.device_mesh.get_local_rank(last))
    return first, min(len(tensor), first + each)


def part(tensor: Tensor, other: Any) -> Tensor:
    """The rows of a whole tensor that this process has of another one, if that is sharded."""
    return tensor if local(other) is other else tensor[slice(*span(other))]


def to_save(
    groups: Mapping[str, Mapping[str, Any]], copy: bool = False
) -> tuple[dict[str, dict[str, Tensor]], dict[str, int]]:
    """What this process writes of groups of tensors, on the CPU, and the first row of each part.

    What is whole rank 0 writes, and of parts that several processes have, the first replica.
    """
    sharded = {n: x for group in groups.values() for n, x in group.items() if local(x) is not x}
    main = distributed.is_main()
    own = {
        name: {
            n: local(x.detach()).to("cpu", copy=copy)
            for n, x in group.items()
            if (_replica(x) == 0 if n in sharded else main)
        }
        for name, group in groups.items()
    }
    return own, {name: span(x)[0] for name, x in sharded.items()}


def _replica(tensor: Any) -> int:
    mesh = tensor.device_mesh
    return mesh.get_local_rank(0) if mesh.ndim > 1 else 0


def like(own: Tensor, other: Any) -> Tensor:
    """A tensor that is sharded as another one, by the part of this process; numbers are not."""
    if local(other) is other or not own.ndim:
        return own
    from torch.distributed.tensor import DTensor

    about = {"run_check": False, "shape": other.shape, "stride": other.stride()}
    return DTensor.from_local(own, other.device_mesh, other.placements, **about)


def sum_grads(grads: list[Any], max_norm: float) -> tuple[list[Tensor], float | Tensor]:
    """Sums of gradients over all processes, clipped to a norm, and that norm before."""
    shards = [local(grad) for grad in grads if local(grad) is not grad]
    if not shards:
        return distributed.all_reduce_grads(grads, max_norm)
    # PyTorch has added the shards up
    kept, norm = distributed.all_reduce_grads([grad for grad in grads if local(grad) is grad])
    rest = iter([grad.clone() for grad in kept])
    grads = [next(rest) if local(grad) is grad else grad for grad in grads]
    squares = nn.utils.get_total_norm(shards).double() ** 2
    mesh = next(grad.device_mesh for grad in grads if local(grad) is not grad)
    dist.all_reduce(squares, group=mesh.get_group(mesh.ndim - 1))
    norm = (squares + norm**2).sqrt().float()
    return grads, distributed.clip([local(grad) for grad in grads], norm, max_norm)
