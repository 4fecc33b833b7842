"""Answers to folders of files, a shard at a time, on one machine or on many; and for Ray."""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regard.answering import CHUNK_LINES, Input, answers, in_chunks, merge_record, rows_in
from regard.errors import UsageError, as_json, log
from regard.files import (
    delete,
    make_folder,
    read_json,
    refuse,
    replacing,
    sweep,
    write_atomically,
    write_json,
)
from regard.verbs import Call

if TYPE_CHECKING:
    from regard.tasks.runner import Runner as Model

_TOGETHER = 16  # files of one input each that are answered at once
_MOST_SHARDS = 1_000_000
_ABOUT = ".run.json"  # by which model and settings the answers of a folder are
_MACHINE = ("threads", "device")  # settings that do not change an answer
_ERRORS = re.compile(r"errors(-\d+-of-\d+)?\.jsonl")
_PACKED = (".gz", ".xz")
_LISTS = frozenset((".jsonl", ".list", ".csv", ".tsv", ".parquet", ".arrow", ".feather"))
_TABLES = _LISTS - {".jsonl", ".list"}

T = TypeVar("T")
R = TypeVar("R")
Parts = Iterable[tuple[list[Input], UsageError | None]]


class _Unreadable(Exception):
    """Why a file cannot be read to its end."""


@dataclass(frozen=True)
class Shard:
    """One of several equal shares of the files, the first of which has number 0."""

    number: int = 0
    count: int = 1

    @classmethod
    def asked(cls, value: str | None, environment: Mapping[str, str] = os.environ) -> "Shard":
        """The shard that is asked for by i/n, by n alone, or by the scheduler's variables.

        A Slurm array says both numbers, an indexed Job of Kubernetes only which it is.
        """
        numbers = re.fullmatch(r"(?:(\d{1,7})/)?(\d{1,7})", value) if value is not None else None
        if value is not None and numbers is None:
            raise UsageError(
                f"shard={value!r:.40}: expected i/n with i from 0 to n-1, such as shard=0/8; or n "
                "alone where SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX says which"
            )
        if numbers is not None and numbers[1] is not None:
            return cls(int(numbers[1]), int(numbers[2]))._checked(f"shard={value}")
        index = environment.get("JOB_COMPLETION_INDEX")
        known = _slurm_shard(environment) if index is None else None
        if numbers is None:
            if index is not None:
                raise UsageError(
                    f"JOB_COMPLETION_INDEX={index} does not say of how many; "
                    "give shard=N, with the completions of the Job"
                )
            return known or cls()
        if known is not None and known.count != int(numbers[2]):
            raise UsageError(
                f"shard={value}: the array has {known.count} tasks; leave shard= out, or give i/n"
            )
        if known is not None:
            return known
        if index is None or not re.fullmatch(r"\d{1,7}", index):
            raise UsageError(
                f"shard={value}: neither SLURM_ARRAY_TASK_ID nor JOB_COMPLETION_INDEX says which "
                f"of {value}; give shard=i/{value}"
            )
        return cls(int(index), int(numbers[2]))._checked(f"JOB_COMPLETION_INDEX={index}")

    def _checked(self, said: str) -> "Shard":
        if not self.number < self.count <= _MOST_SHARDS:
            raise UsageError(
                f"{said}: of {self.count} shards the numbers are 0 to {max(0, self.count - 1)}, "
                f"and at most {_MOST_SHARDS:,} are possible"
            )
        return self

    @property
    def errors(self) -> str:
        """Name of the file that tells of its inputs without an answer."""
        one = "" if self.count == 1 else f"-{self.number}-of-{self.count}"
        return f"errors{one}.jsonl"


def _slurm_shard(environment: Mapping[str, str]) -> Shard | None:
    """The shard of a task of a Slurm array, whose numbers need not begin with 0."""
    if "SLURM_ARRAY_TASK_ID" not in environment:
        return None
    names = ("ID", "COUNT", "MIN", "MAX", "STEP")
    said = [environment.get(f"SLURM_ARRAY_TASK_{name}", "") for name in names]
    said[2:] = [value or usual for value, usual in zip(said[2:], ("0", "", "1"), strict=True)]
    with suppress(ValueError):
        number, count, low, step = (int(said[at]) for at in (0, 1, 2, 4))
        place, rest = divmod(number - low, step)
        whole = not said[3] or int(said[3]) - low == (count - 1) * step
        if whole and rest == 0 and 0 <= place < count <= _MOST_SHARDS:
            return Shard(place, count)
    raise UsageError(
        f"task {said[0]} of an array of {said[1] or 'unknown'} tasks whose numbers have gaps or "
        "are not known; give shard=i/n"
    )


