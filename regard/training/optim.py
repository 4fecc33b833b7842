"""The optimiser and the rate of learning over time."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from regard import native
from regard.errors import lookup


def inverse_sqrt(step: int, steps: int, warmup: int) -> float:
    """Rise in a line, then fall with the square root of time, as in the paper."""
    return min((step + 1) / max(1, warmup), math.sqrt(max(1, warmup) / (step + 1)))


def cosine(step: int, steps: int, warmup: int) -> float:
    """Rise in a line, then fall along half a cosine to a hundredth."""
    if step < warmup:
        return (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def constant(step: int, steps: int, warmup: int) -> float:
    """Rise in a line, then stay."""
    return min(1.0, (step + 1) / max(1, warmup))


SCHEDULES: dict[str, Callable[[int, int, int], float]] = {
    "inverse_sqrt": inverse_sqrt,
    "cosine": cosine,
    "constant": constant,
}


# settings of a group that a kernel takes for all weights alike
SHARED = ("betas", "eps", "amsgrad", "maximize")


class Adam(AdamW):
    """PyTorch's AdamW, which a kernel does for all weights at once where there is one."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move everything by one step."""
        some = [(p, group) for group in self.param_groups for p in group["params"]]
        some = [(p, group, self.state[p]) for p, group in some if p.grad is not None]
        if not some or not all("exp_avg" in past for *_, past in some):
            super().step(closure)  # which makes the memory
            return
        counts = [past["step"] for *_, past in some]
        steps = (torch.stack(counts) + 1).tolist()
        rows = [
            (p, p.grad, past["exp_avg"], past["exp_avg_sq"], n, group["lr"], group["weight_decay"])
            for (p, group, past), n in zip(some, steps, strict=True)
        ]
        first = some[0][1]
        beta1, beta2 = first["betas"]
        alike = all(group[key] == first[key] for _, group, _ in some for key in SHARED)
        plain = alike and closure is None and not (first["amsgrad"] or first["maximize"])
        if plain and native.adamw(rows, beta1, beta2, first["eps"]):
            for count in counts:
                count += 1
        else:
            super().step(closure)


class Muon(Adam):
    """AdamW, but matrices and kernels inside the model move by their momentum made orthogonal.

    As torch.optim.Muon (Jordan et al. 2024) with steps of AdamW's size, but in float32 and for all
    matrices of a shape at once: a processor without bfloat16 is slow at many small products.
    """

    MEMORY = 0.95

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Move everything by one step."""
        groups = self.param_groups
        self.param_groups = [group for group in groups if not group["inner"]]
        super().step(closure)
        self.param_groups = groups
        for group in groups:
            if group["inner"]:
                self._turn(group)

    def _turn(self, group: dict[str, Any]) -> None:
        shapes: dict[torch.Size, list[Tensor]] = {}
        for p in group["params"]:
            if p.grad is not None:
                shapes.setdefault(p.shape, []).append(p)
        for shape, some in shapes.items():
            ahead = orthogonal(torch.stack([self._ahead(p).flatten(1) for p in some]))
            rate = group["lr"] * 0.2 * math.sqrt(max(ahead.shape[1:]))
            for p, way in zip(some, ahead, strict=True):
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(way.view(shape), alpha=rate)

    def _ahead(self, p: Tensor) -> Tensor:
        """Return the momentum of a matrix as the next step will find it (Nesterov)."""
        assert p.grad is not None
        past = self.state[p].setdefault("momentum", torch.zeros_like(p))
        past.lerp_(p.grad, 1 - self.MEMORY)
        return p.grad.lerp(past, self.MEMORY)


def orthogonal(matrices: Tensor, steps: int = 5) -> Tensor:
    """Bring the singular values of matrices (n, rows, columns) near one, by Newton and Schulz."""
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp_min(1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315  # Jordan's, steep at zero
    for _ in range(steps):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def depths(model: nn.Module) -> dict[str, int]:
    """Return for every parameter how many layers lie below it.

    A layer is an entry of a list of modules, the innermost where lists lie in lists; what comes
    before the first has none below, what comes after the last has all.
    """
    lists = [f"{name}." for name, m in model.named_modules() if isinstance(m, nn.ModuleList)]
    found: dict[str, int] = {}
    layers: dict[str, int] = {}
    for name, _ in model.named_parameters():
        inside = max((start for start in lists if name.startswith(start)), key=len, default="")
        layer = inside + name.removeprefix(inside).partition(".")[0] if inside else ""
        found[name] = layers.setdefault(layer, len(layers) + 1) if layer else -len(layers)
    most = len(layers) + 1
    # what is in no layer comes first, unless layers came before it
    return {name: most if depth < 0 else depth for name, depth in found.items()}


OPTIMISERS: dict[str, type[AdamW]] = {"adamw": Adam, "muon": Muon}


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
) -> AdamW:
    """Make an optimiser, fused, that lets matrices decay but neither biases nor norms.

    Each layer learns by `layer_decay` times the rate of the one above, and what has a name that
    begins as in `lr_scales` by such a share: a group's `scale`.
    """
    learning = [p for p in model.parameters() if p.requires_grad]
    # tables of tokens and positions and what is tied to them are no maps between layers
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables |= {id(p) for n, p in model.named_parameters() if n.startswith("head.")}
    kernels = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d)}
    inner = [p for p in learning if id(p) in kernels or (p.ndim == 2 and id(p) not in tables)]
    others = {id(p) for p in learning} - {id(p) for p in inner}
    groups = [
        {"params": inner, "weight_decay": weight_decay, "inner": True},
        {
            "params": [p for p in learning if p.ndim > 1 and id(p) in others],
            "weight_decay": weight_decay,
            "inner": False,
        },
        {"params": [p for p in learning if p.ndim < 2], "weight_decay": 0.0, "inner": False},
    ]
    groups = [group for group in groups if group["params"]]
    if layer_decay != 1 or any(rate != 1 for rate in lr_scales.values()):
        below = depths(model)
        most = max(below.values())
        scales: dict[int, float] = {}
        for part, p in model.named_parameters():
            share = math.prod(rate for start, rate in lr_scales.items() if part.startswith(start))
            scales[id(p)] = share * layer_decay ** (most - below[part])
        groups = [
            {**group, "params": some, "scale": scale}
            for group in groups
            for scale in sorted(set(scales.values()))
            if (some := [p for p in group["params"] if scales[id(p)] == scale])
        ]
    kind = lookup("optimiser", name, OPTIMISERS)
    return kind(groups, lr=lr, betas=betas, eps=eps, fused=True)
