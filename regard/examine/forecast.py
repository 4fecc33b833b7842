"""A look over data before they are trained on: for which task they are, and what it would take."""

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from regard.costs.count import count as count_of
from regard.data.captions import captions_in
from regard.data.documents import find_texts, read_texts
from regard.data.image import ImageOptions, find_images, holds_images
from regard.data.labelled import (
    ExampleFormat,
    ExampleReader,
    SentenceFormat,
    SentenceReader,
    find_labelled,
)
from regard.data.table import is_folder, is_table
from regard.data.text import PairReader, find_parts
from regard.errors import UsageError, lookup
from regard.examine.guess import Guess, guess_task
from regard.examine.images import examine_images
from regard.examine.pairs import Finding, Report, examine
from regard.examine.rows import examine_rows, examine_texts
from regard.tasks import trainer
from regard.tasks.run import Rehearsed, parameters, rehearsing
from regard.training.loop import one_step
from regard.training.optim import build_optimiser

MOST = 20_000  # rows of a part that are looked at, unless all are asked for
MOST_IMAGES = 500
SAMPLE = 1000  # rows that are rehearsed with
SAMPLE_IMAGES = 128
SAMPLE_TEXT = 200_000  # characters
SECONDS = 1.0  # of steps, of which the first is not counted


@dataclass(frozen=True)
class DoctorSettings:
    """What to examine."""

    task: str | None = field(
        default=None, metadata={"help": "that the data are for; taken by their looks unless told"}
    )
    source: str | None = field(default=None, metadata={"key": "from", "help": "language read"})
    target: str | None = field(default=None, metadata={"key": "to", "help": "language written"})
    columns: str | None = field(default=None, metadata={"help": "names or numbers, as in training"})
    header: bool | None = field(default=None, metadata={"help": "whether a table begins with one"})
    valid: str | None = field(default=None, metadata={"help": "a file, or a share"})
    test: str | None = field(default=None, metadata={"help": "a file, or a share"})
    size: str = field(default="tiny", metadata={"help": "size to forecast"})
    full: bool = field(default=False, metadata={"help": "look at all rows, however long it takes"})


@dataclass(frozen=True)
class Forecast:
    """Time and memory of a training of a size on this machine."""

    task: str
    size: str
    parameters: int
    a_second: float
    of: str
    minutes_an_epoch: float
    memory_mb: float
    threads: int

    def __str__(self) -> str:
        return (
            f"forecast for {self.task} size={self.size}: about {self.parameters:,} parameters, "
            f"{self.a_second:,.0f} {self.of}/s on {self.threads} threads, "
            f"{self.minutes_an_epoch:.1f} minutes an epoch, {self.memory_mb:,.0f} MB of memory"
        )


@dataclass(frozen=True)
class Examined:
    """A report of data with its forecast."""

    report: Report
    forecast: Forecast | None
    task: str = ""

    def __str__(self) -> str:
        return "\n".join([*self.report.lines(), *([str(self.forecast)] if self.forecast else [])])

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "task": self.task,
            **self.report.to_dict(),
            "forecast": asdict(self.forecast) if self.forecast else None,
        }


# What each task looks at, and what it is rehearsed with


def _reader(task: str, how: DoctorSettings, most: int | None) -> Any:
    if task == "tag":
        column = how.columns if how.columns and "," not in how.columns else None
        columns = None if column else how.columns
        found: Any = SentenceReader(SentenceFormat(column, skip_bad=True, columns=columns))
    else:
        found = ExampleReader(ExampleFormat(how.columns, skip_bad=True, header=how.header))
    found.most = most
    return found


def _look_at_pairs(task: str, data: str, how: DoctorSettings, quiet: bool) -> Report:
    given = {"columns": how.columns, "header": how.header, "valid": how.valid, "test": how.test}
    most = None if how.full else MOST
    return examine(data, source=how.source, target=how.target, most=most, **given)


def _look_at_rows(task: str, data: str, how: DoctorSettings, quiet: bool) -> Report:
    reader = _reader(task, how, None if how.full else MOST)
    return examine_rows(data, reader, valid=how.valid, test=how.test)


