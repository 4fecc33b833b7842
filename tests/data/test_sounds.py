"""Laws of sounds: one sound in any file is the same sound; a set is the same however it lies."""

import csv
import io
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
import torch

import regard.data.sound_files as sound_files
import regard.data.sound_sets as sound_sets
from regard.data.image_files import holds_images
from regard.data.sound_files import BrokenSound, SoundInfo, read_sound, sound_info
from regard.data.sound_sets import SoundOptions, holds_sounds
from regard.data.sound_streams import mp3_frame
from regard.data.sounds import load_sounds
from regard.data.spectrogram import SoundFormat
from regard.errors import UsageError

RATE = 16000
WAVES = ["PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE"]
LABELS = SoundOptions("label")


def noise(samples: int = 4000, channels: int = 1, seed: int = 0) -> np.ndarray:
    found = np.random.default_rng(seed).normal(0, 0.1, (samples, channels)).clip(-1, 1)
    return found[:, 0] if channels == 1 else found


def coded(
    samples: np.ndarray, format: str = "WAV", subtype: str | None = None, rate: int = RATE
) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


def theirs(data: bytes) -> np.ndarray:
    """Return what soundfile alone reads."""
    return soundfile.read(io.BytesIO(data), dtype="float32", always_2d=True)[0]


# One sound


@pytest.mark.parametrize("channels", [1, 2, 6])
@pytest.mark.parametrize("kind", ["WAV", "WAVEX", "RF64"])
@pytest.mark.parametrize("subtype", WAVES)
def test_a_wav_of_any_kind_is_read_as_soundfile_reads_it(kind, subtype, channels):
    data = coded(noise(channels=channels), kind, subtype)
    assert np.array_equal(read_sound(data, RATE), theirs(data).mean(1, dtype=np.float32))


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize(
    ("format", "subtype"),
    [("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", None)],
)
def test_a_coded_sound_is_read_as_soundfile_reads_it(format, subtype, channels):
    samples = noise(3 * RATE, channels)
    data = coded(samples, format, subtype)
    found = read_sound(data, RATE)
    assert len(found) == len(samples)
    np.testing.assert_allclose(found, theirs(data).mean(1), atol=1e-6)


def test_what_has_no_loss_is_the_same_from_every_file(tmp_path):
    samples = (noise() * 32767).astype(np.int16)
    found = [read_sound(coded(samples, *kind), RATE) for kind in (("WAV", "PCM_16"), ("FLAC",))]
    for given in (samples, samples.astype(np.float32) / 2**15, samples.astype(np.int32) * 2**16):
        found.append(read_sound(given, RATE))
    (tmp_path / "a.wav").write_bytes(coded(samples))
    found += [read_sound(path, RATE) for path in (tmp_path / "a.wav", str(tmp_path / "a.wav"))]
    found.append(read_sound(torch.from_numpy(samples), RATE))
    assert all(np.array_equal(one, samples.astype(np.float32) / 2**15) for one in found)
    assert all(one.dtype == np.float32 for one in found)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
@pytest.mark.parametrize("format", ["WAV", "FLAC"])
def test_any_rate_is_brought_to_that_of_the_model_by_soxr(rate, format, monkeypatch):
    data = coded(noise(2 * rate), format, "PCM_16", rate)
    expected = soxr.resample(theirs(data)[:, 0], rate, RATE)
    np.testing.assert_allclose(read_sound(data, RATE), expected, atol=1e-6)
    monkeypatch.setattr(sound_files, "BLOCK_SAMPLES", 1000)
    np.testing.assert_allclose(read_sound(data, RATE), expected, atol=1e-6)


@pytest.mark.parametrize("format", ["WAV", "FLAC", "OGG", "MP3"])
def test_in_what_blocks_a_sound_is_decoded_does_not_matter(format, monkeypatch):
    data = coded(noise(2 * RATE, 2), format)
    whole = read_sound(data, RATE)
    monkeypatch.setattr(sound_files, "BLOCK_SAMPLES", 777)
    np.testing.assert_allclose(read_sound(data, RATE), whole, atol=1e-6)


