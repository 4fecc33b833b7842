"""A training in its folder, from the settings to the finished model: the same for every task."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import UsageError, log
from regard.files import write_atomically
from regard.files.hashes import SUMS, damaged, listed, seal, unseal
from regard.files.weights import state_of
from regard.layers.lora import merged
from regard.metrics.evaluation import WARNING, beside_baselines
from regard.metrics.results import Scored, exit_code
from regard.models.folder import check_buildable, save_config
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.tasks.frame.film import Film
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.recipe import (
    check_resume,
    hash_frozen,
    is_learnt,
    model_card,
    other_bits,
    parameters,
    save_generation,
    set_aside,
    trainable,
    update_recipe,
    write_recipe,
)
from regard.tasks.frame.task import Choice, Data, Task
from regard.training import distributed
from regard.training.loop import Fit, Trainable, locked, measure
from regard.training.plan import MIN_STEPS, MIN_TRAINING_SHARE, Plan, make_plan, too_few

# what recipe.json says of the last plan outside of the list of all
PLANNED = ("steps", "warmup", "valid_every", "valid_share")
PLANNED += ("seconds_a_step", "seconds_a_validation")
# settings of tasks that say how many rows a validation decodes
ROWS_DECODED = ("valid_sentences", "valid_images", "valid_sounds")


@dataclass(frozen=True)
class Report(Scored):
    """How a training went: where the model is, how far it came, and its scores by name."""

    folder: str
    step: int
    steps: int
    finished: bool
    scores: dict[str, float]  # on the validation part
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)  # of trivial predictors
    signal: int | None = None  # that stopped it

    @property
    def exit_code(self) -> int:
        """Exit code of a command that a signal stopped, as shells count it, or 0."""
        return exit_code(self.signal)

    def named_scores(self) -> Iterable[tuple[str, float]]:
        """Return the scores on the validation part by name."""
        return self.scores.items()

    @property
    def valid(self) -> dict[str, float]:
        """Return the scores on the validation part."""
        return {name: value for name, value in self.scores.items() if name != "better"}

    def keys(self) -> list[str]:
        """Return the names of all scores, then `valid` for all of them, then the fields."""
        return [*super().keys(), "valid"]

    def __str__(self) -> str:
        scores = ", ".join(f"{k} {v:.4g}" for k, v in self.scores.items() if k != "better")
        if self.finished:
            said = beside_baselines(self.scores, self.baselines)
            whole = [f"{self.folder}: finished after {count_steps(self.step)}", scores, said]
            return "; ".join(part for part in whole if part)
        return (
            f"{self.folder}: stopped and saved at step {self.step:,} of {self.steps:,}; "
            "give the same command again to go on"
        )


def count_steps(count: int) -> str:
    """Say how many steps."""
    return f"{count:,} step{'s' * (count != 1)}"


class Training(Trainable):
    """A task with its model and its data, as the training loop sees it."""

    def __init__(self, task: Task[Any, Any], data: Data, settings: Any):
        self.task, self.data, self.settings = task, data, settings
        self.batches = task.batches(data, settings)
        self.lr_scales = task.lr_scales(settings)
        self.decoded = task.decodes(data, settings)
        self.valid_share = 1.0  # of the rows that are decoded

    def batch(self, n: int) -> Any:
        """Return batch n, always the same for the same n."""
        return self.batches[n]

    def epoch(self) -> float:
        """Return in how many batches everything is read once."""
        return self.batches.epoch()

    def count(self, batch: Any) -> tuple[int, int]:
        """Return by how many units the loss is divided, and how many tokens were read."""
        return self.task.count(batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the summed loss of a batch."""
        return self.task.loss(batch, self.settings)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return the scores on the validation part, as the user's model gets them."""
        return self.task.validate(self.data, self.settings, self.valid_share)


class Learnt:
    """Settles what a run learns from its data beside the weights, such as a tokenizer."""

    def __init__(self, folder: Path, begun: dict[str, Any] | None, origin: Origin | None):
        self.folder, self.begun, self.origin = folder, begun, origin

    def __call__(
        self,
        learn: Callable[[], Any],
        *,
        load: Callable[[Path], Any] = load_tokenizer,
        save: Callable[[Path, Any], None] = lambda folder, it: it.save(folder / "tokenizer.json"),
        init: bool = True,
    ) -> Any:
        """Return what the run has, or the model it starts from, or else what `learn` makes."""
        lost = [n for n in listed(self.folder) if is_learnt(n) and not (self.folder / n).exists()]
        if distributed.is_main() and (self.begun is None or lost):
            origin = self.origin if init else None
            save(self.folder, load(origin.folder) if origin else learn())
        distributed.barrier()
        return load(self.folder)


