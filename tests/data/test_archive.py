"""Laws of tars: files in them are the files of a folder, and what is no plain file is refused."""

import io
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from regard.data.archive import content_of, locator, open_archive
from regard.data.captions import captions_of, read_captions
from regard.data.image_files import ImageOptions
from regard.data.images import load_images
from regard.data.photos import load_photos
from regard.data.sound_sets import SoundOptions
from regard.data.sounds import load_sounds
from regard.errors import UsageError
from regard.modalities import modality_of
from tests.tones import sound_folders
from tests.zoo import masked_discs, write_stripes

PARTS = ("train", "valid", "test")


def pack(path: Path, folder: Path, names: list[str] | None = None) -> Path:
    """Put the files of a folder into a tar, in the order of some names."""
    path.parent.mkdir(exist_ok=True)
    every = sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())
    with tarfile.open(path, "w") as tar:
        for name in every if names is None else names:
            tar.add(folder / name, name)
    return path


def written(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


@pytest.fixture(scope="module")
def stripes(tmp_path_factory) -> Path:
    """Images of two classes, some in a folder within."""
    home = tmp_path_factory.mktemp("stripes")
    write_stripes(home, {"train": 16, "test": 4}, size=8)
    (home / "train" / "across" / "more").mkdir(parents=True)
    for path in sorted((home / "train").rglob("*.png"))[::3]:
        more = home / "train" / path.relative_to(home / "train").parts[0] / "more"
        more.mkdir(exist_ok=True)
        path.rename(more / path.name)
    return home


def same(one, other) -> None:
    assert one.sha == other.sha and one.classes == other.classes and one.split == other.split
    for part in one.parts:
        rows = range(len(one[part]))
        assert one[part].read(rows).equal(other[part].read(rows))
        assert one[part].labels.equal(other[part].labels)


@pytest.mark.parametrize("way", ["one tar", "a tar a part", "shards", "wrapped"])
def test_images_from_tars_are_those_of_the_folder_to_the_bit(stripes, tmp_path, way):
    data = tmp_path / "set"
    if way == "one tar":
        data = pack(tmp_path / "all.tar", stripes)
    for part in ("train", "test") if way == "wrapped" else ():
        every = [x.relative_to(stripes) for x in (stripes / part).rglob("*.png")]
        pack(data / f"{part}.tar", stripes, sorted(map(str, every)))
    for part in ("train", "test") if way in ("a tar a part", "shards") else ():
        folder = stripes / part
        names = sorted(str(x.relative_to(folder)) for x in folder.rglob("*.png"))
        np.random.default_rng(0).shuffle(names)
        count = 3 if way == "shards" else 1
        for n in range(count):
            name = f"{part}-{n:03}.tar" if count > 1 else f"{part}.tar"
            pack(data / name, folder, names[n::count])
    same(load_images(str(stripes), need=PARTS), load_images(str(data), need=PARTS))
    kind = modality_of(str(data))
    assert kind is not None and kind.name == "image"
    assert kind.guess(Path(data), None, None)[0] == "label"


def test_sounds_from_a_tar_are_those_of_the_folder_to_the_bit(tmp_path):
    folder = sound_folders(tmp_path / "f", 12)
    tar = pack(tmp_path / "t.tar", Path(folder))
    one, two = (load_sounds(str(x), options=SoundOptions("label")) for x in (folder, tar))
    assert one.sha == two.sha and one.split == two.split
    for i in range(len(one["train"])):
        assert np.array_equal(one["train"].read(i), two["train"].read(i))


def test_photos_and_masks_come_from_a_tar(tmp_path):
    from regard.data.masks import find_masks, has_masks, with_masks

    masked_discs(tmp_path / "f") if (tmp_path / "f").mkdir() is None else None
    tar = pack(tmp_path / "set.tar", tmp_path / "f")
    found = []
    for data in (tmp_path / "f", tar):
        assert has_masks(data)
        where, mask_of = find_masks(str(data), ("train",))
        images = load_images(where, options=ImageOptions(labelled=False), need=("train",))
        found.append(with_masks(images, str(data), mask_of, ["a", "b", "c", "d"]))
    assert found[0].sha == found[1].sha
    assert np.array_equal(found[0].masks["train"], found[1].masks["train"])
    photos = [load_photos(f"{data}/images", need=("train",)) for data in (tmp_path / "f", tar)]
    assert photos[0].part_sha("train") == photos[1].part_sha("train")


def test_a_label_or_text_lies_beside_its_file(stripes, tmp_path):
    files = sorted((stripes / "train").rglob("*.png"))
    labels = [path.relative_to(stripes / "train").parts[0] for path in files]
    ways = {
        ".cls": lambda label: label.encode() + b"\n",
        ".txt": lambda label: label.encode(),
        ".json": lambda label: json.dumps({"x": 1, "label": label}).encode(),
    }
    whole = load_images(str(stripes / "train"), need=("train",))
    for suffix, make in ways.items():
        members = {}
        for n, (path, label) in enumerate(zip(files, labels, strict=True)):
            members |= {f"{n:04}.png": path.read_bytes(), f"{n:04}{suffix}": make(label)}
        tar = written(tmp_path / f"a{suffix}.tar", members)
        data = load_images(str(tar), need=("train",))
        assert data.classes == whole.classes and len(data["train"]) == len(whole["train"])
        told = [item.label for item in data["train"].files.items]
        assert told == labels
    del members["0003.json"]
    tar = written(tmp_path / "lacking.tar", members)
    with pytest.raises(UsageError, match=r"lacking\.tar/0003\.png: no .*beside it"):
        load_images(str(tar), need=("train",))


def test_transcripts_lie_beside_sounds(tmp_path):
    folder = Path(sound_folders(tmp_path / "f", 6))
    sounds = sorted(folder.rglob("*.wav"))
    members = {}
    for n, path in enumerate(sounds):
        members |= {f"{n}.wav": path.read_bytes(), f"{n}.txt": f"word {n}\n".encode()}
    tar = written(tmp_path / "speech.tar", members)
    data = load_sounds(str(tar), options=SoundOptions("text"), need=("train",))
    assert sorted(data["train"].texts) == sorted(f"word {n}" for n in range(len(sounds)))
    assert modality_of(str(tar)).guess(tar, None, None)[0] == "text"  # type: ignore[union-attr]


def test_captions_lie_beside_photos_in_a_tar(stripes, tmp_path):
    photos = sorted((stripes / "train").rglob("*.png"))
    members = {}
    for n, path in enumerate(photos):
        members |= {f"{n}.png": path.read_bytes(), f"{n}.txt": f"photo {n}\n".encode()}
    tar = written(tmp_path / "photos.tar", members)
    captions = read_captions(tar, None, None, None, parts=("train",))
    assert captions == {f"{tar}/{n}.png": [f"photo {n}"] for n in range(len(photos))}
    data = load_images(str(tar), need=("train",), options=ImageOptions(labelled=False))
    told = [text for some in captions_of(data["train"], captions) for text in some]
    assert sorted(told) == sorted(text for some in captions.values() for text in some)


def test_a_table_names_files_of_the_tars_beside_it(stripes, tmp_path):
    pack(tmp_path / "b.tar", stripes / "train")
    files = sorted((stripes / "train").rglob("*.png"))
    names = [str(path.relative_to(stripes / "train")) for path in files]
    rows = [f"{name}\t{name[0]}\n" for name in names]
    (tmp_path / "train.tsv").write_text("".join(rows))
    data = load_images(str(tmp_path), need=("train",))
    assert len(data["train"]) == len(files) and data.classes == ["a", "d"]
    assert content_of(locator(tmp_path)(names[0])) == files[0].read_bytes()
    rows = [f"b.tar/{name}\t{name[0]}\n" for name in names]
    (tmp_path / "train.tsv").write_text("".join(rows))
    assert load_images(str(tmp_path), need=("train",)).sha == data.sha


def special(kind: bytes, name: str, link: str = "") -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = kind, link
    return member


@pytest.mark.parametrize(
    ("member", "says"),
    [
        (special(tarfile.SYMTYPE, "a/1.png", "/etc/passwd"), "'a/1.png' is a link"),
        (special(tarfile.LNKTYPE, "a/1.png", "a/2.png"), "'a/1.png' is a link"),
        (special(tarfile.FIFOTYPE, "a/pipe"), "'a/pipe' is a device"),
        (special(tarfile.CHRTYPE, "a/null"), "'a/null' is a device"),
        (special(tarfile.BLKTYPE, "a/disk"), "'a/disk' is a device"),
        (special(tarfile.GNUTYPE_SPARSE, "a/1.png"), "is a sparse file"),
        (special(tarfile.REGTYPE, "../1.png"), "is no name below"),
        (special(tarfile.REGTYPE, "/1.png"), "is no name below"),
        (special(tarfile.REGTYPE, "a/2.png"), "a/2.png is in it twice"),
    ],
)
def test_what_is_no_plain_file_below_the_tar_is_refused_by_name(stripes, tmp_path, member, says):
    path, content = tmp_path / "t" / "a.tar", next(stripes.rglob("*.png")).read_bytes()
    path.parent.mkdir()
    with tarfile.open(path, "w") as tar:
        plain = tarfile.TarInfo("a/2.png")
        plain.size = len(content)
        tar.addfile(plain, io.BytesIO(content))
        tar.addfile(member)
    with pytest.raises(UsageError, match=says) as told:
        load_images(str(path))
    assert str(path) in str(told.value) and "\n" not in str(told.value)
    assert sorted(os.listdir(path.parent)) == ["a.tar"]


def test_a_tar_that_is_cut_short_or_packed_is_one_clear_line(stripes, tmp_path):
    whole = pack(tmp_path / "a.tar", stripes / "train").read_bytes()
    used = len(whole.rstrip(b"\0")) // 512 * 512 + 512
    for n, length in enumerate([*range(0, used + 1, 512), *range(100, used, 3333)]):
        path = tmp_path / f"cut{n}.tar"
        path.write_bytes(whole[:length])
        with pytest.raises(UsageError, match="copy it again|no image") as told:
            load_images(str(path), need=("train",))
        assert "\n" not in str(told.value)
        path.unlink()
    import gzip

    (tmp_path / "packed.tar").write_bytes(gzip.compress(whole))
    with pytest.raises(UsageError, match="packed by gzip; unpack it"):
        open_archive(tmp_path / "packed.tar")
    (tmp_path / "two.tar").write_bytes(whole + whole)
    with pytest.raises(UsageError, match="more behind its end"):
        open_archive(tmp_path / "two.tar")


def test_a_header_that_promises_much_is_not_believed(tmp_path):
    member = special(tarfile.XHDTYPE, "a/1.png")
    member.size = 2**31
    path = tmp_path / "a.tar"
    with open(path, "wb") as file:
        file.write(member.tobuf(tarfile.USTAR_FORMAT))
        file.truncate(2**31 + 4096)  # a hole, which takes no room
    with pytest.raises(UsageError, match="too long"):
        open_archive(path)


def test_a_tar_that_is_rewritten_is_indexed_anew(stripes, tmp_path):
    path = pack(tmp_path / "a.tar", stripes / "train")
    one = open_archive(path)
    assert open_archive(path) is one
    number = one.find(one.names[0])
    assert number == 0 and one.find("nothing") is None
    names = [one.names[i] for i in range(len(one.names))]
    pack(path, stripes / "train", names[1:])
    with pytest.raises(UsageError, match="changed while it was read"):
        one.read(0)
    assert open_archive(path).find(names[0]) is None
    for name in names[1:]:
        assert content_of(f"{path}/{name}") == (stripes / "train" / name).read_bytes()
