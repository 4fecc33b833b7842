"""What attention costs: regard's attend against PyTorch's kernel called directly, time and memory.

    python bench/attend.py [--quick]

Time: at least 20 calls each, taken in turn, no gradient, 2 threads. A ratio is the median of time
over time of two neighbours, so 1.00 means that attend costs nothing beyond the kernel and 1.05 that
it costs 5% more.
Memory: each figure is the peak of a process of its own, above what it held before the call. Its
exponent is the slope of log(memory) over log(length): 1 is linear, 2 quadratic.
"""

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path

LENGTHS = [1024, 2048, 4096, 8192]
HEADS, HEAD_WIDTH = 8, 64  # those of the base Transformer
THREADS = 2


def inputs(length: int, heads: int = HEADS):
    """Return random queries, keys and values, (1, heads, length, width)."""
    import torch

    torch.manual_seed(0)
    return [torch.randn(1, heads, length, HEAD_WIDTH) for _ in range(3)]


def mask_of(case: str, length: int):
    """Return the mask of a case in Regard's words."""
    import torch

    from regard.attention.masks import Causal, Padding

    lengths = torch.tensor([length - length // 8])
    return {
        "plain": None,
        "causal": Causal(),
        "padded": Padding.of(lengths, length),
        "both": Causal() & Padding.of(lengths, length),
    }[case]


def kernel_settings(case: str, length: int) -> dict:
    """Return the same mask as PyTorch's kernel takes it."""
    import torch

    if case == "padded":
        keep = torch.arange(length) < length - length // 8
        return {"attn_mask": torch.where(keep, 0.0, -math.inf).expand(1, 1, length, length)}
    return {"is_causal": case == "causal"}


def timed(call) -> float:
    """Return how many seconds a call takes."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def compare_times(repeats: int) -> None:
    """Print the time of attend over the time of the kernel at each length."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from regard.attention.attend import attend
    from regard.native.allocator import reuse_memory

    torch.set_num_threads(THREADS)
    reuse_memory()  # else both wait for fresh pages, now one more, now the other
    worst = 0.0
    for case in ("plain", "causal", "padded"):
        ratios = []
        for length in LENGTHS:
            q, k, v = inputs(length)
            settings, mask = kernel_settings(case, length), mask_of(case, length)

            def theirs(q=q, k=k, v=v, settings=settings):
                return scaled_dot_product_attention(q, k, v, **settings)

            def ours(q=q, k=k, v=v, mask=mask):
                return attend(q, k, v, mask=mask)

            with torch.no_grad():
                gap = (ours() - theirs()).abs().max().item()
                assert gap < 1e-5, f"attend differs from the kernel by {gap}"
                taken = {ours: [], theirs: []}
                # short calls are noisy, so there are more of them
                for turn in range(repeats * max(1, LENGTHS[-1] // length)):
                    # Who goes first changes, so that neither always finds a warm cache.
                    for call in (ours, theirs) if turn % 2 else (theirs, ours):
                        taken[call].append(timed(call))
            mine, other = (statistics.median(taken[call]) for call in (ours, theirs))
            # of neighbours in time, since a machine that others share slows down for seconds
            pairs = zip(taken[ours], taken[theirs], strict=True)
            ratios.append(statistics.median(a / b for a, b in pairs))
            print(
                f"{case:7} length {length:5}  attend {mine * 1e3:8.2f} ms  "
                f"kernel {other * 1e3:8.2f} ms  {ratios[-1]:.3f}"
            )
        print(f"ratio attend_vs_sdpa_{case} {max(ratios):.3f}", flush=True)
        if case != "padded":
            worst = max(worst, *ratios)
    print(f"ratio attend_vs_sdpa {worst:.3f}", flush=True)


def status(field: str) -> int:
    """Return a figure of this process's memory in kilobytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    raise RuntimeError(f"/proc/self/status has no {field}; memory is measured on Linux only")


def peak_of(call) -> float:
    """Return by how many megabytes the peak of memory rises above the present during a call."""
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = status("VmRSS")
    call()
    return (status("VmHWM") - before) / 1024


def measure(job: dict) -> float:
    """Run one measurement of memory; each runs in a process of its own."""
    import torch
    from torch import nn

    from regard.attention.attend import attend
    from regard.attention.watch import watch

    torch.set_num_threads(THREADS)

    class Looker(nn.Module):
        """A model of one attention."""

        def __init__(self):
            super().__init__()
            self.attention = nn.Identity()

        def forward(self, q, k, v, mask):
            return attend(q, k, v, mask=mask, watch=self.attention)

    model, length, heads = Looker(), job["length"], job["heads"]
    training = job.get("training", False)

    def call(length: int, q, k, v) -> None:
        mask = mask_of(job["case"], length)
        if job.get("watched"):
            with watch(model) as maps:
                model(q, k, v, mask)
            row = maps["attention"].weights(heads=[1], rows=[length // 2])
            assert row.shape == (1, 1, 1, length)
            assert abs(row.sum().item() - 1) < 1e-4
        elif training:
            model(q, k, v, mask).sum().backward()
        else:
            model(q, k, v, mask)

    with torch.set_grad_enabled(training):
        for size in (64, length):  # the first call loads code, which is no cost of attention
            tensors = [x.requires_grad_(training) for x in inputs(size, heads)]
            risen = peak_of(lambda size=size, tensors=tensors: call(size, *tensors))
    return risen


def in_process(**job) -> float:
    """Measure in a fresh process."""
    command = [sys.executable, __file__, "--job", json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return float(done.stdout)


def exponent(lengths: list[int], megabytes: list[float]) -> float:
    """Return the slope of log(memory) over log(length)."""
    x = [math.log(length) for length in lengths]
    y = [math.log(max(size, 1e-3)) for size in megabytes]
    return statistics.linear_regression(x, y).slope


def compare_memory() -> None:
    """Print the peak of memory against the length, and what watching adds."""
    heads = 4
    worst = 0.0
    for case, training in (("plain", False), ("causal", False), ("both", False), ("plain", True)):
        sizes = [
            in_process(case=case, length=length, heads=heads, training=training)
            for length in LENGTHS
        ]
        name = case + (" with gradient" if training else "")
        slope = exponent(LENGTHS, sizes)
        worst = max(worst, slope)
        figures = "  ".join(f"{n}: {size:.1f}" for n, size in zip(LENGTHS, sizes, strict=True))
        print(f"memory (MB) {name:20} {figures}  exponent {slope:.2f}", flush=True)
    print(f"exponent attend_memory {worst:.2f}")
    for case in ("plain", "causal"):
        alone = in_process(case=case, length=LENGTHS[-1], heads=heads)
        watched = in_process(case=case, length=LENGTHS[-1], heads=heads, watched=True)
        print(
            f"watching one row of one head at {LENGTHS[-1]} ({case}): {watched:.1f} MB against "
            f"{alone:.1f} MB unwatched"
        )
        print(f"megabytes watch_{case} {max(0.0, watched - alone):.1f}", flush=True)


def main() -> None:
    """Measure time, then memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        print(measure(json.loads(options.job)))
        return
    from apart import machine

    print(machine(), flush=True)
    compare_times(5 if options.quick else 20)
    compare_memory()


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    main()
