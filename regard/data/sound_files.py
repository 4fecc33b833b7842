"""Sound files to samples: known by their first bytes, decoded by libsndfile, mixed and resampled.

libsndfile passes over what is damaged or missing, and a sound would be shorter than its transcript
without a word; so what it does not tell is looked for here.
"""

import os
import re
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
from regard.data.sound_streams import (
    SIGNATURE_BYTES,
    SOUND_SUFFIXES,
    Damage,
    after_id3,
    check_mp3,
    check_ogg,
    hear_errors,
    kind_of_sound,
)
from regard.errors import BrokenInput, UsageError
from regard.files import refuse

__all__ = ["SOUND_SUFFIXES", "BrokenSound", "SoundInfo", "open_sound", "read_sound", "sound_info"]

_EXPECTED = "expected WAV (PCM or float), FLAC, Ogg (Vorbis or Opus) or MP3"
_MOST_SECONDS = 3600.0  # of one sound: at 16 kHz, 230 MB
_MOST_BYTES = 2**32  # of one file, of which only a block is in memory
_MOST_CODED = 2**28  # of an Ogg or MP3, of which an hour has 230 MB at the most
_NOT_SAID = 2**63 - 1  # frames, as libsndfile says that a header does not tell
_MOST_CHANNELS = 32
_RATES = (1000, 384_000)  # samples a second, least and most
_MOST_LEVEL = 100.0  # of a float sample, where full scale is 1
BLOCK_SAMPLES = 2**18  # samples of all channels that are decoded at once
_NO_LENGTH = 0x7FFF0000  # bytes from which on a WAV's size says that its writer did not know it
_WIDTHS = {"PCM_U8": 1, "PCM_16": 2, "PCM_24": 3, "PCM_32": 4, "FLOAT": 4, "DOUBLE": 8}  # of a WAV
# what libsndfile logs of a WAV: bytes of a frame, and of all samples
_LOGGED = [
    re.compile(rf"^ *{key} *: (\d+)\b", re.MULTILINE)
    for key in ("Block Align", "(?:data|Data size)")
]


class Samples(NamedTuple):
    """Samples (n,) or (n, channels), and how many there are of them a second."""

    array: np.ndarray
    rate: int


class BrokenSound(BrokenInput):
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
    """Rate, channels, length and kind of a sound, by its header alone."""
    with open_sound(source, name) as sound:
        return sound.info