def _look_at_texts(task: str, data: str, how: DoctorSettings, quiet: bool) -> Report:
    given = {"columns": how.columns, "header": how.header, "valid": how.valid, "test": how.test}
    return examine_texts(data, most=None if how.full else MOST, **given)


def _look_at_images(task: str, data: str, how: DoctorSettings, quiet: bool) -> Report:
    given = {"columns": how.columns, "header": how.header, "valid": how.valid, "test": how.test}
    most = None if how.full else MOST_IMAGES
    labelled = task == "images"
    return examine_images(data, labelled=labelled, most=most, quiet=quiet, **given)


def _train_file(data: str) -> Path:
    return find_labelled(Path(data))["train"][0] if is_folder(data) else Path(data)


def _some_pairs(data: str, how: DoctorSettings, place: Path) -> tuple[str, int]:
    part = find_parts(data, source=how.source, target=how.target)["train"]
    columns = None if part.target_path else how.columns
    reader = PairReader(
        part.path,
        target_path=part.target_path,
        columns=columns,
        header=how.header,
        skip_bad=True,
        source=how.source or part.source,
        target=how.target or part.target,
    )
    pairs = [{"source": p.source, "target": p.target} for p in islice(reader, SAMPLE)]
    return _write(place, pairs)


def _some_rows(task: str) -> Callable[..., tuple[str, int]]:
    def write(data: str, how: DoctorSettings, place: Path) -> tuple[str, int]:
        items = _reader(task, how, SAMPLE).read(_train_file(data), [])
        if task == "tag":
            return _write(place, [{"words": i.words, "tags": i.tags} for i in items])
        one = all(len(item.labels) == 1 for item in items)
        labels = [item.labels[0] if one else item.labels for item in items]
        both = zip(items, labels, strict=True)
        return _write(place, [{"text": item.text, "label": label} for item, label in both])

    return write


def _some_text(data: str, how: DoctorSettings, place: Path) -> tuple[str, int]:
    files = find_texts(Path(data))["train"]
    if len(files) == 1 and not is_table(files[0]):
        text = next(iter(read_texts(files[0])))[:SAMPLE_TEXT]
        (place / "sample.txt").write_text(text)
        return str(place / "sample.txt"), len(text)
    every = (text for path in files for text in read_texts(path, how.columns, how.header))
    return _write(place, [{"text": text} for text in islice(every, SAMPLE)])


