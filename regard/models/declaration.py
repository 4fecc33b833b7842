"""What a family of models says about itself."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

from regard.errors import lookup


def with_changes(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a config with some fields replaced; those of nested configs are given as mappings."""
    new = {}
    for name, value in changes.items():
        old = getattr(config, name)
        nested = is_dataclass(old) and isinstance(value, Mapping)
        new[name] = with_changes(old, value) if nested else value
    return replace(config, **new)


@dataclass(frozen=True)
class FamilyInfo:
    """The declaration of a family: its input, the tasks it serves, its presets and sizes.

    `tasks` holds for each task the config fields that the task sets, such as a head. The first of
    the presets, members of the family by name, is the usual one; `resize` gives a preset one of
    the sizes. `pretrainers` names, by objective, what trains this encoder of images alone.
    """

    reads: str  # text, pair, image, or image+text
    tasks: Mapping[str, Mapping[str, Any]]
    presets: Mapping[str, Any]
    sizes: Mapping[str, Any]
    resize: Callable[[Any, Any], Any] = with_changes
    pretrainers: Mapping[str, str] = field(default_factory=dict)

    def preset(self, size: str, member: str | None = None) -> Any:
        """Return the config of a member in a size; a member's name as the size is its own size."""
        if size in self.presets:
            return self.presets[size]
        config = lookup("preset", member or next(iter(self.presets)), self.presets)
        return self.resize(config, lookup("size", size, self.sizes))
