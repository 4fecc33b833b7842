"""A bar with loss, tokens a second and time left on a terminal, or now and then a line of a log."""

import sys
import time
from typing import Any

EVERY = 30.0  # seconds between two lines of a log


class Progress:
    """Shows how far a long work has come: by a bar, or by lines where stderr is no terminal."""

    def __init__(self, what: str, total: int, *, quiet: bool = False, done: int = 0):
        self.what, self.total, self.done = what, total, done
        self.shown = not quiet and sys.stderr.isatty()
        self.logs = not quiet and not self.shown
        self.said = time.perf_counter()
        self.begun = done
        self.bar: Any = None
        self.task: Any = None
        self.started = time.perf_counter()
        self.tokens = 0

    def __enter__(self) -> "Progress":
        return self

    def update(self, steps: int, *, loss: float | None = None, tokens: int = 0) -> None:
        """Note that some steps were done."""
        self.done += steps
        self.tokens += tokens
        now = time.perf_counter()
        passed = now - self.started
        if self.logs and now - self.said >= EVERY:
            self.said = now
            told = [f"{self.what} {self.done:,} of {self.total:,}"]
            told += [f"loss {loss:.3f}"] if loss is not None else []
            told += [f"{self.tokens / passed:,.0f} tokens/s"] if self.tokens else []
            print("  ".join([*told, self.left()]), file=sys.stderr, flush=True)
        if not self.shown or passed < 2:
            return
        bar = self.bar or self._open()
        speed = f"{self.tokens / passed:,.0f} tokens/s" if self.tokens else ""
        told = f"loss {loss:.3f}" if loss is not None else ""
        bar.update(self.task, completed=self.done, speed=speed, loss=told)

    def left(self) -> str:
        """Say how long it will take from here, as fast as it went so far."""
        steps, todo = self.done - self.begun, self.total - self.done
        if steps <= 0 or todo <= 0:
            return ""
        seconds = (time.perf_counter() - self.started) / steps * todo
        if seconds < 90:
            return f"about {max(1, round(seconds))} s left"
        minutes = seconds / 60
        return (
            f"about {minutes:.0f} min left" if minutes < 90 else f"about {minutes / 60:.1f} h left"
        )

    def _open(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self.bar.start()
        self.task = self.bar.add_task(
            self.what, total=self.total, completed=self.done, speed="", loss=""
        )
        return self.bar

    def __exit__(self, *error) -> None:
        if self.bar is not None:
            self.bar.stop()
