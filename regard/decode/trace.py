"""What a beam search considered: the tree of hypotheses, and what became of each."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import Tensor

from regard.errors import UsageError

_MAX_BRANCHES = 20_000  # of a tree: 2 * beam for each token

# what became of a continuation -> why, as it is told
FATES = {
    "open": "went on",
    "finished": "ended here",
    "beam": "outside of the beam: others were likelier",
    "late end": "an end that was not among the best of its step",
    "stopped": "still open when the search ended",
}


@dataclass
class Branch:
    """A continuation by one token: its parent (-1: the beginning), log-probability and fate."""

    parent: int
    token: int
    logprob: float  # of all tokens up to it
    score: float  # the same, divided as the length penalty says
    rank: int  # among the continuations of its step, the best is 0
    fate: str = "open"
    when: str = ""  # where that was decided, if its number of tokens does not tell


class Continuations(NamedTuple):
    """Ways to go on, each (sentences, n), the best first."""

    scores: Tensor  # log-probability of the whole text
    parents: Tensor  # hypothesis that is continued
    tokens: Tensor

    def pick(self, places: Tensor) -> "Continuations":
        """Continuations at some places (sentences, m)."""
        return Continuations(*(x.gather(1, places) for x in self))


class Observer:
    """What is told of each step of a beam search; this one takes no notice."""

    def observe(
        self,
        considered: Continuations,
        finishing: Tensor,
        going: Tensor,
        divisor: float,
        ends: Mapping[str, Tensor],
    ) -> None:
        """Take notice of a step.

        Args:
            considered: the best continuations.
            finishing: (sentences, n), True for those that end a text.
            going: (sentences, beam), places of those that go on.
            divisor: of log-probabilities, by the length penalty.
            ends: why the search of a sentence ends -> (sentences), True where it does.
        """


@dataclass
class BeamTrace(Observer):
    """The continuations of a beam search for one sentence, in the order they were considered."""

    branches: list[Branch] = field(default_factory=list)
    end: str = ""  # why the search ended
    _open: list[int] = field(default_factory=lambda: [-1])  # the branch of each hypothesis

    def observe(
        self,
        considered: Continuations,
        finishing: Tensor,
        going: Tensor,
        divisor: float,
        ends: Mapping[str, Tensor],
    ) -> None:
        """Take in the continuations of a step, the fate of each, and why the search ends.

        Args:
            considered: scores, parents and tokens of the continuations
            finishing: True for each continuation that ends its text
            going: numbers of the continuations that go on
            divisor: length penalty at this step
            ends: reasons to end the search, True where one holds
        """
        on = going[0].tolist()
        opened: dict[int, int] = {}
        columns = [x[0].tolist() for x in (*considered, finishing)]
        for rank, (score, parent, token, finished) in enumerate(zip(*columns, strict=True)):
            if score == float("-inf") or len(self.branches) >= _MAX_BRANCHES:
                continue
            fate = "beam"
            if finished:
                fate = "finished" if rank < len(on) else "late end"
            if rank in on:
                opened[rank] = len(self.branches)
                fate = "open" if fate != "finished" else fate
            branch = Branch(self._open[parent], token, score, score / divisor, rank, fate)
            self.branches.append(branch)
        # a beam wider than the continuations has places that nothing is in
        self._open = [opened.get(rank, -1) for rank in on]
        self.end = next((why for why, ended in ends.items() if bool(ended)), "")
        if self.end:
            for number in self._open:
                if number >= 0 and self.branches[number].fate == "open":
                    self.branches[number].fate = "stopped"

    def ids(self, number: int) -> list[int]:
        """Tokens from the beginning up to a branch."""
        ids: list[int] = []
        while number >= 0:
            ids.append(self.branches[number].token)
            number = self.branches[number].parent
        return ids[::-1]

    def finished(self) -> Sequence[int]:
        """Branches that ended a text."""
        return [n for n, branch in enumerate(self.branches) if branch.fate == "finished"]


_active: ContextVar[BeamTrace | None] = ContextVar("trace", default=None)
Trace = TypeVar("Trace", BeamTrace, None)


@contextmanager
def _observed_by(trace: Trace) -> Iterator[Trace]:
    token = _active.set(trace)
    try:
        yield trace
    finally:
        _active.reset(token)


def tracing() -> AbstractContextManager[BeamTrace]:
    """Trace what the beam searches inside consider; of several, the last one stays."""
    return _observed_by(BeamTrace())


def untraced() -> AbstractContextManager[None]:
    """Leave the searches inside out of what is traced."""
    return _observed_by(None)


def active_observer(sentences: int) -> Observer:
    """Observer of a search of so many sentences."""
    return begin_trace(sentences) if is_tracing() else Observer()


def begin_trace(sentences: int = 1) -> BeamTrace:
    """The active trace, begun anew for a search of so many sentences."""
    trace = _active.get()
    assert trace is not None
    if sentences != 1:
        raise UsageError(f"a trace is of one sentence, not {sentences}")
    trace.branches, trace.end, trace._open = [], "", [-1]
    return trace


def is_tracing() -> bool:
    """True inside of `tracing`."""
    return _active.get() is not None
