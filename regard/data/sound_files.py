"""Sound files to samples: looked at by their first bytes, decoded in blocks, mixed and resampled.

The decoders of libsndfile have had faults that a file can use, and opening already parses; so WAV
is read here, and libsndfile is only given what begins as FLAC, Ogg (Vorbis, Opus) or MP3.
"""

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import soundfile
import soxr

from regard.data.lines import missing
from regard.data.sound_kinds import HEAD, SUFFIXES, after_id3, kind_of_sound
from regard.data.sound_streams import Damage, check_mp3, check_ogg, hear_errors
from regard.errors import UsageError
from regard.files import refuse

__all__ = ["SUFFIXES", "BrokenSound", "SoundInfo", "open_sound", "read_sound", "sound_info"]

EXPECTED = "expected WAV (PCM or float), FLAC, Ogg (Vorbis or Opus) or MP3"
MOST_SECONDS = 3600.0  # of one sound: at 16 kHz, 230 MB
MOST_BYTES = 2**32  # of one file, of which only a block is in memory
MOST_CODED = 2**29  # of an Ogg or MP3, which is walked from end to end
NOT_SAID = 2**63 - 1  # frames, as libsndfile says that a header does not tell
MOST_CHANNELS = 32
RATES = (1000, 384_000)  # samples a second, least and most
MOST_LEVEL = 100.0  # of a float sample, where full scale is 1
MOST_CHUNKS = 1000  # of a WAV
BLOCK = 2**18  # samples of all channels that are decoded at once
NO_LENGTH = 0x7FFF0000  # bytes from which on a WAV's size says that its writer did not know it


class Samples(NamedTuple):
    """Samples (n,) or (n, channels), and how many there are of them a second."""

    array: np.ndarray
    rate: int


class BrokenSound(UsageError):
    """A sound that cannot be read; a set may be told to leave it out."""


@dataclass(frozen=True)
class SoundInfo:
    """What the header of a sound says."""

    rate: int  # samples a second
    channels: int
    seconds: float
    kind: str  # wav, flac, ogg or mp3


class Sound(NamedTuple):
    """An open sound: its header, and what yields its samples (n, channels) from -1 to 1."""

    info: SoundInfo
    blocks: Callable[[], Iterator[np.ndarray]]


def sound_info(source: Path | str | bytes, name: str = "") -> SoundInfo:
    """Return rate, channels, length and kind of a sound, by its header alone."""
    with open_sound(source, name) as sound:
        return sound.info


def read_sound(
    source: Path | str | bytes | np.ndarray | Samples,
    rate: int,
    name: str = "",
    most_seconds: float = MOST_SECONDS,
) -> np.ndarray:
    """Return the samples (n,) of a sound as float32, mixed to mono and resampled.

    It is a path, the bytes of a file, samples with their rate, or an array of samples (n,) or
    (n, channels) of the rate that is asked for.
    """
    if not isinstance(source, str | os.PathLike | bytes):
        array, own = source if isinstance(source, Samples) else (np.asarray(source), rate)
        if not RATES[0] <= own <= RATES[1]:
            raise UsageError(
                f"rate={own:g}; expected {RATES[0]:,} to {RATES[1]:,} samples a second"
            )
        samples = _from_array(np.asarray(array), name or "the array", own, most_seconds)
        return np.concatenate(list(_resampled(iter([samples]), own, rate)))
    name = name or _name(source)
    with open_sound(source, name) as sound:
        if sound.info.seconds > most_seconds:
            raise _too_long(name, sound.info.seconds, most_seconds)
        samples = bytearray()  # grows in place, without a second copy at the end
        for block in _resampled(_mono(sound, name, most_seconds), sound.info.rate, rate):
            samples += block.astype(np.float32, copy=False).tobytes()
    if not samples:
        raise BrokenSound(f"{name}: no samples in it; expected some sound")
    return np.frombuffer(samples, np.float32)


