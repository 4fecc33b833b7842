"""Filters on photos: one, the lectures' comparison of them, and their grid of the bilateral."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, make_dataclass
from io import BytesIO
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from regard.data.image_format import ImageFormat
from regard.errors import UsageError, lookup
from regard.files import write_atomically
from regard.filters import FILTERS, WEIGHTS
from regard.filters.pixels import Pixel, check_pixel
from regard.metrics.image import noisy, psnr, ssim
from regard.results import Named
from regard.settings import fill, setting
from regard.training.progress import Progress

WRITTEN = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP"}
MOST_PAIRS = 2**40  # of pixels that are compared: some hours
MOST_COPIED = 2**27  # numbers of the patches that a texture is grown from
SHOWN = 0.01  # of the largest weight: what a picture of weights must have room for

# parameter of a filter -> its help and bounds
KEYS: dict[str, tuple[str, dict[str, Any]]] = {
    "sigma": ("standard deviation of the Gaussian, in pixels", {"above": 0, "max": 1000}),
    "sigma_s": ("standard deviation of the spatial Gaussian, in pixels", {"above": 0, "max": 1000}),
    "sigma_r": ("standard deviation of the range Gaussian, values 0 to 1; or inf", {"above": 0}),
    "window": ("side of the search window in pixels, or full", {"min": 1, "max": 10_001}),
    "border": ("border: cut (no padding), mirror or nearest", {}),
    "steps": ("iterations", {"min": 0, "max": 1_000_000}),
    "step": ("step size, at most 0.25", {"above": 0}),
    "k": ("edge threshold (Perona and Malik's K), values 0 to 1", {"above": 0}),
    "conductance": ("conductance function: exponential or rational", {}),
    "strength": ("weight of the total variation", {"above": 0, "max": 1000}),
    "h": ("filtering strength: patch distance at which weights fall", {"above": 0, "max": 1000}),
    "patch": ("side of a patch, in pixels", {"min": 1, "max": 101}),
    "distance": ("patch distance: squared (the paper) or plain (the lectures' slide)", {}),
    "patch_weights": ("weights inside a patch: flat or gaussian", {}),
    "noise": ("known noise standard deviation, values 0 to 1", {"min": 0, "max": 10}),
    "guide": ("guide image, from which the weights are computed", {}),
    "height": ("height of the texture, in pixels", {"min": 1, "max": 4096}),
    "width": ("width of the texture, in pixels", {"min": 1, "max": 4096}),
    "tolerance": ("relative error over the best match that is accepted", {"min": 0, "max": 1000}),
    "seed": ("random seed", {"min": 0, "max": 2**63 - 1}),
}


@dataclass(frozen=True)
class FilterSettings:
    """Settings of every filter."""

    out: Path | None = setting(None, "image to write: .png, .jpg, .webp or .bmp")
    weights_at: str | None = setting(None, "draw the weights of this pixel x,y instead")
    threads: int | None = setting(None, "CPU threads", min=1, max=1024)


@dataclass(frozen=True)
class CompareSettings:
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
class GridSettings:
    """Settings of the bilateral filter's grid over both of its widths."""

    out: Path | None = setting(None, "picture to write, .png")
    weights_at: str | None = setting(None, "draw the weights of this pixel x,y; else the middle")
    size: int = setting(256, "longer side to which larger photos are resized", min=1, max=4096)
    threads: int | None = setting(None, "CPU threads", min=1, max=1024)


def settings_of(name: str) -> type:
    """Return the settings of a filter: its own keywords, and those of all."""
    hints = get_type_hints(FILTERS[name])
    own = []
    for key, one in inspect.signature(FILTERS[name]).parameters.items():
        if one.kind is one.KEYWORD_ONLY and key in KEYS:
            help, bounds = KEYS[key]
            required = one.default is one.empty
            kind = Path | None if hints[key] is Tensor else hints[key]
            default = None if required else one.default
            own.append((key, kind, setting(default, help, **bounds)))
    return make_dataclass("Settings", own, bases=(FilterSettings,), frozen=True)


# what can be asked for -> the class of its keys
SETTINGS: dict[str, type] = {
    **{name: settings_of(name) for name in FILTERS},
    "compare": CompareSettings,
    "grid": GridSettings,
}


