"""A training in its folder, from the settings to the finished model: the same for every task."""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard import own
from regard.data.parts import Dataset
from regard.data.store import SHOWN
from regard.errors import UsageError, log
from regard.files import read_json, write_atomically
from regard.files.hashes import SUMS, damaged, listed, seal, unseal
from regard.files.weights import state_of
from regard.layers.lora import merged
from regard.metrics.evaluation import WARNING, beside_baselines
from regard.metrics.results import Scored
from regard.models.folder import check_buildable, save_config, save_weights
from regard.pretrained.model_card import card_head
from regard.pretrained.tokenizer_folder import load_tokenizer
from regard.settings import written
from regard.tasks.frame.film import Film
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.recipe import (
    begun_in,
    check_resume,
    hash_frozen,
    is_learnt,
    model_card,
    other_bits,
    parameters,
    save_generation,
    set_aside,
    share_batches,
    trainable,
    update_recipe,
    write_recipe,
)
from regard.tasks.frame.settings import TrainSettings, flat
from regard.tasks.parts import Choice, Lesson, Settled, Task
from regard.tasks.runner import Runner
from regard.training import distributed
from regard.training.callbacks import Callback, check_callbacks
from regard.training.fit import Fit
from regard.training.launch import adopt_slurm, launch
from regard.training.plan import MIN_STEPS, MIN_TRAINING_SHARE, Plan, make_plan, too_few
from regard.training.run_folder import exit_code, locked
from regard.training.sharding import recompute, shard
from regard.training.step import Trainable, measure

