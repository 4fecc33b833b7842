"""Weights of public checkpoints: one safetensors file or many, checked before any is read."""

import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from regard.errors import UsageError
from regard.files import read_json, refuse, replacing, system_error, write_json
from regard.models.folder import MOST_PARAMETERS

_MOST_HEADER = 32 * 2**20
_MOST_VALUES = 3_000_000  # in a header, which bounds what it takes in memory
MOST_SHARDS = 1000
_MOST_AXES = 8
_LONGEST_NAME = 250
_MOST_SHARD = 5 * 10**9  # bytes of a file that is written, as others do
WEIGHTS_NAME = "model.safetensors"
INDEX = "model.safetensors.index.json"
_PLAIN_NAME = re.compile(r"[\w-][\w.-]*\.safetensors")
_FLOATS = ("F64", "F32", "F16", "BF16")
# weights that are written in a way that can run code, or in that of another tool
BIN, BIN_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_OTHERS = {  # what other tools write -> their name, in the order in which it is looked for
    "*.onnx": "ONNX",
    "onnx/*.onnx": "ONNX",
    "dict.*.txt": "fairseq",
    "*shared_vocabulary.*": "CTranslate2",
    "source_vocabulary.*": "CTranslate2",
    "decoder.yml": "Marian",
    "*.npz": "Marian",
    "tf_model.h5": "TensorFlow",
    "saved_model.pb": "TensorFlow",
    "*.tflite": "TensorFlow Lite",
    "flax_model.msgpack": "Flax",
    "openvino_model.xml": "OpenVINO",
    "*.mlpackage": "Core ML",
    "*.pt": "PyTorch",
    "*.pth": "PyTorch",
    "*.ckpt": "PyTorch",
}
_READS = (
    "Regard reads its own folders, transformers' (config.json with safetensors) and, by import, "
    f"{BIN} and GGUF"
)


