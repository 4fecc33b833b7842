"""Looking at what a model makes of an image: what is asked, and of which piece of a photo."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from regard.attention.watch import watch
from regard.data.image import ImageFormat, open_image, upright
from regard.errors import UsageError, lookup
from regard.viewer.placement import parse_query_point
from regard.viewer.settings import ImageLookSettings

SHOWN = 512  # pixels to which a photo is kept to be looked at


def check_kind(image: Any) -> None:
    """Refuse what cannot be an image."""
    if not isinstance(image, str | Path | np.ndarray | Tensor | Image):
        raise UsageError(f"{image!r:.60} is no image; give a path, an image or an array")


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
    from regard.viewer.image import VIEWS, image_picture

    view = lookup("view", how.view, VIEWS)
    check_kind(image)
    if how.threads:
        torch.set_num_threads(how.threads)
    format = replace(format, size=how.image or format.size)
    assert format.size is not None
    wide, high = upright(open_image(image)).size
    query = parse_query_point(how.at, (wide, high), format.seen(wide, high))
    pixels, photo, name = photo_of(format, image)
    with watch(model) as maps:
        told = answer(pixels)
    told = {"title": name, "source": name, **told}
    return image_picture(view, model, maps, (format.size, format.size), photo, query, **told)


def photo_of(format: ImageFormat, image: Any) -> tuple[Tensor, np.ndarray, str]:
    """Return what a model sees of an image (1, c, h, w), that as sharp as it is, and its name."""
    assert format.size is not None
    pixels = torch.tensor(format.read(image)).unsqueeze(0)
    side = max(format.size, min(SHOWN, *upright(open_image(image)).size))
    photo = replace(format, size=side).read(image).transpose(1, 2, 0)
    name = Path(image).name if isinstance(image, str | Path) else "image"
    return pixels, photo[..., 0] if photo.shape[2] == 1 else photo, name
