"""What every drawing of the gallery can be told."""

from dataclasses import dataclass
from pathlib import Path

from regard.settings import setting


@dataclass(frozen=True)
class Drawn:
    """Settings of every drawing."""

    out: Path | None = setting(None, "file to write: .png or .html")
