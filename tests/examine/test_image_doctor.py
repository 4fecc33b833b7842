"""The doctor on images: every planted fault is found, told where, and with a remedy."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import regard
from regard.errors import UsageError
from regard.examine.files import examine_files
from regard.modalities.image import IMAGE
from tests.examine.test_doctor import DATA, found


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Write ten different images of each of two classes, for every part."""
    chance = np.random.default_rng(0)
    for part in ("train", "valid", "test"):
        for label in ("cat", "dog"):
            folder = tmp_path / "photos" / part / label
            folder.mkdir(parents=True)
            for i in range(10):
                pixels = chance.integers(0, 256, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    return tmp_path / "photos"


def test_good_images_have_no_findings(photos: Path) -> None:
    report = examine_files(str(photos), IMAGE)
    assert report.healthy and not report.findings
    lines = report.lines()
    assert "20 images of 2 classes, colour, 16 x 16" in lines[1] and lines[-1] == "nothing found"


def cut(photos: Path) -> None:
    whole = (photos / "train/cat/3.png").read_bytes()
    (photos / "train/cat/3.png").write_bytes(whole[: len(whole) // 2])


def no_image(photos: Path) -> None:
    (photos / "valid/dog/3.png").write_bytes(b"hello")


def copy(photos: Path) -> None:
    shutil.copy(photos / "train/cat/3.png", photos / "train/cat/copy.png")


def torn(photos: Path) -> None:
    shutil.copy(photos / "train/cat/3.png", photos / "train/dog/copy.png")


def leak(photos: Path) -> None:
    shutil.copy(photos / "train/cat/3.png", photos / "test/cat/copy.png")


def strange(photos: Path) -> None:
    (photos / "test/cow").mkdir()
    shutil.move(photos / "test/cat/3.png", photos / "test/cow/3.png")


def rare(photos: Path) -> None:
    (photos / "train/cat/3.png").unlink()


def alone(photos: Path) -> None:
    for part in ("train", "valid", "test"):
        shutil.rmtree(photos / part / "dog")


def sizes(photos: Path) -> None:
    Image.new("RGB", (30, 20), "red").save(photos / "train/cat/3.png")


def small(photos: Path) -> None:
    Image.new("RGB", (30, 2), "red").save(photos / "train/cat/3.png")


def uneven(photos: Path) -> None:
    for i in range(101):
        Image.new("RGB", (16, 16), (i, 0, 0)).save(photos / f"train/cat/more{i}.png")


def other_files(photos: Path) -> None:
    (photos / "train/cat/notes.txt").write_text("mine")


def no_valid(photos: Path) -> None:
    shutil.rmtree(photos / "valid")


@pytest.mark.parametrize(
    ("fault", "kind", "level", "where"),
    [
        (cut, "broken", "error", "train/cat/3.png"),
        (no_image, "broken", "error", "valid/dog/3.png"),
        (copy, "duplicate_image", "warning", "train/cat/copy.png"),
        (torn, "torn_label", "warning", "train/dog/copy.png"),
        (leak, "leak_image", "warning", "test/cat/copy.png"),
        (strange, "unknown_label", "error", "test/cow/3.png"),
        (rare, "rare_label", "warning", "cat"),
        (alone, "one_class", "error", "cat"),
        (sizes, "sizes", "note", "30 x 20"),
        (small, "small", "warning", "30 x 2"),
        (uneven, "uneven_labels", "note", "111 images of 'cat'"),
        (other_files, "note", "note", "notes.txt"),
        (no_valid, "no_valid", "note", "split off train by hash"),
    ],
)
def test_a_planted_fault_is_found(photos: Path, fault, kind: str, level: str, where: str) -> None:
    fault(photos)
    report = examine_files(str(photos), IMAGE)
    finding = found(report, kind)
    assert finding.level == level and finding.remedy
    assert where in finding.where + finding.what
    assert report.healthy == (level != "error")


def test_all_faults_at_once(photos: Path) -> None:
    for fault in (cut, no_image, copy, torn, leak, strange, small, other_files):
        fault(photos)
    kinds = {finding.kind for finding in examine_files(str(photos), IMAGE).findings}
    assert kinds >= {"broken", "unknown_label", "small", "note"}
    with pytest.raises(UsageError, match="broken=skip"):  # as training would
        regard.train("images", data=str(photos), out=str(photos.parent / "run"), steps=1)


def test_no_image_can_be_read(photos: Path) -> None:
    for file in photos.glob("train/*/*.png"):
        file.write_bytes(b"")
    report = examine_files(str(photos), IMAGE)
    assert found(report, "broken").count == 20 and found(report, "no_images").level == "error"
    assert "train" not in report.parts


def test_the_whole_of_it_with_a_forecast(photos: Path) -> None:
    examined = regard.doctor(str(photos))
    told = json.loads(json.dumps(examined.to_dict()))
    assert told["healthy"] and told["parts"]["train"]["classes"] == {"cat": 10, "dog": 10}
    assert told["forecast"]["of"] == "images" and told["forecast"]["a_second"] > 0
    assert "images/s" in str(examined)
    with pytest.raises(UsageError, match="these are images"):
        languages: dict[str, Any] = {"from": "en", "to": "de"}
        regard.doctor(str(photos), **languages)
    with pytest.raises(UsageError):
        regard.doctor(str(photos), valid="nowhere")


def test_real_images() -> None:
    if not (DATA / "fashion-mnist").exists():
        pytest.skip("fashion-mnist is not in REGARD_DATA")
    report = examine_files(str(DATA / "fashion-mnist"), IMAGE)
    assert report.healthy and str(report.parts["train"]).lstrip().startswith("60,000 images")
