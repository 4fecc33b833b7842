"""A look over data before they are trained on: for which task they are, and what it would take."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from regard.data.image_files import holds_images
from regard.data.labelled import ExampleFormat, ExampleReader, SentenceFormat, SentenceReader
from regard.errors import UsageError, lookup
from regard.examine.forecast import Forecast, forecast_training
from regard.examine.guess import Guess, guess_task
from regard.examine.images import examine_images
from regard.examine.pairs import examine_pairs
from regard.examine.report import DataReport, Finding
from regard.examine.rows import examine_rows, examine_texts
from regard.native import Status, status
from regard.settings import setting

MOST = 20_000  # rows of a part that are looked at, unless all are asked for
MOST_IMAGES = 500
SIZES = ("tiny", "small", "base", "big")


@dataclass(frozen=True)
class DoctorSettings:
    """What to examine."""

    task: str | None = setting(None, "task that the data are for; guessed unless told")
    source: str | None = field(default=None, metadata={"key": "from", "help": "source language"})
    target: str | None = field(default=None, metadata={"key": "to", "help": "target language"})
    columns: str | None = setting(None, "columns by name or number, as in training")
    header: bool | None = setting(None, "whether a table has a header row; guessed unless told")
    valid: str | None = setting(None, "validation part: a file, or a share of train")
    test: str | None = setting(None, "test part: a file, or a share of train")
    size: str = setting("tiny", "model size to forecast")
    full: bool = setting(False, "look at all rows, however long it takes")


@dataclass(frozen=True)
class Examined:
    """A report of data with its forecast."""

    report: DataReport
    forecast: Forecast | None
    task: str = ""
    kernels: Status = field(default_factory=status)

    def __str__(self) -> str:
        forecast = [str(self.forecast)] if self.forecast else []
        return "\n".join([*self.report.lines(), *forecast, str(self.kernels)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        forecast = asdict(self.forecast) if self.forecast else None
        more = {"forecast": forecast, "kernels": asdict(self.kernels)}
        return {"task": self.task, **self.report.to_dict(), **more}


# What each task looks at


def _look_at_pairs(
    task: str, data: str, settings: DoctorSettings, most: int | None, given: dict[str, Any]
) -> DataReport:
    return examine_pairs(data, source=settings.source, target=settings.target, most=most, **given)


def _look_at_rows(
    task: str, data: str, settings: DoctorSettings, most: int | None, given: dict[str, Any]
) -> DataReport:
    columns, reader = settings.columns, None
    if task == "tag":
        column = columns if columns and "," not in columns else None
        format = SentenceFormat(column, skip_bad=True, columns=None if column else columns)
        reader = SentenceReader(format)
    else:
        reader = ExampleReader(ExampleFormat(columns, skip_bad=True, header=settings.header))
    reader.most = most
    return examine_rows(data, reader, valid=settings.valid, test=settings.test)


def _look_at_texts(
    task: str, data: str, settings: DoctorSettings, most: int | None, given: dict[str, Any]
) -> DataReport:
    return examine_texts(data, most=most, **given)


def _look_at_images(
    task: str, data: str, settings: DoctorSettings, most: int | None, given: dict[str, Any]
) -> DataReport:
    most = most and MOST_IMAGES
    return examine_images(data, labelled=task == "images", most=most, **given)


LOOKS: dict[str, Callable[..., DataReport]] = {
    **dict.fromkeys(("translate", "prefix", "text"), _look_at_pairs),
    **dict.fromkeys(("classify", "tag"), _look_at_rows),
    "language": _look_at_texts,
    **dict.fromkeys(("images", "caption", "pretrain", "denoise"), _look_at_images),
}


def examine(data: str, settings: DoctorSettings, quiet: bool = True) -> Examined:
    """Look over data for a task, told or guessed, and forecast its training."""
    lookup("size", settings.size, dict.fromkeys(SIZES))
    languages = bool(settings.source or settings.target)
    pictures = os.path.exists(data) and holds_images(data)
    if pictures and languages:
        raise UsageError(f"{data}: from= and to= are for texts, these are images; leave them out")
    task = "images" if settings.task == "classify" and pictures else settings.task
    if task is None:
        given = {"columns": settings.columns, "header": settings.header}
        guess = guess_task(data, languages=languages, **given)
    else:
        lookup("task", task, LOOKS)
        guess = Guess(task, "")
    task = guess.task
    given = {"columns": settings.columns, "header": settings.header}
    given |= {"valid": settings.valid, "test": settings.test}
    given |= {"quiet": quiet} if LOOKS[task] is _look_at_images else {}
    report = LOOKS[task](task, data, settings, None if settings.full else MOST, given)
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
            found = Finding("error", f"training refuses: {what}", data, remedy or "see above")
            report.findings.insert(0, replace(found, kind="refused"))
    return Examined(report, forecast, task)
