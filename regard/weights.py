"""The state of a model by name: its parameters, those that are shared once, and its buffers."""

from collections.abc import Container, Mapping

from torch import Tensor, nn

# what the running statistics of a batch norm, then parameters, were called in format 1
FORMAT_1 = {"running_mean": "mean", "running_var": "var"}
COUNTER = "num_batches_tracked"  # of a batch norm, which format 1 did not have


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the persistent buffers of a model by name."""
    return {**dict(model.named_parameters()), **buffers_of(model)}


def float_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model without the counters of batch norms, which nothing reads."""
    return {name: x for name, x in state_of(model).items() if x.is_floating_point()}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the state of a model by name."""
    buffers = dict(model.named_buffers())
    kept = model.state_dict() if buffers else {}
    return {name: buffer for name, buffer in buffers.items() if name in kept}


def learned_state(model: nn.Module) -> dict[str, Tensor]:
    """Return what training may change: parameters that are not frozen, and buffers."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {**learned, **buffers_of(model)}


def stored_name(name: str, stored: Container[str]) -> str | None:
    """Return under which name a tensor is stored; None for a counter that format 1 did not have."""
    place, _, last = name.rpartition(".")
    old = f"{place}.{FORMAT_1.get(last, last)}"
    if name in stored or (old not in stored and last != COUNTER):
        return name
    return None if last == COUNTER else old


def copy_stored(stored: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> None:
    """Copy stored tensors, of format 1 or 2, into those of a state."""
    for name, tensor in state.items():
        place = stored_name(name, stored)
        if place is not None:
            tensor.copy_(stored[place])
