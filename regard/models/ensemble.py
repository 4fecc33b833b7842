"""Ensembles: models of one config, each with weights of its own, whose outputs are averaged."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn


class Ensemble(nn.ModuleList):
    """The other models of a config beside the first, which holds them as `members`.

    So a model alone and the first of an ensemble have the same names for their weights.
    """

    def __init__(self, kind: type[nn.Module], config: Any):
        alone = replace(config, members=1)
        super().__init__(kind(alone) for _ in range(config.members - 1))


def members_of(model: nn.Module) -> list[Any]:
    """All models of an ensemble, the first of them first; a model alone is one of one."""
    return [model, *getattr(model, "members", ())]


def each_member(model: nn.Module, output: Callable[[Any], Tensor]) -> Tensor:
    """Outputs (members, ...) of all models of an ensemble."""
    return torch.stack([output(member) for member in members_of(model)])


def mean_of_members(model: nn.Module, output: Callable[[Any], Tensor]) -> Tensor:
    """Mean of the outputs of all models of an ensemble."""
    return each_member(model, output).mean(0) if len(members_of(model)) > 1 else output(model)


def alone(member: nn.Module, *inputs: Tensor, **named: Tensor) -> Tensor:
    """Output of one model of an ensemble, without the others that it may hold."""
    own: Callable[..., Tensor] = getattr(member, "own_output", member)
    return own(*inputs, **named)
