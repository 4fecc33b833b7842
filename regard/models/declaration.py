"""The declaration of a model family."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regard.errors import lookup
from regard.layers.block import size_field
from regard.models.protocols import ModelConfig


def with_changes(config: ModelConfig, changes: Mapping[str, Any]) -> Any:
    """Config with some fields replaced, those of nested configs by dotted names."""
    own = {name: value for name, value in changes.items() if "." not in name}
    inner: dict[str, dict[str, Any]] = {}
    for name, value in changes.items():
        if "." in name:
            outer, _, rest = name.partition(".")
            inner.setdefault(outer, {})[rest] = value
    nested = {name: with_changes(getattr(config, name), some) for name, some in inner.items()}
    return replace(config, **own, **nested)


def size_table(fields: str, rows: Mapping[str, tuple], **fixed: Any) -> dict[str, dict[str, Any]]:
    """Changes of each size: a row of values for the fields, and what all have."""
    names = fields.split()
    return {size: {**fixed, **dict(zip(names, row, strict=True))} for size, row in rows.items()}


@dataclass(frozen=True)
class EncoderDecoderConfig:
    """The sizes that every encoder-decoder of two texts has."""

    source_vocab: int = size_field(
        8000, 10_000_000, "source vocabulary; a training takes that of the tokenizer"
    )
    target_vocab: int = size_field(
        8000, 10_000_000, "target vocabulary; a training takes that of the tokenizer"
    )
    encoder_depth: int = size_field(6, 1000, "encoder layers")
    decoder_depth: int = size_field(6, 1000, "decoder layers")


@dataclass(frozen=True)
class FamilyInfo:
    """The declaration of a family: its input, the tasks it serves, its presets and sizes.

    `tasks` holds for each task the config fields that the task sets, such as a head. The first of
    the presets, members of the family by name, is the usual one; `resize` gives a preset one of
    the sizes. `pretrainers` names, by objective, what trains this image encoder alone.
    """

    reads: str  # text, pair, image, image+text, or sound
    tasks: Mapping[str, Mapping[str, Any]]
    presets: Mapping[str, Any]
    sizes: Mapping[str, Any]
    resize: Callable[[Any, Any], Any] = with_changes
    pretrainers: Mapping[str, str] = field(default_factory=dict)
    cost_length: int = 1024  # tokens or frames that `cost` reads, unless told or fewer are taken

    def preset(self, size: str, member: str | None = None) -> Any:
        """Config of a member in a size; a member's name as the size is its own size."""
        if size in self.presets:
            return self.presets[size]
        config = lookup("preset", member or next(iter(self.presets)), self.presets)
        return self.resize(config, lookup("size", size, self.sizes))
