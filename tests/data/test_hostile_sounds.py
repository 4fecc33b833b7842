"""Hostile and broken sounds: one clear line within 5 seconds and 500 MB, or read rightly."""

import io
import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

from regard.data.sound_files import BrokenSound, read_sound
from regard.data.sound_sets import SoundOptions
from regard.data.sound_streams import mp3_frame, ogg_checksum
from regard.data.sounds import load_sounds
from regard.errors import UsageError

SECONDS, BYTES = 5, 500 * 2**20
RATE = 16000


def tone(samples: int = RATE) -> np.ndarray:
    return 0.4 * np.sin(np.arange(samples) / 9)


def coded(samples: np.ndarray, format: str, subtype: str | None = None, rate: int = RATE) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=format, subtype=subtype)
    return file.getvalue()


def chunk(name: bytes, body: bytes, length: int | None = None) -> bytes:
    """Return a chunk of a WAV, which may lie about its length."""
    return name + struct.pack("<I", len(body) if length is None else length) + body


def header(
    tag: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16, align: int | None = None
) -> bytes:
    align = channels * bits // 8 if align is None else align
    return struct.pack("<HHIIHH", tag, channels, rate, rate * align % 2**32, align, bits)


def wav(*chunks: bytes, start: bytes = b"RIFF") -> bytes:
    body = b"WAVE" + b"".join(chunks)
    return start + struct.pack("<I", len(body)) + body


def floats(*values: float, bits: int = 32) -> bytes:
    samples = np.array([*tone(100), *values], f"<f{bits // 8}").tobytes()
    return wav(chunk(b"fmt ", header(3, bits=bits)), chunk(b"data", samples))


PCM = (tone(500) * 32767).astype("<i2").tobytes()
FMT, DATA = chunk(b"fmt ", header()), chunk(b"data", PCM)
GUID = bytes.fromhex("00000000 1000 8000 00aa 00389b71".replace(" ", ""))


def extensible(tag: int, guid: bytes = GUID) -> bytes:
    return header(0xFFFE) + struct.pack("<HHIH", 22, 16, 4, tag) + guid


def patched(data: bytes, at: int, new: bytes) -> bytes:
    return data[:at] + new + data[at + len(new) :]


NOISE = np.random.default_rng(0).normal(0, 0.1, 3 * RATE)
FLAC, OGG = coded(tone(), "FLAC"), coded(NOISE, "OGG", "VORBIS")
OPUS, MP3 = coded(tone(), "OGG", "OPUS"), coded(tone(), "MP3")
BARE = MP3[mp3_frame(MP3).length :]  # type: ignore[union-attr]  # without the frame that says the length
ID3 = b"ID3\4\0\0\0\0\0\x0a" + bytes(10)


def flac_total(samples: int) -> bytes:
    """Return a FLAC whose header promises so many samples."""
    packed = int.from_bytes(FLAC[18:26], "big") >> 36 << 36 | samples
    return patched(FLAC, 18, packed.to_bytes(8, "big"))


def page(
    packets: bytes, sizes: bytes, number: int, granule: int, kind: int, serial: bytes
) -> bytes:
    head = b"OggS\0" + bytes([kind]) + struct.pack("<q", granule) + serial
    whole = head + struct.pack("<II", number, 0) + bytes([len(sizes)]) + sizes + packets
    return patched(whole, 22, struct.pack("<I", ogg_checksum(whole)))


def ogg_pages(data: bytes) -> list[bytes]:
    return [b"OggS" + part for part in data.split(b"OggS")[1:]]


def long_opus(hours: float) -> bytes:
    """Return an Opus stream of silence, of which a second takes 150 bytes."""
    first, tags = ogg_pages(OPUS)[:2]
    pages, serial = [first, tags], first[14:18]
    count = int(hours * 3600 / (255 * 0.02))
    for n in range(1, count + 1):
        silence = b"\xf8\xff\xfe" * 255
        last = 4 if n == count else 0
        pages.append(page(silence, b"\3" * 255, n + 1, n * 255 * 960, last, serial))
    return b"".join(pages)