@pytest.mark.parametrize("rate", [8000, 16000, 22050, 44100])
@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("loudness", [(0.5, 0.0001, 0.3), (0.0001, 0.5, 0.5)])
def test_an_mp3_without_a_header_is_read_to_its_end(rate, channels, loudness):
    """Of such a one, libsndfile estimates the length by its first frames, and reads no further."""
    samples = np.repeat(loudness, rate)[:, None] * noise(3 * rate, 2)[:, :channels]
    data = coded(samples, "MP3", rate=rate)
    whole = read_sound(data, rate)
    first = mp3_frame(data)
    assert first is not None and b"Xing" in data[: first.length]
    bare = read_sound(data[first.length :], rate)
    delay = len(bare) - len(whole)  # of the encoder, which only the header tells
    assert len(whole) == 3 * rate and 0 <= delay < 3 * 1152
    shifted = [bare[at : at + len(whole)] for at in range(delay + 1)]
    assert min(np.abs(one - whole).max() for one in shifted) < 1e-4


def test_a_header_says_rate_channels_length_and_kind():
    data = noise(24000, 2)
    for format, kind in (("WAV", "wav"), ("FLAC", "flac"), ("OGG", "ogg"), ("MP3", "mp3")):
        info = sound_info(coded(data, format, rate=24000))
        assert info == SoundInfo(24000, 2, 1.0, kind)


def test_tags_and_unknown_chunks_are_passed_over():
    data = coded(noise())
    body = b"LIST" + struct.pack("<I", 5) + b"INFO!\0"
    tagged = data[:12] + body + data[12:] + b"LIST" + struct.pack("<I", 4) + b"INFO"
    assert np.array_equal(read_sound(tagged, RATE), read_sound(data, RATE))


def test_twelve_bits_lie_in_the_upper_ones_of_two_bytes():
    data = bytearray(coded(noise(), subtype="PCM_16"))
    whole = read_sound(bytes(data), RATE)
    data[34] = 12
    assert np.array_equal(read_sound(bytes(data), RATE), whole)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (np.zeros((2, 2, 2)), "expected samples"),
        (np.zeros(0), "expected samples"),
        (np.zeros(5, complex), "expected samples"),
        (np.zeros((2, 16000)), "channels"),
        (np.array([0.0, np.nan]), "NaN"),
        (np.array([0.0, 20000.0]), "as large as"),
    ],
)
def test_an_array_that_is_no_sound_is_refused(given, said):
    with pytest.raises(UsageError, match=said):
        read_sound(given, RATE)


def test_the_longest_sound_is_a_setting():
    data = coded(noise(RATE * 2))
    with pytest.raises(BrokenSound, match=r"longer than 1\.50 seconds \(2\.00 seconds\)"):
        read_sound(data, RATE, most_seconds=1.5)
    assert len(read_sound(data, RATE, most_seconds=2)) == RATE * 2


# Sets


def write_sounds(folder: Path, count: int = 6, seconds: float = 0.1) -> list[str]:
    (folder / "audio").mkdir(parents=True, exist_ok=True)
    names = [f"audio/{n}.{'wav' if n % 2 else 'flac'}" for n in range(count)]
    for n, name in enumerate(names):
        samples = noise(int(seconds * RATE) + 10 * n, seed=n)
        (folder / name).write_bytes(coded(samples, Path(name).suffix[1:].upper()))
    return names


def write_manifest(path: Path, names: list[str], texts: list[str]) -> None:
    rows = list(zip(names, texts, strict=True))
    if path.suffix == ".jsonl":
        key = "label" if "label" in path.name else "text"
        lines = [json.dumps({"audio": name, key: text}) for name, text in rows]
        path.write_text("\n".join(lines))
    elif path.suffix == ".csv":
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(
                [("path", "sentence", "votes"), *((*row, 3) for row in rows)]
            )
    else:
        path.write_text("".join(f"{name}\t{text}\n" for name, text in rows))


TEXTS = ["YES", "GO ON", "A, B", 'SAY "NO"', "ÄÖÜ", "SIX"]


@pytest.mark.parametrize("name", ["train.tsv", "train.jsonl", "train.csv"])
def test_a_manifest_is_the_same_set_in_any_kind_of_table(tmp_path, name):
    names = write_sounds(tmp_path)
    write_manifest(tmp_path / name, names, TEXTS)
    for data in (tmp_path, tmp_path / name):
        part = load_sounds(str(data), need=("train",)).parts["train"]
        assert part.texts == TEXTS and len(part) == 6
        assert [Path(part.where(i)).name for i in range(6)] == [Path(n).name for n in names]
        for i, path in enumerate(names):
            assert np.array_equal(part.read(i), read_sound(tmp_path / path, RATE))
        assert part.seconds.tolist() == [len(part.read(i)) / RATE for i in range(6)]


