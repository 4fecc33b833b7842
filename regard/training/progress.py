"""Progress of a long run: a bar on a terminal, else a log line every half minute."""

import sys
import time
from typing import Any

_LOG_EVERY = 30.0  # seconds between two log lines


class Progress:
    """A progress bar with loss, tokens per second and time left; log lines without a terminal."""

    def __init__(self, what: str, total: int, *, quiet: bool = False, done: int = 0):
        self.what, self.total, self.done = what, total, done
        self.shown = not quiet and sys.stderr.isatty()
        self.logs = not quiet and not self.shown
        self.logged = time.perf_counter()
        self.begun = done
        self.bar: Any = None
        self.task: Any = None
        self.started = time.perf_counter()
        self.tokens = 0

    def __enter__(self) -> "Progress":
        return self

    def update(self, steps: int, *, loss: float | None = None, tokens: int = 0) -> None:
        """Count steps that were done."""
        self.done += steps
        self.tokens += tokens
        now = time.perf_counter()
        passed = now - self.started
        if self.logs and now - self.logged >= _LOG_EVERY:
            self.logged = now
            parts = [f"{self.what} {self.done:,} of {self.total:,}"]
            parts += [f"loss {loss:.3f}"] if loss is not None else []
            parts += [f"{self.tokens / passed:,.0f} tokens/s"] if self.tokens else []
            print("  ".join([*parts, self.left()]), file=sys.stderr, flush=True)
        if not self.shown or passed < 2:
            return
        bar = self.bar or self._open()
        speed = f"{self.tokens / passed:,.0f} tokens/s" if self.tokens else ""
        shown = f"loss {loss:.3f}" if loss is not None else ""
        bar.update(self.task, completed=self.done, total=self.total, speed=speed, loss=shown)

    def left(self) -> str:
        """Estimated time left, at the speed so far."""
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
