"""A look over data before they are trained on: for which task they are, and what it would take."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from regard.data.labelled import ExampleFormat, ExampleReader, SentenceFormat, SentenceReader
from regard.errors import UsageError
from regard.examine.files import examine_files
from regard.examine.forecast import Forecast, forecast_training
from regard.examine.guess import Guess, guess_task
from regard.examine.pairs import examine_pairs
from regard.examine.report import DataReport
from regard.examine.rows import examine_rows, examine_texts
from regard.modalities import modality_of
from regard.modalities.base import ExamineOptions, Finding
from regard.native import Status, fast, status
from regard.settings import setting
from regard.tasks import TASKS, task_for
from regard.tasks import task as task_class
from regard.tasks.runner import Runner

MOST = 10_000  # rows of a part that are looked at, unless all are asked for
_MOST_SENTENCES = 3000  # with a tag for each word
_MOST_FILES = 500  # that are images or sounds
_SIZES = ("tiny", "small", "base", "big")


@dataclass(frozen=True)
class DoctorSettings:
    """What to examine."""

    task: str | None = setting(
        None, "task that the data are for; guessed unless told", choices=TASKS
    )
    source: str | None = setting(None, "source language", key="from")
    target: str | None = setting(None, "target language", key="to")
    columns: str | None = setting(None, "columns by name or number, as in training")
    header: bool | None = setting(None, "whether a table has a header row; detected unless given")
    valid: str | None = setting(None, "validation part: a file, or a share of train")
    test: str | None = setting(None, "test part: a file, or a share of train")
    pattern: str | None = setting(None, "sounds: file names with labels, as in training")
    size: str | None = setting(
        None, "model size to forecast; that of a training unless given", choices=_SIZES
    )
    full: bool = setting(False, "look at all rows, however long it takes")


@dataclass(frozen=True)
class Examined:
    """A report of data with its forecast."""

    report: DataReport
    forecast: Forecast | None
    task: str = ""
    kernels: Status = field(default_factory=lambda: status())

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 1 if training would refuse the data."""
        return 0 if self.report.healthy else 1

    def __str__(self) -> str:
        forecast = [str(self.forecast)] if self.forecast else []
        return "\n".join([*self.report.lines(), *forecast, str(self.kernels)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        forecast = asdict(self.forecast) if self.forecast else None
        more = {"forecast": forecast, "kernels": asdict(self.kernels)}
        return {"task": self.task, **self.report.to_dict(), **more}


@dataclass(frozen=True)
class ExaminedModel:
    """How a model is run on this machine."""

    name: str
    task: str
    parameters: int
    search: str  # why it is decoded by the search in Python; "" if it is decoded natively
    steps: str  # why the steps of that search are not computed natively, either
    quantise: str = "none"  # how its products are computed, unless told otherwise
    kernels: Status = field(default_factory=lambda: status())
    exit_code = 0

    @classmethod
    def of(cls, name: str, loaded: Runner[Any]) -> "ExaminedModel":
        """Examine a model that was loaded."""
        model: Any = loaded.model
        with fast(model, frozen=True):
            told = getattr(model, "why_no_engine", None)
            why = told() if told else f"the engine does not know {type(model).__name__}"
            steps = getattr(model, "why_no_steps", lambda: why)()
        count, usual = sum(p.numel() for p in model.parameters()), loaded.predictor.defaults
        return cls(name, loaded.name, count, why, steps, usual.get("quantise", "none"))

    def __str__(self) -> str:
        native = "natively" if self.quantise == "none" else f"natively in {self.quantise}"
        steps = (
            "by PyTorch and kernels" if self.steps else f"step by step in Python, steps {native}"
        )
        decoded = f"{steps}: {self.search}" if self.search else native
        lines = [f"{self.name}: {self.task}, {self.parameters:,} parameters", f"decoded {decoded}"]
        return "\n".join([*lines, str(self.kernels)])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


# Texts by what a task learns of them


def _examine_examples(
    data: str, settings: DoctorSettings, given: ExamineOptions, labelled: bool = True
) -> DataReport:
    format = ExampleFormat(given.columns, skip_bad=True, header=given.header)
    return examine_rows(data, given, ExampleReader(format, given.most), labelled=labelled)


def _examine_tags(data: str, settings: DoctorSettings, given: ExamineOptions) -> DataReport:
    columns = given.columns
    column = columns if columns and "," not in columns else None
    format = SentenceFormat(column, skip_bad=True, columns=None if column else columns)
    return examine_rows(data, given, SentenceReader(format, given.most and _MOST_SENTENCES))


def _examine_pairs(data: str, settings: DoctorSettings, given: ExamineOptions) -> DataReport:
    return examine_pairs(data, given, source=settings.source, target=settings.target)


Examiner = Callable[[str, DoctorSettings, ExamineOptions], DataReport]
_EXAMINERS: dict[str, Examiner] = {
    "text": _examine_pairs,
    "label": _examine_examples,
    "number": partial(_examine_examples, labelled=False),
    "tags": _examine_tags,
    "": lambda data, settings, given: examine_texts(data, given),
}


def _examine_files(
    kind: Any, data: str, settings: DoctorSettings, given: ExamineOptions
) -> DataReport:
    asked = replace(given, most=given.most and _MOST_FILES, target=kind.target)
    return examine_files(data, kind.inputs, asked)


def examiner_of(kind: Any) -> Examiner:
    """Look up what examines the data of a task, or refuse one that is not trained on such data."""
    if kind.target is None or (kind.inputs.in_rows and kind.target not in _EXAMINERS):
        raise UsageError(
            f"task={kind.name} is not trained on data that can be examined; give one that is, "
            "such as task=classify"
        )
    return _EXAMINERS[kind.target] if kind.inputs.in_rows else partial(_examine_files, kind)


def examine(data: str, settings: DoctorSettings, quiet: bool = True) -> Examined:
    """Look over data for a task, told or guessed, and forecast its training."""
    languages = bool(settings.source or settings.target)
    told = {"columns": settings.columns, "header": settings.header}
    held = modality_of(data, **told)
    if held is not None and languages:
        raise UsageError(
            f"{data}: from= and to= are for texts, these are {held.many}; leave them out"
        )
    if settings.task is None:
        guess = guess_task(data, languages=languages, **told)
    else:
        guess = Guess(task_for(settings.task, {"data": data, **told}), "")
    task, kind = guess.task, task_class(guess.task)
    told |= {"valid": settings.valid, "test": settings.test}
    more = {"quiet": quiet, "pattern": settings.pattern}
    given = ExamineOptions(**told, most=None if settings.full else MOST, **more)
    report = examiner_of(kind)(data, settings, given)
    if guess.why:
        report.taken = f"taken for {task}: {guess.why}; choose with task="
    forecast = None
    if "train" in report.parts and report.healthy:
        values = {"data": data, "size": settings.size, **told}
        total = report.parts["train"].total
        try:
            forecast = forecast_training(kind, values, report.sample, total)
        except UsageError as refused:
            what, _, remedy = str(refused).partition("; ")
            what = f"training refuses: {what}"
            finding = Finding("error", what, data, remedy or "see above", "refused")
            report.findings.insert(0, finding)
    return Examined(report, forecast, task)
