"""How fast filters are: Regard's against scikit-image's and OpenCV's, and what memory they take.

    python bench/filters.py [--rounds 7] [--quick] [--by cpu]

The bilateral filter (sigma_s 3, window 19) and non-local means (patch 7, window 21, scikit-image's
fast mode) on a picture of 512 x 512 with noise, grey and colour, float32, 2 threads; OpenCV's
non-local means takes bytes. Everybody takes a turn in each round and times are medians over the
rounds; a ratio above 1 means that Regard is faster, and without grey or colour it is the smaller of
the two. By processor time (`--by cpu`) its name ends in _cpu. `memory` is the peak of a process of
its own that does non-local means with the whole 256 x 256 image in view, PyTorch itself included.
"""

import argparse
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from apart import CLOCKS, in_turn, machine, takes  # noqa: E402
from torch import Tensor  # noqa: E402

from regard.filters import bilateral, nonlocal_means  # noqa: E402
from regard.metrics.image import noisy  # noqa: E402
from regard.native.allocator import reuse_memory  # noqa: E402

THREADS = 2
SIGMA_S, SIGMA_R, NEAR = 3.0, 0.1, 19
PATCH, WINDOW, H = 7, 21, 0.1


def picture(side: int, channels: int) -> Tensor:
    """Return waves and an edge with noise, (c, h, w)."""
    at = torch.linspace(0, 1, side)
    waves = 0.5 + 0.2 * torch.sin(40 * at**2) + 0.2 * torch.cos(30 * at).unsqueeze(1)
    shades = torch.linspace(0.8, 1, channels).view(-1, 1, 1)
    edge = 0.1 * (at > 0.5) * (at.unsqueeze(1) > 0.3)
    return noisy(shades * (waves + edge), 0.05).clamp(0, 1)


def acts(side: int, channels: int) -> dict[str, dict[str, Callable[[], Any]]]:
    """Return what each tool does for each filter."""
    import cv2
    from skimage.restoration import denoise_bilateral, denoise_nl_means

    cv2.setNumThreads(torch.get_num_threads())
    image = picture(side, channels)
    array = np.ascontiguousarray(image.permute(1, 2, 0).numpy())
    array = array[..., 0] if channels == 1 else array
    axis = None if channels == 1 else -1
    eight = (255 * array).round().astype(np.uint8)
    return {
        "bilateral": {
            "regard": lambda: bilateral(image, sigma_s=SIGMA_S, sigma_r=SIGMA_R, window=NEAR),
            "skimage": lambda: denoise_bilateral(
                array, NEAR, sigma_color=SIGMA_R, sigma_spatial=SIGMA_S, channel_axis=axis
            ),
            "opencv": lambda: cv2.bilateralFilter(array, NEAR, SIGMA_R, SIGMA_S),
        },
        "nlm": {
            "regard": lambda: nonlocal_means(image, h=H, patch=PATCH, window=WINDOW),
            "skimage": lambda: denoise_nl_means(
                array, PATCH, WINDOW // 2, H, fast_mode=True, channel_axis=axis
            ),
            "opencv": lambda: cv2.fastNlMeansDenoising(eight, None, 255 * H, PATCH, WINDOW),
        },
    }


def full_field(side: int) -> None:
    """Print the seconds and peak memory of this process for full-field non-local means."""
    start = time.perf_counter()
    nonlocal_means(picture(side, 1), h=H, patch=PATCH, window="full")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    took = time.perf_counter() - start
    print(f"memory nlm full field {side}x{side} {peak:.2f} GB ({took:.1f} s)", flush=True)


def main() -> None:
    """Compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=THREADS)
    parser.add_argument("--quick", action="store_true", help="under two minutes")
    parser.add_argument("--by", choices=CLOCKS, default="wall", help="the seconds that count")
    parser.add_argument("--full", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.set_grad_enabled(False)
    if given.full:
        return full_field(given.full)
    print(machine(), flush=True)
    reuse_memory()
    rounds = 3 if given.quick else given.rounds
    ratios: dict[str, float] = {}
    for kind, channels in (("grey", 1), ("colour", 3)):
        for name, tools in acts(512, channels).items():
            found = in_turn({tool: takes(act, given.by) for tool, act in tools.items()}, rounds)
            told = "  ".join(f"{tool} {1e3 * took:.1f} ms" for tool, took in found.items())
            print(f"{name:9} {kind:6}  {told}", flush=True)
            for tool in ("skimage", "opencv"):
                ratio, both = found[tool] / found["regard"], f"{name}_vs_{tool}"
                ratios[f"{both}_{kind}"] = ratio
                ratios[both] = min(ratio, ratios.get(both, ratio))
    words = [sys.executable, __file__, "--full", "256", "--threads", str(given.threads)]
    subprocess.run(words, check=True)
    for name in sorted(ratios):
        print(f"ratio {name}{'_cpu' if given.by == 'cpu' else ''} {ratios[name]:.3f}")


if __name__ == "__main__":
    main()
