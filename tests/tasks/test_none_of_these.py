"""Inputs unlike those a classifier was trained on: prepared as these were, or given no label."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageOps

import regard
from regard.data.image_format import ImageFormat, measure_ground
from regard.errors import UsageError
from regard.metrics.outliers import SHRINKAGES, Outliers
from tests.tones import RATE, sound_folders, tones

DATA = Path(os.environ.get("REGARD_DATA", Path(__file__).parents[3] / "shared" / "data"))
NONE = "none of these"
SMALL = {"steps": 60, "valid_every": 30, "depth": 1, "width": 32, "heads": 2, "ffn_width": 64}


def shape(kind: str, rng: np.random.Generator, size: int = 16) -> np.ndarray:
    """A disc or a cross, grey on black, nearly as large as the image."""
    image = Image.new("L", (size, size), 0)
    draw, level = ImageDraw.Draw(image), int(rng.integers(140, 256))
    low, high = rng.integers(1, 3), size - 1 - rng.integers(1, 3)
    if kind == "disc":
        draw.ellipse((low, low, high, high), fill=level)
    else:
        draw.line((low, size // 2, high, size // 2), fill=level, width=3)
        draw.line((size // 2, low, size // 2, high), fill=level, width=3)
    noise = rng.normal(0, 4, (size, size))
    return (np.asarray(image) + noise).clip(0, 255).astype(np.uint8)


def on_white(pixels: np.ndarray, margin: int = 30, scale: int = 8) -> Image.Image:
    """The same as a large photo on white ground, with room around it and wider than high."""
    large = Image.fromarray(255 - pixels).resize((scale * pixels.shape[1], scale * pixels.shape[0]))
    photo = Image.new("RGB", (large.width + 4 * margin, large.height + 2 * margin), "white")
    photo.paste(large, (3 * margin, margin))
    return photo


def test_an_image_is_laid_on_the_ground_of_the_training_images():
    rng = np.random.default_rng(0)
    images = np.stack([shape(kind, rng) for kind in ("disc", "cross") for _ in range(20)])
    for sign, name in ((images, "dark"), (255 - images, "light")):
        ground, content = measure_ground(sign)
        assert ground == name and content > 0.7
        format = ImageFormat(16, 1, ground=ground, content=content)
        for pixels in sign:
            notes: list[str] = []
            assert (format.read(pixels, notes=notes)[0] == pixels).all() and notes == []
        for pixels, dark in zip(sign, images, strict=True):
            notes = []
            photo = on_white(dark) if name == "dark" else ImageOps.invert(on_white(dark))
            found = format.read(photo, notes=notes)[0].astype(float)
            assert abs(found - pixels).mean() < 40  # some 200 if it were not laid on it
            assert "inverted" in notes[0] and "cropped" in notes[1]
    # without an even ground, or with nothing on it, an image stays as it is
    noise = rng.integers(0, 256, (16, 16)).astype(np.uint8)
    assert measure_ground(rng.integers(0, 256, (50, 16, 16))) == ("any", 1.0)
    for pixels in (noise, np.full((16, 16), 255, np.uint8)):
        assert (format.read(pixels)[0] == pixels).all()


def test_a_distance_is_that_of_mahalanobis():
    """Whatever units the numbers have: d^2 = (x - m)' C^-1 (x - m), C within labels."""
    rng = np.random.default_rng(0)
    numbers = np.arange(400) % 2
    units = np.array([0.3, 1.0, 3.0])
    x = (rng.normal(size=(400, 3)) @ rng.normal(size=(3, 3)) + 3 * numbers[:, None]) * units
    found = Outliers.fit(x, numbers, 2, shrinkage=0.0).distances(x.astype(np.float32), numbers)
    inner = x - np.stack([x[numbers == n].mean(0) for n in (0, 1)])[numbers]
    inverse = np.linalg.inv(inner.T @ inner / len(x))
    wanted = np.sqrt(np.einsum("ni,ij,nj->n", inner, inverse, inner))
    assert found == pytest.approx(wanted, rel=1e-3)


@pytest.mark.parametrize("along", [0, 2])
def test_the_shrinkage_is_that_which_labels_fewest_strangers(along):
    """Strangers of few numbers or of many, where the known ones vary little or much."""
    rng = np.random.default_rng(1)
    x = rng.normal(size=(600, 3)) @ np.array([[1, 1, 1], [0, 0.3, 0.3], [0, 0, 0.05]])
    numbers = np.zeros(600, int)
    step = np.linalg.svd(x - x.mean(0))[2][along]
    far = x[:200] * 0.2 + np.outer(rng.normal(size=200), step) * (0.3 if along else 4)
    known, valid, strangers = (
        (x[:300], numbers[:300]),
        (x[300:], numbers[300:]),
        (far, numbers[:200]),
    )
    best = Outliers.measure(known, valid, {"far": strangers}, 1, 0.05)
    shares = []
    for shrinkage in SHRINKAGES:
        each = Outliers.fit(*known, 1, shrinkage)
        bound = np.quantile(each.distances(*valid), 0.95)
        shares.append((each.distances(*strangers) <= bound).mean())
    assert max(shares) > min(shares) + 0.02
    assert (~best.are_far(*strangers)).mean() == pytest.approx(min(shares))
    assert best.measured["labelled"]["far"] == round(100 * min(shares), 1)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    home, rng = tmp_path_factory.mktemp("shapes"), np.random.default_rng(1)
    for part, count in (("train", 60), ("valid", 30)):
        for kind in ("disc", "cross"):
            (home / part / kind).mkdir(parents=True)
            for n in range(count):
                Image.fromarray(shape(kind, rng)).save(home / part / kind / f"{n}.png")
    asked = {"augment": "none", "lr": 0.003, "ema": 0, "batch": 32, "none": 0.1, "quiet": True}
    regard.train("images", data=home, out=home / "run", **SMALL, **asked)
    return regard.load(home / "run"), home


