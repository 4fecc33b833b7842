"""The folder of a run: its lock, its metrics, and the signals that stop what writes there."""

import json
import math
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from regard.errors import UsageError
from regard.files import lock, refuse, sweep, write_atomically

METRICS_FILE = "metrics.jsonl"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock of a run's folder."""
    made = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "w")  # noqa: SIM115
    except OSError as error:
        raise refuse(error, folder) from error
    with file:
        try:
            lock(file.fileno())
        except OSError:
            raise UsageError(
                f"{folder}: another training is writing here; choose another out="
            ) from None
        sweep(folder)
        try:
            yield
        except BaseException:
            _remove_if_empty(folder, made)
            raise


def _remove_if_empty(folder: Path, made: Sequence[Path]) -> None:
    """Remove the folders that a failed start has made, if nothing was written there."""
    with suppress(OSError):
        if folder not in made or [path.name for path in folder.iterdir()] != [".lock"]:
            return
        (folder / ".lock").unlink()
        for place in made:
            place.rmdir()


class StopSignal:
    """Catches Ctrl-C and SIGTERM, so that the step can be finished and saved."""

    def __init__(self):
        self.asked = 0  # the number of the signal that was caught

    def __enter__(self) -> "StopSignal":
        self.before = {}
        for number in (signal.SIGINT, signal.SIGTERM):
            try:
                self.before[number] = signal.signal(number, self._ask)
            except ValueError:  # not in the main thread, which alone gets signals
                break
        return self

    def _ask(self, number, frame) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = number

    def __exit__(self, *error) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)


def exit_code(signal: int | None) -> int:
    """Exit code of a command that a signal stopped, as shells count it, or 0."""
    return 0 if signal is None else 128 + signal


@contextmanager
def errors_of_folder(folder: Path) -> Iterator[None]:
    """Turn errors of writing to a run's folder, or of its loss, into one line."""
    try:
        yield
    except OSError as error:
        if folder.is_dir():
            raise refuse(error, folder) from error
        raise UsageError(
            f"{folder}: was deleted while training; give the command again to begin anew"
        ) from error


def write_row(file, row: dict[str, Any]) -> None:
    """Add a line to metrics.jsonl; a number that is not finite becomes null."""
    values = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
    file.write(json.dumps(values) + "\n")


def truncate_metrics(folder: Path, step: int) -> None:
    """Drop the lines of metrics.jsonl that a killed run wrote after its last checkpoint."""
    path = folder / METRICS_FILE
    if not path.exists():
        return
    kept = []
    for line in path.read_text(errors="replace").splitlines():
        try:
            if json.loads(line)["step"] <= step:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    write_atomically(path, "".join(line + "\n" for line in kept))
