"""Any model of the package by its name, without its weights, and an input for it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UsageError, nearest
from regard.models import MODELS, family, info_of, preset, preset_family, preset_names
from regard.models.folder import model_config, on_meta, read_config
from regard.pretrained.folder import is_foreign, read_foreign

CAPTION = 16  # tokens of a caption
TRANSCRIPT = 64  # tokens of a transcript


def named(name: str, size: str | None = None) -> tuple[str, Any]:
    """Return the family and the config that a family's or a preset's name means, in a size."""
    kind = name if name in MODELS else preset_family(name)
    if kind is None:
        names = [*MODELS, *(one for each in MODELS for one in preset_names(each))]
        raise UsageError(
            f"no model '{name}': neither a folder, a starter, a family ({', '.join(MODELS)}) nor "
            f"a preset of one.{nearest(name, names)}"
        )
    member = name if name in preset_names(kind) else None
    if size is not None:
        return kind, preset(kind, size, member)
    return kind, preset(kind, member) if member else family(kind)[0]()


def described(folder: Path) -> tuple[str, Any]:
    """Return the family and the config of a folder, ours or a public checkpoint's."""
    if is_foreign(folder):
        format, _, config = read_foreign(folder)
        return format.family, config
    read = read_config(folder)
    return read["family"], model_config(read, folder / "config.json")


def build(kind: str, config: Any) -> nn.Module:
    """Build a model of a family on the meta device."""
    with on_meta():
        return family(kind)[1](config)


def _images(config: Any, batch: int, size: int) -> tuple[Tensor, ...]:
    return (torch.empty(batch, config.channels, size, size, device="meta"),)


def _text(config: Any, batch: int, size: int) -> tuple[Tensor, ...]:
    return (torch.empty(batch, size, dtype=torch.long, device="meta"),)


def _pair(config: Any, batch: int, size: int) -> tuple[Tensor, ...]:
    return _text(config, batch, size) * 2


def _captioned(config: Any, batch: int, size: int) -> tuple[Tensor, ...]:
    return (*_images(config, batch, size), *_text(config, batch, min(config.max_length, CAPTION)))


def _series(config: Any, batch: int, size: int) -> tuple[Tensor, ...]:
    sides = [size] * len(config.chunk)
    return (torch.empty(batch, *sides, config.channels, device="meta"),)


def _sound(config: Any, batch: int, size: int) -> tuple[Tensor, ...]:
    sound = torch.empty(batch, size, config.mels, device="meta")
    if not config.decoder_depth:
        return (sound,)
    lengths = torch.empty(batch, dtype=torch.long, device="meta")
    return sound, lengths, *_text(config, batch, min(config.max_length, TRANSCRIPT))


# what a family reads -> the setting of how much, one and many of what it is, and how to make it
Read = tuple[str, str, str, Callable[..., tuple[Tensor, ...]]]
INPUT_MAKERS: dict[str, Read] = {
    "image": ("image", "image", "images", _images),
    "image+text": ("image", "image", "images", _captioned),
    "series": ("length", "series", "series", _series),
    "pair": ("length", "pair", "pairs", _pair),
    "sound": ("length", "sound", "sounds", _sound),
    "text": ("length", "text", "texts", _text),
}


class Reading:
    """The input of a model: images of a size, or texts or sounds of a length."""

    def __init__(self, name: str, config: Any, batch: int, given: Mapping[str, int | None]):
        declared = info_of(config)
        if declared is None or declared.reads not in INPUT_MAKERS:
            raise UsageError(
                f"{name} reads no images, sounds, series or texts; its cost is not known"
            )
        self.config, self.batch = config, batch
        self.key, self.one, self.many, self.make = INPUT_MAKERS[declared.reads]
        for key, value in given.items():
            if value is not None and key != self.key:
                raise UsageError(f"{key}={value}: {name} reads {self.many}; set {self.key} instead")
        default = declared.cost_length
        if self.key == "image":
            default = config.image
        elif self.one != "sound":
            default = min(config.max_length, default)
        self.size = given.get(self.key) or default

    def __call__(self, times: int = 1) -> tuple[Tensor, ...]:
        """Return the inputs, each side or text so many times as long."""
        return self.make(self.config, self.batch, self.size * times)

    def amount(self, times: int = 1) -> int:
        """Number of pixels of an image, tokens of a text, or frames of a sound at that size."""
        return (self.size * times) ** (2 if self.key == "image" else 1)

    def show(self, times: int = 1) -> str:
        """Name the size in words."""
        size = self.size * times
        unit = {"series": "steps", "sound": "frames"}.get(self.one, "tokens")
        return f"{size}x{size} pixels" if self.key == "image" else f"{size} {unit}"
