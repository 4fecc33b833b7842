"""A pool of worker processes that survives the death of a worker.

A job is a line of JSON on a worker's standard input, its result a line on standard output. A worker
ends when its input does, so that none outlives the process that started it. The pools of the
standard library would not do: a worker that is killed breaks all of a ProcessPoolExecutor and hangs
a multiprocessing.Pool, and their spawned processes import the caller's script again.
"""

import contextlib
import json
import os
import queue
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from importlib import import_module
from typing import Any

Job = Any  # what JSON can hold


class Worker:
    """A process that calls a function, named "module:function", on each job it is given."""

    def __init__(self, function: str):
        self.job: Job | None = None
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "regard.lab.workers", function],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            start_new_session=True,  # so that Ctrl-C reaches it once, through us
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.jobs, self.results = self.process.stdin, self.process.stdout

    def give(self, job: Job) -> None:
        """Hand over the next job."""
        self.job = job
        with contextlib.suppress(BrokenPipeError):  # it is dead, which take() will say
            self.jobs.write(json.dumps(job, default=str) + "\n")
            self.jobs.flush()

    def take(self) -> tuple[Job, Any]:
        """Return the job and its result once it is there, or a RuntimeError if the worker died."""
        job, line = self.job, self.results.readline()
        assert job is not None
        self.job = None
        return job, json.loads(line) if line.endswith("\n") else RuntimeError(self._exit_message())

    def _exit_message(self) -> str:
        code = self.process.wait()
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        ended = f"was ended by signal {-code}" if code < 0 else f"ended with code {code}"
        return f"its process {ended}" + (f": {lines[-1]}" if lines and code > 0 else "")

    def interrupt(self) -> None:
        """Send SIGINT, for it to leave its job in order."""
        if self.job is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """Let it end."""
        with contextlib.suppress(BrokenPipeError):
            self.jobs.close()
        self.process.wait()
        self.results.close()
        self.errors.close()


def work(
    function: str, jobs: Sequence[Job], count: int, begin: Callable[[Job], None] = lambda job: None
) -> Generator[tuple[Job, Any]]:
    """Yield each job with its result as workers finish it; `begin` is called as one starts.

    Ctrl-C interrupts the workers, yields the results of what they left, and is raised.
    """
    waiting = list(reversed(jobs))
    workers: list[Worker] = []
    interrupted = False
    try:
        while waiting or any(worker.job for worker in workers):
            try:
                while waiting and sum(worker.job is not None for worker in workers) < count:
                    free = [worker for worker in workers if worker.job is None]
                    if not free:
                        workers.append(Worker(function))
                        continue
                    begin(waiting[-1])
                    free[0].give(waiting.pop())
                done = ready(workers)
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                waiting.clear()
                for worker in workers:
                    worker.interrupt()
                continue
            for worker in done:
                job, result = worker.take()
                if isinstance(result, RuntimeError):
                    workers.remove(worker)
                    worker.close()
                    if interrupted:  # too early for it to leave in order
                        continue
                yield job, result
        if interrupted:
            raise KeyboardInterrupt
    finally:
        for worker in workers:
            worker.close()


def ready(workers: Sequence[Worker]) -> list[Worker]:
    """Wait until some of the workers have a result, or are dead."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            if worker.job is not None:
                selector.register(worker.results, selectors.EVENT_READ, worker)
        return [key.data for key, _ in selector.select()]


def serve(function: Callable[[Job], Any]) -> None:
    """Do the jobs on standard input until it ends."""
    results = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a job prints is no result
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()

    def read() -> None:
        for line in sys.stdin:
            jobs.put(line)
        os._exit(0)  # there are no more jobs, or the parent is dead

    threading.Thread(target=read, daemon=True).start()
    while True:
        result = function(json.loads(jobs.get()))
        results.write(json.dumps(result) + "\n")
        results.flush()


if __name__ == "__main__":
    module, _, name = sys.argv[1].partition(":")
    serve(getattr(import_module(module), name))
