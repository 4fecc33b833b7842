"""The hypotheses of a beam search as a picture shows them, whatever task has searched."""

from typing import Any

from regard.data.tokenizer import Tokenizer
from regard.decode.trace import FATES, BeamTrace
from regard.errors import UsageError
from regard.viewer.picture import Node, Tree


def beam_tree(trace: BeamTrace, task: Any) -> Tree:
    """Return what a beam search considered, and which of it leads to the text of highest score."""
    tokenizer: Tokenizer | None = getattr(task, "tokenizer", None)
    if not trace.branches or tokenizer is None:
        raise UsageError(
            "beams=true: only a beam search has hypotheses to show; take a model that writes "
            "texts, and choose beam=2 or more"
        )
    place = max(trace.finished(), key=lambda n: trace.branches[n].score, default=-1)
    best: set[int] = set()
    while place >= 0:
        best.add(place)
        place = trace.branches[place].parent
    nodes = [
        Node(
            branch.parent,
            tokenizer.pieces([branch.token])[0],
            branch.logprob,
            branch.score,
            branch.fate,
            number in best,
            branch.when,
        )
        for number, branch in enumerate(trace.branches)
    ]
    return Tree(nodes, FATES, trace.end)
