"""A training run in its folder: what every task does around the loop."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regard.errors import UsageError, log, lookup
from regard.files import read_json, write_atomically
from regard.hashes import SUMS, damaged, listed, seal, unseal
from regard.layers.lora import merged
from regard.models import family, sized
from regard.models.folder import load_folder, save_config, save_weights
from regard.pretrained.folder import import_folder, is_foreign
from regard.settings import fill
from regard.tasks.frame.origin import INIT_MAY_DIFFER as HARMLESS  # noqa: F401
from regard.tasks.frame.origin import Origin
from regard.tasks.frame.recipe import check_resume as recall
from regard.tasks.frame.recipe import hash_frozen as hash_kept
from regard.tasks.frame.recipe import (
    is_learnt,
    model_card,
    parameters,
    save_generation,  # noqa: F401
    set_aside,
    write_recipe,
)
from regard.tasks.frame.recipe import trainable as learning
from regard.tasks.frame.settings import SHORT, flat, size_of, width_of  # noqa: F401
from regard.tasks.frame.settings import TrainSettings as TaskSettings
from regard.tasks.frame.task import Data
from regard.tasks.frame.train import Rehearsed, Report, rehearsing
from regard.tasks.frame.train import count_steps as steps_of
from regard.tasks.tokenizer import load_any_tokenizer, load_any_tokenizers
from regard.tasks.tune import check_tune, let_learn, usual_rate
from regard.training import distributed
from regard.training.loop import (
    Fit,
    Trainable,
    check,
    locked,
    measure,
    mix,
)
from regard.training.plan import DURATION_KEYS, MIN_TRAINING_SHARE, Plan, make_plan
from regard.weights import state_of

# settings of tasks that say how many rows a validation decodes
ROWS_JUDGED = ("valid_sentences", "valid_images")
S = TypeVar("S", bound=TaskSettings)


def resolve_task(
    cls: type[S],
    values: Mapping[str, Any],
    *,
    model: Any,
    sizes: Mapping[str, Mapping[str, Any]],
    short: Mapping[str, str | tuple[str, ...]],
    of: str,
) -> S:
    """Make full settings of what a user gave: the size fills in what is not said.

    `model` is the config that keys such as model.block.norm change; `of` says what data hold.
    """
    size = size_of(values)
    said = {"size": size, "model": model, **lookup("size", size, sizes)}
    if any(values.get(key) is not None for key in DURATION_KEYS):
        said.pop("steps")
    if values.get("init"):
        said["lr"] = usual_rate(values, width_of(model))
    settings = fill(cls, values, base=cls(**said), short=short)
    check(settings)
    check_tune(settings, values)
    if settings.data is None:
        raise UsageError(f"data is missing; add data=FILE or data=FOLDER with {of}")
    return settings


def settings_with(kind: type[S], **parts: type) -> type[S]:
    """Return settings whose parts, such as the model, are of other kinds with their own keys."""
    return _with_parts(kind, tuple(parts.items()))


@cache
def _with_parts(kind: Any, parts: tuple[tuple[str, type], ...]) -> Any:
    own = [(name, part, field(default_factory=part)) for name, part in parts]
    return dataclasses.make_dataclass(kind.__name__, own, bases=(kind,), frozen=True)


def shape_of(name: str, values: Mapping[str, Any], *row: str, **changes: Any) -> Any:
    """Return a family's config: that of the model to start from, or else one of the size.

    A row names a member of the family, such as llama. `changes` are what the task makes anew, such
    as the head of a classifier.
    """
    if not values.get("init"):
        return dataclasses.replace(sized(name, size_of(values), *row), **changes)
    other, config = trained(values["init"])
    if config["family"] != name:
        raise UsageError(f"init={values['init']} is of family {config['family']}; expected {name}")
    return dataclasses.replace(other.config, **changes)


def trained(folder: str | Path) -> tuple[Any, dict[str, Any]]:
    """Load a trained model with its config: one of ours, or a public checkpoint as it came."""
    if is_foreign(folder):
        return import_folder(folder, read=load_any_tokenizers)[:2]
    return load_folder(Path(folder))


def use_threads(threads: int | None) -> int:
    """Use so many threads, or as many as the machine has cores."""
    if threads:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def shorten(values: Mapping[str, Any]) -> str:
    """Write settings as words of a command."""
    return " ".join(f"{key}={value}" for key, value in values.items())


def build_model(name: str, config: Any, settings: TaskSettings, *, fresh: str = "") -> Any:
    """Build a model of a family with weights drawn by the seed, or those of `init`.

    Weights whose names begin with `fresh` (a new head) are not taken from there. Only what
    `tune` chooses learns.
    """
    torch.manual_seed(mix(settings.seed, "weights"))
    model: Any = family(name)[1](config).to(settings.device)
    if settings.init:
        fresh = start_from(model, settings.init, fresh)
    let_learn(model, settings, fresh)
    return model


def start_from(model: Any, folder: str, fresh: str = "") -> str:
    """Give a model the weights of a trained one of the same shape, but for what is fresh."""
    return Origin.load(folder).initialise(model, fresh)


def origin(folder: str | None) -> dict[str, Any]:
    """Return what config.json says of the public format that a model came in, if it did."""
    if not folder:
        return {}
    config = read_json(Path(folder) / "config.json")
    came = config.get("imported")
    if is_foreign(folder):
        came = {"model_type": config.get("model_type")}
    return {"imported": came} if isinstance(came, dict) else {}


def save_tokenizer(folder: Path, tokenizer: Any) -> None:
    """Write the tokenizer of a model beside it."""
    tokenizer.save(folder / "tokenizer.json")


def load_tokenizer(folder: Path) -> Any:
    """Read the tokenizer of a folder: one of ours, of characters, or that of a checkpoint."""
    return load_any_tokenizer(folder)


def settle_tokenizer(
    folder: Path,
    settings: TaskSettings,
    begun: dict[str, Any] | None,
    learn: Callable[[], Any],
    *,
    load: Callable[[Path], Any] = load_tokenizer,
    save: Callable[[Path, Any], None] = save_tokenizer,
) -> Any:
    """Take the tokenizer of the run, or of the model it starts from, or learn a new one."""
    lost = [n for n in listed(folder) if is_learnt(n) and not (folder / n).exists()]
    if distributed.is_main() and (begun is None or lost):
        save(folder, load(Path(settings.init)) if settings.init else learn())
    distributed.barrier()
    return load(folder)


def nothing(folder: Path) -> None:
    """Do nothing to a run's folder."""


