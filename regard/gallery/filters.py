"""Filters side by side: compared on a noisy photo, and the bilateral one over both sigmas."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from regard import UsageError
from regard.files import write_atomically
from regard.filters import (
    FILTERS,
    WEIGHTS,
    as_rgb,
    check_suffix,
    crop_of,
    image_panel,
    parse_pixel,
    read_photo,
    weights_panel,
)
from regard.metrics import Named, noisy, psnr, ssim
from regard.settings import setting
from regard.training import Progress
from regard.viewer import Panel, draw_gallery


@dataclass(frozen=True)
class FilterCompareSettings:
    """Settings of the comparison of denoising filters."""

    out: Path | None = setting(None, "picture to write, .png")
    sigma: float = setting(
        25.0, "standard deviation of the added noise, of 0 to 255", above=0, max=255
    )
    weights_at: str | None = setting(None, "draw the weights of this pixel x,y too")
    size: int = setting(512, "longer side to which larger photos are resized", min=1, max=4096)
    seed: int = setting(0, "random seed of the noise", min=0, max=2**63 - 1)
    threads: int | None = setting(None, "CPU threads", min=1, max=1024)


@dataclass(frozen=True)
class FilterGridSettings:
    """Settings of the bilateral filter's grid over both of its widths."""

    out: Path | None = setting(None, "picture to write, .png")
    weights_at: str | None = setting(None, "draw the weights of this pixel x,y; else the middle")
    size: int = setting(256, "longer side to which larger photos are resized", min=1, max=4096)
    threads: int | None = setting(None, "CPU threads", min=1, max=1024)


@dataclass(frozen=True)
class Filtered(Named):
    """The path of a picture that was written, and the scores of the filters on it."""

    path: str
    scores: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def __str__(self) -> str:
        width = max(map(len, self.scores), default=0)
        rows = [f"{n:{width}}  PSNR {p:.2f} dB  SSIM {s:.4f}" for n, (p, s) in self.scores.items()]
        return "\n".join([*rows, f"wrote {self.path}"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        scores = {name: {"psnr": p, "ssim": s} for name, (p, s) in self.scores.items()}
        return {"path": self.path, **({"scores": scores} if scores else {})}


def shrink(image: Tensor, size: int) -> tuple[Tensor, float]:
    """Resize a larger photo to a longer side; return it and the factor."""
    scale = size / max(image.shape[-2:])
    if scale >= 1:
        return image, 1.0
    sides = [max(1, round(scale * side)) for side in image.shape[-2:]]
    small = F.interpolate(image[None], sides, mode="bicubic", antialias=True)[0]
    return small.clamp(0, 1), scale


def begin(settings: Any, photo: str, *, picture: bool = True) -> tuple[Path, Tensor, str]:
    """File to write, pixels and name of a photo; a file that is no picture is refused first."""
    out: Path | None = settings.out
    if out is None:
        raise UsageError("out is missing; write for example out=filters.png")
    check_suffix(out, photo=not picture)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    return out, read_photo(photo), Path(photo).name


def settings_for(noise: float, channels: int = 1) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the filters of the comparison with parameters for a noise level, of 0 to 1.

    They were searched on Set12 with a noise of 25 / 255, and are scaled with the noise.
    """
    scale = (255 * noise / 25) ** 0.5
    distance = noise * channels**0.5  # of two equal colours, by noise
    return {
        "Gaussian": ("gaussian", {"sigma": 0.9 * scale}),
        "anisotropic": (
            "perona_malik",
            {"k": 0.8 * distance, "steps": 12, "conductance": "rational"},
        ),
        "total variation": ("total_variation", {"strength": 0.8 * distance, "steps": 50}),
        "bilateral": ("bilateral", {"sigma_s": 1.5 * scale, "sigma_r": 2.5 * distance}),
        "non-local means": ("nonlocal_means", {"h": 0.75 * noise, "noise": noise, "patch": 5}),
    }


@torch.no_grad()
def compare(settings: FilterCompareSettings, photo: str, *, quiet: bool = True) -> Filtered:
    """Draw a photo with added noise, and the output of each filter."""
    out, image, title = begin(settings, photo)
    clean, scale = shrink(image, settings.size)
    at = None if settings.weights_at is None else parse_pixel(settings.weights_at, image, scale)
    noise = settings.sigma / 255
    given = noisy(clean, noise, settings.seed)
    outputs, maps = {"noisy": given}, {}
    chosen = settings_for(noise, len(clean))
    with Progress("filters", len(chosen), quiet=quiet) as bar:
        for name, (filter, own) in chosen.items():
            outputs[name] = FILTERS[filter](given, **own)
            if at is not None:
                maps[name] = WEIGHTS[filter](given, at, **own)
            bar.update(1)
    scores = {name: (psnr(x, clean), ssim(x, clean)) for name, x in outputs.items()}
    panels = [
        Panel(as_rgb(x), f"{name}  {scores[name][0]:.2f} dB, SSIM {scores[name][1]:.3f}")
        for name, x in outputs.items()
    ]
    if at is not None:
        box = crop_of(list(maps.values()), at)
        panels.append(image_panel(given, at, box, f"noisy, around {settings.weights_at}"))
        panels += [weights_panel(w, box, f"{name}: weights") for name, w in maps.items()]
    rows = [panels[i : i + 3] for i in range(0, len(panels), 3)]
    write_atomically(out, draw_gallery(f"{title}, noise of {settings.sigma:g} added", rows))
    return Filtered(str(out), scores)


@torch.no_grad()
def grid(settings: FilterGridSettings, photo: str, *, quiet: bool = True) -> Filtered:
    """Draw the bilateral filter over a grid of both sigmas, with the weights of one pixel."""
    out, image, title = begin(settings, photo)
    small, scale = shrink(image, settings.size)
    at = small.shape[-1] // 2, small.shape[-2] // 2
    if settings.weights_at is not None:
        at = parse_pixel(settings.weights_at, image, scale)
    spaces, values = (4.0, 8.0, 16.0), (0.05, 0.2, 0.8, "inf")
    outputs, maps = {}, {}
    with Progress("grid", len(spaces) * len(values), quiet=quiet) as bar:
        for sigma_s in spaces:
            for sigma_r in values:
                own: dict[str, Any] = {"sigma_s": sigma_s, "sigma_r": sigma_r}
                outputs[sigma_s, sigma_r] = FILTERS["bilateral"](small, **own)
                maps[sigma_s, sigma_r] = WEIGHTS["bilateral"](small, at, **own)
                bar.update(1)
    box = crop_of(list(maps.values()), at)
    rows = []
    for s in spaces:
        captions = {r: f"σs {s:g}, σr {'∞: Gaussian' if r == 'inf' else r}" for r in values}
        rows.append([Panel(as_rgb(outputs[s, r]), captions[r]) for r in values])
        rows.append([weights_panel(maps[s, r], box, "weights of the pixel") for r in values])
    rows = [[Panel(as_rgb(small), "the photo"), image_panel(small, at, box, "the pixel")], *rows]
    write_atomically(out, draw_gallery(f"{title}: bilateral filter", rows))
    return Filtered(str(out))
