"""A training run in its folder: what every task does around the loop."""

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from regard import __version__
from regard.errors import Mistake
from regard.files import write_atomically
from regard.models.folder import read_json

# settings that may differ when a run is taken up again, since they do not change what it computes
FREE = {"out", "device", "threads", "compile", "save_every", "test"}
# parts of a model's config that may differ from those of the model it starts from
HARMLESS = {"dropout", "attention_dropout", "ffn_dropout", "max_length"}


def cache_folder() -> Path:
    """Return where tokenised data are kept between runs (REGARD_CACHE, or the user's cache)."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "regard"
    return Path(os.environ.get("REGARD_CACHE", default))


def flat(settings: Any, prefix: str = "") -> dict[str, Any]:
    """Lay nested settings out by dotted keys, as a user would write them."""
    found: dict[str, Any] = {}
    for item in dataclasses.fields(settings):
        value = getattr(settings, item.name)
        key = prefix + item.metadata.get("key", item.name)
        if dataclasses.is_dataclass(value):
            found |= flat(value, key + ".")
        else:
            found[key] = list(value) if isinstance(value, tuple) else value
    return found


def recall(folder: Path, settings: Any, data: str) -> dict[str, Any] | None:
    """Return the recipe of a run that was begun here, or refuse settings or data that differ."""
    path = folder / "recipe.json"
    if not path.exists():
        return None
    recipe = read_json(path)
    before, now = recipe.get("settings", {}), flat(settings)
    for key, value in now.items():
        if key in FREE or key.split(".")[-1] in FREE:
            continue
        if key in before and before[key] != value:
            raise Mistake(
                f"{folder} was begun with {key}={before[key]}, not {value}; "
                f"give the same settings to go on, or another out= to begin anew"
            )
    if recipe.get("data") != data:
        raise Mistake(
            f"{folder} was begun with other data than data={now.get('data')} holds now; "
            "restore them to go on, or give another out= to begin anew"
        )
    return recipe


def write_recipe(folder: Path, task: str, settings: Any, data: str, more: dict[str, Any]) -> dict:
    """Write recipe.json: everything that the run depends on, fully resolved."""
    recipe = {
        "regard": __version__,
        "torch": torch.__version__.split("+")[0],
        "python": platform.python_version(),
        "task": task,
        "data": data,
        **more,
        "settings": flat(settings),
    }
    write_atomically(
        folder / "recipe.json", json.dumps(recipe, indent=2, ensure_ascii=False) + "\n"
    )
    return recipe


def use_threads(threads: int | None) -> int:
    """Use so many threads, or as many as the machine has cores."""
    if threads:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def tell(message: str, quiet: bool = False) -> None:
    """Say something to the user beside the results."""
    if not quiet:
        print(message, file=sys.stderr, flush=True)


def shorten(values: Mapping[str, Any]) -> str:
    """Write settings as words of a command."""
    return " ".join(f"{key}={value}" for key, value in values.items())


@dataclasses.dataclass(frozen=True)
class Report:
    """How a training went."""

    folder: str
    step: int
    steps: int
    finished: bool
    scores: dict[str, float]

    def __str__(self) -> str:
        told = ", ".join(f"{k} {v:.4g}" for k, v in self.scores.items() if k != "better")
        if self.finished:
            return f"{self.folder}: finished after {self.step:,} steps" + (
                f"; {told}" if told else ""
            )
        return (
            f"{self.folder}: stopped and saved at step {self.step:,} of {self.steps:,}; "
            "give the same command again to go on"
        )


def start_from(model: torch.nn.Module, folder: str) -> None:
    """Give a model the weights of a trained one of the same shape."""
    from regard.models.folder import load_folder

    other, _ = load_folder(Path(folder))
    before = flat(other.config)
    for key, value in flat(model.config).items():
        if before[key] != value and key.split(".")[-1] not in HARMLESS:
            raise Mistake(
                f"init={folder} has {key}={before[key]}, not {value}; describe the same model"
            )
    theirs = dict(other.named_parameters())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if theirs[name].shape != parameter.shape:
                raise Mistake(
                    f"init={folder}: its weights do not fit at {name}; use the same model"
                )
            parameter.copy_(theirs[name])


def model_card(
    task: str, settings: Any, corpus: Any, scores: dict, count: int, threads: int
) -> str:
    """Write the README of a trained model: what it is, how it came about, how good it is."""
    rows = [f"| {k} | {v:.4g} |" for k, v in scores.items() if k != "better"]
    return "\n".join(
        [
            f"# A model for `{task}`",
            "",
            f"{corpus.source or 'source'} to {corpus.target or 'target'}, {count:,} parameters, "
            f"trained by Regard {__version__} on {threads} threads. "
            "`recipe.json` holds every setting.",
            "",
            "| on the validation part | |",
            "|---|---|",
            *rows,
            "",
        ]
    )
