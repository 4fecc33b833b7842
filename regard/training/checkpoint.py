"""Checkpoints: written atomically, and verified by their hashes before they are loaded."""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import UsageError
from regard.files import refuse, sha256, sync_folder, system_error, write_atomically
from regard.training.distributed import ALONE, Group
from regard.training.sharding import like, local, span

_MANIFEST, _COUNTERS = "manifest.json", "counters.json"
_OFFSETS = "DCP_SHARDING_INFO"  # key of safetensors' metadata


def save_tensors(path: Path, tensors: dict[str, Tensor], about: dict[str, str] | None = None):
    """Write tensors to a file and make it durable."""
    try:
        own = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        save_file(own, path, metadata=about)
    except SafetensorError as error:
        raise system_error(error) from error
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def save_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, dict[str, Tensor]],
    counters: dict,
    firsts: Mapping[str, int] = MappingProxyType({}),
    by: Group = ALONE,
) -> None:
    """Write checkpoints/step-N: every group of tensors, the counters, and a manifest of hashes.

    Args:
        folder: of the checkpoints
        step: of the run
        tensors: what this process writes, by group and name
        counters: of the run
        firsts: first rows of those tensors of which it has a part
        by: all who write it; it is there when this function returns
    """
    path = folder / f"step-{step}"
    temporary = folder / f".step-{step}.{by.gather(os.getpid())[0]}.tmp"

    def together(act: Callable[[], Any]) -> list[Any]:
        """Let all do something, or all say why one of them cannot."""
        done, why, error = None, "", None
        try:
            done = act()
        except (OSError, UsageError) as failed:
            error = refuse(failed, path) if isinstance(failed, OSError) else failed
            why = f"{error} (rank {by.rank})" if by.rank else str(error)
        told = by.gather([done, why])
        if failed := [why for _, why in told if why]:
            shutil.rmtree(temporary, ignore_errors=True)
            raise UsageError(failed[0]) from error
        return [done for done, _ in told]

    def begin() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(".step-*.tmp"):
            shutil.rmtree(stale, ignore_errors=True)
        for group in [".", *tensors] if by.size > 1 else ["."]:
            (temporary / group).mkdir()

    def write() -> dict[str, str]:
        own = f"/{by.rank + 1:05}-of-{by.size:05}" if by.size > 1 else ""
        files = {f"{group}{own}.safetensors": tensors[group] for group in tensors}
        for name, some in files.items():
            save_tensors(temporary / name, some, _offsets(some, firsts) if own else None)
        return {name: sha256(temporary / name) for name in files}

    def end() -> None:
        write_atomically(temporary / _COUNTERS, json.dumps(counters, indent=1))
        hashes[_COUNTERS] = sha256(temporary / _COUNTERS)
        write_atomically(temporary / _MANIFEST, json.dumps(hashes, indent=1, sort_keys=True))
        if path.exists():
            shutil.rmtree(path)
        os.rename(temporary, path)
        sync_folder(folder)
        write_atomically(folder.parent / "last", path.name + "\n")

    main = by.rank == 0
    together(begin if main else lambda: None)
    hashes = {name: hash for some in together(write) for name, hash in some.items()}
    together(end if main else lambda: None)


def _offsets(tensors: Mapping[str, Tensor], firsts: Mapping[str, int]) -> dict[str, str]:
    """Where parts of tensors begin, as torch.distributed.checkpoint writes it into a file."""
    begins = {
        name: {"saved_offsets": [firsts.get(name, 0), *[0] * x.ndim][: x.ndim]}
        for name, x in tensors.items()
    }
    return {"format": "pt", "DCP_VERSION": "1.0", _OFFSETS: json.dumps(begins)}


