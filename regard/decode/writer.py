"""The protocol of a model that can be decoded from: start and step."""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol, TypeVar

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

    def join(self, other: Any) -> "State":
        """Go on with the sentences of another such state too, after those here, in place.

        Both have as many hypotheses of each sentence; their texts may have different lengths.
        """
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


class Engine(Protocol):
    """What searches for the texts of many sources by itself, with the weights of a writer."""

    def translate(
        self, sources: Sequence[Sequence[int]], limits: Sequence[int], **search: Any
    ) -> Sequence[Sequence[tuple[list[int], list[float], float]]] | None:
        """Tokens, log-probability after each, and score of the texts of each source.

        None where it cannot; then the search in Python does.
        """
        ...


class EncoderDecoder(Writer[Any], Protocol):
    """A writer that also reads whole targets at once, as in training."""

    config: Any  # with source_vocab, target_vocab and max_length
    head: Any  # the output projection, with weight and bias

    def hidden(
        self, source: Tensor, target: Tensor, lengths: Tensor | None = None, **more: Any
    ) -> Tensor:
        """Return the vectors before the head, one for each token of the target."""
        ...

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits after each token of the target."""
        ...

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Return its modules by name; those of cross-attention end in .cross."""
        ...
