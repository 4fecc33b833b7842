"""What follows a run as it goes: callbacks, and loggers that are made of them."""

import csv
import io
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import read_text, write_atomically

_MOST_ID = 200  # letters
_TABLES = ("validations.csv", "steps.csv")


class StopTraining(Exception):
    """Raised by a callback to save the run and leave it, as Ctrl-C would."""


@dataclass(frozen=True)
class Started:
    """A run as it begins or goes on: its folder, settings, and the steps that are done."""

    folder: Path
    settings: Mapping[str, Any]
    step: int
    steps: int


class Callback:
    """What is called while a model learns; a subclass has those of these methods that it needs.

    It is given numbers, never the model, so a run has the same bits with it and without.
    """

    def begin(self, run: Started) -> None:
        """Before the first step, and again whenever the run is resumed."""

    def after_step(self, step: int, values: dict[str, float]) -> None:
        """After an optimiser step: train/loss, lr, grad_norm and tokens_per_second."""

    def after_validation(self, step: int, scores: dict[str, float]) -> None:
        """After a validation: its scores, as valid/loss."""

    def after_save(self, step: int, checkpoint: Path) -> None:
        """After a checkpoint was written."""

    def end(self) -> None:
        """When the run is finished, stopped or has failed."""


class Callbacks:
    """All callbacks of a run, from its begin on; one that raises is left out from then on.

    Args:
        members: called in this order.
        note: told in one line what one has raised.
        stops: whether the run ends then, once it is saved.
    """

    def __init__(self, members: Sequence[Callback], note: Callable[[str], None], stops: bool):
        self.members, self.note, self.stops = list(members), note, stops
        self.begun, self.stopped, self.failure = False, False, ""

    def __call__(self, event: str, *arguments: Any) -> None:
        """Call a method of each; what one does to a dictionary the others do not see."""
        self.begun |= event == "begin"
        for member in list(self.members) if self.begun else ():
            own = [dict(one) if isinstance(one, dict) else one for one in arguments]
            try:
                getattr(member, event)(*own)
            except StopTraining:
                self.stopped = True
            except Exception as error:
                self.members.remove(member)
                told = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
                failed = f"the callback {type(member).__name__} failed in {event}: {told}"
                if self.stops and event != "end":
                    self.stopped, self.failure = True, self.failure or failed
                else:
                    self.note(f"{failed}; the run goes on without it")


class Logger(Callback):
    """A callback that logs whatever there is, and the package that it needs, also as an extra."""

    package = ""

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log values after a step."""
        raise NotImplementedError

    def after_step(self, step: int, values: dict[str, float]) -> None:
        """Log loss, rate and speed."""
        self.log(step, values)

    def after_validation(self, step: int, scores: dict[str, float]) -> None:
        """Log the scores."""
        self.log(step, scores)


class TensorBoard(Logger):
    """Scalars in RUN/tensorboard, for `tensorboard --logdir`."""

    package = "tensorboard"

    def begin(self, run: Started) -> None:
        """Open a file of events; what a killed run wrote after its checkpoint is purged."""
        from torch.utils.tensorboard import SummaryWriter

        place = str(run.folder / "tensorboard")
        self.writer = SummaryWriter(place, purge_step=run.step + 1, flush_secs=30)

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add scalars."""
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def end(self) -> None:
        """Write what is left."""
        self.writer.close()


class CSV(Logger):
    """Tables RUN/steps.csv and RUN/validations.csv, a row each time."""

    package = "csv"

    def begin(self, run: Started) -> None:
        """Drop the rows that a killed run wrote after its last checkpoint."""
        self.folder = run.folder
        for path in (run.folder / name for name in _TABLES):
            if path.exists():
                head, *rows = path.read_text().splitlines(keepends=True) or [""]
                kept = [row for row in rows if row.endswith("\n") and _step(row) <= run.step]
                write_atomically(path, "".join([head, *kept]))

    def log(self, step: int, values: dict[str, float]) -> None:
        """Add a row to the table of its columns; the first one comes with their names."""
        path, text = self.folder / _TABLES["train/loss" in values], io.StringIO()
        if not path.exists():
            csv.writer(text, lineterminator="\n").writerow(["step", *values])
        csv.writer(text, lineterminator="\n").writerow([step, *values.values()])
        with open(path, "a") as file:
            file.write(text.getvalue())


