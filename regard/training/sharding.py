"""Models whose parameters, gradients and optimiser state are sharded over processes (FSDP).

A parameter is then a DTensor, of which each process has a part; PyTorch gathers a layer when it is
used and adds its gradients up. Its modules take half a second to import, so only `shard` does.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

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


def shard(model: Any, device: str) -> None:
    """Shard the parameters of a model over all processes, in place.

    Parameters that layers share with each other or with the rest of the model, and single numbers,
    stay whole on every process; their gradients are added up as without shards.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

    mesh = init_device_mesh(device.split(":")[0], (distributed.world_size(),))
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


def local(tensor: Any) -> Any:
    """The part of a tensor that this process has."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Any) -> Tensor:
    """A tensor with the parts of all processes, which must all ask for it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def on_main(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Whole tensors on rank 0, nothing on others, which have only one of them at a time."""
    each = ((name, whole(tensor)) for name, tensor in tensors.items())
    return {name: tensor for name, tensor in each if distributed.is_main()}


def like(tensor: Tensor, other: Any) -> Tensor:
    """A whole tensor, sharded as another one of its shape is."""
    if local(other) is other or local(tensor) is not tensor or tensor.shape != other.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def sum_grads(grads: list[Tensor], max_norm: float) -> tuple[list[Tensor], float | Tensor]:
    """Sums of gradients over all processes, clipped to a norm, and that norm before."""
    shards = [local(grad) for grad in grads if local(grad) is not grad]
    if not shards:
        return distributed.all_reduce_grads(grads, max_norm)
    # PyTorch has added the shards up
    kept, norm = distributed.all_reduce_grads([grad for grad in grads if local(grad) is grad])
    rest = iter([grad.clone() for grad in kept])
    grads = [next(rest) if local(grad) is grad else grad for grad in grads]
    squares = nn.utils.get_total_norm(shards).double() ** 2
    dist.all_reduce(squares)
    norm = (squares + norm**2).sqrt().float()
    return grads, distributed.clip([local(grad) for grad in grads], norm, max_norm)