@dataclass(frozen=True)
class TensorEntry:
    """What a header says about one tensor."""

    path: Path
    kind: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Return how many numbers it holds."""
        return math.prod(self.shape)


class Weights(Mapping[str, Tensor]):
    """The tensors of a folder by name; each is read when it is asked for, as float32."""

    def __init__(self, entries: Mapping[str, TensorEntry]):
        self.entries = entries

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, of which none is read."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        if entry.kind not in _FLOATS:
            raise UsageError(
                f"{entry.path}: {name} is {entry.kind}; expected {', '.join(_FLOATS)}, "
                "so save the model without quantising it"
            )
        try:
            with safe_open(entry.path, framework="pt", device="cpu") as file:
                tensor = file.get_tensor(name).to(torch.float32)
        except OSError as error:
            raise refuse(error, entry.path) from error
        except (SafetensorError, ValueError) as error:
            raise damaged(entry.path, str(error)) from error
        if not torch.isfinite(tensor).all():
            raise UsageError(
                f"{entry.path}: {name} holds NaN or infinity; train or convert it again"
            )
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def damaged(path: Path, reason: str) -> UsageError:
    """Say that a file of weights is not as it was written."""
    reason = " ".join(reason.rpartition("header: ")[2].split())[:150]
    return UsageError(f"{path}: damaged or cut short ({reason}); copy it again")


def open_weights(folder: str | Path) -> Weights:
    """Find the weights in a folder and check every header, without reading any of them."""
    folder = Path(folder)
    if (folder / WEIGHTS_NAME).exists():
        entries = read_header(folder / WEIGHTS_NAME)
    elif (folder / INDEX).exists():
        entries = _read_index(folder)
    else:
        raise no_weights(folder)
    total = sum(entry.count for entry in entries.values())
    if total > MOST_PARAMETERS:
        raise UsageError(f"{folder}: {total:,} parameters; too many to be meant")
    _check_memory(folder, 4 * total)
    return Weights(entries)


def _check_memory(path: Path, needed: int) -> None:
    """Refuse weights that take more bytes than this machine has memory."""
    if not hasattr(os, "sysconf"):  # Windows
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise UsageError(
            f"{path}: its weights take {needed / 2**30:.1f} GB, "
            f"this machine has {memory / 2**30:.1f}; use a larger one or a smaller model"
        )


def import_first(path: Path) -> UsageError:
    """Say that weights have to be taken over before they are used."""
    kind = "a GGUF file" if path.suffix == ".gguf" else "no safetensors, but other weights"
    return UsageError(
        f"{path}: {kind}, which only import reads; run: regard import {path} out=FOLDER, and then "
        "use that"
    )


def no_weights(folder: Path) -> UsageError:
    """Say what there is in a folder without weights that are read, and what is read."""
    if folder.suffix == ".gguf" or any(folder.glob("*.gguf")):
        return import_first(folder)
    has_config = (folder / "config.json").exists()
    if has_config and any((folder / name).exists() for name in (BIN, BIN_INDEX)):
        return import_first(folder)
    found = ((path, tool) for name, tool in _OTHERS.items() for path in folder.glob(name))
    path, tool = next(found, (None, ""))
    if path is not None:
        shown = path.relative_to(folder)
        return UsageError(f"{folder}: found {shown}, a model of {tool}; {_READS}")
    if has_config:
        return UsageError(
            f"{folder}: no weights; expected {WEIGHTS_NAME} or {INDEX} with its files"
        )
    return UsageError(f"{folder}: no config.json, so there is no model; {_READS}")


def _read_index(folder: Path) -> dict[str, TensorEntry]:
    """Read the headers of the files that an index names."""
    path = folder / INDEX
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise UsageError(f"{path}: no weight_map; expected the file of every weight")
    files: dict[str, list[str]] = {}
    for name, file in names.items():
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file):
            raise UsageError(
                f"{path}: {name!r:.60} is in {file!r:.60}; "
                "expected the name of a .safetensors file in the same folder"
            )
        files.setdefault(file, []).append(name)
    if len(files) > MOST_SHARDS:
        raise UsageError(f"{path}: {len(files)} files; expected at most {MOST_SHARDS}")
    entries: dict[str, TensorEntry] = {}
    for file, listed in sorted(files.items()):
        if not (folder / file).exists():
            raise UsageError(f"{folder / file}: no such file, but {INDEX} names it; copy it too")
        header = read_header(folder / file)
        for name in listed:
            if name not in header:
                raise UsageError(f"{folder / file}: no {name!r:.60}, but {INDEX} says it is there")
        for name, entry in header.items():
            if name in entries:
                raise UsageError(f"{folder / file}: {name} is in {entries[name].path.name} too")
            entries[name] = entry
    return entries


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Read what a safetensors file says about itself, and refuse it if that cannot be."""
    try:
        if not path.is_file():  # a pipe or a device could be read forever
            raise UsageError(f"{path}: not a file; expected weights")
        _check_memory(path, path.stat().st_size // 2)  # of numbers of 8 bytes, half is taken
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > _MOST_HEADER:
                raise damaged(path, f"a header of {length:,} bytes, over {_MOST_HEADER >> 20} MB")
            data = file.read(length)
            if sum(data.count(mark) for mark in b",[{:") > _MOST_VALUES:
                raise damaged(path, f"a header of over {_MOST_VALUES:,} values")
        with safe_open(path, framework="pt") as file:  # which compares places, shapes and size
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            entries = {
                name: TensorEntry(path, str(part.get_dtype()), tuple(part.get_shape()))
                for name, part in slices.items()
            }
    except OSError as error:
        raise refuse(error, path) from error
    except (SafetensorError, ValueError) as error:
        raise damaged(path, str(error)) from error
    for name, entry in entries.items():
        if len(name) > _LONGEST_NAME or not name.isprintable():
            raise damaged(path, f"a tensor is named {name!r:.60}")
        if len(entry.shape) > _MOST_AXES:
            raise damaged(path, f"{name} has the shape {entry.shape!r:.60}")
    return entries


# ---- writing


def write_shards(
    folder: str | Path, tensors: Mapping[str, Tensor], max_shard: int = _MOST_SHARD
) -> list[str]:
    """Write weights as one file, or as several and an index when they are large."""
    folder = Path(folder)
    groups: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if groups[-1] and size + tensor.nbytes > max_shard:
            groups.append({})
            size = 0
        groups[-1][name] = tensor.detach().contiguous()
        size += tensor.nbytes
    count = len(groups)
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    names = names if count > 1 else [WEIGHTS_NAME]
    for name, group in zip(names, groups, strict=True):
        with replacing(folder / name) as temporary:
            try:
                save_file(group, temporary, {"format": "pt"})
            except SafetensorError as error:  # of the disk
                raise refuse(system_error(error), folder / name) from error
            temporary.chmod(0o644)  # the library closes it to others
    if count > 1:
        places = {key: name for name, group in zip(names, groups, strict=True) for key in group}
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_json(folder / INDEX, index)
    return names
