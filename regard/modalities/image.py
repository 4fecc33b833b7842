"""Images: files, arrays, and what PIL or datasets have of them."""

from pathlib import Path
from typing import Any

import numpy as np
from PIL.Image import Image
from torch import Tensor

from regard.data.image_format import SUFFIXES, ImageFormat
from regard.data.media import cell_file
from regard.errors import UsageError
from regard.modalities.base import Modality


class Images(Modality[np.ndarray]):
    """Images as bytes (channels, height, width)."""

    name, key, one, many = "image", "image", "image", "images"
    suffixes = frozenset(SUFFIXES)
    columns = ("image", "img", "path", "file", "filename", "file_name")

    def check(self, given: Any, settings: Any = None, format: Any = None) -> Any:
        """Return a path, an image or an array, or refuse what is none."""
        image = cell_file(given)
        if not isinstance(image, str | Path | bytes | np.ndarray | Tensor | Image):
            raise UsageError(f"{image!r:.60} is no image; give a path, an image or an array")
        return image

    def decode(self, given: Any, format: ImageFormat, notes: list[str] | None = None) -> np.ndarray:
        """Return the pixels of an image, in an array of its own, as PyTorch wants it."""
        return np.array(format.read(given, notes=notes))


IMAGE = Images()
