"""Settings of the import and export of models."""

from dataclasses import dataclass
from pathlib import Path

from regard.settings import setting

# format -> the settings that it takes beside out
EXPORTS = {"huggingface": ("dtype", "max_shard"), "ctranslate2": ("quantization",)}


@dataclass(frozen=True)
class ImportSettings:
    """Settings of `import`."""

    out: Path | None = setting(None, "folder to write the model to")


@dataclass(frozen=True)
class ExportSettings:
    """Settings of `export`."""

    out: Path | None = setting(None, "folder to write the model to")
    format: str = setting("huggingface", "format", choices=EXPORTS)
    dtype: str = setting(
        "float32", "huggingface: data type", choices="regard.pretrained.folder:DTYPES"
    )
    max_shard: int | None = setting(None, "huggingface: MB of a file of weights", min=1, max=10**6)
    quantization: str | None = setting(
        None,
        "ctranslate2: data type",
        choices="regard.pretrained.ctranslate2:QUANTIZATIONS",
    )
