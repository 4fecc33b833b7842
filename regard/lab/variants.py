"""Comparison of variants: runs over a grid of settings, each with several seeds."""

import itertools
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from regard.costs.machine import least
from regard.costs.model import Reading
from regard.errors import UsageError, log
from regard.files import read_json
from regard.lab.report import Compared, SearchRecord, Variant, finite, run_name
from regard.lab.search import (
    SEARCHES,
    Rung,
    draw,
    kept,
    place,
    search_space,
    shares,
    standing,
    validations,
)
from regard.lab.workers import work
from regard.models.folder import check_buildable, load_folder
from regard.native import fast
from regard.own import paths as own_files
from regard.own import use
from regard.own import words as own_words
from regard.settings import describe, fill, setting, written
from regard.tasks import task as task_class
from regard.tasks.frame.recipe import check_resume
from regard.tasks.prepare import train
from regard.training.run_folder import locked

# from given settings to the task, all settings, and the name of the recipe
Plan = Callable[[dict[str, Any]], tuple[str, dict[str, Any], str | None]]

_LIST_KEYS = {"columns", "lora_on"}  # values have commas, beside those typed as lists
_PATH_KEYS = {"data", "valid", "test", "init"}  # a file's name may have commas
_TEST_LENGTHS = (1, 2, 4, 8)  # in training lengths
_MAX_RUNS = 10_000
_SPEED_BATCH = 64  # examples


@dataclass(frozen=True)
class CompareSettings:
    """Settings of `compare` beside those of the training; a value with commas is varied."""

    GROUP = "comparison"

    seeds: int = setting(3, "runs per variant, from seed= on; or seed=1,5,9", min=1, max=1000)
    parallel: int = setting(1, "runs in parallel", min=1, max=256)
    lengths: tuple[int, ...] | None = setting(
        None,
        "test lengths of a language model, as multiples of its context; 1,2,4,8 unless given",
        min=1,
        max=1024,
    )
    speed: bool = setting(
        False, "measure how many examples a second a model reads, to draw its score against that"
    )
    counted: str = setting(
        "all",
        "tokens that count at a test length: all, or the last quarter",
        choices=("all", "last"),
    )
    search: str | None = setting(
        None,
        "random: draw trials from ranges (lr=0.0003..0.01) and lists; stop the worse ones early",
        choices=SEARCHES,
    )
    trials: int = setting(30, "trials of a search", min=1, max=1000)
    out: str | None = setting(None, "output folder of all runs", group="files")


# The grid


def varied_values(key: str, value: Any, lists: Collection[str]) -> list[Any]:
    """Return the values that a key is varied over."""
    whole = key in lists or (key in _PATH_KEYS and isinstance(value, str) and os.path.exists(value))
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


def list_keys(task: str) -> set[str]:
    """Return the keys of a task whose values are lists, which are never varied."""
    kind, keys = task_class(task).Train, task_class(task).short
    typed = {row.key for row in describe(kind) if ",..." in row.type}
    short = {key for key, long in keys.items() if long in typed}
    return _LIST_KEYS | typed | short


def long_keys(values: Mapping[str, Any], short: Mapping[str, str | tuple[str, ...]]) -> set[str]:
    """Keys of the settings that were given, the short ones as what they stand for."""
    longer = [short.get(key, key) for key, value in values.items() if value is not None]
    return {key for some in longer for key in ((some,) if isinstance(some, str) else some)}


def grid(name: str, varied: Mapping[str, Sequence[Any]]) -> list[Variant]:
    """Return every combination of the varied settings, each with a name for its folder."""
    variants: dict[str, Variant] = {}
    for values in itertools.product(*varied.values()):
        words = [re.sub(r"[^\w.+-]+", "_", str(value)).strip(".") for value in values]
        short = "-".join(words)[:80] or name
        unique, number = short, 1
        while unique.lower() in variants:
            number += 1
            unique = f"{short}~{number}"
        variants[unique.lower()] = Variant(unique, dict(zip(varied, values, strict=True)))
    return list(variants.values())