@dataclass(frozen=True)
class Folders:
    """Where the files are that are to be answered, where the answers go, and which share."""

    source: Path
    out: Path
    shard: Shard

    @classmethod
    def taken(cls, settings: MutableMapping[str, Any], words: Sequence[str]) -> "Folders | None":
        """What the settings of a run say, taken out of them; None where no folder is named."""
        source, shard = settings.pop("in", None), settings.pop("shard", None)
        if source is None:
            if shard is not None:
                raise UsageError(f"shard={shard} is a share of a folder; add in=FOLDER out=FOLDER")
            return None
        if words:
            raise UsageError(f"'{words[0]!s:.40}' beside in={source}; give one of them")
        if (out := settings.pop("out", None)) is None:
            raise UsageError(f"in={source}: out is missing; add out=FOLDER for the answers")
        if not os.path.isdir(source):
            raise UsageError(f"in={source}: no such folder; expected one of files to be answered")
        if os.path.exists(out) and not os.path.isdir(out):
            raise UsageError(f"out={out}: a file; expected a folder for the answers")
        one, other = Path(source).resolve(), Path(out).resolve()
        if one == other or one in other.parents or other in one.parents:
            raise UsageError(
                f"in={source} and out={out}: one lies within the other, so answers would be "
                "answered; choose another out="
            )
        return cls(Path(source), Path(out), Shard.asked(shard))


class ErrorLog:
    """Inputs without an answer, a line each in a file that is made for the first."""

    def __init__(self, path: Path, finished: Callable[[str], bool]):
        self.path, self.count, self.file = path, 0, None
        if not path.exists():
            return
        kept = 0
        with replacing(path) as temporary, open(path, "rb") as old, open(temporary, "wb") as new:
            for line in old:
                with suppress(ValueError, KeyError, TypeError):
                    if finished(str(json.loads(line)["input"])):  # else it is answered again
                        kept += new.write(line)
        if not kept:
            delete(path)

    def tell(self, name: str, number: int | None, mistake: Exception) -> None:
        """Tell of a file, or of the input of this number in it."""
        self.count += 1
        told = {"input": name, **({} if number is None else {"number": number})}
        try:
            self.file = self.file or open(self.path, "ab")  # noqa: SIM115
            self.file.write((as_json({**told, "error": str(mistake)}) + "\n").encode())
            self.file.flush()  # before its answers have their name
        except OSError as error:
            raise refuse(error, self.path) from error


def apart(
    ask: Callable[[list[T], int], Sequence[R]], inputs: list[T], first: int = 0
) -> Iterator[R | UsageError]:
    """Answers to inputs, the first of this number, or why one has none.

    What is refused together is asked again in halves, down to the one that is at fault.
    """
    try:
        found = ask(inputs, first)
    except UsageError as mistake:
        if len(inputs) == 1:
            yield mistake
            return
        half = len(inputs) // 2
        yield from apart(ask, inputs[:half], first)
        yield from apart(ask, inputs[half:], first + half)
        return
    yield from found


