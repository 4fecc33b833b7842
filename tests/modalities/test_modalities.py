"""Laws of modalities: nobody who should ask one knows it by its name."""

import importlib.util
from pathlib import Path

from regard.modalities import MODALITIES
from regard.tasks import TASKS, task

BENCH = Path(__file__).parents[2] / "bench" / "house.py"
LEFT = {"api.py", "insight/feature_page.py"}  # which still name some


def test_modalities_are_asked_and_not_named():
    spec = importlib.util.spec_from_file_location("house", BENCH)
    assert spec and spec.loader
    house = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(house)
    assert set(house.modality_files()) <= LEFT


def test_a_modality_names_tasks_that_read_it():
    for modality in MODALITIES.values():
        for target, name in modality.tasks.items():
            kind = task(name)
            assert name in TASKS and kind.inputs is modality and kind.target == target