def seeds_of(settings: CompareSettings, seed: list[Any], own: Mapping[str, Any]) -> list[int]:
    """Return the seeds: those that are listed, or so many from the first on."""
    try:
        numbers = [int(one) for one in seed]
    except (TypeError, ValueError):
        raise UsageError(f"seed={','.join(map(str, seed))} is not a whole number") from None
    if len(numbers) > 1 and "seeds" in own:
        raise UsageError(
            f"seed lists {len(numbers)} seeds, and seeds={settings.seeds} counts; keep one"
        )
    return numbers if len(numbers) > 1 else [numbers[0] + n for n in range(settings.seeds)]


def check_settings(settings: Any) -> None:
    """Refuse wrong names that a run would notice only after reading its data."""
    check_buildable(settings.model)


def check_run(folder: Path, settings: Any, given: Collection[str]) -> None:
    """Refuse a folder whose run was started with others of the given settings.

    What was not given may follow from the data, which are not read yet.
    """
    path = folder / "recipe.json"
    if path.exists():
        check_resume(folder, settings, read_json(path).get("data", ""), only=given)


# One run


def train_one(job: dict[str, Any]) -> dict[str, Any]:
    """Train or resume a variant with a seed, and return its result.

    It is `finished`, or not if it was interrupted; `failed` says why it cannot be, and `refused`
    why it could not even start. Of what was trained before, only the speed is measured.
    """
    use(job["use"])  # a worker is a process of its own
    folder = Path(job["folder"])
    if job["trained"]:
        return {**job["trained"], "speed": reading_speed(folder)}
    kind = task_class(job["task"])
    try:
        rung = [Rung(job["until"])] if job["until"] < 1 else []
        how = {"quiet": True, "recipe": job["recipe"], "callbacks": rung}
        report = train(kind, job["values"], **how)
        if not report.finished and (report.signal is not None or not rung):
            return {"finished": False, "signal": report.signal}
        lengths = None
        if job["lengths"] and report.finished:
            from regard.lab.extrapolate import loss_by_length

            lengths = loss_by_length(folder, kind.resolve(job["values"]), job["lengths"])
    except KeyboardInterrupt:
        return {"finished": False}
    except UsageError as mistake:
        started = (folder / "recipe.json").exists()
        return {"finished": False, "failed" if started else "refused": str(mistake)}
    recipe = read_json(folder / "recipe.json")
    last = (folder / "last").read_text().strip()
    counters = read_json(folder / "checkpoints" / last / "counters.json")
    return {
        "finished": report.finished,
        "scores": report.scores,
        "steps": report.step,
        "planned": report.steps,
        "tokens": counters["tokens"],
        "seconds": counters["seconds"],
        "parameters": recipe["parameters"],
        "data": recipe["data"],
        "tokenizers": recipe.get("tokenizers", []),
        "examples": recipe.get(kind.unit),
        "progress": validations(folder),
        "speed": reading_speed(folder) if job["speed"] and report.finished else None,
        "asked_lengths": job["lengths"],
        "lengths": lengths,
    }


@torch.inference_mode()
def reading_speed(folder: Path) -> float:
    """Return how many examples a second the model of a folder reads at best, in batches."""
    model, config = load_folder(folder)
    made = Reading(config["family"], model.config, _SPEED_BATCH, {})()
    inputs = [torch.zeros_like(x, device="cpu") for x in made]
    with fast(model, frozen=True):
        return _SPEED_BATCH / least(lambda: model(*inputs), 1.0)


def train_in_process(
    jobs: Sequence[dict[str, Any]], begin: Callable[[dict[str, Any]], None]
) -> Generator[tuple[dict[str, Any], Any]]:
    """Yield each job with its result, done in this process; stop when one was interrupted."""
    for job in jobs:
        begin(job)
        result = train_one(job)
        yield job, result
        if "scores" not in result and "failed" not in result:
            raise KeyboardInterrupt(result.get("signal") or signal.SIGINT)


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt(number)

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread, which alone gets signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


# All runs


