"""A proof that a run, stopped and resumed, has the same bits as without a stop: on its own copy."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from regard.errors import UsageError
from regard.files import read_json
from regard.metrics.results import Named
from regard.settings import setting
from regard.tasks.parts import Task
from regard.tasks.prepare import count_steps, train
from regard.training.callbacks import Callback, StopTraining
from regard.training.checkpoint import checkpoints, is_complete, load_checkpoint
from regard.training.run_folder import METRICS_FILE

# settings that change nothing that is computed, as they are here
_HERE = {"processes": 1, "log": "none", "watch_every": 0, "probes": None}
_TIMES = {"seconds", "tokens_per_second"}  # no two runs take as long


@dataclass(frozen=True)
class VerifySettings:
    """What verify can be told."""

    steps: int = setting(20, "steps to train, with a stop in their middle", min=2, max=1_000_000)


@dataclass(frozen=True)
class Verified(Named):
    """Whether a run has the same bits with a stop and without.

    Args:
        run: its folder.
        first: step of the checkpoint from which the copies went on.
        stop: step after which one of them was stopped.
        last: step after which both were compared.
        compared: number of tensors, counters and rows of metrics.
        differing: names of those that differ.
        repeated: whether the rows of the run itself are the same; unknown where it has none.
    """

    run: str
    first: int
    stop: int
    last: int
    compared: int
    differing: tuple[str, ...]
    repeated: bool | None

    @property
    def exit_code(self) -> int:
        """0 if all bits are the same, or else 1."""
        return int(bool(self.differing))

    def __str__(self) -> str:
        what = f"{self.run}: steps {self.first + 1} to {self.last}, stopped after {self.stop}"
        if self.differing:
            some = ", ".join(self.differing[:3])
            return (
                f"{what} and resumed, differ in {len(self.differing):,} of {self.compared:,} "
                f"tensors, counters and metrics from those without a stop: {some}"
            )
        itself = {
            True: "; so are the losses of the run itself",
            False: "; the run itself had other losses (another machine, version or threads)",
            None: "",
        }
        return (
            f"{what} and resumed, are the same bits as without a stop: {self.compared:,} tensors, "
            f"counters and metrics{itself[self.repeated]}"
        )


class _StopAt(Callback):
    """Stops a run after a step, as Ctrl-C would."""

    def __init__(self, step: int):
        self.step = step

    def after_step(self, step: int, values: dict[str, float]) -> None:
        """Stop when the step has come."""
        if step >= self.step:
            raise StopTraining


def verify(
    folder: Path,
    task: Task,
    values: Mapping[str, Any],
    recipe: str | None,
    settings: VerifySettings,
) -> Verified:
    """Train a copy of a run on, with a stop and without, and compare all that was saved.

    Args:
        folder: the run.
        task: what it learns.
        values: its settings as the user wrote them.
        recipe: that it follows, if it follows one.
        settings: how many steps.
    """
    first, steps = _beginning(folder, settings.steps)
    stop, last = first + steps // 2, first + steps
    with TemporaryDirectory(prefix="regard-verify-") as place:

        def go_on(name: str, *stops: int) -> dict[str, Any]:
            """What a copy has saved once it was stopped after each of some steps."""
            copy = Path(place) / name
            _copy(folder, copy, first)
            for step in stops:
                now = {**values, **_HERE, "out": str(copy)}
                try:
                    train(task, now, quiet=True, recipe=recipe, callbacks=[_StopAt(step)])
                except UsageError as error:  # a user knows the run, not its copy
                    raise UsageError(str(error).replace(str(copy), str(folder))) from None
            return _saved(copy, first)

        straight, resumed = go_on("straight", last), go_on("resumed", stop, last)
    names = sorted(straight.keys() | resumed.keys())
    differing = [name for name in names if straight.get(name) != resumed.get(name)]
    rows = _metrics(folder, first, last)
    repeated = all(straight.get(name) == row for name, row in rows.items()) if rows else None
    return Verified(str(folder), first, stop, last, len(names), tuple(differing), repeated)


def _beginning(folder: Path, wanted: int) -> tuple[int, int]:
    """Step of the newest checkpoint with enough steps left, or 0; and how many steps to go."""
    total = read_json(folder / "recipe.json").get("steps")
    if not isinstance(total, int) or total < 2:
        raise UsageError(f"{folder}: a run of {count_steps(total or 0)} has no middle to stop in")
    steps = min(wanted, total)
    kept = (at for at, path in checkpoints(folder / "checkpoints") if is_complete(path))
    return next((at for at in kept if at + steps <= total), 0), steps


def _copy(folder: Path, copy: Path, first: int) -> None:
    """Copy a run as it was after a step: its files, and checkpoints up to there."""
    copy.mkdir()
    for path in folder.iterdir():
        if path.is_file() and path.name != ".lock":
            shutil.copy2(path, copy)
    for at, path in checkpoints(folder / "checkpoints"):
        if at <= first:
            shutil.copytree(path, copy / "checkpoints" / path.name)


def _saved(copy: Path, first: int) -> dict[str, Any]:
    """All that a run has saved by name: tensors as bytes, counters, and rows of metrics."""
    at, newest = checkpoints(copy / "checkpoints")[0]
    groups, counters = load_checkpoint(newest)
    tensors = {
        f"{group} {name}": (str(x.dtype), tuple(x.shape), x.contiguous().view(-1).view(torch.uint8))
        for group, found in groups.items()
        for name, x in found.items()
    }
    return {
        **{name: (*about, x.numpy().tobytes()) for name, (*about, x) in tensors.items()},
        **{f"counter {name}": n for name, n in counters.items() if name not in _TIMES},
        **_metrics(copy, first, at),
    }


def _metrics(folder: Path, first: int, last: int) -> dict[str, Any]:
    """Rows of metrics after one step and up to another, without times."""
    path = folder / METRICS_FILE
    rows = map(json.loads, path.read_text().splitlines()) if path.is_file() else ()
    return {
        f"metrics of step {row['step']}{' (validation)' * ('loss' not in row)}": {
            key: value for key, value in row.items() if key not in _TIMES
        }
        for row in rows
        if first < row["step"] <= last
    }
