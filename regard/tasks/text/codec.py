"""What lies beside a text encoder: how it reads texts, and the labels that it knows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard.data.features import WordFeatures
from regard.data.label_clusters import save_clusters
from regard.data.rows import RowEncoder
from regard.data.tokenizer import Tokenizer
from regard.errors import UsageError
from regard.metrics.baselines import Baselines
from regard.models.protocols import Model
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.settings import setting
from regard.tasks.frame.settings import RunSettings


@dataclass(frozen=True)
class EncoderRun(RunSettings):
    """What a run of a text encoder can be told."""

    max_length: int | None = setting(None, "maximum tokens per text", min=1, max=100_000)
    batch_tokens: int = setting(4096, "tokens per batch", min=1, group="machine")
    batch_rows: int = setting(128, "texts per batch", min=1, group="machine")


@dataclass(frozen=True)
class TextCodec:
    """How an encoder reads texts and, if it has any, its labels and the baselines beside it."""

    encoder: RowEncoder
    labels: list[str] = field(default_factory=list[str])
    baselines: Baselines | None = None
    config: Mapping[str, Any] = field(
        default_factory=dict[str, Any]
    )  # what config.json says further
    clusters: list[list[str]] = field(
        default_factory=list[list[str]]
    )  # of the labels, if there are any

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer."""
        return self.encoder.tokenizer

    def save(self, folder: Path) -> None:
        """Write the tokenizer, features, baselines and clusters of labels."""
        self.tokenizer.save(folder / "tokenizer.json")
        if self.encoder.features is not None:
            self.encoder.features.save(folder)
        if self.baselines is not None:
            self.baselines.save(folder)
        if self.clusters:
            save_clusters(folder, self.clusters)

    def facts(self) -> dict[str, Any]:
        """Return what config.json says of it."""
        return {"labels": self.labels, **self.config}

    def hashes(self) -> list[str]:
        """Return the hash of the tokenizer."""
        return [self.tokenizer.sha]


def load_encoder(
    folder: Path, model: Model, config: Mapping[str, Any], *, bare: bool = False
) -> RowEncoder:
    """Read how a model reads texts, and check that it fits the model."""
    most = model.config.max_length
    longest = config.get("max_length", most)
    if not isinstance(longest, int) or isinstance(longest, bool) or not 1 <= longest <= most:
        raise UsageError(
            f"{folder / 'config.json'}: 'max_length' is {longest!r:.40}; expected 1 to {most}"
        )
    tokenizer: Tokenizer = load_tokenizer(folder)
    features = None
    if config.get("features", "none") != "none":
        features = WordFeatures.load(folder)
        if features.size != model.config.types:
            raise UsageError(
                f"{folder}: {features.size - 1} known features, "
                f"but the model has places for {model.config.types - 1}"
            )
    if tokenizer.vocab > model.config.vocab:
        raise UsageError(
            f"{folder}: the tokenizer has {tokenizer.vocab} pieces, "
            f"the model only {model.config.vocab}"
        )
    return RowEncoder(tokenizer, features, bare=bare)


def check_max_length(settings: EncoderRun, model: Model) -> None:
    """Refuse to read more tokens than a model has positions for."""
    most = model.config.max_length
    if settings.max_length and settings.max_length > most:
        raise UsageError(
            f"max_length={settings.max_length} is more than the {most} places of the model"
        )
