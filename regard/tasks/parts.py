"""A task as a row of parts: its inputs, how a model learns it, answers, is judged and explained.

A `Task` is data. What it does is done by its parts: an `Objective` reads data, makes the codec and
the model and gives the `Lesson` that the training loop follows; a `Predictor`, bound to a model,
answers inputs and explains its answers; a `Judge` scores predictions on a test set. The frame
(`prepare`, `runner`) does the rest: folders, resuming, settings, threads, kernels, JSON.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Generic,
    NamedTuple,
    Protocol,
    cast,
    runtime_checkable,
)

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from regard.data.pairs import Pair
from regard.data.parts import Dataset
from regard.data.seeds import mix
from regard.errors import UsageError, lookup
from regard.metrics.evaluation import Evaluation
from regard.metrics.results import Named, key_of
from regard.metrics.score import Comparison, Score
from regard.models import family, preset, preset_family, preset_names, serving, task_changes
from regard.models.protocols import Model, ModelConfig
from regard.settings import describe, fill
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.question import Question
from regard.tasks.frame.settings import (
    SHORT_KEYS,
    Asked,
    EvalSettings,
    RunSettings,
    TrainSettings,
    derived,
    with_parts,
)
from regard.tasks.frame.tune import check_tune, let_learn, usual_rate
from regard.training.plan import DURATION_KEYS
from regard.training.step import check
from regard.viewer.settings import LookSettings

if TYPE_CHECKING:
    from regard.modalities.base import Modality, One
    from regard.tasks.runner import Runner
    from regard.viewer.picture import Picture

OnText = Callable[[str], None]  # is given a text piece by piece while it is generated
_NOT_DECODING = ("alignment_head", "rules")  # keys of generation_config.json that are no settings


S = TypeVar("S", bound=TrainSettings, default=TrainSettings)
R = TypeVar("R", bound=RunSettings, default=RunSettings)
O = TypeVar("O", default=RunSettings)  # noqa: E741  settings by which an answer is shown
L = TypeVar("L", default=LookSettings)  # settings of look
E = TypeVar("E", bound=EvalSettings, default=EvalSettings)
D = TypeVar("D", bound=Dataset[Any], default=Dataset[Any])
V = TypeVar("V", bound=Asked)  # settings of any verb that runs a model
P = TypeVar("P", default=Any)  # predictions of a model for a part of data
I = TypeVar("I", default="One")  # noqa: E741  one input, as a user gives it


class Answer(Named, Generic[O]):
    """The prediction for one input; str() is what `regard run` prints, fields are read by name."""

    def lines(self, settings: O) -> Iterator[str]:
        """Lines that `regard run` prints."""
        yield str(self)

    def record(self, settings: O) -> dict[str, Any]:
        """Fields that the prediction adds to a JSON line."""
        raise NotImplementedError


class Codec(Protocol):
    """What lies beside the weights and turns inputs into tensors: tokenizers, labels, formats."""

    def save(self, folder: Path) -> None:
        """Write its files, but for what config.json holds."""
        ...

    def facts(self) -> dict[str, Any]:
        """What config.json says of it."""
        ...

    def hashes(self) -> list[str]:
        """Hashes of its tokenizers, which scores and recipes name."""
        ...


class NoCodec:
    """The codec of a model with nothing beside its weights."""

    def save(self, folder: Path) -> None:
        """Write nothing."""

    def facts(self) -> dict[str, Any]:
        """Nothing."""
        return {}

    def hashes(self) -> list[str]:
        """None."""
        return []


class Learnt(Protocol):
    """Settles what a run learns from its data beside the weights, such as a tokenizer."""

    def __call__(self, learn: Any, *, load: Any = ..., save: Any = ..., init: bool = True) -> Any:
        """What the run has, or the model it starts from, or else what `learn` makes."""
        ...


class Batches(Protocol):
    """Batch n of a training, a pure function of (seed, n)."""

    def __getitem__(self, n: int) -> Any:
        """Batch n."""
        ...

    def epoch(self) -> float:
        """Number of batches in which everything is read once."""
        ...


class Choice(NamedTuple):
    """Settings that follow from the data where the user gave none, why, and how to choose."""

    why: str
    settings: Mapping[str, Any]
    remedy: str

    def __str__(self) -> str:
        words = " ".join(f"{key}={value}" for key, value in self.settings.items())
        return f"chosen for {self.why}: {words}; {self.remedy}"


@dataclass(frozen=True)
class ScoredPredictions:
    """The scores of predictions, how many were judged, and further fields of the evaluation.

    `rows` are the predictions beside what they should be, for the file that outputs= names; None
    where the judge has written what it names.
    """

    scores: list[Score]
    count: int
    fields: dict[str, Any] = field(default_factory=dict[str, Any])
    made_with: dict[str, Any] = field(
        default_factory=dict[str, Any]
    )  # what else the scores depend on
    Result: type[Evaluation] | None = None  # if not the judge's
    rows: Sequence[dict[str, Any]] | None = ()


class System(NamedTuple):
    """A model that is judged, by which settings, and what it predicted."""

    name: str
    runner: "Runner[Any]"
    settings: RunSettings | EvalSettings
    predictions: Any
    given: Mapping[str, Any]  # settings that the user gave


@dataclass
class Lesson:
    """What the training loop follows: batches, their loss, and what is noted about the run.

    Args:
        batches: batch n is a pure function of (seed, n).
        count: of a batch, the units that its loss is divided by, and the tokens that it has.
        loss: the summed loss of a batch.
        validate: scores on a share of the validation part, of which `better` is to be raised.
        title: what the model card says that the model is, if not the name of the task.
        facts: what recipe.json says beside the settings.
        baselines: scores of trivial predictors on the validation part, by their names.
        decoded: rows that a validation decodes and of which fewer would do; 0: all are needed.
        lr_scales: learning-rate multipliers by the beginning of a parameter's name.
        published: the part of the model that the folder is of, if not all.
        publish: writes weights that are not written as a whole.
        beside: writes what belongs to weights that are published with such scores.
        generation: how the model decodes by default, for generation_config.json.
        runs_as: the task that the trained model is run by, if another.
        finish: what remains to be done with the published folder.
        dynamic: whether batches differ in shape, for compile=true.
    """

    batches: Batches
    count: Callable[[Any], tuple[int, int]]
    loss: Callable[[Any], Tensor]
    validate: Callable[[float], dict[str, float]]
    title: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict[str, Any])
    baselines: Callable[[], dict[str, dict[str, float]]] = dict
    decoded: int = 0
    lr_scales: Mapping[str, float] = field(default_factory=dict[str, float])
    published: nn.Module | None = None
    publish: Callable[[Path, dict[str, Tensor]], None] | None = None
    beside: Callable[[Path, Mapping[str, float]], None] = lambda folder, scores: None
    generation: Mapping[str, Any] = field(default_factory=dict[str, Any])
    runs_as: str = ""
    finish: Callable[[Path], None] = lambda folder: None
    dynamic: bool = True


C = TypeVar("C", bound=Codec, default=Any)


class Objective(Generic[S, D, C]):
    """How a model learns a task: settings, data, codec, model and lesson.

    A task gives a class with its own `Settings`; the methods with a body have the usual answer.
    """

    Settings: type[S]
    sizes: Mapping[str, Mapping[str, Any]] = {}  # what a size means for training
    published_sizes: bool = False  # whether other sizes are published models, trained as a big one
    short: Mapping[str, str | tuple[str, ...]] = SHORT_KEYS  # short keys of the model's config
    # the task whose families it trains, or one for each objective=; its own unless given
    serves: str | Mapping[str, str] = ""

    def resolve(self, task: "Task", values: Mapping[str, Any], origin: Origin | None) -> S:
        """Settings of a training that fit each other, completed from what a user gave."""
        return usual_settings(task, values, origin)

    def read(self, settings: S, origin: Origin | None) -> D:
        """Parts to train and to validate on."""
        raise NotImplementedError

    def suit(self, settings: S, values: Mapping[str, Any], data: D) -> tuple[S, Choice | None]:
        """Settings whose defaults follow the data where the user gave none, and what was chosen."""
        return settings, None

    def codec(self, data: D, settings: S, learnt: Learnt, origin: Origin | None) -> C:
        """What lies beside the weights; what is learnt of the data is settled by `learnt`."""
        raise NotImplementedError

    def model(self, data: D, codec: C, settings: S, origin: Origin | None) -> tuple[str, nn.Module]:
        """Family and model that the settings describe."""
        raise NotImplementedError

    def lesson(self, runner: "Runner[Any]", data: D, settings: S) -> Lesson:
        """Batches and loss by which the model of a runner learns the data."""
        raise NotImplementedError


A = TypeVar("A", bound=Answer[Any], default=Answer[Any])


class Predictor(Generic[A, R, L, I]):
    """Answers inputs by a model, and tells how an answer came about.

    Args:
        model: the model; what is asked of it is a protocol of regard.models.
        codec: what lies beside its weights.
        config: what its config.json says.
    """

    Settings: type[RunSettings] = RunSettings
    Look: type = LookSettings  # completed by Settings
    from_nothing: ClassVar[bool] = False  # whether an empty text has an answer

    def __init__(self, model: nn.Module, codec: Any, config: Mapping[str, Any]):
        self.model: Any = model
        self.codec, self.config = codec, config
        self.device = next(model.parameters()).device
        told = config.get("generation", {})
        # the model's own defaults of a run, as generation_config.json has them
        self.defaults = {key: value for key, value in told.items() if key not in _NOT_DECODING}

    def check(self, settings: V) -> V:
        """Settings of run, eval or look that fit the model, or a refusal."""
        return settings

    def predict(self, inputs: list[I], settings: R, *, first: int = 0) -> list[A]:
        """Answers to inputs in their order; `first` is the number of the first."""
        raise NotImplementedError

    def answer_logprobs(self, given: I, settings: L, expected: Any = None) -> Question:
        """An input with the model's answer and its log-probability.

        `expected` is the answer to another input, whose log-probability is then asked for.
        """
        raise UsageError("this model gives no probability of an answer, so it has no causes")

    def explain(self, given: I, settings: L) -> "Picture":
        """A picture of where the model looked while it answered one input."""
        raise NotImplementedError


@dataclass(frozen=True)
class Configured(Generic[A]):
    """A predictor with what a task passes it, and the settings that this takes.

    Args:
        make: makes the predictor of a model, its codec and config.
        Settings: of a run.
        Look: of look, completed by those of a run.
    """

    make: Callable[[nn.Module, Any, Mapping[str, Any]], Predictor[A, Any, Any, Any]]
    Settings: type[RunSettings]
    Look: type = LookSettings

    def __call__(
        self, model: nn.Module, codec: Any, config: Mapping[str, Any]
    ) -> Predictor[A, Any, Any, Any]:
        """The predictor of a model."""
        return self.make(model, codec, config)


@runtime_checkable
class Streaming(Protocol):
    """What a predictor can do beside, that shows an answer while it is generated."""

    def stream(self, given: Any, settings: RunSettings, on_text: OnText, *, first: int = 0) -> Any:
        """Answer one input, and pass its text on piece by piece."""
        ...


@runtime_checkable
class ReadsPairs(Protocol):
    """What a predictor can do beside, that reads a text with an answer that is given."""

    def score(self, pairs: Sequence[tuple[str, str]], settings: RunSettings) -> list[Any]:
        """Given answers to texts with their log-probabilities."""
        ...

    def pair_picture(self, pair: Pair) -> "Picture":
        """Where a model looked while it read a given pair."""
        ...


class Judge(Generic[D, E, P]):
    """How predictions on a test set are scored, and compared with those of another model."""

    Settings: type[EvalSettings] = EvalSettings
    Result: type[Evaluation] = Evaluation
    several: ClassVar[bool] = False  # whether a model is judged against more than one at once

    def entrants(
        self, runners: "Sequence[Runner[Any]]", settings: E, given: Mapping[str, Any]
    ) -> "list[tuple[Runner[Any], E]]":
        """Models that are judged, the first against the others, with their settings; or a refusal.

        They are those that are given, or made of them, such as probes on their vectors; `given` are
        the settings that the user gave.
        """
        first, *others = runners
        for other in others:
            if other.name != first.name:
                raise UsageError(
                    f"against= names a model for {other.name}; expected one for {first.name}"
                )
        return [(runner, settings) for runner in runners]

    def read(self, runner: "Runner[Any]", settings: E) -> D:
        """The part that a model is judged on."""
        raise NotImplementedError

    def predict(
        self, runner: "Runner[Any]", data: D, settings: E, like: "Runner[Any] | None" = None
    ) -> P:
        """Predictions of a model for the examples of a part, in the terms of another if given.

        Unless a judge says otherwise, they are the answers to their inputs.
        """
        inputs = runner.inputs.first_inputs(data[settings.part], len(data[settings.part]))
        return cast(P, runner.answer(inputs, settings))

    def score(
        self,
        runner: "Runner[Any]",
        data: D,
        predictions: P,
        settings: E,
        systems: Sequence[System] = (),
    ) -> ScoredPredictions:
        """Scores of predictions; `systems` are all models that are judged, this one first."""
        raise NotImplementedError

    def compare(
        self, runner: "Runner[Any]", data: D, theirs: System, ours: P, settings: E
    ) -> list[Comparison] | None:
        """Comparison with another model by a paired test; None: the scores are told."""
        return None


class Settled(NamedTuple):
    """What is known of a run before data are read."""

    objective: Objective[Any, Any, Any]
    settings: Any
    origin: Origin | None  # the model that it starts from
    folder: Path


def validation(
    runner: "Runner[Any]", data: Dataset[Any], better: str
) -> Callable[[float], dict[str, float]]:
    """Scores on the validation part by predict and score; `better` names the one to raise.

    With - before it, it is the one to lower.
    """

    def validate(share: float) -> dict[str, float]:
        judge, asked = runner.task.judge, runner.task.Eval(part="valid")
        predictions = judge.predict(runner, data, asked)
        scores = judge.score(runner, data, predictions, asked).scores
        named = {key_of(score.name): score.value for score in scores}
        name = better.removeprefix("-")
        return {**named, "better": -named[name] if better != name else named[name]}

    return validate


@dataclass(frozen=True)
class Task:
    """What a model is for, as a row of parts.

    Args:
        name: the word for it on the command line.
        holds: what its data hold, such as "texts and labels".
        inputs: the modality of one input.
        predictor: makes what answers inputs with a model.
        judge: how its predictions are judged.
        load_codec: reads what lies beside the weights of a folder, and checks that it fits.
        objective: how it is learnt; None: it is only run.
        target: what is learnt of an input: text, label, tags, number, or "" for nothing beside it.
        unit: what an evaluation counts.
        learnt_by: the task, and its settings, that trains models which this one only runs.
        remedy: of one that is only run, how its models are trained.
        judged: settings of an evaluation, if not those of the judge with those of a run.
        few_rows: rows up to which few=true chooses a model by the data.
        instead: another task to train by such settings, such as images where data are images.
    """

    name: str
    holds: str
    inputs: "Modality[Any]"
    predictor: type[Predictor[Any, Any, Any, Any]] | Configured[Any]
    judge: Judge[Any, Any, Any]
    load_codec: Callable[[Path, Model, dict[str, Any]], Any]
    objective: Objective[Any, Any, Any] | None = None
    target: str | None = None
    unit: str = "texts"
    learnt_by: "tuple[Task, Mapping[str, Any]] | None" = None
    judged: type[EvalSettings] | None = None
    few_rows: int = 0
    remedy: str = ""
    instead: Callable[[Mapping[str, Any]], str | None] | None = None

    # Settings of the verbs

    @property
    def Train(self) -> type[TrainSettings]:
        """Settings of a training."""
        return self.learning.Settings

    @property
    def Run(self) -> type[RunSettings]:
        """Settings of a run."""
        return self.predictor.Settings

    @cached_property
    def Eval(self) -> Any:
        """Settings of an evaluation: what is judged, and how the model is run."""
        return self.judged or derived(f"{self.name}_eval", self.judge.Settings, self.Run)

    @cached_property
    def Look(self) -> Any:
        """Settings of look: what is drawn, and how the model is run."""
        look = self.predictor.Look
        whole = "threads" in look.__dataclass_fields__  # it says how the model is run
        return look if whole else derived(f"{self.name}_look", look, self.Run)

    @property
    def short(self) -> Mapping[str, str | tuple[str, ...]]:
        """Short keys for fields of the model's config."""
        return self.learning.short

    @property
    def sizes(self) -> Mapping[str, Mapping[str, Any]]:
        """What each size means for training."""
        return self.learning.sizes

    @property
    def learning(self) -> Objective[Any, Any, Any]:
        """How it is learnt, or a refusal if it is only run."""
        if self.objective is None:
            raise UsageError(f"{self.name} has no training of its own{self.remedy}")
        return self.objective

    # Training

    def families(self, values: Mapping[str, Any]) -> tuple[str, ...]:
        """Families that such settings can train, the usual one first."""
        serves = self.learning.serves or self.name
        if isinstance(serves, str):
            return serving(serves)
        usual = next(iter(serves))
        return serving(lookup("objective", str(values.get("objective", usual)), serves))

    def family_of(self, values: Mapping[str, Any], origin: Origin | None) -> str:
        """Family to build: that of `init`, as `family=` or `like=` says, or the usual one."""
        like, asked = values.get("like"), values.get("family")
        known = self.families(values)
        if asked is None and origin is not None:
            asked = origin.family if origin.family in known else None
        if asked is None and like:
            asked = preset_family(str(like), known)
            if asked is None:
                lookup("preset", str(like), {p: f for f in known for p in preset_names(f)})
        asked = str(asked or known[0])
        lookup("family", asked, dict.fromkeys(known))
        return asked

    def resolve(self, values: Mapping[str, Any], origin: Origin | None = None) -> Any:
        """Settings of a training, completed from what a user gave."""
        return self.settle(values, origin).settings

    def settle(self, values: Mapping[str, Any], origin: Origin | None = None) -> Settled:
        """Settings of a run with the model that `init` names, loaded once, and its folder."""
        objective = self.learning
        if origin is None and values.get("init"):
            if values.get("like"):
                raise UsageError(
                    f"like={values['like']} is for a new model; the one in init= has its parts "
                    "already"
                )
            origin = Origin.load(values["init"])
        settings = objective.resolve(self, values, origin)
        return Settled(objective, settings, origin, Path(settings.out or f"runs/{self.name}"))

    def size_rows(self, values: Mapping[str, Any]) -> Mapping[str, Mapping[str, Any]]:
        """What each size means for training; a published one is trained as a big one."""
        published = self.learning.published_sizes
        return {size_of(values): self.sizes["big"], **self.sizes} if published else self.sizes

    # Using

    def bind(self, model: nn.Module, codec: Any, config: Mapping[str, Any]) -> "Runner[Any]":
        """The task with a model."""
        from regard.tasks.runner import Runner

        return Runner(self, model, codec, config)

    def load(self, folder: Path, model: Any, config: dict[str, Any]) -> "Runner[Any]":
        """A loaded model with what lies beside it, ready to run."""
        codec = self.load_codec(folder, model, config)
        try:
            runner = self.bind(model, codec, config)
            runner.check({})
        except UsageError as error:
            raise UsageError(f"{folder / 'generation_config.json'}: {error}") from None
        runner.folder = folder
        return runner


