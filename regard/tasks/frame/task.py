"""One Task: what a model is for, as one class with its model, its codec and its config.

A task class says how its data are read, what lies beside the weights (the codec), which model is
built, what a batch and the loss are, and how inputs are predicted, scored and explained. An
instance has a model: `train` makes one to learn, `load` makes one to be used. Folders, resuming,
settings, threads, evaluation against other models and JSON are the frame's.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Self, TextIO, TypeVar, overload

import torch
from torch import Tensor, nn

from regard.data.columns import input_column, names_in
from regard.data.in_memory import frame_rows, is_columns, rows_of
from regard.data.parts import Dataset, named_files
from regard.data.split import Split
from regard.data.table import is_folder
from regard.decode.trace import tracing
from regard.errors import UsageError, lookup
from regard.metrics.evaluation import Evaluation, provenance, write_outputs
from regard.metrics.results import key_of
from regard.metrics.score import Comparison, Score
from regard.modalities.base import Found, Modality, One
from regard.modalities.text import TEXT
from regard.models import family, preset, preset_family, preset_names, serving
from regard.models.protocols import Model
from regard.native import fast
from regard.native.processor import DTYPES
from regard.settings import fill
from regard.tasks.frame.beams import beam_tree
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import Question
from regard.tasks.frame.recipe import parameters
from regard.tasks.frame.settings import (
    SHORT,
    EvalSettings,
    RunSettings,
    TrainSettings,
    derived,
    is_derived,
    resolve_train,
    size_of,
    with_parts,
)
from regard.tasks.parts import (  # noqa: F401
    Answer,
    Batches,
    Choice,
    Codec,
    Learnt,
    NoCodec,
    build_model,
)
from regard.viewer.settings import LookSettings

OnText = Callable[[str], None]  # is given a text piece by piece while it is generated


@dataclass(frozen=True)
class Judged:
    """The scores of predictions, how many were judged, and further fields of the evaluation."""

    scores: list[Score]
    count: int
    fields: dict[str, Any] = field(default_factory=dict)
    made_with: dict[str, Any] = field(default_factory=dict)  # what else the scores depend on


class System(NamedTuple):
    """A model that is judged, by which settings, and what it predicted."""

    name: str
    task: "Task[Any, Any]"
    settings: Any
    predictions: Any


S = TypeVar("S", bound=TrainSettings)
C = TypeVar("C", bound=Codec)
A = TypeVar("A", bound=Answer)


class Task(Generic[C, A]):
    """What a model is for. See the module for what a task says and what is the frame's."""

    # What it is
    name: ClassVar[str]
    holds: ClassVar[str]  # what its data hold, such as "texts and labels"
    unit: ClassVar[str] = "texts"  # what an evaluation counts
    better: ClassVar[str] = "-loss"  # the score that a validation raises, or with - lowers
    inputs: ClassVar[Modality[Any]] = TEXT
    # what is learnt of an input: text, label, tags, number, or "" for nothing beside it;
    # None: it has no training of its own
    target: ClassVar[str | None] = None
    few_rows: ClassVar[int] = 0  # rows up to which few=true chooses a model by the data
    from_nothing: ClassVar[bool] = False  # whether an empty text has an answer
    streams: ClassVar[bool] = False  # whether an answer can be shown while it is generated
    dynamic: bool = True  # whether batches differ in shape, for compile=true
    # Settings of the verbs; unless given, Eval is EvalSettings with Run, Look LookSettings with Run
    Train: ClassVar[type]
    Run: ClassVar[type] = RunSettings
    Eval: ClassVar[type]
    Look: ClassVar[type]
    sizes: ClassVar[Mapping[str, Mapping[str, Any]]] = {}  # what a size means for training
    short: ClassVar[Mapping[str, str | tuple[str, ...]]] = SHORT
    generation: Mapping[str, Any] = {}  # how to decode by default
    several_against: ClassVar[bool] = False  # whether it is judged against more than one at once
    Result: type[Evaluation] = Evaluation  # of an evaluation; a model may set its own

    def __init_subclass__(cls, **rest: Any) -> None:
        super().__init_subclass__(**rest)
        if "Run" in cls.__dict__:
            if is_derived(getattr(cls, "Eval", None)):
                cls.Eval = derived(f"{cls.__name__}Eval", EvalSettings, cls.Run)
            if is_derived(getattr(cls, "Look", None)):
                cls.Look = derived(f"{cls.__name__}Look", LookSettings, cls.Run)

    def __init__(self, model: nn.Module, codec: C, config: Mapping[str, Any] | None = None):
        """Take a model, what lies beside it, and what its config.json says."""
        self.model: Any = model  # what a task asks of it is a protocol of models
        self.codec, self.config = codec, dict(config or {})
        self.device = next(model.parameters()).device
        self.path = ""  # as it was loaded by
        self.folder: Path | None = None  # that it was loaded from
        self.family = str(self.config.get("family", ""))
        self.trained: Split | None = None  # what it was trained on, and what was held out
        self._defaults: tuple[dict[str, Any], Any] | None = None  # of runs: as given, completed

    @property
    def task(self) -> str:
        """Return the name of the task."""
        return self.name

    @property
    def format(self) -> Any:
        """How inputs are brought to the model, where their modality has a format."""
        return getattr(self.codec, "format", None)

    # ---- Training: what a task says

    @classmethod
    def instead(cls, values: Mapping[str, Any]) -> str:
        """Return the task to train by such data: this one, or the one for another modality."""
        return cls.name

    @classmethod
    def read(cls, settings: Any, origin: Origin | None) -> Dataset[Any]:
        """Read the parts to train and to validate on."""
        raise UsageError(f"{cls.name} has no training of its own")

    @classmethod
    def defaults_for_data(
        cls, settings: Any, values: Mapping[str, Any], data: Any
    ) -> tuple[Any, Choice | None]:
        """Settings whose defaults follow the data where the user gave none, and what was chosen."""
        return settings, None

    @classmethod
    def make_codec(cls, data: Any, settings: Any, learnt: Learnt, origin: Origin | None) -> C:
        """Make what lies beside the weights; what is learnt is settled by `learnt`."""
        raise NotImplementedError

    @classmethod
    def make_model(
        cls, data: Any, codec: C, settings: Any, origin: Origin | None
    ) -> tuple[str, nn.Module]:
        """Build the model that the settings describe; return its family and the model."""
        raise NotImplementedError

    def batches(self, data: Any, settings: Any) -> Batches:
        """Return the batches of a training."""
        raise NotImplementedError

    def count(self, batch: Any) -> tuple[int, int]:
        """Return by how many units the loss of a batch is divided, and how many tokens it has."""
        raise NotImplementedError

    def loss(self, batch: Any, settings: Any) -> Tensor:
        """Return the summed loss of a batch."""
        raise NotImplementedError

    def validate(self, data: Any, settings: Any, share: float = 1.0) -> dict[str, float]:
        """Return the scores on the validation part by predict and score; `better` is to be raised.

        `share` of the rows is enough where `decodes` says that some are decoded.
        """
        asked = self.Eval(part="valid")
        scores = self.judge(data, self.predict_examples(data, asked), asked).scores
        named = {key_of(score.name): score.value for score in scores}
        name = self.better.removeprefix("-")
        return {**named, "better": -named[name] if self.better != name else named[name]}

    def decodes(self, data: Any, settings: Any) -> int:
        """Return how many rows a validation decodes, of which fewer would do; 0: all are needed."""
        return 0

    def columns_of(self, settings: Any) -> list[str]:
        """Return the names of the columns that are trained on, where data are a table of names."""
        return self.inputs.columns_of(settings)

    def title(self, data: Any, settings: Any) -> str:
        """Return what the model card says that the model is."""
        return self.name

    def facts(self, data: Any, settings: Any) -> dict[str, Any]:
        """Return what recipe.json says beside the settings."""
        return {}

    def lr_scales(self, settings: Any) -> dict[str, float]:
        """Return learning-rate multipliers by the beginning of a parameter's name."""
        return {}

    def baselines(self, data: Any, settings: Any) -> dict[str, dict[str, float]]:
        """Return the scores of trivial predictors on the validation part, by their names."""
        return {}

    def published(self) -> nn.Module:
        """Return the part of the model that the folder is of, if not all."""
        return self.model

    def runs_as(self, settings: Any) -> str:
        """Return the task that the trained model is run by."""
        return self.name

    def trained_as(self) -> tuple["Task[Any, Any]", dict[str, Any]]:
        """The task whose batches and loss the model is trained by, and the settings that say so."""
        return self, {}

    def publish(self, folder: Path, weights: dict[str, Tensor]) -> None:
        """Write all weights into a folder."""
        from regard.models.folder import save_weights

        save_weights(folder, weights)

    def finish(self, folder: Path, data: Any, settings: Any) -> None:
        """Do what remains after the last step, with the weights that were published."""

    # ---- Training: what the frame does

    @classmethod
    def family_of(cls, values: Mapping[str, Any], origin: Origin | None) -> str:
        """Return the family to build: that of `init`, as `family=` or `like=` says, or the usual.

        `like` names a member of a family, such as llama of gpt.
        """
        like, asked = values.get("like"), values.get("family")
        known = cls.trainable_families(values)
        if asked is None and origin is not None:
            asked = origin.family if origin.family in known else None
        if asked is None and like:
            asked = preset_family(str(like), known)
            if asked is None:
                lookup("preset", str(like), {p: f for f in known for p in preset_names(f)})
        asked = str(asked or known[0])
        lookup("family", asked, dict.fromkeys(known))
        return asked

    @classmethod
    def origin_of(cls, values: Mapping[str, Any]) -> Origin | None:
        """Load what `init` names, if it names something."""
        if not values.get("init"):
            return None
        if values.get("like"):
            raise UsageError(
                f"like={values['like']} is for a new model; the one in init= has its parts already"
            )
        return Origin.load(values["init"])

    @classmethod
    def families(cls) -> tuple[str, ...]:
        """Return the families that serve the task, the usual one first."""
        return serving(cls.name)

    @classmethod
    def trainable_families(cls, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the families that such settings can train, such as those of an objective."""
        return cls.families()

    @classmethod
    def needs(cls, values: Mapping[str, Any]) -> str:
        """Return what the data of a training hold."""
        return cls.holds

    @classmethod
    def size_table(cls, values: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """Return what each size means for training."""
        return cls.sizes

    @classmethod
    def shape(
        cls, name: str, values: Mapping[str, Any], origin: Origin | None, like: str | None = None
    ) -> Any:
        """Return a family's config: that of the model to start from, or else one of the size."""
        if origin is None:
            return preset(name, size_of(values), values.get("like") or like)
        if origin.family != name:
            raise UsageError(f"init={origin.folder} is of family {origin.family}; expected {name}")
        return origin.model.config

    @classmethod
    def defaults(cls, shape: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Return a family's config with the task's own defaults, such as the kind of head."""
        return shape

    @classmethod
    def checked(cls, settings: Any, values: Mapping[str, Any], origin: Origin | None) -> Any:
        """Return settings that fit each other, or refuse those that do not."""
        return settings

    @classmethod
    def resolve(cls, values: Mapping[str, Any], origin: Origin | None = None) -> Any:
        """Complete what a user gave to the settings of a training."""
        origin = origin or cls.origin_of(values)
        name = cls.family_of(values, origin)
        kind = with_parts(cls.Train, model=family(name)[0])
        given = dict(values)
        if "family" in cls.Train.__dataclass_fields__:
            given["family"] = name
        settings = resolve_train(
            kind,
            given,
            config=cls.defaults(cls.shape(name, values, origin), values, origin),
            sizes=cls.size_table(given),
            short=cls.short,
            holds=cls.needs(values),
        )
        return cls.checked(settings, values, origin)

    @classmethod
    def build(
        cls, name: str, config: Any, settings: Any, origin: Origin | None, *, fresh: str = ""
    ) -> Any:
        """Build a model of a family with weights drawn by the seed, or those of `init`.

        Weights whose names begin with `fresh` (a new head) are not taken from there. Only what
        `tune` chooses is trained.
        """
        return build_model(name, config, settings, origin, fresh)

    @classmethod
    def train(
        cls, values: Mapping[str, Any], *, quiet: bool = False, recipe: str | None = None
    ) -> Any:
        """Train a model in a folder, or resume the run that was begun there."""
        from regard.tasks.prepare import train

        return train(cls, values, quiet=quiet, recipe=recipe)  # type: ignore[arg-type]

    # ---- Using: what a task says

    @classmethod
    def load_codec(cls, folder: Path, model: Model, config: dict[str, Any]) -> C:
        """Read what lies beside the weights of a folder, and check that it fits the model."""
        raise NotImplementedError

    def check_run(self, settings: Any) -> Any:
        """Return settings of run, eval or look that fit the model, or refuse those that do not."""
        return settings

    def check_input(self, given: Any, settings: Any = None) -> Any:
        """Return an input as `predict` takes it, or refuse it."""
        return self.inputs.check(given, settings, self.format)

    def predict(self, inputs: list[Any], settings: Any, *, first: int = 0) -> list[A]:
        """Predict for a list of inputs, in their order; `first` is the number of the first."""
        raise NotImplementedError

    def stream(self, given: Any, settings: Any, on_text: OnText, *, first: int = 0) -> A:
        """Answer one input, and pass its text on piece by piece while it is generated."""
        raise UsageError(f"{self.name} answers all at once; leave on_text out")

    def say(self, given: Any, settings: Any, out: TextIO, *, first: int = 0) -> A:
        """Write the answer to one input to a terminal while it is generated, if it `streams`."""
        raise NotImplementedError

    def session(self, settings: Any, out: TextIO) -> None:
        """Answer what is typed at a terminal until that ends, if it `streams`."""
        raise NotImplementedError

    def read_test(self, settings: Any) -> Dataset[Any]:
        """Read the part that a model is judged on."""
        raise NotImplementedError

    def predict_examples(self, data: Any, settings: Any) -> Any:
        """Predict for the examples of a part, as `score` takes it."""
        raise NotImplementedError

    def judge(self, data: Any, predictions: Any, settings: Any) -> Judged:
        """Return the scores of predictions: `score`, unless that means something else to users."""
        return self.score(data, predictions, settings)

    def score(self, *args: Any, **settings: Any) -> Any:
        """Return the scores of predictions: takes (data, predictions, settings)."""
        raise NotImplementedError

    def check_eval(self, settings: Any, given: Mapping[str, Any]) -> None:
        """Refuse settings of eval, of which the user gave some, before anything is read."""

    def settings_for(self, other: "Task[Any, Any]", settings: Any, given: Mapping[str, Any]) -> Any:
        """Return by which settings another model predicts: as this one does."""
        return settings

    def breakdown(
        self, data: Any, systems: Sequence[System], settings: Any, given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return further fields of the evaluation, which tell of all models side by side."""
        return {}

    def compare(self, data: Any, ours: Any, theirs: Any, settings: Any) -> list[Comparison] | None:
        """Compare predictions with another model's by a paired test; None: the scores are told."""
        return None

    def check_against(self, other: "Task[Any, Any]") -> None:
        """Refuse a model that cannot be compared with this one."""
        if other.name != self.name:
            raise UsageError(
                f"against= names a model for {other.task}; expected one for {self.name}"
            )

    def outputs(self, data: Any, predictions: Any, settings: Any) -> list[dict[str, Any]]:
        """Return the predictions as rows of the file that outputs= names."""
        raise NotImplementedError

    def write_outputs(self, data: Any, predictions: Any, settings: Any) -> None:
        """Write the predictions where outputs= says."""
        write_outputs(settings.outputs, self.outputs(data, predictions, settings))

    def data_hash(self, data: Any, settings: Any) -> Any:
        """Return a hash of the examples that were judged."""
        return data.part_sha(settings.part)

    def made_with(self, settings: Any) -> dict[str, Any]:
        """Return the settings that a score depends on."""
        return {}

    def eval_defaults(self) -> dict[str, Any]:
        """Return defaults of eval that the model's config says, such as a column."""
        return {}

    def explain(self, given: Any, settings: Any) -> Any:
        """Predict for one input and return a Picture of where the model looked."""
        raise NotImplementedError

    def question(self, given: Any, settings: Any, expected: Any = None) -> Question:
        """Return an input with the model's answer and its log-probability; see Question.

        `expected` is the answer to another input, whose log-probability is then asked for.
        """
        raise UsageError(
            f"{self.name} gives no probability of an answer, so its causes cannot be measured"
        )

    def probe(self, given: Any) -> Question:
        """What of an input is compared before and after a change of the model; its answer's p."""
        return self.question(given, self.look_settings({}))

    # ---- Using: what the frame does

    @classmethod
    def load(cls, folder: Path, model: Any, config: dict[str, Any]) -> Self:
        """Put a loaded model together with what lies beside it."""
        codec = cls.load_codec(folder, model, config)
        try:
            loaded = cls(model, codec, config)
            loaded.check({})
        except UsageError as error:
            raise UsageError(f"{folder / 'generation_config.json'}: {error}") from None
        loaded.folder = folder
        return loaded

    @property
    def own(self) -> dict[str, Any]:
        """Return the model's own defaults of decoding, without what is no setting."""
        told = self.config.get("generation", {})
        return {key: value for key, value in told.items() if key not in ("alignment_head", "rules")}

    def check(self, settings: Mapping[str, Any]) -> Any:
        """Complete what a user gave to the settings of a run, on top of the model's defaults."""
        own = self.own
        if self._defaults is None or self._defaults[0] != own:  # resolved once, when it is loaded
            self._defaults = own, fill(self.Run, own)
        defaults = self._defaults[1]
        return self.check_run(fill(self.Run, settings, base=defaults) if settings else defaults)

    def _filled(self, kind: type, settings: Mapping[str, Any]) -> Any:
        """Complete settings by the model's own defaults, as far as the verb has such keys."""
        known = kind.__dataclass_fields__  # type: ignore[attr-defined]
        own = {key: value for key, value in self.own.items() if key in known}
        return self.check_run(fill(kind, {**own, **settings}))

    @property
    def usual_columns(self) -> tuple[str, ...]:
        """Return usual names of the column of a table that holds inputs."""
        language = self.config.get("from")
        return (*([language] if language else []), *self.inputs.columns)

    def inputs_of(self, given: Any, settings: Any) -> tuple[list[Any], bool]:
        """Return the inputs that were given, and whether it was one input rather than several.

        Of the rows of a table (a frame, a dict of columns, records) one column is read: the one
        that columns= names, the one that the model was trained on, or one of a usual name.
        """
        if hasattr(given, "read"):
            given = self.inputs.opened(given)
        rows = frame_rows(given)
        if rows is None and self.inputs.is_one(given):
            return [given], True
        one = isinstance(given, Mapping) and not is_columns(given)  # a row
        inputs = [given] if one else list(rows_of(given) if rows is None else rows)
        if inputs and all(isinstance(row, Mapping) for row in inputs):
            columns = getattr(settings, "columns", None)
            choose = partial(self.column_of, columns=columns)
            inputs = self.inputs.rows(inputs, choose, self.format, columns)
        return inputs, one

    def inputs_at(self, path: str, settings: Any) -> Found | None:
        """Return the inputs that a file or folder is; None where they are its lines or rows."""
        return self.inputs.found(path, self.format, getattr(settings, "columns", None))

    def column_of(self, names: Sequence[str], columns: str | None = None) -> str:
        """Return the column of a table that is read, of these names."""
        return input_column(names, self.usual_columns, columns, self.columns)

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns that the model was trained on, if it was on a table."""
        names = self.config.get("columns")
        known = isinstance(names, list) and all(isinstance(name, str) for name in names)
        return names if names and known else []

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
        Settings are those that `regard run MODEL --help` lists, such as beam=5 or n_best=3.
        `first` is the number of the first input where a long list comes in parts. `on_text` is
        given the answer to one input piece by piece, by a model that `streams`.
        """
        asked = self.check(settings)
        inputs, one = self.inputs_of(inputs, asked)
        if on_text is None:
            answers = self.answer(inputs, asked, first=first)
        elif len(inputs) == 1:
            given = self.check_input(inputs[0], asked)
            answers = [self.stream(given, asked, on_text, first=first)]
        else:
            raise UsageError(f"on_text= follows one answer; give one input, not {len(inputs)}")
        return answers[0] if one else answers

    def answer(self, inputs: list[Any], settings: Any, *, first: int = 0) -> list[A]:
        """Answer a list of inputs in their order, by settings that `check` has completed."""
        inputs = [self.check_input(given, settings) for given in inputs]
        with self.using(settings):
            return self.predict(inputs, settings, first=first)

    @contextmanager
    def using(self, settings: Any) -> Iterator[None]:
        """Use the threads that are asked for, and kernels, while the model is not changed."""
        before = torch.get_num_threads()
        threads = getattr(settings, "threads", None)
        if threads:
            torch.set_num_threads(threads)
        try:
            dtype = DTYPES[getattr(settings, "dtype", "float32")]
            with fast(self.model, frozen=True, dtype=dtype):
                yield
        finally:
            if threads:
                torch.set_num_threads(before)

    def evaluate(
        self,
        settings: Mapping[str, Any],
        *,
        against: "Task[Any, Any] | Sequence[Task[Any, Any]] | None" = None,
        names: Sequence[str] = ("model",),
    ) -> Evaluation:
        """Judge the model on data, alone or against others, of these names after its own."""
        asked = self.eval_settings(settings)
        if asked.data is not None and getattr(asked, "columns", "") is None:
            asked = self.with_columns(asked)
        if asked.data is None:
            raise UsageError(f"data is missing; add data=FILE or data=FOLDER with {self.holds}")
        self.check_eval(asked, settings)
        others = listed(against)
        for other in others:
            self.check_against(other)
        with self.using(asked):
            data = self.read_test(asked)
            started = time.perf_counter()
            predictions = self.predict_examples(data, asked)
            seconds = time.perf_counter() - started
            judged = self.judge(data, predictions, asked)
            scores, comparison = list(judged.scores), []
            systems = [System(names[0], self, asked, predictions)]
            for name, other in zip(names[1:], others, strict=True):
                theirs = self.settings_for(other, asked, settings)
                predicted = self.predictions_of(other, data, theirs)
                systems.append(System(name, other, theirs, predicted))
                rows = self.compare(data, predictions, predicted, asked)
                if rows is None:
                    told = other.judge(data, predicted, asked).scores
                    scores += [replace(score, name=f"{score.name} of {name}") for score in told]
                else:
                    many = len(others) > 1
                    comparison += [replace(row, against=name) for row in rows] if many else rows
            fields = {**judged.fields, **self.breakdown(data, systems, asked, settings)}
            hashes = self.codec.hashes()
            made_with = {
                "data": asked.data,
                "part": asked.part,
                "data_hash": self.data_hash(data, asked),
                **({"tokenizers": hashes} if hashes else {}),
                **self.made_with(asked),
                **judged.made_with,
                **provenance(),
            }
        if asked.outputs:
            self.write_outputs(data, predictions, asked)
        return self.Result(
            names[0],
            scores,
            judged.count,
            seconds,
            made_with,
            ", ".join(name for name in names[1:] if name) or None,
            comparison,
            self.unit,
            notes=data.notes,
            **fields,
        )

    def with_columns(self, settings: Any) -> Any:
        """Return settings of eval that name the columns of the training, if the data have these."""
        path, part = Path(settings.data), settings.part
        files = named_files(path).get(part, []) if is_folder(path) else [path]
        names = names_in(files[0]) if len(self.columns) > 1 and files and files[0].exists() else []
        known = names and set(self.columns) <= set(names)
        return replace(settings, columns=",".join(self.columns)) if known else settings

    def predictions_of(self, other: "Task[Any, Any]", data: Any, settings: Any) -> Any:
        """Return what another model predicts for the same examples, in this model's terms."""
        with other.using(settings):
            return other.predict_examples(data, settings)

    def read_part_of(self, data: str, part: str) -> Dataset[Any]:
        """Read a part of data as an evaluation would."""
        given = {**self.eval_defaults(), "data": data, "part": part}
        return self.read_test(self._filled(self.Eval, given))

    def picture(self, given: Any, **settings: Any) -> Any:
        """Predict for one input and gather where the model looked."""
        from regard.viewer.rollout import follow

        asked = self.look_settings(settings)
        beams = getattr(asked, "beams", False)
        with self.using(asked), tracing() if beams else nullcontext() as trace:
            seen = self.for_reader(follow(self.explain(given, asked), asked.view), asked)
        return seen if trace is None else replace(seen, tree=beam_tree(trace, self))

    def for_reader(self, picture: Any, settings: Any) -> Any:
        """A picture as users see it, who may read other units than the model does."""
        return picture

    def eval_settings(self, settings: Mapping[str, Any]) -> Any:
        """Complete what a user gave to the settings of an evaluation."""
        return self._filled(self.Eval, {**self.eval_defaults(), **settings})

    def look_settings(self, settings: Mapping[str, Any]) -> Any:
        """Complete what a user gave to the settings of look."""
        return self._filled(self.Look, settings)

    def __repr__(self) -> str:
        told: dict[str, Any] = {"task": self.name, "family": self.family}
        told["parameters"] = f"{parameters(self.model):,}"
        if self.config.get("from") and self.config.get("to"):
            told["languages"] = f"{self.config['from']} to {self.config['to']}"
        if labels := getattr(self.codec, "labels", None):
            told["labels"] = len(labels)
        told["device"] = self.device
        words = ", ".join(f"{key}={value}" for key, value in told.items() if value != "")
        return f"{type(self).__name__}({self.path!r}, {words})"


def listed(against: Any) -> Sequence[Any]:
    """Return the models to be judged against: none, one, or several."""
    return against if isinstance(against, Sequence) else [] if against is None else [against]
