"""Models in the local cache of the Hugging Face hub, which is read and never filled."""

import os
import re
from pathlib import Path

from regard.errors import UsageError

# organisation and name as the hub allows them, so that nothing else becomes part of a path
_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_REVISION = re.compile(r"[\w.-]{1,200}")


def is_hub_name(name: str) -> bool:
    """True if a name could be that of a model on the hub: org/name."""
    return _NAME.fullmatch(name) is not None and ".." not in name


def hub_cache() -> Path:
    """The cache's folder, by HF_HUB_CACHE, HF_HOME or XDG_CACHE_HOME as the hub's own tools say."""
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"


def find_cached(name: str) -> Path | None:
    """Folder of the newest cached revision of org/name; None: nothing of it is cached.

    That is the one that refs/main names or, if it names none that is there, the last written.
    """
    if not is_hub_name(name):
        return None
    home = hub_cache() / f"models--{name.replace('/', '--')}"
    main, snapshots = home / "refs" / "main", home / "snapshots"
    if main.is_file():
        with open(main, errors="replace") as file:
            revision = file.read(201).strip()
        if _REVISION.fullmatch(revision) and (snapshots / revision).is_dir():
            return _complete(snapshots / revision, name)
    found = [path for path in snapshots.iterdir() if path.is_dir()] if snapshots.is_dir() else []
    return _complete(max(found, key=lambda p: p.stat().st_mtime), name) if found else None


def _complete(folder: Path, name: str) -> Path:
    """Refuse a revision of which only some files were fetched."""
    if not (folder / "config.json").exists():
        raise UsageError(
            f"{name}: its copy in {folder} has no config.json; fetch all of it, with: "
            f"hf download {name}"
        )
    return folder