@dataclass(frozen=True)
class Rehearsed:
    """All that a training would begin with, while `rehearsing`."""

    settings: Any
    model: nn.Module
    training: Training
    choice: Choice | None = None  # by the data, where the user gave no settings


rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


def train(
    kind: type[Task[Any, Any]],
    values: Mapping[str, Any],
    *,
    quiet: bool = False,
    recipe: str | None = None,
) -> Any:
    """Train a task in a folder by the settings as the user wrote them, or resume a run."""
    started = time.perf_counter()
    origin = kind.origin_of(values)
    settings = kind.resolve(values, origin)
    if origin is None:
        check_buildable(settings.model)  # a wrong name is refused before data are read
    folder = Path(settings.out or f"runs/{kind.name}")
    if settings.threads:
        torch.set_num_threads(settings.threads)
    if settings.processes > 1 and distributed.world_size() == 1:
        words = [f"{key}={value}" for key, value in values.items() if value is not None]
        command = ["train", recipe or kind.name, *words]
        return Report(**distributed.launch(settings.processes, command))
    distributed.init()
    quiet = quiet or not distributed.is_main()
    with locked(folder) if distributed.is_main() else nullcontext():
        data, choice = kind.read(settings, origin), None
        if recipe is None:
            settings, choice = kind.defaults_for_data(settings, values, data)
        begun = check_resume(folder, settings, data.sha, data.split)
        broken = set_aside(folder, quiet) if begun and distributed.is_main() else {}
        lost = not (folder / SUMS).exists() or any(name.endswith(".safetensors") for name in broken)
        distributed.barrier()
        codec = kind.make_codec(data, settings, Learnt(folder, begun, origin), origin)
        name, model = kind.make_model(data, codec, settings, origin)
        task = kind(model, codec, {"family": name, **codec.facts()})
        training = Training(task, data, settings)
        if rehearsing.get():
            return Rehearsed(settings, model, training, choice)
        facts = task.facts(data, settings) | ({"chosen": choice._asdict()} if choice else {})
        check_unchanged(folder, begun, {"kept": hash_frozen(model), **facts}, settings)
        if settings.compile:
            compile_model(model, task.dynamic)
        baselines = task.baselines(data, settings)
        for note in other_bits(folder, begun or {}):
            log(note, quiet)
        if begun is None:
            for note in [*data.notes, *([str(choice)] if choice else [])]:
                log(note, quiet)
            plan = _plan(values, settings, training, model, folder, started)
            for note in plan.notes:
                log(note, quiet)
            begun = _begin(task, folder, settings, data, facts, baselines, recipe, plan)
            count = f"{parameters(model):,} parameters{trainable(model)}"
            log(f"{count}; {count_steps(begun['steps'])}", quiet)
        if distributed.is_main():
            names = task.columns_of(settings)
            _write_beside(task, folder, name, settings, origin, broken, names)
            if not lost:
                seal(folder)

        def publish(weights: dict[str, Tensor], scores: dict[str, float]) -> None:
            whole = {**state_of(model), **weights}
            unseal(folder)
            task.publish(folder, merged(model, whole))
            title, threads = task.title(data, settings), torch.get_num_threads()
            told = (kind.name, title, scores, parameters(model), threads, baselines)
            card = model_card(*told, chosen=str(choice or ""))
            write_atomically(folder / "README.md", card)
            seal(folder)

        plans = plans_of(begun)
        training.valid_share = plans[-1].valid_share
        fit = Fit(
            model,
            training,
            settings,
            folder,
            plans=plans,
            record=lambda plans: record_plans(folder, plans),
            publish=publish,
            quiet=quiet,
            lost=lost,
            film=Film(task, data, settings, folder, plans[-1].steps)
            if settings.watch_every and distributed.is_main()
            else None,
        )
        outcome = fit.run()
        if outcome.finished and distributed.is_main():
            task.finish(folder, data, settings)
            seal(folder)
        distributed.destroy()
    report = Report(
        str(folder),
        outcome.step,
        fit.plan.steps,
        outcome.finished,
        outcome.scores,
        baselines,
        outcome.signal,
    )
    if report.finished:
        said = beside_baselines(report.scores, baselines)
        warnings = [said] if said.startswith(WARNING) else []
        if settings.minutes is not None and report.step < MIN_STEPS:
            warnings.append(too_few(report.step))
        for warning in warnings:
            log(warning, quiet)
    return report


