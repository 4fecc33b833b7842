"""How images are prepared: preprocessor_config.json, in and out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import errors_in, read_json, write_json

_FILE = "preprocessor_config.json"
# Pillow's numbers of the ways to resize
_RESAMPLES = {0: "nearest", 1: "lanczos", 2: "bilinear", 3: "bicubic"}
_MOST_SIZE = 4096


def read_processor(folder: str | Path, image: int, channels: int) -> dict[str, Any]:
    """Return how a public checkpoint wants its images, as our config.json says it.

    A model without such a file was made for images of a size, with numbers from -1 to 1.
    """
    path = Path(folder) / _FILE
    theirs = read_json(path) if path.is_file() else {}
    with errors_in(path):
        return _read(theirs, image, channels)


def _read(theirs: Mapping[str, Any], image: int, channels: int) -> dict[str, Any]:
    rescale = theirs.get("rescale_factor", 1 / 255)
    usual = isinstance(rescale, int | float) and abs(rescale) < 1 and abs(rescale - 1 / 255) < 1e-6
    if theirs.get("do_rescale", True) is not True or not usual:
        raise UsageError(f"rescale_factor={str(rescale)[:40]} is not supported; only 1/255 is")
    made: dict[str, Any] = {"size": image, "channels": channels, "fit": "stretch"}
    size = theirs.get("size")
    if theirs.get("do_center_crop") is True:
        square = isinstance(size, Mapping) and "shortest_edge" not in size
        if size is not None:  # the middle is cut out of what it was resized to
            made["edge"] = _side(size)
        size = theirs.get("crop_size", size)
        made["fit"] = "stretch" if square else "crop"
    elif isinstance(size, Mapping) and "shortest_edge" in size:
        made["fit"] = "crop"
    if size is not None and theirs.get("do_resize", True) is not False:
        made["size"] = _side(size)
    resample = 2 if theirs.get("resample") is None else theirs["resample"]
    if type(resample) is not int or resample not in _RESAMPLES:
        known = ", ".join(f"{number} ({name})" for number, name in _RESAMPLES.items())
        raise UsageError(f"resample={str(resample)[:40]} is not supported; known are {known}")
    made["resample"] = _RESAMPLES[resample]
    if theirs.get("do_normalize", True) is not False:
        for ours, key, least in (("mean", "image_mean", 0), ("std", "image_std", 1e-6)):
            values = theirs.get(key, 0.5)
            values = values if isinstance(values, list) else [values] * channels
            numbers = [float(value) for value in values if isinstance(value, int | float)]
            if len(numbers) != channels or not all(least <= abs(x) <= 1000 for x in numbers):
                raise UsageError(f"{key}={str(values)[:60]}; expected {channels} numbers")
            made[ours] = numbers
    return made


def _side(size: Any) -> int:
    """Return the side of the square to which images are resized."""
    sides = [size]
    if isinstance(size, Mapping):
        sides = [size[key] for key in ("height", "width", "shortest_edge") if key in size]
    side = sides[0] if sides else None
    if any(other != side for other in sides) or not isinstance(side, int) or isinstance(side, bool):
        raise UsageError(f"size={str(size)[:60]} is not supported; only squares are")
    if not 0 < side <= _MOST_SIZE:
        raise UsageError(f"size={side}; expected 1 to {_MOST_SIZE} pixels")
    return side


def write_processor(folder: Path, image: Mapping[str, Any]) -> None:
    """Write how images are prepared."""
    side = image.get("size")
    square = {"height": side, "width": side}
    numbers = {ours: number for number, ours in _RESAMPLES.items()}
    crop, edge = image.get("fit", "stretch") == "crop", image.get("edge") or side
    cut = crop or image.get("edge") is not None
    theirs: dict[str, Any] = {
        "image_processor_type": "BitImageProcessor" if cut else "ViTImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": edge} if crop else {"height": edge, "width": edge},
        "resample": numbers.get(str(image.get("resample")), 2),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": bool(image.get("mean")),
    }
    if cut:
        theirs |= {"do_center_crop": True, "crop_size": square}
    if image.get("mean"):
        theirs |= {"image_mean": list(image["mean"]), "image_std": list(image["std"])}
    write_json(folder / _FILE, theirs)
