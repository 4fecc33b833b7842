"""Models that come from other tools, and that go to them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from regard import __version__
from regard.errors import UsageError
from regard.files import making, read_json, write_atomically
from regard.files.hashes import seal
from regard.files.weights import state_of
from regard.models.folder import load_folder, save_config, save_parts, save_weights
from regard.native.processor import QUANTISED
from regard.pretrained.folder import (
    EXPORT_DTYPES,
    export_weights,
    import_folder,
    is_foreign,
    read_any_config,
    write_json,
)
from regard.pretrained.generation import read_generation
from regard.pretrained.model_card import card_head
from regard.pretrained.shards import no_weights
from regard.pretrained.tokenizer_folder import export_tokenizers, load_tokenizers, save_tokenizers
from regard.settings import fill, setting

# format -> the settings it takes beside out
_EXPORTS = {
    "ctranslate2": {"quantization"},
    "huggingface": {"dtype", "max_shard"},
    "onnx": {"task"},  # written by regard.onnx
    "regard": {"quantise", "data"},  # by tasks.frame.quantised
}

# an encoder of images within what it was trained by, from a folder, a model and its config
Whole = Callable[[Path, nn.Module, dict[str, Any]], Any]


@dataclass(frozen=True)
class ImportSettings:
    """Settings of `import`."""

    out: Path | None = setting(None, "folder to write the model to")


@dataclass(frozen=True)
class ExportSettings:
    """Settings of `export`."""

    out: Path | None = setting(None, "folder to write the model to")
    format: str = setting("huggingface", "format of the export", choices=_EXPORTS)
    dtype: str = setting("float32", "huggingface: type of the weights", choices=EXPORT_DTYPES)
    max_shard: int | None = setting(
        None, "huggingface: maximum MB per weight file", min=1, max=10**6
    )
    quantization: str | None = setting(
        None,
        "ctranslate2: type of the weights",
        choices="regard.pretrained.ctranslate2:QUANTIZATIONS",
    )
    quantise: str = setting("none", "regard: type of the matrix products", choices=QUANTISED)
    data: str | None = setting(None, "regard: data to measure on what quantise= costs")
    task: str | None = setting(
        None, "onnx: embed exports the vectors of any encoder", choices=("embed",)
    )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> "ExportSettings":
        """Settings that a user gave, or a refusal of what is not for the format."""
        ours = {} if given.keys().isdisjoint(_EXPORTS["regard"]) else {"format": "regard"}
        settings = fill(cls, ours | dict(given))
        if settings.out is None:
            raise UsageError("out is missing; add out=FOLDER for the exported model")
        for key in sorted(given.keys() - {"format", "out"} - _EXPORTS[settings.format]):
            raise UsageError(f"{key}= is not for format={settings.format}; leave it out")
        return settings


def read_checkpoint(
    folder: Path, device: str = "cpu"
) -> tuple[Any, dict[str, Any], tuple[Any, Any]]:
    """Model, config and tokenizers of a public checkpoint, or of one that we have exported."""
    model, config, tokenizers = import_folder(folder, device, load_tokenizers)
    config["generation"] = read_generation(folder, config["task"])
    return model, config, tokenizers


def read_any_model(folder: Path, device: str = "cpu") -> tuple[Any, dict[str, Any]]:
    """Model and config of a folder, ours or a public checkpoint's."""
    read, foreign = read_any_config(folder)
    if foreign:
        return read_checkpoint(folder, device)[:2]
    model, config = load_folder(folder, device, read)
    path = folder / "generation_config.json"
    config["generation"] = told = read_json(path) if path.exists() else {}
    if not isinstance(rules := told.get("rules", {}), dict | None):
        raise UsageError(f"{path}: 'rules' are {rules!r:.40}; expected an object")
    return model, config


def import_checkpoint(folder: str | Path, settings: Mapping[str, Any], whole: Whole) -> Path:
    """Write a public checkpoint as a folder of ours, and return that."""
    from regard.pretrained.convert import readable

    out = fill(ImportSettings, settings).out
    if out is None:
        raise UsageError("out is missing; add out=FOLDER for the imported model")
    if not Path(folder).exists():
        raise UsageError(f"{folder}: no such folder; expected one with config.json and weights")
    with readable(folder) as source:
        return _take_over(source, out, whole)


def _take_over(folder: Path, out: Path, whole: Whole) -> Path:
    """Write a folder with config.json and safetensors as one of ours."""
    if not (folder / "config.json").exists():
        raise no_weights(folder)
    if not is_foreign(folder):
        read_json(folder / "config.json")
        raise UsageError(f"{folder}: its config.json names no model_type; expected that of others")
    model, config, tokenizers = read_checkpoint(folder)
    known = ("regard_format", "family", "task", "model", "generation")
    about = {key: value for key, value in config.items() if key not in known}
    with making(out) as partial:
        save_weights(partial, state_of(model))
        if "pretraining" in config:
            save_parts(partial, state_of(whole(folder, model, config)))
        if tokenizers[0] is not None:  # a model that reads images has none
            save_tokenizers(partial, tokenizers)
            write_json(partial / "generation_config.json", config.get("generation", {}))
        card = card_head(config, {}) + _card(config, model)
        write_atomically(partial / "README.md", card)
        save_config(partial, model, name=config["family"], task=config["task"], about=about)
        seal(partial)
    return out


def _card(config: dict[str, Any], model: nn.Module) -> str:
    """README of a model that was imported."""
    count = sum(parameter.numel() for parameter in model.parameters())
    came = config["imported"]
    return (
        f"# A model for `{config['task']}`\n\n{came['architecture']} ({came['model_type']}), "
        f"{count:,} parameters, imported by Regard {__version__}.\n"
    )


def export_model(folder: Path, settings: ExportSettings, whole: Whole) -> Path:
    """Write the model of a folder for another tool, and return where."""
    assert settings.out is not None
    if is_foreign(folder):
        model, config, tokenizers = read_checkpoint(folder)
    else:
        model, config = read_any_model(folder)
        other = {"image", "series", *({"sound"} if config.get("labels") else ())}
        reads_text = not other & config.keys() or hasattr(model, "texts")
        tokenizers = load_tokenizers(folder) if reads_text else (None, None)
    if settings.format == "ctranslate2":
        from regard.pretrained.ctranslate2 import export_ctranslate2

        task, (source, target) = config["task"], tokenizers
        if task != "translate" or source is None or target is None:
            raise UsageError(f"CTranslate2 takes a model for translate from us, not one for {task}")
        return Path(export_ctranslate2(model, source, target, settings.out, settings.quantization))
    told = config.get("pretraining")
    with making(settings.out) as partial:
        export_weights(
            model,
            config,
            tokenizers,
            partial,
            dtype=settings.dtype,
            max_shard=settings.max_shard and settings.max_shard * 10**6,
            whole=whole(folder, model, config)
            if isinstance(told, dict) and told.get("by") == "mae"
            else None,
        )
        if tokenizers[0] is not None:
            export_tokenizers(partial, tokenizers, config)
    return settings.out