_PLAIN = (str, int, float, list, tuple, type(None))  # what JSON holds of given settings
# what recipe.json says of the last plan outside of the list of all
_PLANNED = ("steps", "warmup", "valid_every", "valid_share")
_PLANNED += ("seconds_a_step", "seconds_a_validation")
# settings of tasks that say how many rows a validation decodes
_ROWS_DECODED = ("valid_sentences", "valid_images", "valid_sounds")


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
    """A lesson with its settings, as the training loop sees it."""

    def __init__(self, lesson: Lesson):
        self.lesson, self.lr_scales, self.decoded = lesson, lesson.lr_scales, lesson.decoded
        self.valid_share = 1.0  # of the rows that are decoded

    def batch(self, n: int) -> Any:
        """Batch n, always the same for the same n."""
        return self.lesson.batches[n]

    def epoch(self) -> float:
        """Number of batches in which everything is read once."""
        return self.lesson.batches.epoch()

    def count(self, batch: Any) -> tuple[int, int]:
        """Units that the loss is divided by, and tokens that were read."""
        return self.lesson.count(batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Summed loss of a batch."""
        return self.lesson.loss(batch)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Scores on the validation part, as the user's model gets them."""
        return self.lesson.validate(self.valid_share)


class CodecBuilder:
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
class PreparedRun:
    """All that a training begins with: settings, data, a model with its codec, and its lesson.

    Args:
        task: what is learnt.
        settings: completed by the size, the data and what the user gave.
        folder: the run folder.
        origin: the model that it starts from, if it starts from one.
        data: the parts to train and to validate on.
        choice: settings that followed from the data, if any did.
        begun: recipe.json of the run that is resumed, if one is.
        broken: files of the folder that were damaged, and how.
        family: of the model.
        runner: the model with its codec, as `load` would return it.
        training: its lesson, as the loop sees it.
    """

    task: Task
    settings: TrainSettings
    folder: Path
    origin: Origin | None
    data: Dataset[Any]
    choice: Choice | None
    begun: dict[str, Any] | None
    broken: Mapping[str, str]
    family: str
    runner: Runner[Any]
    training: Training

    @property
    def lesson(self) -> Lesson:
        """Batches, loss and what is noted about the run."""
        return self.training.lesson

    @property
    def lost(self) -> bool:
        """Whether published weights are missing or damaged."""
        damaged_weights = any(name.endswith(".safetensors") for name in self.broken)
        return not (self.folder / SUMS).exists() or damaged_weights


def settle(task: Task, values: Mapping[str, Any]) -> Settled:
    """Complete the settings of a run; a wrong name is refused before data are read."""
    settled = task.settle(values)
    if settled.origin is None:
        check_buildable(settled.settings.model)
    return settled


def prepare(
    task: Task,
    values: Mapping[str, Any],
    settled: Settled | None = None,
    *,
    recipe: str | None = None,
    quiet: bool = True,
) -> PreparedRun:
    """Read data and make codec, model and lesson: all of a training but its steps.

    Args:
        task: what is learnt.
        values: settings as the user wrote them.
        settled: the same, completed, if they are already.
        recipe: the recipe that is followed, if one is.
        quiet: say nothing on stderr.
    """
    objective, settings, origin, folder = settled or settle(task, values)
    SHOWN.set(not quiet)
    data, choice = objective.read(settings, origin), None
    if recipe is None:
        settings, choice = objective.suit(settings, values, data)
    begun = check_resume(folder, settings, data.sha, data.split)
    settings = share_batches(settings, begun, distributed.world_size())
    broken = set_aside(folder, quiet) if begun and distributed.is_main() else {}
    distributed.barrier()
    codec = objective.codec(data, settings, CodecBuilder(folder, begun, origin), origin)
    name, model = objective.model(data, codec, settings, origin)
    runner = Runner(task, model, codec, {"family": name, **codec.facts()})
    training = Training(objective.lesson(runner, data, settings))
    return PreparedRun(
        task, settings, folder, origin, data, choice, begun, broken, name, runner, training
    )


def fit(
    run: PreparedRun,
    values: Mapping[str, Any],
    *,
    quiet: bool = False,
    recipe: str | None = None,
    started: float | None = None,
    callbacks: Sequence[Callback] = (),
) -> Report:
    """Train a prepared run to its end, or until a signal stops it, and publish its model.

    Args:
        run: what it begins with.
        values: settings as the user wrote them.
        quiet: say nothing on stderr.
        recipe: the recipe that is followed, if one is.
        started: since when the minutes of a run by time are counted.
        callbacks: what is called as it goes, beside loggers.
    """
    settings, folder, lesson, begun = run.settings, run.folder, run.lesson, run.begun
    model, data, choice, lost = run.runner.predictor.model, run.data, run.choice, run.lost
    facts = {**lesson.facts, **({"chosen": choice._asdict()} if choice else {})}
    facts["kept"] = hash_frozen(model)
    check_unchanged(folder, begun, facts, settings)
    if settings.compile:
        compile_model(model, lesson.dynamic)
    baselines = lesson.baselines()
    count = parameters(model)
    if settings.recompute:
        recompute(model)
    if settings.parallel != "ddp" and distributed.world_size() > 1:
        shard(model, settings.device, settings.parallel == "hsdp")
    if begun is not None:
        for note in other_bits(folder, begun):
            log(note, quiet)
    else:
        for note in [*data.notes, *([str(choice)] if choice else [])]:
            log(note, quiet)
        plan = _plan(values, run, started or time.perf_counter())
        for note in plan.notes:
            log(note, quiet)
        plain = {k: v if isinstance(v, _PLAIN) else str(v) for k, v in values.items()}
        given = {k: v for k, v in plain.items() if k != "out"}  # a folder can be moved
        noted = {**facts, "baselines": baselines, "parameters": count, "given": given}
        begun = _begin(run, noted, recipe, plan)
        told = f"{count:,} parameters{trainable(model)}; {count_steps(begun['steps'])}"
        log(told, quiet)
    if distributed.is_main():
        _write_beside(run)
        if not lost:
            seal(folder)

    def publish(weights: dict[str, Tensor], scores: dict[str, float]) -> None:
        whole = {**state_of(model), **weights}
        unseal(folder)
        (lesson.publish or save_weights)(folder, merged(model, whole))
        lesson.beside(folder, scores)
        title, threads = lesson.title or run.task.name, torch.get_num_threads()
        told = (run.task.name, title, scores, count, threads, baselines)
        card = model_card(*told, chosen=str(choice or ""))
        data = Path(str(run.settings.data)).name if run.settings.data else ""
        head = card_head(read_json(folder / "config.json"), scores, data)
        write_atomically(folder / "README.md", head + card)
        seal(folder)

    plans = plans_of(begun)
    run.training.valid_share = plans[-1].valid_share
    loop = Fit(
        model,
        run.training,
        settings,
        folder,
        plans=plans,
        record=lambda plans: record_plans(folder, plans),
        publish=publish,
        quiet=quiet,
        lost=lost,
        film=Film(run.runner, data, settings, folder, plans[-1].steps)
        if settings.watch_every and distributed.is_main()
        else None,
        callbacks=callbacks,
        facts={"task": run.task.name, **flat(settings)},
    )
    outcome = loop.run()
    if outcome.finished and distributed.is_main():
        lesson.finish(folder)
        seal(folder)
    return Report(
        str(folder),
        outcome.step,
        loop.plan.steps,
        outcome.finished,
        outcome.scores,
        baselines,
        outcome.signal,
    )


def train(
    task: Task,
    values: Mapping[str, Any],
    *,
    quiet: bool = False,
    recipe: str | None = None,
    callbacks: Sequence[Callback] = (),
) -> Report:
    """Train a task in a folder by the settings as the user wrote them, or resume a run.

    Args:
        task: what is learnt.
        values: settings as the user wrote them.
        quiet: say nothing on stderr.
        recipe: the recipe that is followed, if one is.
        callbacks: what is called as it goes, beside loggers.
    """
    started = time.perf_counter()
    _, settings, _, folder = settled = settle(task, values)
    check_callbacks(callbacks, settings.processes, settings.restarts)
    check_sharded(settings)
    adopt_slurm()
    if settings.threads:
        torch.set_num_threads(settings.threads)
    launches = (settings.processes > 1 or settings.restarts) and "WORLD_SIZE" not in os.environ
    size = settings.processes if launches else distributed.world_size()
    share_batches(settings, begun_in(folder), size)
    if launches:
        words = [f"{key}={written(value)}" for key, value in values.items() if value is not None]
        command = ["train", recipe or task.name, *words, *own.words()]
        return Report(**launch(settings.processes, command, settings.restarts))
    quiet = quiet or not distributed.is_main()
    with (
        distributed.joined(settings.device, settings.timeout),
        locked(folder) if distributed.is_main() else nullcontext(),
    ):
        run = prepare(task, values, settled, recipe=recipe, quiet=quiet)
        report = fit(run, values, quiet=quiet, recipe=recipe, started=started, callbacks=callbacks)
    if report.finished:
        said = beside_baselines(report.scores, report.baselines)
        warnings = [said] if said.startswith(WARNING) else []
        if settings.minutes is not None and report.step < MIN_STEPS:
            warnings.append(too_few(report.step))
        for warning in warnings:
            log(warning, quiet)
    return report


def check_sharded(settings: TrainSettings) -> None:
    """Refuse what does not know weights that are sharded."""
    for key in ("compile", "watch_every"):
        if settings.parallel != "ddp" and getattr(settings, key):
            raise UsageError(
                f"parallel={settings.parallel} does not go with {key}= yet; leave one of them out"
            )
    if settings.recompute and settings.compile:
        raise UsageError("recompute= does not go with compile= yet; leave one of them out")


def own_parts(run: PreparedRun) -> list[dict[str, Any]]:
    """The user's own parts that a run is made of, and the files that they are in."""
    return own.noted(run.task.name, {**flat(run.settings), "model.family": run.family})


def planned(plans: Sequence[Plan]) -> dict[str, Any]:
    """What recipe.json says of the plans of a run: the last one, then all of them."""
    rows = [plan.to_json() for plan in plans]
    return {**{key: rows[-1][key] for key in _PLANNED}, "plans": rows}


def plans_of(recipe: Mapping[str, Any]) -> list[Plan]:
    """Read the plans of a run, of which one of before has only one."""
    if "plans" in recipe:
        return [Plan.from_json(row) for row in recipe["plans"]]
    kept = {key: recipe[key] for key in _PLANNED if key in recipe}
    return [Plan.from_json({"warmup": recipe["settings"].get("warmup"), **kept})]


def record_plans(folder: Path, plans: Sequence[Plan]) -> None:
    """Write the plans of a run into its recipe.json."""
    if distributed.is_main():
        update_recipe(folder, planned(plans))


def check_unchanged(
    folder: Path, begun: dict[str, Any] | None, facts: Mapping[str, Any], settings: TrainSettings
) -> None:
    """Refuse to resume a run whose frozen weights, or whose teacher, are others now."""
    if begun is None:
        return
    if told := own.changed(begun.get("use")):
        raise UsageError(
            f"{folder} was begun with another file of own parts: {told} then; "
            "restore it to go on, or give another out= to begin anew"
        )
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


def _write_beside(run: PreparedRun) -> None:
    """Write config.json and the files of the codec, which must be as they were when resumed."""
    folder, codec, lesson = run.folder, run.runner.predictor.codec, run.lesson
    facts = {key: value for key, value in run.runner.config.items() if key != "family"}
    about = {**(run.origin.imported if run.origin else {}), **facts}
    columns = run.task.inputs.columns_of(run.settings)
    about |= {"columns": columns} if columns else {}
    about |= {"use": parts} if (parts := own_parts(run)) else {}
    model = run.runner.predictor.model if lesson.published is None else lesson.published
    save_config(folder, model, name=run.family, task=lesson.runs_as or run.task.name, about=about)
    codec.save(folder)
    if lesson.generation and not (folder / "generation_config.json").exists():
        save_generation(folder, lesson.generation)
    for other in damaged(folder, {n: h for n, h in run.broken.items() if is_learnt(n)}):
        raise UsageError(
            f"{folder / other}: was damaged and cannot be made again as it was; "
            "give another out= to begin anew"
        )


def _plan(values: Mapping[str, Any], run: PreparedRun, started: float) -> Plan:
    """Number of steps, and what follows from it."""
    settings, training = run.settings, run.training
    if settings.minutes is None:
        return make_plan(settings, epoch=_epoch(settings, training))
    if any(values.get(key) is not None for key in _ROWS_DECODED):
        training.decoded = 0  # the user has said how many
    whole = 60 * settings.minutes
    cost = measure(run.runner.predictor.model, training, settings, run.folder, whole)
    passed = distributed.broadcast(time.perf_counter() - started)
    left = max(whole - passed, MIN_TRAINING_SHARE * whole)
    return make_plan(settings, epoch=_epoch(settings, training), cost=cost, seconds=left)


def _epoch(settings: TrainSettings, training: Training) -> float | None:
    """Steps that read everything once, if that is asked."""
    if settings.epochs is None:
        return None
    return training.epoch() / (settings.batches or distributed.world_size())


def _begin(
    run: PreparedRun,
    facts: dict[str, Any],
    recipe: str | None,
    plan: Plan,
) -> dict[str, Any]:
    """Write down all that the run depends on."""
    hashes = run.runner.predictor.codec.hashes()
    more = {
        "recipe": recipe,
        "world_size": distributed.world_size(),
        **({"use": parts} if (parts := own_parts(run)) else {}),
        **planned([plan]),
        **({"tokenizers": hashes} if hashes else {}),
        **facts,
        "split": run.data.split.to_json(),
    }
    if not distributed.is_main():
        return more
    return write_recipe(run.folder, run.task.name, run.settings, run.data.sha, more)
