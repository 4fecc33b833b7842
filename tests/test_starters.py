"""The models that ship with the package: small, attributed, and at work."""

import os
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.api import starters

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[2] / "shared" / "data"))


def test_the_starters_are_small_and_say_whose_data_they_learnt_from():
    found = starters()
    names = {"digits", "embed", "en-zh", "fashion", "fill", "letters", "shakespeare", "tag"}
    assert names <= set(found)
    files = {file for folder in found.values() for file in folder.rglob("*") if file.is_file()}
    assert sum(file.stat().st_size for file in files) < 15e6
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


def test_the_starter_fills_in_words():
    model = regard.load("fill")
    assert str(model.run("The album was [MASK] in 2004.")) == "The album was released in 2004."
    assert str(model.run("the film was directed [MASK] john smith .")).split()[4] == "by"


def test_texts_of_one_kind_have_vectors_that_are_closer():
    model = regard.load("embed")
    assert model.name == regard.api.model_task("embed") == "embed"
    battle, troops, album = (
        np.array(answer.vector)
        for answer in model.run(
            ["The army won the battle.", "The troops defeated the enemy.", "The album sold well."]
        )
    )
    assert battle @ troops > 0.8 > 0.6 > battle @ album
