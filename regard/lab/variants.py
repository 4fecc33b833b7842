"""Comparing variants: the same training with some settings changed, each with several seeds."""

import itertools
import math
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from regard.data.tokenize import TOKENIZERS
from regard.errors import UsageError, log, lookup
from regard.files import read_json
from regard.lab.report import Compared, Variant, finite, name_of
from regard.lab.workers import work
from regard.models import MODELS, family
from regard.settings import describe, fill, setting
from regard.tasks import train_settings, trainer
from regard.tasks.run import recall
from regard.training.loop import locked

# the task, all settings and the recipe's name that a training of some settings comes to
Plan = Callable[[dict[str, Any]], tuple[str, dict[str, Any], str | None]]

LISTS = {
    "columns",
    "lora_on",
}  # keys whose values have commas of their own, beside those typed as lists
PATHS = {"data", "valid", "test", "init"}  # a file's name may have commas
LENGTHS = (1, 2, 4, 8)
MOST_RUNS = 10_000


@dataclass(frozen=True)
class CompareSettings:
    """Settings of `compare` beside those of the training; a value with commas is varied."""

    seeds: int = setting(3, "runs per variant, from seed= on; or seed=1,5,9", min=1, max=1000)
    parallel: int = setting(1, "runs in parallel", min=1, max=256)
    lengths: tuple[int, ...] | None = setting(
        None,
        "test lengths of a language model, as multiples of its context; 1,2,4,8 unless given",
        min=1,
        max=1024,
    )
    counted: str = setting("all", "tokens that count at a test length: all, or last (quarter)")
    out: str | None = setting(None, "output folder of all runs")


# What to train


def options(key: str, value: Any, lists: Collection[str]) -> list[Any]:
    """Return the values that a key is to take, one after the other."""
    whole = key in lists or (key in PATHS and isinstance(value, str) and os.path.exists(value))
    if not whole and isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",")]
    if whole or not isinstance(value, list | tuple):
        return [value]
    shown = ",".join(map(str, value))
    if not value or "" in value:
        raise UsageError(f"{key}={shown} has an empty value; write {key}=A,B")
    if len(set(map(str, value))) < len(value):
        raise UsageError(f"{key}={shown} has a value twice; name each once")
    return list(value)


def lists_of(task: str) -> set[str]:
    """Return the keys of a task whose values are lists already, and are never varied."""
    kind, keys = train_settings(task)
    typed = {row.key for row in describe(kind) if ",..." in row.type}
    short = {key for key, long in keys.items() if long in typed}
    return LISTS | typed | short


