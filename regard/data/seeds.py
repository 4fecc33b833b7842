"""Random seeds: one for everything that is drawn, made of what it depends on."""

import hashlib


def mix(*parts: int | str) -> int:
    """Hash several numbers or names into one seed."""
    digest = hashlib.sha256(repr(parts).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