@dataclass(frozen=True)
class Filtered(Named):
    """A picture that was written, and how window_mask each filter came to the photo."""

    path: str
    scores: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # PSNR and SSIM

    def __str__(self) -> str:
        width = max(map(len, self.scores), default=0)
        rows = [f"{n:{width}}  PSNR {p:.2f} dB  SSIM {s:.4f}" for n, (p, s) in self.scores.items()]
        return "\n".join([*rows, f"wrote {self.path}"])

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON."""
        scores = {name: {"psnr": p, "ssim": s} for name, (p, s) in self.scores.items()}
        return {"path": self.path, **({"scores": scores} if scores else {})}


def filter_photo(
    name: str, photo: str | Path, settings: Mapping[str, Any], *, quiet: bool = False
) -> Filtered:
    """Filter a photo by a name of FILTERS, or draw the comparison or the grid of it."""
    how: Any = fill(lookup("filter", name, SETTINGS), settings)
    if how.out is None:
        raise UsageError(f"out is missing; write for example out={name}.png")
    kinds = WRITTEN if name in FILTERS and how.weights_at is None else {".png": "PNG"}
    if how.out.suffix.lower() not in kinds:
        raise UsageError(f"out={how.out}: unknown kind of image; end it in {' or '.join(kinds)}")
    if how.threads:
        torch.set_num_threads(how.threads)
    image = read(photo)
    with torch.no_grad():
        scores = ACTS.get(name, _one(name))(image, how, Path(photo).name, quiet)
    return Filtered(str(how.out), scores)


def read(photo: str | Path) -> Tensor:
    """Return a photo as (c, h, w), values from 0 to 1."""
    return torch.tensor(ImageFormat().read(photo)).float() / 255


def parse_pixel(text: str, image: Tensor, share: float = 1.0) -> Pixel:
    """Read which pixel is meant, of a photo that was since made smaller by a share."""
    numbers = re.fullmatch(r"\s*(\d{1,6})\s*[,x ]\s*(\d{1,6})\s*", text)
    if numbers is None:
        raise UsageError(f"weights_at={text:.40}; expected a pixel such as weights_at=120,80")
    x, y = int(numbers[1]), int(numbers[2])
    try:
        check_pixel((x, y), image)
    except UsageError as mistake:
        raise UsageError(f"weights_at={text}: {mistake}") from None
    return int(x * share), int(y * share)


def fitted(image: Tensor, size: int) -> tuple[Tensor, float]:
    """Bring a larger photo to a longer side, and tell by which share."""
    share = size / max(image.shape[-2:])
    if share >= 1:
        return image, 1.0
    sides = [max(1, round(share * side)) for side in image.shape[-2:]]
    small = F.interpolate(image[None], sides, mode="bicubic", antialias=True)[0]
    return small.clamp(0, 1), share


def as_bytes(image: Tensor) -> np.ndarray:
    """Return an image as bytes (h, w) or (h, w, 3)."""
    found = (255 * image.clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return found[..., 0] if found.shape[2] == 1 else found


def as_colours(image: Tensor) -> np.ndarray:
    """Return an image as bytes (h, w, 3)."""
    return as_bytes(image.expand(3, -1, -1))


def _one(name: str) -> Callable[[Tensor, Any, str, bool], dict]:
    """Return how a filter is applied to a photo and the outcome written."""

    def act(image: Tensor, how: Any, title: str, quiet: bool) -> dict:
        own = {one.name: getattr(how, one.name) for one in fields(how)}
        for common in fields(FilterSettings):
            del own[common.name]
        if "guide" in own:
            own["guide"] = _guide(own["guide"], image)
        if how.weights_at is not None:
            _draw_weights(name, image, own, how, title)
            return {}
        _afford(name, image, own)
        if name == "texture":
            with Progress("texture", own["height"] * own["width"], quiet=quiet) as bar:
                out = FILTERS[name](image, **own, progress=bar.update)
        else:
            out = FILTERS[name](image, **own)
        stream = BytesIO()
        more = {"quality": 95} if how.out.suffix.lower() not in (".png", ".bmp") else {}
        Image.fromarray(as_bytes(out)).save(stream, WRITTEN[how.out.suffix.lower()], **more)
        write_atomically(how.out, stream.getvalue())
        return {}

    return act


def _guide(path: Path | None, image: Tensor) -> Tensor:
    if path is None:
        raise UsageError("guide is missing; write guide=other.png, an image of the same size")
    guide = read(path)
    if guide.shape[-2:] != image.shape[-2:]:
        sizes = [f"{x.shape[-1]} x {x.shape[-2]}" for x in (guide, image)]
        raise UsageError(f"guide={path} is {sizes[0]}; expected the image's {sizes[1]} pixels")
    return guide


def _afford(name: str, image: Tensor, own: dict[str, Any]) -> None:
    """Refuse what would take days, or more memory than there is."""
    pixels = image.shape[-1] * image.shape[-2]
    if name == "texture" and 2 * image.numel() * own["patch"] ** 2 > MOST_COPIED:
        raise UsageError(
            f"a sample of {image.shape[-1]} x {image.shape[-2]} has too many patches of "
            f"patch={own['patch']}; cut a smaller sample"
        )
    window = own.get("window", 1)
    if window == "auto" and "sigma_s" in own:
        window = int(6 * own["sigma_s"]) + 1
    looked = window**2 if isinstance(window, int) else pixels if window == "full" else 1
    if name != "gaussian" and pixels * min(pixels, looked) > MOST_PAIRS:
        raise UsageError(
            f"window={own['window']} of {pixels:,} pixels is more than can be waited for; "
            "choose a smaller window, such as window=21, or a smaller image"
        )


def _draw_weights(name: str, image: Tensor, own: dict[str, Any], how: Any, title: str) -> None:
    from regard.viewer.panels import draw_gallery  # matplotlib takes a while to import

    if name not in WEIGHTS:
        raise UsageError(
            f"weights_at: {name} copies single pixels; choose from {', '.join(WEIGHTS)}"
        )
    at = parse_pixel(how.weights_at, image)
    _afford(name, image, own)
    weights = WEIGHTS[name](image, at, **own)
    box = box_of([weights], at)
    rows = [[_seen(image, at, box), _weighed(weights, box, f"{name}: weights")]]
    write_atomically(how.out, draw_gallery(f"{title}: weights of pixel {at[0]},{at[1]}", rows))


Box = tuple[slice, slice]


def box_of(maps: Sequence[Tensor], at: Pixel) -> Box:
    """Return the part around a pixel, as wide and high as the image is, that holds all weights."""
    high, wide = maps[0].shape
    reach = 0.04
    for weights in maps:
        rows, columns = (weights.abs() > SHOWN * weights.abs().max()).nonzero().unbind(1)
        with suppress(RuntimeError):  # weights that are no numbers
            down, right = (rows - at[1]).abs().max() / high, (columns - at[0]).abs().max() / wide
            reach = max(reach, float(torch.maximum(down, right)) * 1.1)
    spans = []
    for place, size in ((at[1], high), (at[0], wide)):
        side = min(size, max(3, 2 * round(reach * size) + 1))
        start = min(max(0, place - side // 2), size - side)
        spans.append(slice(start, start + side))
    return spans[0], spans[1]


def _seen(image: Tensor, at: Pixel, box: Box, caption: str = "the image there"):
    """Return the panel of a part of an image, with a frame around a pixel."""
    from regard.viewer.panels import Panel

    piece = image[..., *box]
    high, wide = piece.shape[-2:]
    frame = (at[0] - box[1].start) / wide, (at[1] - box[0].start) / high, 1 / wide, 1 / high
    return Panel(_enlarged(as_colours(piece), image), caption, frame)


def _weighed(weights: Tensor, box: Box, caption: str):
    """Return the panel of weights in a part of an image."""
    from regard.viewer.panels import Panel, heat_map

    shown = heat_map(weights[box].numpy())
    top = float(weights.max())
    return Panel(_enlarged(shown, weights), f"{caption} ≤{top:.2g}")


def _enlarged(pixels: np.ndarray, image: Tensor) -> np.ndarray:
    """Bring a part of an image to the size of the whole, so that panels are alike."""
    high, wide = image.shape[-2:]
    return np.asarray(Image.fromarray(pixels).resize((wide, high), Image.Resampling.NEAREST))


def settings_for(noise: float, channels: int = 1) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return the filters of the lectures' comparison as they suit noise of a spread, of 0 to 1.

    They were searched on Set12 with a noise of 25 / 255; here they go with the noise.
    """
    more = (255 * noise / 25) ** 0.5
    apart = noise * channels**0.5  # what noise makes of two equal colours
    return {
        "Gaussian": ("gaussian", {"sigma": 0.9 * more}),
        "anisotropic": (
            "perona_malik",
            {"k": 0.8 * apart, "steps": 12, "conductance": "rational"},
        ),
        "total variation": ("total_variation", {"strength": 0.8 * apart, "steps": 50}),
        "bilateral": ("bilateral", {"sigma_s": 1.5 * more, "sigma_r": 2.5 * apart}),
        "non-local means": ("nonlocal_means", {"h": 0.75 * noise, "noise": noise, "patch": 5}),
    }


