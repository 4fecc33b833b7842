"""Settings that stand in a file: a TOML file of keys, or the recipe.json of a run to repeat."""

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import read_json, read_text
from regard.recipes import RECIPES
from regard.settings import written
from regard.tasks import TASKS
from regard.tasks import task as task_class
from regard.training.plan import DURATION_KEYS

_MOST_BYTES = 1 << 20
_PLACES = {"out", "batches"}  # of the run itself, which another has anew


def is_given(name: str) -> bool:
    """True if a word is a file of settings or the folder of a run; names of tasks go first."""
    if name in TASKS or name in RECIPES:
        return False
    return name.endswith(".toml") or (Path(name) / "recipe.json").is_file()


def unfold(name: str, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """A task or recipe with all settings, where a file or a run may stand for both.

    What is given beside it goes before what it says.
    """
    if not is_given(name):
        return name, dict(settings)
    return (_of_file if name.endswith(".toml") else _of_run)(Path(name), settings)


@contextmanager
def naming(name: str, settings: Mapping[str, Any]) -> Iterator[None]:
    """Name the file in a refusal of a key that only the file sets."""
    try:
        yield
    except UsageError as error:
        text = str(error)
        keys = unfold(name, {})[1] if name.endswith(".toml") and Path(name).is_file() else {}
        blamed = (key for key in keys if key not in settings)
        if not text.startswith(name) and any(
            f"'{key}'" in text or text.startswith(f"{key}=") for key in blamed
        ):
            raise UsageError(f"{name}: {text}") from None
        raise


def _of_file(path: Path, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    try:
        found = tomllib.loads(read_text(path, _MOST_BYTES))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"{path}: not TOML ({str(error)[:100]})") from None
    values = dict(_flat(found, ""))
    task, recipe = values.pop("task", None), values.pop("recipe", None)
    name = recipe or task
    if not isinstance(name, str) or (task and recipe) or is_given(name):
        raise UsageError(f'{path}: it must say what to train; add task = "translate", or recipe')
    return name, _changed(values, settings, task)


def _of_run(folder: Path, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """What was given to a run; of one by an older version all settings, which hold as they are."""
    told = read_json(folder / "recipe.json")
    task, recipe = told.get("task"), told.get("recipe")
    values = told.get("given", told.get("settings"))
    if not isinstance(values, dict) or task not in TASKS:
        raise UsageError(f"{folder / 'recipe.json'}: does not say what was trained")
    if not settings.get("out"):
        raise UsageError(f"out is missing; add out=FOLDER for the run that repeats {folder}")
    if "given" not in told and (fixed := {"size", "like", "family"} & set(settings)):
        raise UsageError(
            f"{folder}: was begun before Regard noted what was given, so {min(fixed)}= cannot "
            "change in it; give the whole command instead"
        )
    kept = {key: value for key, value in values.items() if key not in _PLACES and value is not None}
    if any(settings.get(key) is not None for key in DURATION_KEYS):
        follows = (*DURATION_KEYS, *(("warmup", "valid_every") if recipe else ()))
        kept = {key: value for key, value in kept.items() if key not in follows}
    return recipe or task, _changed(kept, settings, task)


def _changed(
    values: Mapping[str, Any], settings: Mapping[str, Any], task: str | None
) -> dict[str, Any]:
    """Values with others in their place, whether the short or the long key was written."""
    short = task_class(task).short if task in TASKS else {}

    def long(key: str) -> tuple[str, ...]:
        found = short.get(key, key)
        return (found,) if isinstance(found, str) else found

    given = {one for key, value in settings.items() if value is not None for one in long(key)}
    return {k: v for k, v in values.items() if not given & {*long(k)}} | dict(settings)


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            plain = isinstance(value, str | int | float | list)
            yield prefix + key, value if plain else written(value)
