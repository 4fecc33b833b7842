"""How the package is built, held by what bench/house.py measures."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

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


def test_names_with_two_meanings_do_not_grow_more(house):
    """The goal is ten: lower the bounds whenever fewer are left."""
    twice, imported = house.two_meanings()
    assert len(twice) <= 152 and len(imported) <= 14


def test_two_meanings_are_found(house, tmp_path, monkeypatch):
    package = tmp_path / "regard"
    package.mkdir()
    (package / "a.py").write_text("class Row: ...\nSIZE = 1\nOWN = 2\n")
    (package / "b.py").write_text("class Row: ...\nSIZE = 3\nfrom regard.a import Row as Other\n")
    (package / "c.py").write_text("from regard.b import Row\n")
    monkeypatch.setattr(house, "PACKAGE", package)
    monkeypatch.setattr(house, "ROOT", tmp_path)
    assert house.two_meanings() == ({"Row", "SIZE"}, {"Row"})