def grid(name: str, varied: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Return every combination of what is varied, each with a name for its folder."""
    found: dict[str, Variant] = {}
    for values in itertools.product(*varied.values()):
        words = [re.sub(r"[^\w.+-]+", "_", str(value)).strip(".") for value in values]
        short = "-".join(words)[:80] or name
        place, number = short, 1
        while place.lower() in found:
            number += 1
            place = f"{short}~{number}"
        found[place.lower()] = Variant(place, dict(zip(varied, values, strict=True)))
    return list(found.values())


def seeds_of(how: CompareSettings, seed: list[Any], own: Mapping[str, Any]) -> list[int]:
    """Return the seeds to train with: those that are listed, or so many from the first on."""
    try:
        numbers = [int(one) for one in seed]
    except (TypeError, ValueError):
        raise UsageError(f"seed={','.join(map(str, seed))} is not a whole number") from None
    if len(numbers) > 1 and "seeds" in own:
        raise UsageError(f"seed lists {len(numbers)} seeds, and seeds={how.seeds} counts; keep one")
    return numbers if len(numbers) > 1 else [numbers[0] + n for n in range(how.seeds)]


def check_parts(settings: Any) -> None:
    """Refuse names that a training would find to be wrong only once it has read its data."""
    kinds = {**TOKENIZERS, "characters": None}
    lookup("tokenizer", getattr(settings, "tokenizer", "characters"), kinds)
    check_model(settings.model)


def check_model(config: Any) -> None:
    """Refuse a model that cannot be built, without taking memory for it."""
    for name in MODELS:
        kind, model = family(name)
        if type(config) is kind:
            if hasattr(config, "labels"):  # how many is known with the data
                config = replace(config, labels=max(2, config.labels))
            with torch.device("meta"):
                model(config)


def check_run(folder: Path, settings: Any) -> None:
    """Refuse a folder whose run was begun with other settings."""
    path = folder / "recipe.json"
    if path.exists():
        recall(folder, settings, read_json(path).get("data", ""))


# One training


def train_one(job: dict[str, Any]) -> dict[str, Any]:
    """Train a variant with a seed, or go on with it, and say what came of it.

    The result is `finished`, or not if it was interrupted; `failed` says why it cannot be, and
    `refused` why it could not even begin.
    """
    folder = Path(job["folder"])
    module = trainer(job["task"])
    try:
        report = module.train(job["values"], quiet=True, recipe=job["recipe"])
        if not report.finished:
            return {"finished": False}
        lengths = None
        if job["lengths"]:
            from regard.lab.extrapolate import loss_by_length

            lengths = loss_by_length(folder, module.resolve(job["values"]), job["lengths"])
    except KeyboardInterrupt:
        return {"finished": False}
    except UsageError as mistake:
        begun = (folder / "recipe.json").exists()
        return {"finished": False, "failed" if begun else "refused": str(mistake)}
    recipe = read_json(folder / "recipe.json")
    last = (folder / "last").read_text().strip()
    counters = read_json(folder / "checkpoints" / last / "counters.json")
    return {
        "finished": True,
        "scores": report.scores,
        "steps": report.step,
        "tokens": counters["tokens"],
        "seconds": counters["seconds"],
        "parameters": recipe["parameters"],
        "data": recipe["data"],
        "tokenizers": recipe.get("tokenizers", []),
        "asked_lengths": job["lengths"],
        "lengths": lengths,
    }


def train_here(
    jobs: Sequence[dict[str, Any]], begin: Callable[[dict[str, Any]], None]
) -> Generator[tuple[dict[str, Any], Any]]:
    """Yield each job with its result, done in this process; stop when one was interrupted."""
    for job in jobs:
        begin(job)
        result = train_one(job)
        yield job, result
        if not result["finished"] and "failed" not in result:
            raise KeyboardInterrupt


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM stop as Ctrl-C does."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: then nobody can interrupt
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# All of them


def compare(
    name: str, given: Mapping[str, Any], *, task: str, plan: Plan, quiet: bool = False
) -> Compared:
    """Train every variant with every seed in its own folder, and compare their scores.

    Runs that are finished are not repeated, and one that was interrupted goes on.
    """
    own = {f.name: given[f.name] for f in fields(CompareSettings) if f.name in given}
    how = fill(CompareSettings, own)
    if how.counted not in ("all", "last"):
        raise UsageError(f"counted={how.counted} is not one of all, last")
    if not hasattr(trainer(task), "resolve"):
        trainer(task).train({})  # which says how such a model comes about
    out = Path(how.out or f"runs/compare_{name}")
    lists = lists_of(task)
    rest = {key: options(key, v, lists) for key, v in given.items() if key not in own}
    varied = {key: some for key, some in rest.items() if len(some) > 1 and key != "seed"}
    fixed = {key: some[0] for key, some in rest.items() if key not in varied and key != "seed"}
    if math.prod(map(len, varied.values())) * how.seeds > MOST_RUNS:
        raise UsageError(f"over {MOST_RUNS:,} runs; vary fewer keys, or take fewer seeds")
    variants = grid(name, varied)
    base = plan({**fixed, **variants[0].values})[1].get("seed", 1)
    seeds = seeds_of(how, rest.get("seed", [base]), own)
    # every variant of a seed before the next seed: what fails is seen early
    jobs = [
        make_job(out, variant, seed, fixed, how, plan) for seed in seeds for variant in variants
    ]
    if how.lengths and not any(job["lengths"] for job in jobs):
        raise UsageError(
            f"lengths={show(how.lengths)} is only for language models that go on writing"
        )
    command = ["regard", "compare", name, *(f"{k}={show(v)}" for k, v in given.items())]
    made = Compared(name, str(out), varied, variants, seeds, how.counted, shlex.join(command))
    with locked(out), stoppable():
        before = remember(out)
        for job in jobs:
            made.runs.append(describe_run(job, before.get((job["name"], job["seed"]))))
        train_all(made, jobs, how.parallel, quiet)
        made.keep(out)
    return made


def make_job(
    out: Path, variant: Variant, seed: int, fixed: Mapping, how: CompareSettings, plan: Plan
) -> dict[str, Any]:
    """Plan one training and refuse what is wrong with it."""
    folder = out / variant.name / f"seed-{seed}"
    task, values, recipe = plan({**fixed, **variant.values, "seed": seed, "out": str(folder)})
    if how.parallel > 1 and values.get("threads") is None:
        values["threads"] = max(1, torch.get_num_threads() // how.parallel)
    settings: Any = trainer(task).resolve(values)
    check_parts(settings)
    check_run(folder, settings)
    goes_on = task == "language" and settings.objective == "causal"
    return {
        "name": variant.name,
        "seed": seed,
        "variant": variant.values,
        "folder": str(folder),
        "task": task,
        "values": values,
        "recipe": recipe,
        "lengths": list(how.lengths or LENGTHS) if goes_on else None,
    }


def describe_run(job: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what is known of a run: what was found before, if it still holds."""
    run = {key: job[key] for key in ("name", "variant", "seed", "folder")}
    begun = (Path(job["folder"]) / "recipe.json").exists()
    if before and begun and before.get("asked_lengths") == job["lengths"]:
        return {**before, **run}
    return {**run, "finished": False}


def remember(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the finished runs that results.json tells of."""
    path = out / "results.json"
    if not path.exists():
        return {}
    try:
        told = read_json(path)
        runs = told["runs"]
        for run in runs if "accuracy_in" not in told else []:
            if "perplexity" in run["scores"] and run["scores"].get("accuracy") is not None:
                run["scores"]["accuracy"] *= 100  # of guessed words it was a share before
        return {(run["name"], run["seed"]): run for run in runs if run["finished"]}
    except (KeyError, TypeError):
        raise UsageError(f"{path}: was not written by compare; choose another out=") from None


def train_all(made: Compared, jobs: Sequence[dict[str, Any]], parallel: int, quiet: bool) -> None:
    """Train what is not finished, and write down each run as it ends."""
    runs = {(run["name"], run["seed"]): run for run in made.runs}
    todo = [job for job in jobs if not runs[job["name"], job["seed"]]["finished"]]
    done = len(jobs) - len(todo)
    log(f"{len(jobs)} runs in {made.out}" + (f", {done} of them done" * bool(done)), quiet)
    started, ended = time.perf_counter(), 0

    def begin(job: dict[str, Any]) -> None:
        log(f"{name_of(job)}: begins", quiet)

    results = (
        work("regard.lab.variants:train_one", todo, min(parallel, len(todo)), begin)
        if parallel > 1 and len(todo) > 1
        else train_here(todo, begin)
    )
    try:
        with closing(results):
            for job, result in results:
                if isinstance(result, RuntimeError):
                    result = {"finished": False, "failed": str(result)}
                if "refused" in result:
                    raise UsageError(f"{name_of(job)}: {result['refused']}")
                runs[job["name"], job["seed"]].update(finite(result))
                made.check_data()
                made.write(Path(made.out))
                ended += bool(result["finished"] or "failed" in result)
                left = (time.perf_counter() - started) / max(1, ended) * (len(todo) - ended)
                log(line_of(job, result, f"{done + ended} of {len(jobs)}", left), quiet)
    except KeyboardInterrupt:
        made.stopped = True


def line_of(job: Mapping[str, Any], result: Mapping[str, Any], count: str, left: float) -> str:
    """Say how a run ended and how much is left to do."""
    if not result["finished"]:
        return f"{name_of(job)}: {result.get('failed', 'stopped and saved')}"
    told = ", ".join(f"{k} {v:.4g}" for k, v in result["scores"].items() if k != "better")
    minutes = f"; about {math.ceil(left / 60)} min left" if left else ""
    return f"{name_of(job)}: {told}; {result['seconds']:.0f} s ({count} runs{minutes})"


def show(value: Any) -> str:
    """Write a value as a word of a command."""
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
