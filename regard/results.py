"""Results that can be read by name: `report.steps` and `report["steps"]` are the same."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from regard.errors import UsageError, nearest


class Named:
    """A result, a dataclass, whose fields can also be read by name in brackets."""

    def keys(self) -> list[str]:
        """Return all names that there are."""
        return [field.name for field in fields(self)]  # type: ignore[arg-type]

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            what, known = type(self).__name__, self.keys()
            more = " (run gives a list of answers for a list)" if isinstance(name, int) else ""
            raise UsageError(
                f"{what} has no {name!r}{more}; choose from {', '.join(known)}."
                + nearest(str(name), known)
            )
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in self.keys()


def key_of(name: str) -> str:
    """Return how the name of a score is written as a key: that of macro F1 is macro_f1."""
    return name.lower().replace(" ", "_").replace("-", "_")


class Scored(Named):
    """A result with scores, which are found by name in any spelling: result["bleu"]."""

    def named_scores(self) -> Iterable[tuple[str, float]]:
        """Return all scores by name."""
        raise NotImplementedError

    def keys(self) -> list[str]:
        """Return the names of all scores, and then those of the fields."""
        return [*(key_of(name) for name, _ in self.named_scores()), *super().keys()]

    def __repr__(self) -> str:
        scores = ", ".join(f"{key_of(name)}={value:.4g}" for name, value in self.named_scores())
        return f"{type(self).__name__}({scores})"

    def __getitem__(self, name: str) -> Any:
        found = {key_of(known): value for known, value in self.named_scores()}
        key = key_of(name) if isinstance(name, str) else name
        return found[key] if key in found else super().__getitem__(name)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Write rows as a table whose columns stand below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])
