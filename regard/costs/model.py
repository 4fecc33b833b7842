"""Any model of the package by its name, without its weights, and an input for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from regard.errors import UsageError, nearest
from regard.modalities import MODALITIES
from regard.modalities.base import Modality
from regard.models import MODELS, family, info_of, preset, preset_family, preset_names
from regard.models.folder import model_config, on_meta, read_config
from regard.models.protocols import ModelConfig
from regard.pretrained.folder import is_foreign, read_foreign

_PAIRS = {"pair": "text+text"}


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


def build(kind: str, config: ModelConfig) -> nn.Module:
    """Build a model of a family on the meta device."""
    with on_meta():
        return family(kind)[1](config)


def modality_read(reads: str) -> tuple[Modality[Any], bool] | None:
    """Modality that a family reads by its declaration, and whether a text is read beside it."""
    name, _, beside = _PAIRS.get(reads, reads).partition("+")
    return (MODALITIES[name], bool(beside)) if name in MODALITIES else None


class Reading:
    """The input of a model: images of a size, texts, series or sounds of a length.

    What a family `reads` names the modality; after it "+text" says that a text is read beside it.
    """

    def __init__(self, name: str, config: Any, batch: int, given: Mapping[str, int | None]):
        declared = info_of(config)
        read = modality_read(declared.reads) if declared else None
        if declared is None or read is None:
            raise UsageError(
                f"{name} reads no images, sounds, series or texts; its cost is not known"
            )
        self.config, self.batch = config, batch
        self.inputs, self.beside = read
        self.one, self.many = self.inputs.words(self.beside)
        key = self.inputs.size_key
        for other, value in given.items():
            if value is not None and other != key:
                raise UsageError(f"{other}={value}: {name} reads {self.many}; set {key} instead")
        self.size = given.get(key) or self.inputs.usual_size(config, declared.cost_length)

    def __call__(self, times: int = 1) -> tuple[Tensor, ...]:
        """Return the inputs, each side or text so many times as long."""
        return self.inputs.example(self.config, self.batch, self.size * times, self.beside)

    def amount(self, times: int = 1) -> int:
        """Return how many pixels an image, tokens a text, or frames a sound then has."""
        return (self.size * times) ** self.inputs.sides

    def show(self, times: int = 1) -> str:
        """Name the size in words."""
        sides = [str(self.size * times)] * self.inputs.sides
        return f"{'x'.join(sides)} {self.inputs.unit}"
