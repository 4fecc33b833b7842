"""The models that ship with the package: small, attributed, and at work."""

import os
from pathlib import Path

import pytest

import regard
from regard.api import starters

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[2] / "shared" / "data"))


def test_the_starters_are_small_and_say_whose_data_they_learnt_from():
    found = starters()
    assert {"en-zh", "fashion", "shakespeare"} <= set(found)
    files = [file for folder in found.values() for file in folder.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 15 * 2**20
    for folder in found.values():
        assert "trained on" in (folder / "ATTRIBUTION.md").read_text()
        assert "about" in (folder / "config.json").read_text()


@pytest.mark.skipif(not (DATA / "fashion-mnist").exists(), reason="no Fashion-MNIST here")
def test_the_starter_knows_clothes_that_it_was_not_trained_on():
    found = regard.evaluate(
        "fashion", data=str(DATA / "fashion-mnist"), part="valid", valid="0.05", batch=256
    )
    scores = {score.name: score.value for score in found.scores}
    assert scores["accuracy"] > 93.5
