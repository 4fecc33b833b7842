"""Published runs by name; the docstring of each states its command, time and score."""

import os
import re
from collections import ChainMap
from importlib import import_module
from pathlib import Path
from shutil import get_terminal_size
from textwrap import wrap
from types import ModuleType
from typing import Any, NamedTuple

from regard.errors import UsageError, lookup
from regard.tasks import TASKS
from regard.verbs import Listing

# name, also of the module, in the order of `regard recipes`
RECIPES = {
    name: f"regard.recipes.{name}"
    for name in (
        "multi30k_en_de",
        "ladder_multi30k",
        "decoder_multi30k",
        "tatoeba_en_zh",
        "text_many",
        "wikitext2_lab",
        "wikitext2_masked",
        "shakespeare_lab",
        "shakespeare",
        "shakespeare_nano",
        "trec",
        "trec_tuned",
        "sst2",
        "ud_ewt_upos",
        "japanese_vowels",
        "basic_motions",
        "fashion",
        "cifar10",
        "cifar10_pretrain",
        "flickr8k_caption",
        "fashion_painter",
        "drawn_scenes",
        "denoise_train400",
        "an4",
        "fsdd",
    )
}


class RecipeEntry(NamedTuple):
    """A recipe as it is trained."""

    examples: tuple[str, str]


# what can be trained: a task, even one that a user adds, or a recipe
TRAININGS: ChainMap[str, Any] = ChainMap(
    TASKS,
    {
        name: RecipeEntry(
            (f"regard train {name} out=runs/{name}", f"regard train {name} minutes=10")
        )
        for name in RECIPES
    },
)


def recipe(name: str) -> ModuleType:
    """Return the module of a recipe: TASK, DATA, SETTINGS, and a docstring with its scores.

    One that compares has VARIANTS, the settings by like=, with a task where that differs; COMPARE,
    the settings of `compare`; and EVAL, those by which its models are evaluated against each other
    in the end.
    """
    return import_module(lookup("recipe", name, RECIPES))


def data_folder(name: str) -> str:
    """Return the path of a data set by name: in REGARD_DATA, or beside the project."""
    folder = _shared() / name
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: no such data; give data=FOLDER, or set REGARD_DATA to its parent"
        )
    return str(folder)


def resolve_data(path: Any) -> Any:
    """Return the path of data; a name that is no path may be that of a set in REGARD_DATA."""
    if not isinstance(path, str) or not path or Path(path).exists():
        return path
    ours = _shared() / path
    return str(ours) if ".." not in Path(path).parts and ours.exists() else path


def _shared() -> Path:
    return Path(os.environ.get("REGARD_DATA", Path("..") / "shared" / "data"))


class Promises(Listing):
    """Recipes with what each promises: what it is, how long it takes, and what it gives."""

    def __str__(self) -> str:
        width = max(map(len, self), default=0)
        wide = max(60, min(get_terminal_size((100, 24)).columns, 120)) - width - 2
        lines = []
        for name, told in self.items():
            body, *parts = re.split(r" (?=(?:Command|Takes|Gives): )", told)
            first = re.split(r"(?<=[.:]) ", body)[0]
            shown = [first, *(part for part in parts if not part.startswith("Command"))]
            rows = [row for part in shown for row in wrap(part, wide, subsequent_indent="       ")]
            lines += [f"{name if n == 0 else '':{width}}  {row}" for n, row in enumerate(rows)]
        return "\n".join([*lines, "", "regard train NAME [data=...] follows one; --json tells all"])


def list_recipes() -> Promises:
    """List the recipes with what they promise."""
    return Promises({name: " ".join((recipe(name).__doc__ or "").split()) for name in RECIPES})
