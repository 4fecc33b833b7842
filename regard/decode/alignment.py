"""Word alignment by cross-attention: the head that aligns, and the words that it links."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from regard.data.tokenizer import Tokenizer, words_of_pieces
from regard.errors import UsageError

Ids = Sequence[int]
# a pass over a source and its target: attention maps by the name of their layer, and logits
Forward = Callable[[Ids, Ids], tuple[Any, Tensor]]


@dataclass
class Alignment:
    """The words of both sides, and for each target word the source word it attended to most."""

    source: list[str]
    target: list[str]
    links: list[tuple[int, int]]

    def __str__(self) -> str:
        return " ".join(f"{s}-{t}" for s, t in self.links)

    def record(self) -> dict[str, Any]:
        """Fields of a JSON line."""
        return {"source": self.source, "target": self.target, "links": self.links}


class Aligner:
    """Reads alignments off one head of cross-attention.

    `heads` counts the heads of each layer of cross-attention, and `named` is the head that the
    model's folder names, such as decoder.1.cross:0; otherwise it is chosen by the first texts.
    """

    def __init__(self, heads: Mapping[str, int], forward: Forward, named: str | None = None):
        self.heads, self.forward = heads, forward
        known = {f"{name}:{n}": (name, n) for name in heads for n in range(heads[name])}
        self.head: tuple[str, int] | None = None
        if named is not None:
            if not isinstance(named, str) or named not in known:
                raise UsageError(f"alignment_head={named!r:.60} is not a cross-attention head")
            self.head = known[named]

    def settle(self, pairs: Sequence[tuple[Ids, Ids]]) -> None:
        """Choose the head, unless that is known."""
        if not self.heads:
            raise UsageError(
                "this model writes from one fixed context and never looks at the source again; "
                "take one with attention, such as like=rnnsearch"
            )
        some = [pair for pair in pairs if pair[0] and pair[1]][:50]
        if self.head is None and some:
            self.head = self.choose(some)

    def choose(self, pairs: Sequence[tuple[Ids, Ids]]) -> tuple[str, int]:
        """Head with the highest mutual information of target and source positions.

        Each target word then attends to few source words, and different ones to different ones.
        """
        information: dict[tuple[str, int], float] = {}
        for source, target in pairs:
            maps, _ = self.forward(source, target)
            for name in self.heads:
                weights = maps[name].weights()[0, :, :-1].double().clamp_min(1e-12)
                if weights.shape[1] == 0:
                    continue
                mean = weights.mean(1)
                entropy = -(mean * mean.log()).sum(-1)
                conditional = -(weights * weights.log()).sum(-1).mean(-1)
                for head, value in enumerate((entropy - conditional).tolist()):
                    information[name, head] = information.get((name, head), 0.0) + value
        if not information:
            raise UsageError("nothing to align: every text is empty")
        return max(information, key=lambda key: information[key])

    def weights(self, source: Ids, target: Ids, shift: int = 0) -> np.ndarray:
        """Attention of each target piece to each source piece, by the aligning head.

        With a shift of 1 a piece has the attention of the step that reads it, after it was written.
        """
        self.settle([(source, target)])
        assert self.head is not None  # neither side is empty
        name, head = self.head
        maps, _ = self.forward(source, target)
        rows = slice(shift, shift + len(target))
        return maps[name].weights(heads=head)[0, 0, rows, :-1].cpu().numpy()

    def align(
        self,
        pairs: Sequence[tuple[Ids, Ids]],
        source: Tokenizer,
        target: Tokenizer,
        shift: int = 0,
        pieces: bool = False,
    ) -> Alignment:
        """Align the sentences of one text, whose words (or pieces) are counted through.

        Args:
            pairs: ids of source and target, a pair for each sentence
            source: tokenizer of the sources
            target: tokenizer of the targets
            shift: 1 to take the attention of the step that reads a piece
            pieces: align pieces instead of words
        """

        def split(names: Sequence[str]) -> tuple[list[str], list[int]]:
            return (list(names), [*range(len(names))]) if pieces else words_of_pieces(names)

        whole = Alignment([], [], [])
        for ids, written in pairs:
            a, of_a = split(source.pieces(ids[:-1]))
            b, of_b = split(target.pieces(written))
            if a and b:
                mass = np.zeros((len(b), len(a)))
                places = np.array(of_b)[:, None], np.array(of_a)[None, :]
                np.add.at(mass, places, self.weights(ids, written, shift))
                first, second = len(whole.source), len(whole.target)
                best = enumerate(mass.argmax(1).tolist())
                whole.links += [(s + first, t + second) for t, s in best]
            whole.source += a
            whole.target += b
        whole.links.sort()
        return whole
