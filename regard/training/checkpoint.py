"""Checkpoints: written atomically, and verified by their hashes before they are loaded."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from regard.files import refuse, sha256, sync_folder, system_error, write_atomically
from regard.training.sharding import like

_MANIFEST = "manifest.json"


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors to a file and make it durable."""
    try:
        save_file({name: x.detach().cpu().contiguous() for name, x in tensors.items()}, path)
    except SafetensorError as error:
        raise system_error(error) from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def save_checkpoint(folder: Path, step: int, tensors: dict[str, dict[str, Tensor]], counters: dict):
    """Write checkpoints/step-N: every group of tensors, the counters, and a manifest of hashes."""
    path = folder / f"step-{step}"
    temporary = folder / f".step-{step}.{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".step-*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary.mkdir()
        for name, group in tensors.items():
            save_tensors(temporary / f"{name}.safetensors", group)
        write_atomically(temporary / "counters.json", json.dumps(counters, indent=1))
        hashes = {file.name: sha256(file) for file in sorted(temporary.iterdir())}
        write_atomically(temporary / _MANIFEST, json.dumps(hashes, indent=1))
        if path.exists():
            shutil.rmtree(path)
        os.rename(temporary, path)
        sync_folder(folder)
        write_atomically(folder.parent / "last", path.name + "\n")
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise refuse(error, path) from error


def is_complete(path: Path) -> bool:
    """True if a checkpoint has every file of its manifest, with the right hash."""
    try:
        hashes = json.loads((path / _MANIFEST).read_text())
        needed = {"counters.json", *(file.name for file in path.glob("*.safetensors"))}
        return needed <= hashes.keys() and all(
            sha256(path / name) == hash for name, hash in hashes.items()
        )
    except (OSError, ValueError, AttributeError):
        return False


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints of a run with their steps, newest first."""
    steps = [(int(p.name[5:]), p) for p in folder.glob("step-*") if p.name[5:].isdigit()]
    return sorted(steps, reverse=True)


def newest_complete(folder: Path) -> tuple[Path | None, list[Path]]:
    """Newest complete checkpoint, and the damaged ones that are newer."""
    damaged = []
    for _, path in checkpoints(folder):
        if is_complete(path):
            return path, damaged
        damaged.append(path)
    return None, damaged


def load_checkpoint(path: Path) -> tuple[dict[str, dict[str, Tensor]], dict]:
    """Read every group of tensors and the counters of a checkpoint."""
    groups = {file.stem: load_file(file) for file in sorted(path.glob("*.safetensors"))}
    return groups, json.loads((path / "counters.json").read_text())


def prune(folder: Path, keep: set[str]) -> None:
    """Delete all checkpoints but those of these names."""
    for _, path in checkpoints(folder):
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def optimiser_tensors(optimiser: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """State of an optimiser as named tensors."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    return {
        f"{name}:{key}": torch.as_tensor(value)
        for name, parameter in zip(names, parameters, strict=True)
        for key, value in optimiser.state[parameter].items()
        if value is not None
    }


def restore_optimiser(
    optimiser: torch.optim.Optimizer, names: list[str], tensors: dict[str, Tensor]
) -> None:
    """Load the state of an optimiser from named tensors."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    for name, parameter in zip(names, parameters, strict=True):
        state = {
            key.rpartition(":")[2]: like(value.to(parameter.device), parameter)
            for key, value in tensors.items()
            if key.rpartition(":")[0] == name
        }
        if state:
            optimiser.state[parameter] = state


def optimiser_names(optimiser: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> list[str]:
    """Names of the optimiser's parameters, in its order."""
    by_id = {id(parameter): name for name, parameter in named.items()}
    return [by_id[id(p)] for group in optimiser.param_groups for p in group["params"]]
