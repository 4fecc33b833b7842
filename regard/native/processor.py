"""Which data types the CPU can compute in, tried in a child process, which may crash."""

import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch

from regard.errors import UsageError, lookup
from regard.files import cache_folder, write_atomically

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
QUANTISED = {"none": torch.float32, "int8": torch.int8}  # of products in writing
TRIAL_SECONDS = 120  # seconds for the child process
# settings of oneDNN that leave out what a CPU announces and the system forbids
_REMEDIES = {"ONEDNN_MAX_CPU_ISA": ("AVX512_CORE_BF16", "AVX512_CORE", "AVX2")}

# Operations that training needs, at small and large shapes, compared with float32.
TRIAL = """
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except ImportError:  # Windows
    pass
import torch
from torch.nn.functional import conv2d, linear, scaled_dot_product_attention
torch.manual_seed(0)
kind = getattr(torch, sys.argv[1])
def close(half, full):
    if not torch.allclose(half.float(), full.float(), rtol=0.1, atol=0.1 * float(full.abs().max())):
        raise RuntimeError("its products are wrong")
for rows, read, written in ((1, 23, 97), (24, 23, 97), (7, 64, 256), (256, 512, 512)):
    x, w, b = (torch.randn(s, requires_grad=True) for s in ((rows, read), (written, read), written))
    full = linear(x, w, b)
    wanted = torch.autograd.grad(full.square().mean(), (x, w))
    with torch.autocast("cpu", kind):
        half = linear(x, w, b)
    close(half, full)
    for one, other in zip(torch.autograd.grad(half.square().mean(), (x, w)), wanted):
        close(one, other)
    close(x.to(kind) @ w.to(kind).T, x @ w.T)
q, k, v = (torch.randn(2, 4, 64, 32, requires_grad=True) for _ in range(3))
close(scaled_dot_product_attention(*(t.to(kind) for t in (q, k, v))),
      scaled_dot_product_attention(q, k, v))
close(q.to(kind) @ k.to(kind).mT, q @ k.mT)
x, w = torch.randn(2, 3, 32, 32), torch.randn(64, 3, 4, 4)
close(conv2d(x.to(kind), w.to(kind), stride=4), conv2d(x, w, stride=4))
"""
CHILD = [sys.executable, "-c", TRIAL]


def cpu_description() -> list[str]:
    """Return the model and the feature flags of the CPU."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:  # no Linux
        return [platform.machine(), platform.processor()]
    return [line for line in first.splitlines() if line.startswith(("model", "flags"))]


def failure(dtype: str, **env: str) -> str | None:
    """Compute in a data type in a child process; return what goes wrong, or None."""
    done = subprocess.run(
        [*CHILD, dtype],
        env={**os.environ, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=TRIAL_SECONDS,
    )
    if done.returncode == 0:
        return None
    if done.returncode < 0:
        with suppress(ValueError):
            return f"it ends the process by {signal.Signals(-done.returncode).name}"
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else f"its process ended with code {done.returncode}"


def check_device(name: str) -> str:
    """Type of a device, or a refusal of one that cannot be used."""
    try:
        return torch.empty(1, device=name).device.type
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0][:100]
        raise UsageError(f"device='{name}' cannot be used ({reason}); try cpu") from None


def check_dtype(dtype: str, device: str = "cpu") -> None:
    """Refuse a data type that is unknown, or that this CPU cannot compute in."""
    lookup("dtype", dtype, DTYPES)
    if dtype != "float32" and device == "cpu" and (why := unsupported_reason(dtype)):
        raise UsageError(
            f"dtype={dtype}: this processor cannot compute in it ({why}); use dtype=float32"
        )


@cache
def unsupported_reason(dtype: str) -> str | None:
    """Reason why this CPU cannot compute in a data type, and the remedy; None if it can.

    The answer is cached for this machine and version of PyTorch, unless there was none.
    """
    set_by_user = {name: os.environ.get(name) for name in _REMEDIES}
    inputs = [
        CHILD,
        dtype,
        cpu_description(),
        platform.uname(),
        version("torch"),
        _REMEDIES,
        set_by_user,
    ]
    key = hashlib.blake2b(repr(inputs).encode(), digest_size=12).hexdigest()
    cached = cache_folder() / f"{dtype}-{key}.json"
    with suppress(OSError, ValueError, KeyError, TypeError):
        reason = json.loads(cached.read_bytes())["failure"]
        if reason is None or isinstance(reason, str):
            return reason
    try:
        reason = failure(dtype)
        if reason is not None:
            for name, values in _REMEDIES.items():
                for value in values:
                    if failure(dtype, **{name: value}) is None:
                        reason += f"; with {name}={value} in the environment it can"
                        break
    except subprocess.TimeoutExpired:  # it may be the machine that is busy
        return f"no answer in {TRIAL_SECONDS} seconds"
    except OSError as error:
        return f"no process to try it in: {error.strerror}"
    with suppress(UsageError):
        write_atomically(cached, json.dumps({"failure": reason}) + "\n")
    return reason
