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
