"""An input and the model's answer to it, as what measures the causes of the answer needs them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.errors import UsageError
from regard.layers.layout import Layout, TokenGrid

# a class by its number: a tokenizer's `pieces`, or the list of all names
Names = Callable[[Sequence[int]], Sequence[str]] | Sequence[str]


@dataclass(frozen=True, eq=False)
class Question:
    """One input, the model's answer, and the log-probability of that answer, copy by copy.

    `logprobs(n)` reads n copies of the input in one batch and returns (n, steps, classes): the
    log-probabilities at each step of the answer. `chosen` are the classes (steps,) that the answer
    consists of, from step `first` on; steps before it were given.
    """

    answer: str
    logprobs: Callable[[int], Tensor]
    chosen: Sequence[int]
    names: Names  # of the classes
    places: Sequence[str]  # what each step is read from, or is called
    tokens: Sequence[str]  # of the input, which can be cut
    # the token (tiles, k) that each key of an attention is, by its name and number of keys; None
    # where its keys are none of these tokens, -1 for a single such key
    keys: Callable[[str, int], Tensor | None]
    expected: Any = None  # the answer as `Task.question` takes it
    reads: Sequence[int] | None = None  # tokens that the answer is read from, all unless given
    grid: TokenGrid | None = None  # on which the tokens stand, of an image or a sound
    first: int = 0
    score: Callable[[Tensor], Tensor] | None = None  # of logprobs, if not the sum over the steps
    unit: str = "loss"  # what is more where `score` is less
    size: int = 1  # tokens that the model reads of one copy, if more than those of the input

    def answers(self, copies: int) -> Tensor:
        """Return the log-probability of the answer by each copy, (copies,) in float64."""
        return self.answers_of(self.logprobs(copies))

    def answers_of(self, logprobs: Tensor) -> Tensor:
        """Return the log-probability of the answer (n,) by those of all classes at each step."""
        logprobs = logprobs.double()
        if self.score is not None:
            return self.score(logprobs)
        chosen = torch.as_tensor(self.chosen, device=logprobs.device)
        steps = logprobs.gather(2, chosen.view(1, -1, 1).expand(len(logprobs), -1, 1)).squeeze(2)
        return steps[:, self.first :].sum(1)

    @cached_property
    def numbers(self) -> int:
        """Return how many log-probabilities there are of one copy."""
        return self.logprobs(1).numel()

    def spell(self, number: int) -> str:
        """Return the name of a class."""
        return self.names([number])[0] if callable(self.names) else self.names[number]


def text_keys(count: int) -> Callable[[str, int], Tensor | None]:
    """Return which token each key is where a model reads one text of so many tokens."""
    return lambda name, keys: torch.arange(count)[None] if keys == count else None


def source_keys(count: int, target: int) -> Callable[[str, int], Tensor | None]:
    """Return which source token each key is: in an encoder, in cross-attention, or in one stack.

    A stack of a decoder alone reads the tokens of the target after those of the source.
    """

    def of(name: str, keys: int) -> Tensor | None:
        if keys == count and (name.startswith("encoder") or name.endswith("cross")):
            return torch.arange(count)[None]
        if keys == count + target and not name.startswith(("encoder", "decoder")):
            both = torch.arange(keys)
            return torch.where(both < count, both, -1)[None]
        return None

    return of


def window_keys(columns: int, step: int) -> Callable[[str, int], Tensor | None]:
    """Return which cell of so many columns each key is, where an input is the start of a window.

    What comes after the input is none of them.
    """

    def of(name: str, keys: int) -> Tensor | None:
        if keys < columns or not (name.startswith("encoder") or name.endswith("cross")):
            return None
        places = torch.arange(keys)
        return torch.where(places < columns, places // step, -1)[None]

    return of


def grid_keys(
    layouts: Mapping[str, Layout],
) -> tuple[TokenGrid, Callable[[str, int], Tensor | None]]:
    """Return the coarsest grid of some layers, and in which of its cells each key stands.

    Where a layer's grid is finer, all keys in a cell are one token of the input.
    """
    grids = [each.key_grid for each in layouts.values() if each.key_grid.height]
    if not grids:
        raise UsageError("this model attends to no places of its input, so none can be cut")
    coarse = min(grids, key=lambda grid: grid.height * grid.width)
    found = {
        name: cells_of(each.key_grid, coarse)[each.key_tokens] for name, each in layouts.items()
    }
    for name, each in layouts.items():
        found[name][each.key_tokens < 0] = -1  # padding
    return coarse, lambda name, keys: found.get(name)


def cells_of(grid: TokenGrid, coarse: TokenGrid) -> Tensor:
    """Return which cell of a coarse grid each token of a grid stands in; -1 for names."""

    def line(count: int, step: float, others: int, other: float) -> Tensor:
        return ((torch.arange(count) + 0.5) * step / other).long().clamp(max=others - 1)

    rows = line(grid.height, grid.cell_height, coarse.height, coarse.cell_height)
    columns = line(grid.width, grid.cell_width, coarse.width, coarse.cell_width)
    cells = (rows[:, None] * coarse.width + columns).flatten()
    return torch.cat([torch.full((len(grid.names),), -1), cells])
