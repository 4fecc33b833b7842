"""Random search: trials drawn from ranges and lists, of which the worse ones are stopped early."""

import json
import math
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from regard.errors import UsageError
from regard.lab.report import Variant
from regard.settings import describe, written
from regard.tasks import task as task_class
from regard.training.callbacks import Callback, Started, StopTraining
from regard.training.plan import DURATION_KEYS
from regard.training.run_folder import METRICS_FILE

SEARCHES = ("random",)
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})")
_SHARES = (1 / 6, 1 / 2)  # of the steps, after which only the best of the trials go on:
_ONE_OF = 3
_DRAWS = 1000  # for a trial that is none of those before
_FIXED = {*DURATION_KEYS, "valid_every"}  # by which trials are compared


class SettingRange(NamedTuple):
    """Numbers between two ends; evenly by their logarithm where both are above zero."""

    low: float
    high: float
    whole: bool = False

    def draw(self, chance: random.Random) -> float:
        """A number to four digits."""
        ends = (self.low - 0.5, self.high + 0.5) if self.whole else (self.low, self.high)
        if ends[0] > 0:
            drawn = math.exp(chance.uniform(*map(math.log, ends)))
        else:
            drawn = chance.uniform(*ends)
        drawn = round(drawn) if self.whole else float(f"{drawn:.4g}")
        return min(max(drawn, self.low), self.high)


Space = dict[str, SettingRange | list[Any]]


def is_range(value: Any) -> bool:
    """Tell whether a value is a range, such as 0.0003..0.01."""
    return isinstance(value, str) and _RANGE.fullmatch(value) is not None


def range_of(key: str, text: str, kind: str) -> SettingRange:
    """Read a range for a setting of a type."""
    if "number" not in kind:
        raise UsageError(f"{key}={text} is a range, and {key} is no number; list values: {key}=A,B")
    low, high = (float(end) for end in _RANGE.fullmatch(text).groups())  # type: ignore[union-attr]
    whole = "whole number" in kind
    if not low < high < math.inf:
        raise UsageError(f"{key}={text} is no range; write the lower end first, then the higher")
    if whole and not (low.is_integer() and high.is_integer()):
        raise UsageError(f"{key}={text} has an end that is not a whole number")
    return SettingRange(int(low), int(high), True) if whole else SettingRange(low, high)


def search_space(rest: Mapping[str, list[Any]], own: Mapping[str, Any], task: str) -> Space | None:
    """A range or list for each key that a search draws, if one was asked for.

    Args:
        rest: the values of each key of the training.
        own: settings of the comparison that were given.
        task: what is trained.
    """
    varied = {k: v for k, v in rest.items() if len(v) > 1 or is_range(v[0])}
    if not own.get("search"):
        for key, some in varied.items():
            if is_range(some[0]):
                raise UsageError(f"{key}={some[0]} is a range; add search=random, or list values")
        if "trials" in own:
            raise UsageError(f"trials={own['trials']} are those of a search; add search=random")
        return None
    seeds = {**{key: own[key] for key in ("seeds",) if key in own}, **varied}
    for key in {"seed", "seeds"} & seeds.keys():
        raise UsageError(
            f"{key}={written(seeds[key])}: a search trains each trial with "
            "one seed; compare the best ones with several seeds afterwards"
        )
    kind = task_class(task)
    types = {row.key: row.type for row in describe(kind.Train)}
    space: Space = {}
    for key, values in varied.items():
        if key in _FIXED:
            raise UsageError(f"{key} cannot be searched, since trials are compared by it")
        long = kind.short.get(key, key)
        told = types.get(long if isinstance(long, str) else long[0], "number")
        ranged = any(map(is_range, values))
        if ranged and len(values) > 1:
            raise UsageError(f"{key}={written(values)} has a range in a list; give only one")
        space[key] = range_of(key, values[0], told) if ranged else values
    if not space:
        raise UsageError("search= has nothing to draw from; add a range or a list, lr=0.0003..0.01")
    return space


def draw(space: Space, trials: int, seed: int) -> list[Variant]:
    """Trials that all differ; those of a seed are the same whenever they are drawn."""
    chance, found = random.Random(f"search {seed}"), dict[str, Variant]()
    for number in range(1, trials + 1):
        for _ in range(_DRAWS):
            values = {
                key: some.draw(chance) if isinstance(some, SettingRange) else chance.choice(some)
                for key, some in space.items()
            }
            if str(values) not in found:
                found[str(values)] = Variant(f"trial-{number}", values)
                break
        else:
            raise UsageError(
                f"trials={trials} are more than there are to draw, about {len(found):,}; "
                "give fewer trials=, or leave out search= to train them all"
            )
    return list(found.values())


class Rung(Callback):
    """Stops a run at the first validation after a share of its steps, there to be compared."""

    def __init__(self, share: float):
        self.share = share

    def begin(self, run: Started) -> None:
        """Stop a run that was there already, when it was killed before that was noted."""
        self.step = self.share * run.steps
        if any(row["step"] >= self.step for row in validations(run.folder)):
            raise StopTraining

    def after_validation(self, step: int, scores: dict[str, float]) -> None:
        """Stop if the step is reached."""
        if step >= self.step:
            raise StopTraining


def validations(folder: Path) -> list[dict[str, Any]]:
    """Rows of the validations of a run."""
    path = folder / METRICS_FILE
    rows = map(json.loads, path.read_text().splitlines()) if path.exists() else ()
    valid = (row for row in rows if "seconds" in row)
    return [{k.removeprefix("valid/"): v for k, v in row.items()} for row in valid]


def score_of(row: Mapping[str, Any]) -> tuple[float, float]:
    """What trials are ranked by, the higher the better: the score, then the lower loss."""
    better, loss = row.get("better"), row.get("loss")
    return -math.inf if better is None else better, -math.inf if loss is None else -loss


def standing(run: Mapping[str, Any], share: float) -> tuple[float, float] | None:
    """Best score of a run at a share of its steps; None if it is not there."""
    if share == 1:
        return score_of(run["scores"]) if run["finished"] else None
    rows = run.get("progress") or []
    there = [n for n, row in enumerate(rows, 1) if row["step"] >= share * run["planned"]]
    if not there and not run["finished"]:
        return None
    return max(map(score_of, rows[: there[0] if there else None]), default=score_of({}))


def place(run: Mapping[str, Any]) -> tuple[float, ...]:
    """By which trials are told: those that went furthest first, then by score."""
    score = score_of(run.get("scores") or {})
    return (
        not run["finished"],
        0 if run["finished"] else -run.get("steps", 0),
        -score[0],
        -score[1],
    )


def shares(trials: int) -> tuple[float, ...]:
    """Shares of the steps at which trials are compared, so that one of them is left at least."""
    rungs = min(len(_SHARES), int(math.log(trials + 0.5, _ONE_OF)))
    return (*_SHARES[len(_SHARES) - rungs :], 1.0)


def kept(runs: Sequence[Mapping[str, Any]], share: float) -> list[Mapping[str, Any]]:
    """Of the runs that were compared at a share of the steps, the third that goes on."""
    ranked = [(score, run) for run in runs if (score := standing(run, share)) is not None]
    ranked.sort(key=lambda pair: pair[0], reverse=True)  # of equal ones, those drawn first
    return [run for _, run in ranked[: math.ceil(len(runs) / _ONE_OF)]]
