"""The models that ship with the package: small, attributed, and at work."""

import importlib
import json
import os
import re
import shutil
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement
from packaging.version import Version

import regard
from regard.api import find_model, list_models, starters
from regard.files.hashes import verify

# the first release of a dependency without a fault that is known: those of torch, pillow, pyarrow
# and starlette as osv.dev has them (November 2026); those of the others were not looked up there
FIXED = {
    "torch": "2.11",
    "pillow": "12.3",
    "jinja2": "3.1.6",
    "pyarrow": "23.0.1",
    "transformers": "5.0",
    "sentencepiece": "0.2.1",
    "opencv-python-headless": "4.12",
    "playwright": "1.55.1",
    "pytest": "9.0.3",
}

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[2] / "shared" / "data"))


def test_the_starters_are_small_and_say_whose_data_they_learnt_from():
    found = starters()
    names = {"digits", "embed", "en-zh", "fashion", "fill", "letters", "painter", "scenes"}
    names |= {"shakespeare", "tag"}
    assert names <= set(found)
    files = {file for folder in found.values() for file in folder.rglob("*") if file.is_file()}
    assert sum(file.stat().st_size for file in files) < 30e6
    for folder in found.values():
        assert "trained on" in (folder / "ATTRIBUTION.md").read_text()
        assert "about" in (folder / "config.json").read_text()


def test_the_starters_say_under_which_licence_their_weights_are_offered():
    listed = list_models()
    for name, folder in starters().items():
        licence = json.loads((folder / "config.json").read_text())["licence"]
        told = (folder / "ATTRIBUTION.md").read_text()
        assert f"offered under {licence}\n" in told and f"weights under {licence})" in listed[name]
        assert "BY-SA" not in told.partition("\nLicence:")[0] or "BY-SA" in licence
        verify(folder)  # and the folder is sealed with it


def test_a_folder_with_the_name_of_a_starter_is_told_of(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "tag" / "train.tsv"
    data.parent.mkdir()
    data.write_text("a\tb\n")
    assert find_model("tag") == starters()["tag"]  # a folder of data is no model
    assert "tag: the starter, as the folder" in capsys.readouterr().err
    shutil.copytree(starters()["tag"], tmp_path / "fill")
    assert find_model("fill") == Path("fill")
    assert "not the starter of this name" in capsys.readouterr().err
    assert regard.load("fill").name == "tag"


def test_every_dependency_is_at_a_release_without_known_faults_and_is_tried():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    asked = [Requirement(one) for one in sum(extras, project["dependencies"])]
    pins = dict(
        line.casefold().split("==")
        for line in (root / "constraints.txt").read_text().splitlines()
        if "==" in line and not line.startswith("#")
    )
    floors = {one.name: min(one.specifier, key=str).version for one in asked if one.specifier}
    for name, floor in floors.items():
        assert Version(floor) <= Version(pins.get(name.casefold(), floor))
    for name, fixed in FIXED.items():
        assert Version(floors[name]) >= Version(fixed), name


def test_every_dependency_but_those_of_tests_is_imported_by_the_package():
    root = Path(__file__).parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = [asked for name, asked in project["optional-dependencies"].items() if name != "dev"]
    text = "\n".join(path.read_text() for path in (root / "regard").rglob("*.py"))
    modules = {
        name.casefold() for name in re.findall(r"(?:import|from) (?:torch\.utils\.)?(\w+)", text)
    }
    names = {"pillow": "pil", "scikit-learn": "sklearn", "mlflow-skinny": "mlflow"}
    # torch.onnx imports onnx; Ray is given a class of regard.cluster
    within = {"onnx", "onnxscript", "ray"}
    asked = [Requirement(one).name.casefold() for one in sum(extras, project["dependencies"])]
    assert [n for n in asked if names.get(n, n) not in modules and n not in within] == []


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


def test_the_starter_tells_scenes_that_were_just_drawn_and_its_words_point(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "bench"))
    scenes, pointing = (importlib.import_module(name) for name in ("scenes", "pointing"))
    scenes.main(tmp_path, seed=7, train=0, valid=60, test=0)
    found = pointing.judged("scenes", tmp_path, "valid", beam=1, threads=1)
    shares = {name: np.mean(hits) for name, hits in found.items()}
    assert shares["right"] >= 0.9 and len(found["colour"]) == len(found["shape"]) > 80
    assert shares["colour"] >= 0.9 and shares["shape"] >= 0.8 > 0.1 > shares["covered"]


