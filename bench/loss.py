"""The loss over a vocabulary: Regard's, some rows at a time, against torch's own on all logits.

    python bench/loss.py [--quick]

Forward and backward with label smoothing 0.1 for about 4,096 tokens, in turn; the ratio is plain
time over ours.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from apart import machine  # noqa: E402

from regard.training.loss import linear_cross_entropy, reference_cross_entropy  # noqa: E402


def seconds(loss, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> float:
    """Time one forward and backward pass."""
    hidden.grad = weight.grad = None
    start = time.perf_counter()
    loss(hidden, weight, targets, smoothing=0.1).backward()
    return time.perf_counter() - start


def main() -> None:
    """Compare the two at the sizes of a small and a tiny model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    options = parser.parse_args()
    print(machine(), flush=True)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    ratios = {}
    for rows, width, vocab in ((4096, 256, 8000), (2048, 128, 6000)):
        hidden = torch.randn(rows, width, requires_grad=True)
        weight = (torch.randn(vocab, width) * width**-0.5).requires_grad_()
        targets = torch.randint(0, vocab, (rows,))
        pairs = [
            [
                seconds(loss, hidden, weight, targets)
                for loss in (reference_cross_entropy, linear_cross_entropy)
            ]
            for _ in range(7 if options.quick else 21)
        ]
        plain, ours = (statistics.median(side) for side in zip(*pairs[1:], strict=True))
        print(f"{rows} x {width} x {vocab}: plain {plain * 1e3:.1f} ms, ours {ours * 1e3:.1f} ms")
        ratios[f"loss_vs_plain_{width}"] = statistics.median(a / b for a, b in pairs[1:])
    for name, ratio in ratios.items():
        print(f"ratio {name} {ratio:.3f}")


if __name__ == "__main__":
    main()
