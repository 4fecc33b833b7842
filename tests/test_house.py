"""How the package is built, held by what bench/house.py measures."""

import ast
import importlib.util
import inspect
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from types import ModuleType
from typing import Any

import pytest

import regard
from regard.api import load, starters
from regard.tasks import TASKS, task
from regard.tasks.parts import Task
from regard.tasks.runner import Runner


@pytest.fixture(scope="module")
def house() -> ModuleType:
    path = Path(__file__).parent.parent / "bench" / "house.py"
    spec = importlib.util.spec_from_file_location("house", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_load_returns_inherits_hardly_anything(house):
    assert all(isinstance(task(name), Task) for name in TASKS)
    assert {type(load(name)) for name in starters()} == {Runner}
    assert house.own_classes(Runner) <= 2


def test_hardly_a_name_has_two_meanings(house):
    twice, imported = house.two_meanings()
    assert len(twice) <= 10 and len(imported) <= 3, sorted(twice)


def test_two_meanings_are_found(house, tmp_path, monkeypatch):
    package = tmp_path / "regard"
    package.mkdir()
    (package / "a.py").write_text("class Row: ...\nSIZE = 1\nOWN = 2\n")
    (package / "b.py").write_text("class Row: ...\nSIZE = 3\nfrom regard.a import Row as Other\n")
    (package / "c.py").write_text("from regard.b import Row\n")
    monkeypatch.setattr(house, "PACKAGE", package)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert house.two_meanings() == ({"Row", "SIZE"}, {"Row"})


def test_a_constant_that_a_table_looks_up_has_one_meaning_in_its_folder(
    house, tmp_path, monkeypatch
):
    for folder in ("families", "formats"):
        (tmp_path / "regard" / folder).mkdir(parents=True)
        (tmp_path / "regard" / folder / "a.py").write_text("SIZES = 1\nINFO = [SIZES]\n")
    (tmp_path / "regard" / "families" / "b.py").write_text("SIZES = 2\nINFO = [SIZES]\n")
    monkeypatch.setattr(house, "PACKAGE", tmp_path / "regard")
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert house.two_meanings()[0] == {"SIZES", "INFO"}
    (tmp_path / "regard" / "table.py").write_text("def info(path):\n    return load(path).INFO\n")
    assert house.two_meanings()[0] == {"SIZES", "INFO"}  # still those of two folders
    (tmp_path / "regard" / "formats" / "a.py").unlink()
    assert house.two_meanings() == (set(), set())


# Parameters


def takes_many(function: Callable[..., Any]) -> bool:
    """True if a function has five parameters or more, `self`, `*args` and `**kwargs` left out."""
    taken = inspect.signature(function).parameters.values()
    named = [each for each in taken if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    return len([each for each in named if each.name != "self"]) >= 5


def without_args(module: ModuleType) -> Iterator[str]:
    """Public functions and methods of a module with many parameters and no `Args:`.

    A constructor is documented by its class, an override by what it overrides; the fields of a
    dataclass are its parameters.
    """
    for name, value in vars(module).items():
        if name.startswith("_") or getattr(value, "__module__", "") != module.__name__:
            continue
        if inspect.isclass(value):
            for key, member in vars(value).items():
                function = getattr(member, "__func__", member)
                if not inspect.isfunction(function) or key.startswith("_") and key != "__init__":
                    continue
                bases = [base for base in value.__mro__ if key in vars(base)]
                texts = [getattr(base, key).__doc__ or "" for base in bases]
                if key == "__init__":
                    texts += [base.__doc__ or "" for base in bases]
                made = function.__code__.co_filename == "<string>"  # by dataclass
                if not made and takes_many(function) and "Args:" not in "".join(texts):
                    yield f"{module.__name__}.{name}.{key}"
        elif (
            inspect.isfunction(value) and takes_many(value) and "Args:" not in (value.__doc__ or "")
        ):
            yield f"{module.__name__}.{name}"


@pytest.mark.parametrize("part", ["attention", "layers", "models", "decode", "training", "viewer"])
def test_many_parameters_are_documented(part: str):
    folder = [str(Path(regard.__path__[0]) / part)]
    names = [found.name for found in walk_packages(folder, f"regard.{part}.")]
    modules = [import_module(name) for name in [f"regard.{part}", *names]]
    assert [name for module in modules for name in without_args(module)] == []


def test_parameters_without_a_word_are_found():
    module = ModuleType("toy")
    source = """
def few(a, b, c, d): ...
def many(a, b, c, d, e): ...
def told(a, b, c, d, e):
    "Sum. Args:"
class Base:
    def __init__(self, a, b, c, d, e): ...
    def run(self, a, b, c, d, e):
        "Args:"
class Derived(Base):
    def run(self, a, b, c, d, e): ...
"""
    exec(compile(source, "toy.py", "exec"), vars(module))
    assert list(without_args(module)) == ["toy.many", "toy.Base.__init__"]


def _taken(node: ast.FunctionDef) -> list[ast.arg]:
    return [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]


def test_search_takes_its_options_whole():
    """No function of decode/ has more than eight parameters."""
    many = [
        f"{path.name}: {node.name}"
        for path in Path(regard.__file__).parent.joinpath("decode").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef)
        and sum(each.arg not in ("self", "cls") for each in _taken(node)) > 8
    ]
    assert not many