def _compare(image: Tensor, how: CompareSettings, title: str, quiet: bool) -> dict:
    """Draw the photo with noise, and what each filter makes of it."""
    from regard.viewer.panels import Panel, draw_gallery

    assert how.out is not None
    clean, share = fitted(image, how.size)
    at = None if how.weights_at is None else parse_pixel(how.weights_at, image, share)
    noise = how.sigma / 255
    given = noisy(clean, noise, how.seed)
    found, maps = {"noisy": given}, {}
    chosen = settings_for(noise, len(clean))
    with Progress("filters", len(chosen), quiet=quiet) as bar:
        for name, (filter, own) in chosen.items():
            found[name] = FILTERS[filter](given, **own)
            if at is not None:
                maps[name] = WEIGHTS[filter](given, at, **own)
            bar.update(1)
    scores = {name: (psnr(x, clean), ssim(x, clean)) for name, x in found.items()}
    panels = [
        Panel(as_colours(x), f"{name}  {scores[name][0]:.2f} dB, SSIM {scores[name][1]:.3f}")
        for name, x in found.items()
    ]
    if at is not None:
        box = box_of(list(maps.values()), at)
        panels.append(_seen(given, at, box, f"noisy, around {how.weights_at}"))
        panels += [_weighed(w, box, f"{name}: weights") for name, w in maps.items()]
    rows = [panels[i : i + 3] for i in range(0, len(panels), 3)]
    write_atomically(how.out, draw_gallery(f"{title}, noise of {how.sigma:g} added", rows))
    return scores