def test_sounds_within_a_table_are_read(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    names = write_sounds(tmp_path / "files")
    rows = [
        {"audio": {"bytes": (tmp_path / "files" / name).read_bytes(), "path": name}, "text": text}
        for name, text in zip(names, TEXTS, strict=True)
    ]
    (tmp_path / "packed").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "packed" / "train.parquet")
    write_manifest(tmp_path / "files" / "train.tsv", names, TEXTS)
    packed, files = (
        load_sounds(str(tmp_path / folder), need=("train",)).parts["train"]
        for folder in ("packed", "files")
    )
    assert packed.sha == files.sha
    assert all(np.array_equal(packed.read(i), files.read(i)) for i in range(6))
    assert holds_sounds(tmp_path / "packed") and not holds_images(tmp_path / "packed")


def test_class_folders_are_labels(tmp_path):
    for label in ("ten", "nine"):
        for n in range(3):
            path = tmp_path / label / f"{n}.wav"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(coded(noise(seed=n + 10 * len(label))))
    data = load_sounds(str(tmp_path), need=("train",), options=LABELS)
    assert (
        data.classes == ["nine", "ten"] and data.parts["train"].labels.tolist() == [0] * 3 + [1] * 3
    )
    assert holds_sounds(tmp_path) and not holds_images(tmp_path)
    with pytest.raises(UsageError, match="no transcripts"):
        load_sounds(str(tmp_path))


def test_labels_come_from_a_table_too_and_numbers_are_in_order(tmp_path):
    names = write_sounds(tmp_path)
    write_manifest(tmp_path / "train.tsv", names, ["10", "2", "10", "2", "0", "0"])
    data = load_sounds(str(tmp_path), need=("train",), options=LABELS)
    assert data.classes == ["0", "2", "10"]
    assert data.parts["train"].labels.tolist() == [2, 1, 2, 1, 0, 0]
    known = load_sounds(str(tmp_path), need=("train",), options=LABELS, classes=["2", "0", "10"])
    assert known.parts["train"].labels.tolist() == [2, 0, 2, 0, 1, 1]
    with pytest.raises(UsageError, match="not among those"):
        load_sounds(str(tmp_path), need=("train",), options=LABELS, classes=["2", "0"])


def test_columns_can_be_chosen_and_must_be_where_it_is_not_clear(tmp_path):
    names = write_sounds(tmp_path)
    rows = [f"{n}\t{text}\t{name}" for n, (name, text) in enumerate(zip(names, TEXTS, strict=True))]
    (tmp_path / "train.tsv").write_text("\n".join(rows))
    with pytest.raises(UsageError, match="which column is the text"):
        load_sounds(str(tmp_path), need=("train",))
    options = SoundOptions(columns="3,2")
    assert (
        load_sounds(str(tmp_path), need=("train",), options=options).parts["train"].texts == TEXTS
    )
    (tmp_path / "train.tsv").write_text("\n".join(["id\tsaid\tclip", *rows]))
    options = SoundOptions(columns="clip,said")
    assert (
        load_sounds(str(tmp_path), need=("train",), options=options).parts["train"].texts == TEXTS
    )
    with pytest.raises(UsageError, match="which column is the text"):
        load_sounds(str(tmp_path), need=("train",), options=SoundOptions(columns="clip,written"))


def test_parts_are_found_by_name_or_split_off_by_hash(tmp_path):
    names = write_sounds(tmp_path, 40, 0.02)
    texts = [f"TEXT {n}" for n in range(40)]
    write_manifest(tmp_path / "all.tsv", names, texts)
    write_manifest(tmp_path / "train.tsv", names[:30], texts[:30])
    write_manifest(tmp_path / "dev.tsv", names[30:], texts[30:])
    (tmp_path / "test.wav").write_bytes(coded(noise()))  # no table of the test part
    data = load_sounds(str(tmp_path))
    assert {name: len(part) for name, part in data.parts.items()} == {"train": 30, "valid": 10}
    split = load_sounds(str(tmp_path / "all.tsv"), valid="0.25")
    again = load_sounds(str(tmp_path / "all.tsv"), valid="0.25")
    held, kept = set(split.parts["valid"].hashes), set(split.parts["train"].hashes)
    assert not held & kept and len(held | kept) == 40 and 4 <= len(held) <= 16
    assert split.sha == again.sha and "split off" in split.notes[-1]
    later = load_sounds(str(tmp_path / "all.tsv"), need=("valid",), trained=split.split)
    assert later.parts["valid"].hashes == split.parts["valid"].hashes


