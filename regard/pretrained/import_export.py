"""Settings of the import and export of models."""

from dataclasses import dataclass
from pathlib import Path

from regard.settings import setting


@dataclass(frozen=True)
class ImportSettings:
    """Settings of `import`."""

    out: Path | None = setting(None, "folder to write the model to")


@dataclass(frozen=True)
class ExportSettings:
    """Settings of `export`."""

    out: Path | None = setting(None, "folder to write the model to")
    format: str = setting("huggingface", "format: huggingface or ctranslate2")
    dtype: str = setting("float32", "huggingface: float32, float16 or bfloat16")
    max_shard: int | None = setting(None, "huggingface: MB of a file of weights", min=1, max=10**6)
    quantization: str | None = setting(None, "ctranslate2: type of the weights, such as int8")