def planned(plans: Sequence[Plan]) -> dict[str, Any]:
    """What recipe.json says of the plans of a run: the last one, then all of them."""
    rows = [plan.to_json() for plan in plans]
    return {**{key: rows[-1][key] for key in PLANNED}, "plans": rows}


def plans_of(recipe: Mapping[str, Any]) -> list[Plan]:
    """Read the plans of a run, of which one of before has only one."""
    if "plans" in recipe:
        return [Plan.from_json(row) for row in recipe["plans"]]
    kept = {key: recipe[key] for key in PLANNED if key in recipe}
    return [Plan.from_json({"warmup": recipe["settings"].get("warmup"), **kept})]


def record_plans(folder: Path, plans: Sequence[Plan]) -> None:
    """Write the plans of a run into its recipe.json."""
    if distributed.is_main():
        update_recipe(folder, planned(plans))


def check_unchanged(
    folder: Path, begun: dict[str, Any] | None, facts: Mapping[str, Any], settings: Any
) -> None:
    """Refuse to resume a run whose frozen weights, or whose teacher, are others now."""
    if begun is None:
        return
    for key, named, what in (
        ("kept", "init", "other weights"),
        ("teacher", "teacher", "another teacher"),
    ):
        if begun.get(key) != facts.get(key):
            raise UsageError(
                f"{folder} was begun with {what} than {named}={getattr(settings, named)} holds "
                "now; restore it to go on, or give another out= to begin anew"
            )


def compile_model(model: nn.Module, dynamic: bool) -> None:
    """Compile what a model computes before its head; what cannot be compiled runs as it is."""
    torch._dynamo.config.suppress_errors = True
    reads = "hidden" if hasattr(model, "hidden") else "features"
    setattr(model, reads, torch.compile(getattr(model, reads), dynamic=dynamic))


def _write_beside(
    task: Task[Any, Any],
    folder: Path,
    name: str,
    settings: Any,
    origin: Origin | None,
    broken: Mapping[str, str],
    columns: list[str],
) -> None:
    """Write config.json and the files of the codec, which must be as they were when resumed."""
    about = {**(origin.imported if origin else {}), **task.codec.facts()}
    about |= {"columns": columns} if columns else {}
    save_config(folder, task.published(), name=name, task=task.runs_as(settings), about=about)
    task.codec.save(folder)
    if task.generation and not (folder / "generation_config.json").exists():
        save_generation(folder, task.generation)
    for other in damaged(folder, {n: h for n, h in broken.items() if is_learnt(n)}):
        raise UsageError(
            f"{folder / other}: was damaged and cannot be made again as it was; "
            "give another out= to begin anew"
        )


def _plan(
    values: Mapping[str, Any],
    settings: Any,
    training: Training,
    model: nn.Module,
    folder: Path,
    started: float,
) -> Plan:
    """Settle how many steps there will be, and what follows from that."""
    if settings.minutes is None:
        return make_plan(settings, epoch=_epoch(settings, training))
    if any(values.get(key) is not None for key in ROWS_DECODED):
        training.decoded = 0  # the user has said how many
    whole = 60 * settings.minutes
    cost = measure(model, training, settings, folder, whole)
    passed = distributed.broadcast(time.perf_counter() - started)
    left = max(whole - passed, MIN_TRAINING_SHARE * whole)
    return make_plan(settings, epoch=_epoch(settings, training), cost=cost, seconds=left)


def _epoch(settings: Any, training: Training) -> float | None:
    """Return how many steps read everything once, if that is asked."""
    if settings.epochs is None:
        return None
    return training.epoch() / (settings.accumulate * distributed.world_size())


def _begin(
    task: Task[Any, Any],
    folder: Path,
    settings: Any,
    data: Data,
    facts: dict[str, Any],
    baselines: dict[str, dict[str, float]],
    recipe: str | None,
    plan: Plan,
) -> dict[str, Any]:
    """Write down all that the run depends on."""
    hashes = task.codec.hashes()
    more = {
        "recipe": recipe,
        **planned([plan]),
        **({"tokenizers": hashes} if hashes else {}),
        **facts,
        "baselines": baselines,
        "parameters": parameters(task.model),
        "kept": hash_frozen(task.model),
        "split": data.split.to_json(),
    }
    if not distributed.is_main():
        return more
    return write_recipe(folder, task.name, settings, data.sha, more)