@dataclass(frozen=True)
class Work:
    """What a task makes of its data, for the frame to train."""

    family: str  # the model's name in MODELS
    model: Any
    task: Trainable
    told: str  # what the model card says it is
    about: dict[str, Any] = field(default_factory=dict)  # what config.json says beside the model
    facts: dict[str, Any] = field(default_factory=dict)  # what recipe.json says beside the settings
    save: Callable[[Path], None] = nothing  # writes the files beside config and weights
    finish: Callable[[Path], None] = nothing  # what remains to be done after the last step
    dynamic: bool = True  # whether batches differ in shape, for compile=true
    runs_as: str = ""  # the task that the model is run by, if not the one that trained it
    kept: Any = None  # the part of the model that the folder is of, if not all
    publish: Callable[[Path, dict[str, Tensor]], None] = save_weights  # writes all weights
    baselines: dict[str, dict[str, float]] = field(default_factory=dict)  # what is to be beaten


def train_task(
    name: str,
    values: Mapping[str, Any],
    settings: TaskSettings,
    *,
    read: Callable[[], Data],
    prepare: Callable[[Data, Path, dict[str, Any] | None], Work],
    recipe: str | None = None,
    quiet: bool = False,
) -> Any:
    """Train a task in a folder, or go on with a run that was begun there.

    `values` are the settings as the user wrote them. `prepare` gets the data, the folder and the
    recipe of the run if it was begun before; files it writes then must not change on going on.
    """
    started = time.perf_counter()
    folder = Path(settings.out or f"runs/{name}")
    threads = use_threads(settings.threads)
    if settings.processes > 1 and distributed.world_size() == 1:
        words = [f"{key}={value}" for key, value in values.items() if value is not None]
        return Report(**distributed.launch(settings.processes, ["train", recipe or name, *words]))
    distributed.init()
    quiet = quiet or not distributed.is_main()
    with locked(folder) if distributed.is_main() else nullcontext():
        data = read()
        begun = recall(folder, settings, data.sha, data.split)
        broken = set_aside(folder, quiet) if begun and distributed.is_main() else {}
        lost = not (folder / SUMS).exists() or any(name.endswith(".safetensors") for name in broken)
        distributed.barrier()
        work = prepare(data, folder, begun)
        if rehearsing.get():
            return Rehearsed(settings, work.model, work.task)  # type: ignore[arg-type]
        model = work.model
        kept = hash_kept(model)
        if begun is not None and begun.get("kept") != kept:
            raise UsageError(
                f"{folder} was begun with other weights than init={settings.init} holds now; "
                "restore them to go on, or give another out= to begin anew"
            )
        if settings.compile:
            # a part that cannot be compiled here, for want of a compiler say, runs as it is
            torch._dynamo.config.suppress_errors = True
            reads = "hidden" if hasattr(model, "hidden") else "features"
            setattr(model, reads, torch.compile(getattr(model, reads), dynamic=work.dynamic))
        if begun is None:
            for note in data.notes:
                log(note, quiet)
            plan = _plan(values, settings, work.task, model, folder, started)
            for note in plan.notes:
                log(note, quiet)
            begun = _begin(name, folder, settings, data, work, recipe, plan)
            count = f"{parameters(model):,} parameters{learning(model)}"
            log(f"{count}; {steps_of(begun['steps'])}", quiet)
        if distributed.is_main():
            task = work.runs_as or name
            about = {**origin(settings.init), **work.about}
            save_config(folder, work.kept or model, name=work.family, task=task, about=about)
            work.save(folder)
            for other in damaged(folder, {n: h for n, h in broken.items() if is_learnt(n)}):
                raise UsageError(
                    f"{folder / other}: was damaged and cannot be made again as it was; "
                    "give another out= to begin anew"
                )
            if not lost:
                seal(folder)

        def publish(weights: dict[str, Tensor], scores: dict[str, float]) -> None:
            whole = {**state_of(model), **weights}
            unseal(folder)
            work.publish(folder, merged(model, whole))
            count = parameters(model)
            card = model_card(name, work.told, scores, count, threads, work.baselines)
            write_atomically(folder / "README.md", card)
            seal(folder)

        if begun.get("valid_share", 1.0) < 1:
            work.task.valid_share = begun["valid_share"]
        if settings.warmup is None:
            # a run of before, which had a warm-up that did not follow from the steps, keeps it
            rise = begun["warmup"] if "warmup" in begun else begun["settings"]["warmup"]
            settings = dataclasses.replace(settings, warmup=rise)
        fit = Fit(
            model,
            work.task,
            settings,
            folder,
            steps=begun["steps"],
            valid_every=begun["valid_every"],
            publish=publish,
            quiet=quiet,
            lost=lost,
        )
        outcome = fit.run()
        if outcome.finished and distributed.is_main():
            work.finish(folder)
            seal(folder)
        distributed.destroy()
    return Report(str(folder), outcome.step, begun["steps"], outcome.finished, outcome.scores)


