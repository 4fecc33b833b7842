"""What lies beside the weights of a model that reads files, be they images, sounds or series."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from regard.data.tokenizer import Tokenizer
from regard.metrics.baselines import Baselines
from regard.metrics.outliers import Outliers
from regard.modalities.base import Describe, Modality
from regard.tasks.frame.settings import RunSettings
from regard.tasks.labels.decision import ONE_LABEL, Decision
from regard.viewer.picture import Picture


@dataclass(frozen=True)
class MediaCodec:
    """The format of a model's inputs, its labels or tokenizer, and what else lies beside it.

    Args:
        modality: what an input is, which its format is of.
        format: how the model wants it.
        labels: labels that the model tells apart.
        baselines: simple classifiers of the same labels.
        tokenizer: of the texts that it writes or reads beside.
        outliers: what is given no label.
        more: further facts of config.json.
        folder: where it was loaded from.
    """

    modality: Modality[Any]
    format: Any
    labels: list[str] = field(default_factory=list)
    baselines: Baselines | None = None
    tokenizer: Tokenizer | None = None
    outliers: Outliers | None = None
    more: Mapping[str, Any] = field(default_factory=dict)
    folder: Path | None = None

    decision: Decision = ONE_LABEL

    def save(self, folder: Path) -> None:
        """Write the baselines and the tokenizer."""
        if self.baselines is not None:
            self.baselines.save(folder)
        if self.tokenizer is not None:
            self.tokenizer.save(folder / "tokenizer.json")
        if self.outliers is not None:
            self.outliers.save(folder)

    def facts(self) -> dict[str, Any]:
        """What config.json says of it."""
        labels = {"labels": self.labels} if self.labels else {}
        none = {} if self.outliers is None else {"none": self.outliers.facts()}
        return {**labels, self.modality.name: asdict(self.format), **none, **self.more}

    def hashes(self) -> list[str]:
        """Hash of the tokenizer, if there is one."""
        return [] if self.tokenizer is None else [self.tokenizer.sha]

    def format_for(self, settings: RunSettings) -> Any:
        """Format in which inputs are read by such settings."""
        return self.modality.format_for(self.format, settings)

    def groups(
        self, inputs: Sequence[Any], settings: Any
    ) -> Iterator[tuple[list[Any], list[list[str]]]]:
        """Inputs as they are read, some at a time, and what was done to each."""
        how = {"most": settings.batch} if hasattr(settings, "batch") else {}
        broken = getattr(settings, "broken", "refuse")
        return self.modality.groups(inputs, self.format_for(settings), broken, **how)

    def picture(self, model: Any, given: Any, settings: Any, describe: Describe) -> Picture:
        """Where a model looks while it answers an input."""
        return self.modality.picture(model, given, self.format_for(settings), settings, describe)
