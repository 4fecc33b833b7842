"""What `load` returns and what `train` teaches: a task with its model, ready to be used."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, final, overload

import torch
from torch import nn

from regard.data.columns import input_column, names_in
from regard.data.in_memory import frame_rows, is_columns, rows_of
from regard.data.parts import Dataset, named_files
from regard.data.split import Split
from regard.data.table import is_folder
from regard.decode.trace import tracing
from regard.errors import UsageError, log
from regard.metrics.evaluation import Evaluation, provenance, write_outputs
from regard.modalities.base import FoundInputs, Modality, One
from regard.native import fast
from regard.native.processor import DTYPES, QUANTISED
from regard.settings import fill
from regard.tasks.frame.beams import beam_tree
from regard.tasks.frame.question import Question
from regard.tasks.frame.recipe import parameters
from regard.tasks.frame.settings import Asked, EvalSettings, RunSettings
from regard.tasks.parts import Answer, Codec, OnText, ReadsPairs, Streaming, System, Task
from regard.viewer.picture import Picture

_READ = "read_"  # keys of config.json that say how the data of the training were read
_READ_AS = ("column", "metric")  # such keys without that beginning
_PLAIN = (str, int, float, type(None))  # values of settings that cannot change in place

Given = One | Sequence[Any]  # one input: a text, a file, an array, words, messages
A = TypeVar("A", bound=Answer[Any])


@final
class Runner(Generic[A]):
    """A task with a model: it answers inputs, is judged on data, and shows where it looks.

    Args:
        task: what the model is for.
        model: the model.
        codec: what lies beside its weights.
        config: what its config.json says.
    """

    def __init__(
        self, task: Task, model: nn.Module, codec: Codec, config: Mapping[str, Any] | None = None
    ):
        self.task, self.config = task, dict(config or {})
        self.predictor: Any = task.predictor(model, codec, self.config)
        self.device = next(model.parameters()).device
        self.path = ""  # as it was loaded by
        self.folder: Path | None = None  # that it was loaded from
        self.family = str(self.config.get("family", ""))
        self.trained: Split | None = None  # what it was trained on, and what was held out
        self._defaults = fill(task.predictor.Settings, self.predictor.defaults)  # of runs
        self._completed: tuple[tuple[Any, ...], Any] = (), self._defaults  # as last given
        self._packed: dict[object, Any] = {}  # weights as kernels have them, while they hold

    # of what type model and codec are, the parts of one row know of each other

    @property
    def model(self) -> Any:
        """The model."""
        return self.predictor.model

    @property
    def codec(self) -> Any:
        """What lies beside its weights."""
        return self.predictor.codec

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def inputs(self) -> Modality[Any]:
        """Modality of one input."""
        return self.task.inputs

    @property
    def holds(self) -> str:
        """What data of the task hold."""
        return self.task.holds

    @property
    def labels(self) -> list[str]:
        """Labels that the model tells apart; none where it gives none."""
        return getattr(self.codec, "labels", [])

    @property
    def several_against(self) -> bool:
        """Whether it is judged against more than one model at once."""
        return self.task.judge.several

    # Settings

    def check(self, settings: Mapping[str, Any]) -> Any:
        """Settings of a run, completed from what a user gave and the model's own defaults."""
        # converted once for settings that stay the same from call to call, such as beam=5
        given = tuple((key, type(value), value) for key, value in settings.items())
        known, completed = self._completed
        if given != known:
            completed = fill(self.task.Run, settings, base=self._defaults)
            if all(isinstance(value, _PLAIN) for value in settings.values()):
                self._completed = given, completed
        return self.predictor.check(completed)

    def _filled(self, kind: type, settings: Mapping[str, Any]) -> Any:
        """Settings of eval or look, completed by the model's own defaults of a run.

        A key for which the verb has another default than a run keeps that.
        """
        of_run = {each.name: each.default for each in fields(self.task.Run)}
        known = {each.name: each.default for each in fields(kind)}
        own = {
            key: value
            for key, value in self.predictor.defaults.items()
            if key in known and known[key] == of_run.get(key, MISSING)
        }
        return self.predictor.check(fill(kind, {**own, **settings}))

    def look_settings(self, settings: Mapping[str, Any]) -> Any:
        """Settings of look, completed from what a user gave."""
        return self._filled(self.task.Look, settings)

    def eval_settings(self, settings: Mapping[str, Any]) -> Any:
        """Settings of an evaluation, completed by how the data of the training were read."""
        known = self.task.Eval.__dataclass_fields__
        read = {key: self.config.get(_READ + key) for key in known}
        read |= {key: self.config.get(key) for key in _READ_AS if key in known}
        told = {key: value for key, value in read.items() if isinstance(value, str) and value}
        return self._filled(self.task.Eval, {**told, **settings})

    # Running

    @property
    def usual_columns(self) -> tuple[str, ...]:
        """Usual names of the column of a table that holds inputs."""
        language = self.config.get("from")
        return (*([language] if language else []), *self.inputs.columns)

    @property
    def format(self) -> Any:
        """Format in which the model takes its files, if it takes files."""
        return getattr(self.codec, "format", None)

    @property
    def columns(self) -> list[str]:
        """Names of the columns that the model was trained on, if it was on a table."""
        names = self.config.get("columns")
        known = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return names if names and known else []

    def column_of(self, names: Sequence[str], columns: str | None = None) -> str:
        """The column of a table that is read, of these names."""
        return input_column(names, self.usual_columns, columns, self.columns)

    def inputs_of(self, given: Any, settings: Asked) -> tuple[list[Any], bool]:
        """Inputs that were given, and whether it was one input rather than several.

        Of the rows of a table (a frame, a dict of columns, records) one column is read: the one
        that columns= names, the one that the model was trained on, or one of a usual name.
        """
        modality = self.inputs
        if hasattr(given, "read"):
            given = modality.opened(given)
        rows = frame_rows(given)
        if rows is None and modality.is_one(given):
            return [given], True
        one = isinstance(given, Mapping) and not is_columns(given)  # a row
        inputs = [given] if one else list(rows_of(given) if rows is None else rows)
        if inputs and all(isinstance(row, Mapping) for row in inputs):
            asked = getattr(settings, "columns", None)
            inputs = modality.rows(
                inputs, partial(self.column_of, columns=asked), self.format, asked
            )
        return inputs, one

    def inputs_at(self, path: str, settings: Asked) -> FoundInputs | None:
        """The inputs that a file or folder is; None where they are its lines or rows."""
        return self.inputs.found(path, self.format, getattr(settings, "columns", None))

    @overload
    def run(
        self,
        inputs: One | tuple[Any, int] | list[dict[str, Any]],
        *,
        first: int = 0,
        on_text: OnText | None = None,
        **settings: Any,
    ) -> A: ...

    @overload
    def run(self, inputs: Iterable[Any], *, first: int = 0, **settings: Any) -> list[A]: ...

    def run(
        self, inputs: Any, *, first: int = 0, on_text: OnText | None = None, **settings: Any
    ) -> Any:
        """Answer one input by one answer, or a list or table of inputs by a list of answers.

        Of a table (a frame, an Arrow table, a dict of columns, records) the column that columns=
        names is read, else the one that the model was trained on, or one of a usual name.

        Args:
            inputs: one input, or several.
            first: number of the first input, where a long list comes in parts.
            on_text: is given the answer to one input piece by piece, by a model that streams.
            settings: those that `regard run MODEL --help` lists, such as beam=5 or n_best=3.
        """
        asked = self.check(settings)
        inputs, one = self.inputs_of(inputs, asked)
        if on_text is None:
            answers = self.answer(inputs, asked, first=first)
        elif len(inputs) == 1:
            answers = [self.stream(inputs[0], asked, on_text, first=first)]
        else:
            raise UsageError(f"on_text= follows one answer; give one input, not {len(inputs)}")
        return answers[0] if one else answers

    def answer(self, inputs: list[Any], settings: Asked, *, first: int = 0) -> list[A]:
        """Answers to inputs in their order, by settings that `check` has completed."""
        inputs = [self.inputs.check(given, settings, self.format) for given in inputs]
        with self.using(settings):
            return self.predictor.predict(inputs, settings, first=first)

    @property
    def streams(self) -> bool:
        """Whether an answer can be shown while it is generated."""
        return isinstance(self.predictor, Streaming)

    @property
    def from_nothing(self) -> bool:
        """Whether an empty text has an answer."""
        return self.predictor.from_nothing

    def stream(self, given: Given, settings: RunSettings, on_text: OnText, *, first: int = 0) -> A:
        """Answer one input, and pass its text on piece by piece while it is generated."""
        if not isinstance(self.predictor, Streaming):
            raise UsageError(f"{self.name} answers all at once; leave on_text out")
        given = self.inputs.check(given, settings, self.format)
        with self.using(settings):
            return self.predictor.stream(given, settings, on_text, first=first)

    @contextmanager
    def using(self, settings: Asked) -> Iterator[None]:
        """Use the threads that are asked for, and kernels, while the model is not changed."""
        before = torch.get_num_threads()
        threads = getattr(settings, "threads", None)
        if threads:
            torch.set_num_threads(threads)
        try:
            dtype = DTYPES[getattr(settings, "dtype", "float32")]
            if QUANTISED[getattr(settings, "quantise", "none")] == torch.int8:
                dtype = torch.int8
                if not hasattr(self.model, "why_no_engine"):
                    raise UsageError(
                        f"quantise=int8 is for transformers that write texts, not for "
                        f"{type(self.model).__name__}; leave it out"
                    )
            with fast(self.model, frozen=True, dtype=dtype, kept=self._packed):
                yield
        finally:
            if threads:
                torch.set_num_threads(before)

    def score(self, pairs: Sequence[tuple[str, str]], **settings: Any) -> list[A]:
        """Given answers to inputs with their log-probabilities, by a model that writes texts."""
        if not isinstance(self.predictor, ReadsPairs):
            raise UsageError(f"{self.name} scores no given answers; give a model that translates")
        asked = self.check(settings)
        with self.using(asked):
            return self.predictor.score(pairs, asked)

    def trained_as(self) -> tuple["Runner[Any]", Mapping[str, Any]]:
        """The model with the task that trains such, and the settings that say so."""
        if self.task.learnt_by is None:
            return self, getattr(self.predictor, "trained_with", {})
        other, settings = self.task.learnt_by
        return Runner(other, self.model, self.codec, self.config), settings

    # Judging

    def evaluate(
        self,
        settings: Mapping[str, Any],
        *,
        against: "Runner[Any] | Sequence[Runner[Any]] | None" = None,
        names: Sequence[str] = ("model",),
    ) -> Evaluation:
        """Judge the model on data, alone or against others, of these names after its own."""
        judge = self.task.judge
        asked = self.eval_settings(settings)
        if asked.data is not None and getattr(asked, "columns", "") is None:
            asked = self._with_columns(asked)
        if asked.data is None:
            raise UsageError(
                f"data is missing; add data=FILE or data=FOLDER with {self.task.holds}"
            )
        with self.using(asked):
            (runner, _), *others = judge.entrants([self, *listed(against)], asked, settings)
            judge = runner.task.judge
            data = judge.read(runner, asked)
            started = time.perf_counter()
            predictions = judge.predict(runner, data, asked)
            seconds = time.perf_counter() - started
            systems = [System(names[0], runner, asked, predictions, settings)]
            for name, (other, how) in zip(names[1:], others, strict=True):
                with other.using(how):
                    predicted = judge.predict(other, data, how, like=runner)
                systems.append(System(name, other, how, predicted, settings))
            judged = judge.score(runner, data, predictions, asked, systems)
            scores, comparison = list(judged.scores), []
            for other in systems[1:]:
                rows = judge.compare(runner, data, other, predictions, asked)
                if rows is None:
                    alone = replace(asked, outputs=None)
                    told = judge.score(other.runner, data, other.predictions, alone).scores
                    scores += [replace(one, name=f"{one.name} of {other.name}") for one in told]
                else:
                    many = len(others) > 1
                    comparison += (
                        [replace(row, against=other.name) for row in rows] if many else rows
                    )
            hashes = runner.codec.hashes()
            made_with = {
                "data": asked.data,
                "part": asked.part,
                "data_hash": data.part_sha(asked.part),
                **({"tokenizers": hashes} if hashes else {}),
                **judged.made_with,
                **provenance(),
            }
        if asked.outputs and judged.rows is not None:
            write_outputs(asked.outputs, judged.rows)
        return (judged.Result or judge.Result)(
            names[0],
            scores,
            judged.count,
            seconds,
            made_with,
            ", ".join(name for name in names[1:] if name) or None,
            comparison,
            runner.task.unit,
            notes=data.notes,
            **judged.fields,
        )

    def _with_columns(self, settings: EvalSettings) -> EvalSettings:
        """Settings of eval that name the columns of the training, if the data have these."""
        path, part = Path(str(settings.data)), settings.part
        files = named_files(path).get(part, []) if is_folder(path) else [path]
        names = names_in(files[0]) if len(self.columns) > 1 and files and files[0].exists() else []
        known = names and set(self.columns) <= set(names)
        return replace(settings, columns=",".join(self.columns)) if known else settings

    def read_part_of(self, data: str, part: str) -> Dataset[Any]:
        """A part of data as an evaluation would read it, or else of inputs alone."""
        try:
            return self.task.judge.read(self, self.eval_settings({"data": data, "part": part}))
        except UsageError as error:
            alone = self.inputs.load_alone(data, part, self.trained)
            if alone is None:
                raise error from None
            log(f"{error}; {self.inputs.many} alone are read")
            return alone

    # Looking

    def picture(self, given: Given, **settings: Any) -> Picture:
        """Answer one input and gather where the model looked."""
        from regard.viewer.rollout import follow

        asked = self.look_settings(settings)
        beams = getattr(asked, "beams", False)
        with self.using(asked), tracing() if beams else nullcontext() as trace:
            seen = follow(self.explain(given, asked), asked.view)
        if seen.units is not None:
            seen = seen.units(seen)
        return seen if trace is None else replace(seen, tree=beam_tree(trace, self.predictor))

    def explain(self, given: Given, settings: Asked) -> Picture:
        """Where the model looked at one input, by settings that are completed."""
        return self.predictor.explain(self.inputs.check(given, settings, self.format), settings)

    def question(self, given: Given, settings: Asked, expected: Any = None) -> Question:
        """An input with the model's answer and its log-probability."""
        given = self.inputs.check(given, settings, self.format)
        found = self.predictor.answer_logprobs(given, settings, expected)
        if found.unit != "loss":  # it is measured by something else than a probability
            raise UsageError(
                f"{self.name} gives no answer with a probability that could be lost when something "
                "is cut; give the model a head with: regard train classify init=MODEL ..., and "
                "look at that. What attends to what: regard look without cause=, lens= and patch="
            )
        if found.caveat:
            log(found.caveat)
        return found

    def probe(self, given: Given) -> Question:
        """What of an input is compared before and after a change of the model."""
        settings = self.look_settings({})
        given = self.inputs.check(given, settings, self.format)
        return self.predictor.answer_logprobs(given, settings)

    def __repr__(self) -> str:
        told: dict[str, Any] = {"task": self.name, "family": self.family}
        told["parameters"] = f"{parameters(self.model):,}"
        if self.config.get("from") and self.config.get("to"):
            told["languages"] = f"{self.config['from']} to {self.config['to']}"
        if self.labels:
            told["labels"] = len(self.labels)
        told["device"] = self.device
        words = ", ".join(f"{key}={value}" for key, value in told.items() if value != "")
        return f"Runner({self.path!r}, {words})"


def listed(against: Any) -> Sequence[Any]:
    """Models to be judged against: none, one, or several."""
    return against if isinstance(against, Sequence) else [] if against is None else [against]
