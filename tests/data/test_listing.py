"""Laws of the index that is kept of a set: what did not change is not opened, what did is."""

import builtins
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import regard.data.media as media
from regard.data.image_files import ImageOptions, find_image_parts
from regard.data.images import load_images
from regard.data.listing import Item, Items, TextBlob
from regard.data.sound_sets import SoundOptions
from regard.data.sounds import load_sounds
from regard.files import cache_folder
from tests.tones import sound_folders


@pytest.fixture
def opened(monkeypatch, tmp_path) -> list[str]:
    """Files below a folder that Python opens; files are trusted however young they are."""
    monkeypatch.setattr(media, "SETTLED", 0)
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    names, plain = [], builtins.open

    def noting(file, *rest, **more):
        if str(tmp_path / "set") in str(file):
            names.append(os.path.basename(file))
        return plain(file, *rest, **more)

    monkeypatch.setattr(builtins, "open", noting)
    return names


def write(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((8, 8), level, np.uint8)).save(path)


def read(folder: Path):
    return load_images(str(folder), need=("train", "valid"), cache=cache_folder())


def test_a_second_start_opens_no_file_and_a_changed_one_is_read_again(tmp_path, opened):
    folder = tmp_path / "set"
    for n in range(40):
        write(folder / "ab"[n % 2] / f"{n}.png", n)
    first = read(folder)
    assert set(opened) == {f"{n}.png" for n in range(40)}
    opened.clear()
    assert read(folder).sha == first.sha and opened == []
    path, was = folder / "a" / "6.png", os.stat(folder / "a" / "6.png")
    write(path, 60)  # as long as it was
    os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
    assert (os.stat(path).st_size, os.stat(path).st_mtime_ns) == (was.st_size, was.st_mtime_ns)
    again = read(folder)
    assert "6.png" in opened and again.sha != first.sha
    opened.clear()
    write(folder / "b" / "new.png", 200)
    (folder / "a" / "8.png").unlink()
    third = read(folder)
    assert set(opened) == {"new.png"} or len(third["train"].files) == 40
    items = {item.where: item.source for part in third.parts.values() for item in part.items}
    fresh = {str(p): media.digest(str(p)) for p in folder.rglob("*.png")}
    assert items == fresh


def test_sounds_and_what_their_headers_say_are_kept(tmp_path, opened):
    folder = sound_folders(tmp_path / "set", 9)
    options = SoundOptions("label")
    first = load_sounds(str(folder), options=options, need=("train",))
    infos = first["train"].files.infos
    assert {info.kind for info in infos} == {"wav"} and infos[0].rate == 4000
    kept = media.Kept.open
    files = load_sounds(str(folder), options=options, need=("train",))["train"].files
    assert files.infos == infos and media.Kept.open == kept


def test_a_file_that_may_still_be_written_is_not_trusted(tmp_path, opened, monkeypatch):
    monkeypatch.setattr(media, "SETTLED", 60 * 10**9)
    folder = tmp_path / "set"
    for n in range(20):
        write(folder / "ab"[n % 2] / f"{n}.png", n)
    read(folder)
    opened.clear()
    read(folder)
    assert len(set(opened)) == 20


def test_an_index_that_is_damaged_is_made_again(tmp_path, opened):
    folder = tmp_path / "set"
    for n in range(20):
        write(folder / "ab"[n % 2] / f"{n}.png", n)
    first = read(folder)
    for path in (tmp_path / "cache" / "files").iterdir():
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
    opened.clear()
    assert read(folder).sha == first.sha and len(set(opened)) == 20
    opened.clear()
    assert read(folder).sha == first.sha and not opened


def test_what_was_read_before_a_broken_file_is_kept(tmp_path, opened):
    folder = tmp_path / "set"
    for n in range(600):
        write(folder / "ab"[n % 2] / f"{n:03}.png", n % 256)
    (folder / "b" / "599.png").write_bytes(b"no image")
    look = find_image_parts(str(folder), None, None, ImageOptions())[0]["train"]
    with pytest.raises(media.UsageError, match=r"599\.png"):
        look()
    opened.clear()
    write(folder / "b" / "599.png", 3)
    assert len(look()) == 600
    assert "599.png" in opened and len(set(opened)) < 300


def test_a_file_takes_at_most_300_bytes(tmp_path, opened):
    folder, count = tmp_path / "set", 3000
    for n in range(count):
        write(folder / f"class{n % 10}" / f"{n:07}.png", n % 256)
    load_images(str(folder), need=("train",), cache=cache_folder())
    tracemalloc.start()
    try:
        data = load_images(str(folder), need=("train",), cache=cache_folder())
        assert len(data["train"]) == count
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert held / count < 300, held / count


def test_items_are_what_they_were_made_of():
    rows = [Item(f"/x/{n}é.png", "ab"[n % 2], f"{n:032x}", "a text" * n) for n in range(7)]
    items = Items.of(rows)
    assert list(items) == rows and items[-1] == rows[-1] and list(items[2:5]) == rows[2:5]
    assert list(items.pick([5, 0])) == [rows[5], rows[0]]
    assert sorted(items.labels) == ["a", "b"] and items.pick([0, 2]).labels == ["a"]
    names = TextBlob.of(["b", "", "cc"], "r/")
    assert list(names) == ["r/b", "r/", "r/cc"] and "r/cc" in names
    with pytest.raises(IndexError):
        names[3]
