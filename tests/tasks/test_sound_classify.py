"""Labels of sounds: tones are told apart, whatever their length, padding and neighbours."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

import regard
from regard.cli import main
from regard.data.sound_sets import name_pattern
from regard.errors import UsageError
from regard.tasks import task_for
from tests.tones import RATE, TONES, tones
from tests.zoo import ANIMALS

SMALL = {**ANIMALS["sounds"].settings, "quiet": True, "steps": 1, "valid_every": 1}
del SMALL["valid"]


@pytest.fixture(scope="module")
def data(zoo) -> Path:
    return zoo.data("sounds")


@pytest.fixture(scope="module")
def run(zoo) -> Path:
    return zoo.model("sounds")


@pytest.fixture(scope="module")
def model(run):
    return regard.load(run, task="sounds")


def flat(folder: Path) -> Path:
    """Write sounds of two speakers into one folder, with label, speaker and take in their names."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    for take in range(10):
        for speaker in ("ann", "bob"):
            for letter in "AB":
                path = folder / f"{letter}_{speaker}_{take}.flac"
                soundfile.write(path, tones(letter, rng), RATE)
    return folder


def test_classify_leaves_sounds_to_their_own_task(data, run):
    assert task_for("classify", {"data": str(data)}) == "sounds"
    assert json.loads((run / "config.json").read_text())["task"] == "sounds"


def test_it_learns_and_is_judged_beside_baselines(run, data):
    judged = regard.evaluate(run, data=data, part="valid")
    assert judged["accuracy"] > 90 and judged["macro_f1"] > 90
    assert set(judged.baselines) == {"the commonest label", "a linear model of band energies"}
    recipe = json.loads((run / "recipe.json").read_text())
    assert recipe["baselines"].keys() == judged.baselines.keys() and recipe["labels"] == 3


def test_an_answer_does_not_depend_on_the_neighbours(model):
    rng = np.random.default_rng(5)
    sounds = [tones("ABC"[n % 3] * (1 + n % 4), rng) for n in range(12)]
    together = model.run(sounds)
    for samples, answer in zip(sounds, together, strict=True):
        alone = model.run(samples)
        assert alone.label == answer.label
        assert alone.probabilities == pytest.approx(answer.probabilities, abs=1e-5)


def test_labels_and_probabilities_are_printed(run, model, tmp_path, capsys):
    path = tmp_path / "b.wav"
    soundfile.write(path, tones("B", np.random.default_rng(9)), RATE)
    assert main(["run", str(run), str(path), "n_best=2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("B\t") and len(lines) == 2
    assert main(["run", str(run), str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prediction"] == "B"
    with pytest.raises(UsageError, match="more than the 3 labels"):
        model.run(str(path), n_best=4)


def test_labels_and_parts_are_taken_from_names(tmp_path):
    data, out = flat(tmp_path / "flat"), tmp_path / "named"
    words = {"pattern": "{label}_{speaker}_{take}", "test": "*_bob_*", "valid": "*_[0-2].*"}
    regard.train("sounds", data=data, out=out, **SMALL, **words)
    judged = regard.evaluate(out, data=data)  # as it was trained, one speaker is the test part
    assert judged.sentences == 20 and judged.labels == ["A", "B"]
    assert all("bob" in error.text for error in judged.errors)
    assert regard.evaluate(out, data=data, part="valid").sentences == 6
    assert regard.evaluate(out, data=data, part="train").sentences == 14


@pytest.mark.parametrize(
    ("pattern", "name", "label"),
    [
        ("{label}_{speaker}_{take}", "7_nicolas_12", "7"),
        ("{speaker}-{label}", "ann-left turn", "left turn"),
        ("clip.{label}", "clip.yes", "yes"),
    ],
)
def test_a_pattern_takes_the_label_out_of_a_name(pattern, name, label):
    assert name_pattern(pattern).fullmatch(name)["label"] == label
    assert name_pattern(pattern).fullmatch("other") is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"pattern": "{speaker}_{take}"}, "expected {label} in it"),
        ({"pattern": "{label}-{take}"}, "a name unlike pattern="),
        ({"pattern": "{label}_{speaker}_{take}", "test": "*_eve_*"}, "fits no file"),
        ({"class_weights": "all"}, "unknown class_weights"),
        ({}, "lie loose"),
    ],
)
def test_names_that_mean_nothing_are_refused(tmp_path, given, why):
    data = flat(tmp_path / "flat")
    with pytest.raises(UsageError, match=why):
        regard.train("sounds", data=data, out=tmp_path / "out", **SMALL, **given)


def test_a_new_head_is_put_on_a_trained_encoder(run, tmp_path):
    data = flat(tmp_path / "flat")
    out = tmp_path / "tuned"
    how = {"pattern": "{label}_{speaker}_{take}", "steps": 2, "valid_every": 2, "quiet": True}
    regard.train("sounds", data=data, init=run, out=out, tune="head", **how)
    before, after = (dict(regard.load(one).model.named_parameters()) for one in (run, out))
    changed = {
        name for name in after if name not in before or before[name].shape != after[name].shape
    }
    assert changed and all(name.startswith("readout.") for name in changed)
    assert all(before[name].equal(after[name]) for name in after if "readout" not in name)
    assert regard.load(out).labels == ["A", "B"]


def test_spoken_digits_are_read_as_the_recipe_says(real_data):
    from regard.data.sound_sets import SoundOptions
    from regard.data.sounds import load_sounds
    from regard.data.spectrogram import SoundFormat
    from regard.recipes import fsdd

    if not (real_data / "fsdd").is_dir():
        pytest.skip("no fsdd in the data folder")
    read = load_sounds(
        str(real_data / "fsdd"),
        test=fsdd.SETTINGS["test"],
        need=("train", "valid", "test"),
        format=SoundFormat(rate=8000),
        options=SoundOptions("label", pattern=fsdd.SETTINGS["pattern"]),
    )
    assert len(read.parts["test"]) == 300 and read.classes == list("0123456789")
    assert np.bincount(read.parts["test"].labels).tolist() == [30] * 10
    takes = [int(Path(item.where).stem.split("_")[2]) for item in read.parts["test"].items]
    assert set(takes) == {0, 1, 2, 3, 4}
    assert set(TONES) and not set(read.parts["test"].hashes) & set(read.parts["train"].hashes)
