"""Photos as tensors, and panels of photos and weights."""

import re
from collections.abc import Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regard.data.image_format import ImageFormat
from regard.errors import UsageError
from regard.files import write_atomically
from regard.filters.pixels import Pixel, check_pixel

_FORMATS = {".png": "PNG", ".jpg": "JPEG", ".jpeg": "JPEG", ".webp": "WEBP", ".bmp": "BMP"}
_VISIBLE = 0.01  # of the largest weight: what a picture of weights must show

Crop = tuple[slice, slice]


def read_photo(photo: str | Path) -> Tensor:
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


def as_bytes(image: Tensor) -> np.ndarray:
    """Return an image as bytes (h, w) or (h, w, 3)."""
    pixels = (255 * image.clamp(0, 1)).round().to(torch.uint8).permute(1, 2, 0).numpy()
    return pixels[..., 0] if pixels.shape[2] == 1 else pixels


def check_suffix(out: Path, *, photo: bool) -> None:
    """Refuse a file that is no kind of photo, or of picture."""
    kinds = _FORMATS if photo else [".png"]
    if out.suffix.lower() not in kinds:
        raise UsageError(f"out={out}: unknown kind of image; end it in {' or '.join(kinds)}")


def save_photo(image: Tensor, out: Path) -> None:
    """Write an image in the format that the name of the file says."""
    stream, suffix = BytesIO(), out.suffix.lower()
    more = {"quality": 95} if suffix not in (".png", ".bmp") else {}
    Image.fromarray(as_bytes(image)).save(stream, _FORMATS[suffix], **more)
    write_atomically(out, stream.getvalue())


def as_rgb(image: Tensor) -> np.ndarray:
    """Return an image as bytes (h, w, 3)."""
    return as_bytes(image.expand(3, -1, -1))


def crop_of(maps: Sequence[Tensor], at: Pixel) -> Crop:
    """Return the crop around a pixel, of the image's proportions, that holds its weights."""
    high, wide = maps[0].shape
    reach = 0.04
    for weights in maps:
        rows, columns = (weights.abs() > _VISIBLE * weights.abs().max()).nonzero().unbind(1)
        with suppress(RuntimeError):  # weights that are NaN
            down, right = (rows - at[1]).abs().max() / high, (columns - at[0]).abs().max() / wide
            reach = max(reach, float(torch.maximum(down, right)) * 1.1)
    spans = []
    for place, size in ((at[1], high), (at[0], wide)):
        side = min(size, max(3, 2 * round(reach * size) + 1))
        start = min(max(0, place - side // 2), size - side)
        spans.append(slice(start, start + side))
    return spans[0], spans[1]


def image_panel(image: Tensor, at: Pixel, box: Crop, caption: str = "the image there"):
    """Return the panel of a crop of an image, with a frame around a pixel."""
    from regard.viewer.panels import Panel

    piece = image[..., *box]
    high, wide = piece.shape[-2:]
    frame = (at[0] - box[1].start) / wide, (at[1] - box[0].start) / high, 1 / wide, 1 / high
    return Panel(_enlarged(as_rgb(piece), image), caption, frame)


def weights_panel(weights: Tensor, box: Crop, caption: str):
    """Return the panel of the weights in a crop."""
    from regard.viewer.panels import Panel, heat_map

    shown = heat_map(weights[box].numpy())
    top = float(weights.max())
    return Panel(_enlarged(shown, weights), f"{caption} ≤{top:.2g}")


def _enlarged(pixels: np.ndarray, image: Tensor) -> np.ndarray:
    """Resize a crop to the size of the whole image, so that panels are of one size."""
    high, wide = image.shape[-2:]
    return np.asarray(Image.fromarray(pixels).resize((wide, high), Image.Resampling.NEAREST))
