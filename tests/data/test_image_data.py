"""Laws of images: one picture in any file is the same picture; a batch follows from its number."""

import gzip
import hashlib
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as some
from PIL import Image

import regard.data.image_files as image_files
import regard.data.images as images_of
from regard.data.augment import (
    OPERATIONS,
    Augment,
    augments,
    boxes,
    brightness,
    crop,
    crop_at,
    equalize,
    erase,
    flip,
    mix,
    smoothed,
    step_rng,
    zoom,
)
from regard.data.batches import Shuffled
from regard.data.image_files import ImageOptions, holds_images, read_idx
from regard.data.image_format import FITS, BrokenImage, ImageFormat, open_image
from regard.data.images import load_images
from regard.data.store import ImageStore, build_image_store
from regard.errors import UsageError


def photo(height: int = 6, width: int = 9, channels: int = 3, seed: int = 0) -> np.ndarray:
    """Return a smooth picture, which JPEG changes little."""
    rows, columns = np.mgrid[0:height, 0:width]
    parts = [rows * 11 + columns * 7, 255 - rows * 13, columns * 17 + seed][:channels]
    found = np.stack([part % 256 for part in parts], -1).astype(np.uint8)
    return found[:, :, 0] if channels == 1 else found


def bits(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def bomb(path: Path, side: int) -> None:
    """Write a PNG of a few bytes whose header promises a huge picture."""
    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


# One picture


@pytest.mark.parametrize("kind", ["png", "bmp", "webp", "gif"])
def test_a_picture_without_loss_is_the_same_from_every_kind_of_file(tmp_path, kind):
    wanted = np.tile(np.uint8([[0, 60], [120, 255]])[:, :, None], (3, 3, 3))
    options = {"lossless": True} if kind == "webp" else {}
    Image.fromarray(wanted).save(tmp_path / f"a.{kind}", **options)
    found = ImageFormat(channels=3).read(tmp_path / f"a.{kind}")
    assert bits(found) == bits(wanted.transpose(2, 0, 1))


def test_a_jpeg_is_nearly_the_picture(tmp_path):
    wanted = photo(32, 32) // 4 + 64
    Image.fromarray(wanted).save(tmp_path / "a.jpg", quality=98, subsampling=0)
    found = ImageFormat().read(tmp_path / "a.jpg").transpose(1, 2, 0)
    assert np.abs(found.astype(int) - wanted).mean() < 4


def test_sixteen_bits_are_brought_to_eight_by_their_share_of_white(tmp_path):
    wide = np.array([[0, 257, 128 * 257], [65535, 255 * 257, 1]], np.uint16)
    Image.fromarray(wide).save(tmp_path / "a.png")
    assert ImageFormat().read(tmp_path / "a.png").tolist() == [[[0, 1, 128], [255, 255, 0]]]


def test_palette_cmyk_grey_and_bits_are_colours(tmp_path):
    red = np.zeros((4, 4, 3), np.uint8)
    red[..., 0] = 255
    whole = Image.fromarray(red)
    whole.convert("P").save(tmp_path / "p.png")
    whole.convert("CMYK").save(tmp_path / "c.jpg", quality=100)
    whole.convert("1").save(tmp_path / "1.png")
    format = ImageFormat(channels=3)
    assert bits(format.read(tmp_path / "p.png")) == bits(red.transpose(2, 0, 1))
    assert np.abs(format.read(tmp_path / "c.jpg").astype(int) - red.transpose(2, 0, 1)).max() < 8
    assert ImageFormat().read(tmp_path / "1.png").shape == (1, 4, 4)


@pytest.mark.parametrize(("background", "seen"), [("white", 255), ("black", 0), ("#808080", 128)])
def test_what_is_clear_shows_the_background(tmp_path, background, seen):
    clear = np.zeros((2, 2, 4), np.uint8)
    clear[0, 0] = (9, 8, 7, 255)
    Image.fromarray(clear).save(tmp_path / "a.png")
    found = ImageFormat(background=background).read(tmp_path / "a.png")
    assert found[:, 0, 0].tolist() == [9, 8, 7]
    assert (found[:, 1] == seen).all() and (found[:, 0, 1] == seen).all()
    grey = Image.fromarray(np.zeros((2, 2, 2), np.uint8), "LA")
    grey.save(tmp_path / "la.png")
    assert (ImageFormat(background=background).read(tmp_path / "la.png") == seen).all()


@pytest.mark.parametrize("turn", range(1, 9))
def test_a_camera_that_was_turned_gives_the_same_picture(tmp_path, turn):
    wanted = photo(16, 24) // 3
    # how to lay it down so that the note sets it upright again
    back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    laid = Image.fromarray(wanted)
    laid = laid.transpose(back[turn]) if turn > 1 else laid
    exif = Image.Exif()
    exif[0x0112] = turn
    laid.save(tmp_path / "a.png", exif=exif)
    found = ImageFormat().read(tmp_path / "a.png")
    assert bits(found) == bits(wanted.transpose(2, 0, 1))


def test_of_an_animation_the_first_frame_is_read_and_told(tmp_path):
    for label, value in (("a", 10), ("b", 200)):
        (tmp_path / label).mkdir()
        frames = [Image.new("L", (8, 8), value), Image.new("L", (8, 8), 255 - value)]
        for kind in ("gif", "png"):
            path = tmp_path / label / f"{label}.{kind}"
            frames[0].save(path, save_all=True, append_images=frames[1:], duration=10)
    data = load_images(str(tmp_path), need=("test",), format=ImageFormat(8, 1))
    found = {row.where(0)[-5:] for row in data.parts.values()}
    assert found == {"a.gif"}
    assert data.parts["test"].read([0, 1, 2, 3])[:, 0, 0, 0].tolist() == [10, 10, 200, 200]
    assert "4 animated images: of each, the first frame is read" in data.notes


@pytest.mark.parametrize("fit", ["crop", "stretch", "pad"])
@pytest.mark.parametrize("size", [(1, 1), (1, 50), (50, 1), (1, 20_000), (20_000, 3), (31, 33)])
def test_pictures_of_every_shape_become_the_square_that_is_asked_for(tmp_path, fit, size):
    Image.new("RGB", size, (10, 20, 30)).save(tmp_path / "a.png")
    format = ImageFormat(16, 3, fit, background="#0a141e")
    found = format.read(tmp_path / "a.png")
    assert found.shape == (3, 16, 16)
    assert (found.transpose(1, 2, 0) == (10, 20, 30)).all()


def test_crop_keeps_the_middle_and_pad_keeps_all():
    wide = np.zeros((10, 30), np.uint8)
    wide[:, 10:20] = 200
    assert (ImageFormat(10, 1).read(wide) == 200).all()
    whole = ImageFormat(30, 1, "pad", background="black").read(wide)
    assert (whole[0, 10:20] == wide).all() and not whole[0, :10].any() and not whole[0, 20:].any()


def test_a_picture_of_the_right_size_is_not_touched(tmp_path):
    wanted = photo(12, 12)
    for fit in FITS:
        assert bits(ImageFormat(12, 3, fit).read(wanted)) == bits(wanted.transpose(2, 0, 1))


def test_normalising_is_undone_to_the_bit():
    format = ImageFormat(8, 3, mean=(0.1, 0.5, 0.9), std=(0.3, 0.2, 0.1))
    pixels = torch.arange(192, dtype=torch.uint8).view(1, 3, 8, 8)
    images = format.normalise(pixels)
    loop = (pixels.double() / 255 - torch.tensor(format.mean)[:, None, None]) / torch.tensor(
        format.std
    )[:, None, None]
    assert torch.allclose(images.double(), loop, atol=1e-5)
    assert torch.equal(format.restore(images), pixels)


@pytest.mark.parametrize("side", [8001, 20_000, 60_000])
def test_a_bomb_is_refused_by_its_header(tmp_path, side):
    bomb(tmp_path / "a.png", side)
    with pytest.raises(
        BrokenImage, match=rf"a.png: {side * side / 1e6:,.0f} megapixels; at most 64"
    ):
        open_image(tmp_path / "a.png")


@given(some.binary(max_size=200), some.integers(0, 400), some.sampled_from(["png", "jpg", "webp"]))
def test_noise_in_a_file_is_a_picture_or_a_mistake(tmp_path_factory, noise, at, kind):
    folder = tmp_path_factory.mktemp("noise")
    path = folder / f"a.{kind}"
    Image.fromarray(photo(20, 20)).save(path)
    data = bytearray(path.read_bytes())
    data[at : at + len(noise)] = noise
    path.write_bytes(bytes(data))
    try:
        assert ImageFormat(8, 3).read(path).shape == (3, 8, 8)
    except BrokenImage as mistake:
        assert str(path) in str(mistake) and "\n" not in str(mistake)


# Sets


def folder_of(home: Path, counts: dict[str, int], size: int = 8, seed: int = 0) -> Path:
    """Write a folder for each class, whose images have a brightness of their own."""
    chance = np.random.default_rng(seed)
    for number, (label, count) in enumerate(counts.items()):
        (home / label).mkdir(parents=True, exist_ok=True)
        for i in range(count):
            noise = chance.integers(0, 40, (size, size, 3)) + 60 * number
            Image.fromarray(noise.astype(np.uint8)).save(home / label / f"{i:03}.png")
    return home


def test_class_folders_tables_and_parts_give_the_same_images(tmp_path):
    folder_of(tmp_path / "f" / "train", {"cat": 5, "dog": 4})
    folder_of(tmp_path / "f" / "val", {"cat": 2, "dog": 2}, seed=1)
    (tmp_path / "t").mkdir()
    for part in ("train", "val"):
        paths = sorted((tmp_path / "f" / part).rglob("*.png"))
        rows = [f"../f/{p.relative_to(tmp_path / 'f')}\t{p.parent.name}\n" for p in paths]
        (tmp_path / "t" / f"{part}.tsv").write_text("path\tlabel\n" + "".join(rows))
    one, two = load_images(str(tmp_path / "f")), load_images(str(tmp_path / "t"))
    assert one.classes == two.classes == ["cat", "dog"]
    assert one.sha == two.sha
    assert [len(one.parts[name]) for name in ("train", "valid")] == [9, 4]
    every = [data.parts["train"].read(np.arange(9)) for data in (one, two)]
    assert torch.equal(*every)
    assert one.parts["train"].labels.tolist() == [0] * 5 + [1] * 4


def test_labels_follow_their_images_through_every_choice(tmp_path):
    folder_of(tmp_path, {"a": 30, "b": 30, "c": 30})
    data = load_images(str(tmp_path), valid="0.3")
    whole = data.parts["train"]
    for part in (whole, data.parts["valid"], whole.part(0.5), whole.pick([5, 1, 40])):
        bright = part.read(np.arange(len(part))).float().mean((1, 2, 3))
        assert torch.equal((bright / 60).floor().long(), part.labels)
        assert [part.where(i).split("/")[-2] for i in range(len(part))] == [
            data.classes[label] for label in part.labels
        ]


def test_a_split_is_the_same_wherever_the_images_lie_and_shares_no_copy(tmp_path):
    folder_of(tmp_path / "one", {"a": 40, "b": 40})
    for path in sorted((tmp_path / "one" / "a").glob("*.png"))[:10]:
        path.with_name(f"copy-{path.name}").write_bytes(path.read_bytes())
    (tmp_path / "one").rename(tmp_path / "two")
    data = load_images(str(tmp_path / "two"), valid="0.2")
    train, valid = data.parts["train"], data.parts["valid"]
    assert not set(train.hashes) & set(valid.hashes)
    assert len(train) + len(valid) == 90 and 5 < len(valid) < 40
    (tmp_path / "two").rename(tmp_path / "three")
    assert load_images(str(tmp_path / "three"), valid="0.2").sha == data.sha


def test_shares_are_by_class_and_within_each_other(tmp_path):
    folder_of(tmp_path, {"a": 40, "b": 20, "c": 3})
    train = load_images(str(tmp_path), need=("train",)).parts["train"]
    parts = [set(train.part(share).hashes) for share in (0.1, 0.5, 1.0)]
    assert parts[0] < parts[1] < parts[2]
    assert torch.bincount(train.part(0.1).labels).tolist() == [4, 2, 1]


def test_mean_and_spread_are_those_of_all_pixels(tmp_path):
    folder_of(tmp_path, {"a": 5, "b": 7})
    train = load_images(str(tmp_path), need=("train",)).parts["train"]
    pixels = train.read(np.arange(12)).double() / 255
    mean, std = train.channel_stats()
    assert torch.allclose(torch.tensor(mean).double(), pixels.mean((0, 2, 3)), atol=1e-6)
    wanted = pixels.transpose(0, 1).flatten(1).std(1, correction=0)
    assert torch.allclose(torch.tensor(std).double(), wanted, atol=1e-6)


def test_decoded_images_are_kept_and_found_again(tmp_path, monkeypatch):
    folder_of(tmp_path / "data", {"a": 3, "b": 3}, size=20)
    how = {"need": ("train",), "format": ImageFormat(12), "cache": tmp_path / "cache"}
    first = load_images(str(tmp_path / "data"), **how)
    monkeypatch.setattr(image_files.ImageFiles, "decode", lambda *_: pytest.fail("decoded again"))
    again = load_images(str(tmp_path / "data"), **how)
    both = [data.parts["train"].read(np.arange(6)) for data in (first, again)]
    assert torch.equal(*both)
    assert both[0].shape == (6, 3, 12, 12)


def test_a_set_too_large_to_keep_is_read_from_its_files(tmp_path, monkeypatch):
    folder_of(tmp_path / "data", {"a": 3, "b": 3}, size=20)
    how = {"need": ("train",), "format": ImageFormat(12)}
    kept = load_images(str(tmp_path / "data"), **how).parts["train"]
    monkeypatch.setattr(images_of, "MOST_STORED", 100)
    for cache in (None, tmp_path / "cache"):
        lazy = load_images(str(tmp_path / "data"), **how, cache=cache).parts["train"]
        assert kept.pixels is not None and lazy.pixels is None
        assert torch.equal(kept.read([4, 0, 4]), lazy.read([4, 0, 4]))


def test_broken_files_are_named_or_left_out_with_their_number(tmp_path):
    home = folder_of(tmp_path / "data", {"a": 4, "b": 4}, size=24)
    whole = load_images(str(home), need=("train",)).parts["train"]
    cut, noise = home / "a" / "001.png", home / "b" / "002.png"
    cut.write_bytes(cut.read_bytes()[:300])
    noise.write_bytes(b"no picture")
    for cache in (None, tmp_path / "cache"):
        with pytest.raises(UsageError, match=r"b/002.png: no image, or a broken one.*broken=skip"):
            load_images(str(home), need=("train",), cache=cache)
        options = ImageOptions(broken="skip")
        data = load_images(str(home), need=("train",), options=options, cache=cache)
        train = data.parts["train"]
        assert len(train) == 6 and train.labels.tolist() == [0, 0, 0, 1, 1, 1]
        assert torch.equal(train.read(range(6)), whole.read([0, 2, 3, 4, 5, 7]))
        assert any("1 files that cannot be read left out" in note for note in data.notes)
        assert any("1 broken images of the train part left out" in note for note in data.notes)
    noise.unlink()
    with pytest.raises(UsageError, match=r"a/001.png: broken or cut short.*broken=skip"):
        load_images(str(home), need=("train",), cache=tmp_path / "cache")


def write_idx(path: Path, array: np.ndarray) -> None:
    head = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    packed = gzip.compress if path.suffix == ".gz" else bytes
    path.write_bytes(packed(head + array.astype(np.uint8).tobytes()))


def test_idx_files_are_read_packed_or_not(tmp_path):
    chance = np.random.default_rng(3)
    images = chance.integers(0, 256, (7, 5, 5))
    labels = np.array([3, 0, 11, 3, 2, 0, 1])
    for part, suffix in (("train", ".gz"), ("t10k", "")):
        write_idx(tmp_path / f"{part}-images-idx3-ubyte{suffix}", images)
        write_idx(tmp_path / f"{part}-labels-idx1-ubyte{suffix}", labels)
    assert holds_images(str(tmp_path))
    data = load_images(str(tmp_path), need=("train", "test"))
    assert data.classes == ["0", "1", "2", "3", "11"]  # by number, not by letter
    assert data.format.channels == 1 and data.format.size == 5
    for part in data.parts.values():
        assert torch.equal(part.read(range(7))[:, 0], torch.from_numpy(images).to(torch.uint8))
        assert [data.classes[i] for i in part.labels] == [str(label) for label in labels]


def test_numbers_of_labels_have_the_names_that_are_given(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte", np.zeros((4, 3, 3)))
    write_idx(tmp_path / "train-labels-idx1-ubyte", np.array([1, 0, 2, 1]))
    names = ("zebra", "ant", "bee")
    data = load_images(str(tmp_path), need=("train",), options=ImageOptions(names=names))
    assert data.classes == list(names) and data.parts["train"].labels.tolist() == [1, 0, 2, 1]
    again = load_images(str(tmp_path), need=("test",), classes=names)
    assert again.parts["test"].labels.tolist() == [1, 0, 2, 1]


def test_mosaics_are_cut_row_by_row(tmp_path):
    tiles = np.random.default_rng(5).integers(0, 256, (6, 4, 4, 3)).astype(np.uint8)
    whole = tiles.reshape(2, 3, 4, 4, 3).transpose(0, 2, 1, 3, 4).reshape(8, 12, 3)
    for label in ("cat", "sea_lion"):
        Image.fromarray(whole).save(tmp_path / f"train_{label}.png")
    data = load_images(str(tmp_path), need=("train",), options=ImageOptions(tile=4))
    assert data.classes == ["cat", "sea_lion"]
    train = data.parts["train"]
    assert torch.equal(train.read(range(6)), torch.from_numpy(tiles.transpose(0, 3, 1, 2)))
    assert train.labels.tolist() == [0] * 6 + [1] * 6
    with pytest.raises(UsageError, match="cannot be cut into tiles of 5; set tile="):
        load_images(str(tmp_path), need=("train",), options=ImageOptions(tile=5))


def test_photos_of_many_sizes_are_brought_to_one_and_told(tmp_path):
    for label, size in (("a", (30, 50)), ("b", (90, 70))):
        (tmp_path / label).mkdir()
        Image.new("L", size, 128).save(tmp_path / label / "x.jpg")
        Image.new("RGB" if label == "b" else "L", size).save(tmp_path / label / "y.jpg")
    data = load_images(str(tmp_path), need=("train",))
    assert (data.format.size, data.format.channels) == (64, 3)
    assert any(
        "images of 30 x 50 to 90 x 70 pixels are brought to 64 x 64" in n for n in data.notes
    )


def test_images_alone_need_no_labels(tmp_path):
    folder_of(tmp_path / "deep", {"er": 3})
    Image.new("RGB", (8, 8)).save(tmp_path / "loose.png")
    options = ImageOptions(labelled=False)
    data = load_images(str(tmp_path), need=("train",), options=options)
    assert len(data.parts["train"]) == 4 and data.classes == []


@pytest.mark.parametrize(
    ("text", "are"),
    [
        ("a.png\tcat\nb.jpg\tdog\n", True),
        ("label\timage\ncat\tdeep/er/a b.PNG\n", True),
        ('{"image": "a.webp", "label": "x"}\n', True),
        ("I like a.png and more\tgood\n", False),
        ("see a.png\tgood\nor not\tbad\n", False),
        ('{"text": "a.png?", "label": "x"}\n', False),
        ('{"image": "a.png"\n', False),
        ("\n", False),
    ],
)
def test_a_table_is_of_images_if_its_rows_name_some(tmp_path, text, are):
    (tmp_path / "train.tsv").write_text(text)
    assert holds_images(str(tmp_path)) == holds_images(tmp_path / "train.tsv") == are


@pytest.mark.parametrize("name", ["multi30k", "sst2", "trec", "tatoeba-en-zh", "ud-en-ewt"])
def test_texts_are_not_taken_for_images(real_data, name):
    if not (real_data / name).is_dir():
        pytest.skip(f"no {name}")
    assert not holds_images(str(real_data / name))


def test_fashion_mnist_is_read_to_the_last_pixel(real_data):
    folder = real_data / "fashion-mnist"
    if not folder.is_dir():
        pytest.skip("no fashion-mnist")
    data = load_images(str(folder), need=("test",))
    test = data.parts["test"]
    assert test.read(range(len(test))).shape == (10_000, 1, 28, 28)
    assert torch.bincount(test.labels).tolist() == [1000] * 10
    raw = gzip.decompress((folder / "t10k-images-idx3-ubyte.gz").read_bytes())[16:]
    digest = hashlib.sha256(test.read(range(len(test))).numpy().tobytes()).hexdigest()
    assert digest == hashlib.sha256(raw).hexdigest()


def test_the_cifar_mosaics_are_cut_as_their_readme_says(real_data):
    folder = real_data / "cifar10"
    if not folder.is_dir():
        pytest.skip("no cifar10")
    test = load_images(str(folder), need=("test",)).parts["test"]
    assert len(test) == 10_000 and torch.bincount(test.labels).tolist() == [1000] * 10
    whole = np.array(Image.open(folder / "test_bird.jpg"))
    birds = whole.reshape(20, 32, 50, 32, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 32, 32, 3)
    found = test.read(torch.nonzero(test.labels == 2)[:, 0])
    assert torch.equal(found, torch.from_numpy(birds.transpose(0, 3, 1, 2)))


# What is kept


def test_a_table_gives_back_its_rows_and_knows_its_gaps(tmp_path):
    rows = np.arange(24, dtype=np.uint8).reshape(4, 2, 3)
    table = build_image_store(tmp_path / "t", (4, 2, 3), [rows[0], "gone", rows[2], rows[3]])
    assert table.gaps == [1] and table.why == "gone"
    again = ImageStore.open(tmp_path / "t", (4, 2, 3))
    assert np.array_equal(again.rows[[0, 2, 3]], rows[[0, 2, 3]])
    assert not build_image_store(tmp_path / "e", (4, 0), ["gone", *rows[1:]]).rows.size
    with pytest.raises(UsageError, match="a broken store"):
        ImageStore.open(tmp_path / "t", (5, 2, 3))
    (tmp_path / "t" / "store.json").write_text("[")
    with pytest.raises(UsageError, match="a broken store"):
        ImageStore.open(tmp_path / "t", (4, 2, 3))


@given(some.integers(1, 40), some.integers(1, 60), some.integers(0, 2**63))
def test_batches_show_every_example_once_an_epoch_in_any_order_of_asking(examples, rows, seed):
    shuffled, again = Shuffled(examples, rows, seed), Shuffled(examples, rows, seed)
    number = 3 * examples // rows + 2
    backwards = [again[n] for n in reversed(range(number))][::-1]
    stream = np.concatenate([shuffled[n] for n in range(number)])
    assert np.array_equal(stream, np.concatenate(backwards))
    for epoch in range(len(stream) // examples):
        part = stream[epoch * examples : (epoch + 1) * examples]
        assert sorted(part.tolist()) == list(range(examples))


# Augmentation


def batch(number: int = 16, channels: int = 3, size: int = 12, seed: int = 0) -> torch.Tensor:
    chance = np.random.default_rng(seed)
    return torch.from_numpy(chance.integers(0, 256, (number, channels, size, size), np.uint8))


def test_a_mirror_image_of_a_mirror_image_is_the_image():
    pixels = batch()
    once = flip(pixels, step_rng(1, 2))
    assert torch.equal(flip(once, step_rng(1, 2)), pixels)
    turned = (once != pixels).flatten(1).any(1)
    assert 0 < turned.sum() < len(pixels)
    assert torch.equal(once[turned], pixels[turned].flip(-1))


def test_a_crop_keeps_the_shape_and_moves_what_is_seen():
    pixels = batch()
    assert crop(pixels, step_rng(1, 1), 3).shape == pixels.shape
    middle = torch.full((16,), 3)
    assert torch.equal(crop_at(pixels, 3, middle, middle), pixels)
    moved = crop_at(pixels, 3, middle + 2, middle - 1)
    assert torch.equal(moved[:, :, :-2, 1:], pixels[:, :, 2:, :-1])
    assert not moved[:, :, -2:].any() and not moved[:, :, :, 0].any()
    assert torch.equal(crop(pixels, step_rng(1, 1), 0), pixels)


def test_a_zoom_on_the_whole_is_the_whole():
    pixels = batch()
    assert torch.allclose(zoom(pixels, _Still(), 1.0), pixels.float(), atol=1e-3)
    flat = torch.full((4, 3, 12, 12), 77, dtype=torch.uint8)
    assert torch.allclose(zoom(flat, step_rng(1, 1)), flat.float(), atol=1e-3)


class _Still:
    """A chance that always draws the middle."""

    def uniform(self, low, high, number):
        return np.full(number, (low + high) / 2)


NEVER = {"autocontrast", "equalize"}  # have no strength


@pytest.mark.parametrize("name", sorted(set(OPERATIONS) - NEVER))
@pytest.mark.parametrize("channels", [1, 3])
def test_a_change_without_strength_changes_nothing(name, channels):
    pixels = batch(channels=channels).float()
    found = OPERATIONS[name].apply(pixels.clone(), torch.zeros(16))
    assert torch.allclose(found, pixels, atol=1e-3)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_an_image_is_changed_alike_whatever_stands_beside_it(name):
    pixels, amounts = batch().float(), torch.linspace(-0.9, 0.9, 16) * OPERATIONS[name].most
    if not OPERATIONS[name].signed:
        amounts = amounts.abs()
    whole = OPERATIONS[name].apply(pixels.clone(), amounts)
    assert whole.shape == pixels.shape and whole.min() >= 0 and whole.max() <= 255
    for i in (0, 7, 15):
        alone = OPERATIONS[name].apply(pixels[i : i + 1].clone(), amounts[i : i + 1])
        assert torch.allclose(alone[0], whole[i], atol=1e-3)


@pytest.mark.parametrize("size", [20, 40])  # pixels for less than one, and for more
def test_equalising_is_what_pillow_does(size):
    from PIL import ImageOps

    pixels = (batch(6, 3, size, seed=4) // 3) + 40
    found = equalize(pixels.float())
    for one, picture in zip(found, pixels, strict=True):
        wanted = np.asarray(ImageOps.equalize(Image.fromarray(picture.permute(1, 2, 0).numpy())))
        assert np.array_equal(one.permute(1, 2, 0).numpy(), wanted.astype(np.float32))


@pytest.mark.parametrize("name", ["brightness", "contrast", "colour", "sharpness"])
def test_blending_is_what_pillow_does(name):
    from PIL import ImageEnhance

    kinds = {"colour": "Color"}
    enhance = getattr(ImageEnhance, kinds.get(name, name.title()))
    pixels = batch(4, 3, 20, seed=5)
    for amount in (-0.6, 0.4):
        found = OPERATIONS[name].apply(pixels.float(), torch.full((4,), amount))
        for one, picture in zip(found, pixels, strict=True):
            wanted = enhance(Image.fromarray(picture.permute(1, 2, 0).numpy())).enhance(1 + amount)
            apart = np.abs(one.permute(1, 2, 0).numpy() - np.asarray(wanted, np.float32))
            assert apart.max() <= 2.5  # Pillow rounds in between


def test_brightness_scales_every_pixel():
    pixels = batch().float()
    assert torch.allclose(brightness(pixels, torch.full((16,), 0.5)), pixels / 2, atol=1e-4)


def test_erasing_leaves_the_rest_and_the_others_alone():
    images = torch.full((64, 3, 16, 16), 9.0)
    found = erase(images, step_rng(3, 1), 0.5)
    gone = (found != 9).all(1)
    touched = gone.flatten(1).any(1)
    assert 15 < touched.sum() < 50
    for mask in gone[touched]:
        rows, columns = torch.nonzero(mask.any(1)), torch.nonzero(mask.any(0))
        box = mask[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1]
        assert box.all() and mask.sum() == box.numel()  # a rectangle
    assert torch.equal(erase(images, step_rng(3, 1), 0.0), images)


def test_boxes_have_the_area_that_is_asked_for():
    areas = torch.tensor([0.0, 0.25, 1.0])
    masks = boxes(step_rng(1, 1), 3, (16, 16), areas, torch.ones(3))
    assert masks.float().mean((1, 2, 3)).tolist() == [0.0, 0.25, 1.0]


@pytest.mark.parametrize(("mixup", "cutmix"), [(0.4, 0.0), (0.0, 1.0), (0.8, 1.0)])
def test_targets_are_mixed_in_the_share_of_the_images(mixup, cutmix):
    # every pixel of an image is its label, so its mean is what its targets must say
    labels = torch.arange(10).repeat(5)
    images = labels.float()[:, None, None, None].expand(50, 1, 16, 16)
    targets = smoothed(labels, 10, 0.0)
    found, soft = mix(images, targets, step_rng(1, 4), mixup, cutmix)
    assert torch.allclose(soft.sum(1), torch.ones(50))
    assert torch.allclose(soft @ torch.arange(10.0), found.mean((1, 2, 3)), atol=1e-4)
    assert not torch.equal(found, images)


def test_nothing_is_mixed_unless_asked_for():
    images, targets = torch.rand(4, 1, 3, 3), torch.eye(4)
    found = mix(images, targets, step_rng(1, 1), 0.0, 0.0)
    assert found[0] is images and found[1] is targets


def test_smoothed_targets_sum_to_one():
    targets = smoothed(torch.tensor([0, 3]), 4, 0.2)
    assert torch.allclose(targets.sum(1), torch.ones(2))
    assert targets[0].tolist() == pytest.approx([0.85, 0.05, 0.05, 0.05])


ALL = {"erase": 0.5, "mixup": 0.3, "cutmix": 1.0, "smoothing": 0.1}


@pytest.mark.parametrize("names", ["none", "flip", "flip+crop", "zoom+trivial", "crop+rand+flip"])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_same_key_gives_the_same_batch_and_another_another(names, channels):
    format = ImageFormat(12, channels, mean=(0.5,) * channels, std=(0.2,) * channels)
    augment = Augment(names, 10, format.normalise, **ALL)
    pixels, labels = batch(channels=channels), torch.arange(16) % 10
    before = pixels.clone()
    one = augment(pixels, labels, step_rng(1, 5))
    two = augment(pixels, labels, step_rng(1, 5))
    assert torch.equal(one[0], two[0]) and torch.equal(one[1], two[1])
    assert torch.equal(pixels, before)  # what lies in the store is not touched
    assert one[0].shape == (16, channels, 12, 12) and one[0].dtype == torch.float32
    assert one[0].isfinite().all()
    assert not torch.equal(one[0], augment(pixels, labels, step_rng(1, 6))[0])
    assert not torch.equal(one[0], augment(pixels, labels, step_rng(2, 5))[0])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_smallest_images_go_through_everything(size):
    for names in ("flip+crop+trivial", "zoom+rand"):
        augment = Augment(names, 3, ImageFormat().normalise, padding=0, **ALL)
        pixels = batch(40, 3, size)
        images, _ = augment(pixels, torch.arange(40) % 3, step_rng(1, size))
        assert images.shape == pixels.shape and images.isfinite().all()


def test_names_of_changes_are_known_or_refused():
    assert augments("none") == [] and len(augments("flip+crop")) == 2
    with pytest.raises(UsageError, match="unknown augment 'flipp'.*Did you mean 'flip'"):
        augments("flipp")
    with pytest.raises(UsageError, match="has a name twice"):
        augments("flip+flip")


def test_idx_files_that_lie_are_refused(tmp_path):
    path = tmp_path / "a-idx3-ubyte"
    for data, told in (
        (b"", "no idx file"),
        (b"\0\0\x0d\x01" + bytes(8), "idx of type 13"),
        (b"\0\0\x08\x03" + bytes(4), "cut short in its header"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "too many to be meant"),
        (b"\0\0\x08\x01" + struct.pack(">I", 5) + bytes(4), "says 5 bytes, there are 4"),
        (b"\0\0\x08\x01" + struct.pack(">I", 5) + bytes(6), "there are more"),
    ):
        path.write_bytes(data)
        with pytest.raises(UsageError, match=told):
            read_idx(path)
