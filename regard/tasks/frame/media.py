"""What tasks on files share, be they images or sounds: the codec, and files that are broken."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError
from regard.metrics.baselines import Baselines
from regard.metrics.labels import one_hot
from regard.metrics.outliers import Outliers
from regard.modalities.base import Modality
from regard.settings import fill_checked
from regard.tasks.labels.classifier import JudgedUnits
from regard.tasks.labels.decision import ONE_LABEL, Decision


@dataclass(frozen=True)
class MediaCodec:
    """The format of a model's files, its labels or tokenizer, and what else lies beside it."""

    kind: ClassVar[str]  # the key of the format in config.json
    modality: ClassVar[Modality[Any]]

    format: Any
    labels: list[str] = field(default_factory=list)
    baselines: Baselines | None = None
    tokenizer: Tokenizer | None = None
    outliers: Outliers | None = None  # what is given no label
    more: Mapping[str, Any] = field(default_factory=dict)  # further facts of config.json

    def save(self, folder: Path) -> None:
        """Write the baselines and the tokenizer."""
        if self.baselines is not None:
            self.baselines.save(folder)
        if self.tokenizer is not None:
            self.tokenizer.save(folder / "tokenizer.json")
        if self.outliers is not None:
            self.outliers.save(folder)

    def facts(self) -> dict[str, Any]:
        """Return what config.json says of it."""
        labels = {"labels": self.labels} if self.labels else {}
        none = {} if self.outliers is None else {"none": self.outliers.facts()}
        return {**labels, self.kind: asdict(self.format), **none, **self.more}

    # As a LabelCodec

    decision: ClassVar[Decision] = ONE_LABEL

    def check(self, settings: Any, model: Any) -> None:
        """Refuse nothing."""

    def read(self, given: Any, settings: Any) -> Any:
        """One input as it is read."""
        return self.modality.read(given, self.format_for(settings))

    def in_parts(self, part: Any, size: int) -> Iterator[Any]:
        """Examples of a part, so many at a time."""
        yield from map(part.pick, np.split(np.arange(len(part)), range(size, len(part), size)))

    def targets(self, part: Any) -> np.ndarray:
        """Table (n, labels) of the label of each example."""
        return one_hot(np.asarray(part.labels), len(self.labels))

    def about(self, raw: Any) -> dict[str, Any]:
        """Nothing further."""
        return {}

    def judged(self, part: Any) -> JudgedUnits:
        """Where each example is."""
        return JudgedUnits(lambda i: ("", part.where(i)))

    def cut_notes(self, part: Any, settings: Any) -> list[str]:
        """None: all of an input is read."""
        return []

    def records(self, part: Any, probs: np.ndarray, settings: Any) -> list[dict[str, Any]]:
        """Each example of a part with its label and what was predicted."""
        numbers = np.asarray(part.labels).tolist()
        return [
            {
                self.modality.key: part.where(i),
                "label": self.labels[numbers[i]],
                "prediction": self.labels[best],
                "probability": float(probs[i, best]),
            }
            for i, best in enumerate(probs.argmax(1).tolist())
        ]

    def format_for(self, settings: Any) -> Any:
        """Format in which inputs are read by such settings."""
        return self.format

    def hashes(self) -> list[str]:
        """Return the hash of the tokenizer, if there is one."""
        return [] if self.tokenizer is None else [self.tokenizer.sha]


F = TypeVar("F")


def saved_format(
    kind: type[F], key: str, folder: Path, config: Mapping[str, Any], expected: str
) -> tuple[F, str]:
    """Check and return the format of files that a config.json has, and the path of that."""
    where, given = str(folder / "config.json"), config.get(key)
    if not isinstance(given, dict):
        raise UsageError(f"{where}: {key!r} is {given!r:.40}; expected {expected}")
    return fill_checked(kind, given, where), where


def first_files(folder: str, suffixes: Collection[str], most: int = 200) -> list[Path]:
    """Return the first files of a folder, and of those in it, that have one of these endings."""
    found = (path for path in sorted(Path(folder).rglob("*")) if path.suffix.lower() in suffixes)
    files = list(islice(found, most))
    if not files:
        raise UsageError(f"{folder}: no files that end in {', '.join(sorted(suffixes))}")
    return files
