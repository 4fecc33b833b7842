"""The public checkpoint formats that Regard reads and writes, one table each."""

from pathlib import Path
from typing import Any

from regard.errors import UsageError, lookup
from regard.files import read_json
from regard.models.protocols import ModelConfig
from regard.pretrained.config_keys import setting_of, shortened
from regard.pretrained.format import Format, differing
from regard.pretrained.formats import clip, decoders, encoder_decoders, encoders, vision, whisper
from regard.pretrained.shards import import_first

# of several that hold a model of ours, the first is written
FORMATS: dict[str, Format] = {
    format.model_type: format
    for module in (decoders, encoders, encoder_decoders, clip, vision, whisper)
    for format in module.FORMATS
}
# A setting that a format refuses counts as so many that differ.
_REFUSAL = 3
# family -> what makes a model whose parts public formats have
_EXPORTABLE = {"vit": "like=vit", "bert": "like=bert or pool=roberta", "gpt": "like=gpt2"}


def read_any_config(folder: str | Path) -> tuple[dict[str, Any] | None, bool]:
    """Return a folder's config.json, if there is one, and whether it is that of transformers."""
    path = Path(folder) / "config.json"
    if Path(folder).suffix == ".gguf" and Path(folder).is_file():
        raise import_first(Path(folder))
    if not path.is_file():
        return None, False
    config = read_json(path)
    theirs = bool({"model_type", "architectures"} & set(config))
    return config, theirs and "regard_format" not in config


def is_huggingface(folder: str | Path) -> bool:
    """Tell whether a folder holds a checkpoint of transformers rather than a model of Regard's."""
    return read_any_config(folder)[1]


def find_format(model_type: Any) -> Format:
    """Return the format of a model_type."""
    if not isinstance(model_type, str):
        raise UsageError(
            f"model_type={model_type!r} names no model; choose from {', '.join(sorted(FORMATS))}"
        )
    return lookup("model_type", model_type, FORMATS)


def write_exactly(
    format: Format, config: ModelConfig, task: str
) -> tuple[dict[str, Any], list[str]]:
    """Return the config.json of a model of ours, and the settings that get lost in it."""
    config = format.canonical(config)
    theirs = format.write_config(config, task)
    return theirs, differing(config, format.read_config(theirs, theirs["architectures"][0]))


def fitting(family: str, config: ModelConfig, task: str) -> tuple[Format, dict[str, Any]]:
    """Return a format that can hold one of our models, and the config.json to write for it."""
    nearest: list[tuple[int, str]] = []
    for model_type, format in FORMATS.items():
        if format.family != family or not format.serves(task):
            continue
        try:
            theirs, lost = write_exactly(format, config, task)
            if not lost:
                return format, theirs
            values = ", ".join(f"{key}={shortened(setting_of(config, key))}" for key in lost)
            nearest.append((len(lost), f"{model_type}, but for {values}"))
        except UsageError as error:
            nearest.append((_REFUSAL, f"{model_type}, but for {error}"))
    if not nearest:
        raise UsageError(f"no public format holds a {family} for {task}; export another model")
    like = _EXPORTABLE.get(family)
    remedy = f"; one trained with {like} alone can be exported" if like else ""
    remedy += "; or try format=onnx"
    raise UsageError(f"no public format holds this {family}; nearest is {min(nearest)[1]}{remedy}")