def size_of(values: Mapping[str, Any]) -> str:
    """Size that a user asks for."""
    return str(values.get("size", "tiny"))


def complete(
    task: Task,
    values: Mapping[str, Any],
    name: str,
    config: Any,
    *,
    sizes: Mapping[str, Mapping[str, Any]] | None = None,
    holds: str = "",
    **parts: type,
) -> Any:
    """Complete what a user gave to the settings of a training: the size fills in the rest.

    Args:
        task: what is learnt; short keys of fields that the model's config lacks are left out.
        values: settings as the user wrote them.
        name: of the family.
        config: of the model, before keys such as model.block.norm change it.
        sizes: what each size means, if not as the objective says.
        holds: what the data hold, if not as the task says.
        parts: classes of what else is nested in the settings, such as a decoder.
    """
    kind = with_parts(task.Train, model=family(name)[0], **parts)
    given = {**values, "family": name} if "family" in kind.__dataclass_fields__ else values
    size = size_of(values)
    row = lookup("size", size, task.size_rows(values) if sizes is None else sizes)
    defaults = {"size": size, "model": config, **row}
    if any(values.get(key) is not None for key in DURATION_KEYS):
        defaults.pop("steps", None)
    if values.get("init"):
        width = config.block.width if hasattr(config, "block") else config.widths[-1]
        defaults["lr"] = usual_rate(values, width)
    known = {each.key for each in describe(kind)}
    short = {
        key: long
        for key, long in task.short.items()
        if known.issuperset((long,) if isinstance(long, str) else long)
    }
    settings = fill(kind, given, base=kind(**defaults), short=short)
    check(settings)
    check_tune(settings, values)
    if settings.data is None:
        raise UsageError(
            f"data is missing; add data=FILE or data=FOLDER with {holds or task.holds}"
        )
    return settings