def read_sound(
    source: Path | str | bytes | np.ndarray | Samples,
    rate: int,
    name: str = "",
    most_seconds: float = _MOST_SECONDS,
) -> np.ndarray:
    """Samples (n,) of a sound as float32, mixed to mono and resampled.

    It is a path, the bytes of a file, samples with their rate, or an array of samples (n,) or
    (n, channels) of the rate that is asked for.
    """
    if not isinstance(source, str | os.PathLike | bytes):
        array, own = source if isinstance(source, Samples) else (np.asarray(source), rate)
        if not _RATES[0] <= own <= _RATES[1]:
            raise UsageError(
                f"rate={own:g}; expected {_RATES[0]:,} to {_RATES[1]:,} sampling rate in Hz"
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
    if max(-least, most) > _MOST_LEVEL:
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
    if array.ndim == 2 and array.shape[1] > _MOST_CHANNELS:
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


# Files


@contextmanager
def open_sound(source: Path | str | bytes, name: str = "") -> Iterator[Sound]:
    """Open a sound by its header; what is none, or out of bounds, is refused."""
    name, kind = name or _name(source), "sound"
    try:
        with _opened(source, name) as file:
            kind = _kind(file, name)
            if kind in _CHECKS:  # in memory, since it is looked at from end to end
                content = file.read(_MOST_CODED + 1)
                if len(content) > _MOST_CODED:
                    raise BrokenSound(f"{name}: over {_MOST_CODED >> 20} MB of {kind}; cut it")
                file = _Stream(_CHECKS[kind](content))
            stream: Any = file if isinstance(file, BytesIO) else file.fileno()
            hearing = hear_errors() if kind == "mp3" else nullcontext()
            with hearing, soundfile.SoundFile(stream, closefd=False) as coded:
                yield Sound(_header(coded, kind, name), partial(_blocks, coded))
    except OSError as error:
        raise BrokenSound(str(refuse(error, name))) from None
    except (soundfile.SoundFileError, Damage) as error:
        reason = " ".join(str(error).split(": ", 1)[-1].split()).rstrip(".")[:80]
        raise BrokenSound(
            f"{name}: a broken {kind} file ({reason}); copy or convert it again"
        ) from None


_CHECKS = {"ogg": check_ogg, "mp3": partial(check_mp3, most_seconds=_MOST_SECONDS)}


class _Stream(BytesIO):
    """Bytes in which a place before the first is the first: libsndfile follows lying headers."""

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        """Go to a place from the start, from here or from the end."""
        return super().seek(offset if whence else max(0, offset), whence)


@contextmanager
def _opened(source: Path | str | bytes, name: str) -> Iterator[BinaryIO]:
    if isinstance(source, bytes):
        yield _Stream(source)
        return
    path = Path(source)
    if not path.is_file():
        if path.is_dir():
            raise BrokenSound(f"{name}: is a folder; expected a sound")
        raise BrokenSound(f"{name}: not a file" if path.exists() else missing(path))
    with open(path, "rb") as file:
        yield file


def _kind(file: BinaryIO, name: str) -> str:
    """Kind of a sound by its first bytes, or a refusal."""
    size = file.seek(0, os.SEEK_END)
    if not 0 < size <= _MOST_BYTES:
        raise BrokenSound(f"{name}: {'over 4 GB' if size else 'empty'}; {_EXPECTED}")
    file.seek(0)
    file.seek(start := after_id3(file.read(10)))
    kind = kind_of_sound(file.read(SIGNATURE_BYTES))
    if kind is None or (start and kind not in ("mp3", "flac")):
        raise BrokenSound(f"{name}: no sound that is known by its first bytes; {_EXPECTED}")
    file.seek(0)
    return kind


def _header(coded: soundfile.SoundFile, kind: str, name: str) -> SoundInfo:
    """Header of an open sound, unless its numbers mean nothing."""
    rate, channels = coded.samplerate, coded.channels
    if not _RATES[0] <= rate <= _RATES[1]:
        raise BrokenSound(f"{name}: {rate} Hz; expected {_RATES[0]} to {_RATES[1]}")
    if not 1 <= channels <= _MOST_CHANNELS:
        raise BrokenSound(f"{name}: {channels} channels; expected 1 to {_MOST_CHANNELS}")
    if coded.frames == _NOT_SAID:
        raise Damage("it does not say how long it is")
    if kind == "wav":
        _check_wav(coded, name)
    return SoundInfo(rate, channels, coded.frames / rate, kind)


def _check_wav(coded: soundfile.SoundFile, name: str) -> None:
    """Refuse a WAV that libsndfile would misread or cut without a word, by what it logs."""
    if coded.subtype not in _WIDTHS:
        raise BrokenSound(f"{name}: a WAV of {coded.subtype}; expected PCM or float, so convert it")
    frame = coded.channels * _WIDTHS[coded.subtype]
    aligns, lengths = ([int(n) for n in found.findall(coded.extra_info)] for found in _LOGGED)
    if not lengths:
        raise Damage("too many chunks before its samples")
    if set(aligns) != {frame}:
        raise Damage(f"{coded.subtype} in {max(aligns, default=0)} bytes, expected {frame}")
    if coded.frames * frame + frame <= max(lengths) < _NO_LENGTH:
        raise Damage(f"cut short, it says {max(lengths):,} bytes of samples")


def _blocks(coded: soundfile.SoundFile) -> Iterator[np.ndarray]:
    """Yield what is decoded, and refuse if it is less than the header says."""
    rows = max(1, BLOCK_SAMPLES // coded.channels)
    block, total = np.empty((rows, coded.channels), np.float32), 0
    while frames := coded.buffer_read_into(block, "float32"):
        total += frames
        yield block[:frames]
    if total < coded.frames:
        raise Damage(f"cut short, {total:,} of {coded.frames:,} samples")
