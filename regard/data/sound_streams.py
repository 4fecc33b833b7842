"""Ogg and MP3 walked from end to end, so that damaged files are refused and not read in part.

Their decoders pass over what they cannot read: a sound would be shorter than its transcript, and
nobody would know.
"""

import os
import re
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock
from typing import BinaryIO, NamedTuple

MP3_BITS = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
MP3_LOW_BITS = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
REVERSED = bytes(int(f"{byte:08b}"[::-1], 2) for byte in range(256))


class Damage(Exception):
    """What is wrong with a stream."""


# Ogg (RFC 3533)


def check_ogg(file: BinaryIO, size: int) -> None:
    """Refuse an Ogg file that is not one stream of whole pages, each as its checksum says."""
    place, serial, number, ended = 0, b"", 0, False
    while place < size:
        file.seek(place)
        head = file.read(27)
        if head[:4] != b"OggS":
            if ended:
                return  # what follows the end is of no concern
            raise Damage(f"no page at byte {place:,}")
        table = file.read(head[26]) if len(head) == 27 else b""
        body = file.read(sum(table))
        if len(head) < 27 or len(table) < head[26] or len(body) < sum(table):
            raise Damage("cut short in a page")
        if ended or (number and head[14:18] != serial):
            raise Damage("several streams in it, expected one")
        sums = head[:22] + bytes(4) + head[26:] + table + body
        if ogg_checksum(sums) != int.from_bytes(head[22:26], "little"):
            raise Damage(f"page {number:,} is not as its checksum says")
        if int.from_bytes(head[18:22], "little") != number:
            raise Damage(f"page {number:,} is missing")
        serial, ended = head[14:18], bool(head[5] & 4)
        number += 1
        place += len(head) + len(table) + len(body)


def ogg_checksum(data: bytes) -> int:
    """Return the CRC-32 of Ogg: that of zlib with all bits in the other order, from 0."""
    crc = zlib.crc32(data.translate(REVERSED), 0xFFFFFFFF) ^ 0xFFFFFFFF
    return int.from_bytes(crc.to_bytes(4, "little").translate(REVERSED), "big")


# MPEG layer III


class Frame(NamedTuple):
    """What the header of a frame says."""

    length: int  # bytes
    rate: int
    samples: int
    channels: int


def mp3_frame(head: bytes) -> Frame | None:
    """Read the header of a frame of MPEG layer III."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return None
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    bits, hertz = head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or layer != 1 or bits in (0, 15) or hertz == 3:
        return None
    first = version == 3  # MPEG 1; else 2 or 2.5
    kilobits = (MP3_BITS if first else MP3_LOW_BITS)[bits - 1]
    rate = (44100, 48000, 32000)[hertz] >> {3: 0, 2: 1, 0: 2}[version]
    samples = 1152 if first else 576
    length = samples // 8 * 1000 * kilobits // rate + (head[2] >> 1 & 1)
    return Frame(length, rate, samples, 1 if head[3] >> 6 == 3 else 2)


def check_mp3(file: BinaryIO, start: int, size: int, most_seconds: float) -> bytes:
    """Refuse an MP3 that is not whole frames of one kind, as many as its first one may say.

    Return a frame that says it, if the first does not: else libsndfile estimates the length by the
    first frames, and reads no further. Of more than `most_seconds`, the rest is not looked at.
    """
    frames, samples = 0, 0
    for frames, frame in enumerate(_mp3_frames(file, start, size), 1):  # noqa: B007
        samples += frame.samples
        if samples > most_seconds * frame.rate:
            break
    else:
        if frames < 2:
            raise Damage("a single frame, expected several")
        said = _xing_frames(file, start)
        if said is not None and said != frames - 1:
            raise Damage(f"its header says {said:,} frames, there are {frames - 1:,}")
        if said is not None:
            return b""
    file.seek(start)
    return _xing_frame(file.read(4), frames)


def _mp3_frames(file: BinaryIO, place: int, size: int) -> Iterator[Frame]:
    kind = None
    while place < size:
        file.seek(place)
        frame = mp3_frame(head := file.read(4))
        if frame is None:
            if head.startswith((b"TAG", b"APET")) or _only_zeros(file, place):
                return  # what some programs put behind the sound
            raise Damage(f"no frame at byte {place:,}")
        if kind not in (None, frame[1:]):
            raise Damage(f"another rate or number of channels at byte {place:,}")
        kind = frame[1:]
        place += frame.length
        if place > size:
            raise Damage("cut short in a frame")
        yield frame


def _only_zeros(file: BinaryIO, place: int) -> bool:
    file.seek(place)
    return not any(any(block) for block in iter(lambda: file.read(2**16), b""))


# samples and channels of a frame -> bytes of side information before its sound
SIDE = {(1152, 2): 32, (1152, 1): 17, (576, 2): 17, (576, 1): 9}


def _xing_frames(file: BinaryIO, start: int) -> int | None:
    """Return how many frames follow the first one, if that is the header of Xing and LAME."""
    file.seek(start)
    head = file.read(64)
    frame = mp3_frame(head)
    assert frame is not None
    tag = head[4 + SIDE[frame.samples, frame.channels] :]
    if tag[:4] not in (b"Xing", b"Info") or not tag[7] & 1:
        return None
    return int.from_bytes(tag[8:12], "big")


def _xing_frame(head: bytes, frames: int) -> bytes:
    """Make a frame without sound that says how many follow."""
    for bits in range(1, 15):  # the smallest that it fits in
        head = bytes([head[0], head[1] | 1, bits << 4 | head[2] & 0x0C, head[3]])
        frame = mp3_frame(head)
        assert frame is not None
        body = bytes(SIDE[frame.samples, frame.channels]) + b"Xing" + struct.pack(">II", 1, frames)
        if len(head + body) <= frame.length:
            return (head + body).ljust(frame.length, b"\0")
    raise Damage("frames too small")


STDERR = 2
HEARING = RLock()  # there is one stderr


@contextmanager
def hear_errors() -> Iterator[None]:
    """Raise what mpg123 says is wrong with a stream, which it only writes to stderr.

    What others write there meanwhile is passed on.
    """
    with HEARING, tempfile.TemporaryFile() as heard:
        try:
            usual = os.dup(STDERR)
        except OSError:  # there is none
            yield
            return
        os.dup2(heard.fileno(), STDERR)
        try:
            yield
        finally:
            os.dup2(usual, STDERR)
            os.close(usual)
            heard.seek(0)
            lines = heard.read(2**16).decode("utf-8", "replace").splitlines(keepends=True)
            errors = [line for line in lines if "libmpg123" in line and "error:" in line]
            others = [line for line in lines if not MPG123.match(line)]
            if others:
                os.write(STDERR, "".join(others).encode())
    if errors:
        raise Damage(errors[0].partition("error:")[2].strip())


MPG123 = re.compile(r"\[src/libmpg123|Note: |Warning: ")
