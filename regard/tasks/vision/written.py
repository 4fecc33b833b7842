"""Images that a run writes: where to, and refusals of what is no image."""

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from regard.data.image_format import IMAGE_SUFFIXES
from regard.errors import UsageError
from regard.files import write_atomically


def is_image_file(out: str) -> bool:
    """Tell whether a name is that of an image, and of no folder."""
    return Path(out).suffix.lower() in IMAGE_SUFFIXES and not Path(out).is_dir()


def check_out(out: str | None) -> None:
    """Refuse files to write that are no images."""
    suffix = Path(out).suffix.lower() if out else ""
    if suffix and suffix not in IMAGE_SUFFIXES and not Path(str(out)).is_dir():
        raise UsageError(
            f"out={out} cannot be written as an image; end it in "
            f"{', '.join(sorted(IMAGE_SUFFIXES))}, or name a folder"
        )


def check_count(out: str | None, count: int) -> None:
    """Refuse one file for several images."""
    if out and is_image_file(out) and count > 1:
        raise UsageError(f"out={out} is one file for several images; name a folder")


def write_answer(pixels: np.ndarray | Image.Image, out: str | None, given: Any, number: int) -> str:
    """Write what was made of an image where told; returns the file, or nothing if not told."""
    if not out:
        return ""
    name = Path(given).stem if isinstance(given, str | Path) else str(number + 1)
    path = Path(out) if is_image_file(out) else Path(out) / f"{name}.png"
    write_image(pixels, path)
    return str(path)


def write_image(pixels: np.ndarray | Image.Image, path: Path) -> None:
    """Write bytes as an image of the kind that the name says."""
    stream = io.BytesIO()
    kind = Image.registered_extensions()[path.suffix.lower()]
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    image.save(stream, kind)
    write_atomically(path, stream.getvalue())
