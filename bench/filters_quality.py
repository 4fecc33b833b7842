"""How well filters remove noise: Regard's against scikit-image's, each at its best setting.

    python bench/filters_quality.py [--sigma 25] [--only bilateral]

Set12 with Gaussian noise, not cut off, the same for both. Both sides are searched on the set they
are judged on, by the same search: all settings of a grid on four of its images, then the best
three of them on all twelve. So these figures compare filters; they do not foretell how good a
filter is on other images. `less` is what Regard lacks to scikit-image in dB.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import torch  # noqa: E402
from apart import machine  # noqa: E402
from skimage import filters, restoration  # noqa: E402
from torch import Tensor  # noqa: E402

from regard.data.image_format import ImageFormat  # noqa: E402
from regard.filters import FILTERS  # noqa: E402
from regard.metrics.image import noisy, psnr, ssim  # noqa: E402
from regard.native.allocator import reuse_memory  # noqa: E402

TRIED = (0, 2, 4, 6)  # images on which the whole grid is tried: some of the small ones
JUDGED = 3  # settings that are judged on all images
SIDES = ("regard", "scikit-image")

Settings = dict[str, Any]


def options(**choices: list) -> list[Settings]:
    """Return all combinations."""
    return [dict(zip(choices, some, strict=True)) for some in product(*choices.values())]


def grids(noise: float) -> dict[str, list[Settings]]:
    """Return what is tried of each filter, in words that stand for both sides."""
    borders = ["nearest", "mirror"]
    patches = options(
        patch=[3, 5, 7],
        window=[11, 21],
        h=[c * noise for c in (0.4, 0.6, 0.8, 1.0, 1.2)],
        noise=[0.0, noise],
        patch_weights=["flat"],
    )
    rounded = options(
        patch=[5, 7],
        window=[21],
        h=[c * noise for c in (0.4, 0.6, 0.8, 1.0)],
        noise=[0.0, noise],
        patch_weights=["gaussian"],
    )
    return {
        "gaussian": options(sigma=[0.8 + 0.1 * i for i in range(10)], border=borders),
        "total_variation": options(
            strength=[0.06, 0.08, 0.1, 0.12, 0.14, 0.17, 0.2], steps=[10, 20, 50, 100, 200]
        ),
        "bilateral": options(
            sigma_s=[1.0, 1.5, 2.0, 3.0],
            sigma_r=[c * noise for c in (0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)],
            border=borders,
        ),
        "nonlocal_means": patches + rounded,
    }


def regard_side(name: str, image: Tensor, setting: Settings) -> Tensor:
    """Filter by Regard."""
    if name == "bilateral":  # which has no border: what is outside has no weight
        setting = {key: value for key, value in setting.items() if key != "border"}
    return FILTERS[name](image, **setting)


def skimage_side(name: str, image: Tensor, setting: Settings) -> Tensor:
    """Filter by scikit-image."""
    x, how = image[0].numpy(), setting
    if name == "gaussian":
        border = {"nearest": "nearest", "mirror": "reflect"}[how["border"]]
        out = filters.gaussian(x, how["sigma"], mode=border)
    elif name == "total_variation":
        out = restoration.denoise_tv_chambolle(x, how["strength"], max_num_iter=how["steps"])
    elif name == "bilateral":
        border = {"nearest": "edge", "mirror": "symmetric"}[how["border"]]
        out = restoration.denoise_bilateral(
            x, sigma_spatial=how["sigma_s"], sigma_color=how["sigma_r"], mode=border
        )
    else:
        out = restoration.denoise_nl_means(
            x,
            how["patch"],
            how["window"] // 2,
            how["h"],
            fast_mode=how["patch_weights"] == "flat",
            sigma=how["noise"],
        )
    return torch.from_numpy(out.astype(x.dtype)).unsqueeze(0)


ACTS: dict[str, Callable[[str, Tensor, Settings], Tensor]] = dict(
    zip(SIDES, (regard_side, skimage_side), strict=True)
)


def mean(numbers: Iterator[float]) -> float:
    """Return the mean."""
    listed = list(numbers)
    return sum(listed) / len(listed)


def best(
    side: str, name: str, grid: list[Settings], pairs: list[tuple[Tensor, Tensor]]
) -> tuple[float, float, Settings]:
    """Return PSNR and SSIM on all images of the best setting found by the search."""
    act = ACTS[side]
    seen: list[Settings] = []
    for setting in grid:  # what a side has no word for is not tried twice
        if side == "regard" and name == "bilateral":
            setting = {**setting, "border": "cut"}
        if setting not in seen:
            seen.append(setting)
    tried = [pairs[i] for i in TRIED]
    found = [mean(psnr(act(name, x, how), clean) for x, clean in tried) for how in seen]
    first = sorted(range(len(seen)), key=lambda i: -found[i])[:JUDGED]
    judged = []
    for i in first:
        outs = [(act(name, x, seen[i]), clean) for x, clean in pairs]
        judged.append((mean(psnr(*one) for one in outs), mean(ssim(*one) for one in outs), seen[i]))
    return max(judged, key=lambda one: one[0])


def main() -> None:
    """Search and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sigma", type=float, default=25)
    parser.add_argument("--only", default="", help="one filter")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    print(machine(), flush=True)
    torch.set_num_threads(given.threads)
    reuse_memory()
    home = Path(os.environ.get("REGARD_DATA", HERE.parent.parent / "shared" / "data"))
    files = sorted((home / "denoise" / "Set12").glob("*.png"))
    if len(files) != 12:
        sys.exit(f"{home / 'denoise' / 'Set12'}: no Set12; set REGARD_DATA to where denoise/ is")
    noise = given.sigma / 255
    clean = [torch.tensor(ImageFormat(channels=1).read(f)).float() / 255 for f in files]
    pairs = [(noisy(x, noise, seed), x) for seed, x in enumerate(clean)]
    print(f"noisy: {mean(psnr(*pair) for pair in pairs):.2f} dB", flush=True)
    print("filter            scikit-image          regard                less   best settings")
    for name, grid in grids(noise).items():
        if given.only in ("", name):
            start = time.perf_counter()
            theirs = best("scikit-image", name, grid, pairs)
            middle = time.perf_counter()
            ours = best("regard", name, grid, pairs)
            print(
                f"{name:16}  {theirs[0]:.2f} dB ssim {theirs[1]:.3f}  "
                f"{ours[0]:.2f} dB ssim {ours[1]:.3f}  {theirs[0] - ours[0]:+.3f}  "
                f"theirs {shown(theirs[2])}; ours {shown(ours[2])} "
                f"({middle - start:.0f} s, {time.perf_counter() - middle:.0f} s)",
                flush=True,
            )


def shown(setting: Settings) -> str:
    """Write a setting in short."""
    return " ".join(
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in setting.items()
    )


if __name__ == "__main__":
    main()
