"""A bar with loss, tokens a second and time left, on a terminal only."""

import sys
import time
from typing import Any


class Progress:
    """Shows how far a long work has come; says nothing when nobody is at a terminal."""

    def __init__(self, what: str, total: int, *, quiet: bool = False, done: int = 0):
        self.what, self.total, self.done = what, total, done
        self.shown = not quiet and sys.stderr.isatty()
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
        passed = time.perf_counter() - self.started
        if not self.shown or passed < 2:
            return
        bar = self.bar or self._open()
        speed = f"{self.tokens / passed:,.0f} tokens/s" if self.tokens else ""
        told = f"loss {loss:.3f}" if loss is not None else ""
        bar.update(self.task, completed=self.done, speed=speed, loss=told)

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