def _some_images(task: str) -> Callable[..., tuple[str, int]]:
    def write(data: str, how: DoctorSettings, place: Path) -> tuple[str, int]:
        labelled = task == "images"
        options = ImageOptions(
            how.columns, labelled=labelled, broken="skip", header=how.header, most=SAMPLE_IMAGES
        )
        readers = find_images(Path(data), options)
        shelf = (readers.get("train") or next(iter(readers.values())))(options)
        every = range(0, len(shelf), max(1, len(shelf) // SAMPLE_IMAGES))
        picked = list(every)[:SAMPLE_IMAGES]
        told = (
            captions_in(Path(data), "train", how.columns, how.header) if task == "caption" else {}
        )
        rows = []
        for number, i in enumerate(picked):
            item = shelf.items[i]
            name = f"{item.label.replace('/', '_')}/{number}" if labelled else str(number)
            path = place / "images" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            source = shelf.paths[i] if shelf.array is None else ""
            if isinstance(source, bytes):
                path = path.with_suffix(".png")  # what is in it decides
                path.write_bytes(source)
            elif shelf.array is None:
                path = path.with_suffix(Path(item.where).suffix)
                os.symlink(os.path.abspath(item.where), path)
            else:
                path = path.with_suffix(".png")
                Image.fromarray(np.squeeze(shelf.array[i].transpose(1, 2, 0))).save(path)
            rows += [{"image": str(path), "caption": each} for each in told.get(item.where, ())[:1]]
        if task == "caption":
            return _write(place, rows)
        return str(place / "images"), len(picked)

    return write


def _write(place: Path, rows: Sequence[dict[str, Any]]) -> tuple[str, int]:
    path = place / "sample.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path), len(rows)


@dataclass(frozen=True)
class _Way:
    look: Callable[[str, str, DoctorSettings, bool], Report]
    sample: Callable[[str, DoctorSettings, Path], tuple[str, int]]
    of: str  # what a step reads


WAYS: dict[str, _Way] = {
    "translate": _Way(_look_at_pairs, _some_pairs, "tokens"),
    "prefix": _Way(_look_at_pairs, _some_pairs, "tokens"),
    "text": _Way(_look_at_pairs, _some_pairs, "tokens"),
    "classify": _Way(_look_at_rows, _some_rows("classify"), "tokens"),
    "tag": _Way(_look_at_rows, _some_rows("tag"), "tokens"),
    "language": _Way(_look_at_texts, _some_text, "tokens"),
    "images": _Way(_look_at_images, _some_images("images"), "images"),
    "caption": _Way(_look_at_images, _some_images("caption"), "images"),
    "pretrain": _Way(_look_at_images, _some_images("pretrain"), "images"),
    "denoise": _Way(_look_at_images, _some_images("denoise"), "images"),
}


def examine_any(data: str, how: DoctorSettings, quiet: bool = True) -> Examined:
    """Look over data for a task, told or taken by their looks, and forecast its training."""
    lookup("size", how.size, dict.fromkeys(("tiny", "small", "base", "big")))
    languages = bool(how.source or how.target)
    pictures = os.path.exists(data) and holds_images(data)
    if pictures and languages:
        raise UsageError(f"{data}: from= and to= are for texts, these are images; leave them out")
    asked = "images" if how.task == "classify" and pictures else how.task
    if asked is not None:
        lookup("task", asked, WAYS)
        guess = Guess(asked, "")
    else:
        guess = guess_task(data, columns=how.columns, languages=languages, header=how.header)
    way = WAYS[guess.task]
    report = way.look(guess.task, data, how, quiet)
    if guess.why:
        report.taken = f"taken for {guess.task}: {guess.why}; choose with task="
    forecast = None
    if "train" in report.parts and report.healthy:
        try:
            forecast = _forecast(guess.task, way, data, how, report.parts["train"].total)
        except UsageError as refused:
            what, _, remedy = str(refused).partition("; ")
            found = Finding("error", f"training refuses: {what}", data, remedy or "see above")
            report.findings.insert(0, replace(found, kind="refused"))
    return Examined(report, forecast, guess.task)


# What it would take


def _forecast(task: str, way: _Way, data: str, how: DoctorSettings, total: int) -> Forecast | None:
    """Measure some steps of the real thing on a sample of the data."""
    with tempfile.TemporaryDirectory() as place:
        sample, rows = way.sample(data, how, Path(place))
        if not rows:
            return None
        values = {"data": sample, "size": how.size, "out": f"{place}/run", "steps": 1}
        values |= {"broken": "skip"} if task in ("images", "pretrain", "denoise") else {}
        token = rehearsing.set(True)
        try:
            found: Rehearsed = trainer(task).train(values, quiet=True)
        finally:
            rehearsing.reset(token)
        model, work = found.model, found.training
        seconds, read = _speed(model, work, found.settings)
        batch = work.batch(0)
        try:
            kept = count_of(lambda: work.loss(model, batch), model=model).kept
        except (RuntimeError, NotImplementedError):
            kept = 0
        steps = work.epoch() * max(1.0, total / rows)
    count = parameters(model)
    if way.of == "images":
        read = rows / work.epoch()
    # weights, gradient, two moments and an average; what a batch leaves for the backward pass
    memory = 4 * 5 * count + kept
    return Forecast(
        task,
        how.size,
        count,
        round(read / seconds, 1),
        way.of,
        round(steps * seconds / 60, 3),
        round(memory / 2**20 + 300, 1),
        torch.get_num_threads(),
    )


def _speed(model: Any, task: Any, settings: Any) -> tuple[float, float]:
    """Return the seconds of a step, and how much it reads, as the middle of some."""
    model.train()
    optimiser = build_optimiser(model, lr=1e-4)
    times, reads = [], []
    started = time.perf_counter()
    for n in range(4):
        begun = time.perf_counter()
        _, _, read, _ = one_step(model, task, settings, optimiser, n, 1e-4)
        times.append(time.perf_counter() - begun)
        reads.append(read)
        if n and time.perf_counter() - started > SECONDS:
            break
    middle = len(times[1:]) // 2
    return sorted(times[1:])[middle], sorted(reads[1:])[middle]
