"""SHA256SUMS: the hash of each file that a model is loaded from, as `sha256sum -c` reads it."""

import os
import re
import stat
from contextlib import suppress
from pathlib import Path

from regard.errors import UsageError
from regard.files import refuse, sha256, write_atomically

SUMS = "SHA256SUMS"
_HASHED_SUFFIXES = (".json", ".safetensors", ".jinja", ".spm")
_EXCLUDED = ("recipe.json", "report.json")  # how it was trained and judged; nothing reads them
_WEIGHTS_SUFFIX = ".safetensors"
LINE = re.compile(r"([0-9a-f]{64}) [ *]([^/\0]{1,255})")
_MOST_LINES = 1000
_MOST_HASHED_BYTES = 2**30  # of all files that are not weights


def seal(folder: Path) -> None:
    """Write SHA256SUMS of a folder that is complete."""
    parts = [
        p for p in folder.iterdir() if p.suffix in _HASHED_SUFFIXES and p.name not in _EXCLUDED
    ]
    names = sorted(p.name for p in parts if p.is_file() and not p.name.startswith("."))
    write_atomically(folder / SUMS, "".join(f"{sha256(folder / n)}  {n}\n" for n in names))


def unseal(folder: Path) -> None:
    """Remove SHA256SUMS, before files that it lists are changed."""
    try:
        (folder / SUMS).unlink(missing_ok=True)
    except OSError as error:
        raise refuse(error, folder / SUMS) from error


def listed(folder: Path) -> dict[str, str]:
    """Return the hash of each file that SHA256SUMS lists; empty if there is none."""
    path = folder / SUMS
    try:
        if not path.is_file():
            return {}
        with open(path, "rb") as file:
            data = file.read(_MOST_LINES * 400)
    except OSError as error:
        raise refuse(error, path) from error
    hashes: dict[str, str] = {}
    for number, line in enumerate(data.decode(errors="replace").removesuffix("\n").split("\n"), 1):
        if not (match := LINE.fullmatch(line)) or number > _MOST_LINES:
            raise UsageError(
                f"{path}:{number}: {line[:40]!r} is not a SHA-256 hash and a name; {remedy(folder)}"
            )
        hashes[match[2]] = match[1]
    return hashes


def damaged(folder: Path, hashes: dict[str, str]) -> list[str]:
    """Return the names of files that have another hash, or are missing."""
    return [name for name, hash in hashes.items() if _hash(folder / name) != hash]


def verify(folder: Path, name: str | None = None) -> None:
    """Refuse a file whose hash differs from SHA256SUMS; without a name, any but the weights."""
    while hashes := listed(folder):
        small = {n: h for n, h in hashes.items() if not n.endswith(_WEIGHTS_SUFFIX)}
        if name is None and sum(map(_size, map(folder.joinpath, small))) > _MOST_HASHED_BYTES:
            raise UsageError(f"{folder / SUMS}: names files of over {_MOST_HASHED_BYTES >> 20} MB")
        asked = small if name is None else {n: h for n, h in hashes.items() if n == name}
        wrong = damaged(folder, asked)
        if not wrong:
            return
        if listed(folder) == hashes:  # else it was rewritten meanwhile
            raise UsageError(
                f"{folder / wrong[0]}: damaged, or not as it was published (see {SUMS}); "
                f"{remedy(folder)}. If it was changed on purpose, delete its line in {SUMS}"
            )


def remedy(folder: Path) -> str:
    """Remedy for a damaged folder."""
    if (folder / "dictionary.safetensors").exists():
        return "delete the folder and give its regard dictionary command again"
    if (folder / "checkpoints").is_dir():
        return "give its regard train command again to publish it again from its checkpoint"
    if Path(__file__).parents[1] / "starters" in folder.resolve().parents:
        return "install Regard again"
    return "copy it again from where it came"


def _size(path: Path) -> int:
    with suppress(OSError):
        return os.stat(path).st_size
    return 0


def _hash(path: Path) -> str | None:
    with suppress(OSError):
        if stat.S_ISREG(os.stat(path).st_mode):  # a pipe could be read forever
            return sha256(path)
    return None
