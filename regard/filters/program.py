"""`regard filter`: one filter on a photo, a comparison of filters, or a grid of the bilateral."""

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
from regard.metrics.results import Named
from regard.settings import fill, setting
from regard.training.progress import Progress

FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP"}
MAX_PAIRS = 2**40  # of pixels that are compared: some hours
MAX_COPIED = 2**27  # numbers in the patches of a texture's sample
MAX_VALUES = 12  # of one key, each drawn as a panel
VISIBLE = 0.01  # of the largest weight: what a picture of weights must show

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


def settings_of(name: str) -> type:
    """Return the settings class of a filter: its own keywords, and those of all."""
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


# filter, compare or grid -> its settings class
SETTINGS: dict[str, type] = {
    **{name: settings_of(name) for name in FILTERS},
    "compare": FilterCompareSettings,
    "grid": FilterGridSettings,
}


def settings_class(name: str | None) -> type:
    """Settings class of a filter, or without a name the keys that all have."""
    return FilterSettings if name is None else lookup("filter", name, SETTINGS)


Scores = Mapping[str, tuple[float, float]]  # PSNR and SSIM by the name of a filter


@dataclass(frozen=True)
class Filtered(Named):
    """The path of a picture that was written, and the scores of the filters on it."""

    path: str
    scores: Scores = field(default_factory=dict)

    def __str__(self) -> str:
        width = max(map(len, self.scores), default=0)
        rows = [f"{n:{width}}  PSNR {p:.2f} dB  SSIM {s:.4f}" for n, (p, s) in self.scores.items()]
        return "\n".join([*rows, f"wrote {self.path}"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        scores = {name: {"psnr": p, "ssim": s} for name, (p, s) in self.scores.items()}
        return {"path": self.path, **({"scores": scores} if scores else {})}


def filter_photo(
    name: str, photo: str | Path, given: Mapping[str, Any], *, quiet: bool = False
) -> Filtered:
    """Filter a photo by a name of FILTERS, or draw a comparison or a grid of it."""
    kind = lookup("filter", name, SETTINGS)
    key, values = listed_key(name, given)
    runs: list[Any] = [fill(kind, {**given, key: value} if key else given) for value in values]
    settings = runs[0]
    out = settings.out
    if out is None:
        raise UsageError(f"out is missing; write for example out={name}.png")
    alone = name in FILTERS and settings.weights_at is None and not key
    kinds = FORMATS if alone else {".png": "PNG"}
    if out.suffix.lower() not in kinds:
        raise UsageError(
            f"out={settings.out}: unknown kind of image; end it in {' or '.join(kinds)}"
        )
    if settings.threads:
        torch.set_num_threads(settings.threads)
    image = read(photo)
    with torch.no_grad():
        scores: Scores = {}
        if key:
            _draw_row(
                name, image, {f"{key}={getattr(run, key)}": run for run in runs}, photo, quiet
            )
        elif name in FILTERS:
            _apply(name, image, settings, Path(photo).name, quiet)
        else:
            scores = PICTURES[name](image, settings, Path(photo).name, quiet)
    return Filtered(str(out), scores)


def listed_key(name: str, given: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
    """The key of a filter that has several values, such as steps=10,20,30, and these values."""
    several = {}
    for key, value in given.items():
        value = value.split(",") if isinstance(value, str) else value
        size = key in ("height", "width")  # panels are of one size
        numeric = name in FILTERS and not size and bool(KEYS.get(key, ("", {}))[1])
        if numeric and isinstance(value, list | tuple) and len(value) > 1:
            several[key] = value
    if len(several) > 1:
        raise UsageError(f"{' and '.join(several)} have several values; only one key may")
    key, values = next(iter(several.items()), ("", [None]))
    if len(values) > MAX_VALUES:
        raise UsageError(f"{key}= has {len(values)} values; give at most {MAX_VALUES}")
    return key, values


def read(photo: str | Path) -> Tensor:
    """Return a photo as (c, h, w), values from 0 to 1."""
    return torch.tensor(ImageFormat().read(photo)).float() / 255


def parse_pixel(text: str, image: Tensor, scale: float = 1.0) -> Pixel:
    """Parse a pixel x,y of a photo that was then resized by a factor."""
    numbers = re.fullmatch(r"\s*(\d{1,6})\s*[,x ]\s*(\d{1,6})\s*", text)
    if numbers is None:
        raise UsageError(f"weights_at={text:.40}; expected a pixel such as weights_at=120,80")
    x, y = int(numbers[1]), int(numbers[2])
    try:
        check_pixel((x, y), image)
    except UsageError as mistake:
        raise UsageError(f"weights_at={text}: {mistake}") from None
    return int(x * scale), int(y * scale)


def shrink(image: Tensor, size: int) -> tuple[Tensor, float]:
    """Resize a larger photo to a longer side; return it and the factor."""
    scale = size / max(image.shape[-2:])
    if scale >= 1:
        return image, 1.0
    sides = [max(1, round(scale * side)) for side in image.shape[-2:]]
    small = F.interpolate(image[None], sides, mode="bicubic", antialias=True)[0]
    return small.clamp(0, 1), scale


def as_bytes(image: Tensor) -> np.ndarray:
    """Return an image as bytes (h, w) or (h, w, 3)."""
    pixels = (255 * image.clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return pixels[..., 0] if pixels.shape[2] == 1 else pixels


def as_rgb(image: Tensor) -> np.ndarray:
    """Return an image as bytes (h, w, 3)."""
    return as_bytes(image.expand(3, -1, -1))


def _own(settings: Any, image: Tensor) -> dict[str, Any]:
    """The arguments of a filter among its settings."""
    common = {one.name for one in fields(FilterSettings)}
    own = {
        one.name: getattr(settings, one.name) for one in fields(settings) if one.name not in common
    }
    return own | ({"guide": _guide(own["guide"], image)} if "guide" in own else {})


def _filtered(name: str, image: Tensor, own: dict[str, Any], quiet: bool) -> Tensor:
    """Filter an image, unless that would take days."""
    _check_cost(name, image, own)
    if name != "texture":
        return FILTERS[name](image, **own)
    with Progress("texture", own["height"] * own["width"], quiet=quiet) as bar:
        return FILTERS[name](image, **own, progress=bar.update)


def _draw_row(
    name: str, image: Tensor, runs: Mapping[str, Any], photo: str | Path, quiet: bool
) -> None:
    """Draw the photo, and beside it the output or a pixel's weights by each value of a key."""
    from regard.viewer.panels import Panel, draw_gallery

    settings, title = next(iter(runs.values())), f"{Path(photo).name}: {name}"
    arguments = {caption: _own(run, image) for caption, run in runs.items()}
    if settings.weights_at is None:
        panels = [
            Panel(as_rgb(_filtered(name, image, own, quiet)), caption)
            for caption, own in arguments.items()
        ]
        if name != "texture":  # whose outputs have a size of their own
            panels.insert(0, Panel(as_rgb(image), "the photo"))
    else:
        at = parse_pixel(settings.weights_at, image)
        maps = {caption: _weights(name, image, at, own) for caption, own in arguments.items()}
        box = crop_of(list(maps.values()), at)
        panels = [_image_panel(image, at, box)]
        panels += [_weights_panel(weights, box, caption) for caption, weights in maps.items()]
        title = f"{title}, weights of pixel {at[0]},{at[1]}"
    rows = [panels[i : i + 4] for i in range(0, len(panels), 4)]
    write_atomically(settings.out, draw_gallery(title, rows))


def _apply(name: str, image: Tensor, settings: Any, title: str, quiet: bool) -> None:
    """Write the filtered photo, or a picture of the weights of one pixel."""
    own = _own(settings, image)
    if settings.weights_at is not None:
        _draw_weights(name, image, own, settings, title)
        return
    out = _filtered(name, image, own, quiet)
    stream = BytesIO()
    more = {"quality": 95} if settings.out.suffix.lower() not in (".png", ".bmp") else {}
    Image.fromarray(as_bytes(out)).save(stream, FORMATS[settings.out.suffix.lower()], **more)
    write_atomically(settings.out, stream.getvalue())


def _guide(path: Path | None, image: Tensor) -> Tensor:
    if path is None:
        raise UsageError("guide is missing; write guide=other.png, an image of the same size")
    guide = read(path)
    if guide.shape[-2:] != image.shape[-2:]:
        sizes = [f"{x.shape[-1]} x {x.shape[-2]}" for x in (guide, image)]
        raise UsageError(f"guide={path} is {sizes[0]}; expected the image's {sizes[1]} pixels")
    return guide


def _check_cost(name: str, image: Tensor, own: dict[str, Any]) -> None:
    """Refuse what would take days, or too much memory."""
    pixels = image.shape[-1] * image.shape[-2]
    if name == "texture" and 2 * image.numel() * own["patch"] ** 2 > MAX_COPIED:
        raise UsageError(
            f"a sample of {image.shape[-1]} x {image.shape[-2]} has too many patches of "
            f"patch={own['patch']}; cut a smaller sample"
        )
    window = own.get("window", 1)
    if window == "auto" and "sigma_s" in own:
        window = int(6 * own["sigma_s"]) + 1
    inside = window**2 if isinstance(window, int) else pixels if window == "full" else 1
    if name != "gaussian" and pixels * min(pixels, inside) > MAX_PAIRS:
        raise UsageError(
            f"window={own['window']} of {pixels:,} pixels is more than can be waited for; "
            "choose a smaller window, such as window=21, or a smaller image"
        )


def _weights(name: str, image: Tensor, at: Pixel, own: dict[str, Any]) -> Tensor:
    """The weights of a pixel under a filter."""
    if name not in WEIGHTS:
        raise UsageError(
            f"weights_at: {name} copies single pixels; choose from {', '.join(WEIGHTS)}"
        )
    _check_cost(name, image, own)
    return WEIGHTS[name](image, at, **own)


def _draw_weights(name: str, image: Tensor, own: dict[str, Any], settings: Any, title: str) -> None:
    from regard.viewer.panels import draw_gallery  # matplotlib takes a while to import

    at = parse_pixel(settings.weights_at, image)
    weights = _weights(name, image, at, own)
    box = crop_of([weights], at)
    rows = [[_image_panel(image, at, box), _weights_panel(weights, box, f"{name}: weights")]]
    write_atomically(settings.out, draw_gallery(f"{title}: weights of pixel {at[0]},{at[1]}", rows))


Crop = tuple[slice, slice]


def crop_of(maps: Sequence[Tensor], at: Pixel) -> Crop:
    """Return the crop around a pixel, of the image's proportions, that holds its weights."""
    high, wide = maps[0].shape
    reach = 0.04
    for weights in maps:
        rows, columns = (weights.abs() > VISIBLE * weights.abs().max()).nonzero().unbind(1)
        with suppress(RuntimeError):  # weights that are NaN
            down, right = (rows - at[1]).abs().max() / high, (columns - at[0]).abs().max() / wide
            reach = max(reach, float(torch.maximum(down, right)) * 1.1)
    spans = []
    for place, size in ((at[1], high), (at[0], wide)):
        side = min(size, max(3, 2 * round(reach * size) + 1))
        start = min(max(0, place - side // 2), size - side)
        spans.append(slice(start, start + side))
    return spans[0], spans[1]


def _image_panel(image: Tensor, at: Pixel, box: Crop, caption: str = "the image there"):
    """Return the panel of a crop of an image, with a frame around a pixel."""
    from regard.viewer.panels import Panel

    piece = image[..., *box]
    high, wide = piece.shape[-2:]
    frame = (at[0] - box[1].start) / wide, (at[1] - box[0].start) / high, 1 / wide, 1 / high
    return Panel(_enlarged(as_rgb(piece), image), caption, frame)


def _weights_panel(weights: Tensor, box: Crop, caption: str):
    """Return the panel of the weights in a crop."""
    from regard.viewer.panels import Panel, heat_map

    shown = heat_map(weights[box].numpy())
    top = float(weights.max())
    return Panel(_enlarged(shown, weights), f"{caption} ≤{top:.2g}")


def _enlarged(pixels: np.ndarray, image: Tensor) -> np.ndarray:
    """Resize a crop to the size of the whole image, so that panels are of one size."""
    high, wide = image.shape[-2:]
    return np.asarray(Image.fromarray(pixels).resize((wide, high), Image.Resampling.NEAREST))


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


def _compare(image: Tensor, settings: FilterCompareSettings, title: str, quiet: bool) -> Scores:
    """Draw a photo with added noise, and the output of each filter."""
    from regard.viewer.panels import Panel, draw_gallery

    assert settings.out is not None
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
        panels.append(_image_panel(given, at, box, f"noisy, around {settings.weights_at}"))
        panels += [_weights_panel(w, box, f"{name}: weights") for name, w in maps.items()]
    rows = [panels[i : i + 3] for i in range(0, len(panels), 3)]
    write_atomically(
        settings.out, draw_gallery(f"{title}, noise of {settings.sigma:g} added", rows)
    )
    return scores


def _grid(image: Tensor, settings: FilterGridSettings, title: str, quiet: bool) -> Scores:
    """Draw the bilateral filter over a grid of both sigmas, with the weights of one pixel."""
    from regard.viewer.panels import Panel, draw_gallery

    assert settings.out is not None
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
        rows.append([_weights_panel(maps[s, r], box, "weights of the pixel") for r in values])
    rows = [[Panel(as_rgb(small), "the photo"), _image_panel(small, at, box, "the pixel")], *rows]
    write_atomically(settings.out, draw_gallery(f"{title}: bilateral filter", rows))
    return {}


PICTURES: dict[str, Callable[[Tensor, Any, str, bool], Scores]] = {
    "compare": _compare,
    "grid": _grid,
}