def _plan(
    values: Mapping[str, Any],
    settings: TaskSettings,
    task: Trainable,
    model: nn.Module,
    folder: Path,
    started: float,
) -> Plan:
    """Settle how many steps there will be, and what follows from that."""
    if settings.minutes is None:
        return make_plan(settings, epoch=_epoch(settings, task))
    if any(values.get(key) is not None for key in ROWS_JUDGED):
        task.decoded = 0  # the user has said how many
    whole = 60 * settings.minutes
    cost = measure(model, task, settings, folder, whole)
    passed = distributed.broadcast(time.perf_counter() - started)
    left = max(whole - passed, MIN_TRAINING_SHARE * whole)
    return make_plan(settings, epoch=_epoch(settings, task), cost=cost, seconds=left)


def _epoch(settings: TaskSettings, task: Trainable) -> float | None:
    """Return how many steps read everything once, if that is asked."""
    if settings.epochs is None:
        return None
    return task.epoch() / (settings.accumulate * distributed.world_size())


def _begin(
    name, folder, settings, data: Data, work: Work, recipe: str | None, plan: Plan
) -> dict[str, Any]:
    """Write down all that the run depends on."""
    more = {
        "recipe": recipe,
        "steps": plan.steps,
        "warmup": plan.warmup,
        "valid_every": plan.valid_every,
        "valid_share": plan.valid_share,
        "seconds_a_step": plan.seconds_a_step,
        "seconds_a_validation": plan.seconds_a_validation,
        **work.facts,
        "baselines": work.baselines,
        "parameters": parameters(work.model),
        "kept": hash_kept(work.model),
        "split": data.split.to_json(),
    }
    return write_recipe(folder, name, settings, data.sha, more) if distributed.is_main() else more
