"""All tasks by name: what a model is trained and used for."""

from importlib import import_module
from types import ModuleType
from typing import NamedTuple

from regard.errors import lookup


class Home(NamedTuple):
    """Where a task lives; imported only when asked for."""

    trains: str  # the module with `train`
    settings: str  # and in it the class of its keys
    runs: str  # the module with the class that runs it
    runner: str


TASKS: dict[str, Home] = {
    "translate": Home(
        "regard.tasks.translate", "TranslateSettings", "regard.tasks.translator", "Translator"
    ),
    "prefix": Home(
        "regard.tasks.prefix", "PrefixSettings", "regard.tasks.prefix", "PrefixTranslator"
    ),
    "language": Home(
        "regard.tasks.language", "LanguageSettings", "regard.tasks.writing", "LanguageModel"
    ),
    "text": Home("regard.tasks.text", "TextSettings", "regard.tasks.text", "TextToText"),
    "classify": Home(
        "regard.tasks.classify", "ClassifySettings", "regard.tasks.classifier", "Classifier"
    ),
    "images": Home(
        "regard.tasks.images", "ImageSettings", "regard.tasks.image_classifier", "ImageClassifier"
    ),
    "pretrain": Home(
        "regard.tasks.pretrain", "PretrainSettings", "regard.tasks.encoder", "Encoder"
    ),
    "caption": Home(
        "regard.tasks.caption", "CaptionSettings", "regard.tasks.captions", "Describer"
    ),
    "denoise": Home(
        "regard.tasks.denoise", "DenoiseSettings", "regard.tasks.denoiser", "ImageDenoiser"
    ),
    "tag": Home("regard.tasks.tag", "TagSettings", "regard.tasks.tagger", "Tagger"),
    "fill": Home("regard.tasks.fill", "FillSettings", "regard.tasks.fill", "Filler"),
    "embed": Home("regard.tasks.embed", "EmbedSettings", "regard.tasks.embed", "Embedder"),
}


def trainer(name: str) -> ModuleType:
    """Return the module that trains a task."""
    return import_module(lookup("task", name, TASKS).trains)


def runner(name: str) -> type:
    """Return the class that runs a task."""
    home = lookup("task", name, TASKS)
    return getattr(import_module(home.runs), home.runner)
