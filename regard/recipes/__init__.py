"""Published runs by name; the docstring of each is its promise."""

import os
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from regard.errors import UsageError, lookup

RECIPES = {
    "multi30k_en_de": "regard.recipes.multi30k_en_de",
    "ladder_multi30k": "regard.recipes.ladder_multi30k",
    "tatoeba_en_zh": "regard.recipes.tatoeba_en_zh",
    "wikitext2_lab": "regard.recipes.wikitext2_lab",
    "shakespeare_lab": "regard.recipes.shakespeare_lab",
    "shakespeare": "regard.recipes.shakespeare",
    "shakespeare_nano": "regard.recipes.shakespeare_nano",
    "trec": "regard.recipes.trec",
    "trec_tuned": "regard.recipes.trec_tuned",
    "sst2": "regard.recipes.sst2",
    "ud_ewt_upos": "regard.recipes.ud_ewt_upos",
    "fashion": "regard.recipes.fashion",
    "cifar10": "regard.recipes.cifar10",
    "cifar10_pretrain": "regard.recipes.cifar10_pretrain",
    "flickr8k_caption": "regard.recipes.flickr8k_caption",
    "denoise_train400": "regard.recipes.denoise",
}


def recipe(name: str) -> ModuleType:
    """Return the module of a recipe: TASK, SETTINGS, and a docstring that promises.

    One that compares has ROWS, what differs by like=; COMPARE, the keys of `compare`; and EVAL, by
    which its models are judged against each other in the end.
    """
    return import_module(lookup("recipe", name, RECIPES))


def data_folder(name: str) -> str:
    """Return where a data set of ours lies: in REGARD_DATA, or beside the project."""
    folder = _shared() / name
    if not folder.is_dir():
        raise UsageError(
            f"{folder}: no such data; give data=FOLDER, or set REGARD_DATA to its parent"
        )
    return str(folder)


def found_data(path: Any) -> Any:
    """Return the path of data; a name that is no path here may be one of a set in REGARD_DATA."""
    if not isinstance(path, str) or not path or Path(path).exists():
        return path
    ours = _shared() / path
    return str(ours) if ".." not in Path(path).parts and ours.exists() else path


def _shared() -> Path:
    return Path(os.environ.get("REGARD_DATA", Path("..") / "shared" / "data"))