def usual_settings(
    task: Task,
    values: Mapping[str, Any],
    origin: Origin | None,
    *,
    like: str | None = None,
    serves: str = "",
) -> Any:
    """Settings of a training of the family that is asked for.

    Args:
        task: what is learnt.
        values: settings as the user wrote them.
        origin: the model to start from, if there is one.
        like: the preset of a new model, unless the user names one.
        serves: the task that changes the config, as the family declares it.
    """
    name = task.family_of(values, origin)
    config = usual_shape(name, values, origin, like)
    config = replace(config, **task_changes(name, serves)) if serves else config
    return complete(task, values, name, config)


def build_model(
    name: str, config: ModelConfig, settings: TrainSettings, origin: Origin | None, fresh: str = ""
) -> Any:
    """Model of a family with weights drawn by the seed, or those of the model to start from.

    Args:
        name: of the family.
        config: of the model.
        settings: those of the training; only what `tune` chooses is trained.
        origin: the model to start from, if there is one.
        fresh: how the names of weights begin that are not taken from there, such as a new head's.
    """
    torch.manual_seed(mix(settings.seed, "weights"))
    model = family(name)[1](config).to(settings.device)
    if origin is not None:
        fresh = origin.initialise(model, fresh)
    let_learn(model, settings, fresh)
    return model


def usual_shape(
    name: str, values: Mapping[str, Any], origin: Origin | None, like: str | None = None
) -> Any:
    """Config of a family: that of the model to start from, or else one of the size asked for."""
    if origin is None:
        return preset(name, size_of(values), values.get("like") or like)
    if origin.family != name:
        raise UsageError(f"init={origin.folder} is of family {origin.family}; expected {name}")
    return origin.model.config