def long_mp3(hours: float) -> bytes:
    """Return an MP3 of one silent frame over and over."""
    data = coded(np.zeros(RATE), "MP3")
    at = 0
    for _ in range(10):
        frame = mp3_frame(data[at:])
        assert frame is not None
        at, length = at + frame.length, frame.length
    return data[at - length : at] * int(hours * 3600 * RATE / 576)


def long_wav(hours: float) -> Callable[[Path], None]:
    """Return what writes silence, which takes no room on the disk."""

    def write(path: Path) -> None:
        length = int(hours * 3600) * RATE * 2
        path.write_bytes(wav(FMT, chunk(b"data", b"", length)))
        with open(path, "r+b") as file:
            file.truncate(44 + length)

    return write


# name -> the file, and what is said of it, or how many samples are read
CASES: dict[str, tuple[bytes | Callable[[Path], None], str | int]] = {
    # no sound at all
    "empty.wav": (b"", "empty"),
    "text.wav": (b"hello, this is a text and no sound\n" * 20, "first bytes"),
    "zeros.wav": (bytes(1000), "first bytes"),
    "page.mp3": (b"<html>" * 100, "first bytes"),
    "picture.flac": (b"\x89PNG\r\n\x1a\n" + bytes(100), "first bytes"),
    "noise.ogg": (np.random.default_rng(0).bytes(5000), "first bytes"),
    "aiff.wav": (coded(tone(), "AIFF"), "first bytes"),
    "au.wav": (coded(tone(), "AU"), "first bytes"),
    "caf.wav": (coded(tone(), "CAF"), "first bytes"),
    "big-endian.wav": (wav(FMT, DATA, start=b"RIFX"), "first bytes"),
    "matlab.wav": (coded(tone(), "MAT5"), "first bytes"),
    # WAV, kinds that are not read
    "ima-adpcm.wav": (coded(tone(), "WAV", "IMA_ADPCM"), "IMA_ADPCM"),
    "ms-adpcm.wav": (coded(tone(), "WAV", "MS_ADPCM"), "ADPCM"),
    "mu-law.wav": (coded(tone(), "WAV", "ULAW"), "ULAW"),
    "a-law.wav": (coded(tone(), "WAV", "ALAW"), "ALAW"),
    "gsm.wav": (coded(tone(8000), "WAV", "GSM610", 8000), "GSM"),
    "adpcm-extensible.wav": (wav(chunk(b"fmt ", extensible(2)), DATA), "broken wav"),
    "unknown-guid.wav": (wav(chunk(b"fmt ", extensible(1, bytes(14))), DATA), "broken wav"),
    "unknown-tag.wav": (wav(chunk(b"fmt ", header(0x1234)), DATA), "broken wav"),
    # WAV, headers that lie
    "0-hertz.wav": (wav(chunk(b"fmt ", header(rate=0)), DATA), "broken wav"),
    "1-hertz.wav": (wav(chunk(b"fmt ", header(rate=1)), DATA), "1 Hz"),
    "4-gigahertz.wav": (wav(chunk(b"fmt ", header(rate=2**32 - 1)), DATA), "broken wav"),
    "0-channels.wav": (wav(chunk(b"fmt ", header(channels=0)), DATA), "Channel count"),
    "300-channels.wav": (wav(chunk(b"fmt ", header(channels=300)), DATA), "300 channels"),
    "0-bits.wav": (wav(chunk(b"fmt ", header(bits=0)), DATA), "broken wav"),
    "0-align.wav": (wav(chunk(b"fmt ", header(align=0)), DATA), "0 bytes"),
    "large-align.wav": (wav(chunk(b"fmt ", header(align=65535)), DATA), "65535 bytes"),
    "16-bit-floats.wav": (wav(chunk(b"fmt ", header(3, bits=16)), DATA), "broken wav"),
    "1000-bits.wav": (wav(chunk(b"fmt ", header(bits=1000)), DATA), "broken wav"),
    "24-bits-in-4-bytes.wav": (wav(chunk(b"fmt ", header(bits=24, align=4)), DATA), "4 bytes"),
    "mp3-within.wav": (wav(chunk(b"fmt ", header(0x55)), chunk(b"data", MP3)), "wav"),
    "hours-in-1-kB.wav": (wav(FMT, chunk(b"data", PCM, 2_000_000_000)), "cut short"),
    "no-length.wav": (wav(FMT, chunk(b"data", PCM, 2**32 - 1)), 500),
    "rf64-exabytes.wav": (
        wav(
            chunk(b"ds64", struct.pack("<QQQI", 2**62, 2**62, 2**61, 0)),
            FMT,
            chunk(b"data", PCM, 2**32 - 1),
            start=b"RF64",
        ),
        500,
    ),
    "half-a-sample.wav": (wav(FMT, chunk(b"data", PCM[:-1])), 499),
    "no-samples.wav": (wav(FMT, chunk(b"data", b"")), "no samples"),
    "no-data.wav": (wav(FMT), "'data' chunk"),
    "no-format.wav": (wav(DATA), "broken wav"),
    "format-after.wav": (wav(DATA, FMT), "broken wav"),
    "short-format.wav": (wav(chunk(b"fmt ", header()[:10]), DATA), "'fmt ' chunk"),
    "long-format.wav": (wav(chunk(b"fmt ", header(), 2**31), DATA), "'fmt ' chunk"),
    "large-list.wav": (wav(FMT, chunk(b"LIST", bytes(8), 2**32 - 1), DATA), "'data' chunk"),
    "many-chunks.wav": (wav(FMT, *[chunk(b"junk", b"")] * 100_000, DATA), "broken wav"),
    "junk-before.wav": (wav(chunk(b"LIST", b"abc" + b"\0", 3), FMT, DATA), 500),
    "cut-in-riff.wav": (wav(FMT, DATA)[:6], "first bytes"),
    "cut-in-format.wav": (wav(FMT, DATA)[:30], "'data' chunk"),
    "cut-in-data-header.wav": (wav(FMT, DATA)[:41], "no samples"),
    "cut-in-data.wav": (wav(FMT, DATA)[:500], "cut short"),
    "cut-wavex.wav": (coded(tone(), "WAVEX")[:20000], "cut short"),
    "cut-rf64.wav": (coded(tone(), "RF64", "PCM_24")[:20000], "cut short"),
    "cut-behind-chunks.wav": (wav(*[chunk(b"junk", b"")] * 3000, FMT, DATA)[:-500], "broken wav"),
    # samples that are no sound
    "nan.wav": (floats(float("nan")), "NaN"),
    "infinite.wav": (floats(float("inf")), "infinite"),
    "minus-infinite.wav": (floats(float("-inf")), "infinite"),
    "1e300.wav": (floats(1e300, bits=64), "infinite"),
    "3e38.wav": (floats(3e38), "as large as"),
    "not-scaled.wav": (floats(32767.0), "as large as"),
    # FLAC
    "flac-cut-in-header.flac": (FLAC[:30], "broken flac"),
    "flac-cut.flac": (FLAC[: len(FLAC) // 2], "broken flac"),
    "flac-19-hours.flac": (flac_total(2**30), "18.6 hours"),
    "flac-1193-hours.flac": (flac_total(2**36 - 1), "longer than"),
    "flac-minutes.flac": (flac_total(600 * RATE), "broken flac"),
    "flac-no-length.flac": (flac_total(0), "how long"),
    "flac-0-hertz.flac": (patched(FLAC, 18, b"\0\0\x00"), "broken flac"),
    "flac-damaged.flac": (patched(FLAC, len(FLAC) // 2, bytes(40)), "broken flac"),
    "flac-large-block.flac": (patched(FLAC, 42, b"\x04\xff\xff\xff"), "broken flac"),
    "flac-behind-id3.flac": (ID3 + FLAC, RATE),
    # Ogg
    "ogg-cut-in-header.ogg": (OGG[:40], "cut short"),
    "ogg-cut.ogg": (OGG[: len(OGG) // 2], "cut short"),
    "ogg-cut-at-a-page.ogg": (b"".join(ogg_pages(OGG)[:-1]), "cut short"),
    "ogg-one-page.ogg": (ogg_pages(OGG)[0], "broken ogg"),
    "ogg-without-a-page.ogg": (b"".join(ogg_pages(OGG)[:2] + ogg_pages(OGG)[3:]), "missing"),
    "ogg-damaged.ogg": (patched(OGG, len(OGG) // 2, b"abcdef"), "checksum"),
    "ogg-chained.ogg": (OGG + OPUS, "several streams"),
    "opus-cut.opus": (OPUS[:-10], "cut short"),
    "opus-damaged.opus": (patched(OPUS, 300, b"abcdef"), "checksum"),
    "speex.ogg": (page(b"Speex   1.2" + bytes(69), b"\x50", 0, 0, 2, b"abcd"), "first bytes"),
    "theora.ogg": (page(b"\x80theora" + bytes(35), b"\x2a", 0, 0, 2, b"abcd"), "first bytes"),
    "vorbis-of-0-channels.ogg": (
        page(b"\1vorbis" + bytes(23), b"\x1e", 0, 0, 6, b"abcd"),
        "broken ogg",
    ),
    # MP3
    "mp3-cut.mp3": (MP3[: len(MP3) // 2], "broken mp3"),
    "mp3-cut-at-a-frame.mp3": (MP3[: len(MP3) // 2 // 144 * 144], "broken mp3"),
    "mp3-twice.mp3": (MP3 + MP3, "frames"),
    "mp3-damaged.mp3": (patched(MP3, len(MP3) // 2, bytes(300)), "broken mp3"),
    "mp3-one-frame.mp3": (MP3[: mp3_frame(MP3).length], "broken mp3"),  # type: ignore[union-attr]
    "mp3-behind-id3.mp3": (ID3 + MP3, RATE),
    "mp3-bare-behind-id3.mp3": (ID3 + BARE, 30 * 576 - 529),
    "mp3-bare-cut.mp3": (BARE[:-10], "cut short"),
    "mp3-bare-damaged.mp3": (patched(BARE, len(BARE) // 2, bytes(300)), "no frame"),
    "mp3-id3-of-256-MB.mp3": (b"ID3\4\0\0\x7f\x7f\x7f\x7f" + MP3, "first bytes"),
    "adpcm-behind-id3.mp3": (ID3 + coded(tone(), "WAV", "IMA_ADPCM"), "first bytes"),
    "mp3-silent-tail.mp3": (MP3 + bytes(500), RATE),
    # long ones
    "4-hours.wav": (long_wav(4), "longer than"),
    "4-hours.opus": (long_opus(4), "longer than"),
    "4-hours.mp3": (long_mp3(4), "longer than"),
    "1-hour.wav": (long_wav(1), 3600 * RATE),
}

# Reads each sound in turn, and tells what came of it, in what time and memory.
CHILD = """
import json, re, resource, sys, time
from regard.data.sound_files import read_sound
from regard.errors import UsageError
def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
for path in sys.stdin.read().splitlines():
    open("/proc/self/clear_refs", "w").write("5")  # forget the highest use of memory so far
    start = time.process_time()
    try:
        said = len(read_sound(path, 16000))
    except UsageError as refused:
        said = str(refused)
    print(json.dumps([path, said, time.process_time() - start, peak()]), flush=True)
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str | int, float, int]]:
    """Read all sounds in another process, and return what it says of each."""
    folder = tmp_path_factory.mktemp("sounds")
    for name, (content, _) in CASES.items():
        path = folder / name
        path.write_bytes(content) if isinstance(content, bytes) else content(path)
    paths = "\n".join(str(folder / name) for name in CASES)
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=paths, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and not done.stderr, done.stderr[-2000:]
    rows = map(json.loads, done.stdout.splitlines())
    return {Path(path).name: (said, seconds, peak) for path, said, seconds, peak in rows}


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_sound_is_refused_in_one_line_or_read_rightly(answers, name):
    said, seconds, peak = answers[name]
    expected = CASES[name][1]
    if isinstance(expected, str):
        assert isinstance(said, str) and expected in said and name in said
        assert "\n" not in said and len(said) < 400
    else:
        assert said == expected
    assert seconds < SECONDS and peak < BYTES, f"{seconds:.1f} s, {peak >> 20} MB"


def test_bytes_are_refused_as_files_are():
    for content, expected in CASES.values():
        if isinstance(content, bytes) and isinstance(expected, str):
            with pytest.raises(BrokenSound, match="^the sound: "):
                read_sound(content, RATE)


@pytest.mark.parametrize("kind", ["WAV", "FLAC", "OGG", "MP3"])
def test_flipped_bytes_never_do_worse_than_a_refusal(kind, capfd):
    rng = np.random.default_rng(1)
    data = {"WAV": wav(FMT, DATA), "FLAC": FLAC, "OGG": OGG, "MP3": MP3}[kind]
    for turn in range(150):
        damaged = bytearray(data)
        reach = 60 if turn % 2 else len(data)  # headers, or anything
        for at in rng.integers(0, reach, rng.integers(1, 5)):
            damaged[at] = rng.integers(256)
        try:
            samples = read_sound(bytes(damaged), RATE)
            assert np.isfinite(samples).all() and len(samples) <= 16 * len(tone())
        except BrokenSound:
            pass
    assert capfd.readouterr().err == ""


def test_a_path_that_is_no_file_is_refused(tmp_path):
    with pytest.raises(BrokenSound, match="is a folder"):
        read_sound(tmp_path, RATE)
    (tmp_path / "a.wav").write_bytes(wav(FMT, DATA))
    with pytest.raises(BrokenSound, match=r"b\.wav: no such file.*'a\.wav'"):
        read_sound(tmp_path / "b.wav", RATE)


# Manifests


@pytest.mark.parametrize(
    "name", ["../secret.wav", "/etc/passwd", "a/../../secret.wav", "../set-of-others/a.wav"]
)
@pytest.mark.parametrize("kind", ["tsv", "jsonl"])
def test_a_manifest_that_points_outside_its_folder_is_refused_by_name(tmp_path, name, kind):
    home = tmp_path / "set"
    home.mkdir()
    for path in (tmp_path / "secret.wav", home / "a.wav"):
        path.write_bytes(wav(FMT, DATA))
    rows = [("a.wav", "YES"), (name, "NO")]
    lines = {
        "tsv": [f"{path}\t{text}" for path, text in rows],
        "jsonl": [json.dumps({"audio": path, "text": text}) for path, text in rows],
    }
    (home / f"train.{kind}").write_text("\n".join(lines[kind]) + "\n")
    with pytest.raises(UsageError, match=r"train\.\w+:2: .*outside of") as refused:
        load_sounds(str(home), need=("train",))
    assert name in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a.wav\n", "which column is the text"),
        ("a.wav\tYES\nb.wav\n", "no column 2"),
        ("a.wav\tYES\n\tNO\n", "no path"),
        ("a.wav\tYES\na.wav\t \n", "text is empty"),
        ("a.wav\tYES\nmissing.wav\tNO\n", "no such file"),
        ("a.wav\tYES\na.wav\0\tNO\n", "NUL"),
        ("a.wav\tYES\n.\tNO\n", "is a folder"),
    ],
)
def test_a_broken_manifest_is_refused_with_its_line(tmp_path, text, said):
    (tmp_path / "a.wav").write_bytes(wav(FMT, DATA))
    (tmp_path / "train.tsv").write_text(text)
    with pytest.raises(UsageError, match=said):
        load_sounds(str(tmp_path), need=("train",))


def test_packed_sounds_are_looked_at_as_files_are(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    rows = [
        {"audio": {"bytes": wav(FMT, DATA), "path": "../../etc/a.wav"}, "text": "YES"},
        {"audio": {"bytes": CASES["nan.wav"][0], "path": None}, "text": "NO"},
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "train.parquet")
    with pytest.raises(BrokenSound, match=r"train\.parquet:2: NaN"):
        load_sounds(str(tmp_path), need=("train",))
    data = load_sounds(str(tmp_path), need=("train",), options=SoundOptions(broken="skip"))
    assert data.parts["train"].texts == ["YES"] and "broken" in data.notes[-1]