def _mono(sound: Sound, name: str, most_seconds: float) -> Iterator[np.ndarray]:
    """Yield blocks of the mean of all channels; what is no number, or too long, is refused."""
    most, total = most_seconds * sound.info.rate, 0
    for block in sound.blocks():
        total += len(block)
        if total > most:
            raise _too_long(name, total / sound.info.rate, most_seconds)
        yield _checked(block, name).mean(1, dtype=np.float32)


def _resampled(blocks: Iterator[np.ndarray], rate: int, to: int) -> Iterator[np.ndarray]:
    if rate == to:
        yield from blocks
        return
    stream = soxr.ResampleStream(rate, to, 1, dtype="float32")
    for block in blocks:
        yield stream.resample_chunk(block)
    yield stream.resample_chunk(np.zeros(0, np.float32), last=True)


def _checked(samples: np.ndarray, name: str) -> np.ndarray:
    least, most = (float(f(samples)) if samples.size else 0.0 for f in (np.min, np.max))
    if not (np.isfinite(least) and np.isfinite(most)):
        raise BrokenSound(f"{name}: NaN or infinite samples; expected numbers from -1 to 1")
    if max(-least, most) > MOST_LEVEL:
        raise BrokenSound(
            f"{name}: samples as large as {max(-least, most):.3g}; expected -1 to 1, so divide them"
        )
    return samples


def _from_array(array: np.ndarray, name: str, rate: int, most_seconds: float) -> np.ndarray:
    if array.ndim not in (1, 2) or not array.size or array.dtype.kind not in "fi":
        raise UsageError(
            f"{name}: {array.dtype} {array.shape}; expected samples (n,) or (n, channels), floats "
            "from -1 to 1 or signed integers"
        )
    if array.ndim == 2 and array.shape[1] > MOST_CHANNELS:
        raise UsageError(f"{name}: {array.shape[1]} channels; expected (n, channels), at most 32")
    if len(array) > most_seconds * rate:
        raise _too_long(name, len(array) / rate, most_seconds)
    full = -float(np.iinfo(array.dtype).min) if array.dtype.kind == "i" else 1.0
    with np.errstate(over="ignore"):  # told below
        samples = (array / full if full > 1 else array).astype(np.float32)
    samples = _checked(samples, name)
    return samples.mean(1, dtype=np.float32) if samples.ndim == 2 else samples


def _name(source: Any) -> str:
    return str(source) if isinstance(source, str | os.PathLike) else "the sound"


def _too_long(name: str, seconds: float, most: float) -> BrokenSound:
    exactly = f" ({_duration(seconds)})" if seconds > 1.1 * most else ""
    return BrokenSound(f"{name}: longer than {_duration(most)}{exactly}; cut it into shorter ones")


def _duration(seconds: float) -> str:
    if seconds >= 7200:
        return f"{seconds / 3600:,.1f} hours"
    return f"{seconds / 60:,.0f} minutes" if seconds >= 120 else f"{seconds:.2f} seconds"


# Which kind of file it is


@contextmanager
def open_sound(source: Path | str | bytes, name: str = "") -> Iterator[Sound]:
    """Open a sound by its header; what is none, or out of bounds, is refused."""
    name = name or _name(source)
    try:
        with _opened(source, name) as file:
            size = file.seek(0, os.SEEK_END)
            if not 0 < size <= MOST_BYTES:
                raise BrokenSound(f"{name}: {'over 4 GB' if size else 'empty'}; {EXPECTED}")
            start = after_id3(_at(file, 0, 10))
            kind = kind_of_sound(_at(file, start, HEAD))
            if kind is None or (start and kind not in ("mp3", "flac")):
                raise BrokenSound(f"{name}: no sound that is known by its first bytes; {EXPECTED}")
            if kind == "wav":
                opened = nullcontext(_open_wav(file, size, name))
            else:
                opened = _open_coded(file, start, size, kind, name)
            with opened as sound:
                yield _bounded(sound, name)
    except OSError as error:
        raise BrokenSound(str(refuse(error, name))) from None