def compare(
    name: str, given: Mapping[str, Any], *, task: str, plan: Plan, quiet: bool = False
) -> Compared:
    """Train every variant with every seed in its own folder, and compare their scores.

    Runs that are finished are not repeated, and one that was interrupted goes on.
    """
    own = {f.name: given[f.name] for f in fields(CompareSettings) if f.name in given}
    settings = fill(CompareSettings, own)
    if settings.counted not in ("all", "last"):
        raise UsageError(f"counted={settings.counted} is not one of all, last")
    if settings.parallel > 1 and sys.platform == "win32":
        raise UsageError(f"parallel={settings.parallel} does not work on Windows; use parallel=1")
    lists = list_keys(task)  # of one that is only run, a refusal
    out = Path(settings.out or f"runs/compare_{name}")
    rest = {key: varied_values(key, v, lists) for key, v in given.items() if key not in own}
    space = search_space(rest, own, task)
    keys = [key for key, some in rest.items() if len(some) > 1] if space is None else space
    varied = {key: rest[key] for key in keys if key != "seed"}
    fixed = {key: some[0] for key, some in rest.items() if key not in varied and key != "seed"}
    search = None
    if space is not None:
        settings = replace(settings, seeds=1)
        first = seeds_of(settings, rest.get("seed", [1]), own)[0]
        variants = draw(space, settings.trials, first)
        varied = {key: [variant.values[key] for variant in variants] for key in space}
        drawn_from = {key: written(given[key]) for key in space}
        search = SearchRecord(settings.trials, first, drawn_from, shares(settings.trials))
    elif math.prod(map(len, varied.values())) * settings.seeds > _MAX_RUNS:
        raise UsageError(f"over {_MAX_RUNS:,} runs; vary fewer keys, or take fewer seeds")
    else:
        variants = grid(name, varied)
    base = plan({**fixed, **variants[0].values})[1].get("seed", 1)
    seeds = seeds_of(settings, rest.get("seed", [base]), own)
    # every variant of a seed before the next seed: what fails is seen early
    jobs = [
        make_job(out, variant, seed, fixed, settings, plan)
        for seed in seeds
        for variant in variants
    ]
    if settings.lengths and not any(job["lengths"] for job in jobs):
        raise UsageError(
            f"lengths={written(settings.lengths)} is only for language models that go on writing"
        )
    command = ["regard", "compare", name, *(f"{k}={written(v)}" for k, v in given.items())]
    command += own_words()
    words = shlex.join(command)
    made = Compared(name, str(out), varied, variants, seeds, settings.counted, words, search=search)
    with locked(out), sigterm_as_interrupt():
        before = load_results(out)
        for job in jobs:
            made.runs.append(known_run(job, before.get((job["name"], job["seed"]))))
        if search is None:
            train_all(made, jobs, settings.parallel, quiet)
        else:
            search_all(made, search, jobs, settings.parallel, quiet)
        made.keep(out)
    return made


