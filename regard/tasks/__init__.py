"""All tasks by name: what a model is trained and used for."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any, Literal, NamedTuple

from regard.errors import lookup

LabelTask = Literal["classify", "images", "sounds", "series"]  # one label of an input


class TaskEntry(NamedTuple):
    """A task in the table: where its row is, imported only when asked for, and two examples."""

    module: str
    task: str
    examples: tuple[str, str]


TASKS: dict[str, TaskEntry | Any] = {
    "translate": TaskEntry(
        "regard.tasks.text.translate",
        "TRANSLATE",
        (
            "regard train translate data=folder from=en to=de minutes=25 out=runs/mine",
            "regard train multi30k_en_de data=multi30k out=runs/multi30k",
        ),
    ),
    "prefix": TaskEntry(
        "regard.tasks.text.prefix",
        "PREFIX",
        (
            "regard train prefix data=folder from=en to=de size=small out=runs/prefix",
            "regard train prefix data=pairs.tsv minutes=30",
        ),
    ),
    "language": TaskEntry(
        "regard.tasks.text.language",
        "LANGUAGE",
        (
            "regard train language data=book.txt minutes=10 out=runs/mine",
            "regard train language data=folder like=llama size=small position=alibi",
        ),
    ),
    "text": TaskEntry(
        "regard.tasks.text.text",
        "TEXT_TO_TEXT",
        (
            "regard train text data=folder prefix=summarize metric=rouge out=runs/mine",
            "regard train text data=book.txt objective=spans like=t5",
        ),
    ),
    "classify": TaskEntry(
        "regard.tasks.text.classify",
        "CLASSIFY",
        (
            "regard train classify data=reviews.tsv minutes=5 out=runs/reviews",
            "regard train classify data=photos family=swin minutes=30 out=runs/photos",
        ),
    ),
    "images": TaskEntry(
        "regard.tasks.vision.images",
        "IMAGES",
        (
            "regard train images data=photos augment=flip+crop+trivial mixup=0.2 minutes=30",
            "regard train images data=photos init=runs/other tune=all layer_decay=0.75",
        ),
    ),
    "series": TaskEntry(
        "regard.tasks.series",
        "CLASSIFY_SERIES",
        (
            "regard train series data=sensors.csv augment=jitter+warp+mask minutes=5",
            "regard train series data=folder chunk=4 size=small out=runs/series",
        ),
    ),
    "pretrain": TaskEntry(
        "regard.tasks.vision.pretrain",
        "PRETRAIN",
        (
            "regard train pretrain data=photos objective=contrastive like=cct minutes=60",
            "regard train pretrain data=photos family=swin mask_share=0.6 out=runs/masked",
        ),
    ),
    "caption": TaskEntry(
        "regard.tasks.vision.caption",
        "CAPTION",
        (
            "regard train caption data=flickr8k init=runs/encoder minutes=60 out=runs/captions",
            "regard train caption data=photos.tsv decoder=recurrent doubly_stochastic=1 image=96",
        ),
    ),
    "segment": TaskEntry(
        "regard.tasks.vision.segment",
        "SEGMENT",
        (
            "regard train segment data=scenes init=runs/encoder tune=head out=runs/segments",
            "regard train segment data=photos family=resnet decoder=up image=96 minutes=30",
        ),
    ),
    "denoise": TaskEntry(
        "regard.tasks.vision.denoise",
        "DENOISE",
        (
            "regard train denoise data=photos minutes=30 out=runs/denoiser",
            "regard train denoise data=photos size=small noise=5,55 window=8 out=runs/denoiser",
        ),
    ),
    "transcribe": TaskEntry(
        "regard.tasks.sound.transcribe",
        "TRANSCRIBE",
        (
            "regard train transcribe data=speech.tsv minutes=60 out=runs/speech",
            "regard train transcribe data=an4 decoder_depth=2 ctc_weight=0.3 out=runs/an4",
        ),
    ),
    "sounds": TaskEntry(
        "regard.tasks.sound.sounds",
        "CLASSIFY_SOUNDS",
        (
            "regard train sounds data=commands minutes=15 out=runs/commands",
            "regard train sounds data=digits pattern={label}_{speaker}_{take} test=*_[0-4].*",
        ),
    ),
    "tag": TaskEntry(
        "regard.tasks.text.tag",
        "TAG",
        (
            "regard train tag data=folder column=upos minutes=10 out=runs/tags",
            "regard train tag data=train.conllu features=affixes size=small",
        ),
    ),
    "fill": TaskEntry(
        "regard.tasks.text.fill",
        "FILL",
        (
            "regard train language data=folder objective=masked out=runs/masked",
            'regard run runs/masked "A dog [MASK] in the snow."',
        ),
    ),
    "embed": TaskEntry(
        "regard.tasks.text.embed",
        "EMBED",
        (
            "regard import all-MiniLM-L6-v2 out=runs/minilm",
            'regard run runs/minilm task=embed "A dog runs."',
        ),
    ),
}


def task(name: str) -> Any:
    """A task by its name, as a row of parts."""
    entry = lookup("task", name, TASKS)
    if not isinstance(entry, TaskEntry):  # one of a user's own
        return entry
    return getattr(import_module(entry.module), entry.task)


def task_for(name: str, values: Mapping[str, Any]) -> str:
    """Return the task to train by such data, such as images where classify is given images."""
    instead = task(name).instead
    return instead and instead(values) or name
