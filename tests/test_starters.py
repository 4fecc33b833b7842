"""The models that ship with the package: small, attributed, and at work."""

import os
from pathlib import Path

import pytest

import regard
from regard.api import starters

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[2] / "shared" / "data"))


def test_the_starters_are_small_and_say_whose_data_they_learnt_from():
    found = starters()
    assert {"digits", "en-zh", "fashion", "letters", "shakespeare", "tag"} <= set(found)
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


@pytest.mark.skipif(not (DATA / "an4").exists(), reason="no AN4 here")
def test_the_starter_writes_what_speakers_spell_that_it_has_not_heard():
    found = regard.evaluate("letters", data=str(DATA / "an4"), part="valid", beam=1, threads=1)
    scores = {score.name: score.value for score in found.scores}
    assert scores["WER"] < 15


@pytest.mark.skipif(not (DATA / "fsdd").exists(), reason="no FSDD here")
def test_the_starter_knows_digits_that_it_was_not_trained_on():
    found = regard.evaluate("digits", data=str(DATA / "fsdd"), part="test", threads=1)
    scores = {score.name: score.value for score in found.scores}
    assert scores["accuracy"] > 97


@pytest.mark.skipif(not (DATA / "ud-en-ewt").exists(), reason="no UD English EWT here")
def test_the_starter_knows_the_parts_of_speech_of_sentences_that_it_was_not_trained_on():
    found = regard.evaluate("tag", data=str(DATA / "ud-en-ewt"), part="valid", threads=1)
    scores = {score.name: score.value for score in found.scores}
    assert scores["accuracy"] > 94


def test_the_starter_tags_a_text_as_people_write_it():
    (found,) = regard.load("tag").run(["I can't believe she's in Paris!"], words="raw")
    tagged = "I/PRON ca/AUX n't/PART believe/VERB she/PRON 's/AUX in/ADP Paris/PROPN !/PUNCT"
    assert str(found) == tagged
