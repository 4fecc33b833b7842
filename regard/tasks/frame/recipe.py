"""The files of a run folder that say how it came about: recipe.json and the model card."""

import hashlib
import json
import platform
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import nn

from regard import __version__, native
from regard.data.split import Split
from regard.errors import UsageError, log
from regard.files import read_json, write_atomically
from regard.files.hashes import SUMS, damaged, listed
from regard.layers.lora import adapters
from regard.tasks.frame.settings import TrainSettings, flat

_S = TypeVar("_S", bound=TrainSettings)

# settings that may differ when a run is resumed, since they do not change what it computes
# (of data, the hash of what they hold is compared)
RESUME_MAY_DIFFER = {
    "data",
    "out",
    "device",
    "threads",
    "compile",
    "recompute",
    "save_every",
    "async",
    "test",
    "watch_every",
    "log",
    "callback_error",
    "probes",
    "parallel",
    "processes",
    "restarts",
    "timeout",
    "workers",
}
FOLLOWS = {"warmup", "batches"}  # from the steps, and from the processes that began the run
_UNSCORED = "Its training has not come to a first validation, so it has no score yet."
# files that are written at every start, whether anew or to resume
_REWRITTEN = {"config.json", "generation_config.json"}


def begun_in(folder: Path) -> dict[str, Any] | None:
    """Recipe of the run that was begun in a folder, if one was."""
    path = folder / "recipe.json"
    return read_json(path) if path.exists() else None


def check_resume(
    folder: Path,
    settings: TrainSettings,
    data: str,
    split: Split | None = None,
    only: Collection[str] | None = None,
) -> dict[str, Any] | None:
    """Return the recipe of a run that was begun here, or refuse settings or data that differ.

    Of the settings, `only` some are compared where others are not yet known.
    """
    recipe = begun_in(folder)
    if recipe is None:
        return None
    before, now = recipe.get("settings", {}), flat(settings)
    for key, value in now.items():
        if key in RESUME_MAY_DIFFER or key.split(".")[-1] in RESUME_MAY_DIFFER:
            continue
        if only is not None and key not in only:
            continue
        if key in FOLLOWS and value is None:
            continue
        if key in before and before[key] != value:
            raise UsageError(
                f"{folder} was begun with {key}={before[key]}, not {value}; "
                f"give the same settings to go on, or another out= to begin anew"
            )
    if recipe.get("data") != data and "split" not in recipe and split and split.bounds:
        raise UsageError(
            f"{folder} was begun by Regard {recipe.get('regard')}, which split a smaller "
            "validation part off; go on with that version, or give another out= to begin anew"
        )
    if recipe.get("data") != data:
        raise UsageError(
            f"{folder} was begun with other data than data={now.get('data')} holds now; "
            "restore them to go on, or give another out= to begin anew"
        )
    return recipe


def share_batches(settings: _S, begun: Mapping[str, Any] | None, size: int) -> _S:
    """Settings with the batches of a step over all processes: as the run was begun, or one each.

    So a run is the same on any number of processes that divides them.
    """
    before = (begun or {}).get("settings", {})
    batches = before.get("batches") or settings.batches or size
    if begun and "batches" not in before:  # begun when each process had its own
        batches = before.get("accumulate", 1) * before.get("processes", 1)
    if batches % size:
        raise UsageError(
            f"a step reads batches={batches}, which {size} processes cannot share evenly; "
            f"start as many processes as divide {batches}"
        )
    return replace(settings, batches=batches)


def other_bits(folder: Path, recipe: Mapping[str, Any]) -> list[str]:
    """Say what rounds otherwise than when a run was begun, so that it ends with other bits."""
    kernels, torch_now = native.status(), torch.__version__.split("+")[0]
    notes: list[str] = []
    if recipe.get("kernels", kernels.enabled) != kernels.enabled:
        begun = "with C kernels" if recipe["kernels"] else "without C kernels"
        notes.append(f"{begun} ({kernels} now)")
    if recipe.get("torch", torch_now) != torch_now:
        notes.append(f"with PyTorch {recipe['torch']} ({torch_now} now)")
    return [f"{folder} was begun {note}: it goes on, but rounds otherwise" for note in notes]


