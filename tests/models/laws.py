"""Laws that models keep, whatever they read; `ask` is what a model says of given inputs."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.files.weights import state_of
from regard.models import MODELS, family
from regard.models.folder import load_folder, save_config, save_weights


def close(ours: Tensor, right: Tensor) -> None:
    torch.testing.assert_close(ours, right, atol=1e-10, rtol=0)


def like(model: nn.Module, *inputs: Tensor) -> list[Tensor]:
    """Inputs in the precision of a model, and where it is."""
    one = next(model.parameters())
    return [x.to(one.device, one.dtype if x.is_floating_point() else x.dtype) for x in inputs]


def builds_on_meta(model: Any, ask: Callable[[Any], Tensor]) -> None:
    """A model is built, and asked, where there are shapes but no numbers."""
    with torch.device("meta"):
        ghost = type(model)(model.config).to(next(model.parameters()).dtype)
        said = ask(ghost)
    assert all(p.is_meta for p in ghost.parameters())
    assert said.shape == ask(model).shape
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in ghost.named_parameters()} == shapes
    assert ghost.state_dict().keys() == model.state_dict().keys()


def survives_its_folder(
    model: Any, folder: Path, task: str, ask: Callable[[Any], Tensor], bound: float = 2e-6
) -> None:
    """What is saved and loaded is the same model; its memory is laid out anew."""
    model = model.float().eval()
    name = next(name for name in MODELS if family(name)[1] is type(model))
    save_config(folder, model, name=name, task=task, about={})
    save_weights(folder, state_of(model))
    again, _ = load_folder(folder)
    assert again.config == model.config
    with torch.no_grad():
        ours, theirs = ask(model), ask(again)
    assert (ours - theirs).abs().max() <= bound * max(1, ours.abs().max())
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[key]), key


def has_learnt(model: nn.Module) -> None:
    """Every parameter has a gradient, and one that is not nothing."""
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 1e-9, name


def draws_in_training_only(model: nn.Module, ask: Callable[[Any], Tensor], draws: bool) -> None:
    """What is random is so in training, by the seed alone."""
    assert torch.equal(ask(model), ask(model))
    model.train()
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(ask(model))
    assert torch.equal(runs[0], runs[1])
    assert torch.equal(runs[0], runs[2]) != draws
