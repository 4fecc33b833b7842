"""`regard filter`: a filter on a photo, with one value of a key or several."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, make_dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from torch import Tensor

from regard.errors import UsageError, lookup
from regard.files import write_atomically
from regard.filters import FILTERS, WEIGHTS
from regard.filters.page import check_page, write_weights_page
from regard.filters.photo import (
    as_rgb,
    check_suffix,
    crop_of,
    image_panel,
    parse_pixel,
    read_photo,
    save_photo,
    weights_panel,
)
from regard.filters.pixels import Pixel
from regard.settings import fill, setting

_MAX_PAIRS = 2**40  # of pixels that are compared: some hours
_MAX_VALUES = 12  # of one key, each drawn as a panel

# parameter of a filter -> its help and bounds
_KEYS: dict[str, tuple[str, dict[str, Any]]] = {
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
}


@dataclass(frozen=True)
class FilterSettings:
    """Settings of every filter."""

    out: Path | None = setting(
        None, "image to write: .png, .jpg, .webp or .bmp; .html: weights under the pointer"
    )
    weights_at: str | None = setting(None, "draw the weights of this pixel x,y instead")
    threads: int | None = setting(None, "CPU threads", min=1, max=1024)


def settings_of(name: str) -> type:
    """Return the settings class of a filter: its own keywords, and those of all."""
    hints = get_type_hints(FILTERS[name])
    own = []
    for key, one in inspect.signature(FILTERS[name]).parameters.items():
        if one.kind is one.KEYWORD_ONLY and key in _KEYS:
            help, bounds = _KEYS[key]
            required = one.default is one.empty
            kind = Path | None if hints[key] is Tensor else hints[key]
            default = None if required else one.default
            own.append((key, kind, setting(default, help, **bounds)))
    return make_dataclass("Settings", own, bases=(FilterSettings,), frozen=True)


# filter -> its settings class
_SETTINGS: dict[str, type] = {name: settings_of(name) for name in FILTERS}


def settings_class(name: str | None, values: Mapping[str, Any]) -> type:
    """Settings class of a filter, or without a name the keys that all have."""
    return FilterSettings if name is None else lookup("filter", name, _SETTINGS)


def filter_photo(name: str, photo: str | Path, given: Mapping[str, Any]) -> Path:
    """Filter a photo by a name of FILTERS, and return the path of what is written."""
    kind = lookup("filter", name, _SETTINGS)
    key, values = listed_key(given)
    runs: list[Any] = [fill(kind, {**given, key: value} if key else given) for value in values]
    settings = runs[0]
    out = settings.out
    if out is None:
        raise UsageError(f"out is missing; write for example out={name}.png")
    alone = settings.weights_at is None and not key
    page = alone and out.suffix.lower() in (".html", ".htm")
    if page:
        check_page(name)
    else:
        check_suffix(out, photo=alone)
    if settings.threads:
        torch.set_num_threads(settings.threads)
    image = read_photo(photo)
    with torch.no_grad():
        if page:
            write_weights_page(name, image, _own(settings, image), photo, out)
        elif alone:
            save_photo(_filtered(name, image, _own(settings, image)), out)
        else:
            captions = [f"{key}={getattr(run, key)}" if key else f"{name}: weights" for run in runs]
            _draw_row(name, image, dict(zip(captions, runs, strict=True)), photo)
    return out


def listed_key(given: Mapping[str, Any]) -> tuple[str, Sequence[Any]]:
    """The key of a filter that has several values, such as steps=10,20,30, and these values."""
    several = {}
    for key, value in given.items():
        value = value.split(",") if isinstance(value, str) else value
        numeric = bool(_KEYS.get(key, ("", {}))[1])
        if numeric and isinstance(value, list | tuple) and len(value) > 1:
            several[key] = value
    if len(several) > 1:
        raise UsageError(f"{' and '.join(several)} have several values; only one key may")
    key, values = next(iter(several.items()), ("", [None]))
    if len(values) > _MAX_VALUES:
        raise UsageError(f"{key}= has {len(values)} values; give at most {_MAX_VALUES}")
    return key, values


def _own(settings: FilterSettings, image: Tensor) -> dict[str, Any]:
    """The arguments of a filter among its settings."""
    common = {one.name for one in fields(FilterSettings)}
    own = {
        one.name: getattr(settings, one.name) for one in fields(settings) if one.name not in common
    }
    return own | ({"guide": _guide(own["guide"], image)} if "guide" in own else {})


def _filtered(name: str, image: Tensor, own: dict[str, Any]) -> Tensor:
    """Filter an image, unless that would take days."""
    _check_cost(name, image, own)
    return FILTERS[name](image, **own)


def _draw_row(name: str, image: Tensor, runs: Mapping[str, Any], photo: str | Path) -> None:
    """Draw the photo, and beside it the output or a pixel's weights by each value of a key."""
    from regard.viewer.panels import Panel, draw_gallery  # matplotlib takes a while to import

    settings, title = next(iter(runs.values())), f"{Path(photo).name}: {name}"
    arguments = {caption: _own(run, image) for caption, run in runs.items()}
    if settings.weights_at is None:
        panels = [Panel(as_rgb(image), "the photo")]
        panels += [
            Panel(as_rgb(_filtered(name, image, own)), caption)
            for caption, own in arguments.items()
        ]
    else:
        at = parse_pixel(settings.weights_at, image)
        maps = {caption: _weights(name, image, at, own) for caption, own in arguments.items()}
        box = crop_of(list(maps.values()), at)
        panels = [image_panel(image, at, box)]
        panels += [weights_panel(weights, box, caption) for caption, weights in maps.items()]
        title = f"{title}, weights of pixel {at[0]},{at[1]}"
    rows = [panels[i : i + 4] for i in range(0, len(panels), 4)]
    write_atomically(settings.out, draw_gallery(title, rows))


def _guide(path: Path | None, image: Tensor) -> Tensor:
    if path is None:
        raise UsageError("guide is missing; write guide=other.png, an image of the same size")
    guide = read_photo(path)
    if guide.shape[-2:] != image.shape[-2:]:
        sizes = [f"{x.shape[-1]} x {x.shape[-2]}" for x in (guide, image)]
        raise UsageError(f"guide={path} is {sizes[0]}; expected the image's {sizes[1]} pixels")
    return guide


def _check_cost(name: str, image: Tensor, own: dict[str, Any]) -> None:
    """Refuse what would take days, or too much memory."""
    pixels = image.shape[-1] * image.shape[-2]
    window = own.get("window", 1)
    if window == "auto" and "sigma_s" in own:
        window = int(6 * own["sigma_s"]) + 1
    inside = window**2 if isinstance(window, int) else pixels if window == "full" else 1
    if name != "gaussian" and pixels * min(pixels, inside) > _MAX_PAIRS:
        raise UsageError(
            f"window={own['window']} of {pixels:,} pixels is more than can be waited for; "
            "choose a smaller window, such as window=21, or a smaller image"
        )


def _weights(name: str, image: Tensor, at: Pixel, own: dict[str, Any]) -> Tensor:
    """The weights of a pixel under a filter."""
    _check_cost(name, image, own)
    return WEIGHTS[name](image, at, **own)
