"""Pickled weights and GGUF files, which are converted to safetensors once, on import.

They are read by a process of its own with little memory and time (`convert_sandbox.py`).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.errors import UsageError
from regard.files import errors_in, read_json, write_json
from regard.pretrained.folder import read_huggingface_config
from regard.pretrained.gguf import as_folder
from regard.pretrained.shards import (
    BIN,
    BIN_INDEX,
    INDEX,
    MOST_SHARDS,
    WEIGHTS_NAME,
    no_weights,
    read_header,
)

_PLAIN_BIN = re.compile(r"[\w-][\w.-]*\.bin")
_PROGRAM = Path(__file__).with_name("convert_sandbox.py")
_SLOWEST = 10 * 2**20  # bytes a second
_SPARE = 2**29  # bytes of memory
_TIMES = {"bin": 12, "gguf": 32}  # the size of a file that its reader may take, quantised or not
_SECONDS = 120


@contextmanager
def readable(path: str | Path) -> Iterator[Path]:
    """Give a folder with config.json and safetensors for what a user wants to import."""
    path = Path(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UsageError(
                f"{path}: not a folder; expected one with config.json, or a .gguf file"
            )
        convert, files = _convert_gguf, [path]
    elif any((path / name).exists() for name in (WEIGHTS_NAME, INDEX)) or not path.is_dir():
        yield path
        return
    elif any((path / name).exists() for name in (BIN, BIN_INDEX)):
        read_huggingface_config(path)  # before anything takes long
        convert, files = _convert_pickles, _pickle_files(path)
    elif ggufs := sorted(path.glob("*.gguf"))[:2]:
        if len(ggufs) > 1:
            raise UsageError(f"{path}: {ggufs[0].name} and {ggufs[1].name}; import one of them")
        convert, files = _convert_gguf, ggufs
    else:
        raise no_weights(path)
    with tempfile.TemporaryDirectory(prefix="regard-import-") as home:
        made = Path(home) / "folder"
        made.mkdir()
        try:
            for file in path.iterdir() if path.is_dir() else ():
                if file not in files and file.name != BIN_INDEX:
                    _link(made / file.name, file)
            convert(files, made)
            yield made
        except UsageError as error:
            raise UsageError(str(error).replace(str(made), str(path))) from None


def _link(made: Path, file: Path) -> None:
    """Let a file or folder be found in another place, by a copy where there are no links."""
    try:
        made.symlink_to(file.resolve())
    except OSError:
        shutil.copytree(file, made) if file.is_dir() else shutil.copy(file, made)


def _pickle_files(folder: Path) -> list[Path]:
    """Return the files of pickled weights."""
    if (folder / BIN).exists():
        return [folder / BIN]
    names = read_json(folder / BIN_INDEX).get("weight_map")
    files = sorted(set(map(str, names.values()))) if isinstance(names, dict) else []
    if not 0 < len(files) <= MOST_SHARDS or not all(map(_PLAIN_BIN.fullmatch, files)):
        raise UsageError(f"{folder / BIN_INDEX}: no weight_map with .bin files in the same folder")
    return [folder / file for file in files]


def _convert_pickles(files: list[Path], made: Path) -> None:
    """Write pickled weights as safetensors with an index."""
    count = len(files)
    targets = [made / f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    _run_sandbox("bin", files, targets)
    places: dict[str, str] = {}
    for file, target in zip(files, targets, strict=True):
        for key in read_header(target):
            if key in places:
                raise UsageError(f"{file}: {key} is in another file too")
            places[key] = target.name
    write_json(made / INDEX, {"metadata": {}, "weight_map": places})


def _convert_gguf(files: list[Path], made: Path) -> None:
    """Write a GGUF file's weights, config and, unless there is one, tokenizer as a folder."""
    raw = made.with_name("raw")
    raw.mkdir()
    _run_sandbox("gguf", files, [raw / "raw.safetensors"])
    with errors_in(files[0]):
        as_folder(raw, made)
    shutil.rmtree(raw)


def _run_sandbox(kind: str, sources: list[Path], targets: list[Path]) -> None:
    """Let a process of its own read files, or say why it could not."""
    for source in sources:
        if not source.is_file():  # a pipe or a device could be read forever
            raise UsageError(f"{source}: no such file, or none that could be read")
    sizes = [source.stat().st_size for source in sources]
    most, seconds = _TIMES[kind] * max(sizes) + _SPARE, _SECONDS + sum(sizes) // _SLOWEST
    words = [sys.executable, "-I", str(_PROGRAM), kind, str(most), str(seconds), str(most)]
    for source, target in zip(sources, targets, strict=True):
        words += [str(source.resolve()), str(target)]
    shown = sources[0] if len(sources) == 1 else sources[0].parent
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=5 * seconds,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise UsageError(f"{shown}: not read within {5 * seconds} s; it may be damaged") from None
    lines = done.stdout.decode(errors="replace").splitlines() or [""]
    try:
        report = json.loads(lines[-1])
        wrong, shown = report["wrong"], sources[report["file"]]
    except (ValueError, KeyError, TypeError, IndexError):
        wrong = f"its reader ended with {done.returncode}, by too much memory or time or by damage"
    if wrong == "missing gguf":
        raise UsageError(f"{shown}: needs the package gguf; install it by pip install regard[gguf]")
    if wrong is not None:
        wrong = "".join(c if c.isprintable() else "?" for c in str(wrong))[:300]
        raise UsageError(f"{shown}: {wrong}")
