"""The protocol of a model that can be decoded from: start and step."""

from typing import Protocol, TypeVar

from torch import Tensor


class State(Protocol):
    """The state of decoding: sentences, each with its hypotheses.

    Hypothesis j of sentence i is row i * hypotheses + j.
    """

    @property
    def sentences(self) -> int:
        """Return how many sentences are not finished."""
        ...

    @property
    def hypotheses(self) -> int:
        """Return how many hypotheses each sentence has."""
        ...

    def select(self, parents: Tensor) -> "State":
        """Let hypothesis j of sentence i continue parents[i, j] of that sentence, in place."""
        ...

    def keep(self, sentences: Tensor) -> "State":
        """Go on with these sentences only, in place."""
        ...


S = TypeVar("S", bound=State)


class Writer(Protocol[S]):
    """A model that reads a source and then returns, token by token, the logits of the next."""

    def start(self, source: Tensor, lengths: Tensor | None = None, *, capacity: int) -> S:
        """Read the sources (b, s) and allocate for texts of `capacity` tokens, one for each."""
        ...

    def step(self, ids: Tensor, state: S) -> tuple[Tensor, S]:
        """Read the next tokens (b, l) of all hypotheses and return the logits after each.

        The caller may overwrite the logits.
        """
        ...
