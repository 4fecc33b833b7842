"""LoRA: low-rank adapters of frozen matrices."""

from collections.abc import Iterator, Mapping
from copy import deepcopy
from fnmatch import fnmatchcase

from torch import Tensor, addmm, autocast, nn
from torch.nn.utils.parametrize import register_parametrization

from regard.errors import UsageError, nearest

_INSIDE = ".parametrizations.weight."  # where torch keeps what a weight is made of


class LowRank(nn.Module):
    """W + alpha / rank B A, of which only A and B learn (Hu et al. 2022).

    B starts at zero, so that at first nothing is changed.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float):
        super().__init__()
        rows, columns = weight.shape
        self.down = nn.Parameter(weight.new_empty(rank, columns))
        self.up = nn.Parameter(weight.new_zeros(rows, rank))
        self.scale = alpha / rank
        nn.init.kaiming_uniform_(self.down, a=5**0.5)  # as nn.Linear begins

    def forward(self, weight: Tensor) -> Tensor:
        """Matrix with its addition."""
        return self.merge(weight, self.up, self.down)

    def merge(self, weight: Tensor, up: Tensor, down: Tensor) -> Tensor:
        """Matrix with the addition that two others make."""
        with autocast(weight.device.type, enabled=False):  # a small addition would be lost
            return addmm(weight, up, down, alpha=self.scale)


def matrices(model: nn.Module, but: str = "") -> Iterator[tuple[str, list[nn.Linear]]]:
    """Yield the linear maps that can be added to, but for those whose names begin so.

    Layers that have one weight (ALBERT) come together. One that shares its weight with another kind
    of part, as a head does with embeddings, cannot be: merged, the two would no longer be the same.
    """
    owners: dict[int, list[nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(module)
    for name, module in model.named_modules():
        fresh = bool(but) and name.startswith(but)
        if isinstance(module, nn.Linear) and not fresh:
            alike = [one for one in owners[id(module.weight)] if isinstance(one, nn.Linear)]
            if alike == owners[id(module.weight)] and alike[0] is module:
                yield name, alike


def adapt(model: nn.Module, patterns: str, rank: int, alpha: float, but: str = "") -> list[str]:
    """Add to every matrix whose name fits one of the patterns, by commas; return their names.

    Args:
        model: model to fine-tune, changed in place
        patterns: names of matrices, with *, by commas
        rank: rank of the additions
        alpha: the additions are scaled by alpha / rank
        but: prefix of names to leave out
    """
    known = dict(matrices(model, but))
    chosen: list[str] = []
    for pattern in (part.strip() for part in patterns.split(",")):
        matching = [name for name in known if fnmatchcase(name, pattern)]
        if not matching:
            ends = list(dict.fromkeys(f"*.{name.rpartition('.')[2]}" for name in known))
            raise UsageError(
                f"lora_on={pattern!r:.60} fits no matrix of the model; choose from "
                f"{', '.join(ends)}, or names such as {next(iter(known), 'none')}."
                + nearest(pattern, [*ends, *known])
            )
        chosen += [name for name in matching if name not in chosen]
    for name in chosen:
        low = LowRank(known[name][0].weight, rank, alpha)
        for linear in known[name]:
            same = deepcopy(low, {id(parameter): parameter for parameter in low.parameters()})
            register_parametrization(linear, "weight", same)
    return chosen


def adapters(model: nn.Module) -> list[nn.Parameter]:
    """Trainable parameters of the additions."""
    parts = [module for module in model.modules() if isinstance(module, LowRank)]
    return list(dict.fromkeys(parameter for part in parts for parameter in part.parameters()))


def merged(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model, by their names in it, as those of one without additions."""
    plain: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        place, inside, part = name.partition(_INSIDE)
        if not inside:
            plain[name] = tensor
        elif part == "original":
            first = f"{place}{_INSIDE}0"
            low = model.get_submodule(first)
            assert isinstance(low, LowRank)
            up, down = weights[f"{first}.up"], weights[f"{first}.down"]
            plain[f"{place}.weight"] = low.merge(tensor.detach(), up.detach(), down.detach())
    return plain
