"""Batches that processes of their own make ahead of time, to the same bits as without them."""

import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset

from regard.errors import UsageError
from regard.training.launch import end_with_parent

if TYPE_CHECKING:
    from regard.training.step import Trainable

_LOST = "DataLoader worker"  # how PyTorch's error begins where one has ended


class _Made(Dataset[Any]):
    """Batches by their numbers, or the mistake that was found in making one."""

    def __init__(self, task: "Trainable"):
        self.task = task

    def __getitem__(self, number: int) -> tuple[int, Any]:
        try:
            return number, self.task.batch(number)
        except UsageError as mistake:
            return number, mistake


class _Ahead:
    """A task whose batches are made elsewhere; all else it does itself."""

    def __init__(self, task: "Trainable", made: Iterator[tuple[int, Any]]):
        self._task, self._made = task, made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    def batch(self, n: int) -> Any:
        """Batch n, which is the next one."""
        number, batch = next(self._made)
        if isinstance(batch, UsageError):
            raise batch
        assert number == n, f"batch {number} was made where {n} was asked for"
        return batch


def _begin(worker: int) -> None:
    """Leave signals to the training, and end with it however it ends."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    end_with_parent()


def _as_it_is(made: Any) -> Any:
    return made


@contextmanager
def ahead(task: "Trainable", workers: int, numbers: Iterable[int]) -> Iterator["Trainable"]:
    """Have so many processes make the batches of a task that are asked for in this order.

    They are forked, since a task holds functions that cannot be sent, and compute by one thread
    each: those of the parent are not theirs.
    """
    if not workers:
        yield task
        return
    loader = DataLoader(
        _Made(task),
        batch_size=None,
        sampler=numbers,
        num_workers=workers,
        collate_fn=_as_it_is,
        worker_init_fn=_begin,
        multiprocessing_context="fork",
        generator=torch.Generator(),  # nothing is drawn from that of the training
    )
    with warnings.catch_warnings():  # of threads and forks: see above
        warnings.simplefilter("ignore", DeprecationWarning)
        made: Any = iter(loader)
    try:
        yield _Ahead(task, made)  # type: ignore[misc]
    except RuntimeError as error:
        if not str(error).startswith(_LOST):
            raise
        raise UsageError(
            f"a process that makes batches has ended ({str(error).splitlines()[0]:.120}); if there "
            "was too little memory, go on by the same command with workers=0"
        ) from None
    finally:
        made._shutdown_workers()  # at once: whoever keeps an error keeps the loader
