"""Write regard/tasks/train_keys.py: keys of `train` by task, for type checkers to find typos.

python bench/train_keys.py
"""

import inspect
from pathlib import Path
from textwrap import fill

import regard
from regard.recipes import RECIPES, recipe
from regard.settings import describe
from regard.tasks import TASKS, task

# tasks that train another one where the data are of another kind
ALSO = {"classify": ("images", "sounds", "series")}
HEAD = '''"""Keys of `train` for each task, for type checkers; written by bench/train_keys.py."""

# ruff: noqa
# fmt: off
from pathlib import Path
from typing import Any, Literal, TypedDict


class Given(TypedDict, total=False):
    data: Any; valid: Any; test: Any; out: str | Path | None; init: str | Path | None
    size: str | None; minutes: float | None; steps: int | None; epochs: float | None
    lr: float | None; batch_tokens: int | None; dropout: float | None; seed: int | None
    device: str | None; callbacks: Any; quiet: bool; use: Any

'''


def trained() -> list[str]:
    """Names of the tasks that are trained."""
    return [name for name in TASKS if name not in ("fill", "embed")]


def keys_of(name: str) -> set[str]:
    """Keys that a task takes in Python beside the parameters of `regard.train`."""
    kind = task(name)
    known = {row.key for row in describe(kind.Train)} | {*kind.short}
    known |= set(kind.Train.__dataclass_fields__) - {"model"}
    known = {key for key in known if key.isidentifier()}
    known -= set(inspect.signature(regard.train).parameters)
    return known.union(*map(keys_of, ALSO.get(name, ())))


def text() -> str:
    """The module: what all tasks take, then of each task its names and what it takes beside."""
    keys = {name: keys_of(name) for name in trained()}
    common = set.intersection(*keys.values())
    parts = [HEAD, _typed("Common", common), "class OtherKeys(Given, Common): ...\n"]
    for name, some in keys.items():
        kind = name.title()
        names = [name, *(each for each in RECIPES if name == recipe(each).TASK)]
        parts.append(f"\n{kind} = Literal[{', '.join(map(repr, names))}]\n".replace("'", '"'))
        parts.append(_typed(f"{kind}Own", some - common))
        parts.append(f"class {kind}Keys(Given, Common, {kind}Own): ...\n")
    return "".join(parts)


def _typed(name: str, keys: set[str]) -> str:
    pairs = fill(", ".join(f'"{key}":~Any' for key in sorted(keys)), 96).replace("~", " ")
    return f'{name} = TypedDict("{name}", {{\n{pairs}\n}}, total=False)\n'


if __name__ == "__main__":
    (Path(__file__).parent.parent / "regard" / "tasks" / "train_keys.py").write_text(text())