@contextmanager
def _opened(source: Path | str | bytes, name: str) -> Iterator[BinaryIO]:
    if isinstance(source, bytes):
        yield BytesIO(source)
        return
    path = Path(source)
    if not path.is_file():
        if path.is_dir():
            raise BrokenSound(f"{name}: is a folder; expected a sound")
        raise BrokenSound(f"{name}: not a file" if path.exists() else missing(path))
    with open(path, "rb") as file:
        yield file


def _at(file: BinaryIO, place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)


def _bounded(sound: Sound, name: str) -> Sound:
    """Refuse a sound whose header has numbers that mean nothing."""
    rate, channels = sound.info.rate, sound.info.channels
    if not RATES[0] <= rate <= RATES[1]:
        raise BrokenSound(f"{name}: {rate} Hz; expected {RATES[0]} to {RATES[1]}")
    if not 1 <= channels <= MOST_CHANNELS:
        raise BrokenSound(f"{name}: {channels} channels; expected 1 to {MOST_CHANNELS}")
    return sound


# WAV

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
# what follows the tag in the subformat of an extensible one
SUBFORMAT = bytes.fromhex("0000 0000 1000 8000 00aa 0038 9b71")
TAGS = {2: "ADPCM", 6: "A-law", 7: "mu-law", 0x11: "IMA ADPCM", 0x31: "GSM 6.10", 0x55: "MP3"}


def _open_wav(file: BinaryIO, size: int, name: str) -> Sound:
    """Walk over the chunks of a WAV to its format and its data."""
    place, header, wide = 12, b"", 0
    for _ in range(MOST_CHUNKS):
        head = _at(file, place, 8)
        if len(head) < 8:
            what = "no data chunk" if header else "no fmt chunk"
            raise BrokenSound(f"{name}: a WAV with {what}, or cut short; copy it again")
        (length,) = struct.unpack("<I", head[4:])
        place += 8
        if head[:4] == b"data":
            break
        if head[:4] == b"ds64":  # of RF64, whose data may be over 4 GB
            wide = int.from_bytes(_at(file, place + 8, 8), "little")
        if head[:4] == b"fmt ":
            header = _at(file, place, min(length, 40))
        place += length + length % 2
    else:
        raise BrokenSound(f"{name}: a WAV of over {MOST_CHUNKS} chunks without data; copy it again")
    channels, rate, width, kind = _wav_format(header, name)
    if length == 2**32 - 1 and wide:
        length = wide
    there = size - place
    if there < length < NO_LENGTH:
        raise BrokenSound(
            f"{name}: cut short: its header says {length:,} bytes of samples, there are {there:,}; "
            "copy it again"
        )
    frames = min(length, there) // (width * channels)
    info = SoundInfo(rate, channels, frames / max(1, rate), "wav")
    return Sound(info, partial(_wav_blocks, file, place, frames, channels, width, kind))


def _wav_format(header: bytes, name: str) -> tuple[int, int, int, str]:
    """Return channels, rate, bytes a sample and the kind of number, or refuse what is not PCM."""
    if len(header) < 16:
        raise BrokenSound(f"{name}: a WAV without a whole fmt chunk before its data; copy it again")
    tag, channels, rate, _, align, bits = struct.unpack("<HHIIHH", header[:16])
    if tag == EXTENSIBLE and header[26:] == SUBFORMAT:
        (tag,) = struct.unpack("<H", header[24:26])
    if tag not in (PCM, FLOAT):
        what = TAGS.get(tag, f"format {tag:#06x}")
        raise BrokenSound(f"{name}: a WAV of {what}; expected PCM or float, so convert it")
    width = align // max(1, channels)
    kind = "f" if tag == FLOAT else "i"
    known = width in ((4, 8) if tag == FLOAT else (1, 2, 3, 4))
    if not known or width * channels != align or not 8 * width - 8 < bits <= 8 * width:
        raise BrokenSound(
            f"{name}: a WAV of {bits} bits in {align} bytes for {channels} channels; expected "
            "8, 16, 24 or 32 bits of PCM, or 32 or 64 of float"
        )
    return channels, rate, width, kind