class Job:
    """A shard of a folder that a model answers: an output for each input, by rename.

    Args:
        model: the model.
        folders: the files, where the answers go, and the share.
        call: what the user asked, with completed settings.
    """

    def __init__(self, model: "Model[Any]", folders: Folders, call: Call):
        self.model, self.folders, self.call = model, folders, call
        self.writes = hasattr(call.completed, "out")  # answers are files, as those of denoise
        names, others = self._names()
        if not names:
            known = ", ".join(sorted(model.inputs.suffixes | _LISTS)) or "any"
            raise UsageError(f"in={folders.source}: no file to answer; expected {known}")
        log(f"{others:,} files of other kinds are left out", call.quiet or not others)
        self.names = names
        self.outputs = {name: folders.out / self._output(name) for name in names}
        taken: dict[Path, str] = {}
        for name, path in self.outputs.items():
            if path.parent == folders.out and _ERRORS.fullmatch(path.name):
                raise UsageError(f"{name}: its answers would be taken for {path.name}; rename it")
            if (other := taken.setdefault(path, name)) != name:
                raise UsageError(f"{name} and {other} would both be answered in {path}; rename one")
        together = 1 if model.inputs.in_rows or self.writes else _TOGETHER
        # the same files together whatever the number of shards, so that answers are the same bytes
        starts = range(0, len(names), together)[folders.shard.number :: folders.shard.count]
        self.groups = [(start, names[start : start + together]) for start in starts]

    def _names(self) -> tuple[list[str], int]:
        """Paths of the files to be answered, from their folder on, and the number of others."""
        names, others, known = [], 0, self.model.inputs.suffixes
        for place, folders, files in os.walk(self.folders.source):
            folders[:] = [name for name in folders if not name.startswith(".")]
            for name in files:
                if name.startswith("."):
                    continue
                if known and os.path.splitext(name)[1].lower() not in known | _LISTS:
                    others += 1
                    continue
                names.append(Path(place, name).relative_to(self.folders.source).as_posix())
        return sorted(names), others

    def _output(self, name: str) -> str:
        """Name of the answers to a file: its own if they are lines for lines."""
        stem, suffix = os.path.splitext(name)
        name, suffix = (stem, os.path.splitext(stem)[1]) if suffix in _PACKED else (name, suffix)
        suffix = suffix.lower()
        if suffix in self.model.inputs.suffixes and self.writes:
            return name if suffix == ".png" else f"{name}.png"
        if self.call.json or suffix in _TABLES:
            return name if suffix == ".jsonl" else f"{name}.jsonl"
        subtitles = getattr(self.call.completed, "format", "")
        ending = subtitles if subtitles in ("srt", "vtt") else "txt"
        return f"{name}.{ending}" if suffix in self.model.inputs.suffixes else name

    def run(self) -> None:
        """Answer what is not yet answered."""
        from regard.training.progress import Progress

        out, shard = self.folders.out, self.folders.shard
        self._same_run()
        for folder in {self.outputs[name].parent for _, group in self.groups for name in group}:
            sweep(folder)
        errors = ErrorLog(out / shard.errors, self._finished)
        count = sum(len(group) for _, group in self.groups)
        before = sum(self._finished(name) for _, group in self.groups for name in group)
        with Progress("files", count, quiet=self.call.quiet) as bar:
            for start, group in self.groups:
                if not all(map(self._finished, group)):
                    self._answer(group, start, errors)
                bar.update(len(group))
        done = sum(self._finished(name) for _, group in self.groups for name in group)
        told = f"{out}: {done - before:,} of {count:,} files answered"
        told += f", {before:,} were before" if before else ""
        told += f"; {errors.count:,} errors are in {errors.path}" if errors.count else ""
        log(told, self.call.quiet)

    def _finished(self, name: str) -> bool:
        return name in self.outputs and self.outputs[name].exists()

    def _same_run(self) -> None:
        """Refuse a folder that holds answers of another model, or by other settings."""
        from regard.files.hashes import SUMS
        from regard.retrieval import fingerprint
        from regard.tasks.frame.settings import flat

        home, out = self.model.folder, self.folders.out
        sums = None if home is None else home / SUMS
        told: dict[str, Any] = {"json": self.call.json}
        if home is not None and sums is not None:
            told["model"] = fingerprint(sums if sums.exists() else home)
        told |= {k: v for k, v in flat(self.call.completed).items() if k not in _MACHINE}
        ours = json.loads(as_json(told))
        try:
            make_folder(out)
        except OSError as error:
            raise refuse(error, out) from error
        if not (out / _ABOUT).exists():
            return write_json(out / _ABOUT, ours)
        theirs = read_json(out / _ABOUT)
        for key in {**ours, **theirs}:
            if ours.get(key) != theirs.get(key):
                said = f"by {key}={theirs.get(key)!s:.40}, not {ours.get(key)!s:.40}"
                said = "of another model" if key == "model" else said
                raise UsageError(f"out={out} holds answers {said}; choose another out=")

    def _answer(self, group: list[str], first: int, errors: ErrorLog) -> None:
        """Answer files; those of one input each together, the others line by line."""
        single: list[str] = []
        for name in group:
            path = str(self.folders.source / name)
            try:
                found = self.model.inputs_at(path, self.call.completed)
            except UsageError as mistake:
                errors.tell(name, None, mistake)
                continue
            if found is not None and not found.rows and not found.several:
                single.append(name)
            elif not self._finished(name):
                rows = found.inputs if found else rows_in(path, self.model, self.call)
                named = found is not None and found.several
                self._write_rows(name, in_chunks(rows, CHUNK_LINES, faulty=True), errors, named)
        if not single:
            return
        inputs: list[Input] = [(str(self.folders.source / name), None) for name in single]
        ask = self._ask(self.outputs[single[0]] if self.writes else None)
        told = apart(ask, inputs, 0 if self.writes else first)
        for name, lines in zip(single, told, strict=True):
            if isinstance(lines, UsageError):
                errors.tell(name, None, lines)
            elif not self._finished(name) and self.writes:
                errors.tell(name, None, UsageError(" ".join(lines)))
            elif not self._finished(name):
                write_atomically(self.outputs[name], "".join(f"{line}\n" for line in lines))

    def _ask(self, out: Path | None = None, named: bool = False) -> Any:
        """What answers inputs, or refuses them together; `out` is the file that an answer is."""
        call = self.call
        if out is not None:
            make_folder(out.parent)
            call = replace(call, completed=replace(call.completed, out=str(out)))

        def ask(inputs: list[Input], first: int) -> list[list[str]]:
            for text, _ in inputs:
                if isinstance(text, UsageError):
                    raise text
            return list(answers(self.model, inputs, call, first=first, named=named))

        return ask

    def _write_rows(self, name: str, parts: Parts, errors: ErrorLog, named: bool) -> None:
        """Write the answers to the lines or rows of a file, a chunk at a time."""
        ask, first = self._ask(named=named), 0
        try:
            with (
                replacing(self.outputs[name]) as temporary,
                open(temporary, "w", encoding="utf-8", newline="\n") as file,
            ):
                for chunk, mistake in parts:
                    told = apart(ask, chunk, first) if chunk else ()
                    for number, lines in enumerate(told):
                        if isinstance(lines, UsageError):
                            errors.tell(name, first + number + 1, lines)
                            lines = self._without_answer(chunk[number], lines)
                        file.writelines(line.replace("\n", " ") + "\n" for line in lines)
                    first += len(chunk)
                    if mistake:
                        raise _Unreadable(mistake)
        except _Unreadable as broken:
            errors.tell(name, None, broken)

    def _without_answer(self, given: Input, mistake: UsageError) -> list[str]:
        """Lines in the place of an answer."""
        if given[1] is not None or self.call.json:
            return [as_json(merge_record(given[1] or {}, {"error": str(mistake)}))]
        return [""] * getattr(self.call.completed, "n_best", 1)