def make_job(
    out: Path, variant: Variant, seed: int, fixed: Mapping, compare: CompareSettings, plan: Plan
) -> dict[str, Any]:
    """Plan one training and refuse what is wrong with it."""
    folder = out / variant.name / f"seed-{seed}"
    task, values, recipe = plan({**fixed, **variant.values, "seed": seed, "out": str(folder)})
    if compare.parallel > 1 and values.get("threads") is None:
        values["threads"] = max(1, torch.get_num_threads() // compare.parallel)
    kind = task_class(task)
    settings: Any = kind.resolve(values)
    check_settings(settings)
    check_run(folder, settings, long_keys(values, kind.short))
    if compare.search and settings.minutes is not None:
        raise UsageError(
            f"minutes={settings.minutes:g}: a search compares trials at a share of their steps; "
            "give steps= or epochs="
        )
    if compare.search and settings.processes > 1:
        raise UsageError(f"processes={settings.processes} cannot be searched; use parallel=")
    if compare.speed:
        Reading(variant.name, settings.model, _SPEED_BATCH, {})  # refuses what it cannot make
    goes_on = task == "language" and settings.objective == "causal"
    return {
        "name": variant.name,
        "seed": seed,
        "variant": variant.values,
        "folder": str(folder),
        "task": task,
        "values": values,
        "recipe": recipe,
        "use": own_files(),
        "lengths": list(compare.lengths or _TEST_LENGTHS) if goes_on else None,
        "speed": compare.speed,
        "trained": None,  # its result, if nothing but its speed is wanted
        "until": 1.0,
    }


def known_run(job: dict[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the record of a run: its result of before, if that still holds.

    A result that lacks no more than the speed is kept for the job.
    """
    run = {key: job[key] for key in ("name", "variant", "seed", "folder")}
    begun = (Path(job["folder"]) / "recipe.json").exists()
    known = before and before.get("asked_lengths") == job["lengths"]
    result = {**{k: v for k, v in before.items() if k != "failed"}, **run} if before else run
    if known and begun and (result.get("speed") or not job["speed"]):
        return result
    if known and begun and result["finished"]:
        job["trained"] = result
    return {**run, "finished": False}


def load_results(out: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Return the runs of results.json that are finished, or have been compared on their way."""
    path = out / "results.json"
    if not path.exists():
        return {}
    try:
        results = read_json(path)
        runs = results["runs"]
        runs = [run for run in runs if run["finished"] or "progress" in run]
        for run in runs if "accuracy_in" not in results else []:
            if "perplexity" in run["scores"] and run["scores"].get("accuracy") is not None:
                run["scores"]["accuracy"] *= 100  # that of masked words was a fraction before
        return {(run["name"], run["seed"]): run for run in runs}
    except (KeyError, TypeError):
        raise UsageError(f"{path}: was not written by compare; choose another out=") from None


def train_all(made: Compared, jobs: Sequence[dict[str, Any]], parallel: int, quiet: bool) -> None:
    """Train what is not finished, and write the results after each run."""
    runs = {(run["name"], run["seed"]): run for run in made.runs}
    keyed = [(job, runs[job["name"], job["seed"]]) for job in jobs]
    todo = [job for job, run in keyed if standing(run, job["until"]) is None]
    done = len(jobs) - len(todo)
    log(f"{len(jobs)} runs in {made.out}" + (f", {done} of them done" * bool(done)), quiet)
    started, ended = time.perf_counter(), 0

    def begin(job: dict[str, Any]) -> None:
        log(f"{run_name(job)}: begins", quiet)

    results = (
        work("regard.lab.variants:train_one", todo, min(parallel, len(todo)), begin)
        if parallel > 1 and len(todo) > 1
        else train_in_process(todo, begin)
    )
    try:
        with closing(results):
            for job, result in results:
                if isinstance(result, RuntimeError):
                    result = {"finished": False, "failed": str(result)}
                if "refused" in result:
                    raise UsageError(f"{run_name(job)}: {result['refused']}")
                runs[job["name"], job["seed"]].update(finite(result))
                made.check_data()
                made.write(Path(made.out))
                ended += "scores" in result or "failed" in result
                left = (time.perf_counter() - started) / max(1, ended) * (len(todo) - ended)
                log(line_of(job, result, f"{done + ended} of {len(jobs)}", left), quiet)
    except KeyboardInterrupt as interrupt:
        made.signal = int(next(iter(interrupt.args), signal.SIGINT))


def search_all(
    made: Compared, search: SearchRecord, jobs: Sequence[dict[str, Any]], parallel: int, quiet: bool
) -> None:
    """Train all trials to the first share of their steps, the best of them to the next, and so on.

    Which go on follows from their scores alone, so an interrupted search ends as it would have.
    """
    runs = {run["name"]: run for run in made.runs}
    for share in search.shares:
        log(f"trials go to {share:.0%} of their steps", quiet)
        train_all(made, [{**job, "until": share} for job in jobs], parallel, quiet)
        if made.stopped:
            return
        best = [run["name"] for run in kept([runs[job["name"]] for job in jobs], share)]
        search.rungs.append({"share": share, "trials": len(jobs), "best": best})
        jobs = [job for job in jobs if job["name"] in best]
    made.variants.sort(key=lambda variant: place(runs[variant.name]))


def line_of(job: Mapping[str, Any], result: Mapping[str, Any], count: str, left: float) -> str:
    """Return a log line: how a run ended and how much is left."""
    if "scores" not in result:
        return f"{run_name(job)}: {result.get('failed', 'stopped and saved')}"
    scores = ", ".join(f"{k} {v:.4g}" for k, v in result["scores"].items() if k != "better")
    minutes = f"; about {math.ceil(left / 60)} min left" if left else ""
    return f"{run_name(job)}: {scores}; {result['seconds']:.0f} s ({count} runs{minutes})"
