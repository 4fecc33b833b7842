"""Results whose fields can be read as items too: `report.steps` and `report["steps"]`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from regard.errors import UsageError, nearest


class Named:
    """A dataclass whose fields can also be read as items."""

    def keys(self) -> list[str]:
        """Names of all fields."""
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
    """Key of a score: macro_f1 for macro F1."""
    return name.lower().replace(" ", "_").replace("-", "_")


class Scored(Named):
    """A result with scores, which are read by name: result["BLEU"], result.bleu."""

    def named_scores(self) -> Iterable[tuple[str, float]]:
        """All scores by name."""
        raise NotImplementedError

    def keys(self) -> list[str]:
        """Names of all scores, and then those of the fields."""
        return [*(key_of(name) for name, _ in self.named_scores()), *super().keys()]

    def __repr__(self) -> str:
        scores = ", ".join(f"{key_of(name)}={value:.4g}" for name, value in self.named_scores())
        return f"{type(self).__name__}({scores})"

    def __getattr__(self, name: str) -> float:
        own = name.startswith("_") or name in Named.keys(self)  # missing while it is made
        scores = {} if own else self._by_key()
        if name not in scores:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return scores[name]

    def _by_key(self) -> dict[str, float]:
        return {key_of(known): value for known, value in self.named_scores()}

    def __getitem__(self, name: str) -> Any:
        scores = self._by_key()
        key = key_of(name) if isinstance(name, str) else name
        return scores[key] if key in scores else super().__getitem__(name)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows, the head first, as an aligned Markdown table."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(f"{c:<{w}}" for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (w + 2) for w in widths) + "|", *lines[1:]])


@dataclass(frozen=True)
class Saved(Named):
    """A file or folder that was written, and what was found, if that is shown there."""

    path: str
    findings: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return "\n\n".join([*map(str, self.findings), f"wrote {self.path}"])

    def to_dict(self) -> dict[str, Any]:
        """Fields of a JSON line."""
        found = {"findings": [one.to_dict() for one in self.findings]} if self.findings else {}
        return {"path": self.path, **found}