def test_broken_sounds_are_refused_or_left_out(tmp_path):
    names = write_sounds(tmp_path)
    write_manifest(tmp_path / "train.tsv", names, TEXTS)
    whole = (tmp_path / names[0]).read_bytes()
    (tmp_path / names[0]).write_bytes(whole[: len(whole) // 2])  # only decoding finds it
    (tmp_path / names[1]).write_bytes(b"no sound")
    with pytest.raises(BrokenSound, match=r"1\.wav.*broken=skip"):
        load_sounds(str(tmp_path), need=("train",))
    options = SoundOptions(broken="skip")
    data = load_sounds(str(tmp_path), need=("train",), options=options)
    part = data.parts["train"]
    assert (
        part.texts == TEXTS[2:] and [len(part.read(i)) for i in range(4)] == part.samples.tolist()
    )
    notes = " ".join(data.notes)
    assert "1 files that cannot be read" in notes and "1 broken sounds" in notes
    with pytest.raises(UsageError, match="unknown broken 'skipp'"):
        load_sounds(str(tmp_path), options=SoundOptions(broken="skipp"))


def test_what_is_decoded_is_kept_within_a_bound(tmp_path, monkeypatch):
    names = write_sounds(tmp_path)
    write_manifest(tmp_path / "train.tsv", names, TEXTS)
    kept = load_sounds(str(tmp_path), need=("train",)).parts["train"]
    bound = sum(kept.samples[:3]) * 4
    monkeypatch.setattr(sound_sets.SoundFiles.decode, "__defaults__", (bound,))
    part = load_sounds(str(tmp_path), need=("train",)).parts["train"]
    read = []
    original = sound_sets.read_sound
    monkeypatch.setattr(sound_sets, "read_sound", lambda *a: read.append(a[2]) or original(*a))
    assert all(np.array_equal(part.read(i), kept.read(i)) for i in range(6))
    assert len(read) == 3  # the others are still in memory
    assert part.samples.tolist() == kept.samples.tolist() and part.sha == kept.sha


def test_some_of_the_sounds_are_those_sounds(tmp_path):
    names = write_sounds(tmp_path)
    write_manifest(tmp_path / "train.tsv", names, TEXTS)
    part = load_sounds(str(tmp_path), need=("train",)).parts["train"]
    some = part.pick([4, 1])
    assert (
        some.texts == [TEXTS[4], TEXTS[1]]
        and some.seconds.tolist() == part.seconds[[4, 1]].tolist()
    )
    assert np.array_equal(some.read(1), part.read(1)) and some.where(0) == part.where(4)


def test_the_hash_of_a_set_follows_sounds_texts_and_rate(tmp_path):
    names = write_sounds(tmp_path)
    write_manifest(tmp_path / "train.tsv", names, TEXTS)

    def sha(rate: int = RATE) -> str:
        return load_sounds(str(tmp_path), need=("train",), format=SoundFormat(rate=rate)).sha

    first = sha()
    assert first == sha() != sha(8000)
    write_manifest(tmp_path / "train.tsv", names, [*TEXTS[:5], "SEVEN"])
    assert sha() != first


def test_the_statistics_of_a_set_normalise_it(tmp_path):
    names = write_sounds(tmp_path)
    write_manifest(tmp_path / "train.tsv", names, TEXTS)
    part = load_sounds(str(tmp_path), need=("train",)).parts["train"]
    mean, std = part.feature_stats()
    format = SoundFormat(normalise="global", mean=mean, std=std).check()
    every = torch.cat([format.spectrogram(part.read(i)) for i in range(6)])
    assert every.mean(0).abs().max() < 1e-3 and (every.std(0, correction=0) - 1).abs().max() < 1e-3


def test_texts_and_images_are_no_sounds(tmp_path):
    (tmp_path / "train.tsv").write_text("a dog\tein Hund\na cat\teine Katze\n")
    assert (
        not holds_sounds(tmp_path) and not holds_sounds(tmp_path / "none") and not holds_sounds("")
    )
    (tmp_path / "train.tsv").write_text("a.png\tdog\nb.png\tcat\n")
    assert not holds_sounds(tmp_path) and holds_images(tmp_path)


def test_an4_is_a_set_of_sounds(real_data):
    if not (real_data / "an4").is_dir():
        pytest.skip("no AN4 data")
    data = load_sounds(str(real_data / "an4"), need=("valid",))
    part = data.parts["valid"]
    assert len(part) == 64 and sum(len(text.split()) for text in part.texts) == 383
    assert 1 < part.seconds.mean() < 6 and not data.notes