def test_what_was_never_learnt_gets_no_label(shapes, tmp_path):
    model, home = shapes
    told = json.loads((home / "run" / "config.json").read_text())["none"]
    assert told["threshold"] > 0 and set(told["labelled"]) == {"noise", "smooth noise", "one level"}
    rng = np.random.default_rng(2)
    known = [shape(kind, rng) for kind in ("disc", "cross") for _ in range(20)]
    answers = model.run(known)
    assert np.mean([answer.label == NONE for answer in answers]) < 0.3
    noise = list(rng.integers(0, 256, (20, 16, 16)).astype(np.uint8))
    assert all(str(answer) == answer.label == NONE for answer in model.run(noise))
    # a picture, a line and a record say the same
    assert model.picture(noise[0]).output == NONE
    asked = model.check({"n_best": 2})
    lines = list(model.run(noise[0]).lines(asked))
    assert lines[0] == f"{NONE}\t" and len(lines) == 2
    record = json.loads(json.dumps(model.run(noise[0]).record(asked), allow_nan=False))
    assert record["prediction"] == NONE and record["probability"] is None
    # an evaluation says how many of its images would get none
    found = regard.evaluate(home / "run", data=home, part="valid")
    assert any(NONE in note for note in found.notes)


def test_a_photo_on_white_has_the_label_of_the_image_and_a_note(shapes, capsys):
    model, _ = shapes
    assert model.format.ground == "dark"
    rng = np.random.default_rng(3)
    for kind in ("disc", "cross"):
        photo = on_white(shape(kind, rng))
        answer = model.run(photo)
        assert answer.labels[int(answer.probabilities.argmax())] == kind
        assert "inverted" in answer.notes[0] and "inverted" in capsys.readouterr().err
        assert model.picture(photo).output == str(answer)
        assert "inverted" in model.picture(photo).note
        assert answer.record(model.check({}))["notes"] == list(answer.notes)


def test_a_threshold_that_is_none_is_refused(shapes, tmp_path):
    _, home = shapes
    for n, told in enumerate(({"threshold": "high"}, {"threshold": -1}, [3])):
        folder = tmp_path / str(n)
        folder.mkdir()
        for file in (home / "run").iterdir():
            if file.is_file() and file.name != "SHA256SUMS":
                (folder / file.name).write_bytes(file.read_bytes())
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "none": told}))
        with pytest.raises(UsageError, match="'none' has the threshold"):
            regard.load(folder)


def test_noise_and_silence_are_no_sounds_that_were_learnt(tmp_path):
    data = sound_folders(tmp_path, 60)
    small = {"mels": 20, "rate": RATE, "subsampling": 2, "kernel": 7, "model.channels": 8}
    quick = {"batch_seconds": 15, "lr": 0.01, "ema": 0, "valid": 0.2, "none": 0.1, "quiet": True}
    regard.train("sounds", data=data, out=tmp_path / "run", **SMALL, **small, **quick)
    model = regard.load(tmp_path / "run")
    rng = np.random.default_rng(0)
    white = [rng.normal(0, 0.1, RATE).astype(np.float32) for _ in range(10)]
    assert {str(answer) for answer in model.run([*white, np.zeros(RATE, np.float32)])} == {NONE}
    assert model.picture(white[0]).output == NONE
    known = [tones(letter, rng) for letter in "AB" for _ in range(10)]
    assert np.mean([str(answer) == NONE for answer in model.run(known)]) < 0.4


# The starters


@pytest.mark.skipif(not (DATA / "fashion-mnist").exists(), reason="no Fashion-MNIST here")
def test_clothes_on_white_ground_are_known_and_noise_is_not():
    model = regard.load("fashion")
    test = model.read_part_of(str(DATA / "fashion-mnist"), "test")["test"]
    pixels = test.read(np.arange(0, 2000, 25))[:, 0].numpy()
    plain, white = model.run(list(pixels)), model.run([on_white(one) for one in pixels])
    assert not any(answer.notes for answer in plain)
    assert np.mean([str(answer) == NONE for answer in plain]) < 0.12
    pairs = zip(plain, white, strict=True)
    assert np.mean([a.probabilities.argmax() == b.probabilities.argmax() for a, b in pairs]) > 0.8
    assert np.mean([str(answer) == NONE for answer in white]) < 0.25
    rng = np.random.default_rng(0)
    noise = list(rng.integers(0, 256, (20, 40, 40)).astype(np.uint8))
    blank = [np.full((28, 28), level, np.uint8) for level in (0, 128, 255)]
    assert {str(answer) for answer in model.run([*noise, *blank])} == {NONE}


@pytest.mark.skipif(not (DATA / "fsdd").exists(), reason="no FSDD here")
def test_digits_are_heard_in_speech_and_not_in_noise():
    model = regard.load("digits")
    test = model.read_part_of(str(DATA / "fsdd"), "test")["test"]
    heard = model.run([test.read(i) for i in range(0, len(test), 5)])
    assert np.mean([str(answer) == NONE for answer in heard]) < 0.12
    rng = np.random.default_rng(0)
    noise = [rng.normal(0, gain, 4000).astype(np.float32) for gain in (0.003, 0.01, 0.05, 0.2)]
    tone = np.float32(0.3 * np.sin(np.arange(4000) * 0.4))
    assert {str(answer) for answer in model.run([*noise, tone, 0 * tone])} == {NONE}
