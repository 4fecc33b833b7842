"""The protocol of a model that can be decoded from: start and step."""

from collections.abc import Iterator
from typing import Any, Protocol, TypeVar

from torch import Tensor


class WriterState(Protocol):
    """The state of decoding: sentences, each with its hypotheses.

    Hypothesis j of sentence i is row i * hypotheses + j.
    """

    @property
    def sentences(self) -> int:
        """Number of sentences that are not finished."""
        ...

    @property
    def hypotheses(self) -> int:
        """Number of hypotheses of each sentence."""
        ...

    def select(self, parents: Tensor) -> "WriterState":
        """Let hypothesis j of sentence i continue parents[i, j] of that sentence, in place."""
        ...

    def keep(self, sentences: Tensor) -> "WriterState":
        """Go on with these sentences only, in place."""
        ...

    def join(self, other: Any) -> "WriterState":
        """Go on with the sentences of another such state too, after those here, in place.

        Both have as many hypotheses of each sentence; their texts may have different lengths.
        """
        ...


WriterStateT = TypeVar("WriterStateT", bound=WriterState)


class Writer(Protocol[WriterStateT]):
    """A model that reads a source and then returns, token by token, the logits of the next."""

    def start(
        self, source: Tensor, lengths: Tensor | None = None, *, capacity: int
    ) -> WriterStateT:
        """Read the sources (b, s) and allocate for texts of `capacity` tokens, one for each."""
        ...

    def step(self, ids: Tensor, state: WriterStateT) -> tuple[Tensor, WriterStateT]:
        """Read the next tokens (b, l) of all hypotheses and return the logits after each.

        The caller may overwrite the logits.
        """
        ...


class EncoderDecoder(Writer[Any], Protocol):
    """A writer that also reads whole targets at once, as in training."""

    config: Any  # with source_vocab, target_vocab and max_length
    head: Any  # the output projection, with weight and bias

    def hidden(
        self, source: Tensor, target: Tensor, lengths: Tensor | None = None, **more: Any
    ) -> Tensor:
        """Vectors before the head, one for each token of the target."""
        ...

    def __call__(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits after each token of the target."""
        ...

    def named_modules(self) -> Iterator[tuple[str, Any]]:
        """Its modules by name; those of cross-attention end in .cross."""
        ...
