"""What a beam search considered: the tree of hypotheses, and what became of each."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

from torch import Tensor

from regard.errors import UsageError

MAX_BRANCHES = 20_000  # of a tree: 2 * beam for each token

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


@dataclass
class BeamTrace:
    """The continuations of a beam search for one sentence, in the order they were considered."""

    branches: list[Branch] = field(default_factory=list)
    end: str = ""  # why the search ended
    _open: list[int] = field(default_factory=lambda: [-1])  # the branch of each hypothesis

    def add(
        self,
        scores: Tensor,
        parents: Tensor,
        tokens: Tensor,
        finishing: Tensor,
        going: Tensor,
        divisor: float,
        beam: int,
    ) -> None:
        """Take in the continuations of a step, each (n,): the best first, and those that go on."""
        on = going.tolist()
        opened: dict[int, int] = {}
        rows = zip(
            scores.tolist(), parents.tolist(), tokens.tolist(), finishing.tolist(), strict=True
        )
        for rank, (score, parent, token, finished) in enumerate(rows):
            if score == float("-inf") or len(self.branches) >= MAX_BRANCHES:
                continue
            fate = "beam"
            if finished:
                fate = "finished" if rank < beam else "late end"
            if rank in on:
                opened[rank] = len(self.branches)
                fate = "open" if fate != "finished" else fate
            branch = Branch(self._open[parent], token, score, score / divisor, rank, fate)
            self.branches.append(branch)
        # a beam wider than the continuations has places that nothing is in
        self._open = [opened.get(rank, -1) for rank in on]

    def stop(self, why: str) -> None:
        """Note why the search ended, and what was open then."""
        self.end = why
        for number in self._open:
            if number >= 0 and self.branches[number].fate == "open":
                self.branches[number].fate = "stopped"

    def ids(self, number: int) -> list[int]:
        """Return the tokens from the beginning up to a branch."""
        ids: list[int] = []
        while number >= 0:
            ids.append(self.branches[number].token)
            number = self.branches[number].parent
        return ids[::-1]

    def finished(self) -> Sequence[int]:
        """Return the branches that ended a text."""
        return [n for n, branch in enumerate(self.branches) if branch.fate == "finished"]


_active: ContextVar[BeamTrace | None] = ContextVar("trace", default=None)


@contextmanager
def tracing() -> Iterator[BeamTrace]:
    """Trace what the beam searches inside consider; of several, the last one stays."""
    trace = BeamTrace()
    token = _active.set(trace)
    try:
        yield trace
    finally:
        _active.reset(token)


@contextmanager
def untraced() -> Iterator[None]:
    """Leave the searches inside out of what is traced."""
    token = _active.set(None)
    try:
        yield
    finally:
        _active.reset(token)


def active_trace(sentences: int = 1) -> BeamTrace | None:
    """Return the trace that a search of so many sentences fills, begun anew; None if none does."""
    trace = _active.get()
    if trace is not None:
        if sentences != 1:
            raise UsageError(f"a trace is of one sentence, not {sentences}")
        trace.branches, trace.end, trace._open = [], "", [-1]
    return trace


def is_tracing() -> bool:
    """True inside of `tracing`."""
    return _active.get() is not None