class Stored(Mapping[str, Tensor]):
    """Tensors of a group in its files, of which nothing is read but what is asked for."""

    def __init__(self, files: Sequence[Path]):
        """Find the parts of each tensor."""
        self._parts: dict[str, list[tuple[int, Any]]] = {}
        for file in map(_open, files):
            begins = json.loads((file.metadata() or {}).get(_OFFSETS, "{}"))
            for name in file.keys():  # noqa: SIM118 # it is no mapping
                first, *_ = [*begins.get(name, {}).get("saved_offsets", ()), 0]
                self._parts.setdefault(name, []).append((first, file))

    def __iter__(self) -> Iterator[str]:
        """Names of the tensors."""
        return iter(self._parts)

    def __len__(self) -> int:
        """Number of tensors."""
        return len(self._parts)

    def __getitem__(self, name: str) -> Tensor:
        """A whole tensor."""
        return self.rows(name)

    def rows(self, name: str, first: int = 0, last: int = sys.maxsize) -> Tensor:
        """Rows of a tensor from one on and up to another."""
        found = []
        for begin, file in sorted(self._parts[name], key=itemgetter(0)):
            some = file.get_slice(name)
            if not some.get_shape():
                return file.get_tensor(name).clone()
            low, high = (min(max(n - begin, 0), some.get_shape()[0]) for n in (first, last))
            if low < high or not found:
                found.append(some[low:high])
        return torch.cat(found)

    def like(self, name: str, other: Tensor) -> Tensor:
        """The part of a tensor that this process has of another one of its shape."""
        if local(other) is other or not self._parts[name][0][1].get_slice(name).get_shape():
            return self[name]
        return self.rows(name, *span(other))


def _open(path: Path) -> Any:
    return safe_open(path, "pt")


def is_complete(path: Path, by: Group = ALONE) -> bool:
    """True if a checkpoint has every file of its manifest, with the right hash.

    Several processes read a share of the files each.
    """
    try:
        hashes = json.loads((path / _MANIFEST).read_text())
        files = (file.relative_to(path).as_posix() for file in path.rglob("*.safetensors"))
        own = [*hashes.items()][by.rank :: by.size]
        right = {_COUNTERS, *files} <= hashes.keys() and all(
            sha256(path / name) == hash for name, hash in own
        )
    except (OSError, ValueError, AttributeError):
        right = False
    return all(by.gather(right))


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Checkpoints of a run with their steps, newest first."""
    steps = [(int(p.name[5:]), p) for p in folder.glob("step-*") if p.name[5:].isdigit()]
    return sorted(steps, reverse=True)


def newest_complete(folder: Path, by: Group = ALONE) -> tuple[Path | None, list[Path]]:
    """Newest complete checkpoint, and the damaged ones that are newer."""
    damaged = []
    every = by.gather([[step, path.name] for step, path in checkpoints(folder)])
    newest = [max((step for step, _ in some), default=0) for some in every]
    for rank, step in enumerate(newest):
        if step != newest[0]:
            raise UsageError(
                f"{folder}: rank {rank} finds step {step:,} here, rank 0 step {newest[0]:,}; "
                "give an out= that all hosts share"
            )
    for _, name in every[0]:
        path = folder / name
        if is_complete(path, by):
            return path, damaged
        damaged.append(path)
    return None, damaged


def load_checkpoint(path: Path) -> tuple[dict[str, Stored], dict]:
    """Open every group of tensors of a checkpoint, and read its counters."""
    files: dict[str, list[Path]] = {}
    for file in sorted(path.rglob("*.safetensors")):
        own = file.relative_to(path)
        files.setdefault(own.parts[0].removesuffix(own.suffix), []).append(file)
    groups = {name: Stored(some) for name, some in files.items()}
    return groups, json.loads((path / _COUNTERS).read_text())


def prune(folder: Path, keep: set[str]) -> None:
    """Delete all checkpoints but those of these names."""
    for _, path in checkpoints(folder):
        if path.name not in keep:
            shutil.rmtree(path, ignore_errors=True)


def optimiser_tensors(optimiser: torch.optim.Optimizer, names: list[str]) -> dict[str, Tensor]:
    """State of an optimiser as named tensors."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    return {
        f"{name}:{key}": torch.as_tensor(value)
        for name, parameter in zip(names, parameters, strict=True)
        for key, value in optimiser.state[parameter].items()
        if value is not None
    }


def restore_optimiser(optimiser: torch.optim.Optimizer, names: list[str], stored: Stored) -> None:
    """Load the state of an optimiser from named tensors."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    named = dict(zip(names, parameters, strict=True))
    for name in stored:
        owner, _, key = name.rpartition(":")
        if (p := named.get(owner)) is not None:
            optimiser.state[p][key] = like(stored.like(name, p).to(p.device), p)


def optimiser_names(optimiser: torch.optim.Optimizer, named: Mapping[str, Tensor]) -> list[str]:
    """Names of the optimiser's parameters, in its order."""
    by_id = {id(parameter): name for name, parameter in named.items()}
    return [by_id[id(p)] for group in optimiser.param_groups for p in group["params"]]
