"""Which kind of sound a file is by its first bytes; Ogg and MP3 walked from end to end.

Their decoders pass over what they cannot read: a sound would be shorter than its transcript, and
nobody would know.
"""

import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import NamedTuple

_MP3_BITS = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_MP3_LOW_BITS = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


class Damage(Exception):
    """What is wrong with a stream."""


SOUND_SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3"}
SIGNATURE_BYTES = 4096  # bytes that tell


def kind_of_sound(head: bytes) -> str | None:
    """wav, flac, ogg or mp3 by the first bytes of a file behind its ID3 tag, or None."""
    return next((kind for kind, fits in _KINDS.items() if fits(head)), None)


def after_id3(head: bytes) -> int:
    """Start of a file behind the ID3v2 tag that MP3 and some FLAC have, if any."""
    if len(head) < 10 or head[:3] != b"ID3" or max(head[6:10]) > 127:
        return 0
    length = sum(byte << 7 * (3 - i) for i, byte in enumerate(head[6:10]))
    return 10 + length + 10 * bool(head[5] & 0x10)  # a footer repeats the header


def begins_as_sound(content: bytes) -> bool:
    """True if the bytes of a file are those of a sound."""
    start = after_id3(content)
    return kind_of_sound(content[start : start + SIGNATURE_BYTES]) is not None


def _is_ogg(head: bytes) -> bool:
    """True if the first packet of an Ogg stream is that of a decoder we use."""
    if head[:5] != b"OggS\0" or len(head) < 28 or not head[5] & 2:
        return False
    packet = head[27 + head[26] :]
    return packet.startswith((b"\x01vorbis", b"OpusHead"))


def _is_mp3(head: bytes) -> bool:
    """True if bytes begin with a frame of MPEG layer III, and another follows."""
    frame = mp3_frame(head)
    if frame is None:
        return False
    return len(head) < frame.length + 4 or mp3_frame(head[frame.length :]) is not None


# kind -> whether the first bytes of a file are of it
_KINDS: dict[str, Callable[[bytes], bool]] = {
    "wav": lambda head: head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE",
    "flac": lambda head: head[:5] in (b"fLaC\0", b"fLaC\x80"),  # its STREAMINFO is first
    "ogg": _is_ogg,
    "mp3": _is_mp3,
}


# Ogg (RFC 3533)


def check_ogg(content: bytes) -> bytes:
    """Refuse an Ogg that is not one stream of whole pages up to the last, else return it."""
    place, number, last = 0, 0, 0
    while content[place : place + 4] == b"OggS":
        head = content[place : place + 27].ljust(27, b"\0")
        end = place + 27 + head[26] + sum(content[place + 27 : place + 27 + head[26]])
        page = content[place:end]
        if end > len(content):
            raise Damage("cut short in a page")
        if last or head[14:18] != content[14:18]:
            raise Damage("several streams in it, expected one")
        if ogg_checksum(page[:22] + bytes(4) + page[26:]) != int.from_bytes(head[22:26], "little"):
            raise Damage(f"page {number:,} is not as its checksum says")
        if int.from_bytes(head[18:22], "little") != number:
            raise Damage(f"page {number:,} is missing")
        place, number, last = end, number + 1, head[5] & 4
    if not last:
        raise Damage(f"cut short, no page at byte {place:,}")
    return content


def ogg_checksum(data: bytes) -> int:
    """CRC-32 of Ogg: that of zlib with all bits in the other order, from 0."""
    crc = zlib.crc32(data.translate(_REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(crc.to_bytes(4, "little").translate(_REVERSED), "big")


# MPEG layer III


class MP3Frame(NamedTuple):
    """What the header of a frame says."""

    length: int  # bytes
    rate: int
    samples: int
    channels: int


def mp3_frame(head: bytes) -> MP3Frame | None:
    """Read the header of a frame of MPEG layer III."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    bits, hertz = head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or layer != 1 or bits in (0, 15) or hertz == 3:
        return None
    first = version == 3  # MPEG 1; else 2 or 2.5
    kilobits = (_MP3_BITS if first else _MP3_LOW_BITS)[bits - 1]
    rate = (44100, 48000, 32000)[hertz] >> {3: 0, 2: 1, 0: 2}[version]
    samples = 1152 if first else 576
    length = samples // 8 * 1000 * kilobits // rate + (head[2] >> 1 & 1)
    return MP3Frame(length, rate, samples, 1 if head[3] >> 6 == 3 else 2)


# samples and channels of a frame -> bytes of side information before its sound
_SIDE = {(1152, 2): 32, (1152, 1): 17, (576, 2): 17, (576, 1): 9}


def check_mp3(content: bytes, most_seconds: float) -> bytes:
    """Refuse an MP3 that is not whole frames of one kind, as many as its first one may say.

    Return it with a frame that says it, if the first does not: else libsndfile estimates the length
    by the first frames, and reads no further. Of more than `most_seconds`, the rest is not checked.
    """
    start = place = after_id3(content)
    head, frames = content[start : start + 4], 0
    first = mp3_frame(head)
    assert first is not None
    while (frame := mp3_frame(content[place : place + 4])) and (
        frames * first.samples <= most_seconds * first.rate
    ):
        if frame[1:] != first[1:]:
            raise Damage(f"another rate or number of channels at byte {place:,}")
        place, frames = place + frame.length, frames + 1
    side = bytes(_SIDE[first.samples, first.channels])
    if frame is None:
        tag, rest = content[start + 4 + len(side) : start + 16 + len(side)], content[place:]
        if place > len(content):
            raise Damage("cut short in a frame")
        if not rest.startswith((b"TAG", b"APET")) and rest.strip(b"\0"):  # behind the sound
            raise Damage(f"no frame at byte {place:,}")
        if tag[:4] in (b"Xing", b"Info") and tag[7] & 1:
            if (said := int.from_bytes(tag[8:], "big")) != frames - 1:
                raise Damage(f"its header says {said:,} frames, there are {frames - 1:,}")
            return content[start:]
    head = bytes([head[0], head[1] | 1, 0xE0 | head[2] & 0x0C, head[3]])  # of most bits
    said = head + side + b"Xing" + struct.pack(">II", 1, frames)
    return said.ljust(mp3_frame(head).length, b"\0") + content[start:]  # type: ignore[union-attr]


_STDERR = 2
_HEARING = RLock()  # there is one stderr


@contextmanager
def hear_errors() -> Iterator[None]:
    """Raise what mpg123 says is wrong with a stream, which it only writes to stderr.

    What others write there meanwhile is passed on.
    """
    with _HEARING, tempfile.TemporaryFile() as heard:
        try:
            usual = os.dup(_STDERR)
        except OSError:  # there is none
            yield
            return
        os.dup2(heard.fileno(), _STDERR)
        try:
            yield
        finally:
            os.dup2(usual, _STDERR)
            os.close(usual)
            heard.seek(0)
            lines = heard.read(2**16).decode("utf-8", "replace").splitlines(keepends=True)
            errors = [line for line in lines if "libmpg123" in line and "error:" in line]
            others = [line for line in lines if not _MPG123.match(line)]
            if others:
                os.write(_STDERR, "".join(others).encode())
    if errors:
        raise Damage(errors[0].partition("error:")[2].strip())


_MPG123 = re.compile(r"\[src/libmpg123|Note: |Warning: ")
