"""PyTorch's private state that a kernel must know before it takes over, all of it read here."""

from typing import Any

import torch
from torch import nn
from torch._C._autograd import _top_saved_tensors_default_hooks
from torch._C._functorch import peek_interpreter_stack
from torch.autograd import forward_ad
from torch.nn.modules import module as _module

# where a module keeps its hooks
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
# of a tensor, without a call of a Python function
requires_grad, dtype, size = (
    vars(torch._C.TensorBase)[name].__get__ for name in ("requires_grad", "dtype", "shape")
)
has_global_hooks = _module._has_any_global_hook


def has_hooks(module: nn.Module) -> bool:
    """True if a module has hooks of its own."""
    own: dict[str, Any] = vars(module)
    return any(own[name] for name in HOOKS)


def under_transform() -> bool:
    """True if a transform of functions (vmap, grad, jvp) is active."""
    return peek_interpreter_stack() is not None


def traced() -> bool:
    """True if every operation must be seen: by a compiler, mode, transform or tracer."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or under_transform()
        or forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch.is_autocast_enabled("cpu")
    )


def packs_saved_tensors() -> bool:
    """True if hooks pack what autograd saves, as torch.utils.checkpoint does."""
    return bool(_top_saved_tensors_default_hooks(True))
