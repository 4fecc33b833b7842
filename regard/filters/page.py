"""A page that shows the weights of the pixel under the pointer, computed there by the formula."""

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import UsageError
from regard.files import write_atomically
from regard.filters.gaussian import window_radius
from regard.filters.nonlocal_means import PatchScore
from regard.filters.photo import as_bytes
from regard.filters.pixels import radius_of

_MAX_PIXELS = 1 << 20
_MAX_TERMS = 1 << 23  # of the weights of one pixel, so that a page can follow the pointer


def _gaussian(sigma: float, window: Any, border: str) -> dict[str, Any]:
    if border != "cut":
        raise UsageError(f"border={border}: a page shows the weights of border=cut alone")
    return {"radius": window_radius(sigma, window), "space": 1 / (2 * sigma**2), "content": 0.0}


def _bilateral(sigma_s: float, sigma_r: Any, window: Any, guide: Any = None) -> dict[str, Any]:
    return {
        "radius": window_radius(sigma_s, window, 3),
        "space": 1 / (2 * sigma_s**2),
        "content": 1 / (2 * float(sigma_r) ** 2),
    }


def _nonlocal_means(window: Any, **options: Any) -> dict[str, Any]:
    patches = PatchScore(**options)
    return {
        "radius": radius_of(window),
        "space": 0.0,
        "content": 1 / patches.h**2,
        "allowed": 2 * (patches.noise / patches.h) ** 2,
        "plain": patches.h if patches.distance == "plain" else 0.0,
        "patch": patches.patch,
        "patch_weights": patches.side_weights().tolist(),
        "mean": True,
    }


# filter -> the numbers of the formula in weights.js
_FORMULAS: dict[str, Callable[..., dict[str, Any]]] = {
    "gaussian": _gaussian,
    "bilateral": _bilateral,
    "joint_bilateral": _bilateral,
    "nonlocal_means": _nonlocal_means,
}


def check_page(name: str) -> None:
    """Refuse a filter whose weights no formula of two pixels gives."""
    if name not in _FORMULAS:
        raise UsageError(
            f"a page shows the weights of {', '.join(_FORMULAS)}; those of {name} come about step "
            "by step: draw them with weights_at=x,y out=weights.png"
        )


def formula(name: str, image: Tensor, own: Mapping[str, Any]) -> dict[str, Any]:
    """What weights.js computes the weights of any pixel from."""
    check_page(name)
    plain = {"allowed": 0.0, "plain": 0.0, "patch": 1, "patch_weights": [1.0], "mean": False}
    told = {**plain, **_FORMULAS[name](**own)}
    pixels = as_bytes(own.get("guide", image))
    high, wide, channels = *pixels.shape[:2], pixels[0, 0].size
    if told.pop("mean"):
        told["content"] /= channels
    side = max(wide, high) if told["radius"] is None else 2 * told["radius"] + 1
    terms = min(side, wide) * min(side, high) * told["patch"] ** 2 * channels
    if wide * high > _MAX_PIXELS or terms > _MAX_TERMS:
        raise UsageError(
            f"{wide} x {high} pixels with a window of {side} are too many for a page; "
            "give a smaller photo or window="
        )
    packed = base64.b64encode(pixels.tobytes()).decode()
    return {**told, "wide": wide, "high": high, "channels": channels, "pixels": packed}


def write_weights_page(
    name: str, image: Tensor, own: Mapping[str, Any], photo: str | Path, out: Path
) -> None:
    """Write the page of a photo and a filter."""
    from regard.viewer.html import write_page

    values = {
        "photo": formula(name, image, own),
        "title": f"{Path(photo).name}: {name}, the weights of a pixel",
        "captions": ["where the pixel under the pointer looks", "its window"],
    }
    write_atomically(out, write_page(values["title"], values, "weights.js"))
