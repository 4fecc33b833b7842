"""The former home of images, their format and their files, for imports that still name it."""

from regard.data.image_files import (
    BROKEN,
    MOST_STORED,
    ImageFiles,
    ImageOptions,
    find_image_parts,
    find_images,
    holds_images,
    kind_of_set,
    read_idx,
)
from regard.data.image_format import SUFFIXES, BrokenImage, ImageFormat, open_image, upright
from regard.data.images import ImageData, Images, load_images

Broken = BrokenImage

__all__ = [
    "BROKEN",
    "MOST_STORED",
    "SUFFIXES",
    "Broken",
    "BrokenImage",
    "ImageData",
    "ImageFiles",
    "ImageFormat",
    "ImageOptions",
    "Images",
    "find_image_parts",
    "find_images",
    "holds_images",
    "kind_of_set",
    "load_images",
    "open_image",
    "read_idx",
    "upright",
]
