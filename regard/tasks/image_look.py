"""Looking at what a model makes of an image: what is asked, and of which piece of a photo."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from regard.attention.watch import watch
from regard.data.image import ImageFormat, open_image, upright
from regard.errors import UsageError, lookup
from regard.settings import setting

SHOWN = 512  # pixels to which a photo is kept to be looked at


@dataclass(frozen=True)
class ImageLookSettings:
    """What to see of how an image is labelled."""

    view: str = setting("attention", "attention, rollout (up to each layer) or filters")
    at: str = setting(
        "class", "who looks: class, mean (of all places), or a pixel x,y of the photo"
    )
    candidates: int = setting(5, "labels to tell", min=1, max=100_000)
    image: int | None = setting(None, "pixels that images are brought to", min=1, max=4096)
    threads: int | None = setting(None, "processor threads", min=1, max=1024)


def check_kind(image: Any) -> None:
    """Refuse what cannot be an image."""
    if not isinstance(image, str | Path | np.ndarray | Tensor | Image):
        raise UsageError(f"{image!r:.60} is no image; give a path, an image or an array")


def spot_of(
    at: str, size: tuple[int, int], seen: tuple[float, float, float, float]
) -> Literal["class", "mean"] | tuple[float, float]:
    """Read who looks; a pixel becomes a place from 0 to 1 on what the model sees of a photo."""
    word = at.strip().lower()
    if word == "class" or word == "mean":
        return word
    numbers = re.fullmatch(r"(\d{1,6})\s*[,x ]\s*(\d{1,6})", word)
    if numbers is None:
        raise UsageError(f"at={at:.40}; expected class, mean, or a pixel such as at=120,80")
    x, y = int(numbers[1]), int(numbers[2])
    left, top, right, bottom = seen
    if x >= size[0] or y >= size[1]:
        raise UsageError(
            f"at={at} is outside of the photo; its pixels are 0,0 to {size[0] - 1},{size[1] - 1}"
        )
    across, down = (x + 0.5 - left) / (right - left), (y + 0.5 - top) / (bottom - top)
    if not (0 <= across < 1 and 0 <= down < 1):
        raise UsageError(
            f"at={at} is not seen by the model, which takes {math.ceil(left)},{math.ceil(top)} to "
            f"{math.ceil(right) - 1},{math.ceil(bottom) - 1} of the photo; choose a pixel in there"
        )
    return across, down


def picture_of(
    model: Any,
    format: ImageFormat,
    image: Any,
    how: ImageLookSettings,
    answer: Callable[[Tensor], dict[str, Any]],
):
    """Watch a model while it answers the bytes (1, c, h, w) of an image; gather where it looked.

    The answer is what the picture is to tell of it.
    """
    from regard.viewer.image import VIEWS, show

    view = lookup("view", how.view, VIEWS)
    check_kind(image)
    if how.threads:
        torch.set_num_threads(how.threads)
    format = replace(format, size=how.image or format.size)
    assert format.size is not None
    wide, high = upright(open_image(image)).size
    spot = spot_of(how.at, (wide, high), format.seen(wide, high))
    pixels, photo, name = photo_of(format, image)
    with watch(model) as maps:
        told = answer(pixels)
    told = {"title": name, "source": name, **told}
    return show(view, model, maps, (format.size, format.size), photo, spot, **told)


def photo_of(format: ImageFormat, image: Any) -> tuple[Tensor, np.ndarray, str]:
    """Return what a model sees of an image (1, c, h, w), that as sharp as it is, and its name."""
    assert format.size is not None
    pixels = torch.tensor(format.read(image)).unsqueeze(0)
    side = max(format.size, min(SHOWN, *upright(open_image(image)).size))
    photo = replace(format, size=side).read(image).transpose(1, 2, 0)
    name = Path(image).name if isinstance(image, str | Path) else "image"
    return pixels, photo[..., 0] if photo.shape[2] == 1 else photo, name
