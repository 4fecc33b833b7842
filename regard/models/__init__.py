"""All model families by name."""

from importlib import import_module
from typing import Any

from regard.errors import lookup

# name -> where its config class and model class are; imported only when asked for
MODELS: dict[str, tuple[str, str, str]] = {
    "transformer": ("regard.models.transformer", "TransformerConfig", "Transformer"),
    "convolutional": (
        "regard.models.convolutional",
        "ConvolutionalConfig",
        "Convolutional",
    ),
    "recurrent": ("regard.models.recurrent", "RecurrentConfig", "Recurrent"),
    "gpt": ("regard.models.gpt", "GPTConfig", "GPT"),
    "ladder": ("regard.models.ladder", "LadderConfig", "Ladder"),
    "bert": ("regard.models.bert", "BertConfig", "Bert"),
    "vit": ("regard.models.vit", "ViTConfig", "ViT"),
    "clip": ("regard.models.clip", "ClipConfig", "Clip"),
    "resnet": ("regard.models.resnet", "ResNetConfig", "ResNet"),
    "swin": ("regard.models.swin", "SwinConfig", "Swin"),
    "mvit": ("regard.models.mvit", "MViTConfig", "MViT"),
    "local": ("regard.models.local", "LocalConfig", "Local"),
    "captioner": ("regard.models.captioner", "CaptionerConfig", "Captioner"),
    "denoiser": ("regard.models.denoiser", "DenoiserConfig", "Denoiser"),
}


def sized(name: str, size: str, *row: str) -> Any:
    """Return a family's config, or that of a row of it, with the sizes that a name stands for."""
    return import_module(lookup("model", name, MODELS)[0]).sized(size, *row)


def rows(name: str) -> list[str]:
    """Return the names of a family's members."""
    return list(getattr(import_module(lookup("model", name, MODELS)[0]), "ROWS", {}))


def family(name: str) -> tuple[type, type]:
    """Return the config class and the model class of a family."""
    module, config, model = lookup("model", name, MODELS)
    module = import_module(module)
    return getattr(module, config), getattr(module, model)


# name -> where what trains an encoder of images without labels is, and its config
PRETRAINERS: dict[str, tuple[str, str, str]] = {
    "mae": ("regard.models.masked", "MAEConfig", "MAE"),
    "simmim": ("regard.models.masked", "SimMIMConfig", "SimMIM"),
    "simclr": ("regard.models.contrast", "SimCLRConfig", "SimCLR"),
    "clip": ("regard.models.contrast", "CLIPConfig", "CLIP"),
}


def pretrainer(name: str) -> tuple[type, type]:
    """Return the config class and the class of what is built around an encoder to train it."""
    module, config, model = lookup("pretrainer", name, PRETRAINERS)
    return getattr(import_module(module), config), getattr(import_module(module), model)