@pytest.mark.skipif(not (DATA / "fashion-mnist").exists(), reason="no Fashion-MNIST here")
def test_the_painter_turns_clothes_into_numbers_and_numbers_into_clothes():
    size = sum(file.stat().st_size for file in starters()["painter"].iterdir())
    assert size < 1e6
    model = regard.load("painter")
    pixels = model.read_part_of(str(DATA / "fashion-mnist"), "valid")["valid"].read(range(200))
    assert len(model.run(pixels[0, 0].numpy()).vector) == model.model.out_width
    whole, seen = model.predictor.whole(), model.codec.format.normalise(pixels)
    with torch.inference_mode():
        means, _ = whole.encode(seen)
        painted = whole.decode(means)
    assert means.shape == (200, 24)
    left, all_of_it = (painted - seen).square().mean(), seen.var(0).mean()
    assert left < 0.35 * all_of_it  # of what differs between clothes, most comes back


def test_the_starter_tags_a_text_as_people_write_it():
    model = regard.load("tag")
    (found,) = model.run(["I can't believe she's in Paris!"])
    tagged = "I/PRON ca/AUX n't/PART believe/VERB she/PRON 's/AUX in/ADP Paris/PROPN !/PUNCT"
    assert str(found) == tagged == model.picture("I can't believe she's in Paris!").output
    # what is tokenised already is told so, or given as words
    words = ["The", "cat", "sleeps."]
    assert model.run(" ".join(words), words="spaces").words == model.run([words])[0].words == words


def test_starters_say_what_they_are_not_good_for():
    told = list_models()
    assert all("not good for" in told[name] for name in ("embed", "fill"))


@pytest.mark.skipif(not (DATA / "an4").exists(), reason="no AN4 here")
def test_letters_are_read_at_three_speeds_and_a_picture_shows_what_run_writes():
    model = regard.load("letters")
    assert model.check({}).speeds == (0.9, 1.0, 1.1)
    part = model.read_part_of(str(DATA / "an4"), "valid")["valid"]
    noise = np.random.default_rng(0).normal(0, 0.1, 16_000).astype(np.float32)
    sounds = [*(part.read(i) for i in range(0, 60, 6)), noise]
    said = [str(answer) for answer in model.run(sounds)]
    assert [model.picture(sound).output for sound in sounds] == said
    assert said[-1] == "" != said[0]
    # one text for a sound, whatever asks: also where the likeliest at one speed is another
    alone = [str(answer) for answer in model.run(sounds, speeds=1.0)]
    assert alone != said
    # aligning is done at the speed of the sound
    assert str(model.run(sounds[0], forced=said[0])) == said[0]


def test_the_starter_fills_in_words():
    model = regard.load("fill")
    assert str(model.run("The album was [MASK] in 2004.")) == "The album was released in 2004."
    assert str(model.run("the film was directed [MASK] john smith .")).split()[4] == "by"


def test_texts_of_one_kind_have_vectors_that_are_closer():
    model = regard.load("embed")
    assert model.name == "embed"
    battle, troops, album = (
        np.array(answer.vector)
        for answer in model.run(
            ["The army won the battle.", "The troops defeated the enemy.", "The album sold well."]
        )
    )
    assert battle @ troops > 0.8 > 0.6 > battle @ album
