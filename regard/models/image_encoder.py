"""The image encoder of a larger model, of any vision family."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regard.errors import UsageError, lookup
from regard.models import MODELS, family, info, preset, serving
from regard.settings import fill, setting


@dataclass(frozen=True)
class EncoderConfig:
    """The image encoder: its family and config."""

    family: str = setting("vit", "family of the image encoder")
    config: Any = field(default_factory=lambda: preset("vit", "tiny", "cct"))

    def __post_init__(self) -> None:
        """Read the config of the family if it is given as a mapping."""
        if self.family not in MODELS or "features" not in info(self.family).tasks:
            lookup("family", self.family, dict.fromkeys(serving("features")))
        kind = family(self.family)[0]
        if isinstance(self.config, Mapping):
            object.__setattr__(self, "config", fill(kind, self.config))
        if not isinstance(self.config, kind):
            raise UsageError(
                f"encoder.config={str(self.config)[:40]}; expected the sizes and parts of a model "
                f"of the family {self.family}"
            )


def build_encoder(config: EncoderConfig) -> Any:
    """Build an encoder of features, without pool and head of its own."""
    changes = info(config.family).tasks["features"]
    return family(config.family)[1](replace(config.config, **changes))


@dataclass(frozen=True)
class AroundEncoder:
    """What the configs of larger models share: the encoder, and the images that it is made for."""

    encoder: EncoderConfig = field(default_factory=EncoderConfig)

    @property
    def image(self) -> int:
        """Side of the images that the encoder is made for."""
        return self.encoder.config.image

    @property
    def channels(self) -> int:
        """Number of channels of an image."""
        return self.encoder.config.channels
