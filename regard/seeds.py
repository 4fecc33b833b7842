"""Random seeds: one for everything that is drawn, made of what it depends on."""

import hashlib


def mix(*parts: int | str) -> int:
    """Make one seed from several numbers."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