class WandB(Logger):
    """A run of Weights and Biases in RUN/wandb, offline unless WANDB_MODE says otherwise."""

    package = "wandb"

    def begin(self, run: Started) -> None:
        """Open the run, under the same name whenever it is resumed."""
        import wandb  # pyright: ignore[reportMissingImports]

        place = run.folder / "wandb" / "run_id"
        identity = _identity(place) or secrets.token_hex(4)
        write_atomically(place, identity + "\n")
        self.run = wandb.init(
            dir=str(run.folder),
            mode=os.environ.get("WANDB_MODE", "offline"),
            id=identity,
            name=run.folder.name,
            config=dict(run.settings),
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", disable_git=True, save_code=False),
        )

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log values of a step."""
        self.run.log(values, step=step)

    def end(self) -> None:
        """Write what is left."""
        self.run.finish()


class MLflow(Logger):
    """A run of MLflow in RUN/mlruns, or where MLFLOW_TRACKING_URI says."""

    package = "mlflow"

    def begin(self, run: Started) -> None:
        """Open the run, the same one whenever it is resumed."""
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # which newer versions ask for
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        home = run.folder / "mlruns"
        uri = os.environ.get("MLFLOW_TRACKING_URI") or home.absolute().as_uri()
        self.client, place = MlflowClient(tracking_uri=uri), home / "run_id"
        self.run = _identity(place)
        if not self.run:
            made = self.client.get_experiment_by_name("regard")
            number = made.experiment_id if made else self.client.create_experiment("regard")
            self.run = self.client.create_run(number, run_name=run.folder.name).info.run_id
            write_atomically(place, self.run + "\n")
            for key, value in run.settings.items():
                self.client.log_param(self.run, key, str(value)[:500])
        self.client.update_run(self.run, status="RUNNING")

    def log(self, step: int, values: dict[str, float]) -> None:
        """Log values of a step."""
        for name, value in values.items():
            self.client.log_metric(self.run, name, value, step=step)

    def end(self) -> None:
        """Say that it is over."""
        self.client.set_terminated(self.run)


LOGGERS: dict[str, type[Logger]] = {
    "tensorboard": TensorBoard,
    "csv": CSV,
    "wandb": WandB,
    "mlflow": MLflow,
}
ON_ERROR = ("continue", "stop")  # what a run does when a callback has failed


def check_loggers(names: Sequence[str]) -> None:
    """Refuse loggers whose package is missing, before anything is written."""
    for name in names:
        kind = LOGGERS[name]
        if not _is_installed(kind.package):
            raise UsageError(
                f"log={name}: the package {kind.package} is not installed; "
                f"pip install regard[{kind.package}], or choose from {', '.join(LOGGERS)}"
            )


def check_callbacks(callbacks: Sequence[Callback], processes: int, restarts: int) -> None:
    """Refuse what is no callback, and callbacks that other processes would have to call."""
    for one in callbacks:
        if not isinstance(one, Callback):
            raise UsageError(
                f"callbacks: {one!r:.60} is no callback; give an object of a subclass of "
                "regard.Callback"
            )
    if callbacks and (processes > 1 or restarts):
        key = f"processes={processes}" if processes > 1 else f"restarts={restarts}"
        raise UsageError(
            f"callbacks cannot follow {key}, which trains in other processes; "
            "use log=, or processes=1 restarts=0"
        )


def _step(row: str) -> float:
    number = row.partition(",")[0]
    return int(number) if number.isdigit() else float("inf")


def _identity(path: Path) -> str:
    return read_text(path, _MOST_ID).strip() if path.exists() else ""


def _is_installed(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ValueError:  # what stands in its place has no spec
        return False
