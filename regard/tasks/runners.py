"""What `load` returns: a trained model as its user has it."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar, overload

import numpy as np
from PIL.Image import Image
from torch import Tensor

from regard.data.split import Split
from regard.results import Named

A = TypeVar("A")
One = str | Path | Image | np.ndarray | Tensor  # one text or image, and no list of such


class Answer(Named):
    """One answer; str() is what `regard run` prints, and fields are read by name."""


class Runner(Generic[A]):
    """A trained model that answers inputs, is judged on data, and shows where it looks."""

    task: str
    reads = "src"  # the name of an input in JSON
    name = ""  # as it was loaded by
    family = ""  # of its model, as MODELS names it
    model: Any  # the network, a torch.nn.Module
    device: Any
    config: dict[str, Any]
    trained: Split | None = None  # what it was trained on, and what was held out
    settings: type  # the class of the keys that `run` takes

    @overload
    def run(self, inputs: One | list[dict[str, Any]], *, first: int = 0, **settings: Any) -> A: ...

    @overload
    def run(self, inputs: Iterable[Any], *, first: int = 0, **settings: Any) -> list[A]: ...

    def run(self, inputs: Any, *, first: int = 0, **settings: Any) -> Any:
        """Answer one input by one answer, or a list of inputs by a list of answers.

        Settings are those that `regard run MODEL --help` lists, such as beam=5 or n_best=3.
        `first` is the number of the first input where a long list comes in parts.
        """
        if self.is_one(inputs):
            return self.answer([inputs], first=first, **settings)[0]
        return self.answer(list(inputs), first=first, **settings)

    def is_one(self, inputs: Any) -> bool:
        """Tell whether this is one input, rather than several."""
        one = One if self.reads == "image" else str
        return isinstance(inputs, one) or not isinstance(inputs, Iterable)

    def answer(self, inputs: list[Any], *, first: int = 0, **settings: Any) -> list[A]:
        """Answer a list of inputs, in their order."""
        raise NotImplementedError

    def __repr__(self) -> str:
        from regard.tasks.run import parameters

        config = getattr(self, "config", {})
        told: dict[str, Any] = {"task": self.task, "family": self.family}
        told["parameters"] = f"{parameters(self.model):,}"
        if config.get("from") and config.get("to"):
            told["languages"] = f"{config['from']} to {config['to']}"
        if labels := getattr(self, "labels", None):
            told["labels"] = len(labels)
        told["device"] = self.device
        words = ", ".join(f"{key}={value}" for key, value in told.items() if value != "")
        return f"{type(self).__name__}({self.name!r}, {words})"