def answer_folder(model: "Model[Any]", folders: Folders, call: Call) -> None:
    """Answer the files of a folder, or a shard of them, and go on where it was stopped."""
    Job(model, folders, call).run()


class RowRunner:
    """A model as `ray.data` takes it: dataset.map_batches(Runner, fn_constructor_args=("en-zh",)).

    To the columns of a row it adds those of its answer, and `error`, which says why there is none.

    Args:
        model: a starter's name, or a folder.
        device: cpu or cuda.
        task: what to use it for, if not for its own task.
        settings: those of `regard run`, such as beam=5 or columns="text".
    """

    def __init__(
        self, model: str | Path, device: str = "cpu", task: str | None = None, **settings: Any
    ):
        from regard.api import load

        self.model = load(model, device, task=task)
        self.settings = self.model.check(settings)

    def __call__(self, batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
        """Rows of a batch, by columns, with the answers beside them."""
        rows = [dict(zip(batch, cells, strict=True)) for cells in zip(*batch.values(), strict=True)]

        def ask(some: list[dict[str, Any]], first: int) -> list[dict[str, Any]]:
            inputs, _ = self.model.inputs_of(some, self.settings)
            found = self.model.answer(inputs, self.settings, first=first)
            return [answer.record(self.settings) for answer in found]

        told = [
            {"error": str(one)} if isinstance(one, UsageError) else {**one, "error": None}
            for one in (apart(ask, rows) if rows else ())
        ]
        whole = [merge_record(*pair) for pair in zip(rows, told, strict=True)]
        columns = dict.fromkeys(key for row in whole for key in row)
        return {key: [row.get(key) for row in whole] for key in columns}


Runner = RowRunner  # the one of a cluster: regard.cluster.Runner
