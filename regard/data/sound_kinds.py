"""Which kind of sound a file is, by its first bytes, before any decoder sees it."""

from collections.abc import Callable

from regard.data.sound_streams import mp3_frame

SUFFIXES = {".wav", ".flac", ".ogg", ".opus", ".mp3"}
HEAD = 4096  # bytes that tell


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
    return packet.startswith((b"\x01vorbis", b"OpusHead"))


def _is_mp3(head: bytes) -> bool:
    """Tell whether bytes begin with a frame of MPEG layer III, and another follows."""
    frame = mp3_frame(head)
    if frame is None:
        return False
    return len(head) < frame.length + 4 or mp3_frame(head[frame.length :]) is not None


# kind -> whether the first bytes of a file are of it
KINDS: dict[str, Callable[[bytes], bool]] = {
    "wav": lambda head: head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE",
    "flac": lambda head: head[:5] in (b"fLaC\0", b"fLaC\x80"),  # its STREAMINFO is first
    "ogg": _is_ogg,
    "mp3": _is_mp3,
}
