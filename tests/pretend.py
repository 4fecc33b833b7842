"""A pretend accelerator: a device of its own with real numbers, kept in the memory of the CPU.

It refuses an operation on tensors of different devices, as a GPU does, and counts the moments at
which the program would wait for one: reading a number, copying to the host, asking where a mask
is true. So code that is wrong or slow on an accelerator is found where there is none.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_stack
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
aten = torch.ops.aten
# results whose shape depends on numbers, or that are a number
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default}
READS |= {aten._unique2.default, aten.unique_dim.default, aten.equal.default}


class _Module:
    """What torch asks of the module of a device."""

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


_setup_privateuseone_for_python_backend(NAME, _Module())
DEVICE = torch.device(NAME, 0)


class OnDevice(Tensor):
    """A tensor of the device; its numbers are those of a tensor on the CPU."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor):
        with torch.inference_mode(False):  # a view could not share its version
            return Tensor._make_wrapper_subclass(
                cls,
                host.shape,
                strides=host.stride(),
                storage_offset=host.storage_offset(),
                dtype=host.dtype,
                device=DEVICE,
                requires_grad=False,
            )

    def __init__(self, host: Tensor):
        self.host = host

    def __repr__(self, **options: Any) -> str:  # type: ignore[override]
        return f"OnDevice({self.host!r})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _run(func, args, kwargs or {})


class Reads:
    """How often the program waited for the device, and where."""

    def __init__(self) -> None:
        self.count = 0
        self.where: list[str] = []


_reads: list[Reads] = []


def _note(what: str) -> None:
    frames = [f"{frame.name} in {frame.filename}:{frame.lineno}" for frame in extract_stack()]
    place = next((frame for frame in reversed(frames) if "/regard/" in frame), "")
    for reads in _reads:
        reads.count += 1
        reads.where.append(f"{what}, {place}")


@contextmanager
def host_reads() -> Iterator[Reads]:
    """Count the moments at which the host waits for the device while a block runs."""
    reads = Reads()
    _reads.append(reads)
    try:
        yield reads
    finally:
        _reads.remove(reads)


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type == NAME


def _run(func, args, kwargs):
    """Compute an operation on the host's numbers, and put the results where they belong."""
    leaves, _ = tree_flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    ours = [x for x in tensors if isinstance(x, OnDevice)]
    wanted = kwargs.get("device")
    copies = func in (aten._to_copy.default, aten.copy_.default, aten.set_.source_Tensor)
    if func in READS and ours:
        _note(str(func))
    if ours and not copies:
        others = [x for x in tensors if not isinstance(x, OnDevice) and x.ndim > 0]
        if others:
            raise RuntimeError(f"{func}: tensors on {NAME} and {others[0].device}")
    if func is aten._to_copy.default:
        stays = bool(ours) if wanted is None else _is_ours(wanted)
        if ours and not stays:
            _note(str(func))
    elif func is aten.copy_.default:
        stays = isinstance(args[0], OnDevice)
        if ours and not stays:
            _note(str(func))
    else:
        stays = bool(ours) if wanted is None else _is_ours(wanted)
    if _is_ours(wanted):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    kwargs = {k: v for k, v in kwargs.items() if k != "pin_memory"}
    host_args, host_kwargs = tree_map_only(OnDevice, lambda x: x.host, (args, kwargs))
    out = func(*host_args, **host_kwargs)
    if not stays:
        return out
    known = {id(x.host): x for x in ours}  # what is changed in place is returned as itself
    return tree_map_only(Tensor, lambda x: known[id(x)] if id(x) in known else OnDevice(x), out)


class _Factories(TorchDispatchMode):
    """Makes tensors on the device where a factory is asked for one, and copies to it."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        leaves, _ = tree_flatten((args, kwargs))
        if _is_ours(kwargs.get("device")) or any(isinstance(x, OnDevice) for x in leaves):
            return _run(func, args, kwargs)
        return func(*args, **kwargs)


class _Literals(TorchFunctionMode):
    """What passes the dispatcher by: tolist, and filling a tensor with literal numbers."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        ours = bool(args) and isinstance(args[0], OnDevice)
        if func is Tensor.tolist and ours:
            _note("tolist")
            return args[0].host.tolist()
        if func is Tensor.new_tensor and ours:
            device = kwargs.pop("device", DEVICE)
            kwargs.setdefault("dtype", args[0].dtype)
            return torch.tensor(args[1], **kwargs).to(device)
        if func in (torch.tensor, torch.as_tensor) and _is_ours(kwargs.get("device")):
            device = kwargs.pop("device")
            return func(*args, **kwargs).to(device)
        return func(*args, **kwargs)


@contextmanager
def accelerator() -> Iterator[torch.device]:
    """Let tensors be made on the pretend device while a block runs."""
    swapped = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)  # shared weights stay shared
    try:
        with _Literals(), _Factories():
            yield DEVICE
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swapped)
