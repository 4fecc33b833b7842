"""Segmentation: masks beside images, a class for each pixel, and what is refused."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import regard
from regard.api import find_model
from regard.cli import main
from regard.data.masks import NO_CLASS, mask_of
from regard.metrics.overlap import Overlaps
from regard.models import family, preset, serving
from regard.models.image_encoder import EncoderConfig
from regard.tasks import task
from regard.tasks.vision.segmenting import MaskBatches, indexed, overlaid
from tests.zoo import ANIMALS, PAINTS

FAST = {**ANIMALS["segment"].settings, "steps": 2, "valid_every": 2}


@pytest.fixture(scope="module")
def data(zoo) -> Path:
    return zoo.data("segment")


@pytest.fixture(scope="module")
def run(zoo) -> Path:
    return zoo.model("segment")


def changed(data: Path, to: Path) -> Path:
    return shutil.copytree(data, to / "data")


# ---- masks


def test_a_mask_lies_where_its_image_does():
    assert mask_of("a/images/b/images/train/1.jpg") == Path("a/images/b/masks/train/1.png")


def test_overlaps_are_those_of_a_loop():
    rng = np.random.default_rng(0)
    masks, found = rng.integers(0, 3, (2, 4, 5, 6)).astype(np.uint8)
    masks[rng.random(masks.shape) < 0.2] = NO_CLASS
    each = []
    for c in range(3):
        both = ((masks == c) & (found == c)).sum()
        either = (((masks == c) | (found == c)) & (masks != NO_CLASS)).sum()
        each.append(100 * both / either)
    counts = Overlaps.of(masks, found, 3)
    assert np.allclose(counts.by_class(), each)
    assert counts.values()["mean_iou"] == pytest.approx(np.mean(each))
    real = masks != NO_CLASS
    assert counts.values()["pixel_accuracy"] == pytest.approx(100 * (masks == found)[real].mean())
    assert Overlaps.of(found, found, 3).values() == {"mean_iou": 100, "pixel_accuracy": 100}
    absent = Overlaps.of(found, found, 5)  # a class that is nowhere does not count
    assert absent.values()["mean_iou"] == 100 and np.isnan(absent.by_class()[4])


def test_images_and_masks_move_alike(data):
    kind = task("segment")
    settings = kind.resolve({"data": str(data), "augment": "flip+crop", "padding": 5, "batch": 12})
    read = kind.learning.read(settings, None)
    format = kind.learning.codec(read, settings, lambda *a, **b: None, None).format
    batches = MaskBatches(read["train"], read.masks["train"], format, settings)
    cut = 0
    for n in range(4):
        batch = batches[n]
        pixels = format.restore(batch.inputs).permute(0, 2, 3, 1).int()
        for number, paint in enumerate(PAINTS.values(), 1):  # a disc is where its mask is
            like = (pixels - torch.tensor(paint)).abs().amax(-1) < 3
            assert torch.equal(like, batch.targets == number)
        black = pixels.sum(-1) < 9
        assert torch.equal(black, batch.targets == -1)  # the rim is of no class
        cut += int(black.any())
        assert torch.equal(batches[n].targets, batch.targets)
    assert cut


# ---- the model


@pytest.mark.parametrize("name", serving("features"))
@pytest.mark.parametrize("decoder", ["linear", "up"])
def test_every_encoder_gives_each_pixel_its_classes(name: str, decoder: str):
    config, model = family("segmenter")
    encoder = EncoderConfig(name, preset(name, "tiny"))
    built = model(config(encoder, 4, decoder))
    logits = built(torch.rand(2, 3, 32, 32))
    assert logits.shape == (2, 4, 32, 32) and logits.isfinite().all()
    logits.logsumexp(1).sum().backward()
    assert all(p.grad is not None for p in built.decoder.parameters())


def test_it_learns_where_discs_are(run, data):
    scores = regard.evaluate(run, data=data)
    assert scores["mean_iou"] > 80
    assert scores.baselines["the commonest class"]["mean_iou"] < 30
    model = regard.load(run)
    name = sorted((data / "images/test").glob("*.png"))[0]
    answer = model.run(name)
    right = np.asarray(Image.open(mask_of(str(name))))
    assert answer.mask.shape == right.shape and (answer.mask == right).mean() > 0.9
    assert list(answer.shares)[0] == "background" and sum(answer.shares.values()) == 1


def test_a_frozen_encoder_stays_as_it_was_pretrained(data, tmp_path):
    small = {**FAST, "image": 24}
    regard.train("pretrain", data=data / "images", out=tmp_path / "seen", quiet=True, **small)
    before = regard.load(tmp_path / "seen").model.state_dict()
    for tune in ("head", "all"):
        how = {"init": tmp_path / "seen", "tune": tune, "steps": 2, "batch": 8, "threads": 1}
        regard.train("segment", data=data, out=tmp_path / tune, quiet=True, ema=0, **how)
        after = regard.load(tmp_path / tune).model.encoder.state_dict()
        same = [torch.equal(after[name], before[name]) for name in after]
        assert all(same) == (tune == "head")
    again = {"init": tmp_path / "head", "steps": 1, "batch": 8, "threads": 1, "ema": 0}
    regard.train("segment", data=data, out=tmp_path / "on", quiet=True, **again)
    assert regard.load(tmp_path / "on").model.config.decoder == "linear"


def test_the_encoder_of_a_captioner_is_reused_as_it_is(data, tmp_path):
    how = {"init": find_model("scenes"), "steps": 2, "batch": 8, "threads": 1, "ema": 0}
    regard.train("segment", data=data, out=tmp_path, quiet=True, tune="head", **how)
    before, after = (
        regard.load(model).model.encoder.state_dict() for model in (how["init"], tmp_path)
    )
    assert before.keys() == after.keys() and before
    assert all(torch.equal(after[name], before[name]) for name in after)


# ---- what is written


def test_run_writes_overlays_and_masks_that_train_reads(run, data, tmp_path, capsys):
    names = [str(path) for path in sorted((data / "images/test").glob("*.png"))[:3]]
    assert main(["run", str(run), *names, f"out={tmp_path / 'masks'}", "draw=mask"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    answers = regard.load(run).run(names)
    for name, answer in zip(names, answers, strict=True):
        written = Image.open(tmp_path / "masks" / Path(name).name)
        assert written.mode == "P" and np.array_equal(np.asarray(written), answer.mask)
    assert main(["run", str(run), names[0], f"out={tmp_path / 'over.png'}", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(tmp_path / "over.png")
    photo, over = (np.asarray(Image.open(p)) for p in (names[0], tmp_path / "over.png"))
    background = answers[0].mask == 0
    assert np.array_equal(photo[background], over[background])
    assert (photo[~background] != over[~background]).any()


def test_grey_photos_are_tinted_too():
    mask = np.array([[0, 1]], np.uint8)
    tinted = np.asarray(overlaid(np.full((1, 2), 90, np.uint8), mask, ["background", "disc"]))
    assert tinted[0, 0].tolist() == [90, 90, 90] and len(set(tinted[0, 1].tolist())) > 1
    assert np.asarray(indexed(mask, mask, ["a", "b"])).tolist() == mask.tolist()


# ---- data as they come


def test_masks_without_names_have_numbers(data, tmp_path):
    copy = changed(data, tmp_path)
    (copy / "classes.txt").unlink()
    regard.train("segment", data=copy, out=tmp_path / "run", quiet=True, **FAST)
    assert regard.load(tmp_path / "run").codec.labels == ["0", "1", "2", "3"]


def test_pixels_of_no_class_are_not_judged(run, data, tmp_path):
    copy, right = changed(data, tmp_path), []
    for path in sorted((copy / "masks/test").glob("*.png")):
        mask = np.asarray(Image.open(path)).copy()
        mask[mask > 0] = NO_CLASS
        Image.fromarray(mask).save(path)
        found = regard.load(run).run(copy / "images/test" / path.name).mask
        right.append((found == 0)[mask == 0])
    some = regard.evaluate(run, data=copy)
    assert some["pixel_accuracy"] == pytest.approx(100 * np.concatenate(right).mean())


def spoil(copy: Path, how: str) -> None:
    path = sorted((copy / "masks/train").glob("*.png"))[3]
    image = Image.open(path)
    match how:
        case "size":
            image.resize((20, 24)).save(path)
        case "class":
            mask = np.asarray(image).copy()
            mask[0, 0] = 9
            Image.fromarray(mask).save(path)
        case "colour":
            image.convert("RGB").save(path)
        case "none":
            path.unlink()
        case "broken":
            path.write_bytes(path.read_bytes()[:60])
        case "names":
            (copy / "classes.txt").write_text("a\na\n")
        case "binary":
            (copy / "classes.txt").unlink()
            for each in (copy / "masks").rglob("*.png"):
                mask = np.asarray(Image.open(each))
                Image.fromarray(np.where(mask > 0, 255, 0).astype(np.uint8)).save(each)
        case "masks":
            shutil.rmtree(copy / "masks")


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("size", "20 x 24 pixels, its image 24 x 24"),
        ("class", "9 is no class; there are 4, from 0 (background) to 3 (blue)"),
        ("colour", "a mask of mode RGB"),
        ("none", "no mask"),
        ("broken", "broken or cut short"),
        ("names", "2 names; expected a line for each class"),
        ("binary", "its masks have one class only"),
        ("masks", "images/ and masks/"),
    ],
)
def test_bad_masks_cost_one_line_before_anything_is_written(data, tmp_path, capsys, how, told):
    copy = changed(data, tmp_path)
    spoil(copy, how)
    words = [f"{key}={value}" for key, value in FAST.items()]
    assert main(["train", "segment", f"data={copy}", f"out={tmp_path / 'run'}", *words]) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["train", "segment", "data=DATA", "decoder=linea"], "Did you mean 'linear'"),
        (["train", "segment", "data=DATA", "augment=zoom"], "augment"),
        (["train", "segment", "data=DATA", "fit=crop"], "fit"),
        (["train", "segment", "data=DATA", "tune=head"], "name a trained one with init="),
        (["run", "RUN", "PHOTO", "out=mask.txt"], "cannot be written as an image"),
        (["run", "RUN", "PHOTO", "draw=both"], "draw"),
        (["eval", "RUN", "data=DATA", "against=fashion"], "a model for images"),
    ],
)
def test_mistakes_cost_one_line(words, told, data, run, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    photo = sorted((data / "images/test").glob("*.png"))[0]
    names = {"DATA": str(data), "RUN": str(run), "PHOTO": str(photo)}
    for name, value in names.items():
        words = [word.replace(name, value) for word in words]
    assert main(words) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1


def test_the_doctor_knows_masks(data):
    found = regard.doctor(str(data))
    assert found.task == "segment" and found.report.healthy and found.forecast is not None
