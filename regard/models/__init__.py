"""All model families by name."""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.errors import UsageError, lookup

if TYPE_CHECKING:
    from regard.models.declaration import FamilyInfo

MODELS: dict[str, tuple[str, str, str]] = {
    "transformer": ("regard.models.transformer", "TransformerConfig", "Transformer"),
    "recurrent": ("regard.models.recurrent", "RecurrentConfig", "Recurrent"),
    "convolutional": ("regard.models.convolutional", "ConvolutionalConfig", "Convolutional"),
    "bert": ("regard.models.bert", "BertConfig", "Bert"),
    "gpt": ("regard.models.gpt", "GPTConfig", "GPT"),
    "ladder": ("regard.models.ladder", "LadderConfig", "Ladder"),
    "vit": ("regard.models.vit", "ViTConfig", "ViT"),
    "swin": ("regard.models.swin", "SwinConfig", "Swin"),
    "mvit": ("regard.models.mvit", "MViTConfig", "MViT"),
    "resnet": ("regard.models.resnet", "ResNetConfig", "ResNet"),
    "local": ("regard.models.local", "LocalConfig", "Local"),
    "series": ("regard.models.series", "SeriesConfig", "SeriesEncoder"),
    "clip": ("regard.models.clip", "ClipConfig", "Clip"),
    "captioner": ("regard.models.captioner", "CaptionerConfig", "Captioner"),
    "conformer": ("regard.models.conformer", "ConformerConfig", "Conformer"),
    "whisper": ("regard.models.whisper", "WhisperConfig", "Whisper"),
    "segmenter": ("regard.models.segmenter", "SegmenterConfig", "Segmenter"),
    "denoiser": ("regard.models.denoiser", "DenoiserConfig", "Denoiser"),
}
"""Families by name: module, config class and model class, imported only when asked for.

The module declares the family as INFO. The first family that serves a task is the default.
"""


def family(name: str) -> tuple[type, type]:
    """Config class and the model class of a family."""
    return _classes(lookup("model", name, MODELS))


def _classes(row: tuple[str, str, str]) -> tuple[type, type]:
    """Two classes that a row of a table names, after their module."""
    module = import_module(row[0])
    return getattr(module, row[1]), getattr(module, row[2])


def info(name: str) -> "FamilyInfo":
    """Declaration of a family."""
    return import_module(lookup("model", name, MODELS)[0]).INFO


def info_of(part: object) -> "FamilyInfo | None":
    """Declaration of the family of a model or config, if its module has one."""
    return getattr(sys.modules.get(type(part).__module__), "INFO", None)


def config_family(config: object) -> str:
    """Name of the family that a config is of."""
    place = (type(config).__module__, type(config).__name__)
    return next(name for name, row in MODELS.items() if row[:2] == place)


def serving(task: str) -> tuple[str, ...]:
    """Families that serve a task, the usual one first."""
    return tuple(name for name in MODELS if task in info(name).tasks)


def task_changes(name: str, task: str) -> dict[str, Any]:
    """Config fields of a family that a task sets, such as the head of a classifier."""
    tasks = info(name).tasks
    if task not in tasks:
        known = " or ".join(serving(task))
        raise UsageError(f"family={name} does not serve {task}; choose {known}")
    return dict(tasks[task])


def preset(name: str, size: str, member: str | None = None) -> Any:
    """Family's config, or that of a member of it such as llama, in a named size."""
    return info(name).preset(size, member)


def preset_names(name: str) -> list[str]:
    """Names of a family's presets, the usual one first."""
    return list(info(name).presets)


def preset_family(member: str, names: tuple[str, ...] | None = None) -> str | None:
    """Family, of these or of all, that has a preset of this name, if any does."""
    return next((name for name in names or MODELS if member in info(name).presets), None)


# name -> where what trains an image encoder without labels is, and its config
PRETRAINERS: dict[str, tuple[str, str, str]] = {
    "mae": ("regard.models.masked", "MAEConfig", "MAE"),
    "simmim": ("regard.models.masked", "SimMIMConfig", "SimMIM"),
    "simclr": ("regard.models.contrast", "SimCLRConfig", "SimCLR"),
    "clip": ("regard.models.contrast", "ImageTextConfig", "ImageTextContrast"),
    "vae": ("regard.models.variational", "VAEConfig", "VAE"),
}


def pretrainer(name: str) -> tuple[type, type]:
    """Config class and the class of what is built around an encoder to train it."""
    return _classes(lookup("pretrainer", name, PRETRAINERS))
