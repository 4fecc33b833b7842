"""The state of a model by name: its parameters, those that are shared once, and its buffers."""

from collections.abc import Container, Iterable

import torch
from torch import Tensor, nn

COUNTER = "num_batches_tracked"  # of a batch norm
LARGEST = ".largest"  # after the name of a matrix in bytes: the largest number of each row


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and the persistent buffers of a model by name."""
    return {**dict(model.named_parameters()), **buffers_of(model)}


def float_state(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model without the counters of batch norms, which nothing reads."""
    return {name: x for name, x in state_of(model).items() if x.is_floating_point()}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that belong to the state of a model by name."""
    # not by state_dict(), which would take the weights of a gathered FSDP model away
    parts = model.named_modules()
    passing = {
        f"{at}.{name}".lstrip(".") for at, p in parts for name in p._non_persistent_buffers_set
    }
    return {name: buffer for name, buffer in model.named_buffers() if name not in passing}


def learned_state(model: nn.Module) -> dict[str, Tensor]:
    """State that training may change: parameters that are not frozen, and buffers."""
    learned = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {**learned, **buffers_of(model)}


def stored_names(state: Iterable[str], stored: Container[str]) -> list[str]:
    """Names of a state to look for in a file: all, but for counters that an average leaves out."""
    return [name for name in state if name in stored or not name.endswith(COUNTER)]


def to_bytes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix rounded to bytes as native/product.h does, and the largest of each row.

    Rows of which no number is larger than 4e-37 become zeros.
    """
    largest = weight.abs().amax(1)
    # divided, as 127 / x is the product with an inverse, which rounds otherwise
    by = torch.full_like(largest, 127) / largest
    some = by.isfinite()
    by, largest = by.where(some, 0), largest.where(some, 0)
    return (weight * by[:, None]).round().to(torch.int8), largest


def from_bytes(rounded: Tensor, largest: Tensor) -> Tensor:
    """Return a matrix that is rounded to the same bytes and has the same largest numbers."""
    return (rounded.double() * largest.double()[:, None] / 127).float()


def byte_names(model: nn.Module) -> set[str]:
    """Return the names of matrices that are read by products alone, not as a table too."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    read = {id(m.weight) for m in model.modules() if isinstance(m, nn.Linear)} - tables
    return {name for name, weight in model.named_parameters() if id(weight) in read}