def _grid(image: Tensor, how: GridSettings, title: str, quiet: bool) -> dict:
    """Draw the lectures' grid of the bilateral filter, with the weights of one pixel."""
    from regard.viewer.panels import Panel, draw_gallery

    assert how.out is not None
    small, share = fitted(image, how.size)
    at = small.shape[-1] // 2, small.shape[-2] // 2
    if how.weights_at is not None:
        at = parse_pixel(how.weights_at, image, share)
    spaces, values = (4.0, 8.0, 16.0), (0.05, 0.2, 0.8, "inf")
    found, maps = {}, {}
    with Progress("grid", len(spaces) * len(values), quiet=quiet) as bar:
        for sigma_s in spaces:
            for sigma_r in values:
                own: dict[str, Any] = {"sigma_s": sigma_s, "sigma_r": sigma_r}
                found[sigma_s, sigma_r] = FILTERS["bilateral"](small, **own)
                maps[sigma_s, sigma_r] = WEIGHTS["bilateral"](small, at, **own)
                bar.update(1)
    box = box_of(list(maps.values()), at)
    rows = []
    for s in spaces:
        told = {r: f"σs {s:g}, σr {'∞: Gaussian' if r == 'inf' else r}" for r in values}
        rows.append([Panel(as_colours(found[s, r]), told[r]) for r in values])
        rows.append([_weighed(maps[s, r], box, "weights of the pixel") for r in values])
    rows = [[Panel(as_colours(small), "the photo"), _seen(small, at, box, "the pixel")], *rows]
    write_atomically(how.out, draw_gallery(f"{title}: bilateral filter", rows))
    return {}


ACTS: dict[str, Callable[[Tensor, Any, str, bool], dict]] = {"compare": _compare, "grid": _grid}
