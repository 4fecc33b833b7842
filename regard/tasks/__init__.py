"""All tasks by name: what a model is trained and used for."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, NamedTuple

from regard.errors import lookup


class Home(NamedTuple):
    """Where a task lives; imported only when asked for."""

    trains: str  # the module with `train`
    settings: str  # and in it the class of its keys
    runs: str  # the module with the class that runs it
    runner: str


class Entry(NamedTuple):
    """A task in the table: where its class is, imported only when asked for, and two examples."""

    module: str
    task: str
    examples: tuple[str, str]


TASKS: dict[str, Any] = {
    "translate": Entry(
        "regard.tasks.text.translate",
        "Translate",
        (
            "regard train translate data=folder from=en to=de minutes=25 out=runs/mine",
            "regard train multi30k_en_de data=multi30k out=runs/multi30k",
        ),
    ),
    "prefix": Entry(
        "regard.tasks.text.prefix",
        "PrefixTranslate",
        (
            "regard train prefix data=folder from=en to=de size=small out=runs/prefix",
            "regard train prefix data=pairs.tsv minutes=30",
        ),
    ),
    "language": Entry(
        "regard.tasks.text.language",
        "LanguageModel",
        (
            "regard train language data=book.txt minutes=10 out=runs/mine",
            "regard train language data=folder like=llama size=small position=alibi",
        ),
    ),
    "text": Entry(
        "regard.tasks.text.text",
        "TextToText",
        (
            "regard train text data=folder prefix=summarize metric=rouge out=runs/mine",
            "regard train text data=book.txt objective=spans like=t5",
        ),
    ),
    "classify": Home(
        "regard.tasks.classify", "ClassifySettings", "regard.tasks.classifier", "Classifier"
    ),
    "images": Entry(
        "regard.tasks.vision.images",
        "ClassifyImages",
        (
            "regard train images data=photos augment=flip+crop+trivial mixup=0.2 minutes=30",
            "regard train images data=photos init=runs/other tune=all layer_decay=0.75",
        ),
    ),
    "pretrain": Entry(
        "regard.tasks.vision.pretrain",
        "Pretrain",
        (
            "regard train pretrain data=photos objective=contrastive like=cct minutes=60",
            "regard train pretrain data=photos family=swin mask_share=0.6 out=runs/masked",
        ),
    ),
    "caption": Entry(
        "regard.tasks.vision.caption",
        "WriteCaptions",
        (
            "regard train caption data=flickr8k init=runs/encoder minutes=60 out=runs/captions",
            "regard train caption data=photos.tsv decoder=recurrent doubly_stochastic=1 image=96",
        ),
    ),
    "denoise": Entry(
        "regard.tasks.vision.denoise",
        "Denoise",
        (
            "regard train denoise data=photos minutes=30 out=runs/denoiser",
            "regard train denoise data=photos size=small noise=5,55 window=8 out=runs/denoiser",
        ),
    ),
    "tag": Home("regard.tasks.tag", "TagSettings", "regard.tasks.tagger", "Tagger"),
    "fill": Entry(
        "regard.tasks.text.fill",
        "Fill",
        (
            "regard train language data=folder objective=masked out=runs/masked",
            'regard run runs/masked "A dog [MASK] in the snow."',
        ),
    ),
    "embed": Home("regard.tasks.embed", "EmbedSettings", "regard.tasks.embed", "Embedder"),
}


def task(name: str) -> Any:
    """Return the class of a task."""
    entry = lookup("task", name, TASKS)
    if isinstance(entry, Entry):
        return getattr(import_module(entry.module), entry.task)
    raise NotImplementedError


def task_for(name: str, values: Mapping[str, Any]) -> str:
    """Return the task to train by such data, such as images where classify is given images."""
    return task(name).instead(values) if isinstance(TASKS[name], Entry) else name


def trainer(name: str) -> Any:
    """Return what trains a task."""
    entry = lookup("task", name, TASKS)
    return task(name) if isinstance(entry, Entry) else import_module(entry.trains)


def runner(name: str) -> Any:
    """Return the class that runs a task."""
    entry = lookup("task", name, TASKS)
    if isinstance(entry, Entry):
        return task(name)
    return getattr(import_module(entry.runs), entry.runner)


def train_settings(name: str) -> Any:
    """Return the class of the settings that train a task, and its short keys."""
    entry = lookup("task", name, TASKS)
    if isinstance(entry, Entry):
        return task(name).Train, task(name).short
    module = import_module(entry.trains)
    return getattr(module, entry.settings), getattr(module, "SHORT", {})
