"""Which kind of sound a file is, by its first bytes, before any decoder sees it."""

from collections.abc import Callable

SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3"}
HEAD = 4096  # bytes that tell
MP3_BITS = (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
MP3_LOW_BITS = (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)


def kind_of_sound(head: bytes) -> str | None:
    """Return wav, flac, ogg or mp3 by the first bytes of a file behind its ID3 tag, or None."""
    return next((kind for kind, fits in KINDS.items() if fits(head)), None)


def after_id3(head: bytes) -> int:
    """Return where a file begins behind the ID3v2 tag that MP3 and some FLAC have, if any."""
    if len(head) < 10 or head[:3] != b"ID3" or max(head[6:10]) > 127:
        return 0
    length = sum(byte << 7 * (3 - i) for i, byte in enumerate(head[6:10]))
    return 10 + length + 10 * bool(head[5] & 0x10)  # a footer repeats the header


def begins_as_sound(content: bytes) -> bool:
    """Tell whether the bytes of a file are those of a sound."""
    start = after_id3(content)
    return kind_of_sound(content[start : start + HEAD]) is not None


def _is_ogg(head: bytes) -> bool:
    """Tell whether the first packet of an Ogg stream is that of a decoder we use."""
    if head[:5] != b"OggS\0" or len(head) < 28 or not head[5] & 2:
        return False
    packet = head[27 + head[26] :]
    return packet.startswith((b"\x01vorbis", b"OpusHead", b"\x7fFLAC"))


def _is_mp3(head: bytes) -> bool:
    """Tell whether bytes begin with a frame of MPEG layer III, and another follows."""
    length = _mp3_frame(head)
    return bool(length) and (len(head) < length + 4 or bool(_mp3_frame(head[length:])))


def _mp3_frame(head: bytes) -> int:
    """Return the length of the frame of MPEG layer III that bytes begin with, or nothing."""
    if len(head) < 4 or head[0] != 0xFF or head[1] & 0xE0 != 0xE0:
        return 0
    version, layer = head[1] >> 3 & 3, head[1] >> 1 & 3
    bits, rate = head[2] >> 4, head[2] >> 2 & 3
    if version == 1 or layer != 1 or bits in (0, 15) or rate == 3:
        return 0
    first = version == 3  # MPEG 1; else 2 or 2.5
    kilobits = (MP3_BITS if first else MP3_LOW_BITS)[bits - 1]
    hertz = (44100, 48000, 32000)[rate] >> {3: 0, 2: 1, 0: 2}[version]
    return (144 if first else 72) * 1000 * kilobits // hertz + (head[2] >> 1 & 1)


# kind -> whether the first bytes of a file are of it
KINDS: dict[str, Callable[[bytes], bool]] = {
    "wav": lambda head: head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE",
    "flac": lambda head: head[:5] in (b"fLaC\0", b"fLaC\x80"),  # its STREAMINFO is first
    "ogg": _is_ogg,
    "mp3": _is_mp3,
}
