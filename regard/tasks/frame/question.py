"""An input and the model's answer to it, as what measures the causes of the answer needs them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.layers.layout import TokenGrid
from regard.modalities.tokens import Keys

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
    keys: Keys
    expected: Any = None  # the answer as `Task.question` takes it
    reads: Sequence[int] | None = None  # tokens that the answer is read from, all unless given
    grid: TokenGrid | None = None  # on which the tokens stand, of an image or a sound
    first: int = 0
    score: Callable[[Tensor], Tensor] | None = None  # of logprobs, if not the sum over the steps
    unit: str = "loss"  # what is more where `score` is less
    caveat: str = ""  # why cuts cannot change the answer, if they cannot
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


def source_keys(count: int, target: int) -> Keys:
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