def _wav_blocks(
    file: BinaryIO, place: int, frames: int, channels: int, width: int, kind: str
) -> Iterator[np.ndarray]:
    step = max(1, BLOCK // channels)
    file.seek(place)
    for start in range(0, frames, step):
        raw = file.read(min(step, frames - start) * channels * width)
        raw = raw[: len(raw) - len(raw) % (channels * width)]  # should it have shrunk meanwhile
        yield _numbers(raw, width, kind).reshape(-1, channels)


def _numbers(raw: bytes, width: int, kind: str) -> np.ndarray:
    """Return samples as float32, where full scale is 1."""
    if kind == "f":
        with np.errstate(over="ignore"):  # what is too large is refused as infinite
            return np.frombuffer(raw, f"<f{width}").astype(np.float32)
    if width == 1:
        return (np.frombuffer(raw, np.uint8).astype(np.float32) - 128) / 128
    if width == 3:  # as the upper three bytes of four
        four = np.zeros((len(raw) // 3, 4), np.uint8)
        four[:, 1:] = np.frombuffer(raw, np.uint8).reshape(-1, 3)
        return four.view("<i4")[:, 0].astype(np.float32) / 2**31
    return np.frombuffer(raw, f"<i{width}").astype(np.float32) / 2 ** (8 * width - 1)


# What libsndfile decodes


class _Tail:
    """A file from a place on, perhaps behind some bytes; libsndfile sees no tag before it."""

    def __init__(self, file: BinaryIO, start: int, size: int, before: bytes = b""):
        self.file, self.start, self.before = file, start, before
        self.place, self.size = 0, len(before) + size - start

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place from the start, from here or from the end."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: self.size}
        self.place = max(0, base[whence] + offset)
        return self.place

    def tell(self) -> int:
        """Return the place."""
        return self.place

    def read(self, size: int) -> bytes:
        """Return at most so many bytes more."""
        data = self.before[self.place : self.place + size]
        place = self.place + len(data) - len(self.before)
        data += _at(self.file, self.start + place, size - len(data)) if len(data) < size else b""
        self.place += len(data)
        return data

    def write(self, data: bytes) -> int:
        """Refuse: nothing is written to what is read."""
        raise OSError("read only")


@contextmanager
def _open_coded(file: BinaryIO, start: int, size: int, kind: str, name: str) -> Iterator[Sound]:
    """Open a FLAC, Ogg or MP3 whose first bytes were looked at."""
    if kind != "flac" and size > MOST_CODED:
        raise BrokenSound(f"{name}: over {MOST_CODED >> 20} MB of {kind}; cut it")
    before = b""
    try:
        if kind == "ogg":
            check_ogg(file, size)
        if kind == "mp3":
            before = check_mp3(file, start, size, MOST_SECONDS)
        tail: Any = _Tail(file, start, size, before)
        with hear_errors() if kind == "mp3" else nullcontext(), soundfile.SoundFile(tail) as coded:
            if coded.frames == NOT_SAID:
                raise Damage("it does not say how long it is")
            seconds = coded.frames / coded.samplerate
            info = SoundInfo(coded.samplerate, coded.channels, seconds, kind)
            yield Sound(info, partial(_coded_blocks, coded, name))
    except (soundfile.SoundFileError, Damage) as error:
        reason = " ".join(str(error).split(": ", 1)[-1].split()).rstrip(".")[:80]
        raise BrokenSound(
            f"{name}: a broken {kind} file ({reason}); copy or convert it again"
        ) from None


def _coded_blocks(coded: soundfile.SoundFile, name: str) -> Iterator[np.ndarray]:
    """Yield what is decoded, and refuse if it is less than the header says."""
    block, total = np.empty((max(1, BLOCK // coded.channels), coded.channels), np.float32), 0
    while frames := coded.buffer_read_into(block, "float32"):
        total += frames
        yield block[:frames]
    if total < coded.frames:
        raise BrokenSound(
            f"{name}: cut short: its header says {coded.frames:,} samples, there are {total:,}; "
            "copy it again"
        )