def write_recipe(
    folder: Path, task: str, settings: TrainSettings, data: str, more: dict[str, Any]
) -> dict[str, Any]:
    """Write recipe.json: everything that the run depends on, fully resolved."""
    recipe = {
        "regard": __version__,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "kernels": native.status().enabled,
        "task": task,
        "data": data,
        **more,
        "settings": flat(settings),
    }
    update_recipe(folder, recipe)
    return recipe


def update_recipe(folder: Path, values: Mapping[str, Any]) -> None:
    """Write values into recipe.json, over those that are there."""
    path = folder / "recipe.json"
    whole = {**(read_json(path) if path.exists() else {}), **values}
    write_atomically(path, json.dumps(whole, indent=2, ensure_ascii=False) + "\n")


def save_generation(folder: Path, generation: Mapping[str, Any]) -> None:
    """Write how to decode by default."""
    text = json.dumps(dict(generation), indent=2) + "\n"
    write_atomically(folder / "generation_config.json", text)


def is_learnt(name: str) -> bool:
    """Tell whether a file is a tokenizer's or the like: not weights, not written at every start."""
    return not name.endswith(".safetensors") and name not in _REWRITTEN


def set_aside(folder: Path, quiet: bool) -> dict[str, str]:
    """Rename files that are not as they were published, and return what their hashes should be."""
    try:
        hashes = listed(folder)
    except UsageError as error:
        log(f"{error}; all is published again", quiet)
        (folder / SUMS).replace(folder / f"{SUMS}.damaged")
        return {}
    broken = damaged(folder, hashes)
    for path in (folder / name for name in broken):
        log(f"{path}: damaged or changed, so it is made again; see {path.name}.damaged", quiet)
        if path.exists():
            path.replace(path.with_name(f"{path.name}.damaged"))
    return {name: hashes[name] for name in broken}


def hash_frozen(model: nn.Module) -> str | None:
    """Return a hash of the parameters that are not trained, if there are any."""
    frozen = [(name, p) for name, p in model.named_parameters() if not p.requires_grad]
    digest = hashlib.sha256()
    for name, parameter in frozen:
        digest.update(name.encode())
        digest.update(parameter.detach().cpu().numpy().tobytes())
    return digest.hexdigest() if frozen else None


def parameters(model: nn.Module) -> int:
    """Return the number of parameters, without adapters."""
    apart = set(adapters(model))
    return sum(p.numel() for p in model.parameters() if p not in apart)


def trainable(model: nn.Module) -> str:
    """Say how many parameters are trained, if those are not all."""
    count = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return "" if count == parameters(model) else f" ({count:,} of them trained)"


def model_card(
    name: str,
    title: str,
    scores: Mapping[str, float],
    count: int,
    threads: int,
    baselines: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
    chosen: str = "",
) -> str:
    """Write the README of a trained model: what it is, how it came about, how good it is.

    `chosen` says which settings follow from the data.
    """
    rows = [f"| {k} | {v:.4g} |" for k, v in scores.items() if k != "better"]
    for who, row in baselines.items() if scores else ():
        rows += [f"| baseline, {who}: {k} | {v:.4g} |" for k, v in row.items()]
    return "\n".join(
        [
            f"# A model for `{name}`",
            "",
            f"{title}, {count:,} parameters, "
            f"trained by Regard {__version__} on {threads} threads. "
            "`recipe.json` holds every setting.",
            "",
            *([f"{chosen[0].upper()}{chosen[1:]}.", ""] if chosen else []),
            *(["| on the validation part | |", "|---|---|"] if scores else [_UNSCORED, ""]),
            *rows,
            "",
        ]
    )
