"""Optimisers (AdamW, Muon), their parameter groups, and learning-rate schedules."""

import math
from collections.abc import Callable, Mapping
from inspect import signature
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from regard import native
from regard.errors import lookup
from regard.training.sharding import local, part, whole


def inverse_sqrt(step: float, steps: int, warmup: int) -> float:
    """Linear warm-up, then decay by the inverse square root (Vaswani et al. 2017)."""
    return min((step + 1) / max(1, warmup), math.sqrt(max(1, warmup) / (step + 1)))


def cosine(step: float, steps: int, warmup: int) -> float:
    """Linear warm-up, then cosine decay to a hundredth."""
    if step < warmup:
        return min(1.0, (step + 1) / warmup)
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def constant(step: float, steps: int, warmup: int) -> float:
    """Linear warm-up, then constant."""
    return min(1.0, (step + 1) / max(1, warmup))


def trapezoid(step: float, steps: int, warmup: int) -> float:
    """Linear warm-up, then constant, then linear decay over the last third."""
    return min(1.0, (step + 1) / max(1, warmup), 3 * (1 - step / steps) + 1e-3)


SCHEDULES: dict[str, Callable[[float, int, int], float]] = {
    "inverse_sqrt": inverse_sqrt,
    "cosine": cosine,
    "constant": constant,
    "trapezoid": trapezoid,
}


# options of a group that the kernel takes to be the same in all groups
_SHARED = ("betas", "eps", "amsgrad", "maximize")


class NativeAdamW(AdamW):
    """PyTorch's AdamW, with one native kernel for all parameters where there is one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters."""
        pairs = [(p, group) for group in self.param_groups for p in group["params"]]
        used = [(p, group, self.state[p]) for p, group in pairs if p.grad is not None]
        on_cpu = all(p.device.type == "cpu" for p, *_ in used)
        if not used or not on_cpu or not all("exp_avg" in state for *_, state in used):
            super().step(closure)  # which initialises the state
            return
        counts = [state["step"] for *_, state in used]
        steps = (torch.stack(counts) + 1).tolist()
        parts = [(p, p.grad, s["exp_avg"], s["exp_avg_sq"]) for p, _, s in used]
        rows = [
            (*map(local, part), n, group["lr"], group["weight_decay"])
            for part, (_, group, _), n in zip(parts, used, steps, strict=True)
        ]
        first = used[0][1]
        beta1, beta2 = first["betas"]
        alike = all(group[key] == first[key] for _, group, _ in used for key in _SHARED)
        plain = alike and closure is None and not (first["amsgrad"] or first["maximize"])
        if plain and native.adamw(rows, beta1, beta2, first["eps"]):
            for count in counts:
                count += 1
        else:
            super().step(closure)


class Muon(NativeAdamW):
    """Muon for hidden matrices and convolutions, AdamW for all else (Jordan et al. 2024).

    As torch.optim.Muon with steps of AdamW's size, but in float32 and batched over matrices of a
    shape: a processor without bfloat16 is slow at many small products.
    """

    MOMENTUM = 0.95

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update all parameters."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["inner"]]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            if group["inner"]:
                self._update(group)

    def _update(self, group: dict[str, Any]) -> None:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                shapes.setdefault(p.shape, []).append(p)
        for shape, parameters in shapes.items():
            matrices = [whole(self._nesterov(p)).flatten(1) for p in parameters]
            updates = newton_schulz(torch.stack(matrices))
            lr = group["lr"] * 0.2 * math.sqrt(max(updates.shape[1:]))
            for p, update in zip(parameters, updates, strict=True):
                own, change = local(p), part(update.view(shape), p)
                own.mul_(1 - group["lr"] * group["weight_decay"]).sub_(change, alpha=lr)

    def _nesterov(self, p: Tensor) -> Tensor:
        """Update the momentum of a parameter and return it as of the next step (Nesterov)."""
        assert p.grad is not None
        momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
        momentum.lerp_(p.grad, 1 - self.MOMENTUM)
        return p.grad.lerp(momentum, self.MOMENTUM)


def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """Orthogonalise matrices (n, rows, columns): Newton-Schulz steps bring singular values to 1."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan's, steep at zero
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def layer_depths(model: nn.Module) -> dict[str, int]:
    """Depth of every parameter: the number of layers below it.

    A layer is an entry of an nn.ModuleList, the innermost where lists are nested; embeddings come
    before the first, heads after the last.
    """
    lists = [f"{name}." for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    depths: dict[str, int] = {}
    layers: dict[str, int] = {}
    for name, _ in model.named_parameters():
        inside = max((start for start in lists if name.startswith(start)), key=len, default="")
        layer = inside + name.removeprefix(inside).partition(".")[0] if inside else ""
        depths[name] = layers.setdefault(layer, len(layers) + 1) if layer else -len(layers)
    most = len(layers) + 1
    # what is in no layer comes first, unless layers came before it
    return {name: most if depth < 0 else depth for name, depth in depths.items()}


OPTIMISERS: dict[str, type[Optimizer]] = {"adamw": NativeAdamW, "muon": Muon}
"""Optimisers by name; each is given those of lr, betas, eps and fused that it takes."""


def build_optimiser(
    model: nn.Module,
    *,
    name: str = "adamw",
    lr: float,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
    layer_decay: float = 1.0,
    lr_scales: Mapping[str, float] = MappingProxyType({}),
) -> Optimizer:
    """Build an optimiser with weight decay on matrices, not on biases and norms.

    Args:
        model: model to train
        name: name of the optimiser
        lr: peak learning rate
        weight_decay: weight decay of matrices
        betas: decay of both moments
        eps: added to the root of the second moment
        layer_decay: learning rate of a layer relative to the one above it
        lr_scales: factors of the learning rate by the beginnings of parameter names
    """
    trainable = [p for p in model.parameters() if p.requires_grad]
    # embeddings and what is tied to them do not map between layers, so Muon leaves them out
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables |= {id(p) for n, p in model.named_parameters() if n.startswith("head.")}
    kernels = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d)}
    inner = [p for p in trainable if id(p) in kernels or (p.ndim == 2 and id(p) not in tables)]
    others = {id(p) for p in trainable} - {id(p) for p in inner}
    groups = [
        {"params": inner, "weight_decay": weight_decay, "inner": True},
        {
            "params": [p for p in trainable if p.ndim > 1 and id(p) in others],
            "weight_decay": weight_decay,
            "inner": False,
        },
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0, "inner": False},
    ]
    groups = [group for group in groups if group["params"]]
    if layer_decay != 1 or any(scale != 1 for scale in lr_scales.values()):
        depths = layer_depths(model)
        top = max(depths.values())
        scales: dict[int, float] = {}
        for part, p in model.named_parameters():
            scale = math.prod(x for start, x in lr_scales.items() if part.startswith(start))
            scales[id(p)] = scale * layer_decay ** (top - depths[part])
        groups = [
            {**group, "params": some, "scale": scale}
            for group in groups
            for scale in sorted(set(scales.values()))
            if (some := [p for p in group["params"] if scales[id(p)] == scale])
        ]
    kind = lookup("optimiser", name, OPTIMISERS)
    options: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "fused": True}
    takes = signature(kind).parameters
    return kind(groups, **{key: value for key, value in options.items() if key in takes})
