"""A program of its own that converts weights which may be hostile, with little memory and time.

It imports nothing of Regard's and is started by `convert.py`; what it writes is checked there as
any other file of weights. Its last line says what went wrong, if anything did.
"""

import json
import re
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

# of the tensors of a GGUF file
_KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
_KINDS += ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
_MOST_VALUES = 3_000_000  # of its metadata
_MOST_BYTES = 2**29  # of what is written at once


class Refused(Exception):
    """What is wrong with a file, in one line."""


def bound(memory: int, seconds: int, bytes_written: int) -> None:
    """Allow so much more memory than is taken now, so much time, and files of a size."""
    try:
        import resource
    except ImportError:  # not on this system
        return
    now = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc").is_dir() else 2**21
    limits = {
        resource.RLIMIT_AS: now * resource.getpagesize() + memory,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_FSIZE: bytes_written,
        resource.RLIMIT_CORE: 0,
    }
    for which, most in limits.items():
        hard = resource.getrlimit(which)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        with suppress(ValueError, OSError):  # of which this system has no such limit
            resource.setrlimit(which, (most, most))


def unpickle(source: Path, target: Path) -> None:
    """Write the tensors of a file of torch.save as safetensors."""
    import torch
    from safetensors.torch import save_file

    take_limits()
    try:
        loaded = torch.load(source, map_location="cpu", weights_only=True)
    except Exception as error:
        named = re.search(r"GLOBAL ([\w.]{1,80})", str(error))
        if named is not None:
            raise Refused(f"it names {named[1]}, which is not part of a state dict") from None
        raise
    if not isinstance(loaded, dict):
        raise Refused(f"it holds a {type(loaded).__name__}; expected tensors by name")
    tensors = {}
    for name, x in loaded.items():
        if not isinstance(name, str) or not isinstance(x, torch.Tensor):
            raise Refused(f"{name!r:.60} is a {type(x).__name__}; expected a tensor")
        if x.layout is not torch.strided or x.is_quantized or x.device.type != "cpu":
            raise Refused(f"{name!r:.60} is sparse, quantised or empty; expected numbers")
        tensors[name] = x.detach().clone(memory_format=torch.contiguous_format)
    save_file(tensors, target)


def ungguf(source: Path, target: Path) -> None:
    """Write the tensors of a GGUF file as safetensors, some in each, and its metadata as JSON."""
    import numpy
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from safetensors.numpy import save_file

    take_limits()
    reader = GGUFReader(source)
    for tensor in reader.tensors:
        if tensor.tensor_type.name not in _KINDS:
            raise Refused(
                f"{tensor.name!r:.60} is {tensor.tensor_type.name}; only {', '.join(_KINDS)} are "
                "read, so take such a file of the same model"
            )
    metadata: dict[str, Any] = {}
    values = 0
    for name, field in reader.fields.items():
        values += len(field.data)
        if values > _MOST_VALUES:
            raise Refused(f"over {_MOST_VALUES:,} values of metadata")
        metadata[name] = field.contents()
    if len({tensor.name for tensor in reader.tensors}) != len(reader.tensors):
        raise Refused("a tensor is there twice")
    target.with_suffix(".json").write_text(json.dumps(metadata))
    tensors: dict[str, Any] = {}
    number = 0
    for tensor in reader.tensors:
        x = dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32, order="C")
        if tensors and x.nbytes + sum(one.nbytes for one in tensors.values()) > _MOST_BYTES:
            save_file(tensors, target.with_name(f"{number:05}-{target.name}"))
            tensors, number = {}, number + 1
        tensors[tensor.name] = x
    save_file(tensors, target.with_name(f"{number:05}-{target.name}"))


@cache
def take_limits() -> None:
    """Take the limits of the command line, once what is needed is imported."""
    bound(*map(int, sys.argv[2:5]))


_READERS = {"bin": unpickle, "gguf": ungguf}


def main() -> None:
    """Read files: KIND MEMORY SECONDS BYTES, and SOURCE and TARGET for each."""
    wrong, number = None, 0
    files = sys.argv[5:]
    try:
        for number in range(0, len(files), 2):
            _READERS[sys.argv[1]](*map(Path, files[number : number + 2]))
    except Refused as refused:
        wrong = str(refused)
    except MemoryError:
        wrong = "it takes far more memory than its size tells"
    except ImportError as error:
        wrong = f"missing {error.name}"
    except BaseException as error:
        text = " ".join(str(error).split())
        wrong = f"{type(error).__name__}: {text}"[:150]
        if "allocate memory" in text:
            wrong = "it takes far more memory than its size tells"
    print("\n" + json.dumps({"wrong": wrong, "file": number // 2}))


if __name__ == "__main__":
    main()
