"""A look over data before they are trained on: for which task they are, and what it would take."""

import os
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from regard.data.image_files import holds_images
from regard.data.labelled import ExampleFormat, ExampleReader, SentenceFormat, SentenceReader
from regard.data.series_files import holds_series
from regard.data.sound_sets import holds_sounds
from regard.errors import UsageError, lookup
from regard.examine.forecast import Forecast, forecast_training
from regard.examine.guess import Guess, guess_task
from regard.examine.images import examine_images
from regard.examine.pairs import examine_pairs
from regard.examine.report import DataReport, ExamineOptions, Finding
from regard.examine.rows import examine_rows, examine_texts
from regard.examine.series import examine_series
from regard.examine.sounds import examine_sounds
from regard.native import Status, status
from regard.settings import setting

MOST = 10_000  # rows of a part that are looked at, unless all are asked for
MOST_SENTENCES = 3000  # with a tag for each word
MOST_FILES = 500  # that are images or sounds
SIZES = ("tiny", "small", "base", "big")


@dataclass(frozen=True)
class DoctorSettings:
    """What to examine."""

    task: str | None = setting(None, "task that the data are for; guessed unless told")
    source: str | None = field(default=None, metadata={"key": "from", "help": "source language"})
    target: str | None = field(default=None, metadata={"key": "to", "help": "target language"})
    columns: str | None = setting(None, "columns by name or number, as in training")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    valid: str | None = setting(None, "validation part: a file, or a share of train")
    test: str | None = setting(None, "test part: a file, or a share of train")
    pattern: str | None = setting(None, "sounds: file names with labels, as in training")
    size: str = setting("tiny", "model size to forecast")
    full: bool = setting(False, "look at all rows, however long it takes")


@dataclass(frozen=True)
class Examined:
    """A report of data with its forecast."""

    report: DataReport
    forecast: Forecast | None
    task: str = ""
    kernels: Status = field(default_factory=lambda: status())

    def __str__(self) -> str:
        forecast = [str(self.forecast)] if self.forecast else []
        return "\n".join([*self.report.lines(), *forecast, str(self.kernels)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        forecast = asdict(self.forecast) if self.forecast else None
        more = {"forecast": forecast, "kernels": asdict(self.kernels)}
        return {"task": self.task, **self.report.to_dict(), **more}


# task -> what it is trained on
HOLDS = {
    **dict.fromkeys(("translate", "prefix", "text"), "pairs"),
    **dict.fromkeys(("classify", "tag"), "rows"),
    "language": "texts",
    "series": "series",
    **dict.fromkeys(("images", "caption", "pretrain", "denoise"), "images"),
    **dict.fromkeys(("transcribe", "sounds"), "sounds"),
}


def look_over(task: str, data: str, settings: DoctorSettings, quiet: bool) -> DataReport:
    """Look over data as a task reads them."""
    columns, most = settings.columns, None if settings.full else MOST
    parts = {"valid": settings.valid, "test": settings.test}
    given = ExamineOptions(columns, settings.header, **parts, most=most, quiet=quiet)
    if task == "tag":
        column = columns if columns and "," not in columns else None
        format = SentenceFormat(column, skip_bad=True, columns=None if column else columns)
        tags = SentenceReader(format, most and MOST_SENTENCES)
        return examine_rows(data, given, tags)
    if task == "classify":
        labels = ExampleFormat(columns, skip_bad=True, header=settings.header)
        return examine_rows(data, given, ExampleReader(labels, most))
    if HOLDS[task] == "pairs":
        return examine_pairs(data, given, source=settings.source, target=settings.target)
    if HOLDS[task] == "texts":
        return examine_texts(data, given)
    if HOLDS[task] == "series":
        return examine_series(data, given)
    given = replace(given, most=most and MOST_FILES)
    if HOLDS[task] == "sounds":
        target = "text" if task == "transcribe" else "label"
        return examine_sounds(data, given, target=target, pattern=settings.pattern)
    return examine_images(data, given, labelled=task == "images")


def examine(data: str, settings: DoctorSettings, quiet: bool = True) -> Examined:
    """Look over data for a task, told or guessed, and forecast its training."""
    lookup("size", settings.size, dict.fromkeys(SIZES))
    languages = bool(settings.source or settings.target)
    media = ""
    if os.path.exists(data):
        numbers = partial(holds_series, columns=settings.columns, header=settings.header)
        kinds = {"images": holds_images, "sounds": holds_sounds, "series": numbers}
        media = next((name for name, holds in kinds.items() if holds(data)), "")
    if media and languages:
        raise UsageError(f"{data}: from= and to= are for texts, these are {media}; leave them out")
    task = media if settings.task == "classify" and media else settings.task
    if task is None:
        given = {"columns": settings.columns, "header": settings.header}
        guess = guess_task(data, languages=languages, **given)
    else:
        lookup("task", task, HOLDS)
        guess = Guess(task, "")
    task = guess.task
    report = look_over(task, data, settings, quiet)
    if guess.why:
        report.taken = f"taken for {task}: {guess.why}; choose with task="
    forecast = None
    if "train" in report.parts and report.healthy:
        captions = (data, settings.columns, settings.header)
        total = report.parts["train"].total
        try:
            forecast = forecast_training(task, settings.size, report.sample, total, captions)
        except UsageError as refused:
            what, _, remedy = str(refused).partition("; ")
            what = f"training refuses: {what}"
            finding = Finding("error", what, data, remedy or "see above", "refused")
            report.findings.insert(0, finding)
    return Examined(report, forecast, task)
